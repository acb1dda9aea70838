"""Quantized matrices of the native kernels: products have the bits of products with the plain matrix of the values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, cast

import pytest
import torch
from matrix import thinned
from torch import Tensor

from trueroll.kernels import reference
from trueroll.kernels.contract import ExpertsWeights
from trueroll.kernels.cpu.backend import PackedLayers, PackedWeight
from trueroll.kernels.cpu.quantized import QuantizedWeight
from trueroll.kernels.quantization import FORMATS, Format, Quantized, quantize
from trueroll.kernels.specs import ExpertsSpec, Pieces

from ..backends import SERVED, Implementation, Served, served_id
from ..inputs import FAMILY_LAYERS, make_experts, randn, same_bits, stored
from ..test_joined_ops import MIXTURES, HybridStep

NATIVE = [served for served in SERVED if served[0].backend == "cpu"]
served_natively = pytest.mark.parametrize("served", NATIVE, ids=served_id, indirect=True)
each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
# The formats with plain activations. ../test_dynamic.py tests the products of all other formats.
VALUES = {name: format for name, format in FORMATS.items() if format.activations is None}
each_of_values = pytest.mark.parametrize("format", VALUES.values(), ids=VALUES)
# One format for each kind of codes and scales, with each instruction set.
KINDS = ("fp8", "int8", "mxfp8", "nvfp4", "awq")
FUSED = "avx512_bf16"


def is_usual(served: tuple[Implementation, torch.dtype], format: Format) -> bool:
    """Return whether every run tests a format with this implementation and dtype."""
    implementation, dtype = served
    usual = (*KINDS[::2],) if dtype == torch.float32 or implementation.emulated else KINDS
    return implementation.instruction_set == FUSED and dtype == torch.bfloat16 or format.name in usual


usually = thinned(lambda served, format, **_: is_usual(served, format))


def pair(served: Served, matrix: Tensor, format: Format, unit: int | None = None) -> tuple[Any, Any]:
    """Return a matrix that is quantized, and the plain matrix of its values."""
    rows, columns = matrix.shape
    quantized = served.ops.new_weight(rows, columns, partial(torch.empty, dtype=served.dtype), format, unit)
    quantized.copy_(matrix)
    values = quantize(matrix, format, unit).values().to(served.dtype)
    assert not same_bits(values, matrix), "premise: quantization changes the matrix"
    return quantized, stored(served.ops, values)


@served_natively
@each_of_values
@usually
@pytest.mark.parametrize("rows,columns", [(5, 7), (16, 32), (70, 544), (33, 1000)])
def test_products(served: Served, format: Format, rows: int, columns: int) -> None:
    ops, dtype = served.ops, served.dtype
    quantized, plain = pair(served, randn(rows, columns, dtype=dtype), format)
    assert same_bits(quantized.to_dense(), plain.to_dense())
    x, residual, bias = (randn(*shape, dtype=dtype, seed=1) for shape in ((40, columns), (40, rows), (rows,)))
    pieces = Pieces(4, -(-columns // 64) * 16)
    for num in (1, 2, 4, 5, 40):
        some, add = x[:num], (residual[:num], bias)
        assert same_bits(ops.linear(some, quantized, bias), ops.linear(some, plain, bias))
        for cut in (Pieces(), pieces):
            found, expected = (ops.project_back(some, each, *add, cut) for each in (quantized, plain))
            assert same_bits(found, expected)
    assert same_bits(ops.back_sums(x, quantized, pieces), ops.back_sums(x, plain, pieces))


@served_natively
@each_of_values
@usually
def test_gate_and_up_may_have_different_formats(served: Served, format: Format) -> None:
    ops, dtype = served.ops, served.dtype
    gate, up = (pair(served, randn(77, 300, dtype=dtype, seed=seed), format) for seed in (1, 2))
    for num in (1, 3, 37):
        x = randn(num, 300, dtype=dtype)
        expected = ops.gate_up(x, gate[1], up[1], "silu")
        for g in gate:
            for u in up:
                assert same_bits(ops.gate_up(x, g, u, "silu"), expected)


@served_natively
@each_of_values
@usually
@pytest.mark.parametrize("gated", [True, False])
def test_experts(served: Served, format: Format, gated: bool) -> None:
    """The experts' matrices have 144 and 96 or 48 rows, so blocks of 128 rows end with each matrix."""
    ops, dtype = served.ops, served.dtype
    spec = ExpertsSpec(num_experts=8, top_k=3, intermediate_size=48, bias=True, gated=gated)
    weights, x = make_experts(served, spec), randn(37, 144, dtype=dtype)
    experts, gates = ops.route(ops.linear(x, weights.router), spec)
    rows = 96 if gated else 48
    dense = randn(8 * rows, 144, dtype=dtype, seed=7)
    dense[:rows] *= 5
    assert weights.gate_up_bias is not None
    weights = dataclasses.replace(weights, gate_up_bias=weights.gate_up_bias[:, :rows].contiguous())
    inner, outer = pair(served, dense, format, rows), pair(served, weights.down.to_dense(), format, 144)
    found, expected = (
        dataclasses.replace(weights, gate_up=gate_up, down=down) for gate_up, down in zip(inner, outer, strict=True)
    )
    for num in (1, 37):
        some = x[:num], spec
        chosen = experts[:num], gates[:num]
        for groups in (1, 4):
            first, second = (ops.experts(*some, each, *chosen, None, groups) for each in (found, expected))
            assert same_bits(first, second)
            first, second = (ops.expert_sums(*some, each, *chosen, groups) for each in (found, expected))
            assert same_bits(first, second)


