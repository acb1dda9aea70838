"""The size of a reply is planned, and a request with a larger reply than a connection may hold is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine, FakeInfo
from serving import serving

from trueroll.engine.request import (
    Distribution,
    GenerateRequest,
    Request,
    SampleOutput,
    SamplingParams,
    ScoreOutput,
    ScoreRequest,
    WeightSpan,
)
from trueroll.errors import InvalidRequestError
from trueroll.rollout import RolloutClient, protocol
from trueroll.rollout.worker.reply_bytes import check_reply

VOCABULARY, ROUTE_BYTES, TOKENS, PROMPT = 512, 12, 60, 40
INFO = FakeInfo(vocab_size=VOCABULARY, route_bytes=ROUTE_BYTES)
RECORDS: dict[str, dict[str, Any]] = {
    "nothing": dict(logprobs=None),
    "tops": dict(top_logprobs=7, target_token_ids=(1, 2, 3)),
    "top_k": dict(top_k=9, top_p=0.5, return_sampling_mask=True),
    "top_p": dict(top_p=0.5, allowed_token_ids=[*range(100)], return_sampling_mask=True),
    "bans": dict(min_tokens=3, return_sampling_mask=True),
    "grammar": dict(structured_outputs=dict(regex="a+"), return_sampling_mask=True),
    "neutral": dict(return_sampling_mask=True),
    "routes": dict(return_routed_experts=True),
}
KEPT = {"top_k": 9, "top_p": 100, "bans": VOCABULARY, "grammar": VOCABULARY, "neutral": 0}


def planned(request: Request) -> int:
    with pytest.raises(InvalidRequestError) as refused:
        check_reply(request, INFO, 0)
    assert refused.value.limit == 0 and isinstance(refused.value.value, int)
    assert str(refused.value.value) in str(refused.value)
    check_reply(request, INFO, refused.value.value)
    return refused.value.value


@pytest.mark.parametrize("name", RECORDS)
def test_the_longest_sample_takes_the_planned_bytes_at_most(name: str) -> None:
    params = SamplingParams(max_tokens=TOKENS, **RECORDS[name])
    empty = SampleOutput.empty("r", 0, 2**64 - 1, params)
    columns: dict[str, Any] = {
        each: np.ones((TOKENS, *found.shape[1:]), found.dtype) for each, found in vars_of(empty).items()
    }
    if params.return_sampling_mask:
        columns["kept_counts"][:] = KEPT[name]
        columns["kept_token_ids"] = np.zeros(TOKENS * KEPT[name], np.int32)
    if params.return_routed_experts:
        columns["routed_experts"] = np.zeros((PROMPT + TOKENS - 1, 3, 4), np.uint8)
    spans = tuple(WeightSpan(2**40, i, i + 1) for i in range(9))
    whole: dict[str, Any] = dict(vars(empty)) | columns | dict(token_ids=[9] * TOKENS, weight_versions=spans)
    size = len(protocol.encode(protocol.sample_message("r", SampleOutput(**whole))))
    bound = planned(GenerateRequest("r", np.zeros(PROMPT, np.int32), params))
    assert size <= bound < 1.05 * size + 5000


def vars_of(output: SampleOutput) -> dict[str, np.ndarray]:
    return {name: value for name, value in vars(output).items() if isinstance(value, np.ndarray)}


@pytest.mark.parametrize("has_mask", [False, True])
def test_the_scores_take_the_planned_bytes_at_most(has_mask: bool) -> None:
    targets, filters = np.zeros((TOKENS - 5, 130), np.int32), Distribution(top_k=KEPT["top_k"])
    asked: dict[str, Any] = dict(top_logprobs=9, start=5, target_token_ids=targets, return_sampling_mask=has_mask)
    request = ScoreRequest("r", np.zeros(TOKENS, np.int32), filters, **asked)
    ones = np.ones(TOKENS - 5, np.float32)
    listed: dict[str, Any] = dict(
        entropy=ones,
        top_token_ids=np.ones((TOKENS - 5, 9), np.int32),
        top_logprobs=np.ones((TOKENS - 5, 9), np.float32),
        target_logprobs=np.ones((TOKENS - 5, 130), np.float32),
    )
    if has_mask:
        listed |= dict(kept_counts=np.full(TOKENS - 5, KEPT["top_k"], np.int32), kept_log_mass=ones)
        listed |= dict(kept_token_ids=np.zeros((TOKENS - 5) * KEPT["top_k"], np.int32))
    size = len(protocol.encode(protocol.scores_message("r", ScoreOutput("r", ones, "stop", (), **listed))))
    assert size <= planned(request) < size + 5000


def test_a_worker_fails_a_request_with_too_many_reply_bytes() -> None:
    engine = FakeEngine()
    engine.info = FakeInfo(max_record_bytes=8000)
    with serving(engine) as worker, RolloutClient(worker.address) as client:
        for n in (1, 32, 2):
            asked = SamplingParams(n=n, max_tokens=40)
            if n == 32:
                with pytest.raises(InvalidRequestError, match=r"limit 8000, max_record_bytes.*are the most") as error:
                    client.generate([[1, 2, 3]], asked)
                assert error.value.limit == 8000
            else:
                [group] = client.generate([[1, 2, 3]], asked)
                assert [len(sample.token_ids) for sample in group.samples] == [40, 39][:n]
        assert client.health().memory["replies"] == 0 and not engine.has_unfinished
        assert client.stats().service["reply_errors"] == client.stats().service["failed"] == 1


def test_a_worker_refuses_what_no_connection_may_hold() -> None:
    with serving(FakeEngine(), max_unread_bytes=2**16) as worker, RolloutClient(worker.address) as client:
        asked = SamplingParams(max_tokens=20, target_token_ids=tuple(range(1000)))
        text = r"may need 84256 bytes \(limit 65536,"
        with pytest.raises(InvalidRequestError, match=text) as error:
            client.generate([[1, 2, 3]], asked)
        assert (error.value.field, error.value.value, error.value.limit) == ("max_tokens", 4096 + 20 * 4008, 2**16)
        [group] = client.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
        assert len(group.samples[0].token_ids) == 4
