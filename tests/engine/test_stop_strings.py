"""Stop strings are found in the text of any tokens, also of those that make no valid text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from trueroll.engine.errors import InvalidRequestError
from trueroll.engine.stop_strings import StopStrings, load_tokenizer

WORDS = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁b", "é"]


def byte_fallback_tokenizer() -> Tokenizer:
    """One token per byte, and a few words, as the tokenizers of the first Llama models have them."""
    tokenizer = Tokenizer(models.BPE({word: id for id, word in enumerate(WORDS)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def feed(stops: list[str], words: list[str]) -> list[bool]:
    watch = StopStrings(byte_fallback_tokenizer(), stops)
    return [watch.feed(WORDS.index(word)) for word in words]


def test_a_stop_string_may_span_tokens_and_end_within_one() -> None:
    assert feed(["a b"], ["a", "▁b", "a"]) == [False, True, False]
    assert feed(["xx", " "], ["a", "▁b"]) == [False, True]


def test_a_character_counts_when_its_last_byte_is_there() -> None:
    assert feed(["é"], ["a", "<0xC3>", "<0xA9>"]) == [False, False, True]


def test_a_stop_string_counts_at_the_token_that_ends_it_only() -> None:
    assert feed(["a", "never in the text"], ["a", "▁b", "▁b"]) == [True, False, False]


@given(st.lists(st.integers(0, len(WORDS) + 5), max_size=40))
def test_any_tokens_can_be_watched(token_ids: list[int]) -> None:
    tokenizer = byte_fallback_tokenizer()
    watch = StopStrings(tokenizer, ["a b"])
    found = [watch.feed(token_id) for token_id in [*token_ids, *map(WORDS.index, ["a", "▁b"])]]
    assert found[-1]


def test_bytes_that_are_no_utf8_do_not_hide_what_follows() -> None:
    assert feed(["a"], ["<0xFF>", "<0xC3>", "▁b", "a"]) == [False, False, False, True]


def test_a_tokenizer_that_cannot_be_read_fails_its_request_only(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidRequestError, match="tokenizer.json, found a fault"):
        load_tokenizer(tmp_path)
