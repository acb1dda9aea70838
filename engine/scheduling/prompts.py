"""The prompts that running or waiting sequences are computing, so that a request with the same one can join.

Owns which sequence computes which prompt. Does not own sequences, nor what is cached of prompts (`prefix_cache`).
"""

from __future__ import annotations

from array import array

from ..cache.chains import Chain
from ..request import ContentSpan
from .sequence import Sequence

_Key = tuple[bytes, bytes, tuple[ContentSpan, ...], bool]


class SharedPrompts:
    """By the tokens of a prompt and what else identifies its blocks: the sequence that computes it, until its first
    token is drawn.
    """

    def __init__(self) -> None:
        self._sequences: dict[_Key, Sequence] = {}

    def find(self, tokens: array[int], chain: Chain) -> Sequence | None:
        """The sequence that computes the prompt of these tokens and this chain; its samples may still grow in number.
        None if a sequence of one with records is wanted, and there is but one without, or the other way round.
        """
        return self._sequences.get(_key_of(tokens, chain))

    def add(self, sequence: Sequence) -> None:
        """Lets others join a sequence that has a prompt and nothing else."""
        self._sequences[_key_of(sequence.tokens, sequence.chain)] = sequence

    def close(self, sequence: Sequence) -> None:
        """No further request may join this computation of a prompt."""
        key = _key_of(sequence.tokens, sequence.chain)
        if self._sequences.get(key) is sequence:
            del self._sequences[key]

    def clear(self) -> None:
        """No further request may join any of them."""
        self._sequences.clear()


def _key_of(tokens: array[int], chain: Chain) -> _Key:
    return tokens.tobytes(), chain.salt, tuple(chain.spans), chain.has_records
