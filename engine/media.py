"""Images and video frames in requests: preprocessed pixels, their place in the prompt, and the checks of pixels and
places.

Does not import torch, so that clients can use `ImageInput` without torch.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from trueroll.errors import InvalidRequestError

NUM_LEVELS = 256
_GRID = struct.Struct("<qqq")


@dataclass(frozen=True, eq=False)
class ImageInput:
    """A preprocessed image of a prompt, or a few consecutive frames of a preprocessed video.

    `start`: the index of the first token of the image; the tokens are placeholders, one for each block of patches.
    `rows`, `columns`: the size of the image, in patches. `levels`: uint8 [rows * columns, channels * frames *
    patch_size**2], the 8-bit pixels of each patch. The pixels are listed channel by channel, frame by frame and row by
    row. The patches are in the tower's order (`TowerSpec`). `table`: float32 [channels, 256]; `table[c, level]` is the
    value that the tower reads for a level of channel c. The format of `levels` and `table` is lossless, because image
    processors map each 8-bit level of a channel to one value. `frames`: the number of frames in `levels`: 1 for an
    image, and `TowerSpec.frames` for a part of a video.
    """

    start: int
    rows: int
    columns: int
    levels: np.ndarray
    table: np.ndarray
    frames: int = 1

    @cached_property
    def content_hash(self) -> bytes:
        """A 32-byte hash of the image's kind (image or video), size, table and levels. The hash includes the size,
        because images of 8 x 12 and 12 x 8 patches can have the same levels.
        """
        found = new_content_hash(self)
        for part in (self.table, self.levels):
            found.update(np.ascontiguousarray(part).data.cast("B"))
        return found.digest()

    @property
    def is_hashed(self) -> bool:
        """Whether `content_hash` is known, so that reading it takes no time."""
        return "content_hash" in vars(self)


class Placed(Protocol):
    """The place and size of an image: see `ImageInput`."""

    @property
    def start(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def frames(self) -> int: ...


def new_content_hash(image: Placed) -> Any:
    """Return a SHA-256 object of hashlib that has hashed the kind and the size of an image. After an update with the
    table and the levels, the object's digest is `ImageInput.content_hash`.
    """
    kind = b"image" if image.frames == 1 else b"video"
    return hashlib.sha256(kind + _GRID.pack(image.frames, image.rows, image.columns))


class Tower(Protocol):
    """The properties of a vision tower that the checks of images read: see `kernels.specs.TowerSpec`."""

    @property
    def placeholder(self) -> int: ...
    @property
    def video_placeholder(self) -> int | None: ...
    @property
    def frames(self) -> int: ...
    @property
    def patch_size(self) -> int: ...
    @property
    def merge(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def sees_span(self) -> bool: ...
    @property
    def grid(self) -> tuple[int, int] | None: ...

    def num_tokens(self, rows: int, columns: int) -> int: ...


@dataclass(frozen=True)
class ImageLimits:
    """The limits on the images of a request. `tower`: the tower that encodes images, or None. `max_images`,
    `max_image_patches`: as in `EngineConfig`.
    """

    tower: Tower | None
    max_images: int
    max_image_patches: int

    def check(self, images: Sequence[Placed], token_ids: np.ndarray) -> Tower:
        """Raise InvalidRequestError unless the images of a prompt are sorted and disjoint, fit the tower, cover
        placeholders only, and are within the limits. Return the tower.

        A patch counts once, whatever its number of frames, because the tower's work per patch is the same.
        """
        if self.tower is None or len(images) > self.max_images:
            raise InvalidRequestError(
                f"images: a prompt may have at most {self.max_images} images (got {len(images)}); raise max_images",
                field="images",
                value=len(images),
                limit=self.max_images,
            )
        before = 0
        for i, image in enumerate(images):
            before = _check_place(f"images[{i}]", image, token_ids, self.tower, self.max_image_patches, before)
        return self.tower


def _check_place(field: str, image: Placed, token_ids: np.ndarray, tower: Tower, most_patches: int, before: int) -> int:
    """Check the size and the tokens of an image. `before`: the end of the previous image; 0 for the first image. Return
    the end of the image.
    """
    _check_size(field, image, tower, most_patches)
    end = image.start + tower.num_tokens(image.rows, image.columns)
    if not before <= image.start < end <= len(token_ids):
        raise InvalidRequestError(
            f"{field}: the tokens [{image.start}, {end}) overlap the previous image or exceed the prompt's "
            f"{len(token_ids)} tokens; give sorted images that do not overlap",
            field=field,
        )
    if tower.sees_span and before and image.start == before:
        raise InvalidRequestError(
            f"{field}: the image begins where the previous image ends, and this model would treat both as one "
            "image; put a token between them",
            field=field,
        )
    placeholder = tower.placeholder if image.frames == 1 else tower.video_placeholder
    others = np.flatnonzero(token_ids[image.start : end] != placeholder)
    if len(others):
        place = image.start + int(others[0])
        raise InvalidRequestError(
            f"{field}: the token at index {place} must be the placeholder {placeholder} (got {token_ids[place]})",
            field=field,
            value=int(token_ids[place]),
        )
    return end


def _check_size(field: str, image: Placed, tower: Tower, most_patches: int) -> None:
    if type(image.start) is not int:
        raise InvalidRequestError(f"{field}: start must be an integer (got {image.start!r})", field=field)
    _check_frames(field, image, tower)
    sizes = image.rows, image.columns
    is_whole = all(type(size) is int and size >= tower.merge and size % tower.merge == 0 for size in sizes)
    if not is_whole or (tower.grid is not None and sizes != tower.grid):
        wanted = f"multiples of {tower.merge}" if tower.grid is None else f"{tower.grid[0]} and {tower.grid[1]}"
        raise InvalidRequestError(
            f"{field}: rows and columns of patches must be {wanted} (got {image.rows} and {image.columns})", field=field
        )
    if (count := image.rows * image.columns) > most_patches:
        raise InvalidRequestError(
            f"{field}: an image may have at most {most_patches} patches (got {count}); give a smaller image",
            field=field,
            value=count,
            limit=most_patches,
        )


def _check_frames(field: str, image: Placed, tower: Tower) -> None:
    known = (1,) if tower.video_placeholder is None else (1, tower.frames)
    if type(image.frames) is not int or image.frames not in known:
        limit = "takes no videos" if len(known) == 1 else f"takes videos in parts of {tower.frames} frames"
        raise InvalidRequestError(
            f"{field}: frames must be {' or '.join(map(str, known))} (got {image.frames!r}), because this model "
            f"{limit}",
            field=field,
        )


def check_pixels(images: Sequence[ImageInput], tower: Tower) -> None:
    """Raise InvalidRequestError unless the arrays of each image fit the image's size, and all tables are finite."""
    for i, image in enumerate(images):
        _check_arrays(f"images[{i}]", image, tower)


def _check_arrays(field: str, image: ImageInput, tower: Tower) -> None:
    values = tower.channels * image.frames * tower.patch_size**2
    shapes = {
        "levels": (image.levels, np.uint8, (image.rows * image.columns, values)),
        "table": (image.table, np.float32, (tower.channels, NUM_LEVELS)),
    }
    for name, (found, dtype, shape) in shapes.items():
        if not isinstance(found, np.ndarray) or found.dtype != dtype or found.shape != shape:
            got = (
                f"{found.dtype} of shape {list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__
            )
            raise InvalidRequestError(
                f"{field}: {name} must be a {np.dtype(dtype)} array of shape {list(shape)} (got {got})", field=field
            )
    if not np.isfinite(image.table).all():
        raise InvalidRequestError(f"{field}: table has values that are not finite", field=field)
