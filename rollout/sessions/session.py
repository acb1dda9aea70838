"""Sessions of agents for Python: chat with a model, and get the tokens of all conversations for the trainer.

Owns: the steps of a call, from the given messages to the node with the answer. Each request to the worker has the
session's own token ids as its prompt, so the worker's prefix cache contains the earlier turns. Does not own: which node
a call continues (`forest`), the new tokens (`templates`), the parts of an answer (`answers`), and the form of samples
(`export`).

Promises:

- Calls may run at the same time. Calls with different messages do not affect each other. Calls with the same messages
  draw several answers, with different seeds. A call waits for another call only if it is a retry of the other call, or
  if both calls are large, because large calls are read one at a time.
- A retry is a call with `is_retry` and the same messages, tools and parameters as an earlier call. If the earlier call
  is still running, the retry waits for its answer. If several equal calls are running, the retry waits for the call
  with the fewest callers. If the earlier call was cancelled but has not ended yet, the retry waits until the call has
  ended, and then draws the answer with the same seed. If several retries wait for the same cancelled call, one of them
  draws the answer for all. A retry that has no call to wait for returns the newest recorded answer. If no answer is
  recorded, the retry draws an answer itself.
- A call that runs for several callers is cancelled when all callers are cancelled. A call adds a node when its first
  caller gets the answer. If all callers are cancelled before one of them gets the answer, or if the call raises an
  error, the call adds nothing to the session.
- A caller may read the drawn tokens as they arrive. All callers of a call get the same tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import secrets
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import count
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np

from trueroll.errors import (
    IllegalStateError,
    InvalidRequestError,
    ModelError,
    RequestAbortedError,
    WorkerFailedError,
    brief,
)

from ...engine.request import SampleDelta, SampleOutput, SamplingParams
from ..client.client import AsyncRolloutClient, RolloutClient
from ..parsing.forced import forced_tools, forcing
from ..protocol import new_id
from ..text import TextModel, is_long
from ..tracing import CallSpan, session_call
from .answers import Parser, ParserSettings, read_answer, told_message
from .export import SessionSample, add_opening, as_record, prompt_of, samples_of, token_entries, tokens_until
from .forest import Drawn, Forest, Node, drawn_of, id_at, place_of, seed_at
from .messages import NODE_FIELD, Message, as_key, is_small, read_messages
from .record import write_record
from .templates import Opening, Templates, Turn, check_template_arguments

T = TypeVar("T")
Ready: TypeAlias = tuple[Node, list[Message], Message, Drawn]
"""A drawn answer that is not yet in the forest: the arguments of `Forest.add`."""
MAX_NODES = 4096
MAX_BYTES = 2**28
_MANY_TOKENS = 2**12
"""Maximum number of tokens of an answer that is read on the event loop."""
DELTA_SECONDS = 0.25
"""Minimum time, in seconds, between two messages with new tokens from the worker, while the worker has many streams.
Each message costs processor time, because over HTTP the message becomes events.
"""


@dataclass(frozen=True)
class Answer:
    """The answer to a call of `chat`.

    `message`: the answer in OpenAI's form, which the agent appends to the messages of its next call. The message has a
    field `session_node`, which distinguishes equal answers; the agent may drop this field. `node`: id of the answer in
    the session. `finish_reason`: `stop`, `tool_calls` or `length`. `num_continued`: the number of messages in the call
    up to and including the last message that is an answer of the session; 0 if the call begins a conversation.
    `prompt_token_ids`: the prompt that the worker got. `sample`: the sample that the worker returned, with read-only
    arrays. The rows of its `routed_experts` continue the rows of the previous answer.
    """

    message: dict[str, Any]
    node: str
    finish_reason: str
    num_continued: int
    prompt_token_ids: list[int]
    sample: SampleOutput


@dataclass(frozen=True)
class _Call:
    """The arguments of a call.

    `params`: the sampling parameters, with the grammar of a required tool call. `root`: the template's arguments as a
    JSON text. The text keeps the order of the arguments, because a template may render the arguments in this order.
    `digest`: a digest of all arguments; equal calls have equal digests. `settings`: the settings of the parser for the
    answer. `adapter`: the named adapter that draws the answer, or None.
    """

    messages: list[Message]
    arguments: dict[str, Any]
    params: SamplingParams
    root: str
    digest: bytes
    settings: ParserSettings
    adapter: str | None

    def seeded(self, seed: int) -> SamplingParams:
        """Return the sampling parameters with a seed."""
        return self.params.model_copy(update=dict(seed=seed))


@dataclass(eq=False)
class _Run:
    """A call from its beginning until its callers have the answer.

    `wants_deltas`: whether to request tokens from the worker as they are drawn. `num_callers`: the number of callers
    that wait for the answer. `reserved`: the reserved place and ordinal in the forest. `asked`: the object that callers
    get; None until the prompt is known. `deltas`: the drawn tokens so far. `node`: the node of the answer; None until a
    caller has got the answer.
    """

    call: _Call
    wants_deltas: bool
    num_callers: int = 0
    reserved: tuple[bytes, int] | None = None
    asked: Asked | None = None
    deltas: list[SampleDelta] = field(default_factory=list)
    node: Node | None = None
    task: asyncio.Task[Ready] = field(init=False)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        """Wake all callers that wait in `until`."""
        self._news.set()
        self._news = asyncio.Event()

    async def delta(self, position: int) -> SampleDelta | None:
        """Wait for the delta at `position`, and return it; None if the call has ended without this delta. Let the event
        loop run other work even if the delta has already arrived, because a retry may find thousands of deltas.
        """
        await asyncio.sleep(0)
        await self.until(lambda: len(self.deltas) > position)
        return self.deltas[position] if position < len(self.deltas) else None

    async def until(self, is_ready: Callable[[], bool]) -> None:
        """Wait until `is_ready` returns true, or until the call has ended."""
        while not (is_ready() or self.task.done()):
            await self._news.wait()


@dataclass(frozen=True)
class Asked:
    """A call that `AsyncSession.asked` has begun, or the earlier call that answers a retry.

    `node`: the id that the answer has in the session. `prompt_token_ids`: the prompt that the worker gets. `params`:
    the sampling parameters, including the seed. `settings`: the settings of the parser for the answer.
    """

    node: str
    prompt_token_ids: list[int]
    params: SamplingParams
    settings: ParserSettings
    _run: _Run | None
    _answer: Callable[[], Awaitable[Answer]]

    @property
    def is_recorded(self) -> bool:
        """Whether the answer was recorded by an earlier call."""
        return self._run is None

    async def deltas(self) -> AsyncGenerator[SampleDelta, None]:
        """Yield the drawn tokens as they arrive, as `AsyncRolloutClient.stream` does. Yield nothing if the answer was
        recorded earlier, or if the call was begun without `deltas`. If the call fails, `answer` raises the error.
        """
        for position in count():
            if self._run is None or (delta := await self._run.delta(position)) is None:
                return
            yield delta

    async def answer(self) -> Answer:
        """Wait for the answer. Raises the errors of `AsyncSession.chat`."""
        return await self._answer()


class AsyncSession:
    """A session of an agent, for code with an event loop. All calls must be made on the event loop of `client`.

    - `client`: an `AsyncRolloutClient` or an `AsyncFleetClient`. If the client has a tracer, each call of the session
      also has a span.
    - `texts`: the model's tokenizer and chat template, `TextModel(model)`. Many sessions may share a `TextModel`.
    - `seed`: seed of the session; None for a random seed. The same calls in a session with the same seed draw the same
      samples, unless the chat template writes the time.
    - `sampling`: the sampling parameters of all calls, without `n` and `seed`; None for the default parameters, without
      a limit on tokens
    - `parser`: finds reasoning and tool calls in answers; None for the parser that fits the model's chat template
    - `max_nodes`, `max_bytes`: `max_nodes` bounds the number of messages. `max_bytes` bounds the memory of the session,
      and separately the memory of its samples
    """

    def __init__(
        self,
        client: AsyncRolloutClient,
        texts: TextModel,
        *,
        seed: int | None = None,
        sampling: SamplingParams | None = None,
        parser: Parser | None = None,
        max_nodes: int = MAX_NODES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.id = new_id()
        self.seed = secrets.randbits(64) if seed is None else _checked_seed(seed)
        self._client, self._texts = client, texts
        self._sampling = SamplingParams(max_tokens=None) if sampling is None else sampling
        _check_sampling(self._sampling)
        self._parser = parser
        bounds = _checked_bound("max_nodes", max_nodes), _checked_bound("max_bytes", max_bytes)
        self._templates, self._forest = Templates(texts), Forest(self.seed, *bounds)
        self._running: dict[bytes, list[_Run]] = {}  # running calls by digest
        self._large = asyncio.Lock()  # held while a large call is read, so equal calls keep their order
        self._is_closed = False

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        tool_choice: str | dict[str, Any] = "auto",
        chat_template_kwargs: dict[str, Any] | None = None,
        is_retry: bool = False,
        adapter: str | None = None,
        **params: Any,
    ) -> Answer:
        """Return the model's answer to a conversation.

        - `messages`: the whole conversation in OpenAI's form, with text only. Messages that the session already has
          keep their tokens. If the history differs from all conversations of the session, a new branch begins.
        - `tools`, `chat_template_kwargs`: arguments of the chat template
        - `tool_choice`: `none` for an answer without tool calls; `required`, or `{"type": "function", "function":
          {"name": NAME}}`, for an answer that a grammar forces to be exactly one call. The prompt contains the tools
          for every `tool_choice`.
        - `is_retry`: if an equal call was made earlier, return the answer of the earlier call
        - `adapter`: the named adapter that draws the answer, as in `AsyncRolloutClient.generate`; None: the base
          weights
        - `params`: sampling parameters of this call, which override the session's parameters

        Raise InvalidRequestError if the conversation is malformed, or if the chat template would rewrite tokens of the
        session. If the template would rewrite tokens, the error names the first such token. Raise IllegalStateError if
        the session is full or closed, RequestAbortedError if the request was aborted, and the errors of
        `AsyncRolloutClient.generate`.
        """
        settings: dict[str, Any] = dict(tool_choice=tool_choice, chat_template_kwargs=chat_template_kwargs)
        settings |= dict(is_retry=is_retry, adapter=adapter)
        async with self.asked(messages, tools, **settings, **params) as asked:
            return await asked.answer()

    @asynccontextmanager
    async def asked(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        tool_choice: str | dict[str, Any] = "auto",
        chat_template_kwargs: dict[str, Any] | None = None,
        is_retry: bool = False,
        deltas: bool = False,
        adapter: str | None = None,
        **params: Any,
    ) -> AsyncGenerator[Asked, None]:
        """Context manager that makes the same call as `chat` with the same arguments. Entering the context begins the
        call, and waits until its prompt is known. Leaving the context before `Asked.answer` has returned cancels the
        call.

        `deltas`: whether `Asked.deltas` yields tokens as they are drawn
        """
        with session_call(self._client.tracer, self._texts.name, self.id) as span:
            call = await self._call(messages, tools or (), tool_choice, chat_template_kwargs or {}, params, adapter)
            found = await self._earlier(call.digest) if is_retry else None
            self._check_open()
            if isinstance(found, Node):
                _note(span, found)
                seeded = call.seeded(self._forest.seed_of(found))
                yield Asked(found.id, prompt_of(found), seeded, call.settings, None, partial(_answered, found))
                return
            with span.as_parent():
                run = found or self._begin(call, deltas)
            async with self._calling(run) as asked:
                yield asked
                if run.node is not None:
                    _note(span, run.node)

    @asynccontextmanager
    async def _calling(self, run: _Run) -> AsyncGenerator[Asked, None]:
        """Context manager that counts as a caller of `run`, and provides the `Asked` of `run`."""
        run.num_callers += 1
        try:
            await run.until(lambda: run.asked is not None)
            if run.asked is None:
                await self._result(run)  # raises the error of the call
                raise AssertionError("a call without a prompt fails")
            yield run.asked
        finally:
            run.num_callers -= 1
            await self._leave(run)

    async def count_tokens(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> int:
        """Return the number of prompt tokens that a call of `chat` with the same arguments would have now."""
        call = await self._call(messages, tools or (), "auto", chat_template_kwargs or {}, {})
        self._check_open()
        base, depth = self._forest.find(call.root, call.messages)
        return len((await self._prompt(call, base, call.messages[depth:]))[0])

    def samples(self) -> list[SessionSample]:
        """Return one sample for each leaf. The mask of a sample includes a drawn token only if the mask of no earlier
        sample includes the token.
        """
        return samples_of(self._forest)

    def token_entries(self) -> list[dict[str, Any]]:
        """Return, for each answer, the record that NeMo-Gym stores for a call of a model: ids, tokens and log-probs.
        `export.token_entries` lists the fields.
        """
        return token_entries(self._forest, self.id)

    def record(self) -> bytes:
        """Return a file with all requests and answers, as JSON lines, for the command `trueroll replay`. The file has
        the tokens, seeds and weight versions of the answers, and the exact bits of the log-probs and the other recorded
        values, but not the texts of messages.

        Raise IllegalStateError if the file would exceed a bound on records.
        """
        return write_record(self._forest, self._texts.name, self.seed)

    def reward(self, value: float, node: str | None = None) -> None:
        """Attach a reward to an answer, or to every leaf if `node` is None. A new reward replaces an earlier reward."""
        reward = _checked_reward(value)
        nodes = self._forest.leaves() if node is None else [self._forest.node(node)]
        if any(each.drawn is None for each in nodes):
            text = f"node: {node!r} is a message that the agent gave; give the id of an answer"
            raise InvalidRequestError(text, field="node", value=node)
        for each in nodes:
            each.reward = reward

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the session in bytes."""
        return self._forest.num_bytes

    @property
    def num_messages(self) -> int:
        """The number of messages of the session."""
        return len(self._forest)

    async def close(self) -> None:
        """End the session: cancel running calls, and refuse new calls. The samples of a closed session can still be
        read. Idempotent.
        """
        self._is_closed = True
        tasks = [run.task for runs in self._running.values() for run in runs]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _check_open(self, what: str = "closed; begin a new session") -> None:
        if self._is_closed:
            raise IllegalStateError(f"session: {what}")

    async def _call(
        self,
        messages: Any,
        tools: Any,
        tool_choice: Any,
        kwargs: Any,
        params: dict[str, Any],
        adapter: str | None = None,
    ) -> _Call:
        """Read the arguments of a call. Raise InvalidRequestError for malformed arguments."""
        read = partial(self._read, messages, tools, tool_choice, kwargs, params, adapter)
        if is_small([messages, tools, kwargs]):
            return read()
        async with self._large:
            return await asyncio.to_thread(read)

    def _read(
        self,
        messages: Any,
        tools: Any,
        tool_choice: Any,
        kwargs: Any,
        params: dict[str, Any],
        adapter: str | None = None,
    ) -> _Call:
        if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
            text = f"tools: must be a list of objects (got {brief(tools)})"
            raise InvalidRequestError(text, field="tools")
        check_template_arguments(kwargs)
        read = read_messages(messages, [*tools, kwargs])
        arguments = deepcopy(kwargs | dict(tools=list(tools) or None))
        sampling = SamplingParams(**(dict(self._sampling) | params))
        _check_sampling(sampling)
        forced = forced_tools(tool_choice, tools)
        if forced:
            sampling = forcing(sampling, forced)
        settings = ParserSettings(() if tool_choice == "none" else tuple(arguments["tools"] or ()), bool(forced))
        root = json.dumps(arguments, ensure_ascii=False)
        whole = as_key([root, tool_choice, sampling.model_dump_json(), adapter, [message.fields for message in read]])
        digest = hashlib.blake2b(whole.encode(), digest_size=16).digest()
        return _Call(read, arguments, sampling, root, digest, settings, adapter)

    async def _earlier(self, digest: bytes) -> _Run | Node | None:
        """Return the running call or the recorded node that answers a retry. Return None if the retry must draw an
        answer itself.
        """
        runs = [*self._running.get(digest, ())]
        if ending := [run.task for run in runs if not run.num_callers]:
            await asyncio.wait(ending)
            begun = (run for run in self._running.get(digest, ()) if run not in runs)  # another retry has begun it
            return next(begun, None)
        return min(runs, key=lambda run: run.num_callers) if runs else self._forest.recorded(digest)

    def _begin(self, call: _Call, wants_deltas: bool) -> _Run:
        run = _Run(call, wants_deltas)
        run.task = asyncio.ensure_future(self._draw(run))
        run.task.add_done_callback(lambda _: self._ended(run))
        self._running.setdefault(call.digest, []).append(run)
        return run

    async def _draw(self, run: _Run) -> Ready:
        """Draw an answer."""
        call = run.call
        base, depth = self._forest.find(call.root, call.messages)
        new = call.messages[depth:]
        place = place_of(base, new)
        run.reserved = place, ordinal = place, self._forest.reserve(place, len(new))
        prompt, opening = await self._prompt(call, base, new)
        call.settings.check(self._texts, prompt)
        node, seed = id_at(place, ordinal), seed_at(place, ordinal)
        run.asked = Asked(node, prompt, call.seeded(seed), call.settings, run, partial(self._answer_of, run))
        run.wake()
        sample = await self._sample(run, run.asked)
        _check_complete(sample)
        drawn = Drawn(opening, len(prompt), sample, call.digest, ordinal, call.params, call.adapter)
        drawn = replace(drawn, sample=as_record(drawn.sample, drawn.routes_start))
        read = partial(read_answer, drawn.sample, self._texts, self._parser, call.settings, prompt, seed)
        is_short = len(drawn.sample.token_ids) <= _MANY_TOKENS
        return base, new, read() if is_short else await asyncio.to_thread(read), drawn

    async def _prompt(self, call: _Call, base: Node, new: list[Message]) -> tuple[list[int], Opening]:
        """Return the prompt for new messages after the node `base`, and the opening of the answer."""
        if base.drawn is not None and not new:
            text = "messages: the conversation ends with an answer of this session; add a message"
            raise InvalidRequestError(text, field="messages")
        turns = [*(node.turn() for node in base.path), *map(Turn, new)]
        try:
            is_large = is_long(sum(message.num_chars for message in call.messages))
            opening = await _in_thread(partial(self._templates.open, turns, call.arguments), is_large)
        except ModelError as error:
            raise InvalidRequestError(f"messages: {error}", field="messages") from None
        token_ids = tokens_until([node for node in base.path if node.drawn is not None])
        add_opening(token_ids, opening)
        return token_ids, opening

    async def _sample(self, run: _Run, asked: Asked) -> SampleOutput:
        """Ask the worker for a sample."""
        prompt, params, adapter = asked.prompt_token_ids, asked.params, run.call.adapter
        if not run.wants_deltas:
            [group] = await self._client.generate([prompt], params, adapter=adapter)
            return group.samples[0]
        wishes: dict[str, Any] = dict(deltas=True, delta_seconds=DELTA_SECONDS, adapter=adapter)
        async with aclosing(self._client.stream([prompt], params, **wishes)) as stream:
            async for _, got in stream:
                if isinstance(got, SampleOutput):
                    return got
                run.deltas.append(got)
                run.wake()
        raise AssertionError("a stream ends with the sample")

    async def _result(self, run: _Run) -> Node:
        """Wait for the answer of a call, and return its node. For the first caller, add the node to the forest."""
        await asyncio.wait([run.task])
        self._check_open("closed during the call; begin a new session")
        if run.node is None:
            run.node = self._forest.add(*run.task.result())
        return run.node

    async def _answer_of(self, run: _Run) -> Answer:
        return _answer(await self._result(run))

    async def _leave(self, run: _Run) -> None:
        """End a run if it has no callers left."""
        if run.num_callers:
            return
        if not run.task.done():
            run.task.cancel()
            await asyncio.wait([run.task])
        self._drop(run)

    def _ended(self, run: _Run) -> None:
        """Wake the callers of a run that has ended, and drop the run if none of them gets an answer."""
        run.wake()
        if run.task.cancelled() or run.task.exception() is not None or not run.num_callers:
            self._drop(run)

    def _drop(self, run: _Run) -> None:
        """Remove a run, and free its place in the forest unless its node was added. Idempotent."""
        runs = self._running.get(run.call.digest, [])
        if run in runs:
            runs.remove(run)
        if not runs:
            self._running.pop(run.call.digest, None)
        if run.reserved is not None:
            self._forest.release(*run.reserved)
            run.reserved = None


