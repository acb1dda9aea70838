"""What is quantized in a decoder: the settings `quantization` and `kv_cache_dtype` of workers and trainers.

`quantization` names a format of `kernels.quantization`, such as `fp8`, and optionally selects which weights are
quantized: `fp8` quantizes the matrices of all attentions, recurrences, MLPs and experts, and `fp8:experts` only the
stacked matrices of experts. With some formats, such as `int8_dynamic`, products with these matrices also quantize their
activations (`kernels.dynamic`). The products with `k_up` and `v_up` of latent attention do not quantize their
activations. Embeddings, the head, routers, the gates of recurrences, norms, biases, convolutions and vision towers keep
the dtype of the model. `none` quantizes nothing. `kv_cache_dtype` names a format of `kernels.cache_formats` for keys
and values; `auto` is the dtype of the model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trueroll.errors import ConfigError

from .cache_formats import AUTO, CACHE_FORMATS, CacheFormat
from .dynamic import MOST_COLUMNS
from .layer import make_layer
from .quantization import FORMATS, Format, round_trip
from .specs import PLAIN, DecoderSpec, LayerSpec, WeightSpec
from .stacks import HeadLayout, StackLayout
from .stored import NONE

EXPERTS_SUFFIX = ":experts"
EXPERT_ROLES = ("experts.gate_up", "experts.down")
MATRIX_ROLES = (
    *("mixer.q", "mixer.k", "mixer.v", "mixer.qkv", "mixer.gate", "mixer.o"),
    *("latent.q_a", "latent.q_b", "latent.kv_a", "latent.kv_b"),
    *("delta.qkv", "delta.z", "delta.qkvz", "delta.o", "mamba.inputs", "mamba.o"),
    *("mlp.gate", "mlp.up", "mlp.gate_up", "mlp.down"),
    *EXPERT_ROLES,
    *("shared.gate", "shared.up", "shared.gate_up", "shared.down"),
)
SETTINGS = (NONE, *FORMATS, *(name + EXPERTS_SUFFIX for name in FORMATS))
"""All values of the setting."""


def with_quantization(spec: DecoderSpec, setting: str) -> DecoderSpec:
    """Return a copy of the spec in which `DecoderSpec.held` has the formats that `setting` gives to the weights.

    The new formats replace all formats in the spec. Raise ConfigError for an unknown setting, and for a setting that
    quantizes the experts of a decoder without experts.
    """
    if setting not in SETTINGS:
        raise ConfigError(
            f"quantization must be one of {', '.join((NONE, *FORMATS))}, or a format followed by {EXPERTS_SUFFIX!r} "
            f"(got {setting!r})",
            field="quantization",
            value=setting,
        )
    plain = {role: replace(held, format=None) for role, held in spec.held.items()}
    if setting == NONE:
        return replace(spec, held=plain, quantization=NONE)
    name, of_experts = setting.removesuffix(EXPERTS_SUFFIX), setting.endswith(EXPERTS_SUFFIX)
    if of_experts and not spec.experts:
        raise ConfigError(
            f"quantization: {setting} needs a model with experts, but {spec.architecture} has none; set quantization "
            f"to {name}",
            field="quantization",
            value=setting,
        )
    roles = EXPERT_ROLES if of_experts else MATRIX_ROLES
    held = {role: replace(plain.get(role, PLAIN), format=FORMATS[name]) for role in roles if role in spec.names}
    quantized = replace(spec, held={**plain, **held}, quantization=setting)
    if FORMATS[name].activations == "int8":
        _check_columns(quantized)
    return quantized


def _check_columns(spec: DecoderSpec) -> None:
    """Raise ConfigError if a product of integers has too many columns for sums of 32 bits."""
    name, columns = max(((name, shape[-1]) for name, (shape, _) in _quantized(spec).items()), key=lambda each: each[1])
    if columns > MOST_COLUMNS:
        raise ConfigError(
            f"quantization: {spec.quantization} needs matrices with at most {MOST_COLUMNS} columns (got {columns} in "
            f"{name}); use another quantization",
            field="quantization",
            value=spec.quantization,
        )


def keeps_values(setting: str) -> bool:
    """Return whether quantizing the values of quantized weights again gives the same bits."""
    return setting.removesuffix(EXPERTS_SUFFIX) not in ("nvfp4", "awq")


def with_kv_cache_dtype(spec: DecoderSpec, setting: str) -> DecoderSpec:
    """Return a copy of the spec that stores keys and values in the format called `setting`; `auto` is the dtype of the
    model. Raise ConfigError for an unknown setting.
    """
    if setting == AUTO:
        return spec
    if setting not in CACHE_FORMATS:
        raise ConfigError(
            f"kv_cache_dtype must be one of {', '.join((AUTO, *CACHE_FORMATS))} (got {setting!r})",
            field="kv_cache_dtype",
            value=setting,
        )
    layers = tuple(_with_format(layer, CACHE_FORMATS[setting]) for layer in spec.layers)
    return replace(spec, layers=layers, kv_cache_dtype=setting)


def _with_format(layer: LayerSpec, format: CacheFormat) -> LayerSpec:
    return layer if layer.cached is None else replace(layer, mixer=replace(layer.cached, cache_format=format))


class Rounding(NamedTuple):
    """Rounds a tensor of a checkpoint to the values of a format. `layout`: the layout of a stack of matrices, or None
    for a matrix.
    """

    format: Format
    layout: StackLayout | None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Quantize a tensor, and return the values of the result, in the dtype and the layout of `tensor`. Raise the
        same errors as `quantize`.
        """
        if self.layout is None:
            return round_trip(tensor, self.format)
        matrices = self.layout.rows_first(tensor)
        rows = round_trip(matrices.flatten(0, 1), self.format, matrices.shape[1] // self.layout.parts)
        return self.layout.as_stored(rows.view(matrices.shape))


def rounding_of(held: WeightSpec, layout: StackLayout | HeadLayout | None) -> Rounding | None:
    """Return the rounding of a weight; None if the weight is not quantized."""
    if held.format is None:
        return None
    return Rounding(held.format, layout if isinstance(layout, StackLayout) else None)


def roundings(spec: DecoderSpec) -> dict[str, Rounding]:
    """Return the rounding of each quantized weight of a decoder, by name."""
    return {name: rounding for name, (_, rounding) in _quantized(spec).items()}


def _quantized(spec: DecoderSpec) -> dict[str, tuple[tuple[int, ...], Rounding]]:
    """Return the shape and the rounding of each quantized weight of a decoder, by name."""
    found: dict[str, tuple[tuple[int, ...], Rounding]] = {}

    def note(name: str, *shape: int, layout: StackLayout | HeadLayout | None = None, held: WeightSpec = PLAIN) -> Any:
        if (rounding := rounding_of(held, layout)) is not None:
            found[name] = shape, rounding
        weight = torch.empty(shape, device="meta")
        return layout.rows_first(weight) if isinstance(layout, HeadLayout) else weight

    for index in range(len(spec.layers)):
        make_layer(spec, index, note)
    return found
