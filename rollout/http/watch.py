"""Poll the worker once a second. The page at `/ui` shows the results of the polls, and `/health` uses these results
while the worker is slow.

Owns: the snapshots of the last hour (`looks`), and the last health report. A look is a snapshot of the worker's state
and counters. Guarantees: polling never stops because of an error. While the worker does not answer, snapshots have the
state `unreachable`. `report` never returns a report that is older than `REPORT_SECONDS`, or older than the front end's
last change of the worker's state.
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
from .errors import HttpError

LOOK_SECONDS = 1.0
ANSWER_SECONDS = 5.0
"""Maximum time, in seconds, for which the front end waits for the worker's health."""
MOST_LOOKS = 3600
REPORT_SECONDS = 2.0
"""Maximum age, in seconds, of a health report that `Watch.report` returns."""
UNREACHABLE = "unreachable"
"""The state that a look records while the worker does not answer."""
COUNTERS = (
    *("computed_tokens", "computed_prompt_tokens", "prefix_queries", "prefix_hits", "preemptions"),
    *("num_running", "num_waiting"),
)
BLOCKS = ("in_use", "cached", "empty")
COLUMNS = ("time", "state", "weight_version", "instance", "push", *BLOCKS, *COUNTERS)
"""The columns of a look. `time` is in seconds since 1970. `state` to `push` come from the worker's health. `BLOCKS` are
numbers of KV blocks over all pools. `COUNTERS` are counters of `EngineStats`. All columns except `time` and `state` are
None if the worker does not report the value.
"""


class Watch:
    """Polls the worker of `client` until `run` is cancelled."""

    def __init__(self, client: AsyncRolloutClient) -> None:
        self._client = client
        self._looks: deque[tuple[Any, ...]] = deque(maxlen=MOST_LOOKS)
        self._report: tuple[protocol.Health, float] | None = None
        self._changed_at = -math.inf
        self._may_have_adapters = True

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            self._looks.append(await self._look())
            await asyncio.sleep(LOOK_SECONDS)

    def since(self, seconds: float) -> dict[str, list[Any]]:
        """Return the snapshots after time `seconds` (in seconds since 1970), as one list of values per column."""
        looks = [look for look in self._looks if look[0] > seconds]
        return {name: [look[i] for look in looks] for i, name in enumerate(COLUMNS)}

    def report(self) -> tuple[protocol.Health, float] | None:
        """Return the worker's last health report and the age of the report in seconds; None if there is no recent
        report.
        """
        if self._report is None or (age := time.monotonic() - self._report[1]) > REPORT_SECONDS:
            return None
        return self._report[0], age

    async def now(self) -> protocol.Health:
        """Ask the worker for its health. Raise HttpError if the worker does not answer in time."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._client.health()
        except TimeoutError:
            text = f"worker did not answer within {ANSWER_SECONDS:g} s; check that the worker is running"
            raise HttpError(503, text, code="worker_lost") from None

    async def adapters(self) -> dict[str, int]:
        """Return the version of each named adapter that the worker serves now. Raise HttpError if the worker does not
        answer in time. If the worker has no memory for named adapters, return an empty dictionary without asking the
        worker.
        """
        return dict((await self.now()).adapters) if self._may_have_adapters else {}

    async def serves(self, adapter: str) -> bool:
        """Return whether the worker serves a named adapter.

        If a recent report lists the adapter, do not ask the worker: if the adapter was unloaded after this report, the
        worker refuses the request. If no recent report lists the adapter, ask the worker, because the adapter may have
        been loaded after the last report.
        """
        report = self.report()
        return (report is not None and adapter in report[0].adapters) or adapter in await self.adapters()

    def note_change(self) -> None:
        """Discard the last health report and any report in flight, because the worker's state may have changed."""
        self._report, self._changed_at = None, time.monotonic()

    async def _look(self) -> tuple[Any, ...]:
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                health = await self._client.health()
                self._may_have_adapters = "adapters" in health.memory or health.state == "loading"
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
