"""The worker's side of adapters: that they belong to its weights, and their merge into these; and checksums of weights.

Owns nothing. What is done for a push goes over weights one by one, each under `guarded`, which says whether to go on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from trueroll.errors import OtherBaseError, PushError

from ..payload.manifest import Adapters, factor_names, list_names
from ..payload.tensors import dtypes_of, tensor_checksum
from .assembly import Destination, StagingArea

Guard = Callable[[], AbstractContextManager[None]]


def begin_adapters(adapters: Adapters, weights: Destination, staging: StagingArea, guarded: Guard) -> None:
    """Raise OtherBaseError unless adapters that come alone are of this worker's weights, to the bit."""
    if adapters.base is not None:
        _check_base(dict(adapters.base), weights, guarded)
    factors = {name: (*factor_names(name), rank, scale) for name, rank, scale in adapters.weights}
    with guarded():
        staging.adapt(factors, adapters.is_alone)


def merge_adapters(staging: StagingArea, reject_nonfinite: bool, guarded: Guard) -> None:
    """Put all weights together with their adapters. Raise PushError if one becomes infinite."""
    for name in staging.to_merge():
        with guarded():
            if not staging.merge(name) and reject_nonfinite:
                raise PushError(
                    f"tensor {name}: expected finite values, or a push with reject_nonfinite=False, found infinite "
                    "ones or NaN where its adapter is added; nothing of this push is served"
                )


def served_checksums(weights: Destination) -> dict[str, int]:
    """Of every parameter that is served."""
    dtype_of = dtypes_of(weights)
    return {name: tensor_checksum(weights.served(name), dtype_of(name)) for name in weights.shapes}


def _check_base(base: dict[str, int], weights: Destination, guarded: Guard) -> None:
    known, others, dtype_of = weights.base.checksums, [], dtypes_of(weights)
    for name, expected in base.items():
        if name not in known:
            with guarded():
                known[name] = tensor_checksum(weights.before_adapters(name), dtype_of(name))
        if known[name] != expected:
            others.append(name)
    if others:
        raise OtherBaseError(
            f"adapters: expected the weights that the trainer adds them to, found others in {list_names(others)}; push "
            "the model without adapters=True once, which brings the weights too"
        )
