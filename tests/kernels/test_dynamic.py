"""Products with quantized activations, compared with an independent definition: numbers in numpy, sums of integers in
int64. The expected sums of float8 numbers come from plain products with the same kernels.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from matrix import thinned
from torch import Tensor

from trueroll.errors import ConfigError
from trueroll.kernels.contract import as_weight
from trueroll.kernels.dynamic import MOST_COLUMNS, DynamicValues, quantize_rows, row_peaks
from trueroll.kernels.precision import with_quantization
from trueroll.kernels.quantization import FORMATS, Format, quantize, round_trip
from trueroll.kernels.selection import select_backend
from trueroll.kernels.specs import WHOLE, ExpertsSpec, MlpSpec, Pieces

from .backends import MIXING, Served, served_id
from .inputs import decoder_spec, layer_spec, make_experts, randn, same_bits

INT8, FP8 = FORMATS["int8_dynamic"], FORMATS["fp8_dynamic"]
each_format = pytest.mark.parametrize("format", [INT8, FP8], ids=lambda format: format.name)
# An emulated library has the code of the portable one.
served_by_all = pytest.mark.parametrize("served", MIXING, ids=served_id, indirect=True)
usually = thinned(lambda served, **_: not served[0].emulated and served[1] != torch.float16)
F32 = np.float32
# The numbers of float8 e4m3 from 0 on, in the order of their codes: three bits of a fraction, and four of an exponent.
FLOAT8 = np.array([f / 512 if e == 0 else (1 + f / 8) * 2.0 ** (e - 7) for e in range(16) for f in range(8)][:-1])


def nearest(quotients: np.ndarray, format: Format) -> np.ndarray:
    """Return the nearest numbers in float64. Ties go to even codes."""
    if format is INT8:
        return np.clip(np.rint(quotients), -127, 127)
    above = np.searchsorted(FLOAT8, np.abs(quotients)).clip(1, len(FLOAT8) - 1)
    to_lower, to_upper = np.abs(quotients) - FLOAT8[above - 1], FLOAT8[above] - np.abs(quotients)
    is_lower = (to_lower < to_upper) | ((to_lower == to_upper) & (above % 2 == 1))
    return np.copysign(FLOAT8[above - is_lower], quotients)


def numbers_of(rows: np.ndarray, format: Format) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of rows and the scale of each row, row by row."""
    numbers, scales, largest = np.zeros(rows.shape), np.zeros(len(rows), F32), 127 if format is INT8 else 448
    for row, number, i in zip(rows, numbers, range(len(rows)), strict=True):
        if not np.isfinite(row).all():
            scales[i] = np.nan
            continue
        peak = np.abs(row).max(initial=0)
        scales[i] = min(max(F32(peak) / F32(largest), F32(2.0**-126)), F32((1 - 2.0**-22) * 2.0**128 / largest))
        number[:] = nearest((row / scales[i]).astype(np.float64), format)
    return numbers, scales


def sums_of(served: Served, left: np.ndarray, right: np.ndarray, format: Format, cut: Pieces, piece: slice) -> Tensor:
    """Return the sums over the columns of one of the pieces into which a product of numbers is cut."""
    if format is INT8:
        total = left[:, piece].astype(np.int64) @ right[:, piece].astype(np.int64).T
        assert np.abs(total).max(initial=0) < 2**31
        return torch.from_numpy(total.astype(F32))
    masked = np.zeros_like(left)  # the other pieces add zeros
    masked[:, piece] = left[:, piece]
    rows, matrix = (torch.from_numpy(each).to(served.dtype) for each in (masked, right))
    assert all(np.array_equal(a.double().numpy(), b) for a, b in ((rows, masked), (matrix, right))), "premise: exact"
    sums = served.ops.back_sums(rows, as_weight(served.ops, matrix), cut)
    bound = np.abs(masked) @ np.abs(right).T * 2.0**-14
    assert (np.abs(sums.double().numpy() - masked @ right.T) <= bound).all()
    return sums


