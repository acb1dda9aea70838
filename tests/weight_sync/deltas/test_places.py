"""Chains at URLs, in fsspec's own memory file system, and the rules about which URLs a worker reads. `make test-agents`
reads chains from a server with the protocol of S3.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from weight_sync.deltas.test_reader import assert_same, read, states, write_own

from trueroll.errors import ConfigError, PushError
from trueroll.rollout.config import WorkerConfig
from trueroll.weight_sync.deltas.chain import Served
from trueroll.weight_sync.deltas.places import RemotePlace, place_for_worker
from trueroll.weight_sync.transports.policy import PushPolicy

URL = "memory://runs/chain"


@pytest.fixture
def uploaded(tmp_path: Path) -> Iterator[list[Any]]:
    """A chain in memory: a full checkpoint, version 1, and deltas to version 3. Yields the weights of each version."""
    history = states(count=4)
    write_own(tmp_path / "chain", history, {1})
    MemoryFileSystem().put(str(tmp_path / "chain"), "/runs/chain", recursive=True)
    yield history
    MemoryFileSystem().rm("/runs", recursive=True)


def test_a_chain_is_read_from_a_url(uploaded: list[Any]) -> None:
    place = place_for_worker(URL, PushPolicy(urls=("memory://runs",)))
    assert_same(read(place, 3, None, None), uploaded[3])
    assert_same(read(place, 3, uploaded[2], Served(2, f"{2:032x}")), uploaded[3])


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("weight_v000003", "cannot read memory://runs/chain/weight_v000003/model.safetensors: FileNotFoundError"),
        ("weight_v000001", "weight_v000002 is a delta to version 1, .* weight_v000001 cannot be used: .*FileNotFound"),
        ("weight_v000002/model-00000-of-00001.safetensors", "cannot read memory://.*FileNotFoundError: .*credentials"),
    ],
)
def test_a_missing_file_at_a_url_is_named(uploaded: list[Any], path: str, text: str) -> None:
    MemoryFileSystem().rm(f"/runs/chain/{path}", recursive=True)
    with pytest.raises(PushError, match=text):
        read(RemotePlace(URL), 3, None, None)


def test_a_server_that_fails_is_named(uploaded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's size is known, but a later read fails, or returns fewer bytes than the file had."""

    def fail(self: io.BytesIO, memory: memoryview) -> int:
        raise RuntimeError("the bucket is gone")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFile.readinto", fail, raising=False)
    with pytest.raises(PushError, match="cannot read memory://.*RuntimeError: the bucket is gone"):
        read(RemotePlace(URL), 3, None, None)
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFile.readinto", lambda self, memory: 0, raising=False)
    with pytest.raises(PushError, match=r"was cut short while it was read \(\d+ bytes are missing\)"):
        read(RemotePlace(URL), 3, None, None)


def test_a_package_that_is_missing_is_named() -> None:
    with pytest.raises(PushError, match=r"cannot read 'unknown://x'.*pip install 'trueroll\[object-store\]'"):
        RemotePlace("unknown://x")


@pytest.mark.parametrize(
    ("allowed", "url"),
    [
        ((), URL),
        (("s3://bucket",), "s3://bucket2/run"),
        (("s3://bucket/run",), "s3://bucket"),
        (("s3://bucket/run",), "s3://bucket/run2"),
        (("s3://bucket/run",), "s3://bucket/run/../other"),
        (("s3://bucket",), "s3://bucket/a/%2e%2e/b"),
        (("s3://bucket",), "s3://bucket/run?versionId=1"),
        (("s3://bucket",), "s3://bucket/run#x"),
        (("s3://bucket",), "s3://bucket/run::http://host"),
        (("s3://bucket",), "simplecache::s3://bucket/run"),
        (("s3://bucket",), "s3://bucket/run\nlog"),
        (("s3://bucket",), "s3://bucket\\run"),
        (("s3://bucket",), "S3://bucket/run"),
        (("s3://bucket",), "file:///etc"),
    ],
)
def test_a_worker_refuses_other_urls(allowed: tuple[str, ...], url: str) -> None:
    with pytest.raises(PushError, match=r"may not read .*--push-urls"):
        place_for_worker(url, PushPolicy(urls=allowed))


@pytest.mark.parametrize("url", ["ftp://me:secret@host/run", "simplecache::http://me:secret@host/run"])
def test_a_password_is_refused_and_not_shown(url: str, caplog: pytest.LogCaptureFixture) -> None:
    for place in (lambda: place_for_worker(url, PushPolicy(urls=("ftp://me:secret@host",))), lambda: RemotePlace(url)):
        with pytest.raises(PushError, match="the URL has a password") as refused:
            place()
        assert "secret" not in str(refused.value) + caplog.text
    PushPolicy(urls=("abfs://box@account",)).check_url("abfs://box@account/run")


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/", "s3://bucket/a/b.c"])
@pytest.mark.parametrize("allowed", ["s3://bucket", "s3://bucket/"])
def test_a_url_may_be_below_an_allowed_url(allowed: str, url: str) -> None:
    PushPolicy(urls=("s3://other", allowed)).check_url(url)


@pytest.mark.parametrize("url", ["bucket/run", "s3://", ""])
def test_an_entry_of_push_urls_must_be_a_url(url: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("is not a URL such as s3://bucket/run")):
        WorkerConfig(push_urls=[url])
