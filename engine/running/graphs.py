"""Decode steps as CUDA graphs: one launch replaces several hundred kernel launches.

The number of rows of a graph is a power of two. There are two graphs of each size: a forward graph and a draw graph.
The forward graph computes hidden states and the model's records, such as routed experts. The draw graph makes plain
draws (without filters, bans or statistics) from the hidden states of the forward graph. A replay reads and writes the
memory addresses that were captured.

A step in which each sequence computes one token replays the forward graph. A step with drafts also replays the forward
graph, unless the model has recurrent layers. In the forward graph, each drafted token is a row with the blocks of its
sequence and a context length of its own. If a step that replays the forward graph makes one plain draw per row, the
step also replays the draw graph. If a step does not make one plain draw per row, its draws are computed without a
graph. A step with fewer rows than its graph is padded. By the contract of the ops, padding does not change any bit of
the other rows. Padding rows read and write `spare_blocks`: for each window, a block of the KV cache that no sequence
uses. Padding rows read no recurrent state, and write to the slot `spare_state`, which no sequence uses.

Owns the graphs and their inputs. Graphs are valid while weights and KV cache keep their addresses. If weights or KV
cache move, call `forget`, then `capture` before the next step. A capture synchronizes the device; a replay does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ...kernels.contract import GREEDY, NO_SLOT, AttentionBatch, Pages, Wanted
from ..models.decoder import ROUTES, ModelOutput
from .model_runner import LaneState, ModelRunner
from .sampler import Drawing, Sampler, make_wanted
from .step import Step

Outputs = Sequence[Tensor]


class Capture(Protocol):
    """Runs a computation. The call returns the outputs, and a function that repeats the computation with the current
    inputs.
    """

    def __call__(self, compute: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], object]]: ...


class CudaCapture:
    """Captures with `torch.cuda.CUDAGraph`. All graphs share a memory pool, because they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], object]]:
        compute()  # The first run compiles and loads kernels, which is not allowed during a capture.
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as one that stages weights, may continue to allocate.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = compute()
        return outputs, graph.replay


class _Padding(NamedTuple):
    """The memory that padding rows use. `blocks`: a spare block for each window. `states`: [2, 1], as in `Step`."""

    blocks: Sequence[int]
    states: Tensor


