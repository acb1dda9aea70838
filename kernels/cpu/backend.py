"""The ops of `kernels.ops.Backend` by native kernels.

How they keep the contract: native/kernels.h says it. The number of threads is torch's.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, get_num_threads

from ..contract import AttentionBatch, DenseLayer, Qkv, TokenStatistics, Wanted
from ..reference import rope as rope
from .library import load_library
from .weight import PackedLayers, PackedWeight, qkv_tensors

_library = load_library()


def instruction_set() -> str:
    """The one the process uses."""
    return _library.instruction_set()


def new_weight(rows: int, columns: int, empty: Callable[..., Tensor]) -> PackedWeight:
    return PackedWeight.new(rows, columns, empty)


def new_layers(layers: Sequence[DenseLayer]) -> PackedLayers:
    return PackedLayers(layers)


def embedding(token_ids: Tensor, weight: PackedWeight) -> Tensor:
    out = torch.empty(len(token_ids), weight.shape[1], dtype=weight.dtype)
    ids = token_ids.contiguous()
    inputs = ids.data_ptr(), len(ids), weight.pointer, *weight.shape
    _library.embedding(get_num_threads(), _is_bfloat16(out), *inputs, out.data_ptr())
    return out


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight, out = x.contiguous(), weight.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    _library.rmsnorm(*_rows(x), weight.data_ptr(), eps, out.data_ptr())
    return out


def rotation(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    positions, inv_freq = positions.contiguous(), inv_freq.contiguous()
    rows, half = positions.shape[0], inv_freq.shape[0]
    cosines, sines = (torch.empty(rows, half, dtype=torch.float32) for _ in range(2))
    inputs = positions.data_ptr(), rows, inv_freq.data_ptr(), half
    _library.rotation(get_num_threads(), *inputs, scale, cosines.data_ptr(), sines.data_ptr())
    return cosines, sines


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    return _linear(x, weight, None if bias is None else bias.contiguous(), None)


def linear_add(x: Tensor, weight: PackedWeight, residual: Tensor) -> Tensor:
    return _linear(x, weight, None, residual.contiguous())


def _linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    x, rows = x.contiguous(), weight.shape[0]
    out = torch.empty(x.shape[0], rows, dtype=x.dtype)
    _library.linear(*_rows(x), weight.pointer, rows, _pointer(bias), _pointer(residual), out.data_ptr())
    return out


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    gate, up, out = gate.contiguous(), up.contiguous(), torch.empty_like(gate, memory_format=torch.contiguous_format)
    pointers = gate.data_ptr(), up.data_ptr(), gate.numel(), out.data_ptr()
    _library.silu_mul(get_num_threads(), _is_bfloat16(gate), *pointers)
    return out


def gate_up(x: Tensor, norm: Tensor, eps: float, gate: PackedWeight, up: PackedWeight) -> Tensor:
    x, norm, rows = x.contiguous(), norm.contiguous(), gate.shape[0]
    out = torch.empty(x.shape[0], rows, dtype=x.dtype)
    _library.gate_up(*_rows(x), norm.data_ptr(), eps, gate.pointer, up.pointer, rows, out.data_ptr())
    return out


def qkv(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weights: Qkv,
    rotation: tuple[Tensor, Tensor],
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    x, slots = x.contiguous(), slots.contiguous()
    cosines, sines = rotation[0].contiguous(), rotation[1].contiguous()
    _, block_size, kv_heads, head_dim = k_cache.shape
    heads = weights.q.shape[0] // head_dim
    q = torch.empty(x.shape[0], heads, head_dim, dtype=x.dtype)
    tensors = [None if tensor is None else tensor.contiguous() for tensor in qkv_tensors(norm, weights)]
    pointers = array("Q", [_pointer(tensor) or 0 for tensor in tensors])
    _library.qkv(
        *(*_rows(x), eps, pointers.buffer_info()[0], k_cache.data_ptr(), v_cache.data_ptr()),
        *(cosines.data_ptr(), sines.data_ptr(), slots.data_ptr()),
        *(heads, kv_heads, head_dim, block_size, q.data_ptr()),
    )
    return q


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    k, v, slots = k.contiguous(), v.contiguous(), slots.contiguous()
    caches = k_cache.data_ptr(), v_cache.data_ptr(), *k_cache.shape[1:]
    _library.write_kv(_is_bfloat16(k), k.data_ptr(), v.data_ptr(), slots.data_ptr(), len(slots), *caches)


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
    starts, lens = batch.tensors
    tables = batch.block_tables.contiguous()
    _, block_size, kv_heads, head_dim = k_cache.shape
    _library.attention(
        *(get_num_threads(), _is_bfloat16(q), q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()),
        *(q.shape[1], kv_heads, head_dim, block_size),
        *(lens.shape[0], starts.data_ptr(), lens.data_ptr(), tables.data_ptr(), tables.shape[1]),
        *(scale, out.data_ptr()),
    )
    return out


def layers(
    x: Tensor,
    layers: PackedLayers,
    eps: float,
    rotation: tuple[Tensor, Tensor],
    kv_caches: Sequence[tuple[Tensor, Tensor]],
    slots: Tensor,
    batch: AttentionBatch,
    scale: float,
) -> Tensor:
    if len(kv_caches) != len(layers):
        raise ValueError(f"layers: expected {len(layers)} pairs of caches, found {len(kv_caches)}; pass one for each")
    if not layers:
        return x
    x, slots = x.contiguous(), slots.contiguous()
    cosines, sines = rotation[0].contiguous(), rotation[1].contiguous()
    starts, lens = batch.tensors
    tables = batch.block_tables.contiguous()
    weights, caches = layers.addresses(), array("Q", [cache.data_ptr() for pair in kv_caches for cache in pair])
    _, block_size, kv_heads, head_dim = kv_caches[0][0].shape
    hidden, width, intermediate = x.shape[1], layers[0].qkv.q.shape[0], layers[0].gate.shape[0]
    sizes = (width, width, hidden, intermediate, hidden)
    q, attended, middle, active, out = (torch.empty(len(x), size, dtype=x.dtype) for size in sizes)
    _library.layers(
        *(*_rows(x), eps, weights.data_ptr(), caches.buffer_info()[0], len(layers), intermediate),
        *(cosines.data_ptr(), sines.data_ptr(), slots.data_ptr()),
        *(width // head_dim, kv_heads, head_dim, block_size),
        *(lens.shape[0], starts.data_ptr(), lens.data_ptr(), tables.data_ptr(), tables.shape[1], scale),
        *(part.data_ptr() for part in (q, attended, middle, active, out)),
    )
    return out


def next_tokens(hidden: Tensor, weight: PackedWeight, wanted: Wanted) -> tuple[Tensor, Tensor, Tensor]:
    return _head(hidden, weight, wanted, 0, (None, None, None))


def next_token_statistics(
    hidden: Tensor, weight: PackedWeight, wanted: Wanted, k: int
) -> tuple[Tensor, TokenStatistics, Tensor]:
    entropy, top_ids, top_logprobs = tops = _empty_tops(len(wanted.rows), k)
    tokens, log_probs, finite = _head(hidden, weight, wanted, k, tops)
    return tokens, TokenStatistics(log_probs, entropy, top_ids, top_logprobs), finite


def _empty_tops(rows: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """For entropy, top ids and their log-probs."""
    ids = torch.empty(rows, k, dtype=torch.int64)
    return torch.empty(rows, dtype=torch.float32), ids, torch.empty(rows, k, dtype=torch.float32)


def _head(
    hidden: Tensor, weight: PackedWeight, wanted: Wanted, k: int, tops: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, count = hidden.contiguous(), len(wanted.rows)
    inputs = (wanted.rows, wanted.temperatures, wanted.raw, wanted.seeds, wanted.positions, wanted.targets)
    inputs = [column.contiguous() for column in inputs]
    tokens, logprobs, finite = (torch.empty(count, dtype=t) for t in (torch.int64, torch.float32, torch.bool))
    _library.head(
        *(get_num_threads(), _is_bfloat16(hidden), hidden.data_ptr(), hidden.shape[1]),
        *(weight.pointer, weight.shape[0], count),
        *(column.data_ptr() for column in (*inputs, tokens, logprobs, finite)),
        *(k, *map(_pointer, tops)),
    )
    return tokens, logprobs, finite


def lm_head(hidden: Tensor, weight: PackedWeight) -> Tensor:
    hidden, out = hidden.contiguous(), torch.empty(len(hidden), weight.shape[0], dtype=torch.float32)
    _library.logits(*_rows(hidden), weight.pointer, weight.shape[0], out.data_ptr())
    return out


def log_probs(logits: Tensor, token_ids: Tensor) -> Tensor:
    logits, token_ids, out = logits.contiguous(), token_ids.contiguous(), torch.empty(len(logits), dtype=torch.float32)
    _library.log_probs(get_num_threads(), logits.data_ptr(), *logits.shape, token_ids.data_ptr(), out.data_ptr())
    return out


def token_statistics(logits: Tensor, token_ids: Tensor, k: int) -> TokenStatistics:
    logits, token_ids = logits.contiguous(), token_ids.contiguous()
    out = TokenStatistics(torch.empty(len(logits), dtype=torch.float32), *_empty_tops(len(logits), k))
    pointers = (column.data_ptr() for column in out)
    _library.token_statistics(get_num_threads(), logits.data_ptr(), *logits.shape, token_ids.data_ptr(), k, *pointers)
    return out


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    out = logits.clone(memory_format=torch.contiguous_format)
    filters = [column.contiguous() for column in (top_k, top_p, min_p)]
    _library.filter(get_num_threads(), out.data_ptr(), *out.shape, *(column.data_ptr() for column in filters))
    return out


def sample(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    logits, seeds, positions = logits.contiguous(), seeds.contiguous(), positions.contiguous()
    out = torch.empty(len(logits), dtype=torch.int64)
    pointers = seeds.data_ptr(), positions.data_ptr(), out.data_ptr()
    _library.sample(get_num_threads(), logits.data_ptr(), *logits.shape, *pointers)
    return out


def _is_bfloat16(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def _rows(x: Tensor) -> tuple[int, int, int, int, int]:
    """(threads, whether x is bfloat16, its address, rows, columns)."""
    rows, columns = x.shape
    return get_num_threads(), _is_bfloat16(x), x.data_ptr(), rows, columns


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
