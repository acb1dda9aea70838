"""Kept sets: which tokens filters and bans left to draw, for trainers that are not aligned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from trueroll.engine.request import (
    Distribution,
    GenerateRequest,
    Output,
    SampleOutput,
    ScoreOutput,
    ScoreRequest,
    columns_of,
    cut_columns,
)
from trueroll.engine.running.sampler import kept_ids, pack_on_device, pack_on_host, packed_bits

from .drive import drain, generate, make_engine, run, run_alone, tokens

PROMPT = np.concatenate((tokens(40), tokens(9, seed=1)))
VOCABULARY = 512
STOPS = [*range(300, 400)]
FILTERS: dict[str, Any] = dict(top_k=50, top_p=0.9, min_p=0.05)
ASKED: dict[str, dict[str, Any]] = {
    "top_k": dict(temperature=0.8, top_k=20),
    "top_p": dict(temperature=0.8, top_p=0.9, logprobs="temperature", n=1),
    "all": dict(temperature=0.7, **FILTERS, top_logprobs=3, target_token_ids=(7,)),
    "bans": dict(min_tokens=5, stop_token_ids=STOPS, repetition_penalty=1.1),
    "neutral": dict(n=1, repetition_penalty=1.1),
}


def ask(name: str, **params: Any) -> GenerateRequest:
    return generate(
        name, PROMPT, **(dict(n=2, max_tokens=12, seed=11, return_sampling_mask=True) | ASKED[name] | params)
    )


def bits(sample: SampleOutput) -> dict[str, Any]:
    return {name: values.tobytes() for name, values in columns_of(sample).items()} | {"ids": sample.token_ids}


def sets_of(sample: SampleOutput) -> list[np.ndarray]:
    offsets, ids = sample.kept_offsets, sample.kept_token_ids
    assert offsets is not None and ids is not None
    assert (offsets.dtype, ids.dtype) == (np.int64, np.int32) and len(offsets) == len(sample.token_ids) + 1
    return np.split(ids, offsets[1:-1])


@pytest.fixture(scope="module")
def alone(tiny_llama: Path) -> dict[tuple[str, int], SampleOutput]:
    return run_alone(tiny_llama, map(ask, ASKED))


@pytest.mark.usefixtures("steps_ahead")
@pytest.mark.parametrize("settings", [{}, dict(num_blocks=20, block_size=8)], ids=["company", "preempted"])
def test_no_bit_depends_on_the_circumstances(
    settings: dict[str, Any], alone: dict[tuple[str, int], SampleOutput], tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, max_num_batched_tokens=24, max_num_seqs=16, **settings)
    run(engine, [generate("warm", PROMPT, max_tokens=1)])
    plain = generate("plain one", tokens(30), max_tokens=20, **FILTERS)
    again = run(engine, [*map(ask, ASKED), plain])
    assert {key: bits(again[key]) for key in alone} == {key: bits(sample) for key, sample in alone.items()}
    assert again["plain one", 0].kept_counts is None and again["plain one", 0].kept_offsets is None
    assert (engine.stats().preemptions > 0) == bool(settings) and engine.stats().prefix_hits > 0, "premise"


def test_a_record_changes_neither_tokens_nor_log_probs(
    alone: dict[tuple[str, int], SampleOutput], tiny_llama: Path
) -> None:
    for key, sample in run(make_engine(tiny_llama), [ask("all", return_sampling_mask=False)]).items():
        expected = bits(alone[key])
        assert bits(sample) == {name: value for name, value in expected.items() if not name.startswith("kept")}


@pytest.mark.parametrize("name", [name for name in ASKED if name != "neutral"])
def test_sets_and_masses_are_those_of_float64_arithmetic(
    name: str, alone: dict[tuple[str, int], SampleOutput], tiny_llama: Path
) -> None:
    """The premise is the distribution over all tokens, with edits and temperature alone."""
    sample, params, engine = alone[name, 0], ask(name).params, make_engine(tiny_llama)
    whole = np.concatenate((PROMPT, np.array(sample.token_ids, np.int32)))
    unfiltered = params.model_copy(update=dict(logprobs="processed", top_k=-1, top_p=1.0, min_p=0.0)).recorded
    engine.add(ScoreRequest("s", whole, unfiltered, start=len(PROMPT), target_token_ids=_everything(sample)))
    [scored] = drain(engine)
    assert isinstance(scored, ScoreOutput) and scored.target_logprobs is not None
    before = scored.target_logprobs.astype(np.float64)
    assert sample.kept_log_mass is not None and sample.logprobs is not None
    for row, (found, log_probs) in enumerate(zip(sets_of(sample), before, strict=True)):
        kept = _kept(log_probs, params.top_k, params.top_p, params.min_p)
        assert found.tolist() == (kept.tolist() if len(kept) < VOCABULARY else [])
        mass = np.log(np.exp(log_probs[kept]).sum())
        assert abs(sample.kept_log_mass[row] - mass) < 2e-6
        if params.logprobs == "processed":
            token = sample.token_ids[row]
            assert abs(scored.logprobs[row] - sample.kept_log_mass[row] - sample.logprobs[row]) < 2e-6
            assert token in found or not len(found)
    if name == "bans":
        assert sample.kept_counts is not None
        assert sample.kept_counts.tolist() == [VOCABULARY - len(STOPS)] * 5 + [0] * (len(sample.token_ids) - 5)


def _everything(sample: SampleOutput) -> np.ndarray:
    return np.tile(np.arange(VOCABULARY, dtype=np.int32), (len(sample.token_ids), 1))


def _kept(log_probs: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The ids that the filters keep, ascending, from log-probs in float64 [V]. Banned tokens have -inf."""
    order = np.argsort(-log_probs, kind="stable")[: top_k if top_k > 0 else None]
    order = order[log_probs[order] > -np.inf]
    probs = np.exp(log_probs[order]) / np.exp(log_probs[order]).sum()
    order = order[probs.cumsum() - probs < top_p]
    probs = np.exp(log_probs[order])
    return np.sort(order[probs >= min_p * probs[0]])


