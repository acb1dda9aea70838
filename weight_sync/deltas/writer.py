"""The trainer's writer of a chain: writes the folder of one version, a full checkpoint or a delta, and removes folders
that no worker needs.

A folder is written under a name that ends in `.tmp`, and renamed once it is complete and synced to disk. A folder
without the suffix `.tmp` is therefore complete. If a push replaces the folder of an earlier push, the earlier folder is
kept under a name that ends in `.old.tmp` until the push is committed. Only one publisher may use a chain's folder at a
time.

Memory of a delta: the XOR of one tensor, its compressed forms, and the list of its changed bytes, which takes five
bytes for each changed byte.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import xxhash

from trueroll.errors import PushError

from ..payload.manifest import MODEL_FILE, Parameters, own_dtypes, spellings_of
from ..transports.durable import FOLDER_MODE, PRIVATE, create_file, explained, sync, write_text
from ..transports.folders import TensorFileWriter, header_of
from .encoding import CHECKSUM, ENCODINGS, MOST_OVERWRITTEN, Encoding, compress, digest, encode
from .index import INDEX_FILE, Delta, Index, folder_name

DELTA_FILE = "model-00000-of-00001.safetensors"
_FOLDER_NAME = re.compile(r"weight_v([0-9]{6,})(-[0-9a-f]{8}(\.old)?\.tmp)?")
_NO_DIGEST = "0" * 32


class _Folder:
    """A new folder of the chain in `parent`. Raise PushError if the folder cannot be written."""

    def __init__(self, parent: Path, index: Index) -> None:
        assert index.push_id is not None, "trueroll writes ids of pushes, which tell its folders from others"
        self._index = index
        self._final = parent.absolute() / folder_name(index.version)
        self.path = self._final.with_name(f"{self._final.name}-{index.push_id[:8]}.tmp")
        with explained(self.path):
            parent.mkdir(PRIVATE, parents=True, exist_ok=True)
            if self._final.exists() and not _is_own(self._final):
                raise PushError(f"chain: {self._final} exists, and trueroll did not write it; use an empty folder")
            self.path.mkdir(FOLDER_MODE)

    def finish(self, index: Index) -> Path:
        """Write the index, sync the folder, and give it its final name."""
        with explained(self._final):
            write_text(self.path / INDEX_FILE, index.to_json())
            sync(self.path)
            if self._final.exists():  # an earlier push of this version wrote it, and workers may serve that push
                self._final.rename(_replaced(self._final, index.push_id))
            self.path.rename(self._final)
            sync(self._final.parent)
        return self._final

    def close(self) -> None:
        """Remove the folder if it is not finished."""
        shutil.rmtree(self.path, ignore_errors=True)


class CheckpointWriter:
    """Writes version `version` as a full checkpoint. `wanted`: the tensors that may be written."""

    def __init__(self, parent: Path, push_id: str, version: int, wanted: Parameters) -> None:
        self._index = Index(version, None, CHECKSUM, push_id=push_id)
        self._folder = _Folder(parent, self._index)
        shapes, own = spellings_of(wanted).all_shapes(), own_dtypes(wanted)
        dtypes = {name: own.get(name, wanted.dtype) for name in shapes}
        longest = dict.fromkeys(shapes, _NO_DIGEST)
        self._model = TensorFileWriter(self._folder.path / MODEL_FILE, shapes, dtypes, xxhash.xxh3_128, longest)

    def append(self, name: str, left: memoryview) -> None:
        """Write the next bytes of a tensor."""
        self._model.append(name, left)

    def finish(self) -> Path:
        """Make the folder complete, and return its path."""
        digests = {name: hashed.hexdigest() for name, hashed in self._model.hashes().items()}
        self._model.finish(digests)
        return self._folder.finish(replace(self._index, files=dict.fromkeys(digests, MODEL_FILE)))

    def close(self) -> None:
        """Close the file, and remove the folder if it is not finished."""
        self._model.close()
        self._folder.close()


class DeltaWriter:
    """Writes version `version` as a delta to version `base_version`. All tensors are written in the encoding that takes
    fewer bytes in total.
    """

    def __init__(self, parent: Path, push_id: str, version: int, base_version: int, base_push_id: str) -> None:
        self._base = base_version, base_push_id
        self._index = Index(version, {}, CHECKSUM, push_id=push_id)
        self._folder = _Folder(parent, self._index)
        self._digests: dict[str, str] = {}
        self._frames: dict[Encoding, dict[str, int]] = {encoding: {} for encoding in ENCODINGS}
        """For each encoding, the number of bytes of each tensor's compressed delta, by the tensor's name. The names are
        in the order in which the deltas are written.
        """
        with explained(self._folder.path):
            self._spools = {encoding: tempfile.TemporaryFile(dir=self._folder.path) for encoding in ENCODINGS}

    def add(self, name: str, old: np.ndarray, new: np.ndarray) -> None:
        """Write a tensor. `old`, `new`: the tensor's bytes in the base and in this version, uint8 [n]. An unchanged
        tensor is left out.
        """
        if np.array_equal(old, new):
            return
        self._digests[name] = digest(CHECKSUM, new)
        if len(new) >= MOST_OVERWRITTEN:
            self._frames.pop("overwrite", None)
        for encoding, lengths in self._frames.items():
            frame = compress(encoding, encode(encoding, old, new), torch.get_num_threads())
            with explained(self._folder.path):
                self._spools[encoding].write(frame)
            lengths[name] = len(frame)

    def finish(self) -> Path:
        """Make the folder complete, and return its path."""
        encoding = min(self._frames, key=lambda each: sum(self._frames[each].values()))
        if self._digests:
            with explained(self._folder.path):
                self._write_file(self._frames[encoding], self._spools[encoding])
        version, push_id = self._base
        files = dict.fromkeys(self._digests, DELTA_FILE)
        return self._folder.finish(replace(self._index, files=files, delta=Delta(version, encoding, push_id)))

    def close(self) -> None:
        """Close the files, and remove the folder if it is not finished."""
        for spool in self._spools.values():
            spool.close()
        self._folder.close()

    def _write_file(self, lengths: Mapping[str, int], spool: IO[bytes]) -> None:
        entries: dict[str, Any] = {}
        end = 0
        for name, length in lengths.items():
            entries[name] = {"dtype": "U8", "shape": [length], "data_offsets": [end, end + length]}
            end += length
        spool.seek(0)
        with open(create_file(self._folder.path / DELTA_FILE), "wb") as file:
            file.write(header_of(entries, self._digests))
            shutil.copyfileobj(spool, file, 2**20)
            file.flush()
            os.fsync(file.fileno())


def take_back(folder: Path, push_id: str) -> None:
    """Remove the folder of a push that was not committed, and restore the folder that the push's folder replaced."""
    shutil.rmtree(folder)
    if (replaced := _replaced(folder, push_id)).exists():
        replaced.rename(folder)


