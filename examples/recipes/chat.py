"""Chat messages in, text out: a chat template formats the prompts, and each sample stops at the template's end-of-turn
token.

`python examples/recipes/chat.py [MODEL]`. MODEL needs a tokenizer with a chat template. The worker handles token ids
only.
"""

import sys

from transformers import AutoTokenizer

from trueroll.rollout import RolloutClient, SamplingParams, launch_worker, resolve_model

folder = resolve_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
questions = ["What is the capital of France?", "Name a fruit."]

# The template already writes all special tokens. Let apply_chat_template tokenize, or encode the text with
# add_special_tokens=False.
prompts = [
    tokenizer.apply_chat_template([{"role": "user", "content": each}], add_generation_prompt=True, return_dict=False)
    for each in questions
]

# The token after an answer in a finished conversation ends the turn. If the model's own end-of-sequence tokens
# (`eos_token_ids` below) include this token, `stop_token_ids` is not needed. Often, the end-of-turn token is not among
# the model's own end-of-sequence tokens.
finished = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
after = tokenizer.apply_chat_template(finished, tokenize=False).rpartition("ANSWER")[2]
end_of_turn = tokenizer.encode(after, add_special_tokens=False)[0]

with launch_worker(str(folder), device="cpu") as worker, RolloutClient(worker.address) as client:
    of_model = client.health().engine["eos_token_ids"]
    print(f"a turn ends with {tokenizer.decode([end_of_turn])!r}, token {end_of_turn}; the model's own: {of_model}")

    params = SamplingParams(n=4, max_tokens=24, temperature=0.7, stop_token_ids=[end_of_turn])
    groups = client.generate(prompts, params, seed=7)

ends = {end_of_turn, *of_model}
num_stopped = 0
for question, group in zip(questions, groups, strict=True):
    print(f"\n{question} ({group.num_prompt_tokens} tokens with the template)")
    for sample in group.samples:
        # The stop token is the last token of a sample and has a log-prob, so that the trainer can train the model to
        # stop.
        is_stopped = sample.finish_reason == "stop"
        assert not ends & set(sample.token_ids[:-1]) and (sample.token_ids[-1] in ends) == is_stopped
        assert sample.stop_reason == (sample.token_ids[-1] if is_stopped else None)
        num_stopped += is_stopped
        answer = tokenizer.decode(sample.token_ids, skip_special_tokens=True)
        print(f"  {sample.finish_reason}, stop_reason {sample.stop_reason}: {answer!r}")
print(f"\n{num_stopped} of {sum(len(group.samples) for group in groups)} samples ended their turn, and none continued")
