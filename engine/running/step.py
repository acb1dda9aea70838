"""A step as plain arrays on the host: what is computed, where its KV goes, and what is drawn and scored after it.

Made once for each step. Model runner, CUDA graphs and sampler read this and no sequence, so that whoever has it and the
tokens of the step before can compute the step.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from ..outputs.open_requests import OpenSample, OpenScore
from ..request import Distribution
from ..scheduling.sequence import Chunk
from ..scheduling.sequence import Sequence as TokenSequence
from .draws import Draw, Draws

_PLACEHOLDER = 0


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """Rows [start, end) of the hidden states give the log-probs of `token_ids`, int64 [end - start].

    `top_logprobs`: that of `ScoreRequest`.
    """

    start: int
    end: int
    token_ids: np.ndarray
    distribution: Distribution
    top_logprobs: int | None


@dataclass(frozen=True, eq=False)
class Step:
    """M tokens of N sequences. Arrays are int64.

    `token_ids`, `positions`, `slots` [M]: the tokens, and where in the cache their KV goes. `unseen` [U, 2]: the places
    of tokens that are not known yet, and for each the row of what the step before draws. `query_starts` (N + 1),
    `context_lens` (N), `block_tables` [N, max_blocks]: those of `AttentionBatch`. `block_copies` [C, 2]: source and
    destination of each block that is copied before anything is computed.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    unseen: np.ndarray
    query_starts: Sequence[int]
    context_lens: Sequence[int]
    block_tables: np.ndarray
    block_copies: np.ndarray
    draws: Draws
    scores: Sequence[ScoredRows]


def plan_step(chunks: Sequence[Chunk], block_copies: Mapping[int, int], block_size: int) -> Step:
    """The step that computes `chunks`, of which there is at least one. `block_copies`: destination to source."""
    counts, lens = [chunk.num_tokens for chunk in chunks], [chunk.end for chunk in chunks]
    ends = list(accumulate(counts))
    token_ids, unseen = _tokens(chunks)
    # Chunk i has rows [ends[i] - counts[i], ends[i]) and positions [lens[i] - counts[i], lens[i]).
    owners = np.arange(len(chunks)).repeat(counts)
    positions = np.arange(len(owners)) + np.subtract(lens, ends)[owners]
    tables = _pad_tables(chunks)
    blocks, offsets = np.divmod(positions, block_size)
    return Step(
        token_ids=token_ids,
        positions=positions,
        slots=tables[owners, blocks] * block_size + offsets,
        unseen=unseen,
        query_starts=[0, *ends],
        context_lens=lens,
        block_tables=tables,
        block_copies=np.array([(source, to) for to, source in block_copies.items()], np.int64).reshape(-1, 2),
        draws=Draws.of([_draw(s, c.sequence, e - 1) for c, e in zip(chunks, ends, strict=True) for s in c.drawing]),
        scores=[_scored(s, c, e) for c, e in zip(chunks, ends, strict=True) if (s := c.scoring) is not None],
    )


def _tokens(chunks: Sequence[Chunk]) -> tuple[np.ndarray, np.ndarray]:
    """`token_ids` and `unseen` of a step. A chunk whose token is unseen has no other."""
    tokens, unseen = array("i"), array("q")
    for chunk in chunks:
        row = chunk.sequence.unseen_row
        if row is not None and chunk.start == len(chunk.sequence.tokens):
            unseen.extend((len(tokens), row))
            tokens.append(_PLACEHOLDER)
        else:
            tokens.extend(chunk.sequence.tokens[chunk.start : chunk.end])
    return np.array(tokens, np.int64), np.array(unseen).reshape(-1, 2)


def _pad_tables(chunks: Sequence[Chunk]) -> np.ndarray:
    """The block tables of the chunks' sequences as the rows of one matrix, filled up with zeros."""
    tables = [chunk.sequence.table for chunk in chunks]
    padded = np.zeros((len(tables), max(map(len, tables))), np.int64)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return padded


def _draw(sample: OpenSample, sequence: TokenSequence, row: int) -> Draw:
    params = sample.request.params
    banned = sample.banned if sequence.num_decoded < params.min_tokens else ()
    return Draw(row, params, sample.seed, sequence.num_tokens, banned)


def _scored(score: OpenScore, chunk: Chunk, end: int) -> ScoredRows:
    """What is scored of a chunk that ends before row `end`."""
    request = score.request
    token_ids = request.token_ids[chunk.start + 1 : chunk.end + 1].astype(np.int64)
    return ScoredRows(end - chunk.num_tokens, end, token_ids, request.distribution, request.top_logprobs)
