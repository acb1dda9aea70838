"""`examples/distill.py` on a tiny model: the student learns, and runs are equal to the bit."""

from __future__ import annotations

import csv
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import make_tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
SMALLER: dict[str, Any] = dict(NUM_HELD_OUT=8, PROMPTS_PER_STEP=8, MAX_TOKENS=8, LEARNING_RATE=1e-3, LEFT_OUT=[1])


@pytest.fixture(scope="module")
def example(forked_workers: None) -> Iterator[Any]:
    """The example with short answers, small steps and a student that lacks the second layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        module: Any = importlib.import_module("distill")
        for name, value in SMALLER.items():
            patch.setattr(module, name, value)
        yield module
        sys.modules.pop("distill")


def test_the_student_learns_and_the_trainer_has_the_workers_log_probs(example: Any, tmp_path: Path) -> None:
    teacher = make_tiny_model("llama", tmp_path / "teacher")
    (teacher / "chat_template.jinja").write_text(TEMPLATE)
    for name, steps in {"a": 8, "b": 2}.items():
        example.main(tmp_path / name, steps=steps, seed=1, top_k=16, model=str(teacher))
    longer, shorter = [(tmp_path / name / "metrics.csv").read_text() for name in "ab"]
    assert longer.startswith(shorter)
    rows = list(csv.DictReader(longer.splitlines()))
    assert [row["mismatch"] for row in rows] == ["0.0"] * 8
    divergences = [float(row["divergence"]) for row in rows]
    assert sum(divergences[-3:]) < 0.9 * sum(divergences[:3])
    assert (tmp_path / "a" / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_divergence_joins_the_tokens_that_the_teacher_does_not_name(example: Any) -> None:
    """A definition in float64 gives the same numbers, and the divergence over all tokens is larger."""
    random = torch.Generator().manual_seed(0)
    p, q = (torch.randn(5, 40, generator=random, dtype=torch.float64).softmax(1) for _ in range(2))
    top = p.topk(7).indices
    found = example.divergence(*(each.gather(1, top).log().float() for each in (p, q)))
    joined = [torch.cat([x.gather(1, top), 1 - x.gather(1, top).sum(1, keepdim=True)], 1) for x in (p, q)]
    expected = (joined[0] * (joined[0] / joined[1]).log()).sum(1)
    assert (found - expected).abs().max() < 1e-5
    assert (found < (p * (p / q).log()).sum(1)).all()
