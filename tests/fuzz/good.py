"""Good clients that run during the attack. Each result must be bitwise equal to the result before the attack.

One good client is a `RolloutClient`, as in a trainer. A second good client is a plain socket that counts every reply,
because `RolloutClient` would silently correct some faults. Some requests of the plain socket have images. Each good
client sends requests on its own thread until it is held or stopped.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, TypeAlias

import msgpack
import numpy as np
from frames import pack
from fuzz.attack import IMAGE_ERRORS, dealer
from fuzz.corpus import MAX_TOKEN
from fuzz.images import LARGE, STILLS, span_of
from fuzz.violation import Violation

from trueroll.engine.media import ImageInput
from trueroll.engine.request import SampleOutput
from trueroll.errors import QueueFullError, TruerollError
from trueroll.rollout import RolloutClient, SamplingParams
from trueroll.rollout.protocol import part_of, ref_of

Result: TypeAlias = tuple[Any, ...]
"""Token ids and log-probs as bytes, so that equality means equal bits, and the finish reason of each sample."""

WINDOW = 4
QUIET_SECONDS = 60.0
STALL_SECONDS = 1.0
"""If a client's own thread did not run for this long during a request, the worker may rightly find it too slow."""


@dataclass(frozen=True)
class Request:
    """A generate request, or a score of `tokens` at the temperature of `params`. `images`: the images of `tokens`."""

    tokens: tuple[int, ...]
    params: SamplingParams
    is_score: bool
    images: tuple[ImageInput, ...] = field(default=(), repr=False)


def good_requests(count: int = 48) -> list[Request]:
    """Return seeded requests with prompts that share prefixes of several lengths. Every third request has images."""
    rng = random.Random(20)
    prefix = [rng.randrange(MAX_TOKEN) for _ in range(48)]
    return [_request(rng, prefix, number) for number in range(count)]


def _request(rng: random.Random, prefix: list[int], number: int) -> Request:
    tokens = prefix[: rng.choice((0, 8, 16, 32, 48))] + [rng.randrange(MAX_TOKEN) for _ in range(rng.randrange(2, 8))]
    images = _insert_images(rng, tokens, number) if number % 3 == 2 else ()
    if number % 4 == 3:
        return Request(tuple(tokens), SamplingParams(temperature=rng.choice((0.5, 1.0))), True, images)
    drawn: dict[str, Any] = dict(
        n=rng.randrange(1, 4), max_tokens=rng.randrange(4, 24), seed=number, temperature=rng.choice((0.0, 1.0))
    )
    filters: dict[str, Any] = dict(
        top_p=rng.choice((0.8, 1.0)), top_k=rng.choice((-1, 20)), logprobs=rng.choice(("processed", "raw"))
    )
    return Request(tuple(tokens), SamplingParams(**drawn, **filters), False, images)


def _insert_images(rng: random.Random, tokens: list[int], number: int) -> tuple[ImageInput, ...]:
    """Insert one or two images before the last two tokens, and return them."""
    chosen = [LARGE] if number % 12 == 5 else rng.choices(STILLS[:6], k=rng.choice((1, 1, 2)))
    images = list[ImageInput]()
    for image in chosen:
        start = len(tokens) - 2
        tokens[start:start] = span_of(image)
        images.append(replace(image, start=start))
    return tuple(images)


def ask(client: RolloutClient, request: Request) -> Result:
    if request.is_score:
        [scores] = client.score([request.tokens], temperature=request.params.temperature)
        return ("scores", scores.logprobs.tobytes())
    [group] = client.generate([request.tokens], request.params)
    return ("samples", *map(_as_sent, group.samples))


def _as_sent(sample: SampleOutput) -> tuple[Any, ...]:
    """Return the sample in the form in which `_result` reads samples from the wire."""
    logprobs = None if sample.logprobs is None else sample.logprobs.tobytes()
    return sample.index, np.array(sample.token_ids, "<i4").tobytes(), logprobs, sample.finish_reason, sample.seed


