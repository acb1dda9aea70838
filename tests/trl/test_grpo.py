"""The real GRPOTrainer on trueroll, both in place of vLLM and through a rollout function."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer
from trl.trainer import grpo_trainer
from trl_setup import CheckingPublisher, ServedEngine, grpo_settings, num_vowels, serve

from tiny import make_tiny_model
from trueroll.engine.request import SampleOutput, WeightSpan
from trueroll.errors import ConfigError, TruerollError
from trueroll.rollout import RolloutClient, WeightPublisher, launch_worker
from trueroll.rollout.integrations.trl import (
    AlignedGRPOTrainer,
    TruerollGeneration,
    WeightsError,
    rollout_func,
    trueroll_generation,
)
from trueroll.rollout.integrations.trl.common import check_samples

T = TypeVar("T", bound=GRPOTrainer)
CHATS = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"Name {n} animals."}] for n in range(2, 10)]})
TEXTS = Dataset.from_dict({"prompt": [f"{n} animals are" for n in range(2, 10)]})
DIFFERENCE = "sampling/sampling_logp_difference/max"
MEAN_DIFFERENCE = "sampling/sampling_logp_difference/mean"
STEPS = 2
SAMPLING: dict[str, Any] = dict(
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=None,
    repetition_penalty=1.0,
    max_completion_length=8,
    generation_kwargs=None,
)
"""TRL's sampling settings: the defaults, except for the length."""


class RecordingClient(RolloutClient):
    """Records the prompts and the groups of all calls."""

    def __init__(self, address: str) -> None:
        super().__init__(address, timeout=10.0)
        self.prompts: list[list[int]] = []
        self.groups: list[Any] = []

    def __enter__(self) -> RecordingClient:
        return self

    def generate(self, prompts: Any, *args: Any, **options: Any) -> Any:
        groups = super().generate(prompts, *args, **options)
        self.prompts += prompts
        self.groups += groups
        return groups


@dataclass(frozen=True)
class Trained:
    """A trainer after some steps. `history`: TRL's log per step. `differing`, `embeddings`: one record per push."""

    trainer: GRPOTrainer
    publisher: CheckingPublisher
    history: list[dict[str, float]]
    differing: list[list[str]]
    embeddings: list[bytes]


