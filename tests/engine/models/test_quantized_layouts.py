"""Checkpoints of AutoAWQ, compressed-tensors and ModelOpt: codes and scales are kept bit for bit, values equal a direct
computation, and damaged files are refused. The layouts are written here, by code of this file.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
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
from trueroll.kernels.quantization import FORMATS, Quantized, quantize
from trueroll.kernels.ranks import Rank
from trueroll.kernels.stored import stored_in

from ..drafting.mtp_models import make_mtp_model
from ..drive import bits, generate, make_engine, run, tokens

FILE = "model.safetensors"
LLAMA: dict[str, Any] = dict(hidden_size=256, intermediate_size=384, head_dim=32)
PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of eight numbers, nibble i of AutoAWQ's word has the number with this index."""
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Stored = dict[str, Tensor]


def pack(numbers: Tensor, places: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack numbers from 0 to 15, eight into a word along the last axis."""
    padded = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[-1] % 8)).unflatten(-1, (-1, 8))
    words = sum(padded[..., place] << 4 * i for i, place in enumerate(places))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()


def wide(of_groups: Tensor, columns: int, group: int) -> Tensor:
    return of_groups[:, torch.arange(columns) // group]


def floats(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return float8 codes of all finite numbers, and the numbers."""
    codes = torch.randint(0, 0x7F, (rows, columns), dtype=torch.uint8, generator=generator)
    codes |= torch.randint(0, 2, (rows, columns), dtype=torch.uint8, generator=generator) << 7
    stored = codes.view(torch.float8_e4m3fn)
    return stored, stored.float()


def scales(rows: int, columns: int, generator: torch.Generator, factor: float) -> Tensor:
    return torch.rand(rows, columns, generator=generator).add_(0.1) * factor


def channel(rows: int, columns: int, generator: torch.Generator) -> tuple[Stored, Tensor]:
    stored, numbers = floats(rows, columns, generator)
    of_rows = scales(rows, 1, generator, 1e-3).bfloat16()
    return dict(weight=stored, weight_scale=of_rows), numbers * of_rows.float()


def block(rows: int, columns: int, generator: torch.Generator) -> tuple[Stored, Tensor]:
    stored, numbers = floats(rows, columns, generator)
    of_blocks = scales(-(-rows // 128), -(-columns // 128), generator, 1e-3)
    values = numbers * wide(of_blocks, columns, 128)[torch.arange(rows) // 128]
    return dict(weight=stored, weight_scale=of_blocks), values


def int8(rows: int, columns: int, generator: torch.Generator) -> tuple[Stored, Tensor]:
    """-128 occurs too, as in files of compressed-tensors."""
    stored = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=generator)
    of_rows = scales(rows, 1, generator, 2e-3)
    return dict(weight=stored, weight_scale=of_rows), stored.float() * of_rows


def of_bfloat16(name: str, rows: int, columns: int, generator: torch.Generator) -> tuple[Stored, Tensor]:
    """Quantizing the values again gives the same codes and scales."""
    found = quantize(torch.randn(rows, columns, generator=generator).mul_(0.05).bfloat16(), FORMATS[name])
    codes = found.codes.view(torch.int8 if found.format.element == "int8" else torch.float8_e4m3fn)
    return dict(weight=codes, weight_scale=found.scales), found.values()


def mxfp8(rows: int, columns: int, generator: torch.Generator) -> tuple[Stored, Tensor]:
    stored, numbers = floats(rows, columns, generator)
    powers = torch.randint(112, 118, (rows, columns // 32), dtype=torch.uint8, generator=generator)
    return dict(weight=stored, weight_scale=powers), numbers * 2.0 ** wide(powers.float() - 127, columns, 32)


def pairs(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return float4 codes, two in a byte, and the numbers."""
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)
    numbers = E2M1[codes.long() % 8] * (1 - 2 * (codes.long() // 8))
    return codes[:, ::2] + 16 * codes[:, 1::2], torch.where(codes == 8, -0.0, numbers)


def mxfp4(rows: int, columns: int, generator: torch.Generator) -> tuple[Stored, Tensor]:
    packed, numbers = pairs(rows, columns, generator)
    powers = torch.randint(118, 124, (rows, columns // 32), dtype=torch.uint8, generator=generator)
    return dict(weight_packed=packed, weight_scale=powers), numbers * 2.0 ** wide(powers.float() - 127, columns, 32)


def nvfp4(rows: int, columns: int, generator: torch.Generator) -> tuple[Stored, Tensor]:
    packed, numbers = pairs(rows, columns, generator)
    of_groups = scales(rows, columns // 16, generator, 400).to(torch.float8_e4m3fn)
    divisor = torch.rand(1, generator=generator) * 1e4 + 1e4
    values = numbers * wide(of_groups.float() * (1 / divisor), columns, 16)
    return dict(weight_packed=packed, weight_scale=of_groups, weight_global_scale=divisor), values


def modelopt(rows: int, columns: int, generator: torch.Generator) -> tuple[Stored, Tensor]:
    packed, numbers = pairs(rows, columns, generator)
    of_groups = scales(rows, columns // 16, generator, 400).to(torch.float8_e4m3fn)
    factor = torch.rand((), generator=generator) * 1e-4
    values = numbers * wide(of_groups.float() * factor, columns, 16)
    return dict(weight=packed, weight_scale=of_groups, weight_scale_2=factor), values


def nibbles(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes from 0 to 15, zero points, and scales in bfloat16."""
    codes, zeros = (torch.randint(0, 16, (rows, each), generator=generator) for each in (columns, -(-columns // 128)))
    return codes, zeros, scales(rows, -(-columns // 128), generator, 3e-2).bfloat16()


def int4(rows: int, columns: int, generator: torch.Generator) -> tuple[Stored, Tensor]:
    codes, zeros, of_groups = nibbles(rows, columns, generator)
    stored = dict(weight_packed=pack(codes), weight_zero_point=pack(zeros.T).T.contiguous(), weight_scale=of_groups)
    values = (codes - wide(zeros, columns, 128)) * wide(of_groups.float(), columns, 128)
    return stored | dict(weight_shape=torch.tensor([rows, columns])), values


def int4_symmetric(rows: int, columns: int, generator: torch.Generator) -> tuple[Stored, Tensor]:
    codes, _, of_groups = nibbles(rows, columns, generator)
    stored = dict(weight_packed=pack(codes), weight_scale=of_groups, weight_shape=torch.tensor([rows, columns]))
    return stored, (codes - 8) * wide(of_groups.float(), columns, 128)


def awq(rows: int, columns: int, generator: torch.Generator) -> tuple[Stored, Tensor]:
    codes, zeros, of_groups = nibbles(rows, columns, generator)
    stored = dict(qweight=pack(codes.T, PLACES), qzeros=pack(zeros.T, PLACES), scales=of_groups.half().T.contiguous())
    values = (codes - wide(zeros, columns, 128)) * wide(of_groups.half().float(), columns, 128)
    return stored, values


def weights(format: str, type: str, num_bits: int, strategy: str, **others: Any) -> dict[str, Any]:
    own = dict(type=type, num_bits=num_bits, strategy=strategy, symmetric=True) | others
    groups = {"group_0": dict(targets=["Linear"], weights=own)}
    return dict(quant_method="compressed-tensors", format=format, config_groups=groups, ignore=["lm_head"])


Writer = Callable[[int, int, torch.Generator], tuple[Stored, Tensor]]


def of_tokens(config: dict[str, Any]) -> dict[str, Any]:
    """Quantize activations per token, too."""
    type = config["config_groups"]["group_0"]["weights"]["type"]
    inputs = dict(type=type, num_bits=8, strategy="token", dynamic=True, symmetric=True)
    groups = {name: group | dict(input_activations=inputs) for name, group in config["config_groups"].items()}
    return config | dict(config_groups=groups)


WRITERS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "awq": (awq, dict(quant_method="awq", bits=4, group_size=128, zero_point=True, version="gemm")),
    "fp8_channel": (channel, weights("float-quantized", "float", 8, "channel")),
    "fp8_block": (block, weights("float-quantized", "float", 8, "block", block_structure=[128, 128])),
    "int8": (int8, weights("int-quantized", "int", 8, "channel")),
    "mxfp8": (mxfp8, weights("mxfp8-quantized", "float", 8, "group", group_size=32)),
    "mxfp4": (mxfp4, weights("mxfp4-pack-quantized", "float", 4, "group", group_size=32)),
    "nvfp4": (nvfp4, weights("nvfp4-pack-quantized", "float", 4, "tensor_group", group_size=16)),
    "modelopt-nvfp4": (modelopt, dict(quant_method="modelopt", quant_algo="NVFP4")),
    "int4": (int4, weights("pack-quantized", "int", 4, "group", group_size=128, symmetric=False)),
    "int4_symmetric": (int4_symmetric, weights("pack-quantized", "int", 4, "group", group_size=128)),
}
each_layout = pytest.mark.parametrize("layout", WRITERS)
# The layouts that may also have activations per token, and the settings that quantize these.
WITH_ACTIVATIONS = {"int8": "int8_dynamic", "fp8_channel": "fp8_dynamic"}


def make_both(folder: Path, out: Path, write: Writer, config: dict[str, Any]) -> dict[str, Tensor]:
    """Save the model of `folder` with random projections in the layout of `write` to `out / "quantized"`, and with the
    same values in float32 to `out / "plain"`. Return the tensors of the quantized model.
    """
    generator, plain, stored = torch.Generator().manual_seed(0), load_file(folder / FILE), dict[str, Tensor]()
    for name, tensor in plain.items():
        kept = tensor.dim() != 2 or name.endswith(("embed_tokens.weight", "lm_head.weight", "gate.weight"))
        if kept or not name.endswith(".weight"):
            stored[name] = tensor
            continue
        members, plain[name] = write(tensor.shape[0], tensor.shape[1], generator)
        stored |= {name.removesuffix("weight") + suffix: member for suffix, member in members.items()}
    for kind, content in (("quantized", stored), ("plain", plain)):
        shutil.copytree(folder, out / kind, dirs_exist_ok=True)
        save_file(content, out / kind / FILE)
    raw = read_config(folder) | dict(quantization_config=config)
    (out / "quantized" / "config.json").write_text(json.dumps(raw))
    return stored


def load(folder: Path, links: Links | None = None, **settings: Any) -> Mapping[str, Any]:
    return load_model(EngineConfig(model=str(folder), **settings), links).weights.tensors


def assert_equal(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        left, right = (each[name].to_dense().contiguous() for each in (found, expected))
        assert left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8)), name


def links_of(index: int, count: int) -> Links:
    exchange: Any = SimpleNamespace(rank=Rank(index, count), native=None)
    return Links(Topology(count, 1), exchange, exchange)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"), "bfloat16", **LLAMA)


@pytest.fixture(scope="module")
def folders(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder with the two models of a layout."""
    made: dict[str, Path] = {}

    def get(layout: str) -> Path:
        if layout not in made:
            made[layout] = tmp_path_factory.mktemp(layout)
            make_both(llama, made[layout], *WRITERS[layout])
        return made[layout]

    return get


def test_the_tables_agree() -> None:
    assert {*WRITERS, "fp8"} == {*LAYOUTS}
    for layout, (_, config) in WRITERS.items():
        stored = stored_in({"quantization_config": config})
        assert (stored.layout, stored.setting) == (layout, LAYOUTS[layout].format.name)


@each_layout
def test_codes_are_kept_and_values_are_those_of_the_definition(
    layout: str, folders: Callable[[str], Path], backend: str
) -> None:
    """The values of the plain folder are in float32, so both round once."""
    folder, expected = folders(layout), load(folders(layout) / "plain", backend=backend)
    kept = load(folder / "quantized", backend=backend, quantization="auto")
    assert_equal(kept, expected)
    assert_equal(load(folder / "quantized", backend=backend), expected)
    name = "model.layers.1.mlp.down_proj.weight"
    if backend != "cpu":
        return
    size, whole, of_bits = kept[name].nbytes, expected[name].nbytes, LAYOUTS[layout].format.bits
    assert size < (0.7 if of_bits == 8 else 0.35) * whole
    found = kept[name].quantized()
    source = whole_matrix(layout, folder / "quantized", name, kept[name].shape)
    assert torch.equal(found.codes, source.codes) and torch.equal(found.float_scales(), source.float_scales())
    assert torch.equal(found.values(), load_file(folder / "plain" / FILE)[name])


def whole_matrix(layout: str, folder: Path, name: str, shape: tuple[int, int]) -> Quantized:
    found, own = load_file(folder / FILE), LAYOUTS[layout]
    names = own.names(name)
    fields = {kind: member.read(found[names[kind]], shape) for kind, member in own.others.items()}
    return Matrix(own, shape, fields).part(found[names["codes"]], range(shape[0]), range(shape[1]))


@each_layout
def test_samples_and_log_probs_are_those_of_a_plain_checkpoint(layout: str, folders: Callable[[str], Path]) -> None:
    folder, request = folders(layout), generate("a", tokens(40), n=2)
    served = make_engine(folder / "quantized", backend="cpu", quantization="auto")
    assert served.info.quantization == LAYOUTS[layout].format.name
    found = run(served, [request])
    for kind in ("plain", "quantized"):
        expected = run(make_engine(folder / kind, backend="cpu"), [request])
        assert {key: bits(each) for key, each in found.items()} == {key: bits(each) for key, each in expected.items()}


@pytest.mark.parametrize(("layout", "setting"), WITH_ACTIVATIONS.items())
def test_activations_per_token_are_those_of_the_format(
    layout: str, setting: str, llama: Path, tmp_path: Path, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Quantizing the values again gives the same codes and scales, so a plain checkpoint has the same samples."""
    config, request = of_tokens(WRITERS[layout][1]), generate("a", tokens(40), n=2)
    make_both(llama, tmp_path, partial(of_bfloat16, layout), config)
    served = make_engine(tmp_path / "quantized", backend=backend, quantization="auto")
    assert served.info.quantization == setting
    assert not any("asks for" in text for text in caplog.messages)
    found = run(served, [request])
    plain, only_weights = (
        run(make_engine(tmp_path / "plain", backend=backend, quantization=each), [request])
        for each in (setting, layout)
    )
    assert {key: bits(each) for key, each in found.items()} == {key: bits(each) for key, each in plain.items()}
    assert found.keys() == only_weights.keys() and any(bits(found[key]) != bits(only_weights[key]) for key in found)


@pytest.mark.parametrize("setting", [*WITH_ACTIVATIONS, *WITH_ACTIVATIONS.values()])
def test_codes_are_kept_whatever_the_activations(setting: str, folders: Callable[[str], Path], backend: str) -> None:
    layout = next(layout for layout, other in WITH_ACTIVATIONS.items() if setting in (layout, other))
    folder, name = folders(layout), "model.layers.1.mlp.down_proj.weight"
    kept = load(folder / "quantized", backend=backend, quantization=setting)[name]
    expected = load_file(folder / "quantized" / FILE)[name].view(torch.uint8)
    dense = load(folder / "plain", backend=backend)[name].to_dense()
    assert not torch.equal(quantize(dense, FORMATS[setting]).codes, expected), "premise: no quantization gives them"
    if backend == "cpu" or FORMATS[setting].activations:
        assert torch.equal(kept.quantized().codes, expected)
    else:
        assert torch.equal(kept.to_dense(), dense)


@each_layout
def test_any_rows_and_columns_can_be_read(layout: str) -> None:
    write, own = WRITERS[layout][0], LAYOUTS[layout]
    members, values = write(280, 320, torch.Generator().manual_seed(1))
    fields = {kind: member.read(members[member.suffix], (280, 320)) for kind, member in own.others.items()}
    matrix, codes = Matrix(own, (280, 320), fields), members[own.codes.suffix]
    assert codes.shape == own.codes.shape(280, 320)
    assert all(members[member.suffix].shape == member.shape(280, 320) for member in own.others.values())
    for rows in row_ranges((280, 320), 1):
        part, expected = Rows(codes, matrix, rows), values[rows.start : rows.stop]
        assert torch.equal(part[:], expected) and torch.equal(part.quantized().values(), expected)
        assert torch.equal(part[3:21], expected[3:21])
        assert torch.equal(part[:, 100:301], expected[:, 100:301])
        assert torch.equal(part[5:6, 319:320], expected[5:6, 319:320])


@pytest.mark.parametrize("layout", ["awq", "int4", "nvfp4", "int8"])
@pytest.mark.parametrize("setting", ["none", "auto"])
def test_a_rank_holds_its_part(layout: str, setting: str, folders: Callable[[str], Path]) -> None:
    folder, settings = folders(layout), dict(backend="cpu")
    whole = allocate_model(EngineConfig(model=str(folder / "quantized"), backend="cpu", quantization=setting))
    whole_bytes = copy_checkpoint(whole.checkpoint, whole.loaded.weights.to_load)
    for index in range(2):
        links = links_of(index, 2)
        config = EngineConfig(model=str(folder / "quantized"), backend="cpu", quantization=setting)
        own = allocate_model(config, links)
        num_bytes = copy_checkpoint(own.checkpoint, own.loaded.weights.to_load)
        assert setting == "auto" or num_bytes < 0.85 * whole_bytes
        assert_equal(own.loaded.weights.tensors, load(folder / "plain", links, **settings))


@pytest.mark.parametrize("layout", ["awq", "modelopt-nvfp4"])
def test_experts_may_be_stored_one_by_one(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_MAX_OPEN_BYTES", 2**12)
    sizes = dict(hidden_size=128, intermediate_size=128, moe_intermediate_size=128)
    folder = make_tiny_model("deepseek_v3", tmp_path / "model", "bfloat16", **sizes)
    stored = make_both(folder, tmp_path, *WRITERS[layout])
    assert any(".experts.3.up_proj." in name and name not in load_file(folder / FILE) for name in stored), "premise"
    for setting in ("none", "auto"):
        found = load(tmp_path / "quantized", backend="cpu", quantization=setting)
        assert_equal(found, load(tmp_path / "plain", backend="cpu"))
    assert found["model.layers.1.mlp.experts.down_proj"].format is LAYOUTS[layout].format


def test_a_module_for_drafts_may_be_quantized(tmp_path: Path) -> None:
    folder = make_mtp_model("qwen3_next", tmp_path / "model")
    stored = make_both(folder, tmp_path, *WRITERS["mxfp4"])
    assert any(name.startswith("mtp.") and name.endswith("weight_packed") for name in stored), "premise"
    found = load(tmp_path / "quantized", speculative="mtp")
    assert any(name.startswith("mtp.") for name in found)
    assert_equal(found, load(tmp_path / "plain", speculative="mtp"))


def test_a_layer_that_is_left_plain_is_not_quantized_by_auto(
    folders: Callable[[str], Path], llama: Path, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    stored = load_file(folders("int4") / "quantized" / FILE)
    for suffix in ("packed", "scale", "zero_point", "shape"):
        del stored[f"{name}_{suffix}"]
    shutil.copytree(folders("int4") / "quantized", tmp_path, dirs_exist_ok=True)
    save_file(stored | {name: load_file(llama / FILE)[name]}, tmp_path / FILE)
    with pytest.raises(ConfigError, match=rf"auto would quantize 1 weights .* such as {name}; set quantization to awq"):
        load(tmp_path, quantization="auto")
    assert load(tmp_path, quantization="awq")[name].format.name == "awq"
    assert load(tmp_path).keys() == load(llama).keys()


def test_scales_of_activations_are_not_used(
    folders: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folders("nvfp4")
    shutil.copytree(folder / "quantized", tmp_path, dirs_exist_ok=True)
    stored, layer = load_file(tmp_path / FILE), "model.layers.0.self_attn."
    more = ("q_proj.input_global_scale", "k_scale", "v_scale")
    save_file(stored | {layer + name: torch.ones(1) for name in more}, tmp_path / FILE)
    raw = read_config(tmp_path)
    group = raw["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = dict(num_bits=4, type="float", dynamic="local")
    raw["quantization_config"]["kv_cache_scheme"] = dict(num_bits=8, type="float")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with caplog.at_level(logging.INFO):
        assert_equal(load(tmp_path, quantization="auto"), load(folder / "quantized", quantization="auto"))
    assert any(f"3 tensors of the checkpoint are not used: {layer}k_scale" in text for text in caplog.messages)
    asked = "asks for activations in 4 bits ('float') and for keys and values in 8 bits ('float'); activations keep b"
    assert any(asked in text for text in caplog.messages)


def test_the_experts_alone_may_be_quantized(tmp_path: Path) -> None:
    sizes = dict(hidden_size=128, intermediate_size=128, moe_intermediate_size=128)
    folder = make_tiny_model("qwen3_moe", tmp_path / "model", "bfloat16", **sizes)
    stored, plain = make_both(folder, tmp_path, *WRITERS["nvfp4"]), load_file(tmp_path / "plain" / FILE)
    attention = {name: each for name, each in load_file(folder / FILE).items() if ".self_attn." in name}
    experts = {name: each for name, each in stored.items() if ".self_attn." not in name}
    save_file(experts | attention, tmp_path / "quantized" / FILE)
    save_file(plain | attention, tmp_path / "plain" / FILE)
    with pytest.raises(ConfigError, match=r"such as .*self_attn.*; set quantization to nvfp4, nvfp4:experts or none"):
        load(tmp_path / "quantized", quantization="auto")
    found = load(tmp_path / "quantized", backend="cpu", quantization="nvfp4:experts")
    assert_equal(found, load(tmp_path / "plain", backend="cpu"))
    assert found["model.layers.1.mlp.experts.down_proj"].format is LAYOUTS["nvfp4"].format


def test_a_plain_weight_that_a_format_cannot_store_is_refused(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    tensors, name = load_file(llama / FILE), "model.layers.1.self_attn.o_proj.weight"
    tensors[name][3, 5] = torch.inf
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(ModelError, match=rf"{FILE}: {name}: 1 of \d+ values are NaN or infinite, which int8 cannot st"):
        load(tmp_path, quantization="int8")


MODULE = "model.layers.1.self_attn.o_proj."
Damage = tuple[str, Callable[[dict[str, Tensor]], Any], str]


def put(suffix: str, place: Any, value: float) -> Callable[[dict[str, Tensor]], Any]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[MODULE + suffix][place] = value

    return change


def replaced(suffix: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], Any]:
    name = MODULE + suffix
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


DAMAGES: dict[str, Damage] = {
    "no codes": ("awq", lambda tensors: tensors.pop(MODULE + "qweight"), rf"1 missing: {MODULE}weight; 2 unknown: "),
    "no scales": ("awq", lambda tensors: tensors.pop(MODULE + "scales"), rf"1 missing: {MODULE}scales;"),
    "no zeros": ("int4", lambda tensors: tensors.pop(MODULE + "weight_zero_point"), r"1 missing: .*weight_zero_point;"),
    "zeros that the config does not have": (
        "int4_symmetric",
        lambda tensors: tensors.update({MODULE + "weight_zero_point": torch.zeros(32, 1, dtype=torch.int32)}),
        rf"1 unknown: {MODULE}weight_zero_point;",
    ),
    "plain and quantized": (
        "int4",
        lambda tensors: tensors.update({MODULE + "weight": torch.zeros(256, 128)}),
        rf"1 unknown: {MODULE}weight;",
    ),
    "fewer words": (
        "awq",
        replaced("qweight", lambda words: words[:, :-1]),
        rf"1 of the wrong shape: {MODULE}qweight \(expected \[128, 32\], found \[128, 31\]\)",
    ),
    "rows first": (
        "awq",
        replaced("qweight", lambda words: words.T),
        r"qweight \(expected \[128, 32\], found \[32, 12",
    ),
    "smaller groups": (
        "mxfp4",
        replaced("weight_scale", lambda scales: scales.repeat_interleave(2, 1)),
        r"weight_scale \(expected \[256, 4\], found \[256, 8\]\)",
    ),
    "a scale for the whole matrix": (
        "int8",
        replaced("weight_scale", lambda scales: scales[:1]),
        r"weight_scale \(expected \[256, 1\], found \[1, 1\]\)",
    ),
    "codes of 64 bits": ("int4", replaced("weight_packed", Tensor.long), rf"1 not of I32: {MODULE}weight_packed \(I64"),
    "codes without a sign": (
        "int8",
        replaced("weight", lambda codes: codes.view(torch.uint8)),
        rf"1 unknown: {MODULE}weight_scale; 1 not of F64, F32, F16, BF16: {MODULE}weight \(U8\)",
    ),
    "powers of two as floats": (
        "mxfp8",
        replaced("weight_scale", Tensor.float),
        r"1 not of U8: .*weight_scale \(F32\)",
    ),
    "another shape": (
        "int4",
        put("weight_shape", 1, 120),
        rf"{MODULE}weight_shape: the shape must be \[256, 128\] \(got \[256, 120\]\); the checkpoint is damaged",
    ),
    "a NaN number": (
        "fp8_channel",
        put("weight", (5, 7), torch.nan),
        rf"{MODULE}weight: 1 of \d+ numbers are NaN; the ch",
    ),
    "a NaN scale": (
        "fp8_block",
        put("weight_scale", (0, 0), torch.nan),
        r"weight_scale: 1 of 2 scales are NaN, infini",
    ),
    "a NaN power of two": (
        "mxfp4",
        put("weight_scale", (3, 1), 255),
        r"1 of 1024 scales are NaN \(byte 255\); the che",
    ),
    "a NaN scale of float8": (
        "nvfp4",
        put("weight_scale", (3, 1), torch.nan),
        r"1 of 2048 scales are NaN, infinite or",
    ),
    "a negative scale": (
        "modelopt-nvfp4",
        put("weight_scale", (3, 1), -1),
        r"1 of 2048 scales are NaN, infinite or ne",
    ),
    "a divisor of 0": ("nvfp4", put("weight_global_scale", 0, 0), r"global_scale: .* positive number .* \(got 0\.0\)"),
    "a NaN factor": ("modelopt-nvfp4", put("weight_scale_2", (), torch.nan), r"weight_scale_2: 1 of 1 scales are NaN"),
    "an infinite scale": ("awq", put("scales", (0, 3), torch.inf), r"scales: 1 of 256 scales are NaN, infinite or neg"),
    "a scale that float16 lacks": (
        "int4",
        put("weight_scale", (2, 0), 1e-9),
        r"weight_scale: 1 of 256 scales are no float16 numbers, which the format awq needs; serve a checkpoint in bf",
    ),
    "a large scale that float16 lacks": ("int4", put("weight_scale", (2, 0), 1e9), r"1 of 256 scales are no float16"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_are_refused(name: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    layout, change, message = DAMAGES[name]
    shutil.copytree(folders(layout) / "quantized", tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / FILE)
    change(tensors)
    save_file(tensors, tmp_path / FILE)
    for setting in ("none", "auto"):
        with pytest.raises(ModelError, match=message):
            load(tmp_path, quantization=setting)


def test_a_packed_embedding_with_a_plain_copy_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model("qwen3", tmp_path / "tied")
    config = read_config(folder)
    assert config["tie_word_embeddings"], "premise"
    tensors = load_file(folder / FILE)
    embedding = tensors.pop("model.embed_tokens.weight")
    members, _ = int4_symmetric(embedding.shape[0], embedding.shape[1], torch.Generator().manual_seed(0))
    tensors |= {"lm_head.weight": embedding} | {f"model.embed_tokens.{name}": each for name, each in members.items()}
    save_file(tensors, folder / FILE)
    (folder / "config.json").write_text(json.dumps(config | dict(quantization_config=WRITERS["int4_symmetric"][1])))
    with pytest.raises(
        ModelError, match=r"lm_head.weight differs from model.embed_tokens.weight, but config.json ties"
    ):
        load(folder)
