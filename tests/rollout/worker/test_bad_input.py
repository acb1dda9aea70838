"""Bad input gets a clear error. The request of another client runs at the same time and must not be affected."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from fake_engine import MAX_MODEL_LEN, VOCAB_SIZE, FakeEngine, expected_tokens
from frames import pack
from serving import RawClient, WorkerOnThread, serving

from trueroll.engine.request import SamplingParams
from trueroll.errors import InvalidRequestError, brief

MAX_BYTES = 4096
TOKENS = np.array([1, 2, 3], "<i4").tobytes()


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def worker(engine: FakeEngine) -> Iterator[WorkerOnThread]:
    with serving(engine, max_message_bytes=MAX_BYTES, max_n=8) as running:
        yield running
    assert running.error is None


@pytest.fixture
def raw(worker: WorkerOnThread, engine: FakeEngine, request: pytest.FixtureRequest) -> Iterator[RawClient]:
    """A client, while a request of another client runs. At the end, the other request must have all tokens of all
    samples.
    """
    with RawClient(worker.address) as bystander, RawClient(worker.address) as client:
        engine.flow.clear()
        bystander.generate(request.node.name[:100], n=8, max_tokens=20, seed=11)
        bystander.health()  # the reply arrives after the worker has received the request
        yield client
        assert client.health()["requests"]["open"] == 1
        engine.flow.set()
        *samples, done = bystander.receive_until("done", "error")
    assert done["type"] == "done" and done["finish_reasons"] == {"length": 8}
    for sample in samples:
        tokens = np.frombuffer(sample["token_ids"], "<i4").tolist()
        assert tokens == expected_tokens(11, sample["index"], 20 - sample["index"])


def nested(depth: int) -> bytes:
    """Return the MessagePack of lists nested `depth` deep."""
    return b"\x91" * depth + b"\xc0"


def with_value(field: str, value: bytes, **fields: Any) -> bytes:
    """Return a message that begins with a version and an id, and ends with `field`. The value of `field` is already
    packed.
    """
    before = {"id": "bad", "version": 1, **fields}
    before.pop(field, None)
    return pack({**before, field: 0})[:-1] + value


def generate(prompt: list[int] | bytes = TOKENS, **params: Any) -> dict[str, Any]:
    tokens = prompt if isinstance(prompt, bytes) else np.array(prompt, "<i4").tobytes()
    return {"type": "generate", "prompt_token_ids": tokens, "params": {"max_tokens": 4, "seed": 1, **params}}


REFUSED = {
    "empty prompt": (generate([]), "invalid_request", "found 0"),
    "negative token": (generate([1, -5]), "invalid_request", "-5"),
    "token beyond the vocabulary": (generate([VOCAB_SIZE]), "invalid_request", f"{VOCAB_SIZE})"),
    "long prompt": (generate([1] * (MAX_MODEL_LEN + 1)), "invalid_request", "max_model_len"),
    "long prompt and output": (generate(max_tokens=MAX_MODEL_LEN - 2), "invalid_request", "max_model_len"),
    "no samples": (generate(n=0), "invalid_request", "n: "),
    "too many samples": (generate(n=9), "invalid_request", "max_n = 8 (got 9)"),
    "negative temperature": (generate(temperature=-1.0), "invalid_request", "temperature: "),
    "temperature that is not a number": (generate(temperature=float("nan")), "invalid_request", "temperature: "),
    "top_p 0": (generate(top_p=0.0), "invalid_request", "top_p: "),
    "top_p above 1": (generate(top_p=1.5), "invalid_request", "top_p: "),
    "unknown parameter": (generate(temprature=1.0), "invalid_request", "temprature: unknown parameter"),
    "parameter named as a word of Python": (generate(self=1), "invalid_request", "self: unknown parameter"),
    "top_k beyond 63 bits": (generate(top_k=2**63), "invalid_request", "top_k: "),
    "wrong type of a parameter": (generate(max_tokens="4"), "invalid_request", "max_tokens: "),
    "parameters that are not a map": (generate() | {"params": 5}, "invalid_message", "generate.params: "),
    "tokens as a list": (generate() | {"prompt_token_ids": [1, 2]}, "invalid_message", "prompt_token_ids: "),
    "tokens cut short": (generate(b"12345"), "invalid_message", "array: length must be a multiple of 4 bytes"),
    "missing field": ({"type": "generate", "params": {}}, "invalid_message", "prompt_token_ids: field required"),
    "unknown field": (generate() | {"prompt": "hello"}, "invalid_message", "generate.prompt: unknown"),
    "unknown type": ({"type": "sing"}, "invalid_message", "got 'sing'"),
    "no type": ({}, "invalid_message", "got None"),
    "type that is not a string": ({"type": {"generate": 1}}, "invalid_message", "type: must be one of"),
    "version that is not an integer": (generate() | {"version": 1.0}, "invalid_message", "version: must be 1"),
    "other version": (generate() | {"version": 2}, "invalid_message", "version: must be 1 (got 2)"),
    "version that is not a number": (generate() | {"version": True}, "invalid_message", "version: must be 1"),
    "score of one token": ({"type": "score", "token_ids": TOKENS[:4]}, "invalid_request", "found 1"),
    "score with a bad filter": (
        {"type": "score", "token_ids": TOKENS, "distribution": {"top_k": 0}},
        "invalid_request",
        "top_k must be",
    ),
    "abort of an unknown id": ({"type": "abort", "request_id": "nobody"}, "unknown_request", "'nobody'"),
    "more fields than a message has": (
        {**generate(), **{f"field {i}": 0 for i in range(50)}},
        "invalid_message",
        "max_map_len",
    ),
    "a handful of unknown fields": (
        {**generate(), **{f"field {i}": 0 for i in range(20)}},
        "invalid_message",
        "and 16 more",
    ),
    "too many stop strings": (generate(stop=["a"] * 65), "invalid_request", "at most 64"),
    "a long stop string": (generate(stop=["a" * 1025]), "invalid_request", "at most 1024"),
    "a version that none can follow": (
        {**generate(), "min_weight_version": 2**63 - 1},
        "invalid_message",
        "min_weight_version: ",
    ),
    "a push of a version that none can follow": (
        {
            "type": "begin_push",
            "push_id": "0" * 32,
            "weight_version": 2**63 - 1,
            "dtype": "float32",
            "source": {"kind": "disk", "folder": "/"},
        },
        "invalid_message",
        "begin_push.weight_version: ",
    ),
    "oversized": (generate([1] * (MAX_BYTES // 4)), "message_too_large", f"limit {MAX_BYTES}, max_message_bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_message_is_refused_by_name(raw: RawClient, name: str) -> None:
    fields, code, text = REFUSED[name]
    raw.socket.send(pack({"version": 1, "id": "bad", **fields}))
    reply = raw.receive()
    assert (reply["type"], reply["code"]) == ("error", code) and text in reply["message"]
    assert reply["id"] == "bad"


@pytest.mark.parametrize("id", [None, 5, "", "x" * 129, b"bytes"])
def test_a_bad_id_is_refused(raw: RawClient, id: Any) -> None:
    raw.socket.send(pack({"version": 1, "id": id, **generate()}))
    reply = raw.receive()
    assert (reply["code"], reply["id"]) == ("invalid_message", None) and "generate.id" in reply["message"]


FIELDS = {
    "version": {},
    "type": {},
    "field": {},
    "prompt_token_ids": {"type": "generate"},
    "params": {"type": "generate"},
    "ids": {"type": "ack"},
    "timeout": {"type": "drain"},
    "bucket": {"type": "stage_bucket", "push_id": "0" * 32},
}
"""The places of a value in a message, and the other fields that the worker needs in order to read up to the value."""


@pytest.mark.parametrize("depth", [4, 5, 6, 7, 500, 1000, 1021, 3000])
@pytest.mark.parametrize("field", FIELDS)
def test_deeply_nested_values_are_refused(raw: RawClient, field: str, depth: int) -> None:
    raw.socket.send(with_value(field, nested(depth), **FIELDS[field]))
    reply = raw.receive()
    assert (reply["type"], reply["code"], reply["id"]) == ("error", "invalid_message", "bad")


@pytest.mark.parametrize("depth", [4, 1021])
def test_a_deeply_nested_parameter_is_refused(raw: RawClient, depth: int) -> None:
    params = b"\x81\xa1n" + nested(depth)
    raw.socket.send(with_value("params", params, type="generate", prompt_token_ids=TOKENS))
    reply = raw.receive()
    assert (reply["type"], reply["id"]) == ("error", "bad") and len(reply["message"]) < 200
    assert ("n: " if depth == 4 else "more than 6 deep") in reply["message"]


def test_an_exception_in_a_decoder_is_an_error_of_that_message_alone(
    raw: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(frame: bytes, **_: Any) -> None:
        raise RecursionError("so deep")

    with monkeypatch.context() as patch:
        patch.setattr("trueroll.rollout.protocol.codec.msgpack.unpackb", broken)
        raw.socket.send(pack({"version": 1, "id": "bad", **generate()}))
        reply = msgpack.Unpacker()
        reply.feed(raw.socket.recv())
        fields = reply.unpack()
    assert (fields["code"], fields["id"]) == ("invalid_message", "bad") and "RecursionError" in fields["message"]


UNREADABLE = {
    "empty": b"",
    "truncated": pack({"version": 1, "id": "bad", **generate()})[:-3],
    "two maps": pack({"version": 1, "type": "stats", "id": "x"}) * 2,
    "no map": pack([1, 2, 3]),
    "deeply nested": b"\x91" * 3000 + b"\xc0",
    "claims missing elements, nested": b"\xdd\x00\x04\x00\x00" * 800,
    "claims four gigabytes": b"\xc6\xff\xff\xff\xff" + b"x" * 10,
    "claims four billion elements": b"\xdd\xff\xff\xff\xff",
    "extension type": pack({"version": 1, "type": msgpack.ExtType(5, b"x"), "id": "bad"}),
    "not UTF-8": b"\x81\xa4type\xa2\xff\xfe",
    "key that is not a string": pack({1: 2}),
    "parameter name that is not a string": pack({"version": 1, "id": "bad", **generate(), "params": {b"n": 1}}),
}


WITH_AN_ID = {
    "truncated": "bad",
    "two maps": "x",
    "extension type": "bad",
    "parameter name that is not a string": "bad",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_bytes_get_an_error(raw: RawClient, name: str) -> None:
    raw.socket.send(UNREADABLE[name])
    reply = raw.receive()
    assert (reply["type"], reply["code"]) == ("error", "invalid_message")
    assert reply["id"] == WITH_AN_ID.get(name), "the error has the id if the id can be read"


@pytest.mark.parametrize("frames", [[b""] * 2, [pack({"version": 1, "type": "stats", "id": "x"})] * 3])
def test_more_than_one_frame_gets_an_error(raw: RawClient, frames: list[bytes]) -> None:
    raw.socket.send_multipart(frames)
    reply = raw.receive()
    assert (
        reply["code"] == "invalid_message" and f"must be a single frame (got {len(frames)} frames)" in reply["message"]
    )


def test_a_thousand_random_messages_get_a_thousand_errors(raw: RawClient) -> None:
    rng = random.Random(0)
    for _ in range(1000):
        raw.socket.send(rng.randbytes(rng.randrange(200)))
    assert all(raw.receive()["code"] == "invalid_message" for _ in range(1000))


def test_a_far_too_long_message_disconnects_only_its_sender(raw: RawClient, worker: WorkerOnThread) -> None:
    with RawClient(worker.address) as sender:
        sender.health()
        sender.socket.send(b"x" * (5 * MAX_BYTES))
        sender.socket.set(zmq.RCVTIMEO, 100)
        assert any(_answers(sender) for _ in range(100))  # messages sent before the reconnect are lost
    assert raw.health()["state"] == "ready"


def test_another_client_can_join_the_request_of_a_vanished_client(raw: RawClient, worker: WorkerOnThread) -> None:
    with RawClient(worker.address) as vanishing:
        vanishing.generate("vanished")
        assert vanishing.health()["requests"]["open"] == 2
    raw.generate("vanished", max_tokens=5)
    assert raw.receive()["code"] == "id_conflict"
    raw.generate("vanished")
    raw.send("abort", id="end", request_id="vanished")
    assert [reply["type"] for reply in raw.receive_until("aborted")] == ["sample", "done", "aborted"]
    raw.generate("vanished")
    assert raw.receive_until("done")[-1]["finish_reasons"] == {"abort": 1}


def _answers(client: RawClient) -> bool:
    try:
        return client.health()["state"] == "ready"
    except zmq.Again:
        return False


def test_long_messages_of_many_small_values_are_refused_before_they_are_built() -> None:
    """Each message is within the size limits. Without the check, a message would take 15 seconds or gigabytes of
    memory.
    """
    many = 2_000_000
    packed = msgpack.Packer()
    head = packed.pack("version") + packed.pack(1) + packed.pack("id") + packed.pack("bad")
    unknown = b"".join(b"\xa7" + b"%07d" % i + b"\xc0" for i in range(1_000_000))
    messages = {
        "unknown fields": b"\xdf" + (1_000_002).to_bytes(4, "big") + head + unknown,
        "elements": b"\x83" + head + b"\xa3ids\xdd" + many.to_bytes(4, "big") + b"\xc0" * many,
        "maps": b"\x83" + head + b"\xa3ids\xdd" + many.to_bytes(4, "big") + b"\x80" * many,
        "lists of lists": b"\x83" + head + b"\xa3ids\xdc\x03\xe8" + (b"\xdc\x07\xd0" + b"\xc0" * 2000) * 1000,
        "stop strings": b"\x83" + head + b"\xa6params\x81\xa4stop\xdd" + many.to_bytes(4, "big") + b"\xa1a" * many,
    }
    with serving(FakeEngine(), max_message_bytes=2**24) as worker, RawClient(worker.address) as raw:
        for name, message in messages.items():
            raw.socket.send(message)
            reply = raw.receive()
            assert (reply["code"], reply["id"]) == ("invalid_message", "bad"), name
            assert "exceeds" in reply["message"] or "more than" in reply["message"], (name, reply)


def test_values_in_errors_are_shortened() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = (deep,)
    for value in (10**5000, deep, b"x" * 10**6, "x" * 10**6, {i: i for i in range(10**5)}):
        assert 1 <= len(brief(value)) <= 80
        with pytest.raises(InvalidRequestError, match="top_p: must be .*got"):
            SamplingParams(top_p=value)  # type: ignore[arg-type]
