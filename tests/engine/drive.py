"""Small helpers that drive an engine in tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.request import (
    Distribution,
    GenerateRequest,
    Output,
    Request,
    SampleOutput,
    SamplingParams,
    ScoreOutput,
    ScoreRequest,
)
from trueroll.engine.running.executor import LocalExecutor


def make_engine(model: Path, **settings: Any) -> Engine:
    return Engine(EngineConfig(model=str(model), **({"num_blocks": 512, "num_threads": 1} | settings)))


def executor_of(engine: Engine) -> LocalExecutor:
    assert isinstance(engine._executor, LocalExecutor)
    return engine._executor


def tokens(count: int, seed: int = 0, vocab_size: int = 512) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, vocab_size, count).astype(np.int32)


def generate(id: str, prompt: np.ndarray, **params: Any) -> GenerateRequest:
    return GenerateRequest(id, prompt, SamplingParams(**({"seed": 5, "max_tokens": 12, "ignore_eos": True} | params)))


def drain(engine: Engine) -> list[Output]:
    """Step until all requests have finished, then check that all blocks are accounted for. Return the outputs."""
    outputs: list[Output] = []
    while engine.has_unfinished:
        outputs += engine.step()
    engine.check_integrity()
    return outputs


def samples_of(outputs: Collection[Output]) -> list[SampleOutput]:
    """Return the outputs. Every output must be a sample."""
    samples = [output for output in outputs if isinstance(output, SampleOutput)]
    assert len(samples) == len(outputs)
    return samples


def run(engine: Engine, requests: Iterable[Request]) -> dict[tuple[str, int], SampleOutput]:
    """Add all requests at once and finish them. Return their samples by (request id, index)."""
    for request in requests:
        engine.add(request)
    outputs = [output for output in drain(engine) if isinstance(output, SampleOutput)]
    samples = {(output.request_id, output.index): output for output in outputs}
    assert len(samples) == len(outputs), "each sample is finished once"
    return samples


def run_alone(model: Path, requests: Iterable[Request]) -> dict[tuple[str, int], SampleOutput]:
    """Serve each request alone, on a new engine. Return the samples by (request id, index)."""
    return {key: sample for request in requests for key, sample in run(make_engine(model), [request]).items()}


def score(engine: Engine, token_ids: np.ndarray, **distribution: Any) -> np.ndarray:
    """Return the log-probs of `token_ids`: float32 [len(token_ids) - 1]."""
    engine.add(ScoreRequest("score", token_ids, Distribution(**distribution)))
    [output] = drain(engine)
    assert isinstance(output, ScoreOutput)
    return output.logprobs


def bits(output: SampleOutput) -> tuple[tuple[int, ...], bytes]:
    """Return the parts of a sample that must be bitwise equal: tokens, and log-probs as bytes."""
    assert output.logprobs is not None and len(output.token_ids) == len(output.logprobs) > 0
    return tuple(output.token_ids), output.logprobs.tobytes()


def top_bits(output: SampleOutput | ScoreOutput, start: int = 0) -> tuple[bytes, bytes, bytes]:
    """Return the bytes of the columns that `top_logprobs` recorded, from entry `start` on."""
    columns = output.entropy, output.top_token_ids, output.top_logprobs
    assert [column.dtype for column in columns if column is not None] == [np.float32, np.int32, np.float32]
    entropy, token_ids, logprobs = (column[start:].tobytes() for column in columns if column is not None)
    return entropy, token_ids, logprobs
