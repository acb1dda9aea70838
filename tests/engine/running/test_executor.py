"""The executor protocol: a process that receives only the model and the steps computes the same bits."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny import make_tiny_model
from trueroll.engine import engine as engine_module
from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.outputs.routes import RouteFormat
from trueroll.engine.request import Distribution, Request, SampleOutput, ScoreRequest, Tag
from trueroll.engine.running.executor import Computation, Executor, LocalExecutor, NoPeers, StepResults
from trueroll.engine.running.loading import EngineInfo, LoadedModel, load_model
from trueroll.engine.running.mtp import DraftStep
from trueroll.engine.running.sampler import Drawn
from trueroll.engine.running.step import Step
from trueroll.engine.running.weights import WeightStaging, WeightStore

from ..checkpoints import stage
from ..drive import generate, tokens


def sent(value: Any) -> Any:
    """Return a copy of a value by encoding it to bytes and decoding it. Raise TypeError for a value that a message
    cannot hold.
    """
    if isinstance(value, np.ndarray):
        return np.frombuffer(bytearray(value.tobytes()), value.dtype).reshape(value.shape)
    if isinstance(value, array):
        return array(value.typecode, value.tobytes())
    if isinstance(value, Distribution):
        return type(value)(**value.model_dump())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        return type(value)(**{name: sent(getattr(value, name)) for name in fields})
    if isinstance(value, Mapping):
        return {key: sent(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [sent(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    raise TypeError(f"expected what a message can hold, found {type(value).__name__}")


class Both:
    """A step in flight on a leader and on a follower. Returns the follower's results, which must equal the leader's."""

    def __init__(self, leader: Computation, follower: Computation) -> None:
        self._leader, self._follower = leader, follower

    def wait(self) -> StepResults:
        own, others = self._leader.wait(), self._follower.wait()
        assert contents(own.drawn) == contents(others.drawn) and own.expert_tokens == others.expert_tokens
        assert [[bits(c) for c in columns] for columns in own.scores] == [[bits(c) for c in cs] for cs in others.scores]
        assert (own.routes is None) == (others.routes is None)
        assert own.routes is None or others.routes is None or bytes(own.routes) == bytes(others.routes)
        return others


def contents(drawn: Drawn | None) -> list[object] | None:
    return drawn and [bits(each) if isinstance(each, np.ndarray) else each for each in drawn]


def bits(column: np.ndarray) -> bytes:
    return np.ascontiguousarray(column).tobytes()


class Leader:
    """A leader that computes with its own weights, and makes a follower with its own copy of the weights compute the
    same steps. Counts the steps.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel) -> None:
        self._own = LocalExecutor(config, loaded)
        self._follower = LocalExecutor(config, load_model(config))
        self.steps = 0

    @property
    def info(self) -> EngineInfo:
        return self._own.info

    @property
    def weights(self) -> WeightStore:
        return self._own.weights

    @property
    def adapters(self) -> None:
        return None

    @property
    def routes(self) -> RouteFormat | None:
        return self._own.routes

    @property
    def runs_ahead(self) -> bool:
        return self._own.runs_ahead

    @property
    def peers(self) -> NoPeers:
        return NoPeers()  # the follower is in this process

    @property
    def encoder(self) -> None:
        return None

    def check_ready(self) -> None:
        self._own.check_ready()
        self._follower.check_ready()

    def compute(self, step: Step) -> Both:
        self.steps += 1
        return Both(self._own.compute(step), self._follower.compute(sent(step)))

    def draft(self, step: DraftStep) -> list[list[int]]:
        drafts = self._own.draft(step)
        assert self._follower.draft(step) == drafts
        return drafts

    def commit(self, staging: WeightStaging) -> None:
        self._own.commit(staging)
        theirs = self._follower.weights.new_staging(in_place=False)
        for name, shape in self.weights.shapes.items():
            theirs.rows(name, 0, shape[0]).copy_(self.weights.served(name))
        self._follower.commit(theirs)

    def sleep(self, level: int, tags: Collection[Tag]) -> None:
        self._own.sleep(level, tags)
        self._follower.sleep(level, tags)

    def wake_up(self, tags: Collection[Tag]) -> None:
        self._own.wake_up(tags)
        self._follower.wake_up(tags)

    def memory(self) -> dict[str, int]:
        return self._own.memory()


def requests(has_experts: bool) -> list[Request]:
    prompt = tokens(40)
    return [
        generate("group", prompt, n=3, max_tokens=12, return_routed_experts=has_experts),
        generate("filters", tokens(17, seed=1), max_tokens=9, top_k=20, top_p=0.9, logprobs="raw", top_logprobs=3),
        generate("banned", tokens(5, seed=2), max_tokens=8, min_tokens=4, stop_token_ids=[3, 7], temperature=0.7),
        generate("greedy", prompt[:30], max_tokens=10, temperature=0.0, top_logprobs=0),
        ScoreRequest("score", tokens(33, seed=3), Distribution(temperature=0.5, top_k=40), top_logprobs=2),
    ]


def serve(engine: Engine) -> list[Any]:
    """Serve requests with a commit and a sleep midway, twice. Return all outputs."""
    outputs = []
    for round in range(2):
        for request in requests(engine.info.num_experts > 0):
            engine.add(request)
        for step in range(200):
            outputs += engine.step()
            if step == 6 and round == 0:
                changed = {name: engine.weights.served(name) * 1.25 for name in engine.weights.shapes}
                outputs += engine.commit_weights(stage(engine, changed, step=64), 1, "recompute")
            if step == 9 and round == 0:
                outputs += engine.sleep(1, ["weights", "kv_cache"], "recompute")
                engine.wake_up(["weights", "kv_cache"])
            if not engine.has_unfinished:
                break
        engine.check_integrity()
    return sorted((comparable(output) for output in outputs), key=repr)


def comparable(output: Any) -> dict[str, Any]:
    values = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    values |= {"index": output.index} if isinstance(output, SampleOutput) else {}
    return {name: bits(value) if isinstance(value, np.ndarray) else value for name, value in values.items()}


@pytest.fixture(params=["qwen3", "qwen3_5", "qwen3_moe"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> EngineConfig:
    """A dense model, a hybrid or a mixture, in too few blocks."""
    folder = make_tiny_model(request.param, tmp_path / request.param)
    return EngineConfig(
        model=str(folder), backend="cpu", block_size=8, num_blocks=16, max_num_seqs=6, max_num_batched_tokens=24
    )


def test_a_follower_that_gets_only_the_steps_computes_the_same_bits(
    config: EngineConfig, steps_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = serve(Engine(config))
    leaders: list[Leader] = []

    def lead(*parts: Any) -> Leader:
        leaders.append(Leader(*parts))
        return leaders[-1]

    monkeypatch.setattr(engine_module, "LocalExecutor", lead)
    engine = Engine(config)
    assert serve(engine) == expected and len(expected) == 2 * 7
    assert leaders[0].steps == engine.stats().steps > 20 and engine.stats().preemptions > 0


def test_leader_and_local_executor_implement_the_protocol(config: EngineConfig) -> None:
    loaded = load_model(config)
    assert isinstance(LocalExecutor(config, loaded), Executor) and isinstance(Leader(config, loaded), Executor)
    assert not isinstance(object(), Executor)


def test_a_value_that_no_message_holds_is_detected() -> None:
    with pytest.raises(TypeError, match="found Engine"):
        sent([1, {"engine": Engine.__new__(Engine)}])
