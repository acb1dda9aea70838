"""Use a second worker as reference or teacher: estimate the KL divergence per token from the log-probs of two workers.

`python examples/recipes/distillation.py [MODEL]`. The student's worker samples, and the second worker scores the
sampled tokens. In this recipe, the second worker keeps the initial weights, as for a KL penalty. For on-policy
distillation, the second worker serves a larger model with the same vocabulary.
"""

import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from trueroll.rollout import RolloutClient, SamplingParams, WeightPublisher, derive_seed, launch_worker, resolve_model

RUN_SEED = 1
STEPS = 3
prompts = [[1, 2, 3], [4, 5]]
params = SamplingParams(n=4, max_tokens=16, temperature=1.0)
folder = resolve_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)


def log_probs_of_both(step):
    """Return the student's and the reference's log-probs for the tokens of each sample: float32 [num_tokens] each."""
    groups = student.generate(prompts, params, seed=derive_seed(RUN_SEED, step))
    sampled = [(prompt, each) for prompt, group in zip(prompts, groups, strict=True) for each in group.samples]
    # Score all samples in one call, so that the worker computes the prefix of a group once and fills its batches.
    scores = reference.score([prompt + each.token_ids for prompt, each in sampled], params.trainer_temperature)
    # Entry i of a score is the log-prob of token i + 1, so the last entries are the log-probs of the sampled tokens.
    both = zip(sampled, scores, strict=True)
    return [(each.logprobs, score.logprobs[-len(each.token_ids) :]) for (_, each), score in both]


with (
    launch_worker(str(folder), device="cpu") as first,
    launch_worker(str(folder), device="cpu") as second,
    RolloutClient(first.address) as student,
    RolloutClient(second.address) as reference,
    WeightPublisher() as publisher,
):
    publisher.connect([first.address])  # the reference worker gets no pushes
    for step in range(STEPS):
        pairs = log_probs_of_both(step)
        # r = log(student / reference) for each token that the student sampled. In on-policy distillation, -r is the
        # token's reward. The mean of r estimates the KL divergence (k1). The mean of exp(-r) - 1 + r is another
        # estimate, which is never negative (k3).
        ratios = np.concatenate([own - others for own, others in pairs])
        k3 = np.expm1(-ratios) + ratios
        print(f"step {step}: KL estimates of {len(ratios)} tokens: {ratios.mean():.6f} (k1), {k3.mean():.6f} (k3)")
        if step == 0:
            assert all(own.tobytes() == others.tobytes() for own, others in pairs)
            print("        the same weights: both workers gave the same bits for every token")
        else:
            assert k3.mean() > 0.0

        with torch.no_grad():  # stands in for the optimizer step
            model.lm_head.weight.mul_(1.1)
        publisher.push(model, version=step + 1)
