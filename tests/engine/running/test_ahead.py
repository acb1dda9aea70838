"""Steps that are queued before the engine sees the tokens of the previous step: when the engine queues ahead, and the
cost. Other engine tests run both with and without queueing ahead.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trueroll.engine.engine import Engine
from trueroll.engine.request import SampleOutput
from trueroll.engine.running import executor as executor_module
from trueroll.engine.running.model_runner import ModelRunner
from trueroll.engine.running.sampler import Drawing
from trueroll.engine.scheduling.scheduler import Scheduler

from ..drive import bits, drain, generate, make_engine, run, tokens, top_bits

TOPS = ("entropy", "top_token_ids", "top_logprobs")


@pytest.fixture(autouse=True)
def _ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "runs_ahead", lambda device: True)


def engine_in_step(model: Path) -> Engine:
    """Return an engine that finishes each step before the next, as on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor_module, "runs_ahead", lambda device: False)
        return make_engine(model)


def computed_tokens(model: Path, **params: object) -> int:
    engine = make_engine(model)
    run(engine, [generate("r", tokens(20), **params)])
    return engine.stats().computed_tokens


def test_a_step_is_queued_before_the_previous_tokens_are_seen(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, events = make_engine(tiny_llama), []
    compute, wait = ModelRunner.run, Drawing.wait
    monkeypatch.setattr(ModelRunner, "run", lambda *args: events.append("queue") or compute(*args))
    monkeypatch.setattr(Drawing, "wait", lambda drawing: events.append("see") or wait(drawing))
    run(engine, [generate("r", tokens(20), max_tokens=4)])
    assert events == ["queue", "queue", "see", "queue", "see", "queue", "see", "see"]


def test_no_row_is_computed_beyond_max_tokens(tiny_llama: Path) -> None:
    assert computed_tokens(tiny_llama, max_tokens=6) == 20 + 5
    assert computed_tokens(tiny_llama, max_tokens=1) == 20


def test_the_row_after_a_stop_token_is_discarded(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    free = run(engine, [generate("r", tokens(20), max_tokens=8)])["r", 0]
    assert free.logprobs is not None
    stop = int(free.token_ids[4])
    assert stop not in free.token_ids[:4]
    engine = make_engine(tiny_llama)
    sample = run(engine, [generate("r", tokens(20), max_tokens=8, stop_token_ids=(stop,))])["r", 0]
    assert sample.finish_reason == "stop"
    assert bits(sample) == (tuple(free.token_ids[:5]), free.logprobs[:5].tobytes())
    assert engine.stats().computed_tokens == 20 + 5, "the discarded row is the fifth"
    assert engine.stats().blocks_in_use == 0


def test_min_tokens_counts_unseen_tokens(tiny_llama: Path) -> None:
    free = run(make_engine(tiny_llama), [generate("r", tokens(20), max_tokens=8)])["r", 0]
    for least in range(1, 8):
        stop = int(free.token_ids[least - 1])
        found = run(
            make_engine(tiny_llama), [generate("r", tokens(20), max_tokens=8, min_tokens=least, stop_token_ids=[stop])]
        )
        assert stop not in found["r", 0].token_ids[:least]


EDITS: dict[str, dict[str, Any]] = {
    "biases": dict(logit_bias={7: 0.5}),
    "bad words": dict(bad_words_token_ids=[[7]]),
    "allowed tokens": dict(allowed_token_ids=range(500)),
}


@pytest.mark.parametrize("edits", EDITS.values(), ids=EDITS)
def test_min_tokens_counts_unseen_tokens_of_samples_with_other_edits(tiny_llama: Path, edits: dict[str, Any]) -> None:
    """A request beside the others makes the engine see all tokens, which must not change the count."""
    ends = set[int]()
    free = run(engine_in_step(tiny_llama), [generate("r", tokens(20), max_tokens=8, **edits)])["r", 0]
    for least in range(1, 8):
        stop = int(free.token_ids[least])
        asked = generate("r", tokens(20), max_tokens=8, min_tokens=least, stop_token_ids=[stop], **edits)
        beside = generate("other", tokens(9), max_tokens=12, repetition_penalty=1.1)
        expected = run(engine_in_step(tiny_llama), [asked])["r", 0]
        assert bits(run(make_engine(tiny_llama), [asked])["r", 0]) == bits(expected)
        assert bits(run(make_engine(tiny_llama), [asked, beside])["r", 0]) == bits(expected)
        ends.add(len(expected.token_ids))
    assert len(ends) > 3, "premise: samples end by the stop token right after `min_tokens`"


def test_settle_returns_outputs_of_the_step_in_flight(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    engine.add(generate("r", tokens(20), max_tokens=1))
    assert engine.step() == []
    [sample] = engine.settle()
    assert sample.finish_reason == "length" and not engine.has_unfinished and engine.settle() == []


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_abort_while_a_step_is_in_flight(tiny_llama: Path, steps: int) -> None:
    engine = make_engine(tiny_llama)
    expected = run(make_engine(tiny_llama), [generate("b", tokens(20, seed=1))])["b", 0]
    engine.add(generate("a", tokens(20), n=2))
    engine.add(generate("b", tokens(20, seed=1)))
    for _ in range(steps):
        engine.step()
    assert len(engine.abort("a")) == 2
    engine.check_integrity()
    [sample] = drain(engine)
    assert isinstance(sample, SampleOutput) and bits(sample) == bits(expected)


def test_after_aborting_everything_no_step_in_flight_returns_outputs(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    engine.add(generate("a", tokens(20)))
    for _ in range(3):
        engine.step()
    engine.abort("a")
    assert not engine.has_unfinished and engine.stats().blocks_in_use == 0
    samples = run(engine, [generate("a", tokens(20))])
    assert bits(samples["a", 0]) == bits(run(make_engine(tiny_llama), [generate("a", tokens(20))])["a", 0])


def test_a_prompt_preempted_before_its_tokens_are_seen_starts_its_group(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older request takes the blocks while the prompt's last chunk is in flight. The group's samples then fork from
    an empty block table.
    """
    fork, tables = Scheduler.fork, []
    monkeypatch.setattr(
        Scheduler, "fork", lambda self, parent, *its: tables.append(parent.table) or fork(self, parent, *its)
    )
    older, group = generate("old", tokens(23), max_tokens=30), generate("g", tokens(24, seed=1), n=3, max_tokens=4)
    engine = make_engine(tiny_llama, num_blocks=7, block_size=8, max_num_batched_tokens=64)
    engine.add(older)
    while engine.stats().blocks_in_use < 4:
        engine.step()
    for _ in range(6):
        engine.step()
    engine.add(group)
    found = {(o.request_id, o.index): o for o in drain(engine) if isinstance(o, SampleOutput)}
    assert any(not table for table in tables)
    calm = run(make_engine(tiny_llama), [older, group])
    assert {key: bits(sample) for key, sample in found.items()} == {key: bits(s) for key, s in calm.items()}


@pytest.mark.parametrize("seed", range(6))
def test_samples_keep_their_bits_in_random_orders_of_events(tiny_llama: Path, seed: int) -> None:
    """Add, abort, recompute and preempt requests in random order."""
    rng = random.Random(seed)
    requests = [
        generate(
            str(i),
            tokens(rng.randrange(1, 60), seed=i % 7),
            n=rng.randrange(1, 4),
            max_tokens=rng.randrange(1, 20),
            stop_token_ids=tuple(range(3, 500, 9)) if i % 3 else (),
            **(dict(top_k=20) if i % 4 == 0 else dict(top_logprobs=4) if i % 4 == 1 else {}),
        )
        for i in range(40)
    ]
    expected = run(engine_in_step(tiny_llama), requests)
    engine = make_engine(tiny_llama, num_blocks=24, block_size=8, max_num_seqs=6, max_num_batched_tokens=48)
    outputs, waiting = [], requests.copy()
    while waiting or engine.has_unfinished:
        action = rng.random()
        if waiting and action < 0.3:
            engine.add(waiting.pop(0))
        elif action < 0.33:
            outputs += engine.interrupt("recompute")
        elif action < 0.36 and engine._ledger.open:
            outputs += engine.abort(rng.choice(list(engine._ledger.open)))
        else:
            outputs += engine.step()
        engine.check_integrity()
    found = {(output.request_id, output.index): output for output in outputs}
    assert len(found) == len(outputs) == len(expected), "each sample has one output"
    reasons = Counter(output.finish_reason for output in outputs)
    assert min(reasons[reason] for reason in ("stop", "length", "abort")) > 0
    assert engine.stats().preemptions > 0 and engine.stats().recomputed > 0
    for key, output in found.items():
        count = len(output.token_ids)
        whole = expected[key]
        assert output.token_ids == whole.token_ids[:count]
        assert output.logprobs is not None and whole.logprobs is not None
        assert output.logprobs.tobytes() == whole.logprobs[:count].tobytes()
        if whole.entropy is not None:
            assert top_bits(output) == top_bits(replace(whole, **{name: getattr(whole, name)[:count] for name in TOPS}))
        assert output.finish_reason == "abort" or count == len(whole.token_ids)
