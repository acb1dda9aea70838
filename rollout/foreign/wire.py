"""Requests to the HTTP server of an engine that is not trusted: every answer is bounded in bytes and in time, redirects
are not followed, and proxies that environment variables name are not used.
"""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from threading import Event, Timer
from typing import Any
from urllib.parse import urlsplit

from trueroll.errors import ConfigError, ProtocolError, UnavailableError, brief, said

MAX_ANSWER_BYTES = 2**20
"""Maximum size of an answer in bytes: more than 100 times the size that an audit expects. Parsed JSON needs up to 30
times its bytes.
"""
ANSWER_SECONDS = 300.0
"""Maximum time, in seconds, from the connection to the server to the last byte of an answer."""
_PORTS = {"http": 80, "https": 443}
_ADVICE = {
    401: "give the server's API key with --api-key-file",
    403: "give the server's API key with --api-key-file",
    404: "give the URL of a server of vLLM, SGLang or `trueroll http`",
}


class Wire:
    """Sends requests to one HTTP server, each request on its own connection. Several threads may share a `Wire`.

    `url`: `http://HOST:PORT` or `https://HOST:PORT`. `api_key`: sent with each request as a bearer token. `seconds`:
    see `ANSWER_SECONDS`. Raise ConfigError if `url` has any other form.
    """

    def __init__(self, url: str, api_key: str | None = None, seconds: float = ANSWER_SECONDS) -> None:
        self.url, self._seconds = url.rstrip("/"), seconds
        try:
            parts = urlsplit(self.url)
            host, port, scheme = parts.hostname, parts.port, parts.scheme
        except ValueError:
            host, port, scheme = None, None, ""
        if scheme not in _PORTS or not host or " " in host or self.url != f"{scheme}://{parts.netloc}":
            raise ConfigError(f"address: {brief(url)} is not the URL of a server; give http://HOST:PORT without a path")
        if "@" in parts.netloc:
            raise ConfigError("address: a user name or password in a URL is not supported; give http://HOST:PORT")
        self._host, self._port = host, _PORTS[scheme] if port is None else port
        self._tls = ssl.create_default_context() if scheme == "https" else None
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> Any:
        """Send a GET request, and return the parsed JSON of the answer. Raise the same errors as `post`."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send `body` as JSON, and return the parsed JSON of the answer.

        Raise UnavailableError if the server cannot be reached or does not answer in time. Raise ProtocolError for an
        answer with a status other than 200, for an answer of more than `MAX_ANSWER_BYTES`, and for invalid JSON.
        """
        return self._ask("POST", path, json.dumps(body).encode())

    def _ask(self, method: str, path: str, body: bytes | None) -> Any:
        late = Event()
        try:
            with self._connected(late) as connection:
                connection.request(method, path, body, self._headers)
                response = connection.getresponse()
                status, found = response.status, response.read(MAX_ANSWER_BYTES + 1)
        except (OSError, HTTPException, UnicodeError) as error:  # UnicodeError: a host that is no domain name
            is_http = isinstance(error, HTTPException) and not isinstance(error, OSError)
            told = f"{'sent no complete answer' if is_http else 'cannot be reached'} ({said(error)})"
            told = f"did not answer within {self._seconds:g} s" if late.is_set() else told
            raise UnavailableError(f"address: the server at {self.url} {told}, for {method} {path}") from None
        if late.is_set():
            raise UnavailableError(f"address: the server at {self.url} did not finish its answer to {method} {path}")
        return self._parsed(f"{method} {path}", status, found)

    @contextmanager
    def _connected(self, late: Event) -> Iterator[HTTPConnection]:
        """Context manager that connects to the server. After `self._seconds` seconds, the event `late` is set and the
        connection is shut down.
        """
        connection = HTTPConnection(self._host, self._port, timeout=self._seconds)
        timer = None
        try:
            connection.connect()
            if self._tls is not None:
                connection.sock = self._tls.wrap_socket(
                    connection.sock, server_hostname=self._host, do_handshake_on_connect=False
                )
            connection.sock.settimeout(None)  # the timer bounds the whole exchange
            timer = Timer(self._seconds, _cut, (connection.sock, late))
            timer.daemon = True
            timer.start()
            if isinstance(connection.sock, ssl.SSLSocket):
                connection.sock.do_handshake()
            yield connection
        finally:
            if timer is not None:
                timer.cancel()
            connection.close()

    def _parsed(self, request: str, status: int, found: bytes) -> Any:
        if len(found) > MAX_ANSWER_BYTES:
            raise ProtocolError(f"{self.url}: the answer to {request} has more than {MAX_ANSWER_BYTES} bytes")
        if status != 200:
            text, advice = said(found.decode(errors="replace")), _ADVICE.get(status)
            raise ProtocolError(
                f"{self.url}: {request} was refused with HTTP status {status}: {text}{f'; {advice}' if advice else ''}"
            )
        try:
            return json.loads(found)
        except (ValueError, RecursionError):
            raise ProtocolError(f"{self.url}: the answer to {request} is not valid JSON") from None


def _cut(connected: socket.socket, late: Event) -> None:
    """Shut down the connection, to wake up the thread that waits for the server. The method `shutdown` of
    `ssl.SSLSocket` is not called, because this method would change objects that the waiting thread is using.
    """
    late.set()
    try:
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
    except OSError:
        pass  # the server closed the connection meanwhile
