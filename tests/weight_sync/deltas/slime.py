"""slime's chains, written and read as its source does (github.com/THUDM/slime, of August 2026), for comparison."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import torch
import xxhash
import zstandard
from safetensors.numpy import save
from safetensors.torch import save_file

from trueroll.weight_sync.payload.tensors import raw_bytes

State = Mapping[str, torch.Tensor]
INDEX = "model.safetensors.index.json"
CHECKSUMS = {
    "xxh3-128": lambda data: xxhash.xxh3_128_hexdigest(data),
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return np.asarray(raw_bytes(tensor.contiguous())).copy()


def folder_of(parent: Path, version: int) -> Path:
    folder = parent / f"weight_v{version:06d}"
    folder.mkdir(parents=True)
    return folder


def encoded(encoding: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    if encoding == "xor":
        return new ^ old
    positions = np.flatnonzero(new != old).astype("<u4")
    return np.concatenate([np.array([len(positions)], "<u4").view(np.uint8), positions.view(np.uint8), new[new != old]])


def frames(encoding: str, old: State, new: State) -> dict[str, np.ndarray]:
    """Return the compressed delta of each changed tensor."""
    pairs = {name: (as_bytes(old[name]), as_bytes(new[name])) for name in new}
    changed = {name: pair for name, pair in pairs.items() if not np.array_equal(*pair)}
    pack = zstandard.ZstdCompressor(level=1).compress
    return {name: np.frombuffer(pack(encoded(encoding, *pair).data), np.uint8) for name, pair in changed.items()}


def write_delta(
    parent: Path,
    version: int,
    old: State,
    new: State,
    encoding: str = "xor",
    checksum: str = "xxh3-128",
    num_files: int = 1,
    base: int | None = None,
) -> Path:
    """Write a delta in `num_files` files, as several ranks of a trainer do."""
    folder, packed = folder_of(parent, version), frames(encoding, old, new)
    names, files = sorted(packed), {}
    for number in range(num_files):
        own = names[number::num_files]
        file = f"model-{number:05d}-of-{num_files:05d}.safetensors"
        digests = {name: CHECKSUMS[checksum](as_bytes(new[name]).tobytes()) for name in own}
        (folder / file).write_bytes(save({name: packed[name] for name in own}, metadata=digests))
        files |= dict.fromkeys(own, file)
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1 if base is None else base:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum,
    }
    write_index(folder, metadata, files)
    return folder


def write_full(parent: Path, version: int, state: State, num_files: int = 1) -> Path:
    """Write a full checkpoint as transformers does: one file without an index, or several with an index."""
    folder = folder_of(parent, version)
    if num_files == 1:
        save_file(dict(state), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    files: dict[str, str] = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        own = {name: state[name] for name in sorted(state)[number::num_files]}
        save_file(own, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(own, file)
    write_index(folder, {"total_size": sum(tensor.nbytes for tensor in state.values())}, files)
    return folder


def write_index(folder: Path, metadata: Mapping[str, Any], files: Mapping[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": files}))


def apply_delta(folder: Path, state: dict[str, np.ndarray]) -> None:
    """Apply a delta to the bytes of a checkpoint, as slime's patch of SGLang does, with its checks."""
    metadata = json.loads((folder / INDEX).read_text())["metadata"]
    assert metadata["compression_format"] == "zstd"
    for path in sorted(folder.glob("*.safetensors")):
        blob = path.read_bytes()
        length = int.from_bytes(blob[:8], "little")
        header = json.loads(blob[8 : 8 + length])
        wanted = header.pop("__metadata__", {})
        for name, info in header.items():
            begin, end = info["data_offsets"]
            delta = zstandard.ZstdDecompressor().decompress(blob[8 + length + begin : 8 + length + end])
            found, region = np.frombuffer(delta, np.uint8), state[name]
            if metadata["delta_encoding"] == "xor":
                region ^= found
            else:
                count = int(found[:4].view("<u4")[0])
                region[found[4 : 4 + 4 * count].copy().view("<u4")] = found[4 + 4 * count :]
            assert CHECKSUMS[metadata["checksum_format"]](region.tobytes()) == wanted[name]
