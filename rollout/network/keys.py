"""Who may speak to a worker, and as whom: CURVE keys, and the users and roles behind them.

A worker knows its clients in one of three ways. Over an ipc socket of its own user's it needs no keys: whoever gets
there is that user. On a TCP port of loopback, which any user of the machine can reach, worker and clients use the keys
in a file of their user's, made when it is first needed. With `curve_secret_key_file` and `clients_file`, on any
address, clients have names and roles. Does not own sockets. No secret leaves this module but into a socket's options.
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
"""`generate`: samples and scores, aborts of one's own requests, health and stats. `control`: everything."""
Key: TypeAlias = str | bytes | Path
"""A CURVE key in Z85, or the file of `zmq.auth.create_certificates` that holds it."""
KEY_CHARS = 40
_USER = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


@dataclass(frozen=True)
class Client:
    """Whoever sent a message. `user`: None where all who can connect count as one."""

    user: str | None
    role: Role


OWNER = Client(None, "control")
"""Of a worker whose clients have no names."""


@dataclass(frozen=True)
class ServerKeys:
    """A worker's, in Z85, and who its clients are by their public keys."""

    public: bytes
    secret: bytes = field(repr=False)
    clients: Mapping[str, Client]


@dataclass(frozen=True)
class ClientKeys:
    """A client's, in Z85, and the worker's public one."""

    server_public: bytes
    public: bytes
    secret: bytes = field(repr=False)


def server_keys(config: WorkerConfig) -> ServerKeys | None:
    """The keys for the configured address; None: it needs none. Raise ConfigError if they cannot be read or made."""
    if config.curve_secret_key_file is not None and config.clients_file is not None:
        public, secret = _read_certificate("curve_secret_key_file", config.curve_secret_key_file)
        return ServerKeys(public, secret, read_clients(config.clients_file))
    if config.address is not None and config.address.startswith("tcp://"):
        own = _OwnKeys.load()
        return ServerKeys(own.server_public.encode(), own.server_secret.encode(), {own.client_public: OWNER})
    return None


def client_keys(address: str, server_public_key: Key | None, client_key: Key | None) -> ClientKeys | None:
    """The keys for a worker at `address`; None: it needs none. Raise ConfigError if they cannot be read or made."""
    if (server_public_key is None) != (client_key is None):
        found = "server_public_key" if client_key is None else "client_key"
        raise ConfigError(
            f"keys: expected server_public_key and client_key together, or neither, found only {found}; give both: the "
            "worker knows its clients by their keys (clients_file)"
        )
    if server_public_key is not None and client_key is not None:
        return ClientKeys(_public_key(server_public_key), *_key_pair(client_key))
    if address.startswith("tcp://"):
        own = _OwnKeys.load()
        return ClientKeys(own.server_public.encode(), own.client_public.encode(), own.client_secret.encode())
    return None


def serve_curve(router: zmq.Socket[bytes], keys: ServerKeys) -> None:
    """Let a socket that is not bound yet accept who speaks with the right keys."""
    router.set(zmq.CURVE_SERVER, 1)
    router.set(zmq.CURVE_PUBLICKEY, keys.public)
    router.set(zmq.CURVE_SECRETKEY, keys.secret)


def use_curve(dealer: zmq.Socket[Any], keys: ClientKeys) -> None:
    """Let a socket that is not connected yet speak with these keys."""
    dealer.set(zmq.CURVE_SERVERKEY, keys.server_public)
    dealer.set(zmq.CURVE_PUBLICKEY, keys.public)
    dealer.set(zmq.CURVE_SECRETKEY, keys.secret)


def read_clients(path: str) -> dict[str, Client]:
    """Who a worker's clients are, by public key: on each line of the file a role, a user and a key. A user may have
    several keys. Empty lines and those that begin with # are passed over. Raise ConfigError for any other file.
    """
    try:
        _check_owner(os.stat(path), stat.S_ISREG, 0o022)
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"clients_file: expected a text file of yours that others cannot write, found {path}: {error}; correct the "
            "path, or run chmod go-w on it"
        ) from None
    return parse_clients("clients_file", path, text, _check_key)


def parse_clients(setting: str, path: str, text: str, check_key: Callable[[str, str], None]) -> dict[str, Client]:
    """The clients in the text of a file as `read_clients` describes it, by key. `check_key(where, key)` raises
    ConfigError for what is no key. Errors name the setting, the file and the line, and never show a key: it may be a
    secret. Raise ConfigError.
    """
    clients: dict[str, Client] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip() and not line.startswith("#"):
            where = f"{setting}: {path}, line {number}"
            key, client = _parse_client(where, line)
            check_key(where, key)
            if key in clients:
                raise ConfigError(f"{where}: expected each key once, found it twice")
            clients[key] = client
    if not clients:
        raise ConfigError(f"{setting}: expected at least one client in {path}, found none; add one")
    return clients


