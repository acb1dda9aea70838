"""Checkpoints in FP8 in blocks: every weight has the bits of a direct computation, for whole models and for ranks, and
damaged files are refused.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.engine.models import loader
from trueroll.engine.models.loader import copy_checkpoint, read_config
from trueroll.engine.models.quantized.layouts import LAYOUTS, Matrix, Rows, row_ranges
from trueroll.engine.running.loading import allocate_model, load_model
from trueroll.engine.running.ranks import Links, Topology
from trueroll.errors import ConfigError, ModelError
from trueroll.kernels.families import describe
from trueroll.kernels.quantization import FORMATS, round_trip
from trueroll.kernels.ranks import Rank
from trueroll.kernels.shards import Shard

from ..drafting.mtp_models import make_mtp_model

FILE = "model.safetensors"
CONFIG = dict(quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128], activation_scheme="dynamic")
# Most sizes are no multiples of 128, so that blocks at both ends of the matrices are smaller.
SIZES: dict[str, Any] = dict(hidden_size=192, intermediate_size=320)
EXPERTS = SIZES | dict(moe_intermediate_size=160)
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": EXPERTS,
    "minimax_m2": dict(intermediate_size=160, hidden_size=192),
    "llama": SIZES,
}


def multiplied(stored: Tensor, scales: Tensor) -> Tensor:
    """Return the definition: each float32 number times the scale of its block."""
    rows, columns = (torch.arange(size) // 128 for size in stored.shape)
    return stored.float() * scales.float()[rows][:, columns]


def quantize(matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scales = torch.empty(*(-(-size // 128) for size in matrix.shape), dtype=dtype)
    stored = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128)
            scales[i, j] = matrix[block].abs().max() / 400
            stored[block] = (matrix[block] / scales[i, j].float()).to(torch.float8_e4m3fn)
    return stored, scales


def make_both(folder: Path, of_fp8: Path, plain: Path, scales_dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Save the model of `folder` with its projections in FP8 to `of_fp8`, and with the same values dequantized to
    `plain`. Return the tensors of `of_fp8`.
    """
    tensors, values = load_file(folder / FILE), load_file(folder / FILE)
    names = [name for name, tensor in tensors.items() if tensor.dim() == 2 and "gate.w" not in name]
    for name in [name for name in names if not name.endswith(("embed_tokens.weight", "lm_head.weight"))]:
        stored, scales = quantize(tensors[name].float(), scales_dtype)
        tensors |= {name: stored, f"{name}_scale_inv": scales}
        values[name] = multiplied(stored, scales)
    for other, content in ((of_fp8, tensors), (plain, values)):
        shutil.copytree(folder, other, dirs_exist_ok=True)
        save_file(content, other / FILE)
    raw = read_config(folder) | dict(quantization_config=CONFIG)
    (of_fp8 / "config.json").write_text(json.dumps(raw))
    return tensors


def dense(folder: Path, backend: str = "reference", links: Links | None = None, **settings: Any) -> dict[str, Tensor]:
    loaded = load_model(EngineConfig(model=str(folder), backend=backend, **settings), links)
    return {name: weight.to_dense() for name, weight in loaded.weights.tensors.items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor.contiguous().view(torch.uint8), expected[name].contiguous().view(torch.uint8)), name


def links_of(index: int, count: int) -> Links:
    exchange: Any = SimpleNamespace(rank=Rank(index, count), native=None)
    return Links(Topology(count, 1), exchange, exchange)


