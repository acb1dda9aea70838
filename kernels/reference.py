"""Every op in plain torch, on any device. Other backends are tested against the definitions in this module.

Torch chooses its matrix kernels by shape. To keep the contract, no product here has a shape that depends on the number
of rows. Rows are padded to tiles of `ROW_TILE`, columns are cut into tiles of `COLUMN_TILE`, and float32 sums are cut
into pieces of `DEPTH_TILE`. Attention uses batched products of one fixed shape. A recurrence processes one token of
every sequence at a time. A recurrence computes sums by adding halves elementwise (`_sum`). Torch computes
elementwise functions with vector code, and the last elements with scalar code. An elementwise function is used only if
both give equal bits. They do for exp, log, log1p, cos, sin, erf and correctly rounded arithmetic; they do not for silu
and sigmoid.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .coded import CodedWeight
from .contract import (
    CLAMP,
    CLAMPED_SLOPE,
    GREEDY,
    KV_SPLIT,
    L2_EPS,
    MASK_BITS,
    NO_SLOT,
    SAMPLE,
    AttentionBatch,
    AttentionWeights,
    Backend,
    DeltaNetWeights,
    ExpertsWeights,
    FoldedHead,
    Layer,
    Mamba2Weights,
    Rotation,
    StateBatch,
    TokenStatistics,
    Wanted,
    Weight,
)
from .dynamic import coded_product, quantize_rows
from .layer import project, run_layers, store
from .quantization import FORMATS as ALL_FORMATS
from .quantization import Format, format_of
from .specs import (
    PLAIN_HEAD,
    WHOLE,
    Activation,
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    HeadSpec,
    LayerNormSpec,
    Mamba2Spec,
    NormSpec,
    Pieces,
    RouterSpec,
)

ROW_TILE = 32
COLUMN_TILE = 512
COLUMN_UNIT = 32
NARROW_TILE = 16
DEPTH_TILE = 512
SAMPLE_TILE = 8
LOGITS_TILE = 64
HEAD_SECTION = COLUMN_TILE
HOLDS_VALUES = False
FUSES_EDITS = False
FORMATS = frozenset(name for name, format in ALL_FORMATS.items() if format.activations)
CACHE_FORMATS: frozenset[str] = frozenset()
MERGE_TILE = 2**16
# The tanh approximation of GELU is x / (1 + exp(-s)), s = 2 sqrt(2 / pi) (x + 0.044715 x^3) = x (GELU_SLOPE +
# GELU_CUBIC x^2).
GELU_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
GELU_CUBIC = GELU_SLOPE * 0.044715
ROOT_HALF = math.sqrt(0.5)

_SELF = cast(Backend, sys.modules[__name__])


def instruction_set() -> str:
    """Return the name of the vector instructions that torch uses on this CPU. The result also names any reduced
    precisions that torch may use for float32 products.
    """
    places = [torch.backends.mkldnn, *([torch.backends.cuda] if torch.cuda.is_available() else [])]
    precisions = {place.matmul.fp32_precision for place in places} - {"none", "ieee"}
    return ", ".join([f"torch {torch.backends.cpu.get_cpu_capability()}", *sorted(precisions)])


def prepare(compute: Callable[[int], object], most_rows: int, device: torch.device) -> None:
    """Do nothing, since the reference backend compiles no kernels."""


def new_weight(
    rows: int, columns: int, empty: Callable[..., Tensor], format: Format | None = None, unit: int | None = None
) -> Tensor | CodedWeight:
    if format is None:
        return empty(rows, columns)
    assert format.name in FORMATS, f"this backend stores no matrices of this format (got {format})"
    return CodedWeight.new(rows, columns, empty, format, unit)


def new_layers(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    return tuple(layers)


def linear(x: Tensor, weight: Tensor | CodedWeight, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, CodedWeight):
        product = _coded_product(x, weight)
        return (product if bias is None else product + bias.float()).to(x.dtype)
    x, weight = _whole_columns(x), _whole_columns(weight)
    tiles = _row_tiles(x)
    out = x.new_empty(len(tiles) * ROW_TILE, weight.shape[0])
    for start in range(0, weight.shape[0], COLUMN_TILE):
        columns = slice(start, start + COLUMN_TILE)
        tile_bias = None if bias is None else bias[columns]
        _multiply_tiles(tiles, weight[columns], tile_bias, out[:, columns])
    return out[: x.shape[0]]


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    of_heads = zip(x.transpose(0, 1).contiguous(), weight.unflatten(0, (x.shape[1], -1)), strict=True)
    return torch.stack([linear(rows, matrix) for rows, matrix in of_heads], 1)


def lm_head(hidden: Tensor, weight: Tensor, head: HeadSpec = PLAIN_HEAD) -> Tensor:
    tiles = _row_tiles(hidden.float())
    out = hidden.new_empty(len(tiles) * ROW_TILE, weight.shape[0], dtype=torch.float32)
    for start in range(0, weight.shape[0], COLUMN_TILE):
        columns = slice(start, start + COLUMN_TILE)
        _multiply_tiles(tiles, weight[columns].float(), None, out[:, columns])
    out = out[: hidden.shape[0]]
    return _capped(out if head.scale == 1.0 else out * head.scale, head.soft_cap)


wide_linear = lm_head


def _whole_columns(x: Tensor) -> Tensor:
    """Pad x [M, K] with zeros to a multiple of COLUMN_UNIT columns.

    On AMX, torch's half-precision products read past the end of a row and multiply the excess elements by zero. Without
    the padding, a NaN in the next row would spread to the current row.
    """
    padding = 0 if x.dtype == torch.float32 else -x.shape[1] % COLUMN_UNIT
    return F.pad(x, (0, padding)) if padding else x


def _row_tiles(x: Tensor) -> tuple[Tensor, ...]:
    """Pad x [M, K] with rows of zeros, and cut x into one or more tiles [ROW_TILE, K]."""
    padding = -len(x) % ROW_TILE if len(x) else ROW_TILE
    return F.pad(x, (0, 0, 0, padding)).split(ROW_TILE)


def _multiply_tiles(tiles: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    padding, count = -len(weight) % NARROW_TILE, len(weight)
    if padding:
        # MKL uses other kernels for few columns. The padding gives a rank's part the bits of the whole product.
        weight = F.pad(weight, (0, 0, 0, padding))
        bias = None if bias is None else F.pad(bias, (0, padding))
    for tile, destination in zip(tiles, out.split(ROW_TILE), strict=True):
        destination.copy_(_multiply(tile, weight, bias)[:, :count])


def _multiply(tile: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return tile @ weight.T + bias.

    MKL splits long float32 sums among its threads, so the bits depend on the number of threads. Long sums are therefore
    cut into pieces that MKL does not split.
    """
    if tile.dtype != torch.float32:
        return F.linear(tile, weight, bias)
    first, *others = zip(tile.split(DEPTH_TILE, 1), weight.split(DEPTH_TILE, 1), strict=True)
    out = F.linear(*first)
    for piece in others:
        out += F.linear(*piece)
    return out if bias is None else out + bias


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    out, columns, rows = torch.empty_like(weight), b.float().T, a.float()
    factor = torch.tensor(scale, dtype=torch.float32).item()
    length = max(1, MERGE_TILE // max(1, weight.shape[1]))
    for start in range(0, len(weight), length):
        part = slice(start, start + length)
        total = torch.zeros(weight[part].shape, dtype=torch.float32, device=weight.device)
        for column, row in zip(columns, rows, strict=True):
            total += column[part, None] * row
        out[part] = weight[part].float() + total * factor
    return out


def merge_into(out: Weight, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> bool:
    merged = merge(weight, a, b, scale)
    is_finite = bool(merged.isfinite().all())
    if is_finite or format_of(out) is None:
        out.copy_(merged)
    return is_finite


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(token_ids, weight)


def rmsnorm(x: Tensor, weight: Tensor, norm: NormSpec) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.zero_centered:
        return (wide * (1.0 + weight.float())).to(x.dtype)
    return (wide.to(x.dtype) * weight).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, norm: LayerNormSpec) -> Tensor:
    wide = x.float()
    return F.layer_norm(wide, wide.shape[-1:], weight.float(), bias.float(), norm.eps).to(x.dtype)


def project_back(
    x: Tensor,
    weight: Tensor | CodedWeight,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    pieces: Pieces = WHOLE,
) -> Tensor:
    if pieces.count == 1:
        out = linear(x, weight, bias)
    else:
        total = back_sums(x, weight, pieces)
        out = (total if bias is None else total + bias.float()).to(x.dtype)
    return out if residual is None else out + residual


def back_sums(x: Tensor, weight: Tensor | CodedWeight, pieces: Pieces, peaks: Tensor | None = None) -> Tensor:
    bounds = pieces.bounds(x.shape[1])
    if isinstance(weight, CodedWeight):
        rows, matrix = quantize_rows(x, weight.format, peaks), weight.quantized()
        parts = ((rows.columns(start, end), matrix.columns(start, end - start)) for start, end in bounds)
        return _tree([coded_product(*part, lm_head) for part in parts])
    return _tree([lm_head(x[:, start:end], weight[:, start:end]) for start, end in bounds])


def _tree(sums: list[Tensor]) -> Tensor:
    """Add tensors as a balanced binary tree."""
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def gate_up(x: Tensor, gate: Tensor | CodedWeight, up: Tensor | CodedWeight, activation: Activation) -> Tensor:
    return gate_mul(linear(x, gate), linear(x, up), activation)


def gate_mul(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    wide = gate.float()
    if activation == "clamped_silu":
        wide, raised = wide.clamp(max=CLAMP), up.float().clamp(-CLAMP, CLAMP) + 1.0
        return (wide / (1.0 + torch.exp(wide * -CLAMPED_SLOPE)) * raised).to(gate.dtype)
    if activation == "gelu":
        return (wide * 0.5 * (1.0 + torch.erf(wide * ROOT_HALF)) * up.float()).to(gate.dtype)
    if activation == "relu":
        return (wide.clamp(min=0.0) * up.float()).to(gate.dtype)
    slope = wide * (GELU_SLOPE + GELU_CUBIC * (wide * wide)) if activation == "gelu_tanh" else wide
    numerator = torch.ones_like(wide) if activation == "sigmoid" else wide
    return (numerator / (1.0 + torch.exp(-slope)) * up.float()).to(gate.dtype)


def route(
    logits: Tensor, spec: ExpertsSpec, chosen: Tensor | None = None, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    router, wide = spec.router, logits.float()
    scores = _scores(wide, router)
    if chosen is None:
        ranks = scores if router.ranks_scores else wide
        ranks = ranks if correction is None else ranks + correction
        best = _best(ranks if router.groups == 1 else _keep_groups(ranks, router), spec.top_k)
        chosen = best.sort(dim=-1).values.int()
    gates = scores.gather(1, chosen.long())
    if router.score == "softmax_of_chosen":
        gates = _softmax(gates)
    if router.normed:
        gates = gates / (_row_sum(gates) + router.eps).clamp(min=router.floor)
    gates = gates if router.scale == 1.0 else gates * router.scale
    return chosen, gates.where(~wide.isnan().any(-1, keepdim=True), torch.nan)


def _scores(logits: Tensor, router: RouterSpec) -> Tensor:
    """Return the scores of all experts; for `softmax_of_chosen`, the logits."""
    if router.score == "sigmoid":
        return 1.0 / (1.0 + torch.exp(-logits))
    return _softmax(logits) if router.score == "softmax" else logits


def _softmax(x: Tensor) -> Tensor:
    found = torch.exp(x - x.amax(-1, keepdim=True))
    return found / _row_sum(found)


def _row_sum(x: Tensor) -> Tensor:
    # A plain sum of one row is split among threads; a running sum adds its elements in order.
    return x.cumsum(-1)[:, -1:]


def _best(x: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` highest elements of each row; among equal elements, lower indices come
    first.
    """
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[:, :count]


def _keep_groups(ranks: Tensor, router: RouterSpec) -> Tensor:
    """Return `ranks` [M, E], the numbers by which experts are ranked, with -inf in groups that are not kept."""
    of_groups = ranks.unflatten(1, (router.groups, -1))
    best = of_groups.sort(-1, descending=True).values[..., : router.group_best]
    kept = _best(best[..., 0] if router.group_best == 1 else best[..., 0] + best[..., 1], router.kept_groups)
    is_kept = torch.zeros_like(best[..., 0], dtype=torch.bool).scatter_(1, kept, True)
    return of_groups.masked_fill(~is_kept[..., None], -torch.inf).flatten(1)


def experts(
    x: Tensor,
    spec: ExpertsSpec,
    weights: ExpertsWeights,
    experts: Tensor,
    gates: Tensor,
    shared: Tensor | None = None,
    groups: int = 1,
) -> Tensor:
    out = expert_sums(x, spec, weights, experts, gates, groups)
    return (out if shared is None else out + shared.float()).to(x.dtype)


def expert_sums(
    x: Tensor, spec: ExpertsSpec, weights: ExpertsWeights, experts: Tensor, gates: Tensor, groups: int
) -> Tensor:
    first, count = spec.own
    matrices = cast(Tensor | CodedWeight, weights.gate_up), cast(Tensor | CodedWeight, weights.down)
    gate_ups, downs = ([_of_expert(matrix, i, count) for i in range(count)] for matrix in matrices)
    sums = [torch.zeros_like(x, dtype=torch.float32) for _ in range(groups)]
    for expert in range(count):
        rows, places = (experts == first + expert).nonzero(as_tuple=True)
        if not len(rows):
            continue
        bias = None if weights.gate_up_bias is None else weights.gate_up_bias[expert]
        product = linear(x[rows], gate_ups[expert], bias)
        gate, up = product.chunk(2, 1) if spec.gated else (product, product)
        made = _wide_product(gate_mul(gate, up, spec.activation), downs[expert])
        if weights.down_bias is not None:
            made = made + weights.down_bias[expert].float()
        sums[expert * groups // count][rows] += gates[rows, places, None] * made
    return _tree(sums)


def _of_expert(stack: Tensor | CodedWeight, expert: int, count: int) -> Tensor | CodedWeight:
    """Return the matrix of one of `count` experts."""
    rows = stack.shape[0] // count
    return stack.narrow(0, expert * rows, rows)


def _coded_product(x: Tensor, weight: CodedWeight) -> Tensor:
    return coded_product(quantize_rows(x, weight.format), weight.quantized(), lm_head)


def _wide_product(x: Tensor, weight: Tensor | CodedWeight) -> Tensor:
    """Return the float32 product of x and the transposed weight."""
    if isinstance(weight, CodedWeight):
        return _coded_product(x, weight)
    return lm_head(x, weight)


def rotation(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    angles = positions.float()[:, None] * inv_freq
    return angles.cos() * scale, angles.sin() * scale


def rope(x: Tensor, rotation: Rotation, interleaved: bool = False) -> Tensor:
    cos, sin = (part[:, None, :] for part in rotation[:2])
    turned, rest = x.float().tensor_split([2 * cos.shape[2]], 2)
    low, high = turned.unflatten(2, (-1, 2)).unbind(3) if interleaved else turned.chunk(2, 2)
    pair = low * cos - high * sin, high * cos + low * sin
    turned = torch.stack(pair, 3).flatten(2) if interleaved else torch.cat(pair, 2)
    return torch.cat((turned, rest), 2).to(x.dtype)


def qkv(
    x: Tensor,
    spec: AttentionSpec,
    weights: AttentionWeights,
    rotation: Rotation,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    q, k, v = project(_SELF, x, spec, weights, rotation)
    store(_SELF, spec, k, v, k_cache, v_cache, slots)
    return q


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    k_cache.flatten(0, 1).index_copy_(0, slots, k)
    v_cache.flatten(0, 1).index_copy_(0, slots, v)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    out = q.new_empty(*q.shape[:2], v_cache.shape[3])
    starts, lens = batch.query_starts, batch.context_lens
    alike = defaultdict(list)
    for i, length in enumerate(lens):
        alike[starts[i + 1] - starts[i]].append((length, i))
    for num_queries, sequences in alike.items():
        sequences.sort(reverse=True)
        contexts, members = zip(*sequences, strict=True)
        rows = torch.tensor([range(starts[i], starts[i + 1]) for i in members], device=q.device)
        tables, ends = batch.block_tables[list(members)], None if batch.ends is None else batch.ends[rows]
        reach = contexts[0] if window is None else window
        attention = _EqualQueries(num_queries, contexts, ends, tables, k_cache, v_cache, reach, soft_cap, sinks)
        out[rows] = attention(q[rows].float() * scale).to(q.dtype)
    return out


@dataclass(frozen=True, eq=False)
class _EqualQueries:
    """Attention for a group of sequences with the same number of queries. The sequences are in descending order of
    context length.

    Products have two shapes: a query tile [TILE, D] by keys [D, KV_SPLIT], and weights [TILE, KV_SPLIT] by values
    [KV_SPLIT, V], where V is D except in latent attention. The rows of a tile are (query, head) pairs. All heads of a
    tile share one key-value head.
    """

    num_queries: int
    contexts: tuple[int, ...]
    ends: Tensor | None
    tables: Tensor
    k_cache: Tensor
    v_cache: Tensor
    window: int
    soft_cap: float | None
    sinks: Tensor | None

    @cached_property
    def context_lens(self) -> Tensor:
        """`contexts` as a tensor, int64 [U]."""
        return torch.tensor(self.contexts, device=self.tables.device)

    def __call__(self, q: Tensor) -> Tensor:
        """Compute attention for scaled queries `q`, which are float32 [U, num_queries, heads, D]. The result is [U,
        num_queries, heads, V].
        """
        units, queries, heads, size = q.shape
        kv_heads = self.k_cache.shape[2]
        group = heads // kv_heads
        tile = -(-group // 8) * 8
        rows = q.view(units, queries, kv_heads, group, size).transpose(1, 2).flatten(2, 3)
        rows = F.pad(rows, (0, 0, 0, -rows.shape[2] % tile)).unflatten(2, (-1, tile))
        positions, ends = (part.unflatten(1, (-1, tile)) for part in self._row_places(rows.shape[2] * tile, group))
        out = self._fold_splits(rows, positions, ends, group)
        out = out.flatten(2, 3)[:, :, : queries * group]
        return out.unflatten(2, (queries, group)).transpose(1, 2).reshape(*q.shape[:3], -1)

    def _row_places(self, num_rows: int, group: int) -> tuple[Tensor, Tensor]:
        """For each row, return the absolute position of the row's query, and the end of the tokens that the query sees,
        both [U, num_rows]. Padding rows repeat the last query.
        """
        query = (torch.arange(num_rows, device=self.tables.device) // group).clamp(max=self.num_queries - 1)
        positions = (self.context_lens - self.num_queries)[:, None] + query
        return positions, positions + 1 if self.ends is None else self.ends[:, query]

    def _fold_splits(self, rows: Tensor, positions: Tensor, ends: Tensor, group: int) -> Tensor:
        """Compute online softmax over the splits (Milakov and Gimelshein 2018). rows: [U, kv_heads, tiles, TILE, D];
        positions and ends: [U, tiles, TILE].
        """
        out = rows.new_zeros(*rows.shape[:4], self.v_cache.shape[3])
        total = torch.zeros_like(rows[..., :1])
        peak = torch.full_like(total, -torch.inf)
        for start in range(self._first_split(), self.contexts[0], KV_SPLIT):
            live = (
                slice(sum(length > start for length in self.contexts)),
                slice(None),
                slice(self._first_tile(start, group, rows.shape[3]), None),
            )
            row_positions, row_ends = (part[live[0], None, live[2]] for part in (positions, ends))
            split = self._reduce_split(start, rows[live], row_positions, row_ends)
            peak[live], total[live], out[live] = _fold((peak[live], total[live], out[live]), split)
        if self.sinks is not None:
            sinks = self._of_rows(self.sinks.float(), group, rows).expand_as(peak)
            peak, total, out = _fold((peak, total, out), (sinks, torch.ones_like(total), torch.zeros_like(out)))
        return out / total

    def _of_rows(self, values: Tensor, group: int, rows: Tensor) -> Tensor:
        """Expand per-head `values` [heads] to one value for each row: [kv_heads, tiles, TILE, 1]."""
        _, kv_heads, tiles, tile, _ = rows.shape
        heads = torch.arange(tiles * tile, device=values.device) % group
        return values.view(kv_heads, group)[:, heads].view(kv_heads, tiles, tile, 1)

    def _first_split(self) -> int:
        """Return the start of the first split that any query sees. The first query of the shortest context sees the
        earliest key.
        """
        return max(0, self.contexts[-1] - self.num_queries - self.window + 1) // KV_SPLIT * KV_SPLIT

    def _first_tile(self, start: int, group: int, tile: int) -> int:
        """Return the index of a tile such that no query in an earlier tile sees key `start`. In causal attention, the
        result is the first tile that sees the key, in the sequence with the longest context.
        """
        if self.ends is not None:
            return 0
        first_query = start - (self.contexts[0] - self.num_queries)
        return max(0, first_query) * group // tile

    def _reduce_split(self, start: int, rows: Tensor, positions: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (peak, total, out) over keys [start, start + KV_SPLIT). The peak of rows that see no key is -inf."""
        keys, values = self._gather(start, rows.shape[0])
        token = torch.arange(start, start + KV_SPLIT, device=rows.device)
        visible = (token < ends[..., None]) & (positions[..., None] - token < self.window)
        scores = _capped(_multiply_alike(rows, keys.transpose(2, 3)), self.soft_cap).masked_fill_(~visible, -torch.inf)
        peak = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - peak.masked_fill(peak == -torch.inf, 0.0))
        return peak, weights.sum(-1, keepdim=True), _weighted_values(weights, values, visible)

    def _gather(self, start: int, units: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one split for the first `units` sequences: float32 [units, kv_heads, KV_SPLIT, D].

        Positions past the end of a context repeat the last token of the context. Stale values of another sequence in
        the same block are therefore never read.
        """
        _, block_size, kv_heads, _ = self.k_cache.shape
        tokens = torch.arange(start, start + KV_SPLIT, device=self.tables.device)
        tokens = torch.minimum(tokens, self.context_lens[:units, None] - 1)
        slots = self.tables[:units].gather(1, tokens // block_size) * block_size + tokens % block_size
        rows = slots[:, None, :] * kv_heads + torch.arange(kv_heads, device=slots.device)[:, None]
        return _read_rows(self.k_cache, rows), _read_rows(self.v_cache, rows)


def _capped(scores: Tensor, soft_cap: float | None) -> Tensor:
    """Return soft_cap * tanh(scores / soft_cap), computed with exponentials. Without a cap, return the scores
    unchanged.
    """
    if soft_cap is None:
        return scores
    decay = torch.exp(scores.abs() * (-2.0 / soft_cap))
    return torch.copysign((1.0 - decay) / (1.0 + decay) * soft_cap, scores)


def _read_rows(cache: Tensor, rows: Tensor) -> Tensor:
    """Gather rows of a cache. Return float32 [*rows.shape, D]. `rows` has indices into the flattened cache, in which
    the dimensions block, offset and key-value head are one dimension.
    """
    return cache.flatten(0, 2).index_select(0, rows.flatten()).unflatten(0, rows.shape).float()


def _fold(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Fold the split `right` into the partial softmax `left`. Rows that see no key of the split `right` keep their
    bits.
    """
    (left_peak, left_total, left_out), (right_peak, right_total, right_out) = left, right
    seen = right_peak != -torch.inf
    peak = torch.maximum(left_peak, right_peak)
    left_scale, right_scale = torch.exp(left_peak - peak), torch.exp(right_peak - peak)
    total = left_total * left_scale + right_total * right_scale
    out = left_out * left_scale + right_out * right_scale
    return peak, torch.where(seen, total, left_total), torch.where(seen, out, left_out)


def _weighted_values(weights: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Return weighted sums of `values`, which have the shape [units, heads, KV_SPLIT, D]. A non-finite value affects
    only the rows that see that value.
    """
    broken = ~values.isfinite()
    if not broken.any():
        return _multiply_alike(weights, values)
    sums = _multiply_alike(weights, values.masked_fill(broken, 0.0))
    seen = _multiply_alike(visible.float().expand_as(weights), broken.float())
    return sums.masked_fill(seen > 0, torch.nan)


def _multiply_alike(rows: Tensor, matrices: Tensor) -> Tensor:
    """Multiply rows [U, heads, tiles, TILE, A] by matrices [U, heads, A, B]. All products have the same shape."""
    units, heads, tiles, _, _ = rows.shape
    rows, matrices = rows.flatten(0, 1), matrices.flatten(0, 1)
    if tiles == 1:
        out = torch.bmm(rows.squeeze(1), matrices).unsqueeze(1)
    else:
        pairs = zip(rows, matrices, strict=True)
        out = torch.stack([torch.bmm(left, right.expand(tiles, -1, -1)) for left, right in pairs])
    return out.unflatten(0, (units, heads))


def convolve(x: Tensor, weight: Tensor, tails: Tensor, batch: StateBatch, bias: Tensor | None = None) -> Tensor:
    kept, starts = tails.shape[1], batch.starts.to(x.device)
    sequence = torch.arange(len(batch.reads), device=x.device)
    # Each sequence's rows come after the sequence's tail.
    first_tails = (starts[:-1] + kept * sequence)[:, None] + torch.arange(kept, device=x.device)
    places = torch.arange(len(x), device=x.device) + kept * sequence.repeat_interleave(starts.diff())
    rows = x.new_empty(len(x) + first_tails.numel(), x.shape[1])
    rows[first_tails], rows[places + kept] = _read_slots(tails, batch.reads), x
    tails[batch.writes] = rows[first_tails + batch.num_kept.to(x.device)[:, None]]
    taps, wide, out = weight[:, 0].float(), rows.float(), torch.zeros_like(x, dtype=torch.float32)
    out = out if bias is None else out + bias.float()
    for j in range(kept + 1):
        out = out + taps[:, j] * wide[places + j]
    return (out / (1.0 + torch.exp(-out))).to(x.dtype)


def _read_slots(memory: Tensor, slots: Tensor) -> Tensor:
    """Return the contents of N slots of `memory` [number of slots, ...]; `slots` [N] lists the slots. The result is [N,
    ...], with zeros for NO_SLOT.
    """
    is_fresh = (slots == NO_SLOT).view(-1, *[1] * (memory.dim() - 1))
    return memory[slots.clamp(min=0)].masked_fill(is_fresh, 0.0)


def delta_rule(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    spec: DeltaNetSpec,
    weights: DeltaNetWeights,
    states: Tensor,
    batch: StateBatch,
) -> Tensor:
    q, k, v = _heads(qkv, spec)
    decays, rates = _gates(b, a, weights)

    def advance(state: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        key, decayed = k[rows], state * decays[rows]
        change = rates[rows] * (v[rows] - _sum(decayed * key))
        state = decayed + key * change[:, :, None]
        return state, _sum(state * q[rows])

    return _recur(advance, torch.empty_like(v), states, batch).to(qkv.dtype)


def state_space(
    xbc: Tensor, steps: Tensor, spec: Mamba2Spec, weights: Mamba2Weights, states: Tensor, batch: StateBatch
) -> Tensor:
    x, b, c = xbc.float().split([spec.inner_size, spec.vector_size, spec.vector_size], 1)
    share = spec.num_heads // spec.num_groups
    b, c = (part.unflatten(1, (spec.num_groups, -1, 1)).repeat_interleave(share, 1) for part in (b, c))
    x = x.unflatten(1, (spec.num_heads, -1))
    sizes = _softplus(steps.float() + weights.bias.float()).clamp(*spec.time_step_limit)
    decays = torch.exp(-torch.exp(weights.decay.float()) * sizes)[..., None, None]
    changes, skipped = sizes[..., None] * x, weights.skip.float()[:, None] * x

    def advance(state: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        state = state * decays[rows] + b[rows] * changes[rows][:, :, None]
        return state, _sum(state * c[rows]) + skipped[rows]

    return _recur(advance, torch.empty_like(x), states, batch).to(xbc.dtype)


def _recur(
    advance: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], out: Tensor, states: Tensor, batch: StateBatch
) -> Tensor:
    """Run a recurrence over each sequence's tokens, write the new states, and return the outputs.

    `advance(state, rows)`: return the states [N, ...] after the tokens of N rows, and the outputs of these tokens.
    `out`: memory for the outputs of all rows.
    """
    order, lens = _longest_first(batch)
    order = torch.tensor(order, dtype=torch.int64, device=out.device)
    num_kept = batch.num_kept.to(out.device)[order]
    state = _read_slots(states, batch.reads[order])
    kept, firsts = state.clone(), batch.starts.to(out.device)[order]
    for t in range(max(lens, default=0)):
        live = sum(length > t for length in lens)
        rows = firsts[:live] + t
        state[:live], out[rows] = advance(state[:live], rows)
        done = num_kept == t + 1
        kept[done] = state[done]
    states[batch.writes[order]] = kept
    return out


def _heads(qkv: Tensor, spec: DeltaNetSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Return float32 queries with norm 1 / sqrt(K), keys with norm 1, and values. Queries and keys are [M, value_heads,
    K, 1], values are [M, value_heads, V].
    """
    q, k, v = qkv.float().split([spec.key_size, spec.key_size, spec.value_size], 1)
    q, k = (part.unflatten(1, (spec.num_key_heads, -1, 1)) for part in (q, k))
    q, k = (part * torch.rsqrt(_sum(part * part) + L2_EPS)[..., None] for part in (q, k))
    q, k = (part.repeat_interleave(spec.num_value_heads // spec.num_key_heads, 1) for part in (q, k))
    return q * spec.key_head_dim**-0.5, k, v.unflatten(1, (spec.num_value_heads, -1))


def _gates(b: Tensor, a: Tensor, weights: DeltaNetWeights) -> tuple[Tensor, Tensor]:
    """Return two tensors. The first tensor is the decay of the states at each token: [M, value_heads, 1, 1]. The second
    tensor is the update rate of each token: [M, value_heads, 1].
    """
    decays = torch.exp(-torch.exp(weights.decay.float()) * _softplus(a.float() + weights.bias.float()))
    return decays[..., None, None], (1.0 / (1.0 + torch.exp(-b.float())))[..., None]


def _softplus(x: Tensor) -> Tensor:
    return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))


def _longest_first(batch: StateBatch) -> tuple[list[int], list[int]]:
    """Return two lists: the sequences in descending order of their numbers of rows, and the numbers of rows in the same
    order.
    """
    counts = [end - start for start, end in pairwise(batch.query_starts)]
    order = sorted(range(len(counts)), key=lambda i: -counts[i])
    return order, [counts[i] for i in order]


def _sum(terms: Tensor) -> Tensor:
    """Sum [..., K, V] over K: repeatedly add the second half to the first half, until one element is left."""
    while (count := terms.shape[-2]) > 1:
        half = (count + 1) // 2
        first, second = terms[..., :half, :], terms[..., half:, :]
        terms = torch.cat((first[..., : count - half, :] + second, first[..., count - half :, :]), -2)
    return terms[..., 0, :]


layers = partial(run_layers, _SELF)


def next_tokens(
    hidden: Tensor, weight: Tensor, wanted: Wanted, head: HeadSpec = PLAIN_HEAD
) -> tuple[Tensor, Tensor, Tensor]:
    results = [_of_tile(hidden, weight, tile, None, head)[:3] for tile in _tiles(wanted)]
    token_ids, logprobs, finite = (torch.cat(column) for column in zip(*results, strict=True))
    return token_ids, logprobs, finite


def next_token_statistics(
    hidden: Tensor, weight: Tensor, wanted: Wanted, k: int, head: HeadSpec = PLAIN_HEAD
) -> tuple[Tensor, TokenStatistics, Tensor]:
    results = []
    for tile in _tiles(wanted):
        token_ids, _, finite, found = _of_tile(hidden, weight, tile, k, head)
        results.append((token_ids, finite, *cast(TokenStatistics, found)))
    token_ids, finite, *found = (torch.cat(column) for column in zip(*results, strict=True))
    return token_ids, TokenStatistics._make(found), finite


def head_sections(
    hidden: Tensor, weight: Tensor, wanted: Wanted, k: int | None, first: int, head: HeadSpec = PLAIN_HEAD
) -> tuple[Tensor, ...]:
    """Return the logits."""
    return (lm_head(hidden[wanted.rows], weight, head),)


def fold_sections(found: Sequence[Tensor], wanted: Wanted, k: int | None) -> FoldedHead:
    token_ids, basis, finite = _choose(found[0], wanted)
    statistics = None if k is None else token_statistics(basis, token_ids, k)
    logprobs = log_probs(basis, token_ids) if statistics is None else statistics.logprobs
    return FoldedHead(token_ids, logprobs, finite & ~logprobs.isnan(), statistics)


def _of_tile(hidden: Tensor, weight: Tensor, wanted: Wanted, k: int | None, head: HeadSpec) -> FoldedHead:
    return fold_sections(head_sections(hidden, weight, wanted, k, 0, head), wanted, k)


def _tiles(wanted: Wanted) -> list[Wanted]:
    columns = (getattr(wanted, field.name).split(LOGITS_TILE) for field in fields(Wanted))
    return [Wanted(*tile) for tile in zip(*columns, strict=True)]


def _choose(logits: Tensor, wanted: Wanted) -> tuple[Tensor, Tensor, Tensor]:
    """Return the token ids, the logits from which the log-probs of these tokens are computed, and whether the tokens'
    logits are finite.
    """
    scaled = logits / wanted.temperatures[:, None]
    token_ids = torch.where(wanted.targets == GREEDY, scaled.argmax(-1), wanted.targets)
    rows = (wanted.targets == SAMPLE).nonzero().flatten()
    if len(rows):
        token_ids[rows] = sample(scaled[rows], wanted.seeds[rows], wanted.positions[rows])
    finite = scaled.gather(1, token_ids[:, None]).isfinite().squeeze(1)
    return token_ids, torch.where(wanted.raw[:, None], logits, scaled), finite


def log_probs(logits: Tensor, token_ids: Tensor) -> Tensor:
    listed = token_ids if token_ids.dim() == 2 else token_ids[:, None]
    return torch.log_softmax(logits, dim=-1).gather(1, listed).view_as(token_ids)


def token_statistics(logits: Tensor, token_ids: Tensor, k: int) -> TokenStatistics:
    log_probs = torch.log_softmax(logits, dim=-1)
    terms = (torch.exp(log_probs) * -log_probs).masked_fill(log_probs == -torch.inf, 0.0)
    ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k]
    at_token = log_probs.gather(1, token_ids[:, None]).squeeze(1)
    # A plain sum of one row is split among threads; a running sum adds its elements in order.
    return TokenStatistics(at_token, terms.cumsum(-1)[:, -1], ids, log_probs.gather(1, ids))


def mask_logits(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    shifts = torch.arange(MASK_BITS, dtype=torch.int32, device=logits.device)
    is_allowed = (masks[..., None] >> shifts & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill(~is_allowed, -torch.inf)


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    ordered, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[1], device=logits.device)
    in_top_k = (ranks < top_k[:, None]) | (top_k[:, None] < 0)
    probs = torch.softmax(ordered.masked_fill(~in_top_k, -torch.inf), dim=-1)
    before = probs.cumsum(-1) - probs
    in_top_p = (before < top_p[:, None]) | (top_p[:, None] >= 1.0)
    keep = in_top_k & in_top_p & (probs >= min_p[:, None] * probs[:, :1])
    keep[:, 0] = True
    dropped = torch.ones_like(keep).scatter_(1, ids, ~keep)
    return logits.masked_fill_(dropped & ~logits.isnan().any(-1, keepdim=True), -torch.inf)


def sample(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    tiles = zip(*(x.split(SAMPLE_TILE) for x in (logits, seeds, positions)), strict=True)
    return torch.cat([(row + _gumbel(seed, position, row.shape[1])).argmax(-1) for row, seed, position in tiles])


def _gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise, float32 [M, vocab_size].

    The noise is -log(E), where E = -log1p(-u) has an exponential distribution. Small values of u, which give the
    largest noise, keep full float32 resolution.
    """
    uniform = (philox(seeds, positions, vocab_size).float() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform.clamp(max=1.0 - 2.0**-24)))


_MASK = 0xFFFFFFFF


def philox(seeds: Tensor, positions: Tensor, count: int) -> Tensor:
    """Return random 32-bit words as int64 [M, count]: Philox4x32-10 (Salmon et al. 2011).

    The Philox key consists of the two halves of the seed. The counter is (id // 4, low half of the position, high half
    of the position, 0). The random word for vocabulary id `id` is the output word with the index `id % 4`.
    """
    ids = torch.arange(-(-count // 4), device=seeds.device)
    c0 = ids.expand(len(seeds), -1)
    c1 = (positions & _MASK)[:, None].expand_as(c0)
    c2 = (positions >> 32 & _MASK)[:, None].expand_as(c0)
    c3 = torch.zeros_like(c0)
    k0, k1 = (seeds & _MASK)[:, None], (seeds >> 32 & _MASK)[:, None]
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0 = (product1 >> 32).bitwise_and_(_MASK).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = (product0 >> 32).bitwise_and_(_MASK).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = product1.bitwise_and_(_MASK), product0.bitwise_and_(_MASK)
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=-1).flatten(1)[:, :count]
