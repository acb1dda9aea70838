"""Which `logprobs` to request so that a trainer computes the same log-probs, bit for bit.

`python examples/recipes/logprobs.py [MODEL]`. With `top_logprobs`, each sample also has the entropy and the most
probable tokens at each position. `token_statistics` computes the same values in the trainer, without gradient.
"""

import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from trueroll.kernels.training import align, token_log_probs, token_statistics
from trueroll.rollout import ConfigError, RolloutClient, SamplingParams, launch_worker, resolve_model

folder = resolve_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
TOP = 4
prompt = [1, 2, 3]
choices = [
    # The default, `processed`, is the distribution that the tokens were drawn from.
    SamplingParams(n=4, max_tokens=16, temperature=0.7),
    # `processed` includes filters, penalties and bans.
    SamplingParams(n=4, max_tokens=16, temperature=0.7, top_p=0.9, min_tokens=4, repetition_penalty=1.1),
    # `temperature` is the distribution before filters, penalties and bans. Importance ratios then ignore filters,
    # penalties and bans.
    SamplingParams(n=4, max_tokens=16, temperature=0.7, top_p=0.9, min_tokens=4, logprobs="temperature"),
    # `raw` is the model's own distribution (temperature 1), whatever the sampling temperature.
    SamplingParams(n=4, max_tokens=16, temperature=0.7, top_k=20, logprobs="raw"),
    # The log-probs of greedy samples always come from the model's own distribution.
    SamplingParams(n=4, max_tokens=16, temperature=0.0),
]

with launch_worker(str(folder), device="cpu") as worker, RolloutClient(worker.address) as client:
    engine = client.health().engine
    dtype = getattr(torch, engine["dtype"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    align(model)

    for choice in choices:
        params = choice.model_copy(update=dict(top_logprobs=TOP))
        [group] = client.generate([prompt], params, seed=1)
        packed = torch.tensor([token for sample in group.samples for token in prompt + sample.token_ids])
        lengths = [len(prompt) + len(sample.token_ids) for sample in group.samples]
        own = torch.cat([torch.arange(length) >= len(prompt) for length in lengths])
        request = dict(lengths=lengths, completion_mask=own, distribution=params, eos_token_ids=engine["eos_token_ids"])
        with torch.no_grad():
            found = token_log_probs(model, packed, **request)
        assert found[own].numpy().tobytes() == b"".join(sample.logprobs.tobytes() for sample in group.samples)

        # Sample and trainer use the same field names. Token ids are int32 in samples and int64 in the trainer. On both
        # sides, entry i belongs to token i.
        statistics = token_statistics(model, packed, **request, top_logprobs=TOP)
        for name in ("logprobs", "entropy", "top_token_ids", "top_logprobs"):
            sampled = np.concatenate([getattr(sample, name) for sample in group.samples])
            assert getattr(statistics, name)[own].numpy().astype(sampled.dtype).tobytes() == sampled.tobytes()
        entropy = statistics.entropy[own].mean()
        print(f"{params.logprobs!r} at temperature {params.temperature}: the trainer computes the same bits,", end=" ")
        print(f"and the same entropies and {TOP} most probable tokens (mean entropy {entropy:.3f})")

# A trainer that is not aligned only divides logits by a temperature. `trainer_temperature` is that temperature.
# `trainer_temperature` raises an error if no temperature describes the log-probs of the samples.
for settings in (dict(top_p=0.9), dict(min_tokens=4), dict(logprobs=None)):
    try:
        print(SamplingParams(**settings).trainer_temperature)
        raise SystemExit("expected an error")
    except ConfigError as error:
        print(f"{settings} is refused: {error}")
