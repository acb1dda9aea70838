"""The files of a fleet, with arbitrary content: the configuration, the members, and the record of a push."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trueroll.engine.config import EngineConfig
from trueroll.errors import ConfigError
from trueroll.rollout.client.membership import (
    MOST_FILE_BYTES,
    FleetFile,
    Member,
    MembersFile,
    PushNote,
    noted_push,
    version_file,
    write_members,
)
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.fleet.config import MOST_CONFIG_BYTES, FleetConfig, read_config, split_settings

pytestmark = pytest.mark.timeout(60)  # a read from a pipe would block forever
VALUES: list[Any] = ["x", "", 5, -1, 2**70, 1.5, -0.5, True, ["x"], [1, [2]], {"a": 1}, {"a": {"b": []}}, None, b"x"]


def pipe(path: Path) -> None:
    os.mkfifo(path)


def written(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text)  # type: ignore[return-value]


NO_FILES: list[tuple[Callable[[Path], None], str]] = [
    (pipe, "not a regular file"),
    (lambda path: path.mkdir(), "directory|not a regular file"),
    (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    (lambda path: path.write_bytes(b"\xff\xfe"), "utf-8"),  # type: ignore[list-item, return-value]
]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *NO_FILES,
        (written("a = " + "[" * 30_000), "recursion|nest"),
        (written("#" * (MOST_CONFIG_BYTES + 1)), f"more than {MOST_CONFIG_BYTES} bytes"),
        (written("num_workers = 1" + "0" * 5000), "digits"),
        (written('model = "a\\u001b[2J"\nnum_workers = 1'), r"control characters .*'a\\x1b\[2J'"),
        (written('"\\u001b[2J" = 1'), r"control characters .*'\\x1b"),
        (written('model = "a"\nnum_workers = 70000'), "num_workers: .* 1024"),
        (written('model = "a"\nnum_workers = 1\nself = 1'), "self: unknown parameter"),
        (written('model = "a"\nnum_workers = 1\n' + "a." * 10_000 + "a = 1"), "a: unknown parameter"),
        (written('model = "a"\nnum_workers = 1979-05-27'), "num_workers: .* integer"),
    ],
)
def test_an_invalid_configuration_is_reported(make: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    make(tmp_path / "fleet.toml")
    with pytest.raises(ConfigError, match=message) as raised:
        read_config(tmp_path / "fleet.toml")
    assert str(raised.value).isprintable() and len(str(raised.value)) < 1000


def test_a_setting_of_a_wrong_type_is_reported() -> None:
    names = {*FleetConfig.model_fields, *WorkerConfig.model_fields, *EngineConfig.model_fields}
    num_refused = 0
    for name in names:
        for value in VALUES:
            try:
                split_settings({"model": "a", "num_workers": 1, name: value})
            except ConfigError as error:
                num_refused += 1
                assert len(str(error)) < 1000
    assert num_refused > 5 * len(names)


def members(*entries: Any, **more: Any) -> Callable[[Path], None]:
    return written(json.dumps({"members": list(entries), **more}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *NO_FILES,
        (written("["), "Expecting value"),
        (written("[" * 200_000), "recursion"),
        (written(" " * (MOST_FILE_BYTES + 1)), f"more than {MOST_FILE_BYTES} bytes"),
        (written("[]"), "not a JSON map with a list of members"),
        (written('{"members": {}}'), "not a JSON map with a list of members"),
        (members(5), "a member must be a map .*got 5"),
        (members({"name": "a", "address": "ipc:///a", "more": "b"}), "a member must be a map with the keys address"),
        (members({"name": "a"}), "no name or no address"),
        (members({"name": "a", "address": ["ipc:///a"]}), "is not a string"),
        (members({"name": "a", "address": "ipc:///a", "standing": "lost"}), "standing must be .*got 'lost'"),
        (members({"name": "a\x1b[2J", "address": "ipc:///a"}), r"control characters .*'a\\x1b\[2J'"),
        (members({"name": "a", "address": "ipc:///a"}, {"name": "a", "address": "ipc:///b"}), "a member twice"),
    ],
)
def test_an_invalid_members_file_is_reported(make: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    make(tmp_path / "fleet.json")
    with pytest.raises(ConfigError, match=message) as raised:
        FleetFile(tmp_path / "fleet.json")
    assert str(raised.value).isprintable() and len(str(raised.value)) < 1000


def test_the_last_members_count_while_the_file_is_invalid(tmp_path: Path) -> None:
    file, told = tmp_path / "fleet.json", [Member("a", "ipc:///a", "1", "joining", "disk: no space")]
    write_members(file, told)
    seen = FleetFile(file)
    assert list(seen.members()) == told
    file.unlink()
    pipe(file)
    assert list(seen.members()) == told


@pytest.mark.parametrize(
    "make",
    [
        *(make for make, _ in NO_FILES),
        written("7"),
        written("[" * 1000),
        written(" " * 2000),
        written('{"version": 7}'),
        written(json.dumps({"version": -1, "push_id": "0" * 32})),
        written(json.dumps({"version": True, "push_id": "0" * 32})),
        written(json.dumps({"version": 7, "push_id": "../../0000"})),
    ],
)
def test_an_invalid_note_is_ignored(make: Callable[[Path], None], tmp_path: Path) -> None:
    write_members(tmp_path / "fleet.json", [])
    make(version_file(tmp_path / "fleet.json"))
    assert noted_push(tmp_path / "fleet.json") is None


def test_a_note_tells_version_and_push(tmp_path: Path) -> None:
    write_members(tmp_path / "fleet.json", [])
    FleetFile(tmp_path / "fleet.json").note_push(PushNote(7, "0123456789abcdef" * 2))
    assert noted_push(tmp_path / "fleet.json") == PushNote(7, "0123456789abcdef" * 2)


def test_a_file_that_cannot_be_written_is_logged_once_and_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "fleet.json"
    path.mkdir()
    file, members = MembersFile(path, 0o600), [Member("worker-0", "ipc:///there")]
    for _ in range(2):
        file.tell(members)
    assert file.is_stale and len(caplog.records) == 1 and str(path) in caplog.text
    assert [*tmp_path.iterdir()] == [path], "a draft was left behind"
    path.rmdir()
    file.tell(members)
    assert not file.is_stale and [*FleetFile(path).members()] == members
