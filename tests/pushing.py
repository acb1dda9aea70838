"""Manual pushes, one protocol message at a time. A test can stop at any message or send invalid messages."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from serving import RawClient

from trueroll.weight_sync.payload.manifest import ALIGNMENT, checksum
from trueroll.weight_sync.transports.shared import SharedSlots

SLOT_BYTES = 1 << 20
_ids = (f"call-{number}" for number in itertools.count())


def ask(client: RawClient, type: str, **fields: Any) -> dict[str, Any]:
    """Send a call and return its reply. Drop replies to other messages."""
    id = next(_ids)
    client.send(type, id=id, **fields)
    while (reply := client.receive())["id"] != id:
        pass
    return reply


class HandPush:
    """A push of `tensors` through shared memory, all in one bucket."""

    def __init__(self, client: RawClient, tensors: Mapping[str, torch.Tensor], version: int = 5) -> None:
        self.client, self.tensors, self.version = client, dict(tensors), version
        self.push_id = secrets.token_hex(16)
        self.memory = SharedSlots(SLOT_BYTES)

    def call(self, type: str, **fields: Any) -> dict[str, Any]:
        return ask(self.client, type, push_id=self.push_id, **fields)

    def begin_fields(self, **fields: Any) -> dict[str, Any]:
        source = self.memory.source(0).model_dump()
        return {"weight_version": self.version, "dtype": "float32", "timeout": 20.0, "source": source, **fields}

    def begin(self, **fields: Any) -> dict[str, Any]:
        return self.call("begin_push", **self.begin_fields(**fields))

    def bucket(self) -> dict[str, Any]:
        """Copy the tensors into the first slot, and return the places of the tensors in the slot."""
        pieces, offset = [], 0
        for name, tensor in self.tensors.items():
            data = tensor.reshape(-1).view(torch.uint8)
            self.memory.slots[0][offset : offset + len(data)] = data
            piece = {"kind": "rows", "name": name, "shape": list(tensor.shape), "start": 0, "length": len(tensor)}
            pieces.append(piece | {"offset": offset, "num_bytes": len(data), "checksum": checksum(data.numpy())})
            offset += -(-len(data) // ALIGNMENT) * ALIGNMENT
        return {"index": 0, "num_bytes": offset, "pieces": pieces}

    def stage(self) -> dict[str, Any]:
        return self.call("stage_bucket", bucket=self.bucket())

    def verify(self) -> dict[str, Any]:
        return self.call("verify_push", num_buckets=1)

    def commit(self, **fields: Any) -> dict[str, Any]:
        return self.call("commit_push", **fields)

    def abort(self) -> dict[str, Any]:
        return self.call("abort_push")

    def up_to_verify(self, **fields: Any) -> None:
        """Begin, stage and verify the push. Each call must succeed."""
        for reply, phase in ((self.begin(**fields), "begun"), (self.stage(), "staged"), (self.verify(), "verified")):
            assert reply["type"] == "push_status" and reply["phase"] == phase, reply

    def run(self, **fields: Any) -> dict[str, Any]:
        """Run the whole push and return the reply to the commit."""
        self.up_to_verify()
        return self.commit(**fields)

    def __enter__(self) -> HandPush:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.memory.close()
