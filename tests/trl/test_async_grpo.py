"""The real AsyncGRPOTrainer on trueroll, in a separate process, and its rollout worker with various rewards."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl_setup import MAX_STALENESS, ServedEngine, async_settings, num_vowels

from trueroll.engine.request import SampleOutput, WeightSpan
from trueroll.errors import ConfigError, DeadlineError
from trueroll.rollout import AsyncRolloutClient
from trueroll.rollout.integrations.trl import TruerollWorker, WeightsError, async_grpo
from trueroll.rollout.integrations.trl.scoring import Group, rollout_samples

SCRIPT = Path(__file__).with_name("async_training.py")
ROWS = [{"prompt": "ab", "answer": 1}, {"prompt": [{"role": "user", "content": "cd"}], "answer": 2}]
TEMPLATE = "{% for message in messages %}<{{ message.content }}>{% endfor %}"


def run_training(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(SCRIPT), *arguments]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)


def with_template(folder: Path, parent: Path) -> str:
    """Return a copy of a tiny model with a chat template."""
    copy = shutil.copytree(folder, parent / "model")
    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(copy)
    return str(copy)


def test_training_starts_on_policy_stays_within_max_staleness_and_exits(tiny_qwen3: Path, tmp_path: Path) -> None:
    done = run_training(with_template(tiny_qwen3, tmp_path), str(tmp_path / "output"))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    ratios = [entry["ratio"] for entry in result["log"] if "ratio" in entry]
    assert len(ratios) == 4 and abs(ratios[0] - 1.0) < 1e-4
    assert abs(ratios[-1] - 1.0) > 1e-4  # the weights had changed
    assert len(result["staleness"]) == 16 and 1 <= max(result["staleness"]) <= MAX_STALENESS
    assert all(math.isfinite(entry["reward"]) for entry in result["log"] if "reward" in entry)


def test_a_killed_worker_ends_the_training_with_an_error(tiny_llama: Path, tmp_path: Path) -> None:
    done = run_training(with_template(tiny_llama, tmp_path), str(tmp_path / "output"), "--kill")
    assert done.returncode == 1
    assert "'ratio'" in done.stdout  # the trainer had taken steps before
    assert done.stderr.splitlines()[-1].startswith("trueroll.errors.WorkerLostError: worker: no answer from")


def settings(output: Path, **changes: Any) -> AsyncGRPOConfig:
    """Return settings with groups of two samples and at most two groups in flight."""
    fields = dict(max_inflight_tasks=4, num_generations=2, per_device_train_batch_size=2, max_completion_length=6)
    return async_settings(output, **(fields | dict(seed=5) | changes))


@contextmanager
def working(
    served: ServedEngine, folder: Path, rewards: Any, args: AsyncGRPOConfig, rows: Any = ROWS
) -> Iterator[TruerollWorker]:
    """A started TruerollWorker that knows the engine's weight version."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    worker = TruerollWorker(AsyncRolloutClient(served.address), args, tokenizer, rows, rewards)
    worker.update_model_version(served.engine.weight_version)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


def until_unhealthy(worker: TruerollWorker, stale_after_s: float) -> None:
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
        worker.check_health(stale_after_s)
        time.sleep(0.05)


def test_groups_come_in_dataset_order_and_depend_only_on_the_seed(
    tiny_llama: Path, tiny_served: ServedEngine, tmp_path: Path
) -> None:
    runs: list[list[Any]] = []
    for seed in (5, 5, 6):
        with working(tiny_served, tiny_llama, num_vowels, settings(tmp_path, seed=seed)) as worker:
            runs.append([worker.rollout_buffer.get(timeout=60.0) for _ in range(6)])
    ids = [[sample.input_ids.tolist() for sample in run] for run in runs]
    assert ids[0] == ids[1] != ids[2]
    assert [sample.group_id for sample in runs[0]] == [0, 0, 1, 1, 2, 2]
    assert [sample.prompt for sample in runs[0][::2]] == [ROWS[0]["prompt"], ROWS[1]["prompt"], ROWS[0]["prompt"]]
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    chat = runs[0][2]
    assert tokenizer.decode(chat.input_ids[chat.completion_mask == 0]) == "<cd>"
    assert chat.completion[0]["role"] == "assistant"


def test_a_sample_has_the_workers_log_probs_for_its_completion_only(
    tiny_llama: Path, tiny_served: ServedEngine, tmp_path: Path
) -> None:
    with working(tiny_served, tiny_llama, [num_vowels], settings(tmp_path)) as worker:
        sample, other = (worker.rollout_buffer.get(timeout=60.0) for _ in range(2))
        metrics = worker.metrics_queue.get(timeout=60.0)
    assert sample.input_ids.dtype == sample.completion_mask.dtype == np.int64
    assert sample.old_log_probs.dtype == np.float32
    is_completion = sample.completion_mask == 1
    assert not is_completion[0] and is_completion[-1] and is_completion.sum() <= 6
    assert (sample.old_log_probs[is_completion] < 0).all() and not sample.old_log_probs[~is_completion].any()
    num_tokens = sum(sample.completion_mask) + sum(other.completion_mask)
    assert metrics["completions/mean_length"] == (num_tokens, 2)
    assert sample.metrics["rewards/num_vowels"] == sample.metrics["reward"]


