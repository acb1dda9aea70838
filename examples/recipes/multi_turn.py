"""Multi-turn rollouts with an environment: collect the model's tokens and log-probs, and reuse the prefix cache.

`python examples/recipes/multi_turn.py [MODEL]`. MODEL needs a tokenizer with a chat template. The token ids of a
conversation are append-only. Retokenizing the text could give other tokens, which would have no log-probs.
"""

import sys

import numpy as np
from transformers import AutoTokenizer

from trueroll.rollout import RolloutClient, SamplingParams, derive_seed, launch_worker, resolve_model

RUN_SEED, STEP = 1, 0
TURNS = 3
folder = resolve_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def between(observation):
    """Return the tokens between two answers: the end of the model's turn, the user's turn, and the header of the next
    answer.
    """
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
    said.append({"role": "user", "content": observation})
    text = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text.rpartition("ANSWER")[2], add_special_tokens=False)


def environment(answer):
    return f"That was {len(answer)} characters. Make it shorter."


question = [{"role": "user", "content": "Describe a cat."}]
ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
loss_mask, log_probs = [0] * len(ids), [0.0] * len(ids)  # one entry for each token of `ids`
end_of_turn = between("")[0]
params = SamplingParams(max_tokens=24, temperature=0.7, stop_token_ids=[end_of_turn])

with launch_worker(str(folder), device="cpu") as worker, RolloutClient(worker.address) as client:
    block_size = client.health().engine["block_size"]
    before = 0  # number of tokens up to the end of the previous answer
    for turn in range(TURNS):
        [group] = client.generate([ids], params, seed=derive_seed(derive_seed(RUN_SEED, STEP), turn))
        [sample] = group.samples
        print(f"turn {turn}: {len(ids)} tokens, {sample.num_cached_tokens} of them found in the cache")
        # All whole blocks of the previous turn are reused. The last token of that turn was never an input, so it is not
        # cached.
        assert sample.num_cached_tokens >= (before - 1) // block_size * block_size
        ids = ids + sample.token_ids
        loss_mask += [1] * len(sample.token_ids)
        log_probs += sample.logprobs.tolist()
        before = len(ids)
        if turn + 1 < TURNS:
            seen = between(environment(tokenizer.decode(sample.token_ids, skip_special_tokens=True)))
            seen = seen[1:] if ids[-1] == end_of_turn else seen  # the model has already sampled the end of the turn
            ids, loss_mask, log_probs = ids + seen, loss_mask + [0] * len(seen), log_probs + [0.0] * len(seen)

    # Entry i of a score is the log-prob of token i + 1.
    [score] = client.score([ids], temperature=params.trainer_temperature)

own = np.array(loss_mask, bool)
assert score.logprobs[own[1:]].tobytes() == np.array(log_probs, np.float32)[own].tobytes()
print(
    f"{own.sum()} of {len(ids)} tokens are the model's: a score of the whole conversation gave the same bits for them"
)
