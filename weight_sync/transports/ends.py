"""The two ends of every transport: slots for buckets in the trainer, and a reader of buckets in each worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from ..payload.manifest import Bucket, Source


class Slots(Protocol):
    """The trainer's end of a transport, for one push. `slots`: uint8 tensors, each with memory for one bucket.

    `has_word_sums`: whether each bucket has one checksum of all its bytes (`Bucket.word_sum`) instead of a checksum of
    each piece. Buckets in GPU memory
    have word sums.
    """

    slots: list[torch.Tensor]
    has_word_sums: bool

    def source(self, position: int) -> Source:
        """Return the source from which a worker reads the buckets. `position`: the worker's index among the workers
        that get buckets.
        """
        ...

    def open(self) -> None:
        """Make the source ready for the workers to open. This method does not wait for the workers."""
        ...

    def opened(self) -> None:
        """Finish opening the source. The trainer calls `opened` after all workers have opened the source."""
        ...

    def send(self, slot: int, num_bytes: int) -> None:
        """Begin to send the first `num_bytes` bytes of a slot."""
        ...

    def wait(self, slot: int) -> None:
        """Wait until the content of a slot is sent."""
        ...

    def close(self) -> None: ...


class Reader(Protocol):
    """The worker's end of a transport."""

    def prepare(self, bucket: Bucket) -> None:
        """Begin to fetch the bucket that will be read next. The previous bucket may still be in use."""
        ...

    def read(self, bucket: Bucket) -> torch.Tensor:
        """Return the bucket's bytes: uint8 [at least bucket.num_bytes]. The returned bytes are valid until the next
        call of `read`.
        """
        ...

    def read_unannounced(self) -> Iterable[tuple[Bucket, Callable[[], torch.Tensor]]]:
        """Yield the buckets that the worker reads without a call from the trainer. Each bucket comes with a function
        that reads the bucket's bytes. The caller must check a bucket before it reads the bucket's bytes.
        """
        ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...
