"""SkyRL's loop against a worker with a model: samples, pushes by delta from a folder and from a URL, no mismatch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from http_fronts import Front, error_of, front_end
from serving import WorkerOnThread
from skyrl_client import SAMPLING, SkyrlClient
from transformers import AutoModelForCausalLM

from trueroll.engine.config import EngineConfig
from trueroll.kernels.training import align, token_log_probs
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.worker.process import load_engine
from weight_sync.deltas.skyrl import write_delta

PROMPT, MAX_TOKENS = [*range(40, 60)], 8


@pytest.fixture
def front(chat_model: Path, tmp_path: Path) -> Iterator[Front]:
    config = EngineConfig(model=str(chat_model), num_blocks=64, num_threads=1)
    worker = WorkerOnThread(WorkerConfig(push_urls=[f"file://{tmp_path}"]), lambda: load_engine(config))
    with front_end(worker.address, vllm=True) as front:
        yield front
    worker.worker.drain()
    worker.join()
    assert worker.error is None


def learn(policy: Any, samples: list[dict[str, Any]]) -> float:
    """Take a step towards the sampled tokens. Return the largest difference of log-probs to the rollout."""
    ids = torch.tensor([PROMPT + sample["response_ids"] for sample in samples])
    computed = token_log_probs(policy, ids)[:, len(PROMPT) - ids.shape[1] :]
    drawn = torch.tensor([sample["response_logprobs"] for sample in samples])
    assert computed.shape == drawn.shape == (2, MAX_TOKENS)
    (-computed.sum()).backward()
    return float((computed.detach() - drawn).abs().max())


def test_skyrls_loop_has_no_mismatch(front: Front, chat_model: Path, tmp_path: Path) -> None:
    policy = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
    align(policy)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    with SkyrlClient(front.url, front.model) as skyrl:
        skyrl.init()
        answers = []
        for version in range(4):
            if version:
                sync_dir = str(tmp_path / "sync") if version < 3 else f"file://{tmp_path}/sync/"
                skyrl.push(version, sync_dir)
            samples = [skyrl.generate(PROMPT, MAX_TOKENS, seed) for seed in (1, 2)]
            spans = [[span["version"] for span in sample["choice"]["weight_versions"]] for sample in samples]
            assert spans == [[str(version)]] * 2
            assert learn(policy, samples) == 0.0
            answers.append(samples[0]["response_logprobs"])
            before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
            optimizer.step()
            optimizer.zero_grad()
            write_delta(tmp_path / "sync", version + 1, before, policy.state_dict())
    assert len({tuple(each) for each in answers}) == 4, "premise: the policy learned"


def test_the_log_probs_leave_out_min_tokens(front: Front) -> None:
    """SkyRL always sets `min_tokens` to 1, of which its trainer knows nothing."""
    with SkyrlClient(front.url, front.model) as skyrl:
        told = skyrl.generate(PROMPT, MAX_TOKENS, 1)
        body = {"sampling_params": SAMPLING | {"max_tokens": MAX_TOKENS, "seed": 1}, "token_ids": PROMPT}
        del body["sampling_params"]["logprobs_mode"]
        other = skyrl.ask("/inference/v1/generate", body)["choices"][0]
    assert other["token_ids"] == told["response_ids"]
    found = [each["logprob"] for each in other["logprobs"]["content"]]
    assert found[0] > told["response_logprobs"][0] and found[1:] == told["response_logprobs"][1:]


def test_a_url_that_the_worker_may_not_read_is_refused(front: Front) -> None:
    refused = front.post("/fetch_weights", {"target_version": 1, "sync_dir": "file:///etc"})
    assert refused.status_code == 409 and "--push-urls" in error_of(refused)["message"]
