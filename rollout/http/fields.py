"""The fields of requests: supported fields, ignored fields, and fields that must be off.

A field with the value null is treated as missing. Unknown fields and unsupported values are refused with an error that
names the field.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from functools import partial
from itertools import islice
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from trueroll.errors import brief

from ...engine.request import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_TARGETS,
    MAX_TOP_LOGPROBS,
    NO_TARGET,
    SamplingParams,
    TokenId,
    about_fault,
    describe_validation_error,
)
from .errors import HttpError

SAMPLING = (
    *("n", "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "allowed_token_ids"),
    *("stop", "stop_token_ids", "ignore_eos", "cache_salt", "structured_outputs"),
    *("target_token_ids", "return_sampling_mask", "return_routed_experts", "one_version"),
)
"""The fields with the same name and meaning in `SamplingParams`."""
IGNORED = {
    *("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "store"),
    *("detokenize", "output_kind", "flat_logprobs"),
}
"""Fields that never change an answer, such as hints and labels."""
OFF: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "logits_processors": ([],),
    "best_of": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "suffix": ("",),
    "prompt_embeds": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "priority": (0,),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "extra_args": ({}, {"prl_compact_logprobs": True}, {"prl_compact_logprobs": False}),
    "features": ({},),
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
"""Fields that other servers support but this server does not. For each field, only the listed neutral values are
accepted.
"""

ONE_CALL = "true, or set tool_choice to 'required' or to a function, which allow one call"
"""The supported values of `parallel_tool_calls`, for error texts."""

F = TypeVar("F", bound="Fields")
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
NumTop = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
EncodeWords: TypeAlias = Callable[[Sequence[str]], Awaitable[list[list[int]]]]
"""Returns the token sequences that stand for words."""
MAX_BAD_WORD_CHARS = 1024
_JSON_SCHEMA = ("schema", "name", "description", "strict")
_TargetId = Annotated[int, Field(ge=NO_TARGET, lt=2**31)]
_TargetIds = Annotated[
    list[_TargetId],
    Field(min_length=1, max_length=MAX_TARGETS, fail_fast=True),
    AfterValidator(partial(array, "i")),  # an array takes a tenth of a list's memory
]
_JsonTokenId = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
_BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]


class Fields(BaseModel):
    """Base class for the fields of a request. Values of a wrong type and unknown fields are refused.

    Lists in subclasses must use pydantic's `fail_fast`. Without `fail_fast`, a list with a million invalid elements
    would produce a million errors, which cost seconds and gigabytes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field_is_enough(cls, values: Any) -> Any:
        """Report only the first unknown field, because a request may have very many unknown fields."""
        if not isinstance(values, dict) or cls.model_config.get("extra") == "allow":
            return values
        unknown = next((name for name in values if name not in cls.model_fields), None)
        return {name: value for name, value in values.items() if name in cls.model_fields or name == unknown}


class StreamOptions(Fields):
    """Options of a stream.

    `include_usage`: end the stream with an event that contains the token counts. All other stream options must be off.
    """

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False
    include_obfuscation: Literal[False] = False


class ResponseFormat(Fields):
    """OpenAI's `response_format`. In `json_schema`, the fields besides `schema` have no effect."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None

    @property
    def grammar(self) -> dict[str, Any] | None:
        """The fields of `structured_outputs` that allow the same texts as `response_format`; None if any text is
        allowed.
        """
        if self.json_schema is not None:
            return {"json": self.json_schema["schema"]}
        return {"json_object": True} if self.type == "json_object" else None

    @model_validator(mode="after")
    def _has_a_schema(self) -> ResponseFormat:
        given = self.json_schema
        if (self.type == "json_schema") != (given is not None):
            raise ValueError("json_schema must be given if the type is json_schema, and left out otherwise")
        unknown = [name for name in given or () if name not in _JSON_SCHEMA]
        if unknown:
            raise ValueError(f"json_schema has the unknown parameter {brief(unknown[0])}; remove it")
        if given is not None and not isinstance(given.get("schema"), dict):
            schema = brief(given.get("schema"))
            raise ValueError(f"the schema of a format of type json_schema must be a JSON object (got {schema})")
        return self


class EditFields(Fields):
    """Fields that edit logits and have a different name or format in `SamplingParams`.

    `logit_bias`: numbers to add to the logits of some tokens. `bad_words`: texts that must not occur in a sample.
    `response_format`: a grammar for the text of a sample, as in OpenAI's API.
    """

    logit_bias: Annotated[dict[_JsonTokenId, float], Field(max_length=MAX_LOGIT_BIAS)] = {}
    bad_words: Annotated[list[_BadWord], Field(max_length=MAX_BAD_WORDS // 2, fail_fast=True)] = []
    response_format: ResponseFormat = ResponseFormat(type="text")

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _one_wrong_bias_is_enough(cls, biases: Any) -> Any:
        """If biases are invalid, return only one of the invalid biases, because pydantic would report all of them."""
        if not isinstance(biases, dict):
            return biases
        few = dict(islice(biases.items(), MAX_LOGIT_BIAS + 1))
        wrong = next((key for key, bias in few.items() if not key.isdecimal() or type(bias) not in (int, float)), None)
        return few if wrong is None else {wrong: few[wrong]}


class RecordFields(Fields):
    """Fields that say what to record for the tokens of the prompt.

    `prompt_logprobs`: number of most probable tokens to return per token of the prompt; the log-prob of the prompt's
    token is also returned. `prompt_logprob_token_ids`: one row of token ids for each token of the prompt after the
    token with index `prompt_logprob_start`. The answer contains the log-probs of the ids in each row; -1 pads a row.
    `prompt_sampling_mask`: whether the answer contains, for each token of the prompt after the token with index
    `prompt_logprob_start`, the ids that the filters keep. `routed_experts_prompt_start`: index of the first prompt
    token for which the answer contains routed experts.
    """

    prompt_logprobs: NumTop | None = None
    prompt_logprob_start: Annotated[int, Field(ge=0)] = 0
    prompt_logprob_token_ids: Annotated[list[_TargetIds], Field(min_length=1, fail_fast=True)] | None = None
    prompt_sampling_mask: bool = False
    routed_experts_prompt_start: Annotated[int, Field(ge=0)] = 0


class GenerationFields(Fields):
    """Fields of all requests that generate tokens, in addition to `SAMPLING` and `seed`."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class TextFields(GenerationFields, RecordFields):
    """Fields of requests for text.

    `return_token_ids`: also return the token ids of prompt and completion. `return_tokens_as_token_ids`: in the
    log-probs, name each token by its id, as in `token_id:7`. `skip_special_tokens`: leave special tokens out of the
    text.
    """

    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    skip_special_tokens: bool = True


