"""Turns on the event loop, for long answers, which are made and written in steps."""

from __future__ import annotations

import asyncio


class Turns:
    """Lets long answers be written one step at a time, in turn, with everything else in between."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def next(self) -> None:
        """Wait until everything else, and everything that waits here already, has had a turn."""
        async with self._lock:
            await asyncio.sleep(0)
