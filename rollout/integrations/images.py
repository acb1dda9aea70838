"""Convert the images of a trainer's prompts to the form that a worker accepts.

In a trainer's prompts, each image already has all its placeholders. The trainer preprocesses the PIL images again for
its own forward pass. Therefore this module preprocesses the images with the trainer's own processor, so that worker and
trainer get the same values. A processor gives the same values for an image alone and in a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trueroll.errors import InvalidRequestError, said

from ...engine.media import ImageInput
from ...kernels.specs import TowerSpec
from ..images import image_of, pillow

_COMPARED_BY_PIXELS = ("L", "RGB")
"""The modes of PIL images that are compared by mode, size and pixels. Images of other modes may have more data, such as
a palette, so two images of another mode count as equal only if they are the same object.
"""


class TrainerImages:
    """Preprocesses the images of prompts with a trainer's processor.

    `processor`: a processor of transformers with an image processor and a tokenizer. `tower`: the vision tower of the
    trainer's model.
    """

    def __init__(self, processor: Any, tower: TowerSpec) -> None:
        self._processor, self._tower = processor, tower

    def place(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[Sequence[Any] | None],
        options: Mapping[str, Any] | None = None,
    ) -> list[list[ImageInput]]:
        """Return the preprocessed images of each prompt, with their starts.

        `images`: for each prompt, its PIL images in order; None or an empty list for a prompt without images.
        `options`: further arguments for the processor. Equal images are preprocessed once. Raise InvalidRequestError if
        an image is not a PIL image, if the processor refuses an image, or if the placeholders of a prompt do not match
        its images.
        """
        made: dict[Any, ImageInput] = {}
        placed = []
        for i, (token_ids, pictures) in enumerate(zip(prompts, images, strict=True)):
            found = []
            for picture in pictures or ():
                key = _key(picture)
                if key not in made:
                    made[key] = self._process(picture, options or {})
                found.append(made[key])
            placed.append(_placed(f"prompts[{i}]", np.asarray(token_ids, np.int64), found, self._tower))
        return placed

    def _process(self, picture: Any, options: Mapping[str, Any]) -> ImageInput:
        try:
            made = self._processor(
                images=[[picture]], text=[self._processor.image_token], return_tensors="pt", **options
            )
        except Exception as error:
            raise InvalidRequestError(
                f"image: the trainer's processor refuses the image: {said(error)}", field="image"
            ) from error
        return image_of(made, self._tower)


def _key(picture: Any) -> Any:
    """Return a key for an image. If two images have the same key, the processor gives the same result for both."""
    Image, _ = pillow()
    if not isinstance(picture, Image.Image):
        raise InvalidRequestError(
            f"image: must be a PIL image (got {type(picture).__name__}); open it in the dataset", field="image"
        )
    if picture.mode not in _COMPARED_BY_PIXELS:
        return id(picture)
    return picture.mode, picture.size, picture.tobytes()


def _placed(name: str, token_ids: np.ndarray, images: Sequence[ImageInput], tower: TowerSpec) -> list[ImageInput]:
    """Return the images, each with the position of its first placeholder as its start. The prompt must have no
    placeholders except the placeholders of these images.
    """
    places = np.flatnonzero(token_ids == tower.placeholder)
    counts = [tower.num_tokens(image.rows, image.columns) for image in images]
    if sum(counts) != len(places):
        raise InvalidRequestError(
            f"{name}: its {len(images)} images have {sum(counts)} tokens, but the prompt has {len(places)} "
            f"placeholders ({tower.placeholder}); use the same processor for the prompts and for training",
            field=name,
            value=len(places),
            limit=sum(counts),
        )
    runs = np.split(places, np.cumsum(counts)[:-1]) if images else []
    for j, run in enumerate(runs):
        if run[-1] - run[0] + 1 != len(run):
            raise InvalidRequestError(
                f"{name}: the {len(run)} placeholders of image {j} are not consecutive; use the same processor for the "
                "prompts and for training",
                field=name,
            )
    return [replace(image, start=int(run[0])) for image, run in zip(images, runs, strict=True)]
