"""Prefix caches with other hash functions, for tests."""

from __future__ import annotations

import zlib

from trueroll.engine.prefix_cache import PrefixCache


class CountingCache(PrefixCache):
    """Counts the hashes it computes."""

    digests = 0

    def _digest(self, content: bytes) -> bytes:
        self.digests += 1
        return super()._digest(content)


class CollidingCache(CountingCache):
    """Knows only two hashes."""

    def _digest(self, content: bytes) -> bytes:
        super()._digest(content)
        return bytes([zlib.crc32(content) & 1] * 16)
