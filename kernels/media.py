"""Images of sequences: the values of their patches, the positions of all tokens, and which tokens each token sees.

The tokens of an image are a span of the sequence: one token for each block of the image's patches, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .specs import TowerSpec
from .transfer import to_device


class Image(Protocol):
    """A processed image, and where its tokens begin: an `engine.media.ImageInput`."""

    @property
    def start(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def frames(self) -> int: ...
    @property
    def levels(self) -> Any: ...
    @property
    def table(self) -> Any: ...


def patches_of(image: Image, tower: TowerSpec, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values of an image's patches, [patches, patch_values]. All frames of a still image have the same
    values.
    """
    table = to_device(_tensor_of(image.table), device).to(dtype)
    levels = to_device(_tensor_of(image.levels), device)
    levels = levels.unflatten(1, (tower.channels, image.frames, -1)).long()
    channels = torch.arange(tower.channels, device=device)[:, None, None]
    values = table[channels, levels]
    return values.expand(-1, -1, tower.frames, -1).reshape(len(levels), -1)


def _tensor_of(array: Any) -> Tensor:
    """Return the values of a numpy array. Arrays that torch cannot share are copied."""
    is_shareable = array.flags.c_contiguous and array.flags.writeable
    return torch.from_numpy(array if is_shareable else array.copy(order="C"))


class ImageSpan(NamedTuple):
    """The tokens [start, start + rows * columns) of an image. `rows`, `columns`: the size of the image, in tokens."""

    start: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        """The index of the first token after the span."""
        return self.start + self.rows * self.columns


def axis_positions(num_tokens: int, spans: Sequence[ImageSpan]) -> Tensor:
    """Return the positions of a sequence's tokens in time, row and column: int64 [3, num_tokens] (Wang et al. 2024,
    Qwen2-VL). `spans`: the images, in ascending order.

    A text token has the same position on all axes: one more than the highest position before it. If an image begins at
    position p, the position of its token in row r and column c is (p, p + r, p + c).
    """
    positions, done, following = torch.empty(3, num_tokens, dtype=torch.int64), 0, 0
    for span in spans:
        text = span.start - done
        positions[:, done : span.start] = torch.arange(following, following + text)
        following += text
        token = torch.arange(span.end - span.start)
        places = torch.stack((torch.zeros_like(token), token // span.columns, token % span.columns))
        positions[:, span.start : span.end] = following + places
        following += max(span.rows, span.columns)
        done = span.end
    positions[:, done:] = torch.arange(following, following + num_tokens - done)
    return positions


def span_ends(num_tokens: int, spans: Sequence[ImageSpan]) -> Tensor:
    """For each token of a sequence, return the end of the tokens that the token sees. The tokens of an image see the
    whole image. The result is int64 [num_tokens] (`AttentionBatch.ends`).
    """
    ends = torch.arange(1, num_tokens + 1)
    for span in spans:
        ends[span.start : span.end] = span.end
    return ends