def _replaced(folder: Path, push_id: str | None) -> Path:
    """A push with the id `push_id` may replace `folder` by a new folder. Return the path at which the replaced folder
    is kept until the push is committed.
    """
    assert push_id is not None
    return folder.with_name(f"{folder.name}-{push_id[:8]}.old.tmp")


def folder_bytes(folder: Path) -> int:
    """Return the number of bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())


def remove_old(parent: Path, version: int) -> None:
    """Remove folders that trueroll wrote and that no worker needs once `version` is committed.

    The last full checkpoint up to `version` and its deltas up to `version` are kept. The previous full checkpoint and
    its deltas are also kept, because a worker may still read them. Folders of versions later than `version` are
    removed, because they come from an earlier run.
    """
    is_full: dict[int, bool] = {}
    for path in parent.iterdir():
        match = _FOLDER_NAME.fullmatch(path.name)
        if match is None or path.is_symlink():
            continue
        if match[2]:
            shutil.rmtree(path, ignore_errors=True)
        elif _is_own(path):
            is_full[int(match[1])] = "delta_encoding" not in _metadata(path)
    kept = sorted((each for each in is_full if each <= version and is_full[each]), reverse=True)[:2]
    for each in is_full:
        if each > version or each < min(kept, default=0):
            shutil.rmtree(parent / folder_name(each), ignore_errors=True)


def _is_own(folder: Path) -> bool:
    """Return whether trueroll wrote a folder, so that it may be removed."""
    return "push_id" in _metadata(folder)


def _metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata of a folder's index; an empty map if the folder has no readable index."""
    try:
        return dict(json.loads((folder / INDEX_FILE).read_text())["metadata"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
