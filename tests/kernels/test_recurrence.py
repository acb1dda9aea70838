"""Mixers with a recurrent state: convolution and recurrence against float64, and bitwise continuation from any state
and tail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from trueroll.kernels.contract import NO_SLOT, DeltaNetWeights, Mamba2Weights, StateBatch
from trueroll.kernels.journal import Journal
from trueroll.kernels.specs import DeltaNetSpec, Mamba2Spec, RecurrentSpec

from .accuracy import check
from .backends import SERVED, Served, param, served_id
from .delta_nets import SPECS, THIN, exact_convolution, exact_recurrence, make_weights
from .inputs import randn, same_bits, strided
from .state_spaces import RARE_SPACES, STATE_SPACES, THIN_SPACE, exact_state_space, make_space_weights

SLOTS = 9
Chunk = tuple[int, int, int]
"""(sequence, start, end)"""


CASES = [
    param(served, (served, spec), id=f"{served_id(served)}-{name}", rarely=name in RARE_SPACES)
    for served in SERVED
    for name, spec in (
        {"thin": THIN, "thin state space": THIN_SPACE} if served[0].interpreted else SPECS | STATE_SPACES
    ).items()
]


@dataclass(frozen=True)
class Recurrent(Served):
    """An implementation with a mixer. `most`: tokens of a long sequence."""

    spec: RecurrentSpec
    most: int

    @property
    def lens(self) -> tuple[int, ...]:
        """Lengths of some sequences."""
        return self.most // 5, 1, self.most * 3 // 20, self.most * 9 // 20


@pytest.fixture(params=CASES)
def recurrent(request: pytest.FixtureRequest) -> Iterator[Recurrent]:
    """Every implementation with every dtype.

    The mixers have several sizes; an interpreter gets one thin mixer of each kind.
    """
    (implementation, dtype), spec = request.param
    with implementation.chosen() as ops:
        yield Recurrent(ops, dtype, spec, most=40 if implementation.interpreted else 200)


@dataclass(frozen=True)
class Memory:
    """States and tails. Each slot holds NaN at first."""

    states: Tensor
    tails: Tensor

    @classmethod
    def new(cls, recurrent: Recurrent) -> Memory:
        spec, dtype = recurrent.spec, recurrent.dtype
        states = torch.full((SLOTS, *spec.state_shape), torch.nan)
        return cls(states, torch.full((SLOTS, *spec.tail_shape), torch.nan, dtype=dtype))

    def at(self, slot: int) -> tuple[Tensor, Tensor]:
        return self.states[slot].clone(), self.tails[slot].clone()


@dataclass(frozen=True)
class Sequences:
    """The inputs of a mixer for some sequences."""

    recurrent: Recurrent
    weights: DeltaNetWeights | Mamba2Weights
    inputs: list[tuple[Tensor, ...]]

    @classmethod
    def new(cls, recurrent: Recurrent, lens: Sequence[int]) -> Sequences:
        spec, dtype = recurrent.spec, recurrent.dtype
        is_delta_net, heads = isinstance(spec, DeltaNetSpec), spec.state_shape[0]
        sizes = spec.channels, *[heads] * (2 if is_delta_net else 1)
        weights = make_weights(spec, dtype) if isinstance(spec, DeltaNetSpec) else make_space_weights(spec, dtype)
        inputs = [
            tuple(randn(length, size, dtype=dtype, seed=10 * i + j) for j, size in enumerate(sizes))
            for i, length in enumerate(lens)
        ]
        return cls(recurrent, weights, inputs)

    def run(self, memory: Memory, chunks: Sequence[Chunk], reads: Sequence[int], writes: Sequence[int]) -> list[Tensor]:
        """Return the output of each chunk, all computed in one step."""
        lens = [end - start for _, start, end in chunks]
        batch = StateBatch([0, *accumulate(lens)], torch.tensor(reads), torch.tensor(writes))
        return list(self.compute(memory, batch, *self.rows(chunks)).split(lens))

    def rows(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """Return the inputs of the rows of all chunks."""
        count = len(self.inputs[0])
        return [torch.cat([self.inputs[i][j][start:end] for i, start, end in chunks]) for j in range(count)]

    def compute(self, memory: Memory, batch: StateBatch, x: Tensor, *gates: Tensor) -> Tensor:
        spec, convolved = self.recurrent.spec, self.convolve(memory, batch, x)
        assert convolved.shape == x.shape and convolved.dtype == x.dtype
        out = self.recur(memory, batch, convolved, *gates)
        assert out.shape == (len(x), *spec.state_shape[::2]) and out.dtype == x.dtype
        return out

    def convolve(self, memory: Memory, batch: StateBatch, x: Tensor) -> Tensor:
        bias = () if isinstance(self.weights, DeltaNetWeights) else (self.weights.convolution_bias,)
        return self.recurrent.ops.convolve(x, self.weights.convolution, memory.tails, batch, *bias)

    def recur(self, memory: Memory, batch: StateBatch, *inputs: Tensor) -> Tensor:
        ops: Any = self.recurrent.ops
        op = ops.delta_rule if isinstance(self.weights, DeltaNetWeights) else ops.state_space
        return op(*inputs, self.recurrent.spec, self.weights, memory.states, batch)

    def whole(self, i: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Compute sequence i alone in one step. Return the output, and the final state and tail."""
        memory = Memory.new(self.recurrent)
        [out] = self.run(memory, [(i, 0, len(self.inputs[i][0]))], [NO_SLOT], [0])
        return out, memory.at(0)


