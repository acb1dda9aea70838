"""Copies that hash: the hash is xxHash's own, the copy has the same bits, and every infinity and NaN is found."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import xxhash

from trueroll.kernels.cpu.backend import PackedWeight
from trueroll.kernels.cpu.copies import LEAST_BYTES, copy_bytes
from trueroll.kernels.cpu.library import load_library

from ..inputs import randn, same_bits

INFINITIES = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}
STEP = 2**18
"""Bytes that the library hashes before it writes them."""


@pytest.fixture(params=load_library().instruction_sets(), autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    library = load_library()
    before = library.instruction_set()
    library.choose(request.param)
    yield
    library.choose(before)


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize(
    "num_bytes",
    [LEAST_BYTES, 256, 1023, 1024, 1025, 1088, 2048, 2049, STEP - 1, STEP, STEP + 1, 2 * STEP + 1024, 3 * STEP + 77],
)
def test_a_copy_has_the_bytes_and_xxhash_s_hash(num_bytes: int, start: int) -> None:
    generator = torch.Generator().manual_seed(num_bytes)
    source = torch.randint(256, (start + num_bytes,), dtype=torch.uint8, generator=generator)[start:]
    target = torch.full((num_bytes + 2,), 7, dtype=torch.uint8)
    found = copy_bytes(source.data_ptr(), num_bytes, target.data_ptr() + 1, 0)
    assert found == (xxhash.xxh3_64_intdigest(source.numpy().data), True)
    assert torch.equal(target[1:-1], source) and target[0] == target[-1] == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows,columns", [(16, 64), (33, 17), (1, 300), (400, 576), (17, 9000)])
def test_rows_are_packed_as_by_copy(rows: int, columns: int, dtype: torch.dtype) -> None:
    matrix = randn(rows, columns, dtype=dtype)
    expected, found = (PackedWeight.new(rows, columns, partial(torch.zeros, dtype=dtype)) for _ in range(2))
    expected.copy_(matrix)
    checksum = xxhash.xxh3_64_intdigest(matrix.view(torch.uint8).numpy().data)
    assert found.copy_checked(matrix, INFINITIES[dtype]) == (checksum, True)
    assert same_bits(found.data, expected.data) and same_bits(found.to_dense(), matrix)


@pytest.mark.parametrize("dtype", INFINITIES)
def test_numbers_are_finite_where_torch_finds_them_finite(dtype: torch.dtype) -> None:
    count, infinity = 200, INFINITIES[dtype]
    bits, sign = (torch.int16, 2**15) if dtype.itemsize == 2 else (torch.int32, 2**31)
    values = torch.full((count,), torch.finfo(dtype).max, dtype=dtype)
    values[::2] = -values[::2]
    for pattern in (infinity, infinity - 1, infinity + 1, 2 * infinity - 1, 0, 1):
        for number in (pattern, pattern | sign):
            for place in (0, 1, 63, count - 1):
                some = values.clone()
                some.view(bits)[place] = (number + sign) % (2 * sign) - sign
                found = copy_bytes(some.data_ptr(), some.nbytes, 0, infinity)
                assert found == (xxhash.xxh3_64_intdigest(some.view(bits).numpy().data), bool(some.isfinite().all()))
                assert copy_bytes(some.data_ptr(), some.nbytes, 0, 0)[1], "no search was asked for"
