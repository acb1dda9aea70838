"""Recorded routed experts: the record has the same bits however a token is computed, and costs little."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matrix import thinned

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.models.decoder import ROUTES
from trueroll.engine.request import Output, SampleOutput, ScoreOutput, ScoreRequest
from trueroll.engine.running.loading import LoadedModel, load_dummy
from trueroll.engine.running.model_runner import ModelRunner
from trueroll.errors import InvalidRequestError
from trueroll.kernels.contract import AttentionBatch, Pages

from .drive import bits, drain, generate, make_engine, run, samples_of, tokens

# Engines that finish each step before the next are covered by the tests of workers on a CPU.
pytestmark = [pytest.mark.usefixtures("steps_ahead"), thinned(lambda steps_ahead, **_: steps_ahead)]

BLOCK, CHUNK = 4, 16
MakeEngine = Callable[..., Engine]


def load(folder: Path) -> LoadedModel:
    return load_dummy(EngineConfig(model=str(folder), backend="reference", num_threads=1))


def engine_of(loaded: LoadedModel, **settings: Any) -> Engine:
    small = dict(block_size=BLOCK, max_num_batched_tokens=CHUNK, max_num_seqs=8, num_blocks=256, num_threads=1)
    return Engine(EngineConfig(model=str(loaded.folder), backend="reference", **(small | settings)), loaded)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(make_tiny_model("qwen3_moe", tmp_path_factory.mktemp("routes") / "qwen3_moe"))


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_next_moe", "gpt_oss"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A mixture of experts with full attention, with recurrent layers, or with a window."""
    return load(make_tiny_model(request.param, tmp_path_factory.mktemp("routes") / request.param))


def asked(id: str, prompt: np.ndarray, **params: Any) -> Any:
    return generate(id, prompt, return_routed_experts=True, **params)


def whole(prompt: np.ndarray, sample: SampleOutput) -> np.ndarray:
    return np.concatenate((prompt, np.array(sample.token_ids, np.int32)))


