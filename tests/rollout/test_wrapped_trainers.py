"""Trainers with two ranks: sharded, replicated and otherwise wrapped. The log-probs of such a trainer have the bits of
a worker, even after training and a push. The gradients match those of a single process. `trainer_rank.py` is the
program that each rank runs.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matrix import thinned
from torch import Tensor
from transformers import AutoModelForCausalLM
from vision_models import make_vision_model

from tiny import FAMILIES, HYBRID, MIXTURES, WINDOWED, make_tiny_model
from trueroll.kernels.training import align, token_log_probs
from trueroll.rollout import RolloutClient, SamplingParams, WeightPublisher, WorkerProcess, launch_worker

from .trainer_rank import ADAPTED, PROMPTS, REFUSED, STEPS, WITH_TOWER, WRAPPERS, Found

SECONDS = 900
pytestmark = pytest.mark.timeout(SECONDS + 100)  # two idle cores need 75 s
BATCHES = {"micro-batches of 6", "micro-batches of 2", "positioned", "padded"}
# A family for each mechanism: fused names, multipliers, caps, text in a wrapper, latent attention, routers with a
# correction bias (a buffer; a frozen parameter; beside float32 weights), state spaces and latent experts.
MECHANISMS = ("phi3", "granite", "gemma2", "mistral3", "deepseek_v3", "afmoe", "ernie4_5_moe", "nemotron_h")
OTHERS = [name for name in (*FAMILIES, *WINDOWED, *HYBRID, *MIXTURES, *MECHANISMS) if name != "llama"]
# Families that combine the mechanisms of others.
COMBINED = ("qwen2", "mistral", "olmo3", "qwen2_window", "qwen3_next", "qwen3_next_moe", "qwen3_5_moe")


@pytest.fixture(scope="module")
def worker(tiny_llama: Path, forked_workers: None) -> Iterator[WorkerProcess]:
    with launch_worker(str(tiny_llama), dtype="bfloat16", num_blocks=256, num_threads=1) as worker:
        yield worker


@pytest.fixture(scope="module")
def told(
    request: pytest.FixtureRequest, worker: WorkerProcess, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """The results of each rank by case."""
    folders = {family: request.getfixturevalue(f"tiny_{family}") for family in FAMILIES}
    for kind in ("windowed", "hybrid", "mixture"):
        folders |= request.getfixturevalue(f"{kind}_models")
    out = tmp_path_factory.mktemp("ranks")
    folders |= {family: make_tiny_model(family, out / family) for family in MECHANISMS}
    named = {family: str(folder) for family, folder in folders.items()}
    items: list[Any] = [item for item in request.session.items if is_of_a_family(item)]
    combined = {item.callspec.params["family"] for item in items}
    others = [family for family in OTHERS if family not in COMBINED or family in combined]
    towers = {family: str(make_vision_model(family, out / family)) for family in ("qwen3_vl", "gemma3")}
    settings = json.dumps(dict(folders=named, others=others, towers=towers, address=worker.address, out=str(out)))
    command = [sys.executable, "-P", str(Path(__file__).with_name("trainer_rank.py"))]
    port = str(free_port())
    ranks = [subprocess.Popen([*command, str(rank), port, settings]) for rank in (0, 1)]
    try:
        assert [rank.wait(SECONDS) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]


def is_of_a_family(item: Any) -> bool:
    return getattr(item, "originalname", "").startswith("test_a_sharded_model_of_any_family")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def found(told: list[dict[str, Any]], case: str) -> list[Found]:
    assert not any(isinstance(each[case], str) for each in told), "\n".join(str(each[case]) for each in told)
    return [Found(**each[case]) for each in told]


@pytest.mark.parametrize("name", WITH_TOWER)
def test_a_wrapped_tower_computes_the_bits_of_a_bare_one(told: list[dict[str, Any]], name: str) -> None:
    """In each forward pass, only one of the two ranks has images."""
    for rank in found(told, name):
        assert rank.count >= 50 and rank.differences == {"turn 0": 0, "turn 1": 0}
        assert rank.errors and all(here < bound for here, bound in rank.errors.values())


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_trainer_computes_the_bits_of_a_bare_one(told: list[dict[str, Any]], name: str) -> None:
    for rank in found(told, name):
        assert rank.count > 100 and rank.differences == dict.fromkeys(BATCHES, 0)
        assert rank.errors and all(here < bound < 0.25 for here, bound in rank.errors.values())


@thinned(lambda family: family not in COMBINED)
@pytest.mark.parametrize("family", OTHERS)
def test_a_sharded_model_of_any_family_computes_the_bits_of_a_bare_one(told: list[dict[str, Any]], family: str) -> None:
    for rank in found(told, family):
        assert rank.count > 100 and rank.differences == {"log_probs": 0, "statistics": 0}
        assert rank.errors and all(here < bound for here, bound in rank.errors.values())


@pytest.mark.parametrize("what", ["pushed", "adapters pushed"])
@pytest.mark.parametrize("name", ["fsdp", "fsdp offloaded", "ddp autocast"])
def test_a_trainer_and_a_worker_agree_after_each_push(told: list[dict[str, Any]], name: str, what: str) -> None:
    for rank in found(told, f"{name}, {what}"):
        assert rank.count > 100 and rank.differences == {f"step {step}": 0 for step in range(STEPS + 1)}


@pytest.mark.parametrize("family", ADAPTED)
def test_a_sharded_model_computes_with_its_merged_weights(told: list[dict[str, Any]], family: str) -> None:
    """The merged weights are the trained weights, not the weights that a mixed precision policy has rounded."""
    for rank in found(told, f"{family}, adapted"):
        assert rank.count > 10 and not any(rank.differences.values()), rank.differences


WORDS = {
    "sharded inside": "layers.1.mlp.gate_proj.weight: .* still a DTensor .* not on modules inside a layer",
    "fsdp1": "wrapper FullyShardedDataParallel is not supported .*; shard with torch.distributed.fsdp.fully_shard",
    "tensor parallel": "layers.0.mlp.up_proj.weight: .* still a DTensor .* do not use tensor parallelism",
    "rounded bias": "layers.1.mlp.expert_bias must be torch.float32, .* the parameter to fully_shard in ignored_params",
    "wide head": "lm_head.weight must be torch.bfloat16 like the hidden states .got torch.float32",
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_wrapper_is_refused_by_name(told: list[dict[str, Any]], name: str) -> None:
    for rank in told:
        assert re.search(WORDS[name], rank[f"{name}, refused"]), rank[f"{name}, refused"]


class Rounding(torch.optim.Optimizer):
    """An optimizer for bfloat16 parameters, with updates smaller than the last bit of a parameter. The optimizer rounds
    stochastically (`stochastic`), or keeps the rounding error for the next step (Kahan).
    """

    def __init__(self, parameters: Any, stochastic: bool) -> None:
        super().__init__(parameters, dict(stochastic=stochastic))
        self.generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.dtype == torch.bfloat16
                change = -2e-4 * parameter.grad.float().sign()
                if group["stochastic"]:
                    parameter.copy_(self.rounded(parameter.float() + change))
                    continue
                lost = self.state[parameter].setdefault("lost", torch.zeros_like(parameter, dtype=torch.float32))
                wanted = parameter.float() + change + lost
                parameter.copy_(wanted)
                lost.copy_(wanted - parameter.float())

    def rounded(self, wide: Tensor) -> Tensor:
        noise = torch.randint(0, 2**16, wide.shape, dtype=torch.int32, generator=self.generator)
        return ((wide.view(torch.int32) + noise) & -(2**16)).view(torch.float32)


@pytest.mark.parametrize("stochastic", [True, False])
def test_bfloat16_parameters_are_pushed_exactly(tiny_llama: Path, worker: WorkerProcess, stochastic: bool) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16)
    align(model)
    optimizer, before = Rounding(model.parameters(), stochastic), model.lm_head.weight.detach().clone()
    with RolloutClient(worker.address) as client, WeightPublisher() as publisher:
        publisher.connect([worker.address])
        for step in range(4):
            publisher.push(model, step, allow_older=True)
            for prompt, group in zip(PROMPTS, client.generate(PROMPTS, SamplingParams(n=2), seed=step), strict=True):
                for sample in group.samples:
                    log_probs = token_log_probs(model, torch.tensor([[*prompt, *sample.token_ids]]))
                    assert sample.logprobs is not None
                    expected = sample.logprobs.view(np.int32)
                    assert np.array_equal(log_probs[0, len(prompt) :].detach().numpy().view(np.int32), expected)
                    log_probs.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    changed = (model.lm_head.weight != before).float().mean()
    assert 0.01 < changed < 0.9, "premise: some steps have changed parameters, and some not yet"
