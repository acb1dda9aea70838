"""A trainer's log-probs have the same bits as the rollout's, for layers of real size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.running.loading import LoadedModel, load_dummy
from trueroll.kernels.training import align, token_log_probs

from ..engine.drive import generate, run, tokens
from ..engine.test_trainer_log_probs import TEMPERATURE, Rollout, count_differences
from .moved import DEVICE, cut_config, sized

LENGTHS = sized((2500, 1030, 513, 40), (12, 3))
MODELS = sized(("qwen3-0.6b", "qwen2.5-7b"), ("qwen3-0.6b",))


def roll_out(config: EngineConfig, loaded: LoadedModel) -> Rollout:
    """Return (prompt, sample) pairs in groups of three. The prompts are computed in chunks."""
    prompts = {str(i): tokens(n, seed=i) for i, n in enumerate(LENGTHS)}
    params: dict[str, Any] = dict(n=sized(3, 1), temperature=TEMPERATURE, max_tokens=sized(40, 4))
    samples = run(Engine(config, loaded), [generate(id, prompt, **params) for id, prompt in prompts.items()])
    return [(prompts[id], sample) for (id, _), sample in samples.items()]


def trainer_model(folder: Path, loaded: LoadedModel) -> Any:
    """Return transformers' model of the configuration in a folder, with the worker's weights."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=loaded.model.dtype).to(DEVICE)
    missing = model.load_state_dict({name: weight.to_dense() for name, weight in loaded.weights.tensors.items()}, False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}, "the head is tied or loaded"
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_trainer_computes_the_bits_of_the_rollout(name: str, tmp_path: Path) -> None:
    folder = cut_config(name, tmp_path)
    config = EngineConfig(
        model=str(folder),
        device=str(DEVICE),
        backend="triton",
        max_model_len=sized(4096, 64),
        max_num_batched_tokens=sized(1024, 64),
    )
    loaded = load_dummy(config)
    rollout = roll_out(config, loaded)
    model = trainer_model(folder, loaded)
    align(model, "triton")
    sequences = [torch.tensor([*prompt, *sample.token_ids]).long().to(DEVICE) for prompt, sample in rollout]
    lengths = [len(sequence) for sequence in sequences]
    packed = token_log_probs(model, torch.cat(sequences), lengths=lengths, temperature=TEMPERATURE).split(lengths)
    mask = pad_sequence([torch.ones_like(sequence) for sequence in sequences], batch_first=True)
    padded = token_log_probs(model, pad_sequence(sequences, batch_first=True), mask, temperature=TEMPERATURE)
    for found in (packed, padded):
        parts = [
            row[len(prompt) : n].detach().cpu() for row, (prompt, _), n in zip(found, rollout, lengths, strict=True)
        ]
        assert count_differences(parts, rollout) == 0
