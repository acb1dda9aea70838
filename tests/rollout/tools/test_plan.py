"""`trueroll plan` prints the plan of the worker's own planner."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from vision_models import make_vision_model

from tiny import make_tiny_model
from trueroll.errors import ConfigError
from trueroll.rollout.tools import cli


def rows(*arguments: str) -> dict[str, list[str]]:
    """Return the cells of each printed table row. The key is the row's first cell, such as the name of a bucket."""
    found = CliRunner().invoke(cli.app, ["plan", *arguments], env={"COLUMNS": "160"})
    assert found.exit_code == 0, found.output
    cells = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in found.output.splitlines()]
    return {name: rest for name, *rest in filter(None, cells)}


@pytest.mark.parametrize("family", ["llama", "olmo3"])
def test_each_window_has_a_bucket_of_its_own(family: str, tmp_path: Path) -> None:
    layers = ["sliding_attention"] * 3 + ["full_attention"]
    overrides: dict[str, Any] = dict(num_hidden_layers=4, layer_types=layers) if family == "olmo3" else {}
    told = rows(str(make_tiny_model(family, tmp_path / family, **overrides)), "--memory", "0.25")
    windows = [name for name in told if name.startswith("KV blocks, window")]
    assert windows == (["KV blocks, window 32"] if family == "olmo3" else [])
    if windows:
        (count, each, _, holds), whole = told[windows[0]], told["KV blocks"]
        assert 0 < int(count.replace(",", "")) < int(whole[0].replace(",", ""))
        assert float(each) == pytest.approx(3 * float(whole[1]), abs=1e-4), "three of four layers have the window"
        assert holds == f"{int(count.replace(',', '')) * 16:,} tokens"
    shared = [float(told[name][2].replace(",", "")) for name in told if name not in ("bucket", "Memory of a device")]
    assert sum(shared) == pytest.approx(256, abs=0.5), "the buckets add up to the memory"


def test_a_rank_holds_the_tower_and_the_encoded_images(tmp_path: Path) -> None:
    model = str(make_vision_model("qwen3_vl", tmp_path))
    text = rows(model, "--memory", "0.25")
    images = "--max-images", "2", "--image-cache-bytes", str(32 * 2**20)
    one, four = (rows(model, "--memory", "0.25", *images, "--tensor-parallel-size", size) for size in ("1", "4"))
    assert "encoded images" not in text and one["encoded images"][2] == four["encoded images"][2] == "32.0"
    each = [float(told["weights"][1]) for told in (text, one, four)]
    tower = each[1] - each[0]
    assert 0.1 < tower < each[2] < each[1]
    shared = [float(one[name][2].replace(",", "")) for name in one if name not in ("bucket", "Memory of a device")]
    assert sum(shared) == pytest.approx(256, abs=0.5), "the buckets add up to the memory"
    with pytest.raises(ConfigError, match=r"0\.5 of encoded images"):
        asked = ["plan", model, "--memory", "0.25", "--max-images", "1"]
        CliRunner().invoke(cli.app, asked, catch_exceptions=False)


@pytest.mark.parametrize("memory", ["nan", "inf", "0", "-1"])
def test_memory_out_of_range_is_refused(memory: str) -> None:
    found = CliRunner().invoke(cli.app, ["plan", "qwen3.5-0.15b", "--memory", memory])
    assert found.exit_code == 2 and "give more than 0 and at most 1048576 GiB" in found.output


def test_a_length_that_a_worker_refuses_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len must be at most 8192"):
        CliRunner().invoke(cli.app, ["plan", "qwen3.5-0.15b", "--max-model-len", "8193"], catch_exceptions=False)


@pytest.mark.parametrize(("given", "chosen"), [([], 2048), (["--state-interval", "48"], 48)])
def test_shorter_and_longer_intervals_are_listed_beside_the_planned_one(given: list[str], chosen: int) -> None:
    told = rows("qwen3.5-0.15b", "--memory", "2", "--max-num-seqs", "16", *given)
    intervals = {int(name.removesuffix(" *").replace(",", "")): name for name in told if name[:1].isdigit()}
    assert [interval for interval, name in intervals.items() if name.endswith("*")] == [chosen]
    assert min(intervals) < chosen < 8 * chosen <= max(intervals)
    fitting = [int(told[name][0].replace(",", "")) for name in intervals.values()]
    assert [*intervals] == sorted(intervals) and fitting == sorted(fitting), "longer intervals leave more tokens"


def test_a_rank_holds_its_part(tmp_path: Path) -> None:
    """Two of four ranks share a key-value head."""
    sizes: dict[str, Any] = dict(
        num_attention_heads=8, num_key_value_heads=2, intermediate_size=512, num_hidden_layers=4
    )
    model = str(make_tiny_model("llama", tmp_path / "model", **sizes))
    one, four = (rows(model, "--memory", "0.25", "--tensor-parallel-size", size) for size in ("1", "4"))
    assert float(four["KV blocks"][1]) == pytest.approx(float(one["KV blocks"][1]) / 2, abs=1e-4)
    assert 0.25 < float(four["weights"][2]) / float(one["weights"][2]) < 0.5, "each rank has the whole embeddings"


def test_a_stage_holds_its_layers(tmp_path: Path) -> None:
    model = str(make_tiny_model("llama", tmp_path / "model", num_hidden_layers=4, vocab_size=64))
    one, two = (rows(model, "--memory", "0.25", "--pipeline-parallel-size", size) for size in ("1", "2"))
    assert float(two["KV blocks"][1]) == pytest.approx(float(one["KV blocks"][1]) / 2, abs=1e-4)
    assert 0.4 < float(two["weights"][2]) / float(one["weights"][2]) < 0.6, "a stage has half of the layers"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--tensor-parallel-size", "8"], "tensor_parallel_size must be a power of two up to 4 .*got 8"),
        (["--pipeline-parallel-size", "8"], "pipeline_parallel_size must be at most 4, the number of layers .*got 8"),
    ],
)
def test_ranks_that_the_model_cannot_have_are_refused(arguments: list[str], error: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = dict(num_attention_heads=8, intermediate_size=512, num_hidden_layers=4)
    model = str(make_tiny_model("llama", tmp_path / "model", **sizes))
    with pytest.raises(ConfigError, match=error):
        CliRunner().invoke(cli.app, ["plan", model, *arguments], catch_exceptions=False)


def test_the_error_for_too_little_memory_proposes_options_that_fit() -> None:
    asked = "qwen3.5-0.15b", "--memory", "0.5", "--max-num-seqs", "256"
    with pytest.raises(ConfigError, match=r"^memory: 0\.5 GiB on each of 1 ranks is too little") as caught:
        CliRunner().invoke(cli.app, ["plan", *asked], catch_exceptions=False)
    text = str(caught.value)
    assert "kv_memory" not in text and "state_budget" not in text, "options that the command does not have"
    proposed = dict(re.findall(r"(--[a-z-]+) (\d+)", text))
    assert proposed == {"--max-num-seqs": "6", "--memory": "2"}, "the model is in two pieces"
    for option, value in proposed.items():
        assert int(rows(*asked, option, value)["KV blocks"][0].replace(",", "")) * 16 >= 8192, option
