"""The host tier: blocks, states, drafts and routed experts come back from it with all their bits, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matrix import thinned

from tiny import make_tiny_model
from trueroll.engine.engine import Engine
from trueroll.engine.request import SampleOutput
from trueroll.engine.running import executor
from trueroll.engine.running.ranks import Links, Topology
from trueroll.errors import ConfigError

from .checkpoints import another_version, read_tensors, stage
from .drafting.mtp_models import make_mtp_model
from .drafting.test_mtp import make as make_drafting
from .drive import bits, executor_of, generate, make_engine, run, tokens

SESSIONS, TURNS = 4, 3
SMALL: dict[str, Any] = dict(block_size=8, max_num_batched_tokens=32, max_num_seqs=4)
TIER: dict[str, Any] = dict(host_cache_bytes=2**24)
STATES: dict[str, Any] = dict(state_interval=16, state_budget=6)
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3": {},
    "deepseek_v3": {},
    "qwen3_5": STATES,
    "falcon_h1": STATES,
    "qwen3_moe": {},
}


def parts(sample: SampleOutput) -> tuple[Any, ...]:
    routes = sample.routed_experts
    return *bits(sample), None if routes is None else routes.tobytes()


def converse(engine: Engine, together: bool = False) -> list[tuple[Any, ...]]:
    """Play sessions that take turns, one after the other or all at once. Return the bits of all samples."""
    histories, found = [tokens(60, seed=i) for i in range(SESSIONS)], list[tuple[Any, ...]]()
    asks = dict(n=2, max_tokens=10, return_routed_experts=engine.info.num_experts > 0)
    for turn in range(TURNS):
        asked = [generate(f"{i} {turn}", history, **asks) for i, history in enumerate(histories)]
        samples = {}
        for requests in [asked] if together else [[each] for each in asked]:
            samples |= run(engine, requests)
        for i, request in enumerate(asked):
            found += [parts(samples[request.id, index]) for index in range(2)]
            drawn = np.array(samples[request.id, 0].token_ids, np.int32)
            histories[i] = np.concatenate((histories[i], drawn, tokens(10, seed=100 * turn + i)))
    return found


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    model = make_tiny_model(request.param, tmp_path_factory.mktemp("tier") / request.param)
    return model, SMALL | CASES[request.param]


@thinned(lambda case, steps_ahead: bool(steps_ahead) == (case != "qwen3_5") and case != "llama")
def test_sessions_that_take_turns_resume_from_the_host(case: tuple[Path, dict[str, Any]], steps_ahead: int) -> None:
    model, settings = case
    expected = converse(make_engine(model, **settings))
    small, tiered = (make_engine(model, **settings, num_blocks=24, **more) for more in ({}, TIER))
    assert converse(small) == converse(tiered) == expected
    stats, computed = tiered.stats(), small.stats().computed_prompt_tokens
    assert stats.host_stored > 0 and stats.host_restored > 0 and stats.host_hits > 0
    assert 2 * stats.computed_prompt_tokens < computed, "premise: without the host tier, prompts are computed again"
    assert stats.checkpoints_on_host > 0 or not settings.keys() & STATES.keys()
    before = tiered.stats()
    assert converse(tiered, together=True) == expected
    after = tiered.stats()
    assert after.host_restored > before.host_restored and after.preemptions + after.deferred_admissions > 0
    assert small.stats().host_stored == 0


@thinned(lambda case: case in ("gemma3", "qwen3_5", "qwen3_moe"))
def test_a_host_tier_that_is_too_small_changes_no_bit(case: tuple[Path, dict[str, Any]]) -> None:
    model, settings = case
    expected = converse(make_engine(model, **settings))
    with pytest.raises(ConfigError, match="host_cache_bytes must be at least") as refused:
        make_engine(model, **settings, num_blocks=24, host_cache_bytes=1)
    assert isinstance(refused.value.limit, int)
    budget = 2 * refused.value.limit
    engine = make_engine(model, **settings, num_blocks=24, host_cache_bytes=budget)
    assert converse(engine) == expected
    assert engine.stats().host_evictions > 0 and engine.memory()["host_cache"] <= budget


@pytest.mark.parametrize("event", ["push", "sleep", "invalidate"])
def test_the_end_of_an_epoch_frees_the_host_tier(tiny_qwen3_5: Path, tmp_path: Path, event: str) -> None:
    settings = SMALL | STATES | dict(num_blocks=24) | TIER
    engine = make_engine(tiny_qwen3_5, **settings)
    old = converse(engine)
    held = engine.memory()["host_cache"]
    assert engine.stats().pools[0].on_host > 0 and 0 < held <= TIER["host_cache_bytes"]
    restored, hit_blocks = engine.stats().host_restored, engine.stats().host_hits // SMALL["block_size"]
    assert restored > hit_blocks > 0, "checkpoints count as restored, but are no blocks of tokens"
    expected = old
    if event == "push":
        newer = another_version(tiny_qwen3_5, tmp_path / "newer")
        engine.commit_weights(stage(engine, read_tensors(newer)), 1, "drain")
        expected = converse(make_engine(newer, **SMALL, **STATES))
        assert expected != old
    elif event == "sleep":
        engine.sleep(1, ["kv_cache"], "drain")
        assert engine.memory()["host_cache"] == 0
        engine.wake_up(["kv_cache"])
    else:
        engine.invalidate_prefix_cache()
    stats = engine.stats()
    assert stats.pools[0].on_host == stats.checkpoints_on_host == 0 and engine.memory()["host_cache"] == held
    [first] = run(engine, [generate("again", tokens(60), max_tokens=10)]).values()
    assert first.num_cached_tokens == 0 and engine.stats().host_restored == stats.host_restored
    assert converse(engine) == expected and engine.stats().host_restored > stats.host_restored


def contents(engine: Engine) -> dict[tuple[bytes, int], list[bytes]]:
    """Return the content of the published blocks on the device (of the last layer and of the MTP module) and of the
    checkpoints there, by the tokens of their prefix and the index of their group. The checkpoints have the last index.
    """
    found, running = dict[tuple[bytes, int], list[bytes]](), engine._scheduler.running
    runner, states = executor_of(engine)._runner, running.states
    tensors = runner._copied()
    tensors[0] = [*runner.memories[-1], *([] if runner.mtp is None else runner.mtp.block_tensors)]
    assert not any(running.take_block_copies()), "all copies are made"
    for entry in engine._scheduler.cache.entries:
        tokens, parent = entry.tokens, entry.parent
        while parent is not None:
            tokens, parent = parent.tokens + tokens, parent.parent
        places = entry.blocks if states is None else [*entry.blocks, states.slots._ready.get(entry)]
        for group, (place, of_group) in enumerate(zip(places, tensors, strict=True)):
            if place is not None and place >= 0:
                found[tokens, group] = [each[place].view(torch.uint8).numpy().tobytes() for each in of_group]
    return found


def test_the_memory_of_the_module_comes_back_from_the_host(tmp_path: Path) -> None:
    model = make_mtp_model("qwen3_5", tmp_path / "model")
    expected, accepted = converse(make_engine(model, **SMALL | STATES)), list[int]()
    found = list[dict[tuple[bytes, int], list[bytes]]]()
    cases: list[dict[str, Any]] = [dict(num_blocks=24) | TIER, {}]
    for more in cases:
        engine = make_drafting(model, **SMALL | STATES | more)
        assert converse(engine) == expected
        accepted.append(engine.stats().drafts[0].num_accepted)
        found.append(contents(engine))
        assert (engine.stats().host_restored > 0) == ("num_blocks" in more)
    assert accepted[0] == accepted[1] > 0
    common = found[0].keys() & found[1].keys()
    assert {key: found[0][key] for key in common} == {key: found[1][key] for key in common}
    assert {group for _, group in common} == {0, 1}, "premise: blocks and checkpoints"


def test_a_preempted_sample_resumes_from_the_host(tiny_llama: Path, steps_ahead: int) -> None:
    asked = [generate(str(i), tokens(60, seed=i), max_tokens=60) for i in range(3)]
    expected = {key: bits(sample) for key, sample in run(make_engine(tiny_llama, **SMALL), asked).items()}
    computed = list[int]()
    for more in ({}, TIER):
        engine = make_engine(tiny_llama, **SMALL, num_blocks=24, **more)
        assert {key: bits(sample) for key, sample in run(engine, asked).items()} == expected
        assert engine.stats().preemptions > 0, "premise"
        computed.append(engine.stats().computed_tokens)
    stats = engine.stats()
    assert stats.host_hits == SMALL["block_size"] * stats.host_restored > 0 and computed[1] < computed[0]


def test_a_tier_larger_than_the_memory_is_refused(tiny_qwen3_5: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SMALL | STATES | dict(num_blocks=24) | TIER
    info = make_engine(tiny_qwen3_5, **settings).info
    assert info.kv_bytes > 0 and info.state_bytes > 0, "premise: on a CPU, they share the memory of the host"
    least = info.kv_bytes + info.state_bytes + TIER["host_cache_bytes"]
    monkeypatch.setattr(executor, "available_memory", lambda device: least)
    make_engine(tiny_qwen3_5, **settings)
    monkeypatch.setattr(executor, "available_memory", lambda device: least - 1)
    with pytest.raises(ConfigError, match=r"host_cache_bytes must be at most the .* available to each rank") as refused:
        make_engine(tiny_qwen3_5, **settings)
    assert refused.value.limit == TIER["host_cache_bytes"] - 1


def test_ranks_divide_the_memory_of_their_device_and_of_the_host() -> None:
    class Exchange:
        def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [x, torch.tensor([60, 20])]

    everyone: Any = Exchange()
    assert executor._available_per_rank(101, 90, Links(Topology(2, 2), everyone, everyone, num_sharers=2)) == [50, 20]
    assert executor._available_per_rank(101, 70, Links(Topology(2, 2), everyone, everyone)) == [60, 17]


def test_a_host_tier_without_a_prefix_cache_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="host_cache_bytes must be 0 if enable_prefix_caching is false"):
        make_engine(tiny_llama, enable_prefix_caching=False, **TIER)
