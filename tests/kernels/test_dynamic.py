"""Products with quantized activations, compared with a definition of their own: integers in int64, numbers in numpy."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from matrix import thinned
from torch import Tensor

from trueroll.errors import ConfigError
from trueroll.kernels.contract import as_weight
from trueroll.kernels.dynamic import MOST_COLUMNS, DynamicValues, row_peaks
from trueroll.kernels.precision import with_quantization
from trueroll.kernels.quantization import FORMATS, quantize
from trueroll.kernels.selection import select_backend
from trueroll.kernels.specs import WHOLE, ExpertsSpec, MlpSpec, Pieces

from .backends import MIXING, Served, served_id
from .inputs import decoder_spec, layer_spec, make_experts, randn, same_bits

FORMAT = FORMATS["int8_dynamic"]
# An emulated library has the code of the portable one.
served_by_all = pytest.mark.parametrize("served", MIXING, ids=served_id, indirect=True)
usually = thinned(lambda served, **_: not served[0].emulated and served[1] != torch.float16)
F32 = np.float32


def codes_of(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the integers of rows and the scale of each row, row by row."""
    codes, scales = np.zeros(rows.shape, np.int64), np.zeros(len(rows), F32)
    for row, code, i in zip(rows, codes, range(len(rows)), strict=True):
        if not np.isfinite(row).all():
            scales[i] = np.nan
            continue
        peak = max((abs(value) for value in row), default=F32(0))
        scales[i] = min(max(F32(peak) / F32(127), F32(2.0**-126)), F32((1 - 2.0**-22) * 2.0**128 / 127))
        quotients = (row / scales[i]).astype(np.float64)
        code[:] = np.clip(np.rint(quotients), -127, 127)
    return codes, scales


