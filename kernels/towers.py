"""The arithmetic of vision towers, defined once in terms of the ops.

`encode` turns the pixels of one image into rows of embeddings. The code is written for workers, with the ops of a
backend, and for trainers, with ops with gradients (`TowerOps`); no trainer uses it yet. Images are encoded one by one,
so the rows of an image depend only on its pixels, its grid and the weights. Learned positions are interpolated in
float32, in a fixed order, and rounded once.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from .contract import Backend, Rotation, as_weight
from .layer import GetWeight, turn
from .packed import Packed, attend
from .specs import Activation, AttentionSpec, LayerNormSpec, NormSpec, TowerSpec

Grid = tuple[int, int]
"""The rows and columns of an image's patches."""


class TowerOps(Protocol):
    """The ops of a tower. Matrices are in the form that the implementation needs for products."""

    @property
    def backend(self) -> Backend: ...

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor: ...

    def rmsnorm(self, x: Tensor, weight: Tensor, norm: NormSpec) -> Tensor: ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, norm: LayerNormSpec) -> Tensor: ...

    def gate_mul(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor: ...

    def rope(self, x: Tensor, rotation: Rotation) -> Tensor: ...

    def attention(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, spec: AttentionSpec) -> Tensor: ...

    def embedding(self, token_ids: Tensor, table: Any) -> Tensor: ...

    def matrix(self, tensor: Tensor) -> Any:
        """Return a plain matrix in the form that products need."""
        ...

    def transposed(self, weight: Any) -> Any:
        """Return the transpose of a matrix."""
        ...


@dataclass(frozen=True)
class BackendTowerOps:
    """The ops of a tower in a worker. The matrices are weights of the backend."""

    backend: Backend

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        return self.backend.linear(x, weight, bias)

    def rmsnorm(self, x: Tensor, weight: Tensor, norm: NormSpec) -> Tensor:
        return self.backend.rmsnorm(x, weight, norm)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, norm: LayerNormSpec) -> Tensor:
        return self.backend.layer_norm(x, weight, bias, norm)

    def gate_mul(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        return self.backend.gate_mul(gate, up, activation)

    def rope(self, x: Tensor, rotation: Rotation) -> Tensor:
        return self.backend.rope(x, rotation)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, spec: AttentionSpec) -> Tensor:
        return attend(self.backend, q, k, v, packed, spec)

    def embedding(self, token_ids: Tensor, table: Any) -> Tensor:
        return self.backend.embedding(token_ids, table)

    def matrix(self, tensor: Tensor) -> Any:
        return as_weight(self.backend, tensor)

    def transposed(self, weight: Any) -> Any:
        return self.matrix(weight.to_dense().T)


class Linear(NamedTuple):
    """A product: weight [N, K], and bias [N] or None."""

    weight: Any
    bias: Tensor | None