class GoodClient(threading.Thread):
    """Sends random `requests` until `stop`. `failure`: the first result that differs from `expected`, or an error.

    `compared`: number of results so far. `tokens`: number of tokens in these results. `with_images`: number of results
    of requests with images, and `parts`: number of parts of images that were sent for them. `refused`: number of
    refusals because the queue was full, and `late`: number of requests with images that this client sent too late,
    because its own thread had stalled. Both are allowed; the client sends the request again.
    """

    def __init__(self, name: str, address: str, requests: Sequence[Request], expected: Sequence[Result]) -> None:
        super().__init__(name=name, daemon=True)
        self._address, self._requests, self._expected = address, requests, expected
        self._rng = random.Random(name)
        self._may_ask = threading.Event()
        self._may_ask.set()
        self._is_holding = threading.Event()
        self._is_over = False
        self.failure: Exception | None = None
        self.compared = 0
        self.tokens = 0
        self.with_images = 0
        self.parts = 0
        self.refused = 0
        self.late = 0

    def hold(self, patience: float) -> None:
        """Wait for pending requests, and send no new requests until `go_on`."""
        self._may_ask.clear()
        if not self._is_holding.wait(patience) and self.failure is None:
            raise Violation(f"a good client waited more than {patience} s for results")

    def go_on(self) -> None:
        self._is_holding.clear()
        self._may_ask.set()

    def stop(self) -> None:
        self._is_over = True
        self._may_ask.set()

    def run(self) -> None:
        try:
            self._ask_on_and_on()
        except Exception as error:
            self.failure = self.failure or error
        finally:
            self._is_holding.set()

    def _ask_on_and_on(self) -> None:
        raise NotImplementedError

    def _rest(self) -> bool:
        """Wait while held. Return False when the client is stopped. Call only without pending requests."""
        if not self._may_ask.is_set():
            self._is_holding.set()
            self._may_ask.wait()
        return not self._is_over

    def _draw(self) -> int:
        return self._rng.randrange(len(self._requests))

    def _wait_for_room(self) -> None:
        self.refused += 1
        time.sleep(0.01)

    def _compare(self, number: int, found: Result) -> None:
        if found != self._expected[number]:
            raise Violation(
                f"a good request got another result than from the quiet worker: {self._requests[number]}, "
                f"expected {self._expected[number]!r:.600}, found {found!r:.600}"
            )
        self.compared += 1
        self.with_images += bool(self._requests[number].images)
        self.tokens += len(found[1]) // 4 if found[0] == "scores" else sum(len(sample[1]) // 4 for sample in found[1:])


class LibraryClient(GoodClient):
    """Uses `RolloutClient`, one request at a time."""

    def _ask_on_and_on(self) -> None:
        with RolloutClient(self._address, timeout=60.0) as client:
            while self._rest():
                self._ask_once(client, self._draw())

    def _ask_once(self, client: RolloutClient, number: int) -> None:
        try:
            found = ask(client, self._requests[number])
        except QueueFullError:
            self._wait_for_room()
        except TruerollError as error:
            raise Violation(f"a good request failed: {type(error).__name__}: {error}") from None
        else:
            self._compare(number, found)


class Exchange:
    """Good requests over a plain socket, with their images. Any reply that is not owed is a failure.

    `name`: the start of all ids. `parts`: number of parts of images that were sent. `stalled`: the seconds for
    which this client was ready to run and did not run while requests were pending.
    """

    def __init__(self, address: str, name: str) -> None:
        self._socket = dealer(address)
        self._name = name
        self._count = 0
        self._requests: dict[str, Request] = {}
        self._replies: dict[str, list[dict[str, Any]]] = {}
        self._polled_at = inf
        self.parts = 0
        self.stalled = 0.0

    def send(self, request: Request) -> str:
        """Send a request, and return its id."""
        if not self._replies:
            self._polled_at = inf
        self._count += 1
        id = f"{self._name}-{self._count}"
        tokens = np.array(request.tokens, "<i4").tobytes()
        if request.is_score:
            distribution = {"temperature": request.params.temperature}
            fields: dict[str, Any] = {"type": "score", "token_ids": tokens, "distribution": distribution}
        else:
            fields = {"type": "generate", "prompt_token_ids": tokens, "params": request.params.model_dump()}
        self._requests[id], self._replies[id] = request, []
        refs = [ref_of(image).model_dump() for image in request.images]
        self._socket.send(pack({"version": 1, "id": id, **fields, "images": refs}))
        return id

    def take(self, patience_ms: int) -> list[dict[str, Any]] | None:
        """Wait for a reply, and answer `need_image`. Return all replies to a request that has ended, or None."""
        is_readable = self._socket.poll(patience_ms)
        now = time.monotonic()
        self.stalled += max(0.0, now - self._polled_at - patience_ms / 1000)
        self._polled_at = now
        if not is_readable:
            return None
        reply = msgpack.unpackb(self._socket.recv())
        id = reply["id"]
        if id not in self._replies:
            raise Violation(f"a good client got a reply that it was not owed, or a second one: {reply!r:.300}")
        if reply["type"] == "need_image":
            self._put_image(reply)
            return None
        self._replies[id].append(reply)
        if reply["type"] == "sample":
            return None
        if reply["type"] != "error":
            self._socket.send(pack({"version": 1, "type": "ack", "ids": [id]}))
        del self._requests[id]
        return self._replies.pop(id)

    def _put_image(self, question: dict[str, Any]) -> None:
        content_hash, start, num_bytes = question["content_hash"], question["start"], question["num_bytes"]
        found = [image for image in self._requests[question["id"]].images if image.content_hash == content_hash]
        data = part_of(found[0], start, num_bytes) if found else b""
        if len(data) != num_bytes:
            raise Violation(f"a good client was asked for pixels that its request does not have: {question!r:.300}")
        part = {"content_hash": content_hash, "start": start, "data": data}
        self._socket.send(pack({"version": 1, "type": "put_image", "id": question["id"], **part}))
        self.parts += 1

    def close(self) -> None:
        self._socket.close()


