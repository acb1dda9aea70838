"""Penalties, biases, bans and filters: the same bits in all circumstances, in scores and in a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import about
from transformers import AutoModelForCausalLM, AutoTokenizer

from trueroll.engine.engine import Engine
from trueroll.engine.request import (
    Distribution,
    GenerateRequest,
    SampleOutput,
    SamplingParams,
    ScoreOutput,
    ScoreRequest,
)
from trueroll.errors import AlignmentError, InvalidRequestError
from trueroll.kernels import reference
from trueroll.kernels.edits import EditedText, Rules, edit
from trueroll.kernels.selection import select_backend
from trueroll.kernels.training import align, token_log_probs, token_statistics
from trueroll.rollout.grammar import GrammarMasks

from .drive import drain, generate, make_engine, run, score, tokens

PROMPT = np.concatenate((tokens(40), tokens(9, seed=1)))
EVERYTHING: dict[str, Any] = dict(
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=-0.4,
    logit_bias={7: 1.5, 300: -100.0},
    bad_words_token_ids=[[9], [5, 6]],
    min_tokens=4,
    stop_token_ids=[*range(10, 60)],
    top_p=0.9,
    temperature=0.8,
)
SCHEMA = dict(
    type="object",
    properties=dict(a=dict(type="integer"), b=dict(type="array", items=dict(enum=["x", "yy", None]))),
    required=["a", "b"],
)
GRAMMAR: dict[str, Any] = dict(structured_outputs=dict(json=SCHEMA), ignore_eos=False)
EDITS: dict[str, dict[str, Any]] = {
    "penalties": dict(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2),
    "greedy": dict(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.2),
    "allowed": dict(allowed_token_ids=[*range(100, 140)], min_tokens=3, stop_token_ids=[101]),
    "words": dict(bad_words_token_ids=[[7, 7], [416, 483, 139], [5]]),
    "filters": dict(top_k=20, top_p=0.9, min_p=0.02, temperature=1.3),
    "everything": EVERYTHING,
    "grammar": GRAMMAR | dict(temperature=0.9, frequency_penalty=0.1, top_p=0.95, min_tokens=2),
}
ENGINES: dict[str, dict[str, Any]] = {
    "company": {},
    "chunks": dict(max_num_batched_tokens=16, max_num_seqs=8),
    "preempted": dict(num_blocks=24, block_size=8),
}


def ask(name: str, id: str = "", **params: Any) -> GenerateRequest:
    given = dict(n=2, max_tokens=24, seed=11, top_logprobs=3) | EDITS[name] | params
    return generate(id or name, PROMPT, **given)


def bits(sample: SampleOutput) -> tuple[bytes, ...]:
    columns = sample.logprobs, sample.entropy, sample.top_token_ids, sample.top_logprobs
    return np.array(sample.token_ids, np.int32).tobytes(), *(
        b"" if each is None else each.tobytes() for each in columns
    )


@pytest.fixture(scope="module")
def alone(tiny_llama: Path) -> dict[tuple[str, int], SampleOutput]:
    """Each request alone, on an engine without cached prefixes."""
    found = dict[tuple[str, int], SampleOutput]()
    for name in EDITS:
        found |= run(make_engine(tiny_llama), [ask(name)])
        plain = run(make_engine(tiny_llama), [generate(name, PROMPT, n=2, max_tokens=24, seed=11)])
        assert {bits(found[name, i])[0] for i in range(2)}.isdisjoint(bits(plain[name, i])[0] for i in range(2)), (
            "premise: the parameters had an effect"
        )
    return found


@pytest.mark.usefixtures("steps_ahead")
@pytest.mark.parametrize("circumstances", ENGINES)
def test_no_bit_depends_on_the_circumstances(
    circumstances: str, alone: dict[tuple[str, int], SampleOutput], tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, **ENGINES[circumstances])
    run(engine, [generate("warm", PROMPT, max_tokens=1)])
    others = [generate(f"other {i}", tokens(30 + i, seed=i), max_tokens=20) for i in range(3)]
    again = run(engine, [*map(ask, EDITS), *others])
    assert {key: bits(again[key]) for key in alone} == {key: bits(sample) for key, sample in alone.items()}
    stats = engine.stats()
    assert stats.prefix_hits > 0 and (stats.preemptions > 0) == (circumstances == "preempted"), "premise"


@pytest.mark.parametrize("name", ["penalties", "grammar"])
def test_a_continued_sample_has_the_bits_of_an_unbroken_one(
    name: str, alone: dict[tuple[str, int], SampleOutput], tiny_llama: Path
) -> None:
    """Earlier tokens of the sample count as tokens of the sample, not of the prompt."""
    before = 10
    whole = alone[name, 0]
    prompt = np.concatenate((PROMPT, np.array(whole.token_ids[:before], np.int32)))
    params = ask(name, n=1, max_tokens=len(whole.token_ids) - before).params
    ended = run(make_engine(tiny_llama), [GenerateRequest("rest", prompt, params, num_prior_tokens=before)])["rest", 0]
    assert ended.token_ids == whole.token_ids[before:] and whole.logprobs is not None and ended.logprobs is not None
    assert ended.logprobs.tobytes() == whole.logprobs[before:].tobytes()
    other = run(make_engine(tiny_llama), [GenerateRequest("rest", prompt, params)])["rest", 0]
    assert bits(other) != bits(ended), "premise: the prompt's tokens count less"


def scores(engine: Engine, samples: dict[tuple[str, int], SampleOutput]) -> Iterator[tuple[SampleOutput, Any]]:
    for (name, _), sample in samples.items():
        whole = np.concatenate((PROMPT, np.array(sample.token_ids, np.int32)))
        engine.add(ScoreRequest(name, whole, ask(name).params, top_logprobs=3, start=len(PROMPT)))
        [score] = drain(engine)
        yield sample, score


@pytest.mark.parametrize("settings", [{}, dict(max_num_batched_tokens=16, max_num_seqs=8)], ids=["whole", "chunks"])
def test_scores_equal_samples(
    settings: dict[str, Any], alone: dict[tuple[str, int], SampleOutput], tiny_llama: Path
) -> None:
    for sample, found in scores(make_engine(tiny_llama, **settings), alone):
        for column in ("logprobs", "entropy", "top_token_ids", "top_logprobs"):
            assert getattr(found, column).tobytes() == getattr(sample, column).tobytes(), (sample.request_id, column)


@pytest.mark.parametrize("name", EDITS)
def test_a_trainer_computes_the_bits_of_the_samples(
    name: str, alone: dict[tuple[str, int], SampleOutput], tiny_llama: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    align(model)
    eos = make_engine(tiny_llama).info.eos_token_ids
    samples = [alone[name, i] for i in range(2)]
    rows = [torch.tensor([*PROMPT, *sample.token_ids]).long() for sample in samples]
    packed, lengths = torch.cat(rows), [len(row) for row in rows]
    mask = torch.cat([torch.arange(length) >= len(PROMPT) for length in lengths])
    asked: dict[str, Any] = dict(
        lengths=lengths, completion_mask=mask, distribution=ask(name).params, eos_token_ids=eos
    )
    if name == "grammar":
        tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
        asked["masks"] = GrammarMasks(ask(name).params, tokenizer, asdict(make_engine(tiny_llama).info))
    found = token_log_probs(model, packed, **asked)
    statistics = token_statistics(model, packed, **asked, top_logprobs=3)
    expected = np.concatenate([sample.logprobs for sample in samples if sample.logprobs is not None])
    assert found.detach()[mask].numpy().tobytes() == expected.tobytes()
    assert statistics.logprobs[mask].numpy().tobytes() == expected.tobytes()
    tops = np.concatenate([sample.top_logprobs for sample in samples if sample.top_logprobs is not None])
    assert statistics.top_logprobs[mask].numpy().tobytes() == tops.tobytes()


def test_gradients_agree_with_plain_torch(alone: dict[tuple[str, int], SampleOutput], tiny_llama: Path) -> None:
    """With the edits and filters as constants, torch differentiates the same log-probs."""
    model, plain = (AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32) for _ in range(2))
    align(model)
    sampled, params = alone["everything", 0].token_ids, SamplingParams(**EVERYTHING)
    ids = torch.tensor([[*PROMPT, *sampled[:-2], 300, *sampled[-1:]]]).long()
    mask = torch.arange(ids.shape[1])[None] >= len(PROMPT)
    asked: dict[str, Any] = dict(completion_mask=mask, distribution=params, eos_token_ids=[2])
    found = token_log_probs(model, ids, **asked)
    is_kept = mask & found.isfinite()
    assert 2 < int(is_kept.sum()) < len(sampled), "premise: filters kept some tokens, and dropped others"
    found[is_kept].sum().backward()
    logits = plain(ids).logits[0, len(PROMPT) - 1 : -1]
    rules = Rules.of(params, sorted({2, *params.stop_token_ids}), 512)
    assert rules is not None
    rows = EditedText(rules, ids[0].numpy(), len(PROMPT)).rows(len(PROMPT), ids.shape[1])
    ops = select_backend("reference", logits.device, torch.float32).ops
    scaled = edit(ops, logits, dict(enumerate(rows))) / params.temperature
    kept = reference.filter_logits(
        scaled.detach().clone(), *(torch.full((len(scaled),), each) for each in (-1, params.top_p, 0.0))
    )
    log_probs = scaled.masked_fill(kept == -torch.inf, -torch.inf).log_softmax(-1)
    log_probs.gather(1, ids[0, len(PROMPT) :, None])[is_kept[0, len(PROMPT) :]].sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert (ours.grad - theirs.grad).norm() < 1e-3 * theirs.grad.norm(), name


@pytest.mark.parametrize("name", ["plain", "penalties"])
def test_log_probs_of_given_tokens_equal_those_of_the_tokens_themselves(name: str, tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    align(model)
    ids = torch.tensor([[*PROMPT, *tokens(12, seed=3)]]).long()
    mask = torch.arange(ids.shape[1])[None] >= len(PROMPT)
    params = SamplingParams(**EDITS.get(name, dict(temperature=0.7)))
    asked: dict[str, Any] = dict(completion_mask=mask, distribution=params, eos_token_ids=[2])
    targets = torch.randint(0, 512, (*ids.shape, 5), generator=torch.Generator().manual_seed(0))
    targets[..., 1], targets[:, ::2, 4] = ids, -1
    found = token_log_probs(model, ids, **asked, target_ids=targets)
    assert torch.equal(found[..., 1], token_log_probs(model, ids, **asked))
    ids_and_logprobs = token_statistics(model, ids, **asked, top_logprobs=512)
    listed = torch.zeros(*ids.shape, 512).scatter_(2, ids_and_logprobs.top_token_ids, ids_and_logprobs.top_logprobs)
    assert torch.equal(found, listed.gather(2, targets.clamp(min=0)).masked_fill((targets < 0) | ~mask[..., None], 0.0))
    weights = torch.linspace(-1, 1, found.numel()).view_as(found).masked_fill(found.isinf(), 0.0)
    separate = [token_log_probs(model, ids, **asked, target_ids=targets[..., i : i + 1]) for i in range(5)]
    gradients = [
        torch.autograd.grad((torch.where(weights != 0, log_probs, 0.0) * weights).sum(), model.lm_head.weight)[0]
        for log_probs in (found, torch.cat(separate, -1))
    ]
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[1].norm() and gradients[1].norm() > 0


@pytest.mark.parametrize("wrong", [torch.zeros(1, 4, 2), torch.zeros(1, 5, 2).long(), torch.full((1, 4, 1), 512)])
def test_wrong_target_ids_are_refused(wrong: torch.Tensor, tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    align(model)
    with pytest.raises(AlignmentError, match="target_ids must be"):
        token_log_probs(model, torch.tensor([[5, 6, 7, 8]]), target_ids=wrong)


def test_what_a_trainer_needs_is_asked_for(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    align(model)
    ids = torch.tensor([[*PROMPT]]).long()
    given: dict[str, Any]
    for error, given in (
        ("temperature must be left out", dict(temperature=0.5, distribution=SamplingParams())),
        ("logprobs is None", dict(distribution=SamplingParams(logprobs=None))),
        ("eos_token_ids must be given", dict(distribution=SamplingParams(min_tokens=3))),
        ("completion_mask must be given", dict(distribution=SamplingParams(presence_penalty=1.0))),
    ):
        with pytest.raises(AlignmentError, match=error):
            token_log_probs(model, ids, **given)
    for mode, temperature in (("raw", 1.0), ("temperature", 0.5)):
        asked: dict[str, Any] = dict(presence_penalty=1.0, temperature=0.5, logprobs=mode)
        found = token_log_probs(model, ids, distribution=SamplingParams(**asked))
        assert torch.equal(found, token_log_probs(model, ids, temperature=temperature))


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("logit_bias", dict(logit_bias={512: 1.0})),
        ("allowed_token_ids", dict(allowed_token_ids=[512])),
        ("bad_words_token_ids", dict(bad_words_token_ids=[[3, 512]])),
        ("min_tokens", dict(allowed_token_ids=[7], stop_token_ids=[7], min_tokens=1)),
        ("bad_words_token_ids", dict(allowed_token_ids=[7], bad_words_token_ids=[[7]])),
    ],
)
def test_what_cannot_be_drawn_is_refused(field: str, params: dict[str, Any], tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    for request in (generate("r", PROMPT, **params), ScoreRequest("r", PROMPT, Distribution(**params))):
        with pytest.raises(InvalidRequestError, check=about(field)):
            engine.add(request)
    assert not engine.has_unfinished


def test_a_sample_that_has_no_token_left_ends_alone(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    stuck = generate("stuck", PROMPT, allowed_token_ids=[7], bad_words_token_ids=[[7, 7]])
    found = run(engine, [stuck, generate("good", PROMPT)])
    assert (found["stuck", 0].finish_reason, found["stuck", 0].token_ids) == ("error", [7])
    assert "leave no token to draw" in str(found["stuck", 0].error)
    assert bits(found["good", 0]) == bits(run(make_engine(tiny_llama), [generate("good", PROMPT)])["good", 0])


def test_two_biases_of_a_token_are_refused() -> None:
    for token in (0, 7):
        with pytest.raises(InvalidRequestError, match=f"logit_bias: token {token} has more than one bias"):
            Distribution(logit_bias=[(token, 1.0), (5, 1.0), (token, 2.0)])


@pytest.mark.parametrize("start", [0, len(PROMPT), -1])
def test_a_start_outside_the_tokens_is_refused(start: int, tiny_llama: Path) -> None:
    with pytest.raises(InvalidRequestError, check=about("start")):
        make_engine(tiny_llama).add(ScoreRequest("r", PROMPT, start=start))


def test_a_score_from_a_start_on_has_the_bits_of_the_whole(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, max_num_batched_tokens=16, max_num_seqs=8)
    whole = score(engine, PROMPT)
    for start in (1, 2, 15, 16, 17, 33, len(PROMPT) - 1):
        engine.add(ScoreRequest("r", PROMPT, start=start))
        [found] = drain(engine)
        assert isinstance(found, ScoreOutput) and found.logprobs.tobytes() == whole[start - 1 :].tobytes()
