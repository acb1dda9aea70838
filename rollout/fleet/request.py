"""A request of a fleet's client, and the attempts to run this request on one or more workers.

Owns: the tasks that send the request to workers, and the wait for an eligible worker. `patience` limits the wait. Does
not own: the samples that have arrived and the content of the next `Ask` (`GroupState`), or the workers (`WorkerPool`).

Guarantees: the request gets exactly one terminal reply, whatever happens to its workers. If a worker's replies are no
longer needed, the request is aborted on this worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from trueroll.errors import TruerollError, UnavailableError, WorkerLostError

from ...engine.media import ImageInput
from ...engine.request import ContentSpan
from .. import protocol
from ..client.requests import Request
from .asks import Ask
from .dispatch import Dispatch
from .group_state import GroupState
from .links import Link
from .placement import Placed, beginnings
from .samples import Reply
from .worker_pool import WorkerPool

SLOWNESS = 3.0
"""A request is a straggler if it takes this many times as long, relative to its size, as the slowest recent request."""


@dataclass(eq=False)
class _Attempt:
    """An attempt to run the request: one `Ask`, sent to one worker. `since`: the time at which the `Ask` was sent, in
    monotonic seconds. `is_last`: whether a reply to this `Ask` ended the request.
    """

    ask: Ask
    link: Link
    placed: Placed
    since: float = field(default_factory=time.monotonic)
    is_last: bool = False

    async def abort(self, indices: set[int], n: int) -> None:
        """Make the worker abort the samples `indices`. `n`: number of samples in the request. Errors are ignored,
        because `GroupState` ends the samples of lost workers.
        """
        with suppress(TruerollError):
            for id, index in self.ask.targets(indices, n):
                await self.link.client.abort(id, index, missing_ok=True)

    def release(self, dispatch: Dispatch) -> None:
        """Remove the request from the worker's load. If `is_last` is set, record that this worker has finished the
        request, even if the task was cancelled.
        """
        if self.is_last:
            dispatch.finish(self.placed, time.monotonic() - self.since)
        else:
            dispatch.withdraw(self.placed)


class FleetRequest:
    """A request and its attempts.

    - `deliver`: called with deltas and samples as they arrive, and finally with one terminal reply: Done, Scores or an
      error
    - `images`: the images of the request, by content hash
    - `may_repeat`: whether a sample may be delivered again, to replace the sample that was delivered before
    - `max_staleness`: maximum difference between the weight versions that generated the request's tokens
    - `patience`: maximum number of seconds to wait for a worker. A request waits if no worker is eligible, or if no
      worker's state permits requests. If a worker is lost while it runs the request, the request also waits while all
      other workers are full.
    """

    def __init__(
        self,
        pool: WorkerPool,
        request: Request,
        deliver: Callable[[Reply], None],
        images: Mapping[bytes, ImageInput],
        *,
        may_repeat: bool,
        max_staleness: int,
        patience: float,
    ) -> None:
        self._pool = pool
        self._deliver = deliver
        self._images = images
        self._state = GroupState(request, may_repeat=may_repeat, max_staleness=max_staleness)
        self._attempts: dict[asyncio.Task[None], _Attempt] = {}
        self._patience = patience
        self._patience_ends: float | None = None
        """Deadline of the wait for a worker, in monotonic seconds. None before the first wait, and None again after a
        worker has accepted the request.
        """
        prompt = request.token_ids if isinstance(request, protocol.GetScores) else request.prompt_token_ids
        salt = request.cache_salt if isinstance(request, protocol.GetScores) else request.params.cache_salt
        # The first position of an image is enough, because every longer prefix contains this position, and the content
        # hash covers the size of the image.
        starts = [ContentSpan(image.start, image.start + 1, image.content_hash) for image in request.images]
        self._beginnings = beginnings(protocol.bytes_to_tokens(prompt), salt, starts or request.spans)

    async def run(self) -> None:
        """Send the request to workers until the terminal reply is delivered."""
        try:
            while not self._state.is_over:
                if not self._attempts:
                    await self._ask_somebody()
                    continue
                done, _ = await asyncio.wait(self._attempts, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    self._end_attempt(task)
        except TruerollError as error:
            self.finish(error)
        except Exception as error:  # a bug in trueroll; otherwise the caller would wait forever
            self.finish(WorkerLostError(f"fleet: internal error in the client: {type(error).__name__}: {error}"))
            raise
        finally:
            await self._give_up()

    def hasten(self, now: float, straggler_seconds: float) -> bool:
        """If the request is slow (a straggler) and another worker is eligible, also request the missing samples from
        the other worker. Return whether the missing samples were requested. `now`: monotonic seconds.
        """
        pace = self._pool.dispatch.slowest_pace
        if self._state.is_over or not self._state.num_to_ask or len(self._attempts) != 1 or pace is None:
            return False
        (attempt,) = self._attempts.values()
        if now - attempt.since <= max(straggler_seconds, SLOWNESS * pace * attempt.placed.cost):
            return False
        avoided = {attempt.link.key} | self._avoided()
        found = self._pool.dispatch.place(self._beginnings, float(self._state.num_to_ask), avoided)
        if found is not None:
            self._ask(*found)
        return found is not None

    async def abort(self, index: int | None) -> int:
        """Abort sample `index`; None aborts all samples. Aborted samples keep the tokens that have arrived. Return the
        number of aborted samples.
        """
        ending, attempts = self._state.abort(index), list(self._attempts.values())
        self._put(self._state.settle())
        await asyncio.gather(*(attempt.abort(ending, self._state.n) for attempt in attempts))
        return len(ending)

    def finish(self, error: TruerollError) -> None:
        """End the request with an error, unless it has already ended."""
        self._put(self._state.fail(error))

    async def _ask_somebody(self) -> None:
        """Choose a worker, and send the next `Ask`. Raise TruerollError if no worker can be chosen."""
        self._put(self._state.settle())
        if self._state.is_over:
            return
        link, placed = await self._place()
        if self._state.is_over:  # the request was aborted meanwhile
            self._pool.dispatch.withdraw(placed)
        else:
            self._ask(link, placed)

    async def _place(self) -> tuple[Link, Placed]:
        """Choose a worker. If no worker is eligible, wait. Raise TruerollError if all workers refuse the request, or if
        the wait exceeds `patience`.
        """
        setbacks = self._state.setbacks
        if error := setbacks.final(self._looks()):
            raise error
        if self._patience_ends is None:
            self._patience_ends = time.monotonic() + self._patience
        cost = float(self._state.num_to_ask)
        try:
            return await self._pool.place(self._beginnings, cost, self._avoided, self._patience_ends, self._patience)
        except WorkerLostError as error:
            raise setbacks.first_refusal or error from None

    def _avoided(self) -> set[str]:
        """Return the keys of the workers that must not get the request now."""
        is_late = self._patience_ends is not None and time.monotonic() >= self._patience_ends
        return self._state.setbacks.avoided(self._looks(), is_late)

    def _looks(self) -> dict[str, int]:
        """Return a map from each eligible worker to the number of its health checks. The map is empty if no worker has
        refused the request.
        """
        return self._pool.dispatch.looks if self._state.setbacks.first_refusal else {}

    def _ask(self, link: Link, placed: Placed) -> None:
        attempt = _Attempt(self._state.ask(), link, placed)
        self._attempts[asyncio.create_task(self._exchange(attempt))] = attempt

    async def _exchange(self, attempt: _Attempt) -> None:
        """Send the messages of an `Ask`. Handle the replies, until all replies have arrived or no more replies are
        needed.
        """
        messages = {-1 if index is None else index: message for index, message in attempt.ask.messages.items()}
        sent = attempt.link.client.exchange(messages, None, "return", images=self._images)
        async with aclosing(sent) as replies:
            async for position, reply in replies:
                await self._take(attempt, None if position < 0 else position, reply)
                if not self._state.wants(attempt.ask):
                    return

    async def _take(self, attempt: _Attempt, index: int | None, reply: Reply) -> None:
        """Handle a reply. `index`: index of a sample that was requested separately; None for the whole request."""
        ask, link = attempt.ask, attempt.link
        if isinstance(reply, TruerollError):
            if link.is_gone:
                reply = WorkerLostError(str(reply))
            await self._pool.note_error(link, reply)
        elif self._state.is_cut(index, reply) and not ask.is_lost:
            await self._pool.look(link)
            ask.is_lost = link.is_ending
        replies = self._state.take(ask, index, reply)
        attempt.is_last = self._state.is_over and bool(replies) and not isinstance(replies[-1], TruerollError)
        self._put(replies)

    def _put(self, replies: Sequence[Reply]) -> None:
        """Deliver replies, and cancel the task of each `Ask` that is no longer needed."""
        for reply in replies:
            self._deliver(_with_max_tokens(reply, self._pool) if isinstance(reply, protocol.Done) else reply)
        for task, attempt in self._attempts.items():
            if task is not asyncio.current_task() and not self._state.wants(attempt.ask):
                task.cancel()

    def _end_attempt(self, task: asyncio.Task[None]) -> None:
        """Handle the end of an attempt's task. If the task raised an exception, raise the exception."""
        attempt = self._attempts.pop(task)
        attempt.release(self._pool.dispatch)
        if not task.cancelled():
            task.result()
        link, refusal = attempt.link, attempt.ask.refusal
        self._state.end_ask(attempt.ask, link.key, link.num_looks)
        if refusal is None:
            self._patience_ends = None
        elif not isinstance(refusal, UnavailableError):
            link.has_refused = True

    async def _give_up(self) -> None:
        """Cancel all attempts. Cancelling an attempt aborts the request on the attempt's worker."""
        for task in self._attempts:
            task.cancel()
        await asyncio.gather(*self._attempts, return_exceptions=True)
        for attempt in self._attempts.values():
            attempt.release(self._pool.dispatch)
        self._attempts.clear()


def _with_max_tokens(done: protocol.Done, pool: WorkerPool) -> protocol.Done:
    """Return the terminal reply of a group. If `max_tokens` in the reply is None, replace None with the limit that the
    workers apply.
    """
    engines = [link.health.engine for link in pool.links if link.health and link.health.engine]
    if done.params.max_tokens is not None or not engines:
        return done
    params = done.params.with_max_tokens(done.num_prompt_tokens, engines[0]["max_model_len"])
    return done.model_copy(update=dict(params=params))
