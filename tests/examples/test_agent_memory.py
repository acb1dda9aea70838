"""The replay of agents' sessions, small: a host tier spares most of the tokens that an LRU cache computes again."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARK = Path(__file__).parents[2] / "examples" / "benchmarks" / "agent_memory.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("agent_memory", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["agent_memory"] = module  # its dataclasses look up their annotations here
    spec.loader.exec_module(module)
    return module


def test_sessions_that_need_twice_the_cache_recompute_little_with_a_host_tier(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "SAMPLED", (4, 8))  # short samples, so that the replays take few steps
    trace = benchmark.make_trace(sessions=8, turns=4)
    least, lru, *tiers = benchmark.compare(trace).values()
    assert least.computed < 1.1 * sum(turn.new for turns in trace for turn in turns), "premise: all turns are found"
    again = [result.computed - least.computed for result in (lru, *tiers)]
    assert again[0] > least.computed / 2, "premise: without a host tier, the sessions displace one another"
    assert 2 * again[2] <= again[0], "a host tier of half the KV cache halves what LRU computes again"
    assert again[3] == 0 < tiers[-1].restored, "a host tier as large as the KV cache computes nothing again"
    assert benchmark.Replay(trace, benchmark.blocks_of(trace) // 2).run() == lru, "a replay is the same each time"


def test_a_restored_prompt_has_the_bits_of_a_computed_one(benchmark: ModuleType, tiny_llama: Path) -> None:
    assert min(benchmark.measure(str(tiny_llama), 64, "cpu")) > 0
