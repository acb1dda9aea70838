"""Prompts with images in the exactness matrix: the requests, the cells and their premises. Runs no engine.

The images have random levels. Two of the images have the same number of placeholders. If the tower takes images of any
size, the two images with the same number of placeholders also have the same levels, but different sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import numpy as np

from ...engine.media import NUM_LEVELS, ImageInput
from ...engine.request import GenerateRequest, SamplingParams
from ...engine.running.ranks import Topology
from ...kernels.specs import TowerSpec
from .verify_premises import Cell, Premise, Run, check_premises
from .verify_subjects import PLAIN, SAMPLINGS, Sizes, with_params

MAX_NUM_SEQS = 16
MAX_IMAGES = 2
_BLOCKS = 8, 6
"""The rows and columns of placeholders of an image, unless the tower takes images of one size only."""
_FILLER_PROMPT = 40
_FILLER_TOKENS = 64  # fillers must still decode after all images have been encoded
IMAGE_LEGEND = """\
Cells with images add premises:
    encoded          images that the vision tower computed
    image evictions  encoded images that lost their memory to another image
    cut images       chunks of prompts that ended inside an image; for models
                     that need whole images, chunks that ended before one
    reused image     tokens of a prompt and its image that came from the cache
    refused          requests that the budget does not admit"""


@dataclass(frozen=True)
class ImageCell(Cell):
    """Circumstances of prompts with images.

    - `encoder`: `hit` if the images have been encoded before, `miss` if not, `evicted` if there is memory for only one
      encoded image
    - `cuts`: some chunks of prompts end inside images. If the model needs whole images (a step computes all tokens of
      an image or none), these chunks end before the image instead
    - `asks_again`: after the first request, a second request asks another question about the same image
    - `is_refused`: the token budget of a step is too small for an image
    """

    encoder: Literal["miss", "hit", "evicted"] = "miss"
    cuts: bool = False
    asks_again: bool = False
    is_refused: bool = False

    def _differences(self) -> Iterator[str]:
        yield "images"
        yield from super()._differences()
        if self.encoder != "miss":
            yield {"hit": "encoded before", "evicted": "room for one encoded image"}[self.encoder]
        if self.cuts:
            yield "chunks cut images"
        if self.asks_again:
            yield "second question"
        if self.is_refused:
            yield "refused"


def image_cells(tower: TowerSpec) -> list[ImageCell]:
    """Return the cells for a model with the vision tower `tower`."""
    size = _num_tokens(tower)
    # If the model needs whole images, a step needs room for one image in addition to the tokens of the other sequences.
    small = MAX_NUM_SEQS + (size if tower.sees_span else 0)
    last = len(_TEXTS) - 1
    cells = [
        ImageCell(interval=16, cache="warm", encoder="hit"),
        ImageCell(interval=16, others=10),
        ImageCell(interval=16, encoder="hit", others=10, block_size=8),
        ImageCell(interval=16, budget=small, encoder="hit", cuts=True),
        ImageCell(interval=16, budget=small, others=last, cache="off"),
        ImageCell(interval=16, others=last, block_size=8, is_starved=True),
        ImageCell(interval=16, budget=small, others=last, cache="off", encoder="evicted"),
        ImageCell(interval=16, cache="warm", asks_again=True),
        ImageCell(interval=8, num_reread=9, block_size=8),
        ImageCell(interval=16, is_score=True, budget=2 * small),
        ImageCell(interval=16, drafts="adversarial", others=10),
        ImageCell(interval=16, others=10, event="push"),
        ImageCell(interval=16, others=10, budget=2 * small, event="sleep"),
    ]
    if tower.sees_span:
        cells.append(ImageCell(interval=16, budget=small - 2, is_refused=True))
    return cells


# For each request: the texts between and around images, and the images. Texts with the same name are equal.
_TEXTS: dict[str, tuple[str, ...]] = {
    "greedy one": ("lead", "first", "tail"),
    "seeded both": ("lead", "first", "middle", "second", "tail"),
    "plain second": ("other lead", "second", "tail"),
    "greedy alike": ("lead", "second", "tail"),
    "greedy last": ("lead", "first"),
    "greedy again": ("lead", "first", "tail", "question"),
}
AGAIN = "greedy again"
"""The request that asks another question after the first request."""


class ImageSubjects:
    """The compared requests with images, for a model with a tower and `vocab_size` token ids."""

    def __init__(self, tower: TowerSpec, vocab_size: int, max_tokens: int) -> None:
        self.tower, self._vocab_size, self._max_tokens = tower, vocab_size, max_tokens
        size, generator = _num_tokens(tower), np.random.default_rng(2)
        # Chunks with the budget of `image_cells` must end inside the first image, or before it.
        lengths = dict(lead=MAX_NUM_SEQS + size // 2, middle=9, tail=14, question=19) | {"other lead": 21}
        self._texts = {name: self._text(generator, length) for name, length in lengths.items()}
        self._images = dict(zip(("first", "second"), _images(tower, generator), strict=True))
        self.requests = [self._request(name, parts) for name, parts in _TEXTS.items()]

    @property
    def sizes(self) -> Sizes:
        """The sizes of the matrix. For images, only the sizes `prompt_lengths` and `max_tokens` are used."""
        return Sizes(tuple(len(each.prompt_token_ids) for each in self.requests), self._max_tokens)

    @property
    def most_positions(self) -> int:
        """The number of tokens of the longest request, whether compared or a filler."""
        return max(self.sizes.num_positions, _FILLER_PROMPT + _FILLER_TOKENS)

    def row_bytes(self, itemsize: int) -> int:
        """Return the size of the encoded rows of an image, in bytes. `itemsize`: the size of an element, in bytes."""
        return _num_tokens(self.tower) * self.tower.row_size * itemsize

    def fillers(self, count: int) -> list[GenerateRequest]:
        """Return requests without images, which run at the same time and are not compared."""
        generator = np.random.default_rng(3)
        params = SamplingParams(seed=1, ignore_eos=True, max_tokens=_FILLER_TOKENS)
        prompts = [self._text(generator, 3 + 7 * i % (_FILLER_PROMPT - 2)) for i in range(count)]
        return [GenerateRequest(f"filler {i}", prompt, params) for i, prompt in enumerate(prompts)]

    def _text(self, generator: np.random.Generator, length: int) -> np.ndarray:
        """Return random tokens without placeholders, int32 [length]."""
        found = generator.integers(0, self._vocab_size - 1, length, np.int32)
        return found + (found >= self.tower.placeholder)

    def _request(self, name: str, parts: Sequence[str]) -> GenerateRequest:
        placeholders = np.full(_num_tokens(self.tower), self.tower.placeholder, np.int32)
        tokens = [self._texts.get(part, placeholders) for part in parts]
        starts = [0, *accumulate(map(len, tokens))]
        images = [
            replace(self._images[part], start=start)
            for part, start in zip(parts, starts, strict=False)
            if part in self._images
        ]
        params = (SAMPLINGS | {"plain": PLAIN})[name.split()[0]]
        request = GenerateRequest(name, np.concatenate(tokens), params, images=tuple(images))
        return with_params(request, max_tokens=self._max_tokens)


def _num_tokens(tower: TowerSpec) -> int:
    return tower.num_tokens(*_grid(tower))


def _grid(tower: TowerSpec) -> tuple[int, int]:
    return tower.grid or (_BLOCKS[0] * tower.merge, _BLOCKS[1] * tower.merge)


def _images(tower: TowerSpec, generator: np.random.Generator) -> list[ImageInput]:
    (rows, columns), values = _grid(tower), tower.channels * tower.patch_size**2
    table = np.linspace(-1.0, 1.0, tower.channels * NUM_LEVELS, dtype=np.float32).reshape(tower.channels, NUM_LEVELS)
    levels = [generator.integers(0, NUM_LEVELS, (rows * columns, values), np.uint8) for _ in range(MAX_IMAGES)]
    first = ImageInput(0, rows, columns, levels[0], table)
    other = dict(levels=levels[1]) if tower.grid else dict(rows=columns, columns=rows)
    return [first, replace(first, **other)]


def check_image_premises(
    cell: ImageCell, runs: Sequence[Run], num_threads: int, topology: Topology, tower: TowerSpec
) -> list[Premise]:
    """Check the premises of a cell with images against its `runs`, and return all premises. Other arguments: see
    `check_premises`.

    Requests that run together share prefixes of their prompts, so that even a cold cache may have hits.
    """
    found = check_premises(cell, runs, num_threads, topology, cuts=True)
    if cell.others and cell.cache == "cold":
        found = [replace(premise, holds=True) if premise.name == "reused" else premise for premise in found]
    return found + _image_premises(cell, runs, tower)


def _image_premises(cell: ImageCell, runs: Sequence[Run], tower: TowerSpec) -> list[Premise]:
    size = _num_tokens(tower)
    encoded, evicted = (sum(run.growth(name) for run in runs) for name in ("images_encoded", "image_evictions"))
    again = cell.encoder == "evicted" or cell.event in ("push", "sleep")
    holds = encoded > MAX_IMAGES if again else encoded == (0 if _is_encoded_before(cell) else MAX_IMAGES)
    found = [
        Premise("encoded", encoded, holds),
        Premise("image evictions", evicted, (evicted > 0) == (cell.encoder == "evicted")),
    ]
    if cell.asks_again:
        (run,) = runs
        found.append(Premise("reused image", run.reused, run.reused >= _requests(run)[0].images[0].start + size))
    if cell.cuts:
        cuts = [_cuts(run, cell.budget, tower) for run in runs]
        found.append(Premise("cut images", sum(cuts), min(cuts) > 0))
    return found


def _requests(run: Run) -> list[GenerateRequest]:
    return [request for request in run.requests if isinstance(request, GenerateRequest)]


def _is_encoded_before(cell: ImageCell) -> bool:
    return cell.encoder == "hit" or cell.asks_again or bool(cell.num_reread)


def _cuts(run: Run, budget: int, tower: TowerSpec) -> int:
    """Return the number of chunks that ended inside an image. If the model needs whole images, return the number of
    chunks that ended before an image because the image did not fit into the budget. The run has one request, which
    found nothing in the cache.
    """
    (request,) = _requests(run)
    counts = [prompt for prompt, _ in run.steps if prompt]
    spans = [(image.start, image.start + _num_tokens(tower)) for image in request.images]
    ends = [*zip(counts, accumulate(counts), strict=True)]
    inside = sum(start < end < stop for _, end in ends for start, stop in spans)
    if not tower.sees_span:
        return inside
    moved = (budget - (stop - start) < count < budget and end == start for count, end in ends for start, stop in spans)
    return 0 if inside else sum(moved)
