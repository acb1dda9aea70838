"""Generate the next batch during training, and continue unfinished samples under newer weights.

`python examples/recipes/asynchronous.py [MODEL]`. Each token has the version number of the weights that sampled it.
Training and pushing block, so they run in threads. Any thread may call a WeightPublisher, but only one thread at a
time. The parameters must not change during a push.
"""

import asyncio
import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # busy-waiting threads would slow down a worker on the same cores

import torch
from transformers import AutoModelForCausalLM

from trueroll.kernels.training import align, token_log_probs
from trueroll.rollout import (
    AsyncRolloutClient,
    SamplingParams,
    WeightPublisher,
    derive_seed,
    launch_worker,
    resolve_model,
)

RUN_SEED, STEPS = 1, 3
NEEDED, ASKED = 2, 100  # after NEEDED finished groups, abort the other groups; groups that have not begun cost nothing
MAX_STALENESS = 2  # versions that a token may lag behind the trainer; groups with older tokens are dropped
params = SamplingParams(n=4, max_tokens=32)
folder = str(resolve_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2"))
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
align(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)


def reward(token_ids):
    """Return the share of even token ids. Replace this function with your reward."""
    return sum(token % 2 == 0 for token in token_ids) / len(token_ids)


def is_whole(group):
    return len(group) == params.n and all(sample.finish_reason != "abort" for sample in group)


def age(group, version):
    return version - min(span.version for sample in group for span in sample.weight_versions)


async def go_on(client, left, version):
    """Continue the aborted groups: finish each sample under the weights of `version` or newer."""
    prompts, samples = [prompt for prompt, group in left for _ in group], [each for _, group in left for each in group]
    whole = await client.continue_samples(prompts, samples, params, min_weight_version=version, wait_for_weights=True)
    return [(prompt, whole[i * params.n : (i + 1) * params.n]) for i, (prompt, _) in enumerate(left)]


async def begin(client, version):
    """Sample new groups until enough are finished. Return (prompt, samples) pairs, including the aborted groups."""
    prompts, arrived, num_whole = [[version, i] for i in range(ASKED)], {}, 0
    ids = [f"run-{RUN_SEED}-{version}-{i}" for i in range(ASKED)]
    demand = dict(min_weight_version=max(1, version - MAX_STALENESS), wait_for_weights=True)
    stream = client.stream(prompts, params, seed=derive_seed(RUN_SEED, version), request_ids=ids, **demand)
    async for position, sample in stream:
        arrived[position] = group = [*arrived.get(position, ()), sample]
        num_whole += is_whole(group)
        if num_whole == NEEDED and is_whole(group):
            await client.abort(ids, missing_ok=True)  # abort_all would also abort the continued samples
    return [(prompts[i], group) for i, group in arrived.items() if any(sample.token_ids for sample in group)]


async def rollout(client, version, left):
    """Return the batch for version `version`, and the groups left over for the next call. `left`: the groups left over
    from the previous call.
    """
    went_on, groups = await asyncio.gather(go_on(client, left, version), begin(client, version))
    batch = went_on + [(prompt, group) for prompt, group in groups if is_whole(group)]
    return batch, [(prompt, group) for prompt, group in groups if not is_whole(group)]


def train(groups, version):
    """Take one training step on packed samples. Autocast is per thread, so this function enters autocast."""
    rows = [(prompt, sample) for prompt, group in groups for sample in group]
    lengths = [len(prompt + sample.token_ids) for prompt, sample in rows]
    ids = torch.tensor([token for prompt, sample in rows for token in prompt + sample.token_ids])
    is_own = torch.cat([torch.arange(n) >= len(prompt) for n, (prompt, _) in zip(lengths, rows, strict=True)])
    settings = dict(lengths=lengths, temperature=params.trainer_temperature, completion_mask=is_own)
    with torch.autocast("cpu", torch.bfloat16):
        log_probs = token_log_probs(model, ids, **settings)[is_own]
    ratios = (log_probs - torch.cat([torch.tensor(sample.logprobs) for _, sample in rows])).exp()
    spans = [span for _, sample in rows for span in sample.weight_versions]
    versions = torch.cat([torch.full((span.end - span.start,), span.version) for span in spans])
    is_fresh = versions == version
    assert (ratios[is_fresh] == 1.0).all() and version - versions.min() <= MAX_STALENESS

    rewards = torch.tensor([[reward(sample.token_ids) for sample in group] for _, group in groups])
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
    each = advantages.repeat_interleave(torch.tensor([len(sample.token_ids) for _, sample in rows]))
    (-torch.minimum(ratios * each, ratios.clamp(0.8, 1.2) * each).mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    num_both = sum(len(sample.weight_versions) > 1 for _, sample in rows)
    print(f"version {version}: {len(groups)} groups, {is_fresh.sum()} fresh tokens with ratio 1.0,", end=" ")
    print(f"{(~is_fresh).sum()} older ones; {num_both} samples have tokens of two versions")


async def main(address):
    async with AsyncRolloutClient(address) as client:
        with WeightPublisher() as publisher:
            publisher.connect([address])
            pending = asyncio.create_task(rollout(client, 1, []))  # the rollout waits for the first push
            for version in range(1, STEPS + 1):
                await asyncio.to_thread(publisher.push, model, version)
                batch, left = await pending
                if version < STEPS:
                    pending = asyncio.create_task(rollout(client, version + 1, left))
                kept = [(prompt, group) for prompt, group in batch if age(group, version) <= MAX_STALENESS]
                print(f"version {version}: {len(batch) - len(kept)} groups too old, {len(left)} ended early")
                await asyncio.to_thread(train, kept, version)


with launch_worker(folder, device="cpu", dtype="bfloat16", max_num_seqs=8) as worker:
    asyncio.run(main(worker.address))
