"""Write folders and files that are complete on the disk once they have their final names.

Owns the modes of folders and files. Does not own the names or the content of the files. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trueroll.errors import PushError

FOLDER_MODE, _FILE_MODE = 0o755, 0o644
"""Modes of the folder of a push and of its files. Only the owner may write folder and files, whatever the umask is. A
worker refuses a folder of its own user that other users can write.
"""
PRIVATE = 0o700
"""Mode of a parent folder that is created here. An existing parent folder keeps its mode, which determines the users
that can read it.
"""


def write_text(path: Path, text: str) -> None:
    """Write a new file, and sync it to the disk. Raise OSError if the file cannot be written."""
    with open(create_file(path), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def create_file(path: Path) -> int:
    """Create a file, and return its descriptor for writing. Raise OSError if the file exists."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, _FILE_MODE)


def sync(folder: Path) -> None:
    """Sync the names in a folder to the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Raise PushError in place of an OSError. `folder`: the folder that is written in this context."""
    try:
        yield
    except OSError as error:
        raise PushError(f"disk: cannot write {folder}: {error.strerror}; correct the folder or free space") from None
