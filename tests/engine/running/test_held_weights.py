"""Weights with a dtype of their own, and weights that are a part of a checkpoint's tensor."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import lends_huge_pages
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tiny import TINY, make_tiny_model
from trueroll.engine.engine import Engine
from trueroll.engine.models.loader import read_config
from trueroll.errors import AlignmentError, ConfigError
from trueroll.kernels import families, reference
from trueroll.kernels.families import Describe
from trueroll.kernels.shards import Shard
from trueroll.kernels.specs import DecoderSpec, MlpSpec, Slice, WeightSpec
from trueroll.kernels.training import align, merged_weights, token_log_probs
from trueroll.weight_sync.payload.adapters import with_adapters
from trueroll.weight_sync.payload.manifest import Adapters, factor_names, own_dtypes
from trueroll.weight_sync.payload.tensors import tensor_checksum
from trueroll.weight_sync.worker.adapters import served_checksums
from trueroll.weight_sync.worker.saving import save_weights

from ..checkpoints import FILE, another_version, read_tensors, stage, stage_changes, stage_rows
from ..drive import make_engine, score, tokens

NORMS = [f"model.layers.{i}.post_attention_layernorm.weight" for i in range(2)]
"""The names of the tensors with the role below."""
HELD = {"mlp_norm.before": WeightSpec(dtype=torch.float32)}
INNER, START = 48, 16


def like_llama(monkeypatch: pytest.MonkeyPatch, change: Callable[[DecoderSpec], DecoderSpec]) -> None:
    """Make Llama a family with a description that differs by `change`."""
    described: Describe = families.families()["LlamaForCausalLM"]
    monkeypatch.setitem(families.families(), "LlamaForCausalLM", lambda *given: change(described(*given)))


@pytest.fixture
def fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bfloat16 checkpoint of a family with some norms in float32."""
    like_llama(monkeypatch, lambda spec: replace(spec, held=HELD))
    folder = make_tiny_model("llama", tmp_path / "fine", dtype="bfloat16")
    return with_fine_norms(folder, read_tensors(folder), seed=0)


def with_fine_norms(folder: Path, tensors: dict[str, Tensor], seed: int) -> Path:
    """Save `tensors` in a folder. The norms are float32 values that bfloat16 cannot represent."""
    generator = torch.Generator().manual_seed(seed)
    fine = {name: 1.0 + torch.rand(tensors[name].shape, generator=generator) / 100 for name in NORMS}
    assert all(not tensor.bfloat16().float().equal(tensor) for tensor in fine.values())
    save_file(tensors | fine, folder / FILE, {"format": "pt"})
    return folder


@pytest.fixture
def newer(fine: Path, tmp_path: Path) -> Path:
    folder = another_version(fine, tmp_path / "newer")
    return with_fine_norms(folder, read_tensors(folder), seed=1)


def bits(engine: Engine) -> bytes:
    return score(engine, tokens(100)).tobytes()


def serves(engine: Engine, folder: Path) -> bool:
    """Return whether the live weights have the dtypes and bits of a checkpoint."""
    weights = engine.weights
    return all(
        weights.served(name).dtype == tensor.dtype and weights.served(name).equal(tensor)
        for name, tensor in read_tensors(folder).items()
    )


