"""SkyRL's chains: weights that are right to the byte, and folders that are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import save_file
from weight_sync.deltas.test_reader import BOMB, STACK, assert_same, change_bytes, flip, in_parts, read, refuse, states

from trueroll.weight_sync.deltas.chain import Served
from trueroll.weight_sync.deltas.places import RemotePlace
from weight_sync.deltas import skyrl, slime

FILE = "delta-rank00000-file000000.safetensors"


@pytest.mark.parametrize("num_files", [1, 2])
def test_a_late_worker_is_right_to_the_byte(tmp_path: Path, num_files: int) -> None:
    history = states(count=6)
    for version in range(1, 6):
        skyrl.write_delta(tmp_path, version, history[version - 1], history[version], num_files)
    assert len([*(tmp_path / "delta-00000004").iterdir()]) == num_files + 1, "premise"
    assert_same(read(tmp_path, 5, history[0], Served(0, None)), history[5])
    assert_same(read(tmp_path, 5, history[4], Served(4, "a" * 32)), history[5])


def test_experts_come_in_parts_under_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    history = [in_parts(state) for state in states(count=3)]
    assert not all(torch.equal(history[1][name], history[2][name]) for name in history[1] if "experts" in name)
    extra = dict.fromkeys(("vision.tower", "old.bias"), torch.ones(3))
    spelled = [{f"model.{name}": tensor for name, tensor in state.items()} | extra for state in history]
    spelled[2] |= dict.fromkeys(extra, torch.zeros(3))
    folder = skyrl.write_delta(tmp_path, 2, spelled[1], spelled[2])
    listed = {record["name"] for record in json.loads((folder / skyrl.MANIFEST).read_text())["tensors"]}
    assert extra.keys() <= listed, "premise: tensors that the worker does not use"
    found = read(tmp_path, 2, states(count=2)[1], Served(1, None))
    assert STACK not in found
    assert_same(found, history[2])


def test_a_delta_without_changes_has_only_a_manifest(tmp_path: Path) -> None:
    [state] = states(count=1)
    folder = skyrl.write_delta(tmp_path, 1, state, state)
    assert [path.name for path in folder.iterdir()] == [skyrl.MANIFEST]
    assert_same(read(tmp_path, 1, state, Served(0, None)), state)


def test_a_full_checkpoint_restarts_the_chain(tmp_path: Path) -> None:
    history = states(count=4)
    slime.write_full(tmp_path, 2, history[2])
    for version in (2, 3):
        skyrl.write_delta(tmp_path, version, history[version - 1], history[version])
    assert_same(read(tmp_path, 3, None, None), history[3])


def test_a_chain_is_read_from_a_url(tmp_path: Path) -> None:
    history = states(count=3)
    for version in (1, 2):
        skyrl.write_delta(tmp_path / "run", version, history[version - 1], history[version])
    MemoryFileSystem().put(str(tmp_path / "run"), "/skyrl/run", recursive=True)
    try:
        assert_same(read(RemotePlace("memory://skyrl/run"), 2, history[0], Served(0, None)), history[2])
    finally:
        MemoryFileSystem().rm("/skyrl", recursive=True)


# Refused folders. The worker serves version 0, and the chain has the versions 1 and 2.


def change(folder: Path, edit: Callable[[Any], Any]) -> None:
    manifest = json.loads((folder / skyrl.MANIFEST).read_text())
    edit(manifest)
    (folder / skyrl.MANIFEST).write_text(json.dumps(manifest))


def set_record(**values: Any) -> Callable[[Path, Path], Any]:
    return lambda _, last: change(last, lambda manifest: manifest["tensors"][0].update(values))


def set_manifest(**values: Any) -> Callable[[Path, Path], Any]:
    return lambda _, last: change(last, lambda manifest: manifest.update(values))


def replace_frames(folder: Path, frame: bytes) -> None:
    manifest = json.loads((folder / skyrl.MANIFEST).read_text())
    tensor = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    save_file({record["name"]: tensor.clone() for record in manifest["tensors"]}, folder / FILE)


FAULTS: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "no folder": (lambda _, last: shutil.rmtree(last), "cannot read .*no delta-00000002/manifest.json either"),
    "no manifest": (lambda _, last: (last / skyrl.MANIFEST).unlink(), "no delta-00000002/manifest.json either"),
    "no file": (lambda _, last: (last / FILE).unlink(), "cannot read a push from .*delta-00000002"),
    "a lost base": (
        lambda first, _: shutil.rmtree(first),
        "delta-00000002 is a delta to version 1, and this worker serves version 0, but delta-00000001 cannot be used",
    ),
    "a flipped bit": (lambda _, last: flip(last / FILE, -9), "tensor .*: "),
    "a flipped bit in the header": (lambda _, last: flip(last / FILE, 3), "is not a whole safetensors file"),
    "a file that grows": (
        lambda _, last: change_bytes(last / FILE, lambda data: data.extend(b"more")),
        "bytes after its header, but its tensors take",
    ),
    "a bomb": (lambda _, last: replace_frames(last, BOMB), "delta-00000002: the delta is longer than"),
    "a long manifest": (set_manifest(more="x" * 2**18), r"manifest.json has \d+ bytes \(limit \d+\)"),
    "no JSON": (lambda _, last: (last / skyrl.MANIFEST).write_text("{"), "delta-00000002/manifest.json is not usable"),
    "deep JSON": (lambda _, last: (last / skyrl.MANIFEST).write_text("[" * 50_000), "is not usable"),
    "a list": (lambda _, last: (last / skyrl.MANIFEST).write_text("[]"), "it is not a JSON map"),
    "a version twice": (set_manifest(version=1), "it describes version 1, so this version is there twice"),
    "a version as text": (set_manifest(version="2"), "version is '2', not a version such as 123"),
    "a later base": (set_manifest(base_version=2), "version 2 is based on version 2, which is not older"),
    "a negative base": (set_manifest(base_version=-1), "base_version is -1, not a version"),
    "no tensors": (set_manifest(tensors=None), "it has no list of tensors"),
    "a tensor twice": (
        lambda _, last: change(last, lambda manifest: manifest["tensors"].append(manifest["tensors"][0])),
        "lists tensor '.*' twice",
    ),
    "no record": (set_manifest(tensors=[7]), "an element of its tensors is not a map"),
    "no name": (set_record(name=3), "the name of a tensor is 3"),
    "another key": (set_record(payload_key="x"), "has the payload_key 'x', which is not its name"),
    "a path": (set_record(payload_file="../x.safetensors"), "which is not the name of a safetensors file"),
    "another checksum": (set_record(checksum_algorithm="sha256"), "checksum_algorithm is 'sha256', .*not supported"),
    "no checksum": (set_record(checksum=None), "the checksum of tensor '.*' is None"),
    "a wrong checksum": (set_record(checksum="0" * 32), "in version 2, expected checksum 0000"),
    "an unlisted tensor": (
        lambda _, last: change(last, lambda manifest: manifest["tensors"].pop()),
        "manifest.json does not list the tensor",
    ),
    "a missing tensor": (
        lambda _, last: change(
            last, lambda manifest: manifest["tensors"].append(manifest["tensors"][0] | dict(name="x", payload_key="x"))
        ),
        "delta-00000002 lacks x, which manifest.json lists",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_folder_is_refused(tmp_path: Path, fault: str) -> None:
    history = states(count=3)
    first, last = (skyrl.write_delta(tmp_path, v, history[v - 1], history[v]) for v in (1, 2))
    assert_same(read(tmp_path, 2, history[0], Served(0, None)), history[2])
    plant, text = FAULTS[fault]
    plant(first, last)
    refuse(tmp_path, text, history[0], Served(0, None))


def test_a_wrong_base_is_refused(tmp_path: Path) -> None:
    """One worker has other weights of the same version, and one worker serves no complete weights."""
    history = states(count=2)
    skyrl.write_delta(tmp_path, 1, history[0], history[1])
    other = history[0] | {"layers.0.weight": history[0]["layers.0.weight"].flip(0)}
    text = "tensor layers.0.weight: in version 1, expected checksum .*the served weights are not the base"
    refuse(tmp_path, text, other, Served(0, None), version=1)
    refuse(tmp_path, "this worker serves no complete weights, but delta-00000000 cannot be used", version=1)
    refuse(tmp_path, "this worker serves version 7, but delta-00000000", history[0], Served(7, None), version=1)
