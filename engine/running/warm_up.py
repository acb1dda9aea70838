"""Warm-up on a GPU before the first step, so that no step waits for a compilation or runs out of memory.

Compiles kernels for all numbers of rows that a step may have. Then captures all CUDA graphs and computes the largest
step, on a KV cache with one block for each group. The memory that is free after that is available to the real KV cache.
On a CPU there is nothing to do.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from trueroll.errors import ConfigError

from ...kernels.contract import LOGITS_ROWS, AttentionBatch, Pages
from ..config import EngineConfig
from ..models.decoder import Decoder
from ..request import Distribution
from .graphs import DecodeGraphs
from .loading import LoadedModel, available_memory, uses_graphs
from .model_runner import ModelRunner
from .sampler import Sampler


def is_needed(device: torch.device) -> bool:
    """Return whether kernels must be compiled and memory must be planned around the largest step."""
    return device.type == "cuda"


def warm_up(config: EngineConfig, loaded: LoadedModel, max_model_len: int) -> int:
    """Compile kernels, and return how many bytes are available for the KV cache.

    Raise ConfigError if the largest step and the graphs do not fit into memory beside the weights, or if kernels cannot
    be compiled or stored.
    """
    device = loaded.model.device
    if not is_needed(device):
        return available_memory(device)
    ops, forms = loaded.backend.ops, _Computation(_outline(loaded), config, max_model_len)
    ops.prepare(forms, config.max_num_batched_tokens, device)
    try:
        return _rehearse(config, loaded, max_model_len)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "max_num_batched_tokens, max_num_seqs, max_model_len: steps and CUDA graphs do not fit into memory beside "
            f"the weights: {error}; lower one of them, or turn graphs off with cuda_graphs=False"
        ) from None
    finally:
        torch.cuda.empty_cache()


class _Computation:
    """The computations of a model's steps, on a KV cache with one block per window and one slot of recurrent state."""

    def __init__(self, model: Decoder, config: EngineConfig, max_model_len: int) -> None:
        blocks = [1] * len(model.spec.windows)
        self.runner, self.sampler = ModelRunner(model, blocks, config.block_size, 1), Sampler(model.ops, model.head)
        self._max_num_seqs, self._max_model_len = config.max_num_seqs, max_model_len

    @torch.inference_mode()
    def __call__(self, rows: int) -> None:
        """Do the computations of steps with this number of rows. Steps compute heads of many rows in smaller parts."""
        hidden = self.hidden(rows)
        if rows <= self._max_num_seqs:
            self._decode(rows)
        if rows <= LOGITS_ROWS:
            self.heads(hidden)

    def hidden(self, rows: int) -> Tensor:
        """Return the hidden states of a decode beside a chunk of a prompt, or of a chunk alone for up to 2 rows."""
        lens, zeros = ([1, rows - 1] if rows > 2 else [rows]), self._zeros(rows)
        batch = AttentionBatch([0, *accumulate(lens)], lens, self._tables(len(lens), rows))
        return self.runner.forward(zeros, zeros, self._pages(batch), self._zeros(2, len(lens))).hidden

    def heads(self, hidden: Tensor) -> None:
        """Compute tokens and log-probs from hidden states in all ways that steps use."""
        token_ids = self._zeros(len(hidden))
        for distribution in (Distribution(), Distribution(top_k=1)):
            self.sampler.score(hidden, token_ids, distribution)
            self.sampler.score_statistics(hidden, token_ids, distribution, k=1)

    def _decode(self, rows: int) -> None:
        """Decode in the form that CUDA graphs capture."""
        zeros, lens = self._zeros(rows), [self._max_model_len] * rows
        batch = AttentionBatch(range(rows + 1), lens, self._tables(rows, self._max_model_len), zeros + 1)
        self.runner.forward(zeros, zeros, self._pages(batch), self._zeros(2, rows))

    def _pages(self, batch: AttentionBatch) -> list[Pages]:
        """Return the pages of each window, on its only block."""
        return [Pages(self._zeros(batch.query_starts[-1]), batch)] * len(self.runner.model.spec.windows)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.runner.model.device)

    def _tables(self, sequences: int, tokens: int) -> Tensor:
        """Return block tables in which every entry is the only block."""
        return self._zeros(sequences, -(-tokens // self.runner.block_size))


def _outline(loaded: LoadedModel) -> Decoder:
    """Return the model without memory, with one layer of each kind."""
    model = loaded.model
    spec = replace(model.spec, layers=tuple(dict.fromkeys(model.spec.layers)))
    return Decoder(spec, model.ops, partial(torch.empty, dtype=model.dtype, device="meta"))


@torch.inference_mode()
def _rehearse(config: EngineConfig, loaded: LoadedModel, max_model_len: int) -> int:
    """Return the bytes that remain free beside all graphs and the largest step."""
    computation = _Computation(loaded.model, config, max_model_len)
    spare = [0] * len(computation.runner.model.spec.windows), 0
    graphs = DecodeGraphs(computation.runner, computation.sampler, *spare, config.max_num_seqs, max_model_len)
    if uses_graphs(config, loaded):
        graphs.capture()  # first, since a capture releases memory that torch has cached
    computation.heads(computation.hidden(config.max_num_batched_tokens)[:LOGITS_ROWS])
    return available_memory(loaded.model.device)
