"""Process settings that a trainer may change do not affect the native kernels, and `reference` names them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from trueroll.kernels import reference
from trueroll.kernels.cpu.backend import PackedWeight

from .backends import Served
from .inputs import randn, same_bits, stored


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


def test_logits_and_log_probs_are_float32_whatever_the_default_dtype(served: Served, default_dtype: None) -> None:
    weight = stored(served.ops, randn(100, 32, dtype=served.dtype, seed=1))
    logits = served.ops.lm_head(randn(3, 32, dtype=served.dtype), weight)
    logprobs = served.ops.log_probs(logits, torch.tensor([1, 2, 99]))
    assert logits.dtype == logprobs.dtype == torch.float32
    expected = torch.log_softmax(logits, -1)[torch.arange(3), torch.tensor([1, 2, 99])]
    assert (logprobs - expected).abs().max() < 1e-5


def test_reference_names_the_precision_of_products_that_torch_is_set_to() -> None:
    """In this precision, torch's float32 products differ from a worker's bits."""
    exact = reference.instruction_set()
    torch.set_float32_matmul_precision("medium")
    try:
        assert reference.instruction_set().startswith(f"{exact}, bf16")
    finally:
        torch.set_float32_matmul_precision("highest")
    assert reference.instruction_set() == exact


def test_bits_do_not_depend_on_which_thread_flushes_denormals(two_threads: None) -> None:
    from trueroll.kernels.cpu import backend

    x, rows = torch.randn(64, 512) * 1e-20, torch.randn(2048, 512) * 1e-20
    weight = PackedWeight.new(2048, 512, torch.empty)
    weight.copy_(rows)
    expected = backend.linear(x, weight)
    assert ((expected != 0) & (expected.abs() < torch.finfo(torch.float32).tiny)).any(), "some are denormal"
    torch.set_flush_denormal(True)
    try:
        results = [backend.linear(x, weight) for _ in range(20)]
    finally:
        torch.set_flush_denormal(False)
    assert all(same_bits(result, expected) for result in results)
