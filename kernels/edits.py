"""Edits: how bans, biases and penalties change the logits of one token.

This module defines the order and the arithmetic of the changes, for worker and trainer alike. Given the same logits,
worker and trainer compute the same bits. The changes of a row depend only on the request and on the earlier tokens of
the sample, and not on other rows or on chunks.

The order of the changes is the same as in vLLM. The logit becomes -inf for three kinds of tokens: tokens that the
request or its grammar does not allow, banned tokens, and tokens that would complete a bad word. Then these steps change
the logit of each token of the vocabulary, in float32, with the result of each step rounded:

1. `logit_bias` is added.
2. If the token occurs in the prompt or in the sample, a positive logit is divided by `repetition_penalty`, and any
   other logit is multiplied by `repetition_penalty` (Keskar et al. 2019, "CTRL", arXiv 1909.05858; as in transformers,
   the prompt counts).
3. `frequency_penalty` times the number of times that the token occurs in the sample is subtracted.
4. `presence_penalty` is subtracted if the token occurs in the sample.

Temperature and filters come after the edits, and do not belong to this module.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from .contract import MASK_BITS, Backend, Edits
from .transfer import all_to_device

# A token, how often it occurs in the sample, its bias, whether it ends a sample, and whether it occurs at all. As
# `LogitEdit` in cpu/native/api.h.
ENTRY = np.dtype([("token_id", "i4"), ("count", "i4"), ("bias", "f4"), ("ends", "?"), ("occurs", "?")], align=True)
# An entry as int32 numbers: their number, the places of the count and of the flags, and the flag `occurs`.
_NUMBERS, _COUNT, _FLAGS = 4, 1, 3
_OCCURS = int(np.frombuffer(np.array((0, 0, 0, False, True), ENTRY).tobytes(), np.int32)[_FLAGS])
_FIRST = array("i", (0, 1, 0, _OCCURS))  # the entry of token 0 that has occurred once in the sample


class Edited(Protocol):
    """The logit-editing parameters of a distribution, which `engine.request.Distribution` documents."""

    @property
    def min_tokens(self) -> int: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> Sequence[tuple[int, float]]: ...
    @property
    def allowed_token_ids(self) -> Sequence[int] | None: ...
    @property
    def bad_words_token_ids(self) -> Sequence[Sequence[int]]: ...
    @property
    def structured_outputs(self) -> object | None: ...


class Masks(Protocol):
    """The masks of a grammar. `trueroll.rollout.grammar.GrammarMasks` implements this interface."""

    def rows(self, sample: np.ndarray, first: int) -> np.ndarray:
        """Return the masks (`RowEdits.mask`) with which tokens [first, end) of a sample were drawn: int32 [end - first,
        ceil(V / 32)]. `sample`: all tokens of the sample before `end`.
        """
        ...


_NONE = np.array([1.0, 0.0, 0.0], np.float32)  # penalties that change nothing


@dataclass(eq=False, slots=True)
class RowEdits:
    """The changes of one row of logits.

    `content`: the bytes of `entries`, because bytes are faster to copy and to join than arrays. `penalties` (float32
    [3]): for repetition, presence and frequency. `mask` (int32 [ceil(V / 32)]): a bit for each token of the vocabulary,
    the lowest bit first; tokens with bit 0 get the logit -inf. `mask` is None if all tokens are allowed.
    `await_mask`: a function that waits for the mask of a grammar, and returns this mask; `know` joins it with `mask`.
    `await_mask` is None if no mask of a grammar is missing.
    """

    content: bytes
    penalties: np.ndarray
    mask: np.ndarray | None
    await_mask: Callable[[], np.ndarray] | None = None

    @property
    def entries(self) -> np.ndarray:
        """The tokens with changed logits, each once and in ascending order: `ENTRY` [E], read-only. A `bias` of -inf
        bans a token. `occurs` tells whether a token occurs in prompt or sample, and `count` how often it occurs in the
        sample.
        """
        return np.frombuffer(self.content, ENTRY)

    def know(self) -> RowEdits:
        """Wait for the mask of the grammar, join it with `mask`, and return these edits."""
        if self.await_mask is not None:
            found = self.await_mask()
            self.mask, self.await_mask = found if self.mask is None else self.mask & found, None
        return self


@dataclass(frozen=True, eq=False)
class Rules:
    """The edits that a request asks for.

    `penalties`: as in `RowEdits`. `bias`: maps tokens to the numbers that are added to their logits. `ending_tokens`:
    banned in the first `min_tokens` tokens of a sample. `bad`: bad words, as sequences of tokens; after the other
    tokens of a bad word, the word's last token is banned. `mask`: as in `RowEdits`, for all tokens of a sample.
    `has_grammar`: whether each token also has a mask from a grammar.
    """

    penalties: np.ndarray
    bias: Mapping[int, float]
    ending_tokens: Sequence[int]
    min_tokens: int
    bad: Sequence[Sequence[int]]
    mask: np.ndarray | None
    has_grammar: bool = False

    @classmethod
    def of(cls, distribution: Edited, ending_tokens: Sequence[int], vocab_size: int) -> Rules | None:
        """Return the rules of a distribution; None if the distribution edits no logit."""
        bans = ending_tokens if distribution.min_tokens > 0 else ()
        penalties = distribution.repetition_penalty, distribution.presence_penalty, distribution.frequency_penalty
        allowed = distribution.allowed_token_ids
        mask = None if allowed is None else mask_of(allowed, vocab_size)
        bias, bad = dict(distribution.logit_bias), distribution.bad_words_token_ids
        min_tokens, has_grammar = distribution.min_tokens if bans else 0, distribution.structured_outputs is not None
        rules = cls(np.array(penalties, np.float32), bias, bans, min_tokens, bad, mask, has_grammar)
        has_any = bans or bias or bad or mask is not None or has_grammar or rules.has_penalties
        return rules if has_any else None

    @property
    def has_penalties(self) -> bool:
        """Return whether the rules have penalties, which change the logits of tokens that have occurred before."""
        return bool((self.penalties != _NONE).any())

    @property
    def reads_tokens(self) -> bool:
        """Return whether the edits depend on which tokens came before, and not only on their number."""
        return self.has_grammar or self.has_penalties or any(len(word) > 1 for word in self.bad)

    @property
    def end(self) -> int:
        """The number of tokens after which a sample is no longer edited; a large number if all tokens are edited."""
        is_short = not (self.bias or self.bad or self.has_penalties or self.has_grammar) and self.mask is None
        return self.min_tokens if is_short else 2**62

    @cached_property
    def named(self) -> np.ndarray:
        """Entries (`ENTRY`) for the tokens that the request names, in ascending order."""
        ids = dict.fromkeys([*self.bias, *self.ending_tokens, *(word[-1] for word in self.bad)])
        ending = frozenset(self.ending_tokens)
        entries = [(token, 0, self.bias.get(token, 0.0), token in ending, False) for token in ids]
        return _sorted_by_token(np.array(entries, ENTRY))

    @cached_property
    def bad_ends(self) -> dict[tuple[int, ...], list[int]]:
        """For each bad word, map the tokens before its last token to a list of last tokens."""
        ends = dict[tuple[int, ...], list[int]]()
        for word in self.bad:
            ends.setdefault(tuple(word[:-1]), []).append(word[-1])
        return ends

    @cached_property
    def bad_sizes(self) -> set[int]:
        """The lengths of the keys of `bad_ends`."""
        return {*map(len, self.bad_ends)}

    @cached_property
    def while_short(self) -> RowEdits:
        """The edits of the first `min_tokens` tokens, if the edits do not depend on earlier tokens."""
        return self.row(self.named, self.named["ends"])

    @cached_property
    def afterwards(self) -> RowEdits:
        """The edits of the tokens after the first `min_tokens`, if the edits do not depend on earlier tokens."""
        return self.row(self.named)

    def row(self, entries: np.ndarray, bans: np.ndarray | None = None) -> RowEdits:
        """Return the edits of a row as copies. `entries`: `ENTRY` [E]. `bans`: which tokens are banned, bool [E]; None
        if no token is banned.
        """
        copied = entries.copy()
        if bans is not None:
            copied["bias"][bans] = -np.inf
        return RowEdits(copied.tobytes(), self.penalties, self.mask)


def mask_of(allowed: Sequence[int], vocab_size: int) -> np.ndarray:
    """Return the mask of allowed tokens: int32 [ceil(vocab_size / 32)], as in `RowEdits`."""
    bits = np.zeros(-(-vocab_size // MASK_BITS) * MASK_BITS, np.uint8)
    bits[np.asarray(allowed, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<i4")


class Editor:
    """The edits of the next token of one sample.

    `prompt` and `sample`: the earlier tokens (integers). Tokens are counted only if the rules have penalties.
    `num_new`: how many tokens of the sample count for `min_tokens`.
    """

    __slots__ = "_num_new", "_reach", "_table", "_tail", "rules"

    def __init__(self, rules: Rules, prompt: np.ndarray, sample: np.ndarray, num_new: int = 0) -> None:
        self.rules = rules
        self._num_new = num_new
        self._reach = max((len(word) - 1 for word in rules.bad), default=0)
        self._tail = sample[-self._reach :].tolist() if self._reach else []
        self._table = _Table(rules.named, prompt, sample) if rules.has_penalties else None

    def append(self, token: int) -> None:
        """Add the next token of the sample."""
        self._num_new += 1
        if self._reach:
            self._tail = [*self._tail, token][-self._reach :]
        if self._table is not None:
            self._table.count(token)

    def row(self, num_unseen: int = 0) -> RowEdits:
        """Return the edits of the next token, without the mask of a grammar. Later changes to the editor do not affect
        the returned edits. `num_unseen`: the number of the sample's tokens that the editor has not received yet.
        """
        rules, is_short = self.rules, self._num_new + num_unseen < self.rules.min_tokens
        if self._table is None and not rules.bad:
            return rules.while_short if is_short else rules.afterwards
        completed = self._completed() if rules.bad else []
        if not is_short and not completed:
            return (
                rules.afterwards if self._table is None else RowEdits(self._table.content, rules.penalties, rules.mask)
            )
        entries = rules.named if self._table is None else np.frombuffer(self._table.content, ENTRY)
        bans = np.isin(entries["token_id"], completed)
        return rules.row(entries, bans | entries["ends"] if is_short else bans)

    def rows(self, following: Sequence[int], masks: Iterable[np.ndarray] | None = None) -> list[RowEdits]:
        """Return the edits of the next token, and of the token after each of the `following` tokens. The editor does
        not change. `masks`: if the rules have a grammar, the grammar's mask (`RowEdits.mask`) for each of the returned
        edits.
        """
        rows = [self.row()]
        if following:
            rows += self._rows_after(following)
        return rows if masks is None else [_masked(row, mask) for row, mask in zip(rows, masks, strict=True)]

    def _rows_after(self, following: Sequence[int]) -> Iterator[RowEdits]:
        """Yield the edits of the token after each of the `following` tokens."""
        ahead = copy(self)
        if self._table is not None:
            ahead._table = self._table.copied()
        for token in following:
            ahead.append(token)
            yield ahead.row()

    def _completed(self) -> list[int]:
        """The tokens that would complete a bad word."""
        tail, ends = tuple(self._tail), self.rules.bad_ends
        sizes = (size for size in self.rules.bad_sizes if size <= len(tail))
        return [last for size in sizes for last in ends.get(tail[len(tail) - size :], ())]


def _masked(row: RowEdits, mask: np.ndarray) -> RowEdits:
    """Return the edits of a row, with a grammar's mask."""
    return RowEdits(row.content, row.penalties, mask if row.mask is None else row.mask & mask)


