"""The arithmetic of vision towers, defined once in terms of the ops.

`encode` turns the pixels of images into rows of embeddings. Workers run `encode` image by image, with the ops of a
backend. Trainers run `encode` for all images of a batch, with ops that have gradients (`TowerOps`). The rows of an
image depend only on the image's pixels, the image's grid and the weights: a patch sees only patches of its image, and
the bits of a row do not depend on other rows in any op. Learned positions are interpolated in float32, in a fixed
order, and rounded once.

A tower consists of parts. In a trainer, the weights of a part are in one module, and each part is computed while that
module is called, once for all images (`training_towers`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

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
    product, or, if the MLP is gated, the gate and up products.
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


class PatchWeights(NamedTuple):
    """The product that embeds patches. The product's weight [hidden_size, channels, ..., patch_size, patch_size] is a
    tensor.
    """

    weight: Tensor
    bias: Tensor | None


Compute: TypeAlias = Callable[[TowerOps, Any, Tensor], Tensor]
"""compute(ops, weights, x): return the output rows of a part of a tower for the input rows x."""
RunPart: TypeAlias = Callable[[Compute, Tensor], Tensor]
"""run(compute, x): call `compute` with the ops and the weights of a part, and return its result."""


class Part(NamedTuple):
    """A part of a tower. `make(get)` returns the part's weights. `make` calls `get(name, *shape)`, which returns a
    matrix for two dimensions, and a tensor otherwise. `role`, `number`: the role of one of the weights, and the number
    in this weight's name.
    """

    role: str
    make: Callable[[GetWeight], Any]
    number: int = 0


@dataclass(frozen=True)
class TowerParts:
    """The parts of a tower: each is a `Part`, a `RunPart`, or, in a trainer, a `_TrainedPart`.
    `table`: learned positions, or None. `deepstack`: the
    mergers of the layers in `TowerSpec.deepstack`.
    """

    patch: Any
    table: Any | None
    layers: tuple[Any, ...]
    last_norm: Any | None
    merger: Any
    deepstack: tuple[Any, ...]

    def __iter__(self) -> Iterator[Any]:
        parts = self.patch, self.table, *self.layers, self.last_norm, self.merger, *self.deepstack
        return (part for part in parts if part is not None)

    def map(self, function: Callable[[Any], Any]) -> TowerParts:
        """Return a tower with the result of `function` in place of each part."""
        return TowerParts(
            function(self.patch),
            None if self.table is None else function(self.table),
            tuple(map(function, self.layers)),
            None if self.last_norm is None else function(self.last_norm),
            function(self.merger),
            tuple(map(function, self.deepstack)),
        )


def make_tower(spec: TowerSpec, ops: TowerOps, get: GetWeight) -> TowerParts:
    """Return a tower with the weights that `get` returns (see `Part`). The result's parts are `RunPart` functions."""

    def run(weights: Any, compute: Compute, x: Tensor) -> Tensor:
        return compute(ops, weights, x)

    return describe_parts(spec).map(lambda part: partial(run, part.make(get)))


def describe_parts(spec: TowerSpec) -> TowerParts:
    """Return the parts of a tower as `Part` objects."""
    hidden, block = spec.hidden_size, spec.hidden_size * spec.merge**2

    def linear(get: GetWeight, role: str, rows: int, columns: int, number: int = 0) -> Linear:
        name = spec.names[role].format(number)
        return Linear(get(f"{name}.weight", rows, columns), get(f"{name}.bias", rows))

    def norm(get: GetWeight, role: str, size: int, of: NormSpec | LayerNormSpec, number: int = 0) -> Norm:
        name = spec.names[role].format(number)
        return Norm(get(f"{name}.weight", size), get(f"{name}.bias", size) if isinstance(of, LayerNormSpec) else None)

    def patch(get: GetWeight) -> PatchWeights:
        size, name = spec.patch_size, spec.names["patch"]
        shape = hidden, spec.channels, *([spec.frames] if spec.frames > 1 else []), size, size
        return PatchWeights(get(f"{name}.weight", *shape), get(f"{name}.bias", hidden) if spec.patch_bias else None)

    def table(get: GetWeight) -> Any:
        return get(spec.names["table"], spec.table_side**2, hidden)

    def layer(i: int, get: GetWeight) -> TowerLayer:
        parts = [("qkv", 3 * hidden)] if spec.joined else [(part, hidden) for part in "qkv"]
        inner = ("gate", "up") if spec.gated else ("up",)
        return TowerLayer(
            norm(get, "mixer_norm", hidden, spec.norm, i),
            tuple(linear(get, role, rows, hidden, i) for role, rows in parts),
            linear(get, "o", hidden, hidden, i),
            norm(get, "mlp_norm", hidden, spec.norm, i),
            tuple(linear(get, role, spec.intermediate_size, hidden, i) for role in inner),
            linear(get, "down", hidden, spec.intermediate_size, i),
        )

    def last_norm(get: GetWeight) -> Norm:
        return norm(get, "last_norm", hidden, cast(LayerNormSpec, spec.last_norm))

    def merger(role: str, size: int, number: int, get: GetWeight) -> Merger:
        own = norm(get, f"{role}.norm", size, spec.merger_norm, number)
        if spec.pooled:
            return Merger(own, (Linear(get(spec.names[f"{role}.matrix"], hidden, spec.out_size), None),))
        inner = linear(get, f"{role}.up", block, block, number)
        return Merger(own, (inner, linear(get, f"{role}.down", spec.out_size, block, number)))

    deepstack = range(len(spec.deepstack))
    return TowerParts(
        Part("patch", patch),
        Part("table", table) if spec.table_side else None,
        tuple(Part("mixer_norm", partial(layer, i), i) for i in range(spec.num_layers)),
        None if spec.last_norm is None else Part("last_norm", last_norm),
        Part("merger.matrix" if spec.pooled else "merger.down", partial(merger, "merger", hidden, 0)),
        tuple(Part("deepstack.down", partial(merger, "deepstack", block, i), i) for i in deepstack),
    )


