"""Products with codes in Triton's interpreter: the bits of products with the plain matrix of the values."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import Any, cast

import pytest
import torch
import triton.language as tl
from matrix import thinned
from torch import Tensor

from trueroll.kernels.coded import CodedWeight, places_of
from trueroll.kernels.contract import AttentionWeights, mark_rows
from trueroll.kernels.quantization import FORMATS, Format, quantize
from trueroll.kernels.specs import Pieces
from trueroll.kernels.triton import backend, experts, products, weights
from trueroll.kernels.triton.launch import exact_jit, launch
from trueroll.kernels.triton.products import CUT_TILES, NARROW_TILE, TILES, unit
from trueroll.kernels.triton.weights import load_weight, row_size

from ..cpu.test_quantized import boundary
from ..inputs import decoder_spec, layer_spec, make_rotations, randn, same_bits
from .test_experts import BIASED, ODD, SPEC, cut
from .test_experts import inputs as inputs_of_experts
from .test_products import cut_everything, use_tile

CODED = {name: FORMATS[name] for name in FORMATS if name in backend.FORMATS}
each_format = pytest.mark.parametrize("format", CODED.values(), ids=CODED)
# Whole steps without masks; masks, with groups that are cut by a step; elements loaded one by one.
COLUMNS = (256, 200, 121)
FEATURES = 37


def pair(matrix: Tensor, format: Format, unit: int | None = None) -> tuple[CodedWeight, Tensor]:
    """Return a matrix of codes, and the plain matrix of its values."""
    empty = partial(torch.empty, dtype=matrix.dtype)
    coded = cast(CodedWeight, backend.new_weight(*matrix.shape, empty=empty, format=format, unit=unit))
    coded.copy_(matrix)
    values = quantize(matrix, format, unit).values().to(matrix.dtype)
    assert not same_bits(values, matrix), "premise: quantization changes the matrix"
    return coded, values


@cache
def weights_of(format: Format, columns: int, dtype: torch.dtype = torch.bfloat16) -> tuple[CodedWeight, Tensor]:
    return pair(randn(FEATURES, columns, dtype=dtype, seed=1), format)


@pytest.mark.parametrize("columns", COLUMNS)
@each_format
@thinned(lambda format, columns: columns == COLUMNS[[*CODED].index(format.name) % 3])
def test_linear(format: Format, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece has its own program, or one program sums all pieces."""
    cut_everything(monkeypatch)
    coded, values = weights_of(format, columns)
    x, bias = randn(17, columns, dtype=torch.bfloat16), randn(FEATURES, dtype=torch.bfloat16, seed=2)
    narrow = columns == COLUMNS[-1]
    for tile, apart in ((NARROW_TILE if narrow else TILES[0], True), (NARROW_TILE if narrow else CUT_TILES[0], False)):
        use_tile(monkeypatch, tile, apart)
        found = products.linear(x, coded, bias)
        assert same_bits(found, products.linear(x, values, bias))
        assert same_bits(products.linear(x[3:4], coded, bias), found[3:4])


# Pieces of whole groups, pieces that begin within groups, and pieces of odd numbers of columns.
PIECES = {"whole": (512, Pieces(4, 128)), "masked": (400, Pieces(8, 48)), "odd": (121, Pieces(2, 63))}


@pytest.mark.parametrize("name", PIECES)
@each_format
@thinned(lambda format, name: (format.name, name) in (("fp8", "whole"), ("nvfp4", "masked"), ("awq", "odd")))
def test_pieces_of_products_that_lead_back(format: Format, name: str) -> None:
    columns, pieces = PIECES[name]
    coded, values = weights_of(format, columns)
    x, residual = randn(5, columns, dtype=torch.bfloat16), randn(5, FEATURES, dtype=torch.bfloat16, seed=3)
    found, expected = (products.project_back(x, each, residual, None, pieces) for each in (coded, values))
    assert same_bits(found, expected)
    assert same_bits(products.back_sums(x, coded, pieces), products.back_sums(x, values, pieces))


@pytest.mark.parametrize("columns", COLUMNS)
@each_format
@thinned(lambda format, columns: (format.name, columns) in (("fp8", 200), ("nvfp4", 256)))
def test_gate_and_up(format: Format, columns: int) -> None:
    """Gate or up may be plain."""
    gate, up = weights_of(format, columns), pair(randn(FEATURES, columns, dtype=torch.bfloat16, seed=5), format)
    x = randn(17, columns, dtype=torch.bfloat16)
    expected = backend.gate_up(x, gate[1], up[1], "silu")
    for g in gate:
        for u in up:
            assert same_bits(backend.gate_up(x, cast(Any, g), cast(Any, u), "silu"), expected)


