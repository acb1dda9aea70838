"""`/inference/v1/generate`: generate token ids from token ids. Compatible with vLLM's endpoint, which trainers use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...engine.request import CacheSalt, LogprobsMode
from .answers import Rows, TokenBytes
from .errors import HttpError
from .fields import OFF, GenerationFields, NumTop, RecordFields, TokenIds, checked, given, recording, take_sampling
from .images import ImageList, Prompt
from .logprobs import chat_logprobs, chat_logprobs_bytes, name_by_id
from .model import ServedModel
from .pieces import Piece, Task, Usage, ending
from .records import check_records, prompt_records, record_bytes, told_records

_OFF = {name: neutral for name, neutral in OFF.items() if name != "include_stop_str_in_output"}
"""Fields that must be off. `include_stop_str_in_output` need not be off, because it has no effect: the tokens of a stop
string are never removed from the token ids of a sample.
"""


class GenerateFields(GenerationFields):
    """Fields of a `/inference/v1/generate` request.

    `token_ids`: the prompt. `images`: the processed images of the prompt. `sampling_params`: an object with `seed`, the
    fields of `SAMPLING` and the fields of `SamplingFields`.
    """

    token_ids: TokenIds
    sampling_params: dict[str, Any]
    cache_salt: CacheSalt | None = None
    images: ImageList = []


class SamplingFields(RecordFields):
    """Fields of `sampling_params` in addition to `SAMPLING` and `seed`.

    `logprobs`: number of most probable tokens to return per position; each generated token's log-prob is also returned.
    `logprobs_mode`: the distribution to which the log-probs refer; takes the values of `SamplingParams.logprobs`.
    `skip_special_tokens`, `include_stop_str_in_output`: have no effect, because the answer contains no text. The token
    ids of a sample always include the tokens of the stop string that ended the sample.
    """

    logprobs: NumTop | None = None
    logprobs_mode: LogprobsMode = "processed"
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False


@dataclass(frozen=True)
class GenerateForm:
    """Writes samples as token ids. Log-probs have the format of chat completions; token 7, for example, has the name
    `token_id:7` and the `token_id` 7. `told_prompt`: the fields with which the answer reports the log-probs of the
    prompt. `tells_usage`: whether a stream ends with the token counts.
    """

    request_id: str
    created: int
    model: str
    eos_token_ids: frozenset[int]
    prompt: Prompt
    fields: SamplingFields
    told_prompt: dict[str, Any]
    tells_usage: bool

    def whole(self, pieces: list[Piece], usage: Usage) -> dict[str, Any]:
        told = self._envelope(Rows(map(self._choice, pieces), None)) | {"usage": usage.told()}
        return told | self._told_images() | self.told_prompt

    def events(self, piece: Piece) -> list[dict[str, Any]]:
        is_first = piece.start == 0 and piece.ended is None
        return [self._envelope([self._choice(piece)]) | (self._told_images() if is_first else {})]

    def last_events(self, usage: Usage) -> list[dict[str, Any]]:
        if not self.tells_usage:
            return []
        return [self._envelope([]) | {"usage": usage.told()}]

    def _told_images(self) -> dict[str, Any]:
        return {"prompt_images": self.prompt.told} if self.prompt.told else {}

    def _envelope(self, choices: list[dict[str, Any]] | Rows) -> dict[str, Any]:
        return {"request_id": self.request_id, "created": self.created, "model": self.model, "choices": choices}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self.fields.logprobs is not None:
            logprobs = chat_logprobs(piece, name_by_id, has_bytes=False, has_ids=True)
        choice = {
            "index": piece.index,
            "token_ids": piece.token_ids,
            "logprobs": logprobs,
        } | ending(piece, self.eos_token_ids)
        return choice | told_records(piece, self.fields)


async def read_generate(body: dict[str, Any], served: ServedModel) -> tuple[Task, GenerateForm]:
    """Parse a `/inference/v1/generate` request. Raise InvalidRequestError or HttpError if the request is not
    supported.
    """
    if body.get("features"):
        text = "features: vLLM's encoding of images is not supported; send processed images in the field images"
        raise HttpError(400, text, field="features", code="unsupported_parameter")
    own = checked(GenerateFields, given(body))
    served = await served.named(own.model)
    fields = given(own.sampling_params, off=_OFF)
    if own.cache_salt is not None:
        fields["cache_salt"] = own.cache_salt
    params, seed = await take_sampling(fields, None, served.encode_words)
    wanted = checked(SamplingFields, fields)
    params = params.model_copy(update=dict(logprobs=wanted.logprobs_mode))
    served.check_lengths([own.token_ids], params.max_tokens, "token_ids")
    check_records(wanted, [own.token_ids], own.stream, params)
    if not own.stream:
        token_bytes = TokenBytes(TokenBytes.ID + chat_logprobs_bytes(wanted.logprobs, has_bytes=False))
        served.check_answer([own.token_ids], params, token_bytes + record_bytes(wanted, params, served))
    prompt = await served.images.receive(own.token_ids, own.images)
    params = served.salted(recording(params, wanted.logprobs))
    for parsed in (body, own.sampling_params, fields):
        parsed.clear()  # `wanted` has a compact copy of long lists
    [told_prompt] = await prompt_records(wanted, [prompt], params, served)
    task = Task(
        prompts=[own.token_ids],
        media=[prompt.images],
        params=params,
        seed=seed,
        is_stream=own.stream,
        adapter=served.adapter,
    )
    form = GenerateForm(
        request_id=own.request_id or served.new_id("generate"),
        created=served.now(),
        model=served.name,
        eos_token_ids=served.eos_token_ids,
        prompt=prompt,
        fields=wanted,
        told_prompt=told_prompt,
        tells_usage=own.stream_options.include_usage,
    )
    return task, form
