"""The worker's ROUTER socket: bound where the settings say, encrypted if they name keys.

Owns nothing: whoever calls gets the socket, and the folder that was made for it, and closes both.
"""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path
from typing import Any

import zmq
import zmq.auth

from ..engine.errors import ConfigError
from .config import WorkerConfig

OVERSIZE_FACTOR = 4
"""ZMQ cuts the connection of a client that sends more than this many times `max_message_bytes`; below it, an error
replies.
"""
HEARTBEAT_MS = 10_000


def bind_router(
    context: zmq.Context[Any], config: WorkerConfig
) -> tuple[zmq.Socket[bytes], str, tempfile.TemporaryDirectory[str] | None]:
    """A socket bound to the configured address, the address it got, and the folder made for it, if any.

    Raise ConfigError if nothing can listen there, or if the keys cannot be read.
    """
    keys = None if config.curve_secret_key_file is None else _read_keys(config.curve_secret_key_file)
    address, folder = (config.address, None) if config.address is not None else _private_ipc_address()
    router = context.socket(zmq.ROUTER)
    router.set(zmq.ROUTER_MANDATORY, 1)
    router.set(zmq.MAXMSGSIZE, OVERSIZE_FACTOR * config.max_message_bytes)
    # libzmq 4.3.5 aborts the process when the heartbeat of a connection is due that ended while its queue was full, and
    # of one whose identity another connection took over (ROUTER_HANDOVER).
    router.set(zmq.RCVHWM, 0)
    router.set(zmq.SNDHWM, 0)
    router.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    router.set(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
    router.set(zmq.IPV6, "[" in address)
    if keys is not None:
        router.set(zmq.CURVE_SERVER, 1)
        router.set(zmq.CURVE_PUBLICKEY, keys[0])
        router.set(zmq.CURVE_SECRETKEY, keys[1])
    try:
        _check_ipc_is_free(address)
        router.bind(address)
    except (OSError, zmq.ZMQError) as error:
        context.destroy(linger=0)
        raise ConfigError(f"address: cannot listen at {address}: {error.strerror}; choose another address") from None
    return router, router.get_string(zmq.LAST_ENDPOINT), folder


def _check_ipc_is_free(address: str) -> None:
    """Raise OSError if somebody listens at an ipc address: ZMQ would quietly take it from them."""
    path = address.removeprefix("ipc://")
    if path == address or not Path(path).exists():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(path) == 0:
            raise OSError(0, "another process listens there")


def _read_keys(secret_key_file: str) -> tuple[bytes, bytes]:
    """The public and the secret key in a file of `zmq.auth.create_certificates`."""
    try:
        public, secret = zmq.auth.load_certificate(secret_key_file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"curve_secret_key_file: cannot read {secret_key_file}: {error}") from None
    if secret is None:
        raise ConfigError(f"curve_secret_key_file: {secret_key_file} has no secret key; name the .key_secret file")
    return public, secret


def _private_ipc_address() -> tuple[str, tempfile.TemporaryDirectory[str]]:
    """An address in a new folder that only this user can enter, and that folder."""
    folder = tempfile.TemporaryDirectory(prefix="trueroll-")
    return f"ipc://{folder.name}/worker.sock", folder
