"""A step as plain arrays on the host: tokens to compute, locations of their KV, draws and scores.

The model runner, CUDA graphs and sampler read only the `Step`, not the sequences. A process that has the `Step` and the
tokens of the previous step can therefore compute the step. A sample usually draws one token, from the last row of its
chunk. If the chunk ends with k drafted tokens, the sample draws one token from each of the last k + 1 rows. `Draws` has
one element per draw, and the draws of a sample are adjacent. The draw from a row does not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from ...kernels.contract import NO_SLOT
from ...kernels.edits import EditedText, RowEdits
from ..cache.host_tier import Copies
from ..outputs.open_requests import DRAW, OpenSample, OpenScore
from ..request import Distribution
from ..scheduling.media import ImageRows
from ..scheduling.sequence import Chunk, Chunks, Lanes, Takers

T = TypeVar("T")
NO_LANE = -1
"""The lane of a draw if the drawn token is not stored on the device. The host sees such a token before the sequence
continues.
"""
_NO_COPIES = np.empty((0, 2), np.int64)


@dataclass(frozen=True, eq=False)
class Draws:
    """R draws. Each draw selects one token, from one row of the hidden states.

    `rows`: int64 [R], the row of the hidden states for each draw. `positions`: int64 [R], the absolute position of the
    drawn token. `lanes`: int64 [R], the lane that stores the drawn token on the device (`LaneState`), or NO_LANE. A
    lane occurs at most once in `lanes`. `records`: `DRAW` [R]. `edits`: maps the indices of some draws to the edits of
    their logits. `targets`: maps the indices of some draws to target tokens, int64 [K]; the log-probs of the target
    tokens are recorded.
    """

    rows: np.ndarray
    positions: np.ndarray
    lanes: np.ndarray
    records: np.ndarray
    edits: Mapping[int, RowEdits]
    targets: Mapping[int, np.ndarray] = field(default_factory=dict)

    @cached_property
    def is_edited(self) -> np.ndarray:
        """A mask of the draws with edits: bool [R]."""
        is_edited = np.zeros(len(self), np.bool_)
        is_edited[list(self.edits)] = True
        return is_edited

    @property
    def are_plain(self) -> bool:
        """Whether all draws are plain: no draw has edits, and no record is `is_special`."""
        return not self.edits and not self.records["is_special"].any()

    def take(self, places: np.ndarray) -> Draws:
        """Return the draws at the given indices."""
        edits, targets = _taken(self.edits, places), _taken(self.targets, places)
        return Draws(
            self.rows[places], self.positions[places], self.lanes[places], self.records.take(places), edits, targets
        )

    def __len__(self) -> int:
        return len(self.rows)


def _taken(found: Mapping[int, T], places: np.ndarray) -> dict[int, T]:
    """Return the values of `found` at the keys in `places`. The new key of a value is the index of its old key in
    `places`.
    """
    return {i: found[place] for i, place in enumerate(places.tolist()) if place in found}


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """Rows [start, end) of the hidden states, from which the log-probs of `token_ids` are computed.

    `token_ids`: int64 [end - start]. `top_logprobs`: as in `ScoreRequest`. `text`: the scored tokens and all earlier
    tokens, or None if no logit is edited. `targets`: int64 [end - start, K], as in `ScoreRequest`, or None. `has_mask`:
    whether the tokens that could be drawn are recorded.
    """

    start: int
    end: int
    token_ids: np.ndarray
    distribution: Distribution
    top_logprobs: int | None
    text: EditedText | None = None
    targets: np.ndarray | None = None
    has_mask: bool = False

    @property
    def is_cut(self) -> bool:
        """Return whether the logits are needed, for edits, filters or targets."""
        return self.text is not None or self.targets is not None or self.distribution.has_filters

    def edits(self, rows: slice) -> Mapping[int, RowEdits]:
        """Return the edits of `rows`, which are counted from `start`. The keys of the result are indices in `rows`."""
        if self.text is None:
            return {}
        before = len(self.text.token_ids) - len(self.token_ids)
        return dict(enumerate(self.text.rows(before + rows.start, before + min(rows.stop, len(self.token_ids)))))


@dataclass(frozen=True, eq=False)
class JournalRows:
    """The rows that recurrent layers compute in a step that has drafted rows, or that repeats the accepted drafted rows
    of an earlier step (see `kernels.journal`).

    The repeated rows of each sequence come before the sequence's own rows. `query_starts` [N + 1]: as in `StateBatch`,
    including the repeated rows. `num_drafted` [N]: the number of drafted rows of each sequence. `own`, `repeated`,
    `drafted`: int64, as in `Journal`.
    """

    query_starts: Sequence[int]
    num_drafted: Sequence[int]
    own: np.ndarray
    repeated: np.ndarray
    drafted: np.ndarray


@dataclass(frozen=True, eq=False)
class Step:
    """M tokens of N sequences. Arrays are int64.

    `token_ids`, `positions` [M]: the tokens and their positions. `unseen` [2, U]: the indices of the tokens that the
    previous step is still drawing, and the lane in which each of these tokens is stored. `query_starts` [N + 1],
    `context_lens` [N]: as in `AttentionBatch`. `states` [2, N]: `reads` and `writes` of `StateBatch`, for a model with
    recurrent layers. `drafted` [D]: the indices of drafted tokens, which may be rejected. `journal`: None for a model
    without recurrent layers, and for a step that has neither drafted nor repeated rows. `records_routes`: whether at
    least one sequence of the step records routed experts.

    `images`: rows of encoded images that replace the embeddings of tokens; `place` is the index of a token in the step.
    `rotary_positions` [M], or [3, M] (time, row, column): the positions for rotations; None if they equal `positions`.
    `ends` [M]: as in `AttentionBatch`, or None.

    `slots` and `block_tables` have one array for each attention window of the model. `slots` [M]: where the KV of each
    token is written in the cache. `block_tables` [N, max_blocks]: as in `AttentionBatch`.

    `adapter`: the name of the adapter with which the step is computed; None for the base weights.

    `block_copies`: one array [C, 2] for each attention window of the model and, for a model with recurrent layers, one
    for the slots of states. Each row of `block_copies` is a copy from a source address to a destination address (see
    `host_tier`). The copies are made in order, before the step computes.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: Sequence[np.ndarray]
    unseen: np.ndarray
    query_starts: Sequence[int]
    context_lens: Sequence[int]
    block_tables: Sequence[np.ndarray]
    states: np.ndarray
    block_copies: Sequence[np.ndarray]
    draws: Draws
    scores: Sequence[ScoredRows]
    drafted: np.ndarray
    journal: JournalRows | None = None
    records_routes: bool = False
    images: Sequence[ImageRows] = ()
    rotary_positions: np.ndarray | None = None
    ends: np.ndarray | None = None
    adapter: str | None = None

    @property
    def owners(self) -> np.ndarray:
        """The index of each token's sequence: int64 [M]."""
        return np.arange(len(self.context_lens)).repeat(np.diff(self.query_starts))


