"""The fleet simulation, small: the engine's schedulers and caches compute every group once, despite failures."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SIMULATION = Path(__file__).parents[2] / "examples" / "benchmarks" / "fleet_simulation.py"
WORKERS, GROUPS = 12, 480


@pytest.fixture(scope="module")
def simulation() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fleet_simulation", SIMULATION)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fleet_simulation"] = module  # its dataclasses look up their annotations here
    spec.loader.exec_module(module)
    return module


def test_prefixes_are_found_and_workers_are_busy(
    simulation: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(simulation, "FAILING", 0.25)
    results, report = [], simulation.report
    monkeypatch.setattr(
        simulation, "report", lambda found, bound: results.append((found, bound)) or report(found, bound)
    )
    simulation.main(tmp_path, workers=WORKERS, groups=GROUPS, seed=1)
    [(runs, bound)] = results
    by_name = {run.name: run for run in runs}
    here, oracle = by_name["this placement"], by_name["oracle"]
    assert all(run.failed > 0 and run.asked_again > 0 for run in runs), "failures hit every run"
    assert all(0 < run.hit_rate < run.best_hit_rate and run.seconds > bound for run in runs), "nothing beats the bounds"
    for name in ("random", "round robin", "least loaded"):
        assert here.hit_rate > 1.1 * by_name[name].hit_rate and here.seconds < by_name[name].seconds
    assert here.hit_rate > 0.85 * oracle.hit_rate and here.seconds < 1.25 * oracle.seconds
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert "this placement" in capsys.readouterr().out


def test_a_run_is_the_same_each_time_and_computes_every_group_once(
    simulation: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: list[list[int]] = [[], []]
    finish = simulation.Placing.finish
    runs = []
    for ended in finished:

        def note(self: object, group: int, worker: int, now: float, ended: list[int] = ended) -> None:
            ended.append(group)
            finish(self, group, worker, now)

        monkeypatch.setattr(simulation.Placing, "finish", note)
        workload = simulation.Workload(200, seed=3)
        run = simulation.simulate("this placement", workload, 6, seed=3)
        runs.append((run.hit_rate, run.seconds))
    assert sorted(finished[0]) == [*range(200)] and finished[0] == finished[1] != sorted(finished[0])
    assert runs[0] == runs[1]


def test_workers_run_out_of_lanes_and_integrity_holds(simulation: ModuleType) -> None:
    """A worker with more groups than lanes computes all tokens of all samples."""
    workload = simulation.Workload(30, seed=0)
    worker = simulation.Worker(workload, slowness=2.0)
    for group in range(30):
        worker.add(group, workload.prompt(group))
    ended, seconds, most = [], 0.0, 0
    while worker.groups:
        step = worker.begin_step()
        seconds += step
        most = max(most, len(worker._scheduler.running.sequences))
        ended += worker.end_step()
        for group in ended:
            if group in worker.groups:
                worker.count(group, counts := simulation.Counts())
                assert counts.asked == workload.prompt_len(group) >= counts.shared >= counts.hits
    worker._scheduler.check_integrity()
    assert sorted(ended) == [*range(30)] and most == simulation.MAX_SEQS
    stats = worker._scheduler.stats
    decoded = stats.computed_tokens - stats.computed_prompt_tokens
    assert stats.preemptions == 0 and decoded == int((workload.lengths - 1).sum())
    assert stats.prefix_hits > 0 and seconds > 2 * workload.least_seconds([1.0])


def test_the_table_of_steps_is_convex_so_that_its_lines_are_bounds(simulation: ModuleType) -> None:
    counts = np.arange(1, max(simulation.STEP_SECONDS) + 1)
    seconds = np.array([simulation.step_seconds(int(count)) for count in counts])
    assert [simulation.step_seconds(count) for count in simulation.STEP_SECONDS] == pytest.approx(
        [*simulation.STEP_SECONDS.values()]
    )
    assert (np.diff(seconds, n=2) > -1e-9).all()
