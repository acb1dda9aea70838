"""A token has the same bits by decode, by prefill and by a CUDA graph, for any number of decodes in the same step."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.request import Distribution, GenerateRequest, SampleOutput, ScoreOutput, ScoreRequest
from trueroll.engine.running import executor as executor_module
from trueroll.engine.running.graphs import DecodeGraphs
from trueroll.engine.running.loading import LoadedModel, load_dummy
from trueroll.engine.scheduling.sequence import Chunks

from ..engine.drive import bits, drain, executor_of, generate, run, tokens
from ..engine.running.test_graphs import Recomputed
from .moved import DEVICE, IS_REHEARSAL, cut_config, sized

ALIVE = sized(
    (520, 513, 512, 511, 300, 257, 256, 255, 130, 129, 128, 127, 65, 64, 33, 32, 17, 16, 9, 8, 5, 3, 2, 1),
    (3, 2, 1),
)
"""Number of decoding samples in each step after the prompts."""
SHARED, OWN = sized(704, 16), sized(9, 3)
"""Number of prompt tokens that all prompts share, and number of a prompt's own tokens. The shared tokens fill more than
one partition of keys.
"""
MODELS = sized(("qwen3-0.6b", "qwen2.5-7b"), ("qwen3-0.6b",))
Samples: TypeAlias = dict[tuple[str, int], SampleOutput]


@pytest.fixture(params=MODELS)
def config(request: pytest.FixtureRequest, tmp_path: Path) -> EngineConfig:
    """A model cut to two layers."""
    return config_of(cut_config(request.param, tmp_path))


def config_of(model: Path, **settings: Any) -> EngineConfig:
    """Return a configuration with room for all sequences that decode together."""
    return EngineConfig(
        model=str(model),
        device=str(DEVICE),
        backend="triton",
        max_model_len=sized(1024, 64),
        max_num_seqs=ALIVE[0],
        max_num_batched_tokens=sized(8192, 128),
        **settings,
    )


@pytest.fixture
def loaded(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """The model's weights. In a rehearsal, a fake graph computes the step again."""
    loaded = load_dummy(config)
    if IS_REHEARSAL:
        monkeypatch.setattr(executor_module, "DecodeGraphs", partial(DecodeGraphs, new_capture=partial(Recomputed, [])))
        return dataclasses.replace(loaded, backend=dataclasses.replace(loaded.backend, can_capture=True))
    return loaded


def requests() -> list[GenerateRequest]:
    """Return requests of several temperatures. `ALIVE[i]` of them decode in step i after the prompts' step."""
    shared = tokens(SHARED)
    return [
        generate(
            str(i),
            np.concatenate((shared, tokens(OWN, seed=i))),
            seed=i,
            temperature=float(i % 4 > 0),
            max_tokens=1 + sum(count > i for count in ALIVE),
        )
        for i in range(ALIVE[0])
    ]


def serve(engine: Engine, asked: list[GenerateRequest], monkeypatch: pytest.MonkeyPatch) -> tuple[Samples, list[int]]:
    """Return the samples, and the number of decodes in each decode-only step. The shared prefix is in the cache."""
    run(engine, [generate("first", tokens(SHARED), max_tokens=1)])
    sizes: list[int] = []
    launch = engine._pipeline._launch

    def note(chunks: Chunks, started: float) -> object:
        if all(chunk.start >= chunk.sequence.num_prompt_tokens for chunk in chunks):
            sizes.append(len(chunks))
        return launch(chunks, started)

    monkeypatch.setattr(engine._pipeline, "_launch", note)
    return run(engine, asked), sizes


def score_bits(engine: Engine, asked: list[GenerateRequest], samples: Samples) -> dict[tuple[str, int], bytes]:
    """Return the log-probs that prefill gives for the tokens of each sample."""
    for request in asked:
        token_ids = np.array([*request.prompt_token_ids, *samples[request.id, 0].token_ids], np.int32)
        engine.add(ScoreRequest(request.id, token_ids, Distribution(temperature=request.params.temperature)))
    lengths = {request.id: len(request.prompt_token_ids) for request in asked}
    outputs = [output for output in drain(engine) if isinstance(output, ScoreOutput)]
    return {(out.request_id, 0): out.logprobs[lengths[out.request_id] - 1 :].tobytes() for out in outputs}


def test_decode_has_the_bits_of_prefill_and_of_graphs(
    config: EngineConfig, loaded: LoadedModel, one_step_ahead: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests()
    with_graphs = Engine(config, loaded)
    expected, sizes = serve(with_graphs, asked, monkeypatch)
    assert (
        sizes == list(ALIVE) and executor_of(with_graphs)._graphs is not None and with_graphs.stats().preemptions == 0
    )
    assert min(sample.num_cached_tokens for sample in expected.values()) > SHARED - config.block_size
    without = Engine(config.model_copy(update={"cuda_graphs": False}), loaded)
    found, sizes = serve(without, asked, monkeypatch)
    assert sizes == list(ALIVE) and executor_of(without)._graphs is None
    assert differing(found, expected) == []
    alone = {key: sample for request in asked[:4] for key, sample in run(without, [request]).items()}
    assert differing(alone, expected) == []
    scores = score_bits(without, asked, expected)
    assert len(scores) == len(expected) > 0
    assert [key for key, sample in expected.items() if bits(sample)[1] != scores[key]] == []


def differing(found: Samples, expected: Samples) -> list[Any]:
    assert found
    return [key for key, sample in found.items() if bits(sample) != bits(expected[key])]
