"""The book of requests alone, without sockets and engine: its counters, if clients are gone."""

from __future__ import annotations

from typing import Any

import pytest

from trueroll.engine.request import Distribution, SamplingParams
from trueroll.rollout import protocol
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.worker.book import Conditions, RequestBook

TOKENS = bytes(4 * 5)
MESSAGES: dict[str, Any] = {
    "score": protocol.GetScores(
        id="r", token_ids=TOKENS, distribution=Distribution(), min_weight_version=9, wait_for_weights=True
    ),
    "generate": protocol.Generate(
        id="r",
        prompt_token_ids=TOKENS,
        params=SamplingParams(n=3, max_tokens=4),
        min_weight_version=9,
        wait_for_weights=True,
    ),
}


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("kind", MESSAGES)
def test_an_abort_of_a_waiting_request_is_counted_once_even_if_its_client_is_gone(kind: str, is_there: bool) -> None:
    """A failed send to a client that is gone ends its requests, and here the same samples, a second time."""
    told: list[bytes] = []

    def send(identity: bytes, frame: bytes) -> bool:
        told.append(frame)
        return is_there

    conditions = Conditions("ready", False, True, 3)
    book = RequestBook(WorkerConfig(), lambda command: None, send, lambda identity: True, lambda: conditions)
    book.max_model_len = 64
    book.submit(b"me", None, MESSAGES[kind])
    assert len(book.ledger.open) == 1 and book.ledger.num_samples_left == {"score": 1, "generate": 3}[kind]
    book.abort(b"me", None, protocol.Abort(id="abort", request_id="r"))
    assert not book.ledger.open and book.ledger.num_samples_left == 0 and not book.has_unanswered
    assert told and book.ledger.num_bytes_open == book.ledger.awaited.num_bytes == 0
