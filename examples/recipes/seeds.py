"""Use seeds so that each prompt of each step gets its own random numbers, and so that a step can be repeated as a whole
or in part.

`python examples/recipes/seeds.py [MODEL]`
"""

import sys

from trueroll.rollout import InvalidRequestError, RolloutClient, SamplingParams, derive_seed, launch_worker

RUN_SEED = 1
STEPS = 2
prompts = [[1, 2, 3], [1, 2, 3], [4, 5]]  # the first two prompts are the same


def bits(sample):
    return sample.seed, sample.token_ids, sample.logprobs.tobytes()


with launch_worker(sys.argv[1] if len(sys.argv) > 1 else "smollm2", device="cpu") as worker:
    with RolloutClient(worker.address) as client:
        params = SamplingParams(n=4, max_tokens=16)
        run = [client.generate(prompts, params, seed=derive_seed(RUN_SEED, step)) for step in range(STEPS)]
        samples = [sample for groups in run for group in groups for sample in group.samples]
        assert len({sample.seed for sample in samples}) == len(samples)
        print(f"{len(samples)} samples of {STEPS} steps, each with its own seed; two groups of the same prompt:")
        for group in run[0][:2]:
            print("  ", [sample.token_ids[:4] for sample in group.samples])

        again = client.generate(prompts, params, seed=derive_seed(RUN_SEED, 1))
        assert [list(map(bits, group.samples)) for group in again] == [list(map(bits, each.samples)) for each in run[1]]
        print("step 1 again: the same bits")

        # Prompt i of a call has the seed derive_seed(seed, i), which the group's `params` contain. The seeds of the
        # group's samples are derived from this seed.
        seed = derive_seed(derive_seed(RUN_SEED, 1), 2)
        [alone] = client.generate([prompts[2]], SamplingParams(n=4, max_tokens=16, seed=seed))
        assert alone.params.seed == run[1][2].params.seed == seed
        assert list(map(bits, alone.samples)) == list(map(bits, run[1][2].samples))
        print("prompt 2 of step 1 alone, with the seed of its group: the same bits")

        # A seed in the parameters is for a single prompt. A call with several prompts rejects such a seed, because all
        # prompts would be sampled with the same random numbers.
        try:
            client.generate(prompts, SamplingParams(n=4, seed=RUN_SEED))
            raise SystemExit("expected an error")
        except InvalidRequestError as error:
            print("refused:", error)
