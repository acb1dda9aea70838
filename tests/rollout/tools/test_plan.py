"""`trueroll plan`: what it prints is the plan of the worker's own planner."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tiny import make_tiny_model
from trueroll.rollout.tools import cli


def rows(*arguments: str) -> dict[str, list[str]]:
    """The first table: the name of a bucket, and what stands in the cells after it."""
    found = CliRunner().invoke(cli.app, ["plan", *arguments], env={"COLUMNS": "160"})
    assert found.exit_code == 0, found.output
    cells = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in found.output.splitlines()]
    return {name: rest for name, *rest in filter(None, cells)}


@pytest.mark.parametrize("family", ["llama", "olmo3"])
def test_each_window_has_a_bucket_of_its_own(family: str, tmp_path: Path) -> None:
    layers = ["sliding_attention"] * 3 + ["full_attention"]
    overrides = dict(num_hidden_layers=4, layer_types=layers) if family == "olmo3" else {}
    told = rows(str(make_tiny_model(family, tmp_path / family, **overrides)), "--memory", "0.25")
    windows = [name for name in told if name.startswith("KV blocks, window")]
    assert windows == (["KV blocks, window 32"] if family == "olmo3" else [])
    if windows:
        (count, each, _, holds), whole = told[windows[0]], told["KV blocks"]
        assert 0 < int(count.replace(",", "")) < int(whole[0].replace(",", ""))
        assert float(each) == pytest.approx(3 * float(whole[1]), abs=1e-4), "three of four layers have the window"
        assert holds == f"{int(count.replace(',', '')) * 16:,} tokens"
    shared = [float(told[name][2].replace(",", "")) for name in told if name not in ("bucket", "Memory of a device")]
    assert sum(shared) == pytest.approx(256, abs=0.5), "the buckets are all of the memory"


@pytest.mark.parametrize(
    ("option", "value", "code", "message"),
    [
        ("--memory", "nan", 2, "expected more than 0 GiB and at most"),
        ("--memory", "inf", 2, "expected more than 0 GiB and at most"),
        ("--max-model-len", "1025", 1, "max_model_len: expected at most 1024, .* found 1025"),
        ("--ranks", "3", 1, "ranks: expected a number that divides the 2 heads of keys .* found 3"),
    ],
)
def test_what_no_worker_can_have_is_refused(
    hybrid_models: dict[str, Path], option: str, value: str, code: int, message: str
) -> None:
    found = CliRunner().invoke(cli.app, ["plan", str(hybrid_models["qwen3_5"]), option, value])
    said = " ".join(re.sub("[│\n]", " ", f"{found.output} {found.exception}").split())
    assert re.search(message, said), said
    assert found.exit_code == code
