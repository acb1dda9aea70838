"""Drafts change no bit: samples with drafts are compared with samples without, for drafts that are right and wrong."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matrix import thinned

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.engine.drafting.drafter import FunctionDrafter
from trueroll.engine.drafting.repeats import RepeatsDrafter
from trueroll.engine.drafting.rule import StepCosts
from trueroll.engine.engine import Engine
from trueroll.engine.outputs.stop_strings import load_vocabulary
from trueroll.engine.request import GenerateRequest, SampleOutput, columns_of
from trueroll.engine.running.loading import LoadedModel, load_model
from trueroll.engine.running.step import Step

from ..checkpoints import read_tensors, stage
from ..drive import bits, drain, generate, run, samples_of, score, tokens, top_bits

pytestmark = pytest.mark.usefixtures("steps_ahead")
Samples = dict[tuple[str, int], SampleOutput]
FAMILIES = ("llama", "gemma3", "qwen3_moe", "qwen3_5")


@dataclass
class Prophet:
    """A drafter function that knows the samples. Each draft has `most` tokens, of which the first few are right.

    `known`: prompt and sample of each sample.
    """

    known: list[array[int]]
    rng: np.random.Generator
    vocab_size: int = 512

    def __call__(self, so_far: array[int], most: int) -> Sequence[int]:
        matching = [whole for whole in self.known if whole[: len(so_far)] == so_far]
        right = matching[0][len(so_far) :][: self.rng.integers(0, most + 1)] if matching else array("i")
        wrong = self.rng.integers(0, self.vocab_size, most - len(right))
        return [*right, *wrong.tolist()]


def requests(has_experts: bool) -> list[GenerateRequest]:
    """Requests with every sampling field."""
    filters: dict[str, Any] = dict(top_k=40, top_p=0.9, min_p=0.01)
    prompt = tokens(33, seed=3)
    return [
        generate("greedy", prompt, temperature=0.0, max_tokens=40),
        generate("group", prompt, n=3, temperature=1.0, max_tokens=37),
        generate(
            "filters", tokens(20, seed=4), n=2, temperature=0.7, max_tokens=30, **filters, return_sampling_mask=True
        ),
        generate("hot", tokens(17, seed=5), temperature=1.5, max_tokens=33, top_logprobs=3, logprobs="raw"),
        generate("tops", tokens(9, seed=6), max_tokens=21, top_logprobs=4, target_token_ids=(5, 9), **filters),
        generate("one", tokens(40, seed=7), temperature=1.0, max_tokens=1),
        generate(
            "bans", tokens(5, seed=8), temperature=1.0, max_tokens=40, min_tokens=25, stop_token_ids=[*range(300)]
        ),
        generate(
            "penalties", prompt, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={7: 2.0}, max_tokens=30
        ),
        generate("words", tokens(11, seed=10), n=2, max_tokens=30, bad_words_token_ids=[[i, 9] for i in range(512)]),
        generate("grammar", prompt, n=2, max_tokens=30, ignore_eos=False, structured_outputs=dict(json_object=True)),
        generate("routes", tokens(21, seed=9), n=2, max_tokens=24, return_routed_experts=has_experts),
    ]


def parts(sample: SampleOutput) -> tuple[object, ...]:
    """Return everything of a sample that drafts must not change."""
    tops = top_bits(sample) if sample.top_token_ids is not None else None
    routes = None if sample.routed_experts is None else sample.routed_experts.tobytes()
    targets = None if sample.target_logprobs is None else sample.target_logprobs.tobytes()
    kept = [values.tobytes() for name, values in columns_of(sample).items() if name.startswith("kept")]
    return *bits(sample), sample.finish_reason, sample.stop_reason, sample.weight_versions, tops, routes, targets, kept


def make(loaded: LoadedModel, config: dict[str, Any], function: Callable[..., Any] | None, **more: Any) -> Engine:
    if function is None:
        return Engine(EngineConfig(**(config | more)), loaded)
    return Engine(EngineConfig(**(config | more), speculative="ngram"), loaded, FunctionDrafter(function))


def some_were_rejected(engine: Engine) -> bool:
    """Return whether some drafted tokens were accepted and some rejected."""
    [stats] = engine.stats().drafts
    return 0 < stats.num_accepted < stats.num_drafted


@thinned(lambda steps_ahead, family, **_: steps_ahead or family == "llama")
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_no_bit(family: str, steps_ahead: int, tmp_path: Path) -> None:
    config = dict(model=str(make_tiny_model(family, tmp_path / "model")), num_blocks=512, num_threads=1, max_num_seqs=8)
    loaded = load_model(EngineConfig(**config))
    plain = make(loaded, config, None)
    asked = requests(plain.info.num_experts > 0)
    expected = run(plain, asked)
    known = known_texts(asked, expected)
    for most in (1, 3, 8):
        engine = make(loaded, config, Prophet(known, np.random.default_rng(most)), num_speculative_tokens=most)
        found = run(engine, asked)
        assert some_were_rejected(engine)
        assert {key: parts(sample) for key, sample in found.items()} == {k: parts(s) for k, s in expected.items()}
        counts = [(sample.num_drafted_tokens, sample.num_accepted_tokens) for sample in found.values()]
        [stats] = engine.stats().drafts
        assert tuple(map(sum, zip(*counts, strict=True))) == (stats.num_drafted, stats.num_accepted)
        if not steps_ahead:  # with steps queued ahead, one more token is computed after a stop
            assert engine.stats().expert_tokens == plain.stats().expert_tokens
            assert engine.stats().computed_tokens == plain.stats().computed_tokens


def known_texts(asked: list[GenerateRequest], samples: Samples) -> list[array[int]]:
    """Return prompt and sample of each sample."""
    return [array("i", [*r.prompt_token_ids, *samples[r.id, i].token_ids]) for r in asked for i in range(r.params.n)]


def small(family: str, tmp_path: Path) -> tuple[dict[str, Any], LoadedModel]:
    """Return a configuration under which sequences are preempted and prompts computed in chunks, and its model."""
    model = make_tiny_model(family, tmp_path / "model")
    config = dict(
        model=str(model), num_blocks=26, block_size=4, num_threads=1, max_num_seqs=6, max_num_batched_tokens=24
    )
    config |= dict(state_interval=8, decode_state_interval=8, state_budget=16)
    return config, load_model(EngineConfig(**config))


@thinned(lambda steps_ahead, family, **_: steps_ahead or family == "llama")
@pytest.mark.parametrize("family", FAMILIES)
def test_rejected_drafts_leave_nothing_behind(family: str, tmp_path: Path) -> None:
    """Wrong drafts are combined with preemptions, chunks and hits. Only true prefixes are published, and windows keep
    their KV.
    """
    config, loaded = small(family, tmp_path)
    asked = [generate(str(i), tokens(21 + i, seed=i // 2), n=2, max_tokens=30, seed=i) for i in range(6)]
    expected = run(make(loaded, config | dict(num_blocks=512), None), asked)
    texts = known_texts(asked, expected)
    engine = make(loaded, config, Prophet(texts, np.random.default_rng(0)), num_speculative_tokens=5)
    tables, running = engine._scheduler.cache.tables, engine._scheduler.running
    for request in asked:
        engine.add(request)
    outputs: list[SampleOutput] = []
    while engine.has_unfinished:
        outputs += [output for output in engine.step() if isinstance(output, SampleOutput)]
        engine.check_integrity()
        for sequence in running.sequences:
            for group, window in tables.windowed:
                assert sequence.table.starts[group] <= tables.first_needed(window, len(sequence.tokens) - 1)
    found = {(output.request_id, output.index): output for output in outputs}
    assert {key: parts(sample) for key, sample in found.items()} == {k: parts(s) for k, s in expected.items()}
    assert engine.stats().preemptions > 0 and engine.stats().prefix_hits > 0
    assert engine.stats().checkpoints_restored > 0 or not engine.info.live_states
    assert some_were_rejected(engine)
    wholes = [text.tobytes() for text in texts]
    for entry in engine._scheduler.cache.entries:
        published = b""
        while entry is not None:
            published, entry = entry.tokens + published, entry.parent
        assert any(whole.startswith(published) for whole in wholes)


def test_drafts_go_on_through_a_commit_of_weights(tmp_path: Path) -> None:
    """The tokens before and after a commit have the log-probs of their own weights."""
    older, newer = (make_tiny_model("llama", tmp_path / name) for name in ("older", "newer"))
    changed = {name: tensor * 1.01 for name, tensor in read_tensors(newer).items()}
    config = dict(model=str(older), num_blocks=512, num_threads=1)
    engine = make(load_model(EngineConfig(**config)), config, lambda so_far, most: [*so_far[-most:]])
    asked = [generate(str(i), tokens(19, seed=i), n=2, max_tokens=40, temperature=0.0) for i in range(3)]
    for request in asked:
        engine.add(request)
    outputs = [output for _ in range(12) for output in engine.step()]
    outputs += engine.commit_weights(stage(engine, changed), 1, "recompute")
    outputs += drain(engine)
    assert some_were_rejected(engine)
    spans = {(o.request_id, o.index): o for o in samples_of(outputs)}
    assert all([span.version for span in output.weight_versions] == [0, 1] for output in spans.values())
    old = make(load_model(EngineConfig(**config)), config, None)
    for output in spans.values():
        whole = np.concatenate((asked[int(output.request_id)].prompt_token_ids, output.token_ids)).astype(np.int32)
        border, start = output.weight_versions[1].start, len(whole) - len(output.token_ids) - 1
        assert output.logprobs is not None
        assert score(engine, whole, temperature=0.0)[start + border :].tobytes() == output.logprobs[border:].tobytes()
        assert score(old, whole, temperature=0.0)[start:][:border].tobytes() == output.logprobs[:border].tobytes()


def test_stop_strings_end_a_sample_inside_a_draft(tmp_path: Path) -> None:
    config = dict(model=str(make_tiny_model("llama", tmp_path / "model")), num_blocks=512, num_threads=1)
    loaded = load_model(EngineConfig(**config))
    free = run(make(loaded, config, None), [generate("a", tokens(9), max_tokens=30)])["a", 0]
    vocabulary = load_vocabulary(tmp_path / "model")
    stop = vocabulary.decode(free.token_ids[17:19])
    asked = [generate("a", tokens(9), max_tokens=30, stop=(stop,))]
    expected = run(make(loaded, config, None), asked)
    assert expected["a", 0].finish_reason == "stop" and len(expected["a", 0].token_ids) < 30
    text = array("i", [*tokens(9), *free.token_ids])
    for most in (1, 7):
        engine = make(loaded, config, lambda so_far, most: text[len(so_far) :][:most], num_speculative_tokens=most)
        assert parts(run(engine, asked)["a", 0]) == parts(expected["a", 0])
        assert engine.stats().generated_tokens == len(expected["a", 0].token_ids)
        assert engine.stats().drafts[0].num_accepted > 0


def test_a_step_has_blocks_and_budget_for_drafts_or_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step exceeds its budget of tokens, or computes a row from which no token of the sample can be drawn."""
    config, loaded = small("llama", tmp_path)
    asked = [generate("a", tokens(16), max_tokens=85)]  # the last block that there is
    expected = run(make(loaded, config, None), asked)
    engine = make(
        loaded, config, Prophet(known_texts(asked, expected), np.random.default_rng(0)), num_speculative_tokens=64
    )
    steps, compute = list[Step](), engine._executor.compute
    monkeypatch.setattr(engine._executor, "compute", lambda step: (steps.append(step), compute(step))[1])
    assert parts(run(engine, asked)["a", 0]) == parts(expected["a", 0])
    assert sum(engine.stats().drafts[0].accepted) > 0
    assert max(len(step.token_ids) for step in steps) == config["max_num_batched_tokens"]
    assert max(int(step.positions.max()) for step in steps) == 16 + 85 - 2


