"""What the worker did, looked at once a second: for the page at `/ui`, and for `/health` while the worker is slow.

Owns: the looks of the last hour, of which the oldest give way, and the worker's last report. Promises that looking
never fails: while the worker does not answer, the looks say so. A report is given only while it is recent, and not
after the front end has changed the worker's state.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from typing import Any

from trueroll.errors import TruerollError

from .. import protocol
from ..client.client import AsyncRolloutClient

LOOK_SECONDS = 1.0
ANSWER_SECONDS = 5.0
MOST_LOOKS = 3600
REPORT_SECONDS = 2.0
"""An older report says too little about the worker."""
UNREACHABLE = "unreachable"
"""The state of a worker that does not answer."""
COUNTERS = (
    *("computed_tokens", "computed_prompt_tokens", "prefix_queries", "prefix_hits", "preemptions"),
    *("num_running", "num_waiting"),
)
BLOCKS = ("in_use", "cached", "empty")
COLUMNS = ("time", "state", "weight_version", "instance", "push", *BLOCKS, *COUNTERS)
"""Of a look: seconds since 1970, what the worker's health says, the KV blocks of all pools, and what `EngineStats` says
by the same names. All but the first two are None where the worker does not tell.
"""


class Watch:
    """Looks at the worker of `client` as long as `run` does."""

    def __init__(self, client: AsyncRolloutClient) -> None:
        self._client = client
        self._looks: deque[tuple[Any, ...]] = deque(maxlen=MOST_LOOKS)
        self._report: tuple[protocol.Health, float] | None = None
        self._changed_at = -math.inf

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            self._looks.append(await self._look())
            await asyncio.sleep(LOOK_SECONDS)

    def since(self, seconds: float) -> dict[str, list[Any]]:
        """The looks after that time, as columns."""
        looks = [look for look in self._looks if look[0] > seconds]
        return {name: [look[i] for look in looks] for i, name in enumerate(COLUMNS)}

    def report(self) -> tuple[protocol.Health, float] | None:
        """What the worker said when it was last asked, and how many seconds ago that was. None if there is no report
        that counts.
        """
        if self._report is None or (age := time.monotonic() - self._report[1]) > REPORT_SECONDS:
            return None
        return self._report[0], age

    def note_change(self) -> None:
        """The worker's state may have changed: what it was asked before counts no more."""
        self._report, self._changed_at = None, time.monotonic()

    async def _look(self) -> tuple[Any, ...]:
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                health = await self._client.health()
                if asked_at > self._changed_at:
                    self._report = health, asked_at
                return _row(health, await self._client.stats())
        except (TruerollError, TimeoutError):
            return (time.time(), UNREACHABLE, *[None] * (len(COLUMNS) - 2))


def _row(health: protocol.Health, stats: protocol.Stats) -> tuple[Any, ...]:
    engine, pools = stats.engine, stats.engine.get("pools", ())
    push = None if health.push is None else health.push.weight_version
    blocks = [sum(pool[name] for pool in pools) if pools else None for name in BLOCKS]
    counts = [engine.get(name) for name in COUNTERS]
    return (time.time(), health.state, health.weight_version, health.instance, push, *blocks, *counts)
