"""Kernels that process each row separately: norms, activations, rotations, writes to the cache, and the epilogue of the
matrix products that give q, k and v. The matrix products themselves are in products.py.

A program takes one row, or one head of a row, as two halves, since `rope` rotates each element of one half with its
counterpart in the other half. Norms sum a row in an explicit order (neighbours first) that does not depend on the
compiler's layouts. The norm of a head's query or key therefore has the same bits in every kernel. All other steps are
elementwise, in float32.

Attention relies on a guarantee of this module: every element of v in the cache is finite. A non-finite element of v is
stored as 0. If k or v of a token has a non-finite element in a head, all elements of the token's k in that head are
stored as NaN. Only the results of queries that see a token with a NaN key become NaN. For queries that do not see the
token, the token's v is finite and has weight zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Rotation
from ..specs import Activation, LayerNormSpec, NormSpec
from .launch import aligned, device_function, exact_jit, launch
from .products import fold_parts, gate_mul_tile

_HEAD_WARPS = 1
_ACTIVATION_TILE = 1024


def rmsnorm(x: Tensor, weight: Tensor, norm: NormSpec) -> Tensor:
    """Divide each row of x [M, H] by the root mean square of the row, round to the dtype, and multiply by weight [H].
    Return [M, H].

    With a zero-centered norm, the quotient is multiplied by 1 + weight in float32, and only the product is rounded.
    """
    x, weight = aligned(x), aligned(weight)
    out = torch.empty_like(x)
    rows, size = x.shape
    warps = min(max(2 ** (size - 1).bit_length() // 512, 1), 16)
    options = dict(SIZE=size, ZERO_CENTERED=norm.zero_centered)
    launch(_rmsnorm_kernel, (rows,), x, weight, norm.eps, out, warps=warps, **options)
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, norm: LayerNormSpec) -> Tensor:
    """Subtract the mean of each row from x [M, H], divide by the standard deviation, multiply by weight [H] and add
    bias [H]. Return [M, H], rounded once.
    """
    x, weight, bias = aligned(x), aligned(weight), aligned(bias)
    out = torch.empty_like(x)
    rows, size = x.shape
    warps = min(max(2 ** (size - 1).bit_length() // 512, 1), 16)
    launch(_layer_norm_kernel, (rows,), x, weight, bias, norm.eps, out, warps=warps, SIZE=size)
    return out


def gate_mul(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) * up, rounded once. Both tensors have the same shape."""
    gate, up = aligned(gate), aligned(up)
    out = torch.empty_like(gate)
    columns = gate.shape[-1]
    grid = (gate.numel() // max(columns, 1), -(-columns // _ACTIVATION_TILE))
    sizes = dict(COLUMNS=columns, TILE=_ACTIVATION_TILE)
    launch(_gate_mul_kernel, grid, gate, up, out, warps=4, ACTIVATION=activation, **sizes)
    return out


def rope(x: Tensor, rotation: tuple[Tensor, Tensor] | Rotation, interleaved: bool = False) -> Tensor:
    """Rotate x [M, heads, D] by cosines and sines, which are float32 [M, P]. Return [M, heads, D]. Elements of a head
    at index 2 P and above stay unchanged. `interleaved`: elements 2 i and 2 i + 1 form a pair, instead of i and i + P.
    """
    turned = 2 * rotation[0].shape[1]
    if turned < x.shape[2]:
        return torch.cat((rope(x[..., :turned], rotation, interleaved), x[..., turned:]), dim=2)
    x, cosines, sines = aligned(x), aligned(rotation[0]), aligned(rotation[1])
    out = torch.empty_like(x)
    rows, heads, size = x.shape
    options = dict(HEADS=heads, SIZE=size, INTERLEAVED=interleaved)
    launch(_rope_kernel, (rows * heads,), x, cosines, sines, out, warps=_HEAD_WARPS, **options)
    return out


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store k and v [M, kv_heads, D] at `slots` (int64 [M]) of contiguous caches [blocks, block_size, kv_heads, D].

    In latent attention, v [M, 1, V] is the first part of k, and only the cache of keys is written.
    """
    if v.shape[2] < k.shape[2]:
        k, slots = aligned(k), aligned(slots)
        sizes = dict(SIZE=k.shape[2], VALUES=v.shape[2])
        launch(_write_latent_kernel, (len(k),), k, slots, k_cache, warps=_HEAD_WARPS, **sizes)
        return
    k, v, slots = aligned(k), aligned(v), aligned(slots)
    rows, heads, size = k.shape
    args = k, v, slots, k_cache, v_cache
    launch(_write_kv_kernel, (rows * heads,), *args, warps=_HEAD_WARPS, HEADS=heads, SIZE=size)


def qkv_epilogue(
    parts: Tensor,
    biases: tuple[Tensor, Tensor, Tensor] | None,
    qk_norms: tuple[Tensor, Tensor] | None,
    norm: NormSpec | None,
    rotation: tuple[Tensor, Tensor],
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """Compute queries, keys and values from `parts`. Return the queries [M, heads, D], and store keys and values in the
    caches as `write_kv` does.

    `parts`: float32 [pieces, M, (heads + 2 * kv_heads) * D]. Each matrix `parts[i]` has the sums over one piece of K,
    with the columns of q, k and v side by side. `qk_norms`: the norm weights [D] of q's heads and of k's heads, or
    None. `norm`: the spec of both norms, or None. The other arguments are documented at `Backend.qkv`.
    """
    pieces, rows, columns = parts.shape
    kv_heads, size = k_cache.shape[2:]
    heads = columns // size - 2 * kv_heads
    q = torch.empty(rows, heads, size, dtype=k_cache.dtype, device=parts.device)
    # A pointer must be valid even if the kernel does not read it.
    weights = *(biases or (q, q, q)), *(qk_norms or (q, q))
    eps, zero_centered = (norm.eps, norm.zero_centered) if norm is not None else (0.0, False)
    args = parts, rows, *map(aligned, weights), eps, *map(aligned, rotation), aligned(slots), q, k_cache, v_cache
    options = dict(BIASES=biases is not None, NORMS=qk_norms is not None, ZERO_CENTERED=zero_centered)
    grid = (rows * (heads + kv_heads),)
    sizes = dict(PIECES=pieces, HEADS=heads, KV_HEADS=kv_heads, SIZE=size)
    launch(_qkv_epilogue_kernel, grid, *args, warps=_HEAD_WARPS, **sizes, **options)
    return q


@exact_jit
def _rmsnorm_kernel(x_ptr, weight_ptr, eps, out_ptr, SIZE: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    x = _norm(_load_halves(x_ptr + row, SIZE), weight_ptr, eps, SIZE, ZERO_CENTERED)
    _store_halves(out_ptr + row, x, SIZE)


@exact_jit
def _layer_norm_kernel(x_ptr, weight_ptr, bias_ptr, eps, out_ptr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    x = _load_halves(x_ptr + row, SIZE)
    # The mean is a scalar, since a tile of one element would give the differences a layout that spills registers.
    mean = tl.sum(sum_in_pairs(x[0] + x[1])) * (1.0 / SIZE)
    FIRST: tl.constexpr = (SIZE + 1) // 2
    place = tl.arange(0, triton.next_power_of_2(FIRST))  # type: ignore[reportArgumentType]
    low = tl.where(place < FIRST, x[0] - mean, 0.0)
    high = tl.where(place < SIZE - FIRST, x[1] - mean, 0.0)
    scale = tl.rsqrt(sum_in_pairs(low * low + high * high) * (1.0 / SIZE) + eps)
    weight, bias = _load_halves(weight_ptr, SIZE), _load_halves(bias_ptr, SIZE)
    x = low * scale * weight[0] + bias[0], high * scale * weight[1] + bias[1]
    _store_halves(out_ptr + row, x, SIZE)


@exact_jit
def _gate_mul_kernel(gate_ptr, up_ptr, out_ptr, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = tl.program_id(0).to(tl.int64) * COLUMNS + column
    mask = column < COLUMNS
    gate = tl.load(gate_ptr + at, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + at, mask=mask).to(tl.float32)
    tl.store(out_ptr + at, gate_mul_tile(gate, up, ACTIVATION).to(out_ptr.dtype.element_ty), mask=mask)


@exact_jit
def _rope_kernel(
    x_ptr,
    cosines_ptr,
    sines_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = SIZE // 2
    pair = tl.arange(0, triton.next_power_of_2(HALF))  # type: ignore[reportArgumentType]
    low = head * SIZE + (2 * pair if INTERLEAVED else pair)
    high = low + (1 if INTERLEAVED else HALF)
    x = tl.load(x_ptr + low, mask=pair < HALF, other=0.0), tl.load(x_ptr + high, mask=pair < HALF, other=0.0)
    x = _rotate((x[0].to(tl.float32), x[1].to(tl.float32)), cosines_ptr, sines_ptr, head // HEADS, SIZE)
    tl.store(out_ptr + low, x[0].to(out_ptr.dtype.element_ty), mask=pair < HALF)
    tl.store(out_ptr + high, x[1].to(out_ptr.dtype.element_ty), mask=pair < HALF)


@exact_jit
def _write_kv_kernel(k_ptr, v_ptr, slots_ptr, k_cache_ptr, v_cache_ptr, HEADS: tl.constexpr, SIZE: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    k, v = _load_halves(k_ptr + head * SIZE, SIZE), _load_halves(v_ptr + head * SIZE, SIZE)
    place = (tl.load(slots_ptr + head // HEADS) * HEADS + head % HEADS) * SIZE
    _store_token(k_cache_ptr + place, v_cache_ptr + place, k, v, SIZE)


@exact_jit
def _write_latent_kernel(k_ptr, slots_ptr, cache_ptr, SIZE: tl.constexpr, VALUES: tl.constexpr):
    """Store the key of a token of latent attention. In the first VALUES elements, 0 replaces elements that are not
    finite. If any element of the key is not finite, all elements after the first VALUES elements are NaN.
    """
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, triton.next_power_of_2(SIZE))  # type: ignore[reportArgumentType]
    k = tl.load(k_ptr + token * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    finite = _is_finite(k)
    shown = tl.min(finite.to(tl.int32), axis=0) == 1
    stored = tl.where(i < VALUES, tl.where(finite, k, 0.0), tl.where(shown, k, float("nan")))
    tl.store(cache_ptr + tl.load(slots_ptr + token) * SIZE + i, stored.to(cache_ptr.dtype.element_ty), mask=i < SIZE)


@exact_jit
def _qkv_epilogue_kernel(
    parts_ptr,
    rows,
    q_bias_ptr,
    k_bias_ptr,
    v_bias_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    cosines_ptr,
    sines_ptr,
    slots_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    PIECES: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BIASES: tl.constexpr,
    NORMS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    """There is one program for each row and head of q. For each row and key-value head, one more program handles k and
    v.
    """
    row = (tl.program_id(0) // (HEADS + KV_HEADS)).to(tl.int64)
    head = tl.program_id(0) % (HEADS + KV_HEADS)
    parts = parts_ptr, rows, row
    COLUMNS: tl.constexpr = (HEADS + 2 * KV_HEADS) * SIZE
    if head < HEADS:
        q = _fold_head(parts, head, q_bias_ptr + head * SIZE, q_ptr, PIECES, COLUMNS, SIZE, BIASES)
        if NORMS:
            q = _norm(q, q_norm_ptr, eps, SIZE, ZERO_CENTERED)
        q = _rotate(q, cosines_ptr, sines_ptr, row, SIZE)
        _store_halves(q_ptr + (row * HEADS + head) * SIZE, q, SIZE)
    else:
        kv_head = head - HEADS
        k = _fold_head(parts, head, k_bias_ptr + kv_head * SIZE, q_ptr, PIECES, COLUMNS, SIZE, BIASES)
        if NORMS:
            k = _norm(k, k_norm_ptr, eps, SIZE, ZERO_CENTERED)
        k = _rotate(k, cosines_ptr, sines_ptr, row, SIZE)
        v = _fold_head(parts, head + KV_HEADS, v_bias_ptr + kv_head * SIZE, q_ptr, PIECES, COLUMNS, SIZE, BIASES)
        place = (tl.load(slots_ptr + row) * KV_HEADS + kv_head) * SIZE
        _store_token(k_cache_ptr + place, v_cache_ptr + place, k, v, SIZE)


@device_function
def _fold_head(
    parts,
    head,
    bias_ptr,
    out_ptr,
    PIECES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    BIASES: tl.constexpr,
):
    """For one row of the product, return one head plus the head's bias, rounded to the dtype of `out_ptr`."""
    parts_ptr, rows, row = parts
    HALF: tl.constexpr = SIZE // 2
    place = tl.arange(0, triton.next_power_of_2(HALF))  # type: ignore[reportArgumentType]
    column = head * SIZE + place
    low = fold_parts(parts_ptr, rows, COLUMNS, row, column, place < HALF, PIECES)
    high = fold_parts(parts_ptr, rows, COLUMNS, row, column + HALF, place < HALF, PIECES)
    if BIASES:
        bias = _load_halves(bias_ptr, SIZE)
        low, high = low + bias[0], high + bias[1]
    return _round((low, high), out_ptr)


@device_function
def _norm(x, weight_ptr, eps, SIZE: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """Divide both halves of a row by the root mean square of the row, round to the weight's dtype, and multiply by the
    weight.

    If `ZERO_CENTERED`, multiply the unrounded quotient by 1 + the weight.
    """
    squares = sum_in_pairs(x[0] * x[0] + x[1] * x[1])
    scale = tl.rsqrt(squares * (1.0 / SIZE) + eps)
    x = x[0] * scale, x[1] * scale
    weight = _load_halves(weight_ptr, SIZE)
    if ZERO_CENTERED:
        weight = 1.0 + weight[0], 1.0 + weight[1]
    else:
        x = _round(x, weight_ptr)
    return _round((x[0] * weight[0], x[1] * weight[1]), weight_ptr)


@device_function
def sum_in_pairs(x):
    """Sum a tile [n] to [1]: add neighbours, then neighbouring sums, and so on."""
    for _ in tl.static_range(_log2(x.shape[0])):  # type: ignore[reportGeneralTypeIssues]
        x = tl.sum(tl.reshape(x, [x.shape[0] // 2, 2]), axis=1)
    return x


@triton.constexpr_function
def _log2(size: int) -> int:
    return size.bit_length() - 1


@device_function
def _rotate(x, cosines_ptr, sines_ptr, row, SIZE: tl.constexpr):
    HALF: tl.constexpr = SIZE // 2
    pair = tl.arange(0, triton.next_power_of_2(HALF))  # type: ignore[reportArgumentType]
    cosines = tl.load(cosines_ptr + row * HALF + pair, mask=pair < HALF, other=0.0)
    sines = tl.load(sines_ptr + row * HALF + pair, mask=pair < HALF, other=0.0)
    return x[0] * cosines - x[1] * sines, x[1] * cosines + x[0] * sines


@device_function
def _store_token(k_ptr, v_ptr, k, v, SIZE: tl.constexpr):
    """Store k and v of one token for one head. Non-finite elements are replaced as described in the module's
    docstring.
    """
    k = _round(k, k_ptr)
    finite = _is_finite(v[0]), _is_finite(v[1])
    both_finite = _is_finite(k[0]) & _is_finite(k[1]) & finite[0] & finite[1]
    shown = tl.min(both_finite.to(tl.int32), axis=0) == 1
    _store_halves(k_ptr, (tl.where(shown, k[0], float("nan")), tl.where(shown, k[1], float("nan"))), SIZE)
    _store_halves(v_ptr, (tl.where(finite[0], v[0], 0.0), tl.where(finite[1], v[1], 0.0)), SIZE)


@device_function
def _is_finite(x):
    return tl.abs(x) < float("inf")


@device_function
def _load_halves(ptr, SIZE: tl.constexpr):
    """Load the row [SIZE] at `ptr` as two float32 tiles, padded with zeros. If SIZE is odd, the first half has one more
    element.
    """
    FIRST: tl.constexpr = (SIZE + 1) // 2
    place = tl.arange(0, triton.next_power_of_2(FIRST))  # type: ignore[reportArgumentType]
    low = tl.load(ptr + place, mask=place < FIRST, other=0.0)
    high = tl.load(ptr + FIRST + place, mask=place < SIZE - FIRST, other=0.0)
    return low.to(tl.float32), high.to(tl.float32)


@device_function
def _store_halves(ptr, x, SIZE: tl.constexpr):
    FIRST: tl.constexpr = (SIZE + 1) // 2
    place = tl.arange(0, triton.next_power_of_2(FIRST))  # type: ignore[reportArgumentType]
    tl.store(ptr + place, x[0].to(ptr.dtype.element_ty), mask=place < FIRST)
    tl.store(ptr + FIRST + place, x[1].to(ptr.dtype.element_ty), mask=place < SIZE - FIRST)


@device_function
def _round(x, ptr):
    """Round float32 halves to the dtype of `ptr`, and return the rounded halves as float32."""
    return x[0].to(ptr.dtype.element_ty).to(tl.float32), x[1].to(ptr.dtype.element_ty).to(tl.float32)
