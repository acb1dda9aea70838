"""Exchange of tensors between processes of one machine, through shared memory.

The memory is an unnamed file that the leader creates and that the followers inherit. Each group of ranks has a region
of the file. The groups are all ranks together, the ranks of each stage, and each pair of ranks that pass hidden states.
A region has one counter for each rank of the group, and two sides, each with one slot for each rank. A rank writes its
tensor to its slot, sets its counter to the number of the call, and waits until all counters have reached this number.
Consecutive calls use different sides of the region. A rank can be at most one call ahead of another rank, so no rank
overwrites a slot that another rank still reads.
"""

from __future__ import annotations

import math
import mmap
import os
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from ...kernels.cpu.ranks import RankMeetings
from ...kernels.ranks import Finish, Rank, fold
from ..running.ranks import Links, Topology

MOST_SECONDS, MOST_SECONDS_TO_START = 60.0, 1800.0
"""How many seconds a rank waits for the other ranks: in a step, and while ranks load and warm up."""
SLOT_BYTES = 4 * 2**20
_COUNTER_BYTES = 64  # a cache line each, so that ranks do not slow each other down


Group: TypeAlias = tuple[int, ...]


class RankError(RuntimeError):
    """A rank has failed or hangs, or ranks have different results. After this error, the engine cannot continue."""


