"""Convert a caller's arguments to messages. Invalid arguments raise InvalidRequestError.

Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from pydantic import ValidationError

from trueroll.errors import InvalidRequestError, brief

from ...engine.request import Distribution, SampleOutput, SamplingParams, derive_seed, from_validation, plain
from .. import protocol
from .continuation import continuation, goes_on
from .media import Prompt

M = TypeVar(
    "M",
    protocol.Generate,
    protocol.GetScores,
    protocol.Abort,
    protocol.Drain,
    protocol.Sleep,
    protocol.WakeUp,
    protocol.UnloadAdapter,
    protocol.BeginPush,
    protocol.CommitPush,
)
ParamsArg: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
Request: TypeAlias = protocol.Generate | protocol.GetScores


def generate_requests(
    prompts: Sequence[Prompt | InvalidRequestError],
    params: ParamsArg,
    seed: int | None,
    ids: Sequence[str] | None,
    demand: dict[str, Any],
    errors: str = "raise",
) -> list[Any]:
    """Return a message for each prompt. With `errors="return"`, each invalid prompt gets an error instead of a message.

    `demand`: message fields `min_weight_version`, `wait_for_weights`, `adapter`, `while_connected` and optionally
    `deltas` and `delta_seconds`.
    """
    if errors not in ("raise", "return"):
        text = f"errors: must be raise or return (got {brief(errors)})"
        raise InvalidRequestError(text, field="errors", value=errors)
    count, made = len(prompts), []
    fields = dict(caller=protocol.new_id(), **demand)
    all_params = _seeded(_one_each(SamplingParams() if params is None else params, count), params, seed)
    all_ids = [protocol.new_id() for _ in prompts] if ids is None else _checked_ids(ids, count)
    for prompt, id, own in zip(prompts, all_ids, all_params, strict=True):
        try:
            if isinstance(prompt, InvalidRequestError):
                raise prompt
            given = dict(prompt_token_ids=prompt.token_ids, images=prompt.refs)
            made.append(message_of(protocol.Generate, id=id, params=own, **given, **fields))
        except InvalidRequestError as error:
            if errors == "raise":
                raise
            made.append(error)
    return made


def continue_requests(
    prompts: Sequence[Prompt],
    samples: Sequence[SampleOutput],
    params: ParamsArg,
    ids: Sequence[str] | None,
    demand: dict[str, Any],
) -> dict[int, protocol.Generate]:
    """Return a map from the position of each sample that must be continued to the message for this sample. `demand`:
    message fields `min_weight_version`, `wait_for_weights` and `adapter`.
    """
    _check_count("samples", "one for each of", len(samples), len(prompts))
    all_params = _one_each(SamplingParams() if params is None else params, len(samples))
    all_ids = [protocol.new_id() for _ in prompts] if ids is None else _checked_ids(ids, len(prompts))
    caller = protocol.new_id()
    fields = dict(caller=caller, **demand)
    return {
        i: message_of(
            protocol.Generate,
            id=all_ids[i],
            images=prompt.refs,
            **continuation(i, prompt.token_ids, sample, own),
            **fields,
        )
        for i, (prompt, sample, own) in enumerate(zip(prompts, samples, all_params, strict=True))
        if goes_on(sample, own)
    }


def score_requests(
    sequences: Sequence[Prompt],
    start: int | Sequence[int],
    targets: Sequence[Any] | None,
    fields: dict[str, Any],
) -> dict[int, protocol.GetScores]:
    """Return a map from the position of each sequence to the message for this sequence. `start`: the index of the first
    token with a log-prob; either one index for all sequences, or one index for each sequence. `targets`: the
    target_token_ids of each sequence, or None. `fields`: the other fields of each message.
    """
    fields = dict(caller=protocol.new_id(), **fields)
    starts = list(start) if isinstance(start, Sequence | np.ndarray) else [start] * len(sequences)
    _check_count("start", "one, or one for each of", len(starts), len(sequences))
    targets = [None] * len(sequences) if targets is None else targets
    _check_count("target_token_ids", "one array for each of", len(targets), len(sequences))
    return {
        i: message_of(
            protocol.GetScores,
            id=protocol.new_id(),
            token_ids=sequence.token_ids,
            images=sequence.refs,
            start=start,
            target_token_ids=None if ids is None else _targets_to_bytes(ids, i),
            **fields,
        )
        for i, (sequence, start, ids) in enumerate(zip(sequences, starts, targets, strict=True))
    }


def _targets_to_bytes(target_token_ids: Any, position: int) -> bytes:
    """Return the target_token_ids of one sequence, integers [rows, K], as the protocol's int32 array."""
    name = f"target_token_ids[{position}]"
    try:
        found = np.asarray(target_token_ids)
    except ValueError:  # numpy raises ValueError for rows of different lengths
        found = np.empty(0)
    if found.ndim != 2:
        text = f"{name} must have the same number of token ids for each token (got {brief(target_token_ids)})"
        raise InvalidRequestError(text, field=name)
    return protocol.tokens_to_bytes(found.reshape(-1), name)


