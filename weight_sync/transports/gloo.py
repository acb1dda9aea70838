"""Join gloo process groups, for trainers and for the receiving processes of workers. Imports only torch.

Gloo connects each member with every other member, at the addresses that the members have put into the store. Gloo
aborts a process that receives more bytes than expected. If the store stops answering, gloo may wait longer than any
timeout.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

c10d: Any = torch.distributed  # torch documents stores and groups, but does not export them

STORE_SECONDS = 30.0
"""Maximum time to reach a store. The store exists before a push begins."""


def connect(host: str, port: int, prefix: str, timeout: timedelta) -> Any:
    """Return a client of the store at `host`:`port`. The client puts `prefix` before every key.

    The client waits for a key no longer than the timeout. Raise RuntimeError if no store listens at this address.
    """
    store = c10d.TCPStore(
        host, port, None, False, min(timeout, timedelta(seconds=STORE_SECONDS)), wait_for_workers=False
    )
    store.set_timeout(timeout)
    return c10d.PrefixStore(prefix, store)


def new_group(store: Any, host: str, port: int, rank: int, size: int, timeout: timedelta) -> Any:
    """Join the group of the `size` members that meet at the store at `host`:`port`.

    Raise RuntimeError if not all members join within the timeout.
    """
    gloo = c10d.ProcessGroupGloo
    options = gloo._Options()  # the only way to choose the address at which gloo listens
    options._devices = [gloo.create_device(hostname=_own_address(host, port))]
    options._timeout = timeout
    return gloo(store, rank, size, options)


def _own_address(host: str, port: int) -> str:
    """Return the local address that connections from this machine to `host` use. Sends nothing."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def reason(error: BaseException) -> str:
    """Return the first line of an error's text, without the stack trace."""
    return str(error).partition("\n")[0]
