"""Runs the model on the chunks of a step. Owns the KV tensors; knows nothing of requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..kernels.ops import AttentionBatch
from .memory import bytes_needed, new_arena
from .models.dense import DenseModel, Empty
from .sequence import Chunk


class ModelRunner:
    """A loaded model with a paged KV cache of `num_blocks` blocks of `block_size` tokens, all of it in `arena`."""

    def __init__(self, model: DenseModel, num_blocks: int, block_size: int) -> None:
        self.model = model
        self.block_size = block_size
        shape = (num_blocks, block_size, model.config.num_kv_heads, model.config.head_dim)

        def build(empty: Empty) -> list[tuple[Tensor, Tensor]]:
            return [(empty(*shape), empty(*shape)) for _ in model.layers]

        # Small pages, so that a block takes memory only once it is used.
        self.arena = new_arena(bytes_needed(build, model.dtype), model.device, huge_pages=False)
        self.kv_caches = build(partial(self.arena.empty, model.dtype))

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Computes the chunks' KV and returns their hidden states [total tokens, hidden_size], in order."""
        token_ids = np.concatenate([np.asarray(c.sequence.tokens[c.start : c.end]) for c in chunks])
        positions = np.concatenate([np.arange(c.start, c.end) for c in chunks])
        tables = [np.asarray(c.sequence.table) for c in chunks]
        slots = np.concatenate([self._slots(c, table) for c, table in zip(chunks, tables, strict=True)])
        batch = AttentionBatch(
            query_starts=np.cumsum([0] + [c.end - c.start for c in chunks]).tolist(),
            context_lens=[c.end for c in chunks],
            block_tables=self._tensor(_pad(tables)),
        )
        return self.model.forward(
            self._tensor(token_ids), self._tensor(positions), self._tensor(slots), batch, self.kv_caches
        )

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies the KV of each (source, destination) block."""
        if pairs:
            sources, destinations = torch.tensor(pairs, device=self.model.device).unbind(1)
            for cache in (cache for caches in self.kv_caches for cache in caches):
                cache[destinations] = cache[sources]

    def _slots(self, chunk: Chunk, table: np.ndarray) -> np.ndarray:
        positions = np.arange(chunk.start, chunk.end)
        return table[positions // self.block_size] * self.block_size + positions % self.block_size

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.model.device)


def _pad(tables: Sequence[np.ndarray]) -> np.ndarray:
    padded = np.zeros((len(tables), max(map(len, tables))), np.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded
