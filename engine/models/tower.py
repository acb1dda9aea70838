"""The vision tower of a decoder: the tower's weights, the embeddings of images, and the decoder layers after which rows
of the tower are added to the hidden states.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from torch import Tensor

from ...kernels.contract import Backend, Layer, Memory, Pages, Rotation, StateBatch
from ...kernels.layer import GetWeight
from ...kernels.specs import ExpertsSpec, TowerSpec
from ...kernels.towers import BackendTowerOps, Grid, encode, make_tower


class EmbeddedRows(NamedTuple):
    """Embeddings of content other than text.

    `places`: int64 [R], the distinct indices of the tokens that get the embeddings in `rows`. `rows`: the embeddings,
    [R, (1 + layers) * hidden_size], in the model's dtype. The first part of a row replaces the token's embedding. Each
    further part is added to the token's hidden state after a layer: the second part after the first layer, and so on.
    """

    places: Tensor
    rows: Tensor


class Tower:
    """The tower that `spec` describes, with the weights that `get` returns. `layers`: the layers of the decoder, or of
    its stage. `first`: the index, in the decoder, of the first layer in `layers`.
    """

    def __init__(self, spec: TowerSpec, backend: Backend, get: GetWeight, layers: Sequence[Layer], first: int) -> None:
        self._ops, self._spec, self._first = backend, spec, first
        self._parts = make_tower(spec, BackendTowerOps(backend), get)
        # One group for each layer after which rows are added, then one group for all other layers.
        count = max(0, len(spec.deepstack) - first)
        self._groups: list[Any] = [backend.new_layers([layer]) for layer in layers[:count]]
        if others := layers[count:]:
            self._groups.append(backend.new_layers(others))

    def encode(self, patches: Tensor, grid: Grid) -> Generator[None, None, Tensor]:
        """Compute the rows of `EmbeddedRows` for an image, [tokens, row_size]. See `towers.encode`."""
        return encode(self._spec, self._parts, patches, [grid])

    def run_layers(
        self,
        x: Tensor,
        embedded: EmbeddedRows,
        rotations: Sequence[Rotation],
        memories: Sequence[Memory],
        pages: Sequence[Pages],
        states: StateBatch | None,
        routes: Tensor | None,
    ) -> Tensor:
        """Run the decoder's layers on the hidden states x [M, hidden_size]. Before the decoder's first layer, replace
        the embeddings at the places of `embedded`. After each of the decoder's first layers, add the next part of the
        rows to the hidden states.
        """
        parts = embedded.rows.split(x.shape[1], 1)
        if self._first == 0:
            x = x.index_copy(0, embedded.places, parts[0])
        start, first_route = 0, 0
        for layers, rows in zip_longest(self._groups, parts[1 + self._first : 1 + self._first + len(self._groups)]):
            end = start + len(layers)
            next_route = first_route + sum(isinstance(layer.spec.mlp, ExpertsSpec) for layer in layers)
            own = None if routes is None else routes[first_route:next_route]
            x = self._ops.layers(x, layers, rotations, memories[start:end], pages[start:end], states, own)
            if rows is not None:
                x = x.index_copy(0, embedded.places, x[embedded.places] + rows)
            start, first_route = end, next_route
        return x
