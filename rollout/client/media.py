"""Prompts and their images: what callers may pass as `media`, and what workers get.

Owns: the check of `media`, and the guarantee that an image is preprocessed only once. Does not own: how an image is
preprocessed (`rollout.images`), or when its pixels are sent (`connection`). Imports torch and transformers only when an
image must be preprocessed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np
from pydantic import ValidationError

from trueroll.errors import ConfigError, InvalidRequestError, TruerollError, WorkerFailedError, brief

from ...engine.media import NUM_LEVELS, ImageInput
from ...engine.request import from_validation
from .. import protocol

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..images import ImageProcessor

Prompts: TypeAlias = Sequence[Sequence[int] | np.ndarray]
Media: TypeAlias = "Sequence[Sequence[Image | np.ndarray | ImageInput]] | None"
LOOK_SECONDS = 0.2
"""Time between two health checks of a worker that is loading its model, in seconds."""


@dataclass(frozen=True)
class Prompt:
    """A prompt for a worker. `token_ids`: an int32 array, with a placeholder for each token of an image. `images`: the
    images of the prompt, sorted by the positions at which they start. `refs`: the `ImageRef` of each image.
    """

    token_ids: bytes
    images: tuple[ImageInput, ...] = ()
    refs: tuple[protocol.ImageRef, ...] = ()


def contents(prompts: Iterable[Prompt | TruerollError]) -> dict[bytes, ImageInput]:
    """Return the images of prompts, by content hash."""
    made = [prompt for prompt in prompts if isinstance(prompt, Prompt)]
    return {ref.content_hash: image for prompt in made for ref, image in zip(prompt.refs, prompt.images, strict=True)}


class PromptMaker:
    """Makes the prompts of a client's calls. Preprocesses images with the image processor of the worker's model. The
    image processor is loaded when the first image must be preprocessed.

    `processor`: the image processor to use; None: the image processor in the folder of the worker's model. `health`: a
    function that returns the worker's health.
    """

    def __init__(self, processor: ImageProcessor | None, health: Callable[[], Awaitable[protocol.Health]]) -> None:
        self._processor = processor
        self._health = health
        self._loading = asyncio.Lock()

    @overload
    async def make(self, prompts: Prompts, media: Media, field: str) -> list[Prompt]: ...

    @overload
    async def make(
        self, prompts: Prompts, media: Media, field: str, errors: str
    ) -> list[Prompt | InvalidRequestError]: ...

    async def make(self, prompts: Prompts, media: Media, field: str, errors: str = "raise") -> list[Any]:
        """Return a prompt for each element of `prompts`.

        `media`: None, or for each prompt a sequence of its images. Either all images of a prompt are preprocessed
        (`ImageInput`), or none of them. An image that is not preprocessed is a PIL image or an array, uint8 [rows,
        columns, 3], and has one placeholder in the prompt. An image object that occurs several times is preprocessed
        once. `field`: the name of the argument `prompts`, for error texts.

        If `errors` is `raise`, raise InvalidRequestError for an invalid prompt or image. If `errors` has another value,
        the returned list has the InvalidRequestError in place of the invalid prompt. Raise ConfigError if the worker's
        model is not on this machine, WorkerFailedError if the worker could not load its model, and ModelError if the
        model takes no images.
        """
        given = _listed(prompts, field)
        all_images = [()] * len(given) if media is None else _checked_media(media, len(given), field)
        made: list[Any] = []
        processed: dict[int, ImageInput] = {}
        for i, (tokens, images) in enumerate(zip(given, all_images, strict=True)):
            try:
                made.append(await self._make_one(i, tokens, images, field, processed))
            except InvalidRequestError as error:
                if errors == "raise":
                    raise
                made.append(error)
        return made

    async def _make_one(
        self,
        i: int,
        tokens: Sequence[int] | np.ndarray,
        images: Sequence[Any],
        field: str,
        processed: dict[int, ImageInput],
    ) -> Prompt:
        token_ids = protocol.tokens_to_bytes(tokens, f"{field}[{i}]")
        if not images:
            return Prompt(token_ids)
        num_processed = sum(isinstance(image, ImageInput) for image in images)
        if num_processed == len(images):
            if all(image.is_hashed for image in images):
                return _of_processed(i, token_ids, images)
            return await asyncio.to_thread(_of_processed, i, token_ids, images)
        if num_processed:
            text = f"media[{i}]: {num_processed} of {len(images)} images are processed; process all images of a prompt"
            raise InvalidRequestError(f"{text}, or none", field=f"media[{i}]", value=num_processed)
        processor = await self._find_processor()
        return await asyncio.to_thread(_of_raw, i, token_ids, images, field, processor, processed)

    async def _find_processor(self) -> ImageProcessor:
        async with self._loading:
            if self._processor is None:
                model = _folder_of(await self._wait_until_loaded())
                self._processor = await asyncio.to_thread(_load, model)
        return self._processor

    async def _wait_until_loaded(self) -> dict[str, Any]:
        while (health := await self._health()).engine is None:
            if health.state == "failed":
                raise WorkerFailedError("media: the worker could not load its model; see the worker's log")
            await asyncio.sleep(LOOK_SECONDS)
        return health.engine


def _listed(sequences: Prompts, field: str) -> list[Sequence[int] | np.ndarray]:
    """Return the sequences as a list. Raise InvalidRequestError for a string and for a 2-D array. A 2-D array has
    padding, which would be treated as tokens.
    """
    if isinstance(sequences, str) or getattr(sequences, "ndim", 1) > 1:
        found = type(sequences).__name__
        raise InvalidRequestError(
            f"{field}: must be a list of token id sequences without padding (got a {found}); "
            "for padded rows give [row[mask].tolist() for row, mask in zip(input_ids, attention_mask.bool())]",
            field=field,
        )
    return list(sequences)


def _checked_media(media: Any, count: int, field: str) -> list[Sequence[Any]]:
    if not isinstance(media, Sequence) or len(media) != count:
        found = len(media) if isinstance(media, Sequence) else type(media).__name__
        text = f"media: must have a list of images for each of {count} {field} (got {found})"
        raise InvalidRequestError(text, field="media", value=found, limit=count)
    for i, images in enumerate(media):
        if not isinstance(images, Sequence) or isinstance(images, str | bytes):
            raise InvalidRequestError(
                f"media[{i}]: must be a list of images, which may be empty (got {type(images).__name__})",
                field=f"media[{i}]",
            )
    # Convert to lists, because a sequence may return a new object at each access.
    return [list(images) for images in media]


def _folder_of(engine: dict[str, Any]) -> str:
    """Return the folder of the worker's model. Raise ConfigError if the folder is not on this machine. The model is not
    downloaded, because a model name that a worker sends must never cause a download.
    """
    from ...engine.models.files import local_path

    model = engine.get("model")
    path = local_path(model) if isinstance(model, str) else None
    if not isinstance(model, str) or path is None or not path.is_dir():
        raise ConfigError(
            f"media: the worker serves {brief(model)}, which is not a folder on this machine; create the client with "
            "image_processor=ImageProcessor(MODEL)"
        )
    return model


def _load(model: str) -> ImageProcessor:
    from ..images import ImageProcessor

    return ImageProcessor(model)


def _of_processed(i: int, token_ids: bytes, images: Sequence[ImageInput]) -> Prompt:
    for j, image in enumerate(images):
        _check_arrays(image, f"media[{i}][{j}]", f"media[{i}]")
    return _prompt_of(i, token_ids, images)


def _of_raw(
    i: int,
    token_ids: bytes,
    pictures: Sequence[Any],
    field: str,
    processor: ImageProcessor,
    processed: dict[int, ImageInput],
) -> Prompt:
    """Preprocess the images of a prompt, and return the expanded prompt. `processed`: the images that this call has
    already preprocessed, as a map from the `id` of the caller's image object. The call keeps the caller's image objects
    alive, so that no `id` is reused.
    """
    for j, picture in enumerate(pictures):
        try:
            if id(picture) not in processed:
                processed[id(picture)] = processor.process(picture)
        except InvalidRequestError as error:
            raise error.retold(f"media[{i}][{j}]: {error}", f"media[{i}]") from None
    found = [processed[id(picture)] for picture in pictures]
    try:
        tokens, images = processor.expand(np.frombuffer(token_ids, "<i4"), found)  # type: ignore[arg-type]
    except InvalidRequestError as error:
        raise error.retold(f"{field}[{i}]: {error}", f"{field}[{i}]") from None
    return _prompt_of(i, tokens.astype("<i4").tobytes(), images)


def _prompt_of(i: int, token_ids: bytes, images: Sequence[ImageInput]) -> Prompt:
    try:
        refs = tuple(protocol.ref_of(image) for image in images)
    except ValidationError as error:
        found = from_validation(InvalidRequestError, error)
        raise found.retold(f"media[{i}]: {found}", f"media[{i}]") from None
    return Prompt(token_ids, tuple(images), refs)


def _check_arrays(image: ImageInput, where: str, field: str) -> None:
    """Raise InvalidRequestError unless the arrays of a preprocessed image match the size of the image. The worker
    checks everything that depends on the worker's model.
    """
    levels, table = (
        (each.dtype, each.shape) if isinstance(each, np.ndarray) else (None, ()) for each in (image.levels, image.table)
    )
    has_table = table[0] == np.float32 and len(table[1]) == 2 and table[1][1] == NUM_LEVELS
    has_levels = levels[0] == np.uint8 and len(levels[1]) == 2 and levels[1][0] == image.rows * image.columns
    if not (has_table and has_levels):
        raise InvalidRequestError(
            f"{where}: levels must be uint8 [{image.rows} * {image.columns}, n], and table must be float32 [channels, "
            f"{NUM_LEVELS}] (got {levels[0]} {list(levels[1])} and {table[0]} {list(table[1])}); pass the image "
            "unchanged from the image processor",
            field=field,
        )
