"""Recognize transformers models that are not aligned, and return their specs."""

from __future__ import annotations

from typing import Any

from trueroll.errors import AlignmentError, ModelError
from trueroll.versions import untested

from .families import describe, families
from .specs import DecoderSpec
from .wrappers import plain_class, text_decoder


def is_decoder(model: Any) -> bool:
    """Return whether the model is a decoder of a supported family, with or without a vision tower."""
    return _is_of_family(model) and hasattr(model, "model") and hasattr(text_decoder(model), "layers")


def is_aligned(module: Any) -> bool:
    """Return whether `training.align` replaced this module's forward pass."""
    return "_aligned" in vars(module)  # hasattr would also look in the module inside a wrapper


def spec_of(model: Any) -> DecoderSpec:
    """Return the spec of a model of a supported family, aligned or not. Raise AlignmentError for any other model."""
    return model._aligned.spec if is_aligned(model) else describe_plain(model)


def describe_plain(model: Any) -> DecoderSpec:
    """Return the spec of an unaligned model of a supported family. Raise AlignmentError for any other model."""
    if not _is_of_family(model):
        names = ", ".join(sorted(families()))
        raise AlignmentError(
            f"model must be one of {names} (got {type(model).__name__}); unwrap it, or use another model"
        )
    if any(map(is_aligned, model.modules())):
        raise AlignmentError("model is already aligned; call unalign first")
    try:
        spec = describe(model.config.to_dict() | {"architectures": [plain_class(type(model)).__name__]})
    except ModelError as error:
        raise AlignmentError(f"model: {error}") from None
    _check_layout(model, spec)
    return spec


def _is_of_family(model: Any) -> bool:
    return plain_class(type(model)).__name__ in families()


def module_of(decoder: Any, name: str) -> Any:
    """Return the module of a decoder that holds the weight `name`, such as `model.norm.weight`."""
    return getattr(decoder, _module_name(name))


def _module_name(name: str) -> str:
    return name.split(".")[-2]


def _check_layout(model: Any, spec: DecoderSpec) -> None:
    """Raise AlignmentError for a transformers model with missing or renamed parts."""
    name = plain_class(type(model)).__name__
    decoder = text_decoder(model) if hasattr(model, "model") else None
    parts = _module_name(spec.embedding), "layers", _module_name(spec.last_norm)
    missing = [part for part in parts if not hasattr(decoder, part)]
    if not hasattr(model, "lm_head"):
        missing.append("lm_head")
    if missing:
        raise AlignmentError(untested("transformers", f"{name} has no {', '.join(missing)}"))
