"""Sampling parameters: accepted values and their conversion."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from refusals import about

from trueroll.engine.request import SamplingParams, derive_seed
from trueroll.errors import InvalidRequestError

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
