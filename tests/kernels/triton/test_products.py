"""The Triton kernels of products: against float64, and the same bits from every tile and for every number of tokens."""

from __future__ import annotations

import json
import math
import statistics
from functools import cache
from pathlib import Path

import pytest
import torch
from matrix import thinned
from torch import Tensor

from trueroll.kernels.contract import mark_rows
from trueroll.kernels.specs import Activation, Pieces
from trueroll.kernels.triton import launch, products, rows
from trueroll.kernels.triton.products import CUT_TILES, NARROW_TILE, TILES, Tile

from ..accuracy import check
from ..backends import both_dtypes
from ..inputs import randn, same_bits

TOKENS = 1 + max(tile.width for tile in TILES)
FEATURES = 65
PIECES = 2
# Numbers of columns for three ways to load elements: without a mask, with a mask in the second piece, and one by one
# with an empty second piece.
WHOLE, MASKED, ODD = (256, torch.bfloat16), (200, torch.float16), (121, torch.bfloat16)


def cut_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split every K into pieces, even a short K."""
    monkeypatch.setattr(products, "k_splits", lambda rows, columns: PIECES)


def use_tile(monkeypatch: pytest.MonkeyPatch, tile: Tile, apart: bool) -> None:
    """Compute all products with this tile, with either one program per piece or one program for all pieces."""
    monkeypatch.setattr(products, "way_of", lambda tokens, factor: (tile, apart))


def inputs(tokens: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, a weight, a bias and a residual."""
    x, weight = randn(tokens, columns, dtype=dtype), randn(FEATURES, columns, dtype=dtype, seed=1)
    return x, weight, randn(FEATURES, dtype=dtype, seed=2), randn(tokens, FEATURES, dtype=dtype, seed=3)


@both_dtypes
@pytest.mark.parametrize("features,columns", [(200, 576), (33, 1537), (FEATURES, 130), (1, 7)])
def test_products_against_float64(features: int, columns: int, dtype: torch.dtype) -> None:
    x, weight = randn(17, columns, dtype=dtype), randn(features, columns, dtype=dtype, seed=1)
    bias, residual = randn(features, dtype=dtype, seed=2), randn(17, features, dtype=dtype, seed=3)
    exact = x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    product = products.linear(x, weight)
    check(product, exact, 1, columns, magnitude)
    check(products.linear(x, weight, bias), exact + bias.double(), 1, columns + 1, magnitude)
    check(products.lm_head(x, weight), exact, 0, columns, magnitude)
    added = product.double() + residual.double()
    check(products.project_back(x, weight, residual), added, 1, 1, added.abs())


def test_a_cut_changes_the_order_of_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The premise of the following tests, which split K."""
    x, weight, _, _ = inputs(16, *WHOLE)
    whole = products.lm_head(x, weight)
    cut_everything(monkeypatch)
    assert not same_bits(products.lm_head(x, weight), whole)


@cache
def linear_by_the_table(columns: int, dtype: torch.dtype) -> Tensor:
    x, weight, bias, _ = inputs(TOKENS, columns, dtype)
    return products.linear(x, weight, bias)


def in_every_run(columns: int, tile: Tile, apart: bool) -> bool:
    """Return whether every run includes a case. For each tile, every run includes one number of columns, either with
    separate pieces or in registers.
    """
    kinds = [number for number, _ in (WHOLE, MASKED, ODD)]
    turn = [*TILES, NARROW_TILE].index(tile) % len(kinds)
    return columns == kinds[turn] and apart != (columns == ODD[0])


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "in_registers"])
@pytest.mark.parametrize("tile", [*TILES, NARROW_TILE], ids=str)
@pytest.mark.parametrize("columns,dtype", [WHOLE, MASKED, ODD])
@thinned(lambda columns, dtype, tile, apart: in_every_run(columns, tile, apart))
def test_linear_has_the_same_bits_from_every_tile(
    columns: int, dtype: torch.dtype, tile: Tile, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_everything(monkeypatch)
    x, weight, bias, _ = inputs(TOKENS, columns, dtype)
    expected = linear_by_the_table(columns, dtype)
    use_tile(monkeypatch, tile, apart)
    for tokens in (1, tile.width + 1):  # a part of a tile; one full tile and a part
        assert same_bits(products.linear(x[:tokens], weight, bias), expected[:tokens]), tokens


@cache
def steps_of_gate_up(columns: int, dtype: torch.dtype, activation: Activation) -> Tensor:
    x, gate, up = gate_up_inputs(columns, dtype)
    return rows.gate_mul(products.linear(x, gate), products.linear(x, up), activation)


def gate_up_inputs(columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x, gate, _, _ = inputs(TOKENS, columns, dtype)
    return x, (gate / 8).to(dtype), randn(FEATURES, columns, dtype=dtype, seed=5)


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "in_registers"])
@pytest.mark.parametrize("tile", [*TILES, NARROW_TILE], ids=str)
@pytest.mark.parametrize("columns,dtype,activation", [(*WHOLE, "silu"), (*MASKED, "gelu_tanh"), (*ODD, "clamped_silu")])
@thinned(lambda columns, tile, apart, **_: tile in (*TILES[:3], NARROW_TILE) and in_every_run(columns, tile, apart))
def test_gate_up_has_the_bits_of_its_steps_from_every_tile(
    columns: int,
    dtype: torch.dtype,
    activation: Activation,
    tile: Tile,
    apart: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut_everything(monkeypatch)
    x, gate, up = gate_up_inputs(columns, dtype)
    expected = steps_of_gate_up(columns, dtype, activation)
    use_tile(monkeypatch, tile, apart)
    for tokens in (1, tile.width + 1):  # a part of a tile; one full tile and a part
        assert same_bits(products.gate_up(x[:tokens], gate, up, activation), expected[:tokens]), tokens


@both_dtypes
def test_epilogues_have_the_bits_of_their_steps(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias is added before rounding and a residual after rounding, with pieces separate or in registers."""
    cut_everything(monkeypatch)
    x, weight, bias, residual = inputs(40, 200, dtype)
    for tile, apart in ((TILES[0], True), (CUT_TILES[0], False)):
        use_tile(monkeypatch, tile, apart)
        logits, product = products.lm_head(x, weight), products.linear(x, weight)
        assert same_bits(product, logits.to(dtype))
        assert same_bits(products.linear(x, weight, bias), (logits + bias.float()).to(dtype))
        assert same_bits(products.project_back(x, weight, residual), product + residual)
        both = products.project_back(x, weight, residual, bias)
        assert same_bits(both, products.linear(x, weight, bias) + residual)


