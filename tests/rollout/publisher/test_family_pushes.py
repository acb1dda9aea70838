"""Pushes of a trainer's model, with the names of transformers' module, to a worker of each family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from proofs import proves

from tiny import ARCHITECTURES, CORRECTED, FREE, OF_LATENT, SWITCHES, make_tiny_model

from .test_expert_pushes import assert_equal, dense, publishing, serving

DENSE = ("qwen3", "gemma3", "mistral", "ministral", "olmo3")


@proves("pushes", backend="cpu", dtype="bfloat16")
@pytest.mark.parametrize("family", (*FREE, *SWITCHES, *CORRECTED, *OF_LATENT, *DENSE))
def test_a_push_of_a_model_brings_its_weights(tmp_path: Path, family: str) -> None:
    """Only the decoder's tensors are served."""
    folder, address = make_tiny_model(family, tmp_path), f"ipc://{tmp_path}/worker"
    model = getattr(transformers, ARCHITECTURES[family]).from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.mul_(1 + 0.01 * number)
    with serving(folder, address, dtype="bfloat16") as engine, publishing(address, "shared") as to:
        to.push(model, 1)
        own_name, served = engine.weights.model.spec.own_name, dense(engine)
        pushed = {own_name(name): tensor for name, tensor in model.state_dict().items()}
        assert len(served) > 10
        assert_equal(served, {name: pushed[name] for name in served})
