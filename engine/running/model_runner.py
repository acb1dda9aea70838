"""Runs the model on a step. Owns the KV tensors; knows nothing of requests, and waits for nothing."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from ...kernels.contract import AttentionBatch
from ...kernels.transfer import to_device
from ..cache.memory import bytes_needed, new_arena
from ..models.decoder import Decoder, Empty, ModelInput
from .step import Step


class ModelRunner:
    """A loaded model with a paged KV cache of `num_blocks` blocks of `block_size` tokens, all of it in `arena`."""

    def __init__(self, model: Decoder, num_blocks: int, block_size: int) -> None:
        self.model = model
        self.block_size = block_size
        mixers = model.spec.attentions
        shapes = [(num_blocks, block_size, mixer.num_kv_heads, mixer.head_dim) for mixer in mixers]

        def build(empty: Empty) -> list[tuple[Tensor, Tensor]]:
            return [(empty(*shape), empty(*shape)) for shape in shapes]

        # Small pages, so that a block takes memory only once it is used.
        self.arena = new_arena(bytes_needed(build, model.dtype), model.device, huge_pages=False)
        self.kv_caches = build(partial(self.arena.empty, model.dtype))

    @torch.inference_mode()
    def run(self, step: Step, drawn: Tensor | None = None) -> Tensor:
        """Computes the KV of a step and returns its hidden states [M, hidden_size].

        `drawn`: the token ids that the step under way draws, on the device.
        """
        batch = AttentionBatch(step.query_starts, step.context_lens, self.to_device(step.block_tables))
        token_ids = self.token_ids(step, drawn)
        return self.forward(token_ids, self.to_device(step.positions), self.to_device(step.slots), batch)

    def forward(self, token_ids: Tensor, positions: Tensor, slots: Tensor, batch: AttentionBatch) -> Tensor:
        """The model's hidden states, on the KV cache."""
        return self.model.forward(ModelInput(token_ids, positions, slots, batch, self.kv_caches)).hidden

    def token_ids(self, step: Step, drawn: Tensor | None) -> Tensor:
        """The tokens of a step, int64 [M], on the device."""
        token_ids = self.to_device(step.token_ids)
        if not len(step.unseen):
            return token_ids
        assert drawn is not None
        places, rows = self.to_device(step.unseen).unbind(1)
        return token_ids.index_copy(0, places, drawn[rows])

    @torch.inference_mode()
    def copy_blocks(self, step: Step) -> None:
        """Copies the KV that a step finds in another block."""
        if not len(step.block_copies):
            return
        sources, destinations = self.to_device(step.block_copies).unbind(1)
        for cache in (cache for caches in self.kv_caches for cache in caches):
            cache[destinations] = cache[sources]

    def to_device(self, values: np.ndarray) -> Tensor:
        """Those on the model's device, without waiting for it. On a CPU they share their memory."""
        return to_device(torch.from_numpy(values), self.model.device)
