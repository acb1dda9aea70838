"""Scheduling of long answers on the event loop. Long answers are produced and written in steps."""

from __future__ import annotations

import asyncio


class Turns:
    """Schedules the steps of all long answers.

    Only one step runs at a time. The answers take turns, and the event loop runs other work between two steps.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def next(self) -> None:
        """Wait until the event loop has run other work, and until all earlier callers of `next` have run their
        steps.
        """
        async with self._lock:
            await asyncio.sleep(0)
