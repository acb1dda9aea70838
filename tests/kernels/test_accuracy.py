"""What the ops compute, against float64; how sampling and filters are defined, against plain Python."""

import math

import pytest
import torch

from trueroll.kernels import reference as ops
from trueroll.kernels.ops import AttentionBatch

from .test_contract import Paged, randn

EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


def check(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, magnitude: torch.Tensor, terms: int) -> None:
    """Half a unit in the last place of the result for the final rounding, and float32 rounding for each summed term."""
    bound = EPSILON[dtype] * 4 * expected.abs() + (terms + 8) * 2.0**-24 * magnitude
    error = (found.double() - expected).abs()
    assert (error <= bound).all(), f"largest excess {(error - bound).max():.3g}"


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
def test_linear(dtype: torch.dtype) -> None:
    x, weight, bias = randn(40, 576, dtype=dtype), randn(700, 576, dtype=dtype, seed=1), randn(700, dtype=dtype, seed=2)
    exact = x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    check(ops.linear(x, weight), exact, dtype, magnitude, 576)
    check(ops.linear(x, weight, bias), exact + bias.double(), dtype, magnitude, 576)
    check(ops.lm_head(x, weight), exact, torch.float32, magnitude, 576)


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
def test_norms_and_activation(dtype: torch.dtype) -> None:
    x, residual, weight = (randn(*s, dtype=dtype, seed=i) for i, s in enumerate([(9, 576), (9, 576), (576,)]))
    total = (x + residual).double()
    normed, kept = ops.add_rmsnorm(x, residual, weight, 1e-5)
    expected = total / (total.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert torch.equal(kept, x + residual)
    check(normed, expected, dtype, expected.abs(), 16)
    gate, up = x.double().chunk(2, 1)
    expected = gate / (1 + torch.exp(-gate)) * up
    check(ops.silu_mul(x), expected, dtype, expected.abs(), 16)


def test_rope_rotates_pairs_by_absolute_angles() -> None:
    x, positions, inv_freq = randn(4, 2, 8), torch.tensor([0, 1, 1000, 60000]), 10.0 ** -torch.arange(4.0)
    angles = (positions.float()[:, None] * inv_freq).double()[:, None]
    low, high = x.double().chunk(2, -1)
    rotated = torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), -1)
    found = ops.rope(x, positions, inv_freq, 1.5)
    check(found, rotated * 1.5, torch.float32, torch.full_like(rotated, 10.0), 8)
    assert torch.equal(ops.rope(x, positions, inv_freq, 1.0)[0], x[0]), "position 0 is not rotated"


@pytest.mark.parametrize("heads,kv_heads,size", [(6, 2, 64), (9, 1, 16), (3, 3, 96)])
def test_attention_against_float64(heads: int, kv_heads: int, size: int) -> None:
    paged = Paged([300], heads, kv_heads, size, block_size=300)
    k, v = (
        c[paged.tables[0, 0]].double().repeat_interleave(heads // kv_heads, 1) for c in (paged.k_cache, paged.v_cache)
    )
    q = paged.q[0].double()
    scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
    scores = scores.masked_fill(torch.ones(300, 300).triu(1).bool(), -torch.inf)
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    check(paged.whole(0), expected, torch.float32, torch.full_like(expected, 4.0), 300)


def test_attention_of_an_old_token_ignores_later_ones() -> None:
    paged = Paged([200])
    before = paged.whole(0)
    paged.k_cache.flatten(0, 1)[paged.tables[0, 150 // 16] * 16 + 150 % 16] += 1
    after = paged.whole(0)
    assert torch.equal(after[:150], before[:150])
    assert (after[150:] != before[150:]).flatten(1).any(1).all(), "every later token sees the change"


def test_philox_known_answers() -> None:
    """The published test vectors of Philox4x32-10 that this counter layout can express."""
    words = ops.philox(torch.tensor([0]), torch.tensor([0]), 4)[0].tolist()
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
        words = ops.philox(torch.tensor([signed]), torch.tensor([position]), 11)[0].tolist()
        key = [seed & 0xFFFFFFFF, seed >> 32]
        expected = [philox_in_python([i, position & 0xFFFFFFFF, position >> 32, 0], key) for i in range(3)]
        assert words == sum(expected, [])[:11]


def test_sampling_follows_the_softmax() -> None:
    """Pearson's chi-square over 20,000 draws stays below its 99.9% quantile for 15 degrees of freedom."""
    logits = randn(16, seed=4).mul(1.5).expand(20000, -1)
    drawn = ops.sample(logits.contiguous(), torch.arange(20000) * 7919, torch.arange(20000) % 50)
    expected = logits[0].softmax(0) * 20000
    assert expected.min() > 5, "the test is valid only if every cell is expected often enough"
    chi_square = ((drawn.bincount(minlength=16) - expected) ** 2 / expected).sum()
    assert chi_square < 37.7


def test_neighbouring_seeds_and_positions_are_independent() -> None:
    logits = torch.zeros(2000, 2)
    seeds, positions = torch.arange(2000), torch.zeros(2000, dtype=torch.int64)
    for a, b in ((seeds, positions), (positions, seeds)):
        heads = ops.sample(logits, a, b)
        flips = (heads[1:] != heads[:-1]).sum()
        assert abs(heads.sum() - 1000) < 4 * math.sqrt(500) and abs(flips - 1000) < 4 * math.sqrt(500)


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((5000, 9), -torch.inf)
    logits[:, 4] = -1e4
    assert (ops.sample(logits, torch.arange(5000), torch.arange(5000)) == 4).all()


def filter_in_python(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[:top_k] if top_k > 0 else order
    weights = [math.exp(logits[i] - logits[order[0]]) for i in order]
    kept, mass = set(), 0.0
    for i, weight in zip(order, weights, strict=True):
        if not kept or (mass < top_p * sum(weights) and weight >= min_p):
            kept.add(i)
        mass += weight
    return kept


@pytest.mark.parametrize("top_k", [-1, 1, 3, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.7, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.2, 1.0])
def test_filters_against_plain_python(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.cat((randn(6, 40, seed=9) * 2, torch.zeros(1, 40)))
    found = ops.filter_logits(logits, torch.full((7,), top_k), torch.full((7,), top_p), torch.full((7,), min_p))
    for row, kept in zip(logits.tolist(), found > -torch.inf, strict=True):
        assert set(kept.nonzero().flatten().tolist()) == filter_in_python(row, top_k, top_p, min_p)
    assert torch.equal(found[found > -torch.inf], logits[found > -torch.inf])


def test_query_rows_may_come_in_any_sequence_order() -> None:
    paged = Paged([40, 20])
    batch = AttentionBatch([0, 20, 60], [20, 40], paged.tables[[1, 0]])
    q = torch.cat((paged.q[1], paged.q[0]))
    out = ops.paged_attention(q, paged.k_cache, paged.v_cache, batch, paged.size**-0.5)
    assert torch.equal(out[:20], paged.whole(1)) and torch.equal(out[20:], paged.whole(0))
