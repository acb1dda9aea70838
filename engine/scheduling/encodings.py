"""Encoded images: which exist, which are needed, and which to encode next.

Owns the decisions, within a budget in bytes. Does not own the rows (`running.encoder`). An image is encoded once, and
its rows serve all sequences with the same content until they are evicted, the least recently needed first. Rows that an
older sequence needs now are never evicted for a newer one, so the oldest sequence always gets its next image.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from ..media import ImageInput


@dataclass
class EncodingStats:
    """Lifetime counters: images that were encoded, images that a step found encoded, and evictions."""

    encoded: int = 0
    hits: int = 0
    evictions: int = 0


@dataclass(frozen=True)
class Encode:
    """Encode an image under a key, after the rows with the keys `evicted` are dropped."""

    key: bytes
    image: ImageInput
    evicted: list[bytes] = field(default_factory=list)


class Encodings:
    """The encoded images. `budget`: the bytes of all rows. `row_bytes`: the bytes of a row, which stands for
    `row_patches` patches.
    """

    def __init__(self, budget: int, row_bytes: int, row_patches: int) -> None:
        self.budget, self._row_bytes, self._row_patches = budget, row_bytes, row_patches
        self.stats = EncodingStats()
        self.under_way: Encode | None = None
        self._ready: OrderedDict[bytes, int] = OrderedDict()
        self._needed: dict[bytes, tuple[tuple[int, int], ImageInput]] = {}

    def size_of(self, image: ImageInput) -> int:
        """Return the bytes of an image's rows."""
        return image.rows * image.columns // self._row_patches * self._row_bytes

    @property
    def num_bytes(self) -> int:
        """The bytes of the rows that exist, and of those that are being computed."""
        return sum(self._ready.values()) + (0 if self.under_way is None else self.size_of(self.under_way.image))

    def begin_plan(self) -> None:
        """Forget what the previous plan needed."""
        self._needed.clear()

    def is_ready(self, image: ImageInput, order: tuple[int, int]) -> bool:
        """Return whether an image is encoded. Note that the sequence with this `order` needs it now."""
        key = image.content_hash
        if key not in self._needed or order < self._needed[key][0]:
            self._needed[key] = order, image
        if key in self._ready:
            self._ready.move_to_end(key)
            self.stats.hits += 1
            return True
        return False

    def choose(self) -> Encode | None:
        """Return what to do next, and count it as under way: nothing if an image is being encoded, if no image is
        needed, or if there is no room for the image that the oldest sequence needs.
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
            del self._ready[other]
        self.stats.evictions += len(evicted)
        self.under_way = Encode(key, image, evicted)
        return self.under_way

    def finish(self) -> None:
        """Count the image under way as encoded."""
        assert self.under_way is not None
        self._ready[self.under_way.key] = self.size_of(self.under_way.image)
        self.stats.encoded += 1
        self.under_way = None

    def clear(self) -> None:
        """Forget all rows, and the image under way."""
        self._ready.clear()
        self._needed.clear()
        self.under_way = None