def expected_sums(x: Tensor, matrix: Tensor, pieces: Pieces = WHOLE, columns: tuple[int, int] | None = None) -> Tensor:
    """Return the float32 sums of the products of rows x and a matrix of finite numbers. `columns`: those that are
    multiplied, with the scales of whole rows.
    """
    (left, of_rows), (right, of_matrix) = codes_of(x.float().numpy()), codes_of(matrix.float().numpy())
    sums = []
    for start, end in pieces.bounds(x.shape[1]) if columns is None else [columns]:
        total = left[:, start:end] @ right[:, start:end].T
        assert np.abs(total).max(initial=0) < 2**31
        sums.append((total.astype(F32) * of_matrix) * of_rows[:, None])
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
    finest = torch.finfo(dtype).smallest_normal
    x[6], x[7] = x[6].sign() * finest / 4, finest
    x = x.to(dtype)
    x[8] = x[8].sign() * torch.finfo(dtype).max
    x[9, columns // 2] = -torch.finfo(dtype).max
    return x


def coded(served: Served, matrix: Tensor) -> Any:
    return as_weight(served.ops, matrix, FORMAT)


def coded_columns(served: Served, matrix: Tensor, start: int, end: int) -> Any:
    """Return some columns of a weight, with the scales of its whole rows."""
    part: Any = served.ops.new_weight(len(matrix), end - start, matrix.new_empty, FORMAT)
    part.copy_(quantize(matrix, FORMAT).columns(start, end - start))
    return part


@served_by_all
@usually
@pytest.mark.parametrize("rows,columns", [(5, 7), (70, 544), (33, 1100)])
def test_products_are_those_of_the_definition(served: Served, rows: int, columns: int) -> None:
    ops, dtype = served.ops, served.dtype
    matrix, x = randn(rows, columns, dtype=dtype, seed=1) / 2**14, rows_of_all_kinds(columns, dtype)
    matrix[1] = 0.0
    weight = coded(served, matrix)
    assert same_bits(weight.to_dense(), quantize(matrix, FORMAT).values().to(dtype))
    bias, residual = randn(rows, dtype=dtype, seed=2) / 2**10, randn(40, rows, dtype=dtype, seed=3)
    assert expected_sums(x, matrix).isfinite().all(), "premise: NaN may have several bits"
    for num in (1, 2, 7, 40):
        for first in (0, 40 - num):
            some = x[first : first + num]
            for pieces in (Pieces(), *(Pieces(count, -(-columns // (16 * count)) * 16) for count in (2, 4))):
                sums = expected_sums(some, matrix, pieces)
                assert same_bits(ops.back_sums(some, weight, pieces), sums)
                out = (sums + bias.float()).to(dtype)
                assert same_bits(ops.project_back(some, weight, None, bias, pieces), out)
                added = residual[:num] + out
                assert same_bits(ops.project_back(some, weight, residual[:num], bias, pieces), added)
            assert same_bits(ops.linear(some, weight, bias), (expected_sums(some, matrix) + bias.float()).to(dtype))
    middle = max(columns // 32 * 16, 4)
    ranks = (0, middle), (middle, columns)
    parts = [ops.back_sums(x[:, a:b], coded_columns(served, matrix, a, b), WHOLE, row_peaks(x)) for a, b in ranks]
    assert all(
        same_bits(part, expected_sums(x, matrix, WHOLE, between)) for part, between in zip(parts, ranks, strict=True)
    )
    plain = as_weight(ops, quantize(matrix, FORMAT).values().to(dtype))
    assert not same_bits(ops.linear(x, weight), ops.linear(x, plain)), "premise: activations are rounded"


@served_by_all
@usually
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_nan_or_infinity_is_nan(served: Served, bad: float) -> None:
    matrix, x = randn(48, 96, dtype=served.dtype), randn(11, 96, dtype=served.dtype, seed=1)
    weight = coded(served, matrix)
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
    """Gate or up may be plain."""
    ops, dtype = served.ops, served.dtype
    gate, up = (randn(77, 300, dtype=dtype, seed=seed) / 16 for seed in (1, 2))
    x = rows_of_all_kinds(300, dtype)[:7]
    products = [ops.linear(x, coded(served, each)) for each in (gate, up)]
    plain = [ops.linear(x, as_weight(ops, each)) for each in (gate, up)]
    makers = (coded, lambda served, matrix: as_weight(served.ops, matrix))
    for i, of_gate in enumerate(makers):
        for j, of_up in enumerate(makers):
            found = ops.gate_up(x, of_gate(served, gate), of_up(served, up), "silu")
            assert same_bits(found, ops.gate_mul((products, plain)[i][0], (products, plain)[j][1], "silu"))


@served_by_all
@usually
@pytest.mark.parametrize("gated", [True, False])
def test_experts(served: Served, gated: bool) -> None:
    """The experts of a row, one by one, with the products of the definition."""
    ops, dtype = served.ops, served.dtype
    spec = ExpertsSpec(num_experts=8, top_k=3, intermediate_size=48, gated=gated)
    weights, x = make_experts(served, spec), randn(37, 144, dtype=dtype)
    experts, gates = ops.route(ops.linear(x, weights.router), spec)
    inner, outer = weights.gate_up.to_dense()[: 8 * 48 * (2 if gated else 1)], weights.down.to_dense()
    weights = dataclasses.replace(weights, gate_up=coded(served, inner), down=coded(served, outer))
    assert weights.gate_up_bias is None
    found = ops.expert_sums(x, spec, weights, experts, gates, 4)
    for num in (1, 5):
        some = ops.expert_sums(x[:num], spec, weights, experts[:num], gates[:num], 4)
        assert same_bits(some, found[:num])
    sums = torch.zeros(4, 37, 144)
    for expert in range(8):
        rows, places = (experts == expert).nonzero(as_tuple=True)
        product = expected_sums(x[rows], inner.unflatten(0, (8, -1))[expert]).to(dtype)
        gate, up = product.chunk(2, 1) if gated else (product, product)
        active = ops.gate_mul(gate.contiguous(), up.contiguous(), spec.activation)
        made = expected_sums(active, outer.unflatten(0, (8, -1))[expert])
        sums[expert // 2][rows] += gates[rows, places, None] * made
    assert same_bits(found, (sums[0] + sums[1]) + (sums[2] + sums[3]))


def test_the_largest_sums() -> None:
    """The largest sums of integers of 32 bits are exact, and the offset of the native kernels wraps."""
    x = torch.ones(2, MOST_COLUMNS)
    x[1] = -1.0
    matrix = torch.ones(16, MOST_COLUMNS)
    for name in ("cpu", "reference"):
        ops = select_backend(name, torch.device("cpu"), torch.float32).ops
        found = ops.linear(x, as_weight(ops, matrix, FORMAT))
        assert same_bits(found, expected_sums(x, matrix))


def test_values_have_the_same_codes_when_they_are_quantized_again() -> None:
    """So a trainer may compute with the values, and weights that are saved have the same bits."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        spread = torch.exp2(torch.randint(-12, 6, (2**15, 1), generator=generator).float())
        matrix = (torch.randn(2**15, 32, generator=generator) * spread).to(dtype)
        matrix[0] = 0.0
        first = quantize(matrix, FORMAT)
        again = quantize(first.values().to(dtype), FORMAT)
        assert torch.equal(first.codes, again.codes) and torch.equal(first.scales, again.scales)
        assert not torch.equal(first.values().to(dtype), matrix), "premise: the values are rounded"


def test_gradients_pass_through_the_rounding() -> None:
    """They are those of plain products with the values."""
    from trueroll.kernels.autograd import GradientOps

    ops = GradientOps(select_backend("reference", torch.device("cpu"), torch.float32).ops)
    x, matrix = randn(6, 32), quantize(randn(16, 32, seed=1), FORMAT).values()
    gradients, outs = [], []
    for wrap in (lambda tensor: tensor, lambda tensor: DynamicValues(tensor, FORMAT)):
        inputs = [each.clone().requires_grad_() for each in (x, matrix)]
        outs.append(ops.project_back(inputs[0], wrap(inputs[1])))
        outs[-1].backward(torch.ones_like(outs[-1]))
        gradients.append([each.grad for each in inputs])
    assert not same_bits(*outs), "premise: activations are rounded"
    assert all(map(same_bits, *gradients))


def test_refusals() -> None:
    spec = with_quantization(decoder_spec(layer_spec()), "int8_dynamic")
    with pytest.raises(
        ConfigError, match="Triton kernels need a quantization with plain activations .got int8_dynamic"
    ):
        select_backend("triton", torch.device("cpu"), torch.bfloat16, spec)
    wide = dataclasses.replace(layer_spec(), mlp=MlpSpec(MOST_COLUMNS + 1, "silu"))
    with pytest.raises(ConfigError, match="at most 132104 columns .got 132105 in model.layers.0.mlp.down"):
        with_quantization(decoder_spec(wide), "int8_dynamic")
