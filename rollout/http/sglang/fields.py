"""The fields of SGLang's `/generate`, and their translation to sampling parameters."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ....engine.request import CacheSalt, SamplingParams
from ....weight_sync.payload.manifest import AdapterName
from ..fields import Fields, NumTop, TokenIds, checked, given, take_sampling
from ..model import ServedModel

IGNORED = {
    *("session_id", "routing_key", "conversation_id", "custom_labels", "external_trace_header", "received_time"),
    *("video_config", "use_audio_in_video"),
}
"""Fields of `/generate` that never change an answer, such as labels."""
OFF: dict[str, tuple[Any, ...]] = {
    "model": (),
    "log_metrics": (True,),
    **dict.fromkeys(
        (
            *("return_text_in_logprobs", "return_hidden_states", "return_indexer_topk", "return_prompt_token_ids"),
            *("return_sampling_mask", "return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs"),
            *("return_flat_raw_top_logprobs_b64", "return_bytes", "return_entropy"),
            *("background", "no_logs", "require_reasoning"),
        ),
        (False,),
    ),
    **dict.fromkeys(("image_data", "video_data", "audio_data", "modalities", "token_ids_logprob"), ([],)),
    **dict.fromkeys(
        (
            *("lora_id", "input_embeds", "session_params", "custom_logit_processor", "watermark"),
            *("sampling_logprobs_mode", "positional_embed_overrides", "max_thinking_tokens", "priority"),
            *("bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "data_parallel_rank"),
        ),
        (),
    ),
}
"""Fields of `/generate` that SGLang supports but this server does not, with their neutral values."""
SAMPLING_OFF: dict[str, tuple[Any, ...]] = {
    "beam_width": (1,),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), ("",)),
    **dict.fromkeys(("stop_regex", "stream_interval", "watermark"), ()),
}
"""Fields of `sampling_params` that SGLang supports but this server does not, with their neutral values."""
SHARED = (
    *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop", "stop_token_ids", "ignore_eos", "logit_bias"),
)
"""Fields of `sampling_params` with the same name and meaning in the other generation endpoints."""
RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
"""SGLang's names of sampling parameters, for error texts."""

_FAIL_FAST = Field(fail_fast=True)
_Rid = Annotated[str, Field(min_length=1, max_length=256)]


class GenerateFields(Fields):
    """Fields of `/generate`.

    `input_ids` or `text`: the prompt, or a list of prompts. `rid`: a name for the request, which `/abort_request` uses.
    For a list of prompts, `rid` is either a list of names or a single name. The position of each prompt is appended to
    a single name. `logprob_start_len`: index of the first prompt token in the answer's list of log-probs; -1 means no
    log-probs of the prompt. `extra_key`: only requests with the same key share cached prefixes.
    `routed_experts_start_len`: index of the first token for which the answer has routed experts. `lora_path`: the name
    of a loaded adapter; None means the base weights.
    """

    input_ids: TokenIds | Annotated[list[TokenIds], _FAIL_FAST] | None = None
    text: str | Annotated[list[str], _FAIL_FAST] | None = None
    sampling_params: dict[str, Any] = {}
    rid: _Rid | Annotated[list[_Rid], _FAIL_FAST] | None = None
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1)] = -1
    top_logprobs_num: NumTop = 0
    return_routed_experts: bool = False
    routed_experts_start_len: Annotated[int, Field(ge=0)] = 0
    extra_key: CacheSalt | None = None
    stream: bool = False
    lora_path: AdapterName | None = None


class CustomParams(Fields):
    """Fields of `custom_params`. `return_top_p_token_ids`: for each generated token, also return the ids that the
    filters kept.
    """

    return_top_p_token_ids: bool = False


class SamplingFields(Fields):
    """Fields of `sampling_params` in addition to `SHARED`.

    `max_new_tokens`: None means up to the end of the context; 0 means that the answer has only log-probs of the prompt.
    `spaces_between_special_tokens`: has no effect with the tokenizers of this server. `no_stop_trim`: whether the text
    of a sample contains the stop token or stop string that ended the sample.
    """

    max_new_tokens: Annotated[int, Field(ge=0, lt=2**63)] | None = 128
    min_new_tokens: Annotated[int, Field(ge=0, lt=2**63)] = 0
    sampling_seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    custom_params: CustomParams = CustomParams()


async def take_sampling_params(
    own: GenerateFields, served: ServedModel
) -> tuple[SamplingParams, int | None, SamplingFields]:
    """Return the sampling parameters of a request, its seed, and its other fields.

    Without `return_top_p_token_ids`, log-probs refer to the distribution after temperature, without filters, as in
    SGLang. With `return_top_p_token_ids`, log-probs refer to the distribution after the filters. Raise
    InvalidRequestError or HttpError if a value is invalid.
    """
    body = own.sampling_params
    fields = given(body, ignored=set(), off=SAMPLING_OFF, path="sampling_params.")
    shared = {name: fields.pop(name) for name in SHARED if name in fields}
    if type(shared.get("top_k")) is int and shared["top_k"] >= served.vocab_size:
        shared["top_k"] = -1  # trainers send large numbers that mean the whole vocabulary
    if body.get("max_new_tokens", 0) is None:
        fields["max_new_tokens"] = None
    rest = checked(SamplingFields, fields)
    shared["min_tokens"] = rest.min_new_tokens
    if rest.sampling_seed is not None:
        shared["seed"] = rest.sampling_seed % 2**64
    most = rest.max_new_tokens
    params, seed = await take_sampling(shared, most if most is None else max(1, most), served.encode_words)
    has_kept = rest.custom_params.return_top_p_token_ids
    recorded: dict[str, Any] = dict(logprobs=None, return_sampling_mask=has_kept, cache_salt=own.extra_key)
    recorded["return_routed_experts"] = own.return_routed_experts
    if own.return_logprob:
        recorded["logprobs"] = "processed" if has_kept else "temperature"
        recorded["top_logprobs"] = own.top_logprobs_num or None
    return params.model_copy(update=recorded), seed, rest
