"""Send the new tokens of streamed requests to each reader that is ready for new tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias

from ..protocol import Delta, Deltas, Growth

FEW_READERS = 8
"""While at most this number of readers stream requests, every reader gets every token at once."""
MOST_BYTES = 2**20
"""Maximum size of a message in bytes. A message with a single token may be larger."""
Reader: TypeAlias = tuple[bytes, str | None]
"""The identity of a connection, and the caller that uses the connection."""
_Place: TypeAlias = tuple[str, int]
"""A sample, as the key of the request and the index of the sample."""


@dataclass
class _Stream:
    """A streamed request.

    `growths`: the tokens received so far for each unfinished sample, by sample index. `readers`: the request's readers.
    """

    growths: dict[int, Growth] = field(default_factory=dict)
    readers: set[Reader] = field(default_factory=set)


@dataclass
class _Progress:
    """The progress of a reader.

    `keys`: keys of the requests that the reader streams. `told`: for each sample, the number of tokens that were
    already sent to the reader. `due`: samples with unsent tokens. `pause`: see `Streams.add`.
    `next_at`: earliest time of the next message, in monotonic seconds.
    """

    keys: set[str] = field(default_factory=set)
    told: dict[_Place, int] = field(default_factory=dict)
    due: dict[_Place, None] = field(default_factory=dict)
    pause: float = 0.0
    next_at: float = 0.0

    def forget(self, place: _Place) -> None:
        self.told.pop(place, None)
        self.due.pop(place, None)


class Streams:
    """The streamed requests, by key, and their readers.

    `send`: sends a message to a connection. `takes`: returns whether a connection has read all messages sent so far.

    Owns: the tokens of unfinished samples in streamed requests, stored once for all readers; and the progress of each
    reader. Does not own: sockets, the ledger, or the replies that end a sample.

    Guarantees: a reader gets each token once and in order, from the first token on. A reader that joins late also
    starts with the first token. When a sample ends, its unsent tokens are not sent as deltas, because the reply that
    ends the sample contains all of its tokens. Once a reader has read all earlier messages and its pause is over, the
    stream sends all unsent tokens in one message, or in several messages of about `MOST_BYTES`. A slow reader needs
    little memory: only its position in each sample is stored. A request without readers needs no memory in `Streams`.
    """

    def __init__(self, send: Callable[[bytes, Deltas], object], takes: Callable[[bytes], bool]) -> None:
        self._send, self._takes = send, takes
        self._streams: dict[str, _Stream] = {}
        self._progress: dict[Reader, _Progress] = {}
        self._by_identity: defaultdict[bytes, set[Reader]] = defaultdict(set)
        self._due: dict[Reader, None] = {}

    def __contains__(self, key: str) -> bool:
        """Return whether a request is streamed."""
        return key in self._streams

    def add(self, key: str, reader: Reader, pause: float = 0.0) -> None:
        """Add a reader of a request. A reader that is added again starts over with the first token.

        `pause`: minimum time between two messages to the reader while there are more than `FEW_READERS` readers, in
        seconds. If a reader is added with different pauses, the latest pause applies to all requests of the reader.
        """
        self._remove(key, reader)
        stream = self._streams.setdefault(key, _Stream())
        stream.readers.add(reader)
        progress = self._progress.setdefault(reader, _Progress())
        progress.keys.add(key)
        progress.pause = pause
        self._by_identity[reader[0]].add(reader)
        for index in stream.growths:
            self._fall_due(reader, (key, index))

    def grow(self, key: str, delta: Delta) -> None:
        """Add new tokens to a sample of a streamed request."""
        stream = self._streams[key]
        growth = stream.growths.get(delta.index)
        if growth is None:
            stream.growths[delta.index] = Growth(delta)
        elif not growth.put(delta):
            raise RuntimeError(
                f"streams: the delta of {key!r} at token {delta.start} does not continue the {growth.num_tokens} "
                "tokens received so far"
            )
        for reader in stream.readers:
            self._fall_due(reader, (key, delta.index))

    def end_sample(self, key: str, index: int) -> None:
        """End a sample for all readers. No reader gets another delta of the sample."""
        if stream := self._streams.get(key):
            stream.growths.pop(index, None)
            for reader in stream.readers:
                self._progress[reader].forget((key, index))

    def end(self, key: str) -> None:
        """End the stream of a request."""
        if stream := self._streams.get(key):
            for reader in list(stream.readers):
                self._remove(key, reader)
            del self._streams[key]

    def withdraw(self, key: str, caller: str) -> None:
        """Remove the request's readers that belong to `caller`."""
        if stream := self._streams.get(key):
            for reader in [reader for reader in stream.readers if reader[1] == caller]:
                self._remove(key, reader)

    def lose(self, identity: bytes) -> None:
        """Remove the readers of a lost connection."""
        for reader in list(self._by_identity.get(identity, ())):
            for key in list(self._progress[reader].keys):
                self._remove(key, reader)

    def flush(self, now: float) -> float:
        """Send unsent tokens to each reader that has read all earlier messages and does not pause.

        `now`: the current time, in monotonic seconds. Return the time at which the next pause ends; infinity if no
        reader with unsent tokens pauses.
        """
        next_at, has_many = inf, len(self._progress) > FEW_READERS
        for reader in list(self._due):
            if (progress := self._progress.get(reader)) is None:
                continue  # the reader was lost while an earlier message was sent
            if has_many and progress.next_at > now:
                next_at = min(next_at, progress.next_at)
                continue
            while reader in self._due and self._takes(reader[0]):
                if parts := self._take(progress):
                    self._send(reader[0], Deltas(samples=tuple(parts), caller=reader[1]))
                    progress.next_at = now + progress.pause
                if not progress.due:
                    self._due.pop(reader, None)
        return next_at

    def _take(self, progress: _Progress) -> list[Delta]:
        """Return the deltas for one message."""
        parts: list[Delta] = []
        room = MOST_BYTES
        while progress.due and room > 0:
            key, index = place = next(iter(progress.due))
            growth = self._streams[key].growths[index]
            part = growth.part(progress.told.get(place, 0), room)
            parts.append(part)
            room -= part.num_bytes
            progress.told[place] = part.start + part.num_tokens
            if progress.told[place] == growth.num_tokens:
                del progress.due[place]
        return parts

    def _fall_due(self, reader: Reader, place: _Place) -> None:
        self._progress[reader].due[place] = None
        self._due[reader] = None

    def _remove(self, key: str, reader: Reader) -> None:
        progress = self._progress.get(reader)
        if progress is None or key not in progress.keys:
            return
        progress.keys.remove(key)
        stream = self._streams[key]
        stream.readers.remove(reader)
        for index in stream.growths:
            progress.forget((key, index))
        if not progress.keys:
            self._forget(reader)

    def _forget(self, reader: Reader) -> None:
        del self._progress[reader]
        self._due.pop(reader, None)
        readers = self._by_identity[reader[0]]
        readers.remove(reader)
        if not readers:
            del self._by_identity[reader[0]]
