"""Claims: the blocks that running sequences are about to compute, so that others wait for them instead.

Owns which chain computes which block. Does not own who waits (`scheduling.waiting`).
"""

from __future__ import annotations

from collections.abc import Iterable

from .chains import Chain


class Claims:
    """By the hash of a block: the chain that computes it."""

    def __init__(self) -> None:
        self._chains: dict[bytes, Chain] = {}

    def __contains__(self, key: bytes) -> bool:
        """Whether the block with this hash is being computed."""
        return key in self._chains

    def find(self, chain: Chain, keys: Iterable[bytes]) -> bytes | None:
        """Of blocks that follow one another and are being computed by other chains, with records if this one has some,
        the hash of the last one in a row; None if the first one is not.
        """
        found = None
        for key in keys:
            other = self._chains.get(key, chain)
            if other is chain or chain.has_records > other.has_records:
                break
            found = key
        return found

    def add(self, chain: Chain) -> None:
        """Announce that the owner of `chain` is about to compute all its known blocks that no one else has claimed."""
        for key in chain.hashes[len(chain.entries) :]:
            self._chains.setdefault(key, chain)

    def withdraw(self, chain: Chain) -> None:
        """Withdraw what `add` announced and nothing has fulfilled."""
        for key in chain.hashes[len(chain.entries) :]:
            self.fulfil(chain, key)

    def fulfil(self, chain: Chain, key: bytes) -> None:
        """A chain no longer computes this block; a claim of another chain on it stays."""
        if self._chains.get(key) is chain:
            del self._chains[key]

    def clear(self) -> None:
        """Forget all of them."""
        self._chains.clear()
