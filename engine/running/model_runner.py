"""Runs the model on a step. Owns the tensors of KV blocks and of recurrent states; knows nothing of requests, and waits
for nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...kernels.contract import AttentionBatch, Memory, StateBatch
from ...kernels.specs import AttentionSpec, DeltaNetSpec
from ...kernels.transfer import to_device
from ..cache.memory import bytes_needed, new_arena
from ..models.decoder import Decoder, Empty, ModelInput
from .step import Step


class ModelRunner:
    """A loaded model with a paged KV cache of `num_blocks` blocks of `block_size` tokens, and `num_slots` slots for the
    states of its recurrent layers if it has such; all of it in `arena`.

    `memories`: what each layer remembers. `kv_caches`: those of them that are keys and values.
    """

    def __init__(self, model: Decoder, num_blocks: int, block_size: int, num_slots: int = 0) -> None:
        self.model = model
        self.block_size = block_size
        mixers = [layer.mixer for layer in model.spec.layers]

        def build(empty: Empty) -> list[Memory]:
            return [_memory(empty, mixer, num_blocks, block_size, num_slots) for mixer in mixers]

        def empty(*shape: int, dtype: torch.dtype = model.dtype) -> Tensor:
            return self.arena.empty(dtype, *shape)

        # Small pages, so that a block takes memory only once it is used.
        self.arena = new_arena(bytes_needed(build, model.dtype), model.device, huge_pages=False)
        self.memories = build(empty)
        pairs = zip(mixers, self.memories, strict=True)
        self.kv_caches = [memory for mixer, memory in pairs if isinstance(mixer, AttentionSpec)]
        self._has_states = len(self.kv_caches) < len(mixers)

    @torch.inference_mode()
    def run(self, step: Step, drawn: Tensor | None = None) -> Tensor:
        """Computes what a step adds to the memories and returns its hidden states [M, hidden_size].

        `drawn`: the token ids that the step under way draws, on the device.
        """
        batch = AttentionBatch(step.query_starts, step.context_lens, self.to_device(step.block_tables))
        token_ids = self.token_ids(step, drawn)
        tokens = token_ids, self.to_device(step.positions), self.to_device(step.slots)
        return self.forward(*tokens, batch, self.to_device(step.states))

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        batch: AttentionBatch,
        states: Tensor | None = None,
    ) -> Tensor:
        """The model's hidden states, on its memories. `states`: those of `Step`, for a model with recurrent layers."""
        tokens = token_ids, positions, slots, batch, self.memories
        if self._has_states:
            assert states is not None
            return self.model.forward(ModelInput(*tokens, StateBatch(batch.query_starts, *states))).hidden
        return self.model.forward(ModelInput(*tokens)).hidden

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


def _memory(
    empty: Empty, mixer: AttentionSpec | DeltaNetSpec, num_blocks: int, block_size: int, num_slots: int
) -> Memory:
    if isinstance(mixer, AttentionSpec):
        shape = num_blocks, block_size, mixer.num_kv_heads, mixer.head_dim
        return empty(*shape), empty(*shape)
    return empty(num_slots, *mixer.state_shape, dtype=torch.float32), empty(num_slots, *mixer.tail_shape)
