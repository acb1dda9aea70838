"""Worker processes with several ranks."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from adapters import adapt, change
from engine.checkpoints import read_tensors
from transformers import AutoModelForCausalLM

from tiny import make_tiny_model
from trueroll.errors import PushError, WorkerFailedError
from trueroll.kernels.training import align, token_log_probs
from trueroll.rollout import FleetClient, RolloutClient, SamplingParams, WeightPublisher, WorkerProcess, launch_worker

PROMPTS = [[1, 20, 30, 40] * 6, [1, 20, 30, 40] * 6 + [50], [7]]
SIZES: dict[str, Any] = dict(num_blocks=64, num_threads=1)
pytestmark = pytest.mark.usefixtures("forked_workers")


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
            client.sleep(level=1)
            client.wake_up()
        assert samples_of(four) == samples_of(one)
    assert four.exit_code == 0 and psutil.wait_procs(followers, 10)[1] == []


@pytest.fixture(scope="module")
def pair(model: str, forked_workers: None) -> Iterator[list[WorkerProcess]]:
    """A worker with one rank, and a worker with two stages of two."""
    ranks = dict(tensor_parallel_size=2, pipeline_parallel_size=2)
    with launch_worker(model, **SIZES) as one, launch_worker(model, **ranks, **SIZES) as four:
        yield [one, four]


def checksums_of(worker: WorkerProcess) -> dict[str, int]:
    with RolloutClient(worker.address) as client:
        return dict(client.weight_checksums().checksums)


TRANSPORTS: dict[str, dict[str, Any]] = {
    "shared": dict(transport="shared"),
    "gloo": dict(transport="collective"),
    "disk": dict(transport="disk"),
    "sparse": dict(transport="shared", sparse=True),
    "in place": dict(transport="shared", in_place=True),
}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_push_gives_the_same_weights_on_one_rank_and_on_four(
    pair: list[WorkerProcess], model: str, name: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = TRANSPORTS[name] | (dict(folder=tmp_path) if name == "disk" else {})
    tensors, before = read_tensors(Path(model)), samples_of(pair[1])
    with WeightPublisher(**settings) as publisher:
        publisher.connect([worker.address for worker in pair])
        for step in (1, 2):
            for tensor in tensors.values():
                tensor.view(-1)[step :: 1 + 2 * step].mul_(1.0 + 0.1 * (step + list(TRANSPORTS).index(name)))
            publisher.push(tensors, step, allow_older=True)
    found = [checksums_of(worker) for worker in pair]
    assert found[0] == found[1] and len(found[0]) == len(tensors)
    assert samples_of(pair[1]) == samples_of(pair[0]) != before


def test_adapters_are_merged_on_four_ranks_as_on_one(pair: list[WorkerProcess], model: str) -> None:
    with WeightPublisher("shared") as publisher:
        publisher.connect([worker.address for worker in pair])
        publisher.push(read_tensors(Path(model)), 99)
        adapted = adapt(Path(model), target_modules="all-linear")
        publisher.push(adapted, 100, adapters=True)
        change(adapted, 1)
        publisher.push(adapted, 101, adapters=True)
        assert checksums_of(pair[1]) == checksums_of(pair[0])
        assert samples_of(pair[1]) == samples_of(pair[0])


def test_a_worker_with_ranks_drops_its_weights_and_gets_new_ones(pair: list[WorkerProcess], model: str) -> None:
    with RolloutClient(pair[1].address) as client, WeightPublisher("shared") as publisher:
        publisher.connect([pair[1].address])
        client.sleep(level=2)
        assert client.health().memory["weights"] == 0
        client.wake_up()
        publisher.push(read_tensors(Path(model)), 200)
    with launch_worker(model, **SIZES) as fresh:
        assert samples_of(pair[1]) == samples_of(fresh)


def test_a_broken_push_leaves_the_weights_of_all_ranks(pair: list[WorkerProcess], model: str) -> None:
    before = samples_of(pair[1]), checksums_of(pair[1])
    tensors = read_tensors(Path(model))
    tensors["model.norm.weight"][3] = float("nan")
    with WeightPublisher("shared") as publisher:
        publisher.connect([pair[1].address])
        with pytest.raises(PushError, match=r"model.norm.weight: expected finite values"):
            publisher.push(tensors, 300)
    assert (samples_of(pair[1]), checksums_of(pair[1])) == before


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


def test_an_aligned_trainer_has_the_log_probs_of_four_ranks(pair: list[WorkerProcess], model: str) -> None:
    trainer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    align(trainer)
    with RolloutClient(pair[1].address) as client, WeightPublisher("shared") as publisher:
        publisher.connect([pair[1].address])
        publisher.push(read_tensors(Path(model)), 400)
        for group, prompt in zip(client.generate(PROMPTS, SamplingParams(max_tokens=20), seed=3), PROMPTS, strict=True):
            (sample,) = group.samples
            found = token_log_probs(trainer, torch.tensor([[*prompt, *sample.token_ids]]))[0, len(prompt) :]
            assert found.detach().numpy().tobytes() == np.asarray(sample.logprobs).tobytes()


def test_requests_of_a_worker_with_a_killed_rank_end_on_a_worker_with_one_rank(model: str) -> None:
    prompts = [[1, 20, 30, 40 + i] for i in range(16)]
    params = SamplingParams(n=2, max_tokens=150, ignore_eos=True)

    def generate(client: RolloutClient) -> list[Any]:
        groups = client.generate(prompts, params, seed=9)
        return [(s.token_ids, np.asarray(s.logprobs).tobytes()) for group in groups for s in group.samples]

    with launch_worker(model, **SIZES) as one, launch_worker(model, tensor_parallel_size=2, **SIZES) as two:
        with RolloutClient(one.address) as client:
            expected = generate(client)
        with FleetClient([two.address, one.address]) as fleet, ThreadPoolExecutor(1) as pool:
            call = pool.submit(generate, fleet)
            while (accepted := fleet.all_stats().get(two.address)) is None or not accepted.service["accepted"]:
                assert not call.done(), "premise: the call is slow enough"
            assert followers_of(two)[0].is_running() and not call.done(), "premise"
            followers_of(two)[0].kill()
            assert call.result(60) == expected
        assert two.wait() != 0
