"""Saved LoRA adapters: a worker reads the names, ranks, scales and bits of the live model, and refuses other files."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import ATTENTION, HYBRID, LATENT, NEMOTRON, adapt
from fake_engine import FakeWeights
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.errors import PushError
from trueroll.kernels import lora_config as field_lists
from trueroll.kernels.adapters import read_tensors
from trueroll.kernels.spellings import own_name
from trueroll.weight_sync.payload import lora_config
from trueroll.weight_sync.payload.lora_config import MOST_CONFIG_BYTES, read_config
from trueroll.weight_sync.payload.manifest import factor_names
from trueroll.weight_sync.payload.tensors import host_chunks
from trueroll.weight_sync.transports.peft_folder import ADAPTER_FILE, CONFIG_FILE, PeftFolder
from trueroll.weight_sync.transports.policy import PushPolicy
from trueroll.weight_sync.worker.assembly import Assembly

# Adapters of live models.

PATTERNS: dict[str, Any] = {
    "rank_pattern": {"layers.0.self_attn.k_proj": 2, r"self_attn\.v_proj": 5, "v_proj": 7},
    "alpha_pattern": {"^model.layers.1.self_attn.q_proj": 3, "q_proj": 5.5, "o_proj": 9},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(target_modules="all-linear", lora_dropout=0.0, init_lora_weights="gaussian"),
    "qwen3": dict(target_modules=ATTENTION, **PATTERNS),
    "qwen3_5": dict(target_modules=HYBRID, use_rslora=True, rank_pattern={"k_proj": 2}),
    "mistral3": dict(target_modules=ATTENTION),
    "deepseek_v3": dict(target_modules=LATENT),
    "nemotron_h": dict(target_modules=NEMOTRON),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_adapter_is_the_live_one(tmp_path: Path, family: str) -> None:
    """The adapter is trained in float32 and served in bfloat16."""
    model = adapt(make_tiny_model(family, tmp_path / "base"), **FAMILIES[family])
    model.save_pretrained(tmp_path / "saved")
    live = read_tensors(model).adapters
    with closing(Engine(EngineConfig(model=str(tmp_path / "base"), dtype="bfloat16", adapter_bytes=2**28))) as engine:
        weights: Any = engine.weights
        expected = {own: adapter for name, adapter in live.items() if (own := own_name(name, weights)) is not None}
        with closing(PeftFolder(str(tmp_path / "saved"), weights, PushPolicy())) as reader:
            found = {name: (rank, scale) for name, rank, scale in reader.adapters.weights}
            assert engine.adapters is not None
            staging = engine.adapters.new_staging("a")
            staging.adapt({name: (*factor_names(name), *told) for name, told in found.items()}, alone=True)
            stage(reader, staging)
        assert reader.adapters.is_alone and expected
        assert found == {name: (len(a), scale) for name, (a, _, scale) in expected.items()}
        assert len({*found.values()}) == {"qwen3": 6, "qwen3_5": 2}.get(family, 1)
        for name, (a, b, scale) in expected.items():
            factors = staging.factors[name]
            assert factors.scale == scale and (a.dtype, factors.a.dtype) == (torch.float32, torch.bfloat16)
            assert torch.equal(factors.a, pushed(a)) and torch.equal(factors.b, pushed(b))
            assert staging.merge(name)


def pushed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a trainer sends it."""
    return torch.cat([rows for _, rows in host_chunks(tensor.detach(), torch.bfloat16)])


def stage(reader: PeftFolder, staging: Any) -> None:
    """Stage the folder as a worker does."""
    assembly = Assembly(reader.wanted, staging, is_sparse=False, reject_nonfinite=True, in_place=False)
    for bucket, read in reader.read_unannounced():
        assembly.check(bucket)
        [piece], data = bucket.pieces, read()
        assembly.inspect_all(bucket, data)
        assembly.take(piece, data, nullcontext)
    assembly.finish()


