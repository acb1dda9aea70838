"""What a caller gives, as messages: each maker checks it, and raises InvalidRequestError that says what to correct.

Pure: knows no connection, and sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from pydantic import ValidationError

from trueroll.errors import InvalidRequestError, brief

from ...engine.request import SampleOutput, SamplingParams, derive_seed, describe_validation_error, plain
from .. import protocol
from .continuation import continuation, goes_on

M = TypeVar(
    "M",
    protocol.Generate,
    protocol.GetScores,
    protocol.Abort,
    protocol.Drain,
    protocol.Sleep,
    protocol.WakeUp,
)
Prompts: TypeAlias = Sequence[Sequence[int] | np.ndarray]
ParamsArg: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
Request: TypeAlias = protocol.Generate | protocol.GetScores


def generate_requests(
    prompts: Prompts,
    params: ParamsArg,
    seed: int | None,
    ids: Sequence[str] | None,
    demand: dict[str, Any],
    errors: str = "raise",
) -> list[Any]:
    """A message for each prompt. With `errors` `return`, the error of a prompt is in the place of its message.

    `demand`: `min_weight_version`, `wait_for_weights`, `while_connected` and, where they are wanted, `deltas`.
    """
    if errors not in ("raise", "return"):
        raise InvalidRequestError(f"errors: expected raise or return, found {brief(errors)}")
    given = _listed(prompts, "prompts")
    count, made = len(given), []
    fields = dict(caller=protocol.new_id(), **demand)
    all_params = _seeded(_one_each(SamplingParams() if params is None else params, count), params, seed)
    all_ids = [protocol.new_id() for _ in given] if ids is None else _checked_ids(ids, count)
    for i, (tokens, id, own) in enumerate(zip(given, all_ids, all_params, strict=True)):
        try:
            array = protocol.tokens_to_bytes(tokens, f"prompts[{i}]")
            made.append(message_of(protocol.Generate, id=id, prompt_token_ids=array, params=own, **fields))
        except InvalidRequestError as error:
            if errors == "raise":
                raise
            made.append(error)
    return made


def continue_requests(
    prompts: Prompts,
    samples: Sequence[SampleOutput],
    params: ParamsArg,
    ids: Sequence[str] | None,
    demand: dict[str, Any],
) -> dict[int, protocol.Generate]:
    """By position, a message for each sample that goes on. `demand`: `min_weight_version` and `wait_for_weights`."""
    given = _listed(prompts, "prompts")
    if len(given) != len(samples):
        raise InvalidRequestError(f"samples: expected one for each of {len(given)} prompts, found {len(samples)}")
    all_params = _one_each(SamplingParams() if params is None else params, len(samples))
    all_ids = [protocol.new_id() for _ in given] if ids is None else _checked_ids(ids, len(given))
    caller = protocol.new_id()
    return {
        i: message_of(protocol.Generate, id=all_ids[i], caller=caller, **demand, **continuation(i, prompt, sample, own))
        for i, (prompt, sample, own) in enumerate(zip(given, samples, all_params, strict=True))
        if goes_on(sample, own)
    }


def score_requests(sequences: Prompts, fields: dict[str, Any]) -> dict[int, protocol.GetScores]:
    """By position, a message for each sequence, with these fields."""
    arrays = [
        protocol.tokens_to_bytes(tokens, f"sequences[{i}]") for i, tokens in enumerate(_listed(sequences, "sequences"))
    ]
    caller = protocol.new_id()
    return {
        i: message_of(protocol.GetScores, id=protocol.new_id(), token_ids=array, caller=caller, **fields)
        for i, array in enumerate(arrays)
    }


def _seeded(all_params: list[SamplingParams], given: ParamsArg, seed: int | None) -> list[SamplingParams]:
    """The parameters of each prompt, with its own seed, if the call has one."""
    own, seed = [params.seed for params in all_params if params.seed is not None], plain(seed)
    if seed is None:
        if own and isinstance(given, SamplingParams) and len(all_params) > 1:
            raise InvalidRequestError(
                f"params: expected no seed in those for {len(all_params)} prompts, as each would draw the same noise, "
                f"found {given.seed}; give generate(..., seed={given.seed}), or a list of params"
            )
        return all_params
    if own or type(seed) is not int or not 0 <= seed < 2**64:
        found = f"one in params as well, {own[0]}" if own else brief(seed)
        raise InvalidRequestError(f"seed: expected one integer in [0, 2**64) for the call, found {found}")
    return [params.model_copy(update={"seed": derive_seed(seed, i)}) for i, params in enumerate(all_params)]


def _checked_ids(ids: Sequence[str], count: int) -> list[str]:
    all_ids = list(ids)
    if len(all_ids) != count:
        raise InvalidRequestError(f"request_ids: expected one for each of {count} prompts, found {len(all_ids)}")
    for id in all_ids:
        if not (isinstance(id, str) and 1 <= len(id) <= protocol.MAX_ID_CHARS):
            raise InvalidRequestError(
                f"request_ids: expected 1 to {protocol.MAX_ID_CHARS} characters, found {brief(id)}"
            )
    return all_ids


def message_of(kind: type[M], **fields: Any) -> M:
    """A message made of what the caller gave, scalars of numpy included. Raises InvalidRequestError."""
    try:
        return kind(**{name: plain(value) for name, value in fields.items()})
    except ValidationError as error:
        raise InvalidRequestError(describe_validation_error(error)) from None


def _listed(sequences: Prompts, what: str) -> list[Sequence[int] | np.ndarray]:
    """Raise InvalidRequestError for a table: padding in its rows would be taken for tokens."""
    if isinstance(sequences, str) or getattr(sequences, "ndim", 1) > 1:
        raise InvalidRequestError(
            f"{what}: expected a list of sequences of token ids without padding, found one {type(sequences).__name__}; "
            "of padded rows give [row[mask].tolist() for row, mask in zip(input_ids, attention_mask.bool())]"
        )
    return list(sequences)


def _one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        raise InvalidRequestError(f"params: expected SamplingParams, or a sequence of them, found {brief(params)}")
    if len(params) != count:
        raise InvalidRequestError(f"params: expected one, or one for each of {count} prompts, found {len(params)}")
    for i, each in enumerate(params):
        if not isinstance(each, SamplingParams):
            raise InvalidRequestError(f"params[{i}]: expected SamplingParams, found {brief(each)}")
    return list(params)
