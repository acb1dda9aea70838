"""Poll the worker once a second: for the page at `/ui`, and for `/health` while the worker is slow.

Owns: the looks of the last hour, which are snapshots of the worker's state and counters; and the last health report.
Promises that polling never stops because of an error: while the worker does not answer, the looks say so. A report is
returned only while it is recent, and never if the front end has since changed the worker's state.
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
"""Maximum age, in seconds, of a report that is returned."""
UNREACHABLE = "unreachable"
"""The state of a worker that does not answer."""
COUNTERS = (
    *("computed_tokens", "computed_prompt_tokens", "prefix_queries", "prefix_hits", "preemptions"),
    *("num_running", "num_waiting"),
)
BLOCKS = ("in_use", "cached", "empty")
COLUMNS = ("time", "state", "weight_version", "instance", "push", *BLOCKS, *COUNTERS)
"""The columns of a look: `time` in seconds since 1970, fields of the worker's health, the number of KV blocks of all
pools, and counters of `EngineStats` under the same names. All but `time` and `state` are None if the worker does not
report them.
"""


class Watch:
    """Polls the worker of `client` while `run` runs."""

    def __init__(self, client: AsyncRolloutClient) -> None:
        self._client = client
        self._looks: deque[tuple[Any, ...]] = deque(maxlen=MOST_LOOKS)
        self._report: tuple[protocol.Health, float] | None = None
        self._changed_at = -math.inf

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            self._looks.append(await self._look())
            await asyncio.sleep(LOOK_SECONDS)

    def since(self, seconds: float) -> dict[str, list[Any]]:
        """Return the looks after a time, in seconds since 1970, as columns."""
        looks = [look for look in self._looks if look[0] > seconds]
        return {name: [look[i] for look in looks] for i, name in enumerate(COLUMNS)}

    def report(self) -> tuple[protocol.Health, float] | None:
        """Return the worker's last health report and its age in seconds; None if there is no recent one."""
        if self._report is None or (age := time.monotonic() - self._report[1]) > REPORT_SECONDS:
            return None
        return self._report[0], age

    def note_change(self) -> None:
        """Discard the last report, and a report in flight, because the worker's state may have changed."""
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
