"""The identity of blocks: what a block's KV is a function of, as a hash; and the prefixes that such hashes name.

A full block's identity is a chain: a 128-bit hash of its parent's hash, its token ids and its extra identity, keyed by
a secret of this process that changes with every epoch. Extra identity are the request's cache salt and the spans of
content other than text that touch the block, each with its place relative to the block. Whoever compares two blocks
compares token ids, extra identity and parents as well: a hash alone never decides.

Owns the secret and the epoch. Does not own the index of published prefixes (`prefix_cache`).
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..request import ContentSpan, content_within


@dataclass(eq=False, slots=True)
class Entry:
    """A published prefix: its place in the index and what it ends with. `parent` is the one a block shorter.

    `blocks`: of each group, that with the KV of its last tokens; None if that was handed out. `num_children`: of how
    many entries in the index it is the parent.
    """

    hash: bytes
    parent: Entry | None = field(repr=False)
    tokens: bytes
    extra: bytes
    blocks: list[int | None]
    num_children: int = 0


@dataclass(slots=True)
class Chain:
    """The identity of one sequence's full blocks under one epoch.

    `hashes[i]` identifies block i; each is computed once. `entries[i]` is where block i was found or published. Hashes
    cover the blocks [0, known full blocks); entries, while the sequence runs, the blocks [0, computed full blocks).
    `salt`: extra identity of every block. `spans`: content other than text, sorted. `has_records`: what it publishes is
    published with a record that others may wait for.
    """

    epoch: int
    salt: bytes
    spans: Sequence[ContentSpan] = ()
    has_records: bool = False
    hashes: list[bytes] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    def fork(self) -> Chain:
        """A chain that begins like this one and goes on by itself."""
        return Chain(self.epoch, self.salt, self.spans, self.has_records, self.hashes.copy(), self.entries.copy())


def _extra(salt: bytes, spans: bytes) -> bytes:
    """Bytes that no other salt and spans have."""
    return b"spans:" + len(spans).to_bytes(4, "little") + spans + salt


class BlockIdentity:
    """Hashes blocks of `block_size` tokens. `epoch`: how often `renew` was called."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.epoch = 0
        self._key = secrets.token_bytes(32)

    def renew(self) -> None:
        """Begin the next epoch: chains of the ones before name no block any more."""
        self.epoch += 1
        self._key = secrets.token_bytes(32)

    def new_chain(self, cache_salt: str | None, spans: Sequence[ContentSpan] = (), has_records: bool = False) -> Chain:
        """An empty chain of the current epoch. Chains with different salts never share a block."""
        salt = b"" if cache_salt is None else b"salt:" + cache_salt.encode()
        return Chain(self.epoch, salt, spans, has_records)

    def restart(self, chain: Chain) -> Chain:
        """An empty chain of the current epoch with the extra identity of another one."""
        return Chain(self.epoch, chain.salt, chain.spans, chain.has_records)

    def extend(self, chain: Chain, tokens: array[int], num_blocks: int) -> None:
        """Compute the hashes of the first `num_blocks` blocks that a chain lacks."""
        for i in range(len(chain.hashes), num_blocks):
            parent = chain.hashes[-1] if chain.hashes else bytes(16)
            chain.hashes.append(self._digest(parent + b"".join(self.content(chain, tokens, i))))

    def content(self, chain: Chain, tokens: array[int], i: int) -> tuple[bytes, bytes]:
        """What block i holds: its token ids, and its extra identity."""
        start, end = i * self.block_size, (i + 1) * self.block_size
        spans = content_within(chain.spans, start, end) if chain.spans else b""
        return tokens[start:end].tobytes(), _extra(chain.salt, spans) if spans else chain.salt

    def _digest(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=16, key=self._key).digest()
