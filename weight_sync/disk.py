"""Weights by a folder, which also lets a restarted worker catch up.

A folder is written under a name that ends in `.tmp` and renamed once it is complete and on the disk, so that a folder
without that ending is whole. Each holds the tensors in one safetensors file, under the name that Hugging Face libraries
look for, and a manifest with the checksums. One publisher at a time uses a folder of folders.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from ..rollout.errors import PushError
from .manifest import MANIFEST_FILE, MODEL_FILE, Bucket, DiskSource, FolderManifest, Rows, Shape
from .tensors import dtype_named

_MAX_MANIFEST_BYTES = 2**26
_FOLDER_NAME = re.compile(r"version-\d+-[0-9a-f]{8}(\.tmp)?")
_DTYPE_CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class FolderWriter:
    """The trainer's side: a new folder in `parent`, for tensors of these shapes that come in any order, in pieces.

    Raise PushError if it cannot be written.
    """

    def __init__(self, parent: Path, push_id: str, version: int, dtype: str, shapes: Mapping[str, Shape]) -> None:
        self._final = parent.absolute() / f"version-{version}-{push_id[:8]}"
        self._folder = self._final.with_name(f"{self._final.name}.tmp")
        self._manifest = FolderManifest(push_id=push_id, weight_version=version, dtype=dtype, checksums={})
        self._hashes = {name: xxhash.xxh3_64() for name in shapes}
        self._file: int | None = None
        header, self._offsets = _layout(shapes, dtype)
        with _explained(self._folder):
            self._folder.mkdir(parents=True)
            self._file = os.open(self._folder / MODEL_FILE, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
            os.pwrite(self._file, header, 0)

    def append(self, name: str, left: memoryview) -> None:
        """The next bytes of a tensor."""
        assert self._file is not None
        offset = self._offsets[name]
        self._hashes[name].update(left)
        with _explained(self._folder):
            while left:
                written = os.pwrite(self._file, left, offset)
                left, offset = left[written:], offset + written
        self._offsets[name] = offset

    def finish(self) -> Path:
        """The complete folder, once it is on the disk under its final name."""
        checksums = {name: hash.intdigest() for name, hash in self._hashes.items()}
        manifest = self._manifest.model_copy(update={"checksums": checksums})
        with _explained(self._final):
            (self._folder / MANIFEST_FILE).write_text(manifest.model_dump_json(), encoding="utf-8")
            for path in (self._folder / MODEL_FILE, self._folder / MANIFEST_FILE, self._folder):
                _sync(path)
            self._folder.rename(self._final)
            _sync(self._final.parent)
        return self._final

    def close(self) -> None:
        """Close the file, and remove what was not finished."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        shutil.rmtree(self._folder, ignore_errors=True)


class FolderReader:
    """The worker's side. Raise PushError if the folder is not there, or holds another push than it should."""

    def __init__(self, source: DiskSource, push_id: str, version: int, dtype: str) -> None:
        self._folder = Path(source.folder)
        self._manifest = read_manifest(self._folder)
        found = self._manifest.push_id, self._manifest.weight_version, self._manifest.dtype
        if found != (push_id, version, dtype):
            raise PushError(
                f"disk: expected push, version and dtype {push_id, version, dtype}, found {found} in {self._folder}"
            )

    def prepare(self, bucket: Bucket) -> None:
        """Nothing to do: `read` refuses it."""

    def read(self, bucket: Bucket) -> torch.Tensor:
        raise PushError(f"bucket {bucket.index}: expected none in a push by disk; ask to verify")

    def read_unannounced(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Each tensor whole, as a bucket of one piece, and its bytes. Raise PushError for what cannot be read."""
        file = self._folder / MODEL_FILE
        for name in _names(file):
            try:
                with safe_open(file, framework="pt") as model:  # anew: what was read of an open file stays in memory
                    tensor = model.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise PushError(f"disk: expected tensor {name} in {file}, found {error}") from None
            yield self._bucket(name, tensor), tensor.view(-1).view(torch.uint8)
            del tensor

    def _bucket(self, name: str, tensor: torch.Tensor) -> Bucket:
        if tensor.dtype != dtype_named(self._manifest.dtype) or not tensor.dim():
            raise PushError(
                f"tensor {name}: expected {self._manifest.dtype}, found {tensor.dtype} {list(tensor.shape)}"
            )
        if name not in self._manifest.checksums:
            raise PushError(
                f"tensor {name}: expected its checksum in {MANIFEST_FILE}, found none; write the folder again"
            )
        piece = Rows(
            name=name,
            shape=tuple(tensor.shape),
            start=0,
            length=len(tensor),
            offset=0,
            num_bytes=tensor.nbytes,
            checksum=self._manifest.checksums[name],
        )
        return Bucket(index=0, num_bytes=tensor.nbytes, pieces=(piece,))

    def close(self) -> None:
        """Nothing is open between two tensors."""


def read_manifest(folder: Path) -> FolderManifest:
    """What push a folder holds. Raise PushError if it is not the folder of a push."""
    path = folder / MANIFEST_FILE
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_MANIFEST_BYTES:
            raise PushError(
                f"disk: expected a file of at most {_MAX_MANIFEST_BYTES} bytes, found something else at {path}; give "
                "the folder of a push"
            )
        return FolderManifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise PushError(
            f"disk: expected {path}, found {error.strerror}; give the folder of a push, at a path the worker can read"
        ) from None
    except (ValidationError, ValueError) as error:
        cause = str(error).partition("\n")[0]
        raise PushError(f"disk: expected a manifest in {path}, found {cause}; write the folder again") from None


def remove_others(kept: Path) -> None:
    """Remove the other pushes beside the folder `kept`, and what was left of pushes that were never finished."""
    for folder in kept.parent.iterdir():
        name = _FOLDER_NAME.fullmatch(folder.name)
        if name is None or folder == kept or folder.is_symlink():
            continue
        if name[1] or (folder / MANIFEST_FILE).is_file():
            shutil.rmtree(folder, ignore_errors=True)


def _layout(shapes: Mapping[str, Shape], dtype: str) -> tuple[bytes, dict[str, int]]:
    """The beginning of a safetensors file with these tensors, and where in the file each of them lies."""
    entries: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype_named(dtype).itemsize
        entries[name] = {"dtype": _DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    header = len(header).to_bytes(8, "little") + header
    return header, {name: len(header) + entry["data_offsets"][0] for name, entry in entries.items()}


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as model:
            return list(model.keys())
    except (OSError, SafetensorError) as error:
        raise PushError(f"disk: expected a complete safetensors file in {file}, found {error}; push again") from None


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PushError(
            f"disk: expected to write {folder}, found {error.strerror}; correct the folder or free space"
        ) from None
