"""Sampling parameters: accepted values and their conversion."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from refusals import about

from trueroll.engine.grammars.source import Grammar
from trueroll.engine.request import SamplingParams, derive_seed
from trueroll.errors import ConfigError, InvalidRequestError

INTEGERS = ["n", "max_tokens", "min_tokens", "top_k", "seed", "top_logprobs"]
FLOATS = ["temperature", "top_p", "min_p"]


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.uint8, np.uint64])
def test_numpy_integers_become_python_integers(kind: Any) -> None:
    for name in INTEGERS:
        found = getattr(SamplingParams(**{name: kind(5)}), name)
        assert found == 5 and type(found) is int, name
    for token_ids in ([kind(5), 6], (kind(5), kind(6)), np.array([5, 6], kind)):
        found = SamplingParams(stop_token_ids=token_ids).stop_token_ids  # type: ignore[arg-type]
        assert found == (5, 6) and {*map(type, found)} == {int}
    assert derive_seed(kind(5), kind(6)) == derive_seed(5, 6)


def test_a_numpy_seed_may_have_64_bits() -> None:
    assert SamplingParams(seed=np.uint64(2**64 - 1)).seed == 2**64 - 1  # type: ignore[arg-type]
    assert derive_seed(np.uint64(2**64 - 1), np.int64(3)) == derive_seed(2**64 - 1, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int64])
def test_numpy_numbers_are_accepted_as_floats(kind: Any) -> None:
    for name in FLOATS:
        found = getattr(SamplingParams(**{name: kind(1)}), name)
        assert found == 1.0 and type(found) is float, name


@pytest.mark.parametrize("value", [True, np.True_])
def test_a_boolean_is_no_number(value: Any) -> None:
    for name in [*INTEGERS, *FLOATS]:
        with pytest.raises(InvalidRequestError, check=about(name)):
            SamplingParams(**{name: value})
    for token_ids in ([value], (value, 3), np.array([True])):
        with pytest.raises(InvalidRequestError, check=about("stop_token_ids[0]")):
            SamplingParams(stop_token_ids=token_ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [2.0, np.float32(2.0), "2", np.str_("2")])
def test_only_integers_are_accepted_as_integers(value: Any) -> None:
    for name in INTEGERS:
        with pytest.raises(InvalidRequestError, check=about(name)):
            SamplingParams(**{name: value})
    with pytest.raises(InvalidRequestError, check=about("stop_token_ids[0]", value=value)):
        SamplingParams(stop_token_ids=[value])  # type: ignore[arg-type]


def test_a_numpy_number_out_of_range_is_named() -> None:
    with pytest.raises(InvalidRequestError, check=about("n", value=0, limit=1)):
        SamplingParams(n=np.int64(0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ban",
    [
        dict(allowed_token_ids=[1]),
        dict(bad_words_token_ids=[[1]]),
        dict(min_tokens=1),
        dict(structured_outputs=dict(choice=["a"])),
    ],
)
def test_an_infinite_temperature_is_refused_with_bans(ban: dict[str, Any]) -> None:
    """Minus infinity divided by infinity is not a number."""
    largest = float(np.finfo(np.float32).max)
    with pytest.raises(InvalidRequestError, check=about("temperature", value=1e308, limit=largest)):
        SamplingParams(temperature=1e308, **ban)
    assert SamplingParams(temperature=largest, **ban).temperature == largest
    assert SamplingParams(temperature=1e308, logit_bias=((1, -100.0),), frequency_penalty=2.0).temperature == 1e308


def test_a_grammar_is_stored_as_text_and_compared_by_it() -> None:
    given: Any = {"json": {"type": "object", "required": ["b", "a"]}, "regex": None}
    params = SamplingParams(structured_outputs=given)
    grammar = params.structured_outputs
    assert grammar is not None and grammar.json == '{"type":"object","required":["b","a"]}'
    assert params == SamplingParams(**params.model_dump()) and hash(params) == hash(
        SamplingParams(**params.model_dump())
    )
    assert Grammar(json='{ "type":"object", "required": ["b", "a"] }') == grammar
    assert params.recorded.structured_outputs == grammar and params.num_numbers > 0
    with pytest.raises(ConfigError, match="structured_outputs"):
        _ = params.trainer_temperature


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ({}, r"exactly one of json, .* \(got none of them\)"),
        ({"regex": "a", "choice": ["b"]}, r"\(got regex and choice\)"),
        ({"regex": ""}, "regex: an empty text is not allowed"),
        ({"choice": ["a", ""]}, "choice: an empty text is not allowed"),
        ({"choice": ["a"] * 10_001}, "at most 10000 items"),
        ({"regex": 3}, "regex: must be a valid string"),
        ({"regex": "a" * 2**18 + "a"}, "at most 262144 bytes"),
        ({"regex": "é" * 2**17 + "a"}, "at most 262144 bytes"),
        ({"regex": "a\0"}, r"U\+0000"),
        ({"grammar": "\ud800"}, "is not a valid character"),
        ({"json": '{"a":"\\ud800"}'}, "is not a valid character"),
        ({"json": "["}, "is not valid JSON"),
        ({"json": "[1]"}, "must be a JSON object"),
        ({"json": '{"a":NaN}'}, "NaN is not a JSON value"),
        ({"json": {"a": {1, 2}}}, "is not valid JSON"),
        ({"json": "[" * 100_000}, "nested more than 64 levels deep"),
        ({"json": '{"a":' * 65 + "1" + "}" * 65}, "nested more than 64 levels deep"),
        ({"regex": "a", "disable_any_whitespace": True}, "needs json or json_object"),
        ({"structural_tag": "{}"}, "structural_tag"),
        ("[a-z]", "must be an instance of Grammar"),
    ],
    ids=range(20),
)
def test_what_is_no_grammar_is_refused(grammar: Any, message: str) -> None:
    with pytest.raises(
        InvalidRequestError, match=f"^structured_outputs: .*{message}", check=about("structured_outputs")
    ):
        SamplingParams(structured_outputs=grammar)
