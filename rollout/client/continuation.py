"""Continue a sample that ended early: request its remaining tokens, then join the two parts.

A token depends only on the weights, the preceding tokens, its position, and the seed of the sample. So the remaining
tokens are requested as sample 0 of a new request. The prompt of the new request ends with the existing tokens. The seed
of the new request is chosen so that the remaining tokens are sampled with the same random numbers as in the original
sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trueroll.errors import InvalidRequestError, StaleWeightsError

from ...engine.request import (
    SampleOutput,
    SamplingParams,
    WeightSpan,
    columns_of,
    empty_columns,
    join_columns,
    seed_before,
)


def goes_on(sample: SampleOutput, params: SamplingParams) -> bool:
    """Return whether a sample can be continued.

    If the finish reason is `length` and `max_tokens` is None, return True: only the worker knows whether the context
    has room.
    """
    if sample.finish_reason == "length":
        return params.max_tokens is None or len(sample.token_ids) < params.max_tokens
    return sample.finish_reason == "abort"


def continuation(position: int, prompt: bytes, sample: SampleOutput, params: SamplingParams) -> dict[str, Any]:
    """Return the fields of the request that generates the remaining tokens of `sample`.

    `position`: position of the sample in the call, for error texts. `prompt`: the bytes of an int32 array.
    `params`: the parameters of the whole sample. Raise InvalidRequestError if the parameters do not match the sample.
    """
    num_prior, field = len(sample.token_ids), f"samples[{position}]"
    if params.max_tokens is not None and params.max_tokens <= num_prior:
        raise InvalidRequestError(
            f"{field}: max_tokens is {params.max_tokens}, but the sample already has {num_prior} tokens; give the "
            "parameters of the original call",
            field=field,
            value=params.max_tokens,
            limit=num_prior + 1,
        )
    _check_records(field, sample, params)
    prior = np.array(sample.token_ids, "<i4").tobytes()
    rest = dict(
        n=1,
        seed=seed_before(sample.seed),
        max_tokens=params.max_tokens and params.max_tokens - num_prior,
        min_tokens=max(0, params.min_tokens - num_prior),
    )
    return dict(
        prompt_token_ids=prompt + prior,
        params=params.model_copy(update=rest),
        num_prior_tokens=num_prior,
    )


def _check_records(field: str, sample: SampleOutput, params: SamplingParams) -> None:
    """Raise InvalidRequestError unless `params` request the same columns of log-probs and routed experts that the
    sample has.
    """
    if (params.logprobs is None) != (sample.logprobs is None):
        raise InvalidRequestError(
            f"{field}: logprobs = {params.logprobs!r} would give log-probs to only one part of the sample; give the "
            "parameters of the original call",
            field=field,
            value=params.logprobs,
        )
    top_logprobs = None if sample.top_token_ids is None else sample.top_token_ids.shape[1]
    if params.top_logprobs != top_logprobs:
        raise InvalidRequestError(
            f"{field}: top_logprobs is {params.top_logprobs}, but the sample was generated with top_logprobs = "
            f"{top_logprobs}; give the parameters of the original call",
            field=field,
            value=params.top_logprobs,
            limit=top_logprobs,
        )
    asked, found = (
        {name: values.shape[1:] for name, values in each.items()}
        for each in (empty_columns(params), columns_of(sample))
    )
    if other := next((name for name in (*asked, *found) if asked.get(name) != found.get(name)), None):
        text = (
            f"{field}: the parameters do not record the same {other} as the sample; give the parameters of the "
            "original call"
        )
        raise InvalidRequestError(text, field=field)
    if sample.token_ids and params.return_routed_experts != (sample.routed_experts is not None):
        raise InvalidRequestError(
            f"{field}: return_routed_experts = {params.return_routed_experts} would give routed experts to only one "
            "part of the sample; give the parameters of the original call",
            field=field,
            value=params.return_routed_experts,
        )


def joined(first: SampleOutput, rest: SampleOutput) -> SampleOutput:
    """Join the two parts of a sample. The parts have spans of tokens with one weight version each. If the last span of
    the first part and the first span of the second part have the same weight version, merge both spans.
    """
    return replace(
        first,
        token_ids=first.token_ids + rest.token_ids,
        routed_experts=_joined_routes(first.routed_experts, rest.routed_experts),
        finish_reason=rest.finish_reason,
        stop_reason=rest.stop_reason,
        error=rest.error,
        weight_versions=_joined_spans(first, rest),
        old_kv=(*first.old_kv, *_moved(rest.old_kv, len(first.token_ids))),
        **join_columns(columns_of(first), columns_of(rest)),
    )


def _joined_routes(first: np.ndarray | None, rest: np.ndarray | None) -> np.ndarray | None:
    """Join the routed experts of two parts of a sample. The first rows of `rest` repeat the rows of `first` and are
    dropped.
    """
    if first is None or rest is None:
        return first if rest is None else rest
    return np.concatenate((first, rest[len(first) :]))


def _joined_spans(first: SampleOutput, rest: SampleOutput) -> tuple[WeightSpan, ...]:
    moved = _moved(rest.weight_versions, len(first.token_ids))
    spans = list(first.weight_versions)
    if spans and moved and spans[-1].version == moved[0].version:
        moved[0] = replace(moved[0], start=spans.pop().start)
    return (*spans, *moved)


def _moved(spans: Sequence[WeightSpan], count: int) -> list[WeightSpan]:
    return [replace(span, start=span.start + count, end=span.end + count) for span in spans]


def check_one_version(params: SamplingParams, sample: SampleOutput) -> None:
    """Raise StaleWeightsError if a sample with `one_version` has tokens of several weight versions."""
    versions = sorted({span.version for span in sample.weight_versions})
    if params.one_version and len(versions) > 1:
        raise StaleWeightsError(
            f"one_version: the sample was begun with version {versions[0]} of the weights and continued with version "
            f"{versions[-1]}; generate the sample again, or leave out one_version"
        )
