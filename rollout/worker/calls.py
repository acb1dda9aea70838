"""Calls that have one reply each: who waits for it, and the last replies given, for callers that lost theirs.

Owns: which of these calls are under way, who sent them, and the replies that are remembered. Does not own: sockets, or
what a call does.
Promises: a call that is sent again, as after a reconnect, is done once and answered each time that it was sent, as long
as it is under way or its reply is among the last `MAX_REMEMBERED`; under the id of another call it is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from trueroll.errors import IdConflictError, QueueFullError, TruerollError

from .. import protocol

MAX_REMEMBERED = 1024


@dataclass(eq=False)
class _Known:
    """`content`: the hash of a call, which may be long. `callers`: whoever waits. `reply`: once there is one."""

    id: str
    content: int
    callers: list[bytes] = field(default_factory=list)
    reply: bytes | None = None


class Calls:
    """Calls by key, which is their id, or that with its user. `send` is called with a caller's identity and the frame
    for it. No more than `most` may be under way at a time, nor wait for the reply of one.
    """

    def __init__(self, send: Callable[[bytes, bytes], object], most: int) -> None:
        self._send = send
        self._most = most
        self._under_way: dict[str, _Known] = {}
        self._answered: OrderedDict[str, _Known] = OrderedDict()

    @property
    def under_way(self) -> tuple[str, ...]:
        """The keys of the calls that have no reply yet."""
        return tuple(self._under_way)

    def is_new(self, key: str, identity: bytes, call: protocol.Call) -> bool:
        """Take a call; `answer` is due for it. False if it was sent before, and its reply with that, now or later.

        Raises IdConflictError if its key is another call's, QueueFullError if there are too many.
        """
        content = hash(call)
        known = self._under_way.get(key) or self._answered.get(key)
        if known is None:
            self._check_room(len(self._under_way))
            self._under_way[key] = _Known(call.id, content, [identity])
            return True
        if known.content != content:
            raise IdConflictError(
                f"id: {call.id!r} is in use for another call; expected a new id, or the same call again",
                field="id",
                value=call.id,
            )
        if known.reply is None:
            self._check_room(len(known.callers))
            known.callers.append(identity)
        else:
            self._send(identity, known.reply)
        return False

    def _check_room(self, found: int) -> None:
        if found >= self._most:
            text = f"calls: found {found} of at most {self._most} under way; wait for their replies"
            raise QueueFullError(text, value=found + 1, limit=self._most)

    def refuse(self, key: str, error: TruerollError) -> None:
        """End a call that is under way with an error."""
        self.answer(key, protocol.error_message(self._under_way[key].id, error))

    def answer(self, key: str, reply: protocol.FromWorker) -> None:
        """End a call that is under way."""
        known = self._under_way.pop(key)
        known.reply = protocol.encode(reply)
        for identity in known.callers:
            self._send(identity, known.reply)
        known.callers.clear()
        self._answered[key] = known
        if len(self._answered) > MAX_REMEMBERED:
            self._answered.popitem(last=False)