def test_the_tower_that_a_worker_leaves_out_is_skipped(tmp_path: Path) -> None:
    weights = FakeWeights(SHAPES)
    weights.left_out = ("model.visual.",)
    visual = {f"base_model.model.model.visual.qkv.lora_{part}.weight": torch.ones(3, 3) for part in "AB"}
    folder = write(tmp_path, TENSORS | visual)
    with closing(PeftFolder(folder, weights, PushPolicy())) as reader:
        assert [name for name, *_ in reader.adapters.weights] == [*SHAPES]
    with pytest.raises(PushError, match="has no matrices for the worker's model; give the folder of an adapter"):
        PeftFolder(write(tmp_path, visual), weights, PushPolicy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_dtype_is_converted_to_the_dtype_of_the_weight(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: (torch.randn(tensor.shape) / 3).to(dtype) for name, tensor in TENSORS.items()}
    weights = FakeWeights(SHAPES, dtypes={"layers.1.up.weight": "float32"})
    with closing(PeftFolder(write(tmp_path, tensors), weights, PushPolicy())) as reader:
        found = {bucket.pieces[0].name: read().clone() for bucket, read in reader.read_unannounced()}
    for name, tensor in tensors.items():
        own = torch.float32 if ".up." in name else torch.bfloat16
        data = found[name.removeprefix("base_model.model.")]
        assert torch.equal(data.view(own).view(tensor.shape), tensor.to(own))


# Folders written by hand.

SHAPES = {"layers.0.q.weight": (6, 4), "layers.1.up.weight": (3, 4)}
RANK = 2
A, B = (f"base_model.model.layers.0.q.lora_{part}.weight" for part in "AB")
TENSORS = {
    f"base_model.model.{name.removesuffix('weight')}lora_{part}.weight": torch.ones(shape)
    for name, (rows, columns) in SHAPES.items()
    for part, shape in (("A", (RANK, columns)), ("B", (rows, RANK)))
}
CONFIG: dict[str, Any] = {"peft_type": "LORA", "bias": "none", "r": RANK, "lora_alpha": 8}


def write(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **fields: Any) -> str:
    (folder / CONFIG_FILE).write_text(json.dumps(CONFIG | fields))
    save_file(TENSORS if tensors is None else tensors, folder / ADAPTER_FILE)
    return str(folder)


def open_folder(folder: str, policy: PushPolicy | None = None) -> None:
    PeftFolder(folder, FakeWeights(SHAPES), policy or PushPolicy()).close()


def without(name: str) -> dict[str, torch.Tensor]:
    return {each: tensor for each, tensor in TENSORS.items() if each != name}


UP = "base_model.model.layers.1.up"
WRONG_TENSORS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "A alone": (without(B), f"tensor '{A}' has no counterpart"),
    "B alone": (without(A), f"tensor '{B}' has no counterpart"),
    "an embedding": (
        TENSORS | {"base_model.model.embed.lora_embedding_A": torch.ones(2, 4)},
        "tensor 'base_model.model.embed.lora_embedding_A' is not supported; save plain LoRA of linear layers",
    ),
    "DoRA": (TENSORS | {f"{UP}.lora_magnitude_vector": torch.ones(3)}, "lora_magnitude_vector' is not supported"),
    "a bias": (TENSORS | {f"{UP}.lora_B.bias": torch.ones(3)}, "lora_B.bias' is not supported"),
    "a whole module": (TENSORS | {"base_model.model.lm_head.weight": torch.ones(3, 4)}, "lm_head.weight' is not supp"),
    "no prefix": (TENSORS | {"layers.0.q.lora_A.weight": torch.ones(2, 4)}, "'layers.0.q.lora_A.weight' is not supp"),
    "nothing": ({}, "has no matrices for the worker's model"),
    "an unknown module": (
        TENSORS | {f"base_model.model.layers.9.q.lora_{part}.weight": torch.ones(2, 2) for part in "AB"},
        "tensor layers.9.q.weight: unknown to the worker's model",
    ),
    "another rank": (TENSORS | {A: torch.ones(3, 4)}, "has the shape [3, 4], but adapter_config.json and the worker's"),
    "another width": (
        TENSORS | {A: torch.ones(2, 5)},
        "has the shape [2, 5], but adapter_config.json and the worker's",
    ),
    "another height": (TENSORS | {B: torch.ones(5, 2)}, "the worker's model need [6, 2]"),
    "another rank of B": (TENSORS | {B: torch.ones(6, 3)}, "has the shape [6, 3]"),
    "one dimension": (TENSORS | {A: torch.ones(2)}, "has the shape [2]"),
    "float64": (TENSORS | {A: torch.ones(2, 4, dtype=torch.float64)}, "has the dtype F64, not one of BF16, F16, F32"),
    "int8": (TENSORS | {A: torch.ones(2, 4, dtype=torch.int8)}, "has the dtype I8"),
}


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_wrong_tensors_are_refused(tmp_path: Path, name: str) -> None:
    tensors, words = WRONG_TENSORS[name]
    open_folder(write(tmp_path))
    with pytest.raises(PushError, match=re.escape(words)):
        open_folder(write(tmp_path, tensors))