def rescored(name: str, sample: SampleOutput, **more: Any) -> ScoreRequest:
    """A score of a sample under the distribution from which it was drawn, with the sample's records."""
    params = ask(name).params.model_copy(update=dict(logprobs="processed"))
    whole = np.concatenate((PROMPT, np.array(sample.token_ids, np.int32)))
    asked: dict[str, Any] = dict(top_logprobs=params.top_logprobs, start=len(PROMPT), return_sampling_mask=True) | more
    return ScoreRequest(f"{name} {sample.index}", whole, params.recorded, **asked)


def kept_bits(output: SampleOutput | ScoreOutput) -> dict[str, bytes]:
    found = {name: values.tobytes() for name, values in columns_of(output).items() if name.startswith("kept")}
    assert len(found) == 3
    return found


@pytest.mark.usefixtures("steps_ahead")
@pytest.mark.parametrize("circumstances", ["whole", "chunks", "restarted"])
def test_a_score_has_the_records_of_the_sample(
    circumstances: str, alone: dict[tuple[str, int], SampleOutput], tiny_llama: Path
) -> None:
    """All scores run together, with targets in half of them. A restarted score has already computed a part."""
    engine = make_engine(tiny_llama, max_num_seqs=16, max_num_batched_tokens=512 if circumstances == "whole" else 56)
    targets = {key: _everything(sample)[:, :3] for key, sample in alone.items() if key[1]}
    for key, sample in alone.items():
        engine.add(rescored(key[0], sample, target_token_ids=targets.get(key)))
    outputs, was_under_way = list[Output](), False
    while engine.has_unfinished:
        outputs += engine.step()
        is_under_way = engine.memory()["records"] > 0
        if circumstances == "restarted" and is_under_way and not was_under_way:
            outputs += engine.interrupt("recompute")
        was_under_way |= is_under_way
    assert was_under_way == (circumstances != "whole"), "premise"
    assert (engine.stats().recomputed > 0) == (circumstances == "restarted"), "premise"
    found = {output.request_id: output for output in outputs}
    for (name, index), sample in alone.items():
        score = found[f"{name} {index}"]
        assert isinstance(score, ScoreOutput) and score.logprobs.shape == (len(sample.token_ids),)
        assert kept_bits(score) == kept_bits(sample)
        assert score.kept_offsets is not None and sample.kept_offsets is not None
        assert score.kept_offsets.tolist() == sample.kept_offsets.tolist()
        if ask(name).params.logprobs == "processed":
            assert score.logprobs.tobytes() == np.array(sample.logprobs).tobytes()


