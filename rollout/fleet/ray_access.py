"""Control access to Ray: the folder, token and ports of a local cluster, and the token check for any other cluster.

Owns: the folder of a local cluster. Guarantees: all files that Ray writes for a local cluster are in a folder of mode
0700. The ports of a local cluster listen on loopback only, and each port requires a token. The token is in a file of
mode 0600 in the same folder.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trueroll.errors import ConfigError

ASK_SECONDS = 60.0
"""Timeout of the child process that asks a cluster for its status. Importing Ray takes seconds on a busy machine."""
_ELSEWHERE = ("192.0.2.1", 9)
"""An address that no machine has, because it is reserved for documentation (RFC 5737)."""
_SOCKET = "session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
MOST_SOCKET_BYTES = 107
"""Maximum length of a socket's path on Linux."""
ONE_MACHINE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Environment variables that make Ray start local clusters on loopback instead of on the IP of the machine."""
_TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class LocalAccess:
    """The private folder of a local cluster, and the environment variables that keep other users out of the cluster.

    `temp_dir`: value of `_temp_dir` for `ray.init`, a subfolder of the private folder. Ray changes the mode of the
    subfolder to 0777. `token_file`: file with the token of the cluster. `address`: address of the cluster; None until
    the cluster runs.
    """

    def __init__(self) -> None:
        self.folder = _make_folder()
        self.temp_dir = self.folder / "ray"
        self.address: str | None = None
        self.token_file = self.folder / "token"
        self._removal = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        with open(os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that another process of this user needs to join the cluster."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token_file), **ONE_MACHINE}

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Context manager that sets environment variables for `ray.init` and for the processes that Ray starts.

        By default, Ray gives a local cluster the IP of the machine, and ignores `_node_ip_address`. So this context
        manager disables multi-machine clusters in Ray, and Ray then binds its ports to 127.0.0.1. The port for the
        autoscaler's metrics does not require a token, so the port is set to a number that no process can open.
        """
        from ray._private import ray_constants

        if not hasattr(ray_constants, "ENABLE_RAY_CLUSTER"):
            raise ConfigError("ray: the installed version cannot be restricted to loopback; install 'trueroll[ray]'")
        variables = {**self.variables, "AUTOSCALER_METRIC_PORT": "-1"}
        before = {name: os.environ.get(name) for name in {*variables, *_TOKEN_VARIABLES}}
        was_enabled = ray_constants.ENABLE_RAY_CLUSTER
        try:
            os.environ.pop("RAY_AUTH_TOKEN", None)
            os.environ.update(variables)
            ray_constants.ENABLE_RAY_CLUSTER = False
            read_token_again()
            yield
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = was_enabled
            for name, value in before.items():
                _set_variable(name, value)

    def keep_folder(self) -> None:
        """Keep the cluster's folder when this process ends, so that Ray's logs can still be read."""
        self._removal.detach()

    def remove_folder(self) -> None:
        """Remove the folder. Idempotent."""
        self._removal()


def _make_folder() -> Path:
    """Create a folder of mode 0700. Use /tmp if Ray's socket paths would be too long in the default folder."""
    name = f"trueroll-ray-{secrets.token_hex(4)}"
    parents = (Path(tempfile.gettempdir()), Path("/tmp"))
    fitting = [parent for parent in parents if len(bytes(parent / name / "ray" / _SOCKET)) <= MOST_SOCKET_BYTES]
    (folder := fitting[0] / name).mkdir(0o700)
    return folder


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def read_token_again() -> None:
    """Make Ray read its token settings from the environment again."""
    from ray import _raylet

    raylet: Any = _raylet  # _raylet is a compiled module without types
    if not hasattr(raylet, "Config") or not hasattr(raylet, "AuthenticationTokenLoader"):
        raise ConfigError(
            "ray: the installed version does not allow setting an authentication token; install 'trueroll[ray]'"
        )
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def is_loopback(ip: str) -> bool:
    """Return whether only processes on this machine can reach `ip`."""
    return ipaddress.ip_address(ip).is_loopback


def asks_for_token(address: str) -> bool:
    """Return whether the cluster at `address` requires a token. The check runs in a child process, which tries to
    connect without a token. If `address` is `auto`, the check connects to the cluster that Ray finds. Raise ConfigError
    if it is unclear whether a token is required, for example because no cluster runs.
    """
    where = [] if address == "auto" else ["--address", address]
    environment = {name: value for name, value in os.environ.items() if name not in _TOKEN_VARIABLES}
    environment |= {"RAY_AUTH_MODE": "disabled", **ONE_MACHINE}
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", *where]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=ASK_SECONDS)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"ray: the cluster at {address} did not answer within {ASK_SECONDS} s; check that it is running"
        ) from None
    if done.returncode == 0:
        return False
    if "AuthenticationError" in done.stderr:
        return True
    told = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
    raise ConfigError(
        f"ray: no answer from the cluster at {address}: {told:.200}; start a cluster, or leave the address out"
    )


def reachable_ip(node_ip: str) -> str:
    """Return the IP address at which other machines can reach this machine. `node_ip`: the IP address that Ray has for
    this node. If `node_ip` is a loopback address and the machine has a default route, the result is the address of the
    network interface with this route. If `node_ip` is any other address, or the machine has no default route, the
    result is `node_ip`.
    """
    if not is_loopback(node_ip):
        return node_ip
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)  # connecting a UDP socket sends nothing
        except OSError:
            return node_ip
        return probe.getsockname()[0]