class Session:
    """Like `AsyncSession`, but for code without an event loop, and without the methods `asked` and `count_tokens`. May
    be used from several threads.

    `client`: a `RolloutClient` or a `FleetClient`. The other arguments: see `AsyncSession`.
    """

    def __init__(
        self,
        client: RolloutClient,
        texts: TextModel,
        *,
        seed: int | None = None,
        sampling: SamplingParams | None = None,
        parser: Parser | None = None,
        max_nodes: int = MAX_NODES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._client = client
        settings: dict[str, Any] = dict(seed=seed, sampling=sampling, parser=parser)
        self._session = AsyncSession(client.asynchronous, texts, max_nodes=max_nodes, max_bytes=max_bytes, **settings)

    @property
    def id(self) -> str:
        """The id of the session."""
        return self._session.id

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        tool_choice: str | dict[str, Any] = "auto",
        chat_template_kwargs: dict[str, Any] | None = None,
        is_retry: bool = False,
        adapter: str | None = None,
        **params: Any,
    ) -> Answer:
        """See `AsyncSession.chat`."""
        settings: dict[str, Any] = dict(tool_choice=tool_choice, chat_template_kwargs=chat_template_kwargs)
        settings |= dict(is_retry=is_retry, adapter=adapter)
        return self._client.wait(self._session.chat(messages, tools, **settings, **params))

    def samples(self) -> list[SessionSample]:
        """See `AsyncSession.samples`."""
        return self._session.samples()

    def token_entries(self) -> list[dict[str, Any]]:
        """See `AsyncSession.token_entries`."""
        return self._session.token_entries()

    def record(self) -> bytes:
        """See `AsyncSession.record`."""
        return self._session.record()

    def reward(self, value: float, node: str | None = None) -> None:
        """See `AsyncSession.reward`."""
        self._session.reward(value, node)

    def close(self) -> None:
        """See `AsyncSession.close`."""
        self._client.wait(self._session.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _answered(node: Node) -> Answer:
    return _answer(node)


def _note(span: CallSpan, node: Node) -> None:
    """Add the answer of a call to its span."""
    drawn = drawn_of(node)
    span.note_sample(drawn.prompt_len, drawn.sample, _finish_reason(node))


def _finish_reason(node: Node) -> str:
    """Return the finish reason of an answer: `stop`, `tool_calls` or `length`."""
    reason = drawn_of(node).sample.finish_reason
    return "tool_calls" if node.message.calls and reason == "stop" else reason


def _answer(node: Node) -> Answer:
    sample = drawn_of(node).sample
    message = told_message(node.message) | {NODE_FIELD: node.id}
    num_continued = max(
        (i for i, each in enumerate(node.path, 1) if each.drawn is not None and each is not node), default=0
    )
    told = replace(sample, token_ids=list(sample.token_ids))
    return Answer(message, node.id, _finish_reason(node), num_continued, prompt_of(node), told)


def _check_complete(sample: SampleOutput) -> None:
    if sample.finish_reason == "abort":
        raise RequestAbortedError("chat: the request was aborted, so the session has no answer; call chat again")
    if sample.finish_reason == "error":
        raise WorkerFailedError(f"chat: {sample.error}")


def _check_sampling(params: SamplingParams) -> None:
    if params.n != 1:
        text = f"n must be 1 in a session (got {params.n}); call chat several times with the same messages"
        raise InvalidRequestError(text, field="n", value=params.n, limit=1)
    if params.seed is not None:
        text = f"seed must be left out (got {params.seed}); give the seed of the session"
        raise InvalidRequestError(text, field="seed", value=params.seed)
    if params.logprobs is None:
        text = "logprobs must not be None in a session, because its samples have a log-prob for each drawn token"
        raise InvalidRequestError(text, field="logprobs")


def _checked_reward(value: Any) -> float:
    try:
        is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
        if is_number and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass
    text = f"reward: must be a finite number (got {brief(value)})"
    raise InvalidRequestError(text, field="reward", value=brief(value))


def _checked_bound(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        text = f"{name}: must be a positive integer (got {brief(value)})"
        raise InvalidRequestError(text, field=name, value=brief(value))
    return value


def _checked_seed(seed: Any) -> int:
    if type(seed) is not int or not 0 <= seed < 2**64:
        text = f"seed: must be an integer in [0, 2**64) (got {brief(seed)})"
        raise InvalidRequestError(text, field="seed", value=seed)
    return seed


async def _in_thread(work: Callable[..., T], is_large: bool) -> T:
    """Run blocking work on a thread. `work` gets the argument `is_abandoned`, which becomes true if this coroutine is
    cancelled. `is_large`: whether the work may take long. Large work has a separate thread, so that other work does not
    wait for it.
    """
    abandoned = threading.Event()
    try:
        work = partial(work, is_abandoned=abandoned.is_set)
        return await asyncio.get_running_loop().run_in_executor(_threads(is_large), work)
    finally:
        abandoned.set()


@lru_cache
def _threads(is_large: bool) -> ThreadPoolExecutor:
    """Return the threads of this process that render conversations. A tokenizer has one process for long texts and
    another process for short texts, so additional threads would only wait.
    """
    return ThreadPoolExecutor(1, "long-conversations") if is_large else ThreadPoolExecutor(2, "conversations")
