"""The formats of quantized weights, compared with an independent definition that finds nearest numbers in float64."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from matrix import thinned
from torch import Tensor

from trueroll.errors import ConfigError
from trueroll.kernels.precision import MATRIX_ROLES, roundings, with_quantization
from trueroll.kernels.quantization import FORMATS, Format, Quantized, join, quantize, round_trip
from trueroll.kernels.specs import ExpertsSpec

from .inputs import decoder_spec, layer_spec

NAMES = list(FORMATS)


def e4m3(code: int) -> float:
    """One sign bit, four bits of the exponent with bias 7, and three bits of the mantissa; no infinity."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def e2m1(code: int) -> float:
    """One sign bit, two bits of the exponent with bias 1, and one bit of the mantissa."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


NUMBERS: dict[str, list[float]] = {
    "e4m3": [e4m3(code) for code in range(256)],
    "e2m1": [e2m1(code) for code in range(16)],
    "int8": [float(np.int8(np.uint8(code))) for code in range(256)],
}
LARGEST = {"e4m3": 448.0, "e2m1": 6.0, "int8": 127.0}


def nearest(x: np.ndarray, element: str) -> np.ndarray:
    """Return the nearest number of each x. Ties go to the number with an even code, and large x to the largest number.
    Zero keeps the sign of x, where the element has signed zeros.
    """
    values = {abs(value): code for code, value in enumerate(NUMBERS[element]) if value >= 0 and np.isfinite(value)}
    sizes = np.array(sorted(value for value in values if value <= LARGEST[element]))
    codes = np.array([values[size] for size in sizes])
    size = np.abs(x.astype(np.float64))
    above = np.clip(np.searchsorted(sizes, size), 1, len(sizes) - 1)
    low, high = sizes[above - 1], sizes[above]
    is_up = (size - low > high - size) | ((size - low == high - size) & (codes[above] % 2 == 0))
    found = np.copysign(np.where(is_up, high, low), x)
    return found + 0.0 if element == "int8" else found


def blocks_of(shape: tuple[int, int], format: Format) -> list[tuple[slice, slice]]:
    rows, columns = shape
    width = format.columns or columns
    return [
        (slice(r, min(r + format.rows, rows)), slice(c, min(c + width, columns)))
        for r, c in product(range(0, rows, format.rows), range(0, columns, width))
    ]


def expected_values(x: np.ndarray, format: Format) -> np.ndarray:
    """Return the values of a float32 matrix, block by block."""
    found, f32 = np.empty_like(x), np.float32
    tensor_scales = {
        r: max(f32(np.abs(x[r : r + 128]).max()) / f32(448.0 * 6.0), f32(2.0**-126)) for r in range(0, len(x), 128)
    }
    for rows, columns in blocks_of(x.shape, format):
        block = x[rows, columns]
        peak = np.abs(block).max()
        if format.element == "int4":
            low, high = min(block.min(), f32(0)), max(block.max(), f32(0))
            scale = f32(np.float16(max((high - low) / f32(15), f32(2.0**-14))))
            zero = np.clip(np.rint(-low / scale), 0, 15)
            codes = np.clip(np.rint(block / scale) + zero, 0, 15)
            found[rows, columns] = (codes - zero).astype(f32) * scale
            continue
        if format.scale == "e8m0":
            exponent = np.floor(np.log2(np.float64(peak))) if peak else -127.0
            scale = np.float64(2.0) ** np.clip(exponent - {"e4m3": 8, "e2m1": 2}[format.element], -127, 127)
        elif format.scale == "e4m3":
            shared = tensor_scales[rows.start // 128 * 128]
            scale = f32(nearest(np.array([peak / f32(6.0) / shared], f32), "e4m3")[0]) * shared
        else:
            largest = f32(LARGEST[format.element])
            most = f32((1 - 2.0**-22) * 2.0**128 / largest.astype(np.float64))
            scale = min(max(peak / largest, f32(2.0**-126)), most)
        quotients = block / f32(scale) if scale else np.copysign(f32(0), block)
        found[rows, columns] = nearest(quotients, format.element).astype(f32) * f32(scale)
    return found


def bits(x: np.ndarray | Tensor) -> np.ndarray:
    return np.asarray(x).view(np.int32)


def random_matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Return rows with scales between 2**-20 and 2**10, and some elements that are much larger."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.exp2(
        torch.randint(-20, 11, (rows, 1), generator=generator).float()
    )
    return torch.where(torch.rand(x.shape, generator=generator) < 0.01, x * 64, x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [1024, 200])
@thinned(lambda name, columns: columns == 200)
def test_values_are_those_of_the_definition(name: str, columns: int) -> None:
    format, x = FORMATS[name], random_matrix(300 if columns == 200 else 1000, columns)
    found = quantize(x, format).values()
    assert not torch.equal(found, x), "premise: values are rounded"
    assert np.array_equal(bits(found), bits(expected_values(x.numpy(), format)))


def boundaries(element: str, scale: float) -> Tensor:
    """Return every number, the middle between every two neighbours, and the float32 numbers around each middle, times a
    power of two.
    """
    sizes = sorted({abs(value) for value in NUMBERS[element] if np.isfinite(value)} - {128.0})
    middles = [(low + high) / 2 for low, high in zip(sizes, sizes[1:], strict=False)]
    x = torch.tensor([*sizes, *middles], dtype=torch.float32)
    x = torch.cat((x, torch.nextafter(x, torch.zeros(())), torch.nextafter(x, torch.full((), torch.inf))))
    return torch.cat((x, -x)).clamp(-sizes[-1], sizes[-1]) * scale


@pytest.mark.parametrize("exponent", [-100, 0, 100])
@pytest.mark.parametrize("name", ["fp8", "fp8_channel", "int8", "mxfp8", "mxfp4"])
def test_numbers_and_the_middles_between_them(name: str, exponent: int) -> None:
    """Each block also has the largest number, so that its scale is a power of two."""
    format = FORMATS[name]
    x, most = boundaries(format.element, 2.0**exponent), LARGEST[format.element] * 2.0**exponent
    width = (format.columns or 31) - 1
    rows = torch.nn.functional.pad(x, (0, -len(x) % width)).view(-1, width)
    matrix = torch.cat((torch.full((len(rows), 1), most), rows), 1)
    quantized = quantize(matrix, format)
    assert quantized.float_scales().eq(2.0**exponent).all(), "premise: the scale is exact"
    expected = nearest((matrix / 2.0**exponent).numpy(), format.element).astype(np.float32) * np.float32(2.0**exponent)
    assert np.array_equal(bits(quantized.values()), bits(expected))


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_zeros_and_tiny_numbers(name: str) -> None:
    """A block of zeros keeps its zeros; the scale of tiny numbers is not 0, so no value is NaN."""
    format = FORMATS[name]
    for value in (0.0, -0.0, 2.0**-149, -(2.0**-140), 2.0**-126, 2.0**-100):
        x = torch.full((130, 140), value)
        x[0] = 1.0
        found = round_trip(x, format)
        assert found.isfinite().all() and (value or not found[-1].any())
        assert found[-1].abs().max() <= 2 * abs(value), value
        assert np.array_equal(bits(found), bits(expected_values(x.numpy(), format)))


@pytest.mark.parametrize("name", NAMES)
def test_large_numbers_stay_finite(name: str) -> None:
    most = 60000.0 if name == "awq" else torch.finfo(torch.float32).max
    x = torch.tensor([[most, -most, most / 3, 1.0] * 10] * 3)
    assert round_trip(x, FORMATS[name]).isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    x = torch.ones(4, 40)
    x[1, 2] = x[3, 39] = bad
    with pytest.raises(ValueError, match=f"2 of 160 values are NaN or infinite, which {name} cannot store"):
        quantize(x, FORMATS[name])


def test_blocks_that_are_too_wide_for_a_float16_scale_are_refused() -> None:
    x = torch.zeros(2, 300)
    x[0, 0], x[0, 1] = 1e6, -1e6
    with pytest.raises(ValueError, match="1 blocks of 2 rows have values that are too far apart for a float16 scale"):
        quantize(x, FORMATS["awq"])


def same(one: Quantized, other: Quantized) -> bool:
    pairs = zip(vars(one).values(), vars(other).values(), strict=True)
    return all(a.equal(b) if isinstance(a, Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("name", NAMES)
def test_a_matrix_may_be_quantized_in_slices_of_rows(name: str) -> None:
    format, x = FORMATS[name], random_matrix(300, 200)
    whole = quantize(x, format)
    assert same(join([quantize(x[start : start + 128], format) for start in (0, 128, 256)], 0), whole)
    assert same(join([whole.rows(slice(0, 50)), whole.rows(slice(50, None))], 0), whole)


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_columns_have_the_same_values(name: str) -> None:
    format, x = FORMATS[name], random_matrix(130, 300)
    whole = quantize(x, format)
    parts = [whole.columns(start, length) for start, length in ((0, 128), (128, 172))]
    assert torch.equal(torch.cat([part.values() for part in parts], 1), whole.values())
    assert same(join(parts, 1), whole)
    if format.columns is not None:
        with pytest.raises(ValueError, match=f"must begin at a multiple of {format.columns} columns"):
            whole.columns(format.columns // 2, 16)


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_blocks_of_rows_begin_anew_in_each_unit(name: str) -> None:
    """A unit of 200 rows is one matrix, such as the gate of an expert."""
    x = random_matrix(400, 64)
    apart = join([quantize(x[:200], FORMATS[name]), quantize(x[200:], FORMATS[name])], 0)
    assert same(quantize(x, FORMATS[name], unit=200), apart)
    assert not same(quantize(x, FORMATS[name]), apart), "premise: the unit matters"


@pytest.mark.parametrize("name", ["fp8", "fp8_channel", "int8", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_quantized_to_themselves(name: str, dtype: torch.dtype) -> None:
    """A worker that saved its weights serves the same bits after a restart."""
    x = torch.randn(300, 200, generator=torch.Generator().manual_seed(0)).to(dtype)
    once = round_trip(x, FORMATS[name])
    assert not torch.equal(once, x), "premise: values are rounded"
    assert torch.equal(round_trip(once, FORMATS[name]).view(torch.int16), once.view(torch.int16))


def test_each_setting_names_weights() -> None:
    dense = with_quantization(decoder_spec(layer_spec()), "fp8")
    assert {held.format for role, held in dense.held.items() if role in MATRIX_ROLES} == {FORMATS["fp8"]}
    names = roundings(dense)
    assert {name.rpartition("mixer.")[2] for name in names if "mixer." in name} == {"q", "k", "v", "o"}
    assert not any("norm" in name or "embed" in name or "lm_head" in name for name in names)
    mixture = decoder_spec(replace(layer_spec(), mlp=ExpertsSpec(4, 2, 64)))
    of_experts = roundings(with_quantization(mixture, "mxfp4:experts"))
    assert {name.rpartition(".")[2] for name in of_experts} == {"gate_up", "down"}
    assert with_quantization(mixture, "none") == mixture and not roundings(mixture)


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("gptq", "quantization must be one of none, .*, fp8_dynamic, or a format followed by ':experts' (got 'gptq')"),
        ("fp8:experts", "quantization: fp8:experts needs a model with experts, but .* has none; set .* to fp8"),
    ],
)
def test_wrong_settings_are_refused(setting: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace("(got", re.escape("(got")).replace("')", r"'\)")):
        with_quantization(decoder_spec(layer_spec()), setting)
