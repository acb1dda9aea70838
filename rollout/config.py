"""A worker's settings (address, keys, limits) and the check that an address is safe.

The module imports neither torch nor zmq, so that the command line and the client can check an address quickly.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from trueroll.errors import ConfigError, brief

from ..engine.config import EngineConfig
from ..engine.request import from_validation


class WorkerConfig(BaseModel):
    """Settings of a worker, without the settings of its engine. Unknown keys and out-of-range values raise ConfigError.

    - `address`: `ipc://PATH`, or `tcp://IP:PORT` (port `*`: any free port); None: an ipc socket in a new private folder
    - `curve_secret_key_file`, `clients_file`: a file with the worker's secret key, in the format of
      `zmq.auth.create_certificates`, and a file with the public keys of the admitted clients (see `network.keys`). Set
      both `curve_secret_key_file` and `clients_file`, or neither of them. A tcp address beyond loopback needs both the
      secret key file and the clients file. A tcp address on loopback uses this user's own keys by default.
    - `max_connections`: maximum number of connections. If `max_connections` exceeds half of the process's limit on file
      descriptors, the worker uses half of this limit instead.
    - `max_message_bytes`: maximum size of a message
    - `max_n`: maximum number of samples per request
    - `max_queued_requests`, `max_queued_samples`, `max_queued_bytes`: maximum number of unfinished requests, maximum
      number of their samples, and maximum size of these requests in memory, in bytes. If a known request is submitted
      again, the new submission counts against a separate budget of `max_queued_bytes`.
    - `max_kept_results`, `max_kept_bytes`: maximum number of unacknowledged results, and their maximum total size in
      bytes, including the names of their callers. The oldest results are evicted first.
    - `max_unread_bytes`: maximum total size, in bytes, of the replies that clients have not read yet
    - `max_image_bytes`: maximum size, in bytes, of all preprocessed images in memory. A request with images waits until
      this memory has room for all images of the request. After a request has ended, its images stay in memory while
      there is room.
    - `image_seconds`: if a client that was asked for an image sends nothing for this many seconds, its requests that
      wait for images fail
    - `drain_seconds`: time for running requests to finish when the worker shuts down
    - `while_unavailable`: whether new requests wait (`queue`) or are refused (`reject`) while the worker is paused,
      draining, asleep, waking, updating or dirty
    - `metrics_port`: port on 127.0.0.1 that serves `/metrics` and `/healthz`; None: no port
    - `push_folder`, `push_hosts`, `push_urls`: see `PushPolicy`
    - `save_folder`: folder in which the worker saves the weights of the last push, to serve them after a restart; None:
      pushed weights are not saved
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    address: str | None = None
    curve_secret_key_file: str | None = None
    clients_file: str | None = None
    max_connections: int = Field(1024, ge=1)
    max_message_bytes: int = Field(4 * 2**20, ge=1024, le=2**30)
    max_n: int = Field(1024, ge=1)
    max_queued_requests: int = Field(16384, ge=1)
    max_queued_samples: int = Field(2**18, ge=1)
    max_queued_bytes: int = Field(2**30, ge=1)
    max_kept_results: int = Field(16384, ge=0)
    max_kept_bytes: int = Field(256 * 2**20, ge=0)
    max_unread_bytes: int = Field(256 * 2**20, ge=0)
    max_image_bytes: int = Field(2**30, ge=1)
    image_seconds: float = Field(60.0, gt=0.0)
    drain_seconds: float = Field(30.0, ge=0.0)
    while_unavailable: Literal["queue", "reject"] = "queue"
    metrics_port: int | None = Field(None, ge=1, le=65535)
    push_folder: str | None = None
    push_hosts: list[str] = []
    push_urls: list[str] = []
    save_folder: str | None = None

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise from_validation(ConfigError, error) from None

    @model_validator(mode="after")
    def _keys_come_with_clients(self) -> WorkerConfig:
        if (self.curve_secret_key_file is None) != (self.clients_file is None):
            found = "clients_file" if self.curve_secret_key_file is None else "curve_secret_key_file"
            raise ValueError(
                f"keys: curve_secret_key_file and clients_file belong together, but only {found} is set; set both"
            )
        return self

    @model_validator(mode="after")
    def _address_is_safe(self) -> WorkerConfig:
        if self.address is not None:
            check_address(self.address, has_keys=self.curve_secret_key_file is not None)
        return self

    @field_validator("push_hosts")
    @classmethod
    def _networks_are_networks(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            if "/" in host and not _is_network(host):
                raise ValueError(
                    f"push_hosts: {brief(host)} is not a valid network; give an IP, a host name, or a network such as "
                    "10.0.0.0/8"
                )
        return hosts

    @field_validator("push_urls")
    @classmethod
    def _urls_are_urls(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if "://" not in url or url.endswith("://"):
                raise ValueError(f"push_urls: {brief(url)} is not a URL such as s3://bucket/run")
        return urls

    @model_validator(mode="after")
    def _a_request_fits(self) -> WorkerConfig:
        if self.max_n > self.max_queued_samples:
            raise ConfigError(
                f"max_n: {self.max_n} is more than max_queued_samples = {self.max_queued_samples}; lower max_n or "
                "raise max_queued_samples",
                field="max_n",
                value=self.max_n,
                limit=self.max_queued_samples,
            )
        return self

    def limits(self) -> dict[str, int]:
        """Return the limits that apply to clients: all settings named `max_*`."""
        return {name: value for name, value in self.model_dump().items() if name.startswith("max_")}


def check_saving(worker: WorkerConfig, engine: EngineConfig) -> None:
    """Raise ConfigError if `save_folder` is set and the weights are quantized in a format that may change the bits of
    saved weights when a worker loads them again.
    """
    if worker.save_folder is not None and not engine.keeps_values:
        raise ConfigError(
            f"save_folder: weights in quantization {engine.quantization} may not have the same bits after they are "
            f"saved and quantized again (got {worker.save_folder!r}); remove the setting save_folder, or name a format "
            "other than nvfp4 and awq",
            field="save_folder",
            value=worker.save_folder,
        )


def check_address(address: str, has_keys: bool) -> None:
    """Raise ConfigError if `address` is malformed or an abstract socket. Without keys, also raise ConfigError for a tcp
    address beyond loopback.
    """
    transport, _, rest = address.partition("://")
    if transport == "ipc" and rest.startswith("@"):
        raise ConfigError(
            f"address: {address!r} is an abstract socket, which every user can connect to; give ipc://PATH"
        )
    if transport == "ipc" and rest:
        return
    if transport != "tcp" or ":" not in rest:
        raise ConfigError(f"address: must be ipc://PATH or tcp://IP:PORT (got {address!r}){address_hint(address)}")
    host, _, port = rest.rpartition(":")
    host = host.strip("[]")
    if host == "localhost":
        raise ConfigError(f"address: {address!r} has a host name instead of an IP; give tcp://127.0.0.1:{port}")
    if not has_keys and not is_loopback(host):
        raise ConfigError(
            f"address: {address!r} is not on loopback and needs keys (curve_secret_key_file and clients_file for the "
            "worker, server_public_key and client_key for the client); give keys, or a loopback IP such as 127.0.0.1"
        )


def check_socket(address: str) -> None:
    """Raise ConfigError if `address` is `ipc://PATH` and the socket file PATH does not exist."""
    transport, _, path = address.partition("://")
    if transport == "ipc" and path and not path.startswith("@") and not Path(path).exists():
        raise ConfigError(
            f"address: no worker listens at {address}, because {path} does not exist; start a worker with "
            "`trueroll serve MODEL`, which prints the address"
        )


def address_hint(address: str) -> str:
    """Return advice for an address that looks like the address of an HTTP server; empty for other addresses."""
    if address.startswith(("http://", "https://")):
        return "; an HTTP address belongs to a front end: give the worker's address, which `trueroll serve` prints"
    host, _, port = address.rpartition(":")
    return f"; give tcp://127.0.0.1:{port}" if host in ("localhost", "127.0.0.1") and port.isdigit() else ""


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback IP, which only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True
