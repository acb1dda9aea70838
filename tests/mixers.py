"""Returns the mixer of a layer as a given kind, or with other fields, for tests that know the kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trueroll.kernels.contract import Layer
from trueroll.kernels.specs import AttentionSpec, LayerSpec


def attention_of(spec: LayerSpec) -> AttentionSpec:
    assert isinstance(spec.mixer, AttentionSpec)
    return spec.mixer


def with_attention(layer: Layer, **fields: Any) -> Layer:
    """Return a layer with other fields of its attention's spec."""
    return replace(layer, spec=replace(layer.spec, mixer=replace(attention_of(layer.spec), **fields)))
