"""The adapters of a PEFT model on their way: alone, or beside all tensors of the model.

Owns the checksums of the tensors that adapters are added to, which are computed anew only for those that changed as far
as torch's version counters tell. Keeps no tensor alive.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from trueroll.errors import PushError

from ..payload.manifest import Adapters, Parameters, describe_tie, describe_unknown, factor_names, own_dtypes
from ..payload.tensors import dtype_named, tensor_checksum
from .trainer_tensors import TrainerTensors, is_sharded, memory_of


class Checksums:
    """Of tensors in some dtype, remembered as long as a tensor lives and nothing is seen to have changed it."""

    def __init__(self) -> None:
        self._known: Any = WeakTensorKeyDictionary()

    def of(self, tensor: torch.Tensor, whole: torch.Tensor, dtype: str) -> int:
        """That of a tensor, which is `whole` where it is sharded."""
        state = *memory_of(tensor), tensor._version, dtype
        if is_sharded(tensor) or self._known.get(tensor, (None, 0))[0] != state:
            self._known[tensor] = state, tensor_checksum(whole, dtype_named(dtype))
        return self._known[tensor][1]


class AdaptedTensors(Protocol):
    """The tensors of a model by the names that workers know, without adapters; which of them are trained whole; and by
    the names of weights [N, K] their adapters: A [R, K], B [N, R], and what multiplies their product.
    """

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]: ...
    @property
    def replaced(self) -> Collection[str]: ...
    @property
    def adapters(self) -> Mapping[str, tuple[torch.Tensor, torch.Tensor, float]]: ...


class TrainerAdapters:
    """What a push of a PEFT model sends: with `alone` its adapters and `modules_to_save`, else all of it.

    `sent`: the tensors that travel, by the names that workers know. `tensors`: before them those that adapters come
    without, which every rank of the trainer gathers alike. Raise PushError for none that are sent `alone`.
    """

    def __init__(self, found: AdaptedTensors, alone: bool) -> None:
        if alone and not found.adapters:
            raise PushError("adapters: expected some that are enabled, found none; enable them, or push without them")
        self._scales = tuple((name, len(a), float(scale)) for name, (a, _, scale) in found.adapters.items())
        self.is_alone = alone
        self._base = {name: t for name, t in found.tensors.items() if alone and name not in found.replaced}
        self.sent: dict[str, torch.Tensor] = {name: t for name, t in found.tensors.items() if name not in self._base}
        for name, (a, b, _) in found.adapters.items():
            self.sent |= zip(factor_names(name), (a, b), strict=True)
        self.tensors = self._base | self.sent

    def describe(self, wanted: Parameters, tensors: TrainerTensors, checksums: Checksums) -> Adapters:
        """What is told to workers that want these parameters. Takes from `tensors` what is not sent.

        Raise PushError for names that they do not know, and for ties that the trainer does not have.
        """
        if not self.is_alone:
            return Adapters(weights=self._scales)
        found: dict[str, int] = {}
        own = own_dtypes(wanted)
        for name, tensor in self._base.items():
            if name not in wanted.shapes and name not in wanted.tied and name not in wanted.ignored:
                raise PushError(describe_unknown(name, wanted))
            dtype = own.get(wanted.tied.get(name, name), wanted.dtype)
            found[name] = checksums.of(tensor, next(tensors)[1], dtype)
        for name, other in wanted.tied.items():
            if name in found and found[name] != found.get(other):
                raise PushError(describe_tie(name, other))
        base = tuple((name, found[name]) for name in wanted.shapes if name in found)
        return Adapters(weights=self._scales, base=base)
