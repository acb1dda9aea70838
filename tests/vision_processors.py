"""Tiny random models with vision towers that take chats with images, their processors, and images for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, Gemma3Processor, PreTrainedTokenizerFast
from vision_models import PLACEHOLDER, make_vision_model

from trueroll.rollout.integrations.processor import QwenProcessor

TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ part.text if part.type == 'text' else '[" + f"<{PLACEHOLDER}>" + "]' }}"
    "{% endfor %}{% endif %}{% endfor %}"
)
GEMMA_START = "<501>"
NORMALIZED: dict[str, Any] = dict(image_mean=[0.5, 0.4, 0.3], image_std=[0.5, 0.25, 0.2])
QWEN: dict[str, Any] = NORMALIZED | dict(
    image_processor_type="Qwen2VLImageProcessorFast",
    patch_size=4,
    merge_size=2,
    temporal_patch_size=2,
    size=dict(shortest_edge=64, longest_edge=1024),
)
GEMMA: dict[str, Any] = NORMALIZED | dict(
    image_processor_type="Gemma3ImageProcessor", size=dict(height=32, width=32), do_pan_and_scan=None
)
SIZES = [(24, 16), (16, 40), (32, 32)]


def make_chat_model(family: str, folder: Path) -> Path:
    """Save a random model with an image processor, and a tokenizer with placeholders and a chat template."""
    make_vision_model(family, folder)
    plain = AutoTokenizer.from_pretrained(folder)
    names = dict(image_token=f"<{PLACEHOLDER}>", boi_token=GEMMA_START, eoi_token="<502>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        pad_token=plain.pad_token,
        bos_token=plain.bos_token,
        eos_token=plain.eos_token,
        extra_special_tokens=names,
        padding_side="left",
    )
    is_gemma = family == "gemma3"
    tokenizer.chat_template = TEMPLATE.replace(f"<{PLACEHOLDER}>", GEMMA_START) if is_gemma else TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(GEMMA if is_gemma else QWEN))
    return folder


def processor_of(family: str, folder: Path) -> Any:
    if family != "gemma3":
        return QwenProcessor.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return Gemma3Processor(
        AutoImageProcessor.from_pretrained(folder, backend="pil"),
        tokenizer,
        chat_template=tokenizer.chat_template,
        image_seq_length=16,
    )


def photo(index: int, mode: str = "RGB") -> Any:
    height, width = SIZES[index % len(SIZES)]
    values = np.random.default_rng(index).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values).convert(mode)