def given(
    body: dict[str, Any],
    ignored: Set[str] = IGNORED,
    off: Mapping[str, tuple[Any, ...]] = OFF,
    path: str = "",
) -> dict[str, Any]:
    """Return the fields that have an effect.

    Drop the fields `ignored`, fields with the value null, and fields of `off` with a neutral value. Raise HttpError if
    a field of `off` has any other value. `path`: the names of the objects that enclose the fields, for error texts.
    """
    fields = {name: value for name, value in body.items() if value is not None and name not in ignored}
    for name in [name for name in fields if name in off]:
        value = fields.pop(name)
        if not any(is_same(value, neutral) for neutral in off[name]):
            raise unsupported(path + name, " or ".join(["null", *map(repr, off[name])]), value)
    return fields


def is_same(value: Any, expected: Any) -> bool:
    """Return whether two JSON values are equal. Unlike with `==`, a boolean never equals a number, at any depth."""
    if isinstance(value, bool) != isinstance(expected, bool) or value != expected:
        return False
    if isinstance(expected, dict):
        return all(is_same(value[name], each) for name, each in expected.items())
    return not isinstance(expected, list) or all(map(is_same, value, expected))


def unsupported(name: str, expected: str, value: Any) -> HttpError:
    """Return the error for a field with an unsupported value. `expected`: the supported values, as text."""
    text = f"{name}: {brief(value)} is not supported; omit the field, or set it to {expected}"
    return HttpError(400, text, field=name, value=value, code="unsupported_parameter")


def checked(kind: type[F], fields: dict[str, Any]) -> F:
    """Validate the fields of a request as an object of class `kind`. Raise HttpError if the fields are invalid."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        code = "unknown_parameter" if first["type"] == "extra_forbidden" else "invalid_request"
        raise HttpError(400, describe_validation_error(error), code=code, **about_fault(error, num_parts=1)) from None


async def take_sampling(
    fields: dict[str, Any], max_tokens: int | None, encode_words: EncodeWords
) -> tuple[SamplingParams, int | None]:
    """Remove the sampling parameters and the seed from `fields`, and return the parameters and the seed.

    `max_tokens`: the default of the sampling parameter `max_tokens`. `encode_words`: encodes `bad_words`. With the
    returned parameters, the log-probs of samples refer to the sampling distribution. Raise InvalidRequestError or
    HttpError if a value is invalid.
    """
    named: dict[str, Any] = {"max_tokens": max_tokens} | {name: fields.pop(name) for name in SAMPLING if name in fields}
    if is_same(named.get("top_k"), 0):
        named["top_k"] = -1  # in vLLM, 0 also means off
    if named.get("allowed_token_ids") == []:
        del named["allowed_token_ids"]
    edits = checked(EditFields, _taken(fields, EditFields))
    if edits.logit_bias:
        named["logit_bias"] = {int(token_id): bias for token_id, bias in edits.logit_bias.items()}
    if edits.bad_words:
        named["bad_words_token_ids"] = await encode_words(edits.bad_words)
    if (grammar := edits.response_format.grammar) is not None:
        if "structured_outputs" in named:
            text = "response_format: not together with structured_outputs; give one of them"
            raise HttpError(400, text, field="response_format", code="invalid_request")
        named["structured_outputs"] = grammar
    seed = SamplingParams(seed=fields.pop("seed", None)).seed
    return SamplingParams(**named), seed


def _taken(fields: dict[str, Any], kind: type[Fields]) -> dict[str, Any]:
    """Remove the fields of the class `kind` from `fields`, and return the removed fields."""
    return {name: fields.pop(name) for name in kind.model_fields if name in fields}


def recording(params: SamplingParams, num_top: int | None) -> SamplingParams:
    """Return a copy of `params` that requests log-probs of the drawn tokens and of the `num_top` most probable tokens.

    If `num_top` is None, the copy requests log-probs only if `params` has `target_token_ids`.
    """
    if num_top is None:
        return params if params.target_token_ids else params.model_copy(update=dict(logprobs=None))
    return params.model_copy(update=dict(top_logprobs=num_top or None))
