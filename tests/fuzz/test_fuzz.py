"""The fuzzer in CI: a short campaign, and a check that the harness finds each planted fault."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import SHAPES, FakeWeights
from fuzz.attack import CODES, IMAGE_ERRORS, TERMINAL, Shot
from fuzz.campaign import Numbers, Plan
from fuzz.corpus import CLOSED_PORT, SECONDS, Corpus, Memory, is_tame
from fuzz.faulty_worker import FAULTS
from fuzz.images import ANSWERS, STILLS, put_image
from fuzz.mutate import MAX_MESSAGE_BYTES
from fuzz.operator_client import Operator
from fuzz.rounds import ROUND, SHARES, Rounds
from fuzz.target import campaign_against, tiny_campaign
from fuzz.trees import Pairs, pack, tree
from fuzz.violation import Trace, Violation, read_trace
from matrix import thinned

from trueroll.errors import MessageTooLargeError, ProtocolError
from trueroll.rollout import protocol
from trueroll.rollout.protocol.error_codes import SENT_ERRORS
from trueroll.rollout.worker.worker import read

FAKE_TENSORS = FakeWeights(SHAPES, "float32").live
COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("faulty_worker.py")))
FOUND = {
    "flips a bit": "another result than from the quiet worker",
    "loses an error": "replies to the attack are owed",
    "repeats an error": "not owed, or a second one",
    "serves another push": "serves the push ffff",
    "keeps blocks": "1 blocks in use",
    "keeps images": "bytes of images, more than",
    "asks for too much": "was asked for",
    "exits": "the worker ended with exit code 3",
    "hangs": "did not answer",
    "grows": "grew by more than",
    "leaks descriptors": "did not return to its threads and descriptors",
    "logs a traceback": "logged an unexpected exception",
    "ends badly": "exited with code 4 after it was told to end",
}


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory(FAKE_TENSORS)
    yield memory
    memory.close()


def test_the_corpus_has_every_message_type_and_only_valid_messages(memory: Memory) -> None:
    corpus = Corpus(random.Random(0), memory)
    types = set()
    for message in (message for _ in range(1000) for message in corpus.script()):
        frame = pack(tree(message))
        assert is_tame([frame]) and protocol.from_client(frame).type == message["type"]
        types.add(message["type"])
    assert types == set(protocol.message_types(protocol.FromClient)) == {*TERMINAL, "ack", "put_image"}
    assert CODES == {error.code for error in SENT_ERRORS} - {"worker_failed", "unavailable", "unread", "forbidden"}


def test_a_corpus_about_images_has_only_messages_about_images(memory: Memory) -> None:
    corpus = Corpus(random.Random(0), memory, images=True)
    for script in (corpus.script() for _ in range(300)):
        assert any(message.get("images") or message["type"] == "put_image" for message in script)
        for message in script:
            assert protocol.from_client(pack(tree(message))).type == message["type"]


def test_a_seed_gives_the_same_round_and_a_saved_round_is_read_back(memory: Memory, tmp_path: Path) -> None:
    trace = Trace()
    trace.start_round()
    for sent in Rounds(7, memory).draw(3):
        trace.add(sent)
    trace.save(tmp_path / "trace")
    first = list(read_trace(tmp_path / "trace"))
    assert first == list(Rounds(7, memory).draw(3)) != list(Rounds(8, memory).draw(3))
    frames = [sent.frames[0] for sent in first if sent.kind == "mutated"]
    num_readable = sum(Shot([frame]).fields is not None for frame in frames)
    assert len(frames) // 4 < num_readable < len(frames) and max(map(len, frames)) > 1000


@pytest.mark.parametrize(
    ("fields", "is_answered"),
    [
        ({}, False),
        ({"start": 2**64 - 1}, False),
        ({"start": -1}, True),
        ({"start": True}, True),
        ({"content_hash": bytes(31)}, True),
        ({"data": b""}, True),
        ({"data": bytes(2**20)}, True),
        ({"caller": "x"}, True),
        ({"version": 2}, True),
    ],
)
def test_only_a_wrong_put_image_is_answered(fields: dict[str, Any], is_answered: bool) -> None:
    frame = pack(tree(put_image("x", STILLS[0], **fields)))
    assert Shot([frame]).needs_reply == is_answered
    if is_answered:
        with pytest.raises((ProtocolError, MessageTooLargeError)):
            read([frame], "control", MAX_MESSAGE_BYTES)
    else:
        assert read([frame], "control", MAX_MESSAGE_BYTES).type == "put_image"


def test_an_ack_with_a_repeated_field_has_no_certain_reply() -> None:
    hidden = Pairs([[b"n", 1]])
    ack = Pairs([["version", 1], ["type", "ack"], ["ids", hidden], ["ids", ["x"]]])
    with pytest.raises(ProtocolError, match="is not a string"):
        protocol.from_client(pack(ack))
    shot = Shot([pack(ack)])
    assert not shot.needs_reply and not shot.is_certain
    ack.remove(["ids", hidden])
    assert Shot([pack(ack)]).is_certain


@pytest.mark.parametrize("in_flight", ["abort", "recompute"])
@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1"])
def test_messages_that_may_harm_other_clients_are_not_sent(memory: Memory, in_flight: str, host: str) -> None:
    source = {"kind": "collective", "host": host, "port": CLOSED_PORT}
    waits = {"timeout": SECONDS, "drain_timeout": SECONDS}
    begin = {"type": "begin_push", "in_flight": in_flight, "source": source, **waits}
    assert is_tame([pack(tree(begin))]) == (in_flight == "recompute" and host == "127.0.0.1")


def test_no_message_harms_a_worker_or_a_good_request() -> None:
    with tiny_campaign(Plan(20_000, seed=1)) as campaign:
        numbers = campaign.run()
    assert numbers.messages >= 20_000 and set(numbers.sent) == {*SHARES, "deserted"}
    assert {*TERMINAL.values(), "sample", "deltas", "need_image"} < set(numbers.replies)
    assert CODES - {"version_gap", "other_base", "deadline_exceeded"} <= set(numbers.replies)
    assert numbers.good_requests > 200 and numbers.good_tokens > 5000
    assert numbers.streams > 200 and numbers.reconnects > 100 and numbers.pushes > 10
    assert numbers.preemptions > 0 and numbers.good_refused > 0
    assert {*ANSWERS, *IMAGE_ERRORS, "served", "unanswered"} == set(numbers.images)
    assert numbers.good_with_images > 50 and numbers.good_parts > 20
    assert numbers.before is not None and numbers.after is not None


def fake_campaign(fault: str, patience: float) -> Numbers:
    plan = Plan(2 * ROUND, patience=patience, warm_up=ROUND)
    with campaign_against(fault, FAKE_TENSORS, plan, command=COMMAND) as campaign:
        return campaign.run()


def test_a_worker_without_a_fault_passes() -> None:
    assert fake_campaign("none", patience=20.0).messages >= 2 * ROUND


def test_a_campaign_that_fails_to_start_leaves_no_shared_memory(
    monkeypatch: pytest.MonkeyPatch, memory: Memory
) -> None:
    def start_receiving(operator: Operator) -> None:
        raise Violation("found by the operator")

    monkeypatch.setattr(Operator, "start_receiving", start_receiving)
    monkeypatch.setattr("fuzz.campaign.Memory", lambda tensors: memory)
    shared = Path("/dev/shm") / memory.source["name"]
    assert shared.exists()
    with pytest.raises(Violation, match="found by the operator"):
        fake_campaign("none", patience=20.0)
    assert not shared.exists()


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - {"none"}))
@thinned(lambda fault: fault in ("flips a bit", "loses an error", "exits"))
def test_a_fault_is_found(fault: str) -> None:
    with pytest.raises(Violation, match=FOUND[fault]):
        fake_campaign(fault, patience=4.0)
