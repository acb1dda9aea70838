"""The software model of tensor cores, compared with hand-computed cases and with its definition in exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from .inputs import randn, same_bits
from .tensor_cores import CANDIDATES, TENSOR_CORES, TensorCore, check_product, multiply, multiply_add

AMPERE, HOPPER = TENSOR_CORES[8], TENSOR_CORES[9]
CORES = [AMPERE, HOPPER]
DTYPES = [torch.bfloat16, torch.float16]
INF = math.inf


def dot(pairs: list[tuple[float, float]], core: TensorCore = HOPPER, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return the sum from zero of products of pairs of numbers that the dtype can represent."""
    a, b = (torch.tensor(side, dtype=torch.float64) for side in zip(*pairs, strict=True))
    assert torch.equal(a.to(dtype).double(), a) and torch.equal(b.to(dtype).double(), b), "premise"
    return multiply_add(core, torch.zeros(()), a.to(dtype), b.to(dtype)).item()


def ones(*numbers: float) -> list[tuple[float, float]]:
    return [(number, 1.0) for number in numbers]


@pytest.mark.parametrize("core", CORES, ids=str)
def test_sums_that_float32_can_represent_are_exact(core: TensorCore) -> None:
    assert dot([(3.0, -0.5)], core) == -1.5
    assert dot(ones(1, 2, 4, 8, 2**-20), core) == 15 + 2**-20
    assert dot(ones(*range(1, 101)), core) == 5050
    assert dot([(1.5, 1.5), (-0.5, 0.5)], core) == 2
    assert dot(ones(2.0**100, 5.0, -(2.0**100)), core) == 0, "5 is cut off"


@pytest.mark.parametrize(("core", "kept"), [(AMPERE, 24), (HOPPER, 25)], ids=str)
def test_a_term_is_cut_behind_the_highest_exponent(core: TensorCore, kept: int) -> None:
    """The truncation is visible in a difference from 1, which has one more bit."""
    last = 2.0**-kept
    for sign in (1, -1):
        assert dot(ones(sign, -sign * last), core) == sign * (1 - 2.0**-24), "kept, and then cut to float32"
        assert dot(ones(sign, -sign * last / 2), core) == sign, "cut toward zero"
        assert dot(ones(sign, *[sign * last] * 4), core) == sign * (1 + 4 * last), "with others it is seen"
        assert dot(ones(sign, *[sign * last / 2] * 7), core) == sign, "each is cut, not their sum"


def test_the_sum_is_cut_toward_zero() -> None:
    for sign in (1, -1):
        assert dot(ones(sign, sign * 2.0**-23), HOPPER) == sign * (1 + 2.0**-23)
        assert dot(ones(sign, sign * 2.0**-24, sign * 2.0**-25), HOPPER) == sign, "3/4 of a unit"
        assert dot(ones(sign, *[sign * 2.0**-25] * 7), HOPPER) == sign * (1 + 2.0**-23), "7/4 of a unit"


def test_terms_are_cut_before_they_cancel() -> None:
    for core in CORES:
        unit = 2.0 ** (30 - core.fraction_bits)
        assert dot(ones(2.0**30, unit, -(2.0**30)), core) == unit
        assert dot(ones(2.0**30, unit / 2, -(2.0**30)), core) == 0


def test_a_product_of_two_and_more_has_the_exponent_of_its_factors() -> None:
    """With a higher exponent, the last product would be truncated to zero."""
    assert dot([(1.5, 1.5), (-(2.0**-25), 1.0)], HOPPER) == 2.25 - 2.0**-22
    assert dot([(1.5, 1.5), (-(2.0**-26), 1.0)], HOPPER) == 2.25


@pytest.mark.parametrize("core", CORES, ids=str)
def test_products_are_added_a_group_at_a_time(core: TensorCore) -> None:
    small, others = 2.0**-24, [0.0] * (core.terms - 1)
    together, apart = [small] * core.terms, [small, *others] * core.terms
    assert dot(ones(1.0, *others, *together), core) == 1 + small * core.terms
    assert dot(ones(1.0, *others, *apart), core) == 1, "each is lost where it comes alone"


