"""Memory that is released and allocated again: only the intended content is lost, and the bits stay the same."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from matrix import thinned
from torch import Tensor

from tiny import make_tiny_model
from trueroll.engine.cache.memory import DeviceArena
from trueroll.engine.engine import Engine
from trueroll.engine.request import Output, ScoreRequest, Tag
from trueroll.engine.running import model_runner, weight_memory
from trueroll.kernels.quantization import FORMATS, format_of, round_trip

from .checkpoints import addresses, another_version, read_tensors, stage
from .drafting.mtp_models import make_mtp_model
from .drive import bits, drain, executor_of, generate, make_engine, run, samples_of, score, tokens

MIB = 2**20
BOTH: tuple[Tag, ...] = ("weights", "kv_cache")
WAYS = [(level, tags) for level in (1, 2) for tags in (BOTH, BOTH[:1], BOTH[1:])]

# Engines that finish each step before the next are covered by the tests of workers on a CPU.
pytestmark = [pytest.mark.usefixtures("steps_ahead"), thinned(lambda steps_ahead, **_: steps_ahead)]


@pytest.fixture(params=["host", "device"])
def arena(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of memory: host memory, or memory that behaves like a device's."""
    if request.param == "device":
        for module in (weight_memory, model_runner):
            monkeypatch.setattr(module, "new_arena", lambda size, device, huge_pages: DeviceArena(size, device))
    return request.param


def all_bits(engine: Engine) -> tuple[dict, bytes]:
    requests = [generate(str(i), tokens(40 + i), n=2) for i in range(3)]
    samples = run(engine, requests)
    return {key: bits(sample) for key, sample in samples.items()}, score(engine, tokens(100)).tobytes()


def begin(engine: Engine, steps: int = 5) -> None:
    """Start requests: samples that already have tokens, and a prompt and a score request that are partly computed."""
    engine.add(generate("short", tokens(20), n=3))
    for _ in range(steps):
        assert engine.step() == []
    engine.add(generate("long", tokens(150, seed=1), n=2))
    engine.add(ScoreRequest("score", tokens(150, seed=2)))
    assert engine.step() == []


def contents(outputs: list[Output]) -> dict:
    """Return the bits of all outputs."""
    return {
        (o.request_id, getattr(o, "index", None)): (
            tuple(getattr(o, "token_ids", ())),
            b"" if o.logprobs is None else o.logprobs.tobytes(),
            o.finish_reason,
            o.weight_versions,
        )
        for o in outputs
    }


CHUNKED = dict(max_num_batched_tokens=64, max_num_seqs=8)


@pytest.mark.parametrize("arena", ["device"], indirect=True)
def test_weights_that_come_back_elsewhere_give_the_same_bits(tiny_model: Path, backend: str, arena: str) -> None:
    engine = make_engine(tiny_model, backend=backend)
    old, before = all_bits(engine), addresses(engine)
    size = engine.memory()["weights"] // 4
    engine.sleep(1, BOTH[:1], "recompute")
    in_their_place = [torch.full((size,), torch.nan) for _ in range(8)]
    engine.wake_up(BOTH[:1])
    assert addresses(engine) != before and all(tensor.isnan().all() for tensor in in_their_place)
    assert all_bits(engine) == old


@pytest.mark.parametrize(("level", "tags"), WAYS)
def test_a_sleep_holds_and_computes_nothing_and_waking_restores(
    tiny_llama: Path, backend: str, arena: str, level: int, tags: tuple[Tag, ...]
) -> None:
    engine = make_engine(tiny_llama, backend=backend)
    old, full = all_bits(engine), engine.memory()
    assert full["weights"] >= engine.info.weight_bytes and full["kv_cache"] == engine.info.kv_bytes
    before = addresses(engine) if arena == "host" else {}
    for _ in range(2):
        assert engine.sleep(level, tags, "recompute") == []
        kept = "weights" not in tags or (level == 1 and arena == "host")
        assert engine.memory() == {
            "weights": full["weights"] if kept else 0,
            "spare": 0,
            "kv_cache": 0 if "kv_cache" in tags else full["kv_cache"],
            "records": 0,
        }
        with pytest.raises(RuntimeError, match=f"{tags[0]}.* is asleep"):
            engine.step()
    for _ in range(2):
        engine.wake_up(tags)
    assert engine.memory() == full
    if level == 2 and "weights" in tags:
        with pytest.raises(RuntimeError, match="the weights are incomplete, so no step can run"):
            engine.step()
        engine.commit_weights(stage(engine, read_tensors(tiny_llama)), 1, "recompute")
    hits = engine.stats().prefix_hits
    engine.add(generate("again", tokens(40)))
    drain(engine)
    assert engine.stats().prefix_hits == hits, "cached prefixes are dropped"
    assert all_bits(engine) == old and (not before or addresses(engine) == before)


