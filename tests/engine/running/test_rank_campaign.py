"""Random requests on four ranks give the bits of one rank. An ordinary run serves a few requests. TRUEROLL_RANK_TOKENS
sets a number of tokens for each of FAMILIES.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trueroll.engine.engine import Engine
from trueroll.engine.request import GenerateRequest, SampleOutput, ScoreOutput, ScoreRequest

from ..drive import generate, tokens
from .test_ranks import FAMILIES, config_of

LEAST_TOKENS = int(os.environ.get("TRUEROLL_RANK_TOKENS", "0"))
ROUND = 64 if LEAST_TOKENS else 8


def random_requests(round: int) -> list[GenerateRequest | ScoreRequest]:
    """Return requests that share prefixes, with random lengths and sampling parameters."""
    random = np.random.default_rng(round)
    shared = tokens(int(random.integers(1, 120)), seed=round)
    found: list[GenerateRequest | ScoreRequest] = []
    for i in range(ROUND):
        prompt = np.concatenate((shared[: random.integers(0, len(shared) + 1)], tokens(5, seed=1000 * round + i)))
        if random.random() < 0.15:
            found.append(ScoreRequest(f"{i}", prompt))
            continue
        params: dict[str, Any] = dict(n=int(random.integers(1, 9)), max_tokens=int(random.integers(1, 60)), seed=i)
        params["temperature"] = float(random.choice([0.0, 0.7, 1.0, 1.0]))
        if random.random() < 0.3:
            params |= dict(top_k=int(random.integers(1, 50)), top_p=0.95)
        if random.random() < 0.2:
            params |= dict(top_logprobs=3)
        found.append(generate(f"{i}", prompt, **params))
    return found


def outputs_of(engine: Engine, requests: list[GenerateRequest | ScoreRequest]) -> dict[tuple[str, int], Any]:
    found = dict[tuple[str, int], Any]()
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        for output in engine.step():
            if isinstance(output, ScoreOutput):
                assert output.logprobs is not None
                found[output.request_id, -1] = output.logprobs.tobytes()
            else:
                assert isinstance(output, SampleOutput) and output.logprobs is not None
                tops = b"" if output.top_logprobs is None else output.top_logprobs.tobytes()
                found[output.request_id, output.index] = tuple(output.token_ids), output.logprobs.tobytes(), tops
    return found


@pytest.mark.parametrize("family", FAMILIES if LEAST_TOKENS else ["qwen3_5_moe"])
def test_no_bit_differs_between_one_rank_and_four(family: str, tmp_path: Path) -> None:
    config = config_of(family, tmp_path, num_blocks=5 * ROUND, max_num_seqs=2 * ROUND, max_num_batched_tokens=256)
    four = Engine(config.model_copy(update=dict(tensor_parallel_size=4)))
    try:
        one, count, rounds = Engine(config), 0, 0
        while count < LEAST_TOKENS or rounds < 2:
            requests = random_requests(rounds)
            expected = outputs_of(one, requests)
            assert outputs_of(four, requests) == expected, f"round {rounds}"
            count += sum(len(sample[0]) for (_, index), sample in expected.items() if index >= 0)
            rounds += 1
        assert four.stats() == one.stats()
        stats = one.stats()
        print(f"{family}: {count} tokens, 0 samples differ; {stats.prefix_hits} hits, {stats.preemptions} preemptions")
        assert stats.prefix_hits > 0 and stats.preemptions > 0, "premise"
    finally:
        four.close()
