"""Buckets in POSIX shared memory, for trainer and workers on one machine.

Owns: in the trainer, a segment of slots for one push; in each worker, the mapping of this segment. The segment's name
is removed as soon as all workers have mapped the memory. The operating system frees the memory when the last mapping is
removed. If a trainer is killed before it removes the name, the segment's lock becomes free. When the lock is free, the
next push by any trainer of the same user removes the name. Trainer and workers run as the same user.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from contextlib import suppress
from pathlib import Path

import torch

from trueroll.errors import PushError

from ..payload.manifest import MOST_UNDER_WAY, Bucket, SharedSource
from .pages import create_mapping, open_mapping

_FOLDER = Path("/dev/shm")
_PREFIX = "trueroll-"
_PAGE = mmap.PAGESIZE


class SharedSlots:
    """The trainer's side. `slots`: uint8 tensors to fill. Raise PushError if there is not enough shared memory."""

    has_word_sums = False

    def __init__(self, slot_bytes: int) -> None:
        slot_bytes = -(-slot_bytes // _PAGE) * _PAGE
        _remove_abandoned()
        self._name = f"{_PREFIX}{secrets.token_hex(16)}"
        self._source = SharedSource(name=self._name, slot_bytes=slot_bytes, num_slots=MOST_UNDER_WAY)
        self.slots = list(_create(self._name, slot_bytes * MOST_UNDER_WAY).split(slot_bytes))

    def source(self, position: int) -> SharedSource:
        return self._source

    def open(self) -> None:
        """Do nothing: the workers map the memory on their own."""

    def opened(self) -> None:
        """Remove the name, so that no other process can map the memory."""
        self._unlink()

    def send(self, slot: int, num_bytes: int) -> None:
        """Do nothing: the workers read the slot directly from the shared memory."""

    def wait(self, slot: int) -> None:
        """Do nothing: a slot is free once all workers have replied."""

    def close(self) -> None:
        self._unlink()
        self.slots.clear()

    def _unlink(self) -> None:
        (_FOLDER / self._name).unlink(missing_ok=True)


class SharedReader:
    """The worker's side. Raise PushError if the memory does not exist, or has another size or owner."""

    def __init__(self, source: SharedSource) -> None:
        self._source = source
        self._memory = _attach(source)

    def prepare(self, bucket: Bucket) -> None:
        """Do nothing: the bytes are already in the shared memory."""

    def read(self, bucket: Bucket) -> torch.Tensor:
        size = self._source.slot_bytes
        if bucket.num_bytes > size:
            raise PushError(f"bucket {bucket.index}: has {bucket.num_bytes} bytes, but a slot has only {size}")
        start = bucket.index % self._source.num_slots * size
        return self._memory[start : start + size]

    def read_unannounced(self) -> tuple[()]:
        return ()

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)


def _create(name: str, size: int) -> torch.Tensor:
    """Create the shared memory and lock its file. The file of the memory stays open and locked for as long as the
    memory is mapped.
    """
    file = _create_locked(_FOLDER / name)
    try:
        return create_mapping(file, size)
    except OSError as error:
        (_FOLDER / name).unlink()
        raise PushError(
            f"shared: cannot allocate {size} bytes of shared memory: {error.strerror}; make {_FOLDER} larger"
        ) from None
    finally:
        os.close(file)


def _create_locked(path: Path) -> int:
    while True:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:  # otherwise another trainer removed the file before it was locked
            return file
        os.close(file)


def _remove_abandoned() -> None:
    """Remove shared memory that killed trainers have left behind."""
    for entry in os.scandir(_FOLDER):
        if entry.name.startswith(_PREFIX):
            with suppress(OSError):  # the file belongs to another user, or another trainer was faster
                _remove_if_abandoned(entry.path)


def _remove_if_abandoned(path: str) -> None:
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    finally:
        os.close(file)


def _attach(source: SharedSource) -> torch.Tensor:
    size = source.slot_bytes * source.num_slots
    try:
        file = os.open(_FOLDER / source.name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise PushError(
            f"shared: cannot open the memory {source.name}: {error.strerror}; run trainer and worker on one machine, "
            "as the same user and, in containers, with the same /dev/shm"
        ) from None
    try:
        status = os.fstat(file)
        if status.st_size != size or status.st_uid != os.geteuid():
            raise PushError(
                f"shared: {source.name} must be {size} bytes long and owned by user {os.geteuid()} (it is "
                f"{status.st_size} bytes long and owned by user {status.st_uid})"
            )
        return open_mapping(file, size)
    finally:
        os.close(file)