def test_a_sleep_of_level_two_loses_the_weights(tiny_llama: Path, backend: str, arena: str) -> None:
    engine = make_engine(tiny_llama, backend=backend)
    assert all(dense(engine, name).any() for name in engine.weights.shapes)
    engine.sleep(2, ["weights"], "recompute")
    engine.wake_up(["weights"])
    assert not any(dense(engine, name).any() for name in engine.weights.shapes)


def dense(engine: Engine, name: str) -> Tensor:
    return engine.weights.tensors[name].to_dense()


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_the_deepest_of_two_sleeps_counts(tiny_llama: Path, arena: str, first: int, second: int) -> None:
    engine = make_engine(tiny_llama)
    for level in (first, second):
        engine.sleep(level, ["weights"], "recompute")
    assert engine.memory()["weights"] == 0
    engine.wake_up(["weights"])
    assert not dense(engine, "model.norm.weight").any()
    with pytest.raises(RuntimeError, match="the weights are incomplete"):
        engine.step()


def test_requests_continue_after_the_kv_cache_slept(tiny_model: Path, backend: str, arena: str) -> None:
    calm, engine = (make_engine(tiny_model, backend=backend, **CHUNKED) for _ in range(2))
    begin(calm)
    begin(engine)
    computed = engine.stats().computed_tokens
    assert engine.sleep(1, BOTH, "recompute") == []
    stats = engine.stats()
    assert stats.recomputed >= 4 and stats.preemptions == 0 and stats.blocks_in_use == 0
    engine.check_integrity()
    engine.wake_up(BOTH)
    assert not any(cache.any() for caches in executor_of(engine)._runner.memories for cache in caches)
    assert contents(drain(engine)) == contents(drain(calm))
    assert engine.stats().computed_tokens - computed > calm.stats().computed_tokens - computed


def test_requests_keep_their_blocks_while_the_weights_alone_sleep(tiny_model: Path, backend: str, arena: str) -> None:
    calm, engine = (make_engine(tiny_model, backend=backend, **CHUNKED) for _ in range(2))
    begin(calm)
    begin(engine)
    in_use = engine.stats().blocks_in_use
    assert engine.sleep(1, ["weights"], "recompute") == [] and engine.stats().blocks_in_use == in_use > 0
    engine.check_integrity()
    engine.wake_up(["weights"])
    assert contents(drain(engine)) == contents(drain(calm))
    assert engine.stats().recomputed == 0 and engine.stats().computed_tokens == calm.stats().computed_tokens


def test_waking_in_stages_around_a_commit(
    tiny_model: Path, backend: str, arena: str, tmp_path: Path, steps_ahead: int
) -> None:
    newer = another_version(tiny_model, tmp_path / "newer")
    engine = make_engine(tiny_model, backend=backend)
    engine.add(generate("r", tokens(20), n=2))
    for _ in range(4):
        engine.step()
    engine.sleep(2, BOTH, "recompute")
    staging = stage(engine, read_tensors(newer))
    with pytest.raises(RuntimeError, match="cannot commit weights while they are asleep"):
        engine.commit_weights(staging, 3, "recompute")
    engine.wake_up(["weights"])
    assert engine.memory()["kv_cache"] == 0
    missing = stage(engine, {"model.norm.weight": read_tensors(newer)["model.norm.weight"]})
    with pytest.raises(ValueError, match="stage every parameter"):
        engine.commit_weights(missing, 3, "recompute")
    engine.commit_weights(staging, 3, "recompute")
    with pytest.raises(RuntimeError, match="kv_cache.* asleep"):
        engine.step()
    engine.wake_up(["kv_cache"])
    at = 4 - steps_ahead
    for sample in drain(engine):
        assert [(s.version, s.start, s.end) for s in sample.weight_versions] == [(0, 0, at), (3, at, 12)]
    assert all_bits(engine) == all_bits(make_engine(newer, backend=backend))


@pytest.mark.parametrize("tags", [BOTH, BOTH[:1], BOTH[1:]])
def test_abort_and_drain_at_a_sleep(tiny_llama: Path, tags: tuple[Tag, ...]) -> None:
    engine = make_engine(tiny_llama, **CHUNKED)
    full = engine.memory()
    begin(engine)
    with pytest.raises(RuntimeError, match="unfinished requests after a drain .got 3."):
        engine.sleep(1, tags, "drain")
    assert engine.memory() == full and engine.stats().recomputed == 0
    outputs = engine.sleep(1, tags, "abort")
    assert [(o.request_id, getattr(o, "index", None)) for o in outputs if o.request_id != "score"] == [
        ("short", 0),
        ("short", 1),
        ("short", 2),
        ("long", 0),
        ("long", 1),
    ]
    assert {o.finish_reason for o in outputs} == {"abort"} and engine.stats().blocks_in_use == 0
    engine.wake_up(tags)
    drain(engine)
    assert engine.sleep(1, tags, "drain") == []


