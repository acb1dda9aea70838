"""How checkpoints pack codes of 4 bits. All functions return one code in each byte.

Words are stored with the lowest byte first, as in safetensors files.
"""

from __future__ import annotations

import torch
from torch import Tensor

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""AutoAWQ packs eight numbers into a word. Number i is in the nibble with the index `_AWQ_PLACES[i]`."""


def nibbles(packed: Tensor) -> Tensor:
    """Unpack bytes [..., n] to codes [..., 2 * n]. The first code of a byte is in the lower 4 bits."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def words(packed: Tensor) -> Tensor:
    """Unpack int32 words [R, n] to codes [R, 8 * n]. The first code of a word is in the lowest 4 bits."""
    return nibbles(packed.contiguous().view(torch.uint8))


def words_of_rows(packed: Tensor) -> Tensor:
    """Unpack int32 words [n, C], each with the codes of eight rows, to codes [8 * n, C]."""
    return words(packed.T).T


def awq_words(packed: Tensor) -> Tensor:
    """Unpack int32 words [C, n] of AutoAWQ, each with the codes of eight rows, to codes [8 * n, C]."""
    return words(packed).unflatten(1, (-1, 8))[..., _AWQ_PLACES].flatten(1).T
