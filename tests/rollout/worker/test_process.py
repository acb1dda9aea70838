"""The worker as a separate process with the fake engine: start, exit, and the effects on clients."""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_engine import FAIL_IN_STEP, HANG_IN_STEP, SHAPES, SLOW_STEP
from matrix import thinned
from pushing import ask
from serving import RawClient, check_group, fake_process

from trueroll.engine.config import EngineConfig
from trueroll.errors import ConfigError, ModelError, PushError, WorkerFailedError, WorkerLostError
from trueroll.rollout import RolloutClient, SamplingParams, WeightPublisher, WorkerProcess, launch_worker
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.worker.process import raise_descriptor_limit
from trueroll.weight_sync.trainer.sender import Transport

SECONDS = 60


def wait_for_end(process: WorkerProcess) -> int:
    """Return the exit code, which is negative if a signal ended the process."""
    return process._process.wait(SECONDS)


def test_a_worker_process_serves_and_ends_cleanly() -> None:
    with fake_process() as process, RolloutClient(process.address) as client:
        check_group(client.generate([[1]], SamplingParams(n=3, max_tokens=5))[0], 3)
        assert process.exit_code is None and os.path.exists(process.address.removeprefix("ipc://"))
    assert process.exit_code == 0 and not os.path.exists(process.address.removeprefix("ipc://"))
    process.close()


def test_a_worker_raises_its_descriptor_limit() -> None:
    soft = 200
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert hard > soft
    lowered = ("sh", "-c", f'ulimit -S -n {soft} && test "$(ulimit -S -n)" = {soft} && exec "$@"', "sh")
    command = (*lowered, sys.executable, str(Path(__file__).parents[2] / "fake_worker.py"))
    with WorkerProcess(WorkerConfig(), EngineConfig(model="fake"), 60, command=command) as process:
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (hard, hard)


def test_a_process_with_many_open_files_starts_workers() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1024  # `select.select` takes no descriptor from here on
    assert limits[1] > 2 * most
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2 * most), limits[1]))
    copies = [os.dup(0)]
    try:
        while copies[-1] < most:
            copies.append(os.dup(0))
        with fake_process() as process:
            assert process._process.stdout is not None and process._process.stdout.fileno() > most, "premise"
    finally:
        for copy in copies:
            os.close(copy)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("error", [OSError(1, "Operation not permitted"), ValueError("not allowed")])
