"""The Triton kernels of experts: the choice of experts, and equal bits from every tile and for any number of rows."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from matrix import thinned
from torch import Tensor

from trueroll.kernels import reference
from trueroll.kernels.contract import Backend, ExpertsWeights
from trueroll.kernels.specs import ExpertsSpec, RouterSpec, Score
from trueroll.kernels.triton import backend, experts, products, rows
from trueroll.kernels.triton.products import NARROW_TILE, Tile

from ..accuracy import FLOAT32
from ..backends import Served, both_dtypes
from ..inputs import randn, same_bits, strided
from ..test_joined_ops import check_parts_of_experts
from .test_products import PIECES

HIDDEN, INNER = 136, 72  # a tail after the last step of a tile, and features that do not fill a tile
SPEC = ExpertsSpec(5, 2, INNER)
BIASED = ExpertsSpec(5, 3, INNER, activation="clamped_silu", bias=True)
ODD = ExpertsSpec(4, 2, 33, activation="gelu_tanh")  # elements are loaded one by one


def weights_of(spec: ExpertsSpec, hidden: int, dtype: torch.dtype) -> ExpertsWeights:
    """Return random weights for which all products stay near 1."""
    count, inner = spec.num_experts, spec.intermediate_size

    def new(*shape: int, seed: int) -> Tensor:
        return (randn(*shape, seed=seed) / shape[-1] ** 0.5).to(dtype)

    biases = (new(count, 2 * inner, seed=3), new(count, hidden, seed=4)) if spec.bias else (None, None)
    gate_up, down = new(count * 2 * inner, hidden, seed=1), new(count * hidden, inner, seed=2)
    return ExpertsWeights(new(count, hidden, seed=5), None, gate_up, biases[0], down, biases[1])


def inputs(
    spec: ExpertsSpec, count: int, dtype: torch.dtype, hidden: int = HIDDEN
) -> tuple[Tensor, ExpertsSpec, ExpertsWeights, Tensor, Tensor, Tensor]:
    """Return the arguments of `experts` for `count` rows. Most rows go to the first expert, and none to the second to
    last.
    """
    logits = randn(count, spec.num_experts, seed=6) + torch.tensor([2.0] + [0.0] * (spec.num_experts - 1))
    logits[:, -2] = -torch.inf
    chosen, gates = reference.route(logits, spec)
    x, shared = randn(count, hidden, dtype=dtype), randn(count, hidden, dtype=dtype, seed=7)
    return x, spec, weights_of(spec, hidden, dtype), chosen, gates, shared


def step_by_step(
    x: Tensor,
    spec: ExpertsSpec,
    weights: ExpertsWeights,
    chosen: Tensor,
    gates: Tensor,
    shared: Tensor,
    groups: int = 1,
) -> Tensor:
    """Compute `experts` with separate products of each expert's rows."""
    totals = [torch.zeros_like(x, dtype=torch.float32) for _ in range(groups)]
    gate_ups, downs = (w.to_dense().unflatten(0, (spec.num_experts, -1)) for w in (weights.gate_up, weights.down))
    for expert in range(spec.num_experts):
        mine, places = (chosen == expert).nonzero(as_tuple=True)
        sides = (side.clone() for side in gate_ups[expert].chunk(2))
        biases = (None, None) if weights.gate_up_bias is None else weights.gate_up_bias[expert].chunk(2)
        gate, up = (products.linear(x[mine], side, bias) for side, bias in zip(sides, biases, strict=True))
        made = products.lm_head(rows.gate_mul(gate, up, spec.activation), downs[expert].clone())
        if weights.down_bias is not None:
            made += weights.down_bias[expert].float()
        totals[expert * groups // spec.num_experts][mine] += gates[mine, places, None] * made
    while len(totals) > 1:
        totals = [left + right for left, right in zip(totals[::2], totals[1::2], strict=True)]
    return (totals[0] + shared.float()).to(x.dtype)


def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split every K into pieces."""
    for module in (experts, products):
        monkeypatch.setattr(module, "k_splits", lambda rows, columns: PIECES)


@pytest.mark.parametrize("pieces", [1, PIECES])
@pytest.mark.parametrize("tile", [*experts.TILES, NARROW_TILE], ids=str)
@thinned(lambda tile, pieces: pieces == PIECES and tile in (experts.TILES[0], experts.TILES[-1], NARROW_TILE))
def test_experts_have_the_bits_of_their_products_from_every_tile(
    tile: Tile, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts have one full tile and a partial tile, only a partial tile, or no tile."""
    monkeypatch.setattr(experts, "_tile", lambda *sizes: tile)
    if pieces > 1:
        cut(monkeypatch)
    asked = inputs(SPEC, tile.tokens + 9, torch.bfloat16)
    counts = torch.bincount(asked[3].flatten(), minlength=SPEC.num_experts).tolist()
    assert tile.tokens < counts[0] < 2 * tile.tokens and counts[3] == 0 and min(counts[1:3]) > 0, "premise"
    assert same_bits(experts.experts(*asked), step_by_step(*asked))


@both_dtypes
@pytest.mark.parametrize("spec,hidden", [(SPEC, HIDDEN), (BIASED, HIDDEN), (ODD, 35)], ids=["", "biased", "odd"])
@thinned(lambda dtype, **_: dtype == torch.bfloat16)
def test_experts(spec: ExpertsSpec, hidden: int, dtype: torch.dtype) -> None:
    asked = inputs(spec, 37, dtype, hidden)
    found, near = experts.experts(*asked), reference.experts(*asked)
    assert same_bits(found, step_by_step(*asked))
    # Three roundings to the dtype: gate and up, their product, and the result.
    assert (found.double() - near.double()).norm() <= 3 * torch.finfo(dtype).eps * near.double().norm()
    without = experts.experts(*asked[:-1])
    assert same_bits(without, step_by_step(*asked[:-1], torch.zeros_like(found)))


@pytest.mark.parametrize("groups", [2, 4, 8])
@thinned(lambda groups: groups == 4)
def test_the_sums_of_groups_are_added_as_a_balanced_tree(groups: int) -> None:
    """The sum is subtracted, as the shared expert's output, so that the rounding to bfloat16 hides no bit of it."""
    x, spec, weights, chosen, gates, _ = inputs(ExpertsSpec(8, 5, INNER, bias=True), 37, torch.bfloat16)
    shared = -experts.experts(x, spec, weights, chosen, gates)
    asked = x, spec, weights, chosen, gates, shared
    found = experts.experts(*asked, groups)
    assert same_bits(found, step_by_step(*asked, groups))
    assert not same_bits(found, experts.experts(*asked)), "premise: another order"
    alone = experts.experts(x[5:6], spec, weights, chosen[5:6], gates[5:6], shared[5:6], groups)
    assert same_bits(alone, found[5:6])


@both_dtypes
def test_parts_of_experts_add_up_to_the_whole(dtype: torch.dtype) -> None:
    check_parts_of_experts(Served(cast(Backend, backend), dtype))


@both_dtypes
def test_a_row_does_not_depend_on_the_others_or_on_how_many_there_are(dtype: torch.dtype) -> None:
    x, spec, weights, chosen, gates, shared = inputs(BIASED, 80, dtype)
    x[11] = torch.nan

    def compute(which: Any) -> Tensor:
        return experts.experts(x[which], spec, weights, chosen[which], gates[which], shared[which])

    whole = compute(slice(None))
    assert whole[11].isnan().all() and not whole[torch.arange(80) != 11].isnan().any()
    widths = set()
    for count in (1, 2, 13, 14, 27, 54, 80):
        assert same_bits(compute(slice(count)), whole[:count]), count
        widths.add(experts._tile(count * spec.top_k, spec.num_experts, HIDDEN, INNER).tokens)
    assert len(widths) == 4, "premise: every tile"
    order = torch.randperm(80, generator=torch.Generator().manual_seed(0))
    assert same_bits(compute(order), whole[order])
    for row in (0, 40, 79):
        assert same_bits(compute([row]), whole[[row]]), row
        assert same_bits(compute([row] * 20), whole[[row] * 20]), "all rows to the same experts"


def test_rows_may_lie_anywhere_in_memory_and_many_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x, spec, weights, chosen, gates, shared = inputs(ODD, 40, torch.bfloat16, hidden=35)
    expected, shapes, list_pairs = experts.experts(x, spec, weights, chosen, gates, shared), [], experts._list
    moved = [strided(each) for each in (x, chosen, gates, shared)]
    assert same_bits(experts.experts(moved[0], spec, weights, moved[1], moved[2], moved[3]), expected)
    monkeypatch.setattr(experts, "MOST_MADE", 4 * 2 * 35 * 16)
    monkeypatch.setattr(
        experts, "_list", lambda chosen, *sizes: shapes.append(len(chosen)) or list_pairs(chosen, *sizes)
    )
    assert same_bits(experts.experts(x, spec, weights, chosen, gates, shared), expected)
    assert shapes == [16, 16, 8]


def test_no_rows() -> None:
    x, spec, weights, chosen, gates, shared = inputs(SPEC, 0, torch.bfloat16)
    assert experts.experts(x, spec, weights, chosen, gates, shared).shape == (0, HIDDEN)
    assert [each.shape for each in experts.route(torch.empty(0, 5), SPEC)] == [(0, 2)] * 2


def made_of_ones(gates: list[float], shared: float) -> float:
    """Return the result for one row that goes to all experts with these gates. Each expert's output is 1."""
    count = len(gates)
    spec, zeros = ExpertsSpec(count, count, 16, bias=True), torch.zeros(count, 32, 16, dtype=torch.float16)
    biases = torch.zeros(count, 32, dtype=torch.float16), torch.ones(count, 16, dtype=torch.float16)
    weights = ExpertsWeights(zeros[0], None, zeros.flatten(0, 1), biases[0], zeros[:, :16].flatten(0, 1), biases[1])
    x, chosen = torch.ones(1, 16, dtype=torch.float16), torch.arange(count, dtype=torch.int32)[None]
    found = experts.experts(x, spec, weights, chosen, torch.tensor([gates]), torch.full_like(x, shared))
    assert len(found.unique()) == 1
    return found[0, 0].item()


def test_experts_are_added_by_ascending_id_and_the_shared_one_at_last() -> None:
    """In float32, 2**24 + 1 rounds to 2**24, so the sum shows the order."""
    assert made_of_ones([2.0**24, 1.0, -(2.0**24)], 0.0) == 0.0
    assert made_of_ones([1.0, 2.0**24, -(2.0**24)], 0.0) == 0.0
    assert made_of_ones([2.0**24, -(2.0**24), 1.0], 0.0) == 1.0
    assert made_of_ones([2.0**24, -(2.0**24)], 1.0) == 1.0


@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize("count", [1, 16, 17, 100])
def test_lists_have_every_pair_once_in_order(count: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases include more pairs, and more tiles of one expert, than the kernel lists at a time."""
    monkeypatch.setattr(experts, "_LISTED", 4)
    chosen = inputs(SPEC, count, torch.bfloat16, hidden=1)[3]
    lists = experts._list(chosen, SPEC.num_experts, width)
    flat = chosen.flatten()
    assert lists.pairs.tolist() == flat.argsort(stable=True).tolist()
    counts = torch.bincount(flat, minlength=SPEC.num_experts).tolist()
    expected, first = [], 0
    for expert, number in enumerate(counts):
        begins = range(first, first + number, width)
        expected += [[expert, begin, min(begin + width, first + number)] for begin in begins]
        first += number
    assert lists.counts.tolist() == [*counts, len(expected)]
    assert len(lists.tiles) >= len(expected) and lists.tiles[: len(expected)].tolist() == expected


@pytest.mark.parametrize("width", [1, 3, 16])
@pytest.mark.parametrize("num_experts", [1, 4, 7])
def test_no_more_tiles_are_needed_than_there_is_room_for(num_experts: int, width: int) -> None:
    """The limit is reached if all experts except one have a single pair."""
    for pairs in range(1, 40):
        begun = min(pairs, num_experts)
        fullest = [pairs - begun + 1] + [1] * (begun - 1)
        assert experts.most_tiles(pairs, num_experts, width) == sum(-(-n // width) for n in fullest)


SIZES = [(1, 1), (5, 5), (6, 2), (64, 6), (130, 8), (512, 10)]


@both_dtypes
@pytest.mark.parametrize("score", ["softmax_of_chosen", "softmax"])
@pytest.mark.parametrize("count,top_k", SIZES)
def test_route(count: int, top_k: int, score: Score, dtype: torch.dtype) -> None:
    """Rounded logits are often equal."""
    spec, logits = ExpertsSpec(count, top_k, 16, router=RouterSpec(score)), (2 * randn(9, count)).to(dtype)
    chosen, gates = experts.route(logits, spec)
    expected, near = reference.route(logits.double(), spec)
    assert chosen.dtype == torch.int32 and chosen.tolist() == expected.tolist()
    assert (
        gates.dtype == torch.float32
        and ((gates - near).abs() <= (count if score == "softmax" else top_k) * 4 * FLOAT32 * near).all()
    )
    again = experts.route(logits, spec, chosen)
    assert same_bits(again[0], chosen) and same_bits(again[1], gates)
    for row in (0, 8):
        alone = experts.route(logits[row : row + 1], spec)
        assert same_bits(alone[0][0], chosen[row]) and same_bits(alone[1][0], gates[row])


@pytest.mark.parametrize("score", ["softmax_of_chosen", "softmax"])
def test_gates_of_experts_that_are_chosen(score: Score) -> None:
    """The caller chooses the experts, which need not have the highest scores."""
    spec, logits = ExpertsSpec(40, 3, 16, router=RouterSpec(score)), randn(4, 40, dtype=torch.bfloat16)
    chosen = torch.tensor([[0, 1, 2], [37, 38, 39], [3, 20, 31], [0, 32, 39]], dtype=torch.int32)
    found, gates = experts.route(logits, spec, chosen)
    assert same_bits(found, chosen)
    near = reference.route(logits, spec, chosen)[1]
    assert chosen.tolist() != experts.route(logits, spec)[0].tolist(), "premise"
    assert ((gates - near).abs() <= 40 * 4 * FLOAT32 * near).all()


def test_equal_scores_choose_the_lower_id() -> None:
    """Zeros of either sign are equal, and so are infinities."""
    cases = [
        ([1.0, 1.0, 1.0, 1.0], [0, 1]),
        ([0.0, 1.0, 0.0, 0.0], [0, 1]),
        ([-1.0, -0.0, 0.0, 0.0], [1, 2]),
        ([-1.0, 0.0, -0.0, 0.0], [1, 2]),
        ([-2.0, -3.0, -2.0, -2.0], [0, 2]),
        ([-torch.inf, -torch.inf, -torch.inf, -2.0], [0, 3]),
        ([5.0, torch.inf, 6.0, torch.inf], [1, 3]),
    ]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        logits = torch.tensor([case for case, _ in cases]).to(dtype)
        assert experts.route(logits, ExpertsSpec(4, 2, 16))[0].tolist() == [ids for _, ids in cases]


@pytest.mark.parametrize("score", ["softmax_of_chosen", "softmax"])
def test_nan_reaches_only_the_gates_of_its_row(score: Score) -> None:
    spec, logits = ExpertsSpec(7, 3, 16, router=RouterSpec(score)), randn(5, 7, dtype=torch.bfloat16)
    logits[1, 4], logits[2, :], logits[3, 0] = torch.nan, torch.nan, -torch.tensor(torch.nan)
    chosen, gates = experts.route(logits, spec)
    assert gates[1:4].isnan().all() and not gates[[0, 4]].isnan().any()
    assert all(len(set(row)) == 3 and 0 <= min(row) <= max(row) < 7 and row == sorted(row) for row in chosen.tolist())
