"""Runs the model on the chunks of a step. Owns the KV tensors; knows nothing of requests, and waits for nothing."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ..kernels.contract import AttentionBatch
from ..kernels.transfer import to_device
from .memory import bytes_needed, new_arena
from .models.decoder import Decoder, Empty, ModelInput
from .sequence import Chunk

_PLACEHOLDER = 0


class ModelRunner:
    """A loaded model with a paged KV cache of `num_blocks` blocks of `block_size` tokens, all of it in `arena`."""

    def __init__(self, model: Decoder, num_blocks: int, block_size: int) -> None:
        self.model = model
        self.block_size = block_size
        mixers = [layer.mixer for layer in model.spec.layers]
        shapes = [(num_blocks, block_size, mixer.num_kv_heads, mixer.head_dim) for mixer in mixers]

        def build(empty: Empty) -> list[tuple[Tensor, Tensor]]:
            return [(empty(*shape), empty(*shape)) for shape in shapes]

        # Small pages, so that a block takes memory only once it is used.
        self.arena = new_arena(bytes_needed(build, model.dtype), model.device, huge_pages=False)
        self.kv_caches = build(partial(self.arena.empty, model.dtype))

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], drawn: Tensor | None = None) -> Tensor:
        """Computes the chunks' KV and returns their hidden states [total tokens, hidden_size], in order.

        `drawn`: the token ids that the step under way draws, on the device.
        """
        counts, lens, tables = [c.num_tokens for c in chunks], [c.end for c in chunks], pad_tables(chunks)
        ends = list(accumulate(counts))
        # Chunk i has rows [ends[i] - counts[i], ends[i]) and positions [lens[i] - counts[i], lens[i]).
        owners = np.arange(len(chunks)).repeat(counts)
        positions = np.arange(len(owners)) + np.subtract(lens, ends)[owners]
        slots = self.slots(owners, positions, tables)
        batch = AttentionBatch([0, *ends], lens, self.to_device(tables))
        token_ids = self.token_ids(chunks, drawn)
        tokens = ModelInput(token_ids, self.to_device(positions), self.to_device(slots), batch, self.kv_caches)
        return self.model.forward(tokens).hidden

    def token_ids(self, chunks: Sequence[Chunk], drawn: Tensor | None) -> Tensor:
        """The chunks' tokens, int64 [total tokens], on the device. A chunk whose token is unseen has no other."""
        tokens, unseen = array("i"), []
        for chunk in chunks:
            if chunk.start == len(chunk.sequence.tokens):
                unseen.append((len(tokens), chunk.sequence.unseen_row))
                tokens.append(_PLACEHOLDER)
            else:
                tokens.extend(chunk.sequence.tokens[chunk.start : chunk.end])
        token_ids = self.to_device(np.asarray(tokens))
        if not unseen:
            return token_ids
        assert drawn is not None
        places, rows = self.to_device(np.asarray(unseen)).unbind(1)
        return token_ids.index_copy_(0, places, drawn[rows])

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies the KV of each (source, destination) block, of which there is at least one."""
        sources, destinations = self.to_device(np.asarray(pairs)).unbind(1)
        for cache in (cache for caches in self.kv_caches for cache in caches):
            cache[destinations] = cache[sources]

    def slots(self, rows: np.ndarray, positions: np.ndarray, tables: np.ndarray) -> np.ndarray:
        """Where in the cache the KV of tokens at `positions` goes. `rows`: the row of `tables` that each one's is."""
        blocks, offsets = np.divmod(positions, self.block_size)
        return tables[rows, blocks] * self.block_size + offsets

    def to_device(self, values: np.ndarray) -> Tensor:
        """int64 on the model's device, without waiting for it."""
        return to_device(torch.from_numpy(values.astype(np.int64)), self.model.device)


def pad_tables(chunks: Sequence[Chunk]) -> np.ndarray:
    """The block tables of the chunks' sequences as the rows of one matrix, int64, filled up with zeros."""
    tables = [chunk.sequence.table for chunk in chunks]
    padded = np.zeros((len(tables), max(map(len, tables))), np.int64)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return padded
