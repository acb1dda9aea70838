"""TRL's trainers on a fleet of two workers. Compared with training on one worker, only the clients are different."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl_setup import ServedEngine, async_settings, grpo_settings, serve

from trueroll.rollout import AsyncFleetClient, FleetClient, WeightPublisher
from trueroll.rollout.integrations.trl import (
    AlignedGRPOTrainer,
    TruerollWeightTransfer,
    TruerollWorker,
    trueroll_generation,
)

PROMPTS: Any = Dataset.from_dict({"prompt": [f"{n} animals are" for n in range(2, 10)]})


@pytest.fixture(scope="module")
def served(tiny_llama: Path) -> Iterator[list[ServedEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serve(tiny_llama)) for _ in range(2)]


def small_ids(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Return rewards that differ between the samples of a random model."""
    return [-sum(ids) / 1000 for ids in completion_ids]


def num_finished(served: ServedEngine) -> int:
    return sum(served.engine.stats().samples_finished.values())


def tensors(served: ServedEngine) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, weight.to_dense().clone()) for name, weight in served.engine.weights.tensors.items())


@pytest.mark.parametrize("is_adapted", [False, True])
def test_grpo_finds_no_difference(
    served: list[ServedEngine], tiny_llama: Path, tmp_path: Path, is_adapted: bool
) -> None:
    """Each step has four groups, and each worker gets some of the groups."""
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if is_adapted else None
    changes = dict(per_device_train_batch_size=16, max_steps=3, learning_rate=1e-2)
    args = grpo_settings(tmp_path, use_vllm=True, vllm_mode="server", **changes)
    addresses = [one.address for one in served]
    before = [num_finished(one) for one in served]
    with FleetClient(addresses) as client, WeightPublisher(timeout=20.0) as publisher:
        publisher.connect_fleet(addresses)
        with trueroll_generation(client, publisher):
            trainer = AlignedGRPOTrainer(str(tiny_llama), small_ids, args, PROMPTS, peft_config=lora)
        trainer.train()
    name = "sampling/sampling_logp_difference/max"
    assert [entry[name] for entry in trainer.state.log_history if name in entry] == [0.0] * 3
    assert [one.engine.weight_version for one in served] == [3, 3]
    finished = [num_finished(one) - start for one, start in zip(served, before, strict=True)]
    assert sum(finished) == 48 and min(finished) > 0, finished


def test_a_fleet_gives_the_same_samples_as_one_worker(
    served: list[ServedEngine], tiny_llama: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    fields = dict(max_inflight_tasks=8, num_generations=2, max_completion_length=6, seed=5)
    addresses, found = [one.address for one in served], []
    for chosen in (addresses, addresses[:1]):
        with WeightPublisher(timeout=20.0) as publisher:
            publisher.connect_fleet(addresses)
            transfer = TruerollWeightTransfer(publisher)
            transfer.init_weight_transfer()
            transfer.send_weights(tensors(served[0]))
            args = async_settings(tmp_path, **fields)
            worker = TruerollWorker(AsyncFleetClient(chosen), args, tokenizer, PROMPTS, small_ids)
            worker.update_model_version(1)
            worker.start()
            found.append([worker.rollout_buffer.get(timeout=60.0) for _ in range(16)])
            worker.stop()
    samples = [[(one.input_ids.tolist(), one.old_log_probs.tolist()) for one in run] for run in found]
    assert samples[0] == samples[1]
