"""The tensors that a push with adapters must contain. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from trueroll.errors import PushError

from ...kernels.spellings import Parts
from .manifest import Adapters, Parameters, Shape, describe_unknown, factor_names, list_names

MOST_OF_WEIGHTS = 4
"""Limit on the number of elements of all adapter matrices A and B together, as a multiple of the number of elements of
all weights.

The limit bounds the memory that the LoRA ranks in a message can claim. There is no limit per weight, because A may have
more elements than its weight, for example if the weight is a gate with one row.
"""


@dataclass(frozen=True)
class Adapted:
    """The `Parameters` of a push with adapters.

    An adapters-only push contains only the parameters that `Adapters.base` does not list. A push that is not
    adapters-only contains all parameters. Each push with adapters also contains A and B for each adapted weight. A
    saved adapter contains only A and B.
    """

    dtype: str
    dtypes: Mapping[str, str]
    shapes: Mapping[str, Shape]
    parts: Parts
    tied: Mapping[str, str]
    ignored: Collection[str]
    optional: Collection[str]


def with_adapters(wanted: Parameters, adapters: Adapters) -> Adapted:
    """Return the tensors that a push with `adapters` must contain. `wanted`: the tensors that the worker expects in a
    push without adapters.

    Raise PushError if a weight is unknown or is not a matrix, or if A and B together have too many elements. Also raise
    PushError if an adapters-only push does not list an adapted weight in `adapters.base`.
    """
    base, adapted = dict(adapters.base or ()), {name for name, *_ in adapters.weights}
    if unknown := next((name for name in (*base, *adapted) if name not in wanted.shapes), None):
        raise PushError(describe_unknown(unknown, wanted))
    shapes = {name: shape for name, shape in wanted.shapes.items() if name not in base}
    if adapters.is_alone and (both := sorted(shapes.keys() & adapted)):
        raise PushError(
            f"adapters: {list_names(both)} have adapters, but adapters.base does not list these weights; push every "
            "tensor whole"
        )
    factors = factors_alone(wanted, adapters)
    parts = {} if adapters.is_alone else wanted.parts
    return replace(factors, shapes=shapes | dict(factors.shapes), parts=parts, optional=wanted.optional)


def factors_alone(wanted: Parameters, adapters: Adapters) -> Adapted:
    """Return only A and B of each adapted weight. `wanted` and the errors are the same as for `with_adapters`."""
    shapes: dict[str, Shape] = {}
    dtypes = dict(wanted.dtypes)
    for name, rank, _ in adapters.weights:
        if name not in wanted.shapes:
            raise PushError(describe_unknown(name, wanted))
        shape = wanted.shapes[name]
        if len(shape) != 2 or not name.endswith("weight"):
            raise PushError(
                f"tensor {name}: only a matrix can have an adapter (shape {list(shape)}); leave out its adapter"
            )
        a, b = factor_names(name)
        shapes |= {a: (rank, shape[1]), b: (shape[0], rank)}
        dtypes |= dict.fromkeys((a, b), dtypes[name]) if name in dtypes else {}
    found = sum(map(math.prod, shapes.values()))
    most = MOST_OF_WEIGHTS * sum(map(math.prod, wanted.shapes.values()))
    if found > most:
        raise PushError(
            f"adapters: all matrices A and B together have {found} elements (limit {most}, {MOST_OF_WEIGHTS} times the "
            "elements of all weights); push the merged weights"
        )
    return Adapted(wanted.dtype, dtypes, shapes, {}, wanted.tied, wanted.ignored, ())


def check_named(name: str, wanted: Adapted, adapters: Adapters) -> None:
    """Raise PushError unless a push of the named adapter consists of A and B alone.

    `wanted`: the tensors that the push must contain, as `with_adapters` returns them.
    """
    factors = {factor for weight, *_ in adapters.weights for factor in factor_names(weight)}
    if not adapters.is_alone or (whole := sorted(wanted.shapes.keys() - factors)):
        found = list_names(whole) if adapters.is_alone else "every tensor"
        raise PushError(
            f"adapter {name!r}: a named adapter has matrices A and B only, but the push has {found} whole; train no "
            "modules_to_save, and push with adapters=True, or push without a name"
        )
