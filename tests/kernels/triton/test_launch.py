"""How kernels are launched, and what the compiler knows about the arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.knobs
import triton.language as tl

from trueroll.errors import ConfigError
from trueroll.kernels.selection import select_backend
from trueroll.kernels.specs import ExpertsSpec
from trueroll.kernels.triton import MOST_EXPERTS, attention, obstacle
from trueroll.kernels.triton.launch import aligned, exact_jit, launch, recording

from ..inputs import decoder_spec, layer_spec


def scale(x_ptr: Any, out_ptr: Any, factor: Any, count: Any, BLOCK: tl.constexpr) -> None:
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + places, tl.load(x_ptr + places, mask=places < count) * factor, mask=places < count)


KERNEL = exact_jit(scale)


def test_a_launch_runs_the_whole_grid() -> None:
    x = torch.arange(100, dtype=torch.float32)
    out = torch.zeros_like(x)
    launch(KERNEL, (4,), x, out, 0.5, 100, warps=1, BLOCK=32)
    assert torch.equal(out, x / 2)


def test_an_empty_grid_runs_nothing() -> None:
    out = torch.zeros(4)
    launch(KERNEL, (0,), torch.ones(4), out, 2.0, 4, warps=1, BLOCK=32)
    assert not out.any()


def test_an_unaligned_or_strided_tensor_is_refused_and_can_be_copied() -> None:
    memory = torch.arange(9, dtype=torch.float32)
    assert memory.data_ptr() % 16 == 0
    out = torch.zeros(8)
    for elsewhere in (memory[1:], memory[::2]):
        with pytest.raises(
            ValueError, match="must be contiguous and begin at addresses that are multiples of 16 .*; pass them"
        ):
            launch(KERNEL, (1,), elsewhere, out, 1.0, 4, warps=1, BLOCK=32)
    launch(KERNEL, (1,), aligned(memory[1:]), out, 1.0, 8, warps=1, BLOCK=32)
    assert torch.equal(out, memory[1:])
    assert aligned(memory) is memory


def test_a_recorded_launch_is_listed_and_not_run() -> None:
    out = torch.zeros(4)
    with recording() as launches:
        launch(KERNEL, (1,), torch.ones(4), out, 2.0, 4, warps=2, stages=3, BLOCK=32)
        launch(KERNEL, (1,), *torch.empty(2, 4, dtype=torch.bfloat16, device="meta"), 2.0, 4, warps=2, BLOCK=32)
    assert not out.any()
    first, second = launches
    assert first.types == (("x_ptr", "*fp32"), ("out_ptr", "*fp32"), ("factor", "fp32"), ("count", "i32"))
    assert (first.constants, first.warps, first.stages) == ((("BLOCK", 32),), 2, 3)
    assert second.types[0] == ("x_ptr", "*bf16") and second.stages == 1
    assert (first.grid, first.values, second.values) == ((1,), (16, 16, 2.0, 4), (8, 8, 2.0, 4))


def test_launches_that_compile_alike_are_equal() -> None:
    with recording() as launches:
        for grid, size, block in ((4, 4, 32), (5, 9, 32), (4, 4, 64)):
            launch(KERNEL, (grid,), torch.ones(size), torch.ones(size), 2.0, size, warps=2, BLOCK=block)
    assert launches[0] == launches[1] != launches[2]


def test_numbers_are_known_by_their_type_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the compiler would specialize kernels for 1 and for multiples of 16, and might choose other layouts."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    parameters = {p.name: p for p in exact_jit(scale).params}
    assert parameters["factor"].do_not_specialize and parameters["count"].do_not_specialize
    assert not parameters["x_ptr"].do_not_specialize and parameters["BLOCK"].is_constexpr


def test_health_says_what_is_pinned_and_what_the_environment_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = select_backend("triton", torch.device("cpu"), torch.bfloat16).ops
    assert ops.instruction_set().startswith(f"interpreter, triton {triton.__version__}, enable_fp_fusion=False")
    assert "DISABLE_MMA_V3" not in ops.instruction_set() and "PTXAS" not in ops.instruction_set()
    monkeypatch.setenv("DISABLE_MMA_V3", "1")
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/opt/ptxas")
    assert "DISABLE_MMA_V3=" in ops.instruction_set() and "TRITON_PTXAS_PATH=/opt/ptxas" in ops.instruction_set()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "interpreted", "reason"),
    [
        (
            torch.float32,
            64,
            "1",
            "do not support float32; set dtype to bfloat16 \\(--dtype bfloat16\\)",
        ),
        (torch.bfloat16, 63, "1", "need an even head size up to 256 .got 63"),
        (torch.bfloat16, 258, "1", "need an even head size up to 256 .got 258"),
        (torch.bfloat16, 64, "0", "need an NVIDIA GPU .got a CPU.; set device to cuda"),
    ],
)
def test_what_the_kernels_do_not_serve(
    dtype: torch.dtype, head_dim: int, interpreted: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    layers = [layer_spec(size=64), layer_spec(size=head_dim)]
    with pytest.raises(ConfigError, match=reason):
        select_backend("triton", torch.device("cpu"), dtype, decoder_spec(*layers))
    assert select_backend("auto", torch.device("cpu"), dtype, decoder_spec(layers[0])).name in ("cpu", "reference")


def test_a_group_of_heads_fits_into_a_tile() -> None:
    device, rows = torch.device("cpu"), attention.ROWS
    groups = [decoder_spec(layer_spec(2 * heads, 2)) for heads in (rows, rows + 1)]
    select_backend("triton", device, torch.bfloat16, groups[0])
    with pytest.raises(ConfigError, match="need at most 64 heads for each key-value head .got 65.; use the backend"):
        select_backend("triton", device, torch.bfloat16, groups[1])


def test_a_program_chooses_among_all_experts() -> None:
    layer, device = layer_spec(size=64), torch.device("cpu")
    few, many = (replace(layer, mlp=ExpertsSpec(count, 2, 16)) for count in (MOST_EXPERTS, MOST_EXPERTS + 1))
    select_backend("triton", device, torch.bfloat16, decoder_spec(layer, few))
    with pytest.raises(ConfigError, match="need at most 1024 experts .got 1025.; use the backend 'reference'"):
        select_backend("triton", device, torch.bfloat16, decoder_spec(layer, many))


@pytest.mark.parametrize(
    ("capability", "interpreted", "reason"),
    [
        ((7, 5), "0", "need compute capability 8.0 or later (got 7.5); use the backend 'reference'"),
        ((9, 0), "1", "interpreted Triton kernels need a CPU (got cuda); unset TRITON_INTERPRET"),
        ((9, 0), "0", ""),
    ],
)
def test_which_gpus_the_kernels_serve(
    capability: tuple[int, int], interpreted: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = obstacle(torch.device("cuda"), torch.bfloat16, decoder_spec(layer_spec(size=64)))
    assert reason in found and bool(reason) == bool(found)