def test_a_weight_is_loaded_in_its_own_dtype(fine: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine = make_engine(fine)
    assert engine.weights.dtype == "bfloat16" and engine.weights.dtypes == dict.fromkeys(NORMS, "float32")
    assert serves(engine, fine) and "converted" not in caplog.text
    assert engine.info.backend == "reference" and "mlp_norm.before in torch.float32" in engine.info.backend_note
    with pytest.raises(ConfigError, match="need all weights in torch.bfloat16 .got mlp_norm.before in torch.float"):
        make_engine(fine, backend="cpu")
    rounded = {name: tensor.bfloat16() for name, tensor in read_tensors(fine).items()}
    before = bits(engine)
    save_file(rounded, fine / FILE, {"format": "pt"})
    assert bits(make_engine(fine)) != before, "premise: rounding changes the scores"
    assert make_engine(fine, dtype="float32").weights.dtypes == {}, "the whole model has that dtype"


@pytest.mark.parametrize("way", ["rows", "in place", "elements"])
def test_a_weight_is_replaced_in_its_own_dtype(fine: Path, newer: Path, way: str) -> None:
    engine, fresh = make_engine(fine), make_engine(newer)
    before, after = read_tensors(fine), read_tensors(newer)
    if way == "elements":
        staging = stage_changes(engine, before, after)
        with pytest.raises(ValueError, match="each torch.float32 value needs one int64 index"):
            staging.put(NORMS[0], torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bfloat16))
    else:
        staging = stage(engine, after, in_place=way == "in place")
    engine.commit_weights(staging, 1, "recompute")
    assert serves(engine, newer) and bits(engine) == bits(fresh)
    engine.sleep(1, ["weights"], "recompute")
    engine.wake_up(["weights"])
    assert serves(engine, newer) and bits(engine) == bits(fresh)


@lends_huge_pages
def test_a_weight_is_lent_in_its_own_dtype(fine: Path, newer: Path) -> None:
    lender, borrower = make_engine(fine), make_engine(fine)
    assert lender.weights.kin == borrower.weights.kin
    staging = lender.weights.new_lendable()
    stage_rows(staging, read_tensors(newer))
    borrower.commit_weights(borrower.weights.borrow(staging.lend()), 1, "recompute")
    assert serves(borrower, newer) and serves(lender, fine)


def test_checksums_and_saved_weights_keep_the_held_dtype(fine: Path, tmp_path: Path) -> None:
    weights, tensors = make_engine(fine).weights, read_tensors(fine)
    assert served_checksums(weights) == {name: tensor_checksum(each, each.dtype) for name, each in tensors.items()}
    saved = load_file(save_weights(tmp_path, "0" * 32, 1, weights) / FILE)
    assert saved.keys() == tensors.keys()
    assert all(saved[name].dtype == each.dtype and saved[name].equal(each) for name, each in tensors.items())


