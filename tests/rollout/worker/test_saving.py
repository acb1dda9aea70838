"""Workers with a `save_folder`, in front of the fake engine: what is saved when, and what a restarted worker serves."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import SHAPES, FakeEngine
from pushing import HandPush, ask
from serving import RawClient, WorkerOnThread, serving, wait_until

from trueroll.errors import ConfigError
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.fleet.config import split_settings
from trueroll.rollout.monitoring.metrics import WorkerMetrics
from trueroll.weight_sync.transports import folders

NEW = {name: torch.randn(shape) for name, shape in SHAPES.items()}
NEWER = {name: torch.randn(shape) for name, shape in SHAPES.items()}


@contextmanager
def worker_in(folder: Path, engine: FakeEngine | None = None) -> Iterator[RawClient]:
    with serving(engine or FakeEngine(), save_folder=str(folder)) as worker, RawClient(worker.address) as raw:
        yield raw


def saved(raw: RawClient) -> dict[str, Any]:
    return raw.health()["saved"]


def wait_for(raw: RawClient, holds: Callable[[dict[str, Any]], bool]) -> None:
    wait_until(lambda: holds(saved(raw)))


def push(raw: RawClient, tensors: dict[str, torch.Tensor], version: int) -> str:
    with HandPush(raw, tensors, version) as made:
        assert made.run()["phase"] == "committed"
    return made.push_id


class SlowDisk:
    """`os.pwrite` for the saver. `gate`: writes wait for it. `is_stuck`: set while a write waits."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.gate, self.is_stuck = threading.Event(), threading.Event()
        self._write = os.pwrite
        patch.setattr(folders.os, "pwrite", self._pwrite)

    def _pwrite(self, *arguments: Any) -> int:
        self.is_stuck.set()
        assert self.gate.wait(60)
        return self._write(*arguments)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.gate.set()


def test_a_restarted_worker_serves_the_last_push(tmp_path: Path) -> None:
    with worker_in(tmp_path / "saved") as raw:
        nothing = dict(weight_version=None, push_id=None, num_saved=0, num_interrupted=0, num_failed=0, error="")
        assert saved(raw) == nothing | {"is_writing": False} and raw.health()["weight_version"] == 3
        push_id = push(raw, NEW, 5)
        wait_for(raw, lambda found: not found["is_writing"] and found["num_saved"] == 1)
        after = saved(raw)
        assert after == nothing | {"weight_version": 5, "push_id": push_id, "num_saved": 1, "is_writing": False}
    engine = FakeEngine()
    with worker_in(tmp_path / "saved", engine) as raw:
        assert saved(raw) == after | {"num_saved": 0}, "the same weights are not written again"
        weights = ask(raw, "weights")
        assert (weights["weight_version"], weights["push_id"]) == (5, push_id)
        assert all(engine.weights.live[name].equal(NEW[name]) for name in SHAPES)
        assert ask(raw, "commit_push", push_id=push_id)["phase"] == "committed", "a repeated call of the trainer"
        raw.generate("a")
        assert raw.receive_until("sample")[-1]["weight_versions"] == [[5, 0, 4]]
        error = HandPush(raw, NEWER, 5).begin()
        assert error["code"] == "push_failed" and "not newer than the served version 5" in error["message"]
        push(raw, NEWER, 6)
        wait_for(raw, lambda found: found["weight_version"] == 6)


def test_a_worker_without_a_folder_saves_nothing(raw: RawClient) -> None:
    push(raw, NEW, 5)
    assert raw.health()["saved"] is None


def test_a_slow_disk_delays_neither_samples_nor_pushes(tmp_path: Path, disk: SlowDisk) -> None:
    engine = FakeEngine()
    with worker_in(tmp_path, engine) as raw:
        push(raw, NEW, 5)
        assert disk.is_stuck.wait(60)
        raw.generate("a")
        assert raw.receive_until("sample")[-1]["weight_versions"] == [[5, 0, 4]]
        push(raw, NEW, 6)
        push(raw, NEWER, 7)
        assert saved(raw)["is_writing"] and saved(raw)["weight_version"] is None
        disk.gate.set()
        wait_for(raw, lambda found: found["weight_version"] == 7)
        assert saved(raw)["num_interrupted"] == 1 and saved(raw)["num_saved"] == 1, "version 6 was never begun"
    with worker_in(tmp_path, engine := FakeEngine()):
        assert all(engine.weights.live[name].equal(NEWER[name]) for name in SHAPES)


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_of_the_weights_interrupts_the_write(tmp_path: Path, disk: SlowDisk, level: int) -> None:
    with worker_in(tmp_path) as raw:
        push(raw, NEW, 5)
        assert disk.is_stuck.wait(60)
        ask(raw, "sleep", level=level, tags=["weights"])
        disk.gate.set()
        wait_for(raw, lambda found: found["num_interrupted"] == 1 and not found["is_writing"])
        ask(raw, "wake_up", tags=["weights"])
        if level == 1:
            wait_for(raw, lambda found: found["weight_version"] == 5)
        else:
            assert raw.health()["state"] == "dirty" and not saved(raw)["is_writing"]


