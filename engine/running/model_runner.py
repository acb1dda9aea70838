"""The model runner: runs the model's forward pass for a step.

Owns the tensors of KV blocks and recurrent states. `LaneState` holds the per-sequence data that stays on the device
between steps. The model runner knows nothing about requests, and does not synchronize the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ...kernels.contract import AttentionBatch, Backend, Memories, Memory, Pages, StateBatch, new_caches
from ...kernels.journal import Journal
from ...kernels.specs import LayerSpec
from ...kernels.transfer import all_to_device, to_device
from ..cache.memory import Arena, bytes_needed, new_arena
from ..models.decoder import Decoder, Empty, ModelInput, ModelOutput, new_output
from ..models.tower import EmbeddedRows
from .encoder import ImageEncoder
from .host_memory import HostMemory
from .mtp import MtpRunner
from .ranks import Links
from .step import Draws, JournalRows, Step


class LaneState:
    """The last drawn tokens, on the device. A lane is the index of a running sequence (see the module `sequence`).

    `last_tokens` (int64 [capacity + 1]) has the last drawn token of each lane. The tensor has one extra element, for
    draws without a lane.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.last_tokens = torch.zeros(capacity + 1, dtype=torch.int64, device=device)

    def update(self, draws: Draws, token_ids: Tensor) -> None:
        """Store the drawn tokens, int64 [R]. Does not synchronize."""
        lanes = draws.lanes % len(self.last_tokens)  # NO_LANE, which is -1, becomes the last element
        self.last_tokens.index_copy_(0, to_device(torch.from_numpy(lanes), token_ids.device), token_ids)