def test_a_descriptor_limit_that_cannot_be_raised_is_logged_and_kept(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr("resource.getrlimit", lambda _: (200, 4096))
    monkeypatch.setattr("resource.setrlimit", refuse)
    with caplog.at_level(logging.WARNING, "trueroll.rollout.worker.process"):
        raise_descriptor_limit()
    assert "200" in caplog.text and "4096" in caplog.text and str(error) in caplog.text


def test_a_model_that_cannot_be_loaded_raises_its_error() -> None:
    with pytest.raises(ModelError, match="model 'broken' cannot be loaded"):
        fake_process("broken")


def test_an_address_that_cannot_be_bound_raises() -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        fake_process(address="ipc:///nowhere/worker.sock")


@pytest.mark.parametrize(
    ("code", "seconds", "text"),
    [("raise SystemExit(3)", SECONDS, "exit code 3"), ("import time; time.sleep(99)", 0.1, "startup_timeout")],
)
def test_a_process_that_ends_early_or_never_gets_ready_raises(code: str, seconds: float, text: str) -> None:
    with pytest.raises(WorkerFailedError, match=text):
        WorkerProcess(WorkerConfig(), EngineConfig(model="any"), seconds, command=(sys.executable, "-c", code))


@pytest.mark.parametrize("setting", [{"no_such_setting": 1}, {"max_n": 0}, {"block_size": 0}])
def test_wrong_settings_raise_before_anything_starts(setting: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        launch_worker("any", **setting)


def test_an_exception_in_a_step_answers_all_and_ends_the_process() -> None:
    with fake_process() as process, RawClient(process.address) as raw, RawClient(process.address) as other:
        ask(other, "pause")
        other.generate("long", n=2, max_tokens=490)
        other.generate("longer", n=2, max_tokens=490)
        other.health()  # the reply arrives after the worker has received the requests
        raw.generate("bad", prompt=[FAIL_IN_STEP])
        raw.send("resume", id="resume")
        assert "broken step" in raw.receive_until("error")[-1]["message"]
        failed = other.receive_until("error") + other.receive_until("error")
        ends = {reply["id"]: reply["code"] for reply in failed if reply["type"] == "error"}
        assert ends == {"long": "worker_failed", "longer": "worker_failed"}
        assert wait_for_end(process) == 1


def test_sigterm_finishes_running_requests() -> None:
    with fake_process() as process, RawClient(process.address) as raw:
        raw.generate("a", prompt=[SLOW_STEP], max_tokens=40)
        raw.health()
        os.kill(process.pid, signal.SIGTERM)
        assert raw.receive_until("done", "error")[-1]["finish_reasons"] == {"length": 1}
        assert wait_for_end(process) == 0


def test_sigterm_returns_partial_output_at_the_deadline() -> None:
    with fake_process(drain_seconds=0.0) as process, RawClient(process.address) as raw:
        raw.generate("a", prompt=[SLOW_STEP], n=2, max_tokens=490)
        raw.health()
        os.kill(process.pid, signal.SIGTERM)
        *samples, done = raw.receive_until("done", "error")
        assert done["finish_reasons"] == {"abort": 2} and all(sample["finish_reason"] == "abort" for sample in samples)
        assert wait_for_end(process) == 0


def test_sigterm_during_a_long_load_ends_cleanly(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/worker.sock"
    settings = {"worker": {"address": address, "drain_seconds": 0.2}, "engine": {"model": "slow"}}
    command = (sys.executable, str(Path(__file__).parents[2] / "fake_worker.py"))
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process, RawClient(address) as raw:
        assert process.stdin is not None
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        process.stdin.flush()
        raw.generate("a")
        assert raw.health()["state"] == "loading"
        process.terminate()
        assert raw.receive()["code"] == "unavailable"
        assert process.wait(SECONDS) == 0


def test_an_engine_that_hangs_does_not_keep_the_process() -> None:
    with fake_process(drain_seconds=0.0) as process, RawClient(process.address) as raw:
        raw.generate("a", prompt=[HANG_IN_STEP])
        while raw.health()["requests"]["running"] < 1:
            pass
        os.kill(process.pid, signal.SIGTERM)
        error = raw.receive_until("error")[-1]
        assert error["code"] == "worker_failed" and "did not abort" in error["message"]
        assert wait_for_end(process) == 1


def test_a_killed_worker_is_lost_and_no_call_waits_forever() -> None:
    errors: list[BaseException] = []

    def generate(client: RolloutClient) -> None:
        try:
            client.generate([[HANG_IN_STEP]])
        except WorkerLostError as error:
            errors.append(error)

    with fake_process() as process, RolloutClient(process.address, timeout=2.0) as client:
        thread = threading.Thread(target=generate, args=(client,))
        thread.start()
        while not client.health().requests["open"]:
            pass
        process.kill()
        thread.join(SECONDS)
        assert "no answer" in str(errors[0]) and process.exit_code == -signal.SIGKILL
        assert not Path(process.address.removeprefix("ipc://")).parent.exists()


def test_an_interrupt_while_the_worker_loads_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def interrupt(process: WorkerProcess, deadline: float) -> str:
        while not (sockets := list(tmp_path.glob("trueroll-*/worker.sock"))):
            time.sleep(0.05)
        with RawClient(f"ipc://{sockets[0]}") as client:
            assert client.health()["state"] == "loading"
        raise KeyboardInterrupt

    monkeypatch.setattr(WorkerProcess, "_wait_until_ready", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fake_process("slow")
    assert list(tmp_path.iterdir()) == []


def test_closing_kills_a_worker_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trueroll.rollout.client.local_worker.STOP_MARGIN_SECONDS", 0.5)
    with fake_process(drain_seconds=0.0) as process:
        os.kill(process.pid, signal.SIGSTOP)
    assert process.exit_code == -signal.SIGKILL


def test_a_worker_ends_with_a_parent_that_was_killed() -> None:
    code = "from serving import fake_process; p = fake_process(); print(p.pid, p.address, flush=True); input()"
    tests = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tests, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None and parent.stdout is not None
    pid, address = parent.stdout.readline().split()
    folder = Path(address.removeprefix("ipc://")).parent
    handle = os.pidfd_open(int(pid))
    assert folder.is_dir()
    parent.kill()
    parent.wait()
    try:
        assert select.select([handle], [], [], SECONDS)[0] == [handle] and not folder.exists()
    finally:
        os.close(handle)
        parent.stdin.close()
        parent.stdout.close()


@pytest.mark.parametrize("transport", ["shared", "collective"])
@thinned(lambda transport: transport == "collective")
def test_sigterm_during_a_push_is_an_orderly_shutdown(transport: Transport) -> None:
    with fake_process(drain_seconds=1.0) as worker, WeightPublisher(transport, timeout=10.0) as publisher:
        publisher.connect([worker.address])

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name, shape in SHAPES.items():
                yield name, torch.zeros(shape)
                if worker.exit_code is None:
                    os.kill(worker.pid, signal.SIGTERM)
                    wait_for_end(worker)

        with pytest.raises(PushError, match="worker .* failed"):
            publisher.push(tensors(), 1)
        assert worker.exit_code == 0


def test_a_child_that_gets_no_settings_ends_without_a_word() -> None:
    command = [sys.executable, "-P", "-m", "trueroll.rollout.worker.process"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
