"""Saving weights in the background, and serving them again: bits, interruptions, kills, faults and foreign folders."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import SHAPES, FakeEngine
from serving import wait_until

from trueroll.errors import ConfigError
from trueroll.weight_sync.transports import folders
from trueroll.weight_sync.worker import saver as saver_module
from trueroll.weight_sync.worker.saved_folder import MOST_RECORD_BYTES, SavedFolder, SavedPush
from trueroll.weight_sync.worker.saver import Saver

FIRST, SECOND, THIRD = (SavedPush(push_id=secrets.token_hex(16), weight_version=version) for version in (7, 9, 8))
STEPS = ("mkdir", "pwrite", "fsync", "rename", "replace", "unlink", "rmdir")
"""The functions of `os` that change the folder."""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "CHUNK_BYTES", 64)


def fill(engine: FakeEngine, value: float) -> None:
    for number, tensor in enumerate(engine.weights.live.values()):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) * 0.5 + value + number)


def checksums(value: float) -> dict[str, int]:
    engine = FakeEngine()
    fill(engine, value)
    return engine.weights.checksums()


@contextmanager
def saver_of(path: Path, engine: FakeEngine, model: str = "fake") -> Iterator[Saver]:
    """A saver that has restored the engine, but that was not started."""
    with closing(SavedFolder(str(path))) as folder:
        saver = Saver(folder, engine.weights, model, "cpu", lambda: None)
        saver.restore(engine)
        yield saver
        saver.close()


def write(saver: Saver, push: SavedPush) -> None:
    """Save the live weights on this thread."""
    saver.save(push.push_id, push.weight_version)
    order = saver._next()
    assert order is not None
    saver._carry_out(order)


def served(path: Path) -> tuple[int, dict[str, int]]:
    """Return the version and the checksums that a new worker serves."""
    engine = FakeEngine()
    with saver_of(path, engine) as saver:
        assert saver.state.push is None or saver.state.push.weight_version == engine.weight_version
    return engine.weight_version, engine.weights.checksums()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with the weights of the push `FIRST`."""
    engine = FakeEngine()
    fill(engine, 1.0)
    with saver_of(tmp_path / "saved", engine) as saver:
        write(saver, FIRST)
        assert saver.state.push == FIRST and saver.state.num_saved == 1 and not saver.state.is_writing
    return tmp_path / "saved"


def test_a_new_worker_serves_the_last_saved_weights(saved: Path) -> None:
    assert served(saved) == (7, checksums(1.0))
    engine = FakeEngine()
    with saver_of(saved, engine) as saver:
        for push, value in ((SECOND, 2.0), (THIRD, 3.0)):
            fill(engine, value)
            write(saver, push)
    assert served(saved) == (8, checksums(3.0)), "the last commit counts, not the highest version"
    assert [path.name for path in (saved / "weights").iterdir()] == [THIRD.name]


def test_the_folder_is_private(saved: Path) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (saved, *saved.iterdir())}
    files, parents = dict.fromkeys(("lock", "saved.json"), 0o600), dict.fromkeys(("saved", "weights", "base"), 0o700)
    assert modes == files | parents


def test_everything_is_synced_before_the_record_names_it(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any, **named: Any) -> Any:
            where = os.readlink(f"/proc/self/fd/{arguments[0]}") if isinstance(arguments[0], int) else arguments[0]
            done.append(f"{name} {Path(where).relative_to(saved)}")
            return real(*arguments, **named)

        return call

    engine = FakeEngine()
    with saver_of(saved, engine) as saver, monkeypatch.context() as patch:
        for name in ("fsync", "rename", "replace", "rmdir"):
            patch.setattr(os, name, noting(name))
        write(saver, SECOND)
        assert not saver.state.error
    new = f"weights/{SECOND.name}"
    assert done[:8] == [
        *(f"fsync {new}.tmp/{name}" for name in ("model.safetensors", "trueroll_push.json")),
        f"fsync {new}.tmp",
        f"rename {new}.tmp",
        "fsync weights",
        "fsync saved.json.tmp",
        "replace saved.json.tmp",
        "fsync .",
    ]


