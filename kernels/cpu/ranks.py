"""Meetings of ranks in the library: the struct `RankExchange` of native/api.h. A meeting is a barrier: the call returns
when all ranks have made the call.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

from .library import load_library

_CHECK = ctypes.CFUNCTYPE(ctypes.c_int)


class _RankExchange(ctypes.Structure):
    _fields_ = (
        ("counters", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("turn", ctypes.c_int64),
        ("check", _CHECK),
        ("has_failed", ctypes.c_int64),
        ("waited_ns", ctypes.c_int64),
    )


class RankMeetings:
    """One rank's part in the meetings of `size` ranks. `counters`, `slots`: the addresses of the shared memory.

    `check(turn)`: called repeatedly while the rank waits, with the number of the meeting. If `check` raises an
    exception, the rank stops waiting, and the call raises this exception.
    """

    def __init__(
        self, counters: int, slots: int, slot_bytes: int, rank: int, size: int, check: Callable[[int], object]
    ) -> None:
        self._check = check
        self._error: BaseException | None = None
        self._library = load_library()
        own = weakref.ref(self)  # a cycle would keep the ranks alive until the next garbage collection

        def refuses() -> int:
            meetings = own()
            return 1 if meetings is None else meetings._refuses()

        self._native = _RankExchange(counters, slots, slot_bytes, rank, size, 0, _CHECK(refuses))

    @property
    def turn(self) -> int:
        """The number of meetings so far."""
        return self._native.turn

    @property
    def waited_us(self) -> int:
        """How long this rank has waited for other ranks, in microseconds."""
        return self._native.waited_ns // 1000

    @property
    def address(self) -> int:
        """The address of the `RankExchange`."""
        return ctypes.addressof(self._native)

    def meet(self) -> None:
        """Wait until all ranks have made this call."""
        self._library.meet(self.address)
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the exception that `check` raised in the library, if any."""
        if self._error is not None:
            raise self._error

    def _refuses(self) -> int:
        try:
            self._check(self._native.turn)
        except BaseException as error:
            self._error = error
            return 1
        return 0
