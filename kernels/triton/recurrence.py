"""Mixers with a recurrent state: the convolution, and the recurrence of delta nets and state spaces token by token.

This module defines the assignment of work to programs, and the order of every sum. Convolution and recurrence do the
same arithmetic in the same order for prompts and decodes, so results do not depend on how a prompt is cut into chunks.

- The recurrences: a program takes one sequence, one (value) head and `COLUMNS` columns of the state; columns are
  independent of each other. A program of a recurrence holds its columns of the state in registers for all tokens of the
  sequence, and loads the next token while it computes the current token. Every program has a tile of the same shape, in
  one warp, so the layout of the tile fixes the order of a sum over keys (in a state space: over the elements of C).
  More columns per program would leave most of a GPU idle for a single prompt. Fewer than 8 columns would waste
  bandwidth, since each access to memory reads at least 8 float32 values.
- The convolution: a program takes some rows of one sequence and some channels. A program of the convolution sums each
  element separately, starting with the oldest token. The tail of a sequence holds the last rows before the batch, which
  the convolution also needs. The program that convolves a sequence's first rows reads the old tail and writes the new
  tail. No other program reads the old tail.

Each kernel has two forms: a form for batches in which every sequence has one row, and a form for all other batches. If
every sequence has one row, the kernel computes where each row is, without a tensor of locations, so a CUDA graph can
capture the kernel.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import L2_EPS, DeltaNetWeights, Mamba2Weights, StateBatch
from ..specs import DeltaNetSpec, Mamba2Spec
from ..transfer import current_stream, to_device
from . import MOST_KERNEL_SIZE
from .head import log1p
from .launch import aligned, device_function, exact_jit, launch
from .products import gate_mul_tile

COLUMNS = 8
# (rows and channels of a program, warps), for convolutions with one row per sequence, and for all other convolutions.
SINGLE, SEVERAL = (1, 512, 2), (MOST_KERNEL_SIZE - 1, 128, 4)
_L2_EPS = tl.constexpr(L2_EPS)


class _Places(NamedTuple):
    """The location of each sequence's rows in a batch. The tensors are int64, and the kernels read them only if
    `listed` is true.

    `pieces` has the shape [n, 2], and holds the sequence and the first row that each program of a convolution takes.
    `starts`: the batch's `query_starts`. `drafted` has the shape [num_sequences], and holds the number of drafted rows
    of each sequence.
    """

    listed: bool
    pieces: Tensor
    starts: Tensor
    drafted: Tensor


def convolve(x: Tensor, weight: Tensor, tails: Tensor, batch: StateBatch, bias: Tensor | None = None) -> Tensor:
    """Convolve each channel of x [M, C] causally with weight [C, 1, K], add bias [C], and apply SiLU. Return [M, C].

    `tails`: a contiguous tensor [slots, K - 1, C], which is read and written as in `Backend.convolve`.
    """
    x, places = aligned(x), _places(batch)
    out, channels = torch.empty_like(x), x.shape[1]
    rows, tile, warps = SEVERAL if places.listed else SINGLE
    grid = len(places.pieces), -(-channels // tile)
    weights = aligned(weight), aligned(weight if bias is None else bias)
    args = x, *weights, tails, *places[1:], aligned(batch.reads), aligned(batch.writes), out
    sizes = dict(CHANNELS=channels, KERNEL=weight.shape[2], ROWS=rows, TILE=tile, HAS_BIAS=bias is not None)
    launch(_convolve_kernel, grid, *args, warps=warps, LISTED=places.listed, **sizes)
    return out


def delta_rule(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    spec: DeltaNetSpec,
    weights: DeltaNetWeights,
    states: Tensor,
    batch: StateBatch,
) -> Tensor:
    """Run the recurrence of `Backend.delta_rule`, and return [M, value_heads, V].

    `states`: a contiguous float32 tensor [slots, value_heads, K, V].
    """
    places, heads, size = _places(batch), spec.num_value_heads, spec.value_head_dim
    out = qkv.new_empty(len(qkv), heads, size)
    inputs = map(aligned, (qkv, b, a, weights.decay, weights.bias))
    args = *inputs, states, *places[2:], aligned(batch.reads), aligned(batch.writes), out, spec.key_head_dim**-0.5
    columns = min(COLUMNS, triton.next_power_of_2(size))
    tiles = -(-size // columns)
    sizes = dict(KEY_HEADS=spec.num_key_heads, HEADS=heads, KEY_SIZE=spec.key_head_dim, SIZE=size)
    sizes |= dict(COLUMNS=columns, TILES=tiles)
    grid = (tiles * heads * len(batch.reads),)
    launch(_delta_rule_kernel, grid, *args, warps=1, LISTED=places.listed, **sizes)
    return out


def state_space(
    xbc: Tensor, steps: Tensor, spec: Mamba2Spec, weights: Mamba2Weights, states: Tensor, batch: StateBatch
) -> Tensor:
    """Run the recurrence of `Backend.state_space`, and return [M, heads, V].

    `states`: a contiguous float32 tensor [slots, heads, N, V].
    """
    places, heads, size = _places(batch), spec.num_heads, spec.head_dim
    out = xbc.new_empty(len(xbc), heads, size)
    inputs = map(aligned, (xbc, steps, weights.decay, weights.bias, weights.skip))
    args = *inputs, states, *places[2:], aligned(batch.reads), aligned(batch.writes), out, *spec.time_step_limit
    columns = min(COLUMNS, triton.next_power_of_2(size))
    tiles = -(-size // columns)
    sizes = dict(GROUPS=spec.num_groups, HEADS=heads, STATE_SIZE=spec.state_size, SIZE=size)
    sizes |= dict(COLUMNS=columns, TILES=tiles)
    grid = (tiles * heads * len(batch.reads),)
    launch(_state_space_kernel, grid, *args, warps=1, LISTED=places.listed, **sizes)
    return out


def _places(batch: StateBatch) -> _Places:
    device, unread = batch.reads.device, aligned(batch.reads)
    drafted = tuple(batch.drafted) or (0,) * len(batch.reads)
    listed = _list_places(tuple(batch.query_starts), drafted, device, current_stream(device))
    return listed or _Places(False, unread, unread, unread)


@lru_cache(maxsize=1)
def _list_places(
    starts: tuple[int, ...], drafted: tuple[int, ...], device: torch.device, stream: torch.cuda.Stream | None
) -> _Places | None:
    """Return the `_Places` of a batch, made once for all layers; None if every sequence has one row.

    The result is copied to the device by work on `stream`, so only later work on `stream` may read the result. A
    sequence without rows has a piece too, since some program must write the sequence's tail.
    """
    if starts == tuple(range(len(starts))):
        return None
    counts = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    pieces = [(i, first) for i, count in enumerate(counts) for first in range(0, max(count, 1), SEVERAL[0])]
    columns = pieces, starts, drafted
    return _Places(True, *(to_device(torch.tensor(x, dtype=torch.int64), device) for x in columns))


@exact_jit
def _convolve_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    tails_ptr,
    pieces_ptr,
    starts_ptr,
    drafted_ptr,
    reads_ptr,
    writes_ptr,
    out_ptr,
    LISTED: tl.constexpr,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Program (i, j) computes the rows of piece i in the channels of tile j."""
    sequence, first = tl.program_id(0).to(tl.int64), 0
    if LISTED:
        sequence, first = tl.load(pieces_ptr + tl.program_id(0) * 2), tl.load(pieces_ptr + tl.program_id(0) * 2 + 1)
    start, count = _rows_of(sequence, starts_ptr, LISTED)
    row = first + tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    x = x_ptr + start * CHANNELS, tails_ptr, tl.load(reads_ptr + sequence)
    inside = (row < count) & (channel < CHANNELS)
    total = tl.zeros([ROWS, TILE], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)
    for j in tl.static_range(KERNEL):  # type: ignore[reportGeneralTypeIssues]
        tap = tl.load(weight_ptr + channel * KERNEL + j, mask=channel < CHANNELS, other=0.0).to(tl.float32)
        total += tap * _rows_or_tail(x, row - (KERNEL - 1) + j, channel, inside, CHANNELS, KERNEL).to(tl.float32)
    out = gate_mul_tile(total, 1.0, "silu").to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (start + row) * CHANNELS + channel, out, mask=inside)
    if KERNEL > 1:
        if first == 0:
            kept = count - tl.load(drafted_ptr + sequence) if LISTED else count
            _move_tail(x, tl.load(writes_ptr + sequence), kept, channel, CHANNELS, KERNEL)


