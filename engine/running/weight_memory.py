"""The memory of sets of weights: the live weights, and weights that are being received.

`WeightMemory` is the interface that creates this memory. `LocalWeights` is the memory of an engine in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from ...kernels.contract import Weight
from ..cache.memory import Arena, bytes_needed, new_arena
from ..models.decoder import Decoder, Empty, Owner


class Build(Protocol):
    """Creates the model of a process. `empty`, `of_owner`, `of_name`: as for `Decoder`."""

    def __call__(
        self,
        empty: Empty,
        of_owner: Mapping[Owner, Empty] | None = None,
        of_name: Mapping[str, Empty] | None = None,
    ) -> Decoder: ...


class WeightArena(Protocol):
    """Memory for one set of weights. See `Arena`."""

    copy_note: str

    @property
    def num_held(self) -> int: ...

    def take(self, other: Any) -> None: ...

    def drop(self, keep: bool) -> None: ...

    def restore(self) -> None: ...

    def set_aside(self) -> bool: ...


Place: TypeAlias = Callable[[Sequence[Build], torch.dtype, torch.device], "WeightMemory"]
"""A function that returns the memory for weights. Its arguments are the builds that create the models of all ranks,
the dtype of the weights, and the device of the weights.
"""


class WeightSet(NamedTuple):
    """A set of weights in memory.

    `model`: the decoder that this process computes. `tensors`: the weights by their names in a checkpoint. A follower
    has only the weights of its part of the model. `to_load`: the weights that this process reads from the checkpoint.
    """

    model: Decoder
    tensors: Mapping[str, Weight]
    to_load: Mapping[str, Weight]


class WeightMemory(Protocol):
    """Creates memory for sets of weights. `num_bytes`: the bytes that this process allocates for a set. `device`: the
    device on which weights are received. The model may compute with a copy on another device.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def num_bytes(self) -> int: ...

    def new_arena(self, is_live: bool) -> Any:
        """Return memory for a set of weights. `is_live`: whether the memory is for the live weights, with which ranks
        compute. Raise MemoryError or RuntimeError if there is not enough memory.
        """
        ...

    def weights_in(self, arena: Any) -> WeightSet:
        """Return the set of weights in an arena, in the layout of the live weights. This call does not write to the
        arena.
        """
        ...


class LocalWeights:
    """The `WeightMemory` of an engine in one process."""

    def __init__(self, build: Build, dtype: torch.dtype, device: torch.device) -> None:
        self._build, self._dtype, self.device = build, dtype, device
        self.num_bytes = bytes_needed(build, dtype)

    def new_arena(self, is_live: bool) -> Arena:
        """See `WeightMemory.new_arena`."""
        return new_arena(self.num_bytes, self.device, huge_pages=True)

    def weights_in(self, arena: Arena) -> WeightSet:
        """See `WeightMemory.weights_in`."""
        model = self._build(empty_of(arena, self._dtype))
        tensors = model.checkpoint_tensors()
        return WeightSet(model, tensors, tensors)

    def overlay_bytes(self, names: Collection[str]) -> int:
        """Return the size, in bytes, of an overlay (see `new_overlay`) that holds the weights `names`."""
        meta = partial(torch.empty, dtype=self._dtype, device="meta")
        return bytes_needed(lambda empty: self._build(meta, of_name=dict.fromkeys(names, empty)), self._dtype)

    def new_overlay(self, num_bytes: int) -> Arena:
        """Allocate an overlay: memory for the weights that a set does not share with another set.

        Raise MemoryError or RuntimeError if there is not enough memory.
        """
        return new_arena(num_bytes, self.device, huge_pages=True)

    def weights_over(self, below: Arena, overlay: Arena, names: Collection[str]) -> WeightSet:
        """Return a set of weights: the weights `names` are in `overlay`, and all other weights are in the arena
        `below`.
        """
        index = count()

        def shared(*shape: int, dtype: torch.dtype = self._dtype) -> Tensor:
            return below.tensor(next(index), dtype, *shape)

        def own(*shape: int, dtype: torch.dtype = self._dtype) -> Tensor:
            next(index)  # the tensor of `below` that this one replaces
            return overlay.empty(dtype, *shape)

        model = self._build(shared, of_name=dict.fromkeys(names, own))
        tensors = model.checkpoint_tensors()
        return WeightSet(model, tensors, tensors)


def empty_of(arena: Arena, own: torch.dtype) -> Empty:
    """Return a function that allocates tensors from an arena. `own`: the default dtype."""

    def empty(*shape: int, dtype: torch.dtype = own) -> Tensor:
        return arena.empty(dtype, *shape)

    return empty
