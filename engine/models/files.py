"""Checks of the kind and size of files in a model folder that may be untrusted.

Owns nothing. Guarantees: only regular files and links to regular files are opened. The memory for reading a file is
bounded by the limits in this module. If a file is faulty, the functions raise a ModelError that names the file and has
a bounded length.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from trueroll.errors import ModelError

MAX_SETTINGS_BYTES = 2**20
"""The size limit for a settings file, such as config.json. Typical files have a few kilobytes."""
MAX_TOKENIZER_BYTES = 2**26
"""The size limit for each tokenizer file. The largest tokenizer.json in wide use has 34 MB."""


def local_path(name: str) -> Path | None:
    """Return `name` as a path, with `~` expanded. Return None if the path does not exist or is not accessible."""
    if not name:
        return None
    try:
        path = Path(name).expanduser()
        path.stat()
    except (OSError, ValueError, RuntimeError):  # ValueError for a NUL, RuntimeError for an unknown home
        return None
    return path


def list_names(folder: Path) -> list[str]:
    """Return the names of the entries of a folder, in any order. Raise ModelError if the folder cannot be read."""
    try:
        return os.listdir(folder)
    except OSError as error:
        raise _unreadable(folder, error) from None


def check_file(path: Path, max_bytes: int | None = None) -> None:
    """Raise ModelError unless `path` is a regular file, or a link to a regular file, of at most `max_bytes` bytes."""
    try:
        status = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from None
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
        raise ModelError(f"{path}: must be a regular file, but is {kind}; download or save the model again")
    if max_bytes is not None and status.st_size > max_bytes:
        raise ModelError(
            f"{path}: file is too large: {status.st_size} bytes (limit {max_bytes}); no supported model needs such a "
            "file; check where the file comes from"
        )


def read_json(path: Path, max_bytes: int = MAX_SETTINGS_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raise ModelError if the file cannot be read, is too large, or does not contain a JSON object.
    """
    check_file(path, max_bytes)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(path, error) from None
    except ValueError as error:
        raise ModelError(f"{path}: is not valid JSON: {error}; download or save the model again") from None
    except RecursionError:
        raise ModelError(f"{path}: the JSON is nested too deeply; save the model again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must contain a JSON object (got {type(content).__name__}); save the model again")
    return content


def _unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError(f"{path}: cannot be read: {error.strerror}; check that the model folder is complete")
