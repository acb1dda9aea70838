"""Tests that need an NVIDIA GPU. On a machine without a GPU, each test is skipped with a reason.

`make test-gpu` and `examples/benchmarks/gpu_check.py` run these tests. `gpu_check.py` reports the property `found`,
which a test can record.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from trueroll.engine.running import executor
from trueroll.kernels.contract import Backend
from trueroll.kernels.selection import select_backend

from ..kernels.backends import Served
from .moved import DEVICE, IS_REHEARSAL, Moved


@pytest.fixture(scope="session", autouse=True)
def _needs_a_gpu() -> None:
    if IS_REHEARSAL:
        return
    if not torch.cuda.is_available():
        pytest.skip(f"needs a GPU that torch can use, found none (torch {torch.__version__})")
    if os.environ["TRITON_INTERPRET"] == "1":
        pytest.skip("needs compiled kernels, these are interpreted; run make test-gpu")


@pytest.fixture
def gpu() -> torch.device:
    """The GPU, for a test that a CPU cannot rehearse."""
    if IS_REHEARSAL:
        pytest.skip("needs a GPU, which a rehearsal does without")
    return DEVICE


@pytest.fixture
def one_step_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the engine queue a step while the previous step computes, even in a rehearsal."""
    if IS_REHEARSAL:
        monkeypatch.setattr(executor, "runs_ahead", lambda device: True)


@pytest.fixture
def kernels(_needs_a_gpu: None) -> Backend:
    """The Triton kernels, for tensors on the GPU."""
    return select_backend("triton", DEVICE, torch.bfloat16).ops


@pytest.fixture
def ops(kernels: Backend) -> Moved:
    """The Triton kernels, for tensors on the CPU. On a GPU, the tests of `tests/kernels` use these ops."""
    return Moved(kernels)


@pytest.fixture
def quick_ops(ops: Moved) -> Moved:
    return ops


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def served(request: pytest.FixtureRequest, ops: Moved) -> Served:
    return Served(ops, request.param)  # type: ignore[arg-type]


@pytest.fixture
def quick(served: Served) -> Served:
    return served


@pytest.fixture
def mixing(served: Served) -> Served:
    return served


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Restore the number of CPU threads after the test. The number does not affect a GPU."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
