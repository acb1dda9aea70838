"""Stop strings are found in the text of any tokens, even of tokens without valid text. A failing tokenizer does not
affect other requests.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizers import UNKNOWN, WORDS, Counting, byte_fallback_tokenizer, byte_level_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from trueroll.engine.models import tokenizer as tokenizer_module
from trueroll.engine.models import trials
from trueroll.engine.outputs.stop_strings import StopStrings, Vocabulary, load_vocabulary
from trueroll.errors import InvalidRequestError, UnavailableError

from ..drive import bits, generate, make_engine, run, tokens

TEXTS = st.text(st.sampled_from("aab \né€漢😀"), max_size=12)
STOPS = st.text(st.sampled_from("ab é€漢😀"), min_size=1, max_size=3)


def first_found(tokenizer: Any, stops: list[str], token_ids: Sequence[int]) -> int | None:
    watch = StopStrings(Vocabulary(tokenizer), stops)
    return next((i for i, token_id in enumerate(token_ids) if watch.feed(token_id)), None)


def feed(stops: list[str], words: list[str]) -> list[bool]:
    watch = StopStrings(Vocabulary(byte_fallback_tokenizer()), stops)
    return [watch.feed(WORDS.index(word)) is not None for word in words]


def test_the_string_that_ends_first_is_named() -> None:
    def named(stops: list[str], words: list[str]) -> str | None:
        watch = StopStrings(Vocabulary(byte_fallback_tokenizer()), stops)
        return [watch.feed(WORDS.index(word)) for word in words][-1]

    assert named(["b", "a", " "], ["a", "▁b"]) == " " and named(["b", " b"], ["a", "▁b"]) == " b"
    assert named(["x"], ["a"]) is None


@given(st.lists(st.integers(0, UNKNOWN), max_size=40), st.integers(0, 40), st.lists(STOPS, min_size=1, max_size=3))
def test_a_continued_text_is_watched_like_a_whole_text(ids: list[int], cut: int, stops: list[str]) -> None:
    vocabulary = Vocabulary(byte_fallback_tokenizer())
    whole, rest = StopStrings(vocabulary, stops), StopStrings(vocabulary, stops)
    rest.feed_prior(ids[:cut])
    assert [whole.feed(token_id) for token_id in ids][cut:] == [rest.feed(token_id) for token_id in ids[cut:]]


@pytest.mark.parametrize("stop", ["漢漢漢漢!", "😀😀😀😀!", "éa!"])
def test_a_stop_string_is_found_across_any_cut_between_tokens(stop: str) -> None:
    text = f"aab{stop}"
    ids = [
        WORDS.index("a") if letter == "a" else WORDS.index(f"<0x{byte:02X}>")
        for letter in text
        for byte in letter.encode()
    ]
    for seam in range(len(ids)):
        watch = StopStrings(Vocabulary(byte_fallback_tokenizer()), [stop])
        watch.feed_prior(ids[:seam])
        assert [watch.feed(token_id) for token_id in ids[seam:]] == [None] * (len(ids) - seam - 1) + [stop]


def test_only_the_end_of_a_long_prior_text_is_read() -> None:
    counting = Counting(byte_fallback_tokenizer())
    watch = StopStrings(Vocabulary(counting), ["aab"])  # type: ignore[arg-type]
    watch.feed_prior([WORDS.index("a")] * 100_000)
    assert counting.num_decoded < 100 and watch.feed(WORDS.index("<0x62>")) == "aab"


def test_a_stop_string_may_span_tokens_and_end_within_one() -> None:
    assert feed(["a b"], ["a", "▁b", "a"]) == [False, True, False]
    assert feed(["xx", " "], ["a", "▁b"]) == [False, True]


def test_a_character_counts_once_its_last_byte_arrives() -> None:
    assert feed(["é"], ["a", "<0xC3>", "<0xA9>"]) == [False, False, True]
    assert feed(["é"], ["a", "<0xC3>", *["<special>"] * 9, "<0xA9>"]) == 11 * [False] + [True]


def test_a_stop_string_is_found_only_at_the_token_that_ends_it() -> None:
    assert feed(["a", "never in the text"], ["a", "▁b", "▁b"]) == [True, False, False]


@given(st.lists(st.integers(0, UNKNOWN), max_size=40))
def test_any_token_ids_can_be_watched(token_ids: list[int]) -> None:
    found = first_found(byte_fallback_tokenizer(), ["a b"], [*token_ids, *map(WORDS.index, ["a", "▁b"])])
    assert found is not None


def test_invalid_utf8_does_not_hide_the_following_text() -> None:
    assert feed(["a"], ["<0xFF>", "<0xC3>", "▁b", "a"]) == [False, False, False, True]


def assert_linear(tokenizer: Tokenizer, token_ids: Sequence[int], ending: Sequence[int], stop: str) -> None:
    """Check that the cost per token stays low for any number of tokens, and that the stop string after the tokens is
    found.
    """
    counting, count = Counting(tokenizer), 1000
    stream = [*token_ids] * (count // len(token_ids))
    assert first_found(counting, [stop], [*stream, *ending]) == len(stream) + len(ending) - 1
    assert counting.num_decoded <= 16 * (len(stream) + len(ending))


@pytest.mark.parametrize(
    "words",
    [["<special>"], ["<0xFF>"], ["<0x80>"], ["<0xF0>", "<0x9F>"], ["\ufffd"], ["<special>", "<0xE2>", "<0x82>"]],
    ids=str,
)
def test_the_cost_of_tokens_without_text_does_not_grow(words: list[str]) -> None:
    ending = [WORDS.index("a"), WORDS.index("▁b")]
    assert_linear(byte_fallback_tokenizer(), [WORDS.index(word) for word in words], ending, "a b")


def test_the_cost_of_unknown_ids_does_not_grow() -> None:
    assert byte_fallback_tokenizer().id_to_token(UNKNOWN) is None
    assert_linear(byte_fallback_tokenizer(), [UNKNOWN], [WORDS.index("a")], "a")


@pytest.mark.parametrize(
    "pieces", [[b"\xff"], [b"\x80"], ["\ufffd".encode()], [b"\xef", b"\xbf", b"\xbd"], [b"\xa9\xc3"]], ids=str
)
def test_the_cost_of_incomplete_bytes_does_not_grow(pieces: list[bytes]) -> None:
    tokenizer = byte_level_tokenizer([*pieces, b"a"])
    assert_linear(tokenizer, range(len(pieces)), [len(pieces)], "a")


def test_the_cost_of_real_tokens_without_text_does_not_grow(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    ending = tokenizer.encode(" the end").ids
    lone = next(id for id in range(tokenizer.get_vocab_size()) if tokenizer.decode([id]) == "\ufffd")
    special = tokenizer.token_to_id("<|im_start|>")
    assert special is not None
    assert tokenizer.decode([special], skip_special_tokens=True) == ""
    for token_ids in ([special], [lone], tokenizer.encode("\ufffd").ids):
        assert_linear(tokenizer, token_ids, ending, "the end")


def check_found(tokenizer: Tokenizer, stop: str, token_ids: Sequence[int]) -> None:
    """Check that a stop string is found in time.

    The earliest time is when the last character of the stop string is complete. The latest time is when all characters
    are complete, at most three tokens later.
    """
    texts = [tokenizer.decode(list(token_ids[: i + 1])) for i in range(len(token_ids))]
    there = next((i for i, text in enumerate(texts) if stop in text), None)
    whole = next((i for i, text in enumerate(texts) if stop in text and not text.endswith("\ufffd")), None)
    found = first_found(tokenizer, [stop], token_ids)
    if whole is None:
        assert found is None and there is None
    else:
        assert found is not None and there is not None and there <= found <= min(whole, there + 3)


@given(TEXTS, STOPS)
@example(" 😀b", "b")
def test_stop_strings_are_found_where_the_whole_text_has_them(text: str, stop: str) -> None:
    """Each token is a word or a byte, so the text is complete as soon as the last byte of a character arrives."""
    spelled = [["a"] if c == "a" else ["▁"] if c == " " else [f"<0x{b:02X}>" for b in c.encode()] for c in text]
    token_ids = [WORDS.index(word) for words in spelled for word in words]
    texts = [byte_fallback_tokenizer().decode(token_ids[: i + 1]) for i in range(len(token_ids))]
    whole = [stop in text and not text.endswith("\ufffd") for text in texts]
    assert first_found(byte_fallback_tokenizer(), [stop], token_ids) == (whole.index(True) if any(whole) else None)


@given(TEXTS, STOPS, st.sets(st.integers(0, 48)), st.booleans())
def test_tokens_may_cut_characters_anywhere(text: str, stop: str, cuts: set[int], is_fine: bool) -> None:
    encoded = text.encode()
    places = sorted({0, len(encoded)} | {cut for cut in cuts if cut < len(encoded)} if is_fine else {0, len(encoded)})
    parts = [encoded[start:end] for start, end in zip(places, places[1:], strict=False)]
    pieces = sorted(set(parts))
    tokenizer = byte_level_tokenizer(pieces)
    token_ids = [pieces.index(part) for part in parts]
    assert tokenizer.decode(token_ids) == text
    check_found(tokenizer, stop, token_ids)
    special = len(pieces)
    assert tokenizer.id_to_token(special) == "<special>"
    found = first_found(tokenizer, [stop], token_ids)
    among = first_found(tokenizer, [stop], [id for token_id in token_ids for id in [special] * 5 + [token_id]])
    assert among == (None if found is None else 6 * found + 5)


def test_a_text_is_read_even_if_every_token_cuts_a_character() -> None:
    tokenizer = byte_level_tokenizer([b"\xc3", b"\xa9\xc3", b"\xa9", b"b"])
    token_ids = [0] + 20 * [1] + [2, 3]
    assert tokenizer.decode(token_ids) == 21 * "é" + "b"
    check_found(tokenizer, 21 * "é", token_ids)
    check_found(tokenizer, "éb", token_ids)
    assert first_found(tokenizer, ["éé"], token_ids) == 3


def test_stop_strings_are_found_in_real_tokens(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    texts = [
        "Plain words. And more: 1 + 1 = 2\n\n",
        "日本語の文章です。漢字とかな",
        "😀👩‍👩‍👧 ✅ naïve café",
        "Привет, мир! Ελληνικά",
    ]
    for text in texts:
        token_ids = tokenizer.encode(text).ids
        assert tokenizer.decode(token_ids) == text
        for start in range(len(text)):
            for length in (1, 3, 8):
                check_found(tokenizer, text[start : start + length], token_ids)


def test_a_tokenizer_that_cannot_be_read_fails_its_request_only(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidRequestError, match="tokenizer.json: the tokenizer cannot be loaded"):
        load_vocabulary(tmp_path)


class Panic(BaseException):
    """An error that is not an Exception, like a panic of the tokenizers library."""


def fail(error: BaseException) -> Callable[..., Any]:
    def failing(*_: Any, **__: Any) -> Any:
        raise error

    return failing


class Stand:
    """A fake `tokenizers.Tokenizer`. No token has text. `faults`: how decoding fails, by token id."""

    def __init__(self, faults: dict[int, BaseException]) -> None:
        self.faults = faults
        self.num_loads = 0
        self.decoder = None

    def from_file(self, path: str) -> Stand:
        self.num_loads += 1
        return self

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0}

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        return {}

    def id_to_token(self, token_id: int) -> str:
        return "a"

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        for token_id in token_ids:
            if token_id in self.faults:
                raise self.faults[token_id]
        return ""


@pytest.fixture
def own_llama(tiny_llama: Path, tmp_path: Path) -> Path:
    """A folder with a tokenizer that has not been loaded yet."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "own"))