def test_a_module_has_one_adapter(tmp_path: Path) -> None:
    weights = FakeWeights(SHAPES)
    weights.renamed = {"old.": "layers."}
    twice = TENSORS | {
        f"base_model.model.old.0.q.lora_{part}.weight": TENSORS[each].clone()
        for part, each in zip("AB", (A, B), strict=True)
    }
    with pytest.raises(PushError, match=r"belongs to layers\.0\.q\.weight, which has another adapter"):
        PeftFolder(write(tmp_path, twice), weights, PushPolicy())


def test_an_adapter_of_one_expert_is_refused(tmp_path: Path) -> None:
    weights = FakeWeights({"mlp.experts.down_proj": (2, 3, 4)})
    weights.parts = {"mlp.experts.down_proj": ("mlp.experts.{}.down_proj.weight",)}
    name = "base_model.model.mlp.experts.1.down_proj.lora_"
    expert = {f"{name}A.weight": torch.ones(2, 4), f"{name}B.weight": torch.ones(3, 2)}
    with pytest.raises(PushError, match="changes one expert of a mixture, which only a push of the merged weights can"):
        PeftFolder(write(tmp_path, expert), weights, PushPolicy())


def test_a_large_rank_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    large = {A: torch.ones(60, 4), B: torch.ones(6, 60)}
    with pytest.raises(PushError, match=r"have 600 elements \(limit 144, 4 times the elements of all weights\)"):
        open_folder(write(tmp_path, large, r=60))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    folder = write(tmp_path, TENSORS | {B: torch.full((6, 2), value)})
    with closing(PeftFolder(folder, FakeWeights(SHAPES), PushPolicy())) as reader:
        with pytest.raises(PushError, match=r"layers\.0\.q\.lora_B\.weight: expected finite values"):
            stage(reader, SilentStaging())


class SilentStaging:
    """A staging area that forgets all values."""

    def rows(self, name: str, start: int, length: int) -> Any:
        return self

    def copy_(self, source: torch.Tensor) -> None:
        pass


# Configs.

