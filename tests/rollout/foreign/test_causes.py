"""The size of differences names the dtype and other weights, with a known chance of an error."""

from __future__ import annotations

import numpy as np
import pytest

from trueroll.rollout.foreign.causes import Verdict, judge
from trueroll.rollout.foreign.trainer import DISTRIBUTIONS

NUM_TOKENS, NUM_AUDITS = 200, 200
SIZES = {"bfloat16": 0.03, "float16": 0.004, "float32": 0.0}


def judged(size: float, seed: int, num_tokens: int = NUM_TOKENS) -> Verdict:
    """Judge an engine with normal errors of `size` nats. Errors of some tokens are ten times larger than of others, on
    both sides.
    """
    chance = np.random.default_rng(seed)
    exact = -chance.uniform(0.1, 5.0, num_tokens)
    scale = chance.choice([0.3, 1.0, 3.0], num_tokens)

    def off_by(size: float) -> np.ndarray:
        return (exact + scale * size * chance.normal(size=num_tokens)).astype(np.float32)

    by_dtype = {dtype: off_by(own) for dtype, own in SIZES.items()}
    told = off_by(size)
    return judge(
        told, np.arange(num_tokens) % 2 == 0, {each: dict.fromkeys(DISTRIBUTIONS, by_dtype[each]) for each in SIZES}
    )


@pytest.mark.parametrize(
    "times, fewest, most", [(0.5, 0, 0), (1.0, 0, 0), (1.27, 0, 0), (2**0.5, 0, 2), (3.0, 199, 200), (5.0, 200, 200)]
)
def test_other_weights_are_named_if_they_are_certain(times: float, fewest: int, most: int) -> None:
    verdicts = [judged(times * SIZES["bfloat16"], seed) for seed in range(NUM_AUDITS)]
    assert fewest <= sum(verdict.dtype is None for verdict in verdicts) <= most
    within = sum(verdict.ratio.low < times < verdict.ratio.high for verdict in verdicts)
    assert within >= NUM_AUDITS - 3, "the interval has the right width"
    assert {verdict.dtype for verdict in verdicts} <= {None, "bfloat16"}


def test_few_tokens_accuse_no_engine() -> None:
    assert all(judged(3 * SIZES["bfloat16"], seed, 4).dtype is not None for seed in range(20))


@pytest.mark.parametrize("size, dtype", [(0.004, "float16"), (1e-6, "float32"), (0.0, "float32")])
def test_smaller_differences_are_of_a_finer_dtype(size: float, dtype: str) -> None:
    assert [judged(size, seed).dtype for seed in range(20)] == [dtype] * 20