@dataclass(frozen=True, eq=False)
class EditedText:
    """A prompt and a sample that was drawn with `rules`. `token_ids` (integers [T]): the tokens from `start` on are the
    sample, and the earlier tokens are its prompt. `masks`: the grammar's masks for the last tokens in `token_ids`, as
    in `Editor.rows`.
    """

    rules: Rules
    token_ids: np.ndarray
    start: int
    masks: np.ndarray | None = None

    def rows(self, first: int, end: int) -> list[RowEdits]:
        """Return the edits with which tokens [first, end) were drawn. The range has at least one token, and `first` is
        not below `start`.
        """
        prompt, sample = self.token_ids[: self.start], self.token_ids[self.start : first]
        masks = self.masks
        if masks is not None:
            before = len(self.token_ids) - len(masks)
            masks = masks[first - before : end - before]
        return Editor(self.rules, prompt, sample, len(sample)).rows(self.token_ids[first : end - 1].tolist(), masks)


class _Table:
    """Entries for the tokens that a request names and for the tokens that occur in prompt or sample.

    The entries are stored as an array of int32, because a step changes a few numbers of many tables, and numpy takes
    several times as long as `array` to change a number.
    """

    __slots__ = "_ids", "_numbers"

    def __init__(self, named: np.ndarray, prompt: np.ndarray, sample: np.ndarray) -> None:
        others = np.setdiff1d(np.concatenate((prompt, sample)), named["token_id"])
        entries = np.concatenate((named, np.zeros(len(others), ENTRY)))
        entries["token_id"][len(named) :] = others
        entries = _sorted_by_token(entries)
        found, counts = np.unique(sample, return_counts=True)
        entries["count"][np.searchsorted(entries["token_id"], found)] = counts
        entries["occurs"] = np.isin(entries["token_id"], prompt) | (entries["count"] > 0)
        self._ids, self._numbers = array("i", entries["token_id"].tolist()), array("i", entries.tobytes())

    @property
    def content(self) -> bytes:
        """The bytes of the entries."""
        return self._numbers.tobytes()

    def count(self, token: int) -> None:
        """Count a token of the sample."""
        ids, numbers, place = self._ids, self._numbers, bisect_left(self._ids, token)
        first = place * _NUMBERS
        if place == len(ids) or ids[place] != token:
            ids.insert(place, token)
            numbers[first:first] = _FIRST
            numbers[first] = token
        else:
            numbers[first + _COUNT] += 1
            numbers[first + _FLAGS] |= _OCCURS

    def copied(self) -> _Table:
        other = copy(self)
        other._numbers, other._ids = self._numbers[:], self._ids[:]
        return other


