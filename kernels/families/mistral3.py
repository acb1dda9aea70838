"""Mistral 3: the text decoder of a model with a vision tower. The decoder is Mistral, Ministral 3 or Mistral 4."""

from __future__ import annotations

from .towers import RENAMED_OLDER, wrapped_text

_TEXT = {
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
}
_BESIDE = ("model.vision_tower.", "model.multi_modal_projector.")

FAMILIES = {"Mistral3ForConditionalGeneration": wrapped_text(_TEXT, _BESIDE, RENAMED_OLDER, is_tied=True)}
