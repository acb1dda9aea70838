"""Keys and values of 8 bits: the values against an independent definition, and attention over codes and over values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matrix import thinned
from torch import Tensor

from trueroll.errors import ConfigError
from trueroll.kernels.cache_formats import CACHE_FORMATS, CacheFormat, encode, round_trip
from trueroll.kernels.contract import new_caches
from trueroll.kernels.layer import store
from trueroll.kernels.precision import with_kv_cache_dtype
from trueroll.kernels.specs import AttentionSpec, CachedSpec, LatentSpec

from .backends import SERVED, Implementation, Served, served_id
from .inputs import NORM, Paged, decoder_spec, layer_spec, randn, same_bits

each_format = pytest.mark.parametrize("format", CACHE_FORMATS.values(), ids=CACHE_FORMATS)
NATIVE = [served for served in SERVED if served[0].backend == "cpu"]
natively = pytest.mark.parametrize("served", NATIVE, ids=served_id, indirect=True)
INT8, FP8 = CACHE_FORMATS.values()
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
)
E4M3 = E4M3[:-1]  # the last code is NaN


def nearest_e4m3(x: np.ndarray) -> np.ndarray:
    """Return the nearest numbers of the kind e4m3, found by search. Ties go to the number with an even code."""
    magnitude = np.abs(x).astype(np.float64)
    above = np.searchsorted(E4M3, magnitude).clip(1, len(E4M3) - 1)
    low, high = magnitude - E4M3[above - 1], E4M3[above] - magnitude
    code = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return np.copysign(E4M3[code], x).astype(np.float32)


def defined(row: np.ndarray, format: CacheFormat) -> np.ndarray:
    """Return the values of a finite float32 vector, before they are rounded to the dtype, in numpy's arithmetic."""
    f32, f16 = np.float32, np.float16
    bounded = lambda x, least: f32(f16(min(max(x, f32(least)), f32(65504))))  # noqa: E731
    with np.errstate(over="ignore"):
        if format is FP8:
            scale = bounded(np.abs(row).max() / f32(448), 2.0**-24)
            return nearest_e4m3((row / scale).clip(-448, 448)) * scale
        scale = bounded((row.max() - row.min()) / f32(255), 2.0**-24)
        zero = bounded(row.min(), -65504)
        return np.rint((row - zero) / scale).clip(0, 255).astype(np.uint8).astype(f32) * scale + zero


def _parts(numbers: Tensor, size: int) -> Tensor:
    return F.pad(numbers, (0, -len(numbers) % size)).view(-1, size)


def vectors(size: int = 64) -> Tensor:
    """Return random vectors of all magnitudes, with and without an offset, and vectors at the bounds of the formats:
    numbers half way between two codes, equal elements, zeros of both signs, denormal and very large numbers.
    """
    random, scales = randn(2000, size), torch.logspace(-12, 12, 2000, base=10)[:, None]
    middles = torch.from_numpy((E4M3[1:] + E4M3[:-1]) / 2).float()
    ties = torch.cat((torch.tensor([448.0, -0.0]), middles, -middles, middles * 2.0**-3))
    halves = torch.arange(255) + 0.5
    bounds = [torch.cat((torch.tensor([448.0]), part)) for part in _parts(ties, size - 1)]
    bounds += [torch.cat((torch.tensor([0.0, 255.0]), part)) for part in _parts(halves, size - 2)]
    alike = torch.tensor([0.0, -0.0, 1e-45, -3e-8, 0.1, -7.3, 65504.0, 1e6, 3e38, -3e38])[:, None].expand(-1, size)
    wide = alike.clone()
    wide[:, ::3] *= -1.0
    return torch.cat((random * scales, random + 100.0, random * 1e-4 + scales, torch.stack(bounds), alike, wide))


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_are_those_of_the_definition(format: CacheFormat, dtype: torch.dtype) -> None:
    x, largest = vectors(), torch.finfo(dtype).max
    x = x.clamp(-largest, largest).to(dtype)
    exact = torch.from_numpy(np.stack([defined(row, format) for row in x.float().numpy()]))
    assert dtype != torch.float16 or (exact.abs() > largest).any(), "premise: values beyond the range of the dtype"
    assert same_bits(round_trip(x, format, (x.shape[1],)), exact.clamp(-largest, largest).to(dtype))


@each_format
def test_a_vector_that_is_not_finite_has_only_nan(format: CacheFormat) -> None:
    x = randn(4, 32)
    x[0, 3], x[1, 5], x[2, 7] = torch.nan, torch.inf, -torch.inf
    found = round_trip(x, format, (16, 16))
    assert found[:3, :16].isnan().all() and found[:3, 16:].isfinite().all() and found[3].isfinite().all()
    assert not encode(x[:3, :16], format).codes.any()


@each_format
def test_gradients_pass_through_the_rounding(format: CacheFormat) -> None:
    x = randn(5, 48).requires_grad_()
    out = round_trip(x, format, (16, 32))
    (out * randn(5, 48, seed=1)).sum().backward()
    assert x.grad is not None and x.grad.equal(randn(5, 48, seed=1)) and not out.equal(x)


def test_settings() -> None:
    spec = decoder_spec(layer_spec())
    assert with_kv_cache_dtype(spec, "auto") == spec
    found = with_kv_cache_dtype(spec, "int8")
    assert found.kv_cache_dtype == "int8" and found.attentions == [replace(spec.attentions[0], cache_format=INT8)]
    with pytest.raises(ConfigError, match=r"kv_cache_dtype must be one of auto, int8, fp8 .got 'int4'"):
        with_kv_cache_dtype(spec, "int4")


