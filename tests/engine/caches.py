"""Prefix caches with other hash functions, for tests."""

from __future__ import annotations

import zlib
from array import array
from typing import Any

from trueroll.engine.cache.prefix_cache import BlockIdentity, Chain, Entry, PrefixCache


class _CountingIdentity(BlockIdentity):
    digests = 0

    def _digest(self, content: bytes) -> bytes:
        self.digests += 1
        return super()._digest(content)


class _CollidingIdentity(_CountingIdentity):
    def _digest(self, content: bytes) -> bytes:
        super()._digest(content)
        return bytes([zlib.crc32(content) & 1] * 16)


class CountingCache(PrefixCache):
    """A prefix cache that counts the hashes it computes and the prefixes it looks up."""

    lookups = 0
    make_identity: type[_CountingIdentity] = _CountingIdentity

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.identity: _CountingIdentity = self.make_identity(self.block_size)

    @property
    def digests(self) -> int:
        return self.identity.digests

    def lookup(self, chain: Chain, tokens: array[int], limit: int) -> list[Entry]:
        self.lookups += 1
        return super().lookup(chain, tokens, limit)


class CollidingCache(CountingCache):
    """A prefix cache with only two different hashes, so that hashes collide."""

    make_identity = _CollidingIdentity
