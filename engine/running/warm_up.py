"""Warm-up on a GPU: ensures that no step waits for a compilation or runs out of memory.

The warm-up compiles kernels for every number of rows that a step may have. The warm-up then captures all CUDA graphs
and computes the largest step, on a KV cache with one block per attention window. The memory that remains free during
the largest step is available to the real KV cache. On a CPU, the warm-up does nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from trueroll.errors import ConfigError

from ...kernels.contract import LOGITS_ROWS, AttentionBatch, Pages
from ...kernels.edits import EditedText, Rules
from ...kernels.specs import Stage
from ..config import EngineConfig
from ..models.decoder import Decoder
from ..request import Distribution
from .graphs import DecodeGraphs
from .loading import LoadedModel, available_memory, uses_graphs
from .model_runner import ModelRunner
from .sampler import Sampler
from .step import ScoredRows


def is_needed(device: torch.device) -> bool:
    """Return whether the device needs a warm-up."""
    return device.type == "cuda"


def warm_up(config: EngineConfig, loaded: LoadedModel, max_model_len: int) -> int:
    """Warm up the device, and return how many bytes are available for the KV cache.

    Raise ConfigError if the largest step and the CUDA graphs do not fit into memory beside the weights. Raise
    ConfigError if kernels cannot be compiled or stored.
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
            f"the weights: {error}; lower one of these settings, or disable CUDA graphs with cuda_graphs=False"
        ) from None
    finally:
        torch.cuda.empty_cache()


class _Computation:
    """The computations of a model's steps, with one KV block per attention window and one recurrent state slot."""

    def __init__(self, model: Decoder, config: EngineConfig, max_model_len: int) -> None:
        blocks = [1] * len(model.spec.windows)
        self.runner = ModelRunner(model, blocks, config.block_size, 1)
        self.sampler = Sampler(model.ops, model.head, model.spec.head)
        self._max_num_seqs, self._max_model_len = config.max_num_seqs, max_model_len

    @torch.inference_mode()
    def __call__(self, rows: int) -> None:
        """Run the computations of steps with `rows` rows. The head runs only if `rows` is at most `LOGITS_ROWS`."""
        hidden = self.hidden(rows)
        if rows <= self._max_num_seqs:
            self._decode(rows)
        if rows <= LOGITS_ROWS:
            self.heads(hidden)

    def hidden(self, rows: int) -> Tensor:
        """Return the hidden states of a batch that consists of one decode and one prompt chunk.

        A batch of 1 or 2 rows has a chunk but no decode.
        """
        lens, zeros = ([1, rows - 1] if rows > 2 else [rows]), self._zeros(rows)
        batch = AttentionBatch([0, *accumulate(lens)], lens, self._tables(len(lens), rows))
        return self.runner.forward(zeros, zeros, self._pages(batch), self._zeros(2, len(lens))).hidden

    def heads(self, hidden: Tensor) -> None:
        """Compute tokens and log-probs from hidden states, with each sampler variant that a step may use."""
        count, token_ids = len(hidden), self._zeros(len(hidden))
        for distribution in (Distribution(), Distribution(top_k=1, allowed_token_ids=[0])):
            rules = Rules.of(distribution, (), self.runner.model.spec.vocab_size)
            text = rules and EditedText(rules, np.zeros(count + 1, np.int64), 1)
            for k in (None, 1):
                rows = ScoredRows(0, count, np.zeros(count, np.int64), distribution, k, text, has_mask=True)
                self.sampler.score(hidden, token_ids, rows)

    def _decode(self, rows: int) -> None:
        """Run a decode batch in the form that CUDA graphs capture."""
        zeros, lens = self._zeros(rows), [self._max_model_len] * rows
        batch = AttentionBatch(range(rows + 1), lens, self._tables(rows, self._max_model_len), zeros + 1)
        self.runner.forward(zeros, zeros, self._pages(batch), self._zeros(2, rows))

    def _pages(self, batch: AttentionBatch) -> list[Pages]:
        """Return the pages of each attention window. Each window has a single block."""
        return [Pages(self._zeros(batch.query_starts[-1]), batch)] * len(self.runner.model.spec.windows)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.runner.model.device)

    def _tables(self, sequences: int, tokens: int) -> Tensor:
        """Return block tables in which every entry is block 0."""
        return self._zeros(sequences, -(-tokens // self.runner.block_size))


def _outline(loaded: LoadedModel) -> Decoder:
    """Return the model on torch's meta device, without memory and with one layer of each kind, in a single stage."""
    model = loaded.model
    spec = replace(model.spec, layers=tuple(dict.fromkeys(model.spec.layers)), stage=Stage())
    return Decoder(spec, model.ops, partial(torch.empty, dtype=model.dtype, device="meta"))


@torch.inference_mode()
def _rehearse(config: EngineConfig, loaded: LoadedModel, max_model_len: int) -> int:
    """Capture all graphs, compute the largest step, and return the bytes that remain free."""
    computation = _Computation(loaded.model, config, max_model_len)
    spare = [0] * len(computation.runner.model.spec.windows), 0
    graphs = DecodeGraphs(computation.runner, computation.sampler, *spare, config.max_num_seqs, max_model_len)
    if uses_graphs(config, loaded):
        graphs.capture()  # Capture first, because a capture releases memory that torch has cached.
    hidden = computation.hidden(config.max_num_batched_tokens)
    if loaded.model.spec.stage.is_last:
        computation.heads(hidden[:LOGITS_ROWS])
    return available_memory(loaded.model.device)
