"""Clients that attack a worker, and a record of the replies that the worker still owes each client.

An `Attacker` stays connected and counts replies. The worker owes exactly one terminal reply to each message except a
valid `ack` or `put_image`. A `Deserter` breaks its connections and reconnects, sometimes with the same identity.
Replies to a deserter may be lost. Both answer `need_image`, often wrongly.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgpack
import zmq
from frames import pack
from fuzz.images import PART_BYTES, draw_answer, right_answer
from fuzz.mutate import MAX_MESSAGE_BYTES
from fuzz.trees import num_fields, unpack
from fuzz.violation import Violation

MAX_ID_CHARS = 128
MAX_ACK_IDS = 1024
HELLO = pack({"version": 1, "type": "health", "id": "x-hello"})
NOTICE_MS = 100
LIFECYCLE = ("pause", "resume", "drain", "sleep", "wake_up", "invalidate", "unload_adapter", "save_weights")
PUSH = ("begin_push", "stage_bucket", "verify_push", "commit_push", "abort_push")
TERMINAL = {
    **{"generate": "done", "score": "scores", "abort": "aborted"},
    **{type: type for type in ("health", "stats", "weights", "checksums")},
    **dict.fromkeys(LIFECYCLE, "status"),
    **dict.fromkeys(PUSH, "push_status"),
}
"""The type of the terminal reply to each message type, if the reply is not `error`."""
CODES = {
    *("invalid_message", "message_too_large", "invalid_request", "id_conflict", "queue_full", "unknown_request"),
    *("illegal_state", "deadline_exceeded", "stale_weights", "push_failed", "version_gap", "other_base"),
}
"""Error codes that a message may cause. The codes `worker_failed` and `unavailable` are missing, because they mean that
the worker is broken.
"""
PUT_FIELDS = {"version", "type", "id", "content_hash", "start", "data"}
IMAGE_ERRORS = {"other hash": "pixels have another hash", "silence": "(image_seconds)", "not finite": "not finite"}
"""Errors about pixels that do not arrive or cannot be used, and a part of their text."""


class Shot:
    """A message of the attack: its frames, and the replies that docs/protocol.md promises for it.

    `id`: the id of its replies, or None if the message has no recognizable id.
    """

    def __init__(self, frames: list[bytes]) -> None:
        self.frames = frames
        self.fields = unpack(frames[0]) if len(frames) == 1 else None
        self._early_id = _find_id(frames[-1])
        id = None if self.fields is None else self.fields.get("id")
        self.id = id if _is_id(id) else self._early_id

    @property
    def is_certain(self) -> bool:
        """Return whether the worker will certainly answer under this id, even if other clients abort the request.

        Return False for an `ack` or a `put_image` with a repeated field. The worker may refuse such a message for the
        field's first value, while `fields` has only the last value.
        """
        fields = self.fields or {}
        may_be_unanswered = fields.get("type") in ("ack", "put_image")
        has_more = may_be_unanswered and len(fields) < num_fields(self.frames[0])
        return self.id == self._early_id and "caller" not in fields and not has_more

    @property
    def terminal(self) -> str | None:
        """Return the type of the message's terminal reply, if that reply is not an error."""
        type = None if self.fields is None else self.fields.get("type")
        return TERMINAL.get(type) if isinstance(type, str) else None

    @property
    def needs_reply(self) -> bool:
        """Return whether the message is anything other than a valid `ack` or `put_image`."""
        fields = self.fields
        if fields is None or type(fields.get("version")) is not int or fields["version"] != 1:
            return True
        if len(self.frames[0]) > MAX_MESSAGE_BYTES:
            return True
        return not (_is_ack(fields) or _is_put_image(fields))


def _is_ack(fields: dict[str, Any]) -> bool:
    if fields.get("type") != "ack" or set(fields) != {"version", "type", "ids"}:
        return False
    ids = fields["ids"]
    return isinstance(ids, list) and len(ids) <= MAX_ACK_IDS and all(map(_is_id, ids))


def _is_put_image(fields: dict[str, Any]) -> bool:
    if fields.get("type") != "put_image" or set(fields) != PUT_FIELDS:
        return False
    content_hash, start, data = fields["content_hash"], fields["start"], fields["data"]
    is_hash = isinstance(content_hash, bytes) and len(content_hash) == 32
    is_part = isinstance(data, bytes) and 1 <= len(data) <= 2**20
    return _is_id(fields["id"]) and is_hash and type(start) is int and start >= 0 and is_part


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_ID_CHARS


def _find_id(frame: bytes) -> str | None:
    """Search the first KiB of a message, which may be unreadable, for its id, and return the id."""
    unpacker = msgpack.Unpacker(use_list=False, max_ext_len=0)
    unpacker.feed(frame[:1024])
    try:
        for _ in range(unpacker.read_map_header()):
            if unpacker.unpack() == "id":
                id = unpacker.unpack()
                return id if _is_id(id) else None
            unpacker.skip()
    except Exception:
        return None
    return None


