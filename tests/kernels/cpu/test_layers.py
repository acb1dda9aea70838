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


def test_addresses_follow_storages_that_move() -> None:
    served = native([layer_spec()])
    (layer,) = make_layers(served, layer_spec())
    layers, norm = served.ops.new_layers([layer]), layer.mixer_norms.before
    assert isinstance(layers, PackedLayers) and norm is not None
    before, start = layers.addresses(), norm.data_ptr()
    assert layers.addresses() is before and start in before.tolist(), "premise"
    storage = norm.untyped_storage()
    storage.resize_(2 * storage.nbytes())
    assert norm.data_ptr() != start, "premise"
    moved = [norm.data_ptr() if address == start else address for address in before.tolist()]
    assert layers.addresses().tolist() == moved