@device_function
def _rows_of(sequence, starts_ptr, LISTED: tl.constexpr):
    """Return (the first row of a sequence, the number of rows of the sequence)."""
    start = sequence
    count = 1
    if LISTED:
        start = tl.load(starts_ptr + sequence)
        count = tl.load(starts_ptr + sequence + 1) - start
    return start, count


@device_function
def _rows_or_tail(x, row, channel, inside, CHANNELS: tl.constexpr, KERNEL: tl.constexpr):
    """Return elements of a sequence's rows where `inside` is true. Rows before the sequence's first row are read from
    the tail.

    `x`: pointers to the first row and to all tails, and the slot of the sequence's tail.
    """
    rows_ptr, tails_ptr, slot = x
    is_old = row < 0
    new = tl.load(rows_ptr + row * CHANNELS + channel, mask=inside & (row >= 0), other=0.0)
    place = (slot * (KERNEL - 1) + KERNEL - 1 + row) * CHANNELS + channel
    old = tl.load(tails_ptr + place, mask=inside & is_old & (slot >= 0), other=0.0)
    return tl.where(is_old, old, new)


@device_function
def _move_tail(x, slot, count, channel, CHANNELS: tl.constexpr, KERNEL: tl.constexpr):
    """Store in `slot` the tail that a sequence has after its first `count` rows. `slot` may be the slot of the old
    tail.
    """
    KEPT: tl.constexpr = KERNEL - 1
    place = tl.arange(0, triton.next_power_of_2(KEPT))[:, None]  # type: ignore[reportArgumentType]
    inside = (place < KEPT) & (channel < CHANNELS)
    tail = _rows_or_tail(x, count - KEPT + place, channel, inside, CHANNELS, KERNEL)
    tl.debug_barrier()  # all threads have read the values that are overwritten next
    tl.store(x[1] + (slot * KEPT + place) * CHANNELS + channel, tail, mask=inside)


