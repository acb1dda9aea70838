"""Brings each message of a client to the part of the worker that it is for, and refuses those that are for none.

Owns: what is read, checked and refused. Does not own: what a message does. It runs on the worker's thread.

Promise: no received bytes end the process.
"""

from __future__ import annotations

import logging

from trueroll.errors import TruerollError, UnavailableError

from .. import protocol
from ..network.router import Peer, Router
from .book import RequestBook
from .control import Control
from .reading import check_peer, read
from .vitals import Vitals

log = logging.getLogger(__name__)


class Dispatch:
    """Takes messages of at most `max_message_bytes` from `router`: requests go to `book`, questions to `vitals`, and
    what controls the worker to `control`.
    """

    def __init__(
        self, router: Router, book: RequestBook, control: Control, vitals: Vitals, max_message_bytes: int
    ) -> None:
        self._router, self._book, self._control, self._vitals = router, book, control, vitals
        self._max_message_bytes = max_message_bytes

    def take(self, peer: Peer, frames: list[bytes]) -> None:
        """Act on a message of a client, or answer why not."""
        if not frames:
            return  # of a client that is to be told first that its replies are lost
        try:
            message = read(frames, peer.client.role, self._max_message_bytes)
        except TruerollError as error:
            log.debug("refused a message: %s", error.code)
            self._refuse(peer, protocol.id_in(frames[-1]), error)
            return
        if isinstance(message, protocol.Ack):
            self._book.acknowledge(peer.client.user, message)
            return
        try:
            check_peer(peer, message)
            self._handle(peer, message)
        except TruerollError as error:
            log.debug("refused a %s: %s", message.type, error.code)
            self._refuse(peer, message.id, error, getattr(message, "caller", None))
        except OSError as error:  # nothing that is known raises it; if something does, the worker goes on
            log.exception("could not serve a %s", message.type)
            refused = UnavailableError(f"worker: the system refused what it needs ({error.strerror}); try again later")
            self._refuse(peer, message.id, refused, getattr(message, "caller", None))

    def _handle(self, peer: Peer, message: protocol.Call) -> None:
        identity, user = peer.identity, peer.client.user
        match message:
            case protocol.Generate() | protocol.GetScores():
                self._book.submit(identity, user, message)
            case protocol.Abort():
                self._book.abort(identity, user, message)
            case protocol.GetHealth():
                self._router.send(identity, protocol.encode(self._vitals.health(message.id)))
            case protocol.GetStats():
                self._router.send(identity, protocol.encode(self._vitals.stats(message.id)))
            case _:
                self._control.handle(identity, message)

    def _refuse(self, peer: Peer, id: str | None, error: TruerollError, caller: str | None = None) -> None:
        self._router.send(peer.identity, protocol.encode(protocol.error_message(id, error, caller)))