class CountingClient(GoodClient):
    """Uses an `Exchange`, with `WINDOW` requests at a time."""

    def _ask_on_and_on(self) -> None:
        exchange, numbers = Exchange(self._address, self.name), dict[str, tuple[int, float]]()
        while numbers or self._rest():
            while len(numbers) < WINDOW and self._may_ask.is_set() and not self._is_over:
                number = self._draw()
                numbers[exchange.send(self._requests[number])] = number, exchange.stalled
            if replies := exchange.take(200):
                number, stalled_before = numbers.pop(replies[-1]["id"])
                self._finish(number, replies, exchange.stalled - stalled_before > STALL_SECONDS)
            elif self._is_over:
                break
            self.parts = exchange.parts
        exchange.close()

    def _finish(self, number: int, replies: list[dict[str, Any]], has_stalled: bool) -> None:
        last = replies[-1]
        if last["type"] == "error" and last["code"] == "queue_full":
            self._wait_for_room()
        elif last["type"] == "error" and has_stalled and IMAGE_ERRORS["silence"] in last["message"]:
            self.late += 1
        elif last["type"] == "error":
            raise Violation(f"a good request failed: {last!r:.300}")
        else:
            self._compare(number, _result(replies))


def _result(replies: list[dict[str, Any]]) -> Result:
    """Return the result from all replies to one request."""
    *samples, last = replies
    if last["type"] == "scores":
        return ("scores", last["logprobs"])
    samples.sort(key=lambda sample: sample["index"])
    keys = ("index", "token_ids", "logprobs", "finish_reason", "seed")
    return ("samples", *(tuple(sample[key] for key in keys) for sample in samples))


def quiet_results(address: str, requests: Sequence[Request]) -> list[Result]:
    """Return the results of an otherwise idle worker."""
    exchange = Exchange(address, "quiet")
    with closing(exchange):
        return [_quiet_result(exchange, request) for request in requests]


def _quiet_result(exchange: Exchange, request: Request) -> Result:
    exchange.send(request)
    deadline = time.monotonic() + QUIET_SECONDS
    while (replies := exchange.take(200)) is None:
        if time.monotonic() > deadline:
            raise Violation(f"the quiet worker did not answer within {QUIET_SECONDS} s: {request}")
    if replies[-1]["type"] == "error":
        raise Violation(f"a good request failed on the quiet worker: {replies[-1]!r:.300}")
    return _result(replies)


def start_good_clients(address: str) -> list[GoodClient]:
    """Start the good clients. Call this while the worker has no other requests."""
    requests = good_requests()
    expected = quiet_results(address, requests)
    texts = [number for number, request in enumerate(requests) if not request.images]
    clients: list[GoodClient] = [
        LibraryClient("good-library", address, [requests[i] for i in texts], [expected[i] for i in texts]),
        CountingClient("good-counting", address, requests, expected),
    ]
    for client in clients:
        client.start()
    return clients
