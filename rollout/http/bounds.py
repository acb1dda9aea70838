"""Limits on the head of a request and on the framing of its body."""

from __future__ import annotations

import re

import h11

from .config import HttpConfig
from .errors import HttpError

READ_BYTES = 2**15
"""Maximum number of bytes that are read from a connection at a time. If a request's body has at least this number of
bytes that the application has not received yet, the connection stops reading.
"""
CHUNK_OVERHEAD_BYTES = 16
"""Allowed average length of a chunk's size line, in bytes."""
_HEAD_END = re.compile(rb"\n\r?\n")


class Head:
    """Limits the bytes and the lines of a request's head while the head arrives."""

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        self.num_bytes = 0
        self._num_lines = 0
        self._tail = b""

    def add(self, data: bytes) -> None:
        """Add received bytes. Raise HttpError if the head has too many bytes or lines."""
        joined = self._tail + data
        found = _HEAD_END.search(joined)
        end = len(joined) if found is None else found.end()
        self.num_bytes += end - len(self._tail)
        self._num_lines += joined.count(b"\n", len(self._tail), end)
        self._tail = joined[-2:]
        if self.num_bytes > self._config.max_head_bytes:
            text = f"head: more than {self._config.max_head_bytes} bytes; send fewer or shorter headers"
            raise HttpError(431, text, limit=self._config.max_head_bytes, code="head_too_large")
        if self._num_lines > self._config.max_head_lines:
            text = f"head: more than {self._config.max_head_lines} lines; send fewer headers"
            raise HttpError(431, text, limit=self._config.max_head_lines, code="head_too_large")


class Framing:
    """Limits the overhead of a body: the number of chunks, and the bytes of chunk sizes, extensions and trailers."""

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        self.num_received = 0
        self._num_content = 0
        self._num_chunks = 0

    def add(self, data: h11.Data) -> None:
        """Count a received part of the body. Raise HttpError if there are too many chunks or too much overhead."""
        self._num_content += len(data.data)
        self._num_chunks += data.chunk_start
        if self._num_chunks > self._config.max_body_chunks:
            text = f"body: more than {self._config.max_body_chunks} chunks; send longer chunks, or Content-Length"
            raise HttpError(413, text, limit=self._config.max_body_chunks, code="body_too_large")
        more = self._config.max_head_bytes + READ_BYTES + CHUNK_OVERHEAD_BYTES * self._num_chunks
        if self.num_received - self._num_content > more:
            raise HttpError(413, "body: chunk extensions are too long; omit them", code="body_too_large")


def check_framing(request: h11.Request) -> None:
    """Raise HttpError if servers and proxies may disagree about the length of the request (RFC 9112, 6.1)."""
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" in names and b"content-length" in names:
        raise HttpError(
            400, "head: the request has both Content-Length and Transfer-Encoding; send only one of the two headers"
        )
    if b"transfer-encoding" in names and request.http_version < b"1.1":
        raise HttpError(400, "head: HTTP/1.0 does not support Transfer-Encoding; send Content-Length")
