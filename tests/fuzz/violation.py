"""What the harness raises, and what it keeps so that one can see it again."""

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
    """Something that was sent: by `who` of the attackers, unless `kind` names somebody else.

    `deserted`: by the deserter. `break`: it breaks off, with a linger of `who` ms, and comes back under the identity in
    `frames`, if there is one. `stream`: a connection of its own, with these bytes before and after the handshake.
    """

    kind: str
    who: int
    frames: list[bytes]


class Trace:
    """What was sent in the last rounds."""

    def __init__(self) -> None:
        self._rounds: deque[list[Sent]] = deque(maxlen=ROUNDS_KEPT)

    def start_round(self) -> None:
        self._rounds.append([])

    def add(self, sent: Sent) -> None:
        self._rounds[-1].append(sent)

    def save(self, path: Path) -> None:
        with path.open("w") as file:
            for sent in (sent for round in self._rounds for sent in round):
                line = {"kind": sent.kind, "who": sent.who, "frames": [frame.hex() for frame in sent.frames]}
                print(json.dumps(line), file=file)


def read_trace(path: Path) -> Iterator[Sent]:
    """What `Trace.save` wrote."""
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        yield Sent(entry["kind"], entry["who"], [bytes.fromhex(frame) for frame in entry["frames"]])
