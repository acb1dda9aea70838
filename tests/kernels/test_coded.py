"""Quantized matrices as rows of bytes: what is stored comes back, and slices of rows are slices of the memory."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

from trueroll.kernels.coded import CodedWeight, places_of
from trueroll.kernels.keeping import copy_of, device_of
from trueroll.kernels.quantization import FORMATS, Format, quantize

from .inputs import randn, same_bits

each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


def new(rows: int, columns: int, format: Format, unit: int | None = None) -> CodedWeight:
    """Return a weight in memory that is full of ones."""

    def full(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.full(shape, 255, dtype=dtype)

    return CodedWeight.new(rows, columns, full, format, unit)


@each_format
@pytest.mark.parametrize("columns", [7, 300])
def test_codes_and_scales_come_back(format: Format, columns: int) -> None:
    weight, source = new(40, columns, format), quantize(randn(40, columns), format)
    weight.copy_(source)
    found = weight.quantized()
    for name in ("codes", "scales", "zeros", "row_scales"):
        left, right = getattr(found, name), getattr(source, name)
        assert (left is None) == (right is None) and (left is None or same_bits(left, right)), name
    assert same_bits(weight.to_dense(), source.values().bfloat16())
    again = new(40, columns, format)
    again.copy_(randn(40, columns))
    rounded = quantize(randn(40, columns).bfloat16(), format)
    assert same_bits(again.to_dense(), rounded.values().bfloat16())


@each_format
def test_a_slice_of_rows(format: Format) -> None:
    """A matrix stored in slices is the matrix stored whole. A slice shares the memory of the matrix."""
    matrix = randn(3 * 160, 300, dtype=torch.bfloat16)
    matrix[100] *= 9
    whole, sliced = new(480, 300, format, 160), new(480, 300, format, 160)
    whole.copy_(matrix)
    assert same_bits(whole.to_dense(), quantize(matrix, format, 160).values().bfloat16())
    for start, end in ((0, 128), (128, 288), (288, 480)):
        sliced.narrow(0, start, end - start).copy_(matrix[start:end])
    assert same_bits(sliced.data, whole.data)
    part, other = whole.narrow(0, 128, 48), new(48, 300, format)
    assert part.shape == (48, 300) and same_bits(part.to_dense(), whole.to_dense()[128:176])
    assert part.data.is_contiguous() and part.data.data_ptr() == whole.data[128].data_ptr()
    other.copy_(part)
    kept = copy_of(part, torch.device("cpu"))
    part.data.zero_()
    assert same_bits(other.to_dense(), kept.to_dense()) and other.to_dense().any()
    assert device_of(kept) == torch.device("cpu") and kept.format == format


@pytest.mark.parametrize("start,length", [(64, 96), (128, 16), (0, 64)])
@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_a_slice_that_cuts_a_block_is_refused(name: str, start: int, length: int) -> None:
    with pytest.raises(ValueError, match=f"quantized to {name} must begin and end at multiples of 128 rows"):
        new(320, 32, FORMATS[name], 160).narrow(0, start, length).copy_(randn(length, 32))


# Bytes of a row with 4096 columns, before the row is padded to whole units of 32 bytes.
BYTES = {"fp8": 4096 + 4 * 32, "fp8_channel": 4096 + 4, "int8": 4096 + 4}
BYTES |= {"mxfp8": 4096 + 128, "mxfp4": 2048 + 128, "nvfp4": 2048 + 256 + 4, "awq": 2048 + 4 * 32}
BYTES |= {"int8_dynamic": BYTES["int8"], "fp8_dynamic": BYTES["fp8_channel"]}


@each_format
def test_memory(format: Format) -> None:
    empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    weight = CodedWeight.new(64, 4096, empty, format, None)
    assert weight.nbytes == 64 * places_of(format, 4096).size and weight.dtype == torch.bfloat16
    assert places_of(format, 4096).size == -(-BYTES[format.name] // 32) * 32
    assert all(place % 4 == 0 for place in places_of(format, 4097)), "scales are aligned"


def test_what_is_refused() -> None:
    weight = new(32, 32, FORMATS["fp8"])
    source = quantize(randn(32, 32), FORMATS["fp8"])
    weight.copy_(source)
    before = weight.data.clone()
    infinite = dataclasses.replace(source, scales=torch.full((32, 1), torch.inf))
    for wrong, text in (
        (randn(32, 33), r"must have shape \[32, 32\]"),
        (quantize(randn(32, 32), FORMATS["int8"]), "must be in the format fp8 .got int8"),
        (torch.full((32, 32), torch.nan), "1024 of 1024 values are NaN or infinite"),
        (infinite, "32 codes or scales in fp8 are NaN or infinite"),
        (dataclasses.replace(source, codes=torch.full((32, 32), 0x7F).byte()), "1024 codes"),
    ):
        with pytest.raises(ValueError, match=text):
            weight.copy_(wrong)
    with pytest.raises(ValueError, match="cannot be replaced, because the elements of a block share"):
        weight.put_(torch.tensor([0]), torch.ones(1))
    assert same_bits(weight.data, before)