def plan_step(chunks: Chunks, lanes: Lanes, takers: Takers, block_copies: Sequence[Copies], block_size: int) -> Step:
    """Return the step that computes `chunks`. There must be at least one chunk, and all chunks must have the same
    adapter.

    `block_copies`: as `Running.take_block_copies` returns them.
    """
    owners, positions, ends = _rows(chunks)
    most = lanes.num_blocks[chunks.lanes].max()
    tables = [table[chunks.lanes, :most] for table in lanes.tables]
    blocks = positions // block_size
    token_ids, unseen = _tokens(chunks, lanes, ends)
    adapter = chunks.sequences[0].chain.adapter
    drafted = ranges(ends - chunks.num_drafted, chunks.num_drafted) if chunks.drafts else ends[:0]
    return Step(
        token_ids=token_ids,
        positions=positions,
        slots=[(table[owners, blocks] - blocks) * block_size + positions for table in tables],
        unseen=unseen,
        query_starts=[0, *ends.tolist()],
        context_lens=chunks.ends.tolist(),
        block_tables=tables,
        states=np.array((lanes.states.source[chunks.lanes], lanes.states.target[chunks.lanes])),
        block_copies=pairs_of(block_copies),
        draws=_draws(chunks, lanes, takers, ends - 1),
        scores=[_scored(score, chunks[i], int(ends[i])) for i, score in takers.scores],
        drafted=drafted,
        journal=_journal(chunks, lanes, drafted),
        records_routes=bool(lanes.has_routes[chunks.lanes].any()),
        adapter=None if adapter is None else adapter.name,
        **_media(chunks, lanes, positions, owners),
    )


