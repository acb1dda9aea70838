"""Load a LoRA adapter from a folder, with the same calls that a push to a single worker uses.

Owns: the order in which the calls are sent. Does not own: the connection. The worker reads and checks the folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

from trueroll.errors import DeadlineError, TruerollError

from ...engine.request import SleepInFlight
from ...weight_sync.payload.manifest import PeftSource
from .. import protocol
from .requests import message_of

Ask = Callable[[Any], Awaitable[protocol.FromWorker]]
"""Sends a call to a worker and returns its reply."""


async def load_adapter(
    ask: Ask, name: str, folder: str | Path, version: int | None, in_flight: SleepInFlight, timeout: float
) -> protocol.Status:
    """See `AsyncRolloutClient.load_adapter`."""
    weights = cast(protocol.Weights, await _within(ask, protocol.GetWeights(id=protocol.new_id()), timeout))
    if version is None:
        version = weights.adapters.get(name, 0) + 1
    push: dict[str, Any] = dict(push_id=protocol.new_id())
    given = dict(source=PeftSource(folder=str(Path(folder).absolute())), adapter=name, weight_version=version)
    calls = [
        message_of(protocol.BeginPush, id=protocol.new_id(), dtype=weights.dtype, timeout=timeout, **push, **given),
        protocol.VerifyPush(id=protocol.new_id(), num_buckets=0, **push),
        message_of(protocol.CommitPush, id=protocol.new_id(), in_flight=in_flight, timeout=timeout, **push),
    ]
    try:
        for call in calls:
            reply = cast(protocol.PushStatus, await _within(ask, call, timeout))
    except BaseException:
        await asyncio.shield(_abort(ask, push))
        raise
    return protocol.Status(id=reply.id, state=reply.state, weight_version=reply.weight_version)


async def _within(ask: Ask, call: Any, timeout: float) -> protocol.FromWorker:
    try:
        return await asyncio.wait_for(ask(call), timeout)
    except TimeoutError:
        raise DeadlineError(f"load_adapter: {call.type} was not answered within {timeout:g} s") from None


async def _abort(ask: Ask, push: dict[str, Any]) -> None:
    """Abort the push. If the worker does not answer, the worker drops the push after its own timeout."""
    try:
        await asyncio.wait_for(ask(protocol.AbortPush(id=protocol.new_id(), **push)), 5.0)
    except (TruerollError, TimeoutError):
        return
