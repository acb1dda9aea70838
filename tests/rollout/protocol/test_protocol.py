"""The protocol alone: messages survive encoding and decoding, arbitrary bytes either decode or raise trueroll's errors,
and docs/protocol.md agrees with the code.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import msgpack
import numpy as np
import pytest
from frames import pack
from hypothesis import given, settings
from hypothesis import strategies as st

from trueroll.engine.request import Distribution, SampleOutput, SamplingParams, ScoreOutput, WeightSpan
from trueroll.errors import ProtocolError, TruerollError
from trueroll.rollout import protocol
from trueroll.rollout.protocol import binaries
from trueroll.rollout.protocol.error_codes import SENT_ERRORS, error_from_code

SHARED = patch.object(binaries, "LONG_BYTES", 4)
"""Makes even short arrays share the memory of a frame, if they are a large enough part of it."""
PAGE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()

ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=128)
arrays = st.binary(max_size=40).map(lambda data: data[: len(data) // 4 * 4])
counts = st.integers(0, 2**63)
token_ids = st.integers(0, 2**31 - 1)
params = st.builds(
    SamplingParams,
    n=st.integers(1, 2**31),
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.sampled_from([-1, 1, 50]),
    seed=st.none() | st.integers(0, 2**64 - 1),
    stop=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    logprobs=st.sampled_from(["processed", "temperature", "raw", None]),
    repetition_penalty=st.floats(1e-4, 1e4),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(token_ids, st.floats(-100, 100), max_size=3),
    allowed_token_ids=st.none() | st.lists(token_ids, min_size=1, max_size=3),
    bad_words_token_ids=st.lists(st.lists(token_ids, min_size=1, max_size=3), max_size=3),
    structured_outputs=st.sampled_from([None, {"json": {"a": [{"b": {}}]}}, {"choice": ["é", "b"]}, {"regex": "a+"}]),
    cache_salt=st.none() | st.text(st.characters(exclude_categories=["Cs"])),
    return_routed_experts=st.booleans(),
    return_sampling_mask=st.booleans(),
) | st.builds(SamplingParams, target_token_ids=st.lists(token_ids, max_size=3))
tops = st.integers(0, 4).flatmap(
    lambda k: st.integers(0, 3).map(
        lambda rows: protocol.TopArrays(
            k=k, entropy=bytes(4 * rows), token_ids=b"abcd" * (k * rows), logprobs=bytes(4 * k * rows)
        )
    )
)
targets = st.integers(1, 4).flatmap(
    lambda k: st.integers(0, 3).map(lambda rows: protocol.TargetArrays(k=k, logprobs=b"abcd" * (k * rows)))
)
kept = st.lists(st.integers(0, 3), max_size=3).map(
    lambda counts: protocol.KeptArrays(
        counts=np.array(counts, "<i4").tobytes(), log_mass=b"abcd" * len(counts), token_ids=b"abcd" * sum(counts)
    )
)
routed = st.integers(0, 3).map(
    lambda rows: protocol.RoutedExperts(dtype="uint16", shape=(rows, 2, 4), data=b"abcd" * (4 * rows))
)
from_client = st.one_of(
    st.builds(protocol.Generate, id=ids, prompt_token_ids=arrays, params=params, deltas=st.booleans()),
    st.builds(
        protocol.Generate,
        id=ids,
        prompt_token_ids=arrays,
        params=params,
        deltas=st.just(True),
        delta_seconds=st.floats(0, 60),
    ),
    st.builds(
        protocol.GetScores,
        id=ids,
        token_ids=arrays,
        distribution=st.builds(Distribution, min_p=st.floats(0, 1), presence_penalty=st.floats(-2, 2)),
        start=st.integers(1, 2**63 - 1),
        target_token_ids=st.none() | arrays,
        return_sampling_mask=st.booleans(),
    ),
    st.builds(protocol.Abort, id=ids, request_id=ids, index=st.none() | counts),
    st.builds(protocol.Ack, ids=st.lists(ids).map(tuple)),
    st.builds(protocol.GetHealth, id=ids),
    st.builds(protocol.GetStats, id=ids),
)
spans = st.lists(st.tuples(counts, counts, counts), max_size=3).map(tuple)
reasons = st.sampled_from(["stop", "length", "abort", "error"])
from_worker = st.one_of(
    st.builds(
        protocol.FinishedSample,
        id=ids,
        index=counts,
        token_ids=arrays,
        logprobs=st.none() | arrays,
        finish_reason=reasons,
        seed=st.integers(0, 2**64 - 1),
        num_cached_tokens=counts,
        weight_versions=spans,
        old_kv=spans,
        error=st.none() | st.just("why"),
        tops=st.none() | tops,
        targets=st.none() | targets,
        kept=st.none() | kept,
        routed_experts=st.none() | routed,
    ),
    st.builds(
        protocol.Deltas,
        samples=st.lists(
            st.builds(
                protocol.Delta,
                id=ids,
                index=counts,
                start=counts,
                token_ids=arrays,
                logprobs=st.none() | arrays,
                tops=st.none() | tops,
                targets=st.none() | targets,
                kept=st.none() | kept,
            ),
            max_size=3,
        ).map(tuple),
        caller=st.none() | ids,
    ),
    st.builds(
        protocol.Done,
        id=ids,
        params=params,
        num_prompt_tokens=counts,
        finish_reasons=st.dictionaries(reasons, counts),
    ),
    st.builds(
        protocol.Scores,
        id=ids,
        logprobs=arrays,
        finish_reason=reasons,
        weight_versions=spans,
        targets=st.none() | targets,
        kept=st.none() | kept,
    ),
    st.builds(protocol.Error, id=st.none() | ids, code=st.just("internal"), message=st.just("text")),
    st.builds(protocol.Aborted, id=ids, request_id=ids, num_samples=counts),
)


@given(from_client)
def test_a_clients_message_survives_the_wire(message: Any) -> None:
    assert protocol.from_client(protocol.encode(message)) == message


@given(from_worker)
def test_a_workers_message_survives_the_wire(message: Any) -> None:
    assert protocol.from_worker(protocol.encode(message)) == message


@given(from_worker)
def test_a_reply_is_decoded_as_with_copies(message: Any) -> None:
    frame = protocol.encode(message)
    with SHARED:
        assert protocol.from_worker(frame) == message


@given(st.data(), from_worker)
@settings(max_examples=200)
def test_a_damaged_reply_is_decoded_as_with_copies(data: st.DataObject, message: Any) -> None:
    frame = bytearray(protocol.encode(message))
    for _ in range(data.draw(st.integers(1, 5))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(frame[: data.draw(st.integers(0, len(frame)))])
    expected = decoded(cut)
    with SHARED:
        assert decoded(cut) == expected


def decoded(frame: bytes) -> Any:
    try:
        return protocol.from_worker(frame)
    except ProtocolError:
        return ProtocolError


@given(st.data(), from_client)
def test_damaged_messages_decode_or_raise_our_errors(data: st.DataObject, message: Any) -> None:
    frame = bytearray(protocol.encode(message))
    for _ in range(data.draw(st.integers(1, 5))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    decode_or_raise(bytes(frame[: data.draw(st.integers(0, len(frame)))]))


@given(st.binary())
@settings(max_examples=500)
def test_random_bytes_raise_our_errors(frame: bytes) -> None:
    decode_or_raise(frame)


def decode_or_raise(frame: bytes) -> None:
    try:
        message = protocol.from_client(frame)
    except TruerollError as error:
        assert error.code in ("invalid_message", "invalid_request") and str(error)
    else:
        assert isinstance(message, get_args(protocol.FromClient))


def test_a_sample_survives_the_wire_bit_for_bit() -> None:
    tokens = [5, 0, 2**31 - 1]
    logprobs = np.array([-0.0, -np.inf, 1e-45], np.float32)
    output = SampleOutput("a", 3, tokens, logprobs, "stop", 2**64 - 1, 17, (WeightSpan(1, 0, 2), WeightSpan(2, 2, 3)))
    frame = protocol.encode(protocol.sample_message(output.request_id, output))
    message = protocol.from_worker(frame)
    assert isinstance(message, protocol.FinishedSample)
    back = protocol.sample_output(message)
    assert back.token_ids == tokens and type(back.token_ids) is list
    assert back.logprobs is not None and back.logprobs.tobytes() == logprobs.tobytes()
    assert back.logprobs.flags.writeable
    assert replace(back, logprobs=logprobs) == replace(output, logprobs=logprobs)


@pytest.mark.parametrize("k,rows", [(2, 3), (0, 3), (5, 0)])
def test_top_logprobs_survive_the_wire_bit_for_bit(k: int, rows: int) -> None:
    entropy = np.linspace(0, 1, rows, dtype=np.float32)
    ids = np.arange(rows * k, dtype=np.int32).reshape(rows, k)
    logprobs = np.full((rows, k), -np.inf, np.float32)
    tops: dict[str, Any] = dict(entropy=entropy, top_token_ids=ids, top_logprobs=logprobs)
    sample = SampleOutput("a", 3, [0] * rows, entropy, "stop", 7, 17, (), **tops)
    message = protocol.from_worker(protocol.encode(protocol.sample_message("a", sample)))
    scored = ScoreOutput("a", entropy, "stop", (), **tops)
    scores = protocol.from_worker(protocol.encode(protocol.scores_message("a", scored)))
    assert isinstance(message, protocol.FinishedSample) and isinstance(scores, protocol.Scores)
    backs = protocol.sample_output(message), protocol.score_output(scores)
    for found in ({name: getattr(back, name) for name in tops} for back in backs):
        for name, expected in tops.items():
            assert found[name].tobytes() == expected.tobytes() and found[name].dtype == expected.dtype
            assert found[name].shape == expected.shape and found[name].flags.writeable


@pytest.mark.parametrize("read_only", [False, True])
def test_read_only_results_share_the_memory_of_the_message(read_only: bool) -> None:
    counts, ids = np.array([2, 0, 1], np.int32), np.arange(3, dtype=np.int32)
    routed = np.zeros((2, 2, 1), np.uint8)
    columns: dict[str, Any] = dict(target_logprobs=np.ones((3, 2), np.float32), routed_experts=routed)
    columns |= dict(kept_counts=counts, kept_log_mass=np.ones(3, np.float32), kept_token_ids=ids)
    ones = np.ones(3, np.float32)
    sample = SampleOutput("a", 3, [0] * 3, ones, "stop", 7, 17, (), **columns)
    message = protocol.sample_message("a", sample)
    scores = protocol.scores_message("a", ScoreOutput("a", ones, "stop", (), **columns))
    for sent, back in (
        (message, protocol.sample_output(message, read_only)),
        (scores, protocol.score_output(scores, read_only)),
    ):
        assert isinstance(back, SampleOutput | ScoreOutput) and sent.kept is not None and sent.targets is not None
        pairs = [(sent.logprobs, back.logprobs), (sent.targets.logprobs, back.target_logprobs)]
        pairs += [(sent.kept.counts, back.kept_counts), (sent.kept.log_mass, back.kept_log_mass)]
        pairs.append((sent.kept.token_ids, back.kept_token_ids))
        assert sent.routed_experts is not None
        for content, found in [*pairs, (sent.routed_experts.data, back.routed_experts)]:
            assert content is not None and found is not None and found.tobytes() == content
            assert found.flags.writeable != read_only
            assert np.shares_memory(found, np.frombuffer(content, np.uint8)) == read_only


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_routed_experts_survive_the_wire_bit_for_bit(dtype: str) -> None:
    routed = np.random.default_rng(0).integers(0, np.iinfo(dtype).max + 1, (5, 3, 2)).astype(dtype)
    sample = SampleOutput("a", 3, [0] * 3, None, "stop", 7, 17, (), routed_experts=routed)
    scored = ScoreOutput("a", np.zeros(5, np.float32), "stop", (), routed_experts=routed)
    message = protocol.from_worker(protocol.encode(protocol.sample_message("a", sample)))
    scores = protocol.from_worker(protocol.encode(protocol.scores_message("a", scored)))
    assert isinstance(message, protocol.FinishedSample) and isinstance(scores, protocol.Scores)
    assert message.routed_experts is not None and message.routed_experts.data == routed.tobytes()
    for back in (protocol.sample_output(message), protocol.score_output(scores)):
        found = back.routed_experts
        assert found is not None and found.dtype == dtype and found.flags.writeable and np.array_equal(found, routed)


def test_routed_experts_that_contradict_their_shape_or_dtype_are_refused() -> None:
    fields = dict(dtype="uint16", shape=[5, 3, 2], data=bytes(60))
    assert protocol.RoutedExperts(dtype="uint16", shape=(5, 3, 2), data=bytes(60)).dtype == "uint16"
    for wrong in (
        dict(shape=[5, 3, 3]),
        dict(dtype="uint8"),
        dict(dtype="int8"),
        dict(shape=[30]),
        dict(data=bytes(59)),
    ):
        frame = protocol.encode(protocol.Scores(id="a", logprobs=bytes(8), finish_reason="stop", weight_versions=()))
        message = msgpack.unpackb(frame) | {"routed_experts": fields | wrong}
        with pytest.raises(ProtocolError, match="routed_experts"):
            protocol.from_worker(pack(message))


def test_top_logprobs_that_contradict_k_are_refused() -> None:
    fields = dict(entropy=bytes(8), token_ids=bytes(16), logprobs=bytes(16))
    assert protocol.TopArrays(k=2, **fields).k == 2
    for wrong in (dict(k=3), dict(k=2, logprobs=bytes(12)), dict(k=65)):
        frame = protocol.encode(protocol.Scores(id="a", logprobs=bytes(8), finish_reason="stop", weight_versions=()))
        message = msgpack.unpackb(frame) | {"tops": fields | wrong}
        with pytest.raises(ProtocolError, match="tops"):
            protocol.from_worker(pack(message))


def test_an_error_is_raised_as_the_class_of_its_code() -> None:
    for kind in SENT_ERRORS:
        assert type(error_from_code(kind.code, "text")) is kind
    assert type(error_from_code("from_the_future", "text")) is TruerollError


def test_error_codes_are_distinct() -> None:
    assert len({kind.code for kind in SENT_ERRORS}) == len(SENT_ERRORS)


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "ack", "ids": (0,) * 1000},
        {
            "type": "stage_bucket",
            "id": "a",
            "push_id": "0" * 32,
            "bucket": {"index": 0, "num_bytes": 0, "pieces": (0,) * 1000},
        },
        {"type": "sleep", "id": "a", "tags": (0,) * 1000},
        {"type": "generate", "id": "a", "prompt_token_ids": b"", "params": {"stop_token_ids": ("x",) * 1000}},
    ],
)
def test_validation_of_a_list_stops_at_the_first_invalid_element(fields: dict[str, Any]) -> None:
    with pytest.raises(TruerollError) as caught:
        protocol.from_client(pack({"version": 1, **fields}))
    assert ".0: " in str(caught.value) and ".1: " not in str(caught.value)


# docs/protocol.md agrees with the code.


def headings(section: str) -> list[str]:
    """Return the words in backquotes in the headings of a section's subsections."""
    text = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    assert text is not None
    return re.findall(r"^### `(\w+)`", text[1], re.M)


