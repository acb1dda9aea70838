"""Exchange of tensors between processes of one machine, through shared memory.

The memory is an unnamed file that the leader creates and that the followers inherit. It has one counter for each rank,
and two sides, each with one slot for each rank. A rank writes its tensor to its slot, sets its counter to the number of
the call, and waits until all counters have reached this number. A rank can be at most one call ahead of another rank,
so two sides suffice.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...kernels.cpu.ranks import RankMeetings
from ...kernels.ranks import Rank

MOST_SECONDS, MOST_SECONDS_TO_START = 60.0, 1800.0
"""How long a rank waits for the others in a step, and while ranks load and warm up."""
SLOT_BYTES = 4 * 2**20
_COUNTER_BYTES = 64  # a cache line each, so that ranks do not slow each other down


class RankError(RuntimeError):
    """A rank has failed or hangs, or ranks have different results. The engine cannot go on."""


def segment_bytes(size: int) -> int:
    """Return the size of the shared memory of `size` ranks, in bytes."""
    return size * (_COUNTER_BYTES + 2 * SLOT_BYTES)


def new_segment(size: int) -> int:
    """Return the descriptor of new shared memory for `size` ranks. The caller closes it."""
    segment = os.memfd_create("trueroll-ranks", os.MFD_CLOEXEC)
    os.ftruncate(segment, segment_bytes(size))
    return segment


class SharedExchange:
    """The `Exchange` of one rank. `segment`: the descriptor of the shared memory; closed by the caller.

    `check()`: called while the rank waits; raises an exception if another rank has ended. `most_seconds`: how long a
    rank waits for the other ranks. After that, a call raises RankError.
    """

    def __init__(self, rank: Rank, segment: int, check: Callable[[], object], most_seconds: float) -> None:
        self.rank, self.check, self.most_seconds = rank, check, most_seconds
        self._memory = mmap.mmap(segment, segment_bytes(rank.size))
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        counters, own = self._bytes.data_ptr(), weakref.ref(self)

        def check_meeting(turn: int) -> None:
            assert (waiting := own()) is not None
            waiting._check_patience(turn)

        self.native = RankMeetings(counters, counters + rank.size * _COUNTER_BYTES, SLOT_BYTES, *rank, check_meeting)
        self._waiting = 0, 0.0

    def meet(self) -> None:
        """Wait until all ranks have made this call. Raise RankError if a rank does not make it in time."""
        self.native.meet()

    def _check_patience(self, turn: int) -> None:
        """Raise RankError if this rank has waited too long at the meeting `turn`, or the error of `check`."""
        self.check()
        waiting_for, since = self._waiting
        if waiting_for != turn:
            self._waiting = turn, time.monotonic()
        elif time.monotonic() > since + self.most_seconds:
            waited = f"{self.most_seconds:.0f} s"
            raise RankError(f"ranks {self._absent()} of {self.rank.size} did not answer in {waited}")

    def _absent(self) -> list[int]:
        """Return the ranks that have not made this call."""
        counters = self._bytes[: self.rank.size * _COUNTER_BYTES].view(torch.int64)[:: _COUNTER_BYTES // 8].tolist()
        return [index for index, turn in enumerate(counters) if turn < self.native.turn]

    def gather(self, x: Tensor) -> Sequence[Tensor]:
        """See `Exchange.gather`."""
        flat = x.contiguous().view(-1).view(torch.uint8)
        if len(flat) <= SLOT_BYTES:
            parts = self._gather(flat)
        else:
            parts = [torch.empty_like(flat) for _ in range(self.rank.size)]
            for start in range(0, len(flat), SLOT_BYTES):
                some = self._gather(flat[start : start + SLOT_BYTES])
                for part, found in zip(parts, some, strict=True):
                    part[start : start + len(found)] = found
        return [part.view(x.dtype).view(x.shape) for part in parts]

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