def test_a_sleep_of_the_cache_does_not_interrupt_the_write(tmp_path: Path, disk: SlowDisk) -> None:
    with worker_in(tmp_path) as raw:
        push(raw, NEW, 5)
        assert disk.is_stuck.wait(60)
        ask(raw, "sleep", level=1, tags=["kv_cache"])
        disk.gate.set()
        wait_for(raw, lambda found: found["weight_version"] == 5)
        assert saved(raw)["num_interrupted"] == 0


def test_a_push_in_place_interrupts_the_write_and_is_saved_after_its_commit(tmp_path: Path, disk: SlowDisk) -> None:
    with worker_in(tmp_path) as raw, HandPush(raw, NEWER, 6) as second:
        push(raw, NEW, 5)
        assert disk.is_stuck.wait(60)
        assert second.begin(in_place=True)["phase"] == "begun" and raw.health()["state"] == "dirty"
        disk.gate.set()
        wait_for(raw, lambda found: found["num_interrupted"] == 1 and not found["is_writing"])
        second.stage()
        second.verify()
        second.commit()
        wait_for(raw, lambda found: found["weight_version"] == 6)


@pytest.mark.parametrize("is_urgent", [False, True])
def test_a_shutdown_waits_for_the_write_unless_it_is_urgent(tmp_path: Path, disk: SlowDisk, is_urgent: bool) -> None:
    running = WorkerOnThread(WorkerConfig(save_folder=str(tmp_path)), FakeEngine)
    with RawClient(running.address) as raw:
        wait_until(lambda: raw.health()["state"] == "ready")
        push(raw, NEW, 5)
        assert disk.is_stuck.wait(60)
        running.worker.drain()
        wait_until(lambda: raw.health()["state"] == "draining")
        running.thread.join(0.2)
        assert running.thread.is_alive()
        running.worker.drain() if is_urgent else disk.gate.set()
        running.join()
        disk.gate.set()
    if not is_urgent:
        with worker_in(tmp_path) as raw:
            assert raw.health()["weight_version"] == 5


def test_a_shutdown_waits_at_most_until_its_deadline(tmp_path: Path, disk: SlowDisk) -> None:
    running = WorkerOnThread(WorkerConfig(save_folder=str(tmp_path), drain_seconds=0.3), FakeEngine)
    with RawClient(running.address) as raw:
        wait_until(lambda: raw.health()["state"] == "ready")
        ask(raw, "pause")
        push(raw, NEW, 5)
        assert disk.is_stuck.wait(60)
        running.worker.drain()
        running.join()
    assert running.error is None


def test_a_worker_does_not_start_with_saved_weights_that_it_cannot_serve(tmp_path: Path) -> None:
    with worker_in(tmp_path) as raw:
        push(raw, NEW, 5)
        wait_for(raw, lambda found: found["weight_version"] == 5)
    (file,) = tmp_path.glob("weights/*/model.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    running = WorkerOnThread(WorkerConfig(save_folder=str(tmp_path)), FakeEngine)
    running.join()
    assert isinstance(running.error, ConfigError) and "cannot serve the saved version 5" in str(running.error)


def test_metrics_show_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    engine = FakeEngine()
    with serving(engine, save_folder=str(tmp_path)) as worker, RawClient(worker.address) as raw:
        push(raw, NEW, 5)
        wait_for(raw, lambda found: found["weight_version"] == 5)
        monkeypatch.setattr(folders.os, "pwrite", fail)
        push(raw, NEWER, 6)
        wait_for(raw, lambda found: found["num_failed"] == 1)
        assert "No space left on device" in saved(raw)["error"]
        raw.generate("a")
        assert raw.receive_until("sample")[-1]["weight_versions"] == [[6, 0, 4]], "the worker goes on serving"
        vitals = worker.worker._vitals
        families = WorkerMetrics(vitals.health(), vitals.stats()).collect()
        told = {f"{each.name} {[*each.labels.values()]}": each.value for family in families for each in family.samples}
    assert told["trueroll_saved_version []"] == 5 and told["trueroll_save_failing []"] == 1
    outcomes = {name: told[f"trueroll_saves_total ['{name}']"] for name in ("saved", "interrupted", "failed")}
    assert outcomes == {"saved": 1, "interrupted": 0, "failed": 1}


def test_a_fleet_refuses_the_setting() -> None:
    with pytest.raises(ConfigError, match="save_folder: a fleet gives a restarted worker"):
        split_settings(dict(model="smollm2", num_workers=2, save_folder="/data/saved"))
