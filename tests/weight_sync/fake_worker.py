"""A worker without an engine: speaks the protocol's push calls on a ROUTER socket, around a real `Receiver`.

`health.engine` tells the checksum of each live tensor. Run as a program it serves a fake model in a process of its own:
`fake_worker.py ADDRESS SHAPES_JSON [DTYPE]`.
"""

from __future__ import annotations

import json
import queue
import secrets
import socket
import sys
from collections.abc import Mapping
from typing import Any

import torch
import zmq

from trueroll.rollout import protocol
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.errors import IllegalStateError, ProtocolError, TruerollError, VersionGapError
from trueroll.weight_sync.events import Begun, Broken, PushEvent, Staged, Verified
from trueroll.weight_sync.manifest import checksum
from trueroll.weight_sync.receiver import Receiver
from trueroll.weight_sync.tensors import DTYPES, raw_bytes


class FakeStaging:
    """Plain tensors beside the live ones, or the live ones themselves."""

    def __init__(self, live: dict[str, torch.Tensor], in_place: bool) -> None:
        self.in_place = in_place
        self.tensors = live if in_place else {name: torch.full_like(tensor, 99.0) for name, tensor in live.items()}
        self.staged: set[str] = set()
        self.elements: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def rows(self, name: str, start: int, length: int) -> torch.Tensor:
        self.staged.add(name)
        return self.tensors[name][start : start + length]

    def put(self, name: str, indices: torch.Tensor, values: torch.Tensor) -> None:
        if self.in_place:
            raise ValueError("in place")
        self.elements.append((name, indices, values))


