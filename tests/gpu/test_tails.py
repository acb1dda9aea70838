"""A row has the same bits in every tile, for both dtypes and for any remainder of K and of the number of features."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from trueroll.kernels.contract import Backend
from trueroll.kernels.triton import products
from trueroll.kernels.triton.launch import recording

from .moved import random, sized
from .test_real_sizes import COUNTS, DTYPES, gate_up

ROWS = sized(2100, 140)
# Numbers of columns beyond a multiple of 128: multiples of 8, of 16 and of every tile depth, and numbers that are
# multiples of none of these.
TAILS = sized((0, 8, 16, 24, 40, 64, 72, 120, 1), (8, 1))
# The weight's shape without the tail, and the op. A weight with 8192 rows is not split along K.
PRODUCTS: dict[str, tuple[Any, ...]] = {
    "cut": (*sized((3592, 3584), (72, 1536)), lambda ops, x, weight: ops.linear(x, weight)),
    "whole": (*sized((9000, 3584), (72, 128)), lambda ops, x, weight: ops.lm_head(x, weight)),
    "cut pair": (*sized((2 * 1032, 3584), (2 * 72, 1536)), gate_up("silu")),
    "whole pair": (*sized((2 * 9000, 3584), (2 * 72, 128)), gate_up("silu")),
}


def tile_of(compute: Callable[[], Tensor]) -> tuple[int, int, int]:
    """Return the numbers of features and tokens, and the depth along K, of the tile that computes this product."""
    with recording() as launches:
        compute()
    (constants,) = (dict(launch.constants) for launch in launches if "DEPTH" in dict(launch.constants))
    return constants["FEATURES"], constants["TOKENS"], constants["DEPTH"]


def count_differing_rows(left: Tensor, right: Tensor) -> int:
    assert left.dtype == right.dtype and left.shape == right.shape
    return int((left.view(torch.int16) != right.view(torch.int16)).any(1).sum())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_no_row_differs(kernels: Backend, name: str, tail: int, dtype: torch.dtype) -> None:
    n, k, product = PRODUCTS[name]
    k += tail
    x, weight = random(ROWS, k, dtype=dtype), random(n, k, dtype=dtype, scale=k**-0.5, seed=1)
    everything = product(kernels, x, weight)
    assert everything.isfinite().all()
    differing: Counter[tuple[int, int, int]] = Counter()
    for count in (count for count in COUNTS if count < ROWS):
        part = x[ROWS - count :]
        found = product(kernels, part, weight)
        tile = tile_of(lambda part=part: product(kernels, part, weight))
        differing[tile] += count_differing_rows(found, everything[ROWS - count :])
    assert len(differing) >= sized(4, 2) or tail % 8, "premise: several tiles were seen"
    assert differing == Counter(dict.fromkeys(differing, 0)), "differing rows by features, tokens and depth of the tile"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tail", TAILS[:2] + TAILS[-1:])
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_tile_gives_the_same_bits(
    kernels: Backend, name: str, tail: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Includes tiles that the tables never choose."""
    n, k, product = PRODUCTS[name]
    k += tail
    x, weight = random(ROWS, k, dtype=dtype), random(n, k, dtype=dtype, scale=k**-0.5, seed=1)
    everything = product(kernels, x, weight)
    parts = weight.chunk(2 if "pair" in name else 1)
    factor = products.factor_of(*parts)
    ways = {way for count in (1, ROWS) for way in products.ways_of(count, k, factor.rows, factor.most_pieces)}
    assert len(ways) >= (2 if "cut" in name else 1) * (1 if k % 8 else len(products.TILES) // 2), "premise: many tiles"
    for way in ways:
        monkeypatch.setattr(products, "way_of", lambda tokens, factor, way=way: way)
        for count in sized((1, 17, 129, 513, 1024), (1, 17)):
            found = product(kernels, x[ROWS - count :], weight)
            assert count_differing_rows(found, everything[ROWS - count :]) == 0, (way, count)
