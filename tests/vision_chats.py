"""Tiny vision models that can chat: with an image processor, tokens for images and a chat template."""

from __future__ import annotations

import io
import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoTokenizer
from vision_models import PLACEHOLDER, make_vision_model

IMAGE = f"<{PLACEHOLDER}>"
BEGIN, END = "<498>", "<499>"
"""The texts of Gemma 3's tokens around an image. Its template writes only the first of them."""
_NORMALIZED: dict[str, Any] = dict(image_mean=[0.5, 0.4, 0.3], image_std=[0.5, 0.25, 0.2])
_PROCESSORS: dict[str, dict[str, Any]] = {
    "gemma3": _NORMALIZED
    | dict(image_processor_type="Gemma3ImageProcessor", size=dict(height=32, width=32), do_pan_and_scan=None),
    "qwen3_vl": _NORMALIZED
    | dict(
        image_processor_type="Qwen2VLImageProcessorFast",
        patch_size=4,
        merge_size=2,
        temporal_patch_size=2,
        size=dict(shortest_edge=64, longest_edge=4096),
    ),
}
_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content or [] %}"
    "{% if part.type == 'text' %}{{ part.text }}{% elif m.role != 'system' %}MARK{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Like the templates of real models, it ignores images in the system message."""


def make_vision_chat_model(family: str, folder: Path) -> Path:
    """Save a tiny model of `family`, `gemma3` or `qwen3_vl`, into `folder`, and return `folder`."""
    make_vision_model(family, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSORS[family]))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    named = dict(boi_token=BEGIN, eoi_token=END, image_token=IMAGE) if family == "gemma3" else {}
    tokenizer.add_special_tokens({"additional_special_tokens": [BEGIN, END, IMAGE]})
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= named | ({"extra_special_tokens": named} if named else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(_TEMPLATE.replace("MARK", BEGIN if named else IMAGE))
    return folder


def picture(seed: int, height: int = 32, width: int = 48) -> Image.Image:
    """Return a picture of 8 x 8 squares in random colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    return Image.fromarray(np.kron(colours, np.ones((8, 8, 1), np.uint8)))


def as_file(image: Image.Image, format: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, format)
    return file.getvalue()


def as_part(file: bytes, type: str = "image/png") -> dict[str, Any]:
    """Return a part of a message: a file as a `data:` URL."""
    return {"type": "image_url", "image_url": {"url": f"data:{type};base64,{b64encode(file).decode()}"}}


def as_fields(image: Any) -> dict[str, Any]:
    """Return an `ImageInput` as a request has it."""
    arrays = {name: b64encode(getattr(image, name).tobytes()).decode() for name in ("levels", "table")}
    return arrays | {name: getattr(image, name) for name in ("start", "rows", "columns")}
