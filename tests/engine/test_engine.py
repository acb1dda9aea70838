"""The engine's promises on tiny models: exactness, groups, one output per accepted sample, and clear rejections."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matrix import thinned
from refusals import about
from transformers import AutoModelForCausalLM

from trueroll.engine.config import EngineConfig
from trueroll.engine.request import HASH_BYTES, ContentSpan, Distribution, ScoreOutput, ScoreRequest, derive_seed
from trueroll.engine.running.loading import engine_info, load_model
from trueroll.engine.running.step import plan_step
from trueroll.engine.scheduling.scheduler import _Plan
from trueroll.engine.scheduling.sequence import takers_of
from trueroll.errors import ConfigError, InvalidRequestError, ModelError, UnknownRequestError
from trueroll.kernels.edits import RowEdits

from .drive import bits, drain, executor_of, generate, make_engine, run, samples_of, score, tokens, top_bits

DTYPES = ["float32", "bfloat16"]
pytestmark = pytest.mark.usefixtures("steps_ahead")


def test_greedy_tokens_and_scores_equal_transformers(tiny_model: Path, backend: str) -> None:
    prompts = [tokens(n, seed=n) for n in (1, 15, 16, 17, 140)]
    engine = make_engine(tiny_model, backend=backend)
    samples = run(engine, [generate(str(i), p, temperature=0.0, max_tokens=24) for i, p in enumerate(prompts)])
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for i, prompt in enumerate(prompts):
        ids = torch.from_numpy(prompt)[None].long()
        expected = model.generate(ids, do_sample=False, max_new_tokens=24, min_new_tokens=24)[0].numpy()
        assert samples[str(i), 0].token_ids == expected[len(prompt) :].tolist()
        logits = model(torch.from_numpy(expected)[None]).logits[0, :-1].log_softmax(-1)
        expected_logprobs = logits.gather(1, torch.from_numpy(expected[1:, None])).squeeze(1).detach().numpy()
        np.testing.assert_allclose(score(engine, expected.astype(np.int32)), expected_logprobs, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_score_gives_the_bits_of_the_rollout(tiny_model: Path, dtype: str, backend: str) -> None:
    engine = make_engine(tiny_model, dtype=dtype, backend=backend)
    prompt = tokens(40)
    modes = {"processed": dict(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01), "temperature": dict(temperature=0.7)}
    for mode, distribution in (modes | {"raw": {}}).items():
        request = generate("r", prompt, logprobs=mode, **modes["processed"])
        sample = run(engine, [request])["r", 0]
        full = np.concatenate((prompt, sample.token_ids))
        rescored = score(engine, full, **distribution)[len(prompt) - 1 :]
        assert rescored.tobytes() == bits(sample)[1], mode
    assert run(engine, [generate("r", prompt, logprobs=None)])["r", 0].logprobs is None


FILTERS = dict(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01)
DISTRIBUTIONS = {"processed": FILTERS, "temperature": dict(temperature=0.7), "raw": {}}


@pytest.mark.parametrize("mode", DISTRIBUTIONS)
def test_score_gives_the_top_logprobs_of_the_rollout(tiny_llama: Path, mode: str, backend: str) -> None:
    engine, prompt = make_engine(tiny_llama, backend=backend, max_num_batched_tokens=64), tokens(90)
    for k, params in ((6, FILTERS), (64, dict(temperature=0.7)), (0, FILTERS)):
        sample = run(engine, [generate("r", prompt, logprobs=mode, top_logprobs=k, **params)])["r", 0]
        whole = np.concatenate((prompt, sample.token_ids))
        distribution = Distribution(**(params if mode == "processed" else DISTRIBUTIONS[mode]))
        engine.add(ScoreRequest("s", whole, distribution, top_logprobs=k))
        [scored] = drain(engine)
        assert isinstance(scored, ScoreOutput) and scored.top_token_ids is not None
        assert scored.top_token_ids.shape == (len(whole) - 1, k)
        assert top_bits(scored, len(prompt) - 1) == top_bits(sample)
        assert scored.logprobs[len(prompt) - 1 :].tobytes() == bits(sample)[1]


def test_top_logprobs_agree_with_the_drawn_tokens_and_change_nothing(tiny_llama: Path, backend: str) -> None:
    """The batch includes requests that list fewer tokens, and requests with a first token that must not be the last."""
    engine, prompt = make_engine(tiny_llama, backend=backend), tokens(20)
    cases = [{}, FILTERS, FILTERS | dict(logprobs="raw"), dict(temperature=0.0), dict(min_tokens=5, stop_token_ids=[7])]
    plain = run(engine, [generate(str(i), prompt, n=2, **case) for i, case in enumerate(cases)])
    asked = [generate(str(i), prompt, n=2, top_logprobs=32 * i, **case) for i, case in enumerate(cases)]
    together = run(engine, asked + [generate("plain", prompt, seed=8)])
    alone = {key: sample for request in asked for key, sample in run(engine, [request]).items()}
    listed = 0
    for key, sample in alone.items():
        assert bits(sample) == bits(plain[key]) == bits(together[key])
        assert top_bits(sample) == top_bits(together[key])
        assert sample.top_token_ids is not None and sample.top_logprobs is not None and sample.logprobs is not None
        rows, places = (sample.top_token_ids == np.array(sample.token_ids)[:, None]).nonzero()
        assert sample.top_logprobs[rows, places].tobytes() == sample.logprobs[rows].tobytes()
        listed += len(rows)
    assert listed > 20, "many drawn tokens are in the lists"
    greedy = alone["3", 0]
    assert greedy.top_token_ids is not None
    assert greedy.top_token_ids[:, 0].tolist() == greedy.token_ids, "greedy takes the first token of the list"
    assert together["plain", 0].entropy is None and plain["0", 0].top_token_ids is None


def test_dropped_tokens_are_listed_after_the_kept_ones(tiny_llama: Path, backend: str) -> None:
    engine = make_engine(tiny_llama, backend=backend)
    request = generate("r", tokens(20), top_k=2, min_tokens=3, stop_token_ids=[0], top_logprobs=5)
    sample = run(engine, [request])["r", 0]
    assert sample.top_token_ids is not None and sample.top_logprobs is not None and sample.entropy is not None
    assert np.isfinite(sample.top_logprobs[:, :2]).all() and np.isneginf(sample.top_logprobs[:, 2:]).all()
    for ids in sample.top_token_ids.tolist():
        assert ids[2:] == [i for i in range(5) if i not in ids[:2]][:3]
    two = sample.top_logprobs[:, :2].astype(np.float64)
    np.testing.assert_allclose(sample.entropy, -(np.exp(two) * two).sum(1), rtol=1e-5)


def test_top_logprobs_of_a_sample_without_tokens(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    engine.add(generate("r", tokens(20), top_logprobs=5))
    engine.add(ScoreRequest("s", tokens(20, seed=1), top_logprobs=4))
    for output, k in ((engine.abort("r")[0], 5), (engine.abort("s")[0], 4)):
        assert output.top_token_ids is not None and output.top_logprobs is not None
        assert output.top_token_ids.shape == output.top_logprobs.shape == (0, k)


def test_top_logprobs_that_cannot_be_served_are_refused(tmp_path: Path, tiny_llama: Path) -> None:
    for params in (dict(top_logprobs=1025), dict(top_logprobs=-1), dict(top_logprobs=2, logprobs=None)):
        with pytest.raises(InvalidRequestError, check=about("top_logprobs", value=params["top_logprobs"])):
            generate("r", tokens(5), **params)
    from tiny import make_tiny_model

    engine = make_engine(make_tiny_model("llama", tmp_path / "small", vocab_size=40))
    for request in (
        generate("r", tokens(5, vocab_size=40), top_logprobs=41),
        ScoreRequest("s", tokens(5, vocab_size=40), top_logprobs=41),
    ):
        with pytest.raises(InvalidRequestError, check=about("top_logprobs", value=41, limit=40)):
            engine.add(request)
    all_of_it = run(engine, [generate("r", tokens(5, vocab_size=40), top_logprobs=40)])["r", 0]
    assert all_of_it.top_token_ids is not None and sorted(all_of_it.top_token_ids[3].tolist()) == list(range(40))


@pytest.mark.parametrize("dtype", DTYPES)
@thinned(lambda backend, dtype, tiny_model, **_: backend == "cpu" or (dtype, tiny_model) == ("bfloat16", "qwen3"))
def test_preempted_samples_keep_their_bits(tiny_model: Path, dtype: str, backend: str) -> None:
    """Every second sample has `top_logprobs`."""
    params = dict(n=3, max_tokens=30)
    requests = [generate(str(i), tokens(30 + i, seed=i), **params, top_logprobs=5 if i % 2 else None) for i in range(6)]
    settings = dict(dtype=dtype, backend=backend)
    calm = make_engine(tiny_model, **settings)
    expected = run(calm, requests)
    pressed = make_engine(tiny_model, **settings, num_blocks=24, block_size=8)
    found = run(pressed, requests)
    assert calm.stats().preemptions == 0 and pressed.stats().preemptions > 5
    assert {key: bits(sample) for key, sample in found.items()} == {k: bits(s) for k, s in expected.items()}
    with_tops = [key for key, sample in expected.items() if sample.entropy is not None]
    assert len(with_tops) == 9
    assert all(top_bits(found[key]) == top_bits(expected[key]) for key in with_tops)


def test_a_thousand_requests_finish_in_a_tenth_of_the_blocks(tiny_llama: Path) -> None:
    rng = np.random.default_rng(1)
    requests = [
        generate(str(i), tokens(int(rng.integers(1, 40)), seed=i), seed=i, max_tokens=int(rng.integers(1, 70)))
        for i in range(1000)
    ]
    needed = sum(-(-(len(r.prompt_token_ids) + (r.params.max_tokens or 0)) // 16) for r in requests)
    settings = dict(max_num_seqs=1000, max_num_batched_tokens=1024)
    calm = make_engine(tiny_llama, num_blocks=needed, **settings)
    expected = run(calm, requests)
    pressed = make_engine(tiny_llama, num_blocks=needed // 10, **settings)
    found = run(pressed, requests)
    assert calm.stats().preemptions == 0 and pressed.stats().preemptions > 10
    assert pressed.stats().computed_tokens < 1.5 * calm.stats().computed_tokens, "few tokens are computed twice"
    assert len(found) == 1000
    assert {key: bits(sample) for key, sample in found.items()} == {k: bits(s) for k, s in expected.items()}


def test_a_group_computes_its_prompt_once(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    samples = run(engine, [generate(str(i), tokens(37 + i, seed=i), n=8) for i in range(8)])
    assert len(samples) == 64 and engine.stats().computed_prompt_tokens == sum(37 + i for i in range(8))


def test_two_groups_with_one_prompt_compute_it_once(tiny_llama: Path) -> None:
    engine, prompt = make_engine(tiny_llama), tokens(53)
    samples = run(engine, [generate("a", prompt, n=3), generate("b", prompt, n=2, seed=9)])
    assert engine.stats().computed_prompt_tokens == 53
    assert [samples[key].num_cached_tokens for key in (("a", 0), ("b", 0))] == [0, 53]
    alone = run(make_engine(tiny_llama), [generate("b", prompt, n=2, seed=9)])
    assert [bits(samples["b", i]) for i in range(2)] == [bits(alone["b", i]) for i in range(2)]


def test_a_prefix_that_is_being_computed_is_awaited(tiny_llama: Path) -> None:
    engine, shared = make_engine(tiny_llama, max_num_batched_tokens=64), tokens(160)
    prompts = [np.concatenate((shared, tokens(10, seed=i))) for i in range(1, 5)]
    run(engine, [generate(str(i), p) for i, p in enumerate(prompts)])
    stats = engine.stats()
    assert stats.deferred_admissions > 0
    assert stats.computed_prompt_tokens == 160 + 4 * 10
    assert stats.prefix_hits == 3 * 160


def test_blocks_computed_by_a_score_are_reused(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    score(engine, tokens(100))
    run(engine, [generate("after", tokens(100))])
    assert engine.stats().prefix_hits == 96
    engine = make_engine(tiny_llama)
    engine.add(ScoreRequest("score", tokens(100)))
    engine.add(generate("beside", tokens(100), max_tokens=1))
    drain(engine)
    assert engine.stats().computed_tokens == 99 + 100 - 96


def test_a_sample_depends_on_its_index_not_on_its_group(tiny_llama: Path) -> None:
    engine, prompt = make_engine(tiny_llama), tokens(20)
    many = run(engine, [generate("g", prompt, n=6)])
    few = run(engine, [generate("g", prompt, n=2)])
    assert [bits(few["g", i]) for i in range(2)] == [bits(many["g", i]) for i in range(2)]
    assert len({bits(sample) for sample in many.values()}) == 6
    assert [many["g", i].seed for i in range(6)] == [derive_seed(5, i) for i in range(6)]
    assert len({derive_seed(seed, i) for seed in (0, 1, 2**64 - 1) for i in range(1000)}) == 3000


def test_a_conversation_reuses_its_decoded_blocks(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    first = run(engine, [generate("1", tokens(30), max_tokens=40)])["1", 0]
    longer = np.concatenate((tokens(30), first.token_ids, tokens(9, seed=1)))
    warm = run(engine, [generate("2", longer)])["2", 0]
    cold = run(make_engine(tiny_llama, enable_prefix_caching=False), [generate("2", longer)])["2", 0]
    assert warm.num_cached_tokens == 64 and cold.num_cached_tokens == 0
    assert bits(warm) == bits(cold)


def test_a_salt_keeps_prefixes_apart(tiny_llama: Path) -> None:
    engine, prompt = make_engine(tiny_llama), tokens(40)
    salts = [None, None, "a", "b", "a", ""]
    cached = [run(engine, [generate("r", prompt, cache_salt=s)])["r", 0].num_cached_tokens for s in salts]
    assert cached == [0, 32, 0, 0, 32, 0]


@pytest.mark.parametrize("params", [{}, FILTERS | dict(top_logprobs=3), dict(min_tokens=9, stop_token_ids=[7])])
def test_drawing_from_several_rows_equals_drawing_one_by_one(
    tiny_llama: Path, params: dict[str, Any], backend: str
) -> None:
    """Speculative decoding can therefore verify its draft tokens in one step, by drawing the real tokens."""
    expected = run(make_engine(tiny_llama, backend=backend), [generate("r", tokens(20), **params)])["r", 0]
    engine = make_engine(tiny_llama, backend=backend)
    engine.add(generate("r", tokens(20), **params))
    while not engine._scheduler.running.sequences or engine._scheduler.running.sequences[0].num_decoded < 5:
        engine.step()
    engine.settle()
    [sequence], scheduler = engine._scheduler.running.sequences, engine._scheduler
    known, start = sequence.num_decoded, sequence.num_computed
    assert known < 8 and sequence.num_uncomputed == 1, "premise"
    guessed = expected.token_ids[known : known + 3]
    scheduler._reserve(sequence, start, 4, _Plan(64))
    chunks = scheduler.running.lanes.chunks(np.array([sequence.lane]), np.array([start]), np.array([start + 4]))
    chunks = replace(chunks, drafts={sequence.lane: guessed})
    step = plan_step(chunks, scheduler.running.lanes, takers_of(chunks, scheduler.running.lanes), [[]], 16)
    drawn = engine._executor.compute(step).wait().drawn
    assert drawn is not None and drawn.token_ids.tolist() == expected.token_ids[known : known + 4]
    assert expected.logprobs is not None
    assert drawn.logprobs.tobytes() == expected.logprobs[known : known + 4].tobytes()
    if expected.top_token_ids is not None:
        assert b"".join(drawn.records[i][1] for i in range(4)) == expected.top_token_ids[known : known + 4].tobytes()


def test_prompts_share_blocks_only_for_the_same_content(tiny_llama: Path) -> None:
    """The model does not use the content yet.

    The content only decides which KV is reused, and does not change any bit.
    """
    engine, prompt = make_engine(tiny_llama, max_num_batched_tokens=64), tokens(200)
    one, other = ((ContentSpan(70, 90, bytes([number] * HASH_BYTES)),) for number in (1, 2))
    expected = [bits(sample) for sample in run(make_engine(tiny_llama), [generate("a", prompt, n=2)]).values()]
    cached = []
    for spans in (one, other, one, other, ()):
        samples = run(engine, [replace(generate("r", prompt, n=2), spans=spans)])
        assert [bits(sample) for sample in samples.values()] == expected
        cached.append(samples["r", 0].num_cached_tokens)
    assert cached == [0, 64, 192, 192, 64]
    together = [replace(generate(str(i), prompt), spans=spans) for i, spans in enumerate((one, one, other))]
    fresh = run(make_engine(tiny_llama), together)
    assert [fresh[str(i), 0].num_cached_tokens for i in range(3)] == [0, 200, 64], "only the second request joined"
    whole = ScoreRequest("s", prompt, spans=other)
    engine.add(whole)
    [scored] = drain(engine)
    assert isinstance(scored, ScoreOutput) and scored.logprobs.tobytes() == score(engine, prompt).tobytes()


@pytest.mark.parametrize(
    ("spans", "fault"),
    [
        ([(10, 10, 32)], "empty"),
        ([(10, 41, 32)], "exceeds the prompt"),
        ([(-1, 4, 32)], "exceeds the prompt"),
        ([(0, 10, 32), (9, 12, 32)], "overlap"),
        ([(20, 30, 32), (0, 10, 32)], "overlap"),
        ([(0, 10, 31)], "32 bytes"),
    ],
)
def test_spans_that_do_not_fit_the_prompt_are_refused(
    tiny_llama: Path, spans: list[tuple[int, int, int]], fault: str
) -> None:
    engine = make_engine(tiny_llama)
    given = tuple(ContentSpan(start, end, bytes(size)) for start, end, size in spans)
    for request in (replace(generate("r", tokens(40)), spans=given), ScoreRequest("s", tokens(40), spans=given)):
        with pytest.raises(InvalidRequestError, match=fault):
            engine.add(request)
    assert not engine.has_unfinished


def test_after_invalidation_later_requests_reuse_nothing(tiny_llama: Path) -> None:
    engine, prompt = make_engine(tiny_llama, max_num_batched_tokens=64), tokens(200)
    expected = run(make_engine(tiny_llama), [generate("a", prompt, n=2)])
    engine.add(generate("a", prompt, n=2))
    for _ in range(2):
        engine.step()
    engine.invalidate_prefix_cache()
    late = run(engine, [generate("b", prompt, seed=6)])["b", 0]
    assert late.num_cached_tokens == 0, "no hit and no shared computation"
    engine = make_engine(tiny_llama)
    found = run(engine, [generate("a", prompt, n=2)])
    assert [bits(s) for s in found.values()] == [bits(s) for s in expected.values()]
    engine.invalidate_prefix_cache()
    assert run(engine, [generate("c", prompt)])["c", 0].num_cached_tokens == 0
    assert run(engine, [generate("d", prompt)])["d", 0].num_cached_tokens == 192


def test_running_requests_survive_invalidation(tiny_llama: Path) -> None:
    engine, prompt = make_engine(tiny_llama, max_num_batched_tokens=64), tokens(200)
    expected = run(make_engine(tiny_llama), [generate("a", prompt, n=2)])
    engine.add(generate("a", prompt, n=2))
    found = {}
    while engine.has_unfinished:
        engine.invalidate_prefix_cache()
        found |= {(o.request_id, o.index): o for o in samples_of(engine.step())}
    assert engine.stats().steps > 10, "the cache was invalidated many times meanwhile"
    assert {k: bits(s) for k, s in found.items()} == {k: bits(s) for k, s in expected.items()}


def test_without_prefix_caching_nothing_is_shared_between_requests(tiny_llama: Path) -> None:
    engine, prompt = make_engine(tiny_llama, enable_prefix_caching=False), tokens(40)
    samples = run(engine, [generate("a", prompt, n=4), generate("b", prompt)])
    assert engine.stats().computed_prompt_tokens == 80 and engine.stats().prefix_hits == 0
    warm = make_engine(tiny_llama)
    run(warm, [generate("a", prompt)])
    assert bits(run(warm, [generate("b", prompt)])["b", 0]) == bits(samples["b", 0])


def test_stop_tokens_and_max_tokens_end_a_sample(tiny_llama: Path) -> None:
    engine, prompt = make_engine(tiny_llama), tokens(20)
    free = run(engine, [generate("r", prompt, max_tokens=40)])["r", 0]
    stop = int(free.token_ids[7])
    first = free.token_ids.index(stop)
    stopped = run(engine, [generate("r", prompt, max_tokens=40, stop_token_ids=[stop])])["r", 0]
    assert stopped.finish_reason == "stop" and free.finish_reason == "length"
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert (free.stop_reason, stopped.stop_reason) == (None, stop)
    eos = engine.info.eos_token_ids[0]
    assert eos not in free.token_ids[:3]


def test_an_eos_token_ends_a_sample_unless_ignored(tmp_path: Path) -> None:
    from tiny import make_tiny_model

    probe = run(make_engine(make_tiny_model("llama", tmp_path / "probe")), [generate("r", tokens(20))])["r", 0]
    eos = int(probe.token_ids[3])
    engine = make_engine(make_tiny_model("llama", tmp_path / "model", eos_token_id=[2, eos]))
    end = probe.token_ids.index(eos) + 1
    ended = run(engine, [generate("r", tokens(20), ignore_eos=False)])["r", 0]
    assert ended.finish_reason == "stop" and ended.token_ids == probe.token_ids[:end] and ended.stop_reason == eos
    assert run(engine, [generate("r", tokens(20))])["r", 0].finish_reason == "length"
    late = run(engine, [generate("r", tokens(20), ignore_eos=False, min_tokens=8)])["r", 0]
    assert len(late.token_ids) > 8 and not {2, eos} & set(late.token_ids[:8])


def test_stop_strings(tiny_llama: Path) -> None:
    from transformers import AutoTokenizer

    engine, prompt = make_engine(tiny_llama), tokens(20)
    free = run(engine, [generate("r", prompt, max_tokens=30)])["r", 0]
    # Ids from 259 on are words. Lower ids are single bytes.
    at = next(i for i in range(4, 20) if free.token_ids[i] >= 259 and free.token_ids[i] not in free.token_ids[:i])
    text = AutoTokenizer.from_pretrained(tiny_llama).decode(free.token_ids[at : at + 1])[:-1]
    stopped = run(engine, [generate("r", prompt, max_tokens=30, stop=["never in the text", text])])["r", 0]
    assert stopped.finish_reason == "stop" and stopped.token_ids == free.token_ids[: at + 1]
    assert stopped.stop_reason == text
    late = run(engine, [generate("r", prompt, max_tokens=30, stop=[text], min_tokens=20)])["r", 0]
    assert len(late.token_ids) == 30


def test_abort_returns_the_current_tokens(tiny_llama: Path, steps_ahead: int) -> None:
    engine = make_engine(tiny_llama)
    expected = run(engine, [generate("g", tokens(20), n=3)])
    engine.add(generate("g", tokens(20), n=3))
    engine.add(generate("other", tokens(20), n=1))
    for _ in range(4):
        assert engine.step() == []
    [one] = samples_of(engine.abort("g", 1))
    assert (one.finish_reason, one.index) == ("abort", 1)
    seen = (4, 2)[steps_ahead]
    assert one.logprobs is not None
    assert one.token_ids == expected["g", 1].token_ids[:seen] and len(one.logprobs) == seen
    with pytest.raises(UnknownRequestError, match="sample 1"):
        engine.abort("g", 1)
    rest = samples_of(engine.abort("g"))
    assert [(o.index, o.finish_reason) for o in rest] == [(0, "abort"), (2, "abort")]
    engine.check_integrity()
    [other] = drain(engine)
    assert other.finish_reason == "length"
    with pytest.raises(UnknownRequestError, match="'g'"):
        engine.abort("g")


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_abort_of_the_request_that_computes_a_shared_prompt(tiny_llama: Path, steps: int) -> None:
    prompt = tokens(100)
    expected = run(make_engine(tiny_llama), [generate("b", prompt, n=2, seed=8)])
    engine = make_engine(tiny_llama, max_num_batched_tokens=64)
    engine.add(generate("a", prompt, n=2))
    engine.add(generate("b", prompt, n=2, seed=8))
    for _ in range(steps):
        engine.step()
    assert len(engine.abort("a")) == 2
    samples = {(o.request_id, o.index): bits(o) for o in samples_of(drain(engine))}
    assert samples == {key: bits(sample) for key, sample in expected.items()}


def test_abort_of_everything_frees_everything(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, max_num_seqs=2, max_num_batched_tokens=32)
    for i in range(5):
        engine.add(generate(str(i), tokens(50, seed=i % 2), n=2))
    engine.add(ScoreRequest("score", tokens(50)))
    engine.step()
    assert {len(engine.abort(str(i))) for i in range(5)} == {2}
    [aborted] = engine.abort("score")
    assert isinstance(aborted, ScoreOutput) and aborted.finish_reason == "abort" and len(aborted.logprobs) == 0
    assert not engine.has_unfinished and engine.stats().blocks_in_use == 0
    engine.check_integrity()


def test_nan_weights_end_only_the_samples_that_use_them(tiny_llama: Path, backend: str) -> None:
    prompts = {"good": tokens(20), "bad": tokens(20, seed=1)}
    assert 7 not in prompts["good"]
    prompts["bad"][5] = 7
    expected = run(make_engine(tiny_llama, backend=backend), [generate("good", prompts["good"], temperature=0.0)])
    assert 7 not in expected["good", 0].token_ids
    engine = make_engine(tiny_llama, backend=backend)
    embedding = executor_of(engine)._runner.model.embed.to_dense().clone()
    embedding[7] = torch.nan
    executor_of(engine)._runner.model.embed.copy_(embedding)
    samples = run(engine, [generate(name, prompt, temperature=0.0) for name, prompt in prompts.items()])
    assert samples["bad", 0].finish_reason == "error" and "NaN" in (samples["bad", 0].error or "")
    assert bits(samples["good", 0]) == bits(expected["good", 0])


@pytest.mark.parametrize(
    ("prompt", "params", "expected"),
    [
        ([], {}, ("prompt_token_ids", 0, 1)),
        ([5, -1], {}, ("prompt_token_ids", -1, 511)),
        ([5, 512], {}, ("prompt_token_ids", 512, 511)),
        ([5], dict(stop_token_ids=[600]), ("stop_token_ids", 600, 511)),
        (range(3, 260), {}, ("prompt_token_ids", 257 + 12, 256)),
        (range(3, 203), dict(max_tokens=57), ("prompt_token_ids", 257, 256)),
        (range(3, 203), dict(max_tokens=20), (None, 14, 12)),
    ],
)
def test_a_request_that_can_never_be_served_is_rejected_at_once(tiny_llama: Path, prompt, params, expected) -> None:
    engine = make_engine(tiny_llama, max_model_len=256, num_blocks=12)
    engine.add(generate("good", tokens(20)))
    with pytest.raises(InvalidRequestError, check=about(expected[0], value=expected[1], limit=expected[2])):
        engine.add(generate("bad", np.array(prompt, np.int32), **params))
    [good] = drain(engine)
    assert good.request_id == "good" and good.finish_reason == "length"


def test_banning_the_whole_vocabulary_is_rejected(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    assert engine.info.vocab_size == 512 and engine.info.eos_token_ids == (2,)
    everything, all_but_the_end = range(512), [id for id in range(512) if id != 2]
    for params in (
        dict(stop_token_ids=everything),
        dict(stop_token_ids=all_but_the_end, ignore_eos=False),
        dict(stop_token_ids=[*everything, 7]),
    ):
        with pytest.raises(InvalidRequestError, check=about("min_tokens")):
            engine.add(generate("bad", tokens(20), min_tokens=1, **params))
    assert not engine.has_unfinished and engine.stats().num_waiting == 0
    requests = {
        "one id is left": generate("one id is left", tokens(20), min_tokens=3, stop_token_ids=all_but_the_end),
        "none is banned": generate("none is banned", tokens(20), stop_token_ids=everything),
    }
    samples = run(engine, requests.values())
    assert samples["one id is left", 0].token_ids[:3] == [2, 2, 2]
    assert samples["none is banned", 0].finish_reason == "stop" and len(samples["none is banned", 0].token_ids) == 1


def test_edits_that_depend_on_no_token_are_built_once_per_request(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, edits = make_engine(tiny_llama), list[RowEdits | None]()
    prepared = executor_of(engine)._sampler.prepared
    monkeypatch.setattr(
        executor_of(engine)._sampler,
        "prepared",
        lambda draws, device: edits.extend(map(draws.edits.get, range(len(draws)))) or prepared(draws, device),
    )
    run(engine, [generate("r", tokens(20), n=3, max_tokens=6, min_tokens=4, stop_token_ids=[7, 9], temperature=2.0)])
    first, later = edits[: 3 * 4], edits[3 * 4 :]
    assert {*later} == {None} and {*map(id, first)} == {id(first[0])}
    assert first[0] is not None and first[0].entries["token_id"].tolist() == [7, 9]


def test_any_temperature_can_be_scored(tiny_llama: Path, backend: str) -> None:
    engine, prompt = make_engine(tiny_llama, backend=backend), tokens(20)
    for temperature in (1e39, 1e300, 1e-320, 0.0):
        [sample] = run(engine, [generate("r", prompt, temperature=temperature, logprobs="temperature")]).values()
        found = score(engine, np.concatenate((prompt, sample.token_ids)), temperature=temperature)[19:]
        assert found.tobytes() == bits(sample)[1], temperature


def test_the_id_of_a_running_request_is_rejected(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    engine.add(generate("r", tokens(20)))
    with pytest.raises(InvalidRequestError, check=about("id", value="r")):
        engine.add(generate("r", tokens(20)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            dict(num_blocks=1, kv_memory=1),
            "^num_blocks and kv_memory each set the size of the KV cache; set at most one of",
        ),
        (dict(num_blocks=1, kv_memory_fraction=0.5), "^num_blocks and kv_memory_fraction each set the size"),
        (dict(num_blocks=None, kv_memory_fraction=1.5), "kv_memory_fraction: .*got 1.5"),
        (dict(num_blocks=None, kv_memory_fraction=0.0), "kv_memory_fraction: .*got 0.0"),
        (dict(num_blocks=None, kv_memory=10), "10 bytes are not enough for one KV block of 8192 bytes"),
        (dict(max_model_len=4096), "at most 1024.*got 4096"),
        (dict(max_num_seqs=65, max_num_batched_tokens=64), "at most max_num_batched_tokens = 64"),
        (dict(device="cuda:99"), "device.*'cuda:99'"),
        (dict(device="meta"), "device: .*'meta'"),
        (dict(num_blocks=2**60), f"{2**60} blocks of 8192 bytes"),
        (dict(num_blocks=None, kv_memory=2**62), f"{2**49} blocks of 8192 bytes"),
        (dict(devise="cpu"), "devise: unknown parameter"),
        (dict(block_size=0), "block_size: .*got 0"),
        (dict(block_size=15), "block_size: must be a multiple of 2"),
        (dict(backend="fast"), "backend: .*'triton' or 'reference' .got 'fast'"),
        (dict(dtype="int8"), "dtype: .*got 'int8'"),
    ],
)
def test_a_configuration_that_cannot_work_is_rejected(tiny_llama: Path, settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(tiny_llama, **settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(eos_token_id=[2, 512]), r"eos_token_id must be in \[0, 512\) .got 512"),
        (dict(eos_token_id=-1), "eos_token_id must be .*got -1"),
        (dict(dtype="int8"), "dtype .* must be float32, bfloat16 or float16 .got torch.int8."),
    ],
)
def test_a_config_json_that_would_fail_later_is_rejected(tiny_llama: Path, tmp_path: Path, change, message) -> None:
    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    (model / "generation_config.json").unlink()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=message):
        make_engine(model)


def test_defaults_follow_the_device(tiny_llama: Path) -> None:
    sizes = {
        device: (config.max_num_seqs, config.max_num_batched_tokens)
        for device in ("cpu", "cuda", "cuda:1")
        for config in [EngineConfig(model="any", device=device)]
    }
    assert sizes == {"cpu": (64, 512), "cuda": (256, 8192), "cuda:1": (256, 8192)}
    given = EngineConfig(model="any", device="cuda", max_num_seqs=3, max_num_batched_tokens=None)
    assert (given.max_num_seqs, given.max_num_batched_tokens) == (3, 8192)
    assert EngineConfig(**given.model_dump()) == given
    loaded, gigabyte = load_model(EngineConfig(model=str(tiny_llama))), 2**30
    for device, fraction in (("cpu", 0.25), ("cuda", 0.9)):
        config = EngineConfig(model=str(tiny_llama), device=device, max_num_seqs=8192, max_num_batched_tokens=8192)
        assert engine_info(config, loaded, gigabyte).num_blocks == int(fraction * gigabyte) // 8192


def test_kv_memory_is_counted_in_whole_blocks(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, num_blocks=None, kv_memory=10 * 8192 + 4096)
    allocated = sum(cache.nbytes for caches in executor_of(engine)._runner.memories for cache in caches)
    assert engine.info.num_blocks == 10 and engine.info.kv_bytes == allocated == 10 * 8192


def test_an_unsupported_architecture_names_the_supported_ones(tiny_llama: Path, tmp_path: Path) -> None:
    config = (tiny_llama / "config.json").read_text().replace("LlamaForCausalLM", "GPT2LMHeadModel")
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match="LlamaForCausalLM, .*Qwen3ForCausalLM.* .got .GPT2LMHeadModel"):
        make_engine(tmp_path)


def test_the_log_lists_memory_by_purpose(tiny_qwen3_5: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "trueroll.engine.running.executor"):
        info = make_engine(tiny_qwen3_5, state_budget=7).info
    assert info.scratch_bytes > 0 and info.live_states == 72
    assert caplog.messages == [
        f"memory in bytes: weights {info.weight_bytes}, KV cache of 512 blocks {info.kv_bytes}, "
        f"72 live states, 7 checkpoints and drafts {info.state_bytes}, largest step {info.scratch_bytes}"
    ]
