"""Buckets in POSIX shared memory, for trainer and workers on one machine.

Owns: on the trainer's side a segment of slots, for one push; on the worker's side a mapping of it. The name is removed
as soon as all workers have mapped the memory, which the system frees with its last mapping; so a process that is killed
leaves nothing behind, except between `begin` and the workers' answer. Both sides run as the same user.
"""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path

import torch

from trueroll.errors import PushError

from ..payload.manifest import MOST_UNDER_WAY, Bucket, SharedSource

_FOLDER = Path("/dev/shm")
_PAGE = mmap.PAGESIZE


class SharedSlots:
    """The trainer's side. `slots`: uint8 tensors to fill. Raise PushError if there is too little shared memory."""

    has_word_sums = False

    def __init__(self, slot_bytes: int) -> None:
        slot_bytes = -(-slot_bytes // _PAGE) * _PAGE
        self._name = f"trueroll-{secrets.token_hex(16)}"
        self._source = SharedSource(name=self._name, slot_bytes=slot_bytes, num_slots=MOST_UNDER_WAY)
        memory = torch.frombuffer(_create(self._name, slot_bytes * MOST_UNDER_WAY), dtype=torch.uint8)
        self.slots = list(memory.split(slot_bytes))

    def source(self, position: int) -> SharedSource:
        return self._source

    def open(self) -> None:
        """Nothing to do: the workers come on their own."""

    def opened(self) -> None:
        """All workers have mapped the memory: nobody else shall."""
        self._unlink()

    def send(self, slot: int, num_bytes: int) -> None:
        """Nothing to do: the workers read the slot where it is."""

    def wait(self, slot: int) -> None:
        """Nothing to wait for beside the workers' answers."""

    def close(self) -> None:
        self._unlink()
        self.slots.clear()

    def _unlink(self) -> None:
        (_FOLDER / self._name).unlink(missing_ok=True)


class SharedReader:
    """The worker's side. Raise PushError if there is no such memory, or not as it should be."""

    def __init__(self, source: SharedSource) -> None:
        self._source = source
        self._memory = torch.frombuffer(_attach(source), dtype=torch.uint8)

    def prepare(self, bucket: Bucket) -> None:
        """Nothing to do: it lies there."""

    def read(self, bucket: Bucket) -> torch.Tensor:
        size = self._source.slot_bytes
        if bucket.num_bytes > size:
            raise PushError(f"bucket {bucket.index}: expected {size} bytes at most, a slot, found {bucket.num_bytes}")
        start = bucket.index % self._source.num_slots * size
        return self._memory[start : start + size]

    def read_unannounced(self) -> tuple[()]:
        return ()

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)


def _create(name: str, size: int) -> mmap.mmap:
    file = os.open(_FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, size)  # otherwise a full file system kills who writes
        return mmap.mmap(file, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as error:
        (_FOLDER / name).unlink()
        raise PushError(
            f"shared: expected {size} bytes of shared memory, found {error.strerror}; make {_FOLDER} larger"
        ) from None
    finally:
        os.close(file)


def _attach(source: SharedSource) -> mmap.mmap:
    size = source.slot_bytes * source.num_slots
    try:
        file = os.open(_FOLDER / source.name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise PushError(
            f"shared: expected the memory {source.name}, found {error.strerror}; run trainer and worker on one "
            "machine, as the same user and, in containers, with the same /dev/shm"
        ) from None
    try:
        status = os.fstat(file)
        if status.st_size != size or status.st_uid != os.geteuid():
            found = f"{status.st_size} of user {status.st_uid}"
            raise PushError(f"shared: expected {size} bytes of user {os.geteuid()} in {source.name}, found {found}")
        return mmap.mmap(file, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(file)
