"""`target_prompt_logprobs`: the token ids to score at each token of a prompt, dense or in CSR form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from trueroll.errors import InvalidRequestError

from ....engine.request import MAX_TARGETS, NO_TARGET
from ..fields import Fields

FIELD = "target_prompt_logprobs"
MAX_CELLS = 2**22
"""Maximum number of cells for target ids in a request to the worker: the number of rows times the number of ids in the
longest row.
"""

_FAIL_FAST = Field(fail_fast=True)
_Index = Annotated[int, Field(ge=0, lt=2**31)]
_Target = Annotated[int, Field(ge=NO_TARGET, lt=2**31)]


class TensorFields(Fields):
    """A tensor of token ids, [len(prompt) - 1, K]; the value -1 stands for no token.

    `data`: the elements, row by row. A tensor in CSR form also has `sparse_crow_indices`, the start of each row in
    `data`, and `sparse_col_indices`, the column of each element of `data`. All elements that `data` does not contain
    are -1.
    """

    data: Annotated[list[_Target], _FAIL_FAST]
    dtype: Literal["int64"]
    shape: Annotated[list[_Index], Field(min_length=2, max_length=2)]
    sparse_crow_indices: Annotated[list[_Index], _FAIL_FAST] | None = None
    sparse_col_indices: Annotated[list[_Index], _FAIL_FAST] | None = None


@dataclass(frozen=True)
class Sparse:
    """The positions of the elements of a CSR tensor. `starts`: int64 [num_rows + 1]. `columns`: int64 [num_elements].
    `rows`, `places`: int64 [num_elements], for each element, its row and its position within the row.
    """

    starts: np.ndarray
    columns: np.ndarray
    rows: np.ndarray
    places: np.ndarray


@dataclass(frozen=True)
class Targets:
    """Token ids to score.

    `ids`: int32 [len(prompt) - 1, width]; row i belongs to token i + 1 of the prompt, and the value -1 stands for no
    token. `first`: index of the first row with a token id. `num_columns`: the number K of columns of the tensor.
    `sparse`: the positions of the elements of a CSR tensor; None for a dense tensor.
    """

    ids: np.ndarray
    first: int
    num_columns: int
    sparse: Sparse | None

    @property
    def num_bytes(self) -> int:
        """Size of the log-probs of these tokens in an answer, in bytes."""
        return 4 * self.ids.size if self.sparse is None else 12 * len(self.sparse.columns) + 8 * len(self.ids) + 8


def read_targets(own: TensorFields, num_rows: int) -> Targets:
    """Return the token ids of a tensor that must have `num_rows` rows. Raise InvalidRequestError if the tensor is not
    valid, names no token, or has too many cells.
    """
    rows, num_columns = own.shape
    if rows != num_rows:
        raise _wrong("shape", f"must have {num_rows} rows, one for each token of the prompt after the first", rows)
    if (own.sparse_crow_indices is None) != (own.sparse_col_indices is None):
        raise _wrong("sparse_col_indices", "give sparse_crow_indices and sparse_col_indices together", None)
    if own.sparse_crow_indices is None:
        if len(own.data) != rows * num_columns:
            raise _wrong("data", f"must have {rows * num_columns} elements, as the shape says", len(own.data))
        _check_width(num_rows, num_columns)
        ids, sparse = np.array(own.data, np.int32).reshape(rows, num_columns), None
    else:
        ids, sparse = _from_csr(own, rows, num_columns)
    is_named = (ids != NO_TARGET).any(axis=1)
    if not is_named.any():
        raise _wrong("data", "must name at least one token id; omit the field to score none", None)
    return Targets(ids, int(is_named.argmax()), num_columns, sparse)


def _from_csr(own: TensorFields, num_rows: int, num_columns: int) -> tuple[np.ndarray, Sparse]:
    starts, columns = np.array(own.sparse_crow_indices, np.int64), np.array(own.sparse_col_indices, np.int64)
    widths = np.diff(starts)
    if len(starts) != num_rows + 1 or starts[0] != 0 or starts[-1] != len(own.data) or (widths < 0).any():
        text = f"must have {num_rows + 1} ascending elements from 0 to {len(own.data)}, the number of ids"
        raise _wrong("sparse_crow_indices", text, len(starts))
    rows = np.repeat(np.arange(num_rows), widths)
    is_next = rows[1:] == rows[:-1]
    if len(columns) != len(own.data) or (columns >= num_columns).any() or (np.diff(columns)[is_next] <= 0).any():
        text = f"must have a column below {num_columns} for each id, ascending in each row"
        raise _wrong("sparse_col_indices", text, len(columns))
    width = int(widths.max(initial=0))
    _check_width(num_rows, width)
    places = np.arange(len(columns)) - np.repeat(starts[:-1], widths)
    ids = np.full((num_rows, width), NO_TARGET, np.int32)
    ids[rows, places] = own.data
    return ids, Sparse(starts, columns, rows, places)


def _check_width(num_rows: int, width: int) -> None:
    if width > MAX_TARGETS:
        raise _wrong("shape", f"must name at most {MAX_TARGETS} token ids for a token of the prompt", width)
    if num_rows * width > MAX_CELLS:
        text = f"may have at most {MAX_CELLS} cells, rows times ids in the longest row; send several requests"
        raise _wrong("shape", text, num_rows * width)


def _wrong(name: str, text: str, value: Any) -> InvalidRequestError:
    field = f"{FIELD}.{name}"
    found = "" if value is None else f" (got {value})"
    return InvalidRequestError(f"{field}: {text}{found}", field=field, value=value)
