"""Where the folders of a chain lie: in a file system of this machine, or at a URL that fsspec can read.

Owns the opening of files. Does not own the rules about which places a worker may read (`transports.policy`), or the
credentials for a URL, which fsspec takes from its environment. fsspec is imported only for a URL.
"""

from __future__ import annotations

import errno
import logging
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from trueroll.errors import PushError

from ..payload.manifest import MODEL_FILE
from ..payload.tensor_file import LocalFile, ReadableFile, read_bytes
from ..transports.policy import PushPolicy
from .index import INDEX_FILE, Index, folder_name, parse_index
from .skyrl import MANIFEST_FILE, parse_manifest, skyrl_folder

READ_AHEAD = 4 * 2**20
"""Bytes of a remote file that are fetched ahead. Each open remote file holds about twice as many bytes."""
_REQUEST = 2**20

log = logging.getLogger(__name__)


class Place(Protocol):
    """The folder or URL of a chain. `open` and `open_if_there` raise PushError if a file cannot be opened."""

    def open(self, folder: str, name: str) -> ReadableFile:
        """Open the file `name` in a folder of the chain."""
        ...

    def open_if_there(self, folder: str, name: str) -> ReadableFile | None:
        """Open the file `name` in a folder of the chain. Return None if the folder or the file does not exist."""
        ...


def is_url(place: str) -> bool:
    """Return whether a chain is at a URL, not in a folder."""
    return "://" in place


def place_for_worker(place: str, policy: PushPolicy) -> Place:
    """Return the `Place` of the chain in `place`, a folder or URL that another process has chosen. Raise PushError if
    `place` is a URL that has a password or that `policy` forbids.
    """
    if not is_url(place):
        return LocalPlace(place, policy)
    _check_no_password(place)
    policy.check_url(place)
    return RemotePlace(place)


def _check_no_password(url: str) -> None:
    """Raise PushError if the URL has a password. This error does not show the URL, but other errors and the log would
    show the URL with its password.
    """
    user = url.partition("://")[2].partition("/")[0].rpartition("@")[0]
    if ":" in user:
        raise PushError(
            "chain: the URL has a password, which errors and the log would show; leave it out, and give fsspec the "
            "credentials in its environment"
        )


class LocalPlace:
    """A folder. A worker reads only the files that `policy` allows."""

    def __init__(self, root: str, policy: PushPolicy) -> None:
        self._root, self._policy = root, policy

    def open(self, folder: str, name: str) -> ReadableFile:
        [file] = self._policy.open_files(self._path(folder), [name])
        return LocalFile(file, Path(self._path(folder), name))

    def open_if_there(self, folder: str, name: str) -> ReadableFile | None:
        file = self._policy.open_if_there(self._path(folder), name)
        return None if file is None else LocalFile(file, Path(self._path(folder), name))

    def _path(self, folder: str) -> str:
        return f"{self._root}/{folder}"


class OwnPlace:
    """A folder that this process has chosen. The process reads the files with its own rights, without a policy."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self, folder: str, name: str) -> ReadableFile:
        path = self._root / folder / name
        try:
            return LocalFile(open(path, "rb", buffering=0), path)
        except OSError as error:
            raise PushError(f"chain: cannot read {path}: {error.strerror}; give the folder of a chain") from None

    def open_if_there(self, folder: str, name: str) -> ReadableFile | None:
        return self.open(folder, name) if (self._root / folder / name).exists() else None


class RemotePlace:
    """A URL. Raise PushError if the URL has a password, or if fsspec or the package for this kind of URL is not
    installed.
    """

    def __init__(self, url: str) -> None:
        _check_no_password(url)
        self._url = url.rstrip("/")
        try:
            from fsspec.core import url_to_fs

            self._files, self._path = url_to_fs(self._url)
            self._files.invalidate_cache()  # another process may have written folders after fsspec cached its lists
        except (ImportError, ValueError) as error:
            raise PushError(
                f"chain: cannot read {url!a:.200}: {error!s:.200}; run pip install 'trueroll[object-store]' and the "
                "package for this kind of URL, such as s3fs"
            ) from None

    def open(self, folder: str, name: str) -> ReadableFile:
        path = f"{self._path}/{folder}/{name}"
        try:
            return RemoteFile(self._files, path, f"{self._url}/{folder}/{name}")
        except Exception as error:
            log.warning("cannot read %s/%s/%s", self._url, folder, name, exc_info=True)
            raise PushError(
                f"chain: cannot read {self._url}/{folder}/{name}: {_name(error)}; check the URL and the worker's "
                "credentials; the log has the cause"
            ) from None

    def open_if_there(self, folder: str, name: str) -> ReadableFile | None:
        try:
            is_there = self._files.isfile(f"{self._path}/{folder}/{name}")
        except Exception:
            is_there = True  # so that `open` reports the error
        return self.open(folder, name) if is_there else None


class RemoteFile:
    """A file of fsspec's file system `files`. The file is read front to back in large requests."""

    def __init__(self, files: Any, path: str, url: str) -> None:
        self.path = url
        self._num_bytes = files.size(path)
        if self._num_bytes is None:
            raise OSError(errno.EIO, "the server does not tell the size of the file")
        self._file = files.open(path, "rb", block_size=READ_AHEAD, cache_type="readahead")

    def num_bytes(self) -> int:
        return self._num_bytes

    def read_into(self, memory: memoryview, offset: int) -> int:
        try:
            self._file.seek(offset)
            return self._file.readinto(memory[:_REQUEST])
        except Exception as error:
            log.warning("cannot read %s", self.path, exc_info=True)
            raise OSError(errno.EIO, _name(error)) from None

    def close(self) -> None:
        self._file.close()


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error!s:.200}"


def read_index(place: Place, version: int, max_bytes: int) -> Index:
    """Return the content of the folder of `version`, which slime, trueroll or SkyRL wrote. Raise PushError if the
    folder is missing or still being written, or if its description is invalid or has more than `max_bytes` bytes.
    """
    folder = folder_name(version)
    if (file := place.open_if_there(folder, INDEX_FILE)) is not None:
        return parse_index(_text(file, max_bytes), version)
    if (file := place.open_if_there(folder, MODEL_FILE)) is not None:
        file.close()
        return Index(version, None)
    if (file := place.open_if_there(skyrl_folder(version), MANIFEST_FILE)) is not None:
        return parse_manifest(_text(file, max_bytes), version)
    try:
        place.open(folder, MODEL_FILE).close()
    except PushError as error:
        raise PushError(f"{error}. There is no {skyrl_folder(version)}/{MANIFEST_FILE} either") from None
    raise PushError(f"chain: {folder} was written while it was read; push again")


def _text(file: ReadableFile, max_bytes: int) -> bytes:
    with closing(file):
        size = file.num_bytes()
        if size > max_bytes:
            raise PushError(f"chain: {file.path} has {size} bytes (limit {max_bytes}); check that it is of this model")
        return read_bytes(file, 0, size).tobytes()
