"""Crashes: trainer or worker is killed in the middle of a step, and asking again gives the samples it would have had.

`python examples/recipes/recovery.py [MODEL]`. A sample depends on weights, prompt, parameters and seed, not on who
computed it, or when. So a trainer keeps the number of its step, with which ids and seeds come back, and its weights.
"""

import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import AutoModelForCausalLM

from trueroll.rollout import (
    RolloutClient,
    SamplingParams,
    StaleWeightsError,
    WorkerLostError,
    derive_seed,
    launch_worker,
    resolve_model,
)
from trueroll.weight_sync import WeightPublisher

RUN_SEED, STEP, VERSION = 1, 5, 5
TIMEOUT = 3.0  # seconds without a sign of life: longer for real
prompts = [[1, 2, 3], [4, 5]]
params = SamplingParams(n=4, max_tokens=32)
folder = resolve_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
with torch.no_grad():
    model.lm_head.weight.mul_(1.01)  # the steps before this one


def generate():
    """The samples of the step, as bits, from its weights alone. What a worker has under these ids it computes once."""
    ids = [f"step-{STEP}-prompt-{i}" for i in range(len(prompts))]
    with RolloutClient(worker.address, timeout=TIMEOUT) as client:
        seed = derive_seed(RUN_SEED, STEP)
        groups = client.generate(prompts, params, seed=seed, request_ids=ids, min_weight_version=VERSION)
    return [(sample.token_ids, sample.logprobs.tobytes()) for group in groups for sample in group.samples]


def push():
    with WeightPublisher(timeout=TIMEOUT) as publisher:
        publisher.connect([worker.address])
        publisher.push(model, version=VERSION)


def wait_until(condition):
    while not condition():
        time.sleep(0.001)


with launch_worker(str(folder), device="cpu") as worker, ThreadPoolExecutor(1) as thread:
    push()
    expected = generate()
    with RolloutClient(worker.address) as observer:
        observer.pause()  # so that the crashes find the step unfinished, however fast the machine is
        trainer = multiprocessing.get_context("fork").Process(target=generate)
        trainer.start()
        wait_until(lambda: observer.health().requests["open"] == len(prompts))
        trainer.kill()
        trainer.join()
        again = thread.submit(generate)
        wait_until(lambda: observer.stats().service["joined"] == len(prompts))
        observer.resume()
        assert again.result() == expected
        print(f"the trainer was killed: its successor joined the {len(prompts)} requests and got the same samples")

        observer.pause()
        lost = thread.submit(generate)
        wait_until(lambda: observer.health().requests["open"] == len(prompts))
        os.kill(worker.pid, signal.SIGKILL)
        try:
            lost.result()
            raise SystemExit("expected an error")
        except WorkerLostError as error:
            print("the worker was killed:", error)

with launch_worker(str(folder), device="cpu") as worker:
    try:
        generate()
        raise SystemExit("expected an error")
    except StaleWeightsError as error:
        print("a new worker serves its checkpoint:", error)
    push()
    assert generate() == expected
print("another worker, given the same weights, gave the same samples")