class Segment:
    """The shared memory of all groups of `topology`. `file`: the file descriptor of the memory, which the caller
    closes.

    `check()`: called while a rank waits; raises an exception if another rank has ended. `most_seconds`: how long a rank
    waits for the other ranks. After `most_seconds`, the call of the waiting rank raises RankError.
    """

    def __init__(
        self, topology: Topology, file: int, check: Callable[[], object], most_seconds: float = math.inf
    ) -> None:
        self.topology, self.check, self.most_seconds = topology, check, most_seconds
        groups = _groups(topology)
        ends = [*accumulate(_region_bytes(len(group)) for group in groups)]
        os.ftruncate(file, ends[-1])
        memory = torch.frombuffer(mmap.mmap(file, ends[-1]), dtype=torch.uint8)
        self._regions = {
            group: memory[end - _region_bytes(len(group)) : end] for group, end in zip(groups, ends, strict=True)
        }

    def links(self, index: int) -> Links:
        """Return the exchanges and links through which a rank reaches the other ranks."""
        topology = self.topology
        before, after = topology.before(index), topology.after(index)
        everyone = stage = SharedExchange(self, _everyone(topology), index)
        if topology.stages > 1:
            stage = SharedExchange(self, tuple(topology.of_stage(index)), index)
        return Links(
            topology,
            everyone,
            stage,
            None if before is None else SharedExchange(self, (before, index), index),
            None if after is None else SharedExchange(self, (index, after), index),
        )

    def region(self, group: Group) -> Tensor:
        """Return the memory of a group: uint8 [bytes]."""
        return self._regions[group]

    def absent(self) -> list[int]:
        """Return the ranks that other ranks wait for and that are not waiting themselves."""
        awaited, waiting = set[int](), set[int]()
        for group, region in self._regions.items():
            turns = region[: len(group) * _COUNTER_BYTES].view(torch.int64)[:: _COUNTER_BYTES // 8].tolist()
            for index, turn in zip(group, turns, strict=True):
                if min(turns) < max(turns):
                    (awaited if turn < max(turns) else waiting).add(index)
        return sorted(awaited - waiting)


class SharedExchange:
    """The `Exchange` of a rank with the ranks of `group`, and the `Link` between the two ranks of a pair. `index`: this
    rank, a member of the group.
    """

    def __init__(self, segment: Segment, group: Group, index: int) -> None:
        self.rank, self._segment = Rank(group.index(index), len(group)), segment
        self._bytes = segment.region(group)
        counters, own = self._bytes.data_ptr(), weakref.ref(self)

        def check_meeting(turn: int) -> None:
            assert (waiting := own()) is not None
            waiting._check_patience(turn)

        slots = counters + len(group) * _COUNTER_BYTES
        self.native = RankMeetings(counters, slots, SLOT_BYTES, *self.rank, check_meeting)
        self._waiting = 0, 0.0

    def meet(self) -> None:
        """Wait until all ranks have made this call. Raise RankError if a rank does not make the call in time."""
        self.native.meet()

    def _check_patience(self, turn: int) -> None:
        """Raise RankError if this rank has waited too long for the other ranks to make the call with the number `turn`.
        An error that `check` raises is propagated.
        """
        self._segment.check()
        waiting_for, since = self._waiting
        if waiting_for != turn:
            self._waiting = turn, time.monotonic()
        elif time.monotonic() > since + self._segment.most_seconds:
            absent, seconds = self._segment.absent(), self._segment.most_seconds
            raise RankError(f"ranks {absent} of {self._segment.topology.size} did not answer within {seconds:.0f} s")

    def gather(self, x: Tensor) -> Sequence[Tensor]:
        """See `Exchange.gather`."""
        flat = _bytes_of(x.contiguous().cpu())
        if len(flat) <= SLOT_BYTES:
            parts = self._gather(flat)
        else:
            parts = [torch.empty_like(flat) for _ in range(self.rank.size)]
            for start in range(0, len(flat), SLOT_BYTES):
                some = self._gather(flat[start : start + SLOT_BYTES])
                for part, found in zip(parts, some, strict=True):
                    part[start : start + len(found)] = found
        return [part.view(x.dtype).view(x.shape).to(x.device) for part in parts]

    def add(self, own: Tensor, finish: Finish) -> Tensor:
        """See `Exchange.add`."""
        return finish(fold(self.gather(own)), 0)

    def send(self, x: Tensor) -> None:
        """See `Link.send`."""
        flat = _bytes_of(x.contiguous().cpu())
        for start in range(0, len(flat), SLOT_BYTES):
            part = flat[start : start + SLOT_BYTES]
            self._slot((self.native.turn + 1) % 2, 0)[: len(part)] = part
            self.meet()

    def receive(self, out: Tensor) -> None:
        """See `Link.receive`. `out` must be contiguous."""
        host = out if out.device.type == "cpu" else torch.empty_like(out, device="cpu")
        flat = _bytes_of(host)
        for start in range(0, len(flat), SLOT_BYTES):
            part = flat[start : start + SLOT_BYTES]
            self.meet()
            part.copy_(self._slot(self.native.turn % 2, 0)[: len(part)])
        if host is not out:
            out.copy_(host)

    def _gather(self, own: Tensor) -> list[Tensor]:
        """Exchange bytes that fit into a slot. The result is valid until the next call."""
        side = (self.native.turn + 1) % 2
        self._slot(side, self.rank.index)[: len(own)] = own
        self.meet()
        return [self._slot(side, index)[: len(own)] for index in range(self.rank.size)]

    def _slot(self, side: int, index: int) -> Tensor:
        size = self.rank.size
        start = size * _COUNTER_BYTES + (side * size + index) * SLOT_BYTES
        return self._bytes[start : start + SLOT_BYTES]


def _region_bytes(size: int) -> int:
    """Return the size, in bytes, of the region of a group with `size` ranks."""
    return size * (_COUNTER_BYTES + 2 * SLOT_BYTES)


def _everyone(topology: Topology) -> Group:
    return tuple(range(topology.size))


def _groups(topology: Topology) -> list[Group]:
    """Return the groups of ranks that exchange tensors, without repetitions."""
    places = _everyone(topology)
    of_stages = [tuple(topology.of_stage(index)) for index in places]
    pairs = [(before, index) for index in places if (before := topology.before(index)) is not None]
    return [*dict.fromkeys([places, *of_stages, *pairs])]


def _bytes_of(x: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, uint8 [bytes]."""
    return x.view(-1).view(torch.uint8)
