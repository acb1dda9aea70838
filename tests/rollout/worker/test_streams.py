"""Streams of growing samples: the deltas that each reader gets, and the cost of a reader that does not read."""

from __future__ import annotations

import random
from collections import defaultdict
from math import inf

import numpy as np
import pytest

from trueroll.rollout.protocol import Delta, Deltas
from trueroll.rollout.worker import streams as module
from trueroll.rollout.worker.streams import FEW_READERS, Reader, Streams

ANN, BOB = (b"\0ann", "x"), (b"\0bob", None)


class Sockets:
    """Receives the messages of connections that read. `told`: the tokens of each sample that a reader has received, by
    reader.
    """

    def __init__(self) -> None:
        self.streams = Streams(self._send, lambda identity: identity not in self.blocked)
        self.blocked: set[bytes] = set()
        self.messages: list[tuple[Reader, Deltas]] = []
        self.told: defaultdict[Reader, defaultdict[tuple[str, int], list[int]]] = defaultdict(lambda: defaultdict(list))

    def _send(self, identity: bytes, message: Deltas) -> None:
        reader = identity, message.caller
        self.messages.append((reader, message))
        for delta in message.samples:
            tokens = self.told[reader][delta.id, delta.index]
            assert delta.start in (0, len(tokens)) and delta.num_tokens
            tokens[delta.start :] = np.frombuffer(delta.token_ids, "<i4").tolist()

    def grow(self, key: str, index: int, start: int, count: int = 1) -> None:
        """Add `count` tokens to a sample. Token i is the number i."""
        tokens = np.arange(start, start + count, dtype="<i4").tobytes()
        self.streams.grow(key, Delta(id=key, index=index, start=start, token_ids=tokens, logprobs=tokens))

    def forget(self, key: str, reader: Reader) -> None:
        for place in [place for place in self.told[reader] if place[0] == key]:
            del self.told[reader][place]

    @property
    def is_empty(self) -> bool:
        held = self.streams._streams, self.streams._progress, self.streams._by_identity, self.streams._due
        return not any(held)


@pytest.fixture
def sockets() -> Sockets:
    return Sockets()


def test_a_reader_that_does_not_read_costs_only_its_place(sockets: Sockets) -> None:
    sockets.streams.add("a", ANN)
    sockets.blocked.add(ANN[0])
    for start in range(10_000):
        sockets.grow("a", 0, start)
        sockets.streams.flush(0.0)
    assert sockets.messages == [] and list(sockets.streams._progress[ANN].due) == [("a", 0)]
    sockets.blocked.clear()
    sockets.streams.flush(0.0)
    assert len(sockets.messages) == 1 and sockets.told[ANN]["a", 0] == list(range(10_000))
    sockets.streams.flush(0.0)
    assert len(sockets.messages) == 1


