"""Authentication of a worker's clients: CURVE keys, users and roles.

A worker identifies its clients in one of three ways:

- An ipc socket needs no keys, because the file system gives access only to the worker's own user.
- On a loopback TCP port, worker and clients run as the same user, and use the keys in a private file of that user. The
  file is created on first use. A TCP port needs keys even on loopback, because any user of the machine can reach the
  port.
- If `curve_secret_key_file` and `clients_file` are set, each client has a user name and a role. Named clients work with
  any address.

Does not own sockets. Secret keys leave this module only as socket options.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import zmq
import zmq.auth
from zmq.utils.z85 import Z85CHARS

from trueroll.errors import ConfigError

from ..config import WorkerConfig

Role: TypeAlias = Literal["generate", "control"]
"""`generate`: samples, scores, aborts of the user's own requests, health and stats. `control`: all calls."""
Key: TypeAlias = str | bytes | Path
"""A CURVE key in Z85, or the path of a key file made by `zmq.auth.create_certificates`."""
KEY_CHARS = 40
_USER = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


@dataclass(frozen=True)
class Client:
    """The sender of a message. `user`: the user's name; None if the worker has no named clients."""

    user: str | None
    role: Role


OWNER = Client(None, "control")
"""The sender of every message to a worker that has no named clients."""


@dataclass(frozen=True)
class ServerKeys:
    """A worker's keys in Z85, and a map from public keys to the worker's clients."""

    public: bytes
    secret: bytes = field(repr=False)
    clients: Mapping[str, Client]


@dataclass(frozen=True)
class ClientKeys:
    """A client's keys and the worker's public key, in Z85."""

    server_public: bytes
    public: bytes
    secret: bytes = field(repr=False)


def server_keys(config: WorkerConfig) -> ServerKeys | None:
    """Return the worker's keys for the configured address, or None if this address needs no keys.

    Raise ConfigError if the keys cannot be read or created.
    """
    if config.curve_secret_key_file is not None and config.clients_file is not None:
        public, secret = _read_certificate("curve_secret_key_file", config.curve_secret_key_file)
        return ServerKeys(public, secret, read_clients(config.clients_file))
    if config.address is not None and config.address.startswith("tcp://"):
        own = _OwnKeys.load()
        return ServerKeys(own.server_public.encode(), own.server_secret.encode(), {own.client_public: OWNER})
    return None


def client_keys(address: str, server_public_key: Key | None, client_key: Key | None) -> ClientKeys | None:
    """Return a client's keys for a worker at `address`, or None if this address needs no keys.

    Raise ConfigError if the keys cannot be read or created.
    """
    if (server_public_key is None) != (client_key is None):
        found = "server_public_key" if client_key is None else "client_key"
        raise ConfigError(
            f"keys: server_public_key and client_key must be set together, but only {found} is set; set both (the "
            "worker identifies clients by the keys in its clients_file)"
        )
    if server_public_key is not None and client_key is not None:
        return ClientKeys(_public_key(server_public_key), *_key_pair(client_key))
    if address.startswith("tcp://"):
        own = _OwnKeys.load()
        return ClientKeys(own.server_public.encode(), own.client_public.encode(), own.client_secret.encode())
    return None


def serve_curve(router: zmq.Socket[bytes], keys: ServerKeys) -> None:
    """Configure a socket to accept only clients with known keys. Call this function before the socket is bound."""
    router.set(zmq.CURVE_SERVER, 1)
    router.set(zmq.CURVE_PUBLICKEY, keys.public)
    router.set(zmq.CURVE_SECRETKEY, keys.secret)


def use_curve(dealer: zmq.Socket[Any], keys: ClientKeys) -> None:
    """Configure a client's socket to use `keys`. Call this function before the socket is connected."""
    dealer.set(zmq.CURVE_SERVERKEY, keys.server_public)
    dealer.set(zmq.CURVE_PUBLICKEY, keys.public)
    dealer.set(zmq.CURVE_SECRETKEY, keys.secret)


