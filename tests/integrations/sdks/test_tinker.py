"""The package `tinker` samples and scores: alone, through cut connections, and in a training loop."""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

os.environ["TINKER_TELEMETRY"] = "0"  # read when a client is made; it would send a batch at the end of the process

import numpy as np
import pytest
import tinker
import torch
from cutting_proxy import cutting_proxy
from http_fronts import CHAT_TEMPLATE, Front, front_end
from serving import WorkerOnThread, wait_until
from tinker import types
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.kernels.training import align, token_log_probs
from trueroll.rollout import RolloutClient, SamplingParams, WeightPublisher
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.worker.process import load_engine

PROMPTS = [[*range(40, 80)], [*range(90, 120)]]
NUM_STEPS, GROUP, MAX_TOKENS = 20, 4, 12
FIRST_POLL = b"\r\nx-tinker-request-iteration: 0\r\n"
"""The header with which the package marks its first poll of a promise."""
ANSWERED = 'trueroll_http_requests_total{path="/api/v1/asample",status="200"}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("tinker") / "model")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def worker(folder: Any) -> Iterator[WorkerOnThread]:
    config = EngineConfig(model=str(folder), num_blocks=256, num_threads=1)
    running = WorkerOnThread(WorkerConfig(), lambda: load_engine(config))
    yield running
    running.worker.drain()
    running.join()
    assert running.error is None


@pytest.fixture(scope="module")
def front(worker: WorkerOnThread) -> Iterator[Front]:
    with front_end(worker.address, model_name="tiny", tinker=True) as running:
        yield running


@pytest.fixture(scope="module")
def sampling(front: Front) -> Iterator[Any]:
    service = tinker.ServiceClient(base_url=front.url, api_key="tml-none")
    yield service.create_sampling_client(base_model="tiny").result()


@pytest.fixture(scope="module")
def client(worker: WorkerOnThread) -> Iterator[RolloutClient]:
    with RolloutClient(worker.address) as running:
        yield running


def as_prompt(token_ids: list[int]) -> Any:
    return types.ModelInput.from_ints(token_ids)


def test_samples_and_scores_have_the_bits_of_the_client(sampling: Any, client: RolloutClient) -> None:
    named: dict[str, Any] = dict(max_tokens=MAX_TOKENS, temperature=0.8, top_p=0.9)
    asked = SamplingParams(n=3, logprobs="temperature", top_logprobs=2, **named)
    [group] = client.generate([PROMPTS[0]], asked, seed=7)
    [score] = client.score([PROMPTS[0]], top_logprobs=3)
    params = types.SamplingParams(seed=7, **named)
    wanted: dict[str, Any] = dict(include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2)
    told = sampling.sample(as_prompt(PROMPTS[0]), 3, params, **wanted).result()
    assert len({sequence.sequence_id for sequence in told.sequences}) == 3
    for sequence, sample in zip(told.sequences, group.samples, strict=True):
        assert sample.logprobs is not None and sample.top_logprobs is not None and sample.top_token_ids is not None
        assert sequence.tokens == sample.token_ids and sequence.stop_reason == sample.finish_reason
        assert sequence.logprobs_np.tobytes() == sample.logprobs.tobytes()
        assert np.array_equal(sequence.topk_logprobs_np.token_ids, sample.top_token_ids)
        assert sequence.topk_logprobs_np.logprobs.tobytes() == sample.top_logprobs.tobytes()
    assert np.isnan(told.prompt_logprobs_np[0]) and told.prompt_logprobs_np[1:].tobytes() == score.logprobs.tobytes()
    assert score.top_logprobs is not None
    assert told.topk_prompt_logprobs_np.logprobs[1:].tobytes() == score.top_logprobs.tobytes()
    computed = sampling.compute_logprobs(as_prompt(PROMPTS[0])).result()
    assert computed[0] is None and np.float32(computed[1:]).tobytes() == score.logprobs.tobytes()
    last = sampling.compute_logprobs(as_prompt(PROMPTS[0]), prompt_logprobs_last_n=4).result()
    assert last == [None] * 36 + computed[-4:]


@pytest.mark.parametrize("layout", ["dense", "csr"])
def test_target_ids_have_the_bits_of_the_client(layout: str, sampling: Any, client: RolloutClient) -> None:
    ids = torch.full((len(PROMPTS[0]) - 1, 6), -1)
    ids[30, :3] = torch.tensor([5, 90, 17])
    ids[38, 5] = 9
    [score] = client.score([PROMPTS[0]], target_token_ids=[ids.numpy()])
    make = types.TensorData.from_torch if layout == "dense" else types.TensorData.from_torch_sparse
    targets = make(ids) if layout == "dense" else make(ids, pad_value=-1)
    assert (targets.sparse_crow_indices is None) == (layout == "dense"), "premise"
    params = types.SamplingParams(max_tokens=1)
    told = sampling.sample(as_prompt(PROMPTS[0]), 1, params, target_prompt_logprobs=targets).result()
    found = told.target_prompt_logprobs.to_torch()
    assert score.target_logprobs is not None and np.count_nonzero(score.target_logprobs) == 4
    assert found.numpy().tobytes() == score.target_logprobs.tobytes()


