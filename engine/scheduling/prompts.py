"""The prompts that running or waiting sequences are computing, so that a request with the same one can join.

Owns which sequence computes which prompt. Does not own sequences, nor what is cached of prompts (`prefix_cache`).
"""

from __future__ import annotations

from .sequence import Sequence

_Key = tuple[bytes, str | None, bool]


class SharedPrompts:
    """By the tokens of a prompt, the salt of the cache, and whether routed experts are recorded: the sequence that
    computes it, until its first token is drawn.
    """

    def __init__(self) -> None:
        self._sequences: dict[_Key, Sequence] = {}

    def find(self, tokens: bytes, cache_salt: str | None, records: bool) -> Sequence | None:
        """The sequence that computes this prompt; its samples may still grow in number."""
        return self._sequences.get((tokens, cache_salt, records))

    def add(self, sequence: Sequence) -> None:
        """Lets others join a sequence that has a prompt and nothing else."""
        self._sequences[_key_of(sequence)] = sequence

    def close(self, sequence: Sequence) -> None:
        """No further request may join this computation of a prompt."""
        key = _key_of(sequence)
        if self._sequences.get(key) is sequence:
            del self._sequences[key]

    def clear(self) -> None:
        """No further request may join any of them."""
        self._sequences.clear()


def _key_of(sequence: Sequence) -> _Key:
    return sequence.tokens.tobytes(), sequence.cache_salt, sequence.routes is not None
