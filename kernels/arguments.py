"""The arguments of an aligned model's forward pass: which arguments are supported, ignored or refused.

This file is an allow-list: aligned models refuse any argument of transformers that is not listed here.
`check_signature` checks the signature of the forward pass when a model is aligned. `check_call` checks each call. An
aligned model therefore never silently ignores an argument that a new release of transformers adds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from trueroll.errors import AlignmentError, brief
from trueroll.versions import untested

SERVED = frozenset({"input_ids", "attention_mask", "position_ids"})
# Arguments that are served if the original forward pass takes them. `image_sizes` and `vision_feature_layer` have no
# effect without pixels, and models that take these two are aligned without their towers.
OF_IMAGES = frozenset({"pixel_values", "image_grid_thw", "mm_token_type_ids", "token_type_ids"})
OF_IMAGES |= {"image_sizes", "vision_feature_layer"}
# Arguments that transformers handles outside the decoder, for example to compute the loss from the logits.
OF_THE_HEAD = frozenset(
    {"labels", "logits_to_keep", "return_dict", "num_items_in_batch", "ignore_index", "shift_labels"}
)
# Arguments without effect: a memory hint, and sequence boundaries that `position_ids` already give.
IGNORED = frozenset({"use_cache", "cu_seq_lens_k", "max_length_q", "max_length_k"})
BOUNDARIES = frozenset({"cu_seq_lens_q", "seq_idx"})
CACHES = frozenset({"past_key_values", "cache"})
# Arguments that are refused, unless the value is None or the value given here. These values request no feature.
REFUSED: Mapping[str, Any] = {
    **dict.fromkeys(CACHES | {"inputs_embeds", "mm_encoder_outputs", "visual_pos_masks", "deepstack_visual_embeds"}),
    **dict.fromkeys(("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_router_logits"), False),
    "is_causal": True,
}
KNOWN = SERVED | OF_IMAGES | OF_THE_HEAD | IGNORED | BOUNDARIES | REFUSED.keys()
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_signature(original: type) -> None:
    """Raise AlignmentError if the forward pass of this transformers class has an argument that is not in KNOWN."""
    unknown = [name for name in _parameters(original.forward) if name not in KNOWN]
    if unknown:
        what = f"{original.__name__}.forward takes {', '.join(unknown)}, which trueroll does not know"
        raise AlignmentError(untested("transformers", what))


def check_call(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call as a map from name to value. `forward`: the unbound method of transformers that is
    called.

    Raise AlignmentError if a refused or unknown argument is neither None nor the value that REFUSED gives for it. Also
    raise AlignmentError for arguments that give the boundaries of packed sequences, unless `position_ids` is given too.
    """
    parameters = _parameters(forward)
    if len(args) > len(parameters):
        raise TypeError(f"forward takes at most {len(parameters)} positional arguments, got {len(args)}")
    given = dict(zip(parameters, args, strict=False))
    if twice := given.keys() & kwargs.keys():
        raise TypeError(f"forward got {', '.join(sorted(twice))} twice")
    given.update(kwargs)
    allowed = KNOWN - REFUSED.keys() - OF_IMAGES.difference(parameters)
    for name, value in given.items():
        if value is not None and name not in allowed and value is not REFUSED.get(name):
            raise AlignmentError(_refusal(name, value))
    without = sorted(name for name in BOUNDARIES if given.get(name) is not None)
    if without and given.get("position_ids") is None:
        raise AlignmentError(
            f"position_ids are required with {', '.join(without)}; pass position_ids that are 0 where a sequence begins"
        )
    return given


def _refusal(name: str, value: Any) -> str:
    if name in CACHES:
        return (
            f"{name}: an aligned model keeps no KV cache; call `generate` with use_cache=False, sample with a "
            "worker, or call unalign"
        )
    kind = "does not support" if name in KNOWN else "does not know"
    return f"{name}: an aligned model {kind} this argument (got {brief(value)}); leave it out, or call unalign"


@cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of an unbound method's arguments without `self`, in positional order."""
    _, *named = inspect.signature(forward).parameters.values()
    return tuple(parameter.name for parameter in named if parameter.kind not in _VARIADIC)
