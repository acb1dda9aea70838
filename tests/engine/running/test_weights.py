"""New weights, committed between two steps: no old weights remain, and no commit is applied only partly."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from machines import lends_huge_pages
from matrix import thinned

from tiny import make_tiny_model
from trueroll.engine.cache.memory import Arena, DeviceArena
from trueroll.engine.engine import Engine
from trueroll.engine.request import GenerateRequest, InFlight, SampleOutput, ScoreOutput, ScoreRequest, derive_seed
from trueroll.engine.running import weight_memory, weights

from ..checkpoints import (
    addresses,
    another_version,
    read_tensors,
    stage,
    stage_changes,
    stage_rows,
)
from ..drive import bits, drain, executor_of, generate, make_engine, run, samples_of, score, tokens

DTYPES = ["float32", "bfloat16"]
GOLDEN = 0x9E3779B97F4A7C15

REFERENCE = "reference", "float32"


def in_every_run(steps_ahead: int, backend: str = "cpu", dtype: str = "", tiny_model: str = "llama", **_: Any) -> bool:
    """Return whether every run includes a case. Engines that finish each step before the next are covered by the tests
    of workers on a CPU. The reference, which is slow, runs with one family.
    """
    return bool(steps_ahead) and (backend == "cpu" or (tiny_model == "llama" and (backend, dtype) != REFERENCE))


pytestmark = [pytest.mark.usefixtures("steps_ahead"), thinned(lambda **cell: in_every_run(**cell))]


@pytest.fixture
def newer(tiny_model: Path, tmp_path: Path) -> Path:
    """A checkpoint with other weights for `tiny_model`."""
    return another_version(tiny_model, tmp_path / "newer")


@pytest.fixture
def newer_llama(tiny_llama: Path, tmp_path: Path) -> Path:
    return another_version(tiny_llama, tmp_path / "newer")


def requests(count: int = 3, n: int = 2) -> list[GenerateRequest]:
    """Groups with prompts that share more than one block."""
    return [generate(str(i), np.concatenate((tokens(40), tokens(9 + i, seed=i + 1))), n=n) for i in range(count)]


def all_bits(engine: Engine) -> tuple[dict, bytes]:
    """Return the bits of the samples for `requests`, and of the scores."""
    samples = run(engine, requests())
    return {key: bits(sample) for key, sample in samples.items()}, score(engine, tokens(100)).tobytes()


def spans(output: SampleOutput | ScoreOutput) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in output.weight_versions]


def by_index(outputs: list) -> dict[tuple[str, int], SampleOutput]:
    return {(o.request_id, o.index): o for o in outputs if isinstance(o, SampleOutput)}


def test_shapes_and_names_of_a_set_of_weights(tiny_model: Path, backend: str) -> None:
    weights = make_engine(tiny_model, backend=backend, dtype="bfloat16").weights
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if "qwen3" in tiny_model.name else {}
    assert weights.dtype == "bfloat16" and weights.tied == tied
    assert weights.shapes == {name: tuple(tensor.shape) for name, tensor in read_tensors(tiny_model).items()}
    assert weights.ignored == {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(2)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [False, True])
def test_after_a_commit_the_engine_equals_a_fresh_one(
    tiny_model: Path, newer: Path, backend: str, dtype: str, in_place: bool
) -> None:
    settings = dict(backend=backend, dtype=dtype)
    engine, fresh = make_engine(tiny_model, **settings), make_engine(newer, **settings)
    old, expected = all_bits(engine), all_bits(fresh)
    hits = engine.stats().prefix_hits
    assert all_bits(engine) == old != expected and engine.stats().prefix_hits > hits, "premise: prefixes are cached"
    hits, cold_hits = engine.stats().prefix_hits, fresh.stats().prefix_hits
    before, memory = addresses(engine), engine.memory()

    staging = stage(engine, read_tensors(newer), in_place)
    assert (staging.num_bytes > 0) == (not in_place)
    assert engine.commit_weights(staging, 7, "recompute") == []

    assert engine.weight_version == 7 and addresses(engine) == before
    assert engine.memory() == memory | {"spare": 0 if in_place else memory["weights"]}
    assert all_bits(engine) == expected
    assert engine.stats().prefix_hits - hits == cold_hits, "only the hits that a fresh engine has, too"
    sample = run(engine, [generate("r", tokens(20))])["r", 0]
    assert spans(sample) == [(7, 0, 12)]


def test_weights_that_were_never_committed_leave_no_trace(tiny_model: Path, newer: Path, backend: str) -> None:
    engine = make_engine(tiny_model, backend=backend)
    old = all_bits(engine)
    staging = stage(engine, read_tensors(newer))
    assert all_bits(engine) == old and staging.num_bytes > 0
    staging.drop()
    assert staging.num_bytes == 0 and all_bits(engine) == old
    stage(engine, read_tensors(newer))
    assert all_bits(engine) == old
    assert engine.weight_version == 0


@lends_huge_pages
def test_lent_weights_give_the_bits_of_own_weights(tiny_model: Path, newer: Path, backend: str) -> None:
    engines = [make_engine(tiny_model, backend=backend) for _ in range(3)]
    lender, *others = engines
    assert lender.weights.kin is not None and {engine.weights.kin for engine in engines} == {lender.weights.kin}
    assert make_engine(tiny_model, backend=backend, dtype="bfloat16").weights.kin != lender.weights.kin
    old, expected, places = all_bits(lender), all_bits(make_engine(newer, backend=backend)), addresses(others[0])

    staging = lender.weights.new_lendable()
    stage_rows(staging, read_tensors(newer))
    borrowed = [other.weights.borrow(staging.lend()) for other in others]
    assert all_bits(others[0]) == old != expected
    for engine, staged in zip(engines, [staging, *borrowed], strict=True):
        engine.commit_weights(staged, 7, "recompute")
    assert [all_bits(engine) for engine in engines] == [expected] * 3 and addresses(others[0]) == places

    lender.commit_weights(stage(lender, read_tensors(tiny_model), in_place=True), 8, "recompute")
    others[0].commit_weights(stage_changes(others[0], read_tensors(newer), read_tensors(tiny_model)), 8, "recompute")
    assert [all_bits(engine) for engine in engines] == [old, old, expected]
    others[1].sleep(2, ["weights"], "recompute")
    others[1].wake_up(["weights"])
    others[1].commit_weights(stage(others[1], read_tensors(newer)), 9, "recompute")
    assert [all_bits(engine) for engine in engines] == [old, old, expected]


@lends_huge_pages
def test_lent_weights_of_another_size_are_refused(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    arena = weights.LendableArena(engine.weights.num_held - 64)
    with pytest.raises(FileNotFoundError, match=f"must have {engine.weights.num_held} bytes"):
        engine.weights.borrow(arena.lend())
    with pytest.raises(FileNotFoundError, match=f"got {2**62}"):  # must not allocate this much memory
        engine.weights.borrow(arena.lend()._replace(num_bytes=2**62))


class LateArena(DeviceArena):
    """A staging that behaves as on a GPU: copies are queued, and freed memory may be reused at once. `queued`: copies
    in flight.
    """

    queued: ClassVar[list[Callable[[], None]]] = []

    def take(self, other: Arena) -> None:
        self.queued.append(partial(self._arrive, other))

    def _arrive(self, other: Arena) -> None:
        assert other.num_held, "released memory is read"
        super().take(other)


def test_a_commit_waits_for_its_copies_before_it_frees_what_they_read(
    tiny_llama: Path, newer_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(device: torch.device) -> None:
        while LateArena.queued:
            LateArena.queued.pop(0)()

    monkeypatch.setattr(weight_memory, "new_arena", lambda size, device, huge_pages: LateArena(size, device))
    monkeypatch.setattr(weights, "wait_for_stream", wait, raising=False)
    engine = make_engine(tiny_llama)
    staging = stage(engine, read_tensors(newer_llama))
    engine.commit_weights(staging, 1, "recompute")
    assert staging.num_bytes == 0, "premise: its memory is released"
    wait(executor_of(engine)._runner.model.device)
    assert all_bits(engine) == all_bits(make_engine(newer_llama))


@pytest.mark.parametrize("dtype", DTYPES)
def test_changed_elements_give_the_bits_of_whole_tensors(
    tiny_model: Path, tmp_path: Path, backend: str, dtype: str
) -> None:
    newer = another_version(tiny_model, tmp_path / "newer", density=0.05)
    before, after = (read_tensors(folder, getattr(torch, dtype)) for folder in (tiny_model, newer))
    changed = [(a != b).float().mean() for a, b in zip(before.values(), after.values(), strict=True)]
    assert 0.02 < sum(changed) / len(changed) < 0.08
    settings = dict(backend=backend, dtype=dtype)
    engine, fresh = make_engine(tiny_model, **settings), make_engine(newer, **settings)
    where = addresses(engine)
    assert all_bits(engine) != (expected := all_bits(fresh))
    staging = stage_changes(engine, before, after)
    assert 0 < staging.num_bytes < engine.info.weight_bytes
    for version in (1, 2):  # applying the changes twice is harmless
        engine.commit_weights(stage_changes(engine, before, after), version, "recompute")
        assert all_bits(engine) == expected
    assert addresses(engine) == where


def test_some_tensors_are_staged_whole_some_in_parts_some_not_at_all(
    tiny_model: Path, newer: Path, backend: str
) -> None:
    engine = make_engine(tiny_model, backend=backend)
    mixture, after = read_tensors(tiny_model), read_tensors(newer)
    staging = engine.weights.new_staging(in_place=False)
    names = list(after)
    stage_rows(staging, {name: after[name] for name in names[::3]})
    mixture |= {name: after[name] for name in names[::3]}
    for name in names[1::3]:
        staging.put(name, torch.tensor([3, 5]), after[name].view(-1)[[3, 5]])
        mixture[name].view(-1)[[3, 5]] = after[name].view(-1)[[3, 5]]
    engine.commit_weights(staging, 1, "recompute")
    found = all_bits(engine)
    engine.commit_weights(stage(engine, mixture), 2, "recompute")
    assert found == all_bits(engine)


def test_staged_values_are_copied_at_once(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    staging = engine.weights.new_staging(in_place=False)
    indices, values = torch.tensor([1]), torch.tensor([9.0])
    staging.put("model.norm.weight", indices, values)
    indices.zero_()
    values.zero_()
    before = read_tensors(tiny_llama)["model.norm.weight"]
    engine.commit_weights(staging, 1, "recompute")
    after = engine.weights.tensors["model.norm.weight"].to_dense()
    assert after[1] == 9 and torch.equal(after[2:], before[2:]) and after[0] == before[0]


def test_the_next_push_uses_the_memory_of_the_replaced_weights(tiny_model: Path, newer: Path, backend: str) -> None:
    """The content of this memory does not matter. A sleep, or a push through lent memory, releases the memory."""
    engine, after = make_engine(tiny_model, backend=backend), read_tensors(newer)
    old, expected = all_bits(engine), all_bits(make_engine(newer, backend=backend))
    engine.commit_weights(stage(engine, after), 1, "recompute")
    held = engine.memory()["spare"]
    assert all_bits(engine) == expected and held == engine.memory()["weights"] > 0
    kept: Any = engine.weights.spare._kept
    assert kept is not None
    kept[0]._memory.fill_(255)  # NaN
    staging = stage(engine, read_tensors(tiny_model))
    assert staging.arena is kept[0] and engine.memory()["spare"] == 0 and staging.num_bytes == held
    engine.commit_weights(staging, 2, "recompute")
    assert all_bits(engine) == old and engine.memory()["spare"] == held
    engine.sleep(1, ["weights"], "recompute")
    assert engine.memory()["spare"] == 0
    engine.wake_up(["weights"])
    assert all_bits(engine) == old
    engine.commit_weights(stage(engine, after), 3, "recompute")
    assert all_bits(engine) == expected and engine.memory()["spare"] == held
    engine.weights.new_lendable()
    assert engine.memory()["spare"] == 0 and all_bits(engine) == expected


def test_a_staging_that_is_not_committed_frees_its_memory(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    engine.commit_weights(stage(engine, read_tensors(tiny_llama)), 1, "recompute")
    assert engine.memory()["spare"]
    staging = stage(engine, read_tensors(tiny_llama))
    staging.drop()
    assert engine.memory()["spare"] == 0 and staging.num_bytes == 0


def test_staging_in_another_thread_while_the_engine_generates(tiny_model: Path, newer: Path, backend: str) -> None:
    engine = make_engine(tiny_model, backend=backend, num_threads=2)
    old, expected = all_bits(engine), all_bits(make_engine(newer, backend=backend))
    after, generated = read_tensors(newer), threading.Event()
    staged: list = []

    def work() -> None:
        while not generated.is_set():
            staged.append(stage(engine, after, step=16))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        rounds = 0
        while rounds < 3 or len(staged) < 3:
            assert all_bits(engine) == old
            rounds += 1
    finally:
        generated.set()
        thread.join()
    engine.commit_weights(staged[-1], 1, "recompute")
    assert all_bits(engine) == expected


def continued(engine: Engine, sample: SampleOutput, prompt: np.ndarray, start: int) -> SampleOutput:
    """Pass the sample's first `start` tokens as a prompt, and return the engine's continuation."""
    seed = (5 + sample.index * GOLDEN) % 2**64
    assert derive_seed(seed, 0) == sample.seed
    given = np.concatenate((prompt, sample.token_ids[:start]))
    return run(engine, [generate("r", given, seed=seed, max_tokens=len(sample.token_ids) - start)])["r", 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_running_samples_keep_their_tokens_and_continue_with_new_weights(
    tiny_model: Path, newer: Path, backend: str, dtype: str, steps_ahead: int
) -> None:
    settings = dict(backend=backend, dtype=dtype)
    engine, fresh = make_engine(tiny_model, **settings), make_engine(newer, **settings)
    groups = requests(n=3)
    alone = run(make_engine(tiny_model, **settings), groups)
    for request in groups:
        engine.add(request)
    for _ in range(5):
        assert engine.step() == []
    engine.commit_weights(stage(engine, read_tensors(newer)), 7, "recompute")
    stats = engine.stats()
    assert stats.recomputed == 9 and stats.preemptions == 0 and stats.blocks_in_use == 0
    samples = by_index(drain(engine))
    assert samples.keys() == alone.keys()
    for (id, index), sample in samples.items():
        at = sample.weight_versions[0].end
        assert spans(sample) == [(0, 0, at), (7, at, 12)] and at in ((4, 5), (2, 4))[steps_ahead]
        assert sample.finish_reason == "length"
        assert sample.num_cached_tokens == alone[id, index].num_cached_tokens
        assert sample.logprobs is not None and (was := alone[id, index].logprobs) is not None
        assert np.array_equal(sample.token_ids[:at], alone[id, index].token_ids[:at])
        assert np.array_equal(sample.logprobs[:at], was[:at])
        after = continued(fresh, sample, groups[int(id)].prompt_token_ids, at)
        assert bits(after) == (tuple(sample.token_ids[at:]), sample.logprobs[at:].tobytes())
        full = np.concatenate((groups[int(id)].prompt_token_ids, sample.token_ids))
        assert np.array_equal(score(fresh, full)[at - 12 :], sample.logprobs[at:])
    assert any(not np.array_equal(s.token_ids, alone[key].token_ids) for key, s in samples.items())


def test_after_a_commit_a_group_computes_its_prompt_once_more(tiny_llama: Path, newer_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    engine.add(generate("g", tokens(64), n=4))
    for _ in range(3):
        engine.step()
    assert engine.stats().computed_prompt_tokens == 64
    engine.commit_weights(stage(engine, read_tensors(newer_llama)), 1, "recompute")
    drain(engine)
    assert engine.stats().computed_prompt_tokens == 2 * 64


@pytest.mark.parametrize("steps", [1, 2])
def test_a_partly_computed_prompt_restarts(tiny_llama: Path, newer_llama: Path, steps: int) -> None:
    prompt = tokens(100)
    expected = run(make_engine(newer_llama), [generate("g", prompt, n=2), generate("later", prompt, seed=9)])
    engine = make_engine(tiny_llama, max_num_batched_tokens=48, max_num_seqs=8)
    engine.add(generate("g", prompt, n=2))
    for _ in range(steps):
        engine.step()
    assert engine.stats().computed_tokens == 48 * steps
    engine.commit_weights(stage(engine, read_tensors(newer_llama)), 1, "recompute")
    engine.add(generate("later", prompt, seed=9))
    samples = by_index(drain(engine))
    assert {key: bits(s) for key, s in samples.items()} == {key: bits(s) for key, s in expected.items()}
    assert all(spans(sample) == [(1, 0, 12)] for sample in samples.values())


def test_a_score_comes_from_one_version(tiny_llama: Path, newer_llama: Path, backend: str) -> None:
    settings = dict(backend=backend, max_num_batched_tokens=48, max_num_seqs=8)
    ids, fresh = tokens(150), make_engine(newer_llama, **settings)
    engine = make_engine(tiny_llama, **settings)
    old = score(engine, ids)
    engine.add(ScoreRequest("s", ids))
    before = engine.stats().computed_tokens
    engine.step()
    engine.step()
    assert engine.stats().computed_tokens - before == 96
    engine.commit_weights(stage(engine, read_tensors(newer_llama)), 4, "recompute")
    [output] = drain(engine)
    assert isinstance(output, ScoreOutput) and spans(output) == [(4, 0, 149)]
    assert np.array_equal(output.logprobs, score(fresh, ids)) and not (output.logprobs == old).any()


def test_a_sample_may_cross_several_commits(tiny_llama: Path, newer_llama: Path) -> None:
    engine, fresh = make_engine(tiny_llama), make_engine(newer_llama)
    engine.add(generate("r", tokens(20)))
    versions = {2: newer_llama, 4: tiny_llama, 7: newer_llama}
    for i in range(9):
        if i in versions:
            engine.commit_weights(stage(engine, read_tensors(versions[i])), i, "recompute")
        engine.step()
    [sample] = samples_of(drain(engine))
    assert spans(sample) == [(0, 0, 2), (2, 2, 4), (4, 4, 7), (7, 7, 12)]
    assert np.array_equal(sample.token_ids[7:], continued(fresh, sample, tokens(20), 7).token_ids)


def test_a_commit_of_the_same_version_begins_a_span(tiny_llama: Path, newer_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    engine.add(generate("r", tokens(20)))
    commits = {2: (newer_llama, 3), 4: (tiny_llama, 3), 7: (newer_llama, 1)}
    for i in range(9):
        if i in commits:
            model, version = commits[i]
            engine.commit_weights(stage(engine, read_tensors(model)), version, "recompute")
        engine.step()
    [sample] = samples_of(drain(engine))
    assert spans(sample) == [(0, 0, 2), (3, 2, 4), (3, 4, 7), (1, 7, 12)]


def test_a_commit_that_produced_no_token_leaves_no_span(tiny_llama: Path, newer_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    engine.add(generate("r", tokens(20)))
    for model in (newer_llama, tiny_llama):
        engine.commit_weights(stage(engine, read_tensors(model)), 3, "recompute")
    [sample] = drain(engine)
    assert spans(sample) == [(3, 0, 12)]


def test_abort_ends_started_requests_and_keeps_waiting_ones(tiny_llama: Path, newer_llama: Path) -> None:
    engine = make_engine(tiny_llama, max_num_seqs=2, max_num_batched_tokens=40)
    expected = run(make_engine(newer_llama), [generate("waits", tokens(20, seed=3), n=2)])
    old = run(make_engine(tiny_llama), [generate("runs", tokens(20), n=3)])
    engine.add(generate("runs", tokens(20), n=3))
    engine.add(ScoreRequest("score", tokens(200)))
    engine.add(generate("waits", tokens(20, seed=3), n=2))
    for _ in range(4):
        assert engine.step() == []
    assert (engine.stats().num_running, engine.stats().num_waiting) == (2, 3)
    aborted = engine.commit_weights(stage(engine, read_tensors(newer_llama)), 1, "abort")
    samples, [of_score] = by_index(aborted), [o for o in aborted if isinstance(o, ScoreOutput)]
    assert {o.finish_reason for o in aborted} == {"abort"} and not len(of_score.logprobs)
    assert samples.keys() == {("runs", 0), ("runs", 1), ("runs", 2)} and engine.stats().recomputed == 0
    for key, sample in samples.items():
        count = len(sample.token_ids)
        assert count > 0 and spans(sample) == [(0, 0, count)]
        assert np.array_equal(sample.token_ids, old[key].token_ids[:count])
    engine.check_integrity()
    rest = drain(engine)
    assert {key: bits(s) for key, s in by_index(rest).items()} == {key: bits(s) for key, s in expected.items()}
    assert all(spans(output)[0][0] == 1 and len(spans(output)) == 1 for output in rest)


def test_abort_also_ends_preempted_samples_with_tokens(tiny_llama: Path, newer_llama: Path) -> None:
    engine = make_engine(tiny_llama, num_blocks=24, block_size=8)
    for i in range(6):
        engine.add(generate(str(i), tokens(30 + i, seed=i), n=3, max_tokens=30))
    outputs: list = []
    while engine.stats().preemptions == 0:
        outputs += engine.step()
    assert [s for s in engine._scheduler.waiting if s.num_tokens > s.num_prompt_tokens]
    outputs += engine.commit_weights(stage(engine, read_tensors(newer_llama)), 1, "abort")
    assert engine.has_unfinished, "requests that had not started"
    outputs += drain(engine)
    assert len(outputs) == 18 and all(len(spans(output)) <= 1 for output in outputs)


@pytest.mark.parametrize("begun", [False, True])
def test_drain_refuses_unfinished_requests(tiny_llama: Path, newer_llama: Path, begun: bool) -> None:
    engine, staging_of = make_engine(tiny_llama), read_tensors(newer_llama)
    old = all_bits(engine)
    engine.add(generate("r", tokens(20)))
    if begun:
        engine.step()
    staging = stage(engine, staging_of)
    with pytest.raises(RuntimeError, match="unfinished requests after a drain .got 1."):
        engine.commit_weights(staging, 1, "drain")
    drain(engine)
    assert engine.weight_version == 0 and all_bits(engine) == old
    assert engine.commit_weights(staging, 1, "drain") == []
    assert all_bits(engine) == all_bits(make_engine(newer_llama))


@pytest.mark.parametrize("in_flight", ["recompute", "abort"])
def test_a_tensor_with_missing_rows_is_refused(
    tiny_model: Path, newer: Path, backend: str, in_flight: InFlight
) -> None:
    engine = make_engine(tiny_model, backend=backend)
    old = all_bits(engine)
    engine.add(generate("r", tokens(20)))
    engine.step()
    staging = stage(engine, {k: v for k, v in read_tensors(newer).items() if k != "model.embed_tokens.weight"})
    staging.rows("model.embed_tokens.weight", 0, 496).copy_(torch.zeros(496, 64))
    with pytest.raises(ValueError, match="model.embed_tokens.weight: all 512 rows must be staged .got 496 rows."):
        engine.commit_weights(staging, 1, in_flight)
    assert len(drain(engine)) == 1 and engine.weight_version == 0 and engine.stats().recomputed == 0
    assert all_bits(engine) == old


def test_in_place_needs_every_parameter(tiny_model: Path, newer: Path, backend: str) -> None:
    engine, after = make_engine(tiny_model, backend=backend), read_tensors(newer)
    last = after.pop("model.norm.weight")
    staging = stage(engine, after, in_place=True)
    for _ in range(2):
        with pytest.raises(ValueError, match="model.norm.weight is missing, .* stage every parameter"):
            engine.commit_weights(staging, 1, "recompute")
        with pytest.raises(RuntimeError, match="the weights are incomplete"):
            engine.step()
    with pytest.raises(ValueError, match="in-place staging accepts only whole rows"):
        staging.put("model.norm.weight", torch.tensor([0]), torch.ones(1))
    with pytest.raises(ValueError, match="model.embed_tokens.weight is missing"):
        engine.commit_weights(stage(engine, {"model.norm.weight": last}), 1, "recompute")
    stage_rows(staging, {"model.norm.weight": last})
    engine.commit_weights(staging, 1, "recompute")
    assert all_bits(engine) == all_bits(make_engine(newer, backend=backend))


def test_an_unwritten_in_place_staging_changes_nothing(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    old = all_bits(engine)
    engine.weights.new_staging(in_place=True)
    assert all_bits(engine) == old


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.rows("model.nom.weight", 0, 1), "'model.nom.weight' is not the name of a parameter"),
        (lambda s: s.rows("lm_head.weight", 8, 16), "multiples of 16"),
        (lambda s: s.put("x", torch.tensor([0]), torch.ones(1)), "'x' is not the name of a parameter"),
        (lambda s: s.put("model.norm.weight", torch.tensor([64]), torch.ones(1)), r"indices must be in \[0, 64\)"),
        (lambda s: s.put("model.norm.weight", torch.tensor([-1]), torch.ones(1)), r"indices must be in \[0, 64\)"),
        (
            lambda s: s.put("model.norm.weight", torch.tensor([1, 2]), torch.ones(1)),
            "each torch.float32 value needs one int64 index",
        ),
        (
            lambda s: s.put("model.norm.weight", torch.tensor([1], dtype=torch.int32), torch.ones(1)),
            "got .* of torch.int32",
        ),
        (lambda s: s.put("model.norm.weight", torch.tensor([1]), torch.ones(1).half()), "torch.float16"),
    ],
)
def test_rows_and_elements_that_do_not_fit_are_refused(tiny_llama: Path, call: Callable, message: str) -> None:
    engine = make_engine(tiny_llama)
    staging = engine.weights.new_staging(in_place=False)
    with pytest.raises(ValueError, match=message):
        call(staging)


def test_a_small_vocabulary_of_odd_size(tmp_path: Path, backend: str) -> None:
    model = make_tiny_model("qwen3", tmp_path / "model", vocab_size=515, hidden_size=60, intermediate_size=77)
    newer = another_version(model, tmp_path / "newer")
    engine = make_engine(model, backend=backend, dtype="bfloat16")
    engine.commit_weights(stage(engine, read_tensors(newer), step=16), 1, "recompute")
    assert all_bits(engine) == all_bits(make_engine(newer, backend=backend, dtype="bfloat16"))
