"""Train with the real AsyncGRPOTrainer on a CPU, and print the results as JSON: `async_training.py MODEL OUTPUT`.

`--kill` kills the worker during the training. TRL's attention and TRL's table of devices do not support a CPU. This
module replaces both, and no other part of TRL.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
from trl_setup import async_settings

from trueroll.rollout import AsyncRolloutClient, WeightPublisher, launch_worker
from trueroll.rollout.integrations.trl import TruerollWeightTransfer, TruerollWorker


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    *_: int,
    softmax_scale: float,
    **__: Any,
) -> torch.Tensor:
    """Attention over packed segments. Segment i has queries [starts_q[i], starts_q[i + 1]), which are the segment's
    last tokens. Attention is causal.
    """
    outputs = []
    for (q0, q1), (k0, k1) in zip(starts_q.unfold(0, 2, 1).tolist(), starts_k.unfold(0, 2, 1).tolist(), strict=True):
        q, k, v = query[q0:q1].transpose(0, 1), key[k0:k1].transpose(0, 1), value[k0:k1].transpose(0, 1)
        sees = torch.ones(q1 - q0, k1 - k0).tril((k1 - k0) - (q1 - q0)).bool()
        outputs.append(scaled_dot_product_attention(q, k, v, sees, scale=softmax_scale, enable_gqa=True))
    return torch.cat(outputs, dim=1).transpose(0, 1)


def make_trl_run_on_a_cpu() -> None:
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # type: ignore[assignment]


class RecordingClient(AsyncRolloutClient):
    """Records the oldest weight version of each sample's tokens, by the sample's log-probs."""

    def __init__(self, address: str, timeout: float) -> None:
        super().__init__(address, timeout)
        self.oldest: dict[bytes, int] = {}

    async def generate(self, *args: Any, **options: Any) -> Any:
        groups = await super().generate(*args, **options)
        for sample in (sample for group in groups for sample in group.samples):
            assert sample.logprobs is not None
            self.oldest[sample.logprobs.tobytes()] = min(span.version for span in sample.weight_versions)
        return groups


class RecordingTrainer(AsyncGRPOTrainer):
    """Records, for each sample in the loss, how many versions the sample's oldest token is behind the trainer's
    weights.
    """

    client: RecordingClient
    staleness: list[int]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        selected = inputs["token_index"] >= 0
        logprobs, samples = inputs["old_log_probs"][selected], inputs["segment_id"][selected]
        for i in samples.unique():
            version = self.client.oldest[logprobs[samples == i].numpy().tobytes()]
            self.staleness.append(self.model_version - version)
        return super().compute_loss(model, inputs, *args, **options)


def make_reward(kill: int | None) -> Any:
    """Return a reward function with different rewards for different texts. At the third group, the function kills the
    process `kill`, if given.
    """
    groups = itertools.count(1)

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        if kill is not None and next(groups) == 3:
            os.kill(kill, signal.SIGKILL)
        return [float(sum(map(ord, messages[0]["content"])) % 7) for messages in completions]

    return reward


def train(args: AsyncGRPOConfig, folder: str, address: str, kill: int | None) -> RecordingTrainer:
    dataset: Any = Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": f"Name {n} animals."}] for n in range(2, 10)]}
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    client, publisher = RecordingClient(address, timeout=4.0), WeightPublisher(timeout=20.0)
    publisher.connect([address])
    trainer = RecordingTrainer(
        model=folder,
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
        rollout_worker=TruerollWorker(client, args, tokenizer, dataset, [make_reward(kill)]),  # type: ignore[arg-type]
        weight_transfer=TruerollWeightTransfer(publisher),
    )
    trainer.client, trainer.staleness = client, []
    trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("output")
    parser.add_argument("--kill", action="store_true")
    options = parser.parse_args()
    make_trl_run_on_a_cpu()
    # Without another push, the trainer notices the worker's death only by the missing rollouts.
    changes = dict(max_steps=100, weight_sync_steps=1000) if options.kill else dict(max_steps=4, learning_rate=1e-3)
    with launch_worker(options.model, device="cpu", dtype="float32", num_blocks=256) as worker:
        args = async_settings(Path(options.output), **changes)
        trainer = train(args, options.model, worker.address, worker.pid if options.kill else None)
    print(json.dumps({"log": trainer.state.log_history, "staleness": trainer.staleness}))


if __name__ == "__main__":
    main()
