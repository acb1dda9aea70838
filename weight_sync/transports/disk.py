"""Pushes through folders. A restarted worker can load the current weights from the folder of a push.

A folder is written under a name that ends in `.tmp`, and renamed once it is complete and synced to disk. A folder
without the suffix `.tmp` is therefore complete. The folder holds a manifest with checksums, and one safetensors file
with the tensors. The safetensors file has the name that Hugging Face libraries expect. Only one publisher may use a
parent folder at a time. A worker reads only what its `PushPolicy` allows, and checks all data before use.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import xxhash
from pydantic import ValidationError

from trueroll.errors import PushError

from ..payload.manifest import (
    MANIFEST_FILE,
    MODEL_FILE,
    Adapters,
    Bucket,
    DiskSource,
    FolderManifest,
    Rows,
    Shape,
    first_fault,
)
from ..payload.tensor_file import DTYPE_CODES, TensorEntry, TensorFile
from ..payload.tensors import dtype_named
from .policy import PushPolicy

_MOST_TENSORS = 2**17
"""Limit on the tensors of a manifest that a trainer reads, since a trainer reads a manifest before it knows the
model.
"""
_FOLDER_MODE, _FILE_MODE = 0o755, 0o644
"""Modes of the folder of a push and of its files. Only the owner may write folder and files, whatever the umask is. A
worker refuses a folder of its own user that other users can write.
"""
PRIVATE = 0o700
"""Mode of a parent folder that is created here. An existing parent folder keeps its mode, which determines the users
that can read it.
"""
_FOLDER_NAME = re.compile(r"version-\d+-[0-9a-f]{8}(\.tmp)?")


@dataclass
class _Written:
    """A tensor that is being written. `extent`: the range [begin, end) of the tensor's bytes after the header.
    `offset`: the file position at which the next byte is written. `hash`: the hash of all bytes of the tensor that have
    been written so far.
    """

    extent: tuple[int, int]
    offset: int
    hash: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)


class FolderWriter:
    """The trainer's side: writes a new folder in `parent`.

    `shapes`: shapes of the tensors. Tensors may be written in any order and in pieces, and some tensors may be missing.
    `dtypes`: by tensor name, the dtypes that differ from `dtype`. Raise PushError if the folder cannot be written.
    """

    def __init__(
        self,
        parent: Path,
        push_id: str,
        version: int,
        dtype: str,
        shapes: Mapping[str, Shape],
        dtypes: Mapping[str, str] | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._final = parent.absolute() / f"version-{version}-{push_id[:8]}"
        self._manifest = FolderManifest(
            push_id=push_id, weight_version=version, dtype=dtype, checksums={}, adapters=adapters
        )
        self._shapes, self._dtypes = shapes, dtypes or {}
        self._written: dict[str, _Written] = {}
        self._file: int | None = None
        total = sum(map(self._num_bytes, shapes))
        # Reserve the longest possible header, since the header is written last.
        self._start = len(self._header(dict.fromkeys(shapes, (total, total)), 0))
        self._end = 0
        with _explained(self._folder):
            parent.mkdir(PRIVATE, parents=True, exist_ok=True)
            self._folder.mkdir(_FOLDER_MODE)
            self._file = _create(self._folder / MODEL_FILE)

    def append(self, name: str, left: memoryview) -> None:
        """Write the next bytes of a tensor. `left`: the bytes."""
        assert self._file is not None
        if (tensor := self._written.get(name)) is None:
            extent = self._end, self._end + self._num_bytes(name)
            tensor = self._written[name] = _Written(extent, self._start + self._end)
            self._end = extent[1]
        tensor.hash.update(left)
        with _explained(self._folder):
            while left:
                count = os.pwrite(self._file, left, tensor.offset)
                left, tensor.offset = left[count:], tensor.offset + count

    def finish(self) -> Path:
        """Sync the complete folder to the disk, rename the folder to its final name, and return the path."""
        checksums = {name: tensor.hash.intdigest() for name, tensor in self._written.items()}
        extents = {name: tensor.extent for name, tensor in self._written.items()}
        manifest = self._manifest.model_copy(update={"checksums": checksums})
        with _explained(self._final):
            assert self._file is not None
            os.pwrite(self._file, self._header(extents, self._start), 0)
            with open(_create(self._folder / MANIFEST_FILE), "w", encoding="utf-8") as file:
                file.write(manifest.model_dump_json(exclude_none=True))
            for path in (self._folder / MODEL_FILE, self._folder / MANIFEST_FILE, self._folder):
                _sync(path)
            self._folder.rename(self._final)
            _sync(self._final.parent)
        return self._final

    def close(self) -> None:
        """Close the file, and remove the folder if the push was not finished."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _folder(self) -> Path:
        """The temporary path of the folder, used until the push is finished."""
        return self._final.with_name(f"{self._final.name}.tmp")

    def _num_bytes(self, name: str) -> int:
        return math.prod(self._shapes[name]) * dtype_named(self._dtype_of(name)).itemsize

    def _dtype_of(self, name: str) -> str:
        return self._dtypes.get(name, self._manifest.dtype)

    def _header(self, extents: Mapping[str, tuple[int, int]], num_bytes: int) -> bytes:
        """Return the length field and the header of a safetensors file with these tensors. The result is padded to at
        least `num_bytes` bytes.
        """
        entries = {
            name: {
                "dtype": DTYPE_CODES[self._dtype_of(name)],
                "shape": list(self._shapes[name]),
                "data_offsets": list(extent),
            }
            for name, extent in extents.items()
        }
        text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
        length = max(-(-len(text) // 8) * 8, num_bytes - 8)
        return length.to_bytes(8, "little") + text.ljust(length)


class FolderReader:
    """The worker's side.

    `num_tensors`: the largest number of tensors that the manifest and the header may describe. `dtypes`: by tensor
    name, the dtypes that differ from `dtype`. Raise PushError if `policy` forbids reading the folder, or if the folder
    holds another push. Also raise PushError if the manifest or the header is invalid or too long.
    """

    def __init__(
        self,
        source: DiskSource,
        push_id: str,
        version: int,
        dtype: str,
        num_tensors: int,
        policy: PushPolicy,
        dtypes: Mapping[str, str] | None = None,
    ) -> None:
        folder, max_bytes = Path(source.folder), _max_bytes(num_tensors)
        with ExitStack() as opened:
            manifest, model = map(opened.enter_context, policy.open_files(source.folder, (MANIFEST_FILE, MODEL_FILE)))
            self._manifest = _parse_manifest(manifest, folder / MANIFEST_FILE, max_bytes)
            found = self._manifest.push_id, self._manifest.weight_version, self._manifest.dtype
            if found != (push_id, version, dtype):
                raise PushError(
                    f"disk: {folder} has the push id, version and dtype {found!s:.200}, not {push_id, version, dtype}; "
                    "give the folder of this push"
                )
            self._tensors = TensorFile(model, folder / MODEL_FILE, dtype, dtypes or {}, max_bytes)
            self._opened = opened.pop_all()

    def prepare(self, bucket: Bucket) -> None:
        """Do nothing, because `read` refuses the bucket."""

    def read(self, bucket: Bucket) -> torch.Tensor:
        raise PushError(f"bucket {bucket.index}: a push by disk has no buckets; send verify_push instead")

    def read_unannounced(self) -> Iterator[tuple[Bucket, Callable[[], torch.Tensor]]]:
        """Yield each whole tensor as a bucket of one piece, together with a function that reads the tensor's bytes.

        The iterator and the function raise PushError if the folder's data is wrong. Only a call of the function
        allocates memory for a tensor.
        """
        for entry in self._tensors.entries:
            yield self._bucket(entry), partial(self._tensors.read, entry)

    def _bucket(self, entry: TensorEntry) -> Bucket:
        if entry.name not in self._manifest.checksums:
            raise PushError(f"tensor {entry.name}: {MANIFEST_FILE} has no checksum for it; write the folder again")
        piece = Rows(
            name=entry.name,
            shape=entry.shape,
            start=0,
            length=entry.shape[0],
            offset=0,
            num_bytes=entry.num_bytes,
            checksum=self._manifest.checksums[entry.name],
        )
        return Bucket(index=0, num_bytes=entry.num_bytes, pieces=(piece,))

    def close(self) -> None:
        self._opened.close()


def read_manifest(folder: Path) -> FolderManifest:
    """Return the manifest of a folder that the caller may read. Raise PushError if the folder is not the folder of a
    push.
    """
    path = folder / MANIFEST_FILE
    try:
        if not path.is_file():
            raise PushError(f"disk: there is no file {path}; give the folder of a push")
        with open(path, "rb", buffering=0) as file:
            return _parse_manifest(file, path, _max_bytes(_MOST_TENSORS))
    except (OSError, ValueError) as error:
        raise PushError(f"disk: cannot read {path}: {error}; give the folder of a push") from None


def _max_bytes(num_tensors: int) -> int:
    """Return the limit on the size of a manifest and of a header, in bytes. A limit is needed because parsing blocks
    other threads.

    An entry of a tensor takes less than 1 KiB, even with the longest name and the largest numbers. Most entries take
    150 bytes.
    """
    return 2**16 + 2**10 * num_tensors


def _parse_manifest(file: FileIO, path: Path, max_bytes: int) -> FolderManifest:
    try:
        text = file.read(max_bytes + 1)
        if len(text) > max_bytes:
            raise PushError(
                f"disk: {path} has more than {max_bytes} bytes; check that the folder belongs to this model"
            )
        return FolderManifest.model_validate(_manifest_fields(text))
    except (OSError, ValueError, RecursionError) as error:
        cause = first_fault(error) if isinstance(error, ValidationError) else f"{error!s:.300}"
        raise PushError(f"disk: {path} is not a manifest: {cause}; write the folder again") from None


def _manifest_fields(text: bytes) -> dict[str, Any]:
    fields, names = json.loads(text.decode()), FolderManifest.model_fields.keys() - {"adapters"}
    if not isinstance(fields, dict) or fields.keys() - {"adapters"} != names:
        raise ValueError(f"expected a JSON map with the keys {', '.join(sorted(names))}")
    return fields


def remove_others(kept: Path, base: Path | None = None) -> None:
    """Remove all push folders, finished or not, that lie beside the folder `kept`, but keep the folder `base`.

    `base`: the folder with the weights that the adapters in `kept` are added to.
    """
    for folder in kept.parent.iterdir():
        name = _FOLDER_NAME.fullmatch(folder.name)
        if name is None or folder in (kept, base) or folder.is_symlink():
            continue
        if name[1] or (folder / MANIFEST_FILE).is_file():
            shutil.rmtree(folder, ignore_errors=True)


def _create(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, _FILE_MODE)


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
        raise PushError(f"disk: cannot write {folder}: {error.strerror}; correct the folder or free space") from None