def test_requests_are_added_and_aborted_during_a_sleep(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    expected = all_bits(engine)
    engine.add(generate("goes", tokens(20)))
    engine.step()
    engine.sleep(1, BOTH, "recompute")
    engine.add(generate("stays", tokens(40), n=2))
    engine.add(generate("goes too", tokens(40)))
    assert len(engine.abort("goes")) == len(engine.abort("goes too")) == 1
    engine.invalidate_prefix_cache()
    engine.check_integrity()
    engine.wake_up(BOTH)
    samples = {(o.request_id, o.index): bits(o) for o in samples_of(drain(engine))}
    assert samples == {("stays", i): expected[0]["0", i] for i in range(2)}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 64 MiB of weights."""
    folder = tmp_path_factory.mktemp("models") / "large"
    return make_tiny_model("llama", folder, vocab_size=32768, hidden_size=256, tie_word_embeddings=True, head_dim=64)


def resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def fill(engine: Engine) -> None:
    """Fill the whole KV cache."""
    for caches in executor_of(engine)._runner.memories:
        for cache in caches:
            cache.fill_(1)


def test_a_kv_cache_takes_memory_only_as_it_is_used(large: Path) -> None:
    engine = make_engine(large, num_blocks=None, kv_memory=512 * MIB)
    caches = [cache for pair in executor_of(engine)._runner.memories for cache in pair]
    start = resident()
    for cache in caches:
        cache[:: 2 * MIB // cache[0].nbytes] = 1
    assert sum(cache.any(dim=(1, 2, 3)).sum() for cache in caches) == 256, "one block per huge page is written"
    assert 256 * 4096 <= resident() - start < 64 * MIB


@pytest.mark.parametrize(("level", "tags"), WAYS)
def test_resident_memory_goes_back_to_the_system(large: Path, level: int, tags: tuple[Tag, ...]) -> None:
    engine = make_engine(large, num_blocks=None, kv_memory=128 * MIB)
    run(engine, [generate("r", tokens(20))])
    before = resident()
    fill(engine)
    full = resident()
    assert full - before > 0.9 * 128 * MIB, "the cache was empty and is full now"
    engine.sleep(level, tags, "recompute")
    gone = full - resident()
    expected = 128 * MIB if "kv_cache" in tags else 0
    expected += engine.info.weight_bytes if level == 2 and "weights" in tags else 0
    assert abs(gone - expected) < 0.03 * (128 * MIB + engine.info.weight_bytes)
    engine.wake_up(tags)
    assert full - resident() >= 0.97 * gone, "waking up takes no memory before it is used"


@pytest.mark.parametrize("level", [1, 2])
def test_ten_sleeps_do_not_grow_memory(large: Path, level: int) -> None:
    engine, tensors = make_engine(large, num_blocks=None, kv_memory=64 * MIB), read_tensors(large)
    expected = run(engine, [generate("r", tokens(20))])["r", 0]

    def cycle() -> int:
        fill(engine)
        engine.sleep(level, BOTH, "recompute")
        asleep = resident()
        engine.wake_up(["weights"])
        if level == 2:
            engine.commit_weights(stage(engine, tensors, step=4096), engine.weight_version + 1, "recompute")
        engine.wake_up(["kv_cache"])
        assert bits(run(engine, [generate("r", tokens(20))])["r", 0]) == bits(expected)
        return asleep

    cycle()  # warm-up: the first cycle touches all memory once
    first = cycle()
    assert max(cycle() for _ in range(10)) - first < 4 * MIB
    fresh = make_engine(large, num_blocks=None, kv_memory=64 * MIB).memory()
    assert engine.memory() == fresh | {"spare": fresh["weights"] if level == 2 else 0}


@pytest.mark.parametrize("level", [1, 2])
def test_the_mtp_module_has_its_codes_again(level: int, tmp_path: Path) -> None:
    """In awq, quantizing values again gives other bits."""
    folder = make_mtp_model("qwen3_5", tmp_path / "model")
    settings: dict[str, Any] = dict(backend="cpu", dtype="bfloat16", quantization="awq", speculative="mtp")
    engine = make_engine(folder, **settings)

    def values() -> dict[str, torch.Tensor]:
        found = {name: each for name, each in engine.weights.tensors.items() if name.startswith("mtp.")}
        return {name: each.to_dense().clone() for name, each in found.items() if format_of(each)}

    before = values()
    again = [round_trip(each, FORMATS["awq"]) for each in before.values()]
    assert not all(map(torch.equal, again, before.values())), "premise"
    engine.sleep(level, ["weights"], "abort")
    engine.wake_up(["weights"])
    after = values()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
