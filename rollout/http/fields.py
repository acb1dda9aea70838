"""The fields of requests: those that are served, those that change nothing here, and those that must be off.

null counts as not given. A field that is not known, or that asks for what is not served, is refused by its name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trueroll.errors import brief

from ...engine.request import MAX_TOP_LOGPROBS, SamplingParams, TokenId, about_fault, describe_validation_error
from .errors import HttpError

SAMPLING = (
    *("n", "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p"),
    *("stop", "stop_token_ids", "ignore_eos", "cache_salt"),
)
"""The fields that are parameters of `SamplingParams`, by the same names."""
IGNORED = {
    *("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "store"),
    *("detokenize", "output_kind", "flat_logprobs", "routed_experts_prompt_start"),
}
"""Hints and labels: whatever they say, the answer is the same. No experts are told, wherever they would begin."""
OFF: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "prompt_logprobs": (),
    "suffix": ("",),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "priority": (0,),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "extra_args": ({}, {"prl_compact_logprobs": True}, {"prl_compact_logprobs": False}),
    "features": ({},),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": (),
    "reasoning_effort": (),
    "thinking_token_budget": (),
    "include_reasoning": (True,),
    "documents": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}
"""Fields that are known elsewhere and not served here, with the values that mean what is done here anyway."""

F = TypeVar("F", bound="Fields")
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
NumTop = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class Fields(BaseModel):
    """The fields of a kind of request. Values of another type, and unknown fields, are refused. Lists in it fail fast:
    a fault for each of a million elements would take seconds and gigabytes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field_is_enough(cls, values: Any) -> Any:
        """Leave out the others of very many, as of elements."""
        if not isinstance(values, dict) or cls.model_config.get("extra") == "allow":
            return values
        unknown = next((name for name in values if name not in cls.model_fields), None)
        return {name: value for name, value in values.items() if name in cls.model_fields or name == unknown}


class StreamOptions(Fields):
    """`include_usage`: a last event says how many tokens there were. The others must be off."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False
    include_obfuscation: Literal[False] = False


class GenerationFields(Fields):
    """What all requests for tokens have, beside `SAMPLING` and `seed`."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class TextFields(GenerationFields):
    """What requests for text have. `return_token_ids`: tell the ids of prompt and completion, too.
    `return_tokens_as_token_ids`: call tokens `token_id:7` among the log-probs. `skip_special_tokens`: leave them out of
    the text.
    """

    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    skip_special_tokens: bool = True


def given(body: dict[str, Any]) -> dict[str, Any]:
    """The fields that ask for something: without null, hints, and what is off. Raise HttpError for one that must be
    off.
    """
    fields = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    for name in [name for name in fields if name in OFF]:
        value = fields.pop(name)
        if not any(is_same(value, neutral) for neutral in OFF[name]):
            raise unsupported(name, " or ".join(["null", *map(repr, OFF[name])]), value)
    return fields


def is_same(value: Any, expected: Any) -> bool:
    """Whether two JSON values are equal. Unlike for `==`, a boolean equals no number, at any depth."""
    if isinstance(value, bool) != isinstance(expected, bool) or value != expected:
        return False
    if isinstance(expected, dict):
        return all(is_same(value[name], each) for name, each in expected.items())
    return not isinstance(expected, list) or all(map(is_same, value, expected))


def unsupported(name: str, expected: str, value: Any) -> HttpError:
    """What to say of a field whose value asks for what is not served."""
    text = f"{name}: expected {expected}, as this is not served, found {brief(value)}; leave it out"
    return HttpError(400, text, field=name, value=value, code="unsupported_parameter")


def checked(kind: type[F], fields: dict[str, Any]) -> F:
    """Fields as those of a kind of request. Raise HttpError."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        code = "unknown_parameter" if first["type"] == "extra_forbidden" else "invalid_request"
        raise HttpError(400, describe_validation_error(error), code=code, **about_fault(error, num_parts=1)) from None


def take_sampling(fields: dict[str, Any], max_tokens: int | None) -> tuple[SamplingParams, int | None]:
    """Take the sampling parameters and the seed out of `fields`. `max_tokens`: where they name none. The log-probs are
    those of the distribution that was drawn from. Raise InvalidRequestError.
    """
    named: dict[str, Any] = {"max_tokens": max_tokens} | {name: fields.pop(name) for name in SAMPLING if name in fields}
    if is_same(named.get("top_k"), 0):
        named["top_k"] = -1  # off, as others write it
    seed = SamplingParams(seed=fields.pop("seed", None)).seed
    return SamplingParams(**named), seed


def recording(params: SamplingParams, num_top: int | None) -> SamplingParams:
    """These, with log-probs of the tokens and of `num_top` most probable ones; None: without any."""
    return params.model_copy(update=dict(logprobs=None) if num_top is None else dict(top_logprobs=num_top or None))
