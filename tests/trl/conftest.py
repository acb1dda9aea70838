"""Workers shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from trl_setup import ServedEngine, serve


@pytest.fixture(scope="module")
def smollm2_served(smollm2: Path) -> Iterator[ServedEngine]:
    with serve(smollm2) as served:
        yield served


@pytest.fixture(scope="module")
def tiny_served(tiny_llama: Path) -> Iterator[ServedEngine]:
    with serve(tiny_llama) as served:
        yield served
