"""Tokenizers with tokens that split characters, as in real models, and a tokenizer that counts decoded tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WORDS = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁b", "é", "\ufffd", "<special>"]
UNKNOWN = len(WORDS) + 5


@functools.cache
def byte_fallback_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte and a few words, as the first Llama models have."""
    tokenizer = Tokenizer(models.BPE({word: id for id, word in enumerate(WORDS)}, [], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<special>", special=True)])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def byte_level_tokenizer(pieces: Sequence[bytes]) -> Tokenizer:
    """Return a tokenizer with a token for each byte string in `pieces`. A token's id is its index in `pieces`. The id
    after the last piece is a special token.
    """
    to_letter = dict(zip(_byte_level_order(), sorted(pre_tokenizers.ByteLevel.alphabet()), strict=True))
    words = ["".join(to_letter[byte] for byte in piece) for piece in pieces]
    model = models.BPE({word: id for id, word in enumerate(words)}, [])
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([AddedToken("<special>", special=True)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_level_order() -> list[int]:
    """Return the bytes in the order of the letters that represent them in a byte-level vocabulary. A visible byte is
    represented by its own character.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return visible + [byte for byte in range(256) if byte not in visible]


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_decoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, token_ids: list[int], **options: bool) -> str:
        self.num_decoded += len(token_ids)
        return self._tokenizer.decode(token_ids, **options)