@pytest.fixture(scope="module")
def trained(chat_model: Path, chat_served: ServedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """A training with trueroll in place of vLLM."""
    args = grpo_settings(tmp_path_factory.mktemp("grpo"), max_steps=STEPS, use_vllm=True, vllm_mode="server")
    original = grpo_trainer.VLLMGeneration
    with RolloutClient(chat_served.address) as client, CheckingPublisher(chat_served) as publisher:
        with trueroll_generation(client, publisher):
            trainer = GRPOTrainer(model=str(chat_model), reward_funcs=num_vowels, args=args, train_dataset=CHATS)
        assert grpo_trainer.VLLMGeneration is original
        trainer.train()
        history = [entry for entry in trainer.state.log_history if DIFFERENCE in entry]
        yield Trained(trainer, publisher, history, [*publisher.differing], [*publisher.embeddings])


def test_trl_finds_its_log_probs_within_1e_4_of_the_workers(trained: Trained) -> None:
    found = [entry[DIFFERENCE] for entry in trained.history]
    assert len(found) == STEPS and 0.0 < max(found) < 1e-4, found


def test_after_each_push_the_workers_weights_equal_the_trainers_to_the_bit(trained: Trained) -> None:
    assert trained.differing == [[]] * STEPS
    assert len(set(trained.embeddings)) == STEPS  # each push brought new weights


def test_a_skipped_push_is_detected(trained: Trained) -> None:
    trained.publisher.skips = True
    with pytest.raises(WeightsError, match=f"its weights have version {STEPS} instead of {STEPS + 1}"):
        trained.trainer.train()
    names = trained.publisher.served.engine.weights.shapes.keys()
    assert set(trained.publisher.differing[-1]) == names  # the last update changed every parameter


def small_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return rewards that differ between the samples of a random model."""
    return [-sum(ids) / 1000 for ids in completion_ids]


def aligned_training(
    served: ServedEngine, model: Path, output: Path, peft_config: Any = None, **changes: Any
) -> AlignedGRPOTrainer:
    """Run a training with an aligned trainer, and return the trainer."""
    original = grpo_trainer.add_fused_lm_head
    trainer = trained_by(AlignedGRPOTrainer, served, model, output, peft_config, **changes)
    assert grpo_trainer.add_fused_lm_head is original
    return trainer


def trained_by(
    kind: Callable[..., T], served: ServedEngine, model: Path, output: Path, peft_config: Any = None, **changes: Any
) -> T:
    """Run a training that pushes the weights after each step, and return the trainer, which is of class `kind`."""
    args = grpo_settings(output, use_vllm=True, vllm_mode="server", **changes)
    with RolloutClient(served.address) as client, WeightPublisher() as publisher:
        publisher.connect([served.address])
        with trueroll_generation(client, publisher):
            trainer = kind(str(model), small_ids, args, TEXTS, peft_config=peft_config)
        trainer.train()
    return trainer


def reported(trainer: GRPOTrainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_with_an_aligned_trainer_trl_finds_no_difference(
    trained: Trained, chat_model: Path, chat_served: ServedEngine, tmp_path: Path
) -> None:
    args = grpo_settings(tmp_path, max_steps=2, use_vllm=True, vllm_mode="server")
    with RolloutClient(chat_served.address) as client, CheckingPublisher(chat_served) as publisher:
        with trueroll_generation(client, publisher):
            trainer = AlignedGRPOTrainer(str(chat_model), reward_funcs=num_vowels, args=args, train_dataset=CHATS)
        trainer.train()
    assert publisher.differing == [[], []] and len(set(publisher.embeddings)) == 2  # the second step has new weights
    assert reported(trainer, DIFFERENCE) == reported(trainer, MEAN_DIFFERENCE) == [0.0, 0.0]
    unaligned, aligned = trained.history[0], trainer.state.log_history[0]
    assert all(aligned[name] == unaligned[name] for name in ("num_tokens", "reward", "reward_std"))  # the same samples
    assert unaligned[DIFFERENCE] > 0.0
    for name in ("entropy", "grad_norm"):  # TRL's own values are equal up to rounding
        assert aligned[name] == pytest.approx(unaligned[name], rel=1e-3), name


@pytest.mark.parametrize(
    "changes",
    [
        dict(top_p=0.9),
        dict(top_k=20),
        dict(min_p=0.05, repetition_penalty=1.3),
        dict(
            temperature=0.8,
            top_p=0.95,
            generation_kwargs=dict(
                min_tokens=4, frequency_penalty=0.5, logit_bias={7: 3.0}, bad_words_token_ids=[[9], [7, 7]]
            ),
        ),
        dict(vllm_structured_outputs_regex=r"[a-z]+ [0-9]*\.", top_p=0.95),
    ],
    ids=["top_p", "top_k", "penalty", "kwargs", "grammar"],
)
def test_filters_and_penalties_of_an_aligned_trainer_leave_ratios_of_one(
    tiny_llama: Path, tiny_served: ServedEngine, tmp_path: Path, changes: dict[str, Any]
) -> None:
    ratios = "sampling/importance_sampling_ratio/min", "sampling/importance_sampling_ratio/max"
    trainer = aligned_training(tiny_served, tiny_llama, tmp_path, max_steps=2, learning_rate=1e-2, **changes)
    assert reported(trainer, DIFFERENCE) == [0.0, 0.0]
    assert [reported(trainer, name) for name in ratios] == [[1.0, 1.0]] * 2
    plain = trained_by(GRPOTrainer, tiny_served, tiny_llama, tmp_path, max_steps=1, **changes)
    assert reported(plain, DIFFERENCE)[0] > 0.01, "premise: TRL computes log-probs at the temperature alone"
    assert reported(plain, ratios[0])[0] < 0.99


@pytest.mark.parametrize("is_adapted", [False, True])
def test_an_aligned_trainer_in_bfloat16_with_a_reference_model(
    tiny_llama: Path, tmp_path: Path, is_adapted: bool
) -> None:
    """Train under autocast, with gradient accumulation and LoRA. The reference model has no adapter."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM") if is_adapted else None
    changes = dict(bf16=True, beta=0.1, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3)
    with serve(tiny_llama, dtype="bfloat16") as served:
        trainer = aligned_training(served, tiny_llama, tmp_path, peft_config=lora, learning_rate=1e-2, **changes)
    kl = reported(trainer, "kl")
    assert reported(trainer, DIFFERENCE) == [0.0] * 3
    assert kl[0] == 0.0 and min(kl[1:]) > 0.0  # the reference model has the same ops and fixed weights


