"""Fixtures of the kernel tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from trueroll.kernels.contract import Backend

from .backends import IMPLEMENTATIONS, MIXING, SERVED, Implementation, Served, params_of


@pytest.fixture(params=IMPLEMENTATIONS, ids=str)
def ops(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The ops of every implementation, one after the other."""
    with request.param.chosen() as ops:
        yield ops


@pytest.fixture(params=[i for i in IMPLEMENTATIONS if not i.interpreted], ids=str)
def quick_ops(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Like `ops`, without interpreted implementations. For tests that would take more than two seconds in an
    interpreter.
    """
    with request.param.chosen() as ops:
        yield ops


@pytest.fixture(params=params_of(SERVED))
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Every implementation with every dtype that it supports, one after the other."""
    yield from _serve(*request.param)


@pytest.fixture(params=params_of([s for s in SERVED if not s[0].interpreted]))
def quick(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Like `served`, without interpreted implementations. For tests that would take more than two seconds in an
    interpreter.
    """
    yield from _serve(*request.param)


@pytest.fixture(params=params_of(MIXING))
def mixing(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Like `served`, for the implementations in `MIXING`."""
    yield from _serve(*request.param)


def _serve(implementation: Implementation, dtype: torch.dtype) -> Iterator[Served]:
    with implementation.chosen() as ops:
        yield Served(ops, dtype)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Two threads for a test, which may change the number. The old number is restored afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
