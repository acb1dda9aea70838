"""Folders of pushes by disk: which folders a worker reads, and how the worker refuses invalid files."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engine import SHAPES, FakeEngine
from machines import NOBODY, give_away, without_rights_of_root
from pushing import ask
from safetensors.torch import load_file
from serving import RawClient, serving

from trueroll.errors import PushError
from trueroll.weight_sync.payload import tensor_file as tensor_file_module
from trueroll.weight_sync.payload.manifest import MANIFEST_FILE, MAX_NAME_CHARS, MODEL_FILE, DiskSource, checksum
from trueroll.weight_sync.payload.tensors import raw_bytes
from trueroll.weight_sync.transports.disk import FolderReader, FolderWriter, read_manifest
from trueroll.weight_sync.transports.policy import PushPolicy

PUSH_ID = "0123456789abcdef" * 2
TENSORS = {"a": torch.arange(6.0).view(3, 2), "b": torch.ones(5), "c": torch.full((2, 1, 3), 7.0)}


def write_folder(parent: Path, tensors: Mapping[str, torch.Tensor] = TENSORS) -> Path:
    """Write the folder of a push of float32 tensors, as the trainer does."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with closing(FolderWriter(parent, PUSH_ID, 7, "float32", shapes)) as writer:
        for name, tensor in tensors.items():
            writer.append(name, raw_bytes(tensor))
        return writer.finish()


def open_reader(folder: Path | str, root: Path | str | None = None, num_tensors: int = len(TENSORS)) -> FolderReader:
    policy = PushPolicy(folder=None if root is None else str(root))
    return FolderReader(DiskSource(folder=str(folder)), PUSH_ID, 7, "float32", num_tensors, policy)


def read_all(
    folder: Path | str, root: Path | str | None = None, num_tensors: int = len(TENSORS)
) -> dict[str, torch.Tensor]:
    with closing(open_reader(folder, root, num_tensors)) as reader:
        found = {}
        for bucket, read in reader.read_unannounced():
            data = read()
            [piece] = bucket.pieces
            assert piece.checksum == checksum(data.numpy())
            found[piece.name] = data.clone().view(torch.float32).view(piece.shape)
        return found


def test_a_tensor_has_its_own_dtype(tmp_path: Path) -> None:
    shapes, own = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}, {"b": "float32"}
    with closing(FolderWriter(tmp_path, PUSH_ID, 7, "bfloat16", shapes, own)) as writer:
        for name, tensor in TENSORS.items():
            writer.append(name, raw_bytes(tensor if name == "b" else tensor.bfloat16()))
        folder = writer.finish()
    found = load_file(folder / MODEL_FILE)
    assert {name: tensor.dtype for name, tensor in found.items()} == dict.fromkeys("ac", torch.bfloat16) | {
        "b": torch.float32
    }
    assert all(found[name].float().equal(tensor) for name, tensor in TENSORS.items())
    source, policy = DiskSource(folder=str(folder)), PushPolicy(folder=None)
    FolderReader(source, PUSH_ID, 7, "bfloat16", 3, policy, own).close()
    with pytest.raises(PushError, match=r"tensor b has F32 \[5\] at .*, but its dtype must be bfloat16"):
        FolderReader(source, PUSH_ID, 7, "bfloat16", 3, policy)


def assert_whole(found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "pushes")


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def open_files() -> set[str]:
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return {os.readlink(link) for link in links if link.is_symlink()}


@pytest.mark.parametrize(("mask", "modes"), [(0o002, (0o755, 0o644)), (0o022, (0o755, 0o644)), (0o077, (0o700, 0o600))])
def test_a_folder_is_read_by_the_user_that_wrote_it(tmp_path: Path, mask: int, modes: tuple[int, int]) -> None:
    with umask(mask):
        folder = write_folder(tmp_path / "pushes")
    paths = folder, folder / MODEL_FILE, folder / MANIFEST_FILE
    assert [path.stat().st_mode & 0o777 for path in paths] == [modes[0], modes[1], modes[1]]
    assert_whole(read_all(folder))


def test_a_reader_holds_its_files_until_it_is_closed(folder: Path) -> None:
    reader = open_reader(folder)
    assert str(folder / MODEL_FILE) in open_files()
    reader.close()
    reader.close()
    assert not any(path.startswith(str(folder)) for path in open_files())


