"""vLLM's side of vllm_report.py, for the interpreter of vLLM's environment: `python vllm_side.py MODEL DTYPE`.

The program prints a line once vLLM is ready. The program then reads one workload from each line of stdin, runs the
workload, and prints its duration in seconds.
"""

import json
import os
import sys
import time

CONTEXT = 2048


def main(folder: str, dtype: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to stdout, too
    from vllm import LLM, SamplingParams

    settings = dict(max_model_len=CONTEXT, enable_prefix_caching=True, skip_tokenizer_init=True)
    llm = LLM(folder, dtype=dtype, **settings)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        params = SamplingParams(**asked["params"], ignore_eos=True, logprobs=0, detokenize=False)
        llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        lengths = {len(sample.token_ids) for output in outputs for sample in output.outputs}
        assert lengths == {params.max_tokens}, lengths
        print(seconds, file=answers, flush=True)


if __name__ == "__main__":  # vLLM starts child processes that import this module
    main(*sys.argv[1:])