@pytest.mark.parametrize("error", [Panic("index out of range"), ValueError("no such token")], ids=repr)
@pytest.mark.usefixtures("steps_ahead")
def test_a_failing_tokenizer_ends_only_the_sample_it_fails_on(
    own_llama: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    requests = {"a": dict(n=3), "b": dict(seed=9), "free": dict(seed=11)}
    expected = run(make_engine(own_llama), [generate(id, tokens(20), **params) for id, params in requests.items()])
    token_ids = expected["a", 1].token_ids
    bad = next(
        id for id in token_ids[3:] if all(id not in expected[k].token_ids for k in [("a", 0), ("a", 2), ("b", 0)])
    )
    monkeypatch.setattr(tokenizer_module, "Tokenizer", Stand({bad: error}))
    load_vocabulary.cache_clear()
    engine = make_engine(own_llama)
    watched = [generate(id, tokens(20), **params, stop=["z"]) for id, params in requests.items() if id != "free"]
    samples = run(engine, [*watched, generate("free", tokens(20), **requests["free"])])
    assert samples.keys() == expected.keys()
    failed = samples.pop(("a", 1))
    end = token_ids.index(bad) + 1
    assert failed.finish_reason == "error" and failed.error is not None
    assert f"token {bad}" in failed.error and f"{type(error).__name__}: {error}" in failed.error
    assert "weights" not in failed.error
    whole = expected["a", 1]
    assert whole.logprobs is not None
    assert bits(failed) == (tuple(whole.token_ids[:end]), whole.logprobs[:end].tobytes())
    assert {key: bits(sample) for key, sample in samples.items()} == {key: bits(expected[key]) for key in samples}
    assert all(sample.finish_reason == "length" and sample.error is None for sample in samples.values())
    assert engine.stats().samples_finished == {"error": 1, "length": 4}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)], ids=repr)