def read_clients(path: str) -> dict[str, Client]:
    """Read a worker's clients file. Return a map from public keys to clients.

    Each line of the file has a role, a user and a key. A user may have several keys. Empty lines and lines that begin
    with # are ignored. Raise ConfigError if the file cannot be read, if users other than the owner can write it, or if
    a line is invalid.
    """
    try:
        _check_owner(os.stat(path), stat.S_ISREG, 0o022)
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"clients_file: cannot use {path}: {error}; give a text file that belongs to you and that only you can "
            "write (run chmod go-w on it)"
        ) from None
    return parse_clients("clients_file", path, text, _check_key)


def parse_clients(setting: str, path: str, text: str, check_key: Callable[[str, str], None]) -> dict[str, Client]:
    """Parse the text of a clients file, in the format that `read_clients` describes. Return a map from keys to clients.

    `check_key(where, key)` raises ConfigError if `key` is not a valid key. Raise ConfigError if a line is invalid, a
    key appears twice or there are no clients. Errors name the setting, the file and the line, but never contain the
    key, which may be secret.
    """
    clients: dict[str, Client] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip() and not line.startswith("#"):
            where = f"{setting}: {path}, line {number}"
            key, client = _parse_client(where, line)
            check_key(where, key)
            if key in clients:
                raise ConfigError(f"{where}: this key appears twice; remove one of the lines")
            clients[key] = client
    if not clients:
        raise ConfigError(f"{setting}: {path} has no clients; add at least one")
    return clients


def _parse_client(where: str, line: str) -> tuple[str, Client]:
    words = line.split()
    if len(words) != 3 or words[0] not in get_args(Role) or not _USER.fullmatch(words[1]):
        raise ConfigError(
            f"{where}: must contain a role ({' or '.join(get_args(Role))}), a user name (up to 64 letters, digits "
            f"and _.@-) and a key (got {len(words)} words that do not match)"
        )
    role, user, key = words
    return key, Client(user, role)  # type: ignore[arg-type]


