"""The paths below `/sessions`: begin a session, call it, read its samples, and delete it.

Owns: the handling of an agent's request, from its body to the answer. Promises: a retry gets the recorded answer, with
the same tokens. If a client disconnects while the model generates the answer, the call adds nothing to the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from trueroll.errors import brief

from ....engine.request import SampleDelta, SampleOutput, SamplingParams, as_fields, columns_of
from ...parsing.parser import AnswerParser
from ...sessions.answers import call_id, prompt_end
from ...sessions.export import SessionSample, to_safetensors
from ...sessions.messages import is_small
from ...sessions.session import Asked, AsyncSession
from ...sessions.templates import check_template_arguments
from ..answers import Rows
from ..chat import last_user_message
from ..clients import Clients, client_of
from ..errors import HttpError, given_twice
from ..fields import Fields, checked, given, take_sampling
from ..model import ServedModel
from ..parsed import ChoiceParser
from ..pieces import Asker, Form, Task
from ..samples import SampleLog
from ..turns import Turns
from ..wire import Handler, LongJson, answer, event_stream, long_answer, read_json, while_present
from .call import AgentCall, Context
from .registry import OpenSession, Registry

T = TypeVar("T")
Reader: TypeAlias = Callable[[dict[str, Any]], AgentCall]
RETRIES_HEADER = "x-stainless-retry-count"
"""The header in which the packages `openai` and `anthropic` send the number of earlier attempts of a request."""
MOST_EXPORTS = 2
"""Maximum number of exports in memory at a time."""
EXPORT_SECONDS = 300.0
"""Maximum time, in seconds, for sending an export. Without this limit, clients that read slowly could block all other
exports.
"""


class BeginFields(Fields):
    """Fields of `POST /sessions`.

    `seed`: seed of the session. `sampling_params`: sampling parameters of all calls, in the form of the fields of
    `/v1/chat/completions`. `chat_template_kwargs`: arguments of the chat template for all calls. `model`: the served
    model, or one of its adapters, for all calls. `sampling_params`, `chat_template_kwargs` and `model` override the
    same fields of an agent's requests.
    """

    model: str | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    sampling_params: dict[str, Any] = {}
    chat_template_kwargs: dict[str, Any] = {}


class RewardFields(Fields):
    """Fields of a reward. `node`: id of the answer that gets the reward; None means the last answer of every sample."""

    reward: float
    node: Annotated[str, Field(max_length=256)] | None = None


class ExportFields(Fields):
    """Query parameters of an export."""

    format: Literal["json", "safetensors", "nemo_gym", "record"] = "json"


@dataclass(frozen=True)
class FromSession:
    """Gets the sample of a task from a call of a session. The last delta of a stream has the whole sample, and the
    `Asker` sends only the tokens of this delta that the `Asker` has not sent yet. The last delta is the only delta if
    the answer was recorded earlier, or if a request without `stream` began the call.
    """

    asked: Asked

    async def samples(self) -> list[list[SampleOutput]]:
        return [[(await self.asked.answer()).sample]]

    async def stream(self) -> AsyncGenerator[tuple[int, SampleDelta | SampleOutput], None]:
        async with aclosing(self.asked.deltas()) as deltas:
            async for delta in deltas:
                yield 0, delta
        sample = (await self.asked.answer()).sample
        yield 0, SampleDelta(sample.request_id, sample.index, 0, sample.token_ids, **as_fields(columns_of(sample)))
        yield 0, sample


class Exports:
    """Sends the samples of sessions. At any time, at most `MOST_EXPORTS` exports are in memory, and no two of these
    exports belong to the same session. An export stays in memory for at most `EXPORT_SECONDS`, even if its client reads
    slowly.
    """

    def __init__(self, registry: Registry, turns: Turns) -> None:
        self._registry, self._turns = registry, turns
        self._places = asyncio.Semaphore(MOST_EXPORTS)

    async def send(self, opened: OpenSession, format: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the samples of a session. Raise Gone if the client disconnects before the samples are sent. If the
        client does not read the samples in time, return without completing the response, so that the connection is cut.
        """
        with self._registry.request(opened):
            async with AsyncExitStack() as stack:
                response = await while_present(receive, self._in_turn(stack, opened, format))
                with suppress(TimeoutError):
                    async with asyncio.timeout(EXPORT_SECONDS):
                        await response(scope, receive, send)

    async def _in_turn(self, stack: AsyncExitStack, opened: OpenSession, format: str) -> Response:
        """Wait until another export may be in memory, and return the response with the samples of a session. The export
        counts as in memory until `stack` is closed.
        """
        for place in (opened.export, self._places):
            await stack.enter_async_context(place)
        session = opened.session
        if format == "nemo_gym":
            return await long_answer({"entries": Rows(await _on_thread(session.token_entries), None)}, self._turns)
        if format == "record":
            return Response(await _on_thread(session.record), media_type="application/jsonl")
        samples = await _on_thread(session.samples)
        if format == "safetensors":
            return Response(await _on_thread(partial(to_safetensors, samples)), media_type="application/octet-stream")
        return await long_answer({"samples": Rows(map(SessionSample.told, samples), None)}, self._turns)


