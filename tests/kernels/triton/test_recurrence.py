"""The Triton kernels of delta nets: tiles and pieces, both forms, float32 inside, and decay at every speed."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from trueroll.kernels import reference
from trueroll.kernels.contract import NO_SLOT, StateBatch
from trueroll.kernels.specs import DeltaNetSpec, NormSpec
from trueroll.kernels.triton import recurrence

from ..accuracy import FLOAT32
from ..backends import both_dtypes
from ..delta_nets import make_weights
from ..inputs import randn, same_bits

SPEC = DeltaNetSpec(1, 2, 5, 20, 4, NormSpec(1e-6))
"""Three tiles of columns, the last of which is partial."""


def batch_of(starts: list[int], reads: list[int], writes: list[int]) -> StateBatch:
    return StateBatch(starts, torch.tensor(reads), torch.tensor(writes))


def test_a_convolution_in_pieces_and_tiles_is_that_of_each_row_and_channel() -> None:
    """Compute two sequences. The kernel for single rows has other tiles."""
    dtype = torch.bfloat16
    channels, starts = 2 * recurrence.SINGLE[1] + 40, [0, 2 * recurrence.SEVERAL[0] + 3, 2 * recurrence.SEVERAL[0] + 5]
    x, weight = randn(starts[-1], channels, dtype=dtype), randn(channels, 1, 4, dtype=dtype, seed=1)
    tails = randn(3, 3, channels, dtype=dtype, seed=2)
    one_by_one, narrow = tails.clone(), tails[..., -7:].contiguous()
    found = recurrence.convolve(x, weight, tails, batch_of(starts, [NO_SLOT, 2], [0, 2]))
    for sequence, slot, (start, end) in zip((0, 1), (0, 2), pairwise(starts), strict=True):
        for row in range(start, end):
            read = NO_SLOT if row == 0 else slot
            out = recurrence.convolve(x[row : row + 1], weight, one_by_one, batch_of([0, 1], [read], [slot]))
            assert same_bits(out[0], found[row]), (sequence, row)
    assert same_bits(one_by_one, tails)
    out = recurrence.convolve(x[:, -7:], weight[-7:], narrow, batch_of(starts, [NO_SLOT, 2], [0, 2]))
    assert same_bits(out, found[:, -7:]) and same_bits(narrow, tails[..., -7:])


def rows_of(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    sizes = SPEC.channels, SPEC.num_value_heads, SPEC.num_value_heads
    qkv, b, a = (randn(count, size, dtype=dtype, seed=i) for i, size in enumerate(sizes))
    return qkv, b, a


@both_dtypes
def test_both_forms_have_the_same_bits_and_the_state_is_float32(dtype: torch.dtype) -> None:
    count, weights = 12, make_weights(SPEC, dtype)
    rows, before = rows_of(count, dtype), randn(4, *SPEC.state_shape)
    several, single, expected = before.clone(), before.clone(), before.clone()
    batch = batch_of([0, count], [1], [3])
    found = recurrence.delta_rule(*rows, SPEC, weights, several, batch)
    for t in range(count):
        each = batch_of([0, 1], [3 if t else 1], [3])
        qkv, b, a = (x[t : t + 1] for x in rows)
        out = recurrence.delta_rule(qkv, b, a, SPEC, weights, single, each)
        assert same_bits(out[0], found[t]), t
    assert same_bits(single, several) and same_bits(several[:3], before[:3])
    reference.delta_rule(*rows, SPEC, weights, expected, batch)
    # For each token, a column is rounded once for each key that reads it, and a few more times. Both results have these
    # errors.
    bound = 2 * count * (SPEC.key_head_dim + 10) * FLOAT32 * expected[3].abs().max()
    assert (several[3] - expected[3]).abs().max() <= bound


def test_slots_may_stand_anywhere_in_memory() -> None:
    rows, weights = rows_of(1, torch.bfloat16), make_weights(SPEC, torch.bfloat16)
    reads, writes = torch.tensor([9, 1, 9, 3])[1::2].split(1)
    assert reads.data_ptr() % 16 and writes.data_ptr() % 16
    found, expected = (randn(4, *SPEC.state_shape) for _ in range(2))
    recurrence.delta_rule(*rows, SPEC, weights, found, StateBatch([0, 1], reads, writes))
    recurrence.delta_rule(*rows, SPEC, weights, expected, batch_of([0, 1], [1], [3]))
    assert same_bits(found, expected) and not same_bits(found[3], found[1])


def test_a_state_decays_as_its_gate_says() -> None:
    """Without a key, nothing is added to the state. Exponents have a relative error. The error of softplus is relative
    to 1.
    """
    a = (
        torch.tensor([-90.0, -17.0, -12.0, -5.0, -0.5, 0.0, 0.5, 5.0, 17.0, 90.0, -1e4])
        .bfloat16()[:, None]
        .expand(-1, 2)
    )
    qkv, b = torch.zeros(len(a), SPEC.channels, dtype=a.dtype), torch.zeros_like(a)
    weights, slots = make_weights(SPEC, a.dtype), torch.arange(len(a))
    states = torch.ones(len(a), *SPEC.state_shape)
    recurrence.delta_rule(qkv, b, a, SPEC, weights, states, StateBatch(range(len(a) + 1), slots, slots))
    speed = weights.decay.double().exp() * torch.nn.functional.softplus(a.double() + weights.bias.double())
    error = (states.double() / torch.exp(-speed)[..., None, None] - 1).abs().amax((2, 3))
    slow = speed < 80  # states with faster decay fall below the smallest float32
    assert slow.sum() > 16 and (error <= 8 * FLOAT32 * (1 + 2 * speed))[slow].all()
    assert (states.amax((2, 3))[~slow] < 1e-34).all()