@exact_jit
def _delta_rule_kernel(
    qkv_ptr,
    b_ptr,
    a_ptr,
    decay_ptr,
    bias_ptr,
    states_ptr,
    starts_ptr,
    drafted_ptr,
    reads_ptr,
    writes_ptr,
    out_ptr,
    scale,
    LISTED: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):
    """There is one program for each sequence, value head and tile of columns. Neighbouring programs read neighbouring
    memory.
    """
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_SIZE + HEADS * SIZE
    head = tl.program_id(0) // TILES % HEADS
    sequence = (tl.program_id(0) // (TILES * HEADS)).to(tl.int64)
    start, count = _rows_of(sequence, starts_ptr, LISTED)
    key = tl.arange(0, triton.next_power_of_2(KEY_SIZE))[None, :]  # type: ignore[reportArgumentType]
    column = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    real = (key < KEY_SIZE) & (column < SIZE)
    place = (head * KEY_SIZE + key) * SIZE + column
    slot = tl.load(reads_ptr + sequence)
    state = tl.load(states_ptr + slot * (HEADS * KEY_SIZE * SIZE) + place, mask=real & (slot >= 0), other=0.0)
    speed, bias = tl.exp(tl.load(decay_ptr + head).to(tl.float32)), tl.load(bias_ptr + head).to(tl.float32)
    q_ptr = qkv_ptr + start * CHANNELS + head // (HEADS // KEY_HEADS) * KEY_SIZE
    v_ptr = qkv_ptr + start * CHANNELS + 2 * KEY_HEADS * KEY_SIZE + head * SIZE
    kept = count - tl.load(drafted_ptr + sequence) if LISTED else count
    target_ptr = states_ptr + tl.load(writes_ptr + sequence) * (HEADS * KEY_SIZE * SIZE) + place
    if kept == 0:
        tl.store(target_ptr, state, mask=real)
    tokens = q_ptr, q_ptr + KEY_HEADS * KEY_SIZE, v_ptr, b_ptr + start * HEADS + head, a_ptr + start * HEADS + head
    q, k, v, b, a = _load_token(tokens, 0, count, key, column, CHANNELS, HEADS, KEY_SIZE, SIZE)
    for i in range(0, count):
        later = _load_token(tokens, i + 1, count, key, column, CHANNELS, HEADS, KEY_SIZE, SIZE)
        q, k = _unit(q) * scale, _unit(k)
        state *= tl.exp(-speed * _softplus(a + bias))
        change = (v - tl.sum(state * k, axis=1, keep_dims=True)) / (1.0 + tl.exp(-b))
        state += k * change
        out = tl.sum(state * q, axis=1, keep_dims=True).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + ((start + i) * HEADS + head) * SIZE + column, out, mask=column < SIZE)
        if i + 1 == kept:
            tl.store(target_ptr, state, mask=real)
        q, k, v, b, a = later


