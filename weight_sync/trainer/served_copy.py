"""What the workers served last, kept in the trainer to find out which elements changed.

Owns a copy of all weights in the workers' dtypes: that is the price of sparse pushes. Differences are of bits, so that
-0.0 replaces 0.0, and NaN replaces NaN only where its bits are others.
"""

from __future__ import annotations

import numpy as np
import torch

from ..payload.manifest import Parameters, spellings_of
from ..payload.tensors import INDEX_DTYPE, dtypes_of, host_chunks, raw_bits

_MAX_ELEMENTS = 2**31
"""Indices are int32."""


class ServedCopy:
    """A copy of the tensors that workers want. Its content means nothing before the first `replace` of everything."""

    def __init__(self, wanted: Parameters) -> None:
        self._kind, self._spellings, dtype_of = _kind(wanted), spellings_of(wanted), dtypes_of(wanted)
        self._tensors = {name: torch.empty(shape, dtype=dtype_of(name)) for name, shape in wanted.shapes.items()}

    def fits(self, wanted: Parameters) -> bool:
        """Whether it is of tensors of the same shapes and dtypes, with the same parts."""
        return self._kind == _kind(wanted)

    def tensor(self, name: str) -> torch.Tensor:
        """What is kept of a tensor, or of a part of one, as a view."""
        part = self._spellings.part(name)
        if part is None:
            return self._tensors[name]
        return self._tensors[part.stack][part.expert].narrow(0, part.start, part.shape[0])

    def replace(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Take up a tensor or a part, and return it in its dtype of the workers."""
        return self.tensor(name).copy_(tensor)

    def update(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Take up a tensor or a part, and return the flat indices of what changed, ascending, and the new values.

        None if sending the whole tensor takes no more bytes.
        """
        kept = self.tensor(name)
        most = _most_elements(kept)
        found: list[np.ndarray] | None = [] if most else None
        num_found = 0
        for start, chunk in host_chunks(tensor, kept.dtype):
            new, old = raw_bits(chunk), raw_bits(kept[start : start + len(chunk)])
            if found is None:
                old[:] = new
                continue
            changed = _where_unequal(new, old)
            old[changed] = new[changed]
            found.append(changed + start * (kept.numel() // len(kept)))
            num_found += len(changed)
            if num_found >= most:
                found = None
        if found is None:
            return None
        indices = torch.from_numpy(np.concatenate(found)) if found else torch.empty(0, dtype=torch.int64)
        return indices.to(INDEX_DTYPE), kept.view(-1)[indices]


def _kind(wanted: Parameters) -> tuple[object, ...]:
    return dict(wanted.shapes), dict(wanted.parts), wanted.dtype, dict(wanted.dtypes)


def _where_unequal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Ascending indices. Looks at eight bytes at once first, for few of them differ."""
    per_word = 8 // a.itemsize
    whole = len(a) // per_word * per_word
    words = np.flatnonzero(a[:whole].view(np.int64) != b[:whole].view(np.int64))
    near = (words[:, None] * per_word + np.arange(per_word)).ravel()
    near = np.concatenate([near, np.arange(whole, len(a))])
    return near[a[near] != b[near]]


def _most_elements(tensor: torch.Tensor) -> int:
    """From how many changed elements on the whole tensor is smaller than a list of them; 0: always."""
    if tensor.numel() >= _MAX_ELEMENTS:
        return 0
    return -(-tensor.nbytes // (INDEX_DTYPE.itemsize + tensor.dtype.itemsize))
