"""The ASGI application: the routing of paths to handlers, the endpoints about the model, and error responses."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Scope

from trueroll.errors import InvalidRequestError, TruerollError

from ...engine.request import TokenId
from .adapters import Adapters
from .agents.chat import read_chat_call
from .agents.endpoints import SessionEndpoints
from .agents.messages import read_count_call, read_messages_call
from .agents.registry import Registry
from .agents.responses import read_response_call
from .answers import Rows
from .bodies import Bodies
from .chat import read_chat
from .clients import Clients, client_of
from .completions import read_completion
from .config import HttpConfig
from .connections import most_connections
from .conversation import ConversationFields, prompt_of
from .errors import Gone, HttpError, as_http_error
from .fields import Fields, checked, given
from .generate import read_generate
from .guard import CLIENT_LEFT, Counters, Guard
from .lifecycle import Lifecycle
from .model import ServedModel
from .pages import FILES, Pages
from .paths import SESSION, SESSIONS
from .pieces import Asker, Form, FromWorker, Task
from .samples import SampleLog
from .sglang.adapters import SglangAdapters
from .sglang.control import Control
from .sglang.generate import Generation
from .sglang.info import Info
from .sglang.routes import sglang_routes
from .sglang.weights import Weights
from .staging import Staging
from .tinker.endpoints import TinkerEndpoints
from .tinker.promises import Promises
from .tinker.routes import tinker_routes
from .tracing import ROUTE, Traced
from .turns import Turns
from .vllm.phases import Phases
from .vllm.routes import vllm_routes
from .watch import Watch
from .wire import Handler, LongJson, answer, error_answer, event_stream, long_answer, while_present

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

Reader: TypeAlias = Callable[[dict[str, Any], ServedModel], Awaitable[tuple[Task, Form]]]

log = logging.getLogger(__name__)


class TokenizeTextFields(Fields):
    """Fields of a `/tokenize` request that contains a text. Requests with a conversation have other fields.
    `return_token_strs`: also return the text of each token.
    """

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatFields(ConversationFields):
    model: str | None = None
    return_token_strs: bool = False


class DetokenizeFields(Fields):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class ExactRoute(Route):
    """A route that matches only its exact path.

    Starlette's `Route` class would also match the path with a newline at the end. The guard does not recognize a path
    with a newline. For such a path, the guard would not check the client's role and the number of open requests.
    """

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["path"].endswith("\n"):
            return Match.NONE, {}
        match, found = super().matches(scope)
        return match, {**found, ROUTE: self.path}


class Endpoints:
    """Handlers for the paths that concern the model: generation, model cards, tokenizing and detokenizing."""

    def __init__(
        self, served: ServedModel, samples: SampleLog, clients: Clients, bodies: LongJson, turns: Turns
    ) -> None:
        self._served, self._samples, self._clients = served, samples, clients
        self._bodies, self._turns = bodies, turns

    def asking(self, read: Reader, prompt_field: str, has_text: bool = True) -> Handler:
        """Return the handler for a generation endpoint.

        `read`: parses the request body. `prompt_field`: name of the request field that contains the prompts.
        `has_text`: whether answers contain text.
        """

        async def handle(request: Request) -> Response:
            client = client_of(request.scope)
            served = replace(self._served, salted=partial(self._clients.salted, client))
            # Only `read` refers to the parsed body, so the body's memory is freed when `read` finishes.
            reading = read(await self._bodies.read(request), served)
            try:
                task, form = await while_present(request.receive, reading)  # type: ignore[arg-type]
                source, texts = FromWorker(served.client, task), served.texts if has_text else None
                asker = Asker(source, texts, served.eos_token_ids, self._samples, self._turns, client.user)
                if task.is_stream:
                    return await event_stream(request.receive, asker.events(task, form))
                return await while_present(request.receive, self._whole(asker, task, form))
            except InvalidRequestError as error:
                raise as_http_error(error, prompt_field) from None

        return handle

    async def _whole(self, asker: Asker, task: Task, form: Form) -> Response:
        return await long_answer(await asker.whole(task, form), self._turns)

    async def models(self, request: Request) -> Response:
        adapters = await self._served.watch.adapters()
        cards = (self._adapter_card(name, version) for name, version in adapters.items())
        return answer({"object": "list", "data": [self._card(), *cards]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._served.name and (version := (await self._served.watch.adapters()).get(name)) is not None:
            return answer(self._adapter_card(name, version))
        await self._served.named(name)
        return answer(self._card())

    async def tokenize(self, request: Request) -> Response:
        fields = given(await self._bodies.read(request))
        return await while_present(request.receive, self._tokenized(fields))

    async def _tokenized(self, fields: dict[str, Any]) -> Response:
        if "messages" in fields:
            own = checked(TokenizeChatFields, fields)
            await self._served.named(own.model)
            tokens = (await prompt_of(own, self._served)).token_ids
        else:
            own = checked(TokenizeTextFields, fields)
            await self._served.named(own.model)
            self._served.check_texts([own.prompt], fits_context=False)
            tokens = await self._served.texts.encode(own.prompt, own.add_special_tokens)
        told = {"count": len(tokens), "max_model_len": self._served.max_model_len, "tokens": tokens}
        if own.return_token_strs:
            told["token_strs"] = Rows(map(self._served.texts.token, tokens))
        return await long_answer(told, self._turns)

    async def detokenize(self, request: Request) -> Response:
        own = checked(DetokenizeFields, given(await self._bodies.read(request)))
        await self._served.named(own.model)
        return await while_present(request.receive, self._detokenized(own.tokens))

    async def _detokenized(self, tokens: list[int]) -> Response:
        text = await self._served.texts.decode_long(tokens, skip_special_tokens=False)
        return await long_answer({"prompt": text}, self._turns)

    def _card(self) -> dict[str, Any]:
        served = self._served
        card = {"id": served.name, "object": "model", "created": served.created, "owned_by": "trueroll"}
        return card | {"root": served.name, "parent": None, "max_model_len": served.max_model_len}

    def _adapter_card(self, name: str, version: int) -> dict[str, Any]:
        return self._card() | {"id": name, "root": name, "parent": self._served.name, "weight_version": version}


def make_app(
    served: ServedModel,
    lifecycle: Lifecycle,
    watch: Watch,
    config: HttpConfig,
    clients: Clients,
    counters: Counters,
    registry: Registry,
    staging: Staging,
    tracer: Tracer | None = None,
    promises: Promises | None = None,
) -> ASGIApp:
    """Return the application: all routes, behind the guard. `staging`: the staged weight version, which the paths of
    SGLang and vLLM share. `tracer`: makes the spans of requests. `promises`: the `Promises` object of the Tinker API;
    None means that the Tinker API is not served.
    """
    samples, turns, long_bodies = SampleLog(), Turns(), LongJson(config.max_body_elements)
    adapters = Adapters(served, lifecycle)
    pages = Pages(served, samples, watch)
    endpoints = Endpoints(served, samples, clients, long_bodies, turns)
    sessions = SessionEndpoints(served, samples, clients, registry, long_bodies, turns)
    routes = [
        ExactRoute("/v1/completions", endpoints.asking(read_completion, "prompt"), methods=["POST"]),
        ExactRoute("/v1/chat/completions", endpoints.asking(read_chat, "messages"), methods=["POST"]),
        ExactRoute(
            "/inference/v1/generate", endpoints.asking(read_generate, "token_ids", has_text=False), methods=["POST"]
        ),
        ExactRoute(SESSIONS, sessions.begin, methods=["POST"]),
        ExactRoute(SESSION, sessions.state),
        ExactRoute(SESSION, sessions.end, methods=["DELETE"]),
        ExactRoute(f"{SESSION}/samples", sessions.samples),
        ExactRoute(f"{SESSION}/reward", sessions.reward, methods=["POST"]),
        ExactRoute(f"{SESSION}/v1/models", endpoints.models),
        ExactRoute(f"{SESSION}/v1/chat/completions", sessions.asking(read_chat_call), methods=["POST"]),
        ExactRoute(f"{SESSION}/v1/messages", sessions.asking(read_messages_call), methods=["POST"]),
        ExactRoute(f"{SESSION}/v1/messages/count_tokens", sessions.counting(read_count_call), methods=["POST"]),
        ExactRoute(f"{SESSION}/v1/responses", sessions.asking(read_response_call), methods=["POST"]),
        ExactRoute("/v1/models", endpoints.models),
        ExactRoute("/v1/models/{name:path}", endpoints.model),
        ExactRoute("/v1/load_lora_adapter", adapters.load_route, methods=["POST"]),
        ExactRoute("/v1/unload_lora_adapter", adapters.unload_route, methods=["POST"]),
        ExactRoute("/tokenize", endpoints.tokenize, methods=["POST"]),
        ExactRoute("/detokenize", endpoints.detokenize, methods=["POST"]),
        ExactRoute("/health", lifecycle.health),
        ExactRoute("/metrics", lifecycle.metrics),
        ExactRoute("/pause", lifecycle.pause, methods=["POST"]),
        ExactRoute("/resume", lifecycle.resume, methods=["POST"]),
        ExactRoute("/is_paused", lifecycle.is_paused),
        ExactRoute("/sleep", lifecycle.sleep, methods=["POST"]),
        ExactRoute("/wake_up", lifecycle.wake_up, methods=["POST"]),
        ExactRoute("/is_sleeping", lifecycle.is_sleeping),
        ExactRoute("/update_weights", lifecycle.update_weights, methods=["POST"]),
        ExactRoute("/reset_prefix_cache", lifecycle.reset_prefix_cache, methods=["POST"]),
        ExactRoute("/", pages.home),
        *(ExactRoute(path, pages.file) for path in FILES),
        ExactRoute("/ui/live", pages.live),
        ExactRoute("/ui/group", pages.group),
        ExactRoute("/ui/tokens", pages.tokens),
        ExactRoute("/ui/score", pages.score, methods=["POST"]),
    ]
    if config.sglang:
        generation, weights = Generation(served, samples, clients, long_bodies, turns), Weights(lifecycle, staging)
        info, control = Info(served, lifecycle, counters), Control(lifecycle, generation.names)
        entries = sglang_routes(generation, info, weights, SglangAdapters(adapters), control, lifecycle)
        routes += [ExactRoute(path, handler, methods=methods) for path, handler, methods in entries]
    if config.vllm:
        entries = vllm_routes(Phases(lifecycle, staging, adapters))
        own = [ExactRoute(path, handler, methods=methods) for path, handler, methods in entries]
        routes = own + routes  # the first match wins: vLLM's `/update_weights` accepts updates in phases, too
    if promises is not None:
        counters.include(promises.collect)
        # A client polls for each of its requests on a separate connection.
        most = min(config.max_open_requests, most_connections(config) // 2)
        tinker = TinkerEndpoints(served, samples, clients, long_bodies, lifecycle, promises, most)
        routes += [ExactRoute(path, handler, methods=methods) for path, handler, methods in tinker_routes(tinker)]
    handlers = {
        TruerollError: partial(_tell, counters),
        Gone: _note_gone,
        HTTPException: _tell_http,
        Exception: _tell_fault,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]
    app.router.redirect_slashes = False  # a redirect would go to the host in `Host`, which the client chooses
    bodies = Bodies(config)
    counters.include(bodies.collect)
    counters.include(registry.collect)
    traced = app if tracer is None else Traced(app, tracer)
    paths = {route.path for route in routes}
    return Guard(traced, clients, config.max_open_requests, counters, bodies, registry, paths)


async def _tell(counters: Counters, request: Request, error: Exception) -> Response:
    told = as_http_error(error)
    if told.setting is not None:
        counters.over_limit[told.setting] += 1
    if told.status == 500:
        log.error("a request failed", exc_info=error)
    return error_answer(told)


async def _tell_http(request: Request, error: HTTPException) -> Response:
    """Return the error response for an unknown path, or for a method that the path does not support."""
    text = f"{request.method} {request.url.path[:200]}: unknown path or method; docs/http.md lists the paths"
    code = "not_found" if error.status_code == 404 else "method_not_allowed"
    return error_answer(HttpError(error.status_code, text, code=code, headers=error.headers))


async def _tell_fault(request: Request, error: Exception) -> Response:
    return error_answer(as_http_error(error))


async def _note_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)  # nobody reads this response, because the client has disconnected
