"""Read small files that another user may have created. Accept only regular files up to a size limit."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading. Does not block, even if the path is a pipe.

    Raise OSError if the file cannot be opened, and ValueError if the file is a pipe, a device or a folder.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("the path is not a regular file")
        yield file


def read_text(file: BinaryIO, max_bytes: int) -> str:
    """Return the text of a UTF-8 file. Raise ValueError if the file has more than `max_bytes` or is not UTF-8."""
    content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"the file has more than {max_bytes} bytes")
    return content.decode("utf-8")


def check_printable(value: object) -> None:
    """Raise ValueError if any string or key in a value has an unprintable character.

    `value`: a value from JSON or TOML, nested to any depth.
    """
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, str) and not found.isprintable():
            raise ValueError(f"control characters are not allowed (got {found[:80]!r})")
        if isinstance(found, dict):
            left += [*found.keys(), *found.values()]
        elif isinstance(found, list):
            left += found
