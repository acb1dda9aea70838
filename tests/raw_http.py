"""Connections to HTTP servers, for tests that send arbitrary bytes."""

from __future__ import annotations

import json
import socket
from typing import Any


class Raw:
    """A connection to a server. Tests can send bytes that no HTTP library would send."""

    def __init__(self, connection: socket.socket, key: str = "none") -> None:
        self.socket = connection
        self._file = connection.makefile("rb")
        self._key = key

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send_head(self, method: str, path: str, *headers: str) -> None:
        """Send a whole head, with `Host` and the key."""
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {self._key}", *headers]
        self.send("\r\n".join([*lines, "", ""]).encode())

    def line(self) -> bytes:
        """Return the next line of an answer."""
        return self._file.readline()

    def send_until_refused(self, data: bytes, most: int = 2**30) -> int:
        """Send `data` again and again until the connection breaks. Return how many bytes were sent."""
        sent = 0
        while sent < most:
            try:
                self.socket.sendall(data)
            except ConnectionError:
                break
            sent += len(data)
        return sent

    def answer(self) -> tuple[int, dict[str, str], Any]:
        """Return status, headers (lower-case names) and JSON of the next answer, which must have a content length."""
        status = int(self._file.readline().split()[1])
        lines = iter(self._file.readline, b"\r\n")
        headers = {name.lower(): value.strip() for name, value in (line.decode().split(":", 1) for line in lines)}
        return status, headers, json.loads(self._file.read(int(headers["content-length"])))

    def is_closed(self) -> bool:
        """Wait until the server closes the connection, and return True. Raise AssertionError if more data arrives."""
        try:
            rest = self._file.read(1)
        except ConnectionError:
            rest = b""
        assert rest == b"", rest
        return True
