"""The bench runs the same work in both systems, and writes its measurements. No test checks a duration."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from rich.console import Console

from trueroll.engine.config import EngineConfig
from trueroll.engine.drafting import drafting
from trueroll.engine.running.loading import load_model
from trueroll.errors import ConfigError
from trueroll.rollout.tools import bench
from trueroll.rollout.tools.bench import EngineSystem, Plan, Timing, TransformersSystem, Workload

GROUP = Workload("tiny group", num_prompts=3, shared=0, own=20, n=2, max_tokens=4, temperature=1.0)
SHARED = Workload("tiny shared", num_prompts=4, shared=32, own=8, n=1, max_tokens=3, temperature=0.0)


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(model=str(folder), num_blocks=64, num_threads=1)


def test_the_workloads_are_those_of_the_documentation() -> None:
    (group,), (shared_8, shared_128), (single,) = bench.WORKLOADS.values()
    assert (group.num_prompts, group.own, group.n, group.max_tokens, group.temperature) == (8, 128, 8, 128, 1.0)
    for shared, max_tokens in ((shared_8, 8), (shared_128, 128)):
        assert (shared.num_prompts, shared.shared, shared.own, shared.n) == (32, 1024, 64, 1)
        assert (shared.max_tokens, shared.temperature) == (max_tokens, 0.0)
    assert (single.num_prompts, single.own, single.n, single.max_tokens) == (1, 128, 1, 128)


def test_prompts_share_only_their_beginning() -> None:
    prompts = SHARED.prompts(512)
    assert prompts.shape == (4, 40)
    assert (prompts[:, :32] == prompts[0, :32]).all()
    assert len({tuple(own) for own in prompts[:, 32:].tolist()}) == 4
    assert (prompts == SHARED.prompts(512)).all()


def test_the_engine_does_the_work_and_counts_its_hits(tiny_llama: Path) -> None:
    config = config_of(tiny_llama)
    system = EngineSystem(config, load_model(config))
    assert system(GROUP).hit_rate == 0.0
    assert system.engine.stats().generated_tokens == 3 * 2 * 4
    # The first prompt computes the 32 shared tokens; the other three find them in the cache.
    assert system(SHARED).hit_rate == 3 * 32 / (4 * 40)
    assert system(SHARED).hit_rate == 3 * 32 / (4 * 40), "a run must begin with an empty cache"
    without = EngineSystem(config.model_copy(update={"enable_prefix_caching": False}), load_model(config))
    assert without(SHARED).hit_rate == 0.0


@pytest.mark.parametrize("workload", [GROUP, SHARED])
def test_transformers_does_the_same_work(tiny_llama: Path, workload: Workload) -> None:
    timing = TransformersSystem(load_model(config_of(tiny_llama)))(workload)
    assert timing.hit_rate is None
    assert timing.arrivals == [timing.seconds] * workload.num_prompts


def test_a_measurement_is_the_median_of_runs_in_turn() -> None:
    """The first run of each system warms up. Then the systems run in turn, so that all notice a slow machine."""
    runs: list[tuple[str, int]] = []

    def system(name: str, seconds: list[float]) -> bench.System:
        def run(workload: Workload) -> Timing:
            runs.append((name, workload.max_tokens))
            return Timing(seconds.pop(0), arrivals=[0.5, 1.0, 1.5], hit_rate=0.25)

        return run

    warm_up, first_token = 99.0, 0.5
    seconds = [warm_up, 4.0, first_token, 1.0, first_token, 2.0, first_token]
    said: list[str] = []
    one, other = bench.measure(GROUP, {"a": system("a", seconds), "b": system("b", [*seconds])}, said.append)
    in_turn = [(name, tokens) for _ in range(bench.RUNS) for name in "ab" for tokens in (4, 1)]
    assert runs == [("a", 4), ("b", 4), *in_turn]
    assert said[0] == "tiny group: a, warm-up" and said[-1] == "tiny group: b, run 3 of 3" and len(said) == 8
    assert (one.workload, one.system, other.system, one.seconds) == ("tiny group", "a", "b", 2.0)
    assert (one.tokens_per_second, one.requests_per_second) == (3 * 2 * 4 / 2.0, 1.5)
    assert (one.hit_rate, one.first_token_seconds) == (0.25, 1.0)
    assert (one.all_seconds, one.all_tokens_per_second) == ((4.0, 1.0, 2.0), (6.0, 24.0, 12.0))
    with_range = Console(record=True, width=120)
    with_range.print(bench.make_table([one], "title"))
    assert " 12     6 to 24 " in with_range.export_text()


def test_every_system_and_workload_is_reported(tiny_llama: Path, tmp_path: Path) -> None:
    console = Console(record=True, width=160)
    files = (tmp_path / "bench.json", tmp_path / "bench.png")
    bench.bench(config_of(tiny_llama), Plan((GROUP, SHARED), (True, False), True, *files), console)
    report = json.loads(files[0].read_text())
    assert report["setting"]["dtype"] == "float32"
    assert report["setting"]["machine"].endswith(f"({len(os.sched_getaffinity(0))} cores)")
    assert [(m["workload"], m["system"]) for m in report["measurements"]] == [
        (workload.name, system) for workload in (GROUP, SHARED) for system in ("cache on", "cache off", "hf")
    ]
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert all(len(m["all_seconds"]) == bench.RUNS for m in report["measurements"])
    text = console.export_text()
    assert "tiny shared" in text and text.count("vs hf") == 2 and "first token:" in text


def test_drafts_are_measured_and_change_no_bit(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repetitive = Workload("tiny", 1, 0, 16, 2, 40, 0.0)
    # The rule depends on times.
    monkeypatch.setattr(drafting, "choose", lambda chances, *_: {lane: len(each) for lane, each in chances.items()})
    config = config_of(tiny_llama).model_copy(update={"speculative": "ngram"})
    console = Console(record=True, width=160)
    plain, drafts = bench.bench(config, Plan((repetitive,), (True,)), console)
    assert (plain.system, drafts.system) == ("cache on", "drafts") and drafts.drafted > 0 == plain.drafted
    assert f"{drafts.accepted:,} of {drafts.drafted:,}" in console.export_text()
    monkeypatch.setattr(bench, "_digest", lambda samples: os.urandom(8))
    with pytest.raises(RuntimeError, match="tiny: runs of cache on and .*drafts have different bits"):
        bench.bench(config, Plan((repetitive,), (True,)), console)


def test_random_weights_can_be_measured(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    config = config_of(Path(shutil.copy(tiny_llama / "config.json", tmp_path)))
    bench.bench(config, Plan((SHARED,), (True,), json_file=file, dummy_weights=True), Console(quiet=True))
    report = json.loads(file.read_text())
    assert report["setting"]["model"] == f"{tmp_path}/config.json with random weights"
    [measurement] = report["measurements"]
    assert measurement["tokens_per_second"] > 0 and measurement["hit_rate"] == 3 * 32 / (4 * 40)


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plan = Plan((GROUP,), plot_file=tmp_path / "bench.png")
    with pytest.raises(ConfigError, match=r"trueroll\[plot\]"):
        bench.bench(EngineConfig(model="nowhere"), plan, Console())
