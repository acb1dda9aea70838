"""The recipes run on a tiny model. Each recipe asserts its own claims. These tests check the premises of the claims."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import trueroll.rollout
from tiny import make_tiny_model
from trueroll.rollout import WeightPublisher, WorkerProcess, launch_worker

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
PAGE = (ROOT / "docs" / "recipes.md").read_text()
END_OF_SEQUENCE, END_OF_TURN = 2, 300
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}<300>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SETTINGS: dict[str, Any] = dict(device="cpu", dtype="bfloat16", max_num_seqs=8)
Run: TypeAlias = Callable[[str], str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that often ends its turn with the chat template's token, or ends the sequence with another token."""
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("models") / "chat", dtype="bfloat16")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][[END_OF_SEQUENCE, END_OF_TURN]] *= 5.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<{END_OF_TURN}>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def workers(model: Path, forked_workers: None) -> Iterator[list[WorkerProcess]]:
    """Two workers with the weights of the folder, for all recipes that do not kill their workers."""
    with ExitStack() as stack:
        yield [stack.enter_context(launch_worker(str(model), **SETTINGS)) for _ in range(2)]


@contextmanager
def lent(worker: WorkerProcess, model: Path) -> Iterator[WorkerProcess]:
    yield worker
    with WeightPublisher() as publisher:
        publisher.connect([worker.address])
        publisher.push(load_file(model / "model.safetensors"), version=0, allow_older=True)


@pytest.fixture
def run_with_own_workers(model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """A function that runs a recipe in this process and returns what the recipe and its children print."""

    def run(name: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, str(model)])
        runpy.run_path(str(RECIPES / f"{name}.py"), run_name="__main__")
        return capfd.readouterr().out

    return run


@pytest.fixture
def run(run_with_own_workers: Run, workers: list[WorkerProcess], model: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A function like `run_with_own_workers` that uses running workers."""

    def launch(folder: str, **settings: Any) -> AbstractContextManager[WorkerProcess]:
        assert folder == str(model) and settings.items() <= SETTINGS.items()
        return lent(idle.pop(), model)

    idle = list(workers)
    monkeypatch.setattr(trueroll.rollout, "launch_worker", launch)
    return run_with_own_workers


def numbers(pattern: str, text: str) -> list[int]:
    found = re.search(pattern, text)
    assert found is not None, text
    return list(map(int, found.groups()))


def test_a_chat_sample_stops_at_the_end_of_turn_of_the_template(run: Run) -> None:
    text = run("chat")
    assert f"token {END_OF_TURN}; the model's own: ({END_OF_SEQUENCE},)" in text
    assert f"stop, stop_reason {END_OF_TURN}:" in text


def test_seeds(model: Path) -> None:
    """Runs the recipe with the command from docs/recipes.md."""
    command = [sys.executable, "examples/recipes/seeds.py", str(model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the same bits\n") == 2
    assert "refused: params: with seed " in done.stdout


def test_a_custom_training_loop(run: Run) -> None:
    """Ratios of later steps use weights that the optimizer changed and the publisher pushed."""
    text = run("grpo_step")
    rows = re.findall(r"step (\d): (\d+) of (\d+) tokens sampled.* all ratios 1\.0, gradient norm (\S+)", text)
    assert [int(step) for step, *_ in rows] == [0, 1, 2]
    assert all(12 <= int(own) < int(total) and float(norm) > 0.0 for _, own, total, norm in rows)
    [changed] = numbers(r"(\d+) elements of the head have changed", text)
    assert changed > 0


def test_generation_overlaps_training_and_stragglers_go_on_under_new_weights(run: Run) -> None:
    text = run("asynchronous")
    [early] = numbers(r"version 1: 0 groups too old, (\d+) ended early", text)
    rows = re.findall(r"version (\d): (\d+) groups, (\d+) fresh tokens with ratio 1\.0, (\d+) older ones; (\d+)", text)
    (first, _, _, no_old, no_both), (second, num_groups, fresh, old, both), (third, *_) = (
        map(int, row) for row in rows
    )
    assert (first, second, third) == (1, 2, 3) and (no_old, no_both) == (0, 0)
    assert num_groups >= early + 2 > 2 and fresh > 0 and old > 0 and both > 0


def test_dynamic_sampling_drops_groups_and_lets_stragglers_go_on(run: Run) -> None:
    text = run("dynamic_sampling")
    dropped, early, not_begun = numbers(r"step 0: \d+ groups .* (\d+) dropped, (\d+) ended early, (\d+)", text)
    [went_on] = numbers(r"step 1: (\d+) groups continued; .*\[\(\(1, \d+\), \(2, \d+\)\)", text)
    assert went_on == early > 0 and not_begun > 0 and dropped > 0


def test_several_turns_share_a_prefix_and_keep_their_log_probs(run: Run) -> None:
    text = run("multi_turn")
    found = [int(cached) for cached in re.findall(r"turn \d: \d+ tokens, (\d+) of them found in the cache", text)]
    assert len(found) == 3 and 0 < found[1] < found[2]
    own, total = numbers(r"(\d+) of (\d+) tokens are the model's: a score .* gave the same bits", text)
    assert 3 <= own < total


def test_a_second_worker_is_a_reference(run: Run) -> None:
    text = run("distillation")
    assert "0.000000 (k1), 0.000000 (k3)\n        the same weights: both workers gave the same bits" in text
    assert len(set(re.findall(r"(\S+) \(k3\)", text))) == 3


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_killed_trainer_or_worker_does_not_change_the_samples(run_with_own_workers: Run) -> None:
    text = run_with_own_workers("recovery")
    assert "the trainer was killed: its successor joined the 2 requests and got the same samples" in text
    assert re.search(r"the worker was killed: worker: no answer from .* for 3\.0 s", text)
    assert re.search(r"a new worker took its place: .*5", text)
    assert "the new worker gave the same samples" in text


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_and_event_loops_have_clients_of_their_own(run: Run) -> None:
    text = run("processes")
    assert "4 items from two processes with a client each: the same tokens" in text
    assert re.search(r"in a forked process: client: it was made in process (\d+) and cannot be used", text)
    assert "in the process that made it: ready\n" in text
    assert "in the loop of its first call: ready\n" in text
    assert "in another loop: client: this call runs in another event loop" in text


def test_a_trainer_computes_each_kind_of_log_probs(run: Run) -> None:
    text = run("logprobs")
    rows = re.findall(r"'(\w+)' at temperature (\S+): the trainer computes the same bits,", text)
    assert rows == [*[("processed", "0.7")] * 2, ("temperature", "0.7"), ("raw", "0.7"), ("processed", "0.0")]
    assert text.count("and the same entropies and 4 most probable tokens") == 5
    refused = re.findall(r"^(\{.*\}) is refused: .*\blogprobs\b", text, re.M)
    assert refused == ["{'top_p': 0.9}", "{'min_tokens': 4}", "{'logprobs': None}"]


def test_the_page_has_every_recipe_with_its_command() -> None:
    commands = re.findall(r"^python examples/recipes/(\w+)\.py$", PAGE, re.M)
    assert sorted(commands) == sorted(path.stem for path in RECIPES.glob("*.py")) and len(commands) == 10