def _sorted_by_token(entries: np.ndarray) -> np.ndarray:
    return entries[entries["token_id"].argsort()]


def edit(ops: Backend, logits: Tensor, rows: Mapping[int, RowEdits]) -> Tensor:
    """Return float32 logits [M, V] with the edits of `rows`, which maps rows to their edits. `logits` stays
    unchanged.
    """
    return edit_(ops, logits.clone(memory_format=torch.contiguous_format), rows) if rows else logits


def edit_(ops: Backend, logits: Tensor, rows: Mapping[int, RowEdits]) -> Tensor:
    """Like `edit`, but overwrite and return `logits`, which must be contiguous. Unlike `edit`, `edit_` makes no copy of
    `logits`.
    """
    if not rows:
        return logits
    if (entries := _Entries.of(rows, logits)) is not None:
        flat = logits.view(-1)
        flat.scatter_(0, entries.places, entries.edited(flat.index_select(0, entries.places)))
    _apply_masks(ops, logits, rows)
    return logits


def edit_slopes(logits: Tensor, rows: Mapping[int, RowEdits]) -> Tensor:
    """Return the derivatives of the results of `edit` with respect to the logits: float32 [M, V]. The derivatives are
    valid only for logits that `edit` does not set to -inf.
    """
    slopes = torch.ones_like(logits)
    if (entries := _Entries.of(rows, logits)) is not None:
        found = entries.slopes(logits.reshape(-1).index_select(0, entries.places))
        slopes.view(-1).scatter_(0, entries.places, found)
    return slopes


