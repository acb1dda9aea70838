"""The checksum of buckets in GPU memory: the definition, and the changes that the checksum detects."""

from __future__ import annotations

import itertools

import pytest
import torch

from trueroll.weight_sync.payload import tensors as tensors_module
from trueroll.weight_sync.payload.tensors import word_sum

MASK = 2**64 - 1


def random_bytes(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def by_definition(data: torch.Tensor) -> int:
    padded = bytes(data.tolist()) + bytes(8 - len(data) % 8)
    total = 0
    for place in range(len(padded) // 8):
        word = int.from_bytes(padded[8 * place :][:8], "little") ^ (place * 0x9E3779B97F4A7C15 & MASK)
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
        total += word ^ (word >> 31)
    return total & MASK


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64, 1000, 1001])
@pytest.mark.parametrize("chunk", [1, 3, 2**21])
def test_the_word_sum_follows_its_definition_for_any_chunk_size(
    size: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors_module, "_CHUNK_WORDS", chunk)
    assert word_sum(random_bytes(size)) == by_definition(random_bytes(size))


def test_the_word_sum_of_a_slice_changes_nothing() -> None:
    whole = random_bytes(4096)
    before = whole.clone()
    assert word_sum(whole[64:1000]) == by_definition(before[64:1000])
    assert torch.equal(whole, before)


@pytest.mark.parametrize("size", [8, 21, 64])
def test_every_flipped_bit_is_detected(size: int) -> None:
    data = random_bytes(size)
    right = word_sum(data)
    for index, bit in itertools.product(range(size), range(8)):
        data[index] ^= 1 << bit
        assert word_sum(data) != right
        data[index] ^= 1 << bit
    assert word_sum(data) == right


@pytest.mark.parametrize("width", [1, 2, 4, 8, 64])
def test_swapped_values_are_detected(width: int) -> None:
    """A swap is detected even if the two values differ in a single bit, such as the sign."""
    data = random_bytes(min(256, 64 * width))
    data[width : 2 * width] = data[:width]
    data[2 * width - 1] ^= 0x80
    right = word_sum(data)
    parts = data.view(-1, width)
    for first, second in itertools.combinations(range(len(parts)), 2):
        order = list(range(len(parts)))
        order[first], order[second] = second, first
        swapped = parts[order].reshape(-1)
        assert (word_sum(swapped) == right) == torch.equal(swapped, data)


def test_the_number_of_zeros_changes_the_word_sum() -> None:
    assert len({word_sum(torch.zeros(size, dtype=torch.uint8)) for size in range(0, 4096, 8)}) == 512
