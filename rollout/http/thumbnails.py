"""Small pictures of processed images, for the page at `/ui`.

A picture is made from the pixels that the vision tower reads, not from the file that a client sent. Therefore, a file
with scripts, or a file that attacks a browser's decoder, never reaches a browser.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np

from ...engine.media import ImageInput
from ...kernels.specs import TowerSpec

MOST_SIDE = 96
"""Maximum width and height of a picture, in pixels."""


def thumbnail(image: ImageInput, tower: TowerSpec, shades: Callable[[np.ndarray], np.ndarray]) -> bytes:
    """Return a PNG file of the first frame of an image. `shades`: converts the table of an image to 8-bit shades, uint8
    [channels, 256].
    """
    from PIL import Image

    levels = pixels_of(image, tower)
    step = -(-max(levels.shape[:2]) // MOST_SIDE)
    small = levels[::step, ::step]
    picture = Image.fromarray(shades(image.table)[np.arange(tower.channels), small])
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def pixels_of(image: ImageInput, tower: TowerSpec) -> np.ndarray:
    """Return the 8-bit pixels (`ImageInput.levels`) of an image's first frame as uint8 [height, width, channels]."""
    size, merge = tower.patch_size, tower.merge
    blocks = image.rows // merge, image.columns // merge
    patches = image.levels.reshape(*blocks, merge, merge, tower.channels, image.frames, size, size)[..., 0, :, :]
    return patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(image.rows * size, image.columns * size, tower.channels)
