"""SGLang's `/generate`: parse a request, get its samples, and register the request's name while the request runs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from trueroll.errors import InvalidRequestError, TruerollError, brief

from ....engine.request import (
    Distribution,
    SampleDelta,
    SampleOutput,
    SamplingParams,
    ScoreOutput,
    derive_seed,
    new_id,
)
from ..answers import Binary, TokenBytes
from ..clients import Clients, client_of
from ..errors import HttpError, as_http_error
from ..fields import checked, given, unsupported
from ..model import ServedModel
from ..pieces import Asker, FromWorker, Source, Task
from ..samples import SampleLog
from ..turns import Turns
from ..wire import LongJson, event_stream, long_answer, while_present
from .answers import ENTRY_BYTES, GenerateForm
from .fields import IGNORED, OFF, RENAMED, GenerateFields, SamplingFields, take_sampling_params


class OpenNames:
    """The names (`rid`) of open requests, and the ids under which the worker runs these requests. Several open requests
    may have the same name.
    """

    def __init__(self) -> None:
        self._ids: defaultdict[str, set[str]] = defaultdict(set)

    def ids_of(self, name: str) -> list[str]:
        """Return the worker's ids of all open requests with this name."""
        return [*self._ids.get(name, ())]

    @contextmanager
    def noted(self, names: list[str], ids: list[str]) -> Iterator[None]:
        """Context manager that registers the names of requests until it exits."""
        pairs = [*zip(names, ids, strict=True)]
        for name, id in pairs:
            self._ids[name].add(id)
        try:
            yield
        finally:
            for name, id in pairs:
                self._ids[name].discard(id)
                if not self._ids[name]:
                    del self._ids[name]


@dataclass(frozen=True)
class Scored:
    """A source of empty samples, for a request that only scores its prompts."""

    task: Task

    async def samples(self) -> list[list[SampleOutput]]:
        params, seed = self.task.params, self.task.seed or 0
        empty = (SampleOutput.empty("", i, derive_seed(seed, i), params) for i in range(params.n))
        samples = [replace(sample, finish_reason="length") for sample in empty]
        return [samples for _ in self.task.prompts]

    def stream(self) -> AsyncGenerator[tuple[int, SampleDelta | SampleOutput], None]:
        raise NotImplementedError("a stream has no log-probs of its prompt")


class Generation:
    """The handler of `/generate`. `names`: the names of open requests."""

    def __init__(
        self, served: ServedModel, samples: SampleLog, clients: Clients, bodies: LongJson, turns: Turns
    ) -> None:
        self.names = OpenNames()
        self._served, self._samples, self._clients = served, samples, clients
        self._bodies, self._turns = bodies, turns

    async def generate(self, request: Request) -> Response:
        client = client_of(request.scope)
        served = replace(self._served, salted=partial(self._clients.salted, client))
        reading = read_generate(await self._bodies.read(request), served)
        try:
            task, form = await while_present(request.receive, reading)
            source: Source = Scored(task) if form.only_scores else FromWorker(served.client, task)
            asker = Asker(source, served.texts, served.eos_token_ids, self._samples, self._turns, client.user)
            if task.is_stream:
                return await event_stream(request.receive, self._events(asker, task, form), turns=self._turns)
            return await while_present(request.receive, self._whole(asker, task, form))
        except TruerollError as error:
            raise _renamed(as_http_error(error, "input_ids")) from None

    async def _whole(self, asker: Asker, task: Task, form: GenerateForm) -> Response:
        assert task.request_ids is not None
        with self.names.noted(form.names, task.request_ids):
            told = await asker.whole(task, form)
        return await long_answer(told, self._turns)

    async def _events(self, asker: Asker, task: Task, form: GenerateForm) -> AsyncGenerator[dict[str, Any], None]:
        assert task.request_ids is not None
        with self.names.noted(form.names, task.request_ids):
            async with aclosing(asker.events(task, form)) as events:
                async for event in events:
                    yield event


async def read_generate(body: dict[str, Any], served: ServedModel) -> tuple[Task, GenerateForm]:
    """Parse a `/generate` request. Raise InvalidRequestError or HttpError if the request is not supported."""
    own = checked(GenerateFields, given(body, IGNORED, OFF))
    if own.lora_path is not None:
        if not await served.watch.serves(own.lora_path):
            raise _not_loaded(own.lora_path)
        served = served.adapted(own.lora_path)
    prompts, is_batch = await _prompts(own, served)
    params, seed, rest = await take_sampling_params(own, served)
    served.check_lengths(prompts, params.max_tokens, "input_ids")
    _check_records(own, rest, prompts)
    if not own.stream:
        served.check_answer(prompts, params, _token_bytes(own, params, served))
    params = served.salted(params)
    task = Task(
        prompts=prompts,
        media=[() for _ in prompts],
        params=params,
        seed=seed,
        is_stream=own.stream,
        skip_special_tokens=rest.skip_special_tokens,
        keeps_stop=rest.no_stop_trim,
        is_kept=rest.max_new_tokens != 0,
        request_ids=[new_id() for _ in prompts],
        adapter=served.adapter,
    )
    form = GenerateForm(
        names=_names(own, prompts, is_batch),
        prompts=prompts,
        has_logprobs=own.return_logprob,
        start=own.logprob_start_len,
        num_top=own.top_logprobs_num,
        scores=[await _score(own, prompt, params, served) for prompt in prompts],
        experts_start=own.routed_experts_start_len,
        num_samples=params.n,
        is_list=is_batch or params.n > 1,
        only_scores=rest.max_new_tokens == 0,
    )
    return task, form


