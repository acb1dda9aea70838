"""SkyRL's chains, written as its release 0.4.0 does (`weight_sync/delta/checkpoint.py`, `DeltaCheckpointPublisher`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors.torch import save_file
from weight_sync.deltas.slime import State, as_bytes, frames

MANIFEST = "manifest.json"


def write_delta(
    parent: Path, version: int, old: State, new: State, num_files: int = 1, base: int | None = None
) -> Path:
    """Write a delta in at most `num_files` files."""
    folder = parent / f"delta-{version:08d}"
    folder.mkdir(parents=True)
    packed = frames("xor", old, new)
    files = [f"delta-rank00000-file{number:06d}.safetensors" for number in range(min(num_files, len(packed)))]
    records = [record(name, new[name], packed[name], files[at % num_files]) for at, name in enumerate(packed)]
    for file in files:
        own = [each["name"] for each in records if each["payload_file"] == file]
        save_file({name: torch.from_numpy(packed[name].copy()) for name in own}, folder / file)
    told: dict[str, Any] = {
        "version": version,
        "base_version": version - 1 if base is None else base,
        "tensors": records,
        "total_uncompressed_num_bytes": sum(each["uncompressed_num_bytes"] for each in records),
        "total_compressed_num_bytes": sum(each["compressed_num_bytes"] for each in records),
        "payload_files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(told))
    return folder


def record(name: str, tensor: torch.Tensor, frame: np.ndarray, file: str) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "uncompressed_num_bytes": tensor.nbytes,
        "compressed_num_bytes": len(frame),
        "payload_file": file,
        "payload_key": name,
        "checksum": xxhash.xxh3_128_hexdigest(as_bytes(tensor).tobytes()),
        "checksum_algorithm": "xxh3-128",
    }