WRONG_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "ADALORA"}, "'peft_type' = 'ADALORA', which is not supported"),
    "no method": ({"peft_type": None}, "'peft_type' = None"),
    "trained biases": ({"bias": "all"}, "'bias' = 'all'"),
    "rank 0": ({"r": 0}, "'r': Value error, a rank must be an integer in [1, 65535] (got 0)"),
    "a large rank": ({"r": 2**16}, "(got 65536)"),
    "true as rank": ({"r": True}, "(got True)"),
    "a float as rank": ({"r": 2.0}, "(got 2.0)"),
    "alpha as text": ({"lora_alpha": "8"}, "'lora_alpha': Value error, an alpha must be a finite number"),
    "a NaN as alpha": ({"lora_alpha": float("nan")}, "(got nan)"),
    "an infinite alpha": ({"lora_alpha": float("inf")}, "(got inf)"),
    "a huge alpha": ({"lora_alpha": 10**400}, "an alpha must be a finite number of at most 2**53"),
    "rsLoRA as text": ({"use_rslora": "no"}, "'use_rslora'"),
    "patterns as list": ({"rank_pattern": ["q"]}, "expected a map (got ['q'])"),
    "a wrong rank of a pattern": ({"rank_pattern": {"q": 0}}, "a rank must be an integer in [1, 65535] (got 0)"),
    "a wrong alpha of a pattern": ({"alpha_pattern": {"q": None}}, "'alpha_pattern': Value error, an alpha"),
    "a slow pattern": ({"alpha_pattern": {"(a+)+b": 1}}, "the pattern '(a+)+b' is not supported; use names of modules"),
    "a choice": ({"rank_pattern": {"q|k": 1}}, "the pattern 'q|k' is not supported"),
    "an empty pattern": ({"rank_pattern": {"": 1}}, "the pattern '' is not supported"),
    "a long pattern": ({"rank_pattern": {"a" * 513: 1}}, "is not supported; use names"),
    "changed base weights": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = 'pissa_niter_4', which is"),
    "a list as initialization": ({"init_lora_weights": [1]}, "init_lora_weights = [1], which is not supported"),
    "a field of a later release": ({"use_new_lora": {"a": 1}}, "'use_new_lora' = a map of 1, which is not supported"),
}


@pytest.mark.parametrize("name", WRONG_FIELDS)
def test_a_wrong_field_is_refused(tmp_path: Path, name: str) -> None:
    fields, words = WRONG_FIELDS[name]
    with pytest.raises(PushError, match=re.escape(words)) as caught:
        open_folder(write(tmp_path, **fields))
    assert CONFIG_FILE in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", sorted({*field_lists.EMPTY, *field_lists.KINDS}))
def test_a_field_that_changes_the_computation_must_be_empty(tmp_path: Path, name: str) -> None:
    assert name in LoraConfig.__dataclass_fields__
    with pytest.raises(PushError, match=rf"'{name}' = True, which is not supported; save plain LoRA of linear layers"):
        open_folder(write(tmp_path, None, **{name: True}))
    for empty in (None, False, [], {}):
        open_folder(write(tmp_path, None, **{name: empty}))


def test_fields_without_effect_are_ignored(tmp_path: Path) -> None:
    inert: dict[str, Any] = dict.fromkeys(field_lists.INERT, "any")
    open_folder(write(tmp_path, **inert, lora_dropout=0.1, init_lora_weights="EVA", rank_pattern=None))


TEXTS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "Expecting value"),
    "no JSON": (b"{", "Expecting property name"),
    "no UTF-8": (b'{"\xff": 1}', "codec can't decode"),
    "a list": (b"[]", "expected a JSON map (got [])"),
    "deep lists": (b"[" * 10**5, "maximum recursion depth"),
    "deep maps": (b'{"r":' * 10**5, "maximum recursion depth"),
    "a number of 5000 digits": (b'{"r": ' + b"9" * 5000 + b"}", "4300 digits"),
    "no text": (b'{"\\ud800": 1, "peft_type": "LORA", "bias": "none"}', r"'\ud800' = 1, which is not supported"),
    "fields are missing": (b'{"peft_type": "LORA", "bias": "none"}', "'r': Field required"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_wrong_config_is_refused(tmp_path: Path, name: str) -> None:
    text, words = TEXTS[name]
    folder = write(tmp_path)
    (tmp_path / CONFIG_FILE).write_bytes(text)
    with pytest.raises(PushError, match=re.escape(words)) as caught:
        open_folder(folder)
    str(caught.value).encode()


def test_a_long_config_is_not_parsed(tmp_path: Path) -> None:
    folder = write(tmp_path)
    with (tmp_path / CONFIG_FILE).open("ab") as file:
        file.write(b" " * (MOST_CONFIG_BYTES - file.tell()))
        file.flush()
        open_folder(folder)
        file.write(b" ")
    with pytest.raises(PushError, match=f"has more than {MOST_CONFIG_BYTES} bytes"):
        open_folder(folder)


@pytest.mark.parametrize(
    "pattern", ["q", "0.q", "layers.0.q", r"layers\.0\.q", "^layers.0.q", "^q", "ers.0.q", "l", "...q", ".q"]
)
def test_a_pattern_matches_as_in_peft(pattern: str) -> None:
    config = read_config(json.dumps(CONFIG | {"rank_pattern": {pattern: 5, "layers.0.q": 6}}).encode(), "")
    names = ["layers.0.q", "q", "0.q", "layers.0.xq", "layers.0_q", "x.layers.0.q", "layers.0.q.q", "x.y.q"]
    expected = [
        {pattern: 5, "layers.0.q": 6}.get(get_pattern_key([pattern, "layers.0.q"], name), RANK) for name in names
    ]
    assert [rank for rank, _ in config.ranks_and_scales(names)] == expected


def test_patterns_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_config, "MOST_MATCHES", 5)
    open_folder(write(tmp_path, alpha_pattern={"x": 1, "y": 1}))
    with pytest.raises(PushError, match=r"need 6 matches for 2 modules \(limit 5\); use fewer patterns"):
        open_folder(write(tmp_path, alpha_pattern={"x": 1, "y": 1}, rank_pattern={"x": 1}))


