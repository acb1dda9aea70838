"""From frames to a message that its sender may send. Whatever the bytes are, at worst it raises a TruerollError."""

from __future__ import annotations

import logging

from trueroll.errors import ForbiddenError, MessageTooLargeError, ProtocolError, TruerollError, UnavailableError

from .. import protocol
from ..network.keys import Role
from ..network.router import Peer

ELEMENTS_BY_ROLE: dict[Role, int] = {"generate": 2**13, "control": protocol.MAX_ELEMENTS}
"""Of a message. Reading costs time for each, and only a bucket of a push has many."""
FOR_ALL_ROLES = protocol.Generate | protocol.GetScores | protocol.Abort | protocol.GetHealth | protocol.GetStats

log = logging.getLogger(__name__)


def read(frames: list[bytes], role: Role, max_message_bytes: int) -> protocol.FromClient:
    """The message in frames. Raise ProtocolError or MessageTooLargeError, whatever the bytes are."""
    frame = _only_frame(frames, max_message_bytes)
    try:
        return protocol.from_client(frame, ELEMENTS_BY_ROLE[role])
    except TruerollError:
        raise
    except Exception as error:  # a fault of the libraries that read it, which must not become everybody's
        log.exception("could not read a message of %d bytes", len(frame))
        raise ProtocolError(f"message: expected one that can be read, found {type(error).__name__}") from None


def _only_frame(frames: list[bytes], limit: int) -> bytes:
    if len(frames) != 1:
        found = len(frames)
        text = f"message: expected one frame (a DEALER socket sends that), found {found}"
        raise ProtocolError(text, value=found, limit=1)
    if (found := len(frames[0])) > limit:
        raise MessageTooLargeError(
            f"message: expected at most max_message_bytes = {limit}, found {found}; send less, or raise the limit",
            value=found,
            limit=limit,
        )
    return frames[0]


def check_peer(peer: Peer, message: protocol.Call) -> None:
    """Raise ForbiddenError unless the client's role and its connection allow the call, UnavailableError if its
    connection has ended where it matters: the replies could come to whoever gets the connection's identity next, or the
    request was to end with it.
    """
    client = peer.client
    if client.role != "control" and not isinstance(message, FOR_ALL_ROLES):
        raise ForbiddenError(
            f"{message.type}: expected a client with the role control, found {client.user} with the role "
            f"{client.role}; use another key, or change the worker's clients_file and start it anew",
            value=client.role,
        )
    # Replies to a request go to the identity that asked for it, which another user could take up once it is free.
    if client.user is not None and not peer.identity.startswith(b"\0"):
        raise ForbiddenError("connection: expected no identity of its own (ZMQ_ROUTING_ID), found one; set none")
    needs_peer = client.user is not None or getattr(message, "while_connected", False)
    if needs_peer and peer.is_gone and isinstance(message, protocol.Generate | protocol.GetScores):
        raise UnavailableError("connection: expected one that is there, found that it has ended; connect and ask again")