def _rows(chunks: Chunks) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three int64 arrays: for each row of the step, the index of its chunk and its position; and for each chunk,
    the end of its rows.
    """
    counts, indices = chunks.ends - chunks.starts, np.arange(len(chunks))
    if (counts == 1).all():
        return indices, chunks.starts, indices + 1
    return indices.repeat(counts), ranges(chunks.starts, counts), counts.cumsum()


def _media(chunks: Chunks, lanes: Lanes, positions: np.ndarray, owners: np.ndarray) -> dict[str, Any]:
    """Return `images`, `rotary_positions` and `ends` of a step. `owners`: the index of each token's chunk."""
    if not lanes.media_end.any():
        return {}
    of_images = np.flatnonzero(chunks.starts < lanes.media_end[chunks.lanes])
    shifts = lanes.shift[chunks.lanes]
    if not len(of_images) and not shifts.any():
        return {}
    images, axes, ends = list[ImageRows](), np.tile(positions + shifts[owners], (3, 1)), None
    firsts = np.searchsorted(owners, of_images)
    for chunk, first in zip(chunks.take(of_images), firsts.tolist(), strict=True):
        rows, media = slice(first, first + chunk.num_tokens), chunk.sequence.media
        assert media is not None
        axes[:, rows] = media.positions(chunk.start, chunk.end)
        images += [replace(each, place=first + each.place) for each in media.rows(chunk.start, chunk.end)]
        if (own := media.ends(chunk.start, chunk.end)) is not None:
            ends = positions + 1 if ends is None else ends
            ends[rows] = own
    is_plain = bool((axes == axes[0]).all())
    return dict(images=images, rotary_positions=axes[0] if is_plain else axes, ends=ends)


def pairs_of(block_copies: Sequence[Copies]) -> list[np.ndarray]:
    """Return the copies as arrays, int64 [C, 2]. `block_copies`: as in `plan_step`."""
    return [np.array(copies, np.int64).reshape(-1, 2) if copies else _NO_COPIES for copies in block_copies]


