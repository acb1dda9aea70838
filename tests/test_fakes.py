"""The fake engine and its weights behave as the service needs. Each test also runs on the real engine and weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import FakeEngine, FakeStats, FakeWeights

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.request import (
    GenerateRequest,
    Output,
    SampleOutput,
    SamplingParams,
    ScoreOutput,
    ScoreRequest,
    derive_seed,
)
from trueroll.engine.stats import EngineStats
from trueroll.errors import InvalidRequestError, UnknownRequestError
from trueroll.rollout.worker.engine_thread import ServedEngine

PROMPT = np.arange(3, 13, dtype=np.int32)
SEED = 11


@pytest.fixture(params=["real", "fake"])
def engine(request: pytest.FixtureRequest, tiny_llama: Path) -> ServedEngine:
    if request.param == "fake":
        return FakeEngine()
    return Engine(EngineConfig(model=str(tiny_llama), num_blocks=64, num_threads=1, backend="reference"))


def generate(id: str, prompt: np.ndarray = PROMPT, **params: Any) -> GenerateRequest:
    chosen: dict[str, Any] = dict(seed=SEED, max_tokens=6, ignore_eos=True) | params
    return GenerateRequest(id, prompt, SamplingParams(**chosen))


def drain(engine: ServedEngine) -> list[Output]:
    outputs: list[Output] = []
    for _ in range(100):
        outputs += engine.step()
        if not engine.has_unfinished:
            return outputs
    raise AssertionError("the engine still has unfinished requests after 100 steps")


def samples_of(outputs: list[Output]) -> dict[tuple[str, int], SampleOutput]:
    found = [output for output in outputs if isinstance(output, SampleOutput)]
    assert len({(sample.request_id, sample.index) for sample in found}) == len(found), "each sample finishes once"
    return {(sample.request_id, sample.index): sample for sample in found}


def test_every_accepted_request_finishes_once(engine: ServedEngine) -> None:
    assert not engine.has_unfinished
    engine.add(generate("a", n=3))
    engine.add(generate("b", max_tokens=2, logprobs=None))
    engine.add(ScoreRequest("s", PROMPT))
    assert engine.has_unfinished
    outputs = drain(engine)
    samples = samples_of(outputs)
    assert samples.keys() == {("a", 0), ("a", 1), ("a", 2), ("b", 0)}
    seeds = {index: sample.seed for (id, index), sample in samples.items() if id == "a"}
    assert seeds == {index: derive_seed(SEED, index) for index in range(3)}
    for (id, _), sample in samples.items():
        assert sample.finish_reason == "length" and 1 <= len(sample.token_ids) <= 6
        assert (sample.logprobs is None) == (id == "b")
        assert sample.logprobs is None or len(sample.logprobs) == len(sample.token_ids)
        assert [(span.start, span.end) for span in sample.weight_versions] == [(0, len(sample.token_ids))]
        assert sample.weight_versions[0].version == engine.weight_version
    [score] = [output for output in outputs if isinstance(output, ScoreOutput)]
    assert score.finish_reason == "stop" and len(score.logprobs) == len(PROMPT) - 1


@pytest.mark.parametrize(
    "prompt",
    [np.zeros(0, np.int32), np.array([-1, 4], np.int32), np.array([10**6], np.int32), np.full(10**4, 5, np.int32)],
)
def test_a_refused_request_changes_nothing(engine: ServedEngine, prompt: np.ndarray) -> None:
    for request in (generate("r", prompt), ScoreRequest("r", prompt)):
        with pytest.raises(InvalidRequestError) as caught:
            engine.add(request)
        assert caught.value.field == ("prompt_token_ids" if isinstance(request, GenerateRequest) else "token_ids")
    assert not engine.has_unfinished
    engine.add(generate("r"))
    assert samples_of(drain(engine)).keys() == {("r", 0)}


def test_an_aborted_sample_keeps_its_tokens(engine: ServedEngine) -> None:
    engine.add(generate("a", n=2, max_tokens=30))
    for _ in range(4):
        engine.step()
    [cut] = engine.abort("a", 1)
    assert isinstance(cut, SampleOutput) and (cut.index, cut.finish_reason) == (1, "abort")
    assert 0 < len(cut.token_ids) < 29
    for id, index in (("a", 1), ("b", None)):
        with pytest.raises(UnknownRequestError):
            engine.abort(id, index)
    assert samples_of(drain(engine)).keys() == {("a", 0)}
    with pytest.raises(UnknownRequestError):
        engine.abort("a")


def test_deltas_are_a_prefix_of_the_output(engine: ServedEngine) -> None:
    engine.add(generate("a", n=2))
    engine.add(generate("quiet"))
    engine.stream("a")
    with pytest.raises(UnknownRequestError):
        engine.stream("b")
    told: dict[int, list[int]] = {0: [], 1: []}
    outputs: list[Output] = []
    while engine.has_unfinished:
        outputs += engine.step()
        for delta in engine.take_deltas():
            assert delta.request_id == "a" and delta.start == len(told[delta.index]) and delta.token_ids
            told[delta.index] += delta.token_ids
    samples = samples_of(outputs)
    for index, tokens in told.items():
        assert tokens and tokens == samples["a", index].token_ids[: len(tokens)]


@pytest.mark.parametrize("act", ["interrupt", "commit", "sleep"])
def test_interrupt_commit_and_sleep_can_abort_all_requests(engine: ServedEngine, act: str) -> None:
    acts: dict[str, Callable[[Any], list[Output]]] = {
        "interrupt": engine.interrupt,
        "commit": lambda how: engine.commit_weights(engine.weights.new_staging(False), 9, how),
        "sleep": lambda how: engine.sleep(1, ["weights", "kv_cache"], how),
    }
    engine.add(generate("a", n=2, max_tokens=30))
    engine.add(ScoreRequest("s", PROMPT))
    engine.step()
    with pytest.raises(RuntimeError):
        acts[act]("drain")
    ended = acts[act]("abort")
    assert {output.request_id for output in ended} <= {"a", "s"} and ended
    if act == "sleep":
        engine.wake_up(["weights", "kv_cache"])
    if act == "commit":
        assert engine.weight_version == 9


def test_a_commit_can_keep_old_kv(engine: ServedEngine) -> None:
    engine.add(generate("a", n=2, max_tokens=9))
    engine.add(generate("one", one_version=True, max_tokens=4))
    engine.step()
    engine.step()
    before = engine.weight_version
    with pytest.raises(RuntimeError, match="one_version"):
        engine.commit_weights(engine.weights.new_staging(False), before + 1, "keep")
    assert engine.weight_version == before
    engine.abort("one")
    outputs = engine.commit_weights(engine.weights.new_staging(False), before + 1, "keep")
    engine.add(generate("later"))
    samples = samples_of(outputs + drain(engine))
    for (id, _), sample in samples.items():
        spans = [(span.version, span.end) for span in sample.old_kv]
        assert spans == ([(before, len(sample.token_ids))] if id == "a" else [])
        assert id != "a" or 0 < sample.old_kv[0].start < sample.old_kv[0].end
    assert samples["later", 0].is_exact and not samples["a", 1].is_exact


def test_stats_have_the_same_names(engine: ServedEngine) -> None:
    names = [field.name for field in dataclasses.fields(EngineStats)]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(FakeStats) if field.name != "checksums")
    assert {"weights", "kv_cache"} <= engine.memory().keys()
    assert {"backend", "backend_note", "max_model_len", "eos_token_ids"} <= dataclasses.asdict(engine.info).keys()
    before = engine.stats().computed_tokens
    engine.add(generate("a"))
    drain(engine)
    assert engine.stats().computed_tokens > before


def test_a_commit_replaces_the_weights(engine: ServedEngine) -> None:
    weights = engine.weights
    name = next(iter(weights.shapes))
    before = weights.served(name).clone()
    staging = weights.new_staging(False)
    rows = torch.arange(before.numel()).reshape(before.shape).to(before.dtype) % 7
    staging.rows(name, 0, len(before)).copy_(rows)
    assert torch.equal(weights.served(name), before) and not torch.equal(rows, before), "the premise"
    assert staging.num_bytes > 0
    engine.commit_weights(staging, 4, "drain")
    assert torch.equal(weights.served(name), rows) and engine.weight_version == 4
    changes = weights.new_staging(False)
    changes.put(name, torch.tensor([0, 3]), torch.tensor([5.0, 6.0], dtype=before.dtype))
    engine.commit_weights(changes, 5, "drain")
    expected = rows.flatten().index_put((torch.tensor([0, 3]),), torch.tensor([5.0, 6.0], dtype=before.dtype))
    assert torch.equal(weights.served(name).flatten(), expected)


def test_the_fake_weights_have_the_attributes_of_a_push_target() -> None:
    weights = FakeWeights({"a": (3, 2)}, "float32", {"b": "a"}, ["c"])
    assert (weights.dtype, weights.shapes, weights.tied, weights.ignored) == (
        "float32",
        {"a": (3, 2)},
        {"b": "a"},
        {"c"},
    )