def expected_sums(
    served: Served,
    x: Tensor,
    matrix: Tensor,
    format: Format,
    pieces: Pieces = WHOLE,
    columns: tuple[int, int] | None = None,
) -> Tensor:
    """Return the float32 sums of the products of rows x and a matrix of finite numbers. `columns`: the columns that are
    multiplied, with the scales of whole rows.
    """
    (left, of_rows), (right, of_matrix) = (numbers_of(each.float().numpy(), format) for each in (x, matrix))
    start, end = (0, x.shape[1]) if columns is None else columns
    left, right = left[:, start:end], right[:, start:end]
    parts = [slice(*piece) for piece in pieces.bounds(end - start)]
    found = [sums_of(served, left, right, format, pieces, part).numpy() for part in parts]
    sums = [(each * of_matrix) * of_rows[:, None] for each in found]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return torch.from_numpy(sums[0])


def rows_of_all_kinds(columns: int, dtype: torch.dtype) -> Tensor:
    """Return rows of random numbers, with ties, of zeros, of denormal and of the largest numbers."""
    x = randn(40, columns, dtype=torch.float32) * torch.logspace(-3, 2, 40)[:, None]
    x[3] = 0.0
    x[4, :-1] = 0.0
    x[5] = torch.arange(columns) % 255 / 2 - 63.5  # the scale is 0.5 with 63.5, so every second number is a tie
    x[5, 0] = 127.0
    x[10] = torch.from_numpy(np.resize((FLOAT8[1:] + FLOAT8[:-1]) / 2, columns))  # the scale is 1 with 448
    x[10, 0], x[11] = -448.0, -x[10]
    finest = torch.finfo(dtype).smallest_normal
    x[6], x[7] = x[6].sign() * finest / 4, finest
    x = x.to(dtype)
    x[8] = x[8].sign() * torch.finfo(dtype).max
    x[9, columns // 2] = -torch.finfo(dtype).max
    return x


def coded_columns(served: Served, matrix: Tensor, format: Format, start: int, end: int) -> Any:
    """Return some columns of a weight, with the scales of its whole rows."""
    part: Any = served.ops.new_weight(len(matrix), end - start, matrix.new_empty, format)
    part.copy_(quantize(matrix, format).columns(start, end - start))
    return part


@served_by_all
@each_format
@usually
@pytest.mark.parametrize("rows,columns", [(5, 7), (70, 544), (33, 1100)])
def test_products_are_those_of_the_definition(served: Served, format: Format, rows: int, columns: int) -> None:
    ops, dtype = served.ops, served.dtype
    matrix, x = randn(rows, columns, dtype=dtype, seed=1) / 2**14, rows_of_all_kinds(columns, dtype)
    matrix[1] = 0.0
    weight = as_weight(ops, matrix, format)
    assert same_bits(weight.to_dense(), quantize(matrix, format).values().to(dtype))
    sums_of = partial(expected_sums, served, matrix=matrix, format=format)
    bias, residual = randn(rows, dtype=dtype, seed=2) / 2**10, randn(40, rows, dtype=dtype, seed=3)
    for pieces in (WHOLE, *(Pieces(count, -(-columns // (16 * count)) * 16) for count in (2, 4))):
        of_all = sums_of(x, pieces=pieces)
        assert of_all.isfinite().all(), "premise: NaN may have several bits"
        for num, first in [(1, 0), (1, 39), (2, 0), (2, 38), (7, 0), (7, 33), (40, 0)]:
            sums, some = of_all[first : first + num], x[first : first + num]
            assert same_bits(ops.back_sums(some, weight, pieces), sums)
            out = (sums + bias.float()).to(dtype)
            assert same_bits(ops.project_back(some, weight, None, bias, pieces), out)
            added = residual[:num] + out
            assert same_bits(ops.project_back(some, weight, residual[:num], bias, pieces), added)
            if pieces is WHOLE:
                assert same_bits(ops.linear(some, weight, bias), out)
    middle = max(columns // 32 * 16, 4)
    ranks = (0, middle), (middle, columns)
    for a, b in ranks:
        part = ops.back_sums(x[:, a:b], coded_columns(served, matrix, format, a, b), WHOLE, row_peaks(x))
        assert same_bits(part, sums_of(x, columns=(a, b)))
    plain = as_weight(ops, quantize(matrix, format).values().to(dtype))
    assert not same_bits(ops.linear(x, weight), ops.linear(x, plain)), "premise: activations are rounded"


@served_by_all
@usually
def test_numbers_and_the_middles_between_them(served: Served) -> None:
    """The inputs are all float8 numbers, the middles between two numbers, and the neighbours of both in the dtype. The
    matrix is diagonal, so each element of a product shows one number.
    """
    wide = torch.from_numpy(np.concatenate((FLOAT8, (FLOAT8[1:] + FLOAT8[:-1]) / 2))).to(served.dtype)
    assert np.isin((FLOAT8[1:] + FLOAT8[:-1]) / 2, wide.double().numpy()).all(), "premise: the middles are exact"
    ends = (torch.full((), end, dtype=served.dtype) for end in (0.0, torch.inf))
    points = torch.cat((wide, *(torch.nextafter(wide, end) for end in ends))).clamp(max=448.0)
    rows = torch.nn.functional.pad(torch.cat((points, -points)), (0, -2 * len(points) % 95)).view(-1, 95)
    x = torch.cat((torch.full((len(rows), 1), 448.0, dtype=served.dtype), rows), 1)
    assert quantize_rows(x, FP8).scales.eq(1.0).all(), "premise"
    x = torch.cat((x, x * 2.0**-10, x * 0.75))
    matrix = torch.eye(96, dtype=served.dtype)
    found = served.ops.back_sums(x, as_weight(served.ops, matrix, FP8), WHOLE)
    numbers, scales = numbers_of(x.float().numpy(), FP8)
    expected = (F32(448) * numbers.astype(F32) + F32(0)) * (F32(1) / F32(448)) * scales[:, None]
    assert same_bits(found, torch.from_numpy(expected))
    assert len(np.unique(numbers)) == 2 * len(FLOAT8) - 1, "premise: every number occurs"


@served_by_all
@each_format
@usually
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_nan_or_infinity_is_nan(served: Served, format: Format, bad: float) -> None:
    matrix, x = randn(48, 96, dtype=served.dtype), randn(11, 96, dtype=served.dtype, seed=1)
    weight = as_weight(served.ops, matrix, format)
    clean = served.ops.linear(x, weight)
    x[4, 95] = bad
    found = served.ops.linear(x, weight)
    assert found[4].isnan().all() and clean.isfinite().all()
    others = torch.arange(11) != 4
    assert same_bits(found[others], clean[others])
    assert served.ops.gate_up(x, weight, weight, "silu")[4].isnan().all()


@served_by_all
@usually
def test_gate_and_up(served: Served) -> None:
    """Each of gate and up may be in any of the formats, or plain."""
    ops, dtype = served.ops, served.dtype
    gate, up = (randn(77, 300, dtype=dtype, seed=seed) / 16 for seed in (1, 2))
    x = rows_of_all_kinds(300, dtype)[:7]
    weights = [[as_weight(ops, each, format) for format in (INT8, FP8, None)] for each in (gate, up)]
    for of_gate, of_up in product(*weights):
        expected = ops.gate_mul(ops.linear(x, of_gate), ops.linear(x, of_up), "silu")
        assert same_bits(ops.gate_up(x, of_gate, of_up, "silu"), expected)


@served_by_all
@each_format
@usually
@pytest.mark.parametrize("gated", [True, False])
def test_experts(served: Served, format: Format, gated: bool) -> None:
    """The definition applies a row's experts one by one."""
    ops, dtype = served.ops, served.dtype
    spec = ExpertsSpec(num_experts=8, top_k=3, intermediate_size=48, gated=gated)
    weights, x = make_experts(served, spec), randn(37, 144, dtype=dtype)
    experts, gates = ops.route(ops.linear(x, weights.router), spec)
    inner, outer = weights.gate_up.to_dense()[: 8 * 48 * (2 if gated else 1)], weights.down.to_dense()
    weights = dataclasses.replace(weights, gate_up=as_weight(ops, inner, format), down=as_weight(ops, outer, format))
    assert weights.gate_up_bias is None
    found = ops.expert_sums(x, spec, weights, experts, gates, 4)
    for num in (1, 5):
        some = ops.expert_sums(x[:num], spec, weights, experts[:num], gates[:num], 4)
        assert same_bits(some, found[:num])
    sums = torch.zeros(4, 37, 144)
    for expert in range(8):
        rows, places = (experts == expert).nonzero(as_tuple=True)
        both = expected_sums(served, x[rows], inner.unflatten(0, (8, -1))[expert], format).to(dtype)
        gate, up = both.chunk(2, 1) if gated else (both, both)
        active = ops.gate_mul(gate.contiguous(), up.contiguous(), spec.activation)
        made = expected_sums(served, active, outer.unflatten(0, (8, -1))[expert], format)
        sums[expert // 2][rows] += gates[rows, places, None] * made
    assert same_bits(found, (sums[0] + sums[1]) + (sums[2] + sums[3]))


def test_the_largest_sums() -> None:
    """The largest sums of integers of 32 bits are exact, and the offset of the native kernels wraps."""
    x = torch.ones(2, MOST_COLUMNS)
    x[1] = -1.0
    matrix = torch.ones(16, MOST_COLUMNS)
    for name in ("cpu", "reference"):
        ops = select_backend(name, torch.device("cpu"), torch.float32).ops
        found = ops.linear(x, as_weight(ops, matrix, INT8))
        assert same_bits(found, expected_sums(Served(ops, torch.float32), x, matrix, INT8))


@each_format
def test_values_have_the_same_codes_when_they_are_quantized_again(format: Format) -> None:
    """A trainer may therefore compute with the values, and saved weights keep their bits. Some values are so small that
    the dtype rounds them by more than the distance of two numbers.
    """
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        least = -24 if dtype == torch.float16 else -140
        for low, high in ((-12, 6), (least, least + 24)):
            spread = torch.exp2(torch.randint(low, high, (2**14, 1), generator=generator).float())
            matrix = (torch.randn(2**14, 32, generator=generator) * spread).to(dtype)
            matrix[0] = 0.0
            first = quantize(matrix, format)
            values = first.values().to(dtype)
            again = quantize(values, format)
            assert torch.equal(first.codes, again.codes) and torch.equal(first.scales, again.scales)
            assert not torch.equal(values, matrix), "premise: the values are rounded"
            assert torch.equal(values, round_trip(matrix, format))
            once = quantize(matrix, dataclasses.replace(format, activations=None))
            is_changed = not torch.equal(once.codes, first.codes)
            assert is_changed == (format is FP8 and low == least and dtype == torch.float16), "premise"


@each_format
def test_gradients_pass_through_the_rounding(format: Format) -> None:
    """The gradients are those of plain products with the values."""
    from trueroll.kernels.autograd import GradientOps

    ops = GradientOps(select_backend("reference", torch.device("cpu"), torch.float32).ops)
    x, matrix = randn(6, 32), quantize(randn(16, 32, seed=1), format).values()
    gradients, outs = [], []
    for wrap in (lambda tensor: tensor, lambda tensor: DynamicValues(tensor, format)):
        inputs = [each.clone().requires_grad_() for each in (x, matrix)]
        outs.append(ops.project_back(inputs[0], wrap(inputs[1])))
        outs[-1].backward(torch.ones_like(outs[-1]))
        gradients.append([each.grad for each in inputs])
    assert not same_bits(*outs), "premise: activations are rounded"
    assert all(map(same_bits, *gradients))


def test_refusals() -> None:
    for format in (INT8, FP8):
        spec = with_quantization(decoder_spec(layer_spec()), format.name)
        text = f"Triton kernels need a quantization with plain activations .got {format.name}"
        with pytest.raises(ConfigError, match=text):
            select_backend("triton", torch.device("cpu"), torch.bfloat16, spec)
    wide = dataclasses.replace(layer_spec(), mlp=MlpSpec(MOST_COLUMNS + 1, "silu"))
    with pytest.raises(ConfigError, match="at most 132104 columns .got 132105 in model.layers.0.mlp.down"):
        with_quantization(decoder_spec(wide), "int8_dynamic")
    assert with_quantization(decoder_spec(wide), "fp8_dynamic").quantizes_activations
