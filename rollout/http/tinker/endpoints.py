"""The handlers of the Tinker API."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from trueroll.errors import RequestAbortedError, brief

from ....engine.request import Distribution, ScoreOutput
from ..clients import Clients, client_of
from ..errors import HttpError
from ..fields import Fields, checked, given
from ..lifecycle import Lifecycle
from ..model import ServedModel
from ..pieces import FromWorker, Task, check_sample
from ..samples import SampleLog
from ..wire import LongJson, answer, read_json, while_present
from .answers import PROTOBUF, sample_response
from .fields import IGNORED, Asked, Id, read_sample
from .promises import Promises

MODEL_PATH = "tinker://"
"""The prefix of a model's path in the Tinker API."""
SESSION_LABELS = {"type", "tags", "user_metadata", "sdk_version", "project_id", "display_name"}
"""Fields of `create_session` that have no effect."""
INLINE_BYTES = 2**20
"""Maximum size, in bytes, of an answer that is sent at once. For a longer answer, the server first returns only the
size of the answer, if the client allows this.
"""
CONCURRENT_REQUESTS = 2000
"""Maximum number of requests that the package `tinker` sends at a time, by its own default."""


class SamplingSessionFields(Fields):
    """Fields of `create_sampling_session`. `base_model`: the served model's name. `model_path`: `tinker://` with the
    served model's name.
    """

    session_id: Id
    sampling_session_seq_id: Annotated[int, Field(ge=0, lt=2**63)]
    base_model: str | None = None
    model_path: str | None = None


class HeartbeatFields(Fields):
    session_id: Id


class RetrieveFields(Fields):
    """Fields of `retrieve_future`. `allow_metadata_only`: whether the server may first return only the size of a long
    answer.
    """

    request_id: Id
    allow_metadata_only: bool = False


class CancelFields(Fields):
    request_id: Id


