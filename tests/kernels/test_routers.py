"""The op `route` for every kind of router, on all backends: choice and gates against their definition in float64, ties,
infinities and NaN, and gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from trueroll.kernels import reference
from trueroll.kernels.autograd import GradientOps
from trueroll.kernels.contract import Backend
from trueroll.kernels.specs import ExpertsSpec, RouterSpec

from .accuracy import check
from .backends import Served, for_served
from .inputs import randn, same_bits, stored

ROWS, COUNT, TOP_K = 16, 40, 6
_DEEPSEEK = RouterSpec("sigmoid", correction=True, groups=5, kept_groups=2, normed=True, eps=1e-20, scale=2.5)
ROUTERS = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v2": RouterSpec("softmax", groups=4, kept_groups=3, group_best=1, scale=16.0),
    "mistral4": RouterSpec("softmax", groups=4, kept_groups=2, normed=True, eps=1e-20),
    "minimax_m2": RouterSpec("sigmoid", correction=True, normed=True),
    "ernie4_5": RouterSpec("softmax", correction=True, normed=True, floor=0.75),
    "a large eps": RouterSpec("sigmoid", normed=True, eps=0.5, scale=0.25),
    "sigmoid alone": RouterSpec("sigmoid"),
    "softmax, scaled": RouterSpec("softmax_of_chosen", scale=3.0),
    "groups of eight": replace(_DEEPSEEK, groups=8, kept_groups=8),
}


def spec_of(router: RouterSpec, count: int = COUNT, top_k: int = TOP_K) -> ExpertsSpec:
    return ExpertsSpec(count, top_k, 16, router=router)


def correction_of(router: RouterSpec) -> Tensor | None:
    return 0.3 * randn(COUNT, seed=3) if router.correction else None


def scores_of(logits: Tensor, router: RouterSpec) -> np.ndarray:
    """Return scores in float64."""
    x = logits.double().numpy()
    if router.score == "sigmoid":
        return 1 / (1 + np.exp(-x))
    shares = np.exp(x - x.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def choose(ranks: np.ndarray, router: RouterSpec, top_k: int) -> list[int]:
    """Choose the experts of one row by sorting."""
    size = len(ranks) // router.groups
    groups = [sorted(ranks[i * size : (i + 1) * size], reverse=True) for i in range(router.groups)]
    sums = [sum(group[: router.group_best]) for group in groups]
    kept = sorted(range(router.groups), key=lambda i: -sums[i])[: router.kept_groups]
    allowed = [i for i in range(len(ranks)) if i // size in kept]
    return sorted(sorted(allowed, key=lambda i: -ranks[i])[:top_k])


def gates_of(scores: np.ndarray, router: RouterSpec) -> np.ndarray:
    """Return the gates for the scores of the chosen experts [M, top_k]."""
    total = scores.sum(1, keepdims=True)
    if router.score == "softmax_of_chosen":
        return router.scale * scores / total
    return router.scale * (scores / np.maximum(total + router.eps, router.floor) if router.normed else scores)


@for_served("name", [(name,) for name in ROUTERS], interpreted=len(ROUTERS))
def test_choice_and_gates(served: Served, name: str) -> None:
    router, correction = ROUTERS[name], correction_of(ROUTERS[name])
    logits, spec = 2 * randn(ROWS, COUNT, dtype=served.dtype), spec_of(router)
    scores = scores_of(logits, router)
    ranks = scores if router.ranks_scores else logits.double().numpy()
    ranks = ranks if correction is None else ranks + correction.double().numpy()
    expected = torch.tensor([choose(row, router, TOP_K) for row in ranks], dtype=torch.int32)
    experts, gates = served.ops.route(logits, spec, correction=correction)
    assert experts.equal(expected) and experts.dtype == torch.int32 and gates.dtype == torch.float32
    plain = served.ops.route(logits, spec_of(RouterSpec(router.score)))[0]
    assert plain.equal(experts) == (not router.correction and router.kept_groups == router.groups), "premise"
    given = randn(ROWS, COUNT, seed=1).argsort(1)[:, :TOP_K].sort(1).values.int()
    for chosen, found in ((expected, gates), (given, served.ops.route(logits, spec, given)[1])):
        exact = torch.from_numpy(gates_of(np.take_along_axis(scores, chosen.long().numpy(), 1), router))
        check(found, exact, 0, 60, exact)
    again = served.ops.route(logits, spec, experts)
    assert same_bits(again[0], experts) and same_bits(again[1], gates)
    for row in (0, ROWS - 1):
        alone = served.ops.route(logits[row : row + 1], spec, correction=correction)
        assert same_bits(alone[0][0], experts[row]) and same_bits(alone[1][0], gates[row])


# The experts that are chosen, two from two groups of two experts, and the logits.
TIES = {
    (0, 1): [0, 0, 0, 0, 0, 0, 0, 0],
    (4, 7): [0, 0, 0, 0, 1, 1, 0, 2],
    (2, 3): [0, 0, 1, 1, 1, 1, 0, 0],
    (2, 5): [2, -9, 1, 0, 0, 1, 3, -9],
    (1, 3): [-np.inf, 1, -np.inf, 1, -np.inf, 1, -np.inf, -np.inf],
    (0, 2): [np.inf, -np.inf, 0, 0, 0, 0, -np.inf, np.inf],
}


@for_served("best", [(1,), (2,)], interpreted=2)
def test_lower_groups_and_experts_win_among_equals(served: Served, best: int) -> None:
    """The score of a group is its best score, or the sum of its two best scores."""
    router = RouterSpec("sigmoid", groups=4, kept_groups=2, group_best=best)
    logits = torch.tensor(list(TIES.values()), dtype=torch.float32)
    experts, gates = served.ops.route(logits.to(served.dtype), spec_of(router, 8, 2))
    assert experts.tolist() == [choose(row, router, 2) for row in torch.sigmoid(logits).double().numpy()]
    assert [tuple(row) for row in experts.tolist()] == list(TIES) or best == 1
    assert not gates.isnan().any()


@for_served("name", [(name,) for name in ROUTERS], interpreted=2)
def test_a_row_with_nan_goes_to_experts_that_exist(served: Served, name: str) -> None:
    router, logits = ROUTERS[name], randn(4, COUNT, dtype=served.dtype)
    correction = correction_of(router)
    expected = served.ops.route(logits, spec_of(router), correction=correction)
    logits[1, 7], logits[2, :] = torch.nan, torch.nan
    for chosen in (None, expected[0]):
        experts, gates = served.ops.route(logits, spec_of(router), chosen, correction)
        assert gates[1:3].isnan().all() and same_bits(gates[::3], expected[1][::3])
        assert all(sorted({*row}) == row and 0 <= row[0] <= row[-1] < COUNT for row in experts.tolist())
        assert same_bits(experts[::3], expected[0][::3])


@for_served("wide", [(False,), (True,)], interpreted=2)
def test_a_product_with_float32_logits(served: Served, wide: bool) -> None:
    """`wide`: the weight is float32 in a decoder of another dtype."""
    dtype = torch.float32 if wide else served.dtype
    x, weight = randn(20, 144, dtype=served.dtype), randn(40, 144, dtype=dtype, seed=1)
    found = served.ops.wide_linear(x, stored(served.ops, weight))
    products = x.double() @ weight.double().T
    assert found.dtype == torch.float32
    assert ((found - products).abs() <= 144 * 2**-24 * (x.double().abs() @ weight.double().abs().T)).all()
    assert same_bits(served.ops.wide_linear(x[3:4], stored(served.ops, weight))[0], found[3])


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_gradients_of_gates(name: str, given: bool) -> None:
    """Logits beyond the range of e^x have gradients too."""
    router, logits = ROUTERS[name], 2 * randn(9, COUNT)
    logits[0, 3] = -200.0
    experts = reference.route(logits, spec_of(router), correction=correction_of(router))[0]
    chosen = torch.cat((experts[:1, :3], torch.tensor([[3, 38, 39]])), 1).sort().values.int() if given else None
    rows = logits[:1] if given else logits
    weights = randn(len(rows), TOP_K, seed=2).double()
    rows = rows.clone().requires_grad_()
    ids, gates = GradientOps(cast(Backend, reference)).route(rows, spec_of(router), chosen, correction_of(router))
    (gates * weights.float()).sum().backward()
    exact = rows.detach().double().requires_grad_()
    scores = exact.sigmoid() if router.score == "sigmoid" else exact.softmax(-1)
    scores = scores.gather(1, ids.long())
    if router.normed or router.score == "softmax_of_chosen":
        scores = scores / (scores.sum(-1, keepdim=True) + router.eps).clamp(min=router.floor)
    (scores * router.scale * weights).sum().backward()
    assert rows.grad is not None and exact.grad is not None and exact.grad.any()
    assert torch.allclose(rows.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