class _Inputs:
    """The inputs of the graphs with `size` rows. At first, all rows are padding."""

    def __init__(
        self, runner: ModelRunner, size: int, max_model_len: int, spare_blocks: Sequence[int], spare_state: int
    ) -> None:
        device, block_size = runner.model.device, runner.block_size

        def column(value: int) -> Tensor:
            return torch.full((size,), value, dtype=torch.int64, device=device)

        self._padding = _Padding(spare_blocks, torch.tensor([[NO_SLOT], [spare_state]], device=device))
        self.token_ids = column(0)
        self.positions = column(0)
        self.lens = column(1)
        width = -(-max_model_len // block_size)
        self.slots = [column(spare * block_size) for spare in spare_blocks]
        self.tables = [torch.full((size, width), spare, device=device) for spare in spare_blocks]
        self.states = self._padding.states.repeat(1, size)
        rows = torch.arange(size, device=device)
        ones = torch.ones(size, dtype=torch.float32, device=device)
        self.wanted = Wanted(rows, column(GREEDY), ones, column(0).bool(), column(0), column(0))

    def fill_draws(self, step: Step) -> None:
        """Write the draws of a step to the inputs. The remaining rows become padding."""
        count, wanted = len(step.draws), make_wanted(step.draws, self.lens.device)
        for name in ("targets", "temperatures", "raw", "seeds", "positions"):
            getattr(self.wanted, name)[:count] = getattr(wanted, name)
        self.wanted.targets[count:] = GREEDY

    def fill_tokens(self, step: Step, runner: ModelRunner, lanes: LaneState | None) -> None:
        """Write the tokens of a step to the inputs. The remaining rows become padding."""
        count, owners = len(step.token_ids), step.owners if len(step.drafted) else slice(None)
        states = step.states[:, owners]
        rotary = step.positions if step.rotary_positions is None else step.rotary_positions
        columns = np.vstack((step.token_ids, rotary, step.positions + 1, states, *step.slots))
        token_ids, positions, lens, reads, writes, *slots = runner.to_device(columns)
        self.token_ids[:count] = runner.seen(token_ids, step, lanes)
        self.positions[:count] = positions
        self.lens[:count], self.lens[count:] = lens, 1
        self.states[0, :count], self.states[1, :count] = reads, writes
        self.states[:, count:] = self._padding.states
        for i, spare in enumerate(self._padding.blocks):
            tables = runner.to_device(step.block_tables[i][owners])
            self.slots[i][:count], self.slots[i][count:] = slots[i], spare * runner.block_size
            self.tables[i][:count, : tables.shape[1]] = tables
            self.tables[i][count:, 0] = spare


@dataclass(frozen=True)
class _Graph:
    """A captured computation. Each `replay` overwrites `outputs`."""

    outputs: Outputs
    replay: Callable[[], object]


@dataclass(frozen=True)
class _Graphs:
    """The graphs of one size.

    `inputs`: the inputs that each replay reads. `forward`: the forward graph; its outputs are the hidden states and the
    records. `names`: the names of the records that the forward graph returns. `draw`: the draw graph, which also reads
    the hidden states.
    """

    inputs: _Inputs
    names: Sequence[str]
    forward: _Graph
    draw: _Graph


class DecodeGraphs:
    """Graphs for decode steps. The number of rows of the largest graph is `max_num_seqs`, rounded up to a power of two.

    Each row belongs to a sequence of at most `max_model_len` tokens.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        spare_blocks: Sequence[int],
        spare_state: int,
        max_num_seqs: int,
        max_model_len: int,
        new_capture: Callable[[], Capture] = CudaCapture,
    ) -> None:
        self._runner, self._sampler = runner, sampler
        self._spare, self._max_model_len = (spare_blocks, spare_state), max_model_len
        self._sizes = [1 << i for i in range(_exponent(max_num_seqs) + 1)]
        self._new_capture = new_capture
        self._graphs: dict[int, _Graphs] = {}

    def capture(self) -> None:
        """Capture all graphs, unless they are already captured.

        The largest graph is captured first, so that smaller graphs reuse its memory.
        """
        if not self._graphs:
            capture = self._new_capture()
            self._graphs = {size: self._captured(size, capture) for size in reversed(self._sizes)}

    def forget(self) -> None:
        """Release the graphs and their memory."""
        self._graphs = {}

    def serves(self, step: Step) -> bool:
        """Return whether `run` can compute the step. Each sequence must compute one token, not counting drafted
        tokens.
        """
        count = len(step.token_ids)
        each_computes_one = count - len(step.drafted) == len(step.context_lens)
        rotary = step.rotary_positions
        has_plain_rows = step.journal is None and not step.images and (rotary is None or rotary.ndim == 1)
        return each_computes_one and has_plain_rows and count <= self._sizes[-1]

    def draws(self, step: Step) -> bool:
        """Return whether `draw` can compute the draws. The step must make one plain draw per row."""
        count, rows = len(step.token_ids), step.draws.rows
        each_draws_once = len(rows) == count and bool((rows == np.arange(count)).all())
        return self.serves(step) and each_draws_once and step.draws.are_plain

    def run(self, step: Step, lanes: LaneState | None) -> ModelOutput:
        """Compute a step and return the same output as `ModelRunner.run`. The output is valid until the next call."""
        graphs, count = self._of(step), len(step.token_ids)
        graphs.inputs.fill_tokens(step, self._runner, lanes)
        graphs.forward.replay()
        hidden, *records = graphs.forward.outputs
        return ModelOutput(hidden[:count], {name: r[:, :count] for name, r in zip(graphs.names, records, strict=True)})

    def draw(self, step: Step) -> Drawing:
        """Draw the tokens of the step that `run` computed last."""
        graphs = self._of(step)
        graphs.inputs.fill_draws(step)
        graphs.draw.replay()
        return Drawing(*(column[: len(step.draws)] for column in graphs.draw.outputs))

    def _of(self, step: Step) -> _Graphs:
        return self._graphs[1 << _exponent(len(step.token_ids))]

    @torch.inference_mode()
    def _captured(self, size: int, capture: Capture) -> _Graphs:
        inputs = _Inputs(self._runner, size, self._max_model_len, *self._spare)
        names = (ROUTES,) if self._runner.model.spec.experts else ()
        forward = _Graph(*capture(lambda: self._forward(inputs, names)))
        hidden = forward.outputs[0]
        draw = _Graph(*capture(lambda: self._sampler.next_tokens(hidden, inputs.wanted)))
        return _Graphs(inputs, names, forward, draw)

    def _forward(self, inputs: _Inputs, names: Sequence[str]) -> Outputs:
        size = len(inputs.lens)
        starts, most = range(size + 1), [self._max_model_len] * size
        pages = [
            Pages(slots, AttentionBatch(starts, most, tables, inputs.lens))
            for slots, tables in zip(inputs.slots, inputs.tables, strict=True)
        ]
        output = self._runner.forward(inputs.token_ids, inputs.positions, pages, inputs.states)
        return [output.hidden, *(output.records[name] for name in names)]


def _exponent(count: int) -> int:
    """Return the exponent of the smallest power of two that is at least `count`."""
    return (count - 1).bit_length()
