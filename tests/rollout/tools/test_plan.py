"""`trueroll plan` prints the plan of the worker's own planner."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from engine.drive import generate, run, tokens
from engine.test_parallel import engine_of
from typer.testing import CliRunner
from vision_models import make_vision_model

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.errors import ConfigError
from trueroll.kernels.cpu.backend import HEAD_SECTION
from trueroll.rollout.tools import cli
from trueroll.rollout.tools.plan import _Asked

OF_27B: dict[str, Any] = dict(
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=12,
    num_key_value_heads=2,
    head_dim=64,
    linear_num_key_heads=4,
    linear_num_value_heads=12,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    vocab_size=2 * HEAD_SECTION,
)


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


@pytest.mark.usefixtures("forked_ranks")
def test_a_worker_with_formats_on_two_ranks_holds_what_was_planned(tmp_path: Path) -> None:
    """The model has the proportions of Qwen3.5-27B: three delta nets for each attention, six queries for each key-value
    head, three values for each key of a delta net. Each rank has half of the head, and
    whole blocks of each matrix.
    """
    model = str(make_tiny_model("qwen3_5", tmp_path / "model", **OF_27B))
    shared: dict[str, Any] = dict(dtype="bfloat16", max_num_seqs=4, block_size=16)
    shared |= dict(max_num_batched_tokens=64, tensor_parallel_size=2)
    formats: dict[str, Any] = dict(quantization="awq", kv_cache_dtype="int8")
    asked = [
        _Asked.of(EngineConfig(model=model, kv_memory_fraction=1.0, **shared, **given), 2**24, None)
        for given in ({}, formats)
    ]
    plain, planned = (each.plan() for each in asked)
    pools, budget = planned.kv_bytes + planned.state_bytes, 2**24 - asked[1].weights - asked[1].scratch
    sizes: dict[str, Any] = dict(num_blocks=None, state_interval=None, state_budget=None)
    del shared["tensor_parallel_size"]
    with engine_of(model, 2, **(shared | sizes | formats), kv_memory=budget) as engine:
        info, held = engine.info, engine.memory()
        [output] = run(engine, [generate("a", tokens(40), max_tokens=4)]).values()
    assert len(output.token_ids) == 4
    assert (info.quantization, info.kv_cache_dtype, info.tensor_parallel_size) == ("awq", "int8", 2)
    assert info.weight_bytes == asked[1].weights and info.token_bytes * 16 == planned.sizes.block
    assert (info.num_blocks, info.live_states) == (planned.num_blocks, planned.live_states)
    assert (info.checkpoints, info.state_interval) == (planned.checkpoints, planned.state_interval)
    assert (info.kv_bytes, info.state_bytes) == (planned.kv_bytes, planned.state_bytes)
    assert held["kv_cache"] == 2 * pools, "of both ranks"
    assert info.weight_bytes < held["weights"] < 2 * info.weight_bytes, "both ranks use the same embeddings"
    head = OF_27B["head_dim"]
    assert planned.sizes.block / plain.sizes.block == (head + 4) / (2 * head), "two float16 numbers for each vector"
    assert asked[1].weights < 0.45 * asked[0].weights, "codes of 4 bits, beside other weights in bfloat16"


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
