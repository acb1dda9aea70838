"""Good clients that run during the attack. Each result must be bitwise equal to the result before the attack.

One good client is a `RolloutClient`, as in a trainer. A second good client is a plain socket that counts every reply,
because `RolloutClient` would silently correct some faults. Each good client sends requests on its own thread until it
is held or stopped.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgpack
import numpy as np
import zmq
from frames import pack
from fuzz.attack import dealer
from fuzz.corpus import MAX_TOKEN
from fuzz.violation import Violation

from trueroll.engine.request import SampleOutput
from trueroll.errors import QueueFullError, TruerollError
from trueroll.rollout import RolloutClient, SamplingParams

Result: TypeAlias = tuple[Any, ...]
"""Token ids and log-probs as bytes, so that equality means equal bits, and the finish reason of each sample."""

WINDOW = 4


@dataclass(frozen=True)
class Request:
    """A generate request, or a score of `tokens` at the temperature of `params`."""

    tokens: tuple[int, ...]
    params: SamplingParams
    is_score: bool


def good_requests(count: int = 48) -> list[Request]:
    """Return seeded requests with prompts that share prefixes of several lengths."""
    rng = random.Random(20)
    prefix = [rng.randrange(MAX_TOKEN) for _ in range(48)]
    return [_request(rng, prefix, number) for number in range(count)]


def _request(rng: random.Random, prefix: list[int], number: int) -> Request:
    tokens = prefix[: rng.choice((0, 8, 16, 32, 48))] + [rng.randrange(MAX_TOKEN) for _ in range(rng.randrange(2, 8))]
    if number % 4 == 3:
        return Request(tuple(tokens), SamplingParams(temperature=rng.choice((0.5, 1.0))), is_score=True)
    drawn: dict[str, Any] = dict(
        n=rng.randrange(1, 4), max_tokens=rng.randrange(4, 24), seed=number, temperature=rng.choice((0.0, 1.0))
    )
    filters: dict[str, Any] = dict(
        top_p=rng.choice((0.8, 1.0)), top_k=rng.choice((-1, 20)), logprobs=rng.choice(("processed", "raw"))
    )
    return Request(tuple(tokens), SamplingParams(**drawn, **filters), is_score=False)


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

    `compared`: number of results so far. `tokens`: number of tokens in these results. `refused`: number of refusals
    because the queue was full. Such refusals are allowed; the client sends the request again.
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
        self.refused = 0

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


class CountingClient(GoodClient):
    """Uses a plain socket, with `WINDOW` requests at a time. Any reply that is not owed is a failure."""

    def _ask_on_and_on(self) -> None:
        socket = dealer(self._address)
        self._replies: dict[str, list[dict[str, Any]]] = {}
        self._numbers: dict[str, int] = {}
        self._count = 0
        while self._replies or self._rest():
            while len(self._replies) < WINDOW and self._may_ask.is_set() and not self._is_over:
                self._send(socket, self._draw())
            if socket.poll(200):
                self._take(socket, msgpack.unpackb(socket.recv()))
            elif self._is_over:
                break
        socket.close()

    def _send(self, socket: zmq.Socket[bytes], number: int) -> None:
        self._count += 1
        id, request = f"{self.name}-{self._count}", self._requests[number]
        tokens = np.array(request.tokens, "<i4").tobytes()
        if request.is_score:
            distribution = {"temperature": request.params.temperature}
            fields = {"type": "score", "token_ids": tokens, "distribution": distribution}
        else:
            fields = {"type": "generate", "prompt_token_ids": tokens, "params": request.params.model_dump()}
        self._replies[id], self._numbers[id] = [], number
        socket.send(pack({"version": 1, "id": id, **fields}))

    def _take(self, socket: zmq.Socket[bytes], reply: dict[str, Any]) -> None:
        id = reply["id"]
        if id not in self._replies:
            raise Violation(f"a good client got a reply that it was not owed, or a second one: {reply!r:.300}")
        self._replies[id].append(reply)
        if reply["type"] == "sample":
            return
        replies, number = self._replies.pop(id), self._numbers.pop(id)
        if reply["type"] == "error" and reply["code"] == "queue_full":
            self._wait_for_room()
        elif reply["type"] == "error":
            raise Violation(f"a good request failed: {reply!r:.300}")
        else:
            self._compare(number, _result(replies))
            socket.send(pack({"version": 1, "type": "ack", "ids": [id]}))


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
    with RolloutClient(address, timeout=60.0) as client:
        return [ask(client, request) for request in requests]


def start_good_clients(address: str) -> list[GoodClient]:
    """Start the good clients. Call this while the worker has no other requests."""
    requests = good_requests()
    expected = quiet_results(address, requests)
    kinds: tuple[Callable[..., GoodClient], ...] = (LibraryClient, CountingClient)
    clients: list[GoodClient] = [kind(f"good-{kind.__name__}", address, requests, expected) for kind in kinds]
    for client in clients:
        client.start()
    return clients
