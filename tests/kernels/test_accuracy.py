"""The results of the ops against float64 and torch's own ops. Draws and filters are compared with their definitions in
plain Python. Fused ops are tested in test_joined_ops.py, because they give the bits of their separate steps.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from matrix import thinned
from torch import Tensor

from trueroll.kernels import reference
from trueroll.kernels.contract import AttentionBatch, Backend
from trueroll.kernels.specs import Activation, ExpertsSpec, LayerNormSpec, NormSpec, RouterSpec, Score

from .accuracy import EPSILON, FLOAT32, check, check_mean, check_products
from .backends import Served, for_served
from .inputs import NORM, ZERO_CENTERED, Paged, filtered, make_experts, randn, same_bits, some_masks, stored

# The shapes of weights.
PRODUCTS = [(700, 576), (300, 1536), (513, 130)]


def check_against_torch(found: Tensor, torch_found: Tensor, expected: Tensor) -> None:
    """Check that errors are hardly larger than the errors of torch's op.

    For 16-bit results, the mean error may be 1.001 times as large as torch's, and the largest error 1.1 times. For
    float32 results, the factors are 1.05 and 3, because torch's order of summation depends on the machine.

    16-bit results: nearly all of the error comes from rounding the result, in trueroll and in torch. Measured on
    AVX-512, relative to torch: products and norms 1.000, activation 0.87, attention 0.97 to 0.98.

    float32 results: the error depends on the order in which terms are summed. Measured: products 0.76 to 0.86, norms
    0.79 to 0.94, activation 0.81 to 0.83, attention 0.96 to 0.98. The largest of several thousand errors varies more:
    0.45 to 1.0. Do not use this function for float32 results of a GPU, because a GPU computes sums and logarithms
    differently from torch on a CPU.
    """
    mean, most = (1.05, 3.0) if found.dtype == torch.float32 else (1.001, 1.1)
    error, torch_error = ((x.double() - expected).abs() for x in (found, torch_found))
    assert error.mean() <= mean * torch_error.mean(), f"{error.mean() / torch_error.mean():.3f} times as large"
    assert error.max() <= most * torch_error.max(), f"{error.max() / torch_error.max():.3f} times as large"


@pytest.mark.parametrize("n,k", PRODUCTS)
def test_linear(served: Served, n: int, k: int) -> None:
    ops, dtype = served.ops, served.dtype
    x, weight, bias = randn(64, k, dtype=dtype), randn(n, k, dtype=dtype, seed=1), randn(n, dtype=dtype, seed=2)
    packed = stored(ops, weight)
    exact = x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    check(ops.linear(x, packed), exact, 1, k, magnitude)
    check(ops.linear(x, packed, bias), exact + bias.double(), 2, k, magnitude)
    check(ops.lm_head(x, packed), exact, 1, k, magnitude)
    check_against_torch(ops.linear(x, packed), F.linear(x, weight), exact)


@pytest.mark.parametrize("n,k", PRODUCTS)
def test_lm_head(served: Served, n: int, k: int) -> None:
    x, weight = randn(64, k, dtype=served.dtype), randn(n, k, dtype=served.dtype, seed=1)
    found = served.ops.lm_head(x, stored(served.ops, weight))
    check_products(found, x, weight)
    if served.dtype == torch.float32:
        check_against_torch(found, F.linear(x, weight), x.double() @ weight.double().T)


@pytest.mark.parametrize("size", [16, 577, 4096])
def test_rmsnorm(served: Served, size: int) -> None:
    x, weight = randn(64, size, dtype=served.dtype), randn(size, dtype=served.dtype, seed=1)
    normed = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = normed * weight.double()
    check(served.ops.rmsnorm(x, weight, NORM), expected, 2, size / 2 + 8, expected.abs())
    centered = normed * (1 + weight.double())
    check(served.ops.rmsnorm(x, weight, ZERO_CENTERED), centered, 1, size / 2 + 9, centered.abs())
    # torch rounds once, after multiplying by the weight; with a weight of ones, both sides round once
    ones = torch.ones(size, dtype=served.dtype)
    check_against_torch(served.ops.rmsnorm(x, ones, NORM), F.rms_norm(x, (size,), ones, 1e-5), normed)


def test_rmsnorm_of_extremes(served: Served) -> None:
    """The root of the sum of squares is correct if float32 can hold that sum. `eps` prevents NaN for a row of zeros."""
    ones = torch.ones(48, dtype=served.dtype)
    for value in (0.0, 1e-4, 1e4):
        x = torch.full((2, 48), value, dtype=served.dtype)
        expected = x.double() / (x.double().pow(2) + 1e-6).sqrt()
        check(served.ops.rmsnorm(x, ones, NormSpec(1e-6)), expected, 1, 16, expected)


@pytest.mark.parametrize("size", [16, 577, 4608])
def test_layer_norm(served: Served, size: int) -> None:
    x = randn(64, size, dtype=served.dtype) * 3 + 5
    weight, bias = (randn(size, dtype=served.dtype, seed=seed) for seed in (1, 2))
    norm = LayerNormSpec(1e-5)
    expected = F.layer_norm(x.double(), (size,), weight.double(), bias.double(), 1e-5)
    # The mean is several times the deviation, so its rounding shows.
    magnitude = weight.double().abs() * (x.double().abs() + 5) + bias.double().abs()
    check(served.ops.layer_norm(x, weight, bias, norm), expected, 1, size / 2 + 9, magnitude)
    torch_found = F.layer_norm(x, (size,), weight, bias, 1e-5)
    check_against_torch(served.ops.layer_norm(x, weight, bias, norm), torch_found, expected)


def test_gelu(served: Served) -> None:
    special = [0.0, 1e-3, -1e-3, 1.0, -1.0, 5.0, -5.0, 20.0, -20.0, 6e4, -6e4]
    gate = torch.cat((torch.tensor(special), randn(50) * 4)).to(served.dtype)
    up = torch.ones_like(gate)
    # 1 + erf(x) cancels for negative x.
    check(served.ops.gate_mul(gate, up, "gelu"), F.gelu(gate.double()), 1, 8, gate.double().abs().clamp(max=40))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "sigmoid"])
def test_activation(served: Served, activation: Activation) -> None:
    special = [0.0, 1e-3, -1e-3, 20.0, -20.0, 87.0, -87.0, 89.0, -88.0, 104.0, -104.0, 6e4, -6e4]
    gate = torch.cat((torch.tensor(special), randn(50) * 4)).to(served.dtype)
    up = randn(len(gate), seed=1).clamp(-1, 1).to(served.dtype)
    slope = gate.double()
    if activation == "gelu_tanh":
        slope = 2 * math.sqrt(2 / math.pi) * (slope + 0.044715 * slope**3)
    numerator = 1.0 if activation == "sigmoid" else gate.double()
    expected = numerator / (1 + torch.exp(-slope)) * up.double()
    # The cubic term has a rounding error, which causes a proportional error of the exponential.
    size = expected.abs() * (1 + slope.abs().clamp(max=110) if activation == "gelu_tanh" else 1)
    check(served.ops.gate_mul(gate, up, activation), expected, 1, 8, size)


def test_clamped_activation(mixing: Served) -> None:
    special = [0.0, 1e-3, -1e-3, 6.9, 7.0, 7.1, -6.9, -7.1, 20.0, -20.0, -52.0, -60.0, 6e4, -6e4]
    gate, up = (torch.cat((torch.tensor(special), randn(50, seed=seed) * 4)).to(mixing.dtype) for seed in (0, 1))
    up = torch.cat((up[20:], up[:20]))
    wide = gate.double().clamp(max=7)
    raised = up.double().clamp(-7, 7) + 1
    expected = wide / (1 + torch.exp(-1.702 * wide)) * raised
    # The rounding of its argument causes an error of the exponential. Adding 1 also rounds, visibly if the sum cancels.
    size = (
        expected.abs() * (1 + 1.702 * wide.abs().clamp(max=110)) + (expected / raised.where(raised != 0, 1)).abs() * 7
    )
    check(mixing.ops.gate_mul(gate, up, "clamped_silu"), expected, 1, 8, size)


@pytest.mark.parametrize("score", ["softmax_of_chosen", "softmax"])
def test_route(mixing: Served, score: Score) -> None:
    spec = ExpertsSpec(num_experts=40, top_k=6, intermediate_size=16, router=RouterSpec(score))
    logits = randn(64, 40, dtype=mixing.dtype) * 3
    chosen = randn(64, 40, seed=1).argsort(1)[:, :6].sort(1).values.int()
    best = torch.sort(logits, descending=True, stable=True).indices[:, :6].sort(1).values.int()
    for expected, replayed in ((best, None), (chosen, chosen)):
        experts, gates = mixing.ops.route(logits, spec, replayed)
        assert torch.equal(experts, expected)
        scores = logits.double().gather(1, experts.long())
        exact = logits.double().softmax(1).gather(1, experts.long()) if score == "softmax" else scores.softmax(1)
        check(gates, exact, 0, 50, exact)


def test_experts(mixing: Served) -> None:
    """Compare with each expert's output in float64, computed from inner rows that are rounded as the contract says."""
    spec = ExpertsSpec(num_experts=6, top_k=3, intermediate_size=48, bias=True)
    weights, x = make_experts(mixing, spec), randn(64, 144, dtype=mixing.dtype)
    shared = randn(64, 144, dtype=mixing.dtype, seed=8)
    experts, gates = mixing.ops.route(randn(64, 6, dtype=mixing.dtype, seed=7), spec)
    gate_up, down = (w.to_dense().double().unflatten(0, (6, -1)) for w in (weights.gate_up, weights.down))
    assert weights.gate_up_bias is not None and weights.down_bias is not None
    expected, magnitude = shared.double(), shared.double().abs()
    for i in range(3):
        chosen = experts[:, i].long()
        inner = (gate_up[chosen] @ x.double()[:, :, None])[..., 0] + weights.gate_up_bias.double()[chosen]
        gate, up = inner.chunk(2, 1)
        active, gates_i = gate / (1 + torch.exp(-gate)) * up, gates[:, i, None].double()
        expected = expected + gates_i * (
            (down[chosen] @ active[:, :, None])[..., 0] + weights.down_bias.double()[chosen]
        )
        sizes = gate.abs().clamp(min=1) * up.abs().clamp(min=1)
        magnitude = magnitude + gates_i * ((down[chosen].abs() @ sizes[:, :, None])[..., 0] + 1)
    # Gate, up and the activation are rounded to the dtype, and summed in float32.
    terms = 4 * EPSILON[mixing.dtype] / FLOAT32 + 300
    check(mixing.ops.experts(x, spec, weights, experts, gates, shared), expected, 1, terms, magnitude)