def _tokens(chunks: Chunks, lanes: Lanes, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `token_ids` and `unseen` of a step. A chunk with an unseen token consists of that token alone.

    In a chunk, drafted tokens come after the sequence's own tokens.
    """
    is_last = (chunks.ends - chunks.starts == 1) & (chunks.ends == lanes.num_tokens[chunks.lanes])
    of_last = chunks.lanes[is_last]
    token_ids = np.empty(int(ends[-1]), np.int64)
    token_ids[ends[is_last] - 1] = lanes.last_token[of_last]
    for i in (~is_last).nonzero()[0].tolist():
        start, end = int(chunks.starts[i]), int(chunks.ends[i])
        drafts = chunks.drafts.get(int(chunks.lanes[i]), ())
        place = int(ends[i]) - len(drafts)
        token_ids[ends[i] - (end - start) : place] = chunks.sequences[i].tokens[start : end - len(drafts)]
        token_ids[place : ends[i]] = drafts
    return token_ids, np.array((ends[is_last] - 1, of_last))[:, lanes.has_unseen[of_last]]


def _journal(chunks: Chunks, lanes: Lanes, drafted: np.ndarray) -> JournalRows | None:
    """Return the rows for recurrent layers. Return None for a model without recurrent layers, and for a step that has
    neither drafted nor repeated rows.

    `drafted`: the indices of the drafted rows.
    """
    if lanes.states.target[chunks.lanes[0]] == NO_SLOT:
        return None
    repeated, num_drafted = lanes.states.num_repeated[chunks.lanes], chunks.num_drafted
    if not (repeated.any() or len(drafted)):
        return None
    counts = chunks.ends - chunks.starts + repeated
    starts = counts.cumsum() - counts
    return JournalRows(
        query_starts=[0, *counts.cumsum().tolist()],
        num_drafted=num_drafted.tolist(),
        own=ranges(starts + repeated, counts - repeated),
        repeated=np.stack((*_places(chunks.lanes, repeated), ranges(starts, repeated))),
        drafted=np.stack((*_places(chunks.lanes, num_drafted), drafted)),
    )


def _places(lanes: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two values for each row: its lane, and its index among the rows of that lane. Lane i has counts[i]
    rows.
    """
    return lanes.repeat(counts), ranges(np.zeros_like(lanes), counts)


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the concatenation of one range for each i: the range has counts[i] numbers and begins at starts[i]. All
    arrays are int64.
    """
    firsts = counts.cumsum() - counts
    return np.arange(int(counts.sum())) + (starts - firsts).repeat(counts)


def _draws(chunks: Chunks, lanes: Lanes, takers: Takers, last_rows: np.ndarray) -> Draws:
    places, counts, num_decodes = takers.places, takers.counts, len(takers.decodes.lanes)
    records, takes = lanes.draws.take(takers.decodes.lanes), chunks.lanes[places]
    if num_decodes < len(places):
        records = np.concatenate((records, np.array([sample.draw for sample in takers.samples[num_decodes:]], DRAW)))
        _, sharing, shared = np.unique(places[num_decodes:], return_inverse=True, return_counts=True)
        takes[num_decodes:][shared[sharing] > 1] = NO_LANE
    rows, positions, owners = last_rows[places], chunks.ends[places], np.arange(len(places))
    if chunks.drafts:
        takes[counts > 1] = NO_LANE
        owners = owners.repeat(counts)
        rows, positions = ranges(rows - counts + 1, counts), ranges(positions - counts + 1, counts)
        takes, records = takes[owners], records.take(owners)
    edited, recorded = (positions < records["edits_end"]).nonzero()[0], records["has_targets"].nonzero()[0]
    found = ((i, takers.samples[owners[i]].target_ids) for i in recorded.tolist())
    targets = {i: ids for i, ids in found if ids is not None}
    return Draws(rows, positions, takes, records, _edits(edited, owners, chunks, lanes, takers), targets)


def _edits(edited: np.ndarray, owners: np.ndarray, chunks: Chunks, lanes: Lanes, takers: Takers) -> dict[int, RowEdits]:
    """Return the edits of the draws with the indices `edited`. `owners`: for each draw, the index of its sample."""
    if not chunks.drafts:
        num_unseen = np.zeros(len(takers.samples), np.int64)
        num_unseen[: len(takers.decodes)] = lanes.has_unseen[takers.decodes.lanes]
        of_samples = zip(edited.tolist(), num_unseen[edited].tolist(), strict=True)
        return {place: _next_edits(takers.samples[place], count) for place, count in of_samples}
    edits, by_owner = dict[int, RowEdits](), dict[int, list[int]]()
    for place, owner in zip(edited.tolist(), owners[edited].tolist(), strict=True):
        by_owner.setdefault(owner, []).append(place)
    for owner, places in by_owner.items():
        sample = takers.samples[owner]
        editor, masks = sample.editor, None if sample.place is None else sample.place.masks
        assert editor is not None
        drafts = chunks.drafts.get(int(chunks.lanes[takers.places[owner]]), ())
        rows = editor.rows(drafts, masks)
        edits |= zip(places, rows, strict=False)  # the edits of min_tokens may end before the last draft
    return edits


def _next_edits(sample: OpenSample, num_unseen: int) -> RowEdits:
    """Return the edits of a sample's next token. `num_unseen`: the number of its tokens that are still being drawn."""
    assert sample.editor is not None
    row = sample.editor.row(num_unseen=num_unseen)
    return row if sample.place is None else RowEdits(row.content, row.penalties, row.mask, sample.place.next_mask)


def _scored(score: OpenScore, chunk: Chunk, end: int) -> ScoredRows:
    """Return the rows to score for a chunk that ends before row `end`."""
    request = score.request
    first = min(max(chunk.start + 1, request.start), chunk.end + 1)
    token_ids = request.token_ids[first : chunk.end + 1].astype(np.int64)
    masks = None if score.place is None or not len(token_ids) else np.stack(score.place.masks)
    text = score.rules and EditedText(score.rules, request.token_ids[: chunk.end + 1], request.start, masks)
    rows, targets = (end - len(token_ids), end), request.target_token_ids
    if targets is not None:
        targets = targets[first - request.start : chunk.end + 1 - request.start].astype(np.int64)
    recorded = request.top_logprobs, text, targets, request.return_sampling_mask
    return ScoredRows(*rows, token_ids, request.distribution, *recorded)
