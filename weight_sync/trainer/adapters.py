"""A PEFT model's adapters, as a push sends them: alone, or together with all tensors of the model.

Owns the checksums of the tensors that adapters are added to. The checksum of an unsharded tensor is computed again only
if the tensor's version counter in torch, or the tensor's address, has changed. The checksum of a sharded tensor is
computed each time. Keeps no tensor alive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, Protocol, TypeAlias
from weakref import ref

import torch

from trueroll.errors import PushError

from ..payload.manifest import Adapters, Parameters, describe_tie, describe_unknown, factor_names, own_dtypes
from ..payload.tensors import dtype_named, tensor_checksum
from .trainer_tensors import TrainerTensors, is_sharded, memory_of

NONE = "none"
"""The setting `quantization` of a worker with plain weights."""
Rounding: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Takes a tensor, and returns the values that the tensor has after a worker quantizes it, in the tensor's dtype. Raises
ValueError for a tensor that the format cannot store. Equal roundings return the same values.
"""


class _Known(NamedTuple):
    """The checksum of a tensor in a given state."""

    tensor: ref[torch.Tensor]
    state: tuple[object, ...]
    checksum: int


class Checksums:
    """Checksums of tensors, computed after conversion to a given dtype and after rounding. The checksum of
    an unsharded tensor is cached for as long as the tensor lives and does not change.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def of(
        self, tensor: torch.Tensor, whole: Callable[[], torch.Tensor], dtype: str, rounding: Rounding | None = None
    ) -> int:
        """Return the checksum of a tensor after conversion to `dtype`, and after `rounding`. `whole`: returns the
        gathered tensor, or `tensor` itself if it is not sharded. `whole` is not called if the checksum is cached.
        """
        state, known = (*memory_of(tensor), tensor._version, dtype, rounding), self._known.get(id(tensor))
        if known is None or known.state != state or known.tensor() is not tensor or is_sharded(tensor):
            own = id(tensor)
            kept = ref(tensor, lambda gone: self._forget(own, gone))
            as_served, found = dtype_named(dtype), whole()
            found = found if rounding is None else rounding(found.detach().to(as_served))
            known = self._known[own] = _Known(kept, state, tensor_checksum(found, as_served))
        return known.checksum

    def _forget(self, own: int, gone: ref[torch.Tensor]) -> None:
        if (known := self._known.get(own)) is not None and known.tensor is gone:
            del self._known[own]


class AdaptedTensors(Protocol):
    """A PEFT model's tensors and adapters, under the names that workers know.

    `tensors`: the tensors of the model, without the matrices A and B of the adapters.
    `replaced`: names of the tensors that are trained as a whole, without an
    adapter. `adapters`: maps the name of each adapted weight [N, K] to (A [R, K], B [N, R], scale of the product B A).
    """

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]: ...
    @property
    def replaced(self) -> Collection[str]: ...
    @property
    def adapters(self) -> Mapping[str, tuple[torch.Tensor, torch.Tensor, float]]: ...


class TrainerAdapters:
    """The tensors that a push of a PEFT model sends: all tensors, or, if `alone` is set, only adapters and the modules
    in `modules_to_save`.

    `sent`: the tensors to send, under the names that workers use. `tensors`: first the base weights that are not sent,
    then the tensors in `sent`. Every rank of the trainer gathers the tensors in the order of `tensors`.
    `roundings_of`: takes a setting `quantization` other than `none`, and returns how workers with this setting round
    the model's weights. The keys of the result are the names that workers use for the weights.
    Raise PushError if `alone` is set and no adapter is enabled.
    """

    def __init__(
        self, found: AdaptedTensors, alone: bool, roundings_of: Callable[[str], Mapping[str, Rounding]]
    ) -> None:
        if alone and not found.adapters:
            raise PushError("adapters: no adapter is enabled; enable one, or push without adapters")
        self._scales = tuple((name, len(a), float(scale)) for name, (a, _, scale) in found.adapters.items())
        self.is_alone, self._roundings_of = alone, roundings_of
        self._base = {name: t for name, t in found.tensors.items() if alone and name not in found.replaced}
        self.sent: dict[str, torch.Tensor] = {name: t for name, t in found.tensors.items() if name not in self._base}
        for name, (a, b, _) in found.adapters.items():
            self.sent |= zip(factor_names(name), (a, b), strict=True)
        self.tensors = self._base | self.sent

    def describe(
        self,
        wanted: Parameters,
        tensors: TrainerTensors,
        checksums: Checksums,
        rename: Callable[[str], str | None],
        quantization: str,
    ) -> Adapters:
        """Return the description of the adapters in a push to workers that want the parameters `wanted`. `rename`:
        returns the workers' name for a trainer's name, or None for a tensor to leave out. `quantization`: see
        `Weights`.

        Consumes the base weights from the iterator `tensors`, which then continues with the tensors to send. Raise
        PushError for names that the workers do not know, for tied tensors that differ in the trainer, and for base
        weights that quantized workers cannot store.
        """
        named = ((rename(name), rank, scale) for name, rank, scale in self._scales)
        scales = tuple((own, rank, scale) for own, rank, scale in named if own is not None)
        if not self.is_alone:
            return Adapters(weights=scales)
        found: dict[str, int] = {}
        own, rounded = own_dtypes(wanted), {} if quantization == NONE else self._roundings_of(quantization)
        for trained, tensor in self._base.items():
            whole, name = tensors.later(), rename(trained)
            if name is None:
                continue
            if name not in wanted.shapes and name not in wanted.tied and name not in wanted.ignored:
                raise PushError(describe_unknown(name, wanted))
            dtype = own.get(wanted.tied.get(name, name), wanted.dtype)
            try:
                found[name] = checksums.of(tensor, whole, dtype, rounded.get(name))
            except ValueError as error:
                raise PushError(f"tensor {name}: {error}") from None
        for name, other in wanted.tied.items():
            if name in found and found[name] != found.get(other):
                raise PushError(describe_tie(name, other))
        base = tuple((name, found[name]) for name in wanted.shapes if name in found)
        return Adapters(weights=scales, base=base)
