"""Which layers the native kernels run in one call, and which tensors they accept."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from trueroll.kernels.contract import AttentionWeights, Norms
from trueroll.kernels.cpu.backend import PackedLayers
from trueroll.kernels.selection import select_backend
from trueroll.kernels.specs import LayerSpec

from ..backends import Served
from ..inputs import EXPERTS, decoder_spec, layer_spec, make_layers, strided
from ..test_joined_ops import BOTH, GATED, HYBRIDS, MIXTURES, HybridStep


def native(layers: Sequence[LayerSpec]) -> Served:
    return Served(select_backend("cpu", torch.device("cpu"), torch.float32, decoder_spec(*layers)).ops, torch.float32)


def test_which_layers_run_in_one_native_call() -> None:
    served = native([GATED])
    for all_specs in (HYBRIDS, MIXTURES):
        packed = {
            name: isinstance(HybridStep.new(served, *specs).step.layers, PackedLayers)
            for name, specs in all_specs.items()
        }
        assert packed == {name: name != "joined" for name in all_specs}


def test_experts_that_do_not_fill_panels_are_refused() -> None:
    served = native([GATED])
    layers = make_layers(served, layer_spec(experts=EXPERTS), hidden=130)
    with pytest.raises(ValueError, match="multiples of 16 .got 130 and 48.; use the backend"):
        served.ops.new_layers(layers)


def test_packed_layers_are_made_of_contiguous_tensors() -> None:
    served = native([layer_spec()])
    (layer,) = make_layers(served, layer_spec(**BOTH))
    mixer = layer.mixer
    assert isinstance(mixer, AttentionWeights) and mixer.biases is not None and mixer.qk_norms is not None
    bq, bk, bv = mixer.biases
    q_norm, k_norm = mixer.qk_norms
    before = layer.mixer_norms.before
    assert before is not None
    for changed in (
        dataclasses.replace(layer, mixer_norms=Norms(strided(before), None)),
        dataclasses.replace(layer, mlp_norms=Norms(strided(before), None)),
        dataclasses.replace(layer, mixer=dataclasses.replace(mixer, biases=(bq, bk, strided(bv)))),
        dataclasses.replace(layer, mixer=dataclasses.replace(mixer, qk_norms=(strided(q_norm), k_norm))),
    ):
        with pytest.raises(ValueError, match=r"must be contiguous .got shape \[\d+\] with strides \[2\]"):
            served.ops.new_layers([layer, changed])
    assert tuple(served.ops.new_layers([layer, layer])) == (layer, layer)


def test_masks_of_storages_are_made_for_layers_that_are_computed() -> None:
    """A model that is only described has a storage for each tensor, and may have a thousand layers."""
    served = native([layer_spec()])
    layers = served.ops.new_layers(make_layers(served, layer_spec()))
    assert isinstance(layers, PackedLayers) and "_storages" not in vars(layers)
    addresses = layers.addresses()
    assert "_storages" in vars(layers) and torch.equal(layers.addresses(), addresses) and addresses.any()
