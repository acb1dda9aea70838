"""The weights of an engine with several ranks.

The leader owns the arenas that hold all weights. One arena holds the embeddings, which several stages may use. Another
arena holds the vision tower, which all ranks use. Each stage has an arena for the weights that are not divided among
its ranks (norms, routers). Each rank has an arena for its part of the divided weights. A follower maps the arenas that
its model needs. The leader therefore receives, reads, saves and drops weights as an engine in one process does. New
weights reach a follower as one file descriptor per arena. Followers do not compute while the leader writes into live
weights.

All arenas are in host memory. A rank on a GPU computes with a copy of its weights (`DeviceCopy`), which is brought up
to date after each commit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias, cast

import torch
from torch import Tensor

from ...kernels.contract import Weight
from ...kernels.shards import Shard, Shards
from ..cache.memory import DeviceArena, HostArena, bytes_needed
from ..cache.shared import FileArena, MappedArena
from ..models.decoder import Decoder, Empty, Owner
from ..running.ranks import Topology
from ..running.weight_memory import Build, WeightSet, empty_of

_Place: TypeAlias = tuple[Owner, int]
"""An owner of weights and its number: the number of a stage or of a rank, or 0 for owners that span all stages."""


def _sizes(build: Build, dtype: torch.dtype) -> dict[Owner, int]:
    """Return the bytes of a rank's weights, by owner. The result leaves out owners without weights."""

    def unallocated(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def size_of(owner: Owner) -> int:
        return bytes_needed(lambda empty: build(unallocated, {owner: empty}), dtype)

    found = {owner: size_of(owner) for owner in Owner}
    return {owner: size for owner, size in found.items() if size}


class DeviceCopy:
    """A copy of a rank's weights in the memory of its device. `sizes`: the bytes of each owner's weights."""

    def __init__(self, sizes: Mapping[Owner, int], dtype: torch.dtype, device: torch.device) -> None:
        self._arenas = {owner: DeviceArena(size, device) for owner, size in sizes.items()}
        self._dtype, self._device = dtype, device

    @property
    def num_held(self) -> int:
        """See `Arena`."""
        return sum(arena.num_held for arena in self._arenas.values())

    def model(self, build: Build) -> Decoder:
        """Return a model that computes with this copy of the weights."""
        empties = {owner: empty_of(arena, self._dtype) for owner, arena in self._arenas.items()}
        return build(partial(torch.empty, dtype=self._dtype, device=self._device), empties)

    def update(self, hosts: Iterable[HostArena]) -> None:
        """Copy the weights from the host."""
        for own, host in zip(self._arenas.values(), hosts, strict=True):
            own.take(host)

    def drop(self) -> None:
        """Free the memory."""
        for arena in self._arenas.values():
            arena.drop(keep=False)

    def restore(self) -> None:
        """Reallocate the memory."""
        for arena in self._arenas.values():
            arena.restore()


class RankedArena:
    """Memory for one set of weights. `arenas`: the arena of each owner. `of_ranks`: the owners of the weights that each
    rank uses. `copy`: the copy with which rank 0 computes; None if rank 0 computes with this memory.
    """

    copy_note = ""

    def __init__(
        self,
        arenas: Mapping[_Place, FileArena],
        of_ranks: Sequence[Sequence[_Place]],
        copy: DeviceCopy | None = None,
    ) -> None:
        self.arenas, self.of_ranks, self.copy = arenas, of_ranks, copy

    @property
    def num_held(self) -> int:
        """See `Arena`. If the ranks compute with copies, return the bytes of all copies."""
        if self.copy is None:
            return sum(arena.num_held for arena in self.arenas.values())
        of_ranks = (self.arenas[place].num_bytes for places in self.of_ranks for place in places)
        return sum(of_ranks) if self.copy.num_held else 0

    @property
    def is_held(self) -> bool:
        """Return whether all arenas and the copy are allocated now."""
        arenas = [*self.arenas.values(), *([] if self.copy is None else [self.copy])]
        return all(arena.num_held for arena in arenas)

    @property
    def files(self) -> list[int]:
        """The file descriptors of all arenas."""
        return [arena.file for arena in self.arenas.values()]

    def files_of(self, index: int) -> list[int]:
        """Return the file descriptors of the arenas that a rank needs, in the order of `Owner`."""
        return [self.arenas[place].file for place in self.of_ranks[index]]

    def take(self, other: RankedArena) -> None:
        """See `Arena.take`. The followers must map the new files before the next step."""
        for place, arena in self.arenas.items():
            arena.take(other.arenas[place])

    def drop(self, keep: bool) -> None:
        """See `Arena.drop`. Frees the memory for all ranks."""
        for arena in self.arenas.values():
            arena.drop(keep)
        if self.copy is not None:
            self.copy.drop()

    def set_aside(self) -> bool:
        """See `Arena.set_aside`. The memory of several ranks is not set aside."""
        return False

    def restore_host(self) -> None:
        """Restore the host memory, but not the copy."""
        try:
            for arena in self.arenas.values():
                arena.restore()
        except BaseException:
            self.drop(keep=False)
            raise

    def restore(self) -> None:
        """See `Arena.restore`. If there is not enough memory, no arena is restored."""
        self.restore_host()
        if self.copy is not None:
            self.copy.restore()
            self.update()

    def update(self) -> None:
        """Bring the copy of rank 0 up to date."""
        if self.copy is not None:
            self.copy.update(self.arenas[place] for place in self.of_ranks[0])


class LeaderWeights:
    """The `WeightMemory` of the leader. `builds`: creates the model of each rank. `copies_to`: the device on which rank
    0 computes with a copy of its weights; None if rank 0 computes with this memory.
    """

    def __init__(
        self, builds: Sequence[Build], dtype: torch.dtype, topology: Topology, copies_to: torch.device | None
    ) -> None:
        self._builds, self._dtype, self.device = builds, dtype, torch.device("cpu")
        self._copies_to = copies_to
        self._sizes, self._of_ranks = dict[_Place, int](), list[list[_Place]]()
        for index, build in enumerate(builds):
            numbers = {Owner.STAGE: topology.stage(index).index, Owner.RANK: index}
            found = {(owner, numbers.get(owner, 0)): size for owner, size in _sizes(build, dtype).items()}
            self._sizes |= found
            self._of_ranks.append([*found])
        self.num_bytes = sum(self._sizes.values())

    def new_arena(self, is_live: bool) -> RankedArena:
        """See `WeightMemory.new_arena`."""
        arenas, copy = {place: FileArena(size) for place, size in self._sizes.items()}, None
        if is_live and self._copies_to is not None:
            own = {place[0]: self._sizes[place] for place in self._of_ranks[0]}
            copy = DeviceCopy(own, self._dtype, self._copies_to)
        return RankedArena(arenas, self._of_ranks, copy)

    def weights_in(self, arena: RankedArena) -> WeightSet:
        """See `WeightMemory.weights_in`. The leader also loads the embeddings, even if its own stage does not use
        them.
        """
        allocated = dict[_Place, list[Tensor]]()
        models = [
            build(partial(torch.empty, dtype=self._dtype), dict(self._empties(arena, places, allocated)))
            for build, places in zip(self._builds, arena.of_ranks, strict=True)
        ]
        whole, own = dict[str, Weight](), models[0].checkpoint_tensors()
        to_load = dict(own)
        for name in dict.fromkeys(name for model in models for name in model.owners):
            holders = [model for model in models if name in model.owners]
            weights = [model.checkpoint_tensors()[name] for model in holders]
            whole[name] = Shards(cast(list[Shard], weights)) if isinstance(weights[0], Shard) else weights[0]
            if holders[0].owners[name] is Owner.ALL:
                to_load[name] = weights[0]
        model = models[0] if arena.copy is None else arena.copy.model(self._builds[0])
        return WeightSet(model, whole, to_load)

    def _empties(
        self, arena: RankedArena, places: Sequence[_Place], allocated: dict[_Place, list[Tensor]]
    ) -> Iterator[tuple[Owner, Empty]]:
        """Yield the functions that allocate a rank's weights. `allocated`: the tensors that earlier ranks have
        allocated. If a later rank has weights of the same owner, the later rank gets the same tensors.
        """
        for place in places:
            if place in allocated:
                again = iter(allocated[place])
                yield place[0], lambda *_, again=again, **__: next(again)
            else:
                new = allocated[place] = []
                yield place[0], partial(_noting, new, empty_of(arena.arenas[place], self._dtype))


def _noting(found: list[Tensor], empty: Empty, *shape: int, **dtype: torch.dtype) -> Tensor:
    found.append(empty(*shape, **dtype))
    return found[-1]


class FollowerArena:
    """The memory of a follower's live weights, which the leader owns. `sizes`: the bytes of each owner's weights.
    `files`: the file descriptors from the leader. `copy`: as for `RankedArena`.
    """

    copy_note, num_held = "", 0

    def __init__(self, sizes: Mapping[Owner, int], files: Sequence[int], copy: DeviceCopy | None) -> None:
        self.arenas, self.copy = {owner: MappedArena(size) for owner, size in sizes.items()}, copy
        self.map(files)

    def map(self, files: Sequence[int]) -> None:
        """Map the memory of these file descriptors, and close the file descriptors. Raise OSError on failure."""
        for arena, file in zip(self.arenas.values(), files, strict=True):
            arena.map(file)
            os.close(file)

    def update(self) -> None:
        """Bring the copy up to date."""
        if self.copy is not None:
            self.copy.update(self.arenas.values())

    def take(self, other: object) -> None:
        """Not used, because the leader commits new weights."""
        raise NotImplementedError

    def drop(self, keep: bool) -> None:
        """Free the copy. The leader frees the host memory, which it owns."""
        if self.copy is not None:
            self.copy.drop()

    def restore(self) -> None:
        """Reallocate the copy. The leader must have restored the host memory."""
        if self.copy is not None:
            self.copy.restore()
            self.update()


class FollowerWeights:
    """The `WeightMemory` of a follower. `receive_files(count)`: waits for `count` file descriptors from the leader.
    `reads_stage`: whether this rank reads from the checkpoint the weights that the ranks of its stage share.
    `copies_to`: as for `LeaderWeights`.
    """

    num_bytes = 0  # the leader allocates the memory

    def __init__(
        self,
        build: Build,
        dtype: torch.dtype,
        receive_files: Callable[[int], Sequence[int]],
        reads_stage: bool,
        copies_to: torch.device | None,
    ) -> None:
        self._copies_to = copies_to
        self._build, self._dtype, self.device = build, dtype, torch.device("cpu")
        self._receive_files, self._sizes = receive_files, _sizes(build, dtype)
        self._reads = (Owner.STAGE, Owner.RANK) if reads_stage else (Owner.RANK,)

    def new_arena(self, is_live: bool) -> FollowerArena:
        """See `WeightMemory.new_arena`."""
        copy = None if self._copies_to is None else DeviceCopy(self._sizes, self._dtype, self._copies_to)
        return FollowerArena(self._sizes, self._receive_files(len(self._sizes)), copy)

    def weights_in(self, arena: FollowerArena) -> WeightSet:
        """See `WeightMemory.weights_in`."""
        empties = {owner: empty_of(each, self._dtype) for owner, each in arena.arenas.items()}
        model = self._build(partial(torch.empty, dtype=self._dtype), empties)
        tensors = model.checkpoint_tensors()
        to_load = {name: weight for name, weight in tensors.items() if model.owners[name] in self._reads}
        return WeightSet(model if arena.copy is None else arena.copy.model(self._build), tensors, to_load)
