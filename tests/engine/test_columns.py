"""Columns: one table defines the recorded values of tokens, and all code that cuts, joins or creates these values uses
that table.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from trueroll.engine.request import (
    COLUMNS,
    KEPT,
    LOGPROBS,
    TOPS,
    GrowingColumns,
    SampleDelta,
    SampleOutput,
    SamplingParams,
    ScoreOutput,
    Widths,
    as_fields,
    columns_of,
    cut_columns,
    join_columns,
)


@pytest.mark.parametrize("kind", [SampleOutput, SampleDelta, ScoreOutput])
def test_each_column_is_a_field_of_the_outputs(kind: type) -> None:
    assert {column.name for column in COLUMNS} <= {field.name for field in dataclasses.fields(kind)}


def test_columns_with_counts_are_cut_and_joined_to_the_bit() -> None:
    growing, ids = GrowingColumns(KEPT, Widths()), np.arange(100, dtype=np.int32)
    counts = np.array([3, 0, 5, 1, 0], np.int32)
    for row, count in enumerate(counts):
        growing.append((count.tobytes(), np.float32(row).tobytes(), ids[7 * row : 7 * row + count].tobytes()))
    whole = growing.arrays()
    assert whole["kept_counts"].tolist() == counts.tolist()
    assert whole["kept_token_ids"].tolist() == [0, 1, 2, 14, 15, 16, 17, 18, 21]
    for border in range(6):
        again = join_columns(cut_columns(whole, 0, border), growing.arrays(border))
        assert {name: each.tobytes() for name, each in again.items()} == {
            n: each.tobytes() for n, each in whole.items()
        }


@pytest.mark.parametrize("k", [0, 3])
def test_growing_columns_are_cut_and_joined_to_the_bit(k: int) -> None:
    growing, rng = GrowingColumns(TOPS, Widths(k)), np.random.default_rng(0)
    rows = [tuple(rng.bytes(column.num_bytes(Widths(k))) for column in TOPS) for _ in range(5)]
    for row in rows:
        growing.append(row)
    whole = growing.arrays()
    assert [values.shape for values in whole.values()] == [(5,), (5, k), (5, k)]
    assert [values.tobytes() for values in whole.values()] == [b"".join(each) for each in zip(*rows, strict=True)]
    assert all(values.flags.writeable for values in whole.values())
    again = join_columns(cut_columns(whole, 0, 2), growing.arrays(2))
    assert {name: values.tobytes() for name, values in again.items()} == {n: v.tobytes() for n, v in whole.items()}


@pytest.mark.parametrize(("logprobs", "k"), [(None, None), ("raw", None), ("raw", 0), ("processed", 4)])
def test_an_empty_sample_has_the_requested_columns(logprobs: str | None, k: int | None) -> None:
    has_mask = k == 4
    params = SamplingParams.model_validate(dict(logprobs=logprobs, top_logprobs=k, return_sampling_mask=has_mask))
    found = columns_of(SampleOutput.empty("r", 2, 7, params))
    asked = [LOGPROBS] * (logprobs is not None) + [*TOPS] * (k is not None) + [*KEPT] * has_mask
    assert [*found] == [column.name for column in asked]
    assert {name: values.shape[1:] for name, values in found.items() if values.ndim > 1} == (
        {} if k is None else dict(top_token_ids=(k,), top_logprobs=(k,))
    )
    assert all(len(values) == 0 for values in found.values())
    assert [name for name, values in as_fields(found).items() if values is not None] == list(found)
