"""A drafter that repeats: it finds the last tokens of a sequence earlier in its prompt, in itself, or in its siblings.

`PromptIndex` holds the tokens of one prompt and of its samples: running ones, and earlier ones, also of earlier weights.
`RepeatsDrafter` owns the indexes within a budget of bytes, and drops the index that was used least recently. Prompts
are told apart as in the prefix cache: by their tokens, their salt and their content spans. An index holds tokens only,
so that a commit of weights or a sleep leaves it alone.

A match is found through chains of equal pairs of tokens, as in the LZ77 compressors of zlib: each position links to the
previous one that follows the same pair. A lookup compares a constant number of positions, so that drafting takes
constant time per token, however repetitive the text.

With equal weights, a sample with the prompt and the seed of an earlier sample has the tokens of the earlier sample,
because both draw with the same noise. With slightly different weights it has most of them. Such a sample is looked at
first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, field

import numpy as np

from ..scheduling.sequence import Sequence

LONGEST_MATCH = 10
_MOST_COMPARED = 16
_LEAST_EQUAL = 4
"""The last tokens in which a sample must equal an earlier one of the same seed, to be drafted from it."""
_BITS = 32
_OVERHEAD_BYTES, _TOKEN_BYTES, _PAIR_BYTES = 1024, 12, 110  # of an index, of a token in it, of a pair in its dict
DEFAULT_BUDGET = 64 * 2**20


@dataclass(eq=False, slots=True)
class Text:
    """Indexed tokens. `links`: for each token, the place of the previous token that follows the same pair, or -1.

    `start`: the index of the first token that does not belong to the prompt.
    """

    number: int
    start: int = 0
    tokens: array[int] = field(default_factory=lambda: array("i"))
    links: array[int] = field(default_factory=lambda: array("q"))


class PromptIndex:
    """The tokens of a prompt and of its samples. A place is `text number << 32 | index` of a token."""

    def __init__(self, prompt: array[int]) -> None:
        self._texts: list[Text] = []
        self._latest: dict[int, int] = {}
        self._running: dict[Sequence, Text] = {}
        self._by_seed: dict[int, Text] = {}
        self._num_tokens = 0
        self._prompt = self._add_text()
        self._extend(self._prompt, prompt)

    @property
    def num_bytes(self) -> int:
        """The approximate memory of the index."""
        return _OVERHEAD_BYTES + _TOKEN_BYTES * self._num_tokens + _PAIR_BYTES * len(self._latest)

    def draft(self, sequence: Sequence, seed: int, most: int) -> AnySequence[int]:
        """See `Drafter.draft`."""
        text = self._read(sequence)
        return self._from_seed(text, seed, most) or self._from_match(text, most)

    def end(self, sequence: Sequence, seed: int) -> None:
        """See `Drafter.end`."""
        self._by_seed[seed] = self._read(sequence)
        del self._running[sequence]

    def _read(self, sequence: Sequence) -> Text:
        """Return the text of a sequence, with its new tokens added."""
        text = self._running.get(sequence)
        known = sequence.num_prompt_tokens
        if text is None:
            text = self._running[sequence] = self._add_text()
            tail = self._prompt.tokens[-LONGEST_MATCH:]
            text.tokens.extend(tail)
            text.links.extend([-1] * len(tail))
            text.start = len(tail)
        self._extend(text, sequence.tokens[known + len(text.tokens) - text.start :])
        return text

    def _add_text(self) -> Text:
        self._texts.append(Text(len(self._texts)))
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

    def _from_seed(self, text: Text, seed: int, most: int) -> AnySequence[int]:
        """Return the next tokens of the earlier sample with this seed, if the last tokens are equal."""
        twin, end = self._by_seed.get(seed), len(text.tokens)
        if twin is None or twin.tokens[end - _LEAST_EQUAL : end] != text.tokens[-_LEAST_EQUAL:]:
            return ()
        return twin.tokens[end : end + most]

    def _from_match(self, text: Text, most: int) -> AnySequence[int]:
        """Return the tokens after the longest match of the last tokens, the latest one among equal lengths."""
        if len(text.tokens) < 2:
            return ()
        tail = text.tokens[-LONGEST_MATCH:]
        place, best, longest = self._latest.get(tail[-2] << _BITS | tail[-1], -1), -1, 0
        for _ in range(_MOST_COMPARED):
            if place < 0 or longest == len(tail):
                break
            found, index = self._texts[place >> _BITS], place & (1 << _BITS) - 1
            if (length := _common(found.tokens, index, tail)) > longest:
                best, longest = place, length
            place = found.links[index]
        return () if best < 0 else self._follow(self._texts[best >> _BITS], best & (1 << _BITS) - 1, text, most)

    def _follow(self, found: Text, index: int, text: Text, most: int) -> AnySequence[int]:
        drafts = found.tokens[index : index + most]
        if found is text:  # a text that repeats itself goes on behind its end
            period = len(text.tokens) - index
            for i in range(len(drafts), most):
                drafts.append(drafts[i - period])
        return drafts


class RepeatsDrafter:
    """Drafts repeated tokens. `budget`: the most bytes of all indexes, approximately."""

    name = "repeats"

    def __init__(self, budget: int = DEFAULT_BUDGET) -> None:
        self.num_bytes = 0
        self._budget = budget
        self._indexes: OrderedDict[bytes, PromptIndex] = OrderedDict()
        self._keys: dict[Sequence, bytes] = {}

    def draft(self, sequence: Sequence, seed: int, most: int) -> AnySequence[int]:
        index = self._index_of(sequence)
        before = index.num_bytes
        drafts = index.draft(sequence, seed, most)
        self._grow(index.num_bytes - before)
        return drafts

    def end(self, sequence: Sequence, seed: int) -> None:
        index = self._index_of(sequence)
        before = index.num_bytes
        index.end(sequence, seed)
        del self._keys[sequence]
        self._grow(index.num_bytes - before)

    def _index_of(self, sequence: Sequence) -> PromptIndex:
        key = self._keys.get(sequence)
        if key is None:
            key = self._keys[sequence] = _key_of(sequence)
        index = self._indexes.get(key)
        if index is None:
            index = self._indexes[key] = PromptIndex(sequence.tokens[: sequence.num_prompt_tokens])
            self.num_bytes += index.num_bytes
        self._indexes.move_to_end(key)
        return index

    def _grow(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        while self.num_bytes > self._budget:
            _, index = self._indexes.popitem(last=False)
            self.num_bytes -= index.num_bytes


def _key_of(sequence: Sequence) -> bytes:
    """Return the identity of a sequence's prompt: its tokens, its salt and its content spans."""
    spans, prompt = sequence.chain.spans, sequence.tokens[: sequence.num_prompt_tokens]
    found = hashlib.blake2b(b"%d %d " % (len(spans), len(prompt)), digest_size=32)
    for span in spans:
        found.update(b"%d %d " % (span.start, span.end) + span.hash)
    found.update(prompt)
    found.update(sequence.chain.salt)
    return found.digest()


def _pairs(tokens: array[int], first: int) -> list[int]:
    """Return the pairs before the tokens from `first` on, except for the first two tokens of a text."""
    start = max(first - 2, 0)
    values = np.array(tokens[start:], np.int64)
    return (values[:-2] << _BITS | values[1:-1]).tolist()


def _common(tokens: array[int], end: int, tail: array[int]) -> int:
    """Return how many tokens before `end` equal the last tokens of `tail`."""
    length, most = 0, min(end, len(tail))
    while length < most and tokens[end - 1 - length] == tail[-1 - length]:
        length += 1
    return length
