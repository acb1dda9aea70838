"""Routed experts pass from the engine through a worker into a client's arrays, for every call that returns routed
experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from engine.drive import tokens
from serving import WorkerOnThread

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.running.loading import load_dummy
from trueroll.errors import InvalidRequestError, TruerollError
from trueroll.rollout import RolloutClient, SampleOutput, SamplingParams
from trueroll.rollout.config import WorkerConfig

PROMPT = tokens(20)
ASKED = SamplingParams(n=2, max_tokens=9, seed=3, ignore_eos=True, return_routed_experts=True)


@contextmanager
def client_of(folder: Path) -> Iterator[RolloutClient]:
    """Yield a client of a worker for the model in `folder`, with random weights."""
    config = EngineConfig(model=str(folder), backend="reference", num_threads=1, num_blocks=64, block_size=8)
    running = WorkerOnThread(WorkerConfig(), lambda: Engine(config, load_dummy(config)))
    with RolloutClient(running.address) as client:
        yield client
    running.worker.drain()
    running.join()
    assert running.error is None


@pytest.fixture
def client(tmp_path: Path) -> Iterator[RolloutClient]:
    """A client of a worker with a mixture of experts."""
    with client_of(make_tiny_model("qwen3_moe", tmp_path / "m")) as client:
        yield client


def test_every_call_returns_the_same_routed_experts(client: RolloutClient) -> None:
    [group] = client.generate([PROMPT], ASKED)
    whole = [np.concatenate((PROMPT, sample.token_ids)) for sample in group.samples]
    scores = client.score(whole, return_routed_experts=True)
    streamed = {s.index: s for _, s in client.stream([PROMPT], ASKED, deltas=True) if isinstance(s, SampleOutput)}
    short = client.generate([PROMPT], ASKED.model_copy(update=dict(max_tokens=4)))[0].samples
    continued = client.continue_samples([PROMPT] * 2, short, ASKED)
    for i, (sample, score) in enumerate(zip(group.samples, scores, strict=True)):
        found = sample.routed_experts
        assert found is not None and found.shape == (28, 2, 3) and found.dtype == np.uint8 and found.flags.writeable
        for other in (score, streamed[i], continued[i]):
            assert other.routed_experts is not None and np.array_equal(other.routed_experts, found)
    health, stats = client.health(), client.stats()
    assert health.engine is not None
    assert health.memory["routed_experts"] > 0 and health.engine["route_bytes"] == 2 * 3
    counts = np.frombuffer(stats.engine["expert_tokens"], "<i8")
    assert counts.sum() == 2 * 3 * stats.engine["computed_tokens"]


def test_a_dense_model_refuses_only_requests_for_routed_experts(tmp_path: Path) -> None:
    with client_of(make_tiny_model("qwen3", tmp_path / "m")) as client:
        plain = ASKED.model_copy(update=dict(return_routed_experts=False))
        refused, group = client.generate(
            [PROMPT, PROMPT], [ASKED, plain.model_copy(update=dict(seed=4))], errors="return"
        )
        assert isinstance(refused, InvalidRequestError) and "return_routed_experts is not supported" in str(refused)
        assert not isinstance(group, TruerollError)
        assert len(group.samples) == 2 and group.samples[0].routed_experts is None
        with pytest.raises(InvalidRequestError, match="return_routed_experts"):
            client.score([PROMPT], return_routed_experts=True)
        assert "routed_experts" not in client.health().memory
