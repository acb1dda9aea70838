"""Requests to the HTTP server of an engine that is not trusted: every answer is bounded in bytes and in time, redirects
are not followed, and the proxies of the environment are not used.
"""

from __future__ import annotations

import json
import socket
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from threading import Event, Timer
from typing import Any
from urllib.parse import urlsplit

from trueroll.errors import ConfigError, ProtocolError, UnavailableError, brief

MAX_ANSWER_BYTES = 16 * 2**20
ANSWER_SECONDS = 300.0
"""Maximum time, in seconds, from the start of a request to the last byte of its answer."""


class Wire:
    """Sends requests to one HTTP server, each on a connection of its own. Threads may share a wire.

    `url`: `http://HOST:PORT` or `https://HOST:PORT`. `seconds`: see `ANSWER_SECONDS`. Raise ConfigError for any other
    URL.
    """

    def __init__(self, url: str, seconds: float = ANSWER_SECONDS) -> None:
        self.url, self._seconds = url.rstrip("/"), seconds
        try:
            parts = urlsplit(self.url)
            self._host, self._port, self._scheme = parts.hostname, parts.port, parts.scheme
        except ValueError:
            self._host, self._port, self._scheme = None, None, ""
        if self._scheme not in ("http", "https") or not self._host or self.url != f"{self._scheme}://{parts.netloc}":
            raise ConfigError(f"address: {brief(url)} is not the URL of a server; give http://HOST:PORT without a path")
        if "@" in parts.netloc:
            raise ConfigError("address: a user name or password in a URL is not supported; give http://HOST:PORT")

    def get(self, path: str) -> Any:
        """Return the parsed JSON of a GET. Raises as `post`."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send `body` as JSON, and return the parsed JSON of the answer.

        Raise UnavailableError if the server cannot be reached or does not answer in time. Raise ProtocolError for an
        answer with a status other than 200, for an answer of more than `MAX_ANSWER_BYTES`, and for invalid JSON.
        """
        return self._ask("POST", path, json.dumps(body).encode())

    def _ask(self, method: str, path: str, body: bytes | None) -> Any:
        kind = HTTPSConnection if self._scheme == "https" else HTTPConnection
        connection = kind(str(self._host), self._port, timeout=self._seconds)
        late = Event()
        try:
            connection.connect()
            connection.sock.settimeout(None)  # the timer bounds the whole exchange
            timer = Timer(self._seconds, _cut, (connection.sock, late))
            timer.daemon = True
            timer.start()
            try:
                status, found = _exchange(connection, method, path, body)
            finally:
                timer.cancel()
        except (OSError, HTTPException) as error:
            told = f"did not answer within {self._seconds:g} s" if late.is_set() else f"cannot be reached ({error})"
            raise UnavailableError(f"address: the server at {self.url} {told}, for {method} {path}") from None
        finally:
            connection.close()
        if late.is_set():
            raise UnavailableError(f"address: the server at {self.url} did not finish its answer to {method} {path}")
        return self._parsed(f"{method} {path}", status, found)

    def _parsed(self, request: str, status: int, found: bytes) -> Any:
        if len(found) > MAX_ANSWER_BYTES:
            raise ProtocolError(f"{self.url}: the answer to {request} has more than {MAX_ANSWER_BYTES} bytes")
        if status != 200:
            text = brief(found[:400].decode(errors="replace"))
            raise ProtocolError(f"{self.url}: {request} was refused with HTTP status {status}: {text}")
        try:
            return json.loads(found)
        except (ValueError, RecursionError):
            raise ProtocolError(f"{self.url}: the answer to {request} is not valid JSON") from None


def _exchange(connection: HTTPConnection, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
    connection.request(method, path, body, {"Content-Type": "application/json", "Accept": "application/json"})
    response = connection.getresponse()
    return response.status, response.read(MAX_ANSWER_BYTES + 1)


def _cut(connected: socket.socket, late: Event) -> None:
    """Wake up the thread that waits for the server."""
    late.set()
    try:
        connected.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the server closed the connection meanwhile
