"""Attributes of errors: `field`, `value` and `limit` are equal from the engine, from a client, and over HTTP."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine
from frames import pack
from http_fronts import Front, error_of, front_end
from serving import serving

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.request import ContentSpan, GenerateRequest
from trueroll.errors import (
    ConfigError,
    InvalidRequestError,
    MessageTooLargeError,
    ProtocolError,
    PushError,
    QueueFullError,
    StaleWeightsError,
    TruerollError,
    UnavailableError,
)
from trueroll.rollout import RolloutClient, SamplingParams, protocol
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.protocol.error_codes import SENT_ERRORS, error_from_code, told

PROMPT, LENGTH, VOCAB = "the field with the prompt", 1024, 512
BAD_REQUESTS = [
    ([], {}, PROMPT, 0, 1),
    ([5, -1], {}, PROMPT, -1, VOCAB - 1),
    ([5, VOCAB], {}, PROMPT, VOCAB, VOCAB - 1),
    ([5] * LENGTH, {"max_tokens": 7}, PROMPT, LENGTH + 7, LENGTH),
    ([5], {"stop_token_ids": [3, 600]}, "stop_token_ids", 600, VOCAB - 1),
    ([5], {"stop_token_ids": [3, -1]}, "stop_token_ids[1]", -1, 0),
    ([5], {"temperature": -0.5}, "temperature", -0.5, 0),
    ([5], {"temperature": "hot"}, "temperature", "hot", None),
    ([5], {"top_p": 0.0}, "top_p", 0.0, 0),
    ([5], {"top_k": -2}, "top_k", -2, -1),
    ([5], {"n": 0}, "n", 0, 1),
    ([5], {"n": True}, "n", True, None),
    ([5], {"max_tokens": 2**63}, "max_tokens", 2**63, 2**63 - 1),
    ([5], {"max_tokens": 10**30}, "max_tokens", str(10**30), 2**63 - 1),
    ([5], {"seed": 2**64}, "seed", str(2**64), 2**64 - 1),
    ([5], {"min_tokens": 9, "max_tokens": 4}, "min_tokens", 9, 4),
    ([5], {"stop": ["a"] * 65}, "stop", 65, 64),
    ([5], {"stop": ["a", ""]}, "stop[1]", 0, 1),
    ([5], {"stop": 3}, "stop", 3, None),
    ([5], {"cache_salt": "x" * 1025}, "cache_salt", 1025, 1024),
    ([5], {"wat": [1, 2]}, "wat", "[1, 2]", None),
]


@pytest.fixture(scope="module")
def engine(chat_model: Path) -> Engine:
    return Engine(EngineConfig(model=str(chat_model), num_blocks=256, num_threads=1))


def ask_engine(engine: Engine, prompt: list[int], params: dict[str, Any]) -> TruerollError:
    with pytest.raises(TruerollError) as caught:
        given = SamplingParams(**{"seed": 1, **params})
        engine.add(GenerateRequest("bad", np.array(prompt, np.int32), given))
    assert not engine.has_unfinished
    return caught.value


def about(error: TruerollError) -> tuple[Any, ...]:
    return type(error), error.field, error.value, error.limit


@pytest.mark.parametrize(("prompt", "params", "field", "value", "limit"), BAD_REQUESTS)
def test_engine_client_and_http_report_a_bad_request_alike(
    engine: Engine,
    client: RolloutClient,
    front: Front,
    prompt: list[int],
    params: dict[str, Any],
    field: str,
    value: Any,
    limit: Any,
) -> None:
    is_prompt = field == PROMPT
    expected = (InvalidRequestError, "prompt_token_ids" if is_prompt else field, value, limit)
    assert about(ask_engine(engine, prompt, params)) == expected
    with pytest.raises(InvalidRequestError) as caught:
        client.generate([[7], prompt], [SamplingParams(max_tokens=1), SamplingParams(**params)])
    assert about(caught.value) == (InvalidRequestError, "prompts[1]" if is_prompt else field, value, limit)
    response = front.post("/inference/v1/generate", {"token_ids": prompt, "sampling_params": params})
    assert (response.status_code, error_of(response)["param"]) == (400, "token_ids" if is_prompt else field)


def test_an_error_about_a_limit_of_the_worker_carries_the_limit(client: RolloutClient, front: Front) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client.generate([[5]], SamplingParams(n=2000))
    assert about(caught.value) == (InvalidRequestError, "n", 2000, 1024)
    response = front.post("/v1/completions", {"prompt": [5], "n": 2000, "max_tokens": 1})
    assert error_of(response)["param"] == "n"


def test_errors_name_the_sequence_of_a_score_and_the_span_of_a_prompt(engine: Engine, client: RolloutClient) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client.score([[1, 2], [3]])
    assert about(caught.value) == (InvalidRequestError, "sequences[1]", 1, 2)
    spans = (ContentSpan(0, 1, b"x" * 32), ContentSpan(0, 2, b"x" * 32))
    request = GenerateRequest("spans", np.array([1, 2], np.int32), SamplingParams(seed=1), spans=spans)
    with pytest.raises(InvalidRequestError) as caught:
        engine.add(request)
    assert caught.value.field == "spans[1]"


def test_errors_that_the_client_raises_itself_name_the_field(client: RolloutClient) -> None:
    cases: list[tuple[Any, dict[str, Any], tuple[Any, ...]]] = [
        ([[1], [2**31]], {}, ("prompts[1]", 2**31, 2**31 - 1)),
        ([[1], "text"], {}, ("prompts[1]", "text", None)),
        ([[1]], dict(params=[SamplingParams()] * 2), ("params", 2, 1)),
        ([[1]], dict(params=["greedy"]), ("params[0]", "greedy", None)),
        ([[1], [2]], dict(request_ids=["a"]), ("request_ids", 1, 2)),
        ([[1]], dict(request_ids=[5]), ("request_ids", 5, 128)),
        ([[1]], dict(seed=-1), ("seed", -1, None)),
        ([[1]], dict(wait_for_weights=True), ("wait_for_weights", True, None)),
        ([[1]], dict(min_weight_version=2**63), ("min_weight_version", 2**63, 2**63 - 2)),
    ]
    for prompts, keywords, expected in cases:
        with pytest.raises(InvalidRequestError) as caught:
            client.generate(prompts, **keywords)
        assert about(caught.value)[1:] == expected, str(caught.value)


@pytest.fixture
def fake() -> Iterator[FakeEngine]:
    yield FakeEngine()


def test_errors_about_a_full_or_paused_worker_carry_values_and_limits(fake: FakeEngine) -> None:
    settings: dict[str, Any] = dict(max_queued_requests=1, max_message_bytes=2000, while_unavailable="reject")
    with serving(fake, **settings) as running, RolloutClient(running.address) as client:
        with pytest.raises(MessageTooLargeError) as large:
            client.generate([[1] * 1000])
        assert large.value.limit == 2000 and isinstance(large.value.value, int) and large.value.value > 4000
        with pytest.raises(StaleWeightsError) as stale:
            client.generate([[1]], min_weight_version=5)
        assert stale.value.field == "min_weight_version" and stale.value.value == 5
        client.pause()
        with pytest.raises(UnavailableError) as unavailable:
            client.generate([[1]])
        assert about(unavailable.value) == (UnavailableError, None, "paused", None)
        client.resume()
        with pytest.raises(QueueFullError) as full:
            client.generate([[1]] * 3, SamplingParams(max_tokens=100))
        assert about(full.value) == (QueueFullError, "max_queued_requests", 2, 1)


def test_an_unknown_field_on_the_wire_is_named() -> None:
    fields = {"version": 1, "type": "abort", "id": "a", "request_id": "b", "depth": 3}
    with pytest.raises(ProtocolError) as caught:
        protocol.from_client(pack(fields))
    assert about(caught.value) == (ProtocolError, "depth", 3, None)


@pytest.mark.parametrize("value", [None, True, -7, 2**64 - 1, 0.5, "short", "\ud800", 10**400, math.inf, b"x" * 999])
@pytest.mark.parametrize("kind", SENT_ERRORS)
def test_an_error_survives_the_wire(kind: type[TruerollError], value: Any) -> None:
    error = kind("text", field="prompts[3]", value=value, limit=7)
    sent = protocol.from_worker(protocol.encode(protocol.error_message("id", error)))
    assert isinstance(sent, protocol.Error)
    received = error_from_code(sent.code, sent.message, sent.field, sent.value, sent.limit)
    assert (str(received), about(received)) == ("text", about(error))
    assert str(error_from_code(**told(error))) == "text"


def test_fields_are_bounded_and_escaped() -> None:
    error = TruerollError("text", field="\x1b" * 1000, value=["x" * 10**6] * 1000, limit=10**30)
    assert error.field is not None and len(error.field) == 128 and error.field.isprintable()
    assert isinstance(error.value, str) and len(error.value) <= 80
    assert error.limit is None and TruerollError("text", limit=math.nan).limit is None
    received = error_from_code("invalid_request", "text", "a\x1b", "b\x1b")
    assert (received.field, received.value) == ("a\\x1b", r"'b\x1b'")


def test_errors_are_pickled_and_copied_with_all_attributes() -> None:
    error = PushError("text", field="weight_dir", value=3, limit=2)
    error.lost = ("tcp://127.0.0.1:1",)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert (str(again), about(again), again.lost) == (str(error), about(error), error.lost)
    other = error.retold("more text", "prompts[0]")
    assert (str(other), about(other)) == ("more text", (PushError, "prompts[0]", 3, 2))


def test_errors_about_settings_name_the_setting() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model="m", block_size=0)
    assert about(caught.value)[1:3] == ("block_size", 0)
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model="m", max_num_seqs=9, max_num_batched_tokens=8)
    assert about(caught.value) == (ConfigError, "max_num_seqs", 9, 8)
    with pytest.raises(ConfigError) as caught:
        WorkerConfig(max_n=9, max_queued_samples=8)
    assert about(caught.value) == (ConfigError, "max_n", 9, 8)


def test_a_front_end_names_its_own_fields(fake: FakeEngine, chat_model: Path) -> None:
    cases = [
        ("/v1/chat/completions", {"messages": []}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user"}], "top_logprobs": 3}, "top_logprobs"),
        ("/v1/completions", {"prompt": "x", "stop": ["a", ""]}, "stop[1]"),
        ("/v1/completions", {"prompt": [1, 2000], "stream": True}, "prompt"),
    ]
    with serving(fake) as running, front_end(running.address, tokenizer=str(chat_model)) as front:
        for path, body, param in cases:
            assert error_of(front.post(path, body))["param"] == param
