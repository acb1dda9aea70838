"""Models of transformers as trainers have them: of which family they are, and what they compute."""

from __future__ import annotations

from typing import Any

from trueroll.errors import AlignmentError, ModelError
from trueroll.versions import untested

from .families import describe, families
from .specs import DecoderSpec
from .wrappers import plain_class


def is_decoder(model: Any) -> bool:
    """Whether it is a model of a family, and a decoder alone."""
    return _is_of_family(model) and hasattr(getattr(model, "model", None), "embed_tokens")


def is_aligned(module: Any) -> bool:
    """Whether `training.align` gave this module another forward pass."""
    return "_aligned" in vars(module)  # hasattr would ask the module inside of a wrapper, too


def describe_plain(model: Any) -> DecoderSpec:
    """What a model of a family computes, of which nothing is aligned. Raise AlignmentError for any other."""
    if not _is_of_family(model):
        names = ", ".join(sorted(families()))
        raise AlignmentError(
            f"model: expected one of {names}, found {type(model).__name__}; unwrap it, or use another model"
        )
    _check_layout(model)
    if not is_decoder(model):
        raise AlignmentError(
            f"model: expected a decoder alone, found {type(model).__name__}, which has more; load its text with "
            "AutoModelForCausalLM"
        )
    if any(map(is_aligned, model.modules())):
        raise AlignmentError("model: expected one that is not aligned, found an aligned one; call unalign first")
    try:
        return describe(model.config.to_dict() | {"architectures": [plain_class(type(model)).__name__]})
    except ModelError as error:
        raise AlignmentError(f"model: {error}") from None


def _is_of_family(model: Any) -> bool:
    return plain_class(type(model)).__name__ in families()


def _check_layout(model: Any) -> None:
    """Raise AlignmentError for a decoder of transformers whose parts have other names than those that are read here."""
    name = plain_class(type(model)).__name__
    if not name.endswith("ForCausalLM"):
        return
    decoder = getattr(model, "model", None)
    missing = [part for part in ("embed_tokens", "layers", "norm") if not hasattr(decoder, part)]
    if not hasattr(model, "lm_head"):
        missing.append("lm_head")
    if missing:
        raise AlignmentError(untested("transformers", f"{name} has no {', '.join(missing)}"))
