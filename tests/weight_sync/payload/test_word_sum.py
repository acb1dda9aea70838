"""The checksum of buckets in the memory of GPUs: what it is, and what it finds."""

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
def test_it_is_what_it_is_defined_to_be_however_it_is_cut(
    size: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors_module, "_CHUNK_WORDS", chunk)
    assert word_sum(random_bytes(size)) == by_definition(random_bytes(size))


def test_it_reads_a_slice_and_changes_nothing() -> None:
    whole = random_bytes(4096)
    before = whole.clone()
    assert word_sum(whole[64:1000]) == by_definition(before[64:1000])
    assert torch.equal(whole, before)


@pytest.mark.parametrize("size", [8, 21, 64])
def test_every_flipped_bit_is_found(size: int) -> None:
    data = random_bytes(size)
    right = word_sum(data)
    for index, bit in itertools.product(range(size), range(8)):
        data[index] ^= 1 << bit
        assert word_sum(data) != right
        data[index] ^= 1 << bit
    assert word_sum(data) == right


@pytest.mark.parametrize("width", [1, 2, 4, 8, 64])
def test_what_has_changed_places_is_found(width: int) -> None:
    """Also where the two differ in a single bit only, as the signs of two equal weights do."""
    data = random_bytes(256)
    data[width : 2 * width] = data[:width]
    data[2 * width - 1] ^= 0x80
    right = word_sum(data)
    parts = data.view(-1, width)
    for first, second in itertools.combinations(range(len(parts)), 2):
        order = list(range(len(parts)))
        order[first], order[second] = second, first
        swapped = parts[order].reshape(-1)
        assert (word_sum(swapped) == right) == torch.equal(swapped, data)


def test_zeros_count_by_their_number() -> None:
    assert len({word_sum(torch.zeros(size, dtype=torch.uint8)) for size in range(0, 4096, 8)}) == 512
