"""Encodes images on the device, and holds the rows of encoded images until they are dropped."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...kernels.media import patches_of
from ...kernels.transfer import to_device
from ..models.decoder import Decoder
from ..models.tower import EmbeddedRows
from ..scheduling.encodings import EncodeTask
from ..scheduling.media import ImageRows


class Encoder(Protocol):
    """Encodes images, one at a time, for later steps."""

    def begin(self, task: EncodeTask) -> None:
        """Drop the rows of the evicted images, then begin to encode an image. No other image may be partly encoded."""
        ...

    def advance(self, most_layers: int | None) -> bool:
        """Compute at most `most_layers` layers of the image that is being encoded; None: all layers. Return whether the
        image is now encoded.
        """
        ...

    def clear(self) -> None:
        """Drop all rows, and the image that is being encoded."""
        ...


@dataclass(frozen=True, eq=False)
class _Encoded:
    """The rows of an encoded image."""

    rows: Tensor

    @cached_property
    def checksum(self) -> int:
        return zlib.crc32(self.rows.contiguous().view(torch.uint8).cpu().numpy().data)


class ImageEncoder:
    """The `Encoder` of one device: the rows of encoded images, by key, and the image that is being encoded."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._encoded: dict[bytes, _Encoded] = {}
        self._under_way: tuple[bytes, Generator[None, None, Tensor]] | None = None

    @torch.inference_mode()
    def begin(self, task: EncodeTask) -> None:
        """See `Encoder.begin`."""
        assert self._under_way is None and self._model.spec.tower is not None and self._model.tower is not None
        for key in task.evicted:
            del self._encoded[key]
        image = task.image
        patches = patches_of(image, self._model.spec.tower, self._model.dtype, self._model.device)
        self._under_way = image.content_hash, self._model.tower.encode(patches, (image.rows, image.columns))

    @torch.inference_mode()
    def advance(self, most_layers: int | None) -> bool:
        """See `Encoder.advance`."""
        assert self._under_way is not None
        key, steps = self._under_way
        for _ in count() if most_layers is None else range(most_layers):
            try:
                next(steps)
            except StopIteration as end:
                self._encoded[key], self._under_way = _Encoded(end.value), None
                return True
        return False

    def clear(self) -> None:
        """See `Encoder.clear`."""
        self._encoded.clear()
        self._under_way = None

    def embedded(self, images: Sequence[ImageRows]) -> EmbeddedRows:
        """Return the encoded rows that a step reads. The places in `images` are indices of the step's tokens."""
        places = [np.arange(rows.place, rows.place + rows.end - rows.start) for rows in images]
        parts = [self._encoded[rows.key].rows[rows.start : rows.end] for rows in images]
        return EmbeddedRows(to_device(torch.from_numpy(np.concatenate(places)), self._model.device), torch.cat(parts))

    def checksums(self, images: Sequence[ImageRows]) -> list[int]:
        """For each image of a step, return a checksum of all rows of the image. Wait for the device if a checksum has
        not been read yet.
        """
        return [self._encoded[rows.key].checksum for rows in images]
