"""The error that the harness raises, and the trace that it keeps to reproduce it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROUNDS_KEPT = 3


class Violation(Exception):
    """The worker broke a promise."""


class Sent(NamedTuple):
    """One sent message or event. `sender`: number of the attacker that sent it, unless `kind` says otherwise.

    `deserted`: sent by the deserter. `break`: the deserter breaks its connection with a linger of `sender` ms, and
    reconnects with the identity in `frames`, if there is one. `stream`: a separate connection that sends these bytes
    before and after the handshake. `silence`: the attacker leaves each `need_image` unanswered in this round.
    """

    kind: str
    sender: int
    frames: list[bytes]


class Trace:
    """All messages and events of the last rounds."""

    def __init__(self) -> None:
        self._rounds: deque[list[Sent]] = deque(maxlen=ROUNDS_KEPT)

    def start_round(self) -> None:
        self._rounds.append([])

    def add(self, sent: Sent) -> None:
        self._rounds[-1].append(sent)

    def save(self, path: Path) -> None:
        with path.open("w") as file:
            for sent in (sent for round in self._rounds for sent in round):
                line = {"kind": sent.kind, "sender": sent.sender, "frames": [frame.hex() for frame in sent.frames]}
                print(json.dumps(line), file=file)


def read_trace(path: Path) -> Iterator[Sent]:
    """Yield the entries that `Trace.save` wrote."""
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        yield Sent(entry["kind"], entry["sender"], [bytes.fromhex(frame) for frame in entry["frames"]])