def test_an_aligned_mixture_of_experts_trains_only_without_a_balancing_loss(tmp_path: Path) -> None:
    folder = make_tiny_model("qwen3_moe", tmp_path / "model")
    with serve(folder) as served:
        with pytest.raises(ConfigError, match="router_aux_loss_coef: 0.001 is not supported: an aligned model"):
            aligned_training(served, folder, tmp_path, max_steps=1)
        trainer = aligned_training(served, folder, tmp_path, max_steps=2, router_aux_loss_coef=0.0)
    assert reported(trainer, DIFFERENCE) == [0.0] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(cast_lm_head_to_fp32=True), "cast_lm_head_to_fp32: True is not supported: no worker .* set it to False"),
        (dict(entropy_coef=0.1), "entropy_coef: 0.1 is not supported: entropies have no gradient; set it to 0.0"),
        (dict(top_p=0.9, beta=0.1), "beta: 0.1 is not supported with top_k, top_p or min_p"),
    ],
)
def test_unsupported_settings_of_an_aligned_trainer_are_refused(
    tiny_llama: Path, tiny_served: ServedEngine, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        aligned_training(tiny_served, tiny_llama, tmp_path, max_steps=1, **changes)


def test_a_rollout_function_trains_with_the_chat_template_and_the_pushed_weights(
    chat_model: Path, chat_served: ServedEngine, tmp_path: Path
) -> None:
    args = grpo_settings(tmp_path, max_steps=2)
    with RecordingClient(chat_served.address) as client, CheckingPublisher(chat_served) as publisher:
        trainer = GRPOTrainer(
            model=str(chat_model),
            reward_funcs=num_vowels,
            args=args,
            train_dataset=CHATS,
            rollout_func=rollout_func(client, publisher),  # type: ignore[arg-type]
        )
        trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "reward" in entry] == [1, 2]
    assert publisher.differing == [[], []] and len(set(publisher.embeddings)) == 2
    assert [len(group.samples) for group in client.groups] == [4, 4]
    texts = [AutoTokenizer.from_pretrained(chat_model).decode(prompt) for prompt in client.prompts]
    assert all(text.endswith("animals.<|im_end|>\n<|im_start|>assistant\n") for text in texts), texts


def test_a_killed_worker_ends_the_training_with_an_error(tiny_llama: Path, tmp_path: Path) -> None:
    calls = []

    def reward(completions: list[Any], **columns: Any) -> list[float | None]:
        calls.append(len(completions))
        if len(calls) == 2:
            worker.kill()
        return num_vowels(completions, **columns)

    args = grpo_settings(tmp_path, max_steps=50)
    worker = launch_worker(str(tiny_llama), device="cpu", num_blocks=256)
    with worker, RolloutClient(worker.address, timeout=4.0) as client, WeightPublisher(timeout=4.0) as publisher:
        publisher.connect([worker.address])
        roll_out = rollout_func(client, publisher)
        trainer = GRPOTrainer(
            model=str(tiny_llama),
            reward_funcs=reward,
            args=args,
            train_dataset=TEXTS,
            rollout_func=roll_out,  # type: ignore[arg-type]
        )
        with pytest.raises(TruerollError, match=f"worker {worker.address} failed: .*no answer within"):
            trainer.train()
    assert len(calls) == 2 and trainer.state.global_step == 2


def stand_in(folder: Path, **changes: Any) -> Any:
    """Return a fake trainer with the attributes that a rollout function reads."""
    return SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=changes.pop("num_processes", 1), unwrap_model=lambda model: model),
        args=SimpleNamespace(**(SAMPLING | changes)),
        state=SimpleNamespace(global_step=0),
        model=AutoModelForCausalLM.from_pretrained(folder),
        processing_class=AutoTokenizer.from_pretrained(folder),
        eos_token_ids=[2],
        chat_template=None,
        chat_template_kwargs={},
    )


def test_torchs_seed_determines_the_samples_and_equal_adjacent_prompts_are_one_group(
    tiny_llama: Path, tiny_served: ServedEngine
) -> None:
    trainer, prompts = stand_in(tiny_llama), ["ab", "ab", "cd"]
    with RecordingClient(tiny_served.address) as client, CheckingPublisher(tiny_served) as publisher:
        roll_out = rollout_func(client, publisher)
        results = []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            results.append(roll_out(list(prompts), trainer))
    assert results[0] == results[1] != results[2]
    assert [len(group.samples) for group in client.groups] == [2, 1] * 3
    assert len({tuple(ids) for ids in results[0]["completion_ids"]}) == 3
    assert [len(ids) for ids in results[0]["completion_ids"]] == [len(values) for values in results[0]["logprobs"]]