def pair(served: Served, format: CacheFormat, lens: list[int], latent: int | None = None, **shape: Any) -> list[Paged]:
    """Return the same sequences in a cache of codes, and in a plain cache that holds the values of the codes."""
    coded, plain = (Paged(served, lens, latent=latent, **shape) for _ in range(2))
    blocks, block_size, kv_heads, size = coded.k_cache.shape
    spec: CachedSpec = AttentionSpec(kv_heads, kv_heads, size, 1.0, cache_format=format)
    if latent is not None:
        spec = LatentSpec(1, latent, size - latent, 16, 16, 1.0, NORM, cache_format=format)
    coded.k_cache, coded.v_cache = new_caches(served.ops, spec, blocks, block_size, torch.empty)
    assert coded.k_cache.dtype == format.dtype, "premise: the cache holds codes"
    for cache in (coded.k_cache, coded.v_cache):
        cache.view(torch.uint8).fill_(0xFF)  # NaN
    for i in range(len(lens)):
        coded.write(i)
        plain.k[i] = round_trip(coded.k[i], format, spec.key_sizes)
        plain.v[i] = round_trip(coded.v[i], format, coded.v[i].shape[2:])
        assert not same_bits(plain.k[i], coded.k[i]), "premise: the format changes keys"
        plain.write(i)
    return [coded, plain]


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one head, window": dict(heads=3, kv_heads=3, size=16, window=150),
    "group of 8": dict(heads=8, kv_heads=1, size=128, block_size=32),
    "sinks and cap": dict(sinks=True, soft_cap=3.0, block_size=4),
    "small blocks": dict(size=80, block_size=2, window=9),
    "other blocks": dict(size=32, block_size=24),
    "spans": dict(spans=((3, 16), (140, 190))),
    "latent": dict(heads=4, kv_heads=1, size=96, latent=64),
    "latent, small blocks": dict(heads=4, kv_heads=1, size=576, latent=512, block_size=8),
}


def is_usual(served: tuple[Implementation, torch.dtype], name: str) -> bool:
    """Return whether every run tests a shape with this implementation and dtype."""
    implementation, dtype = served
    if implementation.emulated or implementation.instruction_set == "portable":
        return name in ("plain", "other blocks") and dtype == torch.bfloat16
    return implementation.instruction_set == "avx512_bf16" or name in ("plain", "latent, small blocks")


@natively
@each_format
@pytest.mark.parametrize("name", SHAPES)
@thinned(lambda served, format, name: is_usual(served, name))
def test_attention_over_codes_has_the_bits_of_attention_over_their_values(
    served: Served, format: CacheFormat, name: str
) -> None:
    lens = [300, 17, 200, 1]
    coded, plain = pair(served, format, lens, **SHAPES[name])
    for chunks in ([(i, 0, n) for i, n in enumerate(lens)], [(0, 299, 300), (2, 150, 200), (1, 16, 17), (3, 0, 1)]):
        for found, expected in zip(coded.attend(chunks), plain.attend(chunks), strict=True):
            assert same_bits(found, expected) and expected.isfinite().all()


@natively
@each_format
def test_all_vectors_get_the_codes_of_the_definition(served: Served, format: CacheFormat) -> None:
    """A query of zeros sees all keys alike, so a sequence of one token returns its value."""
    x = vectors().to(served.dtype)
    x = x[x.isfinite().all(1)]
    spec = AttentionSpec(1, 1, x.shape[1], 1.0, cache_format=format)
    caches = new_caches(served.ops, spec, len(x), 2, torch.zeros)
    slots = 2 * torch.arange(len(x)) + 1
    store(served.ops, spec, x[:, None], x[:, None], *caches, slots)
    coded = encode(x, format)
    codes, shared = caches[1].view(torch.uint8).flatten(1).tensor_split([2 * x.shape[1]], 1)
    assert codes[:, x.shape[1] :].equal(coded.codes)
    numbers = shared.contiguous().view(torch.float16)[:, 1::2]
    parts = [coded.scales] if coded.zeros is None else [coded.scales, coded.zeros]
    assert same_bits(numbers.contiguous(), torch.cat(parts, 1))
    keys = caches[0].view(torch.uint8).flatten(1)
    assert keys[:, 1 : 2 * x.shape[1] : 2].equal(coded.codes) and keys[:, 2 * x.shape[1] :].equal(shared)


@natively
@each_format
def test_a_vector_that_is_not_finite_harms_only_the_queries_that_see_it(served: Served, format: CacheFormat) -> None:
    lens = [150, 40]
    coded, plain = pair(served, format, lens, block_size=8)
    healthy = coded.attend([(0, 0, 150), (1, 0, 40)])
    for paged in (coded, plain):
        for tensor, token, number in ((paged.k[0], 100, torch.inf), (paged.v[0], 130, torch.nan)):
            tensor[token, 0, 5] = number
    plain.k[0][100, 0] = plain.v[0][130, 0] = torch.nan
    for paged in (coded, plain):
        paged.write(0)
    found, expected = (paged.attend([(0, 0, 150), (1, 0, 40)]) for paged in (coded, plain))
    assert torch.equal(found[0].isnan(), expected[0].isnan()) and found[0][100:, :3].isnan().all()
    assert same_bits(found[0].nan_to_num(), expected[0].nan_to_num())
    assert same_bits(found[0][:100], healthy[0][:100]) and same_bits(found[0][:, 3:], healthy[0][:, 3:])
    assert same_bits(found[1], healthy[1])
