"""Decode steps as CUDA graphs: one launch in place of several hundred.

A graph holds the kernels of one step of `size` decodes with plain draws, forward pass and sampling, at the addresses
they had when it was captured. Sizes are powers of two; a step of fewer decodes fills its rows up with padding, which by
the contract of the ops changes no bit of the others. Padding reads and writes `spare_block`, a block of the KV cache
that no sequence has.

Owns the graphs and their inputs. A graph is captured when the first step needs it, and holds for as long as weights and
KV cache stay where they are: `forget` when they move. A capture waits for the device, a replay does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...kernels.contract import GREEDY, AttentionBatch, Wanted
from .model_runner import ModelRunner
from .sampler import Drawing, Sampler, make_wanted
from .step import Step

Outputs = tuple[Tensor, Tensor, Tensor]


class Capture(Protocol):
    """Runs a computation once, and returns its outputs with what computes them anew from the inputs' new content."""

    def __call__(self, compute: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], object]]: ...


class CudaCapture:
    """Capture by `torch.cuda.CUDAGraph`. All graphs share one pool of memory, for they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], object]]:
        compute()  # Kernels are compiled and loaded by their first run, which must not be a captured one.
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as one that stages weights, may go on allocating.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = compute()
        return outputs, graph.replay


class _Inputs:
    """The inputs of a graph of `size` rows, all of them padding at first."""

    def __init__(self, runner: ModelRunner, size: int, max_model_len: int, spare_block: int) -> None:
        self._runner = runner
        device, block_size = runner.model.device, runner.block_size

        def column(value: int) -> Tensor:
            return torch.full((size,), value, dtype=torch.int64, device=device)

        self._spare_block, self._spare_slot = spare_block, spare_block * block_size
        self.token_ids = column(0)
        self.positions = column(0)
        self.slots = column(self._spare_slot)
        self.lens = column(1)
        self.tables = torch.full((size, -(-max_model_len // block_size)), spare_block, device=device)
        rows = torch.arange(size, device=device)
        ones = torch.ones(size, dtype=torch.float32, device=device)
        self.wanted = Wanted(rows, column(GREEDY), ones, column(0).bool(), column(0), column(0))

    def fill(self, step: Step, drawn: Tensor | None) -> None:
        """Writes the inputs of a step; rows that it does not have become padding."""
        self._fill_tokens(step, drawn)
        count, wanted = len(step.draws), make_wanted(step.draws, self.lens.device)
        for name in ("targets", "temperatures", "raw", "seeds", "positions"):
            getattr(self.wanted, name)[:count] = getattr(wanted, name)
        self.wanted.targets[count:] = GREEDY

    def _fill_tokens(self, step: Step, drawn: Tensor | None) -> None:
        count, runner = len(step.token_ids), self._runner
        positions, slots, lens = runner.to_device(np.stack((step.positions, step.slots, step.context_lens)))
        tables = runner.to_device(step.block_tables)
        self.token_ids[:count] = runner.token_ids(step, drawn)
        self.positions[:count] = positions
        self.slots[:count], self.slots[count:] = slots, self._spare_slot
        self.lens[:count], self.lens[count:] = lens, 1
        self.tables[:count, : tables.shape[1]] = tables
        self.tables[count:, 0] = self._spare_block


@dataclass(frozen=True)
class _Graph:
    """`inputs`: what it reads at each replay. `outputs`: what `next_tokens` gave."""

    inputs: _Inputs
    outputs: Outputs
    replay: Callable[[], object]


class DecodeGraphs:
    """Graphs for steps of any number of decodes, of at most `max_model_len` tokens each."""

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        spare_block: int,
        max_model_len: int,
        new_capture: Callable[[], Capture] = CudaCapture,
    ) -> None:
        self._runner, self._sampler = runner, sampler
        self._spare_block, self._max_model_len = spare_block, max_model_len
        self._new_capture = new_capture
        self._capture = new_capture()
        self._graphs: dict[int, _Graph] = {}

    def serves(self, step: Step) -> bool:
        """Whether each sequence computes a single token, with one plain draw after it."""
        count, rows = len(step.context_lens), step.draws.integers[0]
        each_draws_once = len(rows) == count and bool((rows == np.arange(count)).all())
        return len(step.token_ids) == count and each_draws_once and not step.draws.special

    def forget(self) -> None:
        """Gives the graphs and their memory back."""
        self._graphs.clear()
        self._capture = self._new_capture()

    @torch.inference_mode()
    def run(self, step: Step, drawn: Tensor | None) -> Drawing:
        """Computes the KV of a step and draws its next tokens. `drawn`: that of `ModelRunner.run`."""
        count = len(step.draws)
        size = 1 << (count - 1).bit_length()
        graph = self._graphs.get(size) or self._new_graph(size)
        graph.inputs.fill(step, drawn)
        graph.replay()
        return Drawing(step.draws, *(column[:count] for column in graph.outputs))

    def _new_graph(self, size: int) -> _Graph:
        inputs = _Inputs(self._runner, size, self._max_model_len, self._spare_block)
        outputs, replay = self._capture(lambda: self._compute(inputs))
        self._graphs[size] = _Graph(inputs, outputs, replay)
        return self._graphs[size]

    def _compute(self, inputs: _Inputs) -> Outputs:
        size = len(inputs.lens)
        batch = AttentionBatch(range(size + 1), [self._max_model_len] * size, inputs.tables, inputs.lens)
        hidden = self._runner.forward(inputs.token_ids, inputs.positions, inputs.slots, batch)
        return self._sampler.next_tokens(hidden, inputs.wanted)
