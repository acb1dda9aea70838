"""The layers of every family by the Triton kernels: the bits of their ops one by one, and near the reference's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from trueroll.kernels import reference
from trueroll.kernels.triton import backend

from .backends import Served
from .inputs import FAMILY_LAYERS, same_bits
from .test_joined_ops import make_step, step_by_step_layers

TRITON: Any = backend


@pytest.mark.parametrize("name", FAMILY_LAYERS)
def test_layers(name: str) -> None:
    """For 26 rows over contexts of up to 150 tokens, with windows of 9."""
    step = make_step(Served(TRITON, torch.bfloat16), *FAMILY_LAYERS[name][-2:])
    found, caches = step.run(TRITON.layers)
    expected, expected_caches = step.run(partial(step_by_step_layers, TRITON))
    assert same_bits(found, expected) and all(map(same_bits, caches, expected_caches))
    near, _ = step.run(reference.layers)
    print((found.float() - near.float()).norm() / near.float().norm())
    assert (found.float() - near.float()).norm() < 0.02 * near.float().norm()
