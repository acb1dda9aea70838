"""The text of a growing sample: for any tokens, the pieces join to the whole text."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trueroll.engine.request import SampleOutput
from trueroll.rollout.http.texts import GrowingText, Texts
from trueroll.rollout.text import TextModel


@pytest.fixture(scope="module")
def texts(tiny_llama: Path) -> Iterator[Texts]:
    with closing(Texts(TextModel(str(tiny_llama)))) as texts:
        yield texts


def ended(token_ids: list[int], stop_reason: int | str | None = None) -> SampleOutput:
    reason = "length" if stop_reason is None else "stop"
    return SampleOutput("r", 0, token_ids, None, reason, 0, 0, (), stop_reason=stop_reason)


def pieces(texts: Texts, token_ids: list[int], stops: list[str], stop_reason: int | str | None) -> list[str]:
    """Return the pieces of a sample's text, for tokens that arrive in random portions."""
    text, at, told = GrowingText(texts, stops, {7}, True), 0, []
    while at < len(token_ids):
        size = random.Random(at).randint(1, 3)
        told.append(text.add(token_ids[at : at + size]))
        at += size
    return [*told, text.finish(ended(token_ids, stop_reason))]


@pytest.mark.parametrize("text", ["plain", "Grüße, 世界 👋🏽!", "é" * 20])
def test_pieces_hold_whole_characters_and_make_the_text(texts: Texts, text: str) -> None:
    token_ids = texts.model.encode(text)
    assert len(token_ids) == len(text.encode()), "a token for each byte"
    told = pieces(texts, token_ids, [], None)
    assert "".join(told) == text and "\ufffd" not in "".join(told)
    assert len([piece for piece in told if piece]) > 1


def test_many_tokens_may_come_at_once_and_end_within_a_character(texts: Texts) -> None:
    token_ids = texts.model.encode("twelve chars 👋 and more")
    text = GrowingText(texts, [], {7}, True)
    assert text.add(token_ids[:15]) == "twelve chars "
    assert text.add(token_ids[15:]) == "👋 and more" and text.finish(ended(token_ids)) == ""


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_any_tokens_make_the_text_of_all(texts: Texts, seed: int) -> None:
    generator = random.Random(seed)
    token_ids = [generator.randrange(512) for _ in range(60)]
    told = pieces(texts, token_ids, [], None)
    assert "".join(told) == texts.decode(token_ids, True)


@pytest.mark.parametrize("count", [6, 7, 8, 12])
def test_a_character_after_invalid_bytes_is_whole(texts: Texts, count: int) -> None:
    first, middle, last = texts.model.encode("世")
    token_ids = [*[middle] * count, first, middle, last, *texts.model.encode(" on")]
    text = GrowingText(texts, [], set(), True)
    told = [text.add([token_id]) for token_id in token_ids]
    assert (
        "".join([*told, text.finish(ended(token_ids))]) == texts.decode(token_ids, True) == "\ufffd" * count + "世 on"
    )
    assert told[-1] == "n", "it is returned while the text grows"


class ByteFallback:
    """A model that decodes like SentencePiece: ids above 255 are bytes, and a run of bytes is text only if all of it is
    valid UTF-8.
    """

    longest_token = 1

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        runs = [(is_byte, [*run]) for is_byte, run in itertools.groupby(token_ids, lambda each: each > 255)]
        return "".join(self._bytes(run) if is_byte else "".join(map(chr, run)) for is_byte, run in runs)

    def is_silent(self, token_id: int, skip_special_tokens: bool) -> bool:
        return False

    def _bytes(self, run: list[int]) -> str:
        try:
            return bytes(each - 256 for each in run).decode()
        except ValueError:
            return "\ufffd" * len(run)


@pytest.mark.parametrize("stop", [None, "ore", 46])
def test_text_goes_on_if_the_decoder_changes_earlier_text(stop: str | int | None) -> None:
    model: Any = ByteFallback()
    texts = Texts(model)
    token_ids = [*[256 + byte for byte in "世".encode()], 256 + 0xFF, *map(ord, " and more" + "." * (stop == 46))]
    assert texts.decode(token_ids[:3], True) == "世" and texts.decode(token_ids, True).startswith("\ufffd" * 4)
    text = GrowingText(texts, [stop] if isinstance(stop, str) else [], {46}, True)
    told = [text.add([token_id]) for token_id in token_ids]
    told.append(text.finish(ended(token_ids, stop)))
    assert "".join(told) == "世\ufffd and " + ("m" if stop == "ore" else "more")


