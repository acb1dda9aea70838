"""Model folders with wrong or additional content: the error names the content and says what to do."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trueroll.engine.config import EngineConfig
from trueroll.engine.models.folders import refuse_what_is_no_model
from trueroll.engine.running.loading import LoadedModel, load_dummy, load_model
from trueroll.errors import ModelError

SINGLE = "model.safetensors"
BASE = "org/base-7b"
MERGE = "AutoPeftModelForCausalLM.from_pretrained('{folder}').merge_and_unload().save_pretrained('MERGED')"
CONVERT = "AutoModelForCausalLM.from_pretrained('{folder}', dtype='auto').save_pretrained('NEW')"


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_llama, tmp_path / "model")


def load(folder: Path, **settings: str) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), **settings))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder)
    message = str(caught.value)
    assert len(message) < 2000 and message.isprintable()
    return message


class Bomb:
    """Fails the test when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return pytest.fail, ("unpickled",)


BINS = {
    "pytorch_model.bin": ["pytorch_model.bin", "training_args.bin"],
    "pytorch_model-00001-of-00002.bin and 2 more": [
        "pytorch_model.bin.index.json",
        "pytorch_model-00002-of-00002.bin",
        "pytorch_model-00001-of-00002.bin",
    ],
    "pytorch_model.bin.index.json": ["pytorch_model.bin.index.json"],
}


@pytest.mark.parametrize("shown", BINS)
def test_pickled_weights_are_named_and_never_opened(folder: Path, shown: str) -> None:
    (folder / SINGLE).unlink()
    for name in BINS[shown]:
        (folder / name).write_bytes(pickle.dumps(Bomb()))
    message = refusal(folder)
    assert f"has neither {SINGLE} nor {SINGLE}.index.json, but {shown}: pickles, which may run code" in message
    assert CONVERT.format(folder=folder) in message


def test_pickled_weights_beside_safetensors_are_ignored(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    assert load(folder).model.num_bytes > 0


def test_an_unsupported_architecture_is_reported_before_pickles(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | dict(architectures=["OPTForCausalLM"])))
    assert "architecture must be one of " in refusal(folder)


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="gone: cannot be read: No such file"):
        refuse_what_is_no_model(tmp_path / "gone")


def test_a_folder_without_any_weights_says_so(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / "training_args.bin").touch()
    assert f"has neither {SINGLE} nor {SINGLE}.index.json; save the model there" in refusal(folder)


def make_adapter(folder: Path, settings: object, weights: str = "adapter_model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 2)}, folder / weights)
    return folder


def test_an_adapter_is_reported_as_an_adapter(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "run", dict(base_model_name_or_path=BASE, peft_type="LORA"))
    message = refusal(folder)
    assert f"holds no model, but an adapter of the model '{BASE}'" in message
    assert MERGE.format(folder=folder) in message


@pytest.mark.parametrize("settings", [{}, dict(base_model_name_or_path=None), dict(base_model_name_or_path=[1])])
def test_an_adapter_need_not_name_its_model(tmp_path: Path, settings: dict[str, object]) -> None:
    assert "but an adapter of a model that it does not name" in refusal(make_adapter(tmp_path / "run", settings))


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_adapter_weights_alone_are_reported_as_an_adapter(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    assert "but an adapter of a model that it does not name" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_beside_a_model_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_text(json.dumps(dict(base_model_name_or_path=BASE)))
    message = refusal(folder)
    assert "holds a model and an adapter of " in message
    assert MERGE.format(folder=folder) in message
    assert "if the adapter is merged into these weights already, or is not wanted, move adapter_* elsewhere" in message
    (folder / name).unlink()
    assert load(folder).model.num_bytes > 0


@pytest.mark.timeout(30)  # opening the FIFO would wait for a writer
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.write_text("[" * 10**5)])
def test_unreadable_adapter_settings_are_refused(folder: Path, make: Callable[[Path], object]) -> None:
    make(folder / "adapter_config.json")
    assert re.search("adapter_config.json: (must be a regular file|the JSON is nested)", refusal(folder))


def test_a_long_name_of_an_adapters_model_is_cut(tmp_path: Path) -> None:
    refusal(make_adapter(tmp_path / "run", dict(base_model_name_or_path="\x1b[2J" * 10**4)))


def test_dummy_weights_ignore_adapters(folder: Path) -> None:
    make_adapter(folder, {})
    assert load_dummy(EngineConfig(model=str(folder))).model.num_bytes > 0


@pytest.mark.parametrize("has_config", [True, False])
def test_a_trainers_folder_lists_its_checkpoints(folder: Path, has_config: bool) -> None:
    (folder / SINGLE).unlink()
    if not has_config:
        (folder / "config.json").unlink()
    for name in ("checkpoint-9", "checkpoint-100", "checkpoint-20", "checkpoint-x", "old-checkpoint-3"):
        (folder / name).mkdir()
    (folder / "checkpoint-30").touch()
    message = refusal(folder)
    assert f"has neither {SINGLE} nor {SINGLE}.index.json, but checkpoints of a trainer: " in message
    assert "checkpoint-9, checkpoint-20, checkpoint-100; " in message
    assert message.endswith(f"serve one of them, such as {folder / 'checkpoint-100'}")


def test_only_the_last_of_many_checkpoints_are_listed(folder: Path) -> None:
    (folder / SINGLE).unlink()
    for step in range(12):
        (folder / f"checkpoint-{step}").mkdir()
    assert ": 2 earlier and checkpoint-2, checkpoint-3, " in refusal(folder)
    assert "checkpoint-10, checkpoint-11; " in refusal(folder)


def test_checkpoints_beside_weights_are_ignored(folder: Path) -> None:
    (folder / "checkpoint-5").mkdir()
    assert load(folder).model.num_bytes > 0


def stored_as(folder: Path, dtype: torch.dtype, but: int = 0) -> None:
    """Store the weights, except the first `but` tensors, in a dtype that differs from config.json."""
    tensors = load_file(folder / SINGLE)
    save_file({n: t if i < but else t.to(dtype) for i, (n, t) in enumerate(tensors.items())}, folder / SINGLE)


@pytest.mark.parametrize(
    ("says", "stored", "but", "warning"),
    [
        (
            "float32",
            torch.bfloat16,
            0,
            "21 of 21 tensors are stored in bfloat16 and are converted; .* bfloat16",
        ),
        ("bfloat16", torch.float32, 0, "bfloat16, .* 21 of 21 tensors are stored in float32 .* --dtype float32"),
        ("float32", torch.float16, 20, "1 of 21 tensors are stored in float16 and"),
        (None, torch.bfloat16, 0, "served in float32, .* stored in bfloat16 and are converted"),
        ("float32", torch.float64, 0, "float64 and are converted; correct config.json, or set dtype"),
    ],
)
def test_weights_stored_in_another_dtype_are_warned_of(
    folder: Path, says: str | None, stored: torch.dtype, but: int, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | dict(dtype=says)))
    stored_as(folder, stored, but)
    loaded = load(folder)
    assert loaded.dtype_name == (says or "float32")
    [message] = caplog.messages
    assert re.search(warning, message), message
    caplog.clear()
    assert load(folder, dtype="float32").dtype_name == "float32" and not caplog.messages, (
        "no warning if the dtype is requested"
    )
