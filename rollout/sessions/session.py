"""Sessions of agents for Python: chat with a model, and get the tokens of all conversations for the trainer.

Owns: the course of a call, from messages to a node. Each request to the worker has the session's own token ids as its
prompt, so the worker's prefix cache contains the earlier turns. Does not own: which node a call continues (`forest`),
the new tokens (`templates`), the parts of an answer (`answers`), and the form of samples (`export`).

Promises:

- Calls may run at the same time. Calls with different messages do not affect each other. Calls with the same messages
  draw twins, with different seeds. A call does not wait for another call, except for a retry.
- A retry is a call with `is_retry` and the same messages, tools and parameters as an earlier call. It returns the
  answer of the earlier call if there is one, and waits for the earlier call if it is still running. A call that runs
  for several callers ends when all of them are cancelled.
- A call that raises or is cancelled adds nothing to the session.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

from trueroll.errors import (
    IllegalStateError,
    InvalidRequestError,
    ModelError,
    RequestAbortedError,
    WorkerFailedError,
    brief,
)

from ...engine.request import SampleOutput, SamplingParams
from ..client.client import AsyncRolloutClient, RolloutClient
from ..protocol import new_id
from ..text import TextModel
from .answers import Parser, read_answer, told_message
from .export import SessionSample, add_opening, prompt_of, samples_of, token_entries, tokens_until
from .forest import Drawn, Forest, Node, without_earlier_routes
from .messages import Message, as_key, read_messages
from .templates import RESERVED, Templates, Turn

T = TypeVar("T")
MAX_NODES = 4096
MAX_BYTES = 2**28


@dataclass(frozen=True)
class Answer:
    """The answer to a call of `chat`.

    `message`: in OpenAI's form, to append to the messages of the next call. `node`: id of the answer in the session.
    `finish_reason`: `stop`, `tool_calls` or `length`. `prompt_token_ids`: the prompt that the worker got. `sample`: the
    sample that the worker returned; its `routed_experts` begin where those of the previous answer end.
    """

    message: dict[str, Any]
    node: str
    finish_reason: str
    prompt_token_ids: list[int]
    sample: SampleOutput


@dataclass(frozen=True)
class _Call:
    """The arguments of a call. `root`: the text of the template's arguments, in the order in which the template
    may write them. `body`: the digest of all arguments.
    """

    messages: list[Message]
    arguments: dict[str, Any]
    params: SamplingParams
    root: str
    body: bytes


class AsyncSession:
    """A session of an agent, for code with an event loop. All calls must be made on the loop of `client`.

    - `client`: an `AsyncRolloutClient` or an `AsyncFleetClient`
    - `texts`: the model's tokenizer and chat template, `TextModel(model)`. It may serve many sessions.
    - `seed`: seed of the session. The same calls in a session with the same seed draw the same samples. None: random.
    - `sampling`: the parameters of all calls, without `n` and `seed`. None: the defaults, without a limit of tokens.
    - `parser`: finds reasoning and tool calls in answers. None: the parser for the model's chat template.
    - `max_nodes`, `max_bytes`: bounds on the session's messages and its memory
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
        self._templates, self._forest = Templates(texts), Forest(self.seed, max_nodes, max_bytes)
        self._running: dict[bytes, asyncio.Task[Node]] = {}  # by body, the newest call of each
        self._num_callers: Counter[asyncio.Task[Node]] = Counter()
        self._is_closed = False

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        is_retry: bool = False,
        **params: Any,
    ) -> Answer:
        """Return the model's answer to a conversation.

        - `messages`: the whole conversation in OpenAI's form, with text only. The messages that the session knows keep
          their tokens. Any other history begins a new branch.
        - `tools`, `chat_template_kwargs`: arguments of the chat template
        - `is_retry`: return the recorded answer if there was an equal call
        - `params`: sampling parameters of this call, which replace those of the session

        Raise InvalidRequestError if the conversation is malformed, or if the chat template would rewrite tokens of the
        session. The error then names the first token. Raise UnavailableError if the session is full,
        RequestAbortedError if the request was aborted, and the errors of `AsyncRolloutClient.generate`.
        """
        if self._is_closed:
            raise IllegalStateError("session: closed; begin a new session")
        call = self._read(messages, tools, chat_template_kwargs or {}, params)
        if is_retry and (recorded := self._forest.recorded(call.body)):
            return _answer(recorded)
        task = self._running.get(call.body) if is_retry else None
        if task is None:
            task = self._running[call.body] = asyncio.ensure_future(self._draw(call))
        return _answer(await self._result(call.body, task))

    def samples(self) -> list[SessionSample]:
        """Return one sample for each leaf. Each drawn message is trained in the first sample that contains it."""
        return samples_of(self._forest)

    def token_entries(self) -> list[dict[str, Any]]:
        """Return NeMo-Gym's token entry for each answer."""
        return token_entries(self._forest, self.id)

    def reward(self, value: float, node: str | None = None) -> None:
        """Attach a reward to an answer, or to every leaf if `node` is None. A new reward replaces an earlier one."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            text = f"reward: must be a finite number (got {brief(value)})"
            raise InvalidRequestError(text, field="reward", value=value)
        nodes = self._forest.leaves() if node is None else [self._forest.node(node)]
        if any(each.drawn is None for each in nodes):
            text = f"node: {node!r} is a message that the agent gave; give the id of an answer"
            raise InvalidRequestError(text, field="node", value=node)
        for each in nodes:
            each.reward = float(value)

    async def close(self) -> None:
        """End the session: cancel running calls, and refuse new calls. Samples can still be read. Idempotent."""
        self._is_closed = True
        tasks = list(self._num_callers)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _read(self, messages: Any, tools: Any, kwargs: dict[str, Any], params: dict[str, Any]) -> _Call:
        if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
            text = f"tools: must be a list of objects (got {brief(tools)})"
            raise InvalidRequestError(text, field="tools")
        if found := RESERVED & kwargs.keys():
            text = f"chat_template_kwargs: {sorted(found)} cannot be set here; remove them"
            raise InvalidRequestError(text, field="chat_template_kwargs")
        read = read_messages(messages, [*tools, kwargs])
        arguments = deepcopy(kwargs | dict(tools=list(tools) or None))
        sampling = {name: getattr(self._sampling, name) for name in self._sampling.model_fields_set}
        sampling = SamplingParams(**(sampling | params))
        _check_sampling(sampling)
        root = json.dumps(arguments, ensure_ascii=False)
        whole = as_key([root, sampling.model_dump_json(), [message.exact for message in read]])
        body = hashlib.blake2b(whole.encode(errors="surrogatepass"), digest_size=16).digest()
        return _Call(read, arguments, sampling, root, body)

    async def _draw(self, call: _Call) -> Node:
        """Draw an answer, and add it to the forest."""
        base, depth = self._forest.find(call.root, call.messages)
        new = call.messages[depth:]
        if base.drawn is not None and not new:
            text = "messages: the conversation ends with an answer of this session; add a message"
            raise InvalidRequestError(text, field="messages")
        place = self._forest.place(base, new)
        ordinal = self._forest.reserve(place, len(new))
        try:
            drawn, answer = await self._ask(call, base, new, ordinal, self._forest.seed_at(place, ordinal))
            return self._forest.add(base, new, answer, drawn)
        finally:
            self._forest.release(place, ordinal)

    async def _ask(self, call: _Call, base: Node, new: list[Message], ordinal: int, seed: int) -> tuple[Drawn, Message]:
        """Ask the worker for an answer after the node `base` and new messages."""
        turns = [*(node.turn() for node in base.path), *map(Turn, new)]
        try:
            opening = await _in_thread(partial(self._templates.open, turns, call.arguments))
        except ModelError as error:
            raise InvalidRequestError(f"messages: {error}", field="messages") from None
        token_ids = tokens_until([node for node in base.path if node.drawn is not None])
        routes_start = max(0, len(token_ids) - opening.dropped - 1)
        add_opening(token_ids, opening)
        params = call.params.model_copy(update=dict(seed=seed))
        [group] = await self._client.generate([token_ids], params)
        sample = without_earlier_routes(group.samples[0], routes_start)
        _check_complete(sample)
        answer = read_answer(sample, self._texts, self._parser, token_ids, call.arguments.get("tools") or (), seed)
        return Drawn(opening, len(token_ids), sample, routes_start, call.body, ordinal), answer

    async def _result(self, body: bytes, task: asyncio.Task[Node]) -> Node:
        """Wait for a call. The last caller that is cancelled cancels the call."""
        self._num_callers[task] += 1
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._is_closed and task.cancelled():
                raise IllegalStateError("session: closed during the call; begin a new session") from None
            raise
        finally:
            self._num_callers[task] -= 1
            if not self._num_callers[task]:
                del self._num_callers[task]
                self._end(body, task)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _end(self, body: bytes, task: asyncio.Task[Node]) -> None:
        if self._running.get(body) is task:
            del self._running[body]


class Session:
    """The methods of `AsyncSession`, for code without an event loop. May be used from several threads.

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
        tools: Sequence[dict[str, Any]] = (),
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        is_retry: bool = False,
        **params: Any,
    ) -> Answer:
        """See `AsyncSession.chat`."""
        settings: dict[str, Any] = dict(chat_template_kwargs=chat_template_kwargs, is_retry=is_retry)
        return self._client.wait(self._session.chat(messages, tools, **settings, **params))

    def samples(self) -> list[SessionSample]:
        """See `AsyncSession.samples`."""
        return self._session.samples()

    def token_entries(self) -> list[dict[str, Any]]:
        """See `AsyncSession.token_entries`."""
        return self._session.token_entries()

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


def _answer(node: Node) -> Answer:
    assert node.drawn is not None
    sample = node.drawn.sample
    reason = "tool_calls" if node.message.calls and sample.finish_reason == "stop" else sample.finish_reason
    return Answer(told_message(node.message), node.id, reason, prompt_of(node), sample)


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


def _checked_seed(seed: Any) -> int:
    if type(seed) is not int or not 0 <= seed < 2**64:
        text = f"seed: must be an integer in [0, 2**64) (got {brief(seed)})"
        raise InvalidRequestError(text, field="seed", value=seed)
    return seed


async def _in_thread(work: Callable[..., T]) -> T:
    """Run blocking work on a thread. `work` gets the argument `is_abandoned`, which becomes true if this coroutine is
    cancelled.
    """
    abandoned = threading.Event()
    try:
        return await asyncio.to_thread(work, is_abandoned=abandoned.is_set)
    finally:
        abandoned.set()
