"""Preprocess videos for prompts: sample and resize their frames within limits, as the model's video processor does.
Each video is preprocessed only once.

A video is divided into parts of a few successive frames (two in all supported models). Each part is a separate
`ImageInput` with its own hash. In the prompt, a text with the time of a part precedes the part. So workers encode and
cache a long video part by part.

The settings come from the model's files. Sampled frames, times, tokens, sizes, the order of patches, and the value of
each 8-bit level are the same as with transformers' video processor. This module resizes frames with Pillow, as it
resizes images; transformers uses torchvision. The levels can therefore differ from transformers' levels if a frame is
resized. This module does not open video files: the caller decodes them. Needs Pillow (`pip install
"trueroll[vision]"`), but not torchvision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from trueroll.errors import InvalidRequestError, ModelError, brief

from ..engine.media import NUM_LEVELS, ImageInput
from ..kernels.specs import TowerSpec
from .images import MOST_PIXELS, as_picture, check_pixels, patches_of_whole, picture_size, pillow

MOST_FRAMES = 2**15
"""The limit on the frames of a video before sampling: nine minutes at 60 frames per second."""
MOST_VIDEO_PIXELS = 2**31
"""The default limit on the pixels of all sampled frames, before and after they are resized."""
_MOST_GROUP = 8
"""The limit on the frames of a part."""
_MOST_ASPECT = 200
_LEAST, _MOST = 2.0**-40, 2**40
"""Bounds of the numbers in settings and requests, so that no result overflows."""
_FILES = {
    "processor_config.json": "video_processor",
    "video_preprocessor_config.json": None,
    "preprocessor_config.json": None,
}
"""The files that may contain video settings, and the key of the settings in each file. The settings of the first such
file are used.
"""
_KIND = "Qwen3VLVideoProcessor"


@dataclass(frozen=True)
class Video:
    """A processed video. `parts`: the parts in order, each with start 0. `times`: the time of each part, in seconds."""

    parts: tuple[ImageInput, ...]
    times: tuple[float, ...]


@dataclass(frozen=True)
class _Settings:
    """The settings of a video processor. The fields have the names that the model's files use, and the defaults that
    transformers uses. `shortest_edge`, `longest_edge`: minimum and maximum number of pixels of all frames together,
    after resizing.
    """

    shortest_edge: int = 2**17
    longest_edge: int = 3 * 2**18
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    rescale_factor: float = 1 / 255
    resample: int = 3
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    do_sample_frames: bool = True
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 768

    @classmethod
    def read(cls, folder: Path, tower: TowerSpec) -> _Settings:
        """Return the video settings in a model's folder. Raise ModelError if the folder has no video settings or
        invalid video settings.
        """
        raw = _read(folder)
        fixed = {
            "video_processor_type": _KIND,
            "num_frames": None,
            "patch_size": tower.patch_size,
            "merge_size": tower.merge,
            "temporal_patch_size": tower.frames,
        }
        for name, wanted in fixed.items():
            if (found := raw.get(name)) not in (None, wanted):
                raise ModelError(f"{folder}: {name} of the video processor must be {wanted} (got {brief(found)})")
        given = {one.name: raw.get(one.name) for one in fields(cls)} | _edges(folder, raw.get("size"))
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        for name, value in values.items():
            if not _is_valid(name, value, getattr(cls, name)):
                raise ModelError(f"{folder}: {name} of the video processor is not valid: {brief(value)}; correct it")
            values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)

    def table(self) -> np.ndarray:
        """Return the value of each level, float32 [channels, 256], computed as transformers does."""
        levels = np.arange(NUM_LEVELS, dtype=np.float32)
        mean, std = (np.array(each, np.float32)[:, None] for each in (self.image_mean, self.image_std))
        if not self.do_normalize:
            scale = np.float32(self.rescale_factor if self.do_rescale else 1.0)
            return np.tile(levels * scale, (len(mean), 1))
        scale = np.float32(1.0 / self.rescale_factor if self.do_rescale else 1.0)
        return (levels - mean * scale) / (std * scale)

    def sample(self, total: int, fps: float) -> np.ndarray:
        """Return the indices of the frames to use from a video with `total` frames and `fps` frames per second."""
        if not self.do_sample_frames:
            return np.arange(total)
        count = min(max(int(total / fps * self.fps), self.min_frames), self.max_frames, total)
        return np.linspace(0, total - 1, count).round().astype(int)

    def size(self, count: int, height: int, width: int, tower: TowerSpec) -> tuple[int, int]:
        """Return height and width of `count` frames after resizing. If the settings don't resize, return `height` and
        `width`. Otherwise, the new sides are multiples of `tower.patch_size * tower.merge`, the aspect ratio changes
        little, and the pixels of all frames are within the limits.
        """
        unit = tower.patch_size * tower.merge
        if not self.do_resize:
            return height, width
        if height < unit or width < unit:
            factor = max(unit / height, unit / width)
            height, width = int(height * factor), int(width * factor)
        rounded = round(height / unit) * unit, round(width / unit) * unit
        rounded_count = round(count / tower.frames) * tower.frames
        pixels, most = rounded_count * rounded[0] * rounded[1], self._most(count, unit)
        if pixels > most:
            factor = math.sqrt(count * height * width / most)
            height, width = (max(unit, math.floor(side / factor / unit) * unit) for side in (height, width))
            return height, width
        if pixels < self.shortest_edge:
            factor = math.sqrt(self.shortest_edge / (count * height * width))
            return math.ceil(height * factor / unit) * unit, math.ceil(width * factor / unit) * unit
        return rounded

    def _most(self, count: int, unit: int) -> int:
        if not self.cap_pixels_per_frame:
            return self.longest_edge
        of_frame = min(self.max_video_tokens * unit * unit, self.longest_edge // count)
        return count * max(of_frame, int(self.shortest_edge * 1.05))


def _read(folder: Path) -> dict[str, Any]:
    from ..engine.models.files import read_json

    for name, key in _FILES.items():
        if (folder / name).exists():
            raw = read_json(folder / name)
            found = raw if key is None else raw.get(key)
            if isinstance(found, dict):
                return found
    raise ModelError(f"{folder}: has no settings of a video processor; add video_preprocessor_config.json")


def _edges(folder: Path, size: Any) -> dict[str, Any]:
    """Return `shortest_edge` and `longest_edge` from the setting `size` of a video processor. The values are None if
    `size` is None.
    """
    names = "shortest_edge", "longest_edge"
    if size is not None and not (isinstance(size, dict) and size.keys() >= {*names}):
        raise ModelError(
            f"{folder}: size of the video processor must have shortest_edge and longest_edge (got {brief(size)})"
        )
    return {name: None if size is None else size[name] for name in names}


def _is_valid(name: str, value: Any, default: Any) -> bool:
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, tuple):
        numbers = isinstance(value, list) and len(value) == len(default) and all(_is_number(each) for each in value)
        return numbers and (name == "image_mean" or min(value) >= _LEAST)
    if not _is_number(value) or not (isinstance(default, float) or type(value) is int):
        return False
    bounds = {"resample": (0, 5), "min_frames": (1, MOST_FRAMES), "max_frames": (_MOST_GROUP, MOST_FRAMES)}
    least, most = bounds.get(name, (_LEAST, _MOST))
    return least <= value <= most


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -_MOST <= value <= _MOST


class VideoProcessor:
    """Processes videos for a model, and places them in prompts.

    Raise ModelError if the model takes no videos, or if its video settings or its tokenizer cannot be used. Raise
    ConfigError if Pillow is missing.
    """

    def __init__(self, model: str) -> None:
        from ..engine.models.loader import read_config
        from ..engine.models.names import resolve_model
        from ..engine.models.tokenizer import load_tokenizer
        from ..kernels.families import describe

        pillow()
        folder = resolve_model(model)
        raw = read_config(folder)
        spec = describe(raw)
        if spec.tower is None or spec.tower.video_placeholder is None:
            raise ModelError(
                f"{folder}: videos are not supported for {spec.architecture}; serve a model of Qwen3-VL or Qwen3.5"
            )
        self.tower: TowerSpec = spec.tower
        self._settings = _Settings.read(folder, spec.tower)
        if len(self._settings.image_mean) != spec.tower.channels:
            raise ModelError(f"{folder}: the vision tower must have 3 channels (got {spec.tower.channels})")
        self._borders = [_token_id(folder, raw, name) for name in ("vision_start_token_id", "vision_end_token_id")]
        self._tokenizer = load_tokenizer(folder / "tokenizer.json")

    def process(
        self,
        frames: Sequence[Any] | np.ndarray,
        *,
        fps: float | None = None,
        times: Sequence[float] | None = None,
        most_pixels: int = MOST_VIDEO_PIXELS,
    ) -> Video:
        """Preprocess a video. `frames`: a list of PIL images or arrays uint8 [rows, columns, 3], or an array uint8
        [frames, rows, columns, 3]. All frames must have the same size.

        Give either `fps` or `times`, but not both. `fps`: the frames per second of the video; frames are sampled as the
        model's settings say. `times`: the time of each frame in seconds; all frames are used. If the number of used
        frames is odd, the last frame is used twice.

        Raise InvalidRequestError if an argument is not as described above, if there are more than `MOST_FRAMES` frames,
        or if a frame has more than `MOST_PIXELS` pixels. Raise InvalidRequestError also if all used frames together
        have more than `most_pixels` pixels before or after resizing. All sizes are checked before pixels are read.
        """
        used, moments = self._chosen(frames, fps, times)
        width, height = _common_size(used, most_pixels)
        size = self._settings.size(len(used), height, width, self.tower)
        self._check_size(size, len(used), most_pixels)
        while len(used) % self.tower.frames:
            used, moments = [*used, used[-1]], [*moments, moments[-1]]
        table, group = self._settings.table(), self.tower.frames
        starts = range(0, len(used), group)
        parts = [self._part(used[start : start + group], size, table) for start in starts]
        return Video(tuple(parts), tuple((moments[start] + moments[start + group - 1]) / 2 for start in starts))

    def expand(
        self, token_ids: Sequence[int], videos: Sequence[Video], images: Sequence[ImageInput] = ()
    ) -> tuple[np.ndarray, list[ImageInput]]:
        """Replace each video placeholder in `token_ids` with the tokens of its video, in order. Return the tokens,
        int32, and all video parts and images with their starts, in order. `images`: the images of the prompt, as
        `ImageProcessor.expand` has returned them.

        Each part is written as these tokens: its time as text, such as "<0.5 seconds>"; the token that begins an image;
        one placeholder for each token of the part; and the token that ends an image. The tokens before and after a
        video placeholder are kept, as with transformers 5.18 and 5.23. Raise InvalidRequestError unless there is one
        placeholder for each video.
        """
        tokens, placeholder = np.asarray(token_ids, np.int32), self.tower.video_placeholder
        places = np.flatnonzero(tokens == placeholder)
        if len(places) != len(videos):
            raise InvalidRequestError(
                f"videos: the prompt must have one placeholder ({placeholder}) for each of {len(videos)} videos (got "
                f"{len(places)})",
                field="videos",
                value=len(places),
                limit=len(videos),
            )
        pieces, placed, done, growth = list[np.ndarray](), list[ImageInput](), 0, 0
        left = list(images)
        for place, video in zip(places.tolist(), videos, strict=True):
            while left and left[0].start < place:
                image = left.pop(0)
                placed.append(replace(image, start=image.start + growth))
            inner, starts = self._tokens(video)
            placed += [
                replace(part, start=place + growth + start) for part, start in zip(video.parts, starts, strict=True)
            ]
            pieces += tokens[done:place], inner
            done, growth = place + 1, growth + len(inner) - 1
        placed += [replace(image, start=image.start + growth) for image in left]
        return np.concatenate([*pieces, tokens[done:]]), placed

    def _tokens(self, video: Video) -> tuple[np.ndarray, list[int]]:
        """Return the tokens of a video, and the start of each part in these tokens."""
        begin, end = self._borders
        tokens, starts = list[int](), list[int]()
        for part, time in zip(video.parts, video.times, strict=True):
            tokens += [*self._tokenizer.encode(f"<{time:.1f} seconds>", add_special_tokens=False).ids, begin]
            starts.append(len(tokens))
            tokens += [self.tower.video_placeholder] * self.tower.num_tokens(part.rows, part.columns) + [end]
        return np.array(tokens, np.int32), starts

    def _chosen(self, frames: Any, fps: Any, times: Any) -> tuple[list[Any], list[float]]:
        """Return the frames to use, and their times in seconds."""
        least = self.tower.frames
        if not isinstance(frames, list | tuple | np.ndarray) or not least <= len(frames) <= MOST_FRAMES:
            found = len(frames) if isinstance(frames, list | tuple | np.ndarray) else type(frames).__name__
            raise InvalidRequestError(
                f"video: must be a list or an array of {least} to {MOST_FRAMES} frames (got {found})", field="video"
            )
        if (fps is None) == (times is None):
            raise InvalidRequestError("video: exactly one of fps and times must be given", field="video")
        if fps is not None:
            if not _is_number(fps) or fps < _LEAST:
                raise InvalidRequestError(f"video: fps must be a number above 0 (got {fps!r})", field="video")
            chosen = self._settings.sample(len(frames), fps).tolist()
            return [frames[i] for i in chosen], [i / fps for i in chosen]
        moments = list(times)
        is_valid = len(moments) == len(frames) and all(_is_number(each) for each in moments)
        if not is_valid or moments != sorted(moments) or moments[0] < 0:
            raise InvalidRequestError(
                f"video: times must be {len(frames)} ascending numbers of at least 0 (got {brief(moments)})",
                field="video",
            )
        return list(frames), moments

    def _check_size(self, size: tuple[int, int], count: int, most_pixels: int) -> None:
        height, width = size
        unit = self.tower.patch_size * self.tower.merge
        if height % unit or width % unit:
            raise InvalidRequestError(
                f"video: the model's settings don't resize, so the sides of frames must be multiples of {unit} (got "
                f"{width} x {height})",
                field="video",
            )
        _check_all(count, (width, height), most_pixels)

    def _part(self, frames: Sequence[Any], size: tuple[int, int], table: np.ndarray) -> ImageInput:
        """Convert the frames of a part to an `ImageInput`."""
        height, width = size
        patches = list[np.ndarray]()
        for frame in frames:
            picture = as_picture(frame).convert("RGB").resize((width, height), self._settings.resample)
            patches.append(patches_of_whole(np.asarray(picture).transpose(2, 0, 1), self.tower)[2])
        levels = np.stack(patches, 2).reshape(len(patches[0]), -1)
        rows, columns = height // self.tower.patch_size, width // self.tower.patch_size
        return ImageInput(0, rows, columns, levels, table, self.tower.frames)


def _common_size(frames: Sequence[Any], most_pixels: int) -> tuple[int, int]:
    """Return width and height of all frames."""
    sizes = {picture_size(frame) for frame in frames}
    if len(sizes) > 1:
        first, second, *_ = sorted(sizes)
        raise InvalidRequestError(
            f"video: all frames must have the same size (got {first[0]} x {first[1]} and {second[0]} x {second[1]})",
            field="video",
        )
    [size] = sizes
    check_pixels(size, MOST_PIXELS)
    _check_all(len(frames), size, most_pixels)
    if max(size) / min(size) > _MOST_ASPECT:
        raise InvalidRequestError(
            f"video: the longer side of a frame may be at most {_MOST_ASPECT} times the shorter one (got {size[0]} x "
            f"{size[1]})",
            field="video",
        )
    return size


def _check_all(count: int, size: tuple[int, int], most_pixels: int) -> None:
    if (pixels := count * size[0] * size[1]) > most_pixels:
        raise InvalidRequestError(
            f"video: {count} frames of {size[0]} x {size[1]} pixels are too many (limit {most_pixels} pixels); give "
            "fewer or smaller frames",
            field="video",
            value=pixels,
            limit=most_pixels,
        )


def _token_id(folder: Path, raw: dict[str, Any], name: str) -> int:
    if type(found := raw.get(name)) is not int:
        raise ModelError(f"{folder}: {name} in config.json must be a token id (got {brief(found)}); correct the file")
    return found
