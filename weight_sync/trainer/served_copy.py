"""A copy of the weights that the workers served last, kept in the trainer to find the elements that changed.

Owns the copy. The copy takes as much memory as all weights in the workers' dtypes, which is the cost of sparse pushes.
Comparisons are bitwise: a change from 0.0 to -0.0 is sent, and a change from NaN to NaN is sent only if the bits
differ.
"""

from __future__ import annotations

import numpy as np
import torch

from ..payload.manifest import Parameters, spellings_of
from ..payload.tensors import INDEX_DTYPE, dtypes_of, host_chunks, raw_bits

_MAX_ELEMENTS = 2**31
"""Tensors with this many elements or more are always sent whole, since the indices of changed elements are int32."""


class ServedCopy:
    """A copy of the tensors that workers want. The content of a tensor is undefined until it is copied."""

    def __init__(self, wanted: Parameters) -> None:
        self._kind, self._spellings, dtype_of = _kind(wanted), spellings_of(wanted), dtypes_of(wanted)
        self._tensors = {name: torch.empty(shape, dtype=dtype_of(name)) for name, shape in wanted.shapes.items()}
        self._known: set[str] = set()

    def fits(self, wanted: Parameters) -> bool:
        """Return whether the copy's tensors have the shapes, dtypes and parts in `wanted`."""
        return self._kind == _kind(wanted)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a view of the copy of a tensor or part."""
        part = self._spellings.part(name)
        if part is None:
            return self._tensors[name]
        return self._tensors[part.stack][part.expert].narrow(0, part.start, part.shape[0])

    def replace(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor or part, and return the copy in the workers' dtype."""
        self._known.update(self._leaves(name))
        return self.tensor(name).copy_(tensor)

    def update(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Copy a tensor or part. Return the flat indices of the changed elements, ascending, and their new values.

        Return None if the whole tensor takes no more bytes than the list of changed elements, or if the tensor was not
        copied before.
        """
        kept = self.tensor(name)
        if not self._known.issuperset(self._leaves(name)):
            self.replace(name, tensor)
            return None
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

    def _leaves(self, name: str) -> list[str]:
        """Return the names of a tensor's parts. If `name` is a part, or a tensor without parts, return only `name`."""
        parts = self._spellings.parts(name) if name in self._tensors else ()
        return [*parts] or [name]


def _kind(wanted: Parameters) -> tuple[object, ...]:
    return dict(wanted.shapes), dict(wanted.parts), wanted.dtype, dict(wanted.dtypes)


def _where_unequal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the ascending indices of unequal elements. The first pass compares eight bytes at a time, which is faster
    because few elements differ.
    """
    per_word = 8 // a.itemsize
    whole = len(a) // per_word * per_word
    words = np.flatnonzero(a[:whole].view(np.int64) != b[:whole].view(np.int64))
    near = (words[:, None] * per_word + np.arange(per_word)).ravel()
    near = np.concatenate([near, np.arange(whole, len(a))])
    return near[a[near] != b[near]]


def _most_elements(tensor: torch.Tensor) -> int:
    """Return the smallest number of changed elements for which the list of changed elements takes at least as many
    bytes as the whole tensor.

    Return 0 if the tensor must always be sent whole.
    """
    if tensor.numel() >= _MAX_ELEMENTS:
        return 0
    return -(-tensor.nbytes // (INDEX_DTYPE.itemsize + tensor.dtype.itemsize))