def test_zeros_have_no_exponent_and_are_positive() -> None:
    assert dot([(2.0**100, 0.0), (0.0, -(2.0**100)), (2.0**-30, 1.0)]) == 2.0**-30
    assert dot(ones(1.5) + [(0.0, 2.0**100)] * 40) == 1.5, "so a tail of zeros changes nothing"
    for zero in (dot([(0.0, 1.0)]), dot([(-0.0, 1.0)] * 17), dot(ones(3, -3)), dot([(-(2.0**-126), 2.0**-126)])):
        assert math.copysign(1, zero) == 1 and zero == 0


def test_subnormal_numbers_are_kept_and_not_normalised() -> None:
    least = 2.0**-24  # of float16, with the exponent -14
    assert dot([(least, 1.0)], dtype=torch.float16) == least
    assert dot([(least, 1.0), (-least, 2.0**-15)], dtype=torch.float16) == least - 2.0**-39
    assert dot([(least, 1.0), (-least, least)], dtype=torch.float16) == least, "2**-48, cut at 2**-39"
    assert dot([(2.0**-10, 2.0**-14), (-least, least)], dtype=torch.float16) == 2.0**-24 - 2.0**-48, "normal: kept"
    assert dot([(2.0**-100, 2.0**-40)]) == 2.0**-140 and dot([(2.0**-133, 4.0)]) == 2.0**-131
    assert dot([(2.0**-100, 2.0**-50)]) == 0, "float32 has none as small"


def test_sums_beyond_float32_are_infinite() -> None:
    largest = 2.0**127 * (2 - 2.0**-7)
    assert dot(ones(largest, 2.0**120)) == INF and dot(ones(-largest, -(2.0**120))) == -INF
    assert dot(ones(largest, 2.0**119 * (2 - 2.0**-7), 2.0**112 - 2.0**104)) == (2 - 2.0**-23) * 2.0**127
    below = ones(largest, 2.0**119 * (2 - 2.0**-7), 2.0**111 * (2 - 2.0**-7), 2.0**103)
    assert dot(below) == (2 - 2.0**-23) * 2.0**127, "cut, where rounding to nearest would give infinity"
    assert dot([(2.0**127, 2.0**127), (-(2.0**127), 2.0**127), (1.0, 1.0)]) == 0, "finite before it is rounded"


def test_infinity_and_nan_come_through() -> None:
    assert dot(ones(INF, 1, -(2.0**127))) == INF and dot([(-INF, 2.0)] + ones(*[1.0] * 40)) == -INF
    for pairs in (ones(INF, -INF), ones(math.nan), [(INF, 0.0)], ones(INF, *[0.0] * 20, -INF)):
        a, b = (torch.tensor(side).bfloat16() for side in zip(*pairs, strict=True))
        assert multiply_add(HOPPER, torch.zeros(()), a, b).isnan()


def exponent_of(x: float, dtype: torch.dtype) -> int:
    return max(math.frexp(x)[1] - 1, {torch.bfloat16: -126, torch.float16: -14, torch.float32: -126}[dtype])


def cut(x: Fraction, exponent: int) -> Fraction:
    """Return `x` cut toward zero to a multiple of 2**exponent."""
    return int(x / Fraction(2) ** exponent) * Fraction(2) ** exponent


def in_fractions(core: TensorCore, a: list[float], b: list[float], dtype: torch.dtype) -> float:
    """Compute the definition at the top of tensor_cores.py for finite numbers, term by term."""
    total = 0.0
    for start in range(0, len(a), core.terms):
        terms = [(Fraction(total), exponent_of(total, torch.float32))] if total else []
        for x, y in zip(a[start : start + core.terms], b[start : start + core.terms], strict=True):
            if x and y:
                terms.append((Fraction(x) * Fraction(y), exponent_of(x, dtype) + exponent_of(y, dtype)))
        highest = max((exponent for _, exponent in terms), default=0)
        exact = sum((cut(term, highest - core.fraction_bits) for term, _ in terms), Fraction(0))
        exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length()  # of a power of two
        total = float(cut(exact, max(exponent, -126) - 23))
    return total


