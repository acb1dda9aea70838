"""The worker's reader of a chain: tensors that are right to the byte, from slime's folders and from our own, and
refused folders.
"""

from __future__ import annotations

import builtins
import json
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from fake_engine import FakeWeights
from safetensors.torch import load_file, save_file
from weight_sync.deltas.slime import INDEX, State, as_bytes

from trueroll.errors import PushError
from trueroll.weight_sync.deltas import reader as reader_module
from trueroll.weight_sync.deltas.chain import Served
from trueroll.weight_sync.deltas.encoding import ENCODINGS
from trueroll.weight_sync.deltas.places import LocalPlace, Place
from trueroll.weight_sync.deltas.reader import ChainReader
from trueroll.weight_sync.deltas.writer import DELTA_FILE, CheckpointWriter, DeltaWriter, remove_old
from trueroll.weight_sync.payload.manifest import MODEL_FILE, checksum
from trueroll.weight_sync.payload.tensors import DTYPES, raw_bytes
from trueroll.weight_sync.transports.policy import PushPolicy
from weight_sync.deltas import slime

STACK, PARTS = "layers.0.experts.gate_up", ("layers.0.experts.{}.gate.weight", "layers.0.experts.{}.up.weight")
SHAPES = {"embed.weight": (32, 8), "layers.0.weight": (16, 40), STACK: (3, 4, 5), "norm.weight": (24,)}
LAST = 20


def wanted(dtype: str = "bfloat16") -> FakeWeights:
    weights = FakeWeights(SHAPES, dtype, {"head.weight": "embed.weight"}, ["old.bias"], {"norm.weight": "float32"})
    weights.parts = {STACK: PARTS}
    weights.renamed, weights.left_out = {"model.": ""}, ("vision.",)
    return weights


