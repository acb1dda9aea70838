"""The worker's side of adapters: check that adapters fit the weights, merge adapters, and compute checksums of weights.

Owns nothing. Each weight of a push is processed in its own `guarded` context. The context raises `Closed` if the push
is closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from trueroll.errors import OtherBaseError, PushError

from ..payload.manifest import Adapters, factor_names, list_names
from ..payload.tensors import dtypes_of, tensor_checksum
from .assembly import Destination, StagingArea

Guard = Callable[[], AbstractContextManager[None]]


def begin_adapters(adapters: Adapters, weights: Destination, staging: StagingArea, guarded: Guard) -> None:
    """Make `staging` expect adapters. Raise OtherBaseError if a checksum in `adapters.base` differs from the
    checksum of the worker's own base weight. Raise PushError if the staging has no place for the adapters.
    """
    factors = {name: (*factor_names(name), rank, scale) for name, rank, scale in adapters.weights}
    with guarded():
        try:
            staging.adapt(factors, adapters.is_alone)
        except ValueError as error:
            raise PushError(str(error)) from None
    if adapters.base is not None:
        _check_base(dict(adapters.base), weights, guarded)


class Merging:
    """Merges the weights of a push with their adapters, each weight as soon as all of its tensors have arrived.

    `adapters`: the adapters that the staging expects. `has_arrived`: returns whether a tensor has arrived completely.
    """

    def __init__(
        self,
        adapters: Adapters,
        staging: StagingArea,
        has_arrived: Callable[[str], bool],
        reject_nonfinite: bool,
        guarded: Guard,
    ) -> None:
        self._staging, self._has_arrived = staging, has_arrived
        self._reject_nonfinite, self._guarded = reject_nonfinite, guarded
        names = [name for name, *_ in adapters.weights]
        self._waiting = deque((name, *factor_names(name), *([] if adapters.is_alone else [name])) for name in names)
        self._merged: set[str] = set()
        self._error: PushError | None = None

    def merge_arrived(self) -> None:
        """Merge weights, in the order of the adapters, up to the first weight with a tensor that has not arrived. If a
        merge fails, the error is raised later, by `check`, because `merge_arrived` runs while no call waits for a
        reply, so no reply could report the error.
        """
        try:
            while self._waiting and all(map(self._has_arrived, self._waiting[0][1:])):
                self._merge(self._waiting.popleft()[0])
        except PushError as error:
            self._waiting.clear()
            self._error = error

    def check(self) -> None:
        """Raise the error with which `merge_arrived` ended."""
        if self._error is not None:
            raise self._error

    def merge_rest(self) -> None:
        """Merge all weights that `merge_arrived` has not merged. Raise PushError if a result is not finite and
        `reject_nonfinite` is set.
        """
        for name in self._staging.to_merge():
            if name not in self._merged:
                self._merge(name)

    def _merge(self, name: str) -> None:
        with self._guarded():
            try:
                is_finite = self._staging.merge(name)
            except ValueError as error:
                raise PushError(f"tensor {name}: the sum with its adapter: {error}") from None
            if not is_finite and self._reject_nonfinite:
                raise PushError(
                    f"tensor {name}: the sum with its adapter has infinities or NaN (set reject_nonfinite=False to "
                    "accept them); nothing of this push is served"
                )
        self._merged.add(name)


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