def dealer(address: str, identity: bytes | None = None) -> zmq.Socket[bytes]:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 0)
    if identity is not None:
        socket.set(zmq.IDENTITY, identity)
    socket.connect(address)
    return socket


class Attacker:
    """One connection, which sends only messages that are certainly answered.

    `codes`: number of replies so far, by code or type. `owed`: number of missing terminal replies, by id. `images`:
    number of answers to `need_image`, by kind, and of requests with sent images, by outcome. `is_silent`: leave
    `need_image` unanswered for the rest of the round.
    """

    def __init__(self, address: str) -> None:
        self._socket = dealer(address)
        self.owed: Counter[str | None] = Counter()
        self.codes: Counter[str] = Counter()
        self.images: Counter[str] = Counter()
        self.is_silent = False
        self._asked: set[str] = set()
        self._late: list[tuple[int, list[dict[str, Any]]]] = []
        self._terminals: Counter[tuple[str | None, str]] = Counter()

    def send(self, shot: Shot) -> None:
        assert shot.is_certain
        if shot.needs_reply:
            self.owed[shot.id] += 1
            if shot.terminal is not None:
                self._terminals[shot.id, shot.terminal] += 1
        self._socket.send_multipart(shot.frames)

    def receive(self) -> None:
        """Take all replies that have arrived, and answer questions for images."""
        late, self._late = self._late, []
        for delay, messages in late:
            self._answer(delay - 1, messages)
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._account(msgpack.unpackb(frame))

    def start_round(self) -> None:
        """Begin a round. Call only when no reply is owed."""
        self.is_silent = False
        self.owed.clear()
        self._terminals.clear()
        self._asked.clear()
        self._late.clear()

    def _account(self, reply: dict[str, Any]) -> None:
        type = reply["type"]
        self.codes[reply["code"] if type == "error" else type] += 1
        if type == "deltas":
            ids = [delta["id"] for delta in reply["samples"]]
        else:
            ids = [reply["id"]]
        if any(self.owed[id] <= 0 for id in ids):
            raise Violation(f"an attacker got a reply that it was not owed, or a second one: {reply!r:.300}")
        if type in ("sample", "deltas"):
            return
        [id] = ids
        if type == "need_image":
            self._take_question(reply)
            return
        self.owed[id] -= 1
        if type == "error":
            self.images.update(name for name, text in IMAGE_ERRORS.items() if text in reply["message"])
            if reply["code"] not in CODES or len(reply["message"]) > 2000:
                raise Violation(f"an attacker got an error that no message may cause: {reply!r:.300}")
            return
        self._terminals[id, type] -= 1
        if self._terminals[id, type] < 0:
            raise Violation(f"an attacker got a reply of the wrong type: {reply!r:.300}")
        if type in ("done", "scores") and id in self._asked:
            self.images["served"] += 1

    def _take_question(self, question: dict[str, Any]) -> None:
        if not 1 <= question["num_bytes"] <= PART_BYTES or len(question["content_hash"]) != 32:
            raise Violation(f"an attacker was asked for an impossible part of an image: {question!r:.300}")
        self._asked.add(question["id"])
        if self.is_silent:
            self.images["unanswered"] += 1
            return
        kind, delay, messages = draw_answer(question)
        self.images[kind] += 1
        self._answer(delay, messages)

    def _answer(self, delay: int, messages: list[dict[str, Any]]) -> None:
        if delay > 0:
            self._late.append((delay, messages))
            return
        for message in messages:
            self.send(Shot([pack(message)]))

    def close(self) -> None:
        self._socket.close()


class Deserter:
    """Connects, sends, and breaks the connection. `reconnects`: number of new connections.

    Answers only `need_image` for the first part of an image, so that some connections break between two parts.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket = dealer(address)
        self._last: list[bytes] = [b""]
        self.reconnects = 0

    def send(self, frames: list[bytes]) -> None:
        self._last = frames
        self._socket.send_multipart(frames)
        while self._socket.poll(0):
            reply = msgpack.unpackb(self._socket.recv())
            if reply["type"] == "need_image" and reply["start"] == 0:
                self._socket.send(pack(right_answer(reply)))

    def desert(self, identity: bytes | None = None, *, linger: int) -> None:
        """Open a new connection, then break the old one. Messages not sent within `linger` ms are lost.

        If the identity is in use, wait until the worker seems to have noticed. The wait has a limit, because the worker
        may show no sign.
        """
        old, self._socket = self._socket, dealer(self._address, identity)
        if identity is not None:
            self._socket.send(HELLO)
            self._socket.poll(NOTICE_MS)
        old.send_multipart(self._last)
        old.close(linger=linger)
        self.reconnects += 1

    def close(self) -> None:
        self._socket.close()
