"""The search for changed elements, which compares bits, against a simple loop over all elements."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trueroll.weight_sync.payload.adapters import Adapted
from trueroll.weight_sync.payload.manifest import Parameters
from trueroll.weight_sync.payload.tensors import DTYPES, raw_bits
from trueroll.weight_sync.trainer.served_copy import ServedCopy

VALUES = st.sampled_from([0.0, -0.0, 1.0, float("nan"), float("inf")])


def wanted(shape: tuple[int, ...], dtype: str, own: str | None = None) -> Parameters:
    """Parameters with one tensor `w`. `own`: the dtype of `w`, if it is not the dtype of the push."""
    return Adapted(dtype, {} if own is None else {"w": own}, {"w": shape}, {}, {}, (), ())


def test_a_tensor_that_was_never_copied_is_sent_whole() -> None:
    """The tensor is sent whole even if its values happen to be in the copy's memory."""
    copy = ServedCopy(wanted((4, 2), "float32"))
    tensor = copy.tensor("w").clone()
    assert copy.update("w", tensor) is None
    changed = copy.update("w", tensor)
    assert changed is not None and len(changed[0]) == 0


@given(st.data(), st.sampled_from(sorted(DTYPES)), st.integers(1, 9), st.integers(1, 9))
def test_changes_are_found_bitwise(data: st.DataObject, dtype: str, rows: int, columns: int) -> None:
    size = rows * columns
    before, after = (
        torch.tensor(data.draw(st.lists(VALUES, min_size=size, max_size=size))).view(rows, columns) for _ in range(2)
    )
    copy = ServedCopy(wanted((rows, columns), dtype))
    copy.replace("w", before)
    old, new = raw_bits(before.to(DTYPES[dtype])), raw_bits(after.to(DTYPES[dtype]))
    expected = [i for i in range(size) if old[i] != new[i]]
    changes = copy.update("w", after)
    assert (raw_bits(copy.tensor("w")) == new).all()
    itemsize = DTYPES[dtype].itemsize
    if changes is None:
        assert len(expected) * (4 + itemsize) >= size * itemsize
    else:
        indices, values = changes
        assert indices.dtype == torch.int32 and indices.tolist() == expected
        assert (raw_bits(values) == new[expected]).all()


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_changes_in_a_tensor_of_several_chunks(dtype: str) -> None:
    before = torch.zeros(3000, 1001)
    copy = ServedCopy(wanted((3000, 1001), dtype))
    copy.replace("w", before)
    places = [0, 1, 1001 * 1500 + 7, 3000 * 1001 - 1]
    before.view(-1)[places] = -0.0
    changes = copy.update("w", before)
    assert changes is not None
    assert changes[0].tolist() == places and torch.signbit(changes[1]).all()


def test_a_tensor_is_kept_in_its_own_dtype() -> None:
    copy, fine = ServedCopy(wanted((4, 5), "bfloat16", "float32")), torch.full((4, 5), 1 + 2**-20)
    assert copy.replace("w", fine).dtype == torch.float32 and copy.tensor("w").equal(fine)
    assert copy.fits(wanted((4, 5), "bfloat16", "float32")) and not copy.fits(wanted((4, 5), "bfloat16"))
    fine[1, 2] += 2**-20
    changes = copy.update("w", fine)
    assert changes is not None and changes[0].tolist() == [7] and changes[1].tolist() == [1 + 2**-19]
