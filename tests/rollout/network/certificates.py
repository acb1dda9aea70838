"""Keys for tests of roles: one key pair for a worker, and one for each named client."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.auth

from trueroll.rollout.network.keys import client_keys, use_curve


@dataclass(frozen=True)
class Certificates:
    """A folder of key files. `settings`: settings of a worker on a free loopback port that knows all clients."""

    folder: Path
    settings: dict[str, Any]

    def client(self, name: str) -> dict[str, Any]:
        """Return the arguments with which a client connects as `name`."""
        public, _ = zmq.auth.load_certificate(self.folder / "worker.key")
        return {"server_public_key": public.decode(), "client_key": str(self.folder / f"{name}.key_secret")}

    def raw(self, name: str, address: str | None, identity: bytes | None = None) -> zmq.Socket[bytes]:
        """Return a raw socket with the keys of `name`, connected if an address is given."""
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        if identity is not None:
            socket.set(zmq.IDENTITY, identity)
        keys = client_keys(address or "tcp://127.0.0.1:1", **self.client(name))
        assert keys is not None
        use_curve(socket, keys)
        if address is not None:
            socket.connect(address)
        return socket


def make_certificates(folder: Path, roles: dict[str, str]) -> Certificates:
    """Create keys for a worker, for each client in `roles` (role by name), and for an unknown client `stranger`."""
    lines = []
    for name in ("worker", "stranger", *roles):
        public, secret = zmq.auth.create_certificates(folder, name)
        Path(secret).chmod(0o600)
        if name in roles:
            lines.append(f"{roles[name]} {name} {zmq.auth.load_certificate(public)[0].decode()}\n")
    clients = folder / "clients"
    clients.write_text("# role user key\n\n" + "".join(lines))
    clients.chmod(0o600)
    secret_file = str(folder / "worker.key_secret")
    settings = dict(address="tcp://127.0.0.1:*", curve_secret_key_file=secret_file, clients_file=str(clients))
    return Certificates(folder, settings)