@each_format
@thinned(lambda format: format.name == "mxfp4")
def test_queries_keys_and_values(format: Format) -> None:
    """Any of the matrices may be plain, or the rows of a whole matrix."""
    spec, columns = layer_spec(4, 2, 16), 200
    pairs = [pair(randn(rows, columns, dtype=torch.bfloat16, seed=rows), format) for rows in (64, 32, 32)]
    rows = dict(zip("qkv", (64, 32, 32), strict=True))
    x, slots = randn(5, columns, dtype=torch.bfloat16), torch.arange(5)
    rotation = make_rotations(cast(Any, backend), decoder_spec(spec), slots)[0]

    def compute(q: Any, k: Any, v: Any) -> tuple[Tensor, ...]:
        k_cache, v_cache = torch.zeros(2, 8, 2, 2, 16, dtype=torch.bfloat16)
        weights = AttentionWeights(q, k, v, None, None, cast(Any, None))
        return backend.qkv(x, cast(Any, spec.mixer), weights, rotation, k_cache, v_cache, slots), k_cache, v_cache

    expected = compute(*(values for _, values in pairs))
    assert all(map(same_bits, compute(*(coded for coded, _ in pairs)), expected))
    assert all(map(same_bits, compute(pairs[0][0], pairs[1][0], pairs[2][1]), expected))
    joined, _ = pair(torch.cat([randn(n, columns, dtype=torch.bfloat16, seed=n) for n in rows.values()]), format)
    if format.rows == 1 and format.scale != "e4m3":
        parts = [mark_rows(joined.narrow(0, start, n), n) for start, n in ((0, 64), (64, 32), (96, 32))]
        assert all(map(same_bits, compute(*parts), expected))


@pytest.mark.parametrize("name", ["", "biased", "odd"])
@each_format
@thinned(lambda format, name: (format.name, name) in (("nvfp4", ""), ("awq", "odd")))
def test_experts(format: Format, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each expert, the blocks of rows of gate, up and down begin at the first row of the matrix."""
    cut(monkeypatch)
    spec, hidden = {"": (SPEC, 136), "biased": (BIASED, 136), "odd": (ODD, 35)}[name]
    x, spec, plain, chosen, gates, shared = inputs_of_experts(spec, 23, torch.bfloat16, hidden)
    inner = pair(plain.gate_up.to_dense(), format, spec.intermediate_size)
    outer = pair(plain.down.to_dense(), format, hidden)
    found, expected = (
        experts.experts(x, spec, dataclasses.replace(plain, gate_up=gate_up, down=down), chosen, gates, shared)
        for gate_up, down in zip(inner, outer, strict=True)
    )
    assert same_bits(found, expected)


@exact_jit
def _values_kernel(
    w_ptr,
    out_ptr,
    rows,
    columns,
    FORMAT: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Program i stores the values of block i of the rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns *= UNIT
    w_row = w_ptr + (row % rows) * row_size(columns, FORMAT)
    w_tile = w_row[:, None] + tl.arange(0, DEPTH)[None, :]
    for k in range(0, columns, DEPTH):
        column = k + tl.arange(0, DEPTH)
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        values = load_weight(w_row, w_tile, k, columns, columns, dtype, FORMAT, UNIT, DEPTH)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        tl.store(out_ptr + row[:, None] * columns + column[None, :], values, mask=inside)


def values_of(weight: CodedWeight, depth: int) -> Tensor:
    """Return the values with which the kernels compute."""
    (rows, columns), out = weight.shape, torch.empty(weight.shape, dtype=weight.dtype)
    sizes: dict[str, Any] = dict(FORMAT=weight.format, UNIT=unit(columns), ROWS=256, DEPTH=depth)
    launch(_values_kernel, (-(-rows // 256),), weight.data, out, rows, columns // unit(columns), warps=4, **sizes)
    return out


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each_format
def test_all_codes_with_extreme_scales(format: Format, dtype: torch.dtype) -> None:
    source = boundary(format)
    weight: Any = backend.new_weight(*source.shape, empty=partial(torch.empty, dtype=dtype), format=format)
    weight.copy_(source)
    values = source.values()
    tiny = (values != 0) & (values.abs() < 2.0**-126)
    assert tiny.any() or format.element == "int8" or format.scale == "float16", "premise: denormal values"
    assert same_bits(values_of(weight, 128), values.to(dtype)) and same_bits(weight.to_dense(), values.to(dtype))


@pytest.mark.parametrize("columns", [256, 192, 208, 200, 130, 121])
@each_format
def test_values_of_all_ways_to_load(format: Format, columns: int) -> None:
    """Elements are loaded with and without masks, with groups that end within a step, and one by one."""
    coded, values = pair(randn(5, columns, dtype=torch.bfloat16), format)
    for depth in (32, 64, 128):
        assert same_bits(values_of(coded, depth), values)


@each_format
def test_kernels_know_the_places_in_a_row(format: Format) -> None:
    for columns in (1, 2, 15, 16, 31, 32, 33, 127, 128, 129, 500, 4096):
        assert weights.places_in_row.fn(columns, format) == places_of(format, columns)


def test_merged_weights_are_quantized() -> None:
    format = FORMATS["int8"]
    weight, a, b = randn(64, 48, dtype=torch.bfloat16), randn(4, 48), randn(64, 4, seed=1)
    out, _ = pair(randn(64, 48, dtype=torch.bfloat16, seed=2), format)
    assert backend.merge_into(out, weight, a, b, 0.5)
    assert same_bits(out.to_dense(), quantize(backend.merge(weight, a, b, 0.5), format).values().bfloat16())
    before = out.data.clone()
    assert not backend.merge_into(out, weight, a, torch.full((64, 4), 3e38), 1e9)
    assert same_bits(out.data, before)


def test_formats_with_activations_are_not_stored() -> None:
    dynamic = {"int8_dynamic", "fp8_dynamic"}
    assert backend.FORMATS == FORMATS.keys() - dynamic
    for name in dynamic:
        with pytest.raises(AssertionError, match="stores no matrices of this format"):
            backend.new_weight(16, 16, torch.empty, FORMATS[name])
