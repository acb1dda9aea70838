"""A command's first contact with a worker: fail immediately if the address is wrong, and print the longest time that
the command may wait. Owns nothing. Imports neither torch nor zmq.
"""

from __future__ import annotations

import socket

from trueroll.errors import ConfigError

from ..client.membership import is_fleet
from ..config import address_hint, check_address, check_socket
from .progress import tell

WORKER_SECONDS = 30.0
"""Timeout in seconds. If requests are pending and the worker sends nothing for this time, the worker is considered
lost.
"""
CONNECT_SECONDS = 5.0
"""Maximum time, in seconds, to open a connection."""


def check_worker(address: str) -> str:
    """Return `address`. Raise ConfigError if `address` cannot be the address of a worker or a fleet."""
    if not is_fleet(address) or address_hint(address):
        check_address(address, has_keys=True)  # a later check finds missing keys
    return address


def patience(timeout: float) -> float:
    """Return the time, in seconds, after which a client with the timeout `timeout` gives up: 1.25 times the timeout."""
    return timeout * 5 / 4


def contact(address: str, timeout: float) -> None:
    """Print how long a client with the timeout `timeout` waits for a worker. Raise ConfigError if no process listens at
    `address`.
    """
    check_socket(address)
    tell(f"connecting to {address}, for up to {patience(timeout):.0f} s ...")
    if is_fleet(address):
        return
    transport, _, place = address.partition("://")
    try:
        (_connect_tcp if transport == "tcp" else _connect_ipc)(place)
    except OSError as error:
        raise ConfigError(
            f"address: no worker listens at {address} ({error.strerror or error}); start a worker with `trueroll "
            "serve MODEL`, which prints the address"
        ) from None


def _connect_tcp(place: str) -> None:
    host, _, port = place.rpartition(":")
    if port.isdecimal():  # the client reports any other fault of the address
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()


def _connect_ipc(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CONNECT_SECONDS)
        probe.connect(path)