def test_ids_outside_the_vocabulary_end_a_draft(tmp_path: Path) -> None:
    config = dict(model=str(make_tiny_model("llama", tmp_path / "model")), num_blocks=512, num_threads=1)
    loaded = load_model(EngineConfig(**config))
    asked = [generate("a", tokens(9))]
    expected = run(make(loaded, config, None), asked)
    for bad in (-1, 512, 2**40):
        engine = make(loaded, config, lambda so_far, most, bad=bad: [5, bad, 5])
        assert parts(run(engine, asked)["a", 0]) == parts(expected["a", 0])
        [stats] = engine.stats().drafts
        assert sum(stats.drafted) == stats.drafts > 0


def test_repeats_are_drafted_and_change_no_bit(tmp_path: Path) -> None:
    """The samples of a group are drawn twice with the same seeds, so the second run repeats all tokens."""
    config = dict(model=str(make_tiny_model("llama", tmp_path / "model")), num_blocks=512, num_threads=1)
    loaded = load_model(EngineConfig(**config))
    asked = [generate("a", np.tile(tokens(8), 4), n=4, max_tokens=40)]
    expected = run(make(loaded, config, None), asked)
    engine = Engine(EngineConfig(**config, speculative="ngram"), loaded, draft_always=True)
    for _ in range(2):
        assert {k: parts(s) for k, s in run(engine, asked).items()} == {k: parts(s) for k, s in expected.items()}
    [stats] = engine.stats().drafts
    assert sum(stats.accepted) > 100 and stats.accepted[0] >= stats.accepted[3] > 0 and stats.drafter == "repeats"


