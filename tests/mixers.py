"""The mixer of a layer, for tests that know its kind."""

from __future__ import annotations

from trueroll.kernels.specs import AttentionSpec, LayerSpec


def attention_of(spec: LayerSpec) -> AttentionSpec:
    assert isinstance(spec.mixer, AttentionSpec)
    return spec.mixer
