"""Continued samples have the same bits as samples that were never interrupted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.drive import bits, generate, make_engine, run, tokens, top_bits
from hypothesis import given
from hypothesis import strategies as st

from trueroll.engine.engine import Engine
from trueroll.engine.request import (
    GenerateRequest,
    SampleOutput,
    SamplingParams,
    WeightSpan,
    columns_of,
    derive_seed,
    seed_before,
)
from trueroll.errors import InvalidRequestError, StaleWeightsError
from trueroll.rollout import protocol
from trueroll.rollout.client.continuation import check_one_version, continuation, goes_on, joined

PROMPT = tokens(20)


@pytest.fixture
def engine(tiny_llama: Path) -> Engine:
    return make_engine(tiny_llama, max_model_len=128)


def cut_short(engine: Engine, num_tokens: int, **params: Any) -> list[SampleOutput]:
    """Return the samples of a group that is aborted after `num_tokens` tokens."""
    engine.add(generate("cut", PROMPT, **params))
    for _ in range(num_tokens):
        assert engine.step() == []
    return [sample for sample in engine.abort("cut") if isinstance(sample, SampleOutput)]


def gone_on(engine: Engine, sample: SampleOutput, params: SamplingParams) -> SampleOutput:
    asked = continuation(0, PROMPT.tobytes(), sample, params)
    prompt = protocol.bytes_to_tokens(asked["prompt_token_ids"])
    rest = run(engine, [GenerateRequest("rest", prompt, asked["params"], asked["num_prior_tokens"])])["rest", 0]
    return joined(sample, rest)


def test_routed_experts_are_joined_at_the_seam() -> None:
    """The routes that the second request returns start at the prompt. The routes of the existing tokens are kept."""
    rows = np.arange(10 * 2 * 3, dtype=np.uint8).reshape(10, 2, 3)
    first = SampleOutput("r", 0, [1, 2], None, "abort", 7, 0, (), routed_experts=rows[:5])
    rest = replace(first, token_ids=[3, 4, 5, 6, 7], finish_reason="length", routed_experts=rows + 100)
    whole = joined(first, rest).routed_experts
    assert whole is not None and whole.tobytes() == rows[:5].tobytes() + (rows[5:] + 100).tobytes()
    empty = replace(first, token_ids=[], routed_experts=None)
    assert joined(empty, rest).routed_experts is rest.routed_experts and joined(first, empty).routed_experts is not None
    params = SamplingParams(max_tokens=9, logprobs=None)
    with pytest.raises(InvalidRequestError, match=r"samples\[0\]: return_routed_experts = .* only one part"):
        continuation(0, PROMPT.tobytes(), first, params)
    asking = params.model_copy(update=dict(return_routed_experts=True))
    for sample in (first, empty):
        assert continuation(0, PROMPT.tobytes(), sample, asking)["params"].return_routed_experts


@given(st.integers(0, 2**64 - 1))
def test_seed_before_inverts_derive_seed(seed: int) -> None:
    assert derive_seed(seed_before(seed), 0) == seed and seed_before(derive_seed(seed, 0)) == seed


@pytest.mark.parametrize("num_tokens", [0, 1, 17])
def test_the_whole_has_the_bits_of_an_uninterrupted_sample(engine: Engine, num_tokens: int) -> None:
    params = dict(max_tokens=24, min_tokens=18, seed=2**64 - 1, temperature=0.9, top_p=0.95, top_logprobs=4)
    request = generate("g", PROMPT, n=3, **params, return_sampling_mask=True)
    expected = run(engine, [request])
    samples = cut_short(engine, num_tokens, **request.params.model_dump())
    assert [len(sample.token_ids) for sample in samples] == 3 * [num_tokens]
    for sample in samples:
        assert goes_on(sample, request.params)
        whole, uncut = gone_on(engine, sample, request.params), expected["g", sample.index]
        assert bits(whole) == bits(uncut) and top_bits(whole) == top_bits(uncut)
        assert {name: values.tobytes() for name, values in columns_of(whole).items()} == {
            name: values.tobytes() for name, values in columns_of(uncut).items()
        }
        assert (whole.finish_reason, whole.seed, whole.index) == ("length", uncut.seed, sample.index)
        assert whole.weight_versions == (WeightSpan(0, 0, 24),)


def test_a_stop_string_is_found_across_the_seam(engine: Engine, tiny_llama: Path) -> None:
    from transformers import AutoTokenizer

    free = run(engine, [generate("g", PROMPT, max_tokens=30)])["g", 0]
    # Ids from 259 on are words. Lower ids are single bytes.
    seam = next(i for i in range(2, 30) if min(free.token_ids[i - 1 : i + 1]) >= 259)
    text = AutoTokenizer.from_pretrained(tiny_llama).decode(free.token_ids[seam - 1 : seam + 1]).strip()
    params = {"max_tokens": 30, "stop": ["never in the text", text]}
    expected = run(engine, [generate("g", PROMPT, **params)])["g", 0]
    assert expected.finish_reason == "stop" and expected.stop_reason == text and len(expected.token_ids) == seam + 1
    [sample] = cut_short(engine, seam, **params)
    whole = gone_on(engine, sample, SamplingParams(ignore_eos=True, **params))
    assert bits(whole) == bits(expected) and (whole.finish_reason, whole.stop_reason) == ("stop", text)


def test_without_max_tokens_the_rest_equals_that_of_an_uninterrupted_sample(engine: Engine) -> None:
    expected = run(engine, [generate("g", PROMPT, max_tokens=None)])["g", 0]
    assert len(expected.token_ids) == 128 - 20
    [sample] = cut_short(engine, 5, max_tokens=None)
    rest = SamplingParams(max_tokens=None, ignore_eos=True)
    assert bits(gone_on(engine, sample, rest)) == bits(expected)
    ended = run(engine, [generate("short", PROMPT, max_tokens=7)])["short", 0]
    assert ended.finish_reason == "length" and goes_on(ended, rest)
    assert bits(gone_on(engine, ended, rest)) == bits(expected)


def sample_of(num_tokens: int, reason: Any, *spans: WeightSpan) -> SampleOutput:
    return SampleOutput("a", 1, [7] * num_tokens, np.zeros(num_tokens, np.float32), reason, 9, 0, spans)


def test_spans_start_at_the_first_token_and_merge_within_a_version() -> None:
    first = sample_of(5, "abort", WeightSpan(1, 0, 2), WeightSpan(2, 2, 5))
    rest = sample_of(4, "length", WeightSpan(2, 0, 1), WeightSpan(3, 1, 4))
    assert joined(first, rest).weight_versions == (WeightSpan(1, 0, 2), WeightSpan(2, 2, 6), WeightSpan(3, 6, 9))
    later = replace(rest, weight_versions=(WeightSpan(3, 0, 4),))
    assert joined(first, later).weight_versions[2:] == (WeightSpan(3, 5, 9),)
    assert joined(sample_of(0, "abort"), later).weight_versions == (WeightSpan(3, 0, 4),)


def test_a_joined_sample_lists_the_old_kv_of_both_parts() -> None:
    first = replace(sample_of(5, "abort", WeightSpan(1, 0, 2), WeightSpan(2, 2, 5)), old_kv=(WeightSpan(1, 2, 5),))
    rest = replace(sample_of(4, "length", WeightSpan(2, 0, 1), WeightSpan(3, 1, 4)), old_kv=(WeightSpan(2, 1, 4),))
    assert joined(first, rest).old_kv == (WeightSpan(1, 2, 5), WeightSpan(2, 6, 9))


def test_a_continued_sample_of_several_versions_is_refused_with_one_version() -> None:
    one, two = sample_of(5, "abort", WeightSpan(1, 0, 5)), sample_of(4, "length", WeightSpan(2, 0, 4))
    check_one_version(SamplingParams(one_version=True), joined(one, one))
    check_one_version(SamplingParams(), joined(one, two))
    with pytest.raises(StaleWeightsError, match="begun with version 1 .* continued with version 2"):
        check_one_version(SamplingParams(one_version=True), joined(one, two))


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (sample_of(3, "abort"), True),
        (sample_of(3, "stop"), False),
        (sample_of(3, "error"), False),
        (sample_of(3, "length"), True),
        (sample_of(8, "length"), False),
    ],
    ids=lambda value: value.finish_reason if isinstance(value, SampleOutput) else None,
)
def test_goes_on(sample: SampleOutput, expected: bool) -> None:
    assert goes_on(sample, SamplingParams(max_tokens=8)) is expected


def test_parameters_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"^samples\[4\]: max_tokens is .* already has 8 tokens"):
        continuation(4, PROMPT.tobytes(), sample_of(8, "abort"), SamplingParams(max_tokens=8))
    with pytest.raises(InvalidRequestError, match=r"^samples\[4\]: logprobs = .* only one part"):
        continuation(4, PROMPT.tobytes(), sample_of(3, "abort"), SamplingParams(logprobs=None))
    with pytest.raises(
        InvalidRequestError,
        match=r"^samples\[4\]: top_logprobs is 2, but the sample was generated with top_logprobs = None",
    ):
        continuation(4, PROMPT.tobytes(), sample_of(3, "abort"), SamplingParams(top_logprobs=2))


def test_prior_tokens_need_n_1_and_a_prompt_that_contains_them(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="^num_prior_tokens must not exceed the prompt's 20 tokens"):
        engine.add(replace(generate("g", PROMPT), num_prior_tokens=21))
    with pytest.raises(InvalidRequestError, match="^num_prior_tokens requires n = 1.*got n = 2"):
        engine.add(replace(generate("g", PROMPT, n=2), num_prior_tokens=3))