def test_weights_that_change_while_they_are_read_are_not_saved(saved: Path) -> None:
    engine, reached, go_on = FakeEngine(), threading.Event(), threading.Event()
    rows, reads = engine.weights.served_rows, list[str]()

    def slow_rows(name: str, start: int, length: int) -> torch.Tensor:
        reads.append(name)
        if name == "b":  # the tensor in the middle, which is one chunk
            reached.set()
            assert go_on.wait(60)
        return rows(name, start, length)

    with saver_of(saved, engine) as saver:
        fill(engine, 2.0)
        engine.weights.served_rows = slow_rows
        saver.start()
        saver.save(SECOND.push_id, SECOND.weight_version)
        assert reached.wait(60) and saver.state.is_writing
        interrupter = threading.Thread(target=saver.interrupt)
        interrupter.start()
        interrupter.join(0.1)
        assert interrupter.is_alive(), "premise: a chunk is being read"
        go_on.set()
        interrupter.join()
        count = len(reads)
        wait_until(lambda: not saver.state.is_writing)
        if saver.state.num_interrupted:  # otherwise all chunks were read before the interrupter got its turn
            assert len(reads) == count and saver.state.push == FIRST
        fill(engine, 3.0)
        saver.save(THIRD.push_id, THIRD.weight_version)
        wait_until(lambda: saver.state.push == THIRD)
    assert served(saved) == (8, checksums(3.0))


def test_weights_that_were_read_are_saved_although_they_change(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, reached, go_on = FakeEngine(), threading.Event(), threading.Event()
    real = os.fsync

    def slow_fsync(file: int) -> None:
        reached.set()
        assert go_on.wait(60)
        real(file)

    with saver_of(saved, engine) as saver, monkeypatch.context() as patch:
        fill(engine, 2.0)
        patch.setattr(os, "fsync", slow_fsync)
        saver.start()
        saver.save(SECOND.push_id, SECOND.weight_version)
        assert reached.wait(60)
        saver.interrupt()  # does not wait for the disk
        fill(engine, 3.0)
        saver.save(SECOND.push_id, SECOND.weight_version)  # such as after a sleep that kept the weights
        go_on.set()
        wait_until(lambda: not saver.state.is_writing)
        assert saver.state.push == SECOND and saver.state.num_failed == saver.state.num_interrupted == 0
    assert served(saved) == (9, checksums(2.0))


def test_an_order_that_was_not_begun_can_be_taken_back(saved: Path) -> None:
    engine = FakeEngine()
    with saver_of(saved, engine) as saver:
        saver.save(SECOND.push_id, SECOND.weight_version)
        assert saver.state.is_writing
        saver.interrupt()
        assert not saver.state.is_writing
        saver.start()
        saver.save(THIRD.push_id, THIRD.weight_version)
        wait_until(lambda: saver.state.push == THIRD)
        assert saver.state.num_interrupted == 0 and saver.state.num_saved == 1


def save_and_die(path: Path, step: int) -> None:
    """Save the push `SECOND`, and kill this process instead of change number `step` of the folder, counted from 0."""
    engine, left = FakeEngine(), step

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        return call

    with saver_of(path, engine) as saver:
        fill(engine, 2.0)
        for name in STEPS:
            setattr(os, name, dying(getattr(os, name)))
        write(saver, SECOND)
        os._exit(0 if saver.state.push == SECOND else 1)


def test_a_kill_at_any_step_leaves_the_old_or_the_new_weights(saved: Path, tmp_path: Path) -> None:
    found: list[int] = []
    for step in range(100):
        path = tmp_path / str(step)
        shutil.copytree(saved, path)
        with warnings.catch_warnings(action="ignore"):
            child = os.fork()
        if not child:
            try:
                save_and_die(path, step)
            finally:
                os._exit(2)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL)
        version, sums = served(path)
        assert sums == checksums({7: 1.0, 9: 2.0}[version])
        found.append(version)
        assert [each.name for each in (path / "weights").iterdir()] == [(FIRST if version == 7 else SECOND).name]
        if code == 0:
            break
    assert len(found) > 12 and found == sorted(found) and {*found} == {7, 9}, "premise: kills before and after"