def of_all_sizes(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return numbers with widely differing exponents, including subnormal ones and zeros."""
    width = 8.0 if dtype == torch.float16 else 15.0
    x = randn(*shape, seed=seed) * torch.exp2(randn(*shape, seed=seed + 1) * width)
    return x.clamp(-6e4, 6e4).to(dtype) * (randn(*shape, seed=seed + 2) < 1.5)


@pytest.mark.parametrize("core", [*CORES, TensorCore(4, 22)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [False, True])
def test_random_sums_are_those_of_the_definition(core: TensorCore, dtype: torch.dtype, wide: bool) -> None:
    if wide:
        a, b = (of_all_sizes(12, 70, dtype=dtype, seed=seed) for seed in (0, 10))
        assert (a == 0).any()
        assert dtype == torch.bfloat16 or ((a != 0) & (a.abs() < torch.finfo(dtype).tiny)).any()
    else:
        a, b = randn(12, 70, dtype=dtype), randn(12, 70, dtype=dtype, seed=1)
    found = multiply(core, a, b, 128)
    expected = [[in_fractions(core, x, y, dtype) for y in b.double().tolist()] for x in a.double().tolist()]
    assert same_bits(found, torch.tensor(expected, dtype=torch.float64).float() + 0.0)
    assert torch.equal(found.double(), torch.tensor(expected, dtype=torch.float64)), "premise: float32 holds all"
    rounded = (a.double() @ b.double().T).float()
    assert (found != rounded).double().mean() > 0.1, "premise: the model is not the exact sum"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_follow_the_order_of_k_the_pieces_and_the_core(dtype: torch.dtype) -> None:
    """The premise of comparing bits: a change of the order, the pieces or the core changes the bits."""
    x, weight = randn(8, 512, dtype=dtype), randn(16, 512, dtype=dtype, seed=1)
    steps = torch.arange(512).view(-1, 16)
    swapped = steps.clone()
    swapped[[3, 4]] = steps[[4, 3]]

    def along(order: Tensor) -> Tensor:
        return multiply(HOPPER, x[:, order.flatten()], weight[:, order.flatten()], 512)

    expected = along(steps)
    others = {
        "from the end": along(steps.flip(0)),
        "two steps swapped": along(swapped),
        "pieces": multiply(HOPPER, x, weight, 256),
        "a step of 8": multiply(HOPPER._replace(terms=8), x, weight, 512),
        "one bit less": multiply(HOPPER._replace(fraction_bits=24), x, weight, 512),
    }
    shares = {name: (other != expected).double().mean().item() for name, other in others.items()}
    assert min(shares.values()) > 0.05, shares
    assert same_bits(along(steps.flip(1)), expected), "within a step there is no order"


def test_a_difference_names_the_place_and_what_would_explain_it() -> None:
    x, weight = randn(8, 300, dtype=torch.float16), randn(16, 300, dtype=torch.float16, seed=1)
    found = multiply(HOPPER, x, weight, 256)
    check_product(HOPPER, found, x, weight, 256)
    one = found.clone()
    one[3, 5] = torch.nextafter(one[3, 5], torch.tensor(0.0))
    was, bits = (int(each[3, 5].view(torch.int32).item()) for each in (found, one))
    with pytest.raises(AssertionError, match=r"1 of 128 elements.*row 3, feature 5.*none of .* would give") as error:
        check_product(HOPPER, one, x, weight, 256)
    assert f"{was & 0xFFFFFFFF:#010x}" in str(error.value) and f"{bits & 0xFFFFFFFF:#010x}" in str(error.value)
    for other in (AMPERE, TensorCore(32, 25), TensorCore(16, 23)):
        assert other in CANDIDATES
        with pytest.raises(AssertionError) as error:
            check_product(HOPPER, multiply(other, x, weight, 256), x, weight, 256)
        assert f"; {other} would give the found bits" in str(error.value)
