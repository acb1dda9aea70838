"""Long arrays of a worker's reply share the memory of the frame. Apart from that, a reply is decoded to the same values
as with copies.
"""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from trueroll.engine.request import SampleOutput, ScoreOutput
from trueroll.errors import ProtocolError
from trueroll.rollout import protocol
from trueroll.rollout.protocol.binaries import LONG_BYTES, MOST_VALUES, without_binaries


def sample(rows: int, **more: Any) -> SampleOutput:
    """A sample with 20 targets."""
    targets = np.random.default_rng(0).random((rows, 20), np.float32)
    fields: dict[str, Any] = dict(weight_versions=(), target_logprobs=targets) | more
    return SampleOutput("a", 3, [*range(rows)], targets[:, 0].copy(), "stop", 7, 0, **fields)


def test_arrays_share_the_memory_of_a_frame_if_they_are_a_large_part_of_it() -> None:
    output = sample(500)
    scored = ScoreOutput("a", np.array(output.logprobs), "stop", (), target_logprobs=output.target_logprobs)
    for message in (protocol.sample_message("a", output), protocol.scores_message("a", scored)):
        frame = protocol.encode(message)
        back = protocol.from_worker(frame)
        assert back == message and isinstance(back, protocol.FinishedSample | protocol.Scores)
        assert back.targets is not None and back.logprobs is not None and len(back.targets.logprobs) > LONG_BYTES
        shared = [np.shares_memory(as_array(each), as_array(frame)) for each in (back.targets.logprobs, back.logprobs)]
        assert shared == [True, False]
        read = protocol.sample_output if isinstance(back, protocol.FinishedSample) else protocol.score_output
        for read_only in (True, False):
            found: Any = read(back, read_only)  # type: ignore[arg-type]
            assert found.target_logprobs.tobytes() == np.array(output.target_logprobs).tobytes()
            assert found.target_logprobs.flags.writeable != read_only
            assert np.shares_memory(found.target_logprobs, as_array(frame)) == read_only


def as_array(content: Any) -> np.ndarray:
    return np.frombuffer(content, np.uint8)


@pytest.mark.parametrize(
    "frame",
    [
        protocol.encode(protocol.sample_message("a", sample(100))),
        protocol.encode(protocol.sample_message("a", sample(500))) + b"x",
        protocol.encode(protocol.sample_message("a", sample(500)))[:-1],
        msgpack.packb([0] * MOST_VALUES + [bytes(4 * LONG_BYTES)]),
        msgpack.packb([msgpack.ExtType(1, b"0"), bytes(2 * LONG_BYTES)]),
        msgpack.packb([bytes(LONG_BYTES)] * 5),
        b"",
    ],
    ids=["short", "longer", "cut", "many values", "an extension", "small parts", "empty"],
)
def test_a_frame_is_copied_if_it_has_no_large_part_or_cannot_be_searched(frame: bytes) -> None:
    assert without_binaries(memoryview(frame)) is None


def test_only_samples_and_scores_share_memory() -> None:
    """The lifetime counters of a large mixture of experts are a long binary."""
    frame = protocol.encode(protocol.Stats(id="a", engine={"expert_tokens": bytes(LONG_BYTES)}, service={}))
    assert without_binaries(memoryview(frame)) is not None, "premise"
    stats = protocol.from_worker(frame)
    assert isinstance(stats, protocol.Stats) and type(stats.engine["expert_tokens"]) is bytes


def test_an_extension_in_a_reply_is_refused() -> None:
    message = msgpack.unpackb(protocol.encode(protocol.sample_message("a", sample(500))))
    for frame in (message | {"error": msgpack.ExtType(1, b"\0")}, message | {"targets": msgpack.ExtType(1, b"\0")}):
        packed = msgpack.packb(frame)
        assert packed is not None
        with pytest.raises(ProtocolError, match="cannot decode"):
            protocol.from_worker(packed)
