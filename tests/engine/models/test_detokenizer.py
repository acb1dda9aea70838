"""The detokenizer: for any tokens, the parts join to the text of all tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from byte_tokenizers import UNKNOWN, WORDS, Counting, byte_fallback_tokenizer, byte_level_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st

from trueroll.engine.models.detokenizer import REPLACEMENT, Detokenizer
from trueroll.engine.outputs.stop_strings import Vocabulary

TEXTS = st.text(st.sampled_from("aab \né€漢😀\ufffd"), max_size=16)
SOME_BYTES = [*"aé€漢😀".encode(), 0x80, 0xC3, 0xE2, 0xF0, 0xFF]
PIECES = st.lists(st.sampled_from(SOME_BYTES), min_size=1, max_size=4).map(bytes)


def parts(vocabulary: Vocabulary, token_ids: Sequence[int]) -> list[str]:
    """Return the part of the text that each token completes, and the remaining text."""
    text = Detokenizer(vocabulary.decode, vocabulary.is_silent)
    return [*map(text.add, token_ids), text.rest()]


def check(vocabulary: Vocabulary, token_ids: list[int]) -> None:
    """Check that the parts join to the whole text, and that settled text is at most three non-silent tokens late."""
    assert "".join(parts(vocabulary, token_ids)) == vocabulary.decode(token_ids)
    token_ids = [token_id for token_id in token_ids if not vocabulary.is_silent(token_id)]
    told = parts(vocabulary, token_ids)
    for count in range(3, len(token_ids)):
        certain = vocabulary.decode(token_ids[: count - 3]).rstrip(REPLACEMENT)
        assert len("".join(told[:count])) >= len(certain)


@given(st.data(), st.lists(PIECES | TEXTS.filter(bool).map(str.encode), min_size=1, max_size=12, unique=True))
def test_the_parts_of_any_byte_tokens_make_up_the_text(data: st.DataObject, pieces: list[bytes]) -> None:
    special, unknown = len(pieces), len(pieces) + 1
    token_ids = data.draw(st.lists(st.integers(0, unknown), max_size=40))
    vocabulary = Vocabulary(byte_level_tokenizer(pieces))
    assert vocabulary.is_silent(special) and vocabulary.is_silent(unknown)
    check(vocabulary, token_ids)


@pytest.mark.parametrize(
    "pieces",
    [
        [b"\x80", b"\x80", b"\xe4", b"\xb8", b"\x96"],
        [b"a\xe6", b"\xbc", b"\xa2\xf0", b"\x9f", b"\x98", b"\x80a"],
        [b"\xc3", *[b"\xa9\xc3"] * 9, b"\xa9"],
        [*[b"\xff"] * 9, b"\xf0", b"\x9f", b"\x98", b"\xff", b"a"],
    ],
    ids=["a mark before a character", "two characters in turn", "no seam between tokens", "bytes that are none"],
)
def test_a_replacement_mark_is_returned_once(pieces: list[bytes]) -> None:
    words = sorted({*pieces})
    check(Vocabulary(byte_level_tokenizer(words)), [words.index(piece) for piece in pieces])


@given(TEXTS.filter(lambda text: REPLACEMENT not in text), st.lists(st.integers(0, 2), max_size=80))
@example(" a", [2, 0, 0, 0, 0])
def test_special_tokens_change_no_part(text: str, silent: list[int]) -> None:
    """Each token is a byte. Tokens without text are at any position, even before the leading space that decoding would
    strip from a first token.
    """
    spelled = [["a"] if c == "a" else ["▁"] if c == " " else [f"<0x{b:02X}>" for b in c.encode()] for c in text]
    token_ids = [WORDS.index(word) for words in spelled for word in words]
    vocabulary = Vocabulary(byte_fallback_tokenizer())
    plain = parts(vocabulary, token_ids)
    assert "".join(plain) == vocabulary.decode(token_ids)
    among: list[int] = []
    for i, token_id in enumerate(token_ids):
        among += [WORDS.index("<special>"), UNKNOWN][: silent[i] if i < len(silent) else 0] + [token_id]
    assert [part for part in parts(vocabulary, among) if part] == [part for part in plain if part]


def test_returned_text_stands_even_if_later_tokens_change_it() -> None:
    words = [*(f"<0x{byte:02X}>" for byte in "漢".encode()), "<0xFF>", "a"]
    token_ids = [WORDS.index(word) for word in words]
    vocabulary = Vocabulary(byte_fallback_tokenizer())
    assert vocabulary.decode(token_ids) == 4 * REPLACEMENT + "a"
    assert parts(vocabulary, token_ids) == ["", "", "漢", "", REPLACEMENT + "a", ""]


@pytest.mark.parametrize("word", ["a", "<special>", "<0xFF>", "<0x80>"])
def test_the_cost_of_a_token_does_not_grow(word: str) -> None:
    counting = Counting(byte_fallback_tokenizer())
    parts(Vocabulary(counting), [WORDS.index(word)] * 1000)  # type: ignore[arg-type]
    assert counting.num_decoded < 10_000
