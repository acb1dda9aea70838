"""The comparisons of tests/gpu with a software model of tensor cores, run in an interpreter that computes matrix
instructions with that model. The comparisons show that the kernels add the same pieces of K in the same order as the
model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton_interpreter import widen

from trueroll.kernels.specs import ExpertsSpec
from trueroll.kernels.triton import backend, experts, products
from trueroll.kernels.triton.launch import recording
from trueroll.kernels.triton.products import CUT_TILES, NARROW_TILE, TILES, Tile

from ...gpu import moved
from ...gpu import test_tensor_cores as on_a_gpu
from ...gpu.test_tensor_cores import piece_of
from ..backends import both_dtypes
from ..inputs import randn, same_bits
from ..tensor_cores import TENSOR_CORES, TensorCore, check_product, multiply, multiply_add
from .test_experts import BIASED, ODD, cut, step_by_step
from .test_experts import inputs as inputs_of_experts
from .test_products import cut_everything

HOPPER = TENSOR_CORES[9]
DTYPES = {tl.bfloat16: torch.bfloat16, tl.float16: torch.float16}
COLUMNS = (256, 200, 121)  # whole steps of a tile, tails, elements loaded one by one


def compute_with(core: TensorCore, monkeypatch: pytest.MonkeyPatch, backwards: bool = False) -> None:
    """Make the interpreter compute matrix instructions like this tensor core. If `backwards`, K is summed in descending
    order.
    """

    def create_dot(self: Any, a: Any, b: Any, d: Any, *settings: Any) -> Any:
        left, right = (torch.from_numpy(widen(x.data, x.dtype)).to(DTYPES[x.dtype.scalar]) for x in (a, b))
        rows, columns = left[:, None], right.T[None]
        if backwards:
            rows, columns = rows.flip(-1), columns.flip(-1)
        total = multiply_add(core, torch.from_numpy(d.data), rows, columns)
        return interpreter.TensorHandle(total.numpy(), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def inputs(tokens: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return randn(tokens, columns, dtype=dtype), randn(65, columns, dtype=dtype, seed=1)


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "in_registers"])
@pytest.mark.parametrize("columns", COLUMNS)
@both_dtypes
def test_kernels_keep_the_order_of_the_model(
    columns: int, dtype: torch.dtype, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_with(HOPPER, monkeypatch)
    cut_everything(monkeypatch)
    if not apart:
        monkeypatch.setattr(products, "APART_TOKENS", 0)
    x, weight = inputs(70, columns, dtype)
    for tokens in (1, 17, 70):
        check_product(HOPPER, products.lm_head(x[:tokens], weight), x[:tokens], weight, piece_of(weight))


@pytest.mark.parametrize(
    "spec,hidden,dtype", [(BIASED, 200, torch.bfloat16), (ODD, 121, torch.float16)], ids=["biased", "odd"]
)
def test_experts_keep_the_order_of_the_model(
    spec: ExpertsSpec, hidden: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with the separate products of each expert, which the previous test compares with the model."""
    compute_with(HOPPER, monkeypatch)
    cut(monkeypatch)
    asked = inputs_of_experts(spec, 17, dtype, hidden)
    assert same_bits(experts.experts(*asked), step_by_step(*asked))


@both_dtypes
def test_the_gpu_checks_hold_in_the_interpreter(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    compute_with(HOPPER, monkeypatch)
    for module in (moved, on_a_gpu):
        monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(on_a_gpu, "COUNTS", (1, 33))
    ops: Any = backend
    on_a_gpu.test_products_have_the_bits_of_the_model(ops, HOPPER, 70, 1544, dtype)
    on_a_gpu.test_gate_and_up_have_the_bits_of_their_products(ops, 70, 1544, dtype)
    on_a_gpu.test_numbers_at_the_ends_of_a_dtype_have_the_bits_of_the_model(ops, HOPPER, dtype)


@both_dtypes
def test_numbers_at_the_ends_of_a_dtype_are_of_every_kind(dtype: torch.dtype) -> None:
    x, weight = on_a_gpu.numbers_at_the_ends(dtype)
    found = multiply(HOPPER, x, weight, piece_of(weight))
    tiny = torch.finfo(dtype).tiny
    assert (x[1].abs() < tiny).all() and (x[1] != 0).any() and x[0].eq(0).all() and x[0].signbit().any()
    assert found[3].eq(0).any() and found[5].isposinf().any() and found[5].isneginf().any()
    assert found[5].isnan().any() and found[6].isnan().all()
    assert dtype == torch.float16 or 0 < found[4].isinf().sum() < 64


def test_another_order_another_cut_and_another_core_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_everything(monkeypatch)
    x, weight = inputs(17, 256, torch.float16)
    piece = piece_of(weight)
    compute_with(HOPPER, monkeypatch)
    for wrong in (64, 256):
        with pytest.raises(AssertionError, match="none of .* would give the found bits"):
            check_product(HOPPER, products.lm_head(x, weight), x, weight, wrong)
    compute_with(TENSOR_CORES[8], monkeypatch)
    with pytest.raises(AssertionError, match=r"TensorCore\(terms=8, fraction_bits=24\) would give the found bits"):
        check_product(HOPPER, products.lm_head(x, weight), x, weight, piece)
    compute_with(HOPPER, monkeypatch, backwards=True)
    with pytest.raises(AssertionError, match="none of .* would give the found bits"):
        check_product(HOPPER, products.lm_head(x, weight), x, weight, piece)


def test_the_cases_for_a_gpu_take_every_tile_and_both_ways_of_adding_pieces() -> None:
    with recording() as launches:
        for n, k in on_a_gpu.SHAPES:
            x, weight = (
                torch.empty(rows, k, dtype=torch.bfloat16, device="meta") for rows in (max(on_a_gpu.COUNTS), n)
            )
            for count in on_a_gpu.COUNTS:
                products.lm_head(x[:count], weight)
                products.gate_up(x[:count], *weight.chunk(2), activation="silu")
    constants = [dict(launch.constants) for launch in launches]
    tiles = {
        Tile(known["FEATURES"], known["TOKENS"], known["MORE"], known["DEPTH"], launch.warps, launch.stages)
        for launch, known in zip(launches, constants, strict=True)
        if "FEATURES" in known
    }
    assert tiles == {*TILES, *CUT_TILES, NARROW_TILE}
    ways = {(known.get("APART", False), known["CUT"]) for known in constants if "CUT" in known}
    assert ways == {(True, True), (False, True), (False, False)}