LAYERS = {"experts and delta nets": MIXTURES["hybrid"], "biases": FAMILY_LAYERS["llama with biases"]}
LAYERS |= {"experts with biases": MIXTURES["gpt_oss"], "op by op": MIXTURES["joined"]}


@served_natively
@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_matrices_of_all_formats(served: Served, name: str) -> None:
    """Each matrix has another format, and some matrices are plain."""
    step = HybridStep.new(served, *LAYERS[name])
    formats = count()

    def quantized(weight: PackedWeight, unit: int) -> tuple[Any, Any]:
        number = next(formats) % (len(VALUES) + 1)
        if number == len(VALUES):
            return weight, weight
        return pair(served, weight.to_dense(), [*VALUES.values()][number], unit)

    pairs = [changed(layer, quantized) for layer in step.step.layers]
    found, expected = (served.ops.new_layers(each) for each in zip(*pairs, strict=True))
    assert next(formats) >= 12, "premise: every format occurs"
    assert isinstance(found, PackedLayers) == (name != "op by op")
    (x, memories), (y, others) = (
        dataclasses.replace(step, step=dataclasses.replace(step.step, layers=layers)).run(served.ops.layers)
        for layers in (found, expected)
    )
    assert y.isfinite().all() and same_bits(x, y) and all(map(same_bits, memories, others))


