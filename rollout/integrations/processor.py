"""`QwenProcessor`: a processor for prompts with images. `QwenProcessor` needs Pillow, but not torchvision.

The processors in transformers for Qwen3-VL, Qwen3.5 and Qwen2.5-VL also process videos, and therefore need torchvision.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoImageProcessor, AutoTokenizer, ProcessorMixin

from trueroll.errors import ModelError


class QwenProcessor(ProcessorMixin):
    """The object to pass as `processing_class` to TRL's `GRPOTrainer` for the models Qwen3-VL, Qwen3.5 and Qwen2.5-VL.

    Combines a model's image processor with its tokenizer. Does not process videos. Raise ModelError if the tokenizer
    has no placeholder token for images.
    """

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template or tokenizer.chat_template)
        self.image_token = getattr(tokenizer, "image_token", None) or "<|image_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        if self.image_token_id in (None, tokenizer.unk_token_id):
            raise ModelError(
                f"tokenizer: has no token {self.image_token}; use the tokenizer of a Qwen model that takes images"
            )

    @classmethod
    def from_pretrained(cls, model: str | Path, **options: Any) -> QwenProcessor:  # type: ignore[override]
        """Load the image processor and the tokenizer of a model. `options`: the options of transformers'
        `from_pretrained`. By default, the tokenizer has `padding_side="left"`, which TRL's trainers need.
        """
        tokenizer = AutoTokenizer.from_pretrained(model, **{"padding_side": "left", **options})
        return cls(AutoImageProcessor.from_pretrained(model, backend="pil", **options), tokenizer)

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False, **options: Any) -> None:  # type: ignore[override]
        """Save the image processor and the tokenizer in separate files, in the layout of a model folder."""
        for part in (self.image_processor, self.tokenizer):
            part.save_pretrained(save_directory, push_to_hub=push_to_hub, **options)

    def __call__(self, images: Any = None, text: Any = None, **options: Any) -> Any:
        """Return `input_ids`, `attention_mask` and `mm_token_type_ids` of texts, and `pixel_values` and
        `image_grid_thw` of their images. In a text, each image has one placeholder. `images`: the PIL images of each
        text; for a text without images, an empty list or None.
        """
        return super().__call__(images=_flat(images), text=text, return_mm_token_type_ids=True, **options)

    def replace_image_token(self, image_inputs: dict[str, Any], image_idx: int, **_: Any) -> str:
        """Return the placeholders of an image: one for each block of patches."""
        num_patches = int(image_inputs["image_grid_thw"][image_idx].prod())
        return self.image_token * (num_patches // self.image_processor.merge_size**2)


def _flat(images: Sequence[Any] | None) -> list[Any] | None:
    lists = (each if isinstance(each, list | tuple) else [each] for each in images or () if each is not None)
    return [image for each in lists for image in each] or None
