"""A drafter for repeated text: it finds a sequence's last tokens in earlier text, and drafts the tokens that come next
in the earlier text.

Earlier text is the prompt, the samples of the prompt, and the sequence itself. `PromptIndex` holds the tokens of one
prompt and of its samples: running and finished samples, including samples drawn with earlier weights. `RepeatsDrafter`
owns the indexes, and drops the least recently used indexes to stay within a budget in bytes. As in the prefix cache, a
prompt is identified by its tokens, its cache salt and its content spans. An index holds only tokens, so that it stays
valid after a weight commit or a sleep.

A match is found by following links, as in zlib's LZ77 compressor: each position links to the previous position that
follows the same pair of tokens. A lookup compares at most a fixed number of positions, so that drafting takes constant
time per token even in repetitive text.

Two samples with the same prompt, sampling parameters, seed and weights have the same tokens, because both samples draw
with the same noise. Two samples that differ only by a small change of the weights still have most of their tokens in
common. The drafter therefore looks first for an earlier sample with the same prompt and seed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from ..scheduling.sequence import Sequence
from .odds import Odds

T = TypeVar("T")

LONGEST_MATCH = 10
_KINDS = LONGEST_MATCH + 1
"""The number of kinds of guesses. The kind of a guess is the length of the match, or 0 for a guess from an earlier
sample with the same seed.
"""
_MOST_COMPARED = 16
_LEAST_EQUAL = 4
"""An earlier sample with the same seed is used only if this many of the last tokens are the same in both samples."""
_BITS = 32
# Approximate sizes of an index, of a text in it (with its odds), of a token, and of an entry in the dict of pairs.
_OVERHEAD_BYTES, _TEXT_BYTES, _TOKEN_BYTES, _PAIR_BYTES = 2560, 2560, 16, 150
DEFAULT_BUDGET = 64 * 2**20


class Guess(NamedTuple):
    """Predicted tokens, and the length of the match that precedes the predicted tokens. Match length 0 means that the
    predicted tokens come from an earlier sample with the same seed.
    """

    tokens: AnySequence[int]
    length: int

    def lengths(self) -> list[int]:
        """Return a list with the length of the match before each predicted token."""
        return [min(self.length + i, LONGEST_MATCH) if self.length else 0 for i in range(len(self.tokens))]


@dataclass(eq=False, slots=True)
class Text:
    """Indexed tokens. `links`: for each token, the place (`PromptIndex`) of the previous token that follows the same
    pair of tokens, or -1.

    `start`: the index of the first token that does not belong to the prompt. `odds`: how often the predictions for this
    text were right. `guess`: the last prediction.
    """

    number: int
    odds: Odds
    start: int = 0
    tokens: array[int] = field(default_factory=lambda: array("i"))
    links: array[int] = field(default_factory=lambda: array("q"))
    guess: Guess = Guess((), 0)

    def judge(self, tokens: AnySequence[int]) -> None:
        """Compare the last prediction with `tokens`, the tokens that the text then received."""
        for guessed, token, length in zip(self.guess.tokens, tokens, self.guess.lengths(), strict=False):
            self.odds.record(length, guessed == token)
            if guessed != token:
                break


class PromptIndex:
    """The tokens of a prompt and of its samples. A token's place is `text number << 32 | index in the text`."""

    def __init__(self, prompt: array[int], odds: Odds) -> None:
        self._odds = Odds(_KINDS, odds)
        self._texts: list[Text] = []
        self._latest: dict[int, int] = {}
        self._running: dict[Sequence, Text] = {}
        self._by_seed: dict[int, Text] = {}
        self._num_tokens = 0
        self._prompt = self._add_text()
        self._extend(self._prompt, prompt)

    @property
    def num_bytes(self) -> int:
        """The approximate size of the index, in bytes."""
        of_texts = _TEXT_BYTES * len(self._texts) + _TOKEN_BYTES * self._num_tokens
        return _OVERHEAD_BYTES + of_texts + _PAIR_BYTES * len(self._latest)

    def guess(self, sequence: Sequence, seed: int, most: int) -> tuple[AnySequence[int], list[float]]:
        """Guess the next tokens of a sequence. Return the tokens and their chances, as in `Drafter.expect`."""
        text = self._read(sequence)
        text.guess = self._from_seed(text, seed, most) or self._from_match(text, most) or Guess((), 0)
        return text.guess.tokens, [text.odds.chance(length) for length in text.guess.lengths()]

    def end(self, sequence: Sequence, seed: int) -> None:
        """See `Drafter.end`."""
        self._by_seed[seed] = self._read(sequence)
        del self._running[sequence]

    def _read(self, sequence: Sequence) -> Text:
        """Add the new tokens of a sequence to its text, and return the text."""
        text = self._running.get(sequence)
        known = sequence.num_prompt_tokens
        if text is None:
            text = self._running[sequence] = self._add_text()
            tail = self._prompt.tokens[-LONGEST_MATCH:]
            text.tokens.extend(tail)
            text.links.extend([-1] * len(tail))
            text.start = len(tail)
        new = sequence.tokens[known + len(text.tokens) - text.start :]
        text.judge(new)
        self._extend(text, new)
        return text

    def _add_text(self) -> Text:
        self._texts.append(Text(len(self._texts), Odds(_KINDS, self._odds)))
        return self._texts[-1]

    def _extend(self, text: Text, tokens: array[int]) -> None:
        first = len(text.tokens)
        text.tokens.extend(tokens)
        self._num_tokens += len(tokens)
        base, latest = text.number << _BITS, self._latest
        for place, pair in enumerate(_pairs(text.tokens, first), max(first, 2)):
            text.links.extend([-1] * (place - len(text.links)))
            text.links.append(latest.get(pair, -1))
            latest[pair] = base | place
        text.links.extend([-1] * (len(text.tokens) - len(text.links)))

    def _from_seed(self, text: Text, seed: int, most: int) -> Guess | None:
        """Guess that the next tokens are the tokens at the same positions of the earlier sample with this seed. Return
        None if the last tokens before the guess differ from the earlier sample.
        """
        twin, end = self._by_seed.get(seed), len(text.tokens)
        if twin is None or twin.tokens[end - _LEAST_EQUAL : end] != text.tokens[-_LEAST_EQUAL:]:
            return None
        return Guess(twin.tokens[end : end + most], 0)

    def _from_match(self, text: Text, most: int) -> Guess | None:
        """Guess the tokens after the longest match of the last tokens; of equally long matches, use the latest."""
        if len(text.tokens) < 2:
            return None
        tail = text.tokens[-LONGEST_MATCH:]
        place, best, longest = self._latest.get(tail[-2] << _BITS | tail[-1], -1), -1, 0
        for _ in range(_MOST_COMPARED):
            if place < 0 or longest == len(tail):
                break
            found, index = self._texts[place >> _BITS], place & (1 << _BITS) - 1
            if (length := _common(found.tokens, index, tail)) > longest:
                best, longest = place, length
            place = found.links[index]
        if best < 0:
            return None
        return Guess(self._follow(self._texts[best >> _BITS], best & (1 << _BITS) - 1, text, most), longest)

    def _follow(self, found: Text, index: int, text: Text, most: int) -> AnySequence[int]:
        drafts = found.tokens[index : index + most]
        if found is text:  # the text repeats itself, so the guess may extend past its end
            period = len(text.tokens) - index
            for i in range(len(drafts), most):
                drafts.append(drafts[i - period])
        return drafts


