"""Dummy models: the shipped configurations describe their models, and the random weights are usable."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.models.decoder import Decoder
from trueroll.engine.models.loader import read_config
from trueroll.engine.models.names import find_config
from trueroll.engine.running.loading import load_dummy
from trueroll.errors import ModelError
from trueroll.kernels import reference
from trueroll.kernels.families import describe
from trueroll.kernels.specs import AttentionSpec

from ..drive import bits, generate, run, tokens


# The expected numbers of parameters are published with the models.
@pytest.mark.parametrize(
    ("name", "architecture", "num_parameters", "heads", "max_position_embeddings"),
    [
        ("qwen2.5-7b", "Qwen2ForCausalLM", 7_615_616_512, (28, 4, 128), 32768),
        ("qwen3-0.6b", "Qwen3ForCausalLM", 596_049_920, (16, 8, 128), 40960),
    ],
)
def test_shipped_configurations_describe_their_models(
    name: str, architecture: str, num_parameters: int, heads: tuple[int, int, int], max_position_embeddings: int
) -> None:
    folder = find_config(name)
    spec = describe(read_config(folder))
    mixer, [rotation] = spec.layers[0].mixer, spec.rotations
    assert isinstance(mixer, AttentionSpec)
    assert (spec.architecture, spec.dtype) == (architecture, torch.bfloat16)
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == heads
    assert (spec.max_position_embeddings, spec.norm.eps) == (max_position_embeddings, 1e-6)
    assert rotation.inv_freq[-1] == pytest.approx(1e6 ** (-126 / 128)) and rotation.scale == 1.0
    model = Decoder(spec, reference, partial(torch.empty, dtype=spec.dtype, device="meta"))  # type: ignore[arg-type]
    assert model.num_bytes == 2 * num_parameters


def test_a_configuration_is_a_file_or_its_folder(tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_llama / "config.json", tmp_path)
    assert find_config(str(tmp_path)) == find_config(str(tmp_path / "config.json")) == tmp_path
    for nothing in (
        "qwen",
        str(tmp_path / "nowhere"),
        str(tmp_path / "nowhere" / "config.json"),
        "",
        "~nobody/x",
        "x" * 5000,
    ):
        with pytest.raises(ModelError, match="must be a config.json, .* or one of bamba-0.13b, "):
            find_config(nothing)


def dense_weights(folder: Path, backend: str) -> dict[str, Tensor]:
    loaded = load_dummy(EngineConfig(model=str(folder), backend=backend))
    return {name: weight.to_dense() for name, weight in loaded.weights.tensors.items()}


def test_weights_are_random_and_always_the_same(any_model: Path, backend: str) -> None:
    weights, again = dense_weights(any_model, backend), dense_weights(any_model, "reference")
    assert weights.keys() == again.keys() and all(torch.equal(weights[name], again[name]) for name in weights)
    norms = [weight for name, weight in weights.items() if "norm" in name]
    others = [weight for name, weight in weights.items() if "norm" not in name]
    assert norms and all(norm.eq(0 if "gemma" in any_model.name else 1).all() for norm in norms)
    assert all(0.9 < x.std() * x.shape[1] ** 0.5 < 1.1 for x in others if x.dim() == 2)
    assert len({x.flatten()[0].item() for x in others}) == len(others), "no two weights are the same"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_with_random_weights_is_served(any_model: Path, backend: str, dtype: str) -> None:
    config = EngineConfig(model=str(any_model / "config.json"), dtype=dtype, backend=backend, num_blocks=64)
    engine = Engine(config, load_dummy(config))
    first, again = (run(engine, [generate("r", tokens(40), max_tokens=8)])["r", 0] for _ in range(2))
    assert first.finish_reason == "length" and first.logprobs is not None and np.isfinite(first.logprobs).all()
    assert len(set(first.token_ids)) > 2 and bits(first) == bits(again)
