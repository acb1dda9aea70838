"""Pushes through folders. A restarted worker can load the current weights from the folder of a push.

A folder is written under a name that ends in `.tmp`, and renamed once it is complete and synced to disk. A folder
without the suffix `.tmp` is therefore complete. The folder holds a manifest with checksums, and one safetensors file
with the tensors. The safetensors file has the name that Hugging Face libraries expect. Only one publisher may use a
parent folder at a time. A worker reads only what its `PushPolicy` allows, and checks all data before use.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
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
from ..payload.tensor_file import LocalFile, TensorEntry, TensorFile, max_header_bytes
from .durable import FOLDER_MODE, PRIVATE, explained, sync, write_text
from .folders import TensorFileWriter
from .policy import PushPolicy

MOST_TENSORS = 2**17
"""Limit on the number of tensors in a manifest or index that a trainer reads. The trainer does not know the model yet
when it reads the file.
"""
_FOLDER_NAME = re.compile(r"version-\d+-[0-9a-f]{8}(\.tmp)?")


class FolderWriter:
    """The trainer's side: writes a new folder in `parent`.

    `shapes`: shapes of the tensors. Tensors may be written in any order and in pieces, and some tensors may be missing.
    `dtypes`: maps the name of each tensor with a dtype other than `dtype` to the tensor's dtype. Raise PushError if the
    folder cannot be written.
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
        with explained(self._folder):
            parent.mkdir(PRIVATE, parents=True, exist_ok=True)
            self._folder.mkdir(FOLDER_MODE)
        own = dtypes or {}
        dtype_of = {name: own.get(name, dtype) for name in shapes}
        self._model = TensorFileWriter(self._folder / MODEL_FILE, shapes, dtype_of, xxhash.xxh3_64)

    def append(self, name: str, left: memoryview) -> None:
        """Write the next bytes of a tensor. `left`: the bytes."""
        self._model.append(name, left)

    def finish(self) -> Path:
        """Sync the complete folder to the disk, rename the folder to its final name, and return the path."""
        checksums = {name: hashed.intdigest() for name, hashed in self._model.hashes().items()}
        manifest = self._manifest.model_copy(update={"checksums": checksums})
        self._model.finish({})
        with explained(self._final):
            write_text(self._folder / MANIFEST_FILE, manifest.model_dump_json(exclude_none=True))
            sync(self._folder)
            self._folder.rename(self._final)
            sync(self._final.parent)
        return self._final

    def close(self) -> None:
        """Close the file, and remove the folder if the push was not finished."""
        self._model.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _folder(self) -> Path:
        """The temporary path of the folder, used until the push is finished."""
        return self._final.with_name(f"{self._final.name}.tmp")


class FolderReader:
    """The worker's side.

    `num_tensors`: the largest number of tensors that the manifest and the header may describe. `dtypes`: maps the name
    of each tensor with a dtype other than `dtype` to the tensor's dtype. Raise PushError if `policy` forbids reading
    the folder, or if the manifest does not have this `push_id`, `version` and `dtype`. Also raise PushError if the
    manifest or the header is invalid or too long.
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
        folder, max_bytes = Path(source.folder), max_header_bytes(num_tensors)
        with ExitStack() as opened:
            manifest, model = map(opened.enter_context, policy.open_files(source.folder, (MANIFEST_FILE, MODEL_FILE)))
            self._manifest = _parse_manifest(manifest, folder / MANIFEST_FILE, max_bytes)
            found = self._manifest.push_id, self._manifest.weight_version, self._manifest.dtype
            if found != (push_id, version, dtype):
                raise PushError(
                    f"disk: {folder} has the push id, version and dtype {found!s:.200}, not {push_id, version, dtype}; "
                    "give the folder of this push"
                )
            file, own = LocalFile(model, folder / MODEL_FILE), dtypes or {}
            self._tensors = TensorFile(file, lambda name: own.get(name, dtype), max_bytes)
            self._opened = opened.pop_all()

    def prepare(self, bucket: Bucket) -> None:
        """Do nothing. A folder has no buckets, and `read` refuses any bucket."""

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
            return _parse_manifest(file, path, max_header_bytes(MOST_TENSORS))
    except (OSError, ValueError) as error:
        raise PushError(f"disk: cannot read {path}: {error}; give the folder of a push") from None


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
