"""What a worker has answered, until its caller takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TypeAlias

from trueroll.errors import TruerollError

from ...engine.request import SampleDelta
from .. import protocol
from .received import Received

Reply: TypeAlias = protocol.FromWorker | TruerollError


class Inbox:
    """Replies to some calls, in order, with the id of each.

    What a sample has got grows here until it is taken.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[str, Reply | Received]] = asyncio.Queue()
        self._received: dict[tuple[str, int], Received] = {}

    def put(self, id: str, reply: Reply) -> None:
        self._queue.put_nowait((id, reply))

    def put_delta(self, delta: protocol.Delta) -> None:
        """Raise ProtocolError if tokens before it are missing."""
        received = self._received.setdefault((delta.id, delta.index), Received())
        if received.put(delta):
            self._queue.put_nowait((delta.id, received))

    def finish(self, sample: protocol.FinishedSample) -> SampleDelta | None:
        """What was not taken of a sample that has ended."""
        return self._received.pop((sample.id, sample.index), Received()).finish(sample)

    async def get(self) -> tuple[str, Reply | Received]:
        """The next reply; `Received` where a sample has got something."""
        return await self._queue.get()

    def rest(self) -> Iterator[tuple[str, Reply | Received]]:
        """What has come and was not taken."""
        while not self._queue.empty():
            yield self._queue.get_nowait()