def test_convolution(recurrent: Recurrent) -> None:
    sequences, size = Sequences.new(recurrent, [30]), recurrent.spec.kernel_size
    [(x, *_)], weights, memory = sequences.inputs, sequences.weights, Memory.new(recurrent)
    batch = StateBatch([0, 30], torch.tensor([NO_SLOT]), torch.tensor([4]))
    found = sequences.convolve(memory, batch, x)
    bias = weights.convolution_bias if isinstance(weights, Mamba2Weights) else None
    expected, magnitude = exact_convolution(x, weights.convolution, bias)
    check(found, expected, 1, size + 9, magnitude)
    assert same_bits(memory.tails[4], x[30 - size + 1 :])


def test_recurrence(recurrent: Recurrent) -> None:
    sequences, memory = Sequences.new(recurrent, [recurrent.most]), Memory.new(recurrent)
    batch = StateBatch([0, recurrent.most], torch.tensor([NO_SLOT]), torch.tensor([4]))
    [inputs] = sequences.inputs
    found = sequences.recur(memory, batch, *inputs)
    expected, bound = exactly(sequences, *inputs)
    earlier, _ = exactly(sequences, *(x[recurrent.most * 3 // 4 :] for x in inputs))
    remembered = (earlier[-1] - expected[-1]).abs().max() / expected[-1].abs().max()
    assert remembered > 1e-3
    check(found, expected, 1, 1, bound)


def exactly(sequences: Sequences, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the recurrence in float64, and the sum of the sizes of the values that float32 rounds on the way."""
    spec, weights = sequences.recurrent.spec, sequences.weights
    if isinstance(spec, Mamba2Spec) and isinstance(weights, Mamba2Weights):
        xbc, steps = inputs
        return exact_state_space(xbc, steps, spec, weights)
    assert isinstance(spec, DeltaNetSpec) and isinstance(weights, DeltaNetWeights)
    qkv, b, a = inputs
    expected = exact_recurrence(qkv, b, a, spec, weights)
    # Rounding errors of the state are proportional to the values. The errors decay with the state, and a query adds up
    # to K of them. The measured errors in float32 were 1.1 to 2.4 times the largest value over the root of K.
    size = qkv.double().abs().max() / spec.key_head_dim**0.5
    return expected, 6 * size.expand_as(expected)


def test_inputs_of_zeros(recurrent: Recurrent) -> None:
    """The keys and queries of a delta net are zeros, or the values of a state space."""
    sequences, spec, memory = Sequences.new(recurrent, [20]), recurrent.spec, Memory.new(recurrent)
    [inputs] = sequences.inputs
    inputs[0][:, : spec.inner_size if isinstance(spec, Mamba2Spec) else 2 * spec.key_size] = 0.0
    out = sequences.recur(memory, StateBatch([0, 20], torch.tensor([NO_SLOT]), torch.tensor([4])), *inputs)
    assert same_bits(out, torch.zeros(20, *spec.state_shape[::2], dtype=recurrent.dtype))


def test_a_sequence_depends_on_neither_chunks_nor_company_nor_slots(recurrent: Recurrent) -> None:
    """In each step some sequences read and write the same slot, and others read one slot and write another."""
    lens = recurrent.lens
    sequences, memory = Sequences.new(recurrent, lens), Memory.new(recurrent)
    generator = torch.Generator().manual_seed(0)
    done, slots, outs = [0] * 4, [NO_SLOT] * 4, [[] for _ in lens]
    steps = 0
    while any(done[i] < length for i, length in enumerate(lens)):
        active = [i for i in torch.randperm(4, generator=generator).tolist() if done[i] < lens[i]]
        active = active[: 1 + steps % 4]
        ends = [min(lens[i], done[i] + int(torch.randint(1, 6, (), generator=generator))) for i in active]
        free = [slot for slot in torch.randperm(SLOTS, generator=generator).tolist() if slot not in slots]
        stay = [i for i in active if slots[i] != NO_SLOT and steps % 2]
        writes = [slots[i] if i in stay else free.pop() for i in active]
        chunks = [(i, done[i], end) for i, end in zip(active, ends, strict=True)]
        found = sequences.run(memory, chunks, [slots[i] for i in active], writes)
        for (i, _, end), slot, out in zip(chunks, writes, found, strict=True):
            done[i], slots[i] = end, slot
            outs[i].append(out)
        steps += 1
    assert [len(each) > 1 for each in outs] == [True, False, True, True], "prompts are cut"
    for i, each in enumerate(outs):
        expected, left = sequences.whole(i)
        assert expected.isfinite().all() and same_bits(torch.cat(each), expected), i
        assert all(map(same_bits, memory.at(slots[i]), left)), i


def test_a_slot_that_is_read_twice_stays_unchanged(recurrent: Recurrent) -> None:
    sequences, memory = Sequences.new(recurrent, [30, 30, 30]), Memory.new(recurrent)
    for each in zip(*sequences.inputs, strict=True):
        for x in each[1:]:
            x[:10] = each[0][:10]
    sequences.run(memory, [(0, 0, 10)], [NO_SLOT], [3])
    checkpoint, others = memory.at(3), [memory.at(slot) for slot in range(SLOTS)]
    assert checkpoint[0].isfinite().all() and checkpoint[0].any()

    found = sequences.run(memory, [(i, 10, 30) for i in range(3)], [3, 3, 3], [8, 0, 5])

    assert all(map(same_bits, memory.at(3), checkpoint))
    for slot in (1, 2, 4, 6, 7):
        assert all(map(same_bits, memory.at(slot), others[slot])), "the other slots are untouched"
    for i, slot in enumerate((8, 0, 5)):
        expected, left = sequences.whole(i)
        assert same_bits(found[i], expected[10:]) and all(map(same_bits, memory.at(slot), left))
    assert not same_bits(found[0], found[1])


def test_a_sequence_without_rows_is_copied(recurrent: Recurrent) -> None:
    sequences, memory = Sequences.new(recurrent, [12, 9]), Memory.new(recurrent)
    sequences.run(memory, [(0, 0, 12)], [NO_SLOT], [3])
    [nothing, _] = sequences.run(memory, [(0, 12, 12), (1, 0, 9)], [3, NO_SLOT], [5, 6])
    assert len(nothing) == 0 and all(map(same_bits, memory.at(5), memory.at(3)))
    sequences.run(memory, [(0, 12, 12)], [NO_SLOT], [5])
    assert not memory.states[5].any() and not memory.tails[5].any()


DRAFTS = ((0, 3), (2, 3), (3, 3), (0, 0), (1, 2), (0, 1))
"""For some steps: how many drafted rows are right, and how many rows are drafted."""


def test_drafted_rows_leave_no_trace(recurrent: Recurrent) -> None:
    """One sequence drafts rows, and repeats the accepted rows in its next step. The other sequence computes one row per
    step.
    """
    plan = [*DRAFTS, *DRAFTS, (0, 0)]
    length = sum(1 + right for right, _ in plan)
    sequences, memory = Sequences.new(recurrent, [length, len(plan), 3]), Memory.new(recurrent)
    journal = torch.full((1, 3, recurrent.spec.row_size), torch.nan, dtype=recurrent.dtype)
    done, repeated, slots = 0, 0, [NO_SLOT, NO_SLOT]
    outs: tuple[list[Tensor], list[Tensor]] = ([], [])
    for i, (right, count) in enumerate(plan):
        writes = slots if i % 3 == 1 else [i % 4, 4 + i % 4]
        chunks = (0, done, done + 1 + right), (2, 0, count - right), (1, i, i + 1)
        rows = sequences.rows(chunks)
        batch = batch_of(journal, repeated, count, slots, writes)
        assert batch.journal is not None
        found = sequences.compute(memory, batch, *batch.journal.splice(0, *rows))[batch.journal.own]
        outs[0].append(found[: 1 + right])
        outs[1].append(found[-1:])
        done, repeated, slots = done + 1 + right, right, writes
    for i in range(2):
        expected, left = sequences.whole(i)
        assert same_bits(torch.cat(outs[i]), expected) and all(map(same_bits, memory.at(slots[i]), left))


def batch_of(journal: Tensor, repeated: int, drafted: int, reads: Sequence[int], writes: Sequence[int]) -> StateBatch:
    """Return the batch of two sequences. The first sequence has repeated rows, one row that is not drafted, and drafted
    rows.
    """
    end = repeated + 1 + drafted
    own = torch.tensor([*range(repeated, end), end])
    again, drafts = torch.arange(repeated), torch.arange(drafted)
    places = torch.stack((again * 0, again, again)), torch.stack((drafts * 0, drafts, drafts + 1))
    slots = torch.tensor(reads), torch.tensor(writes)
    return StateBatch([0, end, end + 1], *slots, [drafted, 0], Journal([journal], own, *places))


def test_no_sequences(recurrent: Recurrent) -> None:
    sequences, memory = Sequences.new(recurrent, [4]), Memory.new(recurrent)
    none = torch.empty(0, dtype=torch.int64)
    nothing = (x[:0] for x in sequences.inputs[0])
    assert len(sequences.compute(memory, StateBatch([0], none, none), *nothing)) == 0
    assert memory.states.isnan().all() and memory.tails.isnan().all()


def test_a_sequence_depends_on_neither_others_nor_threads_nor_addresses(
    recurrent: Recurrent, two_threads: None
) -> None:
    sequences = Sequences.new(recurrent, recurrent.lens)
    expected, left = sequences.whole(0)
    sequences.inputs[3][0][5], sequences.inputs[2][1][3] = torch.nan, torch.inf
    chunks = [(i, 0, length) for i, length in enumerate(recurrent.lens)]
    apart = replace(sequences, inputs=[tuple(map(strided, inputs)) for inputs in sequences.inputs])
    for threads, each in ((2, sequences), (1, sequences), (2, apart)):
        torch.set_num_threads(threads)
        memory = Memory.new(recurrent)
        found = each.run(memory, chunks, [NO_SLOT] * 4, [4, 3, 2, 1])
        assert same_bits(found[0], expected) and all(map(same_bits, memory.at(4), left))
        assert found[3].isnan().any()


def test_a_rounded_state_changes_bits(recurrent: Recurrent) -> None:
    """A rounded checkpoint would fail the tests above."""
    sequences, memory = Sequences.new(recurrent, [40]), Memory.new(recurrent)
    expected, left = sequences.whole(0)
    sequences.run(memory, [(0, 0, 20)], [NO_SLOT], [0])
    rounded = memory.states[0].bfloat16().float()
    assert not same_bits(rounded, memory.states[0])
    memory.states[0] = rounded
    [found] = sequences.run(memory, [(0, 20, 40)], [0], [0])
    assert not same_bits(found, expected[20:]) and not same_bits(memory.states[0], left[0])
