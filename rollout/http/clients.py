"""Authentication over HTTP: API keys, and the user and the role of each key.

Without a key, or with one key for all clients, every client may call every path, and all clients count as one user.
With a clients file, each key belongs to a user and a role. Owns: digests of the keys (but not the keys themselves), and
the salts that separate the cached prefixes of different users. Guarantees that the duration of a key comparison reveals
nothing about the keys.
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
from .paths import SAMPLER, TINKER

MOST_KEY_BYTES = 4096
MOST_CLIENTS = 1024
"""Maximum number of keys. More keys are refused, because the key of each request is compared with all known keys."""
MOST_FILE_BYTES = 2**18
FEWEST_KEY_CHARS = 16
_CLIENT = "trueroll.client"
GENERATE_PATHS = {
    *("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/tokenize", "/detokenize"),
    *("/sessions", "/v1/models", "/health", "/metrics", "/is_paused", "/is_sleeping"),
    *("/ui/live", "/ui/group", "/ui/tokens", "/ui/score"),
    *("/generate", "/health_generate", "/server_info", "/get_server_info", "/model_info", "/get_model_info"),
    *("/get_weight_version", "/v1/loads", "/get_load", "/weight_info", "/get_world_size"),
    "/finish_session",
    *(f"{TINKER}/{name}" for name in ("client/config", "client/dynamic_config", "create_session", "session_heartbeat")),
    *(f"{TINKER}/{name}" for name in ("create_sampling_session", "asample", "retrieve_future", "cancel_future")),
    *(f"{TINKER}/{name}" for name in ("telemetry", "healthz", "get_server_capabilities")),
    SAMPLER,
}
"""Paths open to the role `generate`: sampling, scoring, the user's own samples, and the worker's health and stats."""


class Clients:
    """The known clients.

    `by_key`: the client to which each key belongs. If `by_key` is empty, no key is needed, and every client may call
    every path.
    """

    def __init__(self, by_key: Mapping[bytes, Client]) -> None:
        self._by_digest = [(_digest(key), client) for key, client in by_key.items()]
        self._salts = secrets.token_hex(16)

    @property
    def need_key(self) -> bool:
        """Return whether requests without a key are refused."""
        return bool(self._by_digest)

    def find(self, authorization: str) -> Client | None:
        """Return the client that owns the key in this `Authorization` header. Return None if a key is needed and the
        header has no known key. If no key is needed, return `OWNER`.
        """
        if not self._by_digest:
            return OWNER
        scheme, _, key = authorization.partition(" ")
        # All digests have the same length, so the duration of a comparison does not depend on a key or the length of a
        # key.
        digest, found = _digest(key.strip().encode(errors="replace")), None
        for known, client in self._by_digest:
            found = client if hmac.compare_digest(digest, known) else found
        return found if scheme.lower() == "bearer" else None

    def salted(self, client: Client, params: SamplingParams) -> SamplingParams:
        """Return `params` with the cache salt for a request of `client`.

        A request without `cache_salt` gets a salt that only requests of the same user have, so cached prefixes are not
        shared between users. Requests with the same `cache_salt` share prefixes, even across users. If the client has
        no user, `params` is returned unchanged.
        """
        if client.user is None:
            return params
        own = f"{self._salts}/{client.user}" if params.cache_salt is None else f"named/{params.cache_salt}"
        return params.model_copy(update=dict(cache_salt=hashlib.sha256(own.encode()).hexdigest()))


def clients_of(config: HttpConfig) -> Clients:
    """Return the clients of a front end with the settings `config`.

    Raise ConfigError if a required key is missing, if other users can read the keys, or if the clients file is invalid.
    """
    key = api_key(config)
    if config.clients_file is None:
        return Clients({} if key is None else {key: OWNER})
    data = read_private_file("clients_file", config.clients_file, MOST_FILE_BYTES)
    try:
        text = data.decode("utf-8-sig")
    except ValueError:
        raise ConfigError(f"clients_file: {config.clients_file} is not UTF-8 text; correct the file") from None
    named = parse_clients("clients_file", config.clients_file, text, _check_key)
    if len(named) > MOST_CLIENTS:
        raise ConfigError(f"clients_file: {len(named)} keys are too many (limit {MOST_CLIENTS}); remove some")
    return Clients({key.encode(): client for key, client in named.items()})


def api_key(config: HttpConfig) -> bytes | None:
    """Return the key that all clients must send; None if no key is needed or each client has a separate key.

    Raise ConfigError if a required key is missing or malformed, if other users can read the key's file, or if a clients
    file is given in addition to a key.
    """
    if config.api_key_file is not None:
        where, key = "api_key_file", read_api_key(config.api_key_file)
    else:
        where, key = API_KEY_VARIABLE, os.environ.get(API_KEY_VARIABLE, "").encode(errors="surrogateescape").strip()
        _check_sendable(where, key)
    if key and config.clients_file is not None:
        raise ConfigError(
            f"clients_file: cannot be combined with the key in {where}; give only one of the two settings"
        )
    if not key and config.clients_file is None and not is_loopback(config.host):
        raise ConfigError(
            f"host: {config.host!r} is not a loopback IP and needs an API key; give --api-key-file or --clients-file, "
            f"set {API_KEY_VARIABLE}, or listen on 127.0.0.1"
        )
    return key or None


def read_api_key(path: str) -> bytes:
    """Return the API key in a file. Raise ConfigError if the key is missing or malformed, or if other users can read
    the file.
    """
    key = read_private_file("api_key_file", path, MOST_KEY_BYTES).strip()
    _check_sendable("api_key_file", key or b" ")
    return key


def _check_sendable(where: str, key: bytes) -> None:
    if not _is_api_key(key):
        raise ConfigError(f"{where}: an API key must be printable ASCII characters without spaces; correct the key")


def _is_api_key(key: bytes) -> bool:
    """Return whether a key can be sent in a header."""
    return all(0x21 <= byte <= 0x7E for byte in key)


def note_client(scope: MutableMapping[str, Any], client: Client) -> None:
    """Store the client of a request in the request's ASGI scope, so that `client_of` can return the client."""
    scope[_CLIENT] = client


def client_of(scope: Mapping[str, Any]) -> Client:
    """Return the client that sent an admitted request."""
    return scope[_CLIENT]


def check_role(client: Client, path: str) -> None:
    """Raise HttpError if the client's role does not permit `path`, which must be a served path."""
    if client.role != "control" and path not in GENERATE_PATHS:
        raise HttpError(403, f"{path} needs the role 'control'; use a key with this role", code="forbidden")


def _check_key(where: str, key: str) -> None:
    if len(key) < FEWEST_KEY_CHARS or not _is_api_key(key.encode()):
        raise ConfigError(
            f"{where}: a key must have at least {FEWEST_KEY_CHARS} printable ASCII characters (one key has {len(key)} "
            "characters); create a key with `openssl rand -hex 32`"
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
