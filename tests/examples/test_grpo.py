"""`examples/grpo.py` on a tiny model: runs are equal to the bit, even if the worker or the trainer is killed."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest
import torch
import typer
from matrix import thinned
from transformers import AutoModelForCausalLM

from tiny import make_tiny_model
from trueroll.errors import WorkerFailedError, WorkerLostError
from trueroll.rollout import RolloutClient, WeightPublisher, WorkerProcess, launch_worker
from trueroll.weight_sync.trainer.transaction import Transaction

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"
Run: TypeAlias = Callable[..., list[dict[str, str]]]
DEADLINE = 240.0
STEPS = 4
SETTINGS: dict[str, Any] = dict(dtype="bfloat16", max_model_len=256)
COLUMNS = ["step", "reward", "response_length", "mismatch", "stale_difference", "stale_share", "oldest_version", "loss"]
COLUMNS += ["grad_norm"]


@pytest.fixture(scope="module")
def worker(model: Path, forked_workers: None) -> Iterator[WorkerProcess]:
    """One worker for all in-process runs of this module. Each run pushes its own weights before its first request."""
    with launch_worker(str(model), **SETTINGS) as worker:
        yield worker


@pytest.fixture(scope="module")
def grpo(model: Path, worker: WorkerProcess) -> Any:
    """The example with a running worker."""

    def lend(folder: str, **settings: Any) -> AbstractContextManager[WorkerProcess]:
        assert (folder, settings) == (str(model), SETTINGS)
        return nullcontext(worker)

    spec = importlib.util.spec_from_file_location("grpo", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["grpo"] = module  # dataclasses look up their module here
    spec.loader.exec_module(module)
    module.WORKER_TIMEOUT, module.launch_worker = 5.0, lend
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny", dtype="bfloat16")


@pytest.fixture(scope="module")
def run(grpo: Any, model: Path) -> Run:
    """A function that runs the example in this process and returns the rows of its metrics."""

    def run(folder: Path, *, steps: int = STEPS, **settings: Any) -> list[dict[str, str]]:
        defaults: dict[str, Any] = dict(seed=1, prompts=2, unaligned=False, staleness=0, sleep=0, resume=False)
        grpo.main(folder, model=str(model), steps=steps, **(defaults | dict(checkpoint_every=1) | settings))
        return read_rows(folder)

    return run


@pytest.fixture(scope="module")
def undisturbed(run: Run, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The metrics of a run that really trains: at each step, the rewards differ within some group, so the gradient is
    not zero.
    """
    folder = tmp_path_factory.mktemp("undisturbed")
    rows = run(folder)
    assert len(rows) == STEPS and all(float(row["grad_norm"]) > 0 for row in rows)
    return (folder / "metrics.csv").read_bytes()


