"""Hostile model folders: each fault is refused before memory is allocated, with an error of bounded length that names
the fault.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trueroll.engine.config import EngineConfig
from trueroll.engine.models import loader
from trueroll.engine.models.loader import check_checkpoint, copy_checkpoint, read_config
from trueroll.engine.running import loading
from trueroll.errors import ModelError
from trueroll.kernels.families import describe

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A complete model for tests to damage. The weights are in one file, which `shard` splits."""
    return shutil.copytree(tiny_llama, tmp_path / "model")


def load(folder: Path) -> loading.LoadedModel:
    return loading.load_model(EngineConfig(model=str(folder)))


def change(folder: Path, file: str = "config.json", **settings: Any) -> None:
    before = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(before | settings))


def shard(folder: Path, *names: str) -> None:
    """Write an index that names these files. The names may be arbitrary."""
    (folder / SINGLE).unlink(missing_ok=True)
    (folder / INDEX).write_text(json.dumps({"weight_map": {str(i): name for i, name in enumerate(names)}}))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder)
    message = str(caught.value)
    assert len(message) < 4000 and message.isprintable()
    return message


def write_safetensors(file: Path, header: bytes, data: bytes = b"") -> None:
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)


def test_a_folder_of_links_is_loaded(folder: Path, tmp_path: Path) -> None:
    links = tmp_path / "snapshot"
    links.mkdir()
    for file in folder.iterdir():
        (links / file.name).symlink_to(file)
    assert load(links).model.num_bytes == load(folder).model.num_bytes > 0


FILES = ("config.json", "generation_config.json", SINGLE, INDEX, "model-1.safetensors")
SPECIAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "a FIFO": (os.mkfifo, "a pipe, a socket or a device"),
    "a link to a device": (lambda path: path.symlink_to("/dev/null"), "a pipe, a socket or a device"),
    "a folder": (Path.mkdir, "a folder"),
    "a link to nothing": (lambda path: path.symlink_to("nowhere"), "No such file"),
    "a link to itself": (lambda path: path.symlink_to(path), "Too many levels"),
}


@pytest.mark.timeout(30)  # opening the FIFO would wait for a writer
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", SPECIAL)
def test_a_file_that_is_not_regular_is_named_and_never_opened(folder: Path, file: str, kind: str) -> None:
    make, found = SPECIAL[kind]
    if file in (INDEX, "model-1.safetensors"):
        shard(folder, "model-1.safetensors")
    (folder / file).unlink(missing_ok=True)
    make(folder / file)
    assert f"{file}: " in (message := refusal(folder)) and found in message


def test_json_nested_too_deeply_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)
    assert "config.json: the JSON is nested too deeply" in refusal(folder)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_settings_of_a_megabyte_are_refused(folder: Path, file: str) -> None:
    (folder / file).write_text(json.dumps({"a": "x" * 2**20}))
    assert f"{file}: file is too large: 10485" in (message := refusal(folder)) and "bytes (limit 1048576)" in message


def test_an_index_out_of_proportion_is_refused(folder: Path) -> None:
    shard(folder)
    os.truncate(folder / INDEX, loader.MAX_HEADER_BYTES + 1)
    assert f"{INDEX}: file is too large: 20971521 bytes (limit 20971520)" in refusal(folder)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        (dict(num_hidden_layers=2**40), "'num_hidden_layers'.* at most 1024 .got 1099511627776"),
        (dict(num_hidden_layers=1025), "'num_hidden_layers'.* at most 1024 .got 1025"),
        (dict(vocab_size=2**25), "'vocab_size'.* at most 16777216"),
        (dict(hidden_size=2**33), "'hidden_size'.* at most 1048576"),
        (dict(intermediate_size=2**40), "'intermediate_size'.* at most 4194304"),
        (dict(num_attention_heads=2**20), "'num_attention_heads'.* at most 4096"),
        (dict(num_key_value_heads=2**20), "'num_key_value_heads'.* at most 4096"),
        (dict(head_dim=2**40), "'head_dim'.* at most 4096"),
        (dict(max_position_embeddings=2**40), "'max_position_embeddings'.* at most 16777216"),
        (dict(vocab_size=10**4000), "'vocab_size'.* at most 16777216"),
        (dict(vocab_size=float("nan")), "'vocab_size' expected int, got float"),
        (dict(hidden_act="x" * 10**5), "hidden_act .* must be 'silu'"),
        (dict(architectures=["x" * 10**5]), "architecture must be one of"),
        (dict(dtype="\ud800" * 1000), "has no attribute"),
        (dict(rope_parameters=dict(rope_type="x" * 10**5)), "rope_type in config.json must"),
        (
            dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=[2.0] * 10**5)),
            "invalid setting: TypeError",
        ),
    ],
)
def test_settings_beyond_any_model_are_refused(folder: Path, settings: dict[str, Any], found: str) -> None:
    raw = read_config(folder) | settings
    with pytest.raises(ModelError, match=found) as caught:
        describe(raw)
    assert len(str(caught.value)) < 2000 and str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("factor", "found"),
    [
        (float("nan"), "do not give a valid rotation"),
        (float("inf"), "do not give a valid rotation"),
        (-1.0, "do not give a valid rotation"),
        ("x", "TypeError"),
        (10**400, "OverflowError"),
    ],
)
def test_a_scale_of_the_rotation_is_a_finite_number(folder: Path, factor: object, found: str) -> None:
    yarn = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=256)
    raw = read_config(folder) | dict(rope_parameters=yarn | dict(attention_factor=factor))
    with pytest.raises(ModelError, match=found):
        describe(raw)