def states(dtype: str = "bfloat16", count: int = LAST + 1, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Return the weights of versions 0, 1, ... From version to version, a few elements of two tensors change."""
    random = torch.Generator().manual_seed(seed)
    model = wanted(dtype)
    now = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    now = {name: tensor.to(DTYPES[model.dtypes.get(name, dtype)]) for name, tensor in now.items()}
    found = [now]
    for version in range(1, count):
        now = {name: tensor.clone() for name, tensor in now.items()}
        for name in (list(SHAPES)[version % 4], "layers.0.weight"):
            now[name].view(-1)[torch.randint(0, now[name].numel(), (5,), generator=random)] = float(version)
        found.append(now)
    return found


def in_parts(state: State) -> dict[str, torch.Tensor]:
    """Return the state with a tensor for each part of the stack, as most checkpoints have it."""
    halves = [(expert, half) for expert in range(3) for half in range(2)]
    parts = {PARTS[h].format(e): state[STACK][e][2 * h : 2 * h + 2].contiguous() for e, h in halves}
    return {name: tensor for name, tensor in state.items() if name != STACK} | parts


def read(
    place: Place | Path, version: int, state: State | None, served: Served | None, model: FakeWeights | None = None
) -> dict[str, torch.Tensor]:
    """Read a version as a worker does that serves `state`."""
    model = model or wanted()
    local = LocalPlace(str(place), PushPolicy()) if isinstance(place, Path) else place
    known = {} if state is None else {name: as_bytes(t) for name, t in [*state.items(), *in_parts(state).items()]}
    found: dict[str, torch.Tensor] = {}
    with closing(ChainReader(local, version, model, served, lambda name: known[name].copy())) as reader:
        for bucket, take in reader.read_unannounced():
            [piece], data = bucket.pieces, take()
            assert piece.checksum == checksum(data.numpy()) and piece.num_bytes == len(data)
            assert piece.name not in found
            found[piece.name] = data.view(DTYPES[model.dtypes.get(piece.name, model.dtype)]).view(piece.shape)
    return found


def opened(place: Path, version: int, push_id: str | None = None) -> ChainReader:
    """Open a chain for a worker that serves no complete weights."""

    def base(name: str) -> np.ndarray:
        raise AssertionError(f"{name} has no base")

    return ChainReader(LocalPlace(str(place), PushPolicy()), version, wanted(), None, base, push_id)


def assert_same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    assert all(np.array_equal(as_bytes(found[name]), as_bytes(expected[name])) for name in expected)


def refuse(place: Path, text: str, state: State | None = None, served: Served | None = None, version: int = 2) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(PushError, match=text):
        read(place, version, state, served)
    assert set(os.listdir("/proc/self/fd")) <= before


def write_own(parent: Path, versions: list[dict[str, torch.Tensor]], full: set[int]) -> None:
    """Write a chain as the trainer does, with full checkpoints of the versions `full`."""
    model = wanted()
    for version, state in enumerate(versions):
        if version in full:
            with closing(CheckpointWriter(parent, f"{version:032x}", version, model)) as checkpoint:
                for name, tensor in state.items():
                    checkpoint.append(name, raw_bytes(tensor.contiguous()))
                checkpoint.finish()
        elif version:
            with closing(DeltaWriter(parent, f"{version:032x}", version, version - 1, f"{version - 1:032x}")) as delta:
                for name, tensor in state.items():
                    delta.add(name, as_bytes(versions[version - 1][name]), as_bytes(tensor))
                delta.finish()


# slime's folders.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_worker_20_versions_behind_is_right_to_the_byte(tmp_path: Path, encoding: str, dtype: str) -> None:
    history = states(dtype)
    for version in range(1, LAST + 1):
        slime.write_delta(tmp_path, version, history[version - 1], history[version], encoding)
    assert_same(read(tmp_path, LAST, history[0], Served(0, None), wanted(dtype)), history[LAST])
    assert_same(read(tmp_path, LAST, history[13], Served(13, "a" * 32), wanted(dtype)), history[LAST])


@pytest.mark.parametrize("num_files", [1, 3])
def test_a_full_checkpoint_restarts_the_chain(tmp_path: Path, num_files: int) -> None:
    history = states(count=6)
    slime.write_full(tmp_path, 3, history[3], num_files)
    for version in (4, 5):
        slime.write_delta(tmp_path, version, history[version - 1], history[version], num_files=num_files)
    assert_same(read(tmp_path, 5, None, None), history[5])
    assert_same(read(tmp_path, 3, None, None), history[3])
    assert_same(read(tmp_path, 5, history[4], Served(4, None)), history[5])


@pytest.mark.parametrize("name", slime.CHECKSUMS)
def test_every_checksum_of_slime_is_read(tmp_path: Path, name: str) -> None:
    old, new = states(count=2)
    slime.write_delta(tmp_path, 1, old, new, checksum=name)
    assert_same(read(tmp_path, 1, old, Served(0, None)), new)
    other = new | {"layers.0.weight": new["layers.0.weight"].flip(0)}
    with pytest.raises(PushError, match=r"tensor layers.0.weight: in version 1, expected checksum"):
        read(tmp_path, 1, other, Served(0, None))


def test_blake3_without_its_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = states(count=2)
    slime.write_delta(tmp_path, 1, old, new, checksum="blake3")
    imported = builtins.__import__

    def without_blake3(name: str, *rest: Any) -> Any:
        if name == "blake3":
            raise ImportError
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_blake3)
    refuse(tmp_path, "needs the package blake3", old, Served(0, None), version=1)


def test_a_delta_without_changes_has_no_files(tmp_path: Path) -> None:
    [state] = states(count=1)
    folder = slime.write_delta(tmp_path, 1, state, state, num_files=0)
    assert [path.name for path in folder.iterdir()] == [INDEX]
    assert_same(read(tmp_path, 1, state, Served(0, None)), state)


def test_experts_come_in_parts(tmp_path: Path) -> None:
    """Deltas to parts change the stack that the worker serves. Without such deltas, the stack is staged whole."""
    history = states(count=4)
    parts = [in_parts(state) for state in history]
    assert not torch.equal(history[1][STACK], history[2][STACK]), "premise: the experts change"
    slime.write_delta(tmp_path, 2, parts[1], parts[2])
    slime.write_delta(tmp_path, 3, parts[2], parts[3])
    assert_same(read(tmp_path, 3, history[1], Served(1, None)), parts[3])
    assert torch.equal(history[2][STACK], history[3][STACK]), "premise: the experts do not change"
    assert_same(read(tmp_path, 3, history[2], Served(2, None)), history[3])
    slime.write_full(tmp_path, 1, parts[1])
    assert_same(read(tmp_path, 3, None, None), parts[3])


def test_a_stack_that_is_named_in_two_ways_is_refused(tmp_path: Path) -> None:
    history = states(count=8)
    slime.write_delta(tmp_path, 2, history[1], history[2])
    slime.write_delta(tmp_path, 3, in_parts(history[5]), in_parts(history[6]))
    refuse(tmp_path, f"tensor {STACK}: the chain has deltas to it and to its parts", history[1], Served(1, None), 3)
    slime.write_full(tmp_path, 1, history[1])
    refuse(tmp_path, "the chain has a delta to it, but its full checkpoint lacks it", None, None, 3)


def test_names_of_the_checkpoint_become_those_of_the_worker(tmp_path: Path) -> None:
    """Tied tensors are compared, and tensors that the worker does not use are skipped, whatever their dtype."""
    old, new = states(count=2)
    new |= {"embed.weight": new["embed.weight"] + 1}

    def spelled(state: State) -> dict[str, torch.Tensor]:
        extra = {"vision.tower": torch.ones(3, dtype=torch.int64), "old.bias": torch.ones(2, dtype=torch.float64)}
        return (
            {f"model.{name}": t for name, t in state.items()} | extra | {"head.weight": state["embed.weight"].clone()}
        )

    slime.write_full(tmp_path, 1, spelled(old))
    slime.write_delta(tmp_path, 2, spelled(old), spelled(new) | {"old.bias": torch.zeros(2, dtype=torch.float64)})
    assert_same(read(tmp_path, 2, None, None), new)
    assert_same(read(tmp_path, 2, old, Served(1, None)), new)
    shutil.rmtree(tmp_path / "weight_v000002")
    slime.write_delta(tmp_path, 2, spelled(old), spelled(new) | {"head.weight": old["embed.weight"] - 1})
    for state, served in ((None, None), (old, Served(1, None))):
        refuse(tmp_path, "tensor head.weight: differs from embed.weight, but the worker ties", state, served)


# Our own folders.


def test_slime_reads_our_folders(tmp_path: Path) -> None:
    history = states(count=4)
    write_own(tmp_path, history, {1})
    checkpoint = load_file(tmp_path / "weight_v000001" / MODEL_FILE)
    assert_same(checkpoint, history[1])
    assert "delta_encoding" not in json.loads((tmp_path / "weight_v000001" / INDEX).read_text())["metadata"]
    state = {name: as_bytes(tensor) for name, tensor in checkpoint.items()}
    for version in (2, 3):
        slime.apply_delta(tmp_path / f"weight_v{version:06d}", state)
        assert all(np.array_equal(state[name], as_bytes(history[version][name])) for name in SHAPES)


def test_only_the_very_push_is_the_base_of_our_deltas(tmp_path: Path) -> None:
    history = states(count=4)
    write_own(tmp_path, history, {1})
    assert_same(read(tmp_path, 3, None, Served(2, "f" * 32)), history[3])  # from the full checkpoint
    assert_same(read(tmp_path, 3, history[2], Served(2, f"{2:032x}")), history[3])
    shutil.rmtree(tmp_path / "weight_v000001")
    assert_same(read(tmp_path, 3, history[2], Served(2, f"{2:032x}")), history[3])
    refuse(tmp_path, "weight_v000001 cannot be used", history[2], Served(2, "f" * 32), 3)


def test_a_delta_is_not_applied_to_another_push_of_its_base(tmp_path: Path) -> None:
    """After a restart, a trainer writes version 1 again, but ends before it removes the later versions. The delta names
    only the tensors that differ between the first version 1 and version 2, so checksums do not tell the difference.
    """
    history = states(count=3)
    write_own(tmp_path, history, {1})
    changed = {name for name in SHAPES if not torch.equal(history[1][name], history[2][name])}
    other = {name: t if name in changed else torch.zeros_like(t) for name, t in history[1].items()}
    with closing(CheckpointWriter(tmp_path, "e" * 32, 1, wanted())) as checkpoint:
        for name, tensor in other.items():
            checkpoint.append(name, raw_bytes(tensor.contiguous()))
        checkpoint.finish()
    assert_same(read(tmp_path, 1, None, None), other)
    refuse(tmp_path, f"weight_v000001 holds push {'e' * 32}, but push {1:032x} is needed", version=2)
    assert_same(read(tmp_path, 2, history[1], Served(1, f"{1:032x}")), history[2])


def test_only_the_announced_push_is_read(tmp_path: Path) -> None:
    history = states(count=3)
    write_own(tmp_path, history, {1})
    with pytest.raises(PushError, match=f"weight_v000002 holds push {2:032x}, but push {'e' * 32} is needed"):
        opened(tmp_path, 2, "e" * 32)
    opened(tmp_path, 2, f"{2:032x}").close()


def test_a_folder_that_is_replaced_while_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = states(count=2)
    write_own(tmp_path, [first], {0})
    (tmp_path / "new").mkdir()
    with closing(CheckpointWriter(tmp_path / "new", "e" * 32, 0, wanted())) as checkpoint:
        for name, tensor in second.items():
            checkpoint.append(name, raw_bytes(tensor.contiguous()))
        folder, open_files = checkpoint.finish(), PushPolicy.open_files

    def replacing(policy: PushPolicy, *args: Any) -> Any:
        if folder.exists():  # after the index of the old folder was read
            shutil.rmtree(tmp_path / folder.name)
            folder.rename(tmp_path / folder.name)
        return open_files(policy, *args)

    monkeypatch.setattr(PushPolicy, "open_files", replacing)
    refuse(tmp_path, "weight_v000000 was replaced while it was opened", version=0)


@pytest.mark.parametrize("share", [1e-4, 0.02, 0.6])
def test_our_folders_have_at_most_the_bytes_of_slime(tmp_path: Path, share: float) -> None:
    """slime counts the safetensors files. Either of its encodings may be set."""
    random = torch.Generator().manual_seed(0)
    old = {f"layers.{number}.weight": torch.randn(256, 257, generator=random).bfloat16() for number in range(4)}
    masks = {name: torch.rand(tensor.shape, generator=random) < share for name, tensor in old.items()}
    new = {name: torch.where(masks[name], tensor * 1.01, tensor) for name, tensor in old.items()}
    with closing(DeltaWriter(tmp_path / "ours", "a" * 32, 2, 1, "b" * 32)) as writer:
        for name in old:
            writer.add(name, as_bytes(old[name]), as_bytes(new[name]))
        folder = writer.finish()
    for encoding in ENCODINGS:
        theirs = slime.write_delta(tmp_path / encoding, 2, old, new, encoding)
        assert (folder / DELTA_FILE).stat().st_size <= (theirs / "model-00000-of-00001.safetensors").stat().st_size


def test_folders_that_no_worker_needs_are_removed(tmp_path: Path) -> None:
    history = states(count=12)
    write_own(tmp_path, history, {1, 4, 7, 10})
    shutil.rmtree(tmp_path / "weight_v000002")
    slime.write_delta(tmp_path, 2, history[1], history[2])  # of another program
    for name in ("weight_v000003-01234567.tmp", "notes", "weight_v12"):
        (tmp_path / name).mkdir()
    remove_old(tmp_path, 10)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["notes", "weight_v000002", *(f"weight_v{version:06d}" for version in (7, 8, 9, 10)), "weight_v12"]


def test_a_folder_of_another_program_is_not_replaced(tmp_path: Path) -> None:
    [state] = states(count=1)
    slime.write_full(tmp_path, 0, state)
    with pytest.raises(PushError, match=r"weight_v000000 exists, and trueroll did not write it; use an empty folder"):
        write_own(tmp_path, [state], {0})
    assert [path.name for path in tmp_path.iterdir()] == ["weight_v000000"]


def test_a_folder_of_a_trainer_that_ended_is_replaced(tmp_path: Path) -> None:
    first, second = states(count=2)
    write_own(tmp_path, [first], {0})
    write_own(tmp_path, [second], {0})
    assert_same(read(tmp_path, 0, None, None), second)


# Refused folders. The chain is a full checkpoint, version 1, and a delta, version 2.


def change_bytes(path: Path, change: Callable[[bytearray], Any]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def flip(path: Path, offset: int) -> None:
    change_bytes(path, lambda data: data.__setitem__(offset, data[offset] ^ 4))


def change_index(folder: Path, change: Callable[[Any], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def change_frame(folder: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the delta of layers.0.weight, in a file with the right lengths."""
    path = folder / DELTA_FILE
    tensors = load_file(path)
    blob = path.read_bytes()
    metadata = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])["__metadata__"]
    frame = change(tensors["layers.0.weight"].numpy().tobytes())
    tensors["layers.0.weight"] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    save_file(tensors, path, metadata=metadata)