def test_an_interrupt_is_not_an_error_of_a_sample(
    own_llama: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(tokenizer_module, "Tokenizer", Stand(dict.fromkeys(range(512), error)))
    engine = make_engine(own_llama)
    with pytest.raises(type(error)):
        run(engine, [generate("r", tokens(20), stop=["z"])])


def test_an_engine_without_room_to_try_its_tokenizer_does_not_start(
    own_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_vocabulary.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(trials.os, "fork", fail(BlockingIOError("no room")))
        with pytest.raises(UnavailableError, match="cannot start another process: no room"):
            make_engine(own_llama)
    run(make_engine(own_llama), [generate("r", tokens(20), stop=["z"])])


@pytest.mark.parametrize("fault", ["panics when read", "panics when asked", "is broken", "is missing"])
def test_a_folder_with_a_useless_tokenizer_serves_requests_without_stop(
    own_llama: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    expected = run(make_engine(own_llama), [generate("r", tokens(20))])
    load_vocabulary.cache_clear()
    stand = Stand({})
    if fault == "panics when read":
        monkeypatch.setattr(stand, "from_file", fail(Panic("boom")))
    if fault == "panics when asked":
        monkeypatch.setattr(stand, "get_added_tokens_decoder", fail(Panic("boom")))
    if fault.startswith("panics"):
        monkeypatch.setattr(tokenizer_module, "Tokenizer", stand)
    if fault == "is broken":
        (own_llama / "tokenizer.json").write_text("{}")
    if fault == "is missing":
        (own_llama / "tokenizer.json").unlink()
    engine = make_engine(own_llama)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=r"stop: .*tokenizer.json.* use stop_token_ids"):
            engine.add(generate("bad", tokens(20), stop=["z"]))
    assert not engine.has_unfinished
    assert bits(run(engine, [generate("r", tokens(20))])["r", 0]) == bits(expected["r", 0])


def test_no_request_loads_a_tokenizer(own_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand({})
    monkeypatch.setattr(tokenizer_module, "Tokenizer", stand)
    engine = make_engine(own_llama)
    assert stand.num_loads == 1, "loaded while the engine was made"
    samples = run(engine, [generate(id, tokens(20), stop=["z"]) for id in ("a", "b")])
    assert len(samples) == 2 and all(sample.finish_reason == "length" for sample in samples.values())
    assert stand.num_loads == 1
    make_engine(own_llama)
    assert stand.num_loads == 1, "engines of one folder share a tokenizer"