def changed(weights: Any, change: Callable[[PackedWeight, int], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return two copies of a layer or of a part of a layer, with both results of `change` for each matrix."""
    pairs: dict[str, tuple[Any, Any]] = {}
    for field in dataclasses.fields(weights):
        value = getattr(weights, field.name)
        if isinstance(value, PackedWeight) and field.name not in ("router", "shared_score"):
            experts = isinstance(weights, ExpertsWeights) and field.name in ("gate_up", "down")
            rows = value.shape[0] // (weights.router.shape[0] if experts else 1)
            pairs[field.name] = change(value, rows)
        elif field.name == "inputs":
            parts = [change(each, each.shape[0]) for each in cast(Any, value)]
            pairs[field.name] = tuple(part[0] for part in parts), tuple(part[1] for part in parts)
        elif dataclasses.is_dataclass(value) and (field.name in ("mixer", "mlp", "shared")):
            pairs[field.name] = changed(value, change)
    copies = [{name: both[i] for name, both in pairs.items()} for i in range(2)]
    return dataclasses.replace(weights, **copies[0]), dataclasses.replace(weights, **copies[1])


SCALES = (2.0**-126, 2.0**-126 * 1.9999999, 2.0**-125, 2.0**-101, 2.0**-100, 0.3, 1.0, 64.0, 64.00001, 2.0**100, 3e38)


def boundary(format: Format) -> Quantized:
    """Return all codes of finite numbers with extreme scales: each row has another scale, and each column another
    code.
    """
    codes = torch.arange(2**format.bits, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F] if format.element == "e4m3" else codes
    codes = codes.repeat(128 // len(codes) + 1)
    if format.scale == "e8m0":
        scales = torch.arange(255, dtype=torch.uint8)
    elif format.scale == "float16":
        scales = torch.arange(0, 0x7C00, 37, dtype=torch.int16).view(torch.float16)
    else:
        scales = torch.tensor(SCALES)
    row_scales = None
    if format.scale == "e4m3":
        kinds = torch.arange(0x7F, dtype=torch.uint8)
        row_scales = scales.clamp(max=2.0**100).repeat_interleave(len(kinds))
        scales = kinds.view(torch.float8_e4m3fn).repeat(len(SCALES))
    rows, groups = len(scales), -(-len(codes) // format.group(len(codes)))
    spread = scales.view(torch.uint8 if scales.itemsize == 1 else scales.dtype)[:, None].repeat(1, groups)
    zeros = torch.arange(rows * groups, dtype=torch.uint8).view(rows, groups) % 16 if format.element == "int4" else None
    return Quantized(format, codes.repeat(rows, 1), spread.view(scales.dtype), zeros, row_scales)


@served_natively
@each_of_values
@usually
@pytest.mark.parametrize("num", [4, 40])
def test_all_codes_with_extreme_scales(served: Served, format: Format, num: int) -> None:
    source = boundary(format)
    values = source.values()
    tiny = values[(values != 0) & (values.abs() < 2.0**-126)]
    assert len(tiny) or format.element == "int8" or format.scale == "float16", "premise: denormal values"
    assert values.isinf().any() or format.element != "e4m3" or format.scale != "float32", "premise: overflow"
    rows, columns = source.shape
    weight: Any = served.ops.new_weight(rows, columns, partial(torch.empty, dtype=served.dtype), format)
    weight.copy_(source)
    plain = stored(served.ops, values.to(served.dtype))
    assert same_bits(weight.to_dense(), plain.to_dense())
    units = torch.eye(source.shape[1], dtype=served.dtype)
    for rows in units.split(num):
        found = served.ops.linear(rows, weight)
        assert same_bits(found, served.ops.linear(rows, plain))
    if served.dtype == torch.float32 and not values.isinf().any():
        assert torch.equal(found, values.T[-len(found) :])


@each_format
@pytest.mark.parametrize("columns", [7, 300])
def test_codes_and_scales_come_back(format: Format, columns: int) -> None:
    weight = new(40, columns, format)
    source = quantize(randn(40, columns), format)
    weight.copy_(source)
    found = weight.quantized()
    for name in ("codes", "scales", "zeros", "row_scales"):
        left, right = getattr(found, name), getattr(source, name)
        assert (left is None) == (right is None) and (left is None or same_bits(left, right)), name


def new(rows: int, columns: int, format: Format, unit: int | None = None) -> QuantizedWeight:
    return QuantizedWeight.new(rows, columns, partial(torch.empty, dtype=torch.bfloat16), format, unit)


@each_format
def test_a_slice_of_rows(format: Format) -> None:
    """A matrix stored in slices is the matrix stored whole. A slice shares the memory of the matrix."""
    matrix = randn(3 * 160, 300, dtype=torch.bfloat16)
    matrix[100] *= 9
    whole, sliced = new(480, 300, format, 160), new(480, 300, format, 160)
    whole.copy_(matrix)
    for start, end in ((0, 128), (128, 288), (288, 480)):
        sliced.narrow(0, start, end - start).copy_(matrix[start:end])
    assert same_bits(sliced.data, whole.data)
    part = whole.narrow(0, 128, 48)
    assert part.shape == (48, 300) and same_bits(part.to_dense(), whole.to_dense()[128:176])
    other = new(48, 300, format)
    other.copy_(part)
    assert same_bits(other.to_dense(), part.to_dense())
    with pytest.raises(ValueError, match="must begin and end at multiples of 16"):
        whole.narrow(0, 8, 16)


@pytest.mark.parametrize("start,length", [(64, 96), (128, 16), (0, 64)])
@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_a_slice_that_cuts_a_block_is_refused(name: str, start: int, length: int) -> None:
    with pytest.raises(ValueError, match=f"quantized to {name} must begin and end at multiples of 128 rows"):
        new(320, 32, FORMATS[name], 160).narrow(0, start, length).copy_(randn(length, 32))


# Bytes of 4096 rows with 4096 columns, divided by the elements.
BYTES = {"fp8": 1 + 4 / 128, "fp8_channel": 1 + 4 / 4096, "int8": 1 + 4 / 4096, "mxfp8": 1 + 1 / 32}
BYTES |= {"mxfp4": 0.5 + 1 / 32, "nvfp4": 0.5 + 1 / 16 + 4 / 4096, "awq": 0.5 + 3 / 128}
BYTES |= {"int8_dynamic": BYTES["int8"], "fp8_dynamic": BYTES["fp8_channel"]}


@each_format
def test_memory(format: Format) -> None:
    empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    weight = QuantizedWeight.new(4096, 4096, empty, format, None)
    assert weight.nbytes == 4096 * 4096 * BYTES[format.name]
    assert weight.dtype == torch.bfloat16 and weight.data.shape[0] == 4096


def test_what_is_refused() -> None:
    weight = new(32, 32, FORMATS["fp8"])
    source = quantize(randn(32, 32), FORMATS["fp8"])
    weight.copy_(source)
    before = weight.data.clone()
    for wrong, text in (
        (randn(32, 33), r"must have shape \[32, 32\]"),
        (quantize(randn(32, 32), FORMATS["int8"]), "must be in the format fp8 .got int8"),
        (torch.full((32, 32), torch.nan), "1024 of 1024 values are NaN or infinite"),
        (
            dataclasses.replace(quantize(randn(32, 32), FORMATS["fp8"]), scales=torch.full((32, 1), torch.inf)),
            "32 codes",
        ),
        (dataclasses.replace(quantize(randn(32, 32), FORMATS["fp8"]), codes=torch.full((32, 32), 0x7F).byte()), "1024"),
    ):
        with pytest.raises(ValueError, match=text):
            weight.copy_(wrong)
    with pytest.raises(ValueError, match="cannot be replaced, because the elements of a block share"):
        weight.put_(torch.tensor([0]), torch.ones(1))
    assert same_bits(weight.data, before)
    scaled = quantize(randn(32, 32), FORMATS["mxfp4"])
    scaled.scales[3] = 255
    with pytest.raises(ValueError, match="1 codes or scales in mxfp4 are NaN or infinite"):
        new(32, 32, FORMATS["mxfp4"]).copy_(scaled)


def test_merged_weights_are_quantized() -> None:
    from trueroll.kernels.cpu import backend as ops

    weight, a, b = randn(64, 48, dtype=torch.bfloat16), randn(4, 48), randn(64, 4, seed=1)
    out = new(64, 48, FORMATS["int8"])
    assert ops.merge_into(out, weight, a, b, 0.5)
    merged = ops.merge(weight, a, b, 0.5)
    assert same_bits(out.to_dense(), quantize(merged, FORMATS["int8"]).values().bfloat16())
    before = out.data.clone()
    assert not ops.merge_into(out, weight, a, torch.full((64, 4), 3e38), 1e9)
    assert same_bits(out.data, before)


def test_backends_without_formats() -> None:
    assert reference.FORMATS == frozenset({"int8_dynamic", "fp8_dynamic"})
    with pytest.raises(AssertionError, match="stores no matrices of this format"):
        reference.new_weight(16, 16, torch.empty, FORMATS["fp8"])
