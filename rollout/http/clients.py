"""Who asks over HTTP, and as whom: API keys, and the users and roles behind them.

Without a key, and with one for all, everybody may do everything, as one user. With a clients file each key stands for
a user and a role. Owns: digests of the keys, never the keys themselves, and what keeps the cached prefixes of users
apart. Promises that a comparison takes the same time whatever is sent, and whichever key it is.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping, MutableMapping
from typing import Any

from trueroll.errors import ConfigError

from ...engine.request import SamplingParams
from ..config import is_loopback
from ..network.keys import OWNER, Client, parse_clients, read_private_file
from .config import API_KEY_VARIABLE, HttpConfig
from .errors import HttpError

MOST_KEY_BYTES = 4096
MOST_CLIENTS = 1024
"""Each request is compared with all of their keys."""
MOST_FILE_BYTES = 2**18
FEWEST_KEY_CHARS = 16
_CLIENT = "trueroll.client"
GENERATE_PATHS = {
    *("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/tokenize", "/detokenize"),
    *("/v1/models", "/health", "/metrics", "/is_paused", "/is_sleeping"),
    *("/ui/live", "/ui/group", "/ui/tokens", "/ui/score"),
}
"""What the role `generate` opens: samples and scores of one's own, and what `health` and `stats` tell."""


class Clients:
    """`by_key`: the client that each key stands for; empty: everybody may do everything without a key."""

    def __init__(self, by_key: Mapping[bytes, Client]) -> None:
        self._by_digest = [(_digest(key), client) for key, client in by_key.items()]
        self._salts = secrets.token_hex(16)

    @property
    def need_key(self) -> bool:
        """Whether a request without a key is refused."""
        return bool(self._by_digest)

    def find(self, authorization: str) -> Client | None:
        """Return the client that sent this `Authorization` header; None if it has no known key."""
        if not self._by_digest:
            return OWNER
        scheme, _, key = authorization.partition(" ")
        # Digests have one length, so that the time of a comparison tells nothing of a key, not even its length.
        digest, found = _digest(key.strip().encode(errors="replace")), None
        for known, client in self._by_digest:
            found = client if hmac.compare_digest(digest, known) else found
        return found if scheme.lower() == "bearer" else None

    def salted(self, client: Client, params: SamplingParams) -> SamplingParams:
        """Return the parameters that a client's request is computed with. By a salt that nobody else can name, a user's
        requests share cached prefixes with each other alone. Users that name the same `cache_salt` share prefixes.
        """
        if client.user is None:
            return params
        own = f"{self._salts}/{client.user}" if params.cache_salt is None else f"named/{params.cache_salt}"
        return params.model_copy(update=dict(cache_salt=hashlib.sha256(own.encode()).hexdigest()))


def clients_of(config: HttpConfig) -> Clients:
    """Who may ask a front end with these settings. Raise ConfigError if keys are missing, or others can read them."""
    key = api_key(config)
    if config.clients_file is None:
        return Clients({} if key is None else {key: OWNER})
    data = read_private_file("clients_file", config.clients_file, MOST_FILE_BYTES)
    try:
        text = data.decode("utf-8-sig")
    except ValueError:
        raise ConfigError(f"clients_file: {config.clients_file} is not text in UTF-8; correct it") from None
    named = parse_clients("clients_file", config.clients_file, text, _check_key)
    if len(named) > MOST_CLIENTS:
        raise ConfigError(f"clients_file: it has {len(named)} keys; at most {MOST_CLIENTS} can be served; remove some")
    return Clients({key.encode(): client for key, client in named.items()})


def api_key(config: HttpConfig) -> bytes | None:
    """The one key that all clients must send; None if none is needed, or each client has its own. Raise ConfigError if
    there must be one, if it is in a file that others can read, or if clients have their own as well.
    """
    found = os.environ.get(API_KEY_VARIABLE, "").encode(errors="surrogateescape")
    where = API_KEY_VARIABLE
    if config.api_key_file is not None:
        where, found = "api_key_file", read_private_file("api_key_file", config.api_key_file, MOST_KEY_BYTES)
    key = found.strip()
    if not _is_api_key(key) or (config.api_key_file is not None and not key):
        raise ConfigError(f"{where}: expected a key of printable ASCII characters without spaces, found another value")
    if key and config.clients_file is not None:
        raise ConfigError(
            f"clients_file: it has the keys of all clients, and {where} has one more; give one of the two"
        )
    if not key and config.clients_file is None and not is_loopback(config.host):
        raise ConfigError(
            f"host: expected a loopback IP such as 127.0.0.1 where no API key is set, found {config.host!r}; give "
            f"--api-key-file or --clients-file, or set {API_KEY_VARIABLE}"
        )
    return key or None


def _is_api_key(key: bytes) -> bool:
    """Whether a client can send these bytes as a key."""
    return all(0x21 <= byte <= 0x7E for byte in key)


def note_client(scope: MutableMapping[str, Any], client: Client) -> None:
    """Let the handlers of a request know who it is from."""
    scope[_CLIENT] = client


def client_of(scope: Mapping[str, Any]) -> Client:
    """Who a request that was let in is from."""
    return scope[_CLIENT]


def check_role(client: Client, path: str) -> None:
    """Raise HttpError if the client's role does not open a path that is served."""
    if client.role != "control" and path not in GENERATE_PATHS:
        raise HttpError(403, f"{path}: it needs the role control; ask with a key that has it", code="forbidden")


def _check_key(where: str, key: str) -> None:
    if len(key) < FEWEST_KEY_CHARS or not _is_api_key(key.encode()):
        raise ConfigError(
            f"{where}: a key must have at least {FEWEST_KEY_CHARS} printable ASCII characters, such as `openssl rand "
            f"-hex 32` gives; this one has {len(key)} characters"
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