def scored_distribution(distribution: Distribution | None, values: dict[str, Any]) -> Distribution:
    """Return the distribution for a score call: `distribution` if given, else a new distribution with `values`. Raise
    InvalidRequestError if `distribution` is given and one of `values` differs from its default.
    """
    if distribution is None:
        return Distribution(**values)
    fields = Distribution.model_fields
    if twice := next((name for name, value in values.items() if value != fields[name].default), None):
        text = f"{twice} must be left out if distribution is given (got {brief(values[twice])})"
        raise InvalidRequestError(text, field=twice, value=values[twice])
    return distribution.recorded if isinstance(distribution, SamplingParams) else distribution


def _seeded(all_params: list[SamplingParams], given: ParamsArg, seed: int | None) -> list[SamplingParams]:
    """Return the parameters of each prompt. If the call has a seed, each prompt gets its own seed."""
    own, seed = [params.seed for params in all_params if params.seed is not None], plain(seed)
    if seed is None:
        if own and isinstance(given, SamplingParams) and len(all_params) > 1:
            raise InvalidRequestError(
                f"params: with seed {given.seed}, all {len(all_params)} prompts would be sampled with the same random "
                f"numbers; call generate(..., seed={given.seed}), or give a list of params",
                field="params",
                value=given.seed,
            )
        return all_params
    if own or type(seed) is not int or not 0 <= seed < 2**64:
        if own:
            text = f"seed: the params also have a seed ({own[0]}); give only one of them"
        else:
            text = f"seed: must be an integer in [0, 2**64) (got {brief(seed)})"
        raise InvalidRequestError(text, field="seed", value=seed)
    return [params.model_copy(update={"seed": derive_seed(seed, i)}) for i, params in enumerate(all_params)]


def _checked_ids(ids: Sequence[str], count: int) -> list[str]:
    all_ids = list(ids)
    _check_count("request_ids", "one for each of", len(all_ids), count)
    most = protocol.MAX_ID_CHARS
    for id in all_ids:
        if not (isinstance(id, str) and 1 <= len(id) <= most):
            text = f"request_ids: an id must have 1 to {most} characters (got {brief(id)})"
            raise InvalidRequestError(text, field="request_ids", value=id, limit=most)
    return all_ids


def _check_count(field: str, expected: str, found: int, count: int) -> None:
    if found != count:
        text = f"{field}: there must be {expected} {count} prompts (got {found})"
        raise InvalidRequestError(text, field=field, value=found, limit=count)


def message_of(kind: type[M], **fields: Any) -> M:
    """Make a message from a caller's arguments, which may be numpy scalars. Raise InvalidRequestError if an argument is
    invalid.
    """
    try:
        return kind(**{name: plain(value) for name, value in fields.items()})
    except ValidationError as error:
        raise from_validation(InvalidRequestError, error) from None


def _one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        text = f"params: must be SamplingParams or a sequence of them (got {brief(params)})"
        raise InvalidRequestError(text, field="params", value=params)
    _check_count("params", "one, or one for each of", len(params), count)
    for i, each in enumerate(params):
        if not isinstance(each, SamplingParams):
            text = f"params[{i}]: must be SamplingParams (got {brief(each)})"
            raise InvalidRequestError(text, field=f"params[{i}]", value=each)
    return list(params)