class Norm(NamedTuple):
    """The weight of a norm, and its bias, which RMS norms do not have."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class TowerLayer:
    """The weights of a layer. `inputs`: the product that computes q, k and v, or the three products. `inner`: the up
    product; gate and up if the MLP is gated.
    """

    mixer_norm: Norm
    inputs: tuple[Linear, ...]
    o: Linear
    mlp_norm: Norm
    inner: tuple[Linear, ...]
    down: Linear


@dataclass(frozen=True)
class Merger:
    """The weights that turn the rows of blocks into embeddings. `products`: the two products of the MLP; for pooled
    rows, one matrix, stored transposed: [hidden_size, out_size].
    """

    norm: Norm
    products: tuple[Linear, ...]


@dataclass(frozen=True)
class TowerWeights:
    """The weights of a tower. `patch`: its weight [hidden_size, channels, ..., patch_size, patch_size] is a plain
    tensor. `table`: [table_side**2, hidden_size] or None.
    """

    patch: Linear
    table: Any
    layers: tuple[TowerLayer, ...]
    last_norm: Norm | None
    merger: Merger
    deepstack: tuple[Merger, ...]


def make_tower(spec: TowerSpec, get: GetWeight) -> TowerWeights:
    """Return a tower with the weights that `get(name, *shape)` returns: a matrix for two dimensions, else a tensor."""
    hidden, block = spec.hidden_size, spec.hidden_size * spec.merge**2

    def linear(role: str, rows: int, columns: int, number: int = 0, has_bias: bool = True) -> Linear:
        name = spec.names[role].format(number)
        return Linear(get(f"{name}.weight", rows, columns), get(f"{name}.bias", rows) if has_bias else None)

    def norm(role: str, size: int, of: NormSpec | LayerNormSpec, number: int = 0) -> Norm:
        name = spec.names[role].format(number)
        return Norm(get(f"{name}.weight", size), get(f"{name}.bias", size) if isinstance(of, LayerNormSpec) else None)

    def layer(i: int) -> TowerLayer:
        parts = [("qkv", 3 * hidden)] if spec.joined else [(part, hidden) for part in "qkv"]
        inner = ("gate", "up") if spec.gated else ("up",)
        return TowerLayer(
            norm("mixer_norm", hidden, spec.norm, i),
            tuple(linear(role, rows, hidden, i) for role, rows in parts),
            linear("o", hidden, hidden, i),
            norm("mlp_norm", hidden, spec.norm, i),
            tuple(linear(role, spec.intermediate_size, hidden, i) for role in inner),
            linear("down", hidden, spec.intermediate_size, i),
        )

    def merger(role: str, size: int, number: int = 0) -> Merger:
        own = norm(f"{role}.norm", size, spec.merger_norm, number)
        if spec.pooled:
            return Merger(own, (Linear(get(spec.names[f"{role}.matrix"], hidden, spec.out_size), None),))
        inner = linear(f"{role}.up", block, block, number)
        return Merger(own, (inner, linear(f"{role}.down", spec.out_size, block, number)))

    size = spec.patch_size
    shape = hidden, spec.channels, *([spec.frames] if spec.frames > 1 else []), size, size
    patch = spec.names["patch"]
    return TowerWeights(
        Linear(get(f"{patch}.weight", *shape), get(f"{patch}.bias", hidden) if spec.patch_bias else None),
        get(spec.names["table"], spec.table_side**2, hidden) if spec.table_side else None,
        tuple(layer(i) for i in range(spec.num_layers)),
        None if spec.last_norm is None else norm("last_norm", hidden, spec.last_norm),
        merger("merger", hidden),
        tuple(merger("deepstack", block, i) for i in range(len(spec.deepstack))),
    )


def encode(
    ops: TowerOps, spec: TowerSpec, weights: TowerWeights, patches: Tensor, grid: Grid
) -> Generator[None, None, Tensor]:
    """Compute the embeddings of one image, [tokens, row_size], from its patches [rows * columns, patch_values], which
    are in the tower's dtype. Yield after each layer, and return the embeddings when the generator ends.
    """
    order = _window_order(spec, grid)
    x = ops.linear(patches, ops.matrix(weights.patch.weight.flatten(1)), weights.patch.bias)
    if weights.table is not None:
        x = x + _table_rows(ops, spec, weights.table, grid, x.device).to(x.dtype)
    rotation = None
    if spec.rotation is not None:
        inv_freq = torch.tensor(spec.rotation.inv_freq, dtype=torch.float32, device=x.device)
        rotation = turn(ops.backend, spec.rotation, inv_freq, patch_places(spec, grid).to(x.device))
    if order is not None:
        x = order.apply(spec, x)
        rotation = None if rotation is None else (order.apply(spec, rotation[0]), order.apply(spec, rotation[1]))
    whole = Packed.of([len(x)], x.device, see_all=True)
    windows = whole if order is None else Packed.of(order.lens, x.device, see_all=True)
    deep = list[Tensor]()
    for i, layer in enumerate(weights.layers):
        x = _run_layer(ops, spec, layer, x, rotation, whole if i in spec.whole_layers else windows)
        if i in spec.deepstack:
            deep.append(_merge(ops, spec, weights.deepstack[spec.deepstack.index(i)], x, joins_first=True))
        yield
    if spec.last_norm is not None:
        x = _normed(ops, x, cast(Norm, weights.last_norm), spec.last_norm)
    out = torch.cat([_merge(ops, spec, weights.merger, x), *deep], 1)
    return out if order is None else out[torch.tensor(order.blocks, device=x.device).argsort()]


def _run_layer(
    ops: TowerOps, spec: TowerSpec, layer: TowerLayer, x: Tensor, rotation: Rotation | None, packed: Packed
) -> Tensor:
    hidden = _normed(ops, x, layer.mixer_norm, spec.norm)
    products = [ops.linear(hidden, *linear) for linear in layer.inputs]
    q, k, v = products[0].chunk(3, 1) if spec.joined else products
    q, k, v = (part.unflatten(1, (spec.num_heads, -1)) for part in (q, k, v))
    if rotation is not None:
        q, k = ops.rope(q, rotation), ops.rope(k, rotation)
    attention = AttentionSpec(spec.num_heads, spec.num_heads, spec.head_dim, spec.head_dim**-0.5)
    mixed = ops.attention(q, k, v, packed, attention).flatten(1)
    x = x + ops.linear(mixed, *layer.o)
    hidden = _normed(ops, x, layer.mlp_norm, spec.norm)
    inner = [ops.linear(hidden, *linear) for linear in layer.inner]
    gate, *ups = inner
    active = ops.gate_mul(gate, ups[0], spec.activation) if ups else _activated(ops, gate, spec.activation)
    return x + ops.linear(active, *layer.down)


def _normed(ops: TowerOps, x: Tensor, norm: Norm, spec: NormSpec | LayerNormSpec) -> Tensor:
    if isinstance(spec, LayerNormSpec):
        return ops.layer_norm(x, norm.weight, cast(Tensor, norm.bias), spec)
    return ops.rmsnorm(x, norm.weight, spec)


def _merge(ops: TowerOps, spec: TowerSpec, merger: Merger, x: Tensor, joins_first: bool = False) -> Tensor:
    """Return a row [out_size] for each block of x [patches, hidden_size]. `joins_first`: the rows of a block are joined
    before the norm.
    """
    size, norm = spec.merge**2, spec.merger_norm
    if spec.pooled:
        pooled = _normed(ops, _mean(x.unflatten(0, (-1, size))), merger.norm, norm)
        return ops.linear(pooled, ops.transposed(merger.products[0].weight))
    joined = x.reshape(-1, size * x.shape[1])
    joined = _normed(ops, joined if joins_first else x, merger.norm, norm).reshape(joined.shape)
    up, down = merger.products
    return ops.linear(_activated(ops, ops.linear(joined, *up), "gelu"), *down)


def _activated(ops: TowerOps, x: Tensor, activation: Activation) -> Tensor:
    return ops.gate_mul(x, torch.ones_like(x), activation)  # multiplication by 1 changes no bit


def _mean(x: Tensor) -> Tensor:
    """Return the mean [M, H] of the rows of each block of x [M, rows, H]: a float32 sum in the order of the rows."""
    total = x[:, 0].float()
    for row in range(1, x.shape[1]):
        total = total + x[:, row].float()
    return (total / x.shape[1]).to(x.dtype)


def patch_places(spec: TowerSpec, grid: Grid) -> Tensor:
    """Return the rows and columns of an image's patches, in the order of the patches: int64 [2, patches]."""
    rows, columns = (torch.arange(size) for size in grid)
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"))
    blocks = places.unflatten(1, (-1, spec.merge)).unflatten(3, (-1, spec.merge))
    return blocks.transpose(2, 3).flatten(1)


