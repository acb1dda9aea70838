"""The paths below `/sessions`: begin a session, call it, read its samples, and delete it.

Owns: the course of an agent's request. Promises: an answer that a session recorded is told again to a retry, with the
same tokens. A call of a client that disconnects before its answer is complete adds nothing to the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trueroll.errors import brief

from ....engine.request import SampleDelta, SampleOutput, SamplingParams, as_fields, columns_of
from ...sessions.answers import call_id, prompt_end
from ...sessions.export import SessionSample, to_safetensors
from ...sessions.messages import is_small
from ...sessions.session import Asked, AsyncSession
from ..answers import Rows
from ..clients import Clients, client_of
from ..errors import HttpError
from ..fields import SAMPLING, EditFields, Fields, checked, given, take_sampling
from ..model import ServedModel
from ..pieces import Asker, Form, Task
from ..samples import SampleLog
from ..turns import Turns
from ..wire import LongJson, answer, event_stream, long_answer, read_json, while_present
from .call import AgentCall, Context
from .registry import OpenSession, OpenSessions

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
Reader: TypeAlias = Callable[[dict[str, Any]], AgentCall]
RETRIES_HEADER = "x-stainless-retry-count"
"""The header in which the packages `openai` and `anthropic` tell how often they have repeated a request."""
MOST_EXPORTS = 2
"""Maximum number of exports in memory at a time."""


class BeginFields(Fields):
    """Fields of `POST /sessions`.

    `seed`: seed of the session. `sampling_params`: sampling parameters of all calls, in the form of the fields of
    `/v1/chat/completions`. They replace those of an agent's requests. `chat_template_kwargs`: arguments of the chat
    template for all calls. `metadata`: ignored.
    """

    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    sampling_params: dict[str, Any] = {}
    chat_template_kwargs: dict[str, Any] = {}
    metadata: dict[str, Any] | None = None


class RewardFields(Fields):
    """Fields of a reward. `node`: id of the answer; None for the last answers of all samples."""

    reward: float
    node: Annotated[str, Field(max_length=256)] | None = None


class ExportFields(Fields):
    """Query of an export."""

    format: Literal["json", "safetensors", "nemo_gym"] = "json"


@dataclass(frozen=True)
class FromSession:
    """A call of a session as the source of samples. The last delta of a stream repeats the whole sample, for an answer
    that was recorded before.
    """

    asked: Asked

    async def samples(self, task: Task) -> list[list[SampleOutput]]:
        return [[(await self.asked.answer()).sample]]

    async def stream(self, task: Task) -> AsyncGenerator[tuple[int, SampleDelta | SampleOutput], None]:
        async with aclosing(self.asked.deltas()) as deltas:
            async for delta in deltas:
                yield 0, delta
        sample = (await self.asked.answer()).sample
        yield 0, SampleDelta(sample.request_id, sample.index, 0, sample.token_ids, **as_fields(columns_of(sample)))
        yield 0, sample


class SessionEndpoints:
    """Handlers of the paths below `/sessions`."""

    def __init__(
        self, served: ServedModel, samples: SampleLog, clients: Clients, opened: OpenSessions, max_body_elements: int
    ) -> None:
        self._served, self._samples, self._clients, self._opened = served, samples, clients, opened
        self._bodies = LongJson(max_body_elements)
        self._turns = Turns()
        self._reading = asyncio.Lock()
        self._exports = asyncio.Semaphore(MOST_EXPORTS)

    async def begin(self, request: Request) -> Response:
        """Begin a session, and return its capability."""
        own = checked(BeginFields, given(read_json(request)))
        await self._sampling(own.sampling_params)
        session = AsyncSession(self._served.client, self._served.texts.model, seed=own.seed)
        opened = OpenSession(session, client_of(request.scope), own.sampling_params, own.chat_template_kwargs)
        capability = self._opened.begin(opened)
        return answer({"session_id": capability, "url": f"/sessions/{capability}/v1"} | _told(opened))

    async def state(self, request: Request) -> Response:
        opened = self._find(request)
        with self._opened.request(opened):
            return answer(_told(opened))

    async def end(self, request: Request) -> Response:
        """Delete a session, and end its running calls."""
        await self._opened.end(request.path_params["id"])
        return answer({"status": "deleted"})

    async def reward(self, request: Request) -> Response:
        """Attach a reward to an answer."""
        opened = self._find(request)
        own = checked(RewardFields, given(read_json(request)))
        with self._opened.request(opened):
            opened.session.reward(own.reward, own.node)
        return answer({"status": "attached"})

    async def samples(self, request: Request) -> Response:
        """Return the samples of a session."""
        own = checked(ExportFields, dict(request.query_params))
        return _Export(self._find(request), own.format, self)

    def counting(self, read: Reader) -> Handler:
        """Return a handler that returns the number of tokens of the prompt that a request would have now."""

        async def handle(request: Request) -> Response:
            opened = self._find(request)
            call = await self._read(request, read)
            with self._opened.request(opened):
                kwargs = opened.template | call.chat_template_kwargs
                counting = opened.session.count_tokens(call.messages, call.tools, chat_template_kwargs=kwargs)
                return answer({"input_tokens": await while_present(request.receive, counting)})

        return handle

    def asking(self, read: Reader) -> Handler:
        """Return the handler of an API. `read`: reads a request's body."""

        async def handle(request: Request) -> Response:
            opened, is_retry = self._find(request), _is_retry(request)
            call = await self._read(request, read)
            if call.is_stream:
                events = self._events(opened, call, is_retry)
                return await event_stream(request.receive, events, call.names_events)
            return await while_present(request.receive, self._whole(opened, call, is_retry))

        return handle

    async def _read(self, request: Request, read: Reader) -> AgentCall:
        """Read a request's body. Large conversations are read one at a time on a thread."""
        body = await self._bodies.read(request)
        if is_small(body):
            return read(body)
        async with self._reading:
            return await asyncio.to_thread(read, body)

    def _find(self, request: Request) -> OpenSession:
        return self._opened.find(request.path_params["id"])

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
        """Context manager of a call: begin it, and provide what its answer needs."""
        params = await self._sampling(call.sampling | opened.sampling)
        params = self._clients.salted(opened.client, params.model_copy(update=dict(top_logprobs=call.top_logprobs)))
        values: dict[str, Any] = dict(max_tokens=None) | {
            name: getattr(params, name) for name in params.model_fields_set
        }
        values |= dict(is_retry=is_retry, deltas=call.is_stream, tool_choice=call.tool_choice)
        values |= dict(chat_template_kwargs=opened.template | call.chat_template_kwargs)
        with self._opened.request(opened, adds=True):
            async with opened.session.asked(call.messages, call.tools, **values) as asked:
                yield self._asker(opened, asked), self._task(call, asked), call.form(self._context(asked))

    async def _sampling(self, fields: dict[str, Any]) -> SamplingParams:
        """Return sampling parameters. Raise HttpError or InvalidRequestError if they are not supported."""
        fields = given(fields)
        known = {*SAMPLING, *EditFields.model_fields}
        if (unknown := next((name for name in fields if name not in known), None)) is not None:
            why = "the session has a seed of its own" if unknown == "seed" else "it is no sampling parameter"
            text = f"{unknown}: not supported in a session, because {why}; remove it"
            raise HttpError(400, text, field=unknown, value=brief(fields[unknown]), code="unsupported_parameter")
        return (await take_sampling(fields, None, self._served.encode_words))[0]

    def _asker(self, opened: OpenSession, asked: Asked) -> Asker:
        served, user = self._served, opened.client.user
        return Asker(FromSession(asked), served.texts, served.eos_token_ids, self._samples, self._turns, user)

    def _task(self, call: AgentCall, asked: Asked) -> Task:
        prompts, parser = [asked.prompt_token_ids], asked.reading.parser(self._served.texts.model)
        self._served.check_lengths(prompts, asked.params.max_tokens, "messages")
        if not call.is_stream:
            self._served.check_answer(prompts, asked.params, call.token_bytes)
        return Task(
            prompts=prompts,
            media=[()],
            params=asked.params,
            seed=None,
            is_stream=call.is_stream,
            tells_usage=call.tells_usage,
            marks=parser.marks if parser else {},
        )

    def _context(self, asked: Asked) -> Context:
        texts, prompt = self._served.texts, asked.prompt_token_ids
        parser = asked.reading.parser(texts.model)
        assert asked.params.seed is not None, "a session has a seed"
        return Context(
            id=asked.node,
            created=self._served.now(),
            model=self._served.name,
            token_text=texts.token,
            prompt_token_ids=prompt,
            call_id=partial(call_id, asked.params.seed),
            parser=parser,
            prompt_end=prompt_end(texts.model, prompt, parser) if parser else "",
            eos_token_ids=self._served.eos_token_ids,
        )

    async def exported(self, opened: OpenSession, format: str) -> Response:
        """Return the response with the samples of a session."""
        if format == "nemo_gym":
            return await long_answer({"entries": await asyncio.to_thread(opened.session.token_entries)}, self._turns)
        samples = await asyncio.to_thread(opened.session.samples)
        if format == "safetensors":
            return Response(await asyncio.to_thread(to_safetensors, samples), media_type="application/octet-stream")
        return await long_answer({"samples": Rows(map(SessionSample.told, samples), None)}, self._turns)

    @asynccontextmanager
    async def exporting(self, opened: OpenSession) -> AsyncGenerator[None, None]:
        """Context manager of an export: wait for a place in memory, and keep the session meanwhile."""
        with self._opened.request(opened):
            async with self._exports:
                yield


class _Export(Response):
    """A response with the samples of a session, which are made when it is sent."""

    def __init__(self, opened: OpenSession, format: str, endpoints: SessionEndpoints) -> None:
        self._opened, self._format, self._endpoints = opened, format, endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._endpoints.exporting(self._opened):
            response = await self._endpoints.exported(self._opened, self._format)
            await response(scope, receive, send)


def _told(opened: OpenSession) -> dict[str, Any]:
    session = opened.session
    return dict(
        id=session.id,
        seed=session.seed,
        created=int(opened.created),
        num_messages=session.num_messages,
        num_bytes=session.num_bytes,
    )


def _is_retry(request: Request) -> bool:
    """Return whether a request repeats an earlier one."""
    given = request.headers.get(RETRIES_HEADER, "0")
    if not (given.isascii() and given.isdecimal()):
        raise HttpError(400, f"{RETRIES_HEADER}: must be a number (got {brief(given)})", code="invalid_request")
    return int(given[:9]) > 0
