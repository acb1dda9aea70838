"""The layers of every family with the Triton kernels: the results have the bits of the separate ops, and are close to
the reference's. Routes to experts equal the reference's routes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from matrix import thinned
from mixers import attention_of

from trueroll.kernels import reference
from trueroll.kernels.contract import Layer, MlpWeights, Pages
from trueroll.kernels.specs import ExpertsSpec, LayerSpec, RouterSpec
from trueroll.kernels.triton import backend

from ..backends import Served
from ..inputs import FAMILY_LAYERS, NORM, Paged, decoder_spec, layer_spec, make_layers, make_rotations, randn, same_bits
from ..test_joined_ops import Step, step_by_step_layers
from .test_experts import weights_of

TRITON: Any = backend
HIDDEN = 34


def make_step(*specs: LayerSpec) -> Step:
    """Make a step with the last tokens of a prompt, and a decode."""
    served, mixer = Served(TRITON, torch.bfloat16), attention_of(specs[0])
    paged, chunks = (
        Paged(served, [13, 12], mixer.num_heads, mixer.num_kv_heads, mixer.head_dim),
        [(0, 10, 13), (1, 11, 12)],
    )
    positions = torch.tensor([10, 11, 12, 11])
    slots = torch.cat([paged.slots(i)[start:end] for i, start, end in chunks])
    return Step(
        layers=backend.new_layers(make_layers(served, *specs, hidden=HIDDEN)),
        x=randn(4, HIDDEN, dtype=torch.bfloat16),
        rotations=make_rotations(TRITON, decoder_spec(*specs), positions),
        caches=[(paged.k_cache, paged.v_cache)] * 2,
        pages=[Pages(slots, paged.batch(chunks)[1])] * 2,
    )


@pytest.mark.parametrize("name", FAMILY_LAYERS)
@thinned(lambda name: name in ("gemma3", "qwen3_5"))
def test_layers(name: str) -> None:
    step = make_step(*FAMILY_LAYERS[name][-2:])  # if any layers differ, these layers do
    found, caches = step.run(TRITON.layers)
    expected, expected_caches = step.run(partial(step_by_step_layers, TRITON))
    assert same_bits(found, expected) and all(map(same_bits, caches, expected_caches))
    near, _ = step.run(reference.layers)
    assert (found.float() - near.float()).norm() < 0.02 * near.float().norm()


def with_experts(layer: Layer, spec: ExpertsSpec) -> Layer:
    """Return the layer with experts in place of its MLP. The MLP becomes the shared expert, if the spec has one."""
    weights = weights_of(spec, HIDDEN, torch.bfloat16)
    if spec.shared_size:
        assert isinstance(layer.mlp, MlpWeights) and len(layer.mlp.up.to_dense()) == spec.shared_size
        weights = replace(weights, shared=layer.mlp, shared_score=randn(1, HIDDEN, dtype=torch.bfloat16, seed=8) / 8)
    return replace(layer, spec=replace(layer.spec, mlp=spec), mlp=weights)


MIXTURES = {
    "qwen3_moe": (layer_spec(4, 2, 16, qk_norm=NORM), ExpertsSpec(6, 2, 16)),
    "gpt_oss": (
        layer_spec(4, 2, 16, window=9, qkv_bias=True, o_bias=True, sinks=True),
        ExpertsSpec(4, 2, 16, activation="clamped_silu", bias=True),
    ),
    "a shared expert": (layer_spec(4, 2, 16), ExpertsSpec(6, 3, 16, router=RouterSpec("softmax"), shared_size=77)),
}


@pytest.mark.parametrize("name", MIXTURES)
@thinned(lambda name: name != "qwen3_moe")
def test_layers_with_experts(name: str) -> None:
    spec, mixture = MIXTURES[name]
    dense = make_step(spec, spec)
    step = replace(dense, layers=[dense.layers[0], with_experts(dense.layers[1], mixture)])
    routes, near_routes = (torch.full((1, 4, mixture.top_k), -1, dtype=torch.int32) for _ in range(2))
    found, _ = step.run(partial(TRITON.layers, routes=routes))
    near, _ = step.run(partial(reference.layers, routes=near_routes))
    assert torch.equal(routes, near_routes) and len(routes.unique()) > mixture.top_k
    assert (found.float() - near.float()).norm() < 0.02 * near.float().norm()
    assert not same_bits(found, dense.run(TRITON.layers)[0]), "premise: experts change the result"
    assert same_bits(step.run(TRITON.layers)[0], found)
