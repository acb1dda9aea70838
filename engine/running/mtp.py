"""Runs the module for multi-token prediction (MTP): keeps the module's memory up to date in each step, and drafts
tokens.

Owns the module's KV cache and some hidden states of the decoder. The KV cache and the hidden states are stored in the
blocks of the layers without a window. Slot q of the KV cache holds a value that depends only on the tokens up to q.
Each block keeps the hidden states of its last tokens. Cache hits, forks and preemptions therefore need no other state:
the blocks of a prefix are enough to guess the tokens that follow the prefix.

The module computes every token that the decoder computes, including the tokens of prompts. If the module skipped
tokens, its KV cache would have gaps. While drafting, the module writes to slots after the last token. The decoder's
next step computes the drafted tokens, and the module then overwrites the slots that drafting wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...kernels.contract import AttentionBatch, Pages
from ...kernels.transfer import all_to_device, to_device
from ..cache.memory import bytes_needed, new_arena
from ..models.decoder import Decoder, Empty
from .planner import kept_states
from .sampler import Sampler
from .step import NO_LANE, Draws, Step


@dataclass(frozen=True, eq=False)
class DraftStep:
    """N sequences for which tokens are drafted. Arrays are int64 unless stated otherwise.

    `token_ids`, `positions` [N]: the last token of each sequence, and its position. `counts` [N]: how many tokens to
    draft, at least 1. `block_table` [N, max_blocks]: the blocks of the layers without a window. The blocks have room
    for every drafted token except the last, because drafting does not need the last token's KV. `records` [N], of dtype
    `DRAW`: how the tokens of each sequence are drawn. `block_copies`: as in `Step`, made before anything is drafted.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    counts: np.ndarray
    block_table: np.ndarray
    records: np.ndarray
    block_copies: Sequence[np.ndarray]


class MtpRunner:
    """The memory and the computations of a model's MTP module. The memory has `num_blocks` blocks of `block_size`
    tokens.

    `most`: the maximum number of tokens drafted for a sequence in a step. `arena`: the memory.
    """

    def __init__(self, model: Decoder, num_blocks: int, block_size: int, most: int) -> None:
        assert model.mtp is not None
        self._model, self._mtp, self._block_size = model, model.mtp, block_size
        [mixer] = model.spec.mtp_attentions
        assert mixer.window is None
        self._kept = kept_states(most, block_size)
        kv = num_blocks, block_size, mixer.num_kv_heads, mixer.head_dim

        def build(empty: Empty) -> tuple[Tensor, Tensor, Tensor]:
            return empty(*kv), empty(*kv), empty(num_blocks, self._kept, model.spec.hidden_size)

        def empty(*shape: int, dtype: torch.dtype = model.dtype) -> Tensor:
            return self.arena.empty(dtype, *shape)

        self.arena = new_arena(bytes_needed(build, model.dtype), model.device, huge_pages=False)
        *self._memory, self._hidden = build(empty)
        self._nothing = torch.zeros(model.spec.hidden_size, dtype=model.dtype, device=model.device)

    @property
    def block_tensors(self) -> list[Tensor]:
        """The tensors with the content of blocks."""
        return [*self._memory, self._hidden]

    def follow(self, step: Step, token_ids: Tensor, hidden: Tensor) -> None:
        """Bring the memory up to date after the decoder has computed a step.

        `token_ids`: int64 [M], the tokens of the step. `hidden`: [M, hidden_size], the decoder's hidden states.
        """
        table, firsts = step.block_tables[0], np.array(step.query_starts[:-1])
        places, kept, kept_places = self._places(table, step, firsts)
        arrays = step.positions, step.slots[0], table, firsts, places, kept, kept_places
        positions, slots, table, firsts, places, kept, kept_places = all_to_device(
            map(torch.from_numpy, arrays), hidden.device
        )
        before = torch.cat((hidden[:1], hidden[:-1]))
        before[firsts] = self._states(places)
        pages = Pages(slots, AttentionBatch(step.query_starts, step.context_lens, table))
        self._compute(token_ids, positions, before, pages)
        self._hidden.flatten(0, 1)[kept_places] = hidden[kept]

    def draft(self, step: DraftStep, sampler: Sampler) -> list[list[int]]:
        """Return the drafted tokens of each sequence. The drafted tokens of a sequence are drawn with the sequence's
        own noise (`records`).
        """
        device = self._model.device
        table, of_table = to_device(torch.from_numpy(step.block_table), device), step.block_table
        hidden = self._states(to_device(torch.from_numpy(self._place(of_table, step.positions - 1)), device))
        token_ids = to_device(torch.from_numpy(step.token_ids), device)
        order, drawn = np.arange(len(step.counts)), list[tuple[np.ndarray, Tensor]]()
        for depth in range(int(step.counts.max())):
            going_on = np.flatnonzero(step.counts[order] > depth)
            order = order[going_on]
            left = to_device(torch.from_numpy(going_on), device)
            hidden, token_ids, table = hidden[left], token_ids[left], table[left]
            positions = step.positions[order] + depth
            blocks = of_table[order, positions // self._block_size]
            slots = blocks * self._block_size + positions % self._block_size
            batch = AttentionBatch(range(len(order) + 1), (positions + 1).tolist(), table)
            slots, of_rows = all_to_device(map(torch.from_numpy, (slots, positions)), device)
            hidden = self._compute(token_ids, of_rows, hidden, Pages(slots, batch))
            token_ids = sampler.draw(hidden, _draws(step.records[order], positions + 1)).token_ids
            drawn.append((order, token_ids))
        drafts: list[list[int]] = [[] for _ in step.counts]
        for rows, tokens in drawn:
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                drafts[row].append(token)
        return drafts

    def _compute(self, token_ids: Tensor, positions: Tensor, before: Tensor, pages: Pages) -> Tensor:
        model, (keys, values) = self._model, self._memory
        return self._mtp.forward(model.embedded(token_ids), before, model.rotations(positions), (keys, values), pages)

    def _states(self, places: Tensor) -> Tensor:
        """Return the kept hidden states at `places`; zeros where a place is -1."""
        found = self._hidden.flatten(0, 1)[places.clamp(min=0)]
        return torch.where((places >= 0).unsqueeze(1), found, self._nothing)

    def _place(self, table: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """For each row of `table`, return where the hidden state of the token at the row's position is kept. The result
        is -1 for a position of -1.
        """
        blocks = table[np.arange(len(positions)), positions.clip(min=0) // self._block_size]
        return np.where(positions < 0, -1, blocks * self._kept + positions % self._block_size % self._kept)

    def _places(self, table: np.ndarray, step: Step, firsts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return three arrays: where the hidden state before each sequence's first token is kept, which rows of the
        step to keep, and where to keep these rows.

        Each block keeps the hidden states of the last tokens that the step computes in the block.
        """
        positions, size = step.positions, self._block_size
        ends = np.minimum((positions // size + 1) * size, np.array(step.context_lens)[step.owners])
        rows = np.flatnonzero(positions >= ends - self._kept)
        return (
            self._place(table, positions[firsts] - 1),
            rows,
            self._place(table[step.owners[rows]], positions[rows]),
        )


def _draws(records: np.ndarray, positions: np.ndarray) -> Draws:
    """Return the draws of drafted tokens, without statistics and bans."""
    records = records.copy()
    records["num_tops"] = -1
    records["is_special"], records["has_targets"], records["has_mask"] = records["has_filters"], False, False
    return Draws(np.arange(len(positions)), positions, np.full(len(positions), NO_LANE), records, {})
