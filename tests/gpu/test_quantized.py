"""Products with quantized weights have the bits of products with the plain weights of their values, on a GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trueroll.engine.config import EngineConfig
from trueroll.engine.running.loading import load_dummy
from trueroll.kernels.contract import Backend, ExpertsWeights
from trueroll.kernels.quantization import FORMATS, Format, quantize
from trueroll.kernels.specs import ExpertsSpec, Pieces
from trueroll.kernels.triton import products
from trueroll.kernels.triton.backend import FORMATS as NAMES

from ..kernels.cpu.test_quantized import boundary
from .moved import DEVICE, cut_config, random, same, sized

CODED = {name: FORMATS[name] for name in FORMATS if name in NAMES}
COUNTS = sized((1, 16, 17, 65, 129, 300, 1024), (1, 17))
# Layers of Qwen2.5-7B, remainders of K modulo 128, and elements that are loaded one by one.
SHAPES = sized(
    ((3584, 3584), (3584, 18944), (9000, 584), (1024, 3592), (528, 130), (2048, 1537)), ((72, 130), (72, 41))
)

each_format = pytest.mark.parametrize("format", CODED.values(), ids=CODED)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def pair(ops: Backend, matrix: Tensor, format: Format, unit: int | None = None) -> tuple[Any, Tensor]:
    """Return a matrix of codes, and the plain matrix of its values. Both are quantized on the GPU."""
    empty = partial(torch.empty, dtype=matrix.dtype, device=DEVICE)
    rows, columns = matrix.shape
    coded = ops.new_weight(rows, columns, empty, format, unit)
    coded.copy_(matrix)
    values = quantize(matrix, format, unit).values().to(matrix.dtype)
    assert not same(values, matrix), "premise: quantization changes the matrix"
    return coded, values


@each_format
def test_codes_and_scales_are_those_of_a_cpu(kernels: Backend, format: Format) -> None:
    matrix = random(300, 584, dtype=torch.bfloat16)
    coded, values = pair(kernels, matrix, format)
    expected = quantize(matrix.cpu(), format)
    for name in ("codes", "scales", "zeros", "row_scales"):
        found, wanted = getattr(coded.quantized(), name), getattr(expected, name)
        assert found is None if wanted is None else same(found.cpu(), wanted), name
    assert same(values.cpu(), expected.values().bfloat16()) and coded.nbytes < matrix.nbytes


@each_dtype
@each_format
def test_all_codes_with_extreme_scales(kernels: Backend, format: Format, dtype: torch.dtype) -> None:
    source = boundary(format)
    rows, columns = source.shape
    weight: Any = kernels.new_weight(rows, columns, partial(torch.empty, dtype=dtype, device=DEVICE), format)
    weight.copy_(source)
    values, units = source.values().to(dtype).to(DEVICE), torch.eye(columns, dtype=dtype, device=DEVICE)
    assert same(kernels.linear(units, weight), kernels.linear(units, values))


@each_dtype
@pytest.mark.parametrize("n,k", SHAPES)
@each_format
def test_products(kernels: Backend, format: Format, n: int, k: int, dtype: torch.dtype) -> None:
    coded, values = pair(kernels, random(n, k, dtype=dtype, scale=k**-0.5, seed=1), format)
    gate, up = (pair(kernels, random(n // 2, k, dtype=dtype, scale=k**-0.5, seed=seed), format) for seed in (2, 3))
    x, pieces = random(max(COUNTS), k, dtype=dtype), Pieces(4, -(-k // 64) * 16)
    for count in COUNTS:
        part = x[:count]
        assert same(kernels.linear(part, coded), kernels.linear(part, values)), count
        assert same(kernels.back_sums(part, coded, pieces), kernels.back_sums(part, values, pieces)), count
        found, expected = (kernels.gate_up(part, gate[i], up[i], "silu") for i in range(2))
        assert same(found, expected), count


@each_format
def test_products_of_every_tile(kernels: Backend, format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """Includes tiles that the tables never choose."""
    n, k = sized((3592, 3592), (72, 1544))
    coded, values = pair(kernels, random(n, k, dtype=torch.bfloat16, scale=k**-0.5, seed=1), format)
    x, factor = random(sized(2100, 20), k, dtype=torch.bfloat16), products.factor_of(coded)
    expected = kernels.linear(x, values)
    ways = {way for count in (1, len(x)) for way in products.ways_of(count, k, factor.rows, factor.most_pieces, True)}
    assert len(ways) > len(products.CUT_TILES), "premise: many tiles"
    for way in ways:
        monkeypatch.setattr(products, "way_of", lambda tokens, factor, way=way: way)
        assert same(kernels.linear(x, coded), expected), way


@each_format
def test_experts(kernels: Backend, format: Format) -> None:
    spec, hidden = sized((ExpertsSpec(128, 8, 768), 2048), (ExpertsSpec(4, 2, 48), 72))
    count, inner = spec.num_experts, spec.intermediate_size
    gate_up = pair(kernels, random(count * 2 * inner, hidden, dtype=torch.bfloat16, scale=hidden**-0.5), format, inner)
    down = pair(kernels, random(count * hidden, inner, dtype=torch.bfloat16, scale=inner**-0.5), format, hidden)
    router = random(count, hidden, dtype=torch.bfloat16, scale=hidden**-0.5, seed=1)
    weights = (ExpertsWeights(router, None, gate_up[i], None, down[i], None) for i in range(2))
    coded, plain = weights
    x = random(max(COUNTS), hidden, dtype=torch.bfloat16, seed=2)
    for part in (x[:count] for count in COUNTS):
        chosen, gates = kernels.route(kernels.linear(part, router), spec)
        assert same(*(kernels.experts(part, spec, each, chosen, gates) for each in (coded, plain)))


@pytest.mark.parametrize("setting", ["fp8", "mxfp4", "awq"])
def test_a_worker_holds_codes(setting: str, tmp_path: Path) -> None:
    folder = cut_config("qwen3-0.6b", tmp_path)
    config = EngineConfig(model=str(folder), device=str(DEVICE), backend="triton", max_model_len=64)
    plain, coded = (load_dummy(each) for each in (config, config.model_copy(update={"quantization": setting})))
    assert coded.weights.num_bytes < plain.weights.num_bytes