# Pieces with whole steps of a tile, pieces of odd heads with masks, and an empty piece.
PIECES_BACK = {"whole": (512, Pieces(4, 128)), "masked": (400, Pieces(8, 48)), "empty": (300, Pieces(4, 112))}


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "in_registers"])
@pytest.mark.parametrize("tile", [*CUT_TILES, NARROW_TILE], ids=str)
@pytest.mark.parametrize("name", PIECES_BACK)
@thinned(lambda name, tile, apart: tile == CUT_TILES[0] or (name == "whole" and not apart))
def test_pieces_are_added_as_a_balanced_tree_from_every_tile(
    name: str, tile: Tile, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns, pieces = PIECES_BACK[name]
    x, weight, _, residual = inputs(tile.width + 1, columns, torch.bfloat16)
    use_tile(monkeypatch, tile, apart)
    monkeypatch.setattr(products, "k_splits", lambda rows, columns: 1)
    sums = [
        products.lm_head(x[:, start:end], weight[:, start:end].contiguous()) if start < end else torch.zeros(1)
        for start, end in pieces.bounds(columns)
    ]
    from_the_left = sum(sums[1:], sums[0])
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    bias = -sums[0][0].to(x.dtype)  # leaves those bits of the first row that are usually rounded
    if name != "empty":
        assert not same_bits((from_the_left + bias)[0].to(x.dtype), (sums[0] + bias)[0].to(x.dtype)), "premise"
    product = (sums[0] + bias.float()).to(x.dtype)
    for tokens in (1, tile.width + 1):
        found = products.project_back(x[:tokens], weight, residual[:tokens], bias, pieces)
        assert same_bits(found, product[:tokens] + residual[:tokens]), tokens
        assert same_bits(products.project_back(x[:tokens], weight, None, bias, pieces), product[:tokens])


@both_dtypes
@pytest.mark.parametrize("tokens", [1, 17, 129])
@pytest.mark.parametrize("apart", [True, False], ids=["apart", "in_registers"])
def test_parts_of_qkv_fold_to_the_products_one_by_one(
    apart: bool, tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The three weights may have different numbers of pieces."""
    pieces = {70: 1, 65: 3, 33: 2}
    monkeypatch.setattr(products, "k_splits", lambda rows, columns: pieces[rows])
    x = randn(tokens, 296, dtype=dtype)
    weights = [randn(n, 296, dtype=dtype, seed=n) for n in pieces]
    biases = [randn(n, dtype=dtype, seed=n + 1) for n in pieces]
    use_tile(monkeypatch, CUT_TILES[1], apart)
    parts = products.qkv_parts(x, (weights[0], weights[1], weights[2]))
    assert len(parts) == (3 if apart else 1), "premise"
    assert same_bits(parts[1:, :, :70], torch.zeros(len(parts) - 1, tokens, 70)), "pieces that a weight lacks are 0"
    total = torch.zeros(parts.shape[1:])
    for part in parts:
        total += part
    found = (total + torch.cat(biases).float()).to(dtype).split(list(pieces), dim=1)
    for product, weight, bias in zip(found, weights, biases, strict=True):
        assert same_bits(product, products.linear(x, weight, bias))


@both_dtypes
def test_rows_do_not_depend_on_other_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_everything(monkeypatch)
    x, weight, bias, _ = inputs(140, 121, dtype)
    x[[5, 131]] = torch.nan
    whole = products.linear(x, weight, bias), products.gate_up(x, weight, weight, "silu"), products.lm_head(x, weight)
    for row in (0, 16, 130, 139):
        alone = x[row : row + 1]
        assert not whole[0][row].isnan().any()
        assert same_bits(products.linear(alone, weight, bias)[0], whole[0][row])
        assert same_bits(products.gate_up(alone, weight, weight, "silu")[0], whole[1][row])
        assert same_bits(products.lm_head(alone, weight)[0], whole[2][row])
    assert all(product[[5, 131]].isnan().all() for product in whole)


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "in_registers"])
def test_a_product_of_minus_zero_is_plus_zero(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adding a partial result of +0.0 therefore changes no bit."""
    cut_everything(monkeypatch)
    _, weight, _, _ = inputs(4, *WHOLE)
    use_tile(monkeypatch, CUT_TILES[0], apart)
    minus_zero = torch.full((4, weight.shape[1]), -0.0, dtype=weight.dtype)
    for product in (products.linear(minus_zero, weight), products.lm_head(minus_zero, weight)):
        assert same_bits(product, torch.zeros(4, FEATURES, dtype=product.dtype))


def test_activations_may_lie_anywhere_in_memory() -> None:
    x, weight, bias, residual = inputs(17, *ODD)
    expected = products.linear(x, weight, bias), products.project_back(x, weight, residual)
    moved = [torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape) for t in (x, bias, residual)]
    strided = x.T.contiguous().T
    assert all(t.data_ptr() % launch.ALIGNMENT for t in moved) and not strided.is_contiguous(), "premise"
    assert same_bits(products.linear(moved[0], weight, moved[1]), expected[0])
    assert same_bits(products.project_back(strided, weight, moved[2]), expected[1])


@pytest.mark.parametrize("pieces", [1, PIECES])
def test_no_tokens(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "k_splits", lambda rows, columns: pieces)
    x, weight, _, residual = inputs(0, *ODD)
    assert products.linear(x, weight).shape == products.project_back(x, weight, residual).shape == (0, FEATURES)
    assert products.gate_up(x, weight, weight, "silu").shape == products.lm_head(x, weight).shape == (0, FEATURES)
    assert products.qkv_parts(x, (weight, weight, weight)).shape[1:] == (0, 3 * FEATURES)


@pytest.mark.parametrize("rows,columns", [(512, 3584), (3584, 18944), (1024, 1024), (8191, 1537), (152064, 3584)])
def test_pieces_are_whole_steps_and_none_is_empty(rows: int, columns: int) -> None:
    factor = weights_of((rows, columns))
    pieces, length = factor.pieces[0].count, factor.pieces[0].length
    assert (pieces - 1) * length < columns <= pieces * length
    assert all(length % tile.depth == 0 for tile in (*TILES, *CUT_TILES, NARROW_TILE))


def weights_of(*shapes: tuple[int, int]) -> products.Factor:
    """Return weights without memory."""
    weights = tuple(torch.empty(shape, device="meta") for shape in shapes)
    return products.factor_of(*weights)


@pytest.mark.parametrize("weight", ["o", "down"])
def test_weights_with_few_rows_stay_cut_in_four(weight: str) -> None:
    """The weights have the sizes of Qwen2.5-7B. A different split would give other bits."""
    assert weights_of(LAYER[weight][0]).most_pieces == 4


# Measured with Qwen2.5-7B.
H100_TILES = Path(__file__).with_name("h100_tiles.json")
LAYER = {
    "qkv": ((3584, 3584), (512, 3584), (512, 3584)),
    "o": ((3584, 3584),),
    "gate_up": ((18944, 3584), (18944, 3584)),
    "down": ((3584, 18944),),
}
# Numbers of tokens on both sides of every tile change up to twice the largest tile, and the sizes of prompts.
COUNTS = (1, 16, 17, 64, 65, 97, 128, 129, 145, 193, 256, 257, 289, 321, 512, 513, 1024, 1025, 2048)


@pytest.mark.parametrize("weight", LAYER)
def test_up_to_128_tokens_are_one_tile(weight: str) -> None:
    """With one tile of tokens, no two programs read the same part of a weight. Up to 96 tokens, each piece has its own
    program.
    """
    factor = weights_of(*LAYER[weight])
    for tokens in (count for count in COUNTS if count <= 128):
        tile, apart = products.way_of(tokens, factor)
        assert tokens <= tile.width, tokens
        assert apart == (factor.most_pieces > 1) or tokens > 96, tokens


def test_the_tiles_that_are_chosen_are_fast_on_an_h100() -> None:
    """The times are in microseconds, measured on an H100 for the joined q, k and v and for each other weight. On
    average, the chosen tile takes at most 1.5% longer than the fastest tile.
    """
    times: dict[tuple[str, int], dict[products.Way, float]] = {}
    for weight, tokens, tile, apart, microseconds in json.loads(H100_TILES.read_text()):
        times.setdefault((weight, tokens), {})[Tile(*tile), apart] = microseconds
    longer = []
    for (weight, tokens), each in times.items():
        chosen = products.way_of(tokens, weights_of(*(LAYER | {"head": ((152064, 3584),)})[weight]))
        longer.append(each[chosen] / min(each.values()))
    assert len(longer) > 30 and min(map(len, times.values())) > 1, "premise: there was a choice"
    assert math.exp(statistics.fmean(map(math.log, longer))) <= 1.015


@pytest.mark.parametrize("shape", [(1001, 480), (1001, 3584)])
def test_results_that_are_stored_one_by_one_have_small_tiles(shape: tuple[int, int]) -> None:
    """Addresses of single elements take many registers, so large tiles would spill."""
    for tokens in COUNTS:
        assert products.way_of(tokens, weights_of(shape))[0] in CUT_TILES, tokens


@cache
def rows_by_one_tile() -> tuple[Tensor, Tensor, Tensor]:
    """Return x, a weight with K in four pieces, and their product computed with the smallest tile."""
    x, weight = randn(1025, 512, dtype=torch.bfloat16), randn(33, 512, dtype=torch.bfloat16, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "k_splits", lambda rows, columns: 4)
        use_tile(patch, TILES[0], False)
        return x, weight, products.linear(x, weight)


@pytest.mark.parametrize("weight", ["o", "gate_up"])
@pytest.mark.parametrize("tokens", [64, 65, 128, 129, 256, 257, 289, 512, 513, 1025])
def test_a_row_has_the_same_bits_at_every_number_of_rows(
    tokens: int, weight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiles and the programs per piece are those of a Qwen2.5-7B layer with this number of tokens."""
    x, small, expected = rows_by_one_tile()
    way = products.way_of(tokens, weights_of(*LAYER[weight]))
    monkeypatch.setattr(products, "k_splits", lambda rows, columns: 4)
    use_tile(monkeypatch, *way)
    assert same_bits(products.linear(x[:tokens], small), expected[:tokens]), way


def test_a_shard_of_a_weight_has_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard has some rows of the weight. A separate weight of this size would be split into more pieces."""
    monkeypatch.setattr(products, "k_splits", lambda rows, columns: 1 if rows >= FEATURES else PIECES)
    x, weight, bias, residual = inputs(17, *WHOLE)
    up = randn(*weight.shape, dtype=weight.dtype, seed=5)
    whole = products.linear(x, weight, bias)
    added, logits = products.project_back(x, weight, residual), products.lm_head(x, weight)
    both, parts = products.gate_up(x, weight, up, "silu"), products.qkv_parts(x, (weight, up, up))
    assert not same_bits(products.lm_head(x, weight[:32]), logits[:, :32]), "premise: alone it has other bits"
    for part in (slice(0, 32), slice(32, FEATURES)):
        shard, shard_up = (mark_rows(each[part].contiguous(), FEATURES) for each in (weight, up))
        assert same_bits(products.linear(x, shard, bias[part]), whole[:, part])
        assert same_bits(products.project_back(x, shard, residual[:, part]), added[:, part])
        assert same_bits(products.lm_head(x, shard), logits[:, part])
        assert same_bits(products.gate_up(x, shard, shard_up, "silu"), both[:, part])
        of_shards = products.qkv_parts(x, (shard, shard_up, shard_up))
        expected = torch.cat([each[:, :, part] for each in parts.split(FEATURES, dim=2)], dim=2)
        assert same_bits(of_shards, expected)