class _Export(Response):
    """A response that reads the samples of a session only when it is sent, so that few exports are in memory."""

    def __init__(self, send: ASGIApp) -> None:
        self._send = send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._send(scope, receive, send)


async def _on_thread(work: Callable[[], T]) -> T:
    """Run `work` on a thread. If this call is cancelled, wait until `work` has ended, because the memory of `work` is
    in use until then.
    """
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


class SessionEndpoints:
    """Handlers of the paths below `/sessions`."""

    def __init__(
        self,
        served: ServedModel,
        samples: SampleLog,
        clients: Clients,
        registry: Registry,
        bodies: LongJson,
        turns: Turns,
    ) -> None:
        self._served, self._samples, self._clients, self._registry = served, samples, clients, registry
        self._bodies, self._turns = bodies, turns
        self._reading = asyncio.Lock()
        self._exports = Exports(registry, turns)

    async def begin(self, request: Request) -> Response:
        """Begin a session, and return its capability."""
        own = checked(BeginFields, given(read_json(request)))
        sampling = given(own.sampling_params)
        params = await self._sampling(sampling)
        check_template_arguments(own.chat_template_kwargs)
        await self._served.named(own.model)
        session = AsyncSession(self._served.client, self._served.texts.model, seed=own.seed, sampling=params)
        opened = OpenSession(session, client_of(request.scope), sampling, own.chat_template_kwargs, own.model)
        capability = self._registry.begin(opened)
        return answer({"session_id": capability, "url": f"/sessions/{capability}/v1"} | _told(opened))

    async def state(self, request: Request) -> Response:
        opened = self._find(request)
        with self._registry.request(opened):
            return answer(_told(opened))

    async def end(self, request: Request) -> Response:
        """Delete a session, and end its running calls."""
        await self._registry.end(request.path_params["id"])
        return answer({"status": "deleted"})

    async def reward(self, request: Request) -> Response:
        """Attach a reward to an answer."""
        opened = self._find(request)
        own = checked(RewardFields, given(read_json(request)))
        with self._registry.request(opened):
            opened.session.reward(own.reward, own.node)
        return answer({"status": "attached"})

    async def samples(self, request: Request) -> Response:
        """Return the samples of a session."""
        queries = dict(request.query_params)
        if twice := next((name for name in queries if len(request.query_params.getlist(name)) > 1), None):
            raise given_twice(twice)
        own = checked(ExportFields, queries)
        return _Export(partial(self._exports.send, self._find(request), own.format))

    def counting(self, read: Reader) -> Handler:
        """Return a handler that counts the tokens of a request's prompt without generating an answer."""

        async def handle(request: Request) -> Response:
            opened = self._find(request)
            call = await self._read(request, read)
            with self._registry.request(opened):
                template = opened.template_of(call)
                counting = opened.session.count_tokens(call.messages, call.tools, chat_template_kwargs=template)
                return answer({"input_tokens": await while_present(request.receive, counting)})

        return handle

    def asking(self, read: Reader) -> Handler:
        """Return the handler for the requests of an API. `read`: converts a request's body to an `AgentCall`."""

        async def handle(request: Request) -> Response:
            opened, is_retry = self._find(request), _is_retry(request)
            call = await self._read(request, read)
            if call.is_stream:
                events = self._events(opened, call, is_retry)
                return await event_stream(request.receive, events, call.names_events)
            return await while_present(request.receive, self._whole(opened, call, is_retry))

        return handle

    async def _read(self, request: Request, read: Reader) -> AgentCall:
        """Read a request's body, and convert it to an `AgentCall`. Large bodies are converted one at a time, on a
        thread.
        """
        body = await self._bodies.read(request)
        if is_small(body):
            return self._call(read, body)
        async with self._reading:
            return await asyncio.to_thread(self._call, read, body)

    def _call(self, read: Reader, body: dict[str, Any]) -> AgentCall:
        """Convert a request's body to an `AgentCall`. Raise HttpError if the texts of the conversation are too long."""
        call = read(body)
        self._served.check_conversation((call.messages, call.tools, call.chat_template_kwargs))
        return call

    def _find(self, request: Request) -> OpenSession:
        return self._registry.find(request.path_params["id"])

    async def _whole(self, opened: OpenSession, call: AgentCall, is_retry: bool) -> Response:
        async with self._asked(opened, call, is_retry) as (asker, task, form):
            return await long_answer(await asker.whole(task, form), self._turns)

    async def _events(
        self, opened: OpenSession, call: AgentCall, is_retry: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        async with self._asked(opened, call, is_retry) as (asker, task, form):
            async with aclosing(asker.events(task, form)) as events:
                async for event in events:
                    yield event

    @asynccontextmanager
    async def _asked(
        self, opened: OpenSession, call: AgentCall, is_retry: bool
    ) -> AsyncGenerator[tuple[Asker, Task, Form], None]:
        """Context manager that begins a call, and provides the objects that generate and write the answer."""
        served = await self._model(opened, call)
        params = await self._sampling(call.sampling | opened.sampling)
        settings: dict[str, Any] = dict(self._clients.salted(opened.client, params)) | dict(
            top_logprobs=call.top_logprobs,
            is_retry=is_retry,
            deltas=call.is_stream,
            adapter=served.adapter,
            tool_choice=call.tool_choice,
            chat_template_kwargs=opened.template_of(call),
        )
        with self._registry.request(opened, adds=True):
            async with opened.session.asked(call.messages, call.tools, **settings) as asked:
                parser = asked.settings.parser(self._served.texts.model)
                form = call.form(self._context(asked, parser, served.name))
                task = replace(self._task(call, asked, parser), adapter=served.adapter)
                yield self._asker(opened, asked), task, form

    async def _model(self, opened: OpenSession, call: AgentCall) -> ServedModel:
        """Return the model that answers a call. If the session has a model, this model answers. Otherwise, if the call
        names a loaded adapter, this adapter answers. Otherwise, the served model answers, whatever model the call
        names. Raise HttpError if the session's adapter is not loaded.
        """
        if opened.model is not None:
            return await self._served.named(opened.model)
        if call.model is None or call.model == self._served.name or not await self._served.watch.serves(call.model):
            return self._served
        return self._served.adapted(call.model)

    async def _sampling(self, fields: dict[str, Any]) -> SamplingParams:
        """Return sampling parameters. Raise HttpError or InvalidRequestError for unsupported parameters."""
        fields = given(fields)
        params, seed = await take_sampling(fields, None, self._served.encode_words)
        if seed is not None:
            raise _not_in_a_session("seed", seed, "the session has a seed of its own")
        for name, value in fields.items():
            raise _not_in_a_session(name, value, "it is no sampling parameter")
        return params

    def _asker(self, opened: OpenSession, asked: Asked) -> Asker:
        served, user = self._served, opened.client.user
        return Asker(FromSession(asked), served.texts, served.eos_token_ids, self._samples, self._turns, user)

    def _task(self, call: AgentCall, asked: Asked, parser: AnswerParser | None) -> Task:
        prompts = [asked.prompt_token_ids]
        self._served.check_lengths(prompts, asked.params.max_tokens, "messages")
        if not call.is_stream:
            self._served.check_answer(prompts, asked.params, call.token_bytes)
        return Task(
            prompts=prompts,
            media=[()],
            params=asked.params,
            seed=asked.params.seed,
            is_stream=call.is_stream,
            message=last_user_message(call.messages),
            marks=parser.marks if parser else {},
            is_kept=not asked.is_recorded,
        )

    def _context(self, asked: Asked, parser: AnswerParser | None, model: str) -> Context:
        texts, prompt = self._served.texts, asked.prompt_token_ids
        assert asked.params.seed is not None, "a session has a seed"
        end = prompt_end(texts.model, prompt, parser) if parser else ""
        return Context(
            node=asked.node,
            created=self._served.now(),
            model=model,
            token_text=texts.token,
            prompt_token_ids=prompt,
            params=asked.params,
            new_parser=partial(ChoiceParser, parser, end, partial(call_id, asked.params.seed)),
            eos_token_ids=self._served.eos_token_ids,
        )


def _told(opened: OpenSession) -> dict[str, Any]:
    session = opened.session
    return dict(
        id=session.id,
        seed=session.seed,
        created=int(opened.created),
        num_messages=session.num_messages,
        num_bytes=session.num_bytes,
    )


def _not_in_a_session(name: str, value: Any, why: str) -> HttpError:
    text = f"{name}: not supported in a session, because {why}; remove it"
    return HttpError(400, text, field=name, value=brief(value), code="unsupported_parameter")


def _is_retry(request: Request) -> bool:
    """Return whether a request repeats an earlier request."""
    given = request.headers.get(RETRIES_HEADER, "0")
    if not (given.isascii() and given.isdecimal()):
        text = f"{RETRIES_HEADER}: must be a non-negative integer (got {brief(given)})"
        raise HttpError(400, text, code="invalid_request")
    return bool(given.strip("0"))