def test_reward_functions_get_texts_ids_and_columns(
    tiny_llama: Path, tiny_served: ServedEngine, tmp_path: Path
) -> None:
    calls: list[dict[str, Any]] = []

    def record(**columns: Any) -> list[float]:
        calls.append(columns)
        return [1.0, 2.0]

    async def judge_later(prompts: list[Any], **_: Any) -> list[float | None]:
        return [None, 3.0]

    with working(tiny_served, tiny_llama, [record, functools.partial(judge_later)], settings(tmp_path)) as worker:
        samples = [worker.rollout_buffer.get(timeout=60.0) for _ in range(2)]
    assert calls[0]["prompts"] == ["ab", "ab"] and calls[0]["answer"] == [1, 1] and "prompt" not in calls[0]
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    assert calls[0]["completions"] == tokenizer.batch_decode(calls[0]["completion_ids"], skip_special_tokens=True)
    assert [sample.metrics["reward"] for sample in samples] == [1.0, 5.0]
    assert math.isnan(samples[0].metrics["rewards/judge_later"]) and samples[1].metrics["rewards/judge_later"] == 3.0


def fail(**_: Any) -> list[float]:
    raise ValueError("no opinion")


@pytest.mark.parametrize(
    ("reward", "rows", "error", "message"),
    [
        (fail, ROWS, ValueError, "no opinion"),
        (lambda **_: [1.0], ROWS, ConfigError, "must return 2 rewards, one for each sample"),
        (lambda **_: None, ROWS, ConfigError, "must return 2 numbers"),
        (lambda **_: [[1.0], [2.0]], ROWS, ConfigError, "must return 2 numbers"),
        (lambda **_: [1.0, float("inf")], ROWS, ConfigError, "must return finite rewards"),
        (lambda **_: next(iter([])), ROWS, RuntimeError, "raised StopIteration"),
        (num_vowels, [], ConfigError, "train_dataset: the dataset has no rows, or can be iterated only once"),
        (num_vowels, [{"text": "ab"}], ConfigError, "train_dataset: the column 'prompt' is missing"),
    ],
)
def test_a_failure_in_the_worker_is_logged_and_raised_in_the_trainer(
    reward: Any,
    rows: Any,
    error: type,
    message: str,
    tiny_llama: Path,
    tiny_served: ServedEngine,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with working(tiny_served, tiny_llama, [reward], settings(tmp_path), rows) as worker:
        with pytest.raises(error, match=message):
            until_unhealthy(worker, stale_after_s=60.0)
    assert message in caplog.text


def test_a_hanging_reward_function_is_noticed(tiny_llama: Path, tiny_served: ServedEngine, tmp_path: Path) -> None:
    goes_on = threading.Event()

    def hang(**_: Any) -> list[float]:
        assert goes_on.wait(60.0)
        return [1.0, 1.0]

    with working(tiny_served, tiny_llama, [hang], settings(tmp_path)) as worker:
        with pytest.raises(DeadlineError, match="no progress for .*heartbeat_stale_after_s = 1.0"):
            until_unhealthy(worker, stale_after_s=1.0)
        goes_on.set()


def test_stop_waits_a_limited_time_for_a_hanging_reward_function(
    tiny_llama: Path, tiny_served: ServedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(**_: Any) -> list[float]:
        hangs.set()
        assert goes_on.wait(60.0)
        return [1.0, 1.0]

    with working(tiny_served, tiny_llama, [hang], settings(tmp_path)) as worker:
        assert hangs.wait(60.0)
        with monkeypatch.context() as patch:
            patch.setattr(async_grpo, "STOP_SECONDS", 0.2)
            with pytest.raises(DeadlineError, match="a reward function did not return within 0.2 s"):
                worker.stop()
        goes_on.set()


def test_a_worker_with_older_weights_than_the_pushed_ones_is_noticed(
    tiny_llama: Path, tiny_served: ServedEngine, tmp_path: Path
) -> None:
    with working(tiny_served, tiny_llama, [num_vowels], settings(tmp_path)) as worker:
        worker.rollout_buffer.get(timeout=60.0)
        pushed = tiny_served.engine.weight_version + 1
        worker.update_model_version(pushed)
        worker.rollout_buffer.queue.clear()
        with pytest.raises(
            WeightsError, match=f"its weights have version {pushed - 1} instead of {pushed} to {pushed + 1}"
        ):
            until_unhealthy(worker, stale_after_s=60.0)


def test_weights_pushed_by_another_trainer_are_noticed(
    tiny_llama: Path, tiny_served: ServedEngine, tmp_path: Path
) -> None:
    with working(tiny_served, tiny_llama, [num_vowels], settings(tmp_path)) as worker:
        worker.rollout_buffer.get(timeout=60.0)
        served = tiny_served.engine.weight_version
        worker._model_version = served - 2
        worker.rollout_buffer.queue.clear()
        with pytest.raises(WeightsError, match=f"its weights have version {served} instead of .* to {served - 1}"):
            until_unhealthy(worker, stale_after_s=60.0)


def group_of(*spans: tuple[WeightSpan, ...]) -> Group:
    """Return a group: a prompt of two tokens, and a sample of three tokens for each tuple of spans."""
    ids: Any = np.array([4, 5, 6], np.int32)
    logprobs = np.array([-1.0, -2.0, -3.0], np.float32)
    samples = tuple(SampleOutput("id", i, ids, logprobs, "length", 7, 0, each) for i, each in enumerate(spans))
    return Group(3, {"prompt": "ab"}, [1, 2], samples, ["x"] * len(samples))


def test_a_sample_is_as_old_as_its_oldest_token() -> None:
    mixed = (WeightSpan(4, 0, 1), WeightSpan(5, 1, 3))
    samples = list(rollout_samples(group_of(mixed, mixed[1:]), ["f"], np.array([[1.0, 2.0]])))
    assert [sample.model_version for sample in samples] == [4, 5]


def test_advantages_are_relative_to_the_mean_and_none_without_a_reward() -> None:
    span = (WeightSpan(1, 0, 3),)
    nan = float("nan")
    rewards = np.array([[1.0, nan, 3.0, nan], [2.0, 4.0, nan, nan]])
    samples = list(rollout_samples(group_of(span, span, span, span), ["f", "g"], rewards))
    assert [sample.metrics["reward"] for sample in samples][:3] == [3.0, 4.0, 3.0]
    std = math.sqrt(2) / 3
    assert [sample.advantage for sample in samples] == pytest.approx([-1 / 3 / std, 2 / 3 / std, -1 / 3 / std, 0.0])
    assert math.isnan(samples[3].metrics["reward"])
    unjudged = list(rollout_samples(group_of(span), ["f"], np.array([[nan]])))
    assert unjudged[0].advantage == 0.0


@pytest.mark.parametrize(
    ("changes", "oldest_taken"),
    [
        (dict(token_budget=0, max_staleness=1), 0),
        (dict(token_budget=0, max_staleness=4), 3),
        (dict(token_budget=64, max_staleness=4), 2),
        (dict(token_budget=64, max_staleness=4, gradient_accumulation_steps=2), 3),
    ],
)
def test_samples_that_would_be_too_old_for_training_are_dropped(
    changes: dict[str, Any], oldest_taken: int, tiny_llama: Path, tmp_path: Path
) -> None:
    args = settings(tmp_path, **changes)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    worker = TruerollWorker(AsyncRolloutClient("ipc:///nowhere"), args, tokenizer, ROWS, [num_vowels])
    for version in range(1, 11):
        for sample in rollout_samples(group_of((WeightSpan(version, 0, 3),)), ["f"], np.array([[1.0]])):
            worker.rollout_buffer.put(sample)
    worker.update_model_version(10)
    taken = [worker.rollout_buffer.get(timeout=1.0).model_version for _ in range(oldest_taken + 1)]
    assert taken == list(range(10 - oldest_taken, 11))
    assert worker.rollout_buffer.empty()
    assert worker.metrics_queue.qsize() == 10 - len(taken)


def test_max_inflight_tasks_must_be_positive(tiny_llama: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    args = settings(tmp_path, max_inflight_tasks=-1)
    worker = TruerollWorker(AsyncRolloutClient("ipc:///nowhere"), args, tokenizer, ROWS, [num_vowels])
    with pytest.raises(ConfigError, match=r"max_inflight_tasks: must be at least 1 \(got -1\)"):
        worker.start()


def test_reward_functions_are_required(tiny_llama: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    with pytest.raises(ConfigError, match="reward_funcs: the list is empty; give at least one"):
        TruerollWorker(AsyncRolloutClient("ipc:///nowhere"), settings(tmp_path), tokenizer, ROWS, [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(max_staleness=0), "max_staleness: 0 is too low, .* set max_staleness to at least 1"),
        (dict(max_staleness=1, token_budget=64), "max_staleness: 1 is too low, .* set max_staleness to at least 2"),
        (dict(token_budget=None), "token_budget: with None, TRL would query a vLLM server"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], message: str, tiny_llama: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    with pytest.raises(ConfigError, match=message):
        TruerollWorker(
            AsyncRolloutClient("ipc:///nowhere"), settings(tmp_path, **changes), tokenizer, ROWS, [num_vowels]
        )