@pytest.mark.parametrize("name", ["top_k", "all", "bans"])
def test_a_score_of_a_token_that_was_dropped_has_the_record_of_its_position(
    name: str, alone: dict[tuple[str, int], SampleOutput], tiny_llama: Path
) -> None:
    """The last token is replaced, or in the case of bans, the fifth one. Earlier tokens keep their bits."""
    sample = alone[name, 0]
    last = 4 if name == "bans" else len(sample.token_ids) - 1
    kept = sets_of(sample)[last]
    dropped = next(token for token in range(VOCABULARY) if token not in kept)
    assert 0 < len(kept) < VOCABULARY, "premise"
    other = replace(sample, token_ids=[*sample.token_ids[:last], dropped])
    engine = make_engine(tiny_llama)
    engine.add(rescored(name, other))
    [score] = drain(engine)
    assert isinstance(score, ScoreOutput) and score.kept_offsets is not None and score.kept_log_mass is not None
    assert score.logprobs[last] == -np.inf and np.isfinite(score.logprobs[:last]).all()
    before = cut_columns(columns_of(score), 0, last), cut_columns(columns_of(sample), 0, last)
    found, expected = ({n: v.tobytes() for n, v in each.items() if n.startswith("kept")} for each in before)
    assert found == expected
    ids = cut_columns(columns_of(score), last, last + 1)["kept_token_ids"]
    assert ids.tolist() == kept.tolist() and sample.kept_log_mass is not None
    assert abs(score.kept_log_mass[last] - sample.kept_log_mass[last]) < 2e-6


@pytest.mark.parametrize("top_logprobs", [None, 2])
def test_a_score_without_filters_and_edits_keeps_the_whole_vocabulary(
    top_logprobs: int | None, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama)
    asked: dict[str, Any] = dict(distribution=Distribution(temperature=0.8), top_logprobs=top_logprobs)
    for has_mask in (True, False):
        engine.add(ScoreRequest(str(has_mask), PROMPT, **asked, return_sampling_mask=has_mask))
    outputs = {output.request_id: columns_of(output) for output in drain(engine)}
    masked, plain = outputs["True"], outputs["False"]
    assert masked["kept_counts"].tolist() == [0] * (len(PROMPT) - 1) and not len(masked["kept_token_ids"])
    assert masked["kept_log_mass"].tobytes() == bytes(4 * (len(PROMPT) - 1))
    assert {name: each.tobytes() for name, each in plain.items()} == {
        name: each.tobytes() for name, each in masked.items() if not name.startswith("kept")
    }


def test_neutral_parameters_keep_the_whole_vocabulary(alone: dict[tuple[str, int], SampleOutput]) -> None:
    columns = columns_of(alone["neutral", 0])
    assert (
        not columns["kept_counts"].any() and not columns["kept_log_mass"].any() and not len(columns["kept_token_ids"])
    )


@pytest.mark.parametrize("name", ["top_k", "all"])
def test_a_trainer_that_is_not_aligned_restores_the_log_probs(
    name: str, alone: dict[tuple[str, int], SampleOutput], tiny_llama: Path
) -> None:
    """A log-softmax over the kept tokens of the trainer's own logits gives an importance ratio of 1. A log-softmax over
    all tokens does not.
    """
    sample = alone[name, 0]
    whole = torch.from_numpy(np.concatenate((PROMPT, np.array(sample.token_ids, np.int32))).astype(np.int64))[None]
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.no_grad():
        logits = model(whole).logits[0, len(PROMPT) - 1 : -1] / ask(name).params.temperature
    offsets, ids = sample.kept_offsets, sample.kept_token_ids
    assert offsets is not None and ids is not None and (np.diff(offsets) > 0).all(), "premise"
    mask = torch.full_like(logits, -torch.inf)
    mask[np.repeat(np.arange(len(logits)), np.diff(offsets)), ids] = 0.0
    drawn = torch.tensor(sample.token_ids)[:, None]
    sampled = torch.from_numpy(np.array(sample.logprobs))
    ratios = [(each.log_softmax(-1).gather(1, drawn)[:, 0] - sampled).exp() for each in (logits + mask, logits)]
    torch.testing.assert_close(ratios[0], torch.ones_like(sampled), rtol=2e-5, atol=0)
    assert ratios[1].max() < 0.999


@pytest.mark.parametrize("vocabulary", [8, 13, 512, 517])
def test_bits_are_unpacked_to_the_ids_of_a_mask_unless_it_has_all(vocabulary: int) -> None:
    mask = torch.from_numpy(np.random.default_rng(0).random((9, vocabulary)) < np.linspace(0, 1, 9)[:, None])
    logits = torch.full(mask.shape, -torch.inf).masked_fill(mask, torch.nan if vocabulary == 13 else 1.0)
    assert torch.equal(pack_on_host(logits), pack_on_device(logits))
    counts, ids = kept_ids(packed_bits(logits).numpy())
    assert mask[-1].all() and not mask[0].any(), "premise"
    mask[mask.all(1)] = False
    assert (counts.dtype, ids.dtype) == (np.int32, np.int32) and counts.tolist() == mask.sum(1).tolist()
    assert ids.tolist() == mask.nonzero()[:, 1].tolist()