class RepeatsDrafter:
    """Drafts repeated tokens. `budget`: the approximate maximum size of all indexes together, in bytes.

    After an index is dropped for lack of room, the running sequences that used it get no more drafts. If a dropped
    index were built again, prompts that together exceed the budget would be indexed again in every step.
    """

    name = "repeats"

    def __init__(self, budget: int = DEFAULT_BUDGET) -> None:
        self.num_bytes = 0
        self._budget, self._odds = budget, Odds(_KINDS)
        self._indexes: OrderedDict[bytes, PromptIndex] = OrderedDict()
        self._keys: dict[Sequence, bytes] = {}  # the keys of running sequences
        self._guesses: dict[Sequence, AnySequence[int]] = {}  # the results of the last calls of `expect`

    def expect(self, sequence: Sequence, seed: int, most: int) -> AnySequence[float]:
        index, chances = self._index_of(sequence), list[float]()
        self._guesses[sequence] = ()
        if index is not None:
            self._guesses[sequence], chances = self._counted(index, lambda: index.guess(sequence, seed, most))
        return chances

    def draft(self, counts: Mapping[Sequence, int]) -> list[AnySequence[int]]:
        return [self._guesses[sequence][:count] for sequence, count in counts.items()]

    def record(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Do nothing, because the next call of `expect` compares the last guess with the accepted tokens."""

    def end(self, sequence: Sequence, seed: int) -> None:
        index = self._index_of(sequence)
        del self._keys[sequence]
        self._guesses.pop(sequence, None)
        if index is not None:
            self._counted(index, lambda: index.end(sequence, seed))

    def _index_of(self, sequence: Sequence) -> PromptIndex | None:
        """Return the index of a sequence's prompt; the first call for a sequence creates a missing index. Return None
        if the index was dropped or does not fit into the budget.
        """
        key = self._keys.get(sequence)
        if key is None:
            key = self._keys[sequence] = _key_of(sequence)
            prompt = sequence.tokens[: sequence.num_prompt_tokens]
            if key not in self._indexes and least_bytes(len(prompt)) <= self._budget:
                self._indexes[key] = index = PromptIndex(prompt, self._odds)
                self.num_bytes += index.num_bytes
        index = self._indexes.get(key)
        if index is not None:
            self._indexes.move_to_end(key)
        return index

    def _counted(self, index: PromptIndex, call: Callable[[], T]) -> T:
        """Run a call that may grow `index`, then drop the least recently used indexes until the remaining indexes fit
        into the budget.
        """
        before = index.num_bytes
        result = call()
        self.num_bytes += index.num_bytes - before
        while self.num_bytes > self._budget:
            _, dropped = self._indexes.popitem(last=False)
            self.num_bytes -= dropped.num_bytes
        return result


def least_bytes(num_tokens: int) -> int:
    """Return the minimum size, in bytes, of an index for a prompt of `num_tokens` tokens."""
    return _OVERHEAD_BYTES + _TEXT_BYTES + _TOKEN_BYTES * num_tokens


def _key_of(sequence: Sequence) -> bytes:
    """Return a hash that identifies a sequence's prompt by its tokens, cache salt and content spans."""
    spans, prompt = sequence.chain.spans, sequence.tokens[: sequence.num_prompt_tokens]
    found = hashlib.blake2b(b"%d %d " % (len(spans), len(prompt)), digest_size=32)
    for span in spans:
        found.update(b"%d %d " % (span.start, span.end) + span.content_hash)
    found.update(prompt)
    found.update(sequence.chain.salt)
    return found.digest()


def _pairs(tokens: array[int], first: int) -> list[int]:
    """For each token from `first` on, return the pair of tokens before it. The first two tokens of a text have no
    pair.
    """
    start = max(first - 2, 0)
    values = np.array(tokens[start:], np.int64)
    return (values[:-2] << _BITS | values[1:-1]).tolist()


def _common(tokens: array[int], end: int, tail: array[int]) -> int:
    """Return the length of the longest common suffix of `tokens[:end]` and `tail`."""
    length, most = 0, min(end, len(tail))
    while length < most and tokens[end - 1 - length] == tail[-1 - length]:
        length += 1
    return length