def read_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("sleep", [0, 1, 2])
def test_a_run_is_the_same_again_at_every_level_of_sleep(
    run: Run, undisturbed: bytes, tmp_path: Path, sleep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = []
    fall_asleep = RolloutClient.sleep
    monkeypatch.setattr(RolloutClient, "sleep", lambda self, level: (levels.append(level), fall_asleep(self, level)))
    rows = run(tmp_path, sleep=sleep)
    assert levels == ([sleep] * STEPS if sleep else []) and [*rows[0]] == COLUMNS
    assert (tmp_path / "metrics.csv").read_bytes() == undisturbed
    assert [row["mismatch"] for row in rows] == ["0.0"] * STEPS
    assert [row["oldest_version"] for row in rows] == [str(step + 1) for step in range(STEPS)]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_an_adapter_is_trained_and_pushed_alone(
    run: Run, grpo: Any, model: Path, undisturbed: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only adapters are pushed, on top of the checkpoint that the worker serves. A resumed run also pushes only
    adapters.
    """
    pushed, push = [], WeightPublisher.push

    def noted(self: WeightPublisher, *arguments: Any, **options: Any) -> Any:
        pushed.append(options["adapters"])
        return push(self, *arguments, **options)

    monkeypatch.setattr(WeightPublisher, "push", noted)
    with launch_worker(str(model), **SETTINGS) as worker:
        monkeypatch.setattr(grpo, "launch_worker", lambda *_, **__: nullcontext(worker))
        for folder, sleep in (("first", 0), ("again", 1)):
            rows = run(tmp_path / folder, lora=4, sleep=sleep)
            assert [row["mismatch"] for row in rows] == ["0.0"] * STEPS
            assert all(float(row["grad_norm"]) > 0 for row in rows)
    assert pushed == [True] * 2 * (STEPS + 1)
    metrics = [(tmp_path / folder / "metrics.csv").read_bytes() for folder in ("first", "again")]
    assert metrics[0] == metrics[1] != undisturbed
    with pytest.raises(typer.BadParameter, match="--lora needs --fsdp 1 and --sleep 0 or 1"):
        run(tmp_path, lora=4, sleep=2)


@pytest.mark.parametrize(
    "sampling",
    [
        dict(temperature=0.9, top_k=20, top_p=0.9, min_p=0.05),
        dict(repetition_penalty=1.2, frequency_penalty=0.5, logit_bias=[[7, 2.0]], bad_words_token_ids=[[9], [7, 7]])
        | dict(min_tokens=6, stop_token_ids=[*range(2, 60)], ignore_eos=True),
        dict(structured_outputs=dict(regex=" ?-?[0-9]+( [a-z]*)?"), top_p=0.95),
    ],
    ids=["filters", "edits", "grammar"],
)
def test_filters_and_edits_leave_no_mismatch(
    run: Run, undisturbed: bytes, tmp_path: Path, sampling: dict[str, Any]
) -> None:
    rows = run(tmp_path, steps=2, sampling=json.dumps(sampling))
    assert [row["mismatch"] for row in rows] == ["0.0"] * 2 and all(float(row["grad_norm"]) > 0 for row in rows)
    assert not undisturbed.startswith((tmp_path / "metrics.csv").read_bytes()), "premise: the samples differ"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(sampling="["), "--sampling: Expecting value"),
        (dict(sampling='{"beams": 3}'), "--sampling: beams: unknown parameter"),
        (dict(sampling='{"min_tokens": 3}'), "min_tokens needs ignore_eos"),
        (dict(sampling='{"structured_outputs": {"regex": "a"}}', fsdp=2), "structured_outputs needs --workers 1"),
        (dict(sampling='{"top_p": 0.9}', staleness=1), "--sampling needs an aligned trainer and --staleness 0"),
    ],
)
def test_invalid_sampling_is_refused(run: Run, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        run(tmp_path, **settings)


def test_another_seed_gives_another_run(run: Run, undisturbed: bytes, tmp_path: Path) -> None:
    run(tmp_path, seed=2)
    assert (tmp_path / "metrics.csv").read_bytes() != undisturbed


def test_the_plain_forward_pass_shows_a_mismatch(
    run: Run, grpo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The mismatch of such a run can be drawn beside the mismatch of an aligned run."""
    rows = run(tmp_path / "plain", steps=2, unaligned=True)
    assert all(float(row["mismatch"]) > 0.0 for row in rows)
    check_diagnostics(rows)
    figures: list[Any] = []
    make_figure = grpo.Figure
    monkeypatch.setattr(grpo, "Figure", lambda **sizes: figures.append(make_figure(**sizes)) or figures[-1])
    run(tmp_path / "aligned", steps=2, beside=tmp_path / "plain")
    both = {line.get_label(): [*line.get_ydata()] for line in figures[0].axes[2].lines}
    assert both == {"step": [0.0, 0.0], "step of plain": [float(row["mismatch"]) for row in rows]}
    assert "seed 1" in figures[0].get_suptitle()
    assert capfd.readouterr().out.count(" s: generate ") == 4, "each step prints its seconds"
    with pytest.raises(typer.BadParameter, match="--beside: .* has no metrics.csv"):
        run(tmp_path / "third", beside=tmp_path)


def test_a_new_worker_gives_no_warning(model: Path, tmp_path: Path) -> None:
    """The first push has a higher version than the checkpoint of a new worker."""
    arguments = ("--out", str(tmp_path / "run"), "--model", str(model), "--steps", "1", "--prompts", "2")
    result = subprocess.run([sys.executable, "-P", str(EXAMPLE), *arguments], capture_output=True, text=True)
    assert result.returncode == 0 and "warning" not in (result.stdout + result.stderr).lower(), result.stderr


def check_diagnostics(rows: list[dict[str, str]]) -> None:
    """Check the diagnostics of samples from a policy that differs from the trainer's."""
    for row in rows:
        assert float(row["k1"]) != 0.0 and float(row["k2"]) > 0.0 and float(row["k3"]) > 0.0
        assert float(row["largest_ratio"]) > 1.0 and float(row["perplexity_gap"]) != 0.0
        assert (float(row["clipped_share"]) > 0.0) == (float(row["largest_ratio"]) > 2.0)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_mixture_of_experts_trains_without_a_mismatch(
    grpo: Any, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(family, tmp_path / "model", dtype="bfloat16")
    monkeypatch.setattr(grpo, "launch_worker", launch_worker)
    grpo.main(tmp_path / "run", model=str(model), steps=3, seed=1, prompts=2)
    rows = read_rows(tmp_path / "run")
    assert [row["mismatch"] for row in rows] == ["0.0"] * 3
    assert all(float(row["grad_norm"]) > 0 for row in rows)
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    after = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["model"]
    trained = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert trained == before.keys()  # including the router and the stacks of all experts


class WorkerKiller:
    """Kills the worker of a run once, during the `nth` call of a function.

    The worker is stopped before the call sends anything, so that it cannot answer. The worker is killed shortly after.
    `pids`: process ids of all workers of the run.
    """

    def __init__(self, grpo: Any, patch: pytest.MonkeyPatch, owner: type, name: str, nth: int) -> None:
        self.pids: list[int] = []
        self.grpo, self.called, self.nth, self.function = grpo, 0, nth, getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **kwargs: self.call(*args, **kwargs))
        patch.setattr(grpo, "launch_worker", self.launch)

    def launch(self, *args: Any, **settings: Any) -> WorkerProcess:
        worker = launch_worker(*args, **settings)
        self.pids.append(worker.pid)
        return worker

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self.called += 1
        if self.called == self.nth:
            os.kill(self.pids[-1], signal.SIGSTOP)
            threading.Timer(0.3, os.kill, (self.pids[-1], signal.SIGKILL)).start()
        return self.function(*args, **kwargs)


@pytest.mark.parametrize(
    ("owner", "name", "nth"),
    [
        (RolloutClient, "generate", 2),
        (RolloutClient, "sleep", 2),
        (WeightPublisher, "push", 3),
        (Transaction, "commit", 3),
    ],
)
@thinned(lambda owner, name, nth: name == "commit")
def test_a_killed_worker_changes_nothing(
    run: Run,
    grpo: Any,
    undisturbed: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    nth: int,
) -> None:
    killer = WorkerKiller(grpo, monkeypatch, owner, name, nth)
    run(tmp_path, sleep=2)
    assert len(killer.pids) == 2 and killer.called > nth
    assert (tmp_path / "metrics.csv").read_bytes() == undisturbed


def test_workers_that_all_die_end_the_run(run: Run, grpo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*args: Any, **settings: Any) -> WorkerProcess:
        raise WorkerFailedError("worker: ended")

    monkeypatch.setattr(grpo, "launch_worker", launch)
    with pytest.raises(WorkerLostError, match="three workers in a row were lost"):
        run(tmp_path)


def check_stale(rows: list[dict[str, str]]) -> None:
    """Check that the weights which sampled a batch are one version older than the weights which the batch trained,
    except for the first batch.
    """
    assert len(rows) == STEPS and rows[0]["mismatch"] == "0.0" and rows[0]["stale_share"] == "0.0"
    for step, row in enumerate(rows[1:], 1):
        assert row["oldest_version"] == str(step) and float(row["stale_share"]) > 0.0
        assert float(row["stale_difference"]) > 0.0 and row["mismatch"] in ("", "0.0")
    check_diagnostics(rows[1:])
    exact = dict(k1="0.0", k2="0.0", k3="0.0", perplexity_gap="0.0", clipped_share="0.0", largest_ratio="1.0")
    assert rows[0].items() >= exact.items() and [*rows[0]] == [*COLUMNS, *exact]


def test_stale_tokens_carry_their_version(run: Run, tmp_path: Path) -> None:
    check_stale(run(tmp_path, staleness=1))


def test_a_worker_killed_while_generating_in_the_background_is_replaced(
    run: Run, grpo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer = WorkerKiller(grpo, monkeypatch, RolloutClient, "generate", 2)
    rows = run(tmp_path, staleness=1)
    assert len(killer.pids) == 2 and killer.called > STEPS
    assert len(rows) == STEPS and {row["mismatch"] for row in rows} <= {"", "0.0"}


def test_a_killed_trainer_resumes(run: Run, model: Path, tmp_path: Path) -> None:
    """The trainer is killed after a checkpoint. The test truncates the last line of the metrics, as a kill could."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    metrics = killed / "metrics.csv"
    command = [sys.executable, str(EXAMPLE), "--out", str(killed), "--model", str(model), "--prompts", "2"]
    trainer = subprocess.Popen([*command, "--steps", "10000", "--checkpoint-every", "2"])
    try:
        wait_until(lambda: metrics.exists() and len(read_rows(killed)) >= 3)
        (worker,) = psutil.Process(trainer.pid).children()
    finally:
        trainer.kill()
    assert trainer.wait() == -signal.SIGKILL
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
    metrics.write_bytes(metrics.read_bytes() + b"9999,0.")
    steps = len(read_rows(killed)) + 1
    assert torch.load(killed / "checkpoint.pt", weights_only=True)["version"] >= 2
    rows = run(killed, steps=steps, resume=True)
    run(whole, steps=steps)
    assert [row["step"] for row in rows] == [str(step) for step in range(steps)]
    assert metrics.read_bytes() == (whole / "metrics.csv").read_bytes()


def test_only_a_run_with_the_same_settings_resumes(run: Run, undisturbed: bytes, tmp_path: Path) -> None:
    run(tmp_path, steps=1)
    with pytest.raises(typer.BadParameter, match="already exists; add --resume"):
        run(tmp_path)
    with pytest.raises(typer.BadParameter, match="'seed': 1.*'seed': 2"):
        run(tmp_path, seed=2, resume=True)
    run(tmp_path, resume=True)
    assert (tmp_path / "metrics.csv").read_bytes() == undisturbed


def test_a_worker_that_generates_all_the_time_cannot_sleep(run: Run, tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="--sleep"):
        run(tmp_path, staleness=1, sleep=1)


@pytest.mark.parametrize(("shift", "advantage"), [(-1.0, 1.0), (1.0, -1.0), (-1.0, -1.0), (1.0, 1.0)])
def test_the_objective_is_clipped_on_one_side(grpo: Any, model: Path, shift: float, advantage: float) -> None:
    """If the ratio is past the clip in the direction of the advantage, the gradient is zero. Past the clip in the other
    direction, the ratio is replaced by the cap.
    """
    trainer = grpo.Trainer(model, is_aligned=True, staleness=1)
    ids, old = torch.tensor([5, 6, 7, 8]), torch.zeros(2, dtype=torch.int64)
    is_own = torch.tensor([False, False, True, True])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        log_probs = trainer.log_probs([grpo.Sample(ids, is_own, torch.zeros(2), old, 0.0, 0.0)])
    trainer.version = 1
    row = trainer.step([grpo.Sample(ids, is_own, log_probs + shift, old, 0.0, advantage)])
    assert row["stale_difference"] == pytest.approx(1.0) and row["mismatch"] is None
    assert (row["grad_norm"] == 0.0) == (shift == -advantage)
    ratio = min(math.exp(-shift), 2.0)
    assert row["loss"] == pytest.approx(-min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage))
    assert row["clipped_share"] == (shift < 0) and row["largest_ratio"] == pytest.approx(math.exp(-shift))


RUNS = """
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

examples, address, model, out = sys.argv[1:]
sys.path.append(examples)  # rank 1 inherits it
import grpo

grpo.launch_worker = lambda *_, **__: nullcontext(SimpleNamespace(address=address))
for folder, steps, fsdp in (("whole", 2, 2), ("parts", 1, 2), ("parts", 2, 2), ("one", 1, 1)):
    grpo.main(Path(out, folder), steps=steps, prompts=2, model=model, checkpoint_every=1, resume=True, fsdp=fsdp)
"""


@pytest.mark.exhaustive
def test_two_ranks_train_the_same_twice(tmp_path: Path, forked_workers: None) -> None:
    """Two ranks get the same results in two runs, even after a resume. Up to rounding, a single process gets these
    results too.

    The ranks share the weights of a model with tied embeddings. One process starts all runs, and one worker serves all
    runs, because starts take most of the time.
    """
    model = make_tiny_model("qwen3", tmp_path / "model", dtype="bfloat16")
    with launch_worker(str(model), **SETTINGS) as worker:
        arguments = [str(EXAMPLE.parent), worker.address, str(model), str(tmp_path)]
        subprocess.run([sys.executable, "-P", "-W", "ignore", "-c", RUNS, *arguments], check=True)
    rows = read_rows(tmp_path / "whole")
    assert [row["mismatch"] for row in rows] == ["0.0"] * 2 and all(float(row["grad_norm"]) > 0 for row in rows)
    whole, parts = ((tmp_path / folder / "metrics.csv").read_bytes() for folder in ("whole", "parts"))
    assert whole == parts
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    after = torch.load(tmp_path / "parts" / "checkpoint.pt", weights_only=True)["model"]
    assert after.keys() == before.keys() and not any(after[name].equal(before[name]) for name in before)
    (one,) = read_rows(tmp_path / "one")
    assert float(one["grad_norm"]) == pytest.approx(float(rows[0]["grad_norm"]), rel=1e-2)
    assert [one[name] for name in ("reward", "response_length")] == [
        rows[0][name] for name in ("reward", "response_length")
    ]