def encode(spec: TowerSpec, tower: TowerParts, patches: Tensor, grids: Sequence[Grid]) -> Generator[None, None, Tensor]:
    """Compute the embeddings [tokens, row_size] of all images, image by image. `patches`: [patches of all images,
    patch_values], in the tower's dtype. `grids`: one grid for each image; there is at least one image. `tower`: the
    tower's parts, each as a `RunPart`. Yield after each layer, and return the embeddings when the generator ends.
    """
    layout = _Layout(spec, grids, patches.device)
    x = tower.patch(lambda ops, own, x: ops.linear(x, ops.matrix(own.weight.flatten(1)), own.bias), patches)
    if tower.table is not None:
        x = tower.table(lambda ops, own, x: x + layout.table_rows(ops, own).to(x.dtype), x)
    x = layout.ordered(x)
    deep = list[Tensor]()
    for i, layer in enumerate(tower.layers):
        x = layer(partial(_run_layer, spec, layout, i), x)
        if i in spec.deepstack:
            merger = tower.deepstack[spec.deepstack.index(i)]
            deep.append(merger(lambda ops, own, x: _merge(ops, spec, own, x, joins_first=True), x))
        yield
    if tower.last_norm is not None:
        x = tower.last_norm(lambda ops, own, x: _normed(ops, x, own, cast(LayerNormSpec, spec.last_norm)), x)
    merged = tower.merger(lambda ops, own, x: _merge(ops, spec, own, x), x)
    return layout.restored(torch.cat([merged, *deep], 1))


class _Layout:
    """Where the patches of images are: their order in the layers, their rotation, and which patches see each other."""

    def __init__(self, spec: TowerSpec, grids: Sequence[Grid], device: torch.device) -> None:
        self._spec, self._grids, self._device = spec, grids, device
        orders = [_window_order(spec, grid) for grid in grids]
        self._order = None if None in orders else _joined_orders(cast(list[_Order], orders))
        self._whole = Packed.of([rows * columns for rows, columns in grids], device, see_all=True)
        self._windows = self._whole if self._order is None else Packed.of(self._order.lens, device, see_all=True)
        self._rotation: Rotation | None = None

    def packed(self, layer: int) -> Packed:
        """Return the sequences of patches that see each other in a layer."""
        return self._whole if layer in self._spec.whole_layers else self._windows

    def rotation(self, backend: Backend) -> Rotation | None:
        """Return the rotation of the patches, which is computed once."""
        spec = self._spec.rotation
        if spec is not None and self._rotation is None:
            inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32, device=self._device)
            places = torch.cat([patch_places(self._spec, grid) for grid in self._grids], 1)
            cosines, sines, _ = turn(backend, spec, inv_freq, places.to(self._device))
            self._rotation = Rotation(self.ordered(cosines), self.ordered(sines))
        return self._rotation

    def table_rows(self, ops: TowerOps, table: Any) -> Tensor:
        """Return the learned position of each patch, float32 [patches, hidden_size]."""
        return torch.cat([_table_rows(ops, self._spec, table, grid, self._device) for grid in self._grids])

    def ordered(self, x: Tensor) -> Tensor:
        """Bring the rows of x [patches, ...] into the order of the layers."""
        if self._order is None:
            return x
        return x.unflatten(0, (-1, self._spec.merge**2))[self._order.blocks].flatten(0, 1)

    def restored(self, rows: Tensor) -> Tensor:
        """Bring rows, one for each block, into the order of the images."""
        if self._order is None:
            return rows
        return rows[torch.tensor(self._order.blocks, device=self._device).argsort()]


def _run_layer(spec: TowerSpec, layout: _Layout, index: int, ops: TowerOps, layer: TowerLayer, x: Tensor) -> Tensor:
    rotation, packed = layout.rotation(ops.backend), layout.packed(index)
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
    """Return the mean [M, H] of the rows of each block of x [M, rows, H]. The rows are summed in float32, in order."""
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
    """Return the learned position of each patch of an image, float32 [patches, hidden_size]: bilinear interpolation
    between places of the table. The corners of the image are mapped to the corners of the table.
    """
    by_row, by_column = (_taps(*axis, spec.table_side) for axis in zip(patch_places(spec, grid), grid, strict=True))
    total = torch.zeros((), device=device)
    for (row, row_share), (column, column_share) in product(by_row, by_column):
        found = ops.embedding((row * spec.table_side + column).to(device), table)
        total = total + found.float() * (row_share * column_share).to(device)[:, None]
    return total


def _taps(places: Tensor, size: int, side: int) -> list[tuple[Tensor, Tensor]]:
    """Map each index on an axis of the image to the axis of the table. Return the two neighbouring indices of the
    table, each with its weight in the interpolation. `size`, `side`: the lengths of the image's axis and of the table's
    axis.
    """
    source = places.float() * (side - 1) / max(size - 1, 1)
    first, share = source.floor().long(), source - source.floor()
    return [(first, 1.0 - share), ((first + 1).clamp(max=side - 1), share)]


class _Order(NamedTuple):
    """The blocks of images in the order of their windows, and the number of patches of each window."""

    blocks: list[int]
    lens: list[int]


def _joined_orders(orders: Sequence[_Order]) -> _Order:
    """Return the order of several images, one after the other."""
    blocks, lens = list[int](), list[int]()
    for order in orders:
        before = len(blocks)
        blocks += [before + block for block in order.blocks]
        lens += order.lens
    return _Order(blocks, lens)


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