class _Entries(NamedTuple):
    """The changed logits of several rows, as tensors [E] on one device. `places`: the indices of the logits in the
    flattened logits. `counts`: float32. `penalties`: float32 [3, E], or [3, 1] if all rows have the same penalties.
    """

    places: Tensor
    bias: Tensor
    counts: Tensor
    occurs: Tensor
    penalties: Tensor

    @classmethod
    def of(cls, rows: Mapping[int, RowEdits], logits: Tensor) -> _Entries | None:
        """Return the changed logits of rows of `logits` [M, V]; None if only masks change logits."""
        sizes = [len(each.content) // ENTRY.itemsize for each in rows.values()]
        if not sum(sizes):
            return None
        entries = _joined([each.content for each in rows.values()], ENTRY)
        penalties = _joined([each.penalties for each in rows.values()], np.float32).reshape(-1, len(_NONE))
        are_equal = bool((penalties == penalties[0]).all())
        columns = [
            np.repeat(np.array([*rows], np.int64) * logits.shape[1], sizes) + entries["token_id"],
            entries["bias"].copy(),
            entries["count"].astype(np.float32),
            entries["occurs"].copy(),
            penalties[:1].T.copy() if are_equal else np.repeat(penalties.T, sizes, axis=1),
        ]
        return cls(*all_to_device(map(torch.from_numpy, columns), logits.device))

    def edited(self, logits: Tensor) -> Tensor:
        """Return the changed logits [E]. Each operation rounds its result to float32."""
        repetition, presence, frequency = self.penalties
        biased = logits + self.bias
        repeated = torch.where(biased > 0, biased / repetition, biased * repetition)
        penalized = torch.where(self.occurs, repeated, biased) - frequency * self.counts
        return penalized - presence * (self.counts > 0).float()

    def slopes(self, logits: Tensor) -> Tensor:
        """Return the derivatives of `edited` with respect to the logits [E]."""
        repetition = self.penalties[0]
        slope = torch.where(logits + self.bias > 0, 1.0 / repetition, repetition)
        return torch.where(self.occurs, slope, 1.0)


def edits_packer(
    rows: Mapping[int, RowEdits], targets: Mapping[int, np.ndarray], count: int, vocab_size: int
) -> Callable[[], Edits]:
    """Pack the edits and the targets (int64 [K]) of `count` requests, except the masks. Return a function that waits
    for the masks of grammars, and returns all as tensors. The keys of `rows` and of `targets` are indices of requests.
    """
    sizes, num_targets, penalties = np.zeros(count, np.int64), np.zeros(count, np.int64), np.tile(_NONE, (count, 1))
    if rows:
        sizes[[*rows]] = [len(each.content) // ENTRY.itemsize for each in rows.values()]
        penalties[[*rows]] = _joined([each.penalties for each in rows.values()], np.float32).reshape(-1, len(_NONE))
    if targets:
        num_targets[[*targets]] = [len(ids) for ids in targets.values()]
    in_order = [rows[row].content for row in sorted(rows)]
    entries = _joined(in_order, np.uint8).reshape(-1, ENTRY.itemsize)
    of_rows = [*map(torch.from_numpy, (_starts(sizes), entries, penalties))]
    ids = _joined([targets[row] for row in sorted(targets)], np.int64)
    of_targets = [*map(torch.from_numpy, (_starts(num_targets), ids))]

    def finish() -> Edits:
        return Edits(*of_rows, *map(torch.from_numpy, _packed_masks(rows, count, vocab_size)), *of_targets)

    return finish


def _packed_masks(rows: Mapping[int, RowEdits], count: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `mask_places` and `masks` of `Edits`. Rows that share an array share a mask. Waits for the masks of
    grammars.
    """
    masks, places = _masks_of(rows), np.full(count, -1, np.int64)
    distinct = {id(mask): mask for mask in masks.values()}
    if masks:
        numbers = dict(zip(distinct, range(len(distinct)), strict=True))
        places[[*masks]] = [numbers[id(mask)] for mask in masks.values()]
    return places, _joined([*distinct.values()], np.int32).reshape(len(distinct), -(-vocab_size // MASK_BITS))


def _masks_of(rows: Mapping[int, RowEdits]) -> dict[int, np.ndarray]:
    """Return the masks of the rows that have masks. Waits for the masks of grammars."""
    found = ((row, each.know().mask) for row, each in rows.items())
    return {row: mask for row, mask in found if mask is not None}


def _starts(sizes: np.ndarray) -> np.ndarray:
    """Return where each of several adjacent parts begins, and the end of the last part. `sizes`: int64 [N]."""
    return np.concatenate((np.zeros(1, np.int64), sizes.cumsum()))


def _joined(parts: Sequence[Any], dtype: Any) -> np.ndarray:
    """Return the content of `parts`, contiguous arrays or bytes, as one array. For small arrays, `_joined` is many
    times faster than `np.concatenate`.
    """
    return np.frombuffer(bytearray().join(parts), dtype)


def _apply_masks(ops: Backend, logits: Tensor, rows: Mapping[int, RowEdits]) -> None:
    """Write -inf to the logits of the tokens that the masks exclude, in place."""
    if masks := _masks_of(rows):
        found = np.array([*masks], np.int64), np.stack([*masks.values()])
        ops.mask_logits(logits, *all_to_device(map(torch.from_numpy, found), logits.device))
