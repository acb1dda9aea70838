"""The images of a trainer's batch: where their tokens are, and the values of their patches.

This module checks the images that come with a batch. Images have two sources: preprocessed images, as workers get them,
and the output of an image processor of transformers (`read_pixels`). The tokens of images are spans that the caller
gives or that token types mark. A placeholder that the model sampled counts as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from trueroll.errors import AlignmentError, brief

from .media import Image, ImageSpan, axis_positions, patches_of, span_ends
from .packed import Packed
from .specs import DecoderSpec, TowerSpec

Media: TypeAlias = Sequence[Sequence[Image]] | Mapping[str, Tensor | None]
"""The images of a batch, in one of two forms: a list of preprocessed images for each sequence, with starts that count
the tokens of the sequence; or a map with the output of an image processor of transformers, by the names in
`FROM_PROCESSORS`.
"""
FROM_PROCESSORS = ("pixel_values", "image_grid_thw", "mm_token_type_ids", "token_type_ids")
_NUM_LEVELS = 256
_IMAGE_TYPE = 1
"""The type of the tokens of an image among a processor's token types."""
_Grid: TypeAlias = tuple[int, int]


class PackedImages:
    """The images of packed sequences with `M` tokens. There is at least one image.

    `spans`: the spans of the images in each sequence. `patches`: float32 [patches of all images, patch_values], image
    by image. `grids`: the rows and columns of patches of each image. `places`: int64 [tokens of all images], the
    indices of the images' tokens among the M tokens.

    The class is neither a dataclass nor a tuple, so that a `PackedImages` passes through wrappers of models unchanged.
    """

    def __init__(
        self, spans: Sequence[Sequence[ImageSpan]], packed: Packed, patches: Tensor, grids: Sequence[_Grid]
    ) -> None:
        self.spans, self.patches, self.grids = spans, patches, grids
        self._packed = packed
        tokens = [torch.arange(start + s.start, start + s.end) for start, own in self._sequences() for s in own]
        self.places = torch.cat(tokens).to(patches.device)

    def _sequences(self) -> list[tuple[int, Sequence[ImageSpan]]]:
        return list(zip(self._packed.batch.query_starts, self.spans, strict=False))

    def positions(self) -> Tensor:
        """Return the positions of all tokens in time, row and column: int64 [3, M]."""
        pairs = zip(self._packed.lens, self.spans, strict=True)
        return torch.cat([axis_positions(length, spans) for length, spans in pairs], 1).to(self.places.device)

    def see_spans(self) -> Packed:
        """Return the sequences with `ends` set so that the tokens of an image see the whole image."""
        pairs = zip(self._packed.lens, self.spans, strict=True)
        ends = torch.cat([span_ends(length, spans) for length, spans in pairs])
        return Packed(self._packed.lens, self._packed.positions, ends.to(self.places.device))


def has_axes(spec: DecoderSpec) -> bool:
    """Return whether the positions of a decoder's tokens have the axes time, row and column."""
    return any(rotation.axes for rotation in spec.rotations)


def read_media(
    media: Media | None, spec: DecoderSpec, token_ids: Tensor, indices: Tensor, packed: Packed, shape: torch.Size
) -> PackedImages | None:
    """Return the images of a batch, or None if there is none.

    `token_ids`: int64 [M], the tokens of all sequences in `packed`. In a batch of this `shape`, the tokens are at the
    flat `indices`. Raise AlignmentError for a model without a vision tower, and for images that do not fit the model or
    the tokens.
    """
    if media is None:
        return None
    if spec.tower is None:
        raise AlignmentError(f"media must be None for {spec.architecture}, which has no vision tower; leave it out")
    if not isinstance(media, Mapping):
        return _read_images(media, spec.tower, token_ids, packed)
    if unknown := media.keys() - set(FROM_PROCESSORS):
        raise AlignmentError(
            f"media has unknown keys: {', '.join(map(brief, sorted(unknown)))}; pass {', '.join(FROM_PROCESSORS)} of "
            "an image processor"
        )
    return read_pixels(media, spec.tower, token_ids, indices, packed, shape)


