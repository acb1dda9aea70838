"""The checksum of bytes and the check for finite values, computed in one pass."""

from __future__ import annotations

import pytest
import torch

from trueroll.weight_sync.payload import tensors
from trueroll.weight_sync.payload.manifest import checksum
from trueroll.weight_sync.payload.tensors import DTYPES, BytePass, copy_and_checksum, raw_bits


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_CACHED_BYTES", 64)


def check(values: torch.Tensor, prefix: int) -> bool:
    """Return whether the check finds `values`, after `prefix` other bytes, to be finite. Assert that the checksum of
    all bytes is correct.
    """
    before, passed = torch.full((prefix,), 255, dtype=torch.uint8), BytePass(values.dtype)
    passed.update_plain(before)
    passed.update(values)
    assert passed.checksum == checksum(torch.cat([before, values.view(torch.uint8)]).numpy())
    return passed.are_finite


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_finiteness_equals_isfinite_for_every_16_bit_number(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = every[every.isfinite()]
    assert check(finite, 0) and check(finite, 8)
    others = every[~every.isfinite()]
    assert len(others) >= 256 and not any(check(each, 0) for each in others.split(1))


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("place", [0, 31, 32, 63, 99])
def test_one_nonfinite_number_is_found_at_any_place(dtype: torch.dtype, place: int) -> None:
    values = torch.linspace(-3, 3, 100).to(dtype)
    values[7], values[8] = torch.finfo(dtype).max, torch.finfo(dtype).min
    for bad in (float("inf"), -float("inf"), float("nan")):
        broken = values.clone()
        broken[place] = bad
        assert check(values, 16) and not check(broken, 16)
        raw_bits(broken)[place] |= -(2 ** (8 * dtype.itemsize - 1))  # the same value with a minus sign
        assert not check(broken, 16)


def test_an_empty_tensor_is_finite() -> None:
    assert check(torch.empty(0), 8)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8])
@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("rows", [1, 4, 7])
def test_a_copy_has_the_bits_of_a_conversion_and_the_checksum_of_these_bits(
    source: torch.dtype, dtype: torch.dtype, rows: int
) -> None:
    whole = torch.linspace(-9, 9, 2 * rows * 16).view(2 * rows, 16).to(source)
    for tensor in (whole[:rows], whole[::2], whole[:rows].t()):  # with one contiguous tensor only
        expected = tensor.to(dtype).contiguous().view(-1).view(torch.uint8)
        place = torch.full((len(expected),), 255, dtype=torch.uint8)
        assert copy_and_checksum(place, tensor, dtype) == checksum(expected.numpy())
        assert torch.equal(place, expected)
