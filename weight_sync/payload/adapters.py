"""What a push with adapters must bring. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from trueroll.errors import PushError

from ...kernels.spellings import Parts
from .manifest import Adapters, Parameters, Shape, describe_unknown, factor_names, list_names

MOST_OF_WEIGHTS = 4
"""How many times the elements of all weights A and B may have together, so that no number in a message takes memory
without end. Those of one weight may have any number: a gate of a single row has fewer elements than its A."""


@dataclass(frozen=True)
class Adapted:
    """`Parameters` of a push with adapters: all of the worker's or, of adapters alone, those that have no base; and of
    each weight with an adapter A and B.
    """

    dtype: str
    dtypes: Mapping[str, str]
    shapes: Mapping[str, Shape]
    parts: Parts
    tied: Mapping[str, str]
    ignored: Collection[str]


def with_adapters(wanted: Parameters, adapters: Adapters) -> Adapted:
    """What a push must bring to a worker that wants these parameters without adapters. Raise PushError if it has no
    such weights.
    """
    base, adapted = dict(adapters.base or ()), {name for name, *_ in adapters.weights}
    if unknown := next((name for name in (*base, *adapted) if name not in wanted.shapes), None):
        raise PushError(describe_unknown(unknown, wanted))
    shapes = {name: shape for name, shape in wanted.shapes.items() if name not in base}
    dtypes = dict(wanted.dtypes)
    if adapters.is_alone and (both := sorted(shapes.keys() & adapted)):
        raise PushError(f"adapters: expected a base for each, but none has {list_names(both)}; push every tensor whole")
    for name, rank, _ in adapters.weights:
        shape = wanted.shapes[name]
        if len(shape) != 2 or not name.endswith("weight"):
            raise PushError(f"tensor {name}: expected a matrix for an adapter, found shape {list(shape)}; leave it out")
        a, b = factor_names(name)
        shapes |= {a: (rank, shape[1]), b: (shape[0], rank)}
        dtypes |= dict.fromkeys((a, b), dtypes[name]) if name in dtypes else {}
    found = sum(rank * sum(wanted.shapes[name]) for name, rank, _ in adapters.weights)
    most = MOST_OF_WEIGHTS * sum(map(math.prod, wanted.shapes.values()))
    if found > most:
        raise PushError(
            f"adapters: expected A and B with at most {MOST_OF_WEIGHTS} times the elements of all weights, {most}, "
            f"found {found}; push the merged weights"
        )
    parts = {} if adapters.is_alone else wanted.parts
    return Adapted(wanted.dtype, dtypes, shapes, parts, wanted.tied, wanted.ignored)