def _table_rows(ops: TowerOps, spec: TowerSpec, table: Any, grid: Grid, device: torch.device) -> Tensor:
    """Return the learned position of each patch, float32 [patches, hidden_size]: bilinear interpolation between places
    of the table. The corners of the image are the corners of the table.
    """
    by_row, by_column = (_taps(*axis, spec.table_side) for axis in zip(patch_places(spec, grid), grid, strict=True))
    total = torch.zeros((), device=device)
    for (row, row_share), (column, column_share) in product(by_row, by_column):
        found = ops.embedding((row * spec.table_side + column).to(device), table)
        total = total + found.float() * (row_share * column_share).to(device)[:, None]
    return total


def _taps(places: Tensor, size: int, side: int) -> list[tuple[Tensor, Tensor]]:
    """Map each index on an axis of the image to the axis of the table. Return the two neighbouring indices of the
    table, each with its share. `size`, `side`: the lengths of the image's axis and of the table's axis.
    """
    source = places.float() * (side - 1) / max(size - 1, 1)
    first, share = source.floor().long(), source - source.floor()
    return [(first, 1.0 - share), ((first + 1).clamp(max=side - 1), share)]


class _Order(NamedTuple):
    """The blocks of an image in the order of their windows, and the number of patches of each window."""

    blocks: list[int]
    lens: list[int]

    def apply(self, spec: TowerSpec, x: Tensor) -> Tensor:
        """Bring the rows of x [patches, ...] into this order."""
        return x.unflatten(0, (-1, spec.merge**2))[self.blocks].flatten(0, 1)


def _window_order(spec: TowerSpec, grid: Grid) -> _Order | None:
    """Return the order of blocks in a tower with windows. Windows at the edges may be smaller."""
    if (side := spec.window) is None:
        return None
    rows, columns = (size // spec.merge for size in grid)
    blocks, lens = list[int](), list[int]()
    for top in range(0, rows, side):
        for left in range(0, columns, side):
            inside = [
                row * columns + column
                for row in range(top, min(top + side, rows))
                for column in range(left, min(left + side, columns))
            ]
            blocks += inside
            lens.append(len(inside) * spec.merge**2)
    return _Order(blocks, lens)


def finish(steps: Generator[None, None, Tensor]) -> Tensor:
    """Run `encode` to its end, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def encode_at_once(
    ops: TowerOps, spec: TowerSpec, weights: TowerWeights, patches: Tensor, grids: Sequence[Grid]
) -> Tensor:
    """Return the embeddings of several images, one after the other, [tokens, row_size]. `patches`: those of all images,
    one after the other.
    """
    parts = patches.split([rows * columns for rows, columns in grids])
    each = [finish(encode(ops, spec, weights, *item)) for item in zip(parts, grids, strict=True)]
    return torch.cat(each)
