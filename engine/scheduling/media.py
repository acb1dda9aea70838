"""The images of a sequence: the positions of the sequence's tokens, and the places at which a chunk may end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...kernels.media import ImageSpan, axis_positions, span_ends
from ...kernels.specs import TowerSpec
from ..media import ImageInput


@dataclass(frozen=True)
class ImageRows:
    """Rows [start, end) of an encoded image, which replace the embeddings of the tokens from `place` on. `key`: the
    hash of the image's content.
    """

    key: bytes
    start: int
    end: int
    place: int


def spans_of(images: Sequence[ImageInput], tower: TowerSpec) -> list[ImageSpan]:
    """Return the tokens of each image."""
    return [ImageSpan(each.start, each.rows // tower.merge, each.columns // tower.merge) for each in images]


class SequenceMedia:
    """The images of a sequence. There is at least one image.

    `end`: the index of the first token after the last image. `shift`: for every token after the last image, the token's
    position minus its index; at most 0. `has_axes`: whether positions have the axes time, row and column.
    """

    def __init__(self, images: Sequence[ImageInput], tower: TowerSpec, has_axes: bool) -> None:
        self.images = tuple(images)
        self.spans = spans_of(images, tower)
        self.end = self.spans[-1].end
        self._sees_span = tower.sees_span
        self._positions = axis_positions(self.end, self.spans).numpy() if has_axes else None
        self._ends = span_ends(self.end, self.spans).numpy() if tower.sees_span else None
        self.shift = sum(max(s.rows, s.columns) - s.rows * s.columns for s in self.spans) if has_axes else 0

    def positions(self, start: int, end: int) -> np.ndarray:
        """Return the positions of tokens [start, end), int64 [3, n]."""
        tokens = np.arange(start, end)
        if self._positions is None:
            return np.tile(tokens, (3, 1))
        known = self._positions[:, start:end]
        return np.concatenate((known, np.tile(tokens[known.shape[1] :] + self.shift, (3, 1))), 1)

    def ends(self, start: int, end: int) -> np.ndarray | None:
        """Return `AttentionBatch.ends` for tokens [start, end), int64 [n]; None if attention is causal."""
        if self._ends is None:
            return None
        known = self._ends[start:end]
        return np.concatenate((known, np.arange(start + len(known) + 1, end + 1)))

    def rows(self, start: int, end: int) -> Iterator[ImageRows]:
        """Yield the rows of images that replace embeddings of tokens [start, end). Each `place` is relative to
        `start`.
        """
        for image, span in zip(self.images, self.spans, strict=True):
            first, last = max(start, span.start), min(end, span.end)
            if first < last:
                yield ImageRows(image.content_hash, first - span.start, last - span.start, first - start)

    def cut(self, start: int, size: int, is_ready: Callable[[ImageInput], bool]) -> int:
        """Return how many of the tokens [start, start + size) can be computed in one step. The computed tokens end
        before the first image that is not ready. If the tokens of an image attend to each other, the computed tokens
        also end before the first image that does not fit as a whole. `is_ready` is called for each image of the tokens,
        up to the first one that is not ready.
        """
        end = start + size
        for image, span in zip(self.images, self.spans, strict=True):
            if span.end <= start or span.start >= end:
                continue
            if not is_ready(image) or (self._sees_span and span.end > end):
                return max(span.start - start, 0)
        return size

    def size_of_span(self, start: int) -> int:
        """Return the number of tokens of the image that begins at this token and must be computed in one step; 0 if no
        such image begins at this token.
        """
        found = (span.end - span.start for span in self.spans if span.start == start)
        return next(found, 0) if self._sees_span else 0

    def can_resume(self, num_tokens: int) -> bool:
        """Return whether a sequence may continue after a cached prefix of `num_tokens` tokens."""
        return not self._sees_span or not any(span.start < num_tokens < span.end for span in self.spans)
