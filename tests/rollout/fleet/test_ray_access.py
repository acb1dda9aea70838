"""Start of a fleet's Ray cluster, and access to it, tested without a running Ray. `test_fleet.py` has the tests with a
running Ray.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray._private import ray_constants
from ray.exceptions import RayError

from trueroll.errors import ConfigError
from trueroll.rollout.fleet import ray_access, ray_cluster, scaler
from trueroll.rollout.fleet.ray_access import asks_for_token, reachable_ip
from trueroll.rollout.fleet.ray_cluster import Cluster


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a process without a cluster, in which starting a cluster does nothing."""
    monkeypatch.setattr(ray_cluster, "_local", None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(ray_cluster, "read_token_again", lambda: None)
    monkeypatch.setattr(ray_access, "read_token_again", lambda: None)


def test_an_argument_that_ray_refuses_is_reported_at_once(no_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[dict[str, Any]] = []

    def init(**fields: Any) -> None:
        starts.append(fields)
        raise RuntimeError("Unknown keyword argument(s): include_dashboard")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConfigError, match=r"ray\.init refuses an argument \(Unknown keyword .*: include_dashboard\)"):
        Cluster(None)
    assert len(starts) == 1


def test_a_cluster_is_started_again_after_whatever_its_start_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = [RayError("no"), OSError("no"), ConfigError("no")]
    monkeypatch.setattr(scaler, "FIRST_PAUSE", 0.0)

    class Reconnecting:
        async def reconnect(self) -> None:
            if errors:
                raise errors.pop()

    asyncio.run(scaler.reconnect(Reconnecting()))  # type: ignore[arg-type]
    assert errors == []


def test_a_start_of_ray_that_fails_leaves_no_process(no_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def init(**fields: Any) -> None:
        started.append(subprocess.Popen([sys.executable, "-c", "input()", ray.__file__], stdin=subprocess.PIPE))
        if len(started) == 1:
            raise RuntimeError("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    Cluster(None)
    failed, there = started
    assert not psutil.pid_exists(failed.pid) and there.poll() is None
    there.communicate(b"\n")


def test_a_child_that_ends_during_the_check_does_not_hide_the_raylet(
    no_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(None)
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    gone = psutil.Process(ended.pid)
    ended.communicate(b"\n")
    raylet = SimpleNamespace(name=lambda: "raylet", status=lambda: psutil.STATUS_SLEEPING)
    children = [gone, raylet]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive=False: children)
    with pytest.raises(psutil.NoSuchProcess):
        gone.name()
    assert cluster.is_alive()
    children.pop()
    assert not cluster.is_alive()


def test_a_local_cluster_that_ray_does_not_keep_on_loopback_is_ended(
    no_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "192.0.2.7")
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    with pytest.raises(ConfigError, match=r"listens on 192\.0\.2\.7, not on loopback"):
        Cluster(None)
    assert ended == [True]
    monkeypatch.delattr(ray_constants, "ENABLE_RAY_CLUSTER")
    with pytest.raises(ConfigError, match="cannot be restricted to loopback"):
        Cluster(None)


def test_the_folder_and_the_token_of_a_local_cluster_are_private(
    no_ray: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The folder is private even if the paths of sockets would be too long in the folder for temporary files."""
    seen: list[dict[str, str]] = []
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")
    monkeypatch.setattr(ray, "init", lambda **fields: seen.append({**os.environ, "temp_dir": fields["_temp_dir"]}))
    before = os.umask(0)
    try:
        for parent in (Path("/tmp"), tmp_path / ("x" * 100)):
            parent.mkdir(exist_ok=True)
            monkeypatch.setattr(tempfile, "tempdir", str(parent))
            cluster = Cluster(None)
            assert cluster.local is not None
            file = cluster.local.token_file
            assert file.parent.parent == Path("/tmp")
            assert file.parent.stat().st_mode & 0o777 == 0o700 and file.stat().st_mode & 0o777 == 0o600
            environment = seen.pop()
            assert Path(environment["temp_dir"]).parent == file.parent
            assert environment["RAY_AUTH_MODE"] == "token" and environment["RAY_AUTH_TOKEN_PATH"] == str(file)
            assert "RAY_AUTH_TOKEN" not in environment and os.environ["RAY_AUTH_TOKEN"] == "of another cluster"
            cluster.close()
            assert not file.parent.exists()
    finally:
        os.umask(before)


def test_a_cluster_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 1, "", "Traceback ...\nRpcError: Timed out while waiting for GCS\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(ConfigError, match="no answer from the cluster at 127.0.0.1:1: RpcError: Timed out"):
        asks_for_token("127.0.0.1:1")

    def take_long(*_: Any, timeout: float, **__: Any) -> Any:
        raise subprocess.TimeoutExpired("status", timeout)

    monkeypatch.setattr(subprocess, "run", take_long)
    with pytest.raises(ConfigError, match="the cluster at auto did not answer within"):
        asks_for_token("auto")


def test_workers_with_keys_listen_where_other_machines_reach_them() -> None:
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    assert reachable_ip("192.0.2.7") == "192.0.2.7" and reachable_ip("127.0.0.1") in own
