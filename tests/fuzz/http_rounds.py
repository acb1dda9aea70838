"""The requests of a round for a front end. A round's requests depend only on the seed and the number of the round."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

from fuzz.http_corpus import HttpCorpus, Request, is_tame
from fuzz.http_mutate import framed, hostile_head, mutated_body, plain_body
from fuzz.mutate import corrupted
from fuzz.rounds import ROUND
from fuzz.violation import Sent

NUM_HTTP_ATTACKERS = 8
HTTP_SHARES = {"plain": 12, "body": 45, "head": 20, "bytes": 10, "cut": 4, "left": 6, "repeated": 3}
"""Shares of the kinds of requests, in percent.

`body`: mutated body. `head`: hostile head. `bytes`: mutations of all bytes. `cut`: the client stops sending before the
end. `left`: valid, but the client does not wait for the answer.
"""
STREAMED = {"stream": True, "max_tokens": 100, "ignore_eos": True}


class HttpRounds:
    """Draws rounds."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def draw(self, number: int) -> Iterator[Sent]:
        """Yield the requests of a round, in order."""
        rng = random.Random(f"http/{self._seed}/{number}")
        corpus = HttpCorpus(rng)
        bodies: deque[dict[str, Any]] = deque([corpus.completion().body or {}], maxlen=20)
        whole: deque[bytes] = deque([framed(corpus.look(), None)], maxlen=20)
        for _ in range(ROUND):
            request = corpus.request()
            [kind] = rng.choices(list(HTTP_SHARES), list(HTTP_SHARES.values()))
            frames = _frames(rng, kind, request, bodies, whole)
            while not is_tame(b"".join(frames)):
                frames = _frames(rng, kind, corpus.look(), bodies, whole)
            bodies.append(request.body or {"a": 1})
            whole.append(framed(request, plain_body(request)))
            yield Sent(kind, rng.randrange(NUM_HTTP_ATTACKERS), frames)


def _frames(
    rng: random.Random, kind: str, request: Request, bodies: deque[dict[str, Any]], whole: deque[bytes]
) -> list[bytes]:
    plain = framed(request, plain_body(request))
    match kind:
        case "plain":
            return _parted(rng, plain)
        case "body":
            if request.method == "GET":
                return [framed(request, mutated_body(rng, {"a": 1}, bodies))]
            return _parted(rng, framed(request, mutated_body(rng, request.body or {"a": 1}, bodies)))
        case "head":
            return [hostile_head(rng, request, plain_body(request) or b"") + (plain if rng.random() < 0.1 else b"")]
        case "bytes":
            return [corrupted(rng, plain, rng.choice(whole))]
        case "cut":
            return [plain[: rng.randrange(len(plain))]]
        case "left":
            stream = Request("POST", "/v1/completions", {"prompt": [1, 2], **STREAMED})
            left = stream if rng.random() < 0.5 else request
            return [framed(left, plain_body(left))]
        case _:
            return [rng.choice(whole)]


def _parted(rng: random.Random, data: bytes) -> list[bytes]:
    """Return the data, sometimes split into two parts."""
    if rng.random() > 0.1:
        return [data]
    at = rng.randrange(len(data))
    return [data[:at], data[at:]]
