"""The model of launches on an H100: counts checked by hand, and properties checked at every number of rows."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trueroll.kernels.triton.machine import H100, REASONS

REPORT = Path(__file__).parents[2] / "examples" / "benchmarks" / "triton_report.py"


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("triton_report", REPORT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["triton_report"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def layers(report: ModuleType) -> list[tuple[Any, dict[str, list[Any]]]]:
    """Steps of Qwen2.5-7B. For each step, the work of its launches by op."""
    steps = report.steps_of(report.MODELS["Qwen2.5-7B"])
    return [
        (step, {op: [report.work_of(launch, step) for launch in found] for op, found in step.launches.items()})
        for step in steps
    ]


def test_few_launches_cover_all_tiles_constants_and_types(report: ModuleType) -> None:
    launches, modelled = report.record(report.MODELS), report.record([report.MODELLED])
    jobs = report.chosen_jobs(launches, modelled)
    chosen = {launch for capability, launch in jobs if capability == 80}
    assert set().union(*map(report.shown_by, chosen)) == set().union(*map(report.shown_by, launches))
    assert len(chosen) < 0.6 * len(launches), "premise: few"
    assert {launch for capability, launch in jobs if capability == 100} == chosen
    assert {launch for capability, launch in jobs if capability == 90} == {*chosen, *modelled}


def test_every_assumption_has_a_reason() -> None:
    assert {field.name for field in fields(H100)} == REASONS.keys()


def test_a_program_of_a_product_by_hand(report: ModuleType) -> None:
    """A tile of 64 features by 16 tokens over 256 columns takes 16 matrix instructions of 16 columns each."""
    work = report.triton_model.tile_work(64, [16, 0], 256, depth=128, stages=3)
    assert work.l2 == (64 + 16) * 256 * 2
    assert work.matrix == 64 * 16 * 256 / 2048
    assert work.shared == (16 * (64 * 16 * 2 + 16 * 16 * 2) + work.l2) / 128
    assert work.alone == 2 * H100.latency / 2


def test_a_tile_of_keys_by_hand(report: ModuleType) -> None:
    work = report.triton_model.attention_tile(rows=32, keys=64, size=128, warps=4)
    assert work.l2 == 2 * 64 * 128 * 2, "keys and values"
    assert work.matrix == 2 * 64 * 32 * 128 / 2048
    halves = report.triton_model.attention_tile(rows=64, keys=64, size=128, warps=8)
    assert halves.matrix == 2 * work.matrix and halves.l2 == work.l2


def test_a_launch_takes_as_long_as_its_slowest_resource(report: ModuleType) -> None:
    work = report.triton_model.Work(264, memory=H100.memory * 3e-6, l2=H100.l2 * 5e-6, matrix=H100.clock * 4e-6)
    found = report.triton_model.model(work, 2)
    assert (found.bound, found.waves) == ("L2", 1.0) and found.seconds == pytest.approx(5e-6 + H100.launch)


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "programs"),
    [(128, 64 * 1024, 4, 3), (224, 64 * 1024, 4, 2), (255, 0, 8, 1), (32, 0, 4, 16), (16, 0, 1, 32)],
)
def test_registers_shared_memory_and_threads_bound_the_programs_of_an_sm(
    report: ModuleType, registers: int, shared: int, warps: int, programs: int
) -> None:
    assert report.triton_model.resident(registers, shared, warps) == programs


def test_the_tiles_of_keys_of_a_prompt(report: ModuleType) -> None:
    """Two heads share a key: rows 0 to 31 are queries 0 to 15."""
    assert report.triton_model.tiles_of_keys(100, 100, group=2, rows=32, keys=64) == [1, 1, 1, 1, 2, 2, 2]
    assert report.triton_model.tiles_of_keys(1, 129, group=2, rows=32, keys=64) == [3]


def test_weights_come_from_memory_once_at_any_number_of_rows(
    report: ModuleType, layers: list[tuple[Any, dict[str, list[Any]]]]
) -> None:
    shapes = dict(zip(report.PRODUCTS, report.product_shapes(report.MODELS["Qwen2.5-7B"]), strict=True))
    for step, ops in layers:
        for op, (n, k) in shapes.items():
            product = max(ops[op], key=lambda work: work.matrix)
            rows = sum(step.queries)
            assert 2 * n * k <= product.memory <= 2 * (n * k + rows * k + 8 * rows * n), (step.name, op)
            assert product.l2 >= 2 * n * k and product.matrix * H100.sms >= n * k * rows / 2048


def test_more_rows_never_take_fewer_bytes_from_memory(layers: list[tuple[Any, dict[str, list[Any]]]]) -> None:
    """Checked only up to the number of rows that one tile holds. With more rows, some products store no partial
    results.
    """
    decodes = [ops for step, ops in layers if sum(step.queries) == len(step.queries) <= 320]
    assert len(decodes) > 10
    for fewer, more in pairwise(decodes):
        for op in fewer:
            assert sum(work.memory for work in fewer[op]) <= sum(work.memory for work in more[op]), op


def test_the_limit_of_a_product_by_hand(report: ModuleType) -> None:
    """For a weight of 1 GB, few rows are limited by reading the weight, and many rows are limited by multiplying."""
    assert report.product_limit(2**15, 2**14, 1) == 2**30 / 3.0e12
    assert report.product_limit(2**15, 2**14, 1000) == pytest.approx(2**30 * 1000 / 880e12)


def test_the_bytes_of_a_step_by_hand(report: ModuleType) -> None:
    """Qwen2.5-7B: a layer has 466 MB of matrices, the head 1.09 GB; a token has 2 KB of keys and values in a layer."""
    model = report.MODELS["Qwen2.5-7B"]
    one, two = (report.step_bytes(model, report.Step([1] * rows, 1000, {})) for rows in (1, 2))
    assert two - one == 28 * 1000 * 2048
    assert one - (two - one) == 28 * 2 * 3584 * (3584 + 1024 + 3584 + 3 * 18944) + 2 * 152064 * 3584


@pytest.mark.parametrize("rows", [64, 128, 256, 512])
def test_one_more_row_takes_little_more_time(
    report: ModuleType, layers: list[tuple[Any, dict[str, list[Any]]]], rows: int
) -> None:
    """In the model, with two programs on each SM, one more row makes a layer at most 1.15 times slower."""
    found = {sum(step.queries): ops for step, ops in layers if sum(step.queries) == len(step.queries)}
    times = [
        sum(
            report.triton_model.model(work, 2).seconds
            for op, works in found[n].items()
            if op != "head"
            for work in works
        )
        for n in (rows, rows + 1)
    ]
    assert times[0] < times[1] <= 1.15 * times[0]