def test_the_header_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header is read once for any number of tensors. One read per tensor would take quadratic time."""
    tensors = {f"layers.{number}.weight": torch.full((1,), float(number)) for number in range(9000)}
    folder = write_folder(tmp_path, tensors)
    parsed: list[int] = []

    def loads(text: str, **settings: Any) -> Any:
        parsed.append(len(text))
        return json.loads(text, **settings)

    monkeypatch.setattr(tensor_file_module, "json", SimpleNamespace(loads=loads))
    found = read_all(folder, num_tensors=len(tensors))
    assert len(parsed) == 1
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


# The folders that are read.


def replace(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


def move_and_link(path: Path) -> None:
    moved = path.rename(path.with_name("moved"))
    path.symlink_to(moved)


def loop(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.symlink_to(folder)


def to_file(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.write_text("")


PATH_FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda folder: folder.rename(folder.with_name("moved")), "No such file"),
    "a file as folder": (to_file, "Not a directory"),
    "a loop of links": (loop, "symbolic links"),
    "no model": (lambda folder: (folder / MODEL_FILE).unlink(), "No such file"),
    "no manifest": (lambda folder: (folder / MANIFEST_FILE).unlink(), "No such file"),
    "a folder as model": (lambda folder: replace(folder / MODEL_FILE, Path.mkdir), "Is a directory"),
    "a FIFO as model": (lambda folder: replace(folder / MODEL_FILE, os.mkfifo), f"{MODEL_FILE} is not a regular file"),
    "a FIFO as manifest": (
        lambda folder: replace(folder / MANIFEST_FILE, os.mkfifo),
        f"{MANIFEST_FILE} is not a regular file",
    ),
    "a link as model": (lambda folder: move_and_link(folder / MODEL_FILE), "symbolic links"),
    "a link as manifest": (lambda folder: move_and_link(folder / MANIFEST_FILE), "symbolic links"),
}
OWNER_FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a folder of the group's": (lambda folder: folder.chmod(0o775), "mode 0775"),
    "a folder of everybody's": (lambda folder: folder.chmod(0o757), "mode 0757"),
    "a model of the group's": (lambda folder: (folder / MODEL_FILE).chmod(0o664), f"{MODEL_FILE} has mode 0664"),
    "a manifest of everybody's": (lambda folder: (folder / MANIFEST_FILE).chmod(0o646), "mode 0646"),
}
# Files of another user.
FOREIGN_FAULTS = {
    "another user's folder": (".", f"the folder belongs to uid {NOBODY}"),
    "another user's model": (MODEL_FILE, f"{MODEL_FILE} belongs to uid {NOBODY}"),
    "another user's manifest": (MANIFEST_FILE, f"{MANIFEST_FILE} belongs to uid {NOBODY}"),
}


def assert_refused(caplog: pytest.LogCaptureFixture, folder: Path | str, root: Path | str | None, cause: str) -> None:
    """Assert that the error's text hides the cause, that the log has the cause, and that no file stays open."""
    expected = (
        f"disk: cannot read a push from {folder}. If the worker has --push-folder, use a folder inside that folder. "
        f"Without --push-folder, the folder and its files must belong to the worker's user (uid {os.geteuid()}), and "
        "no other user may write them. The worker's log has the cause"
    )
    before = open_files()
    with caplog.at_level(logging.WARNING), pytest.raises(PushError, match=f"^{re.escape(expected)}$"):
        open_reader(folder, root)
    assert open_files() <= before
    assert cause in caplog.text


@pytest.mark.parametrize(
    ("name", "has_root"),
    [
        *((name, has_root) for name in PATH_FAULTS for has_root in (False, True)),
        *((name, False) for name in OWNER_FAULTS),
    ],
)
def test_every_fault_of_a_path_gives_the_same_text(
    folder: Path, caplog: pytest.LogCaptureFixture, name: str, has_root: bool
) -> None:
    root = folder.parent if has_root else None
    assert_whole(read_all(folder, root))
    spoil, cause = (PATH_FAULTS | OWNER_FAULTS)[name]
    spoil(folder)
    assert_refused(caplog, folder, root, cause)