def _parse_client(where: str, line: str) -> tuple[str, Client]:
    words = line.split()
    if len(words) != 3 or words[0] not in get_args(Role) or not _USER.fullmatch(words[1]):
        raise ConfigError(
            f"{where}: expected a role ({' or '.join(get_args(Role))}), a user of up to 64 letters, digits and _.@-, "
            f"and a key, found {len(words)} words that are not these; correct the line"
        )
    role, user, key = words
    return key, Client(user, role)  # type: ignore[arg-type]


def read_private_file(setting: str, path: str, most_bytes: int) -> bytes:
    """Read a regular file that belongs to this user or to root, and that nobody else can read. Never waits for the
    other end of a pipe. Raise ConfigError for any other file, and for one of more than `most_bytes`.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            _check_owner(os.fstat(file.fileno()), stat.S_ISREG, 0o077)
            data = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting}: expected a file of yours that nobody else can read, found {path}: {error}; correct the path, "
            "or run chmod 600 on it"
        ) from None
    if len(data) > most_bytes:
        raise ConfigError(f"{setting}: {path} has more than {most_bytes} bytes; name another file")
    return data


def _public_key(given: Key) -> bytes:
    what = "server_public_key"
    key = _key_or_file(what, given)
    if isinstance(key, bytes):
        return key
    try:
        public = zmq.auth.load_certificate(key)[0]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what}: expected a file with a public key, found {key}: {error}; correct it") from None
    _check_key(f"{what}: {key}", public.decode(errors="replace"))
    return public


def _key_pair(given: Key) -> tuple[bytes, bytes]:
    """The public and the secret key of a client."""
    key = _key_or_file("client_key", given)
    return (zmq.curve_public(key), key) if isinstance(key, bytes) else _read_certificate("client_key", str(key))


def _key_or_file(what: str, given: Key) -> bytes | Path:
    """The key itself, or the file that has it. No error shows what may be a secret."""
    if isinstance(given, Path):
        return given
    text = given.decode(errors="replace") if isinstance(given, bytes) else given
    if _is_key(text):
        return text.encode()
    if isinstance(given, str) and os.path.exists(given):
        return Path(given)
    raise ConfigError(
        f"{what}: expected the {KEY_CHARS} Z85 characters of a CURVE key, or a file of zmq.auth.create_certificates, "
        f"found {len(text)} characters that are neither; correct it"
    )


def _is_key(key: str) -> bool:
    return len(key) == KEY_CHARS and set(key.encode()) <= set(Z85CHARS)


def _check_key(what: str, key: str) -> None:
    if not _is_key(key):
        found = f"{len(key)} characters" if len(key) != KEY_CHARS else "others among them"
        raise ConfigError(
            f"{what}: expected the {KEY_CHARS} Z85 characters of a CURVE key, found {found}; copy the public-key of "
            "the .key file"
        )


def _read_certificate(setting: str, path: str) -> tuple[bytes, bytes]:
    """The public and the secret key in a file of `zmq.auth.create_certificates` that nobody else can read."""
    try:
        _check_owner(os.stat(path), stat.S_ISREG, 0o077)
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting}: expected a file with keys that is yours and that nobody else can read, found {path}: {error}; "
            "correct the path, or run chmod 600 on it"
        ) from None
    if secret is None:
        raise ConfigError(f"{setting}: {path} has no secret key; name the .key_secret file")
    if not _is_key(secret.decode(errors="replace")) or zmq.curve_public(secret) != public:
        raise ConfigError(f"{setting}: expected a secret key and its public one in {path}, found others; make new ones")
    return public, secret


@dataclass(frozen=True)
class _OwnKeys:
    """The keys that all workers and clients of this user share on loopback."""

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)

    @classmethod
    def load(cls) -> _OwnKeys:
        """Those in the user's file, made now if there is none. Raise ConfigError if others might have a hand in it."""
        file = _own_folder() / "loopback_keys.json"
        with _explained(file):
            _make_private_folder(file.parent)
            if not os.path.lexists(file):
                cls._create(file)
            own = cls(**json.loads(_read_private(file)))
            for key in astuple(own):
                if not isinstance(key, str) or not _is_key(key):
                    raise ValueError("something else in the place of a key")
            return own

    @classmethod
    def _create(cls, file: Path) -> None:
        """Whole, or not at all, and not over a file that another process has made meanwhile."""
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
    """As the XDG base directory specification has it: a relative path counts as none."""
    configured = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    try:
        folder = configured if configured.is_absolute() else Path.home() / ".config"
    except RuntimeError:
        folder = Path()
    if not folder.is_absolute():
        raise ConfigError(
            "keys: expected a home folder for the keys of tcp addresses, found none; set XDG_CONFIG_HOME, or use ipc"
        )
    return folder / "trueroll"


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"keys: expected {file}, with the keys for tcp addresses of this user alone, found {error}; remove it to "
            "have new keys made, set XDG_CONFIG_HOME to a folder of your own, or use an ipc address"
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
    """Raise ValueError unless it is of this kind, this user's or root's, and without the forbidden permissions."""
    if not is_kind(status.st_mode) or status.st_uid not in (os.geteuid(), 0) or status.st_mode & forbidden:
        raise ValueError(f"mode {stat.filemode(status.st_mode)} of user {status.st_uid}")