def test_weights_are_pushed_once_per_step_and_per_training(tiny_llama: Path, tiny_served: ServedEngine) -> None:
    trainer = stand_in(tiny_llama)
    with RolloutClient(tiny_served.address) as client, CheckingPublisher(tiny_served) as publisher:
        roll_out = rollout_func(client, publisher)
        counts = []
        for state, step in ((trainer.state, 0), (trainer.state, 0), (trainer.state, 1), (SimpleNamespace(), 1)):
            trainer.state, state.global_step = state, step
            roll_out(["ab"], trainer)
            counts.append(len(publisher.differing))
    assert counts == [1, 1, 2, 3]


def test_samples_of_weights_from_another_trainer_are_refused(tiny_llama: Path, tiny_served: ServedEngine) -> None:
    trainer = stand_in(tiny_llama)
    with RolloutClient(tiny_served.address) as client, CheckingPublisher(tiny_served) as publisher:
        roll_out = rollout_func(client, publisher)
        roll_out(["ab"], trainer)
        publisher.push(trainer.model, version=77)
        with pytest.raises(WeightsError, match="its weights have version 77 instead of 1"):
            roll_out(["ab"], trainer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_processes=2), "must run in one process"),
        (dict(repetition_penalty=0.0), r"repetition_penalty: must be at least 0.0001 \(got 0.0\)"),
        (dict(generation_kwargs={"beams": 2}), "beams: unknown parameter"),
        (dict(generation_kwargs={"n": 2, "top_k": 3}), "generation_kwargs must not set n: TRL"),
        (dict(generation_kwargs={"logprobs": None, "seed": 1}), "generation_kwargs must not set seed, logprobs: TRL"),
    ],
)
def test_unsupported_settings_of_a_rollout_function_are_refused(
    tiny_llama: Path, tiny_served: ServedEngine, changes: dict[str, Any], message: str
) -> None:
    with RolloutClient(tiny_served.address) as client, CheckingPublisher(tiny_served) as publisher:
        with pytest.raises(TruerollError, match=message):
            rollout_func(client, publisher)(["ab"], stand_in(tiny_llama, **changes))


def make_generation(client: RolloutClient, publisher: WeightPublisher, **changes: Any) -> Any:
    settings = SAMPLING | dict(structured_outputs_regex=None) | changes
    accelerator = SimpleNamespace(num_processes=settings.pop("num_processes", 1))
    tokenizer = SimpleNamespace(eos_token_id=2)
    return TruerollGeneration(client, publisher, torch.nn.Identity(), accelerator, tokenizer, **settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_processes=2), "must run in one process"),
        (dict(structured_outputs_regex=3), "structured_outputs: regex: must be a valid string"),
        (dict(repetition_penalty=-1.0), r"repetition_penalty: must be at least 0.0001 \(got -1.0\)"),
    ],
)
def test_unsupported_settings_for_vllm_are_refused(
    tiny_served: ServedEngine, changes: dict[str, Any], message: str
) -> None:
    with RolloutClient(tiny_served.address) as client, WeightPublisher() as publisher:
        with pytest.raises(TruerollError, match=message):
            make_generation(client, publisher, **changes)


@pytest.mark.parametrize(("reason", "error"), [("abort", None), ("error", "logits are not finite")])
def test_an_aborted_or_failed_sample_is_refused(reason: Any, error: str | None) -> None:
    ids: Any = np.array([4], np.int32)
    logprobs = np.array([-1.0], np.float32)
    sample = SampleOutput("id", 0, ids, logprobs, reason, 7, 0, (WeightSpan(1, 0, 1),), error)
    with pytest.raises(TruerollError, match=f"finish reason {reason} .*{error or 'aborted by a client'}"):
        check_samples([sample], oldest=1, newest=1)


def test_filters_and_generation_kwargs_reach_the_worker(tiny_llama: Path, tiny_served: ServedEngine) -> None:
    trainer = stand_in(tiny_llama, top_k=7, min_p=0.1, generation_kwargs={"min_tokens": 3, "min_p": 0.2})
    with RecordingClient(tiny_served.address) as client, CheckingPublisher(tiny_served) as publisher:
        rollout_func(client, publisher)(["ab"], trainer)
    params = client.groups[0].params
    assert (params.top_k, params.min_p, params.min_tokens, params.max_tokens) == (7, 0.2, 3, 8)
    assert params.stop_token_ids == (2,)


def test_without_trl_the_import_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['trl'] = None; import trueroll.rollout.integrations.trl"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "TrlMissingError: trl: version 1.16 is required" in done.stderr and "trueroll[trl]" in done.stderr