@pytest.mark.parametrize("name", FOREIGN_FAULTS)
def test_files_of_another_user_give_the_same_text(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert_whole(read_all(folder))
    part, cause = FOREIGN_FAULTS[name]
    give_away(folder / part, monkeypatch)
    assert_refused(caplog, folder, None, cause)


def test_a_folder_without_permission_gives_the_same_text(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / MODEL_FILE).chmod(0)
    with without_rights_of_root():
        assert_refused(caplog, folder, None, "Permission denied")


@pytest.mark.parametrize("path", ["\0", "", "/" + "a" * 300, "/proc/self/fd"])
def test_an_invalid_path_gives_the_same_text(caplog: pytest.LogCaptureFixture, path: str) -> None:
    assert_refused(caplog, path, None, "refused")


def test_a_worker_of_another_user_does_not_read_the_folder(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert_refused(caplog, folder, None, f"the folder belongs to uid {uid}")
    assert_whole(read_all(folder, folder.parent))


@pytest.mark.parametrize("name", [*OWNER_FAULTS, *FOREIGN_FAULTS])
def test_inside_the_push_folder_pushes_of_any_user_are_read(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in OWNER_FAULTS:
        OWNER_FAULTS[name][0](folder)
    else:
        give_away(folder / FOREIGN_FAULTS[name][0], monkeypatch)
    assert_whole(read_all(folder, folder.parent))


def test_links_and_dots_that_stay_inside_the_push_folder_are_followed(folder: Path, tmp_path: Path) -> None:
    root = folder.parent
    (root / "here").symlink_to(folder)
    (tmp_path / "root").symlink_to(root)
    (tmp_path / "way").symlink_to(folder)
    for path in (folder, root / "here", f"{root}/../{root.name}/{folder.name}", tmp_path / "way"):
        assert_whole(read_all(path, root))
        assert_whole(read_all(path, tmp_path / "root"))


@pytest.mark.parametrize("way", ["beside", "dots", "link", "prefix"])
def test_a_folder_outside_the_push_folder_is_refused(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    root = tmp_path / "push"
    root.mkdir()
    (root / "link").symlink_to(folder)
    path = {"beside": folder, "dots": f"{root}/../pushes/{folder.name}", "link": root / "link", "prefix": folder}[way]
    assert_whole(read_all(path, tmp_path))
    assert_refused(caplog, path, root, "is not in the subpath of")


def test_a_missing_push_folder_contains_no_push(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert_refused(caplog, folder, tmp_path / "none", "No such file")


@pytest.mark.parametrize("depth", ["itself", "above"])
def test_a_folder_that_is_replaced_by_a_link_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, depth: str
) -> None:
    """The folder is replaced after its path was resolved and found to be inside the push folder."""
    root = tmp_path / "root"
    folder = write_folder(root / "job")
    outside = write_folder(tmp_path / "outside")
    exchanged, target = (folder, outside) if depth == "itself" else (folder.parent, outside.parent)
    realpath = os.path.realpath

    def resolve_and_exchange(path: Any, **settings: Any) -> str:
        resolved = realpath(path, **settings)
        if resolved == str(folder) and not exchanged.is_symlink():
            exchanged.rename(tmp_path / "moved")
            exchanged.symlink_to(target)
        return resolved

    monkeypatch.setattr(os.path, "realpath", resolve_and_exchange)
    assert_refused(caplog, folder, root, "Not a directory")
    assert exchanged.is_symlink()


def begin_push(client: RawClient, folder: Path) -> dict[str, Any]:
    source = {"kind": "disk", "folder": str(folder)}
    fields = {"push_id": PUSH_ID, "weight_version": 7, "dtype": "float32", "timeout": 20.0}
    return ask(client, "begin_push", source=source, **fields)


def test_a_worker_reads_pushes_inside_its_push_folder(folder: Path, tmp_path: Path) -> None:
    outside = write_folder(tmp_path / "elsewhere")
    folder.chmod(0o775)
    with serving(FakeEngine(), push_folder=str(folder.parent)) as running, RawClient(running.address) as client:
        reply = begin_push(client, outside)
        assert reply["code"] == "push_failed" and "the worker has --push-folder" in reply["message"]
        assert begin_push(client, folder)["phase"] == "begun"


@pytest.mark.parametrize("name", [MODEL_FILE, MANIFEST_FILE])
def test_a_fifo_does_not_block_a_worker(tmp_path: Path, name: str) -> None:
    """Opening a FIFO for reading would block, because there is no writer."""
    folder = write_folder(tmp_path / "pushes", {name: torch.ones(shape) for name, shape in SHAPES.items()})
    replace(folder / name, os.mkfifo)
    with serving(FakeEngine()) as running, RawClient(running.address) as client:
        reply = begin_push(client, folder)
        if reply["type"] != "error":  # the size of the file is checked only when the file is read
            reply = ask(client, "verify_push", push_id=PUSH_ID, num_buckets=0)
        assert (reply["type"], reply["code"]) == ("error", "push_failed")
        assert "cannot read a push from" in reply["message"]
        assert client.health()["state"] == "ready"


def test_a_trainer_gets_the_cause_for_its_own_folder(folder: Path) -> None:
    assert read_manifest(folder).push_id == PUSH_ID
    replace(folder / MANIFEST_FILE, os.mkfifo)
    with pytest.raises(PushError, match=f"there is no file {re.escape(str(folder / MANIFEST_FILE))}; give"):
        read_manifest(folder)


# The content of the files.


def entry(start: int, end: int, **changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end], **changes}


def file_of(header: Any, num_bytes: int = 8) -> bytes:
    """Return a safetensors file with `num_bytes` bytes after the header. `header`: bytes, or a value to be encoded."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_bytes)


WRONG_FILES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "0 bytes"),
    "half a length": (b"\1\0\0", "3 bytes"),
    "a header that ends behind the file": (file_of({"a": entry(0, 8)})[:20], "has 20 bytes, but its header ends at"),
    "a length of 2**64": (b"\xff" * 8 + bytes(8), "its header has 18446744073709551615 bytes (limit 68608)"),
    "no JSON": (file_of(b"{"), "cannot be read"),
    "no UTF-8": (file_of(b'{"\xff": 1}'), "cannot be read"),
    "deep lists": (file_of(b"[" * 10**4), "cannot be read (maximum recursion depth"),
    "deep maps": (file_of(b'{"a":' * 10**4 + b"1" + b"}" * 10**4), "cannot be read (maximum recursion depth"),
    "a number of 5000 digits": (file_of(b'{"a": ' + b"9" * 5000 + b"}"), "cannot be read"),
    "a list": (file_of([]), "not a JSON map"),
    "a tensor that is a number": (file_of({"a": 1}), "not a map of dtype"),
    "a name twice": (file_of(b'{"a": %b, "a": %b}' % (2 * (json.dumps(entry(0, 8)).encode(),))), "appears twice"),
    "no dtype": (file_of({"a": {"shape": [2], "data_offsets": [0, 8]}}), "tensor 'a' is not a map of dtype"),
    "more about a tensor": (file_of({"a": entry(0, 8, strides=[1])}), "tensor 'a' is not a map of dtype"),
    "a key that is no text": (file_of(b'{"a": {"\\ud800": 1}}'), "tensor 'a' is not a map of dtype"),
    "a name that is no text": (file_of(b'{"\\ud800": %b}' % json.dumps(entry(0, 8)).encode()), "'name'"),
    "a long name": (file_of({"a" * 513: entry(0, 8)}), "'name'"),
    "an unknown dtype": (
        file_of({"a": entry(0, 8, dtype="F31")}),
        "has F31 [2] at [0, 8], but its dtype must be float32",
    ),
    "another dtype": (file_of({"a": entry(0, 8, dtype="BF16", shape=[4])}), "but its dtype must be float32"),
    "a scalar": (file_of({"a": entry(0, 4, shape=[])}, 4), "'shape'"),
    "nine dimensions": (file_of({"a": entry(0, 4, shape=[1] * 9)}, 4), "'shape'"),
    "true in a shape": (file_of({"a": entry(0, 8, shape=[2, True])}), "'shape.1'"),
    "a broken number in a shape": (file_of({"a": entry(0, 8, shape=[2.0])}), "'shape.0'"),
    "a negative shape": (file_of({"a": entry(0, 8, shape=[-1, -2])}), "'shape.0'"),
    "a huge shape": (file_of({"a": entry(0, 8, shape=[2**62, 2**62])}), "but its shape takes"),
    "another shape": (file_of({"a": entry(0, 8, shape=[3])}), "but its shape takes 12 bytes"),
    "negative offsets": (file_of({"a": entry(-8, 0)}), "'data_offsets.0'"),
    "offsets backwards": (file_of({"a": entry(8, 0)}), "'shape.0'"),
    "an end before the start": (
        file_of({"z": entry(0, 8), "a": entry(8, 0, shape=[0])}),
        "but its shape takes 0 bytes",
    ),
    "offsets beyond 63 bits": (file_of({"a": entry(0, 2**64, shape=[2])}), "'data_offsets.1'"),
    "offsets behind the end": (file_of({"a": entry(0, 2**62)}), "8 bytes after its header"),
    "three offsets": (file_of({"a": entry(0, 8, data_offsets=[0, 4, 8])}), "'data_offsets'"),
    "a gap at the beginning": (file_of({"a": entry(4, 8)}), "but the tensor before it ends at 0"),
    "a gap": (file_of({"a": entry(0, 4), "b": entry(8, 12)}, 12), "but the tensor before it ends at 4"),
    "an overlap": (file_of({"a": entry(0, 8), "b": entry(4, 12)}, 12), "but the tensor before it ends at 8"),
    "the same bytes twice": (file_of({"a": entry(0, 8), "b": entry(0, 8)}), "but the tensor before it ends at 8"),
    "a cut end": (file_of({"a": entry(0, 8)}, 7), "7 bytes after its header, but its tensors take 8"),
    "more at the end": (file_of({"a": entry(0, 8)}, 9), "9 bytes after its header, but its tensors take 8"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_wrong_file_is_refused(folder: Path, name: str) -> None:
    content, words = WRONG_FILES[name]
    (folder / MODEL_FILE).write_bytes(content)
    with pytest.raises(PushError, match=f"is not a whole safetensors file: .*{re.escape(words)}") as caught:
        open_reader(folder)
    assert len(str(caught.value).encode()) < 1500  # the text is short enough to be sent


def test_a_header_above_the_limit_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, into, at: sizes.append(len(into[0])) or preadv(file, into, at))
    (folder / MODEL_FILE).write_bytes(file_of(b" " * 2**20))
    with pytest.raises(PushError, match=r"its header has 1048576 bytes \(limit 68608\); write"):
        open_reader(folder)
    assert sizes == [8]


def test_padding_metadata_and_empty_tensors_are_accepted(folder: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "b": entry(8, 28), "c": entry(8, 8), "a": entry(0, 8, shape=[2, 1])}
    (folder / MODEL_FILE).write_bytes(file_of(json.dumps(header).encode() + b"   ", 28))
    with closing(open_reader(folder)) as reader:
        found = [(*bucket.pieces, len(read())) for bucket, read in reader.read_unannounced()]
    assert [(piece.name, piece.shape, size) for piece, size in found] == [
        ("a", (2, 1), 8),
        ("c", (0,), 0),
        ("b", (5,), 20),
    ]


def test_a_tensor_without_checksum_is_refused(folder: Path) -> None:
    (folder / MODEL_FILE).write_bytes(file_of({"d": entry(0, 8)}))
    with closing(open_reader(folder)) as reader, pytest.raises(PushError, match=f"d: {MANIFEST_FILE} has no checksum"):
        next(reader.read_unannounced())


def test_a_tensor_larger_than_the_workers_own_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "pushes", {name: torch.ones(shape) for name, shape in SHAPES.items()})
    (folder / MODEL_FILE).write_bytes(file_of({"a": entry(0, 2**40)}, 0))
    os.truncate(folder / MODEL_FILE, (folder / MODEL_FILE).stat().st_size + 2**40)  # the file is sparse
    with serving(FakeEngine()) as running, RawClient(running.address) as client:
        assert begin_push(client, folder)["phase"] == "begun"
        reply = ask(client, "verify_push", push_id=PUSH_ID, num_buckets=0)
        assert reply["code"] == "push_failed"
        assert f"tensor a: expected shape {list(SHAPES['a'])}, found [{2**38}]" in reply["message"]


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error(folder: Path) -> None:
    """The bytes that were read stay valid. If the file were memory-mapped instead, the mapping would lose its pages and
    an access would kill the process.
    """
    with closing(open_reader(folder)) as reader:
        tensors = reader.read_unannounced()
        bucket, read = next(tensors)
        data = read()
        os.truncate(folder / MODEL_FILE, 0)
        assert bucket.pieces[0].checksum == checksum(data.numpy())
        _, read = next(tensors)
        with pytest.raises(PushError, match="was cut short while it was read .*; write the folder again"):
            read()


def test_a_file_that_cannot_be_read_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    with closing(open_reader(folder)) as reader:
        _, read = next(reader.read_unannounced())
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(PushError, match=f"cannot read .*{MODEL_FILE}: Input/output error"):
            read()


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"\xff", b"[" * 10**4, b'{"checksums":' * 5000, b'{"format": true}', b'{"push_id": "\\ud800"}', b"[]"],
    ids=["nothing", "empty", "no UTF-8", "deep lists", "deep maps", "true", "no text", "a list"],
)
def test_a_wrong_manifest_is_refused(folder: Path, content: bytes) -> None:
    (folder / MANIFEST_FILE).write_bytes(content)
    for read in (open_reader, read_manifest):
        with pytest.raises(PushError, match=f"{MANIFEST_FILE} is not a manifest: ") as caught:
            read(folder)
        assert len(str(caught.value).encode()) < 1000


def test_only_the_first_wrong_checksum_is_described(folder: Path) -> None:
    """Describing every one of a very large number of wrong checksums would take seconds and gigabytes."""
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest | {"checksums": {"a": 1, "b": True, "c": ""}}))
    for read in (open_reader, read_manifest):
        with pytest.raises(
            PushError, match=r"'checksums': .* of 'b' must be an integer in \[0, 2\*\*64\) \(got True\); write"
        ):
            read(folder)


@pytest.mark.parametrize("checksum", [-1, 2**64, 1.0, "1", None, [[1]]])
def test_a_checksum_is_a_number_of_64_bits(folder: Path, checksum: Any) -> None:
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest["checksums"]["b"] = checksum
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(PushError, match=rf"of 'b' must be an integer .*\(got {re.escape(ascii(checksum))}\); write"):
        open_reader(folder)


@pytest.mark.parametrize("version", [-1, 2**63 - 1, 1.0, True, None])
def test_an_invalid_version_is_refused(folder: Path, version: Any) -> None:
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest | {"weight_version": version}))
    with pytest.raises(PushError, match=f"{MANIFEST_FILE} is not a manifest: 'weight_version': "):
        read_manifest(folder)


def pad(folder: Path, name: str, num_bytes: int) -> None:
    """Pad the manifest, or the header of the tensors, with spaces to `num_bytes`.

    The spaces do not change the content.
    """
    content = (folder / name).read_bytes()
    if name == MANIFEST_FILE:
        content = content.ljust(num_bytes)
    else:
        start = 8 + int.from_bytes(content[:8], "little")
        content = num_bytes.to_bytes(8, "little") + content[8:start].ljust(num_bytes) + content[start:]
    (folder / name).write_bytes(content)


@pytest.mark.parametrize("name", [MODEL_FILE, MANIFEST_FILE])
def test_the_limit_on_parsed_bytes_follows_the_workers_model(tmp_path: Path, name: str) -> None:
    """Parsing is limited, because the worker's other threads wait while a manifest or header is parsed."""
    folder = write_folder(tmp_path / "pushes", {name: torch.ones(shape) for name, shape in SHAPES.items()})
    most = 2**16 + 2**10 * len(SHAPES)
    with serving(FakeEngine()) as running, RawClient(running.address) as client:
        pad(folder, name, most)
        assert begin_push(client, folder)["phase"] == "begun"
        assert ask(client, "verify_push", push_id=PUSH_ID, num_buckets=0)["phase"] == "verified"
        pad(folder, name, most + 1)
        reply = begin_push(client, folder)
        assert reply["code"] == "push_failed" and re.search(
            rf"more than {most} bytes|\(limit {most}\)", reply["message"]
        )


def test_the_longest_names_fit(tmp_path: Path) -> None:
    longest = {f"{number:0{MAX_NAME_CHARS}}": torch.ones((1,) * 8) for number in range(300)}
    folder = write_folder(tmp_path / "pushes", longest)
    assert min((folder / name).stat().st_size for name in (MODEL_FILE, MANIFEST_FILE)) > 2**16 + 300 * 2**8
    assert read_all(folder, num_tensors=300).keys() == longest.keys()


def test_a_manifest_that_is_too_long_is_not_read_by_the_trainer(folder: Path) -> None:
    os.truncate(folder / MANIFEST_FILE, 2**28)
    with pytest.raises(PushError, match="has more than 134283264 bytes"):
        read_manifest(folder)


def test_the_manifest_of_another_push_is_refused(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest | {"dtype": "x" * 10**4}))
    with pytest.raises(PushError, match="has the push id, version and dtype") as caught:
        open_reader(folder)
    assert len(str(caught.value)) < 1000
