"""A chat model, and workers shared by the tests of a module."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from trl_setup import ServedEngine, serve

LAYERS = 3


@pytest.fixture(scope="session")
def shallow_smollm2(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with its first three layers, which trains five times as fast."""
    folder = tmp_path_factory.mktemp("models") / "shallow-smollm2"
    folder.mkdir()
    for file in smollm2.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((smollm2 / "config.json").read_text())
    tensors = {
        name: tensor
        for name, tensor in load_file(smollm2 / "model.safetensors").items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < LAYERS
    }
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    (folder / "config.json").write_text(json.dumps(config | dict(num_hidden_layers=LAYERS)))
    save_file(tensors, folder / "model.safetensors", metadata=dict(format="pt"))
    return folder


@pytest.fixture(scope="module", params=["shallow", pytest.param("whole", marks=pytest.mark.exhaustive)])
def chat_model(request: pytest.FixtureRequest, smollm2: Path, shallow_smollm2: Path) -> Path:
    """The embedded model, cut or whole. The test of the README trains the whole model in every run."""
    return shallow_smollm2 if request.param == "shallow" else smollm2


@pytest.fixture(scope="module")
def chat_served(chat_model: Path) -> Iterator[ServedEngine]:
    with serve(chat_model) as served:
        yield served


@pytest.fixture(scope="module")
def tiny_served(tiny_llama: Path) -> Iterator[ServedEngine]:
    with serve(tiny_llama) as served:
        yield served
