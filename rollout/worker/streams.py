"""How the samples of streamed requests grow, and how far each reader was told.

Owns: the tokens so far of unfinished samples that somebody streams, once, whoever reads them; who reads, and where each
reader is. Does not own: sockets, the ledger, or the replies that end a sample.

Promises: a reader is told of each token once and in order, from the first one, however late it came, until the sample
ends: what it was not told of by then is in the sample. All that it has not been told of goes out in one message (in
several where that is more than about `MOST_BYTES`), once it has read what was sent before: one that does not read costs
its place in each sample, however far they grow. A request that nobody streams costs nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from ..protocol import Delta, Deltas, Growth

MOST_BYTES = 2**20
"""Of a message, unless a single token takes more."""
Reader: TypeAlias = tuple[bytes, str | None]
"""The identity of a connection, and the caller behind it."""
_Place: TypeAlias = tuple[str, int]
"""A sample: the key of its request, and its index."""


@dataclass
class _Stream:
    """A request: its samples as far as they are known, and who reads them."""

    growths: dict[int, Growth] = field(default_factory=dict)
    readers: set[Reader] = field(default_factory=set)


@dataclass
class _Progress:
    """Of a reader. `keys`: the requests that it streams. `told`: of how many tokens. `due`: where there are more."""

    keys: set[str] = field(default_factory=set)
    told: dict[_Place, int] = field(default_factory=dict)
    due: dict[_Place, None] = field(default_factory=dict)

    def forget(self, place: _Place) -> None:
        self.told.pop(place, None)
        self.due.pop(place, None)


class Streams:
    """Requests by key. `send` gives a connection a message; `takes` tells whether it has read what was sent before."""

    def __init__(self, send: Callable[[bytes, Deltas], object], takes: Callable[[bytes], bool]) -> None:
        self._send, self._takes = send, takes
        self._streams: dict[str, _Stream] = {}
        self._progress: dict[Reader, _Progress] = {}
        self._by_identity: defaultdict[bytes, set[Reader]] = defaultdict(set)
        self._due: dict[Reader, None] = {}

    def __contains__(self, key: str) -> bool:
        """Whether a request is streamed."""
        return key in self._streams

    def add(self, key: str, reader: Reader) -> None:
        """One more reader of a request; one that is there already begins anew."""
        self._remove(key, reader)
        stream = self._streams.setdefault(key, _Stream())
        stream.readers.add(reader)
        self._progress.setdefault(reader, _Progress()).keys.add(key)
        self._by_identity[reader[0]].add(reader)
        for index in stream.growths:
            self._fall_due(reader, (key, index))

    def grow(self, key: str, delta: Delta) -> None:
        """What a sample of a streamed request has got."""
        stream = self._streams[key]
        growth = stream.growths.get(delta.index)
        if growth is None:
            stream.growths[delta.index] = Growth(delta)
        elif not growth.put(delta):
            raise RuntimeError(f"streams: expected tokens of {key!r} from {growth.num_tokens} on, found {delta.start}")
        for reader in stream.readers:
            self._fall_due(reader, (key, delta.index))

    def end_sample(self, key: str, index: int) -> None:
        """The sample has ended: nobody is told more of it."""
        if stream := self._streams.get(key):
            stream.growths.pop(index, None)
            for reader in stream.readers:
                self._progress[reader].forget((key, index))

    def end(self, key: str) -> None:
        """The request has ended."""
        if stream := self._streams.get(key):
            for reader in list(stream.readers):
                self._remove(key, reader)
            del self._streams[key]

    def withdraw(self, key: str, caller: str) -> None:
        """`caller` wants nothing more of a request."""
        if stream := self._streams.get(key):
            for reader in [reader for reader in stream.readers if reader[1] == caller]:
                self._remove(key, reader)

    def lose(self, identity: bytes) -> None:
        """A connection gets no more replies."""
        for reader in list(self._by_identity.get(identity, ())):
            for key in list(self._progress[reader].keys):
                self._remove(key, reader)

    def flush(self) -> None:
        """Tells readers what they have not been told of, as far as each has read."""
        for reader in list(self._due):
            while reader in self._due and self._takes(reader[0]):
                if parts := self._take(self._progress[reader]):
                    self._send(reader[0], Deltas(samples=tuple(parts), caller=reader[1]))
                else:
                    del self._due[reader]

    def _take(self, progress: _Progress) -> list[Delta]:
        """What one message holds."""
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
