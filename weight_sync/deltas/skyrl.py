"""The description of one folder of a chain that SkyRL wrote. Imports no torch.

The format is that of SkyRL 0.4.0 (github.com/NovaSky-AI/SkyRL, `weight_sync/delta/checkpoint.py`). A folder such as
`delta-00000123` has the changes from version 122 to version 123: files with
one tensor of uint8 for each changed tensor, encoded with
`xor` and compressed as in slime's format, and a `manifest.json`, which is written last. The manifest lists the file and
the checksum of each tensor. There are no full checkpoints: version 0 is the checkpoint from which the run began.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..payload.manifest import LAST_VERSION
from .encoding import CHECKSUM
from .index import FILE_NAME, Delta, Index, expect, unusable

MANIFEST_FILE = "manifest.json"
_DIGEST = re.compile(r"[0-9a-f]{32}")


def skyrl_folder(version: int) -> str:
    """Return the name of SkyRL's folder with this version."""
    return f"delta-{version:08d}"


@dataclass(frozen=True)
class SkyrlIndex(Index):
    """The content of a folder of SkyRL. `digests`: the checksum of each tensor, by the tensor's name."""

    digests: Mapping[str, str] = field(default_factory=dict)
    source = MANIFEST_FILE

    @staticmethod
    def folder_of(version: int) -> str:
        return skyrl_folder(version)

    def digest_of(self, name: str, metadata: Mapping[str, str]) -> str | None:
        return self.digests.get(name)


def parse_manifest(text: bytes, version: int) -> SkyrlIndex:
    """Return the content of the folder of `version`. `text`: the folder's `MANIFEST_FILE`, of bounded length.

    Raise PushError if the text is not a manifest, describes another version, or uses an unknown format.
    """
    try:
        values = json.loads(text.decode())
        expect(isinstance(values, dict), "it is not a JSON map")
        found, base = _version(values, "version"), _version(values, "base_version")
        expect(found == version, f"it describes version {found}, so this version is there twice")
        expect(base < version, f"version {version} is based on version {base}, which is not older")
        records = values.get("tensors")
        expect(isinstance(records, list), "it has no list of tensors")
        files: dict[str, str] = {}
        digests: dict[str, str] = {}
        for record in records:
            name, files_name, digest = _record(record)
            expect(name not in files, f"it lists tensor {name!a:.80} twice")
            files[name], digests[name] = files_name, digest
        return SkyrlIndex(version, files, CHECKSUM, Delta(base, "xor"), digests=digests)
    except (ValueError, RecursionError) as error:
        raise unusable(f"{skyrl_folder(version)}/{MANIFEST_FILE}", error) from None


def _version(values: dict[str, Any], name: str) -> int:
    value = values.get(name)
    is_version = type(value) is int and 0 <= value <= LAST_VERSION
    expect(is_version, f"{name} is {value!a:.80}, not a version such as 123")
    assert isinstance(value, int)
    return value


def _record(record: Any) -> tuple[str, str, str]:
    """Return the name, the file and the checksum of a tensor."""
    expect(isinstance(record, dict), "an element of its tensors is not a map")
    name, file, key = (record.get(each) for each in ("name", "payload_file", "payload_key"))
    assert isinstance(record, dict)
    expect(isinstance(name, str), f"the name of a tensor is {name!a:.80}, not a text")
    expect(key == name, f"tensor {name!a:.80} has the payload_key {key!a:.80}, which is not its name")
    is_file = isinstance(file, str) and FILE_NAME.fullmatch(file) is not None
    expect(is_file, f"tensor {name!a:.80} is in {file!a:.80}, which is not the name of a safetensors file")
    algorithm, digest = record.get("checksum_algorithm"), record.get("checksum")
    is_known = algorithm == CHECKSUM
    expect(is_known, f"checksum_algorithm is {algorithm!a:.80}, which is not supported (supported: {CHECKSUM})")
    is_digest = isinstance(digest, str) and _DIGEST.fullmatch(digest) is not None
    expect(is_digest, f"the checksum of tensor {name!a:.80} is {digest!a:.80}, not 32 hexadecimal digits")
    return str(name), str(file), str(digest)
