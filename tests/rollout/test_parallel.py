"""Worker processes with several ranks."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import psutil
import pytest

from tiny import make_tiny_model
from trueroll.errors import IllegalStateError, WorkerFailedError
from trueroll.rollout import RolloutClient, SamplingParams, WorkerProcess, launch_worker

PROMPTS = [[1, 20, 30, 40] * 6, [1, 20, 30, 40] * 6 + [50], [7]]
SIZES: dict[str, Any] = dict(num_blocks=64, num_threads=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes: dict[str, Any] = dict(num_attention_heads=8, intermediate_size=512, num_hidden_layers=4)
    return str(make_tiny_model("llama", tmp_path_factory.mktemp("model"), **sizes))


def samples_of(worker: WorkerProcess) -> list[Any]:
    params = SamplingParams(n=3, max_tokens=40, top_p=0.9)
    with RolloutClient(worker.address) as client:
        groups = client.generate(PROMPTS, params, seed=5)
        return [(s.token_ids, np.asarray(s.logprobs).tobytes()) for group in groups for s in group.samples]


def followers_of(worker: WorkerProcess) -> list[psutil.Process]:
    return [c for c in psutil.Process(worker.pid).children() if "trueroll.engine.parallel.follower" in c.cmdline()]


def test_a_worker_with_four_ranks_gives_the_bits_of_a_worker_with_one(model: str) -> None:
    with launch_worker(model, **SIZES) as one, launch_worker(model, tensor_parallel_size=4, **SIZES) as four:
        assert samples_of(four) == samples_of(one)
        followers = followers_of(four)
        assert len(followers) == 3
        with RolloutClient(four.address) as client:
            engine = client.health().engine
            assert engine is not None and (engine["tensor_parallel_size"], engine["pieces"]) == (4, 4)
            for call in (client.weight_checksums, lambda: client.sleep(level=2)):
                with pytest.raises(IllegalStateError, match="with 4 ranks cannot receive, read, save or drop"):
                    call()
            client.sleep(level=1)
            client.wake_up()
        assert samples_of(four) == samples_of(one)
    assert four.exit_code == 0 and psutil.wait_procs(followers, 10)[1] == []


def test_a_killed_rank_ends_a_worker_without_work(model: str) -> None:
    with launch_worker(model, tensor_parallel_size=2, **SIZES) as worker:
        followers_of(worker)[0].send_signal(signal.SIGKILL)
        assert worker.wait() != 0


def test_a_killed_rank_ends_the_worker_and_every_request(model: str) -> None:
    with launch_worker(model, tensor_parallel_size=2, **SIZES) as worker:
        (follower,) = followers_of(worker)
        with RolloutClient(worker.address) as client:
            follower.send_signal(signal.SIGKILL)
            with pytest.raises(WorkerFailedError, match=rf"rank 1 of 2 \(process {follower.pid}\) ended"):
                client.generate(PROMPTS, SamplingParams(max_tokens=200), seed=1)
        assert worker.wait() != 0
    assert not follower.is_running()
