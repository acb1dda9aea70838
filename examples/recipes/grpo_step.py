"""Complete training steps in your own loop: push, sample groups, pad the batch, compute the loss, run the optimizer.

`python examples/recipes/grpo_step.py [MODEL]`. The trainer's parameters are float32, because bfloat16 parameters would
lose AdamW's small updates. The worker serves bfloat16 weights. Under bfloat16 autocast, the trainer's forward pass
computes the same bits as the worker.
"""

import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # busy-waiting threads would slow down a worker on the same cores

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from trueroll.kernels.training import align, token_log_probs
from trueroll.rollout import RolloutClient, SamplingParams, WeightPublisher, derive_seed, launch_worker, resolve_model

RUN_SEED, STEPS, CLIP = 1, 3, 0.2
prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
params = SamplingParams(n=4, max_tokens=16, temperature=0.9)
folder = str(resolve_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2"))
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
align(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)


def reward(token_ids):
    """Return the share of even token ids. Replace this function with your reward."""
    return sum(token % 2 == 0 for token in token_ids) / len(token_ids)


def padded(rows):
    return pad_sequence(rows, batch_first=True)


before = model.lm_head.weight.bfloat16()
with (
    launch_worker(folder, device="cpu", dtype="bfloat16") as worker,
    RolloutClient(worker.address) as client,
    WeightPublisher() as publisher,
):
    publisher.connect([worker.address])  # connecting sends no weights
    for step in range(STEPS):
        version = step + 1  # version 0 is the checkpoint that the worker started with
        publisher.push(model, version)
        groups = client.generate(prompts, params, seed=derive_seed(RUN_SEED, step), min_weight_version=version)

        rewards = torch.tensor([[reward(sample.token_ids) for sample in group.samples] for group in groups])
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)

        # All tensors are [B, T]: one sample per row, padded on the right.
        rows = [(prompt, sample) for prompt, group in zip(prompts, groups, strict=True) for sample in group.samples]
        ids = padded([torch.tensor(prompt + sample.token_ids) for prompt, sample in rows])
        mask = padded([torch.ones(len(prompt + sample.token_ids), dtype=torch.bool) for prompt, sample in rows])
        is_own = padded([torch.arange(len(prompt + sample.token_ids)) >= len(prompt) for prompt, sample in rows])

        # The log-probs are [B, T] as well. Log-probs are 0.0 except at sampled tokens.
        settings = dict(temperature=params.trainer_temperature, completion_mask=is_own)
        with torch.autocast("cpu", torch.bfloat16):
            log_probs = token_log_probs(model, ids, mask, **settings)[is_own]
        sampled = torch.cat([torch.tensor(sample.logprobs) for _, sample in rows])
        ratios = (log_probs - sampled).exp()
        assert (ratios == 1.0).all(), "samples must come from these weights, and autocast must use the worker's dtype"

        each = advantages.flatten().repeat_interleave(is_own.sum(1))
        loss = -torch.minimum(ratios * each, ratios.clamp(1 - CLIP, 1 + CLIP) * each).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: {is_own.sum()} of {mask.sum()} tokens sampled, reward {rewards.mean():.3f},", end=" ")
        print(f"all ratios 1.0, gradient norm {norm:.4f}")

changed = (model.lm_head.weight.bfloat16() != before).sum()
print(f"even in bfloat16, {changed} elements of the head have changed since the beginning")
