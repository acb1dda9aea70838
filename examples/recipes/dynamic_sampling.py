"""Dynamic sampling with partial rollouts, as in DAPO: drop groups without a learning signal, and continue unfinished
samples later.

`python examples/recipes/dynamic_sampling.py [MODEL]`. MODEL needs a tokenizer with a chat template. Each step requests
more groups than the batch needs. When enough groups are finished, the step aborts the other groups. The next step
continues the aborted samples under new weights.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trueroll.rollout import RolloutClient, SamplingParams, WeightPublisher, derive_seed, launch_worker, resolve_model

RUN_SEED = 1
STEPS = 2
NEEDED = 4  # groups that a training step needs
ASKED = 400  # groups requested per step; groups that have not begun when the step has enough cost nothing
folder = resolve_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
params = SamplingParams(n=4, max_tokens=32)


def prompts_of(step):
    questions = [[{"role": "user", "content": f"Is {step + 2} times {i} more than 50?"}] for i in range(ASKED)]
    return [tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False) for each in questions]


def teaches(group):
    """Return whether the samples of a group have different rewards. In this recipe the reward is 1 for a short
    answer.
    """
    return len({len(sample.token_ids) < 20 for sample in group}) > 1


def is_whole(group):
    """Return whether all samples of a group finished. Aborted samples are delivered too, in any order."""
    return len(group) == params.n and all(sample.finish_reason != "abort" for sample in group)


def is_enough(groups):
    return sum(map(teaches, groups)) >= NEEDED


with launch_worker(str(folder), device="cpu", max_num_seqs=8) as worker, WeightPublisher() as publisher:
    publisher.connect([worker.address])
    with RolloutClient(worker.address) as client:
        partial = []  # (prompt, samples) of each group from the previous step that has an aborted sample
        for step in range(STEPS):
            publisher.push(model, version=step + 1)

            # Aborted samples continue, each with its own random numbers. Finished samples are returned unchanged.
            prompts_of_samples = [prompt for prompt, group in partial for _ in group]
            unfinished = [sample for _, group in partial for sample in group]
            samples = client.continue_samples(prompts_of_samples, unfinished, params)
            groups = [samples[i : i + params.n] for i in range(0, len(samples), params.n)]
            spans = {tuple((span.version, span.end - span.start) for span in each.weight_versions) for each in samples}
            both = sorted(each for each in spans if len(each) > 1)
            print(f"step {step}: {len(groups)} groups continued; (version, tokens) in samples of two versions: {both}")

            prompts, arrived = [] if is_enough(groups) else prompts_of(step), {}
            for position, sample in client.stream(prompts, params, seed=derive_seed(RUN_SEED, step)):
                group = arrived.setdefault(position, [])
                group.append(sample)
                if is_whole(group):
                    groups.append(group)
                    if is_enough(groups) and not is_enough(groups[:-1]):
                        client.abort_all()  # to abort only some requests: client.abort(ids, missing_ok=True)

            # Samples without any token could continue as well. This recipe drops groups without any token, because most
            # of these prompts were requested only as spares.
            begun = [(prompts[i], group) for i, group in arrived.items() if any(each.token_ids for each in group)]
            partial = [(prompt, group) for prompt, group in begun if not is_whole(group)]
            kept = [group for group in groups if teaches(group)]
            assert is_enough(groups), f"only {len(kept)} of {NEEDED} groups have a learning signal; raise ASKED"
            print(f"step {step}: {len(kept)} groups to train on, {len(groups) - len(kept)} dropped,", end=" ")
            print(f"{len(partial)} ended early, {len(prompts) - len(begun)} of {len(prompts)} not begun")

            with torch.no_grad():  # stands in for an optimizer step on `kept`
                model.lm_head.weight.mul_(1.01)