def test_while_drafting_pauses_no_drafter_is_asked_and_steps_run_ahead(steps_ahead: int, tmp_path: Path) -> None:
    config = dict(model=str(make_tiny_model("llama", tmp_path / "model")), num_blocks=512, num_threads=1)
    loaded, asked = load_model(EngineConfig(**config)), [generate("a", tokens(9), max_tokens=120)]
    expected = run(make(loaded, config, None), asked)
    calls: list[int] = []
    engine = make(loaded, config, lambda so_far, most: calls.append(len(so_far)) or [])
    engine.add(asked[0])
    in_flight: dict[int, bool] = {}
    outputs: list[SampleOutput] = []
    while engine.has_unfinished:
        before = len(calls)
        outputs += [output for output in engine.step() if isinstance(output, SampleOutput)]
        if len(calls) == before:
            in_flight[engine.stats().steps] = bool(engine._pipeline._queued)
    assert parts(outputs[0]) == parts(expected["a", 0])
    assert 20 <= len(calls) <= 24, "the first 16 steps, and every 16th step after them"
    assert len(in_flight) >= 90 and any(in_flight.values()) == bool(steps_ahead)


@thinned(lambda steps_ahead, family, **_: steps_ahead or family == "llama")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pause_that_begins_while_drafts_are_in_flight_changes_no_bit(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After fifteen wrong drafts, one draft is partly right but costs more than it gains. The next step runs ahead."""
    config = dict(model=str(make_tiny_model(family, tmp_path / "model")), num_blocks=512, num_threads=1)
    loaded, asked = load_model(EngineConfig(**config)), [generate("a", tokens(9), max_tokens=80)]
    expected = run(make(loaded, config, None), asked)["a", 0]
    whole, calls = array("i", [*tokens(9), *expected.token_ids]), list[int]()

    def draft(so_far: array[int], most: int) -> list[int]:
        calls.append(len(so_far))
        right = whole[len(so_far) :]
        return [(right[0] + 1) % 512] if len(calls) < 16 else [*right[:2], (right[2] + 1) % 512] * (len(calls) == 16)

    def dear(costs: StepCosts, rows: int, drafted: int, tokens: int) -> float:
        return 1.0 if drafted else 0.0

    monkeypatch.setattr(StepCosts, "price", dear)
    engine = make(loaded, config, draft)
    drafting = engine._drafting
    assert drafting is not None
    monkeypatch.setattr(drafting, "_choose", lambda chances, *_: {lane: len(each) for lane, each in chances.items()})
    monkeypatch.setattr(StepCosts, "is_known", lambda costs, rows: True)
    drafting._adapts = True
    found = run(engine, asked)["a", 0]
    assert engine.stats().drafts[0].num_accepted == 2 and len(calls) < 70, "premise: drafting paused"
    assert parts(found) == parts(expected)
    for most in (1, 8):  # never right
        engine = make(loaded, config, lambda so_far, most: [7] * most, num_speculative_tokens=most)
        assert parts(run(engine, asked)["a", 0]) == parts(expected)


def test_a_draft_that_is_too_long_is_cut(tmp_path: Path) -> None:
    config, loaded = small("qwen3_5", tmp_path)
    asked = [generate("a", tokens(9), max_tokens=40)]
    expected = run(make(loaded, config, None), asked)
    for last in (-1, 5):
        engine = make(loaded, config, lambda so_far, most, last=last: [7] * (most + 5) + [last])
        assert parts(run(engine, asked)["a", 0]) == parts(expected["a", 0])
        assert len(engine.stats().drafts[0].drafted) == 4 and engine.stats().drafts[0].num_drafted > 0


def test_nothing_is_kept_of_samples_that_have_ended(tmp_path: Path) -> None:
    config = dict(model=str(make_tiny_model("llama", tmp_path / "model")), num_blocks=512, num_threads=1)
    engine = Engine(EngineConfig(**config, speculative="ngram"), load_model(EngineConfig(**config)), RepeatsDrafter())
    asked = [generate(str(i), tokens(9, seed=i), max_tokens=20, stop_token_ids=[*range(512)]) for i in range(5)]
    run(engine, [*asked, generate("long", tokens(9, seed=9), n=3, max_tokens=30)])
    drafting = engine._drafting
    assert drafting is not None and not drafting._pauses
    [(drafter, _)] = drafting._drafters
    assert isinstance(drafter, RepeatsDrafter) and not drafter._keys
    assert not any(index._running for index in drafter._indexes.values())


def test_a_sample_that_is_aborted_with_drafts_in_flight_is_counted_nowhere(steps_ahead: int, tmp_path: Path) -> None:
    """Its drafts count neither in a sample nor in the statistics. The sums of the statistics equal the sums over the
    samples.
    """
    config = dict(model=str(make_tiny_model("llama", tmp_path / "model")), num_blocks=512, num_threads=1)
    loaded = load_model(EngineConfig(**config))
    asked = [generate(name, tokens(9, seed=seed), max_tokens=40) for seed, name in enumerate("ab")]
    known = known_texts(asked, run(make(loaded, config, None), asked))
    engine = make(loaded, config, Prophet(known, np.random.default_rng(0)))
    for request in asked:
        engine.add(request)
    outputs = [output for _ in range(5) for output in engine.step()]
    in_flight = [queued for turn in engine._pipeline._queued for queued in turn if queued.chunks.drafts]
    assert bool(in_flight) == bool(steps_ahead), "premise: drafts are in flight"
    outputs += engine.abort("a")
    outputs += drain(engine)
    [stats] = engine.stats().drafts
    assert stats.num_drafted == sum(sample.num_drafted_tokens for sample in samples_of(outputs)) > 0
    assert stats.num_accepted == sum(sample.num_accepted_tokens for sample in samples_of(outputs))