def numbers(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return a matrix that has every number but NaN, and scales from the smallest numbers to large ones, and 0."""
    codes = [code for code in range(256) if code & 127 != 127]
    stored = torch.tensor(codes, dtype=torch.uint8).repeat(rows * columns // len(codes) + 1)[: rows * columns]
    shape = -(-rows // 128), -(-columns // 128)
    scales = torch.logspace(-38, 30, shape[0] * shape[1]).view(shape) * 1.2345678
    scales[0, 0], scales[-1, -1] = 0.0, 2.0**-140
    return stored.view(rows, columns).view(torch.float8_e4m3fn), scales


def test_each_number_is_multiplied_by_the_scale_of_its_block() -> None:
    stored, scales = numbers(300, 500)
    matrix = Matrix(LAYOUTS["fp8"], (300, 500), {"scales": scales})
    found, expected = matrix.part(stored, range(300), range(500)).values(), multiplied(stored, scales)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32)) and len(found.unique()) > 1000
    for rows in row_ranges((300, 500), 128 * 500 * 4):
        part = Rows(stored, matrix, rows)
        assert torch.equal(part[:], expected[rows.start : rows.stop])
        assert torch.equal(part[3:40], expected[rows][3:40])
        assert torch.equal(part[:, 100:420], expected[rows.start : rows.stop, 100:420])


def test_ranges_of_rows_are_whole_blocks() -> None:
    assert [*row_ranges((300, 500), 2**20)] == [range(0, 300)]
    assert [*row_ranges((300, 500), 2 * 128 * 500 * 4)] == [range(0, 256), range(256, 300)]
    assert [*row_ranges((300, 500), 1)] == [range(0, 128), range(128, 256), range(256, 300)]


def test_whole_blocks_equal_those_of_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    stored, scales = numbers(256, 384)
    found: Any = Fp8Dequantize(None).convert({"weight": [stored], "weight_scale_inv": [scales]})["weight"]
    matrix = Matrix(LAYOUTS["fp8"], (256, 384), {"scales": scales})
    assert torch.equal(matrix.part(stored, range(256), range(384)).values(), found)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_model_has_the_bits_of_the_dequantized_values(
    tmp_path: Path, family: str, dtype: str, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The values of the dequantized folder are in float32, so both round once."""
    folder = make_tiny_model(family, tmp_path / "model", "bfloat16", **FAMILIES[family])
    tensors = make_both(folder, tmp_path / "fp8", tmp_path / "plain")
    assert any(len(scales.unique()) > 3 for name, scales in tensors.items() if name.endswith("_scale_inv")), "premise"
    expected = dense(tmp_path / "plain", backend, dtype=dtype)
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        assert_equal(dense(tmp_path / "fp8", backend, dtype=dtype), expected)
    named = "bfloat16" if dtype == "auto" else dtype
    warning, left_out = caplog.messages
    assert f"in fp8 and are dequantized to {named}; pushes must be in {named} too, without scales" in warning
    assert f"config.json asks for activations in FP8 ('dynamic'); activations keep {named}" in left_out


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_codes_are_kept_as_they_are_stored(tmp_path: Path, family: str, backend: str) -> None:
    """The values are those of dequantized matrices, and the native kernels hold about half of the bytes. In the whole
    model, `int8` is another format, so values are quantized again.
    """
    folder = make_tiny_model(family, tmp_path / "model", "bfloat16", **FAMILIES[family])
    make_both(folder, tmp_path / "fp8", tmp_path / "plain")
    expected = dense(tmp_path / "fp8", backend)
    for setting in ("auto", "fp8"):
        assert_equal(dense(tmp_path / "fp8", backend, quantization=setting), expected)
    loaded = load_model(EngineConfig(model=str(tmp_path / "fp8"), backend=backend, quantization="auto")).weights
    name = "model.layers.0.mlp.up_proj.weight"
    assert loaded.model.spec.quantization == "fp8"
    size, whole = loaded.tensors[name].nbytes, expected[name].nbytes
    assert size < 0.7 * whole if backend == "cpu" else size >= whole
    other = dense(tmp_path / "fp8", backend, quantization="int8")[name]
    assert torch.equal(other, round_trip(expected[name], FORMATS["int8"])) and not torch.equal(other, expected[name])


def test_a_checkpoint_that_is_partly_in_fp8_is_not_quantized_further(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "model", "bfloat16", **SIZES)
    tensors, name = make_both(folder, tmp_path / "fp8", tmp_path / "plain"), "model.layers.1.mlp.up_proj.weight"
    del tensors[f"{name}_scale_inv"]
    save_file(tensors | {name: load_file(folder / FILE)[name]}, tmp_path / "fp8" / FILE)
    with pytest.raises(ConfigError, match=rf"auto would quantize 1 weights .* such as {name}; set quantization to fp8"):
        dense(tmp_path / "fp8", quantization="auto")


@pytest.mark.parametrize("scales_dtype", [torch.bfloat16, torch.float16])
def test_scales_may_have_fewer_bits(tmp_path: Path, scales_dtype: torch.dtype) -> None:
    folder = make_tiny_model("llama", tmp_path / "model", "bfloat16", **SIZES)
    make_both(folder, tmp_path / "fp8", tmp_path / "plain", scales_dtype)
    assert_equal(dense(tmp_path / "fp8"), dense(tmp_path / "plain"))


@pytest.mark.parametrize("most", [1, 2**26], ids=["block by block", "at once"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_rank_reads_its_part(tmp_path: Path, dtype: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_MAX_OPEN_BYTES", most)
    folder = make_tiny_model("deepseek_v3", tmp_path / "model", "bfloat16", **EXPERTS)
    make_both(folder, tmp_path / "fp8", tmp_path / "plain")
    config = EngineConfig(model=str(tmp_path / "fp8"), backend="cpu", dtype=dtype)
    whole = allocate_model(config)
    whole_bytes = copy_checkpoint(whole.checkpoint, whole.loaded.weights.to_load)
    for index in range(2):
        own = allocate_model(config, links_of(index, 2))
        num_bytes = copy_checkpoint(own.checkpoint, own.loaded.weights.to_load)
        assert num_bytes < 0.8 * whole_bytes
        found = {name: weight.to_dense() for name, weight in own.loaded.weights.tensors.items()}
        assert_equal(found, dense(tmp_path / "plain", "cpu", links_of(index, 2), dtype=dtype))


@pytest.mark.parametrize("setting", ["fp8", "int8", "mxfp4", "awq"])
@pytest.mark.parametrize("stored", ["fp8", "model"])
def test_a_rank_holds_its_part_of_the_quantized_weights(tmp_path: Path, stored: str, setting: str) -> None:
    """The scale of a row or block does not depend on how a matrix is divided."""
    folder = make_tiny_model("deepseek_v3", tmp_path / "model", "bfloat16", **EXPERTS)
    make_both(folder, tmp_path / "fp8", tmp_path / "plain")
    settings: dict[str, Any] = dict(backend="cpu", quantization=setting)
    whole = dense(tmp_path / stored, **settings)
    assert not all(map(torch.equal, whole.values(), dense(tmp_path / "model", "cpu").values())), "premise"
    for index in range(2):
        loaded = load_model(EngineConfig(model=str(tmp_path / stored), **settings), links_of(index, 2))
        for name, weight in loaded.weights.tensors.items():
            part = weight.slice if isinstance(weight, Shard) else None
            expected = whole[name]
            if part is not None:
                ranges = [expected.narrow(part.dim, start, length) for start, length in part.ranges]
                expected = torch.cat(ranges, part.dim)
            assert torch.equal(weight.to_dense(), expected), name


def test_scales_may_lie_in_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model("deepseek_v3", tmp_path / "model", "bfloat16", **EXPERTS)
    tensors = make_both(folder, tmp_path / "fp8", tmp_path / "plain")
    files = {name: f"model-{int(name.endswith('_scale_inv'))}.safetensors" for name in tensors}
    for file in {*files.values()}:
        save_file({name: each for name, each in tensors.items() if files[name] == file}, tmp_path / "fp8" / file)
    (tmp_path / "fp8" / FILE).unlink()
    (tmp_path / "fp8" / f"{FILE}.index.json").write_text(json.dumps({"weight_map": files}))
    opened: list[str] = []
    monkeypatch.setattr(loader, "safe_open", lambda file, **kind: opened.append(file.name) or safe_open(file, **kind))
    found = dense(tmp_path / "fp8")
    assert sorted(opened) == ["model-0.safetensors"] * 2 + ["model-1.safetensors"] * 2, "once to check, once to copy"
    assert_equal(found, dense(tmp_path / "plain"))


def test_the_text_of_a_model_with_a_tower_may_be_quantized(tmp_path: Path) -> None:
    folder = make_tiny_model("kimi_k25", tmp_path / "model", "bfloat16")
    make_both(folder, tmp_path / "fp8", tmp_path / "plain")
    raw = read_config(tmp_path / "fp8")
    raw["text_config"]["quantization_config"] = raw.pop("quantization_config")
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(raw))
    assert_equal(dense(tmp_path / "fp8"), dense(tmp_path / "plain"))
    raw["text_config"]["quantization_config"] = dict(quant_method="gptq", bits=4)
    with pytest.raises(ModelError, match=r"must be .*, fp8 or modelopt \(got 'gptq'\); serve a checkpoint in bf"):
        describe(raw)


def test_a_module_for_drafts_may_be_quantized(tmp_path: Path) -> None:
    folder = make_mtp_model("qwen3_next", tmp_path / "model")
    tensors = make_both(folder, tmp_path / "fp8", tmp_path / "plain")
    assert any(name.startswith("mtp.") and name.endswith("_scale_inv") for name in tensors), "premise"
    found = dense(tmp_path / "fp8", speculative="mtp")
    assert any(name.startswith("mtp.") for name in found)
    assert_equal(found, dense(tmp_path / "plain", speculative="mtp"))


Q, SCALE = "model.layers.1.self_attn.o_proj.weight", "model.layers.1.self_attn.o_proj.weight_scale_inv"
PART = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "no scales": (lambda tensors: tensors.pop(SCALE), rf"1 missing: {SCALE};"),
    "no scales of an expert": (lambda tensors: tensors.pop(PART), rf"1 missing: {PART};"),
    "no matrix": (lambda tensors: tensors.pop(Q), rf"1 missing: {Q}; 1 unknown: {SCALE};"),
    "scales of a matrix that is not quantized": (
        lambda tensors: tensors.update({Q: tensors[Q].float()}),
        rf"fit the model that config.json describes: 1 unknown: {SCALE};",
    ),
    "blocks of another size": (
        lambda tensors: tensors.update({SCALE: torch.ones(3, 2)}),
        rf"1 of the wrong shape: {SCALE} \(expected \[2, 1\], found \[3, 2\]\)",
    ),
    "scales as vector": (
        lambda tensors: tensors.update({SCALE: torch.ones(2)}),
        rf"1 of the wrong shape: {SCALE} \(expected \[2, 1\], found \[2\]\)",
    ),
    "a matrix of another shape": (
        lambda tensors: tensors.update({Q: torch.zeros(1, 128).to(torch.float8_e4m3fn)}),
        rf"1 of the wrong shape: {Q} \(expected \[192, 128\], found \[1, 128\]\)",
    ),
    "scales as bytes": (
        lambda tensors: tensors.update({SCALE: torch.ones(2, 1, dtype=torch.uint8)}),
        rf"1 not of F32, F16, BF16: {SCALE} \(U8\)",
    ),
    "a norm in FP8": (
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(192).to(torch.float8_e4m3fn)}),
        r"1 not of F64, F32, F16, BF16: model.norm.weight \(F8_E4M3\)",
    ),
    "another form of FP8": (
        lambda tensors: tensors.update({Q: tensors[Q].float().to(torch.float8_e5m2)}),
        rf"1 unknown: {SCALE}; 1 not of F64, F32, F16, BF16: {Q} \(F8_E5M2\)",
    ),
    "a NaN scale": (lambda tensors: tensors[SCALE].fill_(torch.nan), rf"{SCALE}: 2 of 2 scales are NaN, infinite or"),
    "an infinite scale": (lambda tensors: tensors[PART][1, 1].fill_(torch.inf), rf"{PART}: 1 of 4 scales are NaN, inf"),
    "a negative scale": (lambda tensors: tensors[SCALE][1].neg_(), rf"{SCALE}: 1 of 2 scales .* checkpoint is damaged"),
}


