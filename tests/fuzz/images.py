"""Images for requests of the attack and of good clients, false descriptions of them, and answers to `need_image`.

Owns: the vision tower of the attacked models, and the only images that have pixels.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from fuzz.mutate import MAX_MESSAGE_BYTES

from trueroll.engine.media import NUM_LEVELS, ImageInput
from trueroll.rollout.protocol import part_of, ref_of

Ref = dict[str, Any]
Message = dict[str, Any]

PLACEHOLDER, VIDEO_PLACEHOLDER = 500, 501
"""Tokens that no prompt has by chance."""
PATCH_SIZE = 32
"""So large that the pixels of `LARGE` need two messages, although a prompt has few tokens."""
MAX_IMAGES = 4
MAX_IMAGE_PATCHES = 200
MAX_IMAGE_BYTES = 650_000
"""Less than all images together, so that images are evicted and requests wait for room."""
PART_BYTES = MAX_MESSAGE_BYTES // 2
"""The maximum size of the parts that the worker asks for."""


def _image(seed: int, rows: int, columns: int, frames: int = 1) -> ImageInput:
    source = np.random.default_rng(seed)
    levels = source.integers(0, 256, (rows * columns, 3 * frames * PATCH_SIZE**2), np.uint8)
    return ImageInput(0, rows, columns, levels, source.standard_normal((3, NUM_LEVELS), np.float32), frames)


def _turned(image: ImageInput) -> ImageInput:
    """Return an image of another size with the same pixels."""
    return ImageInput(0, image.columns, image.rows, image.levels, image.table)


def _not_finite(image: ImageInput) -> ImageInput:
    """Return an image that the engine refuses after its pixels have arrived."""
    table = image.table.copy()
    table[1, 7] = np.nan
    return ImageInput(0, image.rows, image.columns, image.levels, table)


_GRIDS = (2, 2), (2, 2), (2, 2), (2, 4), (4, 6), (6, 4), (8, 6)
STILLS = [_image(seed, *grid) for seed, grid in enumerate(_GRIDS)]
STILLS.append(_turned(STILLS[3]))
LARGE = _image(20, 8, 22)
VIDEOS = [_image(30, 2, 2, 2), _image(31, 4, 2, 2)]
_NAN = _not_finite(STILLS[0])
BY_HASH = {image.content_hash: image for image in (*STILLS, LARGE, *VIDEOS, _NAN)}


def draw_image(rng: random.Random) -> ImageInput:
    """Return one of the images, rarely the large one."""
    return rng.choice((*STILLS[:3] * 4, *STILLS * 2, *VIDEOS, _NAN, LARGE))


def span_of(image: ImageInput) -> list[int]:
    """Return the tokens of an image."""
    return [PLACEHOLDER if image.frames == 1 else VIDEO_PLACEHOLDER] * (image.rows * image.columns // 4)


def prompt_with(images: list[ImageInput], rng: random.Random, max_token: int) -> tuple[list[int], list[Ref]]:
    """Return a prompt with images between random tokens, and the references to the images."""
    tokens, refs = list[int](), list[Ref]()
    for image in images:
        tokens += [rng.randrange(max_token) for _ in range(rng.randrange(4))]
        refs.append(ref_of(image).model_dump() | {"start": len(tokens)})
        tokens += span_of(image)
    return tokens + [rng.randrange(max_token) for _ in range(rng.randrange(1, 4))], refs


# Requests with false references. Each function changes the tokens or the references of a prompt.


def _overlap(rng: random.Random, tokens: list[int], refs: list[Ref]) -> None:
    refs.append(dict(refs[-1]))


def _unsort(rng: random.Random, tokens: list[int], refs: list[Ref]) -> None:
    refs.insert(0, refs[-1] | {"start": len(tokens) - 1})


def _move_outside(rng: random.Random, tokens: list[int], refs: list[Ref]) -> None:
    refs[-1]["start"] = rng.choice((len(tokens) - 1, len(tokens), 2**31, 2**63, 2**64 - 1))


def _turn(rng: random.Random, tokens: list[int], refs: list[Ref]) -> None:
    """Give the hash of an image with another size. The number of tokens stays right."""
    [ref, *_], refs[1:] = refs, []
    rows, columns = ref["rows"], ref["columns"]
    ref["rows"], ref["columns"] = (4, 2) if rows == columns else (columns, rows)
    tokens[ref["start"] :] = [*[PLACEHOLDER] * (ref["rows"] * ref["columns"] // 4), 1]


def _enlarge(rng: random.Random, tokens: list[int], refs: list[Ref]) -> None:
    sizes = (2, 2**20), (2**20, 2**20), (2**20, 1), (3, 2), (1, 1), (20, 20)
    refs[0]["rows"], refs[0]["columns"] = rng.choice(sizes)


def _change_token(rng: random.Random, tokens: list[int], refs: list[Ref]) -> None:
    tokens[refs[-1]["start"]] = rng.choice((0, 7, VIDEO_PLACEHOLDER, 502))


def _change_hash(rng: random.Random, tokens: list[int], refs: list[Ref]) -> None:
    refs[-1]["content_hash"] = rng.randbytes(32)


def _change_frames(rng: random.Random, tokens: list[int], refs: list[Ref]) -> None:
    refs[0]["frames"] = rng.choice((2, 3, 16))


def _add_many(rng: random.Random, tokens: list[int], refs: list[Ref]) -> None:
    tokens[:], refs[:] = prompt_with([STILLS[0]] * rng.choice((MAX_IMAGES, MAX_IMAGES + 1, 20)), rng, PLACEHOLDER)


def _exceed_the_budget(rng: random.Random, tokens: list[int], refs: list[Ref]) -> None:
    tokens[:], refs[:] = prompt_with([LARGE, LARGE], rng, PLACEHOLDER)
    refs[1]["content_hash"] = rng.randbytes(32)


FALSEHOODS: tuple[Callable[[random.Random, list[int], list[Ref]], None], ...] = (
    *(_overlap, _unsort, _move_outside, _turn, _turn, _enlarge, _change_token, _change_hash, _change_hash),
    *(_change_frames, _add_many, _exceed_the_budget),
)


# Pixels.


def put_image(id: str, image: ImageInput, **fields: Any) -> Message:
    """Return a message with the first part of an image."""
    part = {"content_hash": image.content_hash, "start": 0, "data": part_of(image, 0, PART_BYTES)}
    return {"version": 1, "type": "put_image", "id": id, **part, **fields}


def right_answer(question: Message) -> Message:
    """Return the part that a worker has asked for. Bytes that do not exist are 0."""
    start, num_bytes = question["start"], question["num_bytes"]
    image = BY_HASH.get(question["content_hash"])
    data = b"" if image is None else part_of(image, start, num_bytes)
    part = {"content_hash": question["content_hash"], "start": start, "data": data.ljust(num_bytes, b"\0")}
    return {"version": 1, "type": "put_image", "id": question["id"], **part}


class Answer(NamedTuple):
    """`kind`: a key of `ANSWERS`. `delay`: how often the client looks for replies before it sends `messages`."""

    kind: str
    delay: int
    messages: list[Message]


ANSWERS = {"right": 60, "twice": 5, "late": 5, "wrong": 14, "after another part": 8, "after another hash": 8}
"""Shares of the answers to `need_image`, in percent."""


def draw_answer(question: Message) -> Answer:
    """Return an attacker's answer. It depends only on the question, so that a replayed attack gives the same answer."""
    rng = random.Random(f"{question['id']}/{question['content_hash'].hex()}/{question['start']}")
    [kind] = rng.choices(list(ANSWERS), list(ANSWERS.values()))
    right = right_answer(question)
    start, data = right["start"], right["data"]
    match kind:
        case "twice":
            return Answer(kind, 0, [right, right])
        case "late":
            return Answer(kind, rng.randrange(1, 40), [right])
        case "wrong":
            at = rng.randrange(len(data))
            return Answer(kind, 0, [right | {"data": data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]}])
        case "after another part":
            others = {"start": start + 1}, {"data": data[:-1] or b"xx"}, {"data": data + b"x"}
            return Answer(kind, 0, [right | rng.choice(others), right])
        case "after another hash":
            return Answer(kind, 0, [right | {"content_hash": rng.randbytes(32)}, right])
        case _:
            return Answer(kind, 0, [right])
