"""sglang-router in front of two front ends with SGLang's paths, alone and in slime's training loop."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from http_fronts import CHAT_TEMPLATE, Front, front_end
from serving import WorkerOnThread
from slime_client import SlimeClient
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM
from weight_sync.deltas.slime import write_delta

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.kernels.training import align, token_log_probs
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.worker.process import load_engine

ROUTER = """
import sys
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs
port, metrics_port = map(int, sys.argv[1:])
options = dict(host="127.0.0.1", prometheus_host="127.0.0.1", policy="round_robin", log_level="warn")
Router.from_args(RouterArgs(port=port, prometheus_port=metrics_port, **options)).start()
"""
PROMPTS = [[*range(40, 80)], [*range(90, 120)]]
GROUP, MAX_TOKENS = 4, 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("router") / "model")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture
def fronts(model: Path) -> Iterator[list[Front]]:
    """Front ends of two workers."""
    config = EngineConfig(model=str(model), num_blocks=256, num_threads=1)
    workers = [WorkerOnThread(WorkerConfig(), lambda: load_engine(config)) for _ in range(2)]
    with ExitStack() as stack:
        yield [stack.enter_context(front_end(worker.address, sglang=True)) for worker in workers]
    for worker in workers:
        worker.worker.drain()
        worker.join()
        assert worker.error is None


@contextmanager
def router(fronts: list[Front]) -> Iterator[str]:
    """Run a router, and register the front ends as slime does (`SGLangEngine._register_to_router`). Yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [str(each.getsockname()[1]) for each in (one, other)]
    url, process = f"http://127.0.0.1:{ports[0]}", subprocess.Popen([sys.executable, "-P", "-c", ROUTER, *ports])
    try:
        with httpx2.Client(base_url=url, trust_env=False) as client:
            wait_for(lambda: client.get("/workers").status_code == 200)
            for front in fronts:
                client.post("/workers", json={"url": front.url, "worker_type": "regular"}).raise_for_status()
            wait_for(lambda: len(healthy(client)) == len(fronts))
            assert healthy(client) == {front.url for front in fronts}
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def healthy(client: httpx2.Client) -> set[str]:
    return {worker["url"] for worker in client.get("/workers").json()["workers"] if worker["is_healthy"]}


def wait_for(holds: Any) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            if holds():
                return
        except httpx2.TransportError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_router_changes_no_bit(fronts: list[Front]) -> None:
    fields: dict[str, Any] = dict(max_new_tokens=8, sampling_seed=3)
    with router(fronts) as url, SlimeClient(fronts[0].url) as direct, SlimeClient(fronts[0].url, url) as routed:
        expected = direct.generate(PROMPTS[0], fields)
        before = [front.metric('trueroll_http_requests_total{path="/generate",status="200"}') for front in fronts[:1]]
        for _ in range(4):
            told = routed.generate(PROMPTS[0], fields)
            assert (told["tokens"], told["log_probs"]) == (expected["tokens"], expected["log_probs"])
        counts = [front.metric('trueroll_http_requests_total{path="/generate",status="200"}') for front in fronts]
        assert counts == [before[0] + 2, 2], "each front end answered two of the requests"
        body = dict(input_ids=PROMPTS[0], sampling_params=fields, return_logprob=True, stream=True)
        with httpx2.stream("POST", f"{url}/generate", json=body, timeout=60, trust_env=False) as response:
            *_, last, done = [line for line in response.iter_lines() if line]
        assert done == "data: [DONE]" and f'"output_ids":{expected["tokens"][40:]}'.replace(" ", "") in last
        answer = httpx2.post(f"{url}/generate", json=body | {"stream": False, "lora_path": "a"}, trust_env=False)
        assert answer.status_code == 400 and "lora_path: the adapter 'a' is not loaded" in answer.text


@pytest.mark.parametrize("pushes,num_steps", [("delta", 20), ("full", 3)])
def test_slimes_loop_has_no_mismatch(
    pushes: str, num_steps: int, fronts: list[Front], model: Path, tmp_path: Path
) -> None:
    """GRPO with slime's calls: rollouts through the router (`sglang_rollout.py`, `generate_rollout_async`), and pushes
    from a shared folder: 20 steps with deltas (`update_weight_from_disk_delta.py`), and 3 with checkpoints
    (`actor_group.py`, `_reload_rollout_weights_from_disk`). The trainer is aligned, so its log-probs are the rollouts'
    log-probs, bit for bit.
    """
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    align(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    first = policy.state_dict()["model.embed_tokens.weight"].clone()
    with router(fronts) as url, ExitStack() as stack, ThreadPoolExecutor(8) as threads:
        engines = [stack.enter_context(SlimeClient(front.url, url, source=str(tmp_path))) for front in fronts]
        if pushes == "delta":
            for engine in engines:
                engine.pull(0)
        for step in range(num_steps):
            asked = [(engines[0], prompt, step, index) for prompt in PROMPTS for index in range(GROUP)]
            samples = list(threads.map(lambda each: sample(*each), asked))
            assert {each["weight_version"] for each in samples} == {str(step)}
            drawn, computed, loss = learn(policy, samples)
            assert torch.equal(drawn, computed.detach())
            before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if pushes == "delta":
                write_delta(tmp_path, step + 1, before, policy.state_dict())
            else:
                policy.save_pretrained(folder := tmp_path / f"weight_v{step + 1:06d}")
            for engine in engines:
                engine.push(step + 1) if pushes == "delta" else engine.push_folder(str(folder), step + 1)
                assert engine.version() == str(step + 1)
    assert not torch.equal(policy.state_dict()["model.embed_tokens.weight"], first), "premise: the policy learned"


def sample(engine: SlimeClient, prompt: list[int], step: int, index: int) -> dict[str, Any]:
    told = engine.generate(prompt, dict(max_new_tokens=MAX_TOKENS, sampling_seed=100 * step + index))
    return told | dict(prompt_length=len(prompt), reward=float(sum(token % 2 for token in told["tokens"])))


def learn(policy: Any, samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the samples' log-probs from the rollout and from the trainer, and the loss."""
    ids = pad_sequence([torch.tensor(each["tokens"]) for each in samples], batch_first=True, padding_value=-1)
    places = torch.arange(ids.shape[1])
    is_own = (places >= torch.tensor([[each["prompt_length"]] for each in samples])) & (ids >= 0)
    computed = token_log_probs(policy, ids.clamp(min=0), ids >= 0, completion_mask=is_own)[is_own]
    rewards = torch.tensor([each["reward"] for each in samples]).reshape(-1, GROUP)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    weights = torch.repeat_interleave(advantages, is_own.sum(1))
    drawn = torch.tensor([value for each in samples for value in each["log_probs"]])
    return drawn, computed, -(weights * (computed - drawn).exp()).mean()