class Truth:
    """The experts that a model chooses for a sequence computed alone, in one chunk, without a cache."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._engine = engine_of(loaded, max_num_batched_tokens=1024, enable_prefix_caching=False)

    def __call__(self, token_ids: np.ndarray) -> np.ndarray:
        self._engine.add(ScoreRequest("score", token_ids, return_routed_experts=True))
        [output] = drain(self._engine)
        assert isinstance(output, ScoreOutput) and output.routed_experts is not None
        assert len(output.routed_experts) == len(token_ids) - 1
        return output.routed_experts

    def check(self, prompt: np.ndarray, sample: SampleOutput) -> None:
        assert sample.routed_experts is not None
        assert np.array_equal(sample.routed_experts, self(whole(prompt, sample)))


def test_each_fed_token_has_the_experts_that_the_model_chose(mixture: LoadedModel) -> None:
    prompt, spec = tokens(21), mixture.model.spec
    [sample] = run(engine_of(mixture), [asked("r", prompt)]).values()
    found, fed = sample.routed_experts, whole(prompt, sample)[:-1]
    assert found is not None and found.dtype == np.uint8 and found.shape == (21 + 11, len(spec.experts), 3)
    assert (np.diff(found.astype(int)) > 0).all(), "ids are in ascending order"
    assert {*found.flat} == {*range(8)}, "premise: each expert is chosen somewhere"
    runner, count = ModelRunner(mixture.model, [1], 64), torch.arange(len(fed))
    pages = Pages(count, AttentionBatch([0, len(fed)], [len(fed)], torch.zeros(1, 1, dtype=torch.int64)))
    with torch.inference_mode():
        chosen = runner.forward(torch.from_numpy(fed).long(), count, [pages]).records[ROUTES]
    assert np.array_equal(found, chosen.transpose(0, 1).numpy())
    assert np.array_equal(found, Truth(mixture)(whole(prompt, sample)))


def test_without_the_option_no_experts_are_returned_and_no_bit_changes(mixture: LoadedModel) -> None:
    engine, prompt = engine_of(mixture), tokens(21)
    both = run(engine, [generate("plain", prompt), asked("asked", prompt)])
    assert both["plain", 0].routed_experts is None and both["asked", 0].routed_experts is not None
    assert bits(both["plain", 0]) == bits(both["asked", 0])
    [again] = run(engine, [generate("again", prompt)]).values()
    assert again.num_cached_tokens == 20 and again.routed_experts is None


def test_a_prefix_hit_at_every_block_boundary_returns_the_record(loaded: LoadedModel) -> None:
    """With recurrent layers there is a checkpoint at every block boundary."""
    interval = BLOCK if loaded.model.spec.recurrent else None
    engine, truth, prompt = engine_of(loaded, state_interval=interval), Truth(loaded), tokens(29)
    for length in range(0, 29, BLOCK):
        engine.invalidate_prefix_cache()
        if length:
            run(engine, [asked("before", prompt[: length + 1], max_tokens=1)])
        [sample] = run(engine, [asked("r", prompt, max_tokens=2)]).values()
        assert sample.num_cached_tokens == length, "premise"
        truth.check(prompt, sample)


def test_the_record_is_the_same_alone_chunked_and_batched(loaded: LoadedModel) -> None:
    """The other requests are scores, and samples without routed experts."""
    truth, prompts = Truth(loaded), [tokens(n, seed=n) for n in (1, 30, 37, 52)]
    engine = engine_of(loaded)
    others = [generate(f"other {i}", tokens(20 + i, seed=90 + i)) for i in range(3)]
    score = ScoreRequest("score", tokens(50, seed=7), return_routed_experts=True)
    requests = [asked(str(i), prompt, n=2) for i, prompt in enumerate(prompts)]
    for request in [others[0], *requests, score, *others[1:]]:
        engine.add(request)
    for output in drain(engine):
        if isinstance(output, ScoreOutput):
            assert output.routed_experts is not None
            assert np.array_equal(output.routed_experts, truth(score.token_ids))
        elif output.request_id.startswith("other"):
            assert output.routed_experts is None
        else:
            truth.check(prompts[int(output.request_id)], output)
    assert engine.stats().steps > 12 + 4, "premise: prompts came in chunks"


def test_preempted_samples_keep_their_records(loaded: LoadedModel) -> None:
    engine, prompts = engine_of(loaded, num_blocks=16), [tokens(20 + i, seed=i) for i in range(3)]
    requests = [(asked if i % 2 == 0 else generate)(str(i), p, n=2, max_tokens=20) for i, p in enumerate(prompts)]
    found, truth = run(engine, requests), Truth(loaded)
    assert engine.stats().preemptions > 0, "premise"
    for (id, _), sample in found.items():
        if int(id) % 2 == 0:
            truth.check(prompts[int(id)], sample)
        assert (sample.routed_experts is None) == (int(id) % 2 == 1)


def test_entries_without_a_record_get_one_when_computed_again(loaded: LoadedModel) -> None:
    engine, prompt, truth = engine_of(loaded), tokens(33), Truth(loaded)
    [plain] = run(engine, [generate("plain", prompt)]).values()
    index = {key: [*entry.blocks] for key, entry in engine._scheduler.cache._index.items()}
    assert engine.memory()["routed_experts"] == 0
    [first] = run(engine, [asked("first", prompt)]).values()
    assert first.num_cached_tokens == 0 and engine.stats().shortened_hits >= 32
    assert engine._scheduler.cache._index.keys() == index.keys(), "the same prefix hits"
    assert engine.memory()["routed_experts"] == len(index) * BLOCK * engine.info.route_bytes
    [second] = run(engine, [asked("second", prompt)]).values()
    assert second.num_cached_tokens == 32, "the record exists"
    for sample in (first, second):
        assert bits(sample) == bits(plain)
        truth.check(prompt, sample)
    [plain] = run(engine, [generate("plain", prompt)]).values()
    assert plain.num_cached_tokens == 32, "requests without routed experts have the same hits as before"


def test_a_prefix_is_resumed_where_its_record_ends(mixture: LoadedModel) -> None:
    engine, prompt = engine_of(mixture), tokens(33)
    run(engine, [asked("part", prompt[:13], max_tokens=1)])
    run(engine, [generate("all", prompt)])
    [sample] = run(engine, [asked("r", prompt)]).values()
    assert sample.num_cached_tokens == 12
    Truth(mixture).check(prompt, sample)


def test_requests_for_one_record_wait_for_one_computation(mixture: LoadedModel) -> None:
    """The requests also wait if the prefix is cached without a record."""
    engine, shared = engine_of(mixture), tokens(24)
    run(engine, [generate("plain", shared)])
    before = engine.stats().computed_prompt_tokens
    prompts = [np.concatenate((shared, tokens(5, seed=i + 1))) for i in range(4)]
    samples = run(engine, [asked(str(i), prompt) for i, prompt in enumerate(prompts)])
    assert engine.stats().computed_prompt_tokens - before == 24 + 4 * 5
    assert engine.stats().deferred_admissions > 0, "premise"
    for i, prompt in enumerate(prompts):
        Truth(mixture).check(prompt, samples[str(i), 0])


def test_a_group_and_requests_that_join_it_share_a_record(loaded: LoadedModel) -> None:
    engine, prompt, truth = engine_of(loaded), tokens(30), Truth(loaded)
    engine.add(asked("group", prompt, n=4))
    engine.step()
    for request in (asked("joins", prompt, seed=9), generate("does not", prompt, seed=9)):
        engine.add(request)
    samples = {(o.request_id, o.index): o for o in drain(engine) if isinstance(o, SampleOutput)}
    assert samples["joins", 0].num_cached_tokens == 30, "premise: the request joined"
    assert samples["does not", 0].routed_experts is None
    assert len({sample.token_ids[0] for sample in samples.values()}) > 1, "premise: the samples diverge"
    for key, sample in samples.items():
        if key[0] != "does not":
            truth.check(prompt, sample)


def test_the_prompt_of_a_group_is_held_once(mixture: LoadedModel) -> None:
    engine, width = engine_of(mixture, enable_prefix_caching=False), 2 * 3
    engine.add(asked("group", tokens(40), n=4, max_tokens=30))
    held = [engine.memory()["routed_experts"]]
    while engine.has_unfinished:
        engine.step()
        held.append(engine.memory()["routed_experts"])
    assert max(held) == width * (40 + 4 * 28) and held[-1] == 0


def test_waiting_requests_cost_the_memory_report_nothing(mixture: LoadedModel) -> None:
    engine = engine_of(mixture, max_num_seqs=1)
    for i in range(20):
        engine.add(asked(f"r{i}", tokens(20, seed=i), max_tokens=4))
    most = 0
    while engine.has_unfinished:
        engine.step()
        most = max(most, len(engine._ledger.open_routes._filled))
    assert most == 1


def test_an_aborted_sample_has_the_experts_of_the_fed_tokens(mixture: LoadedModel) -> None:
    engine, prompt = engine_of(mixture), tokens(30)
    engine.add(asked("r", prompt, n=2, max_tokens=50))
    early = samples_of(engine.abort("r", 0))
    for _ in range(9):
        engine.step()
    engine.add(ScoreRequest("s", prompt, return_routed_experts=True))
    [late], [scored] = samples_of(engine.abort("r", 1)), engine.abort("s")
    assert early[0].token_ids == [] and early[0].routed_experts is None and scored.routed_experts is None
    assert len(late.token_ids) > 3
    Truth(mixture).check(prompt, late)


def test_an_evicted_record_is_computed_again(loaded: LoadedModel) -> None:
    engine, prompt, truth = engine_of(loaded, num_blocks=24, max_num_seqs=1), tokens(40), Truth(loaded)
    run(engine, [asked("first", prompt)])
    for i in range(4):
        run(engine, [asked(f"other {i}", tokens(60, seed=i + 1))])
        assert engine.memory()["routed_experts"] <= 24 * BLOCK * engine.info.route_bytes
    assert engine.stats().evictions > 0, "premise"
    [again] = run(engine, [asked("again", prompt)]).values()
    assert again.num_cached_tokens == 0
    truth.check(prompt, again)


def test_a_sleep_drops_the_records_of_the_cache(mixture: LoadedModel) -> None:
    engine, prompt = engine_of(mixture), tokens(30)
    assert engine.memory()["routed_experts"] == 0
    engine.add(asked("r", prompt, n=2, max_tokens=30))
    for _ in range(6):
        engine.step()
    assert engine.memory()["routed_experts"] > 0
    outputs = engine.sleep(1, ("kv_cache",), "recompute")
    assert outputs == [] and engine._scheduler.routes is not None and engine._scheduler.routes.num_bytes == 0
    engine.wake_up(("kv_cache",))
    outputs = drain(engine)
    assert engine.stats().recomputed == 2, "premise"
    for sample in samples_of(outputs):
        Truth(mixture).check(prompt, sample)
    engine.invalidate_prefix_cache()
    assert engine.memory()["routed_experts"] == 0


def commit_another_router(engine: Engine, version: int) -> None:
    """Commit weights with routers that choose other experts."""
    staging, generator = engine.weights.new_staging(False), torch.Generator().manual_seed(version)
    for name, tensor in engine.weights.tensors.items():
        if name.endswith("mlp.gate.weight"):
            count = tensor.shape[0] * tensor.shape[1]
            staging.put(name, torch.arange(count), torch.randn(count, generator=generator).to(torch.float32))
    engine.commit_weights(staging, version, "recompute")


def test_a_commit_keeps_the_rows_of_drawn_tokens(tmp_path: Path) -> None:
    """Later requests hit only rows of the new weights."""
    folder = make_tiny_model("qwen3_moe", tmp_path / "tiny")
    engine, prompt, old = engine_of(load(folder)), tokens(30), Truth(load(folder))
    engine.add(asked("r", prompt, n=2, max_tokens=30))
    for _ in range(9):
        engine.step()
    engine.add(asked("late", tokens(40, seed=3)))
    engine.step()
    commit_another_router(engine, 1)
    assert engine.stats().recomputed == 3, "premise"
    new_loaded = load(folder)
    commit_another_router(engine_of(new_loaded), 1)
    new = Truth(new_loaded)
    for sample in drain(engine):
        assert isinstance(sample, SampleOutput) and sample.routed_experts is not None
        sequence = whole(prompt if sample.request_id == "r" else tokens(40, seed=3), sample)
        before, after = old(sequence), new(sequence)
        border = 0
        if sample.request_id == "r":
            assert [span.version for span in sample.weight_versions] == [0, 1], "premise"
            border = len(prompt) + sample.weight_versions[0].end - 1
            assert not np.array_equal(before[:border], after[:border]), "premise"
        assert np.array_equal(sample.routed_experts, np.concatenate((before[:border], after[border:])))
    for id in ("again", "hit"):
        [sample] = run(engine, [asked(id, prompt, max_tokens=30)]).values()
        new.check(prompt, sample)
    assert sample.num_cached_tokens == 28


def test_deltas_carry_no_experts(mixture: LoadedModel) -> None:
    engine, prompt = engine_of(mixture), tokens(20)
    engine.add(asked("r", prompt))
    engine.stream("r")
    outputs: list[Output] = []
    told = 0
    while engine.has_unfinished:
        outputs += engine.step()
        told += sum(len(delta.token_ids) for delta in engine.take_deltas())
    assert told > 0, "premise"
    Truth(mixture).check(prompt, samples_of(outputs)[0])


def test_more_than_256_experts_take_two_bytes(tmp_path: Path) -> None:
    loaded = load(make_tiny_model("qwen3_moe", tmp_path / "many", num_experts=300, moe_intermediate_size=8))
    engine, prompt = engine_of(loaded), tokens(40)
    assert engine.info.route_bytes == 2 * 3 * 2
    for id in ("computed", "hit"):
        [sample] = run(engine, [asked(id, prompt)]).values()
        assert sample.routed_experts is not None and sample.routed_experts.dtype == np.uint16
        assert sample.routed_experts.max() > 255, "premise"
        Truth(loaded).check(prompt, sample)
    assert sample.num_cached_tokens == 36


def test_a_model_without_experts_refuses_the_option(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, backend="reference")
    engine.add(generate("r", tokens(5)))
    for request in (asked("a", tokens(5)), ScoreRequest("s", tokens(5), return_routed_experts=True)):
        with pytest.raises(
            InvalidRequestError, match="return_routed_experts is not supported, because .* has no layer with experts"
        ):
            engine.add(request)
    [sample] = drain(engine)
    assert sample.finish_reason == "length" and "routed_experts" not in engine.memory()
    assert engine.stats().expert_tokens == b"" and engine.info.route_bytes == 0


def test_the_tokens_of_each_expert_are_counted(loaded: LoadedModel) -> None:
    engine = engine_of(loaded)
    [sample] = run(engine, [asked("r", tokens(30))]).values()
    run(engine, [generate("plain", tokens(20, seed=1))])
    info = engine.info
    counts = np.frombuffer(engine.stats().expert_tokens, "<i8").reshape(info.expert_layers, info.num_experts)
    assert (counts.sum(1) == engine.stats().computed_tokens * info.experts_per_token).all()
    fresh = engine_of(loaded)
    run(fresh, [generate("r", tokens(30))])
    assert sample.routed_experts is not None
    expected = [
        np.bincount(layer.ravel(), minlength=info.num_experts) for layer in sample.routed_experts.swapaxes(0, 1)
    ]
    assert fresh.stats().expert_tokens == np.array(expected, "<i8").tobytes()


@pytest.fixture(params=range(2))
def dice(request: pytest.FixtureRequest) -> Iterator[random.Random]:
    yield random.Random(request.param)


@thinned(lambda dice, steps_ahead, loaded: dice == steps_ahead and loaded != "qwen3_next_moe")
def test_records_stay_right_in_random_orders_of_events(loaded: LoadedModel, dice: random.Random) -> None:
    """Mix requests with and without routed experts, for a few prompts with common prefixes, with too few blocks."""
    engine, truth = engine_of(loaded, num_blocks=40), Truth(loaded)
    stem, outputs, prompts = tokens(26), [], {}
    events = 0
    while events < 30 or engine.has_unfinished:
        if events < 30 and dice.random() < 0.4:
            events += 1
            id, length = str(events), dice.randrange(1, 27)
            prompts[id] = np.concatenate((stem[:length], tokens(dice.randrange(1, 12), seed=dice.randrange(3))))
            params = dict(n=dice.choice((1, 3)), max_tokens=dice.randrange(1, 20), return_routed_experts=events % 3 > 0)
            engine.add(generate(id, prompts[id], seed=events, **params))
        elif dice.random() < 0.05:
            engine.invalidate_prefix_cache()
        elif dice.random() < 0.03:
            outputs += engine.interrupt("recompute")
        elif dice.random() < 0.05 and engine._ledger.open:
            outputs += engine.abort(dice.choice([*engine._ledger.open]))
        outputs += engine.step()
        engine.check_integrity()
    checked = 0
    for sample in outputs:
        if int(sample.request_id) % 3 == 0 or not sample.token_ids:
            assert sample.routed_experts is None
        else:
            truth.check(prompts[sample.request_id], sample)
            checked += 1
    assert checked > 8 and engine.stats().shortened_hits > 0, "premise"
    assert loaded.model.spec.recurrent or engine.stats().prefix_hits > 0, "premise"
    engine.invalidate_prefix_cache()
    assert engine.memory()["routed_experts"] == 0