class ModelRunner:
    """A loaded model with a paged KV cache and slots for recurrent states, all in `arena`.

    A block has `block_size` tokens. `num_blocks`: the number of blocks for each attention window of the model.
    `num_slots`: the number of slots for recurrent states. `journal`: the size of the journal of recurrent layers
    (`kernels.journal`), as a pair: the number of sequences, and the number of drafted tokens per sequence. `mtp`: the
    runner of the model's MTP module, or None. `links`: how this rank reaches the other ranks; None if there is only one
    rank. `host_slots`: the number of slots in the host tier for each window and, for a model with recurrent layers, for
    states; empty without a host tier. `memories`: the memory of each layer. `host`: the slots of the host tier; `host`
    makes all copies of blocks. `encoder`: encodes images; None for a model without a vision tower.

    A stage has the memory of its own layers only, but steps and `num_blocks` list the windows of all layers.
    """

    def __init__(
        self,
        model: Decoder,
        num_blocks: Sequence[int],
        block_size: int,
        num_slots: int = 0,
        journal: tuple[int, int] = (0, 0),
        mtp: MtpRunner | None = None,
        links: Links | None = None,
        host_slots: Sequence[int] = (),
    ) -> None:
        self.model, self.mtp, self.block_size = model, mtp, block_size
        self._links = links
        self.encoder = None if model.tower is None else ImageEncoder(model)
        layers = [model.spec.layers[i] for i in model.spec.own_layers]
        blocks = [0 if group is None else num_blocks[group] for group in self.groups]

        def build(empty: Empty) -> tuple[list[Memory], list[Tensor | None]]:
            pairs = zip(layers, blocks, strict=True)
            memories = [_memory(model.ops, empty, layer, count, block_size, num_slots) for layer, count in pairs]
            recurrent = [layer.recurrent for layer in layers]
            return memories, [None if mixer is None else empty(*journal, mixer.row_size) for mixer in recurrent]

        def empty(*shape: int, dtype: torch.dtype = model.dtype) -> Tensor:
            return self.arena.empty(dtype, *shape)

        # Use small pages, so that a block occupies memory only after it is first used.
        self.arena = new_arena(bytes_needed(build, model.dtype), model.device, huge_pages=False)
        memories, journals = build(empty)
        self.memories = Memories(memories)
        self._journals = journals if model.spec.recurrent else None  # None without recurrent layers
        tensors = self._copied()
        self.host = HostMemory(tensors, host_slots or [0] * len(tensors))

    @cached_property
    def groups(self) -> list[int | None]:
        """For each layer, the index of its window; None for layers without a KV cache."""
        spec = self.model.spec
        mixers, windows = [spec.layers[i].cached for i in spec.own_layers], spec.windows
        return [None if mixer is None else windows.index(mixer.window) for mixer in mixers]

    @property
    def device(self) -> torch.device:
        """The device of the model and its memory."""
        return self.model.device

    @property
    def num_held(self) -> int:
        """The bytes that the memory holds now, including the memory of the MTP module."""
        return sum(arena.num_held for arena in self._arenas)

    def sleep(self) -> None:
        """Release the memory. The content of the memory is lost."""
        for arena in self._arenas:
            arena.drop(keep=False)
        self.host.sleep()

    def wake_up(self) -> None:
        """Reallocate the memory."""
        for arena in self._arenas:
            arena.restore()
        self.memories = Memories(self.memories)  # their addresses may differ
        self.host.wake_up()

    def run(self, step: Step, lanes: LaneState | None = None, model: Decoder | None = None) -> ModelOutput:
        """Compute a step: update the memories, and return the model's output for the step's tokens.

        `lanes`: the tokens drawn by previous steps. A step with unseen tokens requires `lanes`. `model`: as in
        `forward`.
        """
        rotary = step.positions if step.rotary_positions is None else step.rotary_positions
        arrays = step.token_ids, rotary, step.states, *step.slots, *step.block_tables
        token_ids, positions, states, *paged = all_to_device(map(torch.from_numpy, arrays), self.device)
        count, ends = len(step.slots), None if step.ends is None else self.to_device(step.ends)
        pages = [
            Pages(slots, AttentionBatch(step.query_starts, step.context_lens, tables, ends=ends))
            for slots, tables in zip(paged[:count], paged[count:], strict=True)
        ]
        embedded = self.encoder.embedded(step.images) if step.images and self.encoder is not None else None
        seen = self.seen(token_ids, step, lanes)
        return self.forward(seen, positions, pages, states, step.journal, embedded, model)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        pages: Sequence[Pages],
        states: Tensor | None = None,
        journal: JournalRows | None = None,
        embedded: EmbeddedRows | None = None,
        model: Decoder | None = None,
    ) -> ModelOutput:
        """Run the model's forward pass, which reads and writes the memories. A stage begins with the hidden states of
        the previous stage, and sends its own hidden states to the next stage.

        `positions`, `embedded`: as in `ModelInput`. `pages`: for each window, where to read and write keys and values.
        `states`, `journal`: as in `Step`, for a model with recurrent layers. `model`: a model of the same spec that is
        used instead of the runner's model.
        """
        batch = None
        if states is not None and self._journals is not None:
            batch = self._states(pages[0].batch.query_starts, states, journal)
        of_layers = [pages[group or 0] for group in self.groups]
        before = None if self.model.spec.stage.is_first else self._received(len(token_ids))
        rows = ModelInput(token_ids, positions, self.memories, of_layers, batch, embedded, before)
        out = (self.model if model is None else model).forward(rows)
        if self._links is not None and self._links.after is not None:
            for tensor in _up_to(self.model.spec.own_experts.stop, out):
                self._links.after.send(tensor)
        return out

    def _received(self, rows: int) -> ModelOutput:
        """Wait for the output of the previous stage, and return it. Without `links`, return an uninitialized output."""
        spec, dtype = self.model.spec, self.model.dtype
        out = new_output(spec, torch.empty(rows, spec.hidden_size, dtype=dtype, device=self.device))
        if self._links is not None and self._links.before is not None:
            for tensor in _up_to(self.model.spec.own_experts.start, out):
                self._links.before.receive(tensor)
        return out

    def _states(self, query_starts: Sequence[int], states: Tensor, rows: JournalRows | None) -> StateBatch:
        reads, writes = states
        if rows is None or self._journals is None:
            return StateBatch(query_starts, reads, writes)
        places = map(self.to_device, (rows.own, rows.repeated, rows.drafted))
        return StateBatch(rows.query_starts, reads, writes, rows.num_drafted, Journal(self._journals, *places))

    def seen(self, token_ids: Tensor, step: Step, lanes: LaneState | None) -> Tensor:
        """Return `token_ids` with the step's unseen tokens filled in. The previous step draws the unseen tokens.

        `token_ids`: int64 [M], on the device.
        """
        if not step.unseen.size:
            return token_ids
        assert lanes is not None
        places, drawing = self.to_device(step.unseen).unbind()
        return token_ids.index_copy(0, places, lanes.last_tokens[drawing])

    def follow(self, mtp: MtpRunner, step: Step, lanes: LaneState | None, hidden: Tensor) -> None:
        """After a step, bring the memory of `mtp` up to date. `hidden`: the hidden states of the step."""
        mtp.follow(step, self.seen(self.to_device(step.token_ids), step, lanes), hidden)

    def _copied(self) -> list[list[Tensor]]:
        """Return the tensors of the blocks or slots that a step copies: one list of tensors for each entry of
        `Step.block_copies`.
        """
        spec, states = self.model.spec, list[Tensor]()
        tensors: list[list[Tensor]] = [[] for _ in spec.windows]
        for group, memory in zip(self.groups, self.memories, strict=True):
            if group is not None:
                (keys, values), memory = memory[:2], memory[2:]
                tensors[group] += [keys] if values.data_ptr() == keys.data_ptr() else [keys, values]
            states += memory
        if self.mtp is not None:
            tensors[0] += self.mtp.block_tensors
        return [*tensors, states] if spec.recurrent else tensors

    @property
    def _arenas(self) -> list[Arena]:
        return [self.arena] if self.mtp is None else [self.arena, self.mtp.arena]

    def to_device(self, values: np.ndarray) -> Tensor:
        """Copy values to the model's device without synchronizing. On a CPU, the result shares memory with `values`."""
        return to_device(torch.from_numpy(values), self.device)


def _up_to(num_experts: int, out: ModelOutput) -> list[Tensor]:
    """Return the tensors that a stage passes to the next stage. `num_experts`: the number of layers with experts up to
    this stage.
    """
    return [out.hidden, *(record[:num_experts] for record in out.records.values())]


def _memory(
    ops: Backend,
    empty: Empty,
    layer: LayerSpec,
    num_blocks: int,
    block_size: int,
    num_slots: int,
) -> Memory:
    memory: Memory = ()
    if layer.cached is not None:
        memory = new_caches(ops, layer.cached, num_blocks, block_size, empty)
    if (mixer := layer.recurrent) is not None:
        states = empty(num_slots, *mixer.state_shape, dtype=torch.float32)
        memory = *memory, states, empty(num_slots, *mixer.tail_shape)
    return memory
