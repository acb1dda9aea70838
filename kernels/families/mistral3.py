"""Mistral 3: the text of a model with a vision tower. The text is a Mistral or Mistral 4 model."""

from __future__ import annotations

from .towers import RENAMED_OLDER, wrapped_text

_TEXT = {"mistral": "MistralForCausalLM", "mistral4": "Mistral4ForCausalLM"}
_BESIDE = ("model.vision_tower.", "model.multi_modal_projector.")

FAMILIES = {"Mistral3ForConditionalGeneration": wrapped_text(_TEXT, _BESIDE, RENAMED_OLDER, is_tied=True)}
