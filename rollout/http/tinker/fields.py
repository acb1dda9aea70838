"""The fields of `asample`, and their translation to a request to the worker."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from trueroll.errors import InvalidRequestError

from ....engine.request import MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams, TokenId
from ..answers import TokenBytes
from ..fields import Fields, NumTop, checked, given, unsupported
from ..model import ServedModel
from .targets import Targets, TensorFields, read_targets

IGNORED = {"type"}
"""Fields that only repeat the path of a request."""
OFF: dict[str, tuple[Any, ...]] = {
    "prompt_alt_tokens_k": (0,),
    "record_stability_info": (False,),
    "base_model": (),
    "model_path": (),
}
"""Fields of `asample` that this server does not support, with their neutral values. A request must not name a model,
because the sampling session determines the model.
"""
MAX_ID_CHARS = 128
MAX_CHUNKS = 4096
MAX_SAMPLES = 4096
"""Maximum number of samples of a request. The front end itself checks this number, because the client gets the ids of
all samples before the worker gets the request.
"""
TEXT_CHUNK = "encoded_text"
TOKEN_BYTES = 36
"""Memory of a token id in a list, in bytes."""
ENTRY_BYTES = 8
"""Size of a token id with a log-prob, in bytes."""

Id = Annotated[str, Field(max_length=MAX_ID_CHARS)]
_FAIL_FAST = Field(fail_fast=True)


class ChunkFields(Fields):
    """A part of a prompt. `tokens`: the token ids of the part."""

    type: str = TEXT_CHUNK
    tokens: Annotated[list[TokenId], _FAIL_FAST]


class PromptFields(Fields):
    """A prompt, as a list of parts in order."""

    chunks: Annotated[list[ChunkFields], Field(max_length=MAX_CHUNKS, fail_fast=True)]


class SamplingFields(Fields):
    """Fields of `sampling_params`.

    `stop`: a text, a list of texts, or a list of token ids; each of them ends a sample, as the model's end-of-sequence
    tokens do. [] means that nothing ends a sample before `max_tokens`. `max_tokens`: None means up to the end of the
    context. `seed`: None means that the worker chooses the seed.
    """

    max_tokens: int | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: (
        str
        | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
        | Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]
        | None
    ) = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleFields(Fields):
    """Fields of `asample`.

    `sampling_session_id`, `seq_id`: together identify the request; a request that repeats both is the same request.
    `num_samples`: number of samples. `prompt_logprobs`: whether the answer has the log-probs of the prompt.
    `prompt_logprobs_last_n`: the answer has the log-probs of only the last n tokens of the prompt.
    `topk_prompt_logprobs`, `topk_sample_logprobs`: number of most probable tokens per token of the prompt, and per
    generated token. `target_prompt_logprobs`: token ids to score at each token of the prompt after the first.
    """

    sampling_session_id: Id
    seq_id: Annotated[int, Field(ge=0, lt=2**63)]
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    prompt: PromptFields
    sampling_params: dict[str, Any]
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    topk_prompt_logprobs: NumTop = 0
    topk_sample_logprobs: NumTop = 0
    target_prompt_logprobs: TensorFields | None = None


@dataclass(frozen=True)
class Asked:
    """A request for samples and scores.

    `prompt`: the token ids of the prompt. `start`: index of the first prompt token for which the answer has a log-prob;
    None if the answer has no log-probs of the prompt. `num_top`: number of most probable tokens per token of the
    prompt. `targets`: the token ids to score. `fingerprint`: a digest of the request, by which a retry is recognized.
    """

    prompt: list[int]
    params: SamplingParams
    seed: int | None
    start: int | None
    num_top: int
    targets: Targets | None
    fingerprint: bytes

    @property
    def num_bytes(self) -> int:
        """Estimated memory of the request while it runs."""
        return TOKEN_BYTES * len(self.prompt) + (0 if self.targets is None else 2 * self.targets.ids.nbytes)


def read_sample(body: dict[str, Any], served: ServedModel) -> tuple[SampleFields, Asked]:
    """Parse a request for samples. Raise InvalidRequestError or HttpError if the request is not supported."""
    _check_chunks(body.get("prompt"))
    own = checked(SampleFields, given(body, IGNORED, OFF))
    rest = checked(SamplingFields, given(own.sampling_params, set(), {}, path="sampling_params."))
    prompt = [token for chunk in own.prompt.chunks for token in chunk.tokens]
    served.check_lengths([prompt], rest.max_tokens, "prompt")
    params = _params(own, rest)
    start = _start(own, len(prompt))
    targets = None
    if own.target_prompt_logprobs is not None:
        targets = read_targets(own.target_prompt_logprobs, len(prompt) - 1)
    target_bytes = 0 if targets is None else targets.num_bytes // len(prompt) + 1
    per_token = ENTRY_BYTES * (1 + own.topk_sample_logprobs), ENTRY_BYTES * (1 + own.topk_prompt_logprobs)
    served.check_answer([prompt], params, TokenBytes(per_token[0], per_token[1] + target_bytes))
    seed = None if rest.seed is None else rest.seed % 2**64
    asked = Asked(
        prompt=prompt,
        params=served.salted(params),
        seed=seed,
        start=start,
        num_top=own.topk_prompt_logprobs,
        targets=targets,
        fingerprint=_fingerprint(prompt, params, seed, start, own.topk_prompt_logprobs, targets),
    )
    return own, asked


def _check_chunks(prompt: Any) -> None:
    """Raise HttpError if a part of the prompt is an image or a sound."""
    chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
    for i, chunk in enumerate(chunks if isinstance(chunks, list) else ()):
        kind = chunk.get("type", TEXT_CHUNK) if isinstance(chunk, dict) else TEXT_CHUNK
        if kind != TEXT_CHUNK:
            raise unsupported(f"prompt.chunks[{i}].type", repr(TEXT_CHUNK), kind)


def _params(own: SampleFields, rest: SamplingFields) -> SamplingParams:
    """Return the sampling parameters. Log-probs refer to the distribution after temperature, without filters."""
    named: dict[str, Any] = dict(n=own.num_samples, top_logprobs=own.topk_sample_logprobs or None)
    named |= dict(temperature=rest.temperature, top_k=rest.top_k, top_p=rest.top_p, max_tokens=rest.max_tokens)
    if isinstance(rest.stop, str):
        named["stop"] = [rest.stop]
    elif rest.stop:
        named["stop" if isinstance(rest.stop[0], str) else "stop_token_ids"] = rest.stop
    return SamplingParams(logprobs="temperature", ignore_eos=rest.stop == [], **named)


def _start(own: SampleFields, prompt_len: int) -> int | None:
    """Return the index of the first prompt token for which the answer has a log-prob; None if the answer has no
    log-probs of the prompt.
    """
    if (last := own.prompt_logprobs_last_n) is not None:
        if not own.prompt_logprobs:
            text = "prompt_logprobs_last_n: needs prompt_logprobs; set prompt_logprobs to true"
            raise InvalidRequestError(text, field="prompt_logprobs_last_n", value=last)
        if last >= prompt_len:
            raise InvalidRequestError(
                f"prompt_logprobs_last_n: must be at most {prompt_len - 1}, the number of tokens of the prompt after "
                f"the first (got {last})",
                field="prompt_logprobs_last_n",
                value=last,
                limit=prompt_len - 1,
            )
        return prompt_len - last
    return 1 if own.prompt_logprobs or own.topk_prompt_logprobs else None


def _fingerprint(prompt: list[int], params: SamplingParams, *others: Any) -> bytes:
    *small, targets = others
    digest = hashlib.sha256(np.array(prompt, np.int32).tobytes())
    digest.update(repr((params, small)).encode())
    if targets is not None:
        digest.update(targets.ids.tobytes() + repr((targets.ids.shape, targets.num_columns)).encode())
        digest.update(b"" if targets.sparse is None else targets.sparse.columns.tobytes())
    return digest.digest()
