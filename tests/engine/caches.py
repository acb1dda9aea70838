"""Prefix caches with other hash functions, for tests."""

from __future__ import annotations

import zlib
from array import array

from trueroll.engine.cache.prefix_cache import Chain, Entry, PrefixCache


class CountingCache(PrefixCache):
    """Counts the hashes it computes and the prefixes it looks up."""

    digests = 0
    lookups = 0

    def lookup(self, chain: Chain, tokens: array[int], limit: int) -> list[Entry]:
        self.lookups += 1
        return super().lookup(chain, tokens, limit)

    def _digest(self, content: bytes) -> bytes:
        self.digests += 1
        return super()._digest(content)


class CollidingCache(CountingCache):
    """Knows only two hashes."""

    def _digest(self, content: bytes) -> bytes:
        super()._digest(content)
        return bytes([zlib.crc32(content) & 1] * 16)
