"""The calls that wait for their end, and the replies that end them.

Owns: which call each reply is for. Does not own: the socket (`line`), nor when calls are sent (`connection`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trueroll.errors import ProtocolError, TruerollError

from .. import protocol
from ..protocol.error_codes import error_from_code
from .inbox import Inbox, Reply


@dataclass
class Call:
    """`caller`: the name that replies to it bear; None for a call that has none. `replies`: what they may be, beside
    deltas.
    """

    frame: bytes
    inbox: Inbox
    caller: str | None
    replies: tuple[type[protocol.FromWorker], ...]
    has_deltas: bool
    was_sent: bool = False

    @classmethod
    def of(cls, message: protocol.Call, inbox: Inbox) -> Call:
        """The call that a message makes."""
        has_deltas = getattr(message, "deltas", False)
        return cls(protocol.encode(message), inbox, _caller_of(message), protocol.REPLIES[type(message)], has_deltas)


class PendingCalls:
    """Calls by their ids, in the order in which they were made."""

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, id: str) -> bool:
        return id in self._calls

    def __iter__(self) -> Iterator[str]:
        """The ids."""
        return iter(self._calls)

    def add(self, id: str, call: Call) -> None:
        """One more call waits for its end."""
        self._calls[id] = call

    def get(self, id: str) -> Call | None:
        """The call of an id, if it waits."""
        return self._calls.get(id)

    def give_up(self, ids: Iterable[str]) -> set[str]:
        """Expect nothing more for these calls. Return those that the worker may know of."""
        given_up = {id: self._calls.pop(id, None) for id in ids}
        return {id for id, call in given_up.items() if call is not None and call.was_sent}

    def deliver(self, reply: protocol.FromWorker) -> None:
        """Hand a reply to the call that it is for."""
        if isinstance(reply, protocol.Deltas):
            for delta in reply.samples:
                self._deliver_delta(delta, reply)
            return
        call = self._calls.get(reply.id or "")
        if call is not None and _caller_of(reply) not in (None, call.caller):
            return  # to an earlier asking for the same request, which was given up
        if isinstance(reply, protocol.Error):
            error = error_from_code(reply.code, reply.message, reply.field, reply.value, reply.limit)
            self.fail(error) if reply.id is None else self.finish(reply.id, error)
        elif call is None:
            return
        elif not isinstance(reply, call.replies):
            self.finish(reply.id, _unexpected(reply, call.replies))
        elif isinstance(reply, protocol.FinishedSample):
            call.inbox.put(reply.id, reply)
        else:
            self.finish(reply.id, reply)

    def finish(self, id: str, reply: Reply) -> None:
        """End a call with its last reply."""
        if call := self._calls.pop(id, None):
            call.inbox.put(id, reply)

    def fail(self, error: TruerollError) -> None:
        """End all calls."""
        for id in list(self._calls):
            self.finish(id, error)

    def fail_sent(self, error: TruerollError) -> None:
        """End all calls that were sent."""
        for id in [id for id, call in self._calls.items() if call.was_sent]:
            self.finish(id, error)

    def _deliver_delta(self, delta: protocol.Delta, reply: protocol.Deltas) -> None:
        call = self._calls.get(delta.id)
        if call is None or reply.caller not in (None, call.caller):
            return
        if not call.has_deltas:
            self.finish(delta.id, _unexpected(reply, call.replies))
            return
        try:
            call.inbox.put_delta(delta)
        except ProtocolError as error:
            self.finish(delta.id, error)


def _caller_of(message: protocol.Call | protocol.FromWorker) -> str | None:
    return getattr(message, "caller", None)


def _unexpected(reply: protocol.FromWorker, expected: tuple[type[protocol.FromWorker], ...]) -> ProtocolError:
    types = " or ".join(kind.model_fields["type"].default for kind in expected)
    return ProtocolError(f"reply: expected {types}, found {reply.type}; use the same release of trueroll on both sides")
