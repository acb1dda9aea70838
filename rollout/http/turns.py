"""Turns on the event loop for long answers, which are produced and written in steps."""

from __future__ import annotations

import asyncio


class Turns:
    """Schedules the steps of all long answers: one at a time, in turn, with other work in between."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def next(self) -> None:
        """Wait until all other work, and every caller that already waits here, has had a turn."""
        async with self._lock:
            await asyncio.sleep(0)