@device_function
def _load_token(
    tokens,
    i,
    count,
    key,
    column,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Load token i of a sequence in float32: query and key [1, K], values [COLUMNS, 1], `b` and `a`. Return zeros
    beyond the last token.

    `tokens`: pointers to the first token's query, key, values, `b` and `a`.
    """
    q_ptr, k_ptr, v_ptr, b_ptr, a_ptr = tokens
    row, is_there = tl.cast(i, tl.int64), i < count
    q = tl.load(q_ptr + row * CHANNELS + key, mask=is_there & (key < KEY_SIZE), other=0.0)
    k = tl.load(k_ptr + row * CHANNELS + key, mask=is_there & (key < KEY_SIZE), other=0.0)
    v = tl.load(v_ptr + row * CHANNELS + column, mask=is_there & (column < SIZE), other=0.0)
    b = tl.load(b_ptr + row * HEADS, mask=is_there, other=0.0)
    a = tl.load(a_ptr + row * HEADS, mask=is_there, other=0.0)
    return q.to(tl.float32), k.to(tl.float32), v.to(tl.float32), b.to(tl.float32), a.to(tl.float32)


@device_function
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) + _L2_EPS)


@device_function
def _softplus(x):
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@exact_jit
def _state_space_kernel(
    xbc_ptr,
    steps_ptr,
    decay_ptr,
    bias_ptr,
    skip_ptr,
    states_ptr,
    starts_ptr,
    drafted_ptr,
    reads_ptr,
    writes_ptr,
    out_ptr,
    least,
    most,
    LISTED: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):
    """There is one program for each sequence, head and tile of columns. Neighbouring programs read neighbouring
    memory.
    """
    CHANNELS: tl.constexpr = HEADS * SIZE + 2 * GROUPS * STATE_SIZE
    head = tl.program_id(0) // TILES % HEADS
    sequence = (tl.program_id(0) // (TILES * HEADS)).to(tl.int64)
    start, count = _rows_of(sequence, starts_ptr, LISTED)
    key = tl.arange(0, triton.next_power_of_2(STATE_SIZE))[None, :]  # type: ignore[reportArgumentType]
    column = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    real = (key < STATE_SIZE) & (column < SIZE)
    place = (head * STATE_SIZE + key) * SIZE + column
    slot = tl.load(reads_ptr + sequence)
    state = tl.load(states_ptr + slot * (HEADS * STATE_SIZE * SIZE) + place, mask=real & (slot >= 0), other=0.0)
    speed, bias = tl.exp(tl.load(decay_ptr + head).to(tl.float32)), tl.load(bias_ptr + head).to(tl.float32)
    skip = tl.load(skip_ptr + head).to(tl.float32)
    x_ptr = xbc_ptr + start * CHANNELS + head * SIZE
    b_ptr = xbc_ptr + start * CHANNELS + HEADS * SIZE + head // (HEADS // GROUPS) * STATE_SIZE
    tokens = x_ptr, b_ptr, b_ptr + GROUPS * STATE_SIZE, steps_ptr + start * HEADS + head
    kept = count - tl.load(drafted_ptr + sequence) if LISTED else count
    target_ptr = states_ptr + tl.load(writes_ptr + sequence) * (HEADS * STATE_SIZE * SIZE) + place
    if kept == 0:
        tl.store(target_ptr, state, mask=real)
    x, b, c, step = _load_step(tokens, 0, count, key, column, CHANNELS, HEADS, STATE_SIZE, SIZE)
    for i in range(0, count):
        later = _load_step(tokens, i + 1, count, key, column, CHANNELS, HEADS, STATE_SIZE, SIZE)
        step = _softplus(step + bias)
        step = tl.where(step < least, least, tl.where(step > most, most, step))  # comparisons keep NaN
        state = state * tl.exp(-speed * step) + b * (step * x)
        out = (tl.sum(state * c, axis=1, keep_dims=True) + skip * x).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + ((start + i) * HEADS + head) * SIZE + column, out, mask=column < SIZE)
        if i + 1 == kept:
            tl.store(target_ptr, state, mask=real)
        x, b, c, step = later


@device_function
def _load_step(
    tokens,
    i,
    count,
    key,
    column,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Load token i of a sequence in float32: x [COLUMNS, 1], B and C [1, N], and the input of the time step. Return
    zeros beyond the last token.

    `tokens`: pointers to the first token's x, B, C and time step.
    """
    x_ptr, b_ptr, c_ptr, step_ptr = tokens
    row, is_there = tl.cast(i, tl.int64), i < count
    x = tl.load(x_ptr + row * CHANNELS + column, mask=is_there & (column < SIZE), other=0.0)
    b = tl.load(b_ptr + row * CHANNELS + key, mask=is_there & (key < STATE_SIZE), other=0.0)
    c = tl.load(c_ptr + row * CHANNELS + key, mask=is_there & (key < STATE_SIZE), other=0.0)
    step = tl.load(step_ptr + row * HEADS, mask=is_there, other=0.0)
    return x.to(tl.float32), b.to(tl.float32), c.to(tl.float32), step.to(tl.float32)