def _read_images(
    media: Sequence[Sequence[Image]], tower: TowerSpec, token_ids: Tensor, packed: Packed
) -> PackedImages | None:
    if len(media) != len(packed.lens):
        raise AlignmentError(
            f"media must have one entry for each of {len(packed.lens)} sequences (got {len(media)}); pass an empty "
            "list for a sequence without images"
        )
    for i, images in enumerate(media):
        for j, image in enumerate(images):
            _check_image(f"media[{i}][{j}]", image, tower)
    spans = [
        [ImageSpan(each.start, each.rows // tower.merge, each.columns // tower.merge) for each in m] for m in media
    ]
    every = [image for images in media for image in images]
    if not every:
        return None
    for i, (own, ids) in enumerate(zip(spans, token_ids.split(list(packed.lens)), strict=True)):
        placeholders = [tower.placeholder if image.frames == 1 else tower.video_placeholder for image in media[i]]
        _check_spans(f"media[{i}]", own, placeholders, tower, ids)
    patches = torch.cat([patches_of(image, tower, torch.float32, token_ids.device) for image in every])
    return PackedImages(spans, packed, patches, [(image.rows, image.columns) for image in every])


def _check_image(name: str, image: Image, tower: TowerSpec) -> None:
    """Raise AlignmentError unless the image has the size, dtypes and shapes that the tower takes."""
    numbers = image.start, image.rows, image.columns, image.frames
    if not all(type(number) is int for number in numbers):
        raise AlignmentError(f"{name}: start, rows, columns and frames must be integers (got {brief(numbers)})")
    known = (1,) if tower.video_placeholder is None else (1, tower.frames)
    if image.frames not in known:
        limit = "takes no videos" if len(known) == 1 else f"takes videos in parts of {tower.frames} frames"
        raise AlignmentError(
            f"{name}: frames must be {' or '.join(map(str, known))} (got {image.frames}), because this model {limit}"
        )
    _check_grid(name, (image.rows, image.columns), tower)
    values = tower.channels * image.frames * tower.patch_size**2
    shapes = {
        "levels": (image.levels, "uint8", (image.rows * image.columns, values)),
        "table": (image.table, "float32", (tower.channels, _NUM_LEVELS)),
    }
    for part, (found, dtype, shape) in shapes.items():
        got = str(getattr(found, "dtype", type(found).__name__)), list(getattr(found, "shape", ()))
        if got != (dtype, list(shape)):
            raise AlignmentError(
                f"{name}: {part} must be a {dtype} array of shape {list(shape)} (got {got[0]} of shape {got[1]}); pass "
                "the image that the worker got"
            )
    if not torch.tensor(image.table).isfinite().all():
        raise AlignmentError(f"{name}: table has values that are not finite; pass the image that the worker got")


def _check_grid(name: str, grid: _Grid, tower: TowerSpec) -> None:
    is_whole = all(size >= tower.merge and size % tower.merge == 0 for size in grid)
    if not is_whole or (tower.grid is not None and grid != tower.grid):
        wanted = f"multiples of {tower.merge}" if tower.grid is None else f"{tower.grid[0]} and {tower.grid[1]}"
        raise AlignmentError(
            f"{name}: rows and columns of patches must be {wanted} (got {grid[0]} and {grid[1]}); use the image "
            "processor of this model"
        )


def _check_spans(
    name: str, spans: Sequence[ImageSpan], placeholders: Sequence[int | None], tower: TowerSpec, token_ids: Tensor
) -> None:
    """Raise AlignmentError unless the spans of a sequence are in order, do not overlap, and cover placeholders.
    `placeholders`: the placeholder of each span.
    """
    before = 0
    for j, (span, placeholder) in enumerate(zip(spans, placeholders, strict=True)):
        if not before <= span.start < span.end <= len(token_ids):
            raise AlignmentError(
                f"{name}[{j}]: the tokens [{span.start}, {span.end}) overlap the previous image or exceed the "
                f"sequence's {len(token_ids)} tokens; pass images in ascending order, with the `start` values that the "
                "worker got"
            )
        if tower.sees_span and j and span.start == before:
            raise AlignmentError(
                f"{name}[{j}]: the image begins where the previous image ends, which no worker accepts for this model"
            )
        others = (token_ids[span.start : span.end] != placeholder).nonzero().flatten()
        if len(others):
            place = span.start + int(others[0])
            raise AlignmentError(
                f"{name}[{j}]: the token at index {place} must be the placeholder {placeholder} (got "
                f"{int(token_ids[place])})"
            )
        before = span.end


def read_pixels(
    given: Mapping[str, Tensor | None],
    tower: TowerSpec,
    token_ids: Tensor,
    indices: Tensor,
    packed: Packed,
    shape: torch.Size,
) -> PackedImages | None:
    """Return the images that an image processor of transformers has preprocessed, or None if `given` has no pixels.

    `given`: the arguments in `FROM_PROCESSORS`. Token types say which tokens belong to images. Without token types, all
    placeholders must belong to images. The other arguments are documented at `read_media`. Raise AlignmentError for
    pixels that do not fit the model or the tokens.
    """
    pixels = given.get("pixel_values")
    if pixels is None:
        return None
    patches, grids = _patches_by_block(pixels, tower) if tower.pooled else _patches_in_order(given, pixels, tower)
    for number, grid in enumerate(grids):
        _check_grid(f"image {number}", grid, tower)
    if len(patches) != sum(rows * columns for rows, columns in grids):
        raise AlignmentError(
            f"pixel_values must have a row for each of {sum(rows * columns for rows, columns in grids)} patches in "
            f"image_grid_thw (got {len(patches)} rows); pass both as the processor returned them"
        )
    types = given.get("mm_token_type_ids")
    types = given.get("token_type_ids") if types is None else types
    if types is None:
        is_of_image = token_ids == tower.placeholder
    elif types.shape != shape:
        raise AlignmentError(f"token types must have shape {list(shape)} like input_ids (got {list(types.shape)})")
    else:
        is_of_image = types.flatten()[indices] == _IMAGE_TYPE
    spans = _assigned(is_of_image.nonzero().flatten().tolist(), grids, tower, packed)
    for i, (own, ids) in enumerate(zip(spans, token_ids.split(list(packed.lens)), strict=True)):
        _check_spans(f"images of sequence {i}", own, [tower.placeholder] * len(own), tower, ids)
    return PackedImages(spans, packed, patches.float().to(token_ids.device), grids)


def _patches_in_order(
    given: Mapping[str, Tensor | None], pixels: Tensor, tower: TowerSpec
) -> tuple[Tensor, list[_Grid]]:
    grids = given.get("image_grid_thw")
    if grids is None or grids.ndim != 2 or grids.shape[1] != 3 or bool((grids[:, 0] != 1).any()):
        raise AlignmentError(
            "image_grid_thw must have a row (1, rows, columns) for each image (got "
            f"{brief(None if grids is None else grids.tolist())}); pass what the image processor returned"
        )
    if pixels.ndim != 2 or pixels.shape[1] != tower.patch_values:
        raise AlignmentError(
            f"pixel_values must have shape [patches, {tower.patch_values}] (got {list(pixels.shape)}); use the image "
            "processor of this model"
        )
    return pixels, [(rows, columns) for _, rows, columns in grids.tolist()]


def _patches_by_block(pixels: Tensor, tower: TowerSpec) -> tuple[Tensor, list[_Grid]]:
    """Return the patches of images [N, channels, height, width], block by block."""
    rows, columns = tower.grid or (0, 0)
    size, merge = tower.patch_size, tower.merge
    shape = tower.channels, rows * size, columns * size
    if pixels.ndim != 4 or tuple(pixels.shape[1:]) != shape:
        raise AlignmentError(
            f"pixel_values must have shape [images, {', '.join(map(str, shape))}] (got {list(pixels.shape)}); use the "
            "image processor of this model"
        )
    cut = pixels.reshape(-1, tower.channels, rows // merge, merge, size, columns // merge, merge, size)
    return cut.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, tower.patch_values), [tower.grid or (0, 0)] * len(pixels)


def _assigned(places: list[int], grids: Sequence[_Grid], tower: TowerSpec, packed: Packed) -> list[list[ImageSpan]]:
    """Assign the `places` of image tokens to the images, in order. Return the spans of each sequence."""
    if len(places) != (wanted := sum(tower.num_tokens(*grid) for grid in grids)):
        raise AlignmentError(
            f"the images have {wanted} tokens, but the sequences have {len(places)} placeholders; pass the images of "
            "exactly these sequences, and pass token types, which distinguish the placeholders of images from sampled "
            "placeholders"
        )
    bounds = list(pairwise(packed.batch.query_starts))
    spans: list[list[ImageSpan]] = [[] for _ in bounds]
    done = sequence = 0
    for number, (rows, columns) in enumerate(grids):
        own = places[done : done + tower.num_tokens(rows, columns)]
        done += len(own)
        while own[0] >= bounds[sequence][1]:
            sequence += 1
        start, end = bounds[sequence]
        if own[-1] - own[0] + 1 != len(own) or own[-1] >= end:
            raise AlignmentError(
                f"the {len(own)} tokens of image {number} are not consecutive tokens of one sequence; expand each "
                "image's placeholder as the processor of this model does"
            )
        spans[sequence].append(ImageSpan(own[0] - start, rows // tower.merge, columns // tower.merge))
    return spans


class SplitPositions(NamedTuple):
    """`position_ids` by meaning. `text`: the index of each token in its sequence, [B, T] or None. `axes`: positions in
    time, row and column, [3, B, T] or None.
    """

    text: Tensor | None
    axes: Tensor | None


def split_positions(position_ids: Tensor | None) -> SplitPositions:
    """Split the `position_ids` of a batch, which are [B, T], [3, B, T] (time, row, column) or [4, B, T] (index, time,
    row, column).
    """
    if position_ids is None or position_ids.ndim != 3 or len(position_ids) not in (3, 4):
        return SplitPositions(position_ids, None)
    return SplitPositions(position_ids[0] if len(position_ids) == 4 else None, position_ids[-3:])


def check_positions(axes: Tensor | None, expected: Tensor, indices: Tensor, shape: torch.Size) -> None:
    """Raise AlignmentError unless the positions [3, B, T] that a caller passes equal the positions that workers use.

    `expected`: [M] or [3, M], for the tokens at the flat `indices` of a batch of this `shape`.
    """
    if axes is None:
        return
    if axes.shape[1:] not in (shape, (1, *shape[1:])):
        raise AlignmentError(f"position_ids must have shape [axes, {shape[0]}, {shape[1]}] (got {list(axes.shape)})")
    found = axes.expand(3, *shape).flatten(1)[:, indices]
    if not torch.equal(found, expected.expand(3, -1).to(found.dtype)):
        token = int((found != expected).any(0).nonzero()[0])
        raise AlignmentError(
            f"position_ids of token {token} are {found[:, token].tolist()}, but workers use "
            f"{expected.expand(3, -1)[:, token].tolist()}; leave position_ids out, or pass the position_ids for this "
            "batch's images"
        )