def test_gate_up_against_torch(served: Served) -> None:
    hidden = randn(64, 576, dtype=served.dtype)
    gate, up = ((randn(300, 576, seed=seed) / 8).to(served.dtype) for seed in (1, 2))
    products = [hidden.double() @ weight.double().T for weight in (gate, up)]
    expected = products[0] / (1 + torch.exp(-products[0])) * products[1]
    found = served.ops.gate_up(hidden, stored(served.ops, gate), stored(served.ops, up), "silu")
    check_against_torch(found, F.silu(F.linear(hidden, gate)) * F.linear(hidden, up), expected)


def test_rotation(ops: Backend) -> None:
    positions, inv_freq = torch.tensor([0, 1, 1000, 60000]), 10.0 ** -torch.arange(4.0)
    angles = (positions.float()[:, None] * inv_freq).double()
    cosines, sines = ops.rotation(positions, inv_freq, 1.5)
    check(cosines, angles.cos() * 1.5, 2, 4, torch.ones_like(angles))
    check(sines, angles.sin() * 1.5, 2, 4, torch.ones_like(angles))


def exact_attention(
    paged: Paged, i: int, window: int | None = None, soft_cap: float | None = None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return three results in float64: the attention of sequence i, the attention with absolute values, and the largest
    scaled |query| |key|.
    """
    q, k, v = (x[i].double().transpose(0, 1) for x in (paged.q, paged.k, paged.v))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    places = torch.arange(q.shape[1])
    hidden = places >= paged.ends[: len(places), None]
    if window is not None:
        hidden |= places <= places[:, None] - window
    scores = q @ k.transpose(1, 2) * paged.size**-0.5
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(places), 1)), -1)
    weights = scores.softmax(-1)[..., : len(places)]
    magnitude = (q.abs() @ k.abs().transpose(1, 2)).max() * paged.size**-0.5
    return (weights @ v).transpose(0, 1), (weights @ v.abs()).transpose(0, 1), magnitude


@for_served("heads,kv_heads,size", [(9, 1, 16), (6, 2, 64), (3, 3, 96), (4, 2, 80)], interpreted=1)
def test_attention(served: Served, heads: int, kv_heads: int, size: int) -> None:
    check_attention(served, Paged(served, [300], heads, kv_heads, size))


# A window that is off by one fails, because windows of 1 and 2 leave few keys, each with a large weight.
@for_served(
    "window,soft_cap",
    [(140, 1.5), (1, None), (2, None), (100, None), (128, None), (129, None), (None, 1.5)],
    interpreted=1,
)
def test_attention_with_window_and_soft_cap(served: Served, window: int | None, soft_cap: float | None) -> None:
    check_attention(served, Paged(served, [300], window=window, soft_cap=soft_cap))


@for_served("window,spans", [(None, [(0, 300)]), (None, [(3, 40), (120, 290)]), (60, [(100, 180)])], interpreted=1)
def test_attention_of_tokens_that_see_all_of_their_span(
    served: Served, window: int | None, spans: list[tuple[int, int]]
) -> None:
    check_attention(served, Paged(served, [300], window=window, spans=spans))


@pytest.mark.parametrize("window", [None, 1, 100])
def test_attention_with_sinks(mixing: Served, window: int | None) -> None:
    paged = Paged(mixing, [300], window=window, sinks=True)
    check_attention(mixing, paged)
    for sink, expected in ((-1e4, Paged(mixing, [300], window=window).whole(0)), (1e4, torch.zeros_like(paged.q[0]))):
        paged.attention["sinks"] = torch.full((6,), sink, dtype=mixing.dtype)
        assert same_bits(paged.whole(0), expected), "a sink takes nothing, or everything"


def check_attention(served: Served, paged: Paged) -> None:
    expected, magnitude, scores = exact_attention(paged, 0, **paged.attention)
    size = paged.size
    # A weight has the error of its score and its own rounding to the dtype. The divisor, a sum of weights, has the same
    # errors.
    weight_error = (size + 8) * scores * FLOAT32 + EPSILON[served.dtype] + 300 * FLOAT32
    check(paged.whole(0), expected, 1, 2.1 * float(weight_error) / FLOAT32, magnitude)


@pytest.mark.parametrize("heads,kv_heads,size,length", [(6, 2, 64, 300), (2, 2, 128, 700)])
def test_attention_against_torch(quick: Served, heads: int, kv_heads: int, size: int, length: int) -> None:
    paged = Paged(quick, [length], heads, kv_heads, size)
    q, k, v = (x[0].transpose(0, 1)[None] for x in (paged.q, paged.k, paged.v))
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    torch_found = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
    check_against_torch(paged.whole(0), torch_found, exact_attention(paged, 0)[0])


@pytest.mark.parametrize("size", [64, 80])
def test_attention_with_huge_scores(quick: Served, size: int) -> None:
    """With huge scores, the softmax returns one value unchanged: the last value that the query sees, or the first."""
    unit = 200.0 if quick.dtype == torch.float16 else 1e13
    for sign in (1, -1):
        paged = Paged(quick, [300], size=size)
        paged.q[0].zero_()[..., 0] = unit
        paged.k[0].zero_()[..., 0] = (torch.arange(1, 301)[:, None] * sign * unit).to(quick.dtype)
        paged.write(0)
        expected, _, scores = exact_attention(paged, 0)
        assert scores > (1e6 if quick.dtype == torch.float16 else 1e27)
        check(paged.whole(0), expected, 1, 8, expected.abs())


def test_attention_shows_nan_to_every_later_query(quick: Served) -> None:
    for place in (0, 15, 16, 127, 128, 150, 199):
        for side in ("k", "v"):
            paged = Paged(quick, [200])
            getattr(paged, side)[0][place] = torch.nan
            paged.write(0)
            assert paged.whole(0)[place:].isnan().all(), f"{side} of token {place}"


def test_attention_of_an_old_token_ignores_later_ones(quick: Served) -> None:
    paged = Paged(quick, [200])
    before = paged.whole(0)
    paged.k[0][150] += 1
    paged.write(0)
    after = paged.whole(0)
    assert same_bits(after[:150], before[:150])
    assert (after[150:] != before[150:]).flatten(1).any(1).all(), "every later token sees the change"


def test_query_rows_may_come_in_any_sequence_order(served: Served) -> None:
    paged = Paged(served, [40, 20])
    batch = AttentionBatch([0, 20, 60], [20, 40], paged.tables[[1, 0]])
    q = torch.cat((paged.q[1], paged.q[0]))
    out = served.ops.paged_attention(q, paged.k_cache, paged.v_cache, batch, paged.size**-0.5)
    assert same_bits(out[:20], paged.whole(1)) and same_bits(out[20:], paged.whole(0))


@pytest.mark.parametrize("vocab_size", [17, 1001, 49153])
@pytest.mark.parametrize("spread", [1, 8])
def test_log_probs(quick_ops: Backend, vocab_size: int, spread: int) -> None:
    logits = randn(64, vocab_size) * spread
    ids = torch.arange(64) * 769 % vocab_size
    expected = logits.double().log_softmax(-1).gather(1, ids[:, None])[:, 0]
    found = quick_ops.log_probs(logits, ids)
    # The relative error of the sum of exponentials is the absolute error of its logarithm.
    check(found, expected, 3, vocab_size / 16 + 16, torch.ones_like(expected))
    # With rounding to nearest, the error of n additions is at most about sqrt(n) roundings.
    check_mean(found, expected, 3 * expected.abs() + math.sqrt(vocab_size / 16) + 16)


def test_log_probs_of_several_tokens(ops: Backend) -> None:
    logits, ids = randn(5, 1001) * 4, torch.arange(5 * 130).view(5, 130) * 31 % 1001
    logits[2, ids[2, :3]] = -torch.inf
    found, columns = ops.log_probs(logits, ids), [0, 1, 2, 31, 32, 63, 64, 127, 128, 129]
    assert torch.equal(found[:, columns], torch.stack([ops.log_probs(logits, ids[:, i]) for i in columns], 1))
    assert (found == -torch.inf).sum() == 3


def test_log_probs_of_extremes(ops: Backend) -> None:
    rows = randn(8, 1001)
    rows[0, 1:] = -torch.inf
    rows[1, 600:] = -torch.inf
    rows[2, 3], rows[3, 3] = 1e30, -1e30
    rows[4], rows[5] = 3e38, 3e38 * torch.cat((torch.ones(1), -torch.ones(1000)))
    rows[6], rows[7] = 0.0, torch.arange(1001.0) - 500
    for token in (0, 3, 599, 600, 1000):
        ids = torch.full((8,), token)
        expected = rows.double().log_softmax(-1)[:, token]
        found = ops.log_probs(rows, ids)
        endless = expected < -torch.finfo(torch.float32).max
        assert torch.equal(found[endless], torch.full((int(endless.sum()),), -torch.inf))
        check(found[~endless], expected[~endless], 3, 80, torch.ones(int((~endless).sum())))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_without_a_distribution_has_no_log_prob(ops: Backend, value: float) -> None:
    for place in (0, 15, 16, 511, 512, 1000):
        logits = randn(1, 1001)
        logits[0, place] = value
        for token in (place, 7):
            found = ops.log_probs(logits, torch.tensor([token]))
            assert found.isnan() or (value == torch.inf and token != place and found == -torch.inf)
    assert ops.log_probs(torch.full((1, 40), -torch.inf), torch.tensor([3])).isnan()


def best_tokens(row: Tensor, k: int) -> list[int]:
    """Return the best tokens, highest logit first, the lower id first among equal logits."""
    logits = row.tolist()
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:k]


def rows_with_ties(vocab_size: int) -> Tensor:
    """Return rows with ties. The last two rows keep three tokens and one."""
    rows = (randn(6, vocab_size) * 16).round() / 8
    rows[4:] = rows[4:].where(torch.arange(vocab_size) % 331 == 7, -torch.inf)
    rows[5] = rows[5].where(torch.arange(vocab_size) == 7, -torch.inf)
    return rows


@thinned(lambda vocab_size, k, ops=None: vocab_size <= 2100 or ops is None or not ops.interpreted)  # None on a GPU
@pytest.mark.parametrize("vocab_size,k", [(17, 17), (50, 50), (1001, 1), (2100, 8), (2100, 0), (152064, 8)])
def test_token_statistics(ops: Backend, vocab_size: int, k: int) -> None:
    rows, ids = rows_with_ties(vocab_size), torch.arange(6) * 769 % vocab_size
    found = ops.token_statistics(rows, ids, k)
    assert [x.dtype for x in found] == [torch.float32, torch.float32, torch.int64, torch.float32]
    assert found.top_token_ids.tolist() == [best_tokens(row, k) for row in rows]
    assert same_bits(found.logprobs, ops.log_probs(rows, ids)), "the bits of `log_probs`"
    for i in range(k):
        assert same_bits(found.top_logprobs[3:5, i], ops.log_probs(rows[3:5], found.top_token_ids[3:5, i])), i
    expected = torch.special.entr(rows.double().softmax(-1)).sum(-1)
    check(found.entropy, expected, 3, vocab_size / 16 + 16, 1 + expected)
    assert found.entropy[5] == 0, "there is one token"


def test_tokens_without_a_probability_are_listed_last(ops: Backend) -> None:
    rows = rows_with_ties(1001)
    assert rows[4].isfinite().sum() == 4 and rows[5].isfinite().sum() == 1
    found = ops.token_statistics(rows[4:], torch.tensor([7, 7]), 8)
    assert found.top_token_ids[0, 4:].tolist() == [0, 1, 2, 3] and found.top_token_ids[1].tolist() == [7, *range(7)]
    assert found.top_logprobs[0, 4:].eq(-torch.inf).all() and found.top_logprobs[0, :4].isfinite().all()


def test_equal_logits_are_listed_by_their_ids(ops: Backend) -> None:
    rows = torch.zeros(2, 2100)
    rows[1, [3, 4, 600, 2047, 2048, 2099]] = 1.0
    found = ops.token_statistics(rows, torch.tensor([0, 0]), 8)
    assert found.top_token_ids.tolist() == [[*range(8)], [3, 4, 600, 2047, 2048, 2099, 0, 1]]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 600, 1000])
def test_a_row_without_a_distribution_has_no_statistics(ops: Backend, value: float, place: int) -> None:
    rows = randn(2, 1001)
    rows[1, place] = value
    found = ops.token_statistics(rows, torch.tensor([3, 3]), 4)
    assert found.entropy[1].isnan() and found.logprobs[1].isnan()
    assert found.entropy[0].isfinite() and found.top_logprobs[0].isfinite().all()


@pytest.mark.parametrize("vocab_size", [17, 49153])
@pytest.mark.parametrize("spread", [0.01, 1, 8, 300])
def test_entropy(quick_ops: Backend, vocab_size: int, spread: float) -> None:
    logits = randn(16, vocab_size) * spread
    expected = torch.special.entr(logits.double().softmax(-1)).sum(-1)
    found = quick_ops.token_statistics(logits, torch.zeros(16, dtype=torch.int64), 0).entropy
    check(found, expected, 3, vocab_size / 16 + 16, 1 + expected)
    assert (found >= 0).all()


def test_philox_known_answers() -> None:
    """Check the published test vectors of Philox4x32-10 that this counter layout can express."""
    words = reference.philox(torch.tensor([0]), torch.tensor([0]), 4)[0].tolist()
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def philox_in_python(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b & 0xFFFFFFFF, (a >> 32) ^ counter[3] ^ key[1], a & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def test_philox_against_plain_integers() -> None:
    for seed, position in ((2**64 - 3, 2**40 + 7), (2**63, 1), (12345678901234567, 2**31)):
        signed = seed - 2**64 if seed >= 2**63 else seed
        words = reference.philox(torch.tensor([signed]), torch.tensor([position]), 11)[0].tolist()
        key = [seed & 0xFFFFFFFF, seed >> 32]
        expected = [philox_in_python([i, position & 0xFFFFFFFF, position >> 32, 0], key) for i in range(3)]
        assert words == sum(expected, [])[:11]


@pytest.mark.parametrize("vocab_size", [2, 17, 1001])
def test_sample_takes_the_best_of_the_defined_noise(quick_ops: Backend, vocab_size: int) -> None:
    """The drawn token has the highest logit + noise in float64, or is within float32 rounding of the highest."""
    rows = 2000
    logits = randn(rows, vocab_size) * 3
    seeds, positions = torch.arange(rows) * 2**54 - 77, torch.arange(rows) * 2**31 % 2**62
    uniform = (reference.philox(seeds, positions, vocab_size).double() + 0.5) * 2.0**-32
    values = logits.double() - torch.log(-torch.log1p(-uniform))
    best, second = values.topk(2).values.unbind(-1)
    # In this test noise and logits stay below 64, where one unit in the last place is 2**-18.
    rounding = 2.0**-17
    assert values.abs().max() < 64 and (best - second > rounding).double().mean() > 0.99
    found = quick_ops.sample(logits, seeds, positions)
    assert (values.gather(1, found[:, None])[:, 0] >= best - rounding).all()


def test_sampling_follows_the_softmax(quick_ops: Backend) -> None:
    """Pearson's chi-square over 20,000 draws stays below its 99.9% quantile for 15 degrees of freedom."""
    logits = randn(16, seed=4).mul(1.5).expand(20000, -1)
    drawn = quick_ops.sample(logits.contiguous(), torch.arange(20000) * 7919, torch.arange(20000) % 50)
    expected = logits[0].softmax(0) * 20000
    assert expected.min() > 5, "the test is valid only if every cell is expected often enough"
    chi_square = ((drawn.bincount(minlength=16) - expected) ** 2 / expected).sum()
    assert chi_square < 37.7


def test_neighbouring_seeds_and_positions_are_independent(quick_ops: Backend) -> None:
    logits = torch.zeros(2000, 2)
    seeds, positions = torch.arange(2000), torch.zeros(2000, dtype=torch.int64)
    for a, b in ((seeds, positions), (positions, seeds)):
        heads = quick_ops.sample(logits, a, b)
        flips = (heads[1:] != heads[:-1]).sum()
        assert abs(heads.sum() - 1000) < 4 * math.sqrt(500) and abs(flips - 1000) < 4 * math.sqrt(500)


def test_masked_tokens_are_never_drawn(quick_ops: Backend) -> None:
    for vocab_size, kept in ((9, 4), (1001, 0), (1001, 700), (1001, 1000)):
        logits = torch.full((500, vocab_size), -torch.inf)
        logits[:, kept] = -1e4
        assert (quick_ops.sample(logits, torch.arange(500), torch.arange(500)) == kept).all()


@pytest.mark.parametrize("vocab_size", [1, 32, 1001, 4100])
def test_masks(ops: Backend, vocab_size: int) -> None:
    """Bit t % 32 of word t // 32 allows token t. Rows without a mask stay unchanged."""
    logits, rows = randn(6, vocab_size, seed=4), torch.tensor([4, 0, 5])
    logits[0], logits[5, ::2] = torch.nan, torch.inf
    masks = some_masks(3, vocab_size)
    words = (masks.long() & 0xFFFFFFFF).tolist()
    expected = logits.clone()
    for row, mask in zip(rows.tolist(), words, strict=True):
        expected[row, [t for t in range(vocab_size) if not mask[t // 32] >> t % 32 & 1]] = -torch.inf
    ops.mask_logits(logits, rows, masks)
    assert same_bits(logits, expected)


def filter_in_python(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Return the ids that the filter keeps, out of the ids with a logit above -inf."""
    order = sorted((i for i, x in enumerate(logits) if x > -math.inf), key=lambda i: (-logits[i], i))
    order = order[: max(top_k, 1)] if top_k >= 0 else order
    weights = [math.exp(logits[i] - logits[order[0]]) for i in order]
    total, kept, mass = math.fsum(weights), set(), 0.0
    for i, weight in zip(order, weights, strict=True):
        if not kept or ((top_p >= 1 or mass < top_p * total) and weight >= min_p):
            kept.add(i)
        mass += weight
    return kept


def stays(filtered: Tensor) -> Tensor:
    return filtered != -torch.inf


def rows_to_filter() -> Tensor:
    """Return rows that are random, all equal, with -inf, with one token left, and full of ties."""
    rows = randn(9, 40, seed=9) * 2
    rows[5:] = rows[5:].round()
    rows[1], rows[2, ::3], rows[3, 1:], rows[8, 5:] = 0.0, -torch.inf, -torch.inf, -torch.inf
    return rows


@pytest.mark.parametrize("top_k", [-1, 1, 3, 40, 100, 2**40])
@pytest.mark.parametrize("top_p", [1.0, 0.71, 1e-9])
@pytest.mark.parametrize("min_p", [0.0, 0.2, 1.0])
def test_filters_against_plain_python(ops: Backend, top_k: int, top_p: float, min_p: float) -> None:
    logits = rows_to_filter()
    filters = torch.full((9,), top_k), torch.full((9,), top_p), torch.full((9,), min_p)
    found = filtered(ops, logits, *filters)
    for i, (row, kept) in enumerate(zip(logits.tolist(), stays(found), strict=True)):
        assert set(kept.nonzero().flatten().tolist()) == filter_in_python(row, top_k, top_p, min_p), f"row {i}"
    assert same_bits(found[stays(found)], logits[stays(found)])


def test_filters_of_a_large_vocabulary(ops: Backend) -> None:
    """The mask equals the reference's, for many ties, every kind of filter, and different filters in each row."""
    logits = (randn(24, 1001, seed=3) * 8).round() / 4
    rows = torch.arange(24)
    filters = torch.tensor([-1, 1, 40, 900])[rows % 4], torch.tensor([0.95, 0.5, 1e-9])[rows % 3], rows % 2 * 0.05
    kept = stays(reference.filter_logits(logits.clone(), *filters))
    assert len(kept.sum(1).unique()) > 6
    assert torch.equal(stays(filtered(ops, logits, *filters)), kept)


def spread_rows() -> Tensor:
    """Return flat rows, steep rows, and rows with equal, huge and far apart logits."""
    rows = randn(8, 9000, seed=5)
    rows[1:3] = rows[1:3] * torch.tensor([[0.01], [20.0]])
    rows[3] = torch.where(rows[3] > 0, 0.0, -0.0)
    rows[4] *= 1e36
    rows[5, 1:] -= 500.0
    rows[6, ::2] = -torch.inf
    rows[7] = (rows[7] * 300).round()
    return rows


@pytest.mark.parametrize("top_k,top_p,min_p", [(-1, 0.9, 0.0), (-1, 0.999, 0.0), (700, 0.7, 0.0), (-1, 1.0, 0.02)])
def test_filters_keep_the_first_logits_in_order(quick_ops: Backend, top_k: int, top_p: float, min_p: float) -> None:
    logits = spread_rows()
    filters = torch.full((8,), top_k), torch.full((8,), top_p), torch.full((8,), min_p)
    kept = stays(filtered(quick_ops, logits, *filters)).sum(1)
    ordered, ids = logits.double().sort(dim=-1, descending=True, stable=True)
    expected = logits.clone()
    for row, count in enumerate(kept.tolist()):
        expected[row, ids[row, count:]] = -torch.inf
    assert same_bits(filtered(quick_ops, logits, *filters), expected)
    counts = [
        [len(filter_in_python(row, top_k, top_p * f, min_p / f)) for row in ordered.tolist()] for f in (0.9999, 1.0001)
    ]
    least, most = torch.tensor(counts)
    assert ((least <= kept) & (kept <= most)).all() and kept.max() > 256 and kept.min() == 1


@pytest.mark.parametrize("vocab_size", [17, 49153])
def test_filters_that_are_off_drop_nothing(ops: Backend, vocab_size: int) -> None:
    logits = torch.cat((torch.zeros(2, vocab_size), randn(6, vocab_size)))
    off = torch.full((8,), -1), torch.ones(8), torch.zeros(8)
    assert same_bits(filtered(ops, logits, *off), logits)


def test_no_filter_drops_the_best_token(ops: Backend) -> None:
    logits = rows_to_filter()
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (-1, 0.0, 0.0), (-1, 1.0, 2.0)):
        filters = torch.full((9,), top_k), torch.full((9,), top_p), torch.full((9,), min_p)
        kept = stays(filtered(ops, logits, *filters))
        assert kept.gather(1, logits.argmax(-1, keepdim=True)).all(), (top_k, top_p, min_p)


@pytest.mark.parametrize("broken", [0, 7, 39])
def test_filters_never_turn_a_row_with_nan_into_a_good_one(ops: Backend, broken: int) -> None:
    """Filters leave a row with NaN unchanged, so any draw from the row shows the fault."""
    logits = randn(5, 40, seed=9)
    logits[:, broken] = torch.nan
    filters = (
        torch.tensor([-1, 3, -1, -1, 2]),
        torch.tensor([1.0, 1.0, 0.7, 1.0, 0.5]),
        torch.tensor([0, 0, 0, 0.2, 0.1]),
    )
    assert same_bits(filtered(ops, logits, *filters), logits)
