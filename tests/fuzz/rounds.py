"""The messages of a round, in order, each with its client.

The messages depend only on the seed and the number of the round, except for the name of the pushes' shared memory.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

from fuzz.attack import Shot
from fuzz.corpus import Corpus, Memory, Message, is_tame
from fuzz.mutate import MAX_MESSAGE_BYTES, corrupted, mutated
from fuzz.streams import WHOLE, broken_off, wrong
from fuzz.trees import pack, tree
from fuzz.violation import Sent

ROUND = 500
"""Messages in a round."""
NUM_ATTACKERS = 4
STREAMS = 6
"""Broken connections in a round."""
SHARES = {"valid": 15, "mutated": 60, "corrupted": 18, "repeated": 4, "frames": 3}
"""Shares of the kinds of messages, in percent."""
SILENCE_EVERY = 32
"""Rounds between two rounds in which an attacker leaves each `need_image` unanswered."""
TAKEOVER_EVERY = 5
"""Rounds between two takeovers of an identity. libzmq may keep some memory for each takeover."""
TOO_LONG = bytes(4 * MAX_MESSAGE_BYTES + 1)
"""A frame for which ZMQ closes the connection."""


class Rounds:
    """Draws rounds. `memory`: the shared memory that pushes of the attack name. `images`: True to draw only messages
    about images.
    """

    def __init__(self, seed: int, memory: Memory, images: bool = False) -> None:
        self._seed = seed
        self._memory = memory
        self._images = images

    def draw(self, number: int) -> Iterator[Sent]:
        """Yield the messages of a round, in order."""
        return _Round(random.Random(f"{self._seed}/{number}"), self._memory, number, self._images).draw()


class _Round:
    def __init__(self, rng: random.Random, memory: Memory, number: int, images: bool) -> None:
        self._rng = rng
        self._number = number
        self._corpus = Corpus(rng, memory, f"x-{number}-", images)
        self._late_messages: deque[Message] = deque(self._corpus.script(), maxlen=20)
        self._late_frames: deque[bytes] = deque([pack(tree(self._late_messages[0]))], maxlen=20)

    def draw(self) -> Iterator[Sent]:
        """Yield scripts of several clients, interleaved, with broken connections between them."""
        scripts: list[list[Message]] = [[] for _ in range(NUM_ATTACKERS)]
        streams = {self._rng.randrange(ROUND): count for count in range(STREAMS)}
        is_silent = self._number % SILENCE_EVERY == SILENCE_EVERY // 2
        if is_silent:
            yield Sent("silence", NUM_ATTACKERS - 1, [])
        for at in range(ROUND):
            if is_silent and at % 50 == 0:
                [request] = self._corpus.request_for_unknown_pixels()
                yield Sent("valid", NUM_ATTACKERS - 1, self._frames("valid", request))
            if at in streams:
                yield Sent("stream", 0, self._stream(streams[at]))
            sender = self._rng.randrange(NUM_ATTACKERS)
            scripts[sender] = scripts[sender] or self._corpus.script()
            yield from self._send(sender, scripts[sender].pop(0))
        if self._number % 8 == 0:
            yield Sent("deserted", 0, [TOO_LONG])
            yield self._break([])
        if self._number % TAKEOVER_EVERY == 0:
            yield self._break([b"deserter"])
            yield Sent("deserted", 0, self._frames("valid", self._corpus.question()[0]))
            yield self._break([b"deserter"])
        yield self._break([])

    def _break(self, identity: list[bytes]) -> Sent:
        return Sent("break", self._rng.choice((0, 20)), identity)

    def _send(self, sender: int, message: Message) -> Iterator[Sent]:
        [kind] = self._rng.choices(list(SHARES), list(SHARES.values()))
        frames = self._frames(kind, message)
        while not is_tame(frames):
            frames = self._frames(kind, self._corpus.question()[0])
        self._late_messages.append(message)
        self._late_frames.append(frames[0])
        if self._rng.random() > 0.05 and Shot(frames).is_certain:
            yield Sent(kind, sender, frames)
            return
        yield Sent("deserted", 0, frames)
        if self._rng.random() < 0.2:
            yield self._break(self._rng.choice(([], [self._rng.randbytes(9)], [self._rng.randbytes(255)])))

    def _frames(self, kind: str, message: Message) -> list[bytes]:
        match kind:
            case "valid":
                return [pack(tree(message))]
            case "mutated":
                return [mutated(self._rng, message, self._late_messages)]
            case "corrupted":
                return [corrupted(self._rng, pack(tree(message)), self._rng.choice(self._late_frames))]
            case "repeated":
                return [self._rng.choice(self._late_frames)]
            case _:
                frame = pack(tree(message))
                return self._rng.choice(([frame, frame], [b"", frame], [frame, b""], [b"", b""], [b""] * 100, [b""]))

    def _stream(self, count: int) -> list[bytes]:
        """Return the parts of a broken conversation. The first half of the conversations are cut off, and the second
        half are invalid.
        """
        if count < STREAMS // 2:
            return broken_off((self._number * STREAMS // 2 + count) % len(WHOLE))
        return wrong(self._rng, pack(tree(self._corpus.question()[0])))
