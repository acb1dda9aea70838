"""Without a GPU: the GPU report counts correctly, compares equal work, and continues after a failure."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.engine.running.loading import load_model
from trueroll.kernels import reference
from trueroll.kernels.selection import SelectedBackend

REPORT = Path(__file__).parents[2] / "examples" / "benchmarks" / "gpu_report.py"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_report", REPORT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_report", module)  # dataclasses look up their module here
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_the_report_exits_with_an_error() -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-P", str(REPORT)], capture_output=True, text=True, env=hidden, timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("no usable GPU found (torch 2.")


def test_the_arithmetic_of_products_and_attention(report: ModuleType) -> None:
    assert report.product_cost(3, 5, 7) == (2 * 3 * 5 * 7, 2 * (5 * 7 + 3 * 7 + 3 * 5))
    one_token = 4 * 28 * 128  # per head: 128 multiplications and additions for a score, and 128 for a weighted value
    assert report.attention_cost(2, 1, 100)[0] == 2 * 100 * one_token
    assert report.attention_cost(1, 4, 4)[0] == (1 + 2 + 3 + 4) * one_token
    assert report.attention_cost(1, 2, 5)[0] == (4 + 5) * one_token
    assert report.attention_cost(2, 3, 100)[1] == 2 * 2 * 128 * (2 * 100 * 4 + 2 * 3 * 28)


def test_the_arithmetic_of_a_step(report: ModuleType, tiny_model: Path) -> None:
    model = load_model(EngineConfig(model=str(tiny_model), dtype="bfloat16", backend="reference")).model
    weights = model.checkpoint_tensors()
    tied = model.spec.tie_word_embeddings
    assert ("lm_head.weight" in weights) != tied
    parameters = sum(x.shape.numel() for name, x in weights.items() if tied or "embed" not in name)
    flops, num_bytes = report.attention_cost(3, 1, report.STEP_CONTEXT)
    assert report.step_cost(model, 3) == (2 * 3 * parameters + 2 * flops, 2 * parameters + 2 * num_bytes)


def test_rows_are_arithmetic_on_timings(report: ModuleType) -> None:
    machine = report.Machine("fake", bandwidth=1e12, arithmetic=1e14)
    cost = (4 * 10**8, 2 * 10**6)  # 4 us of arithmetic, 2 us of reading
    row = report.product_row("o", 64, cost, 2.5e-6, 2e-6, machine)
    assert (row["us"], row["cuBLAS us"], row["of cuBLAS"]) == pytest.approx((2.5, 2.0, 0.8))
    assert (row["TB/s"], row["TFLOP/s"]) == pytest.approx((0.8, 160))
    assert (row["of memory"], row["of limit"]) == pytest.approx((0.8, 1.6))
    row = report.step_row(8, 5.4e-3, 5e-3, 0.01, {})
    assert (row["ms"], row["cuBLAS + SDPA ms"], row["times as long"]) == pytest.approx((5.4, 5.0, 1.08))
    row = report.workload_row(8, 40.0, 25.0, 19.34, 0.38)
    assert (row["times"], row["of cache: gain"]) == pytest.approx((40 / 19.34, 0.6))
    workload = report.Workload("groups of 8", 2, 0, 128, 8, 250, 1.0)
    row = report.serving_row("qwen3-0.6b", workload, 0.5)
    assert (row["sequences"], row["tokens/s"], row["ms a token"]) == pytest.approx((16, 8000, 2.0))
    row = report.attention_row(2, 1, 1000, 1e-3, 0.5e-3, machine)
    num_bytes = 2 * 2 * 128 * (2 * 1000 * 4 + 2 * 28)
    assert (row["of SDPA"], row["of limit"]) == pytest.approx((0.5, num_bytes / 1e12 / 1e-3))


def test_the_goals_of_products(report: ModuleType) -> None:
    machine = report.Machine("fake", bandwidth=1e12, arithmetic=1e14)

    def product(rows: int, of_memory: float, of_cublas: float) -> Any:
        seconds = 1e-6 / of_memory
        return report.product_row("o", rows, (1, 10**6), seconds, seconds * of_cublas, machine)["goal"]

    assert [product(rows, 0.91, 0.5) for rows in (1, 64, 128, 256)] == [True, True, None, None]
    assert [product(rows, 0.89, 2.0) for rows in (1, 64)] == [False, False]
    assert [product(512, 0.1, share) for share in (0.86, 0.84)] == [True, False]
    assert [report.step_row(1, seconds, 1.0, 0.0, {})["goal"] for seconds in (1.09, 1.11)] == [True, False]
    speeds = ((40.0, 25.0), (38.0, 20.0), (40.0, 30.0))
    assert [report.workload_row(8, *each, 19.34, 0.38)["goal"] for each in speeds] == [True, False, False]
    shown = [report.show("goal", goal) for goal in (True, False, None)]
    assert shown == ["met", "[red]missed[/]", ""]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.03)])
def test_the_torch_ops_compute_the_same_step(
    report: ModuleType, tmp_path: Path, family: str, dtype: str, bound: float
) -> None:
    folder = make_tiny_model(family, tmp_path, dtype)
    model = load_model(EngineConfig(model=str(folder), backend="reference")).model
    torch.manual_seed(0)
    step = report.Step(model, sequences=3, context=48)
    (expected, best), (found, torch_best) = (step.run(ops) for ops in (reference, report.torch_ops(reference)))
    assert 0 < (found.float() - expected.float()).norm() / expected.float().norm() < bound
    assert best.isfinite().all() and (torch_best - best).abs().max() < 30 * bound


def test_the_torch_ops_compute_the_same_prefill(report: ModuleType) -> None:
    batch = report.batch_of(2, 48, 48, "cpu")
    q, k, v = torch.randn(96, 4, 16), torch.randn(6, 16, 2, 16), torch.randn(6, 16, 2, 16)
    found = report.dense_attention(q, k, v, batch, 0.25)
    torch.testing.assert_close(found, reference.paged_attention(q, k, v, batch, 0.25), rtol=0, atol=1e-5)


@pytest.fixture
def on_a_cpu(report: ModuleType, tiny_qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The report with sizes for a CPU, the reference kernels, and a stopped clock."""

    def seconds_of(calls: list[Callable[[], object]]) -> float:
        for call in calls[:3]:
            call()
        return 1e-3

    folder = str(tiny_qwen2)
    config = EngineConfig(model=folder, dtype="bfloat16", backend="reference", max_num_batched_tokens=512)
    changes: dict[str, Any] = report.SMALL | dict(
        CONFIG=config,
        SERVED=(folder,),
        seconds_of=seconds_of,
        measure_machine=lambda: report.Machine("no GPU", 1e9, 1e9),
        select_backend=lambda *_: SelectedBackend("reference", reference, ""),  # type: ignore[arg-type]
    )
    for name, value in changes.items():
        assert hasattr(report, name)
        monkeypatch.setattr(report, name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return report


def test_every_section_is_measured_and_written(
    on_a_cpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--json", str(file)])
    on_a_cpu.main()
    written, text = json.loads(file.read_text()), capsys.readouterr().out
    assert written["failed"] == [] and [len(rows) for rows in written["sections"].values()] == [9, 3, 2, 2, 1, 2]
    assert list(written["sections"]) == list(on_a_cpu.SECTIONS)
    assert all(title[:20] in text for title, _ in on_a_cpu.SECTIONS.values())
    products, tiles, attention, steps, workloads, serving = written["sections"].values()
    assert {row["product"] for row in products} == {"o 64x48", "gate_up 64x48", "head 512x48"}
    assert all(row["times"] >= 1 for row in tiles)
    assert all(row["of cuBLAS"] == 1.0 for row in products) and all(row["of SDPA"] == 1.0 for row in attention)
    assert all(row["times as long"] == 1.0 and 0 < row["differs by"] < 0.03 for row in steps)
    assert workloads[0]["requests/s"] > 0 and workloads[0]["cache off"] > 0
    assert [(row["sequences"], row["prompt"]) for row in serving] == [(8, 16), (3, 37)]


def test_a_failed_step_restores_the_ops_of_the_model(on_a_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        assert on_a_cpu.load(on_a_cpu.CONFIG).model.ops is not reference, "the other system ran last"
        raise RuntimeError

    monkeypatch.setattr(on_a_cpu, "step_row", fail)
    with pytest.raises(RuntimeError):
        list(on_a_cpu.measure_steps(reference, on_a_cpu.measure_machine()))
    assert on_a_cpu.load(on_a_cpu.CONFIG).model.ops is reference


def test_a_failed_section_does_not_stop_the_others(
    on_a_cpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(ops: Any, machine: Any) -> Iterator[dict[str, Any]]:
        yield {"part": "measured before"}
        raise RuntimeError("an illegal memory access")

    def works(ops: Any, machine: Any) -> Iterator[dict[str, Any]]:
        yield {"part": "measured after"}

    file = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--json", str(file)])
    monkeypatch.setattr(on_a_cpu, "SECTIONS", {"first": ("First", broken), "second": ("Second", works)})
    with pytest.raises(SystemExit, match="1 of 2 sections failed: first"):
        on_a_cpu.main()
    text = capsys.readouterr().out
    assert all(found in text for found in ("measured before", "an illegal memory access", "FAILED: First"))
    assert "measured after" in text and json.loads(file.read_text())["failed"] == ["first"]