def without_checksum(folder: Path) -> None:
    save_file(load_file(folder / DELTA_FILE), folder / DELTA_FILE)


BOMB = zstandard.ZstdCompressor(level=1).compress(bytes(2**25))
FAULTS: dict[str, tuple[str, Callable[[Path, Path], Any], str]] = {
    "no folder": ("delta", lambda _, delta: shutil.rmtree(delta), "cannot read a push from .*weight_v000002"),
    "no base": (
        "full",
        lambda full, _: shutil.rmtree(full),
        "weight_v000002 is a delta to version 1, .*cannot be used",
    ),
    "no index": ("delta", lambda _, delta: (delta / INDEX).unlink(), "cannot read a push from .*weight_v000002"),
    "no file": ("delta", lambda _, delta: (delta / DELTA_FILE).unlink(), "cannot read a push from .*weight_v000002"),
    "no checkpoint": ("full", lambda full, _: (full / MODEL_FILE).unlink(), "cannot read a push from .*weight_v000001"),
    "a FIFO": (
        "delta",
        lambda _, delta: ((delta / DELTA_FILE).unlink(), os.mkfifo(delta / DELTA_FILE)),
        "cannot read a push from",
    ),
    "a version twice": (
        "delta",
        lambda _, delta: change_index(delta, lambda index: index["metadata"].update(version="000001")),
        "it describes version 1, so this version is there twice",
    ),
    "a cycle": (
        "full",
        lambda full, delta: (shutil.rmtree(full), shutil.copytree(delta, full)),
        "weight_v000001 cannot be used: .*it describes version 2",
    ),
    "a flipped bit in the header": (
        "delta",
        lambda _, delta: flip(delta / DELTA_FILE, 3),
        "is not a whole safetensors",
    ),
    "a flipped bit in a delta": ("delta", lambda _, delta: flip(delta / DELTA_FILE, -9), "tensor .*: "),
    "a flipped bit in a checkpoint": ("full", lambda full, _: flip(full / MODEL_FILE, -1), "expected checksum"),
    "a file that grows": (
        "delta",
        lambda _, delta: change_bytes(delta / DELTA_FILE, lambda data: data.extend(b"more")),
        "bytes after its header, but its tensors take",
    ),
    "a file that is still written": (
        "full",
        lambda full, _: change_bytes(full / MODEL_FILE, lambda data: data.__delitem__(slice(-40, None))),
        "bytes after its header, but its tensors take",
    ),
    "a cut frame": (
        "delta",
        lambda _, d: change_frame(d, lambda frame: frame[:-8]),
        "weight_v000002: the delta is cut",
    ),
    "a bomb": ("delta", lambda _, d: change_frame(d, lambda _: BOMB), "weight_v000002: the delta is longer than"),
    "a long delta": (
        "delta",
        lambda _, d: change_frame(d, lambda _: bytes(9000)),
        r"its delta in weight_v000002 has 9000 bytes \(limit 8704\)",
    ),
    "no checksum": ("delta", lambda _, delta: without_checksum(delta), "weight_v000002 has no checksum for it"),
    "another shape": (
        "full",
        lambda full, _: save_file({"norm.weight": torch.ones(23)}, full / MODEL_FILE),
        r"tensor norm.weight: has shape \[23\] in weight_v000001, expected \[24\]",
    ),
    "another dtype": (
        "full",
        lambda full, _: save_file({"norm.weight": torch.ones(24).half()}, full / MODEL_FILE),
        "but its dtype must be float32",
    ),
    "an unknown tensor": (
        "full",
        lambda full, _: (
            save_file({"other.weight": torch.ones(24).bfloat16()}, full / MODEL_FILE),
            change_index(full, lambda index: index.update(weight_map={"other.weight": MODEL_FILE})),
        ),
        "tensor other.weight: unknown to the worker's model",
    ),
    "a file that is not listed": (
        "delta",
        lambda _, delta: change_index(delta, lambda index: index["weight_map"].pop("layers.0.weight")),
        "does not list the tensor layers.0.weight of",
    ),
    "a tensor that is not there": (
        "delta",
        lambda _, delta: change_index(delta, lambda index: index["weight_map"].update(norm=DELTA_FILE)),
        "weight_v000002 lacks norm, which model.safetensors.index.json lists",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_folder_is_refused(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    history = states(count=3)
    write_own(tmp_path, history, {1})
    assert_same(read(tmp_path, 2, None, None), history[2])
    changed, spoil, text = FAULTS[name]
    spoil(tmp_path / "weight_v000001", tmp_path / "weight_v000002")
    with caplog.at_level(logging.ERROR):
        refuse(tmp_path, text)
    if changed == "full":  # a worker that serves version 1 does not need the folder
        assert_same(read(tmp_path, 2, history[1], Served(1, f"{1:032x}")), history[2])


def test_the_wrong_base_is_named(tmp_path: Path) -> None:
    """slime's deltas have no ids, so only the checksum tells that the served version 1 is another one."""
    history, other = states(count=3), states(count=2, seed=9)
    slime.write_delta(tmp_path, 2, history[1], history[2])
    refuse(tmp_path, "are not the base of this chain, .*push the whole weights once", other[1], Served(1, None))


def test_a_delta_is_not_applied_twice(tmp_path: Path) -> None:
    history = states(count=3)
    slime.write_delta(tmp_path, 2, history[1], history[2])
    refuse(tmp_path, "tensor .*: in version 2, expected checksum", history[2], Served(1, None))


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    history = states(count=3)
    write_own(tmp_path, history, {1})
    with closing(opened(tmp_path, 2)) as reader:
        os.truncate(tmp_path / "weight_v000001" / MODEL_FILE, 600)
        with pytest.raises(PushError, match="was cut short while it was read"):
            list(reader.read_unannounced())


def test_a_folder_that_is_removed_while_it_is_read_stays_readable(tmp_path: Path) -> None:
    history = states(count=3)
    write_own(tmp_path, history, {1})
    with closing(opened(tmp_path, 2)) as reader:
        shutil.rmtree(tmp_path)
        found = {bucket.pieces[0].name: take() for bucket, take in reader.read_unannounced()}
    assert_same(found, {name: torch.from_numpy(as_bytes(tensor)) for name, tensor in history[2].items()})


def test_the_number_of_open_files_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "MOST_FILES", 3)
    history = states(count=5)
    for version in range(1, 5):
        slime.write_delta(tmp_path, version, history[version - 1], history[version])
    assert_same(read(tmp_path, 3, history[0], Served(0, None)), history[3])
    refuse(tmp_path, "more than 3 files lead to this version", history[0], Served(0, None), 4)


def test_an_index_has_a_limit(tmp_path: Path) -> None:
    history = states(count=3)
    write_own(tmp_path, history, {1})
    with open(tmp_path / "weight_v000002" / INDEX, "a") as file:
        file.write(" " * 2**20)
    refuse(tmp_path, r"has \d+ bytes \(limit \d+\); check that it is of this model")
