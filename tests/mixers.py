"""Returns the mixer of a layer as a given kind, for tests that know the kind."""

from __future__ import annotations

from trueroll.kernels.specs import AttentionSpec, LayerSpec


def attention_of(spec: LayerSpec) -> AttentionSpec:
    assert isinstance(spec.mixer, AttentionSpec)
    return spec.mixer
