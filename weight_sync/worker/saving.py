"""Write the served weights into a folder in the format of a push by disk, for a worker that joins a fleet."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from ..payload.tensors import dtypes_of, host_chunks, raw_bytes
from ..transports.disk import FolderWriter
from .assembly import Destination


def save_weights(parent: Path, push_id: str, version: int, weights: Destination) -> Path:
    """Write the folder of the push `push_id` into `parent`, and return the folder's path. Raise PushError if the folder
    cannot be written.
    """
    dtype_of = dtypes_of(weights)
    with closing(FolderWriter(parent, push_id, version, weights.dtype, weights.shapes, weights.dtypes)) as writer:
        for name in weights.shapes:
            for _, chunk in host_chunks(weights.served(name), dtype_of(name)):
                writer.append(name, raw_bytes(chunk))
        return writer.finish()
