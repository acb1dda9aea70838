"""What a push with adapters must bring. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from trueroll.errors import PushError

from ...kernels.spellings import Parts
from .manifest import Adapters, Shape, factor_names
from .parameters import Parameters, describe_unknown, list_names


@dataclass(frozen=True)
class Adapted:
    """`Parameters` of a push with adapters: all of the worker's or, of adapters alone, those that have no base; and of
    each weight with an adapter A and B.
    """

    dtype: str
    shapes: Mapping[str, Shape]
    parts: Parts
    tied: Mapping[str, str]
    ignored: Collection[str]


def with_adapters(wanted: Parameters, adapters: Adapters) -> Adapted:
    """What a push must bring to a worker that wants these parameters without adapters. Raise PushError if it has no
    such weights.
    """
    base = adapters.base or {}
    if unknown := next((name for name in (*base, *adapters.weights) if name not in wanted.shapes), None):
        raise PushError(describe_unknown(unknown, wanted))
    shapes = {name: shape for name, shape in wanted.shapes.items() if name not in base}
    if adapters.base is not None and (both := sorted(shapes.keys() & adapters.weights)):
        raise PushError(f"adapters: expected a base for each, but none has {list_names(both)}; push every tensor whole")
    for name, (rank, _) in adapters.weights.items():
        shape = wanted.shapes[name]
        if len(shape) != 2 or not name.endswith("weight"):
            raise PushError(f"tensor {name}: expected a matrix for an adapter, found shape {list(shape)}; leave it out")
        a, b = factor_names(name)
        shapes |= {a: (rank, shape[1]), b: (shape[0], rank)}
    parts = wanted.parts if adapters.base is None else {}
    tied = {name: other for name, other in wanted.tied.items() if other in shapes}
    return Adapted(wanted.dtype, shapes, parts, tied, wanted.ignored)