def read_private_file(setting: str, path: str, most_bytes: int) -> bytes:
    """Return the content of a regular file that belongs to this user or root and that other users cannot read.

    Does not block if the path is a pipe. Raise ConfigError if the file is not regular, belongs neither to this user nor
    to root, can be read by other users, or has more than `most_bytes` bytes.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            _check_owner(os.fstat(file.fileno()), stat.S_ISREG, 0o077)
            data = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting}: cannot use {path}: {error}; give a file that belongs to you and that only you can read (run "
            "chmod 600 on it)"
        ) from None
    if len(data) > most_bytes:
        raise ConfigError(f"{setting}: {path} has more than {most_bytes} bytes; give another file")
    return data


def _public_key(given: Key) -> bytes:
    what = "server_public_key"
    key = _key_or_file(what, given)
    if isinstance(key, bytes):
        return key
    try:
        public = zmq.auth.load_certificate(key)[0]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what}: cannot read a public key from {key}: {error}; correct the path") from None
    _check_key(f"{what}: {key}", public.decode(errors="replace"))
    return public


def _key_pair(given: Key) -> tuple[bytes, bytes]:
    """Return the public and the secret key of a client."""
    key = _key_or_file("client_key", given)
    return (zmq.curve_public(key), key) if isinstance(key, bytes) else _read_certificate("client_key", str(key))


def _key_or_file(what: str, given: Key) -> bytes | Path:
    """Return the key if `given` is a key, or the path if `given` is the path of a key file. Errors never contain
    `given`, which may be secret.
    """
    if isinstance(given, Path):
        return given
    text = given.decode(errors="replace") if isinstance(given, bytes) else given
    if _is_key(text):
        return text.encode()
    if isinstance(given, str) and os.path.exists(given):
        return Path(given)
    raise ConfigError(
        f"{what}: must be the {KEY_CHARS} Z85 characters of a CURVE key, or a file from zmq.auth.create_certificates "
        f"(got a text of {len(text)} characters that is neither)"
    )


def _is_key(key: str) -> bool:
    return len(key) == KEY_CHARS and set(key.encode()) <= set(Z85CHARS)


def _check_key(what: str, key: str) -> None:
    if not _is_key(key):
        found = f"{len(key)} characters" if len(key) != KEY_CHARS else "characters that are not Z85"
        raise ConfigError(
            f"{what}: a CURVE key has {KEY_CHARS} Z85 characters (got {found}); copy the public-key from the .key file"
        )


def _read_certificate(setting: str, path: str) -> tuple[bytes, bytes]:
    """Return the public and the secret key in a file made by `zmq.auth.create_certificates`.

    Raise ConfigError if other users can read the file, or if the file does not contain a valid pair of keys.
    """
    try:
        _check_owner(os.stat(path), stat.S_ISREG, 0o077)
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting}: cannot use {path}: {error}; give a key file that belongs to you and that only you can read "
            "(run chmod 600 on it)"
        ) from None
    if secret is None:
        raise ConfigError(f"{setting}: {path} has no secret key; give the .key_secret file")
    if not _is_key(secret.decode(errors="replace")) or zmq.curve_public(secret) != public:
        raise ConfigError(f"{setting}: the secret and the public key in {path} do not match; create new keys")
    return public, secret


@dataclass(frozen=True)
class _OwnKeys:
    """The keys that all workers and clients of this user share for loopback addresses."""

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)

    @classmethod
    def load(cls) -> _OwnKeys:
        """Read the keys from the user's file, which is created if it does not exist.

        Raise ConfigError if the permissions let other users read or write the file.
        """
        file = _own_folder() / "loopback_keys.json"
        with _explained(file):
            _make_private_folder(file.parent)
            if not os.path.lexists(file):
                cls._create(file)
            own = cls(**json.loads(_read_private(file)))
            for key in astuple(own):
                if not isinstance(key, str) or not _is_key(key):
                    raise ValueError("a value in the file is not a CURVE key")
            return own

    @classmethod
    def _create(cls, file: Path) -> None:
        """Create the file atomically. If another process creates the file at the same time, keep the other process's
        file.
        """
        pairs = [key.decode() for _ in range(2) for key in zmq.curve_keypair()]
        draft = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
        try:
            with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as stream:
                json.dump(asdict(cls(*pairs)), stream)
            with suppress(FileExistsError):
                os.link(draft, file)
        finally:
            draft.unlink(missing_ok=True)


def _own_folder() -> Path:
    """Return the folder for the keys, according to the XDG base directory specification. A relative path in
    XDG_CONFIG_HOME is ignored.
    """
    configured = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    try:
        folder = configured if configured.is_absolute() else Path.home() / ".config"
    except RuntimeError:
        folder = Path()
    if not folder.is_absolute():
        raise ConfigError(
            "keys: there is no home folder to store the keys for tcp addresses; set XDG_CONFIG_HOME, or use an ipc "
            "address"
        )
    return folder / "trueroll"


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"keys: cannot use {file}, your private file of keys for tcp addresses: {error}; remove the file so that "
            "new keys are created, set XDG_CONFIG_HOME to your own folder, or use an ipc address"
        ) from None


def _make_private_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder.lstat(), stat.S_ISDIR, 0o022)


def _read_private(file: Path) -> bytes:
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        _check_owner(os.fstat(descriptor), stat.S_ISREG, 0o077)
        return stream.read()


def _check_owner(status: os.stat_result, is_kind: Callable[[int], bool], forbidden: int) -> None:
    """Raise ValueError unless all of these conditions hold: `is_kind` accepts the file's mode, the file belongs to this
    user or root, and no mode bit of `forbidden` is set.
    """
    if not is_kind(status.st_mode) or status.st_uid not in (os.geteuid(), 0) or status.st_mode & forbidden:
        raise ValueError(f"the mode is {stat.filemode(status.st_mode)} and the owner is user {status.st_uid}")
