"""The layers of every family by the Triton kernels: the bits of their ops one by one, and near the reference's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from trueroll.kernels import reference
from trueroll.kernels.contract import Pages
from trueroll.kernels.triton import backend

from ..backends import Served
from ..inputs import FAMILY_LAYERS, Paged, decoder_spec, make_layers, make_rotations, randn, same_bits
from ..test_joined_ops import Step, step_by_step_layers

TRITON: Any = backend


def make_step(name: str) -> Step:
    """The last two layers of a family, which differ if any do, for the end of a prompt and a decode."""
    served, specs = Served(TRITON, torch.bfloat16), FAMILY_LAYERS[name][-2:]
    mixer = specs[0].mixer
    paged, chunks = (
        Paged(served, [13, 12], mixer.num_heads, mixer.num_kv_heads, mixer.head_dim),
        [(0, 10, 13), (1, 11, 12)],
    )
    positions = torch.tensor([10, 11, 12, 11])
    slots = torch.cat([paged.slots(i)[start:end] for i, start, end in chunks])
    return Step(
        layers=backend.new_layers(make_layers(served, *specs, hidden=34)),
        x=randn(4, 34, dtype=torch.bfloat16),
        rotations=make_rotations(TRITON, decoder_spec(*specs), positions),
        caches=[(paged.k_cache, paged.v_cache)] * 2,
        pages=[Pages(slots, paged.batch(chunks)[1])] * 2,
    )


@pytest.mark.parametrize("name", FAMILY_LAYERS)
def test_layers(name: str) -> None:
    step = make_step(name)
    found, caches = step.run(TRITON.layers)
    expected, expected_caches = step.run(partial(step_by_step_layers, TRITON))
    assert same_bits(found, expected) and all(map(same_bits, caches, expected_caches))
    near, _ = step.run(reference.layers)
    assert (found.float() - near.float()).norm() < 0.02 * near.float().norm()
