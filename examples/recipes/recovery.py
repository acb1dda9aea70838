"""Recover from crashes: kill the trainer or the worker in the middle of a step, repeat the requests, and get the same
samples.

`python examples/recipes/recovery.py [MODEL]`. A sample depends only on weights, prompt, parameters and seed, not on the
worker or the time. A trainer that has saved its step number and its weights can request the same samples again.
"""

import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM

from trueroll.rollout import (
    RolloutClient,
    SamplingParams,
    StaleWeightsError,
    WeightPublisher,
    WorkerLostError,
    derive_seed,
    launch_worker,
    resolve_model,
)

RUN_SEED, STEP, VERSION = 1, 5, 5
prompts = [[1, 2, 3], [4, 5]]
params = SamplingParams(n=4, max_tokens=32)
folder = str(resolve_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2"))
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
with torch.no_grad():
    model.lm_head.weight.mul_(1.01)  # stands in for earlier training steps


def generate():
    """Return the bits of the step's samples. The worker does not compute a request again if it already knows the
    request's id.
    """
    request = dict(seed=derive_seed(RUN_SEED, STEP), request_ids=[f"step-{STEP}-{i}" for i in range(len(prompts))])
    with RolloutClient(address, timeout=3.0) as client:  # a short timeout; use more in production
        groups = client.generate(prompts, params, **request, min_weight_version=VERSION)
    return [(sample.token_ids, sample.logprobs.tobytes()) for group in groups for sample in group.samples]


def wait_until(condition):
    while not condition():
        time.sleep(0.001)


with TemporaryDirectory() as private, WeightPublisher() as publisher, ThreadPoolExecutor(1) as thread:
    address = f"ipc://{private}/worker.sock"
    publisher.connect([address])
    with launch_worker(folder, device="cpu", address=address) as worker, RolloutClient(address) as observer:
        publisher.push(model, version=VERSION)
        expected = generate()

        observer.pause()  # ensures that the step is unfinished at the crash, even on a fast machine
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
        again = thread.submit(generate)
        wait_until(lambda: observer.health().requests["open"] == len(prompts))
        os.kill(worker.pid, signal.SIGKILL)
        try:
            again.result()
            raise SystemExit("expected an error")
        except WorkerLostError as error:
            print("the worker was killed:", error)

    with launch_worker(folder, device="cpu", address=address) as worker:
        try:
            generate()
            raise SystemExit("expected an error")
        except StaleWeightsError as error:  # with wait_for_weights=True, the call would wait for the push
            print("a new worker took its place:", error)
        publisher.restore(model)
        assert generate() == expected
        print("after its weights were restored, the new worker gave the same samples")
