"""Images in messages: a request names its images, and the worker asks for the pixels that it lacks.

A request contains an `ImageRef` for each image: the image's position in the prompt, its size, and a hash of its
content. If the worker lacks an image's content, it sends a `NeedImage` for each part of the content, and the client
answers each `NeedImage` with a `PutImage`. So a repeated image costs only the bytes of its `ImageRef`, and no message
is large.

The content of an image is its float32 table, followed by its uint8 levels (see `ImageInput`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import numpy as np
from pydantic import FailFast, Field

from ...engine.media import NUM_LEVELS, ImageInput, Tower
from ...engine.request import HASH_BYTES, MAX_SPANS
from ...weight_sync.payload.messages import Count, Id, Message

MOST_PART_BYTES = 2**20
"""The maximum size of a part of an image's content."""
ContentHash = Annotated[bytes, Field(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Patches = Annotated[int, Field(ge=1, le=2**20)]
Frames = Annotated[int, Field(ge=1, le=16)]


class ImageRef(Message):
    """An image of a prompt. `start`, `rows`, `columns`, `frames`, `content_hash`: as in `ImageInput`."""

    start: Count
    rows: Patches
    columns: Patches
    frames: Frames = 1
    content_hash: ContentHash


ImageRefs: TypeAlias = Annotated[tuple[ImageRef, ...], FailFast(), Field(max_length=MAX_SPANS)]


class NeedImage(Message):
    """Ask a client for bytes [start, start + num_bytes) of the content of an image of request `id`.

    `caller`: the caller that submitted the request.
    """

    type: Literal["need_image"] = "need_image"
    id: Id
    content_hash: ContentHash
    start: Count
    num_bytes: Annotated[int, Field(ge=1, le=MOST_PART_BYTES)]
    caller: Id | None = None


class PutImage(Message):
    """The answer to a `NeedImage`: the requested bytes. There is no reply. A worker ignores bytes that it did not
    request from the client on this connection.
    """

    type: Literal["put_image"] = "put_image"
    id: Id
    content_hash: ContentHash
    start: Count
    data: Annotated[bytes, Field(min_length=1, max_length=MOST_PART_BYTES)]


def ref_of(image: ImageInput) -> ImageRef:
    """Return the reference to an image."""
    place = dict(start=image.start, rows=image.rows, columns=image.columns, frames=image.frames)
    return ImageRef(**place, content_hash=image.content_hash)


def part_of(image: ImageInput, start: int, num_bytes: int) -> bytes:
    """Return bytes [start, start + num_bytes) of an image's content. The result is shorter if the content ends
    earlier.
    """
    table = np.ascontiguousarray(image.table, "<f4").data.cast("B")
    levels = np.ascontiguousarray(image.levels).data.cast("B")
    end = start + num_bytes
    first = bytes(table[start:end])
    return first + bytes(levels[max(0, start - len(table)) : max(0, end - len(table))])


def num_content_bytes(ref: ImageRef, tower: Tower) -> int:
    """Return the size of an image's content."""
    return tower.channels * (4 * NUM_LEVELS + ref.rows * ref.columns * ref.frames * tower.patch_size**2)


def image_of(ref: ImageRef, content: bytearray, tower: Tower) -> ImageInput:
    """Return an image from its content, with the hash that `ref` names. The arrays share the memory of `content`."""
    split = 4 * NUM_LEVELS * tower.channels
    table = np.frombuffer(content, "<f4", split // 4).reshape(tower.channels, NUM_LEVELS)
    levels = np.frombuffer(content, np.uint8, offset=split).reshape(ref.rows * ref.columns, -1)
    image = ImageInput(ref.start, ref.rows, ref.columns, levels, table, ref.frames)
    vars(image)["content_hash"] = ref.content_hash  # so that the hash is not computed again
    return image


def content_of_images(images: Sequence[ImageRef]) -> bytes:
    """Return bytes that identify the images of a prompt; empty if the prompt has no images."""
    return b"".join(image.content_hash for image in images)
