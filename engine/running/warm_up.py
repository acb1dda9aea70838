"""What is done on a GPU before the first step, so that no step has to wait for it, and all of them find memory.

Kernels are compiled for any number of rows that a step may have. Then the largest step and all CUDA graphs are computed
on a KV cache of one block for each group, and what is free beside them is there for the real one. On a CPU there is
nothing to do.
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
    """Whether kernels have to be compiled, and memory is short enough to be planned."""
    return device.type == "cuda"


def warm_up(config: EngineConfig, loaded: LoadedModel, max_model_len: int) -> int:
    """Compiles kernels, and returns how many bytes are available for the KV cache.

    Raise ConfigError if the largest step and the graphs do not fit into memory beside the weights, or if
    kernels cannot be compiled or kept.
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
            "max_num_batched_tokens, max_num_seqs, max_model_len: expected steps and CUDA graphs that fit into memory "
            f"beside the weights, found: {error}; lower one of them, or turn graphs off with cuda_graphs=False"
        ) from None
    finally:
        torch.cuda.empty_cache()


class _Computation:
    """What steps compute with a model, on a KV cache of one block and one slot of recurrent state."""

    def __init__(self, model: Decoder, config: EngineConfig, max_model_len: int) -> None:
        blocks = [1] * len(model.spec.windows)
        self.runner, self.sampler = ModelRunner(model, blocks, config.block_size, 1), Sampler(model.ops, model.head)
        self._max_num_seqs, self._max_model_len = config.max_num_seqs, max_model_len

    @torch.inference_mode()
    def __call__(self, rows: int) -> None:
        """What steps of so many rows compute, but for the heads of many rows, which come in parts of fewer."""
        hidden = self.hidden(rows)
        if rows <= self._max_num_seqs:
            self._decode(rows)
        if rows <= LOGITS_ROWS:
            self.heads(hidden)

    def hidden(self, rows: int) -> Tensor:
        """Hidden states of a decode beside a part of a prompt, or of that alone where it would be a decode too."""
        lens, zeros = ([1, rows - 1] if rows > 2 else [rows]), self._zeros(rows)
        batch = AttentionBatch([0, *accumulate(lens)], lens, self._tables(len(lens), rows))
        return self.runner.forward(zeros, zeros, self._pages(batch), self._zeros(2, len(lens))).hidden

    def heads(self, hidden: Tensor) -> None:
        """All ways from hidden states to tokens and log-probs."""
        token_ids = self._zeros(len(hidden))
        for distribution in (Distribution(), Distribution(top_k=1)):
            self.sampler.score(hidden, token_ids, distribution)
            self.sampler.score_statistics(hidden, token_ids, distribution, k=1)

    def _decode(self, rows: int) -> None:
        """Decodes in the form that graphs hold."""
        zeros, lens = self._zeros(rows), [self._max_model_len] * rows
        batch = AttentionBatch(range(rows + 1), lens, self._tables(rows, self._max_model_len), zeros + 1)
        self.runner.forward(zeros, zeros, self._pages(batch), self._zeros(2, rows))

    def _pages(self, batch: AttentionBatch) -> list[Pages]:
        """For each window, on its one block."""
        return [Pages(self._zeros(batch.query_starts[-1]), batch)] * len(self.runner.model.spec.windows)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.runner.model.device)

    def _tables(self, sequences: int, tokens: int) -> Tensor:
        """Block tables that name the one block."""
        return self._zeros(sequences, -(-tokens // self.runner.block_size))


def _outline(loaded: LoadedModel) -> Decoder:
    """The model without memory, with one layer of each kind."""
    model = loaded.model
    spec = replace(model.spec, layers=tuple(dict.fromkeys(model.spec.layers)))
    return Decoder(spec, model.ops, partial(torch.empty, dtype=model.dtype, device="meta"))


@torch.inference_mode()
def _rehearse(config: EngineConfig, loaded: LoadedModel, max_model_len: int) -> int:
    """The bytes that are free while memory is held for all graphs and for the largest step."""
    computation = _Computation(loaded.model, config, max_model_len)
    spare = [0] * len(computation.runner.model.spec.windows), 0
    graphs = DecodeGraphs(computation.runner, computation.sampler, *spare, config.max_num_seqs, max_model_len)
    if uses_graphs(config, loaded):
        graphs.capture()  # first, since it gives back what torch keeps of other memory
    computation.heads(computation.hidden(config.max_num_batched_tokens)[:LOGITS_ROWS])
    return available_memory(loaded.model.device)
