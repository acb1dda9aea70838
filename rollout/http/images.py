"""Images of requests: read each image within bounds, process it once with the model's own image processor, and insert
it into the prompt.

Owns: the threads that process images, and the count of the bytes of all images in memory. Guarantees that the front end
never fetches an image, that work on images never blocks the event loop, and that the images of open requests take at
most `max_image_bytes`.
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import logging
import os
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import Field

from trueroll.errors import ConfigError, InvalidRequestError, ModelError, TruerollError

from ...engine.media import NUM_LEVELS, ImageInput, ImageLimits, Placed, check_pixels
from ...engine.request import MAX_SPANS
from ...kernels.specs import TowerSpec
from ..images import ImageProcessor, open_image, tower_of
from ..protocol.content import Frames, Patches
from .config import HttpConfig
from .errors import RETRY_AFTER_SECONDS, HttpError
from .fields import Fields
from .thumbnails import thumbnail

T = TypeVar("T")
MOST_THREADS = 4
RECENT_SHARE = 8
"""The images that were processed last take at most 1 / RECENT_SHARE of `max_image_bytes`."""
TYPES = ("png", "jpeg", "jpg", "webp")
_URL = re.compile(rf"data:image/(?:{'|'.join(TYPES)});base64,", re.IGNORECASE)
_STEP_CHARS = 2**18
"""Number of characters of base64 that are decoded in one step. Other threads can run between two steps."""
_PART_TOKENS = 2**14

log = logging.getLogger(__name__)


class ImageFields(Fields):
    """A processed image in a request: the fields of `ImageInput`. `levels`, `table`: the bytes of the arrays in base64;
    `table` is in little-endian order.
    """

    start: Annotated[int, Field(ge=0, lt=2**31)]
    rows: Patches
    columns: Patches
    levels: str
    table: str
    frames: Frames = 1


ImageList = Annotated[list[ImageFields], Field(max_length=MAX_SPANS, fail_fast=True)]


@dataclass(frozen=True)
class ImageUrl:
    """A `data:` URL in a request. `where`: the position of the URL in the request, for error texts."""

    where: str
    url: str


@dataclass(frozen=True)
class Prompt:
    """A prompt with its images. `told`: the position and the hash of each image, as written to the answer."""

    token_ids: list[int]
    images: tuple[ImageInput, ...] = ()
    told: tuple[dict[str, Any], ...] = ()


class ImageMemory:
    """Counts the bytes of images in memory. Thread-safe. `most`: maximum number of bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[int, int] = {}
        self._keys = count()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """The number of bytes that images in memory use now."""
        return sum([*self._held.values()])

    def hold(self, array: np.ndarray, num_bytes: int) -> None:
        """Count `num_bytes` as used until `array` is garbage-collected. Raise HttpError if `most` would be exceeded."""
        weakref.finalize(array, self._held.pop, self._add(num_bytes), None).atexit = False

    @contextmanager
    def room(self, num_bytes: int) -> Iterator[None]:
        """Context manager that counts `num_bytes` as used until exit. Raise HttpError if `most` would be exceeded."""
        key = self._add(num_bytes)
        try:
            yield
        finally:
            del self._held[key]

    def _add(self, num_bytes: int) -> int:
        with self._lock:
            if self.num_bytes + num_bytes > self._most:
                raise HttpError(
                    429,
                    f"images: the images of all open requests need more than {self._most} bytes; try again later, "
                    "send smaller images, or raise --max-image-bytes",
                    limit=self._most,
                    code="images_full",
                    headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
                    setting="max_image_bytes",
                )
            key = next(self._keys)
            self._held[key] = num_bytes
            return key


