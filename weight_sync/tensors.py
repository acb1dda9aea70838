"""Tensors as bytes: the dtypes that weights travel in, and views without copies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ..rollout.errors import ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
INDEX_DTYPE = torch.int32
_CHUNK_ELEMENTS = 2**20
_BITS = {2: torch.int16, 4: torch.int32}


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name. Raise ConfigError if no weights travel in it."""
    if name not in DTYPES:
        raise ConfigError(
            f"dtype: expected one of {', '.join(DTYPES)}, found {name!r:.80}; serve the model in one of them"
        )
    return DTYPES[name]


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, as a view."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def raw_bits(tensor: torch.Tensor) -> np.ndarray:
    """The elements of a contiguous tensor in host memory as integers, a flat view: equal where the bits are."""
    return tensor.view(-1).view(_BITS[tensor.dtype.itemsize]).numpy()


def host_chunks(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    """Runs of rows, of about a million elements each: (first row, the rows as contiguous `dtype` in host memory)."""
    length = max(1, _CHUNK_ELEMENTS // max(1, tensor[0].numel())) if len(tensor) else 1
    for start in range(0, len(tensor), length):
        yield start, tensor[start : start + length].to("cpu", dtype).contiguous()
