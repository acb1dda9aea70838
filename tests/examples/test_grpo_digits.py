"""`examples/grpo_digits.py`: runs are equal to the bit, and its model takes a benchmark."""

from __future__ import annotations

import csv
import importlib
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 2


@pytest.fixture(scope="module")
def example(forked_workers: None) -> Iterator[Any]:
    """The example with few held-out images and small steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        module: Any = importlib.import_module("grpo_digits")
        patch.setattr(module, "NUM_HELD_OUT", 12)
        patch.setattr(module, "IMAGES_PER_STEP", 12)
        yield module
        sys.modules.pop("grpo_digits")


def test_runs_are_equal_and_the_trainer_has_the_workers_log_probs(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    towers: list[dict[str, Any]] = []
    imitate = example.Trainer.imitate

    def imitate_and_copy(self: Any, *args: Any) -> None:
        imitate(self, *args)
        towers.append({name: tensor.clone() for name, tensor in self.model.state_dict().items() if "visual." in name})

    monkeypatch.setattr(example.Trainer, "imitate", imitate_and_copy)
    for name in "ab":
        example.main(tmp_path / name, steps=STEPS, seed=1, supervised_steps=12)
    assert (tmp_path / "a" / "metrics.csv").read_bytes() == (tmp_path / "b" / "metrics.csv").read_bytes()
    with (tmp_path / "a" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["mismatch"] for row in rows] == ["0.0"] * STEPS
    assert all(float(row["grad_norm"]) > 0.0 for row in rows), "premise: rewards differ within a group"
    trained = load_file(tmp_path / "a" / "model" / "model.safetensors")
    assert all((trained[name] != before).any() for name, before in towers[0].items() if "patch_embed" in name)
    assert (tmp_path / "a" / "plot.png").read_bytes().startswith(b"\x89PNG")

    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["digits_benchmark.py", str(tmp_path / "a" / "model")])
    runpy.run_path(str(EXAMPLES / "digits_benchmark.py"), run_name="__main__")
    assert re.search(r"accuracy: [01]\.\d{3} of 12 images", capsys.readouterr().out)


def test_an_answer_is_rewarded_if_it_is_the_digit_and_then_ends(example: Any) -> None:
    class Of:
        def __init__(self, **fields: Any) -> None:
            vars(self).update(fields)

    answers = [[3, example.END], [3, 3], [4, example.END], [3]]
    groups: Any = [Of(samples=[Of(token_ids=answer) for answer in answers])] * 2
    assert example.rewards_of(groups, example.np.array([3, 4])).tolist() == [[1, 0, 0, 0], [0, 0, 1, 0]]


def test_no_digit_is_in_two_parts(example: Any) -> None:
    parts = [example.Digits.held_out(), example.Digits.labelled(), example.Digits.rewarded()]
    assert [len(part.labels) for part in parts[:2]] == [12, example.NUM_LABELLED]
    assert sum(len(part.labels) for part in parts) == len(example.Digits.load().labels) == 1797
