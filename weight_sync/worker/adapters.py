"""The worker's side of adapters: check that adapters fit the weights, merge adapters, and compute checksums of weights.

Owns nothing. Each weight of a push is processed in its own `guarded` context. The context raises `Closed` if the push
is closed.
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
    """Make `staging` expect adapters. Raise OtherBaseError if `adapters.base` differs from `weights` in any bit, and
    PushError if the staging has no place for the adapters.
    """
    if adapters.base is not None:
        _check_base(dict(adapters.base), weights, guarded)
    factors = {name: (*factor_names(name), rank, scale) for name, rank, scale in adapters.weights}
    with guarded():
        try:
            staging.adapt(factors, adapters.is_alone)
        except ValueError as error:
            raise PushError(str(error)) from None


def merge_adapters(staging: StagingArea, reject_nonfinite: bool, guarded: Guard) -> None:
    """Merge every weight with its adapter. Raise PushError if a result is not finite and `reject_nonfinite` is set."""
    for name in staging.to_merge():
        with guarded():
            if not staging.merge(name) and reject_nonfinite:
                raise PushError(
                    f"tensor {name}: the sum with its adapter has infinities or NaN (set reject_nonfinite=False to "
                    "accept them); nothing of this push is served"
                )


def served_checksums(weights: Destination) -> dict[str, int]:
    """Return the checksum of every served parameter."""
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
            f"adapters: the adapters were trained on other weights than this worker's ({list_names(others)} differ); "
            "push the model without adapters=True once, which also sends the weights"
        )
