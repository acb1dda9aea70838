"""The weights of an engine with several ranks.

The leader owns the memory of all weights: one arena for the common weights, which every rank uses whole (embeddings,
norms, routers), and one arena for the part of each rank. A follower maps the first arena and its own. So the leader
receives, reads, saves and drops weights as an engine in one process does. New weights reach a follower as two
descriptors. Followers do not compute while the leader writes into live weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from ...kernels.shards import Shard, Shards
from ..cache.memory import bytes_needed
from ..cache.shared import FileArena, MappedArena
from ..running.weight_memory import Build, WeightSet, empty_of

NUM_FILES = 2
"""The number of descriptors that a follower receives: of the common weights, and of its own part."""


def _sizes(build: Build, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of the common weights, and the bytes of this rank's part."""

    def unallocated(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    common = bytes_needed(lambda empty: build(empty, unallocated), dtype)
    return common, bytes_needed(lambda empty: build(unallocated, empty), dtype)


class RankedArena:
    """Memory for one set of weights: `common` for the common weights, and one of `parts` for each rank."""

    copy_note = ""

    def __init__(self, common: FileArena, parts: Sequence[FileArena]) -> None:
        self.common, self.parts = common, parts

    @property
    def num_held(self) -> int:
        """See `Arena`."""
        return sum(arena.num_held for arena in self._all)

    @property
    def files(self) -> list[int]:
        """The descriptors of all memory."""
        return [arena.file for arena in self._all]

    def files_of(self, index: int) -> list[int]:
        """Return the descriptors of the memory that a rank needs."""
        return [self.common.file, self.parts[index].file]

    def take(self, other: RankedArena) -> None:
        """See `Arena.take`. The followers must map the new files before the next step."""
        for own, new in zip(self._all, other._all, strict=True):
            own.take(new)

    def drop(self, keep: bool) -> None:
        """See `Arena.drop`. Frees the memory for all ranks."""
        for arena in self._all:
            arena.drop(keep)

    def restore(self) -> None:
        """See `Arena.restore`. If there is not enough memory, none is restored."""
        try:
            for arena in self._all:
                arena.restore()
        except BaseException:
            self.drop(keep=False)
            raise

    @property
    def _all(self) -> list[FileArena]:
        return [self.common, *self.parts]


class LeaderWeights:
    """The `WeightMemory` of the leader. `builds`: creates the model of each rank."""

    def __init__(self, builds: Sequence[Build], dtype: torch.dtype) -> None:
        self._builds, self._dtype, self.device = builds, dtype, torch.device("cpu")
        sizes = [_sizes(build, dtype) for build in builds]
        self._common, self._parts = sizes[0][0], [own for _, own in sizes]
        self.num_bytes = self._common + sum(self._parts)

    def new_arena(self, is_live: bool) -> RankedArena:
        """See `WeightMemory.new_arena`."""
        common, *parts = (FileArena(size, huge_pages=is_live) for size in (self._common, *self._parts))
        return RankedArena(common, parts)

    def weights_in(self, arena: RankedArena) -> WeightSet:
        """See `WeightMemory.weights_in`."""
        allocate, common = empty_of(arena.common, self._dtype), list[Tensor]()

        def empty(*shape: int, dtype: torch.dtype = self._dtype) -> Tensor:
            common.append(allocate(*shape, dtype=dtype))
            return common[-1]

        model = self._builds[0](empty, empty_of(arena.parts[0], self._dtype))
        models = [model]
        for build, part in zip(self._builds[1:], arena.parts[1:], strict=True):
            again = iter(common)  # every rank has the same tensors there
            models.append(build(lambda *_, again=again, **__: next(again), empty_of(part, self._dtype)))
        own = model.checkpoint_tensors()
        of_all = {name: [each.checkpoint_tensors()[name] for each in models] for name in own}
        whole = {
            name: Shards(cast(list[Shard], each)) if isinstance(each[0], Shard) else each[0]
            for name, each in of_all.items()
        }
        return WeightSet(model, whole, own)


class FollowerArena:
    """The memory of a follower's live weights, which the leader owns. `files`: the descriptors from the leader."""

    copy_note = ""

    def __init__(self, common: int, own: int, files: Sequence[int]) -> None:
        self.common, self.own = MappedArena(common), MappedArena(own)
        self.map(files)

    @property
    def num_held(self) -> int:
        """See `Arena`."""
        return self.common.num_held + self.own.num_held

    def map(self, files: Sequence[int]) -> None:
        """Map the memory with these descriptors, and close them. Raise OSError on failure."""
        for arena, file in zip((self.common, self.own), files, strict=True):
            arena.map(file)
            os.close(file)

    def take(self, other: object) -> None:
        """Not used, because the leader commits new weights."""
        raise NotImplementedError

    def drop(self, keep: bool) -> None:
        """Do nothing, because the leader owns the memory."""

    def restore(self) -> None:
        """Do nothing, because the leader owns the memory."""


class FollowerWeights:
    """The `WeightMemory` of a follower. `receive_files()`: waits for the descriptors from the leader."""

    num_bytes = 0  # the leader allocates the memory

    def __init__(self, build: Build, dtype: torch.dtype, receive_files: Callable[[], Sequence[int]]) -> None:
        self._build, self._dtype, self.device = build, dtype, torch.device("cpu")
        self._receive_files = receive_files

    def new_arena(self, is_live: bool) -> FollowerArena:
        """See `WeightMemory.new_arena`."""
        return FollowerArena(*_sizes(self._build, self._dtype), self._receive_files())

    def weights_in(self, arena: FollowerArena) -> WeightSet:
        """See `WeightMemory.weights_in`. The leader reads the common weights."""
        model = self._build(empty_of(arena.common, self._dtype), empty_of(arena.own, self._dtype))
        tensors = model.checkpoint_tensors()
        parts = {name: weight for name, weight in tensors.items() if isinstance(weight, Shard)}
        return WeightSet(model, tensors, parts)
