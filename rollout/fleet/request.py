"""One request of a fleet's client, from the first worker that is asked to its end.

Owns: which workers are asked for it now, and what of it was delivered. Does not own the workers (`WorkerPool`).

Promises: each sample is delivered once, with the tokens that it would have from any of the workers, and the request has
one end, whatever becomes of the workers that were asked: what a lost one left is asked of another, sample by sample, or
all of it under the same id if nothing was delivered yet. A sample that a worker ended because it was told to exit goes
on elsewhere from what it has. All tokens of a request are of versions that differ by no more than is allowed: one that
would mix others is begun anew, or is an error if a part of it was shown already.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeAlias

import numpy as np

from trueroll.errors import (
    QueueFullError,
    StaleWeightsError,
    TruerollError,
    UnavailableError,
    UnreadError,
    WorkerFailedError,
    WorkerLostError,
)

from ...engine.request import FinishReason, SampleDelta, SampleOutput, SamplingParams, derive_seed, seed_before, seed_of
from .. import protocol
from ..client.continuation import continuation, joined
from ..client.requests import Request
from .placement import Placed, beginnings
from .worker_pool import Link, WorkerPool

Reply: TypeAlias = protocol.FromWorker | SampleDelta | TruerollError

MOST_LOSSES = 5
"""A request whose workers were lost more often is given up: it may be what ends them."""
SLOWNESS = 3.0
"""A request is far behind if it takes so many times as long for its size as the slowest of the last ones."""
_LOST = (WorkerLostError, WorkerFailedError, UnreadError)
_REFUSED = (QueueFullError, StaleWeightsError, UnavailableError)


@dataclass(eq=False)
class _Attempt:
    """What one worker was asked. `messages`: for the whole of a request by None, or for single samples by index;
    `prior`: what those had before. `since`: when (monotonic seconds). `is_last`: the request ended with its answer.
    """

    link: Link
    placed: Placed
    messages: dict[int | None, Request]
    prior: dict[int, SampleOutput]
    since: float = field(default_factory=time.monotonic)
    num_samples: int = 0
    is_last: bool = False
    is_lost: bool = False
    refusal: TruerollError | None = None


@dataclass(frozen=True)
class _Refusal:
    """Why a worker refused a request. `num_looks`: how often it had been looked at; the next look voids the refusal,
    even if it finds what the one before found: the worker may have filled up and emptied in between.
    """

    error: TruerollError
    num_looks: int


class FleetRequest:
    """`deliver` gets samples and pieces of them as they come, then one end: Done, Scores or an error. `may_repeat`: it
    may get a sample again, which then replaces the one before. `max_staleness`: by how many versions the weights of
    tokens may differ. `patience`: seconds to wait for a worker while there is none, while all refuse requests because
    of their state, or, if this request was lost with a worker, while all others are full.
    """

    def __init__(
        self,
        pool: WorkerPool,
        request: Request,
        deliver: Callable[[Reply], None],
        *,
        may_repeat: bool,
        max_staleness: int,
        patience: float,
    ) -> None:
        self.request = request
        self._pool = pool
        self._deliver = deliver
        self._may_repeat = may_repeat
        self._max_staleness = max_staleness
        self._patience = patience
        self._attempts: dict[asyncio.Task[None], _Attempt] = {}
        self._lead: _Attempt | None = None
        self._is_over = False
        self._losses = 0
        self._refusals: dict[str, _Refusal] = {}
        self._rejecting: set[str] = set()
        self._patience_ends: float | None = None
        """While no worker has taken it: until when it waits for one (monotonic seconds)."""
        self._to_end: set[int] = set()  # samples that the caller aborted
        self._begin()
        prompt = request.token_ids if isinstance(request, protocol.GetScores) else request.prompt_token_ids
        salt = request.cache_salt if isinstance(request, protocol.GetScores) else request.params.cache_salt
        self._beginnings = beginnings(protocol.bytes_to_tokens(prompt), salt)

    def _begin(self) -> None:
        self._delivered: dict[int, FinishReason] = {}
        # By sample, whose tokens were shown, up to which one; None: those of what is in `_parts`, or all.
        self._shown: dict[int, tuple[_Attempt | None, int]] = {}
        self._parts: dict[int, SampleOutput] = {}
        self._versions: tuple[int, int] | None = None

    @property
    def n(self) -> int:
        return self.request.params.n if isinstance(self.request, protocol.Generate) else 1

    async def run(self) -> None:
        """Until its end was delivered."""
        try:
            while not self._is_over:
                if not self._attempts:
                    await self._ask_somebody()
                    continue
                done, _ = await asyncio.wait(self._attempts, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    self._end_attempt(task)
        except TruerollError as error:
            self.finish(error)
        finally:
            await self._give_up()

    def is_behind(self, now: float, straggler_seconds: float) -> bool:
        """Whether it takes so long that another worker may well be done sooner. `now`: monotonic seconds."""
        pace = self._pool.slowest_pace
        if self._is_over or len(self._attempts) != 1 or pace is None:
            return False
        (attempt,) = self._attempts.values()
        return now - attempt.since > max(straggler_seconds, SLOWNESS * pace * attempt.placed.cost)

    def ask_twice(self) -> bool:
        """Ask a second worker for what is missing, if there is one."""
        asked = {attempt.link.key for attempt in self._attempts.values()}
        found = self._pool.try_place(self._beginnings, self._cost(), asked | self._avoided())
        if found is not None:
            self._ask(*found)
        return found is not None

    async def abort(self, index: int | None) -> int:
        """End it, or one of its samples, with what is there; returns how many samples that ended."""
        ending = {i for i in range(self.n) if index in (None, i)} - self._delivered.keys() - self._to_end
        self._to_end |= ending
        attempts = list(self._attempts.values())
        if not attempts:
            self._finish_unasked(ending)
        await asyncio.gather(*(self._abort_at(attempt, ending) for attempt in attempts))
        return len(ending)

    def finish(self, end: Reply) -> None:
        """Deliver its end, if it has had none, and expect nothing more."""
        if not self._is_over:
            self._is_over = True
            self._deliver(end)
            for task, attempt in self._attempts.items():
                if task is not asyncio.current_task():
                    task.cancel()
                elif not isinstance(end, TruerollError):
                    attempt.is_last = True

    async def _abort_at(self, attempt: _Attempt, ending: set[int]) -> None:
        whole = attempt.messages.get(None)
        targets = [(message.id, None) for index, message in attempt.messages.items() if index in ending]
        if whole is not None:
            targets = [(whole.id, None)] if len(ending) == self.n else [(whole.id, index) for index in sorted(ending)]
        try:
            for id, index in targets:
                await attempt.link.client.abort(id, index, missing_ok=True)
        except TruerollError:
            pass  # it is lost; whoever is asked next gives the sample, or `_finish_unasked` does

    async def _ask_somebody(self) -> None:
        """Ask the worker that the placement chooses. Raise what keeps it from that."""
        self._finish_unasked(self._to_end - self._delivered.keys())
        if len(self._delivered) == self.n:
            self.finish(self._done())
        if self._is_over:
            return
        if self._losses > MOST_LOSSES:
            raise WorkerLostError(
                f"request {self.request.id!r}: lost with {self._losses} workers, one after the other; it may be what "
                "ends them: see their logs"
            )
        link, placed = await self._place()
        if self._is_over:  # it was aborted meanwhile
            self._pool.withdraw(placed)
        else:
            self._ask(link, placed)

    async def _place(self) -> tuple[Link, Placed]:
        """Choose a worker, after a wait if need be. Raise why there is none."""
        self._check_refusals()
        if self._patience_ends is None:
            self._patience_ends = time.monotonic() + self._patience
        try:
            return await self._pool.place(
                self._beginnings, self._cost(), self._avoided, self._patience_ends, self._patience
            )
        except WorkerLostError:
            if self._refusals:
                raise next(iter(self._refusals.values())).error from None
            raise

    def _check_refusals(self) -> None:
        """Raise why all workers refuse the request, if they do. One that was lost with a worker waits for room at
        another.
        """
        refusing = self._refusing()
        if not refusing or not {link.key for link in self._pool.open_links} <= refusing:
            return
        errors = [refusal.error for refusal in self._refusals.values()]
        if not (self._losses and any(isinstance(error, QueueFullError) for error in errors)):
            raise errors[0]

    def _avoided(self) -> set[str]:
        """The workers not to be asked now; once patience has ended, also those that rejected it in their state."""
        is_late = self._patience_ends is not None and time.monotonic() >= self._patience_ends
        return self._refusing() | (self._rejecting if is_late else set())

    def _refusing(self) -> set[str]:
        """The workers that refused it and were not looked at since."""
        valid = {key for key, refusal in self._refusals.items() if self._pool.looks_at(key) == refusal.num_looks}
        self._refusals = {key: refusal for key, refusal in self._refusals.items() if key in valid}
        return valid

    def _cost(self) -> float:
        return float(self.n - len(self._delivered))

    def _ask(self, link: Link, placed: Placed) -> None:
        attempt = _Attempt(link, placed, self._messages(), dict(self._parts))
        task = asyncio.create_task(self._exchange(attempt))
        self._attempts[task] = attempt
        if len(self._attempts) == 1:
            self._lead = attempt

    def _messages(self) -> dict[int | None, Request]:
        """What is to be asked for: all of it, as it is, if nothing of it is there yet."""
        caller = dict(caller=protocol.new_id())
        if not self._delivered and not self._parts:
            return {None: self.request.model_copy(update=caller)}
        missing = [index for index in range(self.n) if index not in self._delivered]
        return {index: self._message_for(index, caller) for index in missing}

    def _message_for(self, index: int, caller: dict[str, Any]) -> protocol.Generate:
        """One that asks for a single sample, or for the rest of it."""
        assert isinstance(self.request, protocol.Generate)
        request, update = self.request, dict(caller, id=protocol.new_id())
        if (part := self._parts.get(index)) is None:
            seed = seed_before(derive_seed(self._seed(), index))
            params = request.params.model_copy(update=dict(n=1, seed=seed))
            return request.model_copy(update=dict(update, params=params))
        prompt = protocol.bytes_to_tokens(request.prompt_token_ids)
        content = continuation(0, prompt, part, request.params)
        content["num_prior_tokens"] += request.num_prior_tokens
        return request.model_copy(update=update | content)

    def _seed(self) -> int:
        """Of the group, as a worker takes it."""
        assert isinstance(self.request, protocol.Generate)
        seed = self.request.params.seed
        return seed_of(self.request.id, self.request.prompt_token_ids) if seed is None else seed

    async def _exchange(self, attempt: _Attempt) -> None:
        """Take what a worker answers, until it has answered all or this request is over."""
        messages = {-1 if index is None else index: message for index, message in attempt.messages.items()}
        async with aclosing(attempt.link.client.exchange(messages, None, "return")) as replies:
            async for position, reply in replies:
                await self._take(attempt, None if position < 0 else position, reply)
                if self._is_over:
                    return

    async def _take(self, attempt: _Attempt, index: int | None, reply: Reply) -> None:
        """`index`: of the sample that was asked for alone; None: all were."""
        if isinstance(reply, TruerollError):
            await self._take_error(attempt, reply)
        elif isinstance(reply, SampleDelta):
            self._take_piece(attempt, index, reply)
        elif isinstance(reply, protocol.FinishedSample):
            await self._take_sample(attempt, index, reply)
        elif isinstance(reply, protocol.Scores):
            await self._take_scores(attempt, reply)
        elif isinstance(reply, protocol.Done) and len(self._delivered) == self.n:
            self.finish(reply if index is None else self._done())

    async def _take_error(self, attempt: _Attempt, error: TruerollError) -> None:
        if attempt.link.is_gone or isinstance(error, _LOST):
            attempt.is_lost = True
            if not isinstance(error, UnreadError):
                self._pool.mark_lost(attempt.link)
        elif isinstance(error, _REFUSED):
            attempt.refusal = error
            if isinstance(error, UnavailableError):
                await self._pool.look(attempt.link)  # one that ends is not asked again
                self._pool.mark_refusing(attempt.link)
        else:
            self.finish(error)

    def _take_piece(self, attempt: _Attempt, index: int | None, piece: SampleDelta) -> None:
        """Show a piece, unless another worker's are shown, or one before it was not."""
        own = piece.index if index is None else index
        if attempt is not self._lead or own in self._delivered:
            return
        start = piece.start + (len(attempt.prior[own].token_ids) if own in attempt.prior else 0)
        if start and self._shown.get(own) != (attempt if piece.start else None, start):
            return
        self._shown[own] = attempt, start + len(piece.token_ids)
        self._deliver(replace(piece, request_id=self.request.id, index=own, start=start))

    async def _take_sample(self, attempt: _Attempt, index: int | None, reply: protocol.FinishedSample) -> None:
        own = reply.index if index is None else index
        attempt.num_samples += 1
        if own in self._delivered:
            return
        if self._mixes(reply.weight_versions, attempt.prior.get(own)):
            self._begin_anew(attempt)
        if own in attempt.prior:
            reply = protocol.sample_message(reply.id, joined(attempt.prior[own], protocol.sample_output(reply)))
        reply = reply.model_copy(update=dict(id=self.request.id, index=own))
        is_cut = reply.finish_reason == "abort" and own not in self._to_end
        if is_cut and (attempt.is_lost or await self._is_leaving(attempt)):
            self._parts[own] = protocol.sample_output(reply)
            attempt.is_lost = True
            if attempt is self._lead:
                self._show_whole(attempt, reply)
        elif not self._is_over and own not in self._delivered:
            self._deliver_sample(attempt, reply)
            has_all = index is None and attempt.num_samples == self.n  # then its end comes next
            if len(self._delivered) == self.n and not has_all:
                self.finish(self._done())

    def _deliver_sample(self, attempt: _Attempt | None, sample: protocol.FinishedSample) -> None:
        self._show_whole(attempt, sample)
        self._delivered[sample.index] = sample.finish_reason
        self._parts.pop(sample.index, None)
        self._deliver(sample)

    def _show_whole(self, attempt: _Attempt | None, sample: protocol.FinishedSample) -> None:
        """All of a sample in one piece, where pieces are wanted and those that were shown are not its own."""
        assert isinstance(self.request, protocol.Generate)
        if not self.request.deltas:
            return
        count = len(sample.token_ids) // 4
        if self._shown.get(sample.index, (attempt, 0)) != (attempt, count):
            self._deliver(protocol.sample_delta(protocol.delta_of(sample)))
        self._shown[sample.index] = None, count

    async def _take_scores(self, attempt: _Attempt, reply: protocol.Scores) -> None:
        if self._mixes(reply.weight_versions):
            self._begin_anew(attempt)
        if reply.finish_reason == "abort" and not self._to_end and await self._is_leaving(attempt):
            attempt.is_lost = True
        else:
            self.finish(reply)

    async def _is_leaving(self, attempt: _Attempt) -> bool:
        """Whether a worker that ended a sample by itself is about to exit, so that nobody meant the sample to end."""
        await self._pool.look(attempt.link)
        link = attempt.link
        return (
            link.is_gone or link.is_silent or (link.health is not None and link.health.state in ("draining", "failed"))
        )

    def _mixes(self, spans: Sequence[tuple[int, int, int]], prior: SampleOutput | None = None) -> bool:
        """Whether these versions and those of what was delivered are too far apart."""
        versions = [version for version, _, _ in spans] + [*(self._versions or ())]
        versions += [span.version for span in prior.weight_versions] if prior else []
        if not versions:
            return False
        if max(versions) - min(versions) > self._max_staleness:
            return True
        self._versions = min(versions), max(versions)
        return False

    def _begin_anew(self, attempt: _Attempt) -> NoReturn:
        """Drop what is there, and ask again, unless a part of it was shown."""
        if not self._may_repeat and (self._delivered or self._shown):
            self.finish(
                StaleWeightsError(
                    f"request {self.request.id!r}: expected weights whose versions differ by at most max_staleness = "
                    f"{self._max_staleness}, found others in a part of it, after a push; allow more, or use "
                    "`generate`, which asks again"
                )
            )
            raise _Mixed
        self._begin()
        for task, other in self._attempts.items():
            if other is not attempt:
                task.cancel()
        raise _Mixed

    def _end_attempt(self, task: asyncio.Task[None]) -> None:
        """See how an attempt ended."""
        attempt = self._attempts.pop(task)
        error = None if task.cancelled() else task.exception()
        self._release(attempt)
        self._lead = next(iter(self._attempts.values()), None)
        if error is not None and not isinstance(error, _Mixed):
            raise error
        if attempt.is_lost:
            self._losses += 1
        if attempt.refusal is None:
            self._patience_ends = None
            self._refusals.clear()
            self._rejecting.clear()
        elif isinstance(attempt.refusal, UnavailableError):
            self._rejecting.add(attempt.link.key)
        else:
            attempt.link.has_refused = True
            self._refusals[attempt.link.key] = _Refusal(attempt.refusal, attempt.link.num_looks)

    def _release(self, attempt: _Attempt) -> None:
        """A worker has nothing of it any more. Whether it finished it is not seen by how its task ended: whoever waits
        may cancel that first.
        """
        if attempt.is_last:
            self._pool.finish(attempt.placed, time.monotonic() - attempt.since)
        else:
            self._pool.withdraw(attempt.placed)

    def _finish_unasked(self, indices: set[int]) -> None:
        """End samples that were aborted while no worker had them."""
        if not indices:
            return
        if not isinstance(self.request, protocol.Generate):
            self.finish(protocol.Scores(id=self.request.id, logprobs=b"", finish_reason="abort", weight_versions=()))
            return
        for index in sorted(indices):
            part = self._parts.get(index) or _empty(index, self.request.params, derive_seed(self._seed(), index))
            self._deliver_sample(None, protocol.sample_message(self.request.id, part))
        if len(self._delivered) == self.n:
            self.finish(self._done())

    def _done(self) -> protocol.Done:
        """The end of a group whose samples came from several attempts."""
        request = self.request
        assert isinstance(request, protocol.Generate)
        params = request.params.model_copy(update=dict(seed=self._seed()))
        length = len(request.prompt_token_ids) // 4
        engines = [link.health.engine for link in self._pool.links if link.health and link.health.engine]
        if params.max_tokens is None and engines:
            params = params.with_max_tokens(length, engines[0]["max_model_len"])
        reasons = dict(Counter(self._delivered.values()))
        return protocol.Done(id=request.id, params=params, num_prompt_tokens=length, finish_reasons=reasons)

    async def _give_up(self) -> None:
        """Whoever is still asked is told that nobody waits."""
        self._is_over = True
        for task in self._attempts:
            task.cancel()
        await asyncio.gather(*self._attempts, return_exceptions=True)
        for attempt in self._attempts.values():
            self._release(attempt)
        self._attempts.clear()


class _Mixed(Exception):
    """Ends an attempt whose samples are of weights that are too far apart."""


def _empty(index: int, params: SamplingParams, seed: int) -> SampleOutput:
    """A sample that ended before it had a token."""
    nothing, k = np.zeros(0, np.float32), params.top_logprobs
    tops: dict[str, Any] = {}
    if k is not None:
        tops = dict(
            entropy=nothing, top_token_ids=np.zeros((0, k), np.int32), top_logprobs=np.zeros((0, k), np.float32)
        )
    return SampleOutput("", index, [], None if params.logprobs is None else nothing, "abort", seed, 0, (), **tops)
