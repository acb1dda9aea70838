"""Good requests over HTTP during the attack. Each answer must have the bits that the worker gave over ZMQ before the
attack.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from fuzz.good import GoodClient, Request, Result, good_requests
from fuzz.violation import Violation

from trueroll.rollout import RolloutClient

REFUSED = {429, 503}
"""Allowed statuses: the queue is full, or the attack has put the worker to sleep."""


class HttpGoodClient(GoodClient):
    """Sends requests to a front end on a kept connection. Every second request is a stream."""

    def __init__(
        self, address: tuple[str, int], patience: float, requests: Sequence[Request], expected: Sequence[Result]
    ) -> None:
        super().__init__("good-http", f"{address[0]}:{address[1]}", requests, expected)
        self._patience = patience

    def _ask_on_and_on(self) -> None:
        while self._rest():
            connection = http.client.HTTPConnection(self._address, timeout=self._patience)
            try:
                while self._rest() and self._ask_once(connection, self._draw()):
                    pass
            finally:
                connection.close()

    def _ask_once(self, connection: http.client.HTTPConnection, number: int) -> bool:
        """Send a request. Return whether the connection can serve another request."""
        is_stream = self.compared % 2 == 1
        body = json.dumps(_body(self._requests[number], number, is_stream))
        is_kept = connection.sock is not None
        try:
            connection.request("POST", "/inference/v1/generate", body)
            response = connection.getresponse()
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            if not is_kept:
                raise
            return False  # closed between two requests, which is allowed for an idle connection
        text = response.read()
        if response.status in REFUSED:
            self._wait_for_room()
        elif response.status != 200:
            raise Violation(f"a good request was answered with {response.status}: {text[:300]!r}")
        else:
            answers = list(_events(text)) if is_stream else [json.loads(text)]
            self._compare(number, _result(answers))
        return not response.will_close


def _body(request: Request, number: int, is_stream: bool) -> dict[str, Any]:
    params = request.params
    sampling = dict(n=params.n, max_tokens=params.max_tokens, temperature=params.temperature, logprobs=0)
    sampling |= dict(top_p=params.top_p, top_k=params.top_k, seed=number)
    return {"token_ids": list(request.tokens), "sampling_params": sampling, "stream": is_stream}


def _events(text: bytes) -> Iterator[dict[str, Any]]:
    *lines, last = (line.removeprefix(b"data: ") for line in text.split(b"\n\n") if line)
    if last != b"[DONE]":
        raise Violation(f"a good stream ended with {last[:300]!r}")
    yield from map(json.loads, lines)


def _result(answers: list[dict[str, Any]]) -> Result:
    """Return the result from the answer, or from all events of a stream."""
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[float]] = {}
    reasons: dict[int, str] = {}
    for choice in (choice for answer in answers for choice in answer["choices"]):
        index = choice["index"]
        tokens.setdefault(index, []).extend(choice["token_ids"])
        told = (choice["logprobs"] or {}).get("content") or []
        logprobs.setdefault(index, []).extend(entry["logprob"] for entry in told)
        reasons[index] = choice["finish_reason"]
    return ("samples", *(_sample(i, tokens[i], logprobs[i], reasons[i]) for i in sorted(tokens)))


def _sample(index: int, token_ids: list[int], logprobs: Sequence[float], reason: str) -> tuple[Any, ...]:
    return index, np.array(token_ids, "<i4").tobytes(), np.array(logprobs, "<f4").tobytes(), reason


def start_good_http_client(worker: str, front: tuple[str, int], patience: float) -> HttpGoodClient:
    """Start the good client. Call this while the worker has no other requests. The client expects the bits that a ZMQ
    client gets.
    """
    requests = [request for request in good_requests() if not request.is_score and not request.images]
    with RolloutClient(worker, timeout=60.0) as client:
        expected = [_own(client, request, number) for number, request in enumerate(requests)]
    good = HttpGoodClient(front, patience, requests, expected)
    good.start()
    return good


def _own(client: RolloutClient, request: Request, number: int) -> Result:
    params = request.params.model_copy(update=dict(seed=None, logprobs="processed"))
    [group] = client.generate([request.tokens], params, seed=number)
    samples = sorted(group.samples, key=lambda sample: sample.index)
    return (
        "samples",
        *(_sample(each.index, each.token_ids, each.logprobs, each.finish_reason) for each in samples),  # type: ignore[arg-type]
    )
