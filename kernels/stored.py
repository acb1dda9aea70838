"""How the matrices of a checkpoint are stored, according to `quantization_config` in config.json.

A config.json may be untrusted. Each entry of `quantization_config` is therefore only compared with the entries of a
table, and is not interpreted in any other way. The entry that lists excluded layers is not read, because the tensors in
the files show which matrices are quantized. Owns nothing.

Sources: the configurations of transformers (`fp8`, `mxfp4`), AutoAWQ 0.2, compressed-tensors 0.20 and ModelOpt 0.40.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from trueroll.errors import ModelError, brief

NONE = "none"
_PLACE = "quantization_config of config.json"
_ADVICE = "serve a checkpoint in bfloat16, which the setting quantization can quantize"
_MOST_TEXTS = 4


class Stored(NamedTuple):
    """How a checkpoint is stored.

    `layout`: the name of the layout of quantized matrices, in `engine.models.quantized`. `setting`: the value of
    `quantization` with which a worker keeps the stored codes and scales; `none` for a plain checkpoint. `activations`,
    `cache`: the quantization of activations, and of keys and values, that the checkpoint asks for, in words.
    """

    layout: str = "fp8"
    setting: str = NONE
    activations: tuple[str, ...] = ()
    cache: tuple[str, ...] = ()


def stored_in(config: Mapping[str, Any]) -> Stored:
    """Return how a checkpoint is stored. `config`: the content of the checkpoint's config.json, which
    `families.describe` accepts.
    """
    text = config.get("text_config")
    outer = text if isinstance(text, dict) and "quantization_config" in text else config
    return read_stored(outer.get("quantization_config"), _OF_FAMILIES)


def read_stored(found: Any, methods: Collection[str] = ()) -> Stored:
    """Return how a checkpoint with the `quantization_config` `found` is stored.

    `methods`: the methods of `_OF_FAMILIES` that checkpoints of the family may have. Raise ModelError for any other
    method, and for a variant of a method that is not in this module's tables.
    """
    method = found.get("quant_method") if isinstance(found, dict) else found
    if method is None:
        return Stored()
    served = [*_METHODS, *methods]
    if method not in served or not isinstance(found, dict):
        *others, last = served
        raise ModelError(
            f"quant_method in {_PLACE} must be {', '.join(others)} or {last} (got {brief(method)}); {_ADVICE}"
        )
    return (_METHODS | _OF_FAMILIES)[method](found)


def _expect(found: Mapping[str, Any], name: str, *wanted: Any, default: Any = None) -> None:
    if (value := found.get(name, default)) not in wanted:
        raise ModelError(f"{name} in {_PLACE} must be {' or '.join(map(str, wanted))} (got {brief(value)}); {_ADVICE}")


def _fp8(found: Mapping[str, Any]) -> Stored:
    _expect(found, "weight_block_size", [128, 128])
    _expect(found, "fmt", "e4m3", "float8_e4m3fn", default="e4m3")  # two names of the same format
    scheme = found.get("activation_scheme")
    return Stored("fp8", "fp8", () if scheme is None else (f"activations in FP8 ({brief(scheme)})",))


def _mxfp4(found: Mapping[str, Any]) -> Stored:
    return Stored(setting="mxfp4:experts")


def _awq(found: Mapping[str, Any]) -> Stored:
    _expect(found, "bits", 4)
    _expect(found, "group_size", 128)
    _expect(found, "zero_point", True)
    _expect(found, "version", "gemm", "GEMM", default=found.get("format"))
    return Stored("awq", "awq")


def _modelopt(found: Mapping[str, Any]) -> Stored:
    _expect(found, "quant_algo", "NVFP4")
    groups = found.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        _expect(weights if isinstance(weights, dict) else {}, "group_size", 16)
    activations = _activations(found) if isinstance(groups, dict) else ("activations in NVFP4",)
    algorithm = found.get("kv_cache_quant_algo")
    cache = _cache(found) or (() if algorithm is None else (f"keys and values in {brief(algorithm)}",))
    return Stored("modelopt-nvfp4", "nvfp4", activations, cache)


class _Weights(NamedTuple):
    """How compressed-tensors stores weights, in the words of its configuration. `size`: the columns of a group, the
    rows and columns of a block, or None for a channel (a row).
    """

    formats: tuple[Any, ...]
    type: Any
    num_bits: Any
    strategy: Any
    size: Any = None
    symmetric: Any = True

    def __str__(self) -> str:
        size = "" if self.size is None else f" of {brief(self.size)}"
        kind = "symmetric" if self.symmetric is True else "asymmetric"
        way = f"{brief(self.type)}, {brief(self.strategy)}{size}, {kind}"
        return f"{brief(self.formats[0])} with {brief(self.num_bits)} bits ({way})"


_FLOAT, _INT = ("float-quantized", "naive-quantized"), ("int-quantized", "naive-quantized")
_COMPRESSED: Sequence[tuple[_Weights, str, str]] = (
    # the weights, the layout, the setting
    (_Weights(_FLOAT, "float", 8, "channel"), "fp8_channel", "fp8_channel"),
    (_Weights(_FLOAT, "float", 8, "block", [128, 128]), "fp8_block", "fp8"),
    (_Weights(_INT, "int", 8, "channel"), "int8", "int8"),
    (_Weights(("mxfp8-quantized",), "float", 8, "group", 32), "mxfp8", "mxfp8"),
    (_Weights(("mxfp4-pack-quantized",), "float", 4, "group", 32), "mxfp4", "mxfp4"),
    (_Weights(("nvfp4-pack-quantized",), "float", 4, "tensor_group", 16), "nvfp4", "nvfp4"),
    (_Weights(("pack-quantized",), "int", 4, "group", 128), "int4_symmetric", "awq"),
    (_Weights(("pack-quantized",), "int", 4, "group", 128, False), "int4", "awq"),
)
_WITH_ACTIVATIONS = {"fp8_channel": "fp8_dynamic", "int8": "int8_dynamic"}
"""The settings of layouts with quantized activations."""


def _compressed(found: Mapping[str, Any]) -> Stored:
    """Return how compressed-tensors stores a checkpoint. All groups of layers must be stored in the same way."""
    _expect(found, "quantization_status", "compressed", "frozen", default="compressed")
    for name in ("sparsity_config", "moe_sparsity_config", "transform_config"):
        _expect(found, name, None, {})
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelError(f"config_groups in {_PLACE} must be a map of groups (got {brief(groups)}); {_ADVICE}")
    layouts = {_layout_of(group, found.get("format")) for group in groups.values()}
    if len(layouts) > 1:
        several = " and ".join(sorted(layout for layout, _ in layouts))
        raise ModelError(f"config_groups in {_PLACE} must store all weights in one way (got {several}); {_ADVICE}")
    ((layout, setting),) = layouts
    if layout in _WITH_ACTIVATIONS and all(map(_quantizes_tokens, groups.values())):
        setting = _WITH_ACTIVATIONS[layout]
    return Stored(layout, setting, _activations(found), _cache(found))


def _quantizes_tokens(group: Mapping[str, Any]) -> bool:
    """Return whether a group of layers quantizes activations token by token, to 8-bit numbers of the same type as its
    weights.
    """
    scheme, kind = group.get("input_activations"), group["weights"]["type"]
    wanted = dict(type=kind, num_bits=8, strategy="token", dynamic=True, symmetric=True)
    return isinstance(scheme, dict) and all(scheme.get(name) == value for name, value in wanted.items())


def _layout_of(group: Any, format: Any) -> tuple[str, str]:
    """Return the layout and the setting of a group of layers. `format`: the format of groups of layers that name no
    format.
    """
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise ModelError(f"a group of config_groups in {_PLACE} must describe weights (got {brief(group)}); {_ADVICE}")
    _expect(weights, "dynamic", False, None)
    _expect(weights, "actorder", None, False, "weight", "static")
    _expect(group, "output_activations", None)
    size = weights.get("block_structure") if weights.get("strategy") == "block" else weights.get("group_size")
    kind, bits, strategy, symmetric = map(weights.get, ("type", "num_bits", "strategy", "symmetric"))
    own = _Weights((group.get("format") or format,), kind, bits, strategy, None if size == -1 else size, symmetric)
    for known, layout, setting in _COMPRESSED:
        if own.formats[0] in known.formats and own[1:] == known[1:]:
            return layout, setting
    raise ModelError(
        f"config_groups in {_PLACE} store weights as {own}, which is not supported; {_ADVICE}, or a checkpoint in a "
        "form that docs/low_precision.md lists"
    )


def _activations(found: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the quantization of activations in words."""
    groups = found.get("config_groups")
    listed = [*groups.values()] if isinstance(groups, dict) else []
    inputs = [group.get("input_activations") for group in listed if isinstance(group, dict)]
    texts = [f"activations in {_kind(each)}" for each in inputs if each is not None]
    return tuple(dict.fromkeys(texts))[:_MOST_TEXTS]


def _cache(found: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the quantization of keys and values in words."""
    scheme = found.get("kv_cache_scheme")
    return () if scheme is None else (f"keys and values in {_kind(scheme)}",)


def _kind(scheme: Any) -> str:
    if not isinstance(scheme, dict):
        return brief(scheme)
    return f"{brief(scheme.get('num_bits'))} bits ({brief(scheme.get('type'))})"


_METHODS: dict[str, Callable[[Mapping[str, Any]], Stored]] = {
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "modelopt": _modelopt,
}
_OF_FAMILIES: dict[str, Callable[[Mapping[str, Any]], Stored]] = {"mxfp4": _mxfp4}
