"""TRL's own asynchronous rollout worker, which requests `/v1/completions`, and TRL's client of the vLLM server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState
from datasets import Dataset
from http_fronts import Front
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.chat_template_utils import qwen3_chat_template
from trl.experimental.async_grpo import async_rollout_worker
from trl.experimental.async_grpo.vllm_client import VLLMClient
from trl.generation import vllm_client
from trl_setup import num_vowels

from trueroll.rollout import RolloutClient

PROMPTS = [[{"role": "user", "content": f"Name {n} animals."}] for n in range(2, 6)]
TEMPERATURE = 0.8


@contextmanager
def rollouts(front: Front, model: Path) -> Iterator[async_rollout_worker.AsyncRolloutWorker]:
    """A rollout worker created by TRL, with two samples per group and two groups in flight."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = qwen3_chat_template  # TRL parses answers only of templates that it knows
    worker = async_rollout_worker.AsyncRolloutWorker(
        model_name=front.model,
        dataset=Dataset.from_dict({"prompt": PROMPTS}),
        reward_funcs=[num_vowels],
        processing_class=tokenizer,
        eos_token_ids=[2],
        num_generations=2,
        max_inflight_tasks=4,
        queue_maxsize=8,
        vllm_server_url=front.url,
        max_tokens=12,
        temperature=TEMPERATURE,
    )
    worker.start()
    try:
        yield worker
        worker.check_health(60.0)
    finally:
        process, stopped = worker._process, threading.Event()
        taking = threading.Thread(target=empty, args=(worker, stopped))
        taking.start()
        worker.stop()
        stopped.set()
        taking.join()
    assert process is not None and not process.is_alive()


def empty(worker: async_rollout_worker.AsyncRolloutWorker, stopped: threading.Event) -> None:
    """Empty the queue of the worker's process, because the process exits only when the queue is empty."""
    while not stopped.wait(0.05):
        for queue in (worker.metrics_queue, worker.rollout_buffer):
            while not queue.empty():
                queue.get()


def test_trls_client_gets_a_teachers_log_probs(
    front: Front, client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's trainers for distillation score sequences with this client."""
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda: True)  # the client does not use vLLM
    sequences, lengths, k = [[*range(5, 25)], [*range(30, 42)]], [4, 11], 6
    found = vllm_client.VLLMClient(front.url).get_sequence_logprobs(sequences, lengths, k, TEMPERATURE)
    scores = client.score(sequences, TEMPERATURE, start=lengths, top_logprobs=k)
    for i, (score, sequence, length) in enumerate(zip(scores, sequences, lengths, strict=True)):
        assert score.top_token_ids is not None and score.top_logprobs is not None
        assert found["logprobs"][i] == score.top_logprobs.tolist()
        assert found["logprob_token_ids"][i] == score.top_token_ids.tolist()
        assert found["actual_logprobs"][i] == score.logprobs[:, None].tolist()
        assert found["actual_token_ids"][i] == [[token] for token in sequence[length:]]


def trained(model: Path, folder: Path) -> str:
    """Save a checkpoint of the model with other weights, and return its folder."""
    changed = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.mul_(1.25)
    changed.save_pretrained(folder)
    return str(folder)


def take(worker: async_rollout_worker.AsyncRolloutWorker, version: int) -> list[Any]:
    """Return the next four samples from groups that began while the trainer had this version."""
    samples: list[Any] = []
    while len(samples) < 4:
        sample = worker.rollout_buffer.get(timeout=60.0)
        samples += [sample] if sample.model_version == version else []
    return samples


def num_same(samples: list[Any], client: RolloutClient) -> int:
    """Count the samples with log-probs that are bitwise equal to log-probs of the currently served weights."""
    scores = client.score([sample.input_ids.tolist() for sample in samples], temperature=TEMPERATURE)
    count = 0
    for sample, score in zip(samples, scores, strict=True):
        drawn = sample.completion_mask[1:] == 1
        assert 1 <= drawn.sum() <= 12
        given = np.asarray(sample.old_log_probs[1:], np.float32)
        count += given[drawn].tobytes() == score.logprobs[drawn].tobytes()
    return count


def test_samples_have_the_log_probs_of_the_served_weights_and_the_worker_stops(
    front: Front, client: RolloutClient, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # TRL makes its worker only where vLLM is installed, although the worker does not use vLLM.
    monkeypatch.setattr(async_rollout_worker, "is_vllm_available", lambda: True)
    PartialState()  # required by TRL's logger
    server = VLLMClient(front.url)
    server.wait_for_server_ready()
    assert server.get_max_model_len() == 1024
    with rollouts(front, chat_model) as worker:
        before = take(worker, version=0)
        assert num_same(before, client) == 4
        server.pause()
        pushed = front.post("/update_weights", {"weight_dir": trained(chat_model, tmp_path)})
        assert pushed.json()["weight_version"] == 1
        server.resume()
        worker.update_model_version(1)
        after = take(worker, version=1)
        assert num_same(after, client) == 4 and num_same(before, client) == 0
    assert front.post("/update_weights", {"weight_dir": str(chat_model)}).is_success  # restore for other tests
    assert front.metric("trueroll_http_open_requests") == 0
    assert {tuple(sample.prompt[0].items()) for sample in before} <= {tuple(prompt[0].items()) for prompt in PROMPTS}
    assert all(sample.metrics["reward"] == num_vowels([sample.completion])[0] for sample in before + after)