@pytest.fixture(scope="module")
def of_fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    make_both(make_tiny_model("deepseek_v3", folder / "model", "bfloat16", **EXPERTS), folder / "fp8", folder / "plain")
    return folder / "fp8"


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_are_refused(of_fp8: Path, tmp_path: Path, name: str) -> None:
    change, message = DAMAGES[name]
    tensors = load_file(of_fp8 / FILE)
    change(tensors)
    shutil.copytree(of_fp8, tmp_path, dirs_exist_ok=True)
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(ModelError, match=message):
        dense(tmp_path)


def test_a_block_of_zeros_may_have_the_scale_0(of_fp8: Path, tmp_path: Path) -> None:
    tensors = load_file(of_fp8 / FILE)
    tensors[SCALE][1] = 0.0
    shutil.copytree(of_fp8, tmp_path, dirs_exist_ok=True)
    save_file(tensors, tmp_path / FILE)
    found = dense(tmp_path)[Q]
    assert not found[128:].any() and found[:128].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(weight_block_size=[64, 128]),
            r"weight_block_size in .* must be \[128, 128\] \(got \[64, 128\]\); serve a",
        ),
        (dict(weight_block_size=None), r"weight_block_size in .* must be \[128, 128\] \(got None\)"),
        (dict(fmt="e5m2"), r"fmt in .* of config.json must be e4m3 or float8_e4m3fn \(got 'e5m2'\)"),
        (dict(quant_method="fbgemm_fp8"), r"quant_method .* must be .* or modelopt \(got 'fbgemm_fp8'\)"),
        (dict(quant_method=["fp8"]), r"quant_method .* must be .* or modelopt \(got \['fp8'\]\)"),
    ],
)
def test_other_quantizations_are_refused(of_fp8: Path, change: dict[str, Any], message: str) -> None:
    raw = read_config(of_fp8)
    describe(raw)
    with pytest.raises(ModelError, match=message):
        describe(raw | dict(quantization_config=CONFIG | change))


def test_the_format_has_two_names(of_fp8: Path) -> None:
    """The published files of MiniMax-M2 have the longer name."""
    raw = read_config(of_fp8)
    assert describe(raw | dict(quantization_config=CONFIG | dict(fmt="float8_e4m3fn"))) == describe(raw)