def test_no_part_of_a_stop_string_is_returned(texts: Texts) -> None:
    token_ids = texts.model.encode("one END EN two END")
    told = pieces(texts, token_ids, ["END two", "D EN two END"], "D EN two END")
    assert "".join(told) == "one EN"
    first = texts.model.encode("aXYZ")
    assert "".join(pieces(texts, first, ["XYZ", "Z"], "XYZ")) == "a"


def test_a_stop_string_before_min_tokens_is_text(texts: Texts) -> None:
    """A stop string before `min_tokens` does not end the sample, so it is a part of the text."""
    token_ids = texts.model.encode("a, b, c, ")
    told = pieces(texts, token_ids, [", "], ", ")
    assert "".join(told) == "a, b, c"


def test_the_stop_token_is_not_part_of_the_text(texts: Texts) -> None:
    assert texts.decode([7], True) != ""
    assert "".join(pieces(texts, [50, 7, 51, 7], [], 7)) == texts.decode([50, 7, 51], True)
    assert "".join(pieces(texts, [50, 7, 51, 7], [], None)) == texts.decode([50, 7, 51, 7], True)


def test_a_cancelled_text_is_freed_at_once() -> None:
    """The text is freed even while it waits for the tokenization of another text."""

    class Text(str):
        """A string that permits weak references."""

    may_end = threading.Event()
    model: Any = SimpleNamespace(longest_token=1, encode=lambda *_, is_abandoned: may_end.wait(60), close=lambda: None)

    async def check() -> None:
        texts = Texts(model)
        first = asyncio.create_task(texts.encode("x", False))
        await asyncio.sleep(0)
        text = Text("y")
        second, kept = asyncio.create_task(texts.encode(text, False)), weakref.ref(text)
        del text
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([second])
        del second
        gc.collect()
        assert kept() is None and not first.done()
        may_end.set()
        await first
        texts.close()

    asyncio.run(check())


def test_decoding_for_the_page_stops_when_the_client_disconnects(texts: Texts) -> None:
    looks = iter([False, False, True])
    assert len(texts._by_token([50, 51, 52, 53], lambda: next(looks))) == 2


def test_the_texts_of_some_tokens_are_replaced(texts: Texts) -> None:
    """In `marks`, tokens have another text, also if they are skipped, and also in stop strings."""
    token_ids, marks = [50, 7, 51, 52], {7: "\ud800", 52: "\ud801"}
    expected = f"{texts.decode([50], True)}\ud800{texts.decode([51], True)}\ud801"
    assert texts.decode(token_ids, True, marks) == expected
    for stop, told in ((None, expected), (texts.token(52), expected[:-1])):
        text = GrowingText(texts, [] if stop is None else [stop], set(), True, marks)
        parts = [text.add([token_id]) for token_id in token_ids]
        assert "".join([*parts, text.finish(ended(token_ids, stop))]) == told


class Words:
    """A model with a token for each word. The last word is a special token."""

    longest_token = 12
    words = ("a", "bc", "<call>", "{", "}", "</call>", "<s>")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(self.words[i] for i in token_ids if not (skip_special_tokens and i == 6))

    def is_silent(self, token_id: int, skip_special_tokens: bool) -> bool:
        return skip_special_tokens and token_id == 6


@pytest.mark.parametrize(
    ("stop", "token_ids", "told"),
    [
        ("l>{", [0, 2, 3], "a<cal"),
        ("}</c", [2, 3, 4, 5], "C{"),
        ("bc<ca", [0, 1, 2], "a"),
        ("<call>", [0, 2], "a"),
        ("</call>", [0, 2, 3, 4, 5], "aC{}"),
        ("c{", [0, 2, 1, 6, 3], "aCb"),
        ("{", [0, 6, 3], "a"),
    ],
)
def test_a_stop_string_may_cut_a_mark(stop: str, token_ids: list[int], told: str) -> None:
    """A worker finds stop strings in text without marks and without special tokens."""
    model: Any = Words()
    texts, marks = Texts(model), {2: "\ud800", 5: "\ud801", 6: "\ud802"}
    told = told.replace("C", "\ud800")
    for sizes in ([len(token_ids)], [1] * len(token_ids)):
        text, at = GrowingText(texts, [stop, "unused stop"], set(), True, marks), 0
        parts = []
        for size in sizes:
            parts.append(text.add(token_ids[at : at + size]))
            at += size
        assert "".join([*parts, text.finish(ended(token_ids, stop))]) == told
    whole = GrowingText(texts, [stop], set(), True, marks)
    assert whole.finish(ended(token_ids, stop)) == told