class FakeWeights:
    """A `Destination` of zeros."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: str = "bfloat16",
        tied: Mapping[str, str] | None = None,
        ignored: tuple[str, ...] = (),
    ) -> None:
        self.dtype = dtype
        self.shapes = dict(shapes)
        self.tied = dict(tied or {})
        self.ignored = frozenset(ignored)
        self.live = {name: torch.zeros(shape, dtype=DTYPES[dtype]) for name, shape in shapes.items()}

    def new_staging(self, in_place: bool) -> FakeStaging:
        return FakeStaging(self.live, in_place)

    def commit(self, staging: FakeStaging) -> None:
        for name in staging.staged:
            self.live[name] = staging.tensors[name]
        for name, indices, values in staging.elements:
            self.live[name].view(-1)[indices] = values


class FakeWorker:
    """Serves `weights` on `address` until it is told to end. `calls`: the types of what it was asked.

    `refuse`: an error for a type of call, to be answered once. `mute`: types of calls that get no answer.
    """

    def __init__(self, address: str, weights: FakeWeights) -> None:
        self.address = address
        self.weights = weights
        self.version = 0
        self.push_id: str | None = None
        self._instance = secrets.token_hex(8)
        self.calls: list[str] = []
        self.refuse: dict[str, TruerollError] = {}
        self.mute: set[str] = set()
        self._receiver: Receiver | None = None
        self._begin: protocol.BeginPush | None = None
        self._begin_tag: Any = None
        self._is_ended = False
        self._events: queue.SimpleQueue[tuple[Receiver, PushEvent]] = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(address)

    def end(self) -> None:
        """Callable from any thread."""
        self._is_ended = True
        self._wake_writer.send(b"\0")

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        while not self._is_ended:
            ready = dict(poller.poll())
            if self._wake_reader.fileno() in ready:
                self._wake_reader.recv(4096)
            while not self._events.empty():
                self._handle_event(*self._events.get())
            if self._socket in ready:
                self._handle(*self._socket.recv_multipart())
        self._close_receiver()
        self._context.destroy(linger=200)

    def _handle(self, identity: bytes, frame: bytes) -> None:
        message = protocol.from_client(protocol.unpack(frame))
        if message.type != "health":
            self.calls.append(message.type)
        if message.type in self.mute:
            return
        try:
            if message.type in self.refuse:
                raise self.refuse.pop(message.type)
            self._do(identity, message)
        except TruerollError as error:
            self._refuse(identity, message.id, error)

    def _do(self, identity: bytes, message: Any) -> None:
        tag = identity, message.id
        match message:
            case protocol.GetHealth():
                self._reply(identity, self._health(message.id))
            case protocol.GetWeights():
                self._reply(identity, self._weights(message.id))
            case protocol.BeginPush():
                self._begin_push(message, tag)
            case protocol.StageBucket():
                self._receiver_of(message.push_id).stage(message, tag)
            case protocol.VerifyPush():
                self._receiver_of(message.push_id).verify(message, tag)
            case protocol.CommitPush():
                self._commit(message)
                self._report(tag, message.push_id, "committed", pause_seconds=0.001)
            case protocol.AbortPush():
                if self._begin is not None and self._begin.push_id == message.push_id:
                    self._close_receiver()
                self._report(tag, message.push_id, "aborted")
            case _:
                raise ProtocolError(f"type: expected a call of a push, found {message.type}")

    def _begin_push(self, begin: protocol.BeginPush, tag: Any) -> None:
        if begin.base is not None and begin.base != self.push_id:
            raise VersionGapError(f"base: expected {self.push_id}, found {begin.base}; push every tensor")
        self._close_receiver()
        receiver = Receiver(begin, self.weights, lambda event: self._publish(receiver, event))
        self._receiver, self._begin, self._begin_tag = receiver, begin, tag
        receiver.start()

    def _publish(self, receiver: Receiver, event: PushEvent) -> None:
        self._events.put((receiver, event))
        self._wake_writer.send(b"\0")

    def _receiver_of(self, push_id: str) -> Receiver:
        if self._receiver is None or self._begin is None or self._begin.push_id != push_id:
            raise IllegalStateError(f"push: expected begin_push first, found none for {push_id}")
        return self._receiver

    def _commit(self, message: protocol.CommitPush) -> None:
        receiver = self._receiver_of(message.push_id)
        assert self._begin is not None
        if receiver.progress.phase != "verified":
            raise IllegalStateError(f"push: expected it verified, found it {receiver.progress.phase}")
        self.weights.commit(receiver.staging)  # type: ignore[arg-type]
        self.version, self.push_id = self._begin.weight_version, message.push_id
        self._close_receiver()

    def _close_receiver(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver, self._begin = None, None

    def _handle_event(self, receiver: Receiver, event: PushEvent) -> None:
        if receiver is not self._receiver:
            return
        match event:
            case Begun():
                self._report(self._begin_tag, event.push_id, "begun")
            case Staged():
                self._report(event.tag, event.push_id, "staged")
            case Verified():
                self._report(event.tag, event.push_id, "verified")
            case Broken():
                phase, tag = receiver.progress.phase, event.tag
                self._close_receiver()
                tag = self._begin_tag if tag is None and phase == "begun" else tag
                if tag is not None:
                    self._refuse(*tag, event.error)

    def _report(self, tag: Any, push_id: str, phase: Any, pause_seconds: float | None = None) -> None:
        identity, id = tag
        fields = dict(push_id=push_id, phase=phase, weight_version=self.version, pause_seconds=pause_seconds)
        self._reply(identity, protocol.PushStatus(id=id, **fields))

    def _refuse(self, identity: bytes, id: str, error: TruerollError) -> None:
        self._reply(identity, protocol.Error(id=id, code=error.code, message=str(error)))

    def _reply(self, identity: bytes, message: protocol.FromWorker) -> None:
        self._socket.send_multipart([identity, protocol.encode(message)])

    def _weights(self, id: str) -> protocol.Weights:
        weights = self.weights
        return protocol.Weights(
            id=id,
            dtype=weights.dtype,
            shapes=weights.shapes,
            tied=weights.tied,
            ignored=tuple(sorted(weights.ignored)),
            weight_version=self.version,
            push_id=self.push_id,
        )

    def _health(self, id: str) -> protocol.Health:
        return protocol.Health(
            id=id,
            state="ready",
            instance=self._instance,
            seconds_since_progress=None,
            weight_version=self.version,
            requests={},
            memory={},
            limits=WorkerConfig().limits(),
            engine={name: checksum(raw_bytes(tensor)) for name, tensor in self.weights.live.items()},
        )


def main() -> None:
    address, shapes, *rest = sys.argv[1:]
    torch.set_num_threads(1)
    weights = FakeWeights({name: tuple(shape) for name, shape in json.loads(shapes).items()}, *rest)
    print("ready", flush=True)
    FakeWorker(address, weights).run()


if __name__ == "__main__":
    main()
