"""Decode steps from inputs that stay where they are, as CUDA graphs need them: the ladder of sizes, padding, bits.

There is no CUDA here: in place of a graph the computation runs again at each replay, from the same inputs into the same
outputs. It finds what a graph would get wrong, except for kernels that a graph cannot hold; tests/gpu has graphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny import make_tiny_model
from trueroll.engine import engine as engine_module
from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.graphs import DecodeGraphs, Outputs
from trueroll.engine.loading import LoadedModel, load_model
from trueroll.engine.model_runner import ModelRunner

from .drive import bits, generate, run, tokens


class Recomputed:
    """`log`: "capture" and "replay", in order. Inputs and outputs never move."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def __call__(self, compute: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], object]]:
        outputs = compute()
        self._log.append("capture")

        def replay() -> None:
            self._log.append("replay")
            for place, found in zip(outputs, compute(), strict=True):
                place.copy_(found)

        return outputs, replay


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = make_tiny_model(
        "qwen3", tmp_path_factory.mktemp("graphs") / "tiny", dtype="bfloat16", num_hidden_layers=1, vocab_size=64
    )
    return EngineConfig(
        model=str(folder), backend="triton", num_blocks=64, max_model_len=64, max_num_seqs=6, num_threads=1
    )


@pytest.fixture(scope="module")
def loaded(config: EngineConfig) -> LoadedModel:
    return load_model(config)


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def with_graphs(
    config: EngineConfig, loaded: LoadedModel, log: list[str], steps_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Engine]:
    """Makes engines whose decode steps are graphs."""
    graphs = partial(DecodeGraphs, new_capture=partial(Recomputed, log))
    monkeypatch.setattr(engine_module, "DecodeGraphs", graphs)
    capturing = dataclasses.replace(loaded, backend=dataclasses.replace(loaded.backend, can_capture=True))
    return lambda **changes: Engine(config.model_copy(update=changes), capturing)


def requests() -> list[Any]:
    """Up to four samples at once, sampled and greedy, raw and not, with one that has to leave the graphs: a filter."""
    prompt = partial(tokens, vocab_size=64)
    return [
        generate("sampled", prompt(3), n=2, max_tokens=4),
        generate("greedy", prompt(4, seed=1), temperature=0.0, max_tokens=8, logprobs="raw"),
        generate("filtered", prompt(2, seed=3), top_k=3, max_tokens=2),
    ]


def test_graphs_change_no_bit(
    config: EngineConfig, loaded: LoadedModel, with_graphs: Callable[..., Engine], log: list[str]
) -> None:
    expected = run(Engine(config, loaded), requests())
    assert log == []
    found = run(with_graphs(), requests())
    assert {key: bits(sample) for key, sample in found.items()} == {k: bits(s) for k, s in expected.items()}
    assert log.count("replay") > log.count("capture") > 1, "one graph for each power of two that was needed"


def test_graphs_are_off_when_they_are_not_wanted(with_graphs: Callable[..., Engine], log: list[str]) -> None:
    run(with_graphs(cuda_graphs=False), requests())
    assert log == []


def test_padding_touches_no_block_of_the_cache(with_graphs: Callable[..., Engine], log: list[str]) -> None:
    engine = with_graphs()
    run(engine, [generate("r", tokens(3, vocab_size=64), n=3, max_tokens=3)])
    engine.invalidate_prefix_cache()
    caches = [cache for pair in engine._runner.kv_caches for cache in pair]
    before = [cache.clone() for cache in caches]
    with torch.inference_mode():
        engine._graphs._graphs[4].replay()
    inputs = engine._graphs._graphs[4].inputs
    assert inputs.slots[3] == 64 * 16, "three rows of four are filled"
    for cache, was in zip(caches, before, strict=True):
        assert torch.equal(cache[:64], was[:64])


def test_a_sleep_forgets_the_graphs(with_graphs: Callable[..., Engine], log: list[str]) -> None:
    engine = with_graphs()
    request = generate("r", tokens(3, vocab_size=64), n=2, max_tokens=3)
    first = run(engine, [request])
    captures = log.count("capture")
    engine.sleep(1, ("weights", "kv_cache"), "recompute")
    engine.wake_up(("weights", "kv_cache"))
    second = run(engine, [request])
    assert log.count("capture") == 2 * captures > 0
    assert {key: bits(sample) for key, sample in second.items()} == {k: bits(s) for k, s in first.items()}


def test_a_replay_reads_nothing_but_its_inputs(
    with_graphs: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step in a graph asks the runner for nothing that a captured graph would have kept from an earlier step."""
    engine = with_graphs()
    eager: list[int] = []
    compute = ModelRunner.run

    def note(runner: ModelRunner, chunks: Any, unseen: Any = None) -> Tensor:
        eager.append(len(chunks))
        return compute(runner, chunks, unseen)

    monkeypatch.setattr(ModelRunner, "run", note)
    run(engine, [generate("r", tokens(3, vocab_size=64), max_tokens=4)])
    assert len(eager) == 1, "only the prompt"
