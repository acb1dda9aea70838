"""Log-probs of given tokens, for each token of a sample or of a scored sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import about
from transformers import AutoModelForCausalLM

from trueroll.engine.engine import Engine
from trueroll.engine.request import (
    NO_TARGET,
    Distribution,
    GenerateRequest,
    SampleOutput,
    SamplingParams,
    ScoreOutput,
    ScoreRequest,
)
from trueroll.errors import InvalidRequestError
from trueroll.kernels.training import align, token_log_probs

from .drive import drain, generate, make_engine, run, run_alone, tokens

PROMPT = np.concatenate((tokens(40), tokens(9, seed=1)))
TARGETS = (7, 300, 7, 511, 0)
ASKED: dict[str, dict[str, Any]] = {
    "plain": dict(temperature=0.8),
    "greedy": dict(temperature=0.0, top_logprobs=2),
    "raw": dict(temperature=0.8, logprobs="raw", target_token_ids=TARGETS[:2]),
    "filters": dict(temperature=0.8, top_k=50, top_logprobs=4, repetition_penalty=1.2, min_tokens=2),
}


def ask(name: str, **params: Any) -> GenerateRequest:
    given = dict(n=2, max_tokens=20, seed=11, target_token_ids=TARGETS) | ASKED[name] | params
    return generate(name, PROMPT, **given)


def score(engine: Engine, request: ScoreRequest) -> ScoreOutput:
    engine.add(request)
    [found] = drain(engine)
    assert isinstance(found, ScoreOutput)
    return found


def bits(sample: SampleOutput) -> tuple[Any, ...]:
    columns = sample.logprobs, sample.top_logprobs, sample.target_logprobs
    return sample.token_ids, *(None if each is None else each.tobytes() for each in columns)


@pytest.fixture(scope="module")
def alone(tiny_llama: Path) -> dict[tuple[str, int], SampleOutput]:
    return run_alone(tiny_llama, map(ask, ASKED))


@pytest.mark.usefixtures("steps_ahead")
@pytest.mark.parametrize("settings", [{}, dict(num_blocks=24, block_size=8)], ids=["company", "preempted"])
def test_no_bit_depends_on_the_circumstances(
    settings: dict[str, Any], alone: dict[tuple[str, int], SampleOutput], tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, max_num_batched_tokens=24, max_num_seqs=16, **settings)
    run(engine, [generate("warm", PROMPT, max_tokens=1)])
    again = run(engine, [*map(ask, ASKED), generate("plain one", tokens(30), max_tokens=20)])
    assert {key: bits(again[key]) for key in alone} == {key: bits(sample) for key, sample in alone.items()}
    assert again["plain one", 0].target_logprobs is None
    assert (engine.stats().preemptions > 0) == bool(settings) and engine.stats().prefix_hits > 0, "premise"


def test_targets_change_neither_tokens_nor_log_probs(
    alone: dict[tuple[str, int], SampleOutput], tiny_llama: Path
) -> None:
    for name in ASKED:
        for key, sample in run(make_engine(tiny_llama), [ask(name, target_token_ids=())]).items():
            assert bits(sample)[:3] == bits(alone[key])[:3] and sample.target_logprobs is None


@pytest.mark.parametrize("name", ["plain", "greedy", "filters"])
def test_samples_scores_and_a_trainer_have_the_same_bits(
    name: str, alone: dict[tuple[str, int], SampleOutput], tiny_llama: Path
) -> None:
    sample, params, engine = alone[name, 0], ask(name).params, make_engine(tiny_llama, max_num_batched_tokens=520)
    whole, rows = np.concatenate((PROMPT, np.array(sample.token_ids, np.int32))), len(sample.token_ids)
    targets = np.tile(np.array(TARGETS, np.int32), (rows, 1))
    targets[::3, 1] = NO_TARGET
    request = ScoreRequest(
        "s", whole, params.recorded, top_logprobs=params.top_logprobs, start=len(PROMPT), target_token_ids=targets
    )
    expected = np.array(sample.target_logprobs)
    assert expected.shape == (rows, len(TARGETS)) and np.array_equal(expected[:, 0], expected[:, 2])
    expected[::3, 1] = 0.0
    found = score(engine, request)
    assert found.target_logprobs is not None and found.target_logprobs.tobytes() == expected.tobytes()
    assert found.logprobs.tobytes() == np.array(sample.logprobs).tobytes()
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    align(model)
    ids = torch.from_numpy(whole.astype(np.int64))[None]
    given = torch.full((*ids.shape, len(TARGETS)), NO_TARGET)
    given[0, len(PROMPT) :] = torch.from_numpy(targets.astype(np.int64))
    mask = torch.arange(ids.shape[1])[None] >= len(PROMPT)
    asked: dict[str, Any] = dict(completion_mask=mask, distribution=params, eos_token_ids=engine.info.eos_token_ids)
    computed = token_log_probs(model, ids, **asked, target_ids=given).detach()[0, len(PROMPT) :]
    assert computed.numpy().tobytes() == expected.tobytes()


def test_a_score_in_chunks_and_on_every_backend(tiny_llama: Path, backend: str) -> None:
    targets = np.random.default_rng(0).integers(-1, 512, (len(PROMPT) - 5, 130)).astype(np.int32)
    request = ScoreRequest("s", PROMPT, Distribution(), start=5, target_token_ids=targets)
    whole = score(make_engine(tiny_llama, backend=backend), request)
    chunks = score(make_engine(tiny_llama, backend=backend, max_num_batched_tokens=16, max_num_seqs=8), request)
    assert whole.target_logprobs is not None and chunks.target_logprobs is not None
    assert whole.target_logprobs.tobytes() == chunks.target_logprobs.tobytes()
    assert ((whole.target_logprobs == 0) == (targets == NO_TARGET)).all()
    everything = np.tile(np.arange(512, dtype=np.int32), (len(PROMPT) - 5, 1))
    sums = score(
        make_engine(tiny_llama, backend=backend), ScoreRequest("s", PROMPT, start=5, target_token_ids=everything)
    )
    assert sums.target_logprobs is not None and np.allclose(np.exp(sums.target_logprobs).sum(1), 1, atol=1e-4)


@pytest.mark.parametrize(
    "targets",
    [np.zeros((len(PROMPT), 1)), np.zeros((len(PROMPT) - 1, 0)), np.full((len(PROMPT) - 1, 1), 512), np.zeros(9)],
    ids=["rows", "empty", "vocabulary", "flat"],
)
def test_wrong_targets_are_refused(targets: np.ndarray, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    with pytest.raises(InvalidRequestError, check=about("target_token_ids")):
        engine.add(ScoreRequest("s", PROMPT, target_token_ids=targets.astype(np.int32)))
    with pytest.raises(InvalidRequestError, check=about("target_token_ids")):
        engine.add(generate("g", PROMPT, target_token_ids=[512]))
    with pytest.raises(InvalidRequestError, check=about("target_token_ids")):
        SamplingParams(target_token_ids=(3,), logprobs=None)
