"""Deferred tokens: samples receive them before anything reads the samples, so outputs do not change."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trueroll.engine import pipeline
from trueroll.engine.engine import Engine
from trueroll.engine.request import Output, SampleDelta
from trueroll.engine.scheduling.deferred import MOST, Deferred
from trueroll.errors import UnknownRequestError

from ..drive import generate, make_engine, tokens

PARAMS: list[dict[str, Any]] = [
    *[{}] * 4,
    dict(stop_token_ids=tuple(range(3, 120))),  # too many to look for in each step
    dict(stop_token_ids=tuple(range(3, 11)), min_tokens=9),
    dict(ignore_eos=False),
    dict(logprobs=None),
    dict(top_logprobs=2),
    dict(presence_penalty=0.5),
    dict(one_version=True),
]


def test_tokens_come_back_in_order_and_only_stored_ones() -> None:
    deferred = Deferred(4)
    deferred.open(1, frozenset({7}))
    deferred.open(3, frozenset())
    deferred.open(2, frozenset(range(100)))

    def add(tokens: list[int], may: list[bool] | None = None) -> list[bool]:
        may_defer = np.array([True] * 4 if may is None else may)
        logprobs = -np.array(tokens, np.float32)
        return deferred.add(np.arange(4), np.array(tokens), logprobs, may_defer).tolist()

    assert add([5, 5, 5, 5]) == [False, True, False, True], "lanes 0 and 2 are closed"
    assert add([6, 7, 8, 7]) == [False] * 4, "7 may end the sample of lane 1, and so ends the storing in all lanes"
    assert add([6, 9, 8, 8], [True, True, True, False]) == [False, True, False, False]
    assert (deferred.last(1), deferred.last(3)) == (9, 5)
    found = deferred.take(1)
    assert np.frombuffer(found[0], np.int32).tolist() == [5, 9]
    assert np.frombuffer(found[1], np.float32).tolist() == [-5, -9]
    deferred.close(1)
    assert add([7, 7, 7, 7]) == [False, False, False, True], "no open lane ends with 7 any more"
    assert [add([0] * 4)[3] for _ in range(MOST)] == [True] * (MOST - 2) + [False] * 2, "the lane is full"
    with pytest.raises(AssertionError, match="tokens of lane 3 are not delivered"):
        deferred.close(3)


def never(engine: Engine) -> None:
    engine._scheduler.running.lanes.allow_deferral = lambda sequence: None  # type: ignore[method-assign]


def contents(output: Output | SampleDelta) -> list[object]:
    values = [getattr(output, field.name) for field in dataclasses.fields(output)]
    return [(each.dtype, each.shape, each.tobytes()) if isinstance(each, np.ndarray) else each for each in values]


class Calls:
    """Random calls, the same for each engine with the same seed, and everything that they return."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.random, self.number = engine, random.Random(seed), 0
        self.found: list[list[Output] | list[SampleDelta]] = []
        self.most_deferred = 0

    def add(self) -> None:
        params = self.random.choice(PARAMS) | dict(n=self.random.randint(1, 3), seed=self.number)
        prompt = tokens(self.random.randint(1, 40), self.number % 3)
        self.engine.add(generate(str(self.number), prompt, max_tokens=self.random.randint(9, 60), **params))
        self.number += 1

    def step(self) -> None:
        for _ in range(self.random.randint(1, 12)):
            self.found.append(self.engine.step())
            self.found.append(self.engine.take_deltas())
            self.most_deferred = max(self.most_deferred, self.engine._scheduler.running.lanes.deferred.counts.max())
            self.engine.check_integrity()

    def abort(self) -> None:
        self.of_one(lambda id: self.found.append(self.engine.abort(id)))

    def stream(self) -> None:
        self.of_one(self.engine.stream)

    def interrupt(self) -> None:
        self.found.append(self.engine.interrupt("recompute"))

    def settle(self) -> None:
        self.found.append(self.engine.settle())

    def of_one(self, call: Callable[[str], object]) -> None:
        try:
            call(str(max(0, self.number - self.random.randint(1, 5))))
        except UnknownRequestError:
            self.found.append([])

    def run(self) -> None:
        names = [self.add] * 6 + [self.step] * 8 + [self.abort, self.stream, self.interrupt, self.settle]
        for _ in range(80):
            self.random.choice(names)()
        while self.engine.has_unfinished:
            self.step()


@pytest.mark.usefixtures("steps_ahead")
@pytest.mark.parametrize("settings", [{}, dict(num_blocks=10, max_num_seqs=6)], ids=["roomy", "preempts"])
def test_deferred_tokens_change_no_output(
    tiny_llama: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_FEWEST_TO_DEFER", 1)
    num_recomputed = 0
    for seed in range(2):
        engines = [make_engine(tiny_llama, max_model_len=128, **settings) for _ in range(2)]
        never(engines[1])
        plain, immediate = (Calls(engine, seed) for engine in engines)
        plain.run()
        immediate.run()
        assert plain.most_deferred > 1 and immediate.most_deferred == 0, "premise"
        for found, expected in zip(plain.found, immediate.found, strict=True):
            assert [contents(each) for each in found] == [contents(each) for each in expected]
        num_recomputed += engines[0].stats().preemptions
    assert bool(num_recomputed) == bool(settings), "premise"
