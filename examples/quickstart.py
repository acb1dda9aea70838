"""Start a worker, generate groups of samples, and score one sample: `python examples/quickstart.py [MODEL]`."""

import sys

from trueroll.rollout import RolloutClient, SamplingParams, launch_worker

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"

with launch_worker(model, device="cpu") as worker, RolloutClient(worker.address) as client:
    params = SamplingParams(n=8, temperature=1.0, max_tokens=32)
    groups = client.generate(prompts=[[1, 2, 3], [4, 5]], params=params, seed=7)
    for group in groups:
        for sample in group.samples:
            print(group.num_prompt_tokens, sample.index, sample.finish_reason, sample.seed, sample.token_ids[:8])

    sample = groups[0].samples[0]
    logprobs = client.score([[1, 2, 3, *sample.token_ids]])[0].logprobs[2:]
    assert sample.logprobs is not None and logprobs.tobytes() == sample.logprobs.tobytes()
    print("scoring the sample again gave the same bits:", len(logprobs), "log-probs")