def test_many_tokens_are_cut_into_several_messages(sockets: Sockets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    sockets.streams.add("a", ANN)
    for index in range(3):
        sockets.grow("a", index, 0, 500)
    sockets.streams.flush(0.0)
    assert len(sockets.messages) >= 3 * 500 * 8 // 1000
    assert all(sum(delta.num_bytes for delta in message.samples) < 1400 for _, message in sockets.messages)
    assert list(sockets.told[ANN].values()) == [list(range(500))] * 3


def test_a_token_that_takes_more_than_a_message_is_sent_by_itself(
    sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1)
    sockets.streams.add("a", ANN)
    sockets.grow("a", 0, 0, 3)
    sockets.streams.flush(0.0)
    assert len(sockets.messages) == 3 and sockets.told[ANN]["a", 0] == [0, 1, 2]


def test_many_readers_pause_between_messages(sockets: Sockets) -> None:
    readers: list[Reader] = [(b"\0ann", f"caller-{number}") for number in range(FEW_READERS + 1)]
    for reader in readers:
        sockets.streams.add("a", reader, pause=0.5)
    sockets.streams.add("a", BOB)
    sockets.grow("a", 0, 0)
    assert sockets.streams.flush(100.0) == inf and len(sockets.messages) == len(readers) + 1
    sockets.grow("a", 0, 1)
    sockets.grow("a", 0, 2)
    assert sockets.streams.flush(100.25) == 100.5
    assert sockets.told[BOB]["a", 0] == [0, 1, 2] and all(sockets.told[reader]["a", 0] == [0] for reader in readers)
    sockets.blocked.add(readers[0][0])
    assert sockets.streams.flush(100.5) == inf, "a reader that does not read would keep the worker busy"
    sockets.blocked.clear()
    assert sockets.streams.flush(100.625) == inf
    assert all(sockets.told[reader]["a", 0] == [0, 1, 2] for reader in readers)
    assert len(sockets.messages) == 2 * (len(readers) + 1)
    sockets.grow("a", 0, 3)
    assert sockets.streams.flush(100.75) == 101.125
    sockets.streams.end_sample("a", 0)
    assert sockets.streams.flush(102.0) == inf and len(sockets.messages) == 2 * (len(readers) + 1) + 1
    sockets.streams.end("a")
    assert sockets.is_empty


def test_a_pause_ends_when_few_readers_are_left(sockets: Sockets) -> None:
    readers: list[Reader] = [(b"\0ann", f"caller-{number}") for number in range(FEW_READERS + 1)]
    for number, reader in enumerate(readers):
        sockets.streams.add(str(number), reader, pause=60.0)
        sockets.grow(str(number), 0, 0)
    assert sockets.streams.flush(100.0) == inf
    sockets.grow("0", 0, 1)
    assert sockets.streams.flush(101.0) == 160.0
    sockets.streams.end("8")
    assert sockets.streams.flush(102.0) == inf and sockets.told[readers[0]]["0", 0] == [0, 1]


def test_few_readers_never_pause(sockets: Sockets) -> None:
    readers: list[Reader] = [(b"\0ann", f"caller-{number}") for number in range(FEW_READERS)]
    for reader in readers:
        sockets.streams.add("a", reader, pause=60.0)
    for start in range(3):
        sockets.grow("a", 0, start)
        assert sockets.streams.flush(100.0 + start) == inf
    assert len(sockets.messages) == 3 * len(readers)


def test_ended_samples_get_no_deltas(sockets: Sockets) -> None:
    for key in "ab":
        sockets.streams.add(key, ANN)
        sockets.grow(key, 0, 0)
        sockets.grow(key, 1, 0)
    sockets.streams.end_sample("a", 1)
    sockets.streams.end("b")
    sockets.streams.flush(0.0)
    assert sockets.told[ANN] == {("a", 0): [0]}
    sockets.streams.end("a")
    assert sockets.is_empty


def test_a_gap_is_an_error(sockets: Sockets) -> None:
    sockets.streams.add("a", ANN)
    sockets.grow("a", 0, 0)
    with pytest.raises(RuntimeError, match="at token 2 does not continue the 1 tokens"):
        sockets.grow("a", 0, 2)


@pytest.mark.parametrize("seed", range(20))
def test_random_readers_get_every_token_in_order(sockets: Sockets, seed: int) -> None:
    rng = random.Random(seed)
    lens: dict[tuple[str, int], int] = {}
    readers: defaultdict[str, set[Reader]] = defaultdict(set)
    for _ in range(400):
        key, index, reader = rng.choice("ab"), rng.randrange(2), rng.choice([ANN, BOB, (ANN[0], "y")])
        match rng.randrange(9):
            case 0 | 1:
                sockets.streams.add(key, reader)
                sockets.forget(key, reader)
                readers[key].add(reader)
            case 2 | 3 | 4 if key in sockets.streams:
                sockets.grow(key, index, lens.get((key, index), 0), 2)
                lens[key, index] = lens.get((key, index), 0) + 2
            case 5:
                sockets.blocked ^= {reader[0]}
            case 6:
                sockets.streams.lose(reader[0])
                for found in readers.values():
                    found.difference_update([each for each in found if each[0] == reader[0]])
            case 7 if reader[1] is not None:
                sockets.streams.withdraw(key, reader[1])
                readers[key].difference_update([each for each in readers[key] if each[1] == reader[1]])
            case 8 if rng.random() < 0.2:
                sockets.streams.end(key)
                for told in list(sockets.told):
                    sockets.forget(key, told)
                readers[key].clear()
                lens = {place: count for place, count in lens.items() if place[0] != key}
        sockets.streams.flush(0.0)
        for key, found in readers.items():
            for reader in found:
                for place, count in lens.items():
                    if place[0] == key and reader[0] not in sockets.blocked:
                        assert sockets.told[reader][place] == list(range(count))
    for key in "ab":
        sockets.streams.end(key)
    assert sockets.is_empty
