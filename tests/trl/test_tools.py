"""The real GRPOTrainer with tools: trueroll generates the turns between the calls."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_templates import make_chat_folder, template_of
from datasets import Dataset
from scripted_models import give_texts
from transformers import AutoTokenizer
from trl_setup import grpo_settings, serve

from tiny import make_tiny_model
from trueroll.rollout import RolloutClient, WeightPublisher
from trueroll.rollout.integrations.trl import AlignedGRPOTrainer, trueroll_generation

CALL, WRONG_CALL, END = 400, 401, "<|im_end|>"
STEPS = 2
DIFFERENCE = "sampling/sampling_logp_difference/max"
SAID = {
    CALL: '<tool_call>Ċ{"name":Ġ"add",Ġ"arguments":Ġ{"number":Ġ3}}Ċ</tool_call>',
    WRONG_CALL: '<tool_call>Ċ{"name":Ġ"add",Ġ"arguments":Ġ{"number":Ġ-1}}Ċ</tool_call>',
}
"""Tokens that are whole calls. A random model writes no calls."""
PROMPTS = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{n} and 3?"}] for n in range(8)]})


class Counter:
    """An environment with a tool."""

    def reset(self, **_: Any) -> None:
        self.total = 0

    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: The number, which must be positive.
        """
        if number < 1:
            raise ValueError("the number must be positive")
        self.total += number
        return str(self.total)


def total(environments: list[Counter], **_: Any) -> list[float]:
    return [float(environment.total) for environment in environments]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Qwen3 with Qwen3's chat template, as TRL contains it."""
    model = make_tiny_model("qwen3", tmp_path / "model", max_position_embeddings=2048)
    folder = make_chat_folder(tmp_path / "chat", template_of("trl/qwen3"), END, model)
    give_texts(folder, SAID)
    return folder


def test_an_environment_with_tools_trains_on_the_log_probs_of_the_worker(folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(use_vllm=True, vllm_mode="server", max_steps=STEPS, max_completion_length=512)
    settings |= dict(num_generations=16, per_device_train_batch_size=16)
    bias = {CALL: 9.0, WRONG_CALL: 9.0, AutoTokenizer.from_pretrained(folder).eos_token_id: 10.0}
    args = grpo_settings(tmp_path / "run", generation_kwargs=dict(logit_bias=bias), **settings)
    num_turns = 0

    class CountingClient(RolloutClient):
        def generate(self, *args: Any, **options: Any) -> Any:
            nonlocal num_turns
            num_turns += 1
            return super().generate(*args, **options)

    with serve(folder) as served, CountingClient(served.address) as client, WeightPublisher() as publisher:
        publisher.connect([served.address])
        with trueroll_generation(client, publisher):
            trainer = AlignedGRPOTrainer(str(folder), total, args, PROMPTS, environment_factory=Counter)
        trainer.train()
    history = [entry for entry in trainer.state.log_history if DIFFERENCE in entry]
    assert [entry[DIFFERENCE] for entry in history] == [0.0] * STEPS
    assert num_turns > STEPS, "premise: the model answers after the results of tools"
    for entry in history:
        assert entry["tools/call_frequency"] > 0 < entry["tools/failure_frequency"] < 1 and entry["grad_norm"] > 0