# Files.


def link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("moved")))


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda folder: (folder / CONFIG_FILE).unlink(), "No such file"),
    "no adapter": (lambda folder: (folder / ADAPTER_FILE).unlink(), "No such file"),
    "a link as config": (lambda folder: link(folder / CONFIG_FILE), "symbolic links"),
    "a link as adapter": (lambda folder: link(folder / ADAPTER_FILE), "symbolic links"),
    "an adapter that others may write": (lambda folder: (folder / ADAPTER_FILE).chmod(0o666), "mode 0666"),
    "a config that others may write": (lambda folder: (folder / CONFIG_FILE).chmod(0o666), "mode 0666"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_files_that_a_worker_must_not_read_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    folder, (spoil, cause) = write(tmp_path), FAULTS[name]
    spoil(tmp_path)
    before = os.listdir("/proc/self/fd")
    with caplog.at_level(logging.WARNING), pytest.raises(PushError, match=f"cannot read a push from {folder}"):
        open_folder(folder)
    assert cause in caplog.text and len(os.listdir("/proc/self/fd")) == len(before)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    (inside := tmp_path / "inside").mkdir()
    folder = write(inside)
    (inside / ADAPTER_FILE).rename(inside / "adapter_model.bin")
    with pytest.raises(PushError, match=r"has no adapter_model\.safetensors, and .* save the adapter with safe_serial"):
        open_folder(folder)
    (other := tmp_path / "other").mkdir()
    with pytest.raises(PushError, match="cannot read a push from"):  # the text does not tell which files exist
        open_folder(folder, PushPolicy(folder=str(other)))


def test_a_long_header_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (tmp_path / ADAPTER_FILE).write_bytes((2**20).to_bytes(8, "little") + b" " * 2**20)
    with pytest.raises(PushError, match=r"its header has 1048576 bytes \(limit 69632\)"):
        open_folder(folder)


def test_a_shape_that_takes_more_bytes_is_refused(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 8]}
    folder, header = write(tmp_path), json.dumps({A: entry}).encode()
    (tmp_path / ADAPTER_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(PushError, match="has 8 bytes, but its shape takes 32 bytes"):
        open_folder(folder)


@pytest.mark.parametrize("name", [CONFIG_FILE, ADAPTER_FILE])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, name: str) -> None:
    with closing(PeftFolder(write(tmp_path), FakeWeights(SHAPES), PushPolicy())) as reader:
        tensors = reader.read_unannounced()
        assert len([next(tensors) for _ in TENSORS]) == len(load_file(tmp_path / ADAPTER_FILE))
        os.utime(tmp_path / name, ns=(0, 0))
        with pytest.raises(PushError, match="was changed while it was read; load the adapter again"):
            next(tensors)