def test_the_page_lists_every_message_type() -> None:
    assert sorted(headings("From client to worker")) == sorted(protocol.message_types(protocol.FromClient))
    assert sorted(headings("From worker to client")) == sorted(protocol.message_types(protocol.FromWorker))


@pytest.mark.parametrize(
    ("section", "union"),
    [("From client to worker", protocol.FromClient), ("From worker to client", protocol.FromWorker)],
)
def test_the_page_lists_every_field(section: str, union: Any) -> None:
    text = PAGE.split(f"## {section}\n")[1]
    for message in get_args(union):
        type = message.model_fields["type"].default
        part = re.search(rf"^### `{type}`\n(.*?)(?=^##)", text, re.M | re.S)
        assert part is not None
        assert set(re.findall(r"^\| `(\w+)` ", part[1], re.M)) == message.model_fields.keys() - {"type"}, type


def test_the_page_lists_every_error_code() -> None:
    codes = re.findall(r"^\| `(\w+)` ", PAGE.split("## Errors\n")[1].split("\n## ")[0], re.M)
    assert sorted(codes) == sorted(kind.code for kind in SENT_ERRORS)


def test_the_parts_of_a_growing_sample_have_the_kept_sets_of_their_tokens() -> None:
    ids, limits = np.arange(9, dtype="<i4"), [0, 3, 3, 8, 9]

    def delta(start: int, end: int) -> protocol.Delta:
        counts = np.diff(limits[start : end + 1]).astype("<i4").tobytes()
        part = ids[limits[start] : limits[end]].tobytes()
        kept = protocol.KeptArrays(counts=counts, log_mass=bytes(4 * (end - start)), token_ids=part)
        tokens = ids[start:end].tobytes()
        return protocol.Delta(id="a", index=0, start=start, token_ids=tokens, logprobs=None, kept=kept)

    growth = protocol.Growth(delta(0, 1))
    assert growth.put(delta(0, 3)) and growth.put(delta(2, 4))
    assert growth.num_tokens == 4 and growth.part(0) == delta(0, 4)
    # Token 0 takes 12 + 12 bytes, token 1 takes 12, and token 2 takes 12 + 20.
    for room, end in ((1, 1), (35, 1), (36, 2), (67, 2), (68, 3), (1000, 4)):
        assert growth.part(0, room) == delta(0, end)
    assert growth.part(2, 31) == delta(2, 3) and growth.part(2, 48) == delta(2, 4)


def test_the_page_lists_every_sampling_parameter() -> None:
    text = PAGE.split("## Sampling parameters\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` ", text, re.M)) == SamplingParams.model_fields.keys()
