"""Which `logprobs` to ask for, so that a trainer computes the same log-probs, bit for bit.

`python examples/recipes/logprobs.py [MODEL]`
"""

import sys

import torch
from transformers import AutoModelForCausalLM

from trueroll.kernels.training import align, token_log_probs
from trueroll.rollout import ConfigError, RolloutClient, SamplingParams, launch_worker, resolve_model

folder = resolve_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
prompt = [1, 2, 3]
choices = [
    # The default, `processed`: what the tokens were drawn from. Right wherever nothing is filtered or banned.
    SamplingParams(n=4, max_tokens=16, temperature=0.7),
    # With filters, ask for the distribution before them. Then the importance ratio leaves the filters out.
    SamplingParams(n=4, max_tokens=16, temperature=0.7, top_p=0.9, min_tokens=4, logprobs="temperature"),
    # The model's own, whatever the temperature.
    SamplingParams(n=4, max_tokens=16, temperature=0.7, top_k=20, logprobs="raw"),
    # Greedy samples have those of the model's own distribution.
    SamplingParams(n=4, max_tokens=16, temperature=0.0),
]

with launch_worker(str(folder), device="cpu") as worker, RolloutClient(worker.address) as client:
    dtype = getattr(torch, client.health().engine["dtype"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    align(model)

    for params in choices:
        [group] = client.generate([prompt], params, seed=1)
        packed = torch.tensor([token for sample in group.samples for token in prompt + sample.token_ids])
        lengths = [len(prompt) + len(sample.token_ids) for sample in group.samples]
        with torch.no_grad():
            found = token_log_probs(model, packed, lengths=lengths, temperature=params.trainer_temperature)
        largest = 0.0
        for sample, row in zip(group.samples, found.split(lengths), strict=True):
            assert row[len(prompt) :].numpy().tobytes() == sample.logprobs.tobytes()
            largest = max(largest, float(-sample.logprobs.min()))
        print(f"{params.logprobs!r} at temperature {params.temperature}: the trainer computes the same bits", end=" ")
        print(f"with temperature={params.trainer_temperature}; the least likely token had {-largest:.3f}")

# Of filtered or banned tokens no trainer computes the distribution. Ask before generating, not after.
for settings in (dict(top_p=0.9), dict(min_tokens=4), dict(logprobs=None)):
    try:
        print(SamplingParams(**settings).trainer_temperature)
        raise SystemExit("expected an error")
    except ConfigError as error:
        print(f"{settings} is refused: {error}")
