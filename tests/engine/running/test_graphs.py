"""Decode steps from inputs that stay where they are, as CUDA graphs need them: which steps, the sizes, padding, bits.

There is no CUDA here: in place of a graph the computation runs again at each replay, from the same inputs into the same
outputs. That finds what a graph would get wrong, except for kernels that a graph cannot hold; tests/gpu has graphs.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor

from tiny import make_tiny_model
from trueroll.engine import engine as engine_module
from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.models.decoder import ModelInput, ModelOutput
from trueroll.engine.request import Output, Request, SampleOutput, ScoreRequest
from trueroll.engine.running.graphs import DecodeGraphs, Outputs
from trueroll.engine.running.loading import load_model
from trueroll.kernels import reference
from trueroll.kernels.contract import AttentionBatch

from ..drive import bits, drain, generate, run, tokens, top_bits

NUM_BLOCKS, BLOCK_SIZE = 64, 4
prompt = partial(tokens, vocab_size=64)
Found: TypeAlias = dict[Any, tuple[bytes, ...]]


class Recomputed:
    """In place of a graph. `log`: "capture" and "replay", in order."""

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
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs") / "tiny"
    return make_tiny_model("qwen3", folder, dtype="bfloat16", num_hidden_layers=1, vocab_size=64)


@pytest.fixture
def log() -> list[str]:
    return []


MakeEngine: TypeAlias = Callable[..., Engine]


@pytest.fixture
def make_engine(model: Path, log: list[str], steps_ahead: int, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """Makes engines, whose decode steps are graphs if they are told so."""
    attention = reference.paged_attention

    def read_lens(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, *options: Any) -> Tensor:
        if batch.lens is not None:
            batch = dataclasses.replace(batch, context_lens=batch.lens.tolist())
        return attention(q, k_cache, v_cache, batch, *options)

    monkeypatch.setattr(reference, "paged_attention", read_lens)
    monkeypatch.setattr(engine_module, "DecodeGraphs", partial(DecodeGraphs, new_capture=partial(Recomputed, log)))

    def make(cuda_graphs: bool, **changes: Any) -> Engine:
        settings = dict(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=64, max_num_seqs=6, num_threads=1)
        settings |= dict(backend="reference", cuda_graphs=cuda_graphs) | changes
        config = EngineConfig(model=str(model), **settings)
        loaded = load_model(config)
        return Engine(
            config, dataclasses.replace(loaded, backend=dataclasses.replace(loaded.backend, can_capture=True))
        )

    return make


def serve(engine: Engine, requests: list[Request]) -> Found:
    for request in requests:
        engine.add(request)
    return {key_of(output): what(output) for output in drain(engine)}


def key_of(output: Output) -> Any:
    return (output.request_id, output.index) if isinstance(output, SampleOutput) else output.request_id


def what(output: Output) -> tuple[bytes, ...]:
    of_tokens = bits(output) if isinstance(output, SampleOutput) else (output.logprobs.tobytes(),)
    return of_tokens if output.entropy is None else (*of_tokens, *top_bits(output))


def mixed_requests() -> list[Request]:
    """Sampled and greedy, raw and not, with two that have to leave the graphs: a filter, and `top_logprobs`."""
    return [
        generate("sampled", prompt(3), n=2, max_tokens=4),
        generate("greedy", prompt(4, seed=1), temperature=0.0, max_tokens=8, logprobs="raw"),
        generate("filtered", prompt(2, seed=3), top_k=3, max_tokens=2),
        generate("recorded", prompt(2, seed=4), top_logprobs=3, max_tokens=2),
    ]


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_graphs_change_no_bit(make_engine: MakeEngine, log: list[str], backend: str) -> None:
    expected = serve(make_engine(False, backend=backend), mixed_requests())
    assert log == []
    assert serve(make_engine(True, backend=backend), mixed_requests()) == expected
    assert log.count("replay") > log.count("capture") > 1, "one graph for each power of two that was needed"


@pytest.mark.parametrize(
    "beside", [ScoreRequest("beside", prompt(2, seed=4)), generate("beside", prompt(9, seed=4), max_tokens=3)]
)
def test_a_row_with_two_draws_beside_one_with_none(make_engine: MakeEngine, beside: Request) -> None:
    """A step of two tokens, with two draws: both are after the first token."""
    settings = dict(max_num_batched_tokens=2, max_num_seqs=2)
    requests = [generate("group", prompt(1), n=2, max_tokens=3), beside]
    expected = serve(make_engine(False, **settings), requests)
    assert len(expected) == 3 and serve(make_engine(True, **settings), requests) == expected


@pytest.mark.parametrize("seed", range(4))
def test_any_mixture_of_requests(make_engine: MakeEngine, log: list[str], seed: int) -> None:
    rng = random.Random(seed)
    settings = dict(num_blocks=24, max_num_batched_tokens=rng.choice((9, 30)))

    def some_request(i: int) -> Request:
        if rng.random() < 0.2:
            return ScoreRequest(str(i), prompt(rng.randrange(2, 20), seed=i % 5))
        ending = dict(min_tokens=2, stop_token_ids=(7, 9))
        options = rng.choice((dict(), dict(), dict(temperature=0.0), ending, dict(top_k=5), dict(top_logprobs=2)))
        return generate(
            str(i), prompt(rng.randrange(1, 20), seed=i % 5), n=rng.randrange(1, 4), max_tokens=12, **options
        )

    requests = [some_request(i) for i in range(16)]
    expected = serve(make_engine(False, **settings), requests)
    assert log == []
    assert serve(make_engine(True, **settings), requests) == expected
    assert "replay" in log


def test_padding_touches_no_block_of_the_cache(make_engine: MakeEngine) -> None:
    engine = make_engine(True)
    run(engine, [generate("r", prompt(3), n=3, max_tokens=3)])
    graph = engine._graphs._graphs[4]
    assert graph.inputs.slots[3] == NUM_BLOCKS * BLOCK_SIZE, "premise: three rows of four were filled"
    caches = [cache for pair in engine._runner.kv_caches for cache in pair]
    before = [cache[:NUM_BLOCKS].clone() for cache in caches]
    with torch.inference_mode():
        for column in (graph.inputs.slots, graph.inputs.tables):
            column.copy_(torch.full_like(column, int(column[3].flatten()[0])))
        graph.replay()
    for cache, was in zip(caches, before, strict=True):
        assert torch.equal(cache[:NUM_BLOCKS].view(torch.int16), was.view(torch.int16))


def test_a_sleep_forgets_the_graphs(make_engine: MakeEngine, log: list[str]) -> None:
    engine = make_engine(True)
    request = generate("r", prompt(3), n=2, max_tokens=3)
    first = serve(engine, [request])
    captures = log.count("capture")
    engine.sleep(1, ("weights", "kv_cache"), "recompute")
    engine.wake_up(("weights", "kv_cache"))
    assert serve(engine, [request]) == first
    assert log.count("capture") == 2 * captures > 0


def test_only_the_prompt_is_computed_outside_of_a_graph(
    make_engine: MakeEngine, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, lens = make_engine(True), []
    forward = engine._runner.model.forward

    def note(tokens: ModelInput) -> ModelOutput:
        lens.append(len(tokens.token_ids))
        return forward(tokens)

    monkeypatch.setattr(engine._runner.model, "forward", note)
    run(engine, [generate("r", prompt(7), max_tokens=4)])
    assert lens == [7, 1, 1, 1, 1] and log == ["capture", "replay", "replay", "replay"]
    assert np.sum(lens) == 7 + 4, "a capture computes once more"