async def _prompts(own: GenerateFields, served: ServedModel) -> tuple[list[list[int]], bool]:
    """Return the prompts of a request, and whether the request gives a list of prompts."""
    if (own.text is None) == (own.input_ids is None):
        text = "input_ids: give either input_ids or text, and not both"
        raise InvalidRequestError(text, field="input_ids")
    if own.text is not None:
        texts = [own.text] if isinstance(own.text, str) else own.text
        served.check_count(len(texts))
        served.check_texts(texts)
        return [await served.encode(text, True) for text in texts], not isinstance(own.text, str)
    is_batch = not own.input_ids or isinstance(own.input_ids[0], list)
    prompts: Any = own.input_ids if is_batch else [own.input_ids]
    served.check_count(len(prompts))
    return prompts, is_batch


def _names(own: GenerateFields, prompts: list[list[int]], is_batch: bool) -> list[str]:
    """Return the name of each prompt's request."""
    if isinstance(own.rid, list):
        if not is_batch or len(own.rid) != len(prompts):
            text = f"rid: there must be one name for each of {len(prompts)} prompts (got {len(own.rid)})"
            raise InvalidRequestError(text, field="rid", value=len(own.rid), limit=len(prompts))
        return own.rid
    name = own.rid or new_id()
    return [f"{name}_{i}" for i in range(len(prompts))] if is_batch else [name]


def _check_records(own: GenerateFields, rest: SamplingFields, prompts: list[list[int]]) -> None:
    """Raise InvalidRequestError or HttpError if the prompts cannot have the requested records."""
    scores_prompt = own.return_logprob and own.logprob_start_len >= 0
    if own.stream and scores_prompt:
        raise unsupported("logprob_start_len", "-1 for a stream", own.logprob_start_len)
    if rest.max_new_tokens == 0 and (not scores_prompt or own.return_routed_experts):
        raise HttpError(
            400,
            "max_new_tokens: 0 returns only the log-probs of the prompt; set return_logprob to true, logprob_start_len "
            "to the first token, and leave out return_routed_experts",
            field="max_new_tokens",
            value=0,
            code="unsupported_parameter",
        )
    shortest = min(map(len, prompts))
    for name in ("logprob_start_len", "routed_experts_start_len"):
        if (found := getattr(own, name)) > shortest:
            text = f"{name}: must be at most {shortest}, the length of the shortest prompt (got {found})"
            raise InvalidRequestError(text, field=name, value=found, limit=shortest)


def _token_bytes(own: GenerateFields, params: SamplingParams, served: ServedModel) -> TokenBytes:
    """Return the estimated bytes per token in an answer."""
    entry = ENTRY_BYTES * (1 + own.top_logprobs_num) * own.return_logprob
    routes = Binary.num_chars(4 * served.route_bytes * own.return_routed_experts)
    new = TokenBytes.ID + TokenBytes.TEXT + entry + routes
    if params.return_sampling_mask:
        new += Binary.num_chars(4 * (1 + params.most_kept(served.vocab_size)))
    return TokenBytes(new, entry * (own.logprob_start_len >= 0) + routes)


async def _score(
    own: GenerateFields, prompt: list[int], params: SamplingParams, served: ServedModel
) -> ScoreOutput | None:
    """Score the tokens of a prompt after the token with index `logprob_start_len`, under the model's own distribution.
    Return None if the request does not ask for these scores, or if there is no such token.
    """
    start = own.logprob_start_len + 1
    if not own.return_logprob or not 1 <= start < len(prompt):
        return None
    wanted: dict[str, Any] = dict(start=start, distribution=Distribution(), cache_salt=params.cache_salt)
    wanted["adapter"] = served.adapter
    [score] = await served.client.score([prompt], top_logprobs=own.top_logprobs_num or None, **wanted)
    return score


def _not_loaded(adapter: object) -> HttpError:
    text = f"lora_path: the adapter {brief(adapter)} is not loaded; load it with /load_lora_adapter"
    return HttpError(400, text, field="lora_path", value=adapter, code="model_not_found")


def _renamed(error: HttpError) -> HttpError:
    """Return a copy of an error, with sampling parameters under the names that SGLang gives them."""
    if error.code == "unknown_parameter":  # this error already names the caller's own spelling
        return error
    if error.code == "model_not_found":
        return _not_loaded(error.value)
    names = re.compile(rf"(?<![\w.-])({'|'.join(RENAMED)})\b")
    about: dict[str, Any] = dict(value=error.value, limit=error.limit, code=error.code, setting=error.setting)
    field = RENAMED.get(error.field or "", error.field)
    text = names.sub(lambda found: RENAMED[found[1]], str(error))
    return HttpError(error.status, text, field=field, headers=error.headers, **about)