class RecentImages:
    """The most recently processed images, by the hash of their URL. Thread-safe. `most`: maximum total size of these
    images, in bytes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._images: OrderedDict[bytes, ImageInput] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: bytes) -> ImageInput | None:
        with self._lock:
            if key in self._images:
                self._images.move_to_end(key)
            return self._images.get(key)

    def add(self, key: bytes, image: ImageInput) -> None:
        """Add an image, and drop the least recently used images while the total size exceeds the limit."""
        with self._lock:
            if key not in self._images:
                self._images[key] = image
                self._num_bytes += num_bytes(image)
            while self._num_bytes > self._most:
                self._num_bytes -= num_bytes(self._images.popitem(last=False)[1])


class Images:
    """Reads the images of requests, and prepares them as inputs of one model.

    `model`: name or path of the model. `max_images`, `max_image_patches`: settings of the worker.
    """

    def __init__(self, model: str, max_images: int, max_image_patches: int, config: HttpConfig) -> None:
        self._max_images, self._max_patches, self._max_pixels = max_images, max_image_patches, config.max_image_pixels
        self.memory = ImageMemory(config.max_image_bytes)
        self._recent = RecentImages(config.max_image_bytes // RECENT_SHARE)
        self._threads = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "images")
        self._tower: TowerSpec | None = None
        self._processor: ImageProcessor | None = None
        self._fault: TruerollError | None = None
        if max_images:
            self._load(model)

    def _load(self, model: str) -> None:
        try:
            self._tower = tower_of(model)
            self._processor = ImageProcessor(model)
        except (ConfigError, ModelError) as error:
            log.warning("requests with images will be refused: %s", error)
            self._fault = error

    @property
    def placeholder(self) -> int:
        """The token id of the model's image placeholder. Raise HttpError if the model's vision tower is not known."""
        return self._found(self._tower).placeholder

    def check_count(self, num_images: int, where: str) -> None:
        """Raise HttpError if a prompt has more images than the worker accepts. `where`: the request field with the
        images.
        """
        most = self._max_images
        if num_images <= most:
            return
        if most:
            text = f"{num_images} images are too many (limit {most}, the worker's max_images); send fewer images"
        else:
            text = "the worker takes no images; start it with a model that has a vision tower, and with --max-images"
        raise HttpError(400, f"{where}: {text}", field=where, value=num_images, limit=most)

    async def open(self, urls: Sequence[ImageUrl], salt: str | None) -> list[ImageInput]:
        """Return the preprocessed images of `data:` URLs. An image that was preprocessed a short time ago is not
        preprocessed again. `salt`: only requests with the same salt share preprocessed images.

        Raise HttpError if a URL is not a `data:` URL, if its data is not an image, or if an image has too many pixels,
        patches or bytes.
        """
        processor = self._found(self._processor)
        with self.memory.room(sum(len(each.url) for each in urls)):
            return [await self._in_thread(partial(self._opened, processor, each, salt or "")) for each in urls]

    async def expand(self, token_ids: list[int], images: list[ImageInput]) -> Prompt:
        """Return the prompt in which each placeholder is replaced by as many placeholders as its image has tokens.

        Raise InvalidRequestError if the images do not fit the model.
        """
        return await self._in_thread(partial(self._expanded, self._found(self._processor), token_ids, images))

    async def receive(self, token_ids: list[int], fields: list[ImageFields]) -> Prompt:
        """Return a prompt with images that the client has already processed.

        Raise HttpError or InvalidRequestError if the images are invalid or do not fit the model and the prompt.
        """
        if not fields:
            return Prompt(token_ids)
        self.check_count(len(fields), "images")
        tower = self._found(self._tower)
        tokens = await self._in_thread(partial(self._checked, tower, token_ids, fields))
        with self.memory.room(sum(len(each.levels) for each in fields)):
            images = [await self._in_thread(partial(self._received, i, each)) for i, each in enumerate(fields)]
        return await self._in_thread(partial(_placed, tower, tokens, images))

    async def thumbnails(self, images: Sequence[ImageInput]) -> list[bytes]:
        """Return a small PNG picture of each image, made from the pixels that the vision tower reads. Return an empty
        list if the model's image processor is not available on this machine.
        """
        if self._processor is None:
            return []
        make = partial(thumbnail, tower=self._processor.tower, shades=self._processor.shades)
        return [await self._in_thread(partial(make, image)) for image in images]

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _found(self, part: T | None) -> T:
        """Return `part`, a component that requests with images need. Raise HttpError if the front end could not load
        the part.
        """
        if part is None:
            raise HttpError(501, f"images: {self._fault}", code="images_unavailable")
        return part

    def _opened(self, processor: ImageProcessor, given: ImageUrl, salt: str) -> ImageInput:
        hashed = hashlib.sha256(f"{salt} ".encode())
        hashed.update(given.url.encode())
        if (known := self._recent.get(key := hashed.digest())) is not None:
            return known
        data = _data_of(given)
        try:
            image = processor.process(open_image(data, self._max_pixels), self._max_pixels)
        except InvalidRequestError as error:
            text = f"{given.where}: {str(error).removeprefix('image: ')}"
            raise HttpError(400, text, field=given.where, value=error.value, limit=error.limit) from None
        if (patches := image.rows * image.columns) > self._max_patches:
            raise HttpError(
                400,
                f"{given.where}: the image has {patches} patches (limit {self._max_patches}, the worker's "
                "max_image_patches); send a smaller image",
                field=given.where,
                value=patches,
                limit=self._max_patches,
            )
        self.memory.hold(image.levels, num_bytes(image))
        self._recent.add(key, image)
        return image

    def _expanded(self, processor: ImageProcessor, token_ids: list[int], images: list[ImageInput]) -> Prompt:
        tokens, placed = processor.expand(token_ids, images)
        return _placed(processor.tower, self._checked(processor.tower, tokens, placed), placed)

    def _checked(self, tower: TowerSpec, token_ids: Sequence[int] | np.ndarray, images: Sequence[Placed]) -> np.ndarray:
        """Return the tokens of a prompt as an array. Raise InvalidRequestError if the positions or the sizes of the
        images in the prompt are invalid.
        """
        tokens = np.asarray(token_ids, np.int32)
        ImageLimits(tower, self._max_images, self._max_patches).check(images, tokens)
        return tokens

    def _received(self, i: int, given: ImageFields) -> ImageInput:
        levels = np.frombuffer(_decoded(f"images[{i}].levels", given.levels), np.uint8)
        table = np.frombuffer(_decoded(f"images[{i}].table", given.table), np.uint8)
        if levels.size % (given.rows * given.columns):
            text = f"{levels.size} bytes cannot be divided among {given.rows} * {given.columns} patches"
            raise _invalid(f"images[{i}].levels", f"{text}; send the levels of all patches")
        if table.size % (4 * NUM_LEVELS):
            text = f"{table.size} bytes are not float32 [channels, {NUM_LEVELS}]; send the whole table"
            raise _invalid(f"images[{i}].table", text)
        image = ImageInput(
            start=given.start,
            rows=given.rows,
            columns=given.columns,
            levels=levels.reshape(given.rows * given.columns, -1),
            table=table.view("<f4").reshape(-1, NUM_LEVELS),
            frames=given.frames,
        )
        self.memory.hold(image.levels, num_bytes(image))
        return image

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` on one of the threads that process images. If this coroutine is cancelled, pending work never
        starts.
        """
        waiting = [work]
        try:
            return await asyncio.wrap_future(self._threads.submit(lambda: waiting.pop()()))
        finally:
            waiting.clear()  # the pool keeps a cancelled call in its queue, but must not keep the image in memory


