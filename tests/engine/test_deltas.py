"""Deltas of streamed samples: the concatenated deltas are always a bitwise prefix of the sample's output."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trueroll.engine.engine import Engine
from trueroll.engine.outputs.open_requests import OpenSample
from trueroll.engine.outputs.stop_strings import load_vocabulary
from trueroll.engine.request import Output, Request, SampleDelta, SampleOutput, ScoreRequest
from trueroll.errors import UnknownRequestError

from .checkpoints import another_version, read_tensors, stage
from .drive import bits, generate, make_engine, run, tokens, top_bits

pytestmark = pytest.mark.usefixtures("steps_ahead")
Key = tuple[str, int]


class Reader:
    """Drives an engine and collects the deltas of each sample."""

    def __init__(self, engine: Engine, requests: Iterable[Request] = ()) -> None:
        self.engine = engine
        self.told: defaultdict[Key, list[SampleDelta]] = defaultdict(list)
        self.samples: dict[Key, SampleOutput] = {}
        for request in requests:
            engine.add(request)
            engine.stream(request.id)

    def step(self) -> None:
        self.take(self.engine.step())

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            assert isinstance(output, SampleOutput)
            self.samples[output.request_id, output.index] = output
        for delta in self.engine.take_deltas():
            key = delta.request_id, delta.index
            assert key not in self.samples, "no deltas after the output"
            assert delta.start == self.num_told(key) and delta.token_ids
            self.told[key].append(delta)

    def num_told(self, key: Key) -> int:
        return sum(len(delta.token_ids) for delta in self.told[key])

    def drain(self) -> Reader:
        while self.engine.has_unfinished:
            self.step()
        assert self.engine.take_deltas() == []
        return self

    def check(self) -> None:
        """Check that every delta equals its part of the finished sample, to the bit."""
        for key, deltas in self.told.items():
            sample = self.samples[key]
            for delta in deltas:
                assert part(delta, 0, None) == part(sample, delta.start, delta.start + len(delta.token_ids))


def part(of: SampleDelta | SampleOutput, start: int, end: int | None) -> list[Any]:
    columns = of.logprobs, of.entropy, of.top_token_ids, of.top_logprobs
    found = [None if column is None else (column.dtype, column[start:end].tobytes()) for column in columns]
    return [of.token_ids[start:end], *found]


def test_deltas_report_every_token_but_the_last(tiny_model: Path) -> None:
    requests = [
        generate("group", tokens(20), n=3, max_tokens=9),
        generate("recorded", tokens(33, seed=1), top_logprobs=3),
        generate("no log-probs", tokens(5, seed=2), logprobs=None, temperature=0.0),
    ]
    reader = Reader(make_engine(tiny_model), requests).drain()
    reader.check()
    assert {key: reader.num_told(key) for key in reader.samples} == {
        **{("group", i): 8 for i in range(3)},
        ("recorded", 0): 11,
        ("no log-probs", 0): 11,
    }
    assert reader.told["no log-probs", 0][0].logprobs is None
    expected = run(make_engine(tiny_model), requests)
    assert {key: part(sample, 0, None) for key, sample in reader.samples.items()} == {
        key: part(sample, 0, None) for key, sample in expected.items()
    }


def test_a_request_that_is_not_streamed_has_no_deltas(tiny_llama: Path) -> None:
    reader = Reader(make_engine(tiny_llama), [generate("streamed", tokens(20))])
    reader.engine.add(generate("not", tokens(21)))
    reader.drain().check()
    assert reader.told.keys() == {("streamed", 0)} and reader.samples.keys() == {("streamed", 0), ("not", 0)}


def test_a_sample_streamed_late_reports_its_first_tokens_once(tiny_llama: Path) -> None:
    reader = Reader(make_engine(tiny_llama))
    reader.engine.add(generate("r", tokens(20), n=2, max_tokens=9))
    while not any(isinstance(each, OpenSample) and each.token_ids for each in reader.engine._ledger._sequences):
        reader.step()
    reader.step()
    reader.step()
    assert not reader.told
    reader.engine.stream("r")
    reader.take([])
    assert [[delta.start for delta in deltas] for deltas in reader.told.values()] == [[0], [0]]
    assert all(reader.num_told(key) > 1 for key in reader.told)
    reader.engine.stream("r")
    reader.take([])
    assert [len(deltas) for deltas in reader.told.values()] == [1, 1]
    reader.drain().check()


def test_deltas_grow_until_they_are_taken(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    reader = Reader(engine, [generate("r", tokens(20), max_tokens=9)])
    for _ in range(5):
        engine.step()
    reader.take([])
    [delta] = reader.told["r", 0]
    assert len(delta.token_ids) > 3
    reader.drain().check()


@pytest.mark.parametrize("by", ["token", "string"])
def test_the_token_that_ends_a_sample_is_in_its_output_alone(tiny_llama: Path, by: str) -> None:
    free = run(make_engine(tiny_llama), [generate("r", tokens(20), max_tokens=8)])["r", 0]
    stop = next(token for token in free.token_ids[3:] if token not in free.token_ids[:3])
    text = load_vocabulary(tiny_llama).decode([stop])
    params = dict(stop_token_ids=(stop,)) if by == "token" else dict(stop=(text,))
    reader = Reader(make_engine(tiny_llama), [generate("r", tokens(20), max_tokens=8, **params)])
    reader.drain().check()
    sample = reader.samples["r", 0]
    assert sample.stop_reason == (stop if by == "token" else text)
    assert reader.num_told(("r", 0)) == len(sample.token_ids) - 1 > 0


def test_preempted_samples_report_each_token_once(tiny_llama: Path) -> None:
    requests = [generate(str(i), tokens(30 + i, seed=i), n=3, max_tokens=30, top_logprobs=2) for i in range(6)]
    expected = run(make_engine(tiny_llama), requests)
    reader = Reader(make_engine(tiny_llama, num_blocks=24, block_size=8), requests).drain()
    assert reader.engine.stats().preemptions > 5, "premise"
    reader.check()
    assert {key: bits(sample) for key, sample in reader.samples.items()} == {k: bits(s) for k, s in expected.items()}
    assert all(top_bits(reader.samples[key]) == top_bits(sample) for key, sample in expected.items())
    assert all(reader.num_told(key) == 29 for key in expected)


def test_an_abort_ends_the_deltas(tiny_llama: Path) -> None:
    reader = Reader(make_engine(tiny_llama), [generate("r", tokens(20), n=2, max_tokens=9)])
    while reader.num_told(("r", 1)) < 3:
        reader.step()
    reader.take(reader.engine.abort("r", 0))
    reader.drain().check()
    assert reader.samples["r", 0].finish_reason == "abort" and reader.samples["r", 1].finish_reason == "length"
    assert reader.num_told(("r", 1)) == 8 and 3 <= reader.num_told(("r", 0)) <= len(reader.samples["r", 0].token_ids)


@pytest.mark.parametrize("in_flight", ["recompute", "abort"])
def test_deltas_across_a_commit_of_weights(tiny_llama: Path, tmp_path: Path, in_flight: Any) -> None:
    newer = another_version(tiny_llama, tmp_path / "newer")
    reader = Reader(make_engine(tiny_llama), [generate("r", tokens(20), n=2, max_tokens=12)])
    while reader.num_told(("r", 1)) < 4:
        reader.step()
    reader.take(reader.engine.commit_weights(stage(reader.engine, read_tensors(newer)), 7, in_flight))
    reader.drain().check()
    versions = [[span.version for span in sample.weight_versions] for sample in reader.samples.values()]
    assert versions == [[0, 7] if in_flight == "recompute" else [0]] * 2
    assert all(reader.num_told(key) >= 4 for key in reader.samples)


def test_only_a_running_generation_can_be_streamed(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    engine.add(ScoreRequest("score", np.arange(3, 9, dtype=np.int32)))
    for name in ("score", "nobody"):
        with pytest.raises(UnknownRequestError, match=f"request '{name}' is not running, or is a score"):
            engine.stream(name)