class TinkerEndpoints:
    """Handlers of the Tinker API. `max_requests`: maximum number of concurrent requests that a client should send."""

    def __init__(
        self,
        served: ServedModel,
        samples: SampleLog,
        clients: Clients,
        bodies: LongJson,
        lifecycle: Lifecycle,
        promises: Promises,
        max_requests: int,
    ) -> None:
        self._served, self._samples, self._clients = served, samples, clients
        self._bodies, self._lifecycle, self._promises = bodies, lifecycle, promises
        self._max_requests = min(CONCURRENT_REQUESTS, max_requests)

    async def config(self, request: Request) -> Response:
        """Return the settings that the package `tinker` reads once."""
        told = {"pjwt_auth_enabled": False, "sample_max_concurrent_requests": self._max_requests}
        return answer(told | {"sample_use_retrieve_futures": False, "sample_join_sampling_session": False})

    async def dynamic_config(self, request: Request) -> Response:
        """Return the settings that the package `tinker` reads repeatedly. The settings allow the package to cancel
        requests.
        """
        return answer({"sample_cancel_enabled": True})

    async def health(self, request: Request) -> Response:
        """Return 200 if the worker answers, and raise HttpError otherwise."""
        await self._lifecycle.report()
        return answer({"status": "ok"})

    async def capabilities(self, request: Request) -> Response:
        """Return the served model, which can be sampled but not trained."""
        served = self._served
        model = {"model_name": served.name, "max_context_length": served.max_model_len}
        return answer({"supported_models": [model | {"trainable": False, "sampleable": True}]})

    async def telemetry(self, request: Request) -> Response:
        """Drop a client's telemetry."""
        return answer({"status": "accepted"})

    async def begin_session(self, request: Request) -> Response:
        """Open a session. The labels in the request have no effect."""
        checked(Fields, given(read_json(request), SESSION_LABELS, {}))
        id = self._promises.begin_session(client_of(request.scope))
        return answer({"type": "create_session", "session_id": id})

    async def heartbeat(self, request: Request) -> Response:
        """Keep a session open. A client that gets the status 410 stops its heartbeats."""
        own = checked(HeartbeatFields, given(read_json(request), IGNORED, {}))
        self._promises.session(own.session_id, client_of(request.scope), status=410)
        return answer({"type": "session_heartbeat"})

    async def begin_sampling_session(self, request: Request) -> Response:
        """Return the id of a sampling session. The front end stores no data for sampling sessions."""
        own = checked(SamplingSessionFields, given(read_json(request), IGNORED, {}))
        self._check_model(own)
        id = f"{own.session_id}:{own.sampling_session_seq_id}"
        self._promises.sampling_session(id, client_of(request.scope))
        return answer({"type": "create_sampling_session", "sampling_session_id": id})

    async def sampler(self, request: Request) -> Response:
        """Return the model of a sampling session."""
        id = request.path_params["id"]
        self._promises.sampling_session(id, client_of(request.scope))
        return answer({"sampler_id": id, "base_model": self._served.name, "model_path": None})

    async def sample(self, request: Request) -> Response:
        """Start a request, and return its promise."""
        client = client_of(request.scope)
        served = replace(self._served, salted=partial(self._clients.salted, client))
        own, asked = read_sample(await self._bodies.read(request), served)
        place = self._promises.sampling_session(own.sampling_session_id, client)
        work = partial(self._answer, asked, client.user)
        self._promises.begin(place, own.seq_id, asked.fingerprint, asked.num_bytes, work)
        id = f"{own.sampling_session_id}:{own.seq_id}"
        return answer({"request_id": id, "sample_sequence_ids": [f"{id}:{i}" for i in range(asked.params.n)]})

    async def retrieve(self, request: Request) -> Response:
        """Return the outcome of a promise, or an answer that says that its request is still running."""
        own = checked(RetrieveFields, given(read_json(request), IGNORED, {}))
        promise = self._promises.find(own.request_id, client_of(request.scope))
        if not await while_present(request.receive, self._promises.wait(promise)):
            return answer({"type": "try_again", "request_id": own.request_id, "queue_state": "active"})
        if (error := promise.error) is not None:
            self._promises.tell(promise)
            return answer({"error": str(error), "category": "user" if error.status < 500 else "server"})
        content = promise.task.result()
        if own.allow_metadata_only and len(content) > INLINE_BYTES:
            return answer({"status": "complete_metadata", "response_payload_size": len(content)})
        self._promises.tell(promise)
        return Response(content, media_type=PROTOBUF)

    async def cancel(self, request: Request) -> Response:
        """End the request of a promise. No-op if the request has already ended."""
        own = checked(CancelFields, given(read_json(request), IGNORED, {}))
        self._promises.find(own.request_id, client_of(request.scope)).task.cancel()
        return Response(status_code=204)

    async def refuse(self, request: Request) -> Response:
        """Raise HttpError, because this front end supports only the paths of the Tinker API that sample or score."""
        raise HttpError(
            400,
            f"{request.url.path[:200]}: is not supported, because this server only samples and scores; train with "
            "your own trainer, and push its weights with WeightPublisher (see docs/tinker.md)",
            code="unsupported_path",
        )

    def _check_model(self, own: SamplingSessionFields) -> None:
        """Raise HttpError if a sampling session names a model other than the served model."""
        name = self._served.name
        expected, told = {"base_model": name, "model_path": MODEL_PATH + name}, own.model_dump()
        given_by = {field: told[field] for field in expected if told[field] is not None}
        wrong = next((field for field, value in given_by.items() if value != expected[field]), None)
        if wrong is None and given_by:
            return
        field = wrong or "base_model"
        raise HttpError(
            404,
            f"{field}: {brief(given_by.get(field))} is not served; set base_model to {name!r}",
            field=field,
            value=given_by.get(field),
            code="model_not_found",
        )

    async def _answer(self, asked: Asked, user: str | None) -> bytes:
        """Score the prompt, generate the samples, and return the answer."""
        score = await self._score(asked)
        task = Task(prompts=[asked.prompt], media=[()], params=asked.params, seed=asked.seed, is_stream=False)
        [group] = await FromWorker(self._served.client, task).samples()
        for sample in group:
            check_sample(sample)
            if sample.finish_reason == "abort":
                raise RequestAbortedError("prompt: the request was aborted; sample again")
        self._samples.add(asked.prompt, asked.params, asked.seed, group, user)
        return sample_response(asked, group, score)

    async def _score(self, asked: Asked) -> ScoreOutput | None:
        """Return the scores that the request asks for, under the model's own distribution; None if the request asks for
        no scores.
        """
        targets, first = asked.targets, len(asked.prompt) if asked.start is None else asked.start
        wanted: dict[str, Any] = dict(top_logprobs=asked.num_top or None, cache_salt=asked.params.cache_salt)
        if targets is not None:
            first = min(first, targets.first + 1)
            wanted["target_token_ids"] = [targets.ids[first - 1 :]]
        if first >= len(asked.prompt):
            return None
        [score] = await self._served.client.score([asked.prompt], start=first, distribution=Distribution(), **wanted)
        if score.finish_reason == "error":
            raise HttpError(500, f"prompt: {score.error}", code="sample_failed")
        return score