def _placed(tower: TowerSpec, tokens: np.ndarray, images: Sequence[ImageInput]) -> Prompt:
    check_pixels(images, tower)
    told = [
        {
            "start": image.start,
            "end": image.start + tower.num_tokens(image.rows, image.columns),
            "hash": image.content_hash.hex(),
        }
        for image in images
    ]
    parts = (tokens[at : at + _PART_TOKENS].tolist() for at in range(0, len(tokens), _PART_TOKENS))
    return Prompt([token for part in parts for token in part], tuple(images), tuple(told))


def num_bytes(image: ImageInput) -> int:
    """Return the size of an image in memory, in bytes."""
    return image.levels.nbytes + image.table.nbytes


def _data_of(given: ImageUrl) -> bytes:
    """Return the file in a `data:` URL."""
    if (head := _URL.match(given.url)) is None:
        raise _invalid(
            given.where,
            f"the URL {given.url[:40]!r} is not supported, and nothing was fetched; send the image in the request, as "
            "data:image/png;base64,... (or jpeg, or webp)",
        )
    return _decoded(given.where, given.url, head.end())


def _decoded(where: str, text: str, start: int = 0) -> bytes:
    """Decode the base64 text that begins at position `start` of `text`. Raise HttpError if this text is not valid
    base64.
    """
    try:
        # Python's strict mode accepts padding that is too long.
        if (len(text) - start) % 4 or 0 <= text.find("=", start, len(text) - 2):
            raise ValueError("wrong padding")
        steps = (text[at : at + _STEP_CHARS] for at in range(start, len(text), _STEP_CHARS))
        parts = [binascii.a2b_base64(step, strict_mode=True) for step in steps]
    except ValueError as error:
        raise _invalid(where, f"the text is not valid base64 ({str(error)[:100]}); correct the encoding") from None
    return b"".join(parts)


def _invalid(where: str, text: str) -> HttpError:
    return HttpError(400, f"{where}: {text}", field=where, code="invalid_request")
