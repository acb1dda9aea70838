"""What each transport has: slots at the trainer's end, which buckets go into, and a reader at each worker's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from ..payload.manifest import Bucket, Source


class Slots(Protocol):
    """The trainer's end of a transport, for one push. `slots`: memory for one bucket each, uint8.

    `has_word_sums`: a bucket carries a word sum and not a checksum of each piece, as in the memory of a GPU.
    """

    slots: list[torch.Tensor]
    has_word_sums: bool

    def source(self, position: int) -> Source:
        """Where the worker at that position finds the buckets."""
        ...

    def open(self) -> None:
        """Let the workers in, without waiting for them."""
        ...

    def opened(self) -> None:
        """Called when all workers say that they are in."""
        ...

    def send(self, slot: int, num_bytes: int) -> None:
        """Begin to send what is in a slot."""
        ...

    def wait(self, slot: int) -> None:
        """Wait until a slot is sent."""
        ...

    def close(self) -> None: ...


class Reader(Protocol):
    """The end of a transport that buckets come out of."""

    def prepare(self, bucket: Bucket) -> None:
        """Begin to fetch the bucket that is read next, while the one before it is still in use."""
        ...

    def read(self, bucket: Bucket) -> torch.Tensor:
        """The bucket's bytes, valid until the next one is read: uint8 [at least bucket.num_bytes]."""
        ...

    def read_unannounced(self) -> Iterable[tuple[Bucket, Callable[[], torch.Tensor]]]:
        """What no call announces: each bucket, and what reads its bytes once the bucket is checked."""
        ...

    def close(self) -> None:
        """Let go of everything. May be called again."""
        ...
