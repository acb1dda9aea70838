"""Control who can reach Ray: the folder, the token and the ports of a local cluster; the token of any other cluster.

Owns: the folder of a local cluster. Promises: everything that Ray writes for a local cluster lies in a folder of mode
0700; its ports listen on loopback only, and each of them asks for a token, which lies in that folder with mode 0600.
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
"""For a process that asks a cluster something: it imports Ray, which takes seconds on a busy machine."""
_ELSEWHERE = ("192.0.2.1", 9)
"""The address of no machine: it is reserved for documentation."""
_SOCKET = "session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
MOST_SOCKET_BYTES = 107
"""Of the path of a socket, on Linux."""
ONE_MACHINE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Has Ray start local clusters on loopback, and not replace 127.0.0.1 in an address by the IP of the machine."""
_TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class LocalAccess:
    """The private folder of a local cluster, and the environment that keeps other users out of the cluster.

    `temp_dir`: an argument of `ray.init`. It is not the private folder itself, because Ray changes the mode of its own
    folder to 0777. `token_file`: the token of the cluster. `address`: of the cluster, once it runs.
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
        """What another process of this user needs in its environment to join the cluster."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token_file), **ONE_MACHINE}

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Set what the Ray processes that start meanwhile read, and what `ray.init` reads in this process.

        Ray gives a local cluster the IP of the machine, whatever `_node_ip_address` says, unless clusters of several
        machines are switched off: then it uses 127.0.0.1 and binds its ports to that. The port of the autoscaler's
        metrics asks for no token, so it gets a number that cannot be opened.
        """
        from ray._private import ray_constants

        if not hasattr(ray_constants, "ENABLE_RAY_CLUSTER"):
            raise ConfigError("ray: this version cannot be kept on loopback; install 'trueroll[ray]'")
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
        """Leave the folder there for good, for the logs in it."""
        self._removal.detach()

    def remove_folder(self) -> None:
        """Remove the folder. Does nothing if that has happened."""
        self._removal()


def _make_folder() -> Path:
    """Return a new folder of mode 0700, in /tmp if the names of Ray's sockets were too long anywhere else."""
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
    """Have Ray read its token and whether it uses one from the environment, in place of what it has read before."""
    from ray import _raylet

    raylet: Any = _raylet  # compiled, without types
    if not hasattr(raylet, "Config") or not hasattr(raylet, "AuthenticationTokenLoader"):
        raise ConfigError("ray: this version cannot be given a token; install 'trueroll[ray]'")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def is_loopback(ip: str) -> bool:
    """Return whether only processes of this machine can reach `ip`."""
    return ipaddress.ip_address(ip).is_loopback


def asks_for_token(address: str) -> bool:
    """Return whether the cluster at `address`, or `auto`, refuses a process that has no token. A child process asks.
    Raise ConfigError if there is no clear answer, as when no cluster is there.
    """
    where = [] if address == "auto" else ["--address", address]
    environment = {name: value for name, value in os.environ.items() if name not in _TOKEN_VARIABLES}
    environment |= {"RAY_AUTH_MODE": "disabled", **ONE_MACHINE}
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", *where]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=ASK_SECONDS)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"ray: the cluster at {address} did not answer within {ASK_SECONDS} s; start it") from None
    if done.returncode == 0:
        return False
    if "AuthenticationError" in done.stderr:
        return True
    told = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
    raise ConfigError(f"ray: no answer from the cluster at {address}: {told:.200}; start one, or leave the address out")


def reachable_ip(node_ip: str) -> str:
    """Return the IP by which other machines reach this one, where Ray knows the node as `node_ip`: for a cluster on
    loopback that of the interface with the default route, or loopback if there is none.
    """
    if not is_loopback(node_ip):
        return node_ip
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)  # sends nothing
        except OSError:
            return node_ip
        return probe.getsockname()[0]