def fine_model(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tensors = read_tensors(folder)
    for name in NORMS:
        module = model.get_submodule(name.removesuffix(".weight"))
        module.weight = torch.nn.Parameter(tensors[name])
    return model


def test_an_aligned_model_computes_with_the_held_dtype(fine: Path) -> None:
    model, ids, expected = fine_model(fine), torch.from_numpy(tokens(100))[None], bits(make_engine(fine))
    align(model)
    found = token_log_probs(model, ids)[0, 1:]
    assert found.detach().numpy().tobytes() == expected
    found.sum().backward()
    norm = model.get_submodule(NORMS[0].removesuffix(".weight")).weight
    assert norm.grad is not None and norm.grad.dtype == torch.float32 and norm.grad.abs().sum() > 0
    assert not norm.grad.bfloat16().float().equal(norm.grad), "the gradient is not rounded"
    wide = fine_model(fine).float()
    align(wide)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert token_log_probs(wide, ids)[0, 1:].numpy().tobytes() == expected, (
            "a worker rounds float32 parameters in the same way"
        )


def test_an_aligned_model_has_to_hold_a_weight_in_its_own_dtype(fine: Path) -> None:
    name = NORMS[0].replace(".", r"\.")
    with pytest.raises(AlignmentError, match=f"{name} must be torch.float32, as in a worker .got torch.bfloat16"):
        align(fine_model(fine).bfloat16())
    model = fine_model(fine)
    model.model.layers[0].input_layernorm.float()
    with pytest.raises(
        AlignmentError,
        match="must all have the same dtype, which must be one of .* .got torch.bfloat16 and torch.float32",
    ):
        align(model)


@pytest.mark.parametrize("aligned", [False, True])
def test_merged_weights_keep_the_held_dtype(fine: Path, aligned: bool) -> None:
    model = get_peft_model(fine_model(fine), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    if aligned:
        align(model)
    tensors = read_tensors(fine)
    found = {name: tensor for name, tensor in merged_weights(model, torch.bfloat16) if name in tensors}
    assert found.keys() == tensors.keys()
    assert all(found[name].dtype == each.dtype and found[name].equal(each) for name, each in tensors.items())
    assert {tensor.dtype for _, tensor in merged_weights(model, torch.float32)} == {torch.float32}


def test_an_adapter_of_a_matrix_is_added_in_its_own_dtype(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    like_llama(monkeypatch, lambda spec: replace(spec, held={"mlp.gate": WeightSpec(dtype=torch.float32)}))
    gate, dtype = "model.layers.1.mlp.gate_proj.weight", torch.float32
    weights = make_engine(tiny_llama, dtype="bfloat16").weights
    before, (rows, columns) = weights.served(gate).clone(), weights.shapes[gate]
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, columns, generator=generator), torch.randn(rows, 2, generator=generator)
    wanted = with_adapters(weights, Adapters(weights=((gate, 2, 0.5),), base=tuple((n, 0) for n in weights.shapes)))
    assert {own_dtypes(wanted)[name] for name in factor_names(gate)} == {"float32"}
    staging = weights.new_staging(in_place=False)
    staging.adapt({gate: ("a", "b", 2, 0.5)}, alone=True)
    staging.rows("a", 0, 2).copy_(a)
    staging.rows("b", 0, rows).copy_(b)
    assert all(staging.merge(name) for name in staging.to_merge())
    weights.commit(staging)
    assert weights.served(gate).dtype == dtype and weights.served(gate).equal(reference.merge(before, a, b, 0.5))


def half(spec: DecoderSpec) -> DecoderSpec:
    """Return the decoder with only half of the inner features of each MLP."""
    total = TINY["intermediate_size"]
    layers = tuple(replace(layer, mlp=MlpSpec(INNER)) for layer in spec.layers)
    rows, columns = (WeightSpec(part=Slice(dim, total, ((START, INNER),))) for dim in (0, 1))
    return replace(spec, layers=layers, held={"mlp.gate": rows, "mlp.up": rows, "mlp.down": columns})


def part_of(name: str, tensor: Tensor) -> Tensor:
    if ".mlp." not in name:
        return tensor
    return tensor.narrow(1 if "down_proj" in name else 0, START, INNER)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_partial_weights_take_their_part_of_checkpoints_and_pushes(
    tiny_llama: Path, tmp_path: Path, backend: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder with parts of the weights equals the decoder of a checkpoint with only these parts, before and after
    full pushes.
    """
    newer, cut = another_version(tiny_llama, tmp_path / "newer"), [tmp_path / "cut", tmp_path / "cut_newer"]
    for whole, folder in zip((tiny_llama, newer), cut, strict=True):
        another_version(tiny_llama, folder)
        tensors = {name: part_of(name, tensor).contiguous() for name, tensor in read_tensors(whole).items()}
        save_file(tensors, folder / FILE, {"format": "pt"})
        config = read_config(folder) | dict(intermediate_size=INNER)
        (folder / "config.json").write_text(json.dumps(config))
    settings = dict(backend=backend, dtype=dtype)
    expected = [bits(make_engine(folder, **settings)) for folder in cut]
    assert expected[0] != expected[1]

    like_llama(monkeypatch, half)
    engine, tensors = make_engine(tiny_llama, **settings), read_tensors(newer, getattr(torch, dtype))
    gate = "model.layers.1.mlp.gate_proj.weight"
    assert isinstance(engine.weights.tensors[gate], Shard)
    assert engine.weights.shapes[gate] == tuple(tensors[gate].shape) != tuple(engine.weights.served(gate).shape)
    assert bits(engine) == expected[0]
    before = read_tensors(tiny_llama, getattr(torch, dtype))
    engine.commit_weights(stage(engine, tensors), 1, "recompute")
    assert bits(engine) == expected[1]
    engine.commit_weights(stage(engine, before, in_place=True), 2, "recompute")
    assert bits(engine) == expected[0]
    engine.commit_weights(stage_changes(engine, before, tensors), 3, "recompute")
    assert bits(engine) == expected[1]
