"""Decides which images are encoded and evicted, within a budget in bytes.

Encoding an image makes rows, which replace the embeddings of the image's tokens. `running.encoder` owns the rows. An
image is encoded once. The rows of an encoded image serve all sequences with this image until the rows are evicted.
The least recently needed rows are evicted first. Rows that an older sequence needs now are never evicted for a newer
sequence, so the oldest sequence always gets its next image.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ...kernels.specs import TowerSpec
from ..media import ImageInput


@dataclass
class EncodingStats:
    """Lifetime counters: images that were encoded, and images that were evicted."""

    encoded: int = 0
    evictions: int = 0


@dataclass(frozen=True)
class EncodeTask:
    """A task for the encoder: drop the rows of the images with the hashes `evicted`, then encode an image."""

    image: ImageInput
    evicted: list[bytes]


class Encodings:
    """The encoded images. `budget`: the maximum bytes of all rows. `itemsize`: the bytes of an element of a row."""

    def __init__(self, budget: int, tower: TowerSpec, itemsize: int) -> None:
        self.budget, self._tower, self._itemsize = budget, tower, itemsize
        self.stats = EncodingStats()
        self.under_way: EncodeTask | None = None
        self._ready: OrderedDict[bytes, int] = OrderedDict()
        self._ready_bytes = 0
        self._needed: dict[bytes, tuple[tuple[int, int], ImageInput]] = {}

    def size_of(self, image: ImageInput) -> int:
        """Return the bytes of an image's rows."""
        return self._tower.num_tokens(image.rows, image.columns) * self._tower.row_size * self._itemsize

    @property
    def num_bytes(self) -> int:
        """The bytes of all rows, including the rows that are being computed."""
        return self._ready_bytes + (0 if self.under_way is None else self.size_of(self.under_way.image))

    def begin_plan(self) -> None:
        """Forget which images the previous plan needed."""
        self._needed.clear()

    def need(self, image: ImageInput, order: tuple[int, int]) -> bool:
        """Record that the sequence with this `order` needs an image now. Return whether the image is encoded."""
        key = image.content_hash
        if key not in self._needed or order < self._needed[key][0]:
            self._needed[key] = order, image
        if key in self._ready:
            self._ready.move_to_end(key)
            return True
        return False

    def choose(self) -> EncodeTask | None:
        """Choose the image to encode next, and mark it as being encoded. Return None if an image is being encoded, if
        no needed image is missing, or if the missing image of the oldest sequence does not fit.
        """
        missing = [(order, key) for key, (order, _) in self._needed.items() if key not in self._ready]
        if self.under_way is not None or not missing:
            return None
        order, key = min(missing)
        image, evicted, free = self._needed[key][1], list[bytes](), self.budget - self.num_bytes
        for other, size in self._ready.items():
            if free >= self.size_of(image):
                break
            if other not in self._needed or self._needed[other][0] > order:
                evicted.append(other)
                free += size
        if free < self.size_of(image):
            return None
        for other in evicted:
            self._ready_bytes -= self._ready.pop(other)
        self.stats.evictions += len(evicted)
        self.under_way = EncodeTask(image, evicted)
        return self.under_way

    def finish(self) -> None:
        """Record that the image that was being encoded is now encoded."""
        assert self.under_way is not None
        size = self.size_of(self.under_way.image)
        self._ready[self.under_way.image.content_hash] = size
        self._ready_bytes += size
        self.stats.encoded += 1
        self.under_way = None

    def clear(self) -> None:
        """Forget all rows, and the image that is being encoded."""
        self._ready.clear()
        self._ready_bytes = 0
        self._needed.clear()
        self.under_way = None