def test_refused_requests_raise(sampling: Any) -> None:
    with pytest.raises(tinker.BadRequestError, match="prompt_alt_tokens_k: 2 is not supported"):
        sampling.sample(as_prompt([1, 2]), 1, types.SamplingParams(max_tokens=1), prompt_alt_tokens_k=2).result()
    with pytest.raises(tinker.RequestFailedError, match=r"token ids must be in \[0, 512\)"):
        sampling.sample(as_prompt([1, 2**30]), 1, types.SamplingParams(max_tokens=1)).result()


def test_an_abandoned_request_is_cancelled(sampling: Any, front: Front) -> None:
    """The package may miss a cancellation that comes while it reads an answer. So the request is abandoned while its
    poll waits: the request is answered, and `/metrics` is not alone.
    """
    params = types.SamplingParams(max_tokens=4)
    sampling.sample(as_prompt(PROMPTS[0]), 1, params).result()  # the metrics now have a line for it
    before = front.metric(ANSWERED)
    assert front.post("/pause?mode=keep").status_code == 200
    try:
        asked = sampling.sample(as_prompt(PROMPTS[0]), 1, params)
        front.wait_for(ANSWERED, before + 1)
        front.wait_for('trueroll_http_connections{stage="busy"}', 2)
        assert asked.future().cancel()
        wait_until(lambda: 'path="/api/v1/cancel_future",status="204"' in front.get("/metrics").text)
    finally:
        assert front.post("/resume").status_code == 200


def test_an_answer_that_is_lost_is_read_again(sampling: Any, front: Front) -> None:
    address, params = urlsplit(front.url), types.SamplingParams(max_tokens=4, seed=3)
    assert address.hostname is not None and address.port is not None
    undisturbed = sampling.sample(as_prompt(PROMPTS[0]), 2, params).result()
    before = front.metric("trueroll_http_tinker_promises")
    with cutting_proxy((address.hostname, address.port), FIRST_POLL) as proxy:
        service = tinker.ServiceClient(base_url=f"http://127.0.0.1:{proxy.port}", api_key="tml-none")
        behind = service.create_sampling_client(base_model="tiny").result()
        told = behind.sample(as_prompt(PROMPTS[0]), 2, params).result()
        assert proxy.num_cut == 1
    for one, other in zip(told.sequences, undisturbed.sequences, strict=True):
        assert one.tokens == other.tokens and one.logprobs_np.tobytes() == other.logprobs_np.tobytes()
    assert front.metric("trueroll_http_tinker_promises") == before + 1, "the request was sent once"


def test_a_loop_with_pushes_has_no_mismatch(sampling: Any, worker: WorkerOnThread, folder: Any) -> None:
    """20 steps of GRPO: the package samples, an aligned trainer learns and pushes. The trainer's log-probs are the
    samples' log-probs, bit for bit.
    """
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    align(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    first = policy.state_dict()["model.embed_tokens.weight"].clone()
    with WeightPublisher("shared") as publisher:
        publisher.connect([worker.address])
        for step in range(NUM_STEPS):
            params = [types.SamplingParams(max_tokens=MAX_TOKENS, seed=2 * step + i) for i in range(len(PROMPTS))]
            asked = [sampling.sample(as_prompt(p), GROUP, s) for p, s in zip(PROMPTS, params, strict=True)]
            drawn, computed, loss = learn(policy, [each.result() for each in asked])
            assert torch.equal(drawn, computed.detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.push(policy, step + 1)
    assert not torch.equal(policy.state_dict()["model.embed_tokens.weight"], first), "premise: the policy learned"


def learn(policy: Any, answers: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the samples' log-probs from the rollout and from the trainer, and the loss."""
    pairs = [(prompt, each) for prompt, told in zip(PROMPTS, answers, strict=True) for each in told.sequences]
    rows = [torch.tensor(prompt + each.tokens) for prompt, each in pairs]
    ids = pad_sequence(rows, batch_first=True, padding_value=-1)
    lengths = torch.tensor([[len(prompt)] for prompt, _ in pairs])
    is_own = (torch.arange(ids.shape[1]) >= lengths) & (ids >= 0)
    computed = token_log_probs(policy, ids.clamp(min=0), ids >= 0, completion_mask=is_own)[is_own]
    rewards = torch.tensor([[float(sum(token % 2 for token in each.tokens))] for _, each in pairs]).reshape(-1, GROUP)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    drawn = torch.from_numpy(np.concatenate([each.logprobs_np for _, each in pairs]))
    weights = torch.repeat_interleave(advantages, is_own.sum(1))
    return drawn, computed, -(weights * (computed - drawn).exp()).mean()
