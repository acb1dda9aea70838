"""The columns of a sample (`engine.columns`) in the fields of messages, and back: the only place that knows which field
carries which column. Elements travel little-endian.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from ...engine.columns import COLUMNS, LOGPROBS, TOPS, Column, Columns
from .messages import Delta, FinishedSample, Scores, TopArrays

_TOP_FIELDS = {"entropy": "entropy", "top_token_ids": "token_ids", "top_logprobs": "logprobs"}

Carrier: TypeAlias = FinishedSample | Delta | Scores


def bytes_within(message: Carrier) -> dict[Column, bytes]:
    """The columns that a message carries, as bytes."""
    found = {} if message.logprobs is None else {LOGPROBS: message.logprobs}
    if message.tops is not None:
        found |= {column: getattr(message.tops, _TOP_FIELDS[column.name]) for column in TOPS}
    return found


def num_listed(message: Carrier) -> int:
    """How many elements the listed columns of a message have for a token."""
    return 0 if message.tops is None else message.tops.k


def fields_of(content: Mapping[Column, bytes], k: int) -> dict[str, Any]:
    """The fields of a message that carry columns, of which the listed ones have `k` elements for a token."""
    tops = {_TOP_FIELDS[column.name]: content[column] for column in TOPS if column in content}
    return {"logprobs": content.get(LOGPROBS), "tops": TopArrays(k=k, **tops) if tops else None}


def columns_within(message: Carrier) -> Columns:
    """The columns that a message carries, as writable arrays."""
    found, k = bytes_within(message), num_listed(message)
    rows = next((len(content) // column.num_bytes(k) for column, content in found.items()), 0)
    return {
        column.name: np.frombuffer(content, column.dtype).reshape(column.shape(rows, k)).copy()
        for column, content in found.items()
    }


def fields_for(columns: Columns) -> dict[str, Any]:
    """The fields of a message that carry these columns."""
    content = {
        column: columns[column.name].astype(column.dtype).tobytes() for column in COLUMNS if column.name in columns
    }
    listed = [columns[column.name].shape[1] for column in content if column.is_listed]
    return fields_of(content, max(listed, default=0))