OUTSIDE = ["../outside.safetensors", "sub/inside.safetensors", "./model-1.safetensors", "{absolute}", "..", ""]
OUTSIDE += ["model-1.bin", "nul\0.safetensors", "\x1b[2J.safetensors"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_may_name_only_files_of_its_folder(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / "sub").mkdir()
    outside = tmp_path / "outside.safetensors"
    for copy in (outside, folder / "sub" / "inside.safetensors", folder / "model-1.safetensors"):
        shutil.copy(folder / SINGLE, copy)
    shard(folder, name.format(absolute=outside))
    assert "is not the name of a .safetensors file in this folder" in refusal(folder)


def test_an_index_of_too_many_files_is_refused(folder: Path) -> None:
    shard(folder, *(f"{i}.safetensors" for i in range(1025)))
    assert f"{INDEX}: names 1025 files (limit 1024)" in refusal(folder)


def header_of(file: Path, more: int) -> bytes:
    """Return the header of a file, `more` bytes longer. JSON may end in spaces."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return content[8 : 8 + length] + b" " * more


def test_a_header_out_of_proportion_is_refused(folder: Path) -> None:
    content, header = (folder / SINGLE).read_bytes(), header_of(folder / SINGLE, more := loader.MAX_HEADER_BYTES)
    write_safetensors(folder / SINGLE, header, content[8 + len(header) - more :])
    assert (
        "headers of the safetensors files are too large: 2097" in (message := refusal(folder))
        and "bytes (limit 20971520)" in message
    )


def test_headers_out_of_proportion_together_are_refused(folder: Path) -> None:
    for file in (names := ("1.safetensors", "2.safetensors")):
        write_safetensors(folder / file, b"{}" + b" " * (11 * 2**20))
    shard(folder, *names)
    assert (
        "headers of the safetensors files are too large: 2306" in (message := refusal(folder))
        and "bytes (limit 20971520)" in message
    )


@pytest.mark.parametrize("length", [2**63, 2**24 + 1, 1000])
def test_a_header_longer_than_its_file_is_refused(folder: Path, length: int) -> None:
    (folder / SINGLE).write_bytes(struct.pack("<Q", length) + b"{}")
    assert f"complete safetensors file: the header should have {length} bytes, but only 2 bytes follow" in refusal(
        folder
    )


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 10**6,
        b'{"a":' * 10**5,
        b'{"x":"' + b"y" * 10**6 + b'"}',
        b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551615]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
    ],
)
def test_an_invalid_header_is_refused(folder: Path, header: bytes) -> None:
    write_safetensors(folder / SINGLE, header)
    assert f"{SINGLE}: is not a complete safetensors file" in refusal(folder)


def test_names_and_shapes_beyond_reason_are_cut(tmp_path: Path) -> None:
    dims = b",".join([b"1"] * 10**5)
    entry = b'"%s":{"dtype":"F32","shape":[%s],"data_offsets":[%d,%d]}'
    entries = [entry % (b"x" * 10**5, b"1", 0, 4), entry % (b"\x1b[2J".replace(b"\x1b", b"\\u001b"), b"1", 4, 8)]
    header = b"{%s}" % b",".join([*entries, entry % (b"norm", dims, 8, 12)])
    write_safetensors(tmp_path / SINGLE, header, bytes(12))
    with pytest.raises(ModelError, match="2 unknown: .*1 of the wrong shape: norm") as caught:
        check_checkpoint(tmp_path, {"norm": torch.empty(4)}, ignored=())
    assert len(str(caught.value)) < 2000 and str(caught.value).isprintable()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_unsupported_kinds_of_numbers_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"norm": torch.zeros(4, dtype=dtype)}, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=r"1 not of F64, F32, F16, BF16: norm \("):
        check_checkpoint(tmp_path, {"norm": torch.empty(4)}, ignored=())


@pytest.mark.parametrize("settings", [dict(num_hidden_layers=1024), dict(vocab_size=2**24, hidden_size=2**20)])
def test_sizes_that_the_checkpoint_does_not_have_take_no_memory(
    folder: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    change(folder, **settings)
    monkeypatch.setattr(loading, "WeightStore", lambda *_: pytest.fail("memory was taken"))
    assert "the tensors do not fit the model that config.json describes" in refusal(folder)


@pytest.mark.parametrize("read", [loading.load_model, loading.load_dummy])
def test_weights_larger_than_the_free_memory_take_no_memory(
    folder: Path, read: Callable[[EngineConfig], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "available_memory", lambda device: 10**5)
    monkeypatch.setattr(loading, "WeightStore", lambda *_: pytest.fail("memory was taken"))
    with pytest.raises(ModelError, match="weights need [0-9]{6} bytes, but only 100000 bytes of memory are available"):
        read(EngineConfig(model=str(folder), dtype="float32"))


def test_a_header_is_parsed_once_to_check_and_once_to_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    monkeypatch.setattr(loader, "safe_open", lambda file, **kind: opened.append(file) or safe_open(file, **kind))
    load(folder)
    assert opened == [folder / SINGLE] * 2


def test_many_small_tensors_do_not_parse_the_header_many_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {str(i): torch.full((4,), float(i)) for i in range(100)}
    save_file(tensors, tmp_path / SINGLE)
    opened: list[Path] = []
    monkeypatch.setattr(loader, "safe_open", lambda file, **kind: opened.append(file) or safe_open(file, **kind))
    destinations = {name: torch.empty(4) for name in tensors}
    copy_checkpoint(check_checkpoint(tmp_path, destinations, ignored=()), destinations)
    assert all(torch.equal(destinations[name], tensor) for name, tensor in tensors.items())
    assert len(opened) == 2, "opened once to check and once to copy"
