"""The description of one folder of a chain: the version that the folder holds, and how the tensors are stored. Imports
no torch.

A folder is a Hugging Face checkpoint with safetensors files and a `model.safetensors.index.json`, as slime writes it.
The index of a delta has these texts in its `metadata`: `version`, `base_version`, `delta_encoding`,
`compression_format` and `checksum_format`. A folder with an index without `delta_encoding`, or a folder with only a
`model.safetensors`, is a full checkpoint. trueroll also writes `push_id` and, for a delta, `base_push_id`: the ids of
the pushes of the two versions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trueroll.errors import PushError

from ..payload.manifest import LAST_VERSION, MODEL_FILE
from .encoding import COMPRESSION, ENCODINGS, HASHES, Encoding

INDEX_FILE = "model.safetensors.index.json"
_VERSION = re.compile(r"[0-9]{1,19}")
FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}\.safetensors")
_PUSH_ID = re.compile(r"[0-9a-f]{32}")


def folder_name(version: int) -> str:
    """Return the name of the folder with this version."""
    return f"weight_v{version:06d}"


@dataclass(frozen=True)
class Delta:
    """How the tensors of a delta are encoded. `base_version`: the version that the delta changes. `base_push_id`: the
    id of the push of `base_version`; None if the writer of the delta stores no push ids.
    """

    base_version: int
    encoding: Encoding
    base_push_id: str | None = None


@dataclass(frozen=True)
class Index:
    """The content of a folder. `files`: the file of each tensor, by the tensor's name; None if the folder has no index.
    A folder without an index has a single safetensors file, `MODEL_FILE`.
    `checksum_format`: the kind of checksum that each tensor of this version has; None if there
    are no checksums. The metadata of a tensor's file has the checksum under the tensor's name. `delta`: None for a full
    checkpoint. `push_id`: the id of the push of this version; None if the writer of the folder stores no push ids.
    """

    version: int
    files: Mapping[str, str] | None
    checksum_format: str | None = None
    delta: Delta | None = None
    push_id: str | None = None

    source = INDEX_FILE
    """The file that describes the folder."""

    @staticmethod
    def folder_of(version: int) -> str:
        """Return the name of the folder with this version."""
        return folder_name(version)

    @property
    def folder(self) -> str:
        return self.folder_of(self.version)

    def digest_of(self, name: str, metadata: Mapping[str, str]) -> str | None:
        """Return the checksum of a tensor, if there is one. `metadata`: the texts in the header of the tensor's
        file.
        """
        return metadata.get(name)

    @property
    def file_names(self) -> list[str]:
        """The names of the folder's safetensors files, in ascending order."""
        return [MODEL_FILE] if self.files is None else sorted(set(self.files.values()))

    def to_json(self) -> str:
        """Return the text of `INDEX_FILE`."""
        metadata: dict[str, str | None] = {"version": f"{self.version:06d}", "checksum_format": self.checksum_format}
        if (delta := self.delta) is not None:
            metadata |= {"base_version": f"{delta.base_version:06d}", "delta_encoding": delta.encoding}
            metadata |= {"compression_format": COMPRESSION, "base_push_id": delta.base_push_id}
        metadata["push_id"] = self.push_id
        told = {name: value for name, value in metadata.items() if value is not None}
        return json.dumps({"metadata": told, "weight_map": self.files})


def parse_index(text: bytes, version: int) -> Index:
    """Return the content of the folder of `version`. `text`: the folder's `INDEX_FILE`, of bounded length.

    Raise PushError if the text is not an index, describes another version, or uses an unknown format.
    """
    try:
        values = json.loads(text.decode())
        expect(isinstance(values, dict), "it is not a JSON map")
        metadata, files = values.get("metadata", {}), values.get("weight_map")
        expect(isinstance(metadata, dict), "its metadata is not a map")
        found = _version(metadata.get("version", str(version)), "version")
        expect(found == version, f"it describes version {found}, so this version is there twice")
        delta, checksum_format = _delta(metadata, version), metadata.get("checksum_format")
        if delta is not None or checksum_format is not None:
            _expect_one_of(metadata, "checksum_format", tuple(HASHES))
        return Index(version, _files(files), checksum_format, delta, _push_id(metadata, "push_id"))
    except (ValueError, RecursionError) as error:
        raise unusable(f"{folder_name(version)}/{INDEX_FILE}", error) from None


def unusable(path: str, error: Exception) -> PushError:
    """Return the error for a folder with an invalid description."""
    return PushError(f"chain: {path} is not usable: {error!s:.300}; write the folder again, or a full checkpoint")


def _files(values: Any) -> dict[str, str]:
    expect(isinstance(values, dict), "it has no weight_map, the map of tensors to files")
    for name, file in values.items():
        is_name = isinstance(file, str) and FILE_NAME.fullmatch(file) is not None
        expect(is_name, f"tensor {ascii(name[:80])} is in {file!a:.80}, which is not the name of a safetensors file")
    return values


def _delta(metadata: dict[str, Any], version: int) -> Delta | None:
    if "delta_encoding" not in metadata:
        return None
    base = _version(metadata.get("base_version"), "base_version")
    expect(base < version, f"version {version} is based on version {base}, which is not older")
    _expect_one_of(metadata, "delta_encoding", ENCODINGS)
    _expect_one_of(metadata, "compression_format", (COMPRESSION,))
    return Delta(base, metadata["delta_encoding"], _push_id(metadata, "base_push_id"))


def _version(value: Any, name: str) -> int:
    is_version = isinstance(value, str) and _VERSION.fullmatch(value) is not None and int(value) <= LAST_VERSION
    expect(is_version, f"{name} is {value!a:.80}, not a version such as '000123'")
    return int(value)


def _push_id(metadata: dict[str, Any], name: str) -> str | None:
    value = metadata.get(name)
    is_id = value is None or (isinstance(value, str) and _PUSH_ID.fullmatch(value) is not None)
    expect(is_id, f"{name} is {value!a:.80}, not 32 hexadecimal digits")
    return value


def _expect_one_of(metadata: dict[str, Any], name: str, known: tuple[str, ...]) -> None:
    value = metadata.get(name)
    is_known = isinstance(value, str) and value in known
    expect(is_known, f"{name} is {value!a:.80}, which is not supported (supported: {', '.join(known)})")


def expect(holds: bool, found: str) -> None:
    """Raise ValueError with the text `found` unless a condition holds."""
    if not holds:
        raise ValueError(found)