def test_a_full_disk_is_reported_and_retried(
    saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    engine = FakeEngine()
    monkeypatch.setattr(saver_module, "RETRY_SECONDS", 0.01)
    with saver_of(saved, engine) as saver:
        fill(engine, 2.0)
        with monkeypatch.context() as patch:
            patch.setattr(folders.os, "pwrite", full)
            saver.start()
            saver.save(SECOND.push_id, SECOND.weight_version)
            wait_until(lambda: saver.state.num_failed > 2)
            assert "No space left on device" in saver.state.error and saver.state.push == FIRST
            assert "version 9 cannot be saved" in caplog.text
        wait_until(lambda: saver.state.push == SECOND)
        assert not saver.state.error
    assert served(saved) == (9, checksums(2.0))


def test_a_write_that_fails_after_its_last_byte_can_be_repeated(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    engine = FakeEngine()
    with saver_of(saved, engine) as saver:
        fill(engine, 2.0)
        monkeypatch.setattr(saver_module, "RETRY_SECONDS", 0.0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fail)
            write(saver, SECOND)
            assert "Input/output error" in saver.state.error and served_weights(saved) == [FIRST.name, SECOND.name]
        write(saver, SECOND)
        assert saver.state.push == SECOND and served_weights(saved) == [SECOND.name]


def served_weights(path: Path) -> list[str]:
    return sorted(each.name for each in (path / "weights").iterdir())


def test_only_one_worker_uses_a_folder(saved: Path) -> None:
    program = (
        "import sys\n"
        "from trueroll.weight_sync.worker.saved_folder import SavedFolder\n"
        "folder = SavedFolder(sys.argv[1]); print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, saved], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        with pytest.raises(ConfigError, match="another worker uses .*give each worker its own folder"):
            SavedFolder(str(saved))
        other.kill()
    assert served(saved)[0] == 7


def record(path: Path, **changes: Any) -> None:
    file = path / "saved.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def corrupt(path: Path) -> None:
    file = path / "weights" / FIRST.name / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def cut(path: Path) -> None:
    file = path / "weights" / FIRST.name / "model.safetensors"
    os.truncate(file, file.stat().st_size - 4)


def replace_by_link(path: Path) -> None:
    (path / "saved.json").rename(path / "elsewhere")
    (path / "saved.json").symlink_to(path / "elsewhere")


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (
            lambda path: record(path, model="other"),
            "has weights of 'other' in float32 .*, but this worker serves 'fake'",
        ),
        (lambda path: record(path, dtype="bfloat16"), "has weights of 'fake' in bfloat16 .* 'fake' in float32"),
        (lambda path: record(path, quantization="int8"), "with quantization int8, .* 'fake' in .* quantization none"),
        (corrupt, "saved version 7: tensor embed: expected checksum .* remove"),
        (cut, "saved version 7: .*not a whole safetensors file"),
        (lambda path: shutil.rmtree(path / "weights" / FIRST.name), "saved version 7: disk: cannot read"),
        (lambda path: record(path, push=dict(push_id="0" * 32, weight_version=7)), "saved version 7: disk: cannot"),
        (lambda path: record(path, push=dict(push_id="../../../x", weight_version=7)), "not a record of saved weights"),
        (lambda path: record(path, format=2), "not a record of saved weights"),
        (lambda path: (path / "saved.json").write_text("[" * 50_000), "not a record of saved weights"),
        (lambda path: (path / "saved.json").write_text(" " * (MOST_RECORD_BYTES + 1)), "more than 65536 bytes"),
        (lambda path: (path / "saved.json").chmod(0o666), "saved.json has mode 0666: other users can write it"),
        (lambda path: path.chmod(0o777), "saved has mode 0777: other users can write it"),
        (lambda path: (path / "weights" / FIRST.name).chmod(0o777), "saved version 7: disk: cannot read"),
        (replace_by_link, "Too many levels of symbolic links"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused(saved: Path, damage: Callable[[Path], Any], error: str) -> None:
    damage(saved)
    with pytest.raises(ConfigError, match=error):
        served(saved)


def test_a_folder_of_another_model_of_the_same_name_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "embed", (48, 4))
    with pytest.raises(ConfigError, match="saved version 7: tensor embed: expected shape .48, 4., found .32, 4."):
        served(saved)


def test_nothing_else_in_the_folder_is_touched(saved: Path) -> None:
    for name in (f"version-1-{'0' * 8}", "weights/mine"):
        (saved / name).mkdir()
    engine = FakeEngine()
    with saver_of(saved, engine) as saver:
        write(saver, SECOND)
    assert served_weights(saved) == ["mine", SECOND.name] and (saved / f"version-1-{'0' * 8}").is_dir()
