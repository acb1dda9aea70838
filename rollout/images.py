"""Open images for prompts within limits, and preprocess each image once with the model's own image processor.

If trainer and worker each preprocessed an image, different versions or implementations of the processor could produce
different values. Therefore each image is preprocessed only once, where it enters trueroll. Trainer and worker both use
the result, an `ImageInput`. Never runs Python code from a model's folder. Needs Pillow (`pip install
"trueroll[vision]"`), but not torchvision.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trueroll.errors import ConfigError, InvalidRequestError, ModelError, said

from ..engine.media import NUM_LEVELS, ImageInput
from ..kernels.specs import TowerSpec

MOST_PIXELS = 2**26
"""The default limit on the pixels of an image before it is resized: 8192 x 8192."""
_FORMATS = ("PNG", "JPEG", "WEBP")


def open_image(data: bytes, most_pixels: int = MOST_PIXELS) -> Any:
    """Return a PIL image in RGB from the bytes of a PNG, JPEG or WebP file. The size of the image is checked before the
    pixels are decompressed. Raise InvalidRequestError for any other file format, for broken data, and for an image with
    more pixels than `most_pixels`.
    """
    Image, ImageOps = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of large images, which are bounded here
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
            check_pixels(image.size, most_pixels)
            image.load()
            return ImageOps.exif_transpose(image).convert("RGB")
    except InvalidRequestError:
        raise
    except Exception as error:  # Pillow raises errors of many classes for broken data
        raise InvalidRequestError(
            f"image: is not a readable PNG, JPEG or WebP image: {said(error)}", field="image"
        ) from None


def check_pixels(size: tuple[int, int], most_pixels: int) -> None:
    """Raise InvalidRequestError if an image of this width and height has more pixels than `most_pixels`."""
    if (pixels := size[0] * size[1]) > most_pixels:
        raise InvalidRequestError(
            f"image: {size[0]} x {size[1]} pixels are too many (limit {most_pixels} pixels); give a smaller image",
            field="image",
            value=pixels,
            limit=most_pixels,
        )


def tower_of(model: str) -> TowerSpec:
    """Return the vision tower of a model. Raise ModelError if the model has no vision tower."""
    from ..engine.models.loader import read_config
    from ..engine.models.names import resolve_model
    from ..kernels.families import describe

    folder = resolve_model(model)
    tower = describe(read_config(folder)).tower
    if tower is None:
        raise ModelError(f"{folder}: the model has no vision tower; serve a model with a vision tower")
    return tower


class ImageProcessor:
    """The image processor of a model with a vision tower. Raise ModelError if the model has no vision tower or no image
    processor, and ConfigError if Pillow is missing.
    """

    def __init__(self, model: str) -> None:
        from ..engine.models.names import resolve_model

        pillow()
        self.tower = tower_of(model)
        folder = resolve_model(model)
        from transformers import AutoImageProcessor

        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, backend="pil"
            )
        except Exception as error:
            raise ModelError(f"{folder}: the model's image processor cannot be loaded: {said(error)}") from None

    def process(self, image: Any, most_pixels: int = MOST_PIXELS) -> ImageInput:
        """Preprocess a PIL image, or an array uint8 [rows, columns, 3]. The returned `ImageInput` has start 0.

        Raise InvalidRequestError for an image with more pixels than `most_pixels`, and for an image that the processor
        refuses.
        """
        check_pixels(picture_size(image), most_pixels)
        picture = as_picture(image)
        try:
            made = self._processor(images=[picture], return_tensors="np")
        except Exception as error:
            raise InvalidRequestError(
                f"image: the model's image processor refuses the image: {said(error)}", field="image"
            ) from None
        return image_of(made, self.tower)

    def expand(self, token_ids: Sequence[int], images: Sequence[ImageInput]) -> tuple[np.ndarray, list[ImageInput]]:
        """Replace the placeholder of each image in `token_ids` with one placeholder for each token of the image. Return
        the tokens, int32, and the images with their starts. Raise InvalidRequestError unless there is one placeholder
        for each image.
        """
        tokens, placeholder = np.asarray(token_ids, np.int32), self.tower.placeholder
        if (found := int((tokens == placeholder).sum())) != len(images):
            raise InvalidRequestError(
                f"images: the prompt must have one placeholder ({placeholder}) for each of {len(images)} images (got "
                f"{found})",
                field="images",
                value=found,
                limit=len(images),
            )
        counts = np.ones(len(tokens), np.int64)
        counts[tokens == placeholder] = [self.tower.num_tokens(image.rows, image.columns) for image in images]
        starts = (counts.cumsum() - counts)[tokens == placeholder]
        placed = [replace(image, start=int(start)) for image, start in zip(images, starts, strict=True)]
        return tokens.repeat(counts), placed

    def shades(self, table: np.ndarray) -> np.ndarray:
        """Return the 8-bit shades, uint8 [channels, 256], from which the processor computes the values in `table`.
        `table`: the table of an `ImageInput`, [channels, 256].
        """
        own = self._processor
        mean, std = (np.reshape(each, (-1, 1)) for each in (own.image_mean, own.image_std))
        values = table * std + mean if own.do_normalize else table
        return np.clip(np.rint(values / own.rescale_factor), 0, 255).astype(np.uint8)


def image_of(made: Mapping[str, Any], tower: TowerSpec) -> ImageInput:
    """Convert the output of a transformers processor for one image to an `ImageInput` with start 0.

    `made`: the processor's output, with `pixel_values` and, if the tower takes images of any size, `image_grid_thw`.
    Raise InvalidRequestError if the output has several crops of an image, frames that differ, or more than 256 distinct
    values per channel.
    """
    pixels = np.asarray(made["pixel_values"], np.float32)
    if not tower.pooled:
        _, rows, columns = (int(each) for each in made["image_grid_thw"][0])
        return ImageInput(0, rows, columns, *_as_levels(_first_frames(pixels, tower)))
    if len(pixels) != 1:
        raise InvalidRequestError(
            f"image: the processor split the image into {len(pixels)} images; turn off do_pan_and_scan", field="image"
        )
    rows, columns, patches = patches_of_whole(pixels[0], tower)
    return ImageInput(0, rows, columns, *_as_levels(patches))


def _first_frames(pixels: np.ndarray, tower: TowerSpec) -> np.ndarray:
    """Return the first frame of each patch, [patches, channels, values]. `pixels`: [patches, channels * frames *
    values]. Raise InvalidRequestError if the frames differ.
    """
    frames = pixels.reshape(len(pixels), tower.channels, tower.frames, -1)
    if not (frames == frames[:, :, :1]).all():
        raise InvalidRequestError(
            "image: the processor made several different frames from the image; give a still image", field="image"
        )
    return frames[:, :, 0]


def picture_size(image: Any) -> tuple[int, int]:
    """Return the width and height of a PIL image, or of an array uint8 [rows, columns, 3], without reading its pixels.
    Raise InvalidRequestError for an object of any other kind.
    """
    Image, _ = pillow()
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
            raise InvalidRequestError(
                f"image: an array must be uint8 [rows, columns, 3] (got {image.dtype} {list(image.shape)})",
                field="image",
            )
        return image.shape[1], image.shape[0]
    if not isinstance(image, Image.Image):
        raise InvalidRequestError(f"image: must be a PIL image or an array (got {type(image).__name__})", field="image")
    return image.size


def as_picture(image: Any) -> Any:
    """Return `image` as a PIL image. Processors guess the meaning of an array's axes, so arrays are converted to PIL
    images before a processor gets them. Raise InvalidRequestError in the same cases as `picture_size`.
    """
    picture_size(image)
    return pillow()[0].fromarray(image) if isinstance(image, np.ndarray) else image


def patches_of_whole(pixels: np.ndarray, tower: TowerSpec) -> tuple[int, int, np.ndarray]:
    """Split an image, [channels, height, width], into patches. Return the number of rows of patches, the number of
    columns of patches, and the patches themselves, [patches, channels, values]. The patches are ordered by blocks of
    `tower.merge` x `tower.merge` patches: all patches of a block come before the patches of the next block.
    """
    size, merge = tower.patch_size, tower.merge
    channels, height, width = pixels.shape
    rows, columns = height // size, width // size
    shape = channels, rows // merge, merge, size, columns // merge, merge, size
    blocks = pixels.reshape(shape).transpose(1, 4, 2, 5, 0, 3, 6)
    return rows, columns, blocks.reshape(rows * columns, channels, size * size)


def _as_levels(patches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Convert patches, [patches, channels, values], to levels. Return the levels, uint8 [patches, channels * values],
    and the table with the value of each level, float32 [channels, 256].
    """
    count, channels, size = patches.shape
    levels, table = np.empty(patches.shape, np.uint8), np.zeros((channels, NUM_LEVELS), np.float32)
    for channel, (values, places) in enumerate(_by_channel(patches)):
        table[channel, : len(values)] = values
        levels[:, channel] = places.reshape(count, size)
    return levels.reshape(count, channels * size), table


def _by_channel(patches: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each channel, yield the distinct values in ascending order, and, for each value of the channel, the index of
    this value among the distinct values.
    """
    for channel in patches.transpose(1, 0, 2):
        values, places = np.unique(channel, return_inverse=True)
        if len(values) > NUM_LEVELS:
            raise InvalidRequestError(
                f"image: the processor made {len(values)} different values for a channel (limit {NUM_LEVELS})",
                field="image",
                value=len(values),
                limit=NUM_LEVELS,
            )
        yield values, places


def pillow() -> tuple[Any, Any]:
    """Return Pillow's modules Image and ImageOps. Raise ConfigError if Pillow is not installed."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ConfigError('images need Pillow; install it with: pip install "trueroll[vision]"') from None
    return Image, ImageOps
