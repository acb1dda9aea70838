"""Images are opened within bounds, and processed as the model's image processor does."""

from __future__ import annotations

import io
import json
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from vision_models import PLACEHOLDER, make_vision_model

from trueroll.engine.media import ImageLimits, check_pixels
from trueroll.errors import ConfigError, InvalidRequestError, ModelError
from trueroll.kernels.media import patches_of
from trueroll.rollout.images import ImageProcessor, open_image

from ..engine.models.test_towers import pixels_for_transformers

NORMALIZED: dict[str, Any] = dict(image_mean=[0.5, 0.4, 0.3], image_std=[0.5, 0.25, 0.2])
QWEN: dict[str, Any] = NORMALIZED | dict(
    image_processor_type="Qwen2VLImageProcessorFast",
    patch_size=4,
    merge_size=2,
    temporal_patch_size=2,
    size=dict(shortest_edge=64, longest_edge=4096),
)
GEMMA: dict[str, Any] = NORMALIZED | dict(
    image_processor_type="Gemma3ImageProcessor", size=dict(height=32, width=32), do_pan_and_scan=None
)


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5", "qwen2_5_vl", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_vision_model(request.param, tmp_path_factory.mktemp(request.param))
    settings = GEMMA if request.param == "gemma3" else QWEN
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def photo(height: int = 50, width: int = 70, seed: int = 0) -> Any:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def as_png(image: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def test_levels_and_table_have_the_values_of_the_processor(folder: Path) -> None:
    processor = ImageProcessor(str(folder))
    theirs = transformers.AutoImageProcessor.from_pretrained(folder)
    for image in (photo(), photo(33, 90, seed=1), np.asarray(photo(64, 64, seed=2))):
        found = processor.process(image)
        expected = theirs(images=[image], return_tensors="pt")
        patches = patches_of(found, processor.tower, torch.float32, torch.device("cpu"))
        given = pixels_for_transformers(processor.tower, patches, (found.rows, found.columns))
        assert torch.equal(given["pixel_values"], expected["pixel_values"])
        if "image_grid_thw" in given:
            assert torch.equal(given["image_grid_thw"], expected["image_grid_thw"])


def test_an_image_has_one_hash(folder: Path) -> None:
    processor = ImageProcessor(str(folder))
    hashes = [processor.process(image).content_hash for image in (photo(), photo(), np.asarray(photo()))]
    assert len({*hashes}) == 1 and processor.process(photo(seed=1)).content_hash != hashes[0]


def test_placeholders_are_expanded(folder: Path) -> None:
    processor = ImageProcessor(str(folder))
    images = [processor.process(photo(seed=seed)) for seed in range(2)]
    counts = [processor.tower.num_tokens(image.rows, image.columns) for image in images]
    tokens, placed = processor.expand([5, PLACEHOLDER, 6, 7, PLACEHOLDER], images)
    assert tokens.tolist() == [5] + [PLACEHOLDER] * counts[0] + [6, 7] + [PLACEHOLDER] * counts[1]
    assert [image.start for image in placed] == [1, 3 + counts[0]]
    check_pixels(placed, ImageLimits(processor.tower, len(placed), 10**6).check(placed, tokens))
    for wrong in ([5, PLACEHOLDER], [PLACEHOLDER] * 3):
        with pytest.raises(InvalidRequestError, match="one placeholder .500. for each of 2 images"):
            processor.expand(wrong, images)


def test_files_are_opened() -> None:
    image = photo()
    assert (np.asarray(open_image(as_png(image))) == np.asarray(image)).all()
    assert open_image(as_png(image.convert("L"))).mode == "RGB"


def bomb(side: int) -> bytes:
    """Return a small PNG file that says that its image is a square with this side."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(10**6))) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "not a readable PNG, JPEG or WebP image"),
        (b"no image at all", "not a readable PNG, JPEG or WebP image"),
        (as_png(photo())[:-200], "not a readable PNG, JPEG or WebP image"),
        (b"GIF89a" + bytes(100), "not a readable PNG, JPEG or WebP image"),
        (bomb(10000), "10000 x 10000 pixels are too many"),
        (bomb(60000), "Image size .3600000000 pixels. exceeds limit"),
    ],
    ids=["nothing", "text", "cut off", "another format", "large", "bomb"],
)
def test_other_data_is_refused(data: bytes, error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        open_image(data)


def test_what_cannot_be_processed_is_refused(folder: Path, tiny_llama: Path, tmp_path: Path) -> None:
    processor = ImageProcessor(str(folder))
    with pytest.raises(InvalidRequestError, match="pixels are too many .limit 100 pixels"):
        processor.process(photo(), most_pixels=100)
    for shape, dtype in (((5, 5, 3), np.float32), ((5, 5), np.uint8), ((3, 5, 5), np.uint8), ((0, 5, 3), np.uint8)):
        with pytest.raises(InvalidRequestError, match=r"an array must be uint8 \[rows, columns, 3\]"):
            processor.process(np.zeros(shape, dtype))
    with pytest.raises(InvalidRequestError, match="must be a PIL image or an array .got bytes"):
        processor.process(b"")
    if not processor.tower.pooled:
        with pytest.raises(InvalidRequestError, match="image processor refuses the image"):
            processor.process(np.zeros((2, 1000, 3), np.uint8))
    with pytest.raises(ModelError, match="has no vision tower"):
        ImageProcessor(str(tiny_llama))
    without = make_vision_model("qwen3_vl", tmp_path)
    with pytest.raises(ModelError, match="image processor cannot be loaded"):
        ImageProcessor(str(without))


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"trueroll\[vision\]"):
        open_image(b"")
