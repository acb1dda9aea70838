"""Videos are processed as transformers' video processor does, but resized by Pillow, and placed part by part."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer
from transformers.image_processing_backends import TorchvisionBackend
from transformers.video_utils import VideoMetadata
from vision_models import PLACEHOLDER, VIDEO_PLACEHOLDER, VISION_END, VISION_START, make_vision_model

from trueroll.engine.media import ImageLimits, check_pixels
from trueroll.errors import InvalidRequestError, ModelError
from trueroll.kernels.media import patches_of
from trueroll.rollout import videos as module
from trueroll.rollout.images import ImageProcessor
from trueroll.rollout.videos import Video, VideoProcessor

SETTINGS: dict[str, Any] = dict(
    video_processor_type="Qwen3VLVideoProcessor",
    patch_size=4,
    merge_size=2,
    temporal_patch_size=2,
    image_mean=[0.5, 0.4, 0.3],
    image_std=[0.5, 0.25, 0.2],
    size=dict(shortest_edge=256, longest_edge=8192),
    cap_pixels_per_frame=False,
)
IMAGES: dict[str, Any] = dict(
    image_processor_type="Qwen2VLImageProcessorFast",
    patch_size=4,
    merge_size=2,
    size=dict(shortest_edge=64, longest_edge=1024),
)


def write(folder: Path, **settings: Any) -> Path:
    (folder / "video_preprocessor_config.json").write_text(json.dumps(SETTINGS | settings))
    return folder


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_vision_model(request.param, tmp_path_factory.mktemp(request.param))
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES))
    return write(folder)


@pytest.fixture(scope="module")
def processor(folder: Path) -> VideoProcessor:
    return VideoProcessor(str(folder))


def movie(count: int, height: int = 20, width: int = 28, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), np.uint8)


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The video processor class of transformers. Its resizing and normalization are those of torchvision, which is not
    installed. Pillow resizes instead, and torch normalizes as torchvision does.
    """

    def resize(self: Any, image: Tensor, size: Any, resample: int, **others: Any) -> Tensor:
        frames = [Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in image[0]]
        resized = [np.asarray(frame.resize((size.width, size.height), resample)) for frame in frames]
        return torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2)[None]

    def normalize(self: Any, image: Tensor, mean: Tensor, std: Tensor, **others: Any) -> Tensor:
        mean, std = (torch.as_tensor(each, dtype=torch.float32)[:, None, None] for each in (mean, std))
        return (image - mean) / std

    monkeypatch.setattr(TorchvisionBackend, "resize", resize)
    monkeypatch.setattr(TorchvisionBackend, "normalize", normalize)
    return import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl").Qwen3VLVideoProcessor


def made_by_transformers(theirs: Any, frames: np.ndarray, fps: float, **settings: Any) -> dict[str, Any]:
    metadata = VideoMetadata(total_num_frames=len(frames), fps=fps)
    given = dict(video_metadata=[metadata], return_metadata=True, return_tensors="pt")
    return theirs(**(SETTINGS | settings))(
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)], do_convert_rgb=False, **given
    )


def text_of_transformers(made: dict[str, Any]) -> str:
    """Return the text that replaces the placeholder: [S] begins an image, [V] is a placeholder, [E] ends an image."""
    own = import_module("transformers.models.qwen3_vl.processing_qwen3_vl").Qwen3VLProcessor
    found = object.__new__(own)
    found.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    found.vision_start_token, found.video_token, found.vision_end_token = "[S]", "[V]", "[E]"
    return found.replace_video_token(made, 0)


def pixels_of(processor: VideoProcessor, video: Video) -> Tensor:
    parts = [patches_of(part, processor.tower, torch.float32, torch.device("cpu")) for part in video.parts]
    return torch.cat(parts)


CASES: dict[str, tuple[tuple[int, int, int], float, dict[str, Any]]] = {
    "all frames": ((6, 16, 24), 2.0, {}),
    "an odd number": ((7, 20, 28), 2.0, {}),
    "sampled": ((50, 20, 28), 9.7, {}),
    "few frames": ((3, 20, 28), 30.0, {}),
    "smaller": ((8, 90, 70), 2.0, {}),
    "larger": ((2, 5, 9), 2.0, dict(size=dict(shortest_edge=4096, longest_edge=8192))),
    "capped": ((6, 60, 50), 2.0, dict(cap_pixels_per_frame=True, max_video_tokens=12)),
    "most frames": ((40, 16, 16), 2.0, dict(max_frames=10)),
    "not normalized": ((4, 16, 16), 2.0, dict(do_normalize=False)),
    "not rescaled": ((4, 16, 16), 2.0, dict(do_rescale=False)),
    "not resized": ((4, 16, 24), 2.0, dict(do_resize=False)),
}


@pytest.mark.parametrize("case", CASES)
def test_videos_are_processed_as_transformers_does(case: str, folder: Path, theirs: Any) -> None:
    (count, height, width), fps, settings = CASES[case]
    try:
        processor = VideoProcessor(str(write(folder, **settings)))
    finally:
        write(folder)
    frames = movie(count, height, width)
    video, expected = processor.process(frames, fps=fps), made_by_transformers(theirs, frames, fps, **settings)
    [grid] = expected["video_grid_thw"].tolist()
    assert [[1, part.rows, part.columns] for part in video.parts] == [[1, *grid[1:]]] * grid[0]
    assert torch.equal(pixels_of(processor, video), expected["pixel_values_videos"].float())
    text = text_of_transformers(expected)
    assert "".join(f"<{time:.1f} seconds>" for time in video.times) == re.sub(r"\[.\]", "", text)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids, placed = processor.expand([7, VISION_START, VIDEO_PLACEHOLDER, VISION_END, 8], [video])
    markers = {"S": VISION_START, "V": VIDEO_PLACEHOLDER, "E": VISION_END}
    inner = list[int]()
    for piece in re.split(r"\[(.)\]", text):
        inner += [markers[piece]] if piece in markers else tokenizer.encode(piece, add_special_tokens=False)
    assert ids.tolist() == [7, VISION_START, *inner, VISION_END, 8]
    check_pixels(placed, ImageLimits(processor.tower, len(placed), 10**6).check(placed, ids))


def test_sizes_are_those_of_transformers(processor: VideoProcessor, theirs: Any) -> None:
    smart_resize = import_module(theirs.__module__).smart_resize
    generator, refused = np.random.default_rng(0), 0
    for _ in range(500):
        count, height, width = (int(each) for each in generator.integers((2, 1, 1), (40, 300, 300)))
        limits = dict(min_pixels=256, max_pixels=8192)
        try:
            expected = smart_resize(count, height, width, temporal_factor=2, factor=8, **limits)
        except ValueError:
            refused += 1
            continue
        assert processor._settings.size(count, height, width, processor.tower) == expected
    assert refused < 50, "premise"


def test_frames_with_given_times(processor: VideoProcessor) -> None:
    frames = movie(5)
    video = processor.process(frames, times=[0, 1.5, 2, 4, 4.5])
    assert video.times == (0.75, 3.0, 4.5)
    others = processor.process([Image.fromarray(frame) for frame in frames], times=[9, 10, 11, 12, 13])
    assert [part.content_hash for part in others.parts] == [part.content_hash for part in video.parts]
    assert others.times != video.times
    last = video.parts[2].levels.reshape(-1, 3, 2, 16)
    assert (last[:, :, 0] == last[:, :, 1]).all(), "the last frame is used twice"


def test_equal_pairs_have_one_hash(processor: VideoProcessor) -> None:
    one, other = movie(2), movie(2, seed=1)
    frames = np.concatenate([one, other, one, one[::-1]])
    hashes = [part.content_hash for part in processor.process(frames, times=range(8)).parts]
    assert hashes[0] == hashes[2] and len({*hashes}) == 3


def test_images_and_videos_in_one_prompt(folder: Path, processor: VideoProcessor) -> None:
    of_images = ImageProcessor(str(folder))
    images = [of_images.process(frame) for frame in movie(3, seed=2)]
    videos = [processor.process(movie(4, seed=seed), fps=2) for seed in range(2)]
    prompt = [5, PLACEHOLDER, VIDEO_PLACEHOLDER, 6, PLACEHOLDER, 7, VIDEO_PLACEHOLDER, PLACEHOLDER, 9]
    tokens, placed = of_images.expand(prompt, images)
    ids, items = processor.expand(tokens.tolist(), videos, placed)
    check_pixels(items, ImageLimits(processor.tower, len(items), 10**6).check(items, ids))
    assert [item.frames for item in items] == [1, 2, 2, 1, 2, 2, 1]
    hashes = [images[0], *videos[0].parts, images[1], *videos[1].parts, images[2]]
    assert [item.content_hash for item in items] == [each.content_hash for each in hashes]
    assert (ids == VISION_START).sum() == 4 and ids[-1] == 9
    for count in (1, 3):
        with pytest.raises(InvalidRequestError, match=f"one placeholder .501. for each of {count} videos .got 2"):
            processor.expand(tokens.tolist(), [videos[0]] * count, placed)


def unread(width: int, height: int) -> Any:
    """Return a PIL image of this size, which has no pixels."""
    image = Image.new("RGB", (1, 1))
    image._size = (width, height)
    image.convert = image.resize = image.load = None  # type: ignore[method-assign,assignment]
    return image


@pytest.mark.parametrize(
    ("frames", "settings", "error"),
    [
        (movie(1), dict(fps=2), "2 to 32768 frames .got 1"),
        (np.zeros((2**15 + 1, 1, 1, 3), np.uint8), dict(fps=2), "2 to 32768 frames .got 32769"),
        (b"bytes", dict(fps=2), "2 to 32768 frames .got bytes"),
        (movie(2), {}, "exactly one of fps and times must be given"),
        (movie(2), dict(fps=2, times=[0, 1]), "exactly one of fps and times must be given"),
        (movie(2), dict(fps=0), "fps must be a number above 0 .got 0"),
        (movie(2), dict(fps=float("nan")), "fps must be a number above 0 .got nan"),
        (movie(2), dict(fps=5e-324), "fps must be a number above 0 .got 5e-324"),
        (movie(2), dict(fps=True), "fps must be a number above 0 .got True"),
        (movie(2), dict(times=[1, 0]), "times must be 2 ascending numbers"),
        (movie(2), dict(times=[0]), "times must be 2 ascending numbers"),
        (movie(2), dict(times=[-1, 0]), "times must be 2 ascending numbers of at least 0"),
        (movie(2), dict(times=[0, float("nan")]), "times must be 2 ascending numbers"),
        (movie(2)[..., :2], dict(fps=2), r"an array must be uint8 \[rows, columns, 3\]"),
        (movie(2).astype(np.float32), dict(fps=2), r"an array must be uint8 \[rows, columns, 3\]"),
        ([b"", b""], dict(fps=2), "must be a PIL image or an array .got bytes"),
        ([movie(1, 8, 8)[0], movie(1, 8, 16)[0]], dict(fps=2), "same size .got 8 x 8 and 16 x 8"),
        (movie(2, 1, 201), dict(fps=2), "at most 200 times the shorter one .got 201 x 1"),
        ([unread(2**14, 2**13)] * 2, dict(fps=2), "16384 x 8192 pixels are too many"),
        ([unread(100, 100)] * 3, dict(fps=2, most_pixels=29999), "3 frames of 100 x 100 pixels are too many"),
        ([unread(4, 4)] * 2, dict(fps=2, most_pixels=255), "2 frames of 16 x 16 pixels are too many"),
    ],
)
def test_what_cannot_be_processed_is_refused(
    frames: Any, settings: dict[str, Any], error: str, processor: VideoProcessor
) -> None:
    """Sizes are refused before pixels are read."""
    with pytest.raises(InvalidRequestError, match=error):
        processor.process(frames, **settings)


def test_a_model_that_does_not_resize_refuses_other_sizes(folder: Path) -> None:
    try:
        processor = VideoProcessor(str(write(folder, do_resize=False)))
    finally:
        write(folder)
    with pytest.raises(InvalidRequestError, match="sides of frames must be multiples of 8 .got 28 x 20"):
        processor.process(movie(2), fps=2)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_other_families_are_refused_by_name(family: str, tmp_path: Path) -> None:
    make_vision_model(family, tmp_path)
    name = {"qwen2_5_vl": "Qwen2_5_VL", "gemma3": "Gemma3"}[family]
    with pytest.raises(ModelError, match=f"videos are not supported for {name}ForConditionalGeneration; serve"):
        VideoProcessor(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (dict(patch_size=5), "patch_size of the video processor must be 4 .got 5"),
        (dict(temporal_patch_size=1), "temporal_patch_size of the video processor must be 2"),
        (dict(video_processor_type="Other"), "video_processor_type of the video processor must be Qwen3VL"),
        (dict(num_frames=4), "num_frames of the video processor must be None"),
        (dict(size=dict(shortest_edge=-1, longest_edge=9)), "shortest_edge of the video processor is not valid: -1"),
        (dict(size=dict(shortest_edge=1, longest_edge=2.5)), "longest_edge of the video processor is not valid: 2.5"),
        (dict(size=dict(height=8, width=8)), "size of the video processor must have shortest_edge and longest_edge"),
        (dict(max_frames=1), "max_frames of the video processor is not valid: 1"),
        (dict(rescale_factor=1e-300), "rescale_factor of the video processor is not valid: 1e-300"),
        (dict(max_frames=2**20), "max_frames of the video processor is not valid"),
        (dict(image_std=[0.5, 0.5, 0]), "image_std of the video processor is not valid"),
        (dict(image_mean=[0.5]), "image_mean of the video processor is not valid"),
        (dict(fps="2"), "fps of the video processor is not valid"),
        (dict(resample=9), "resample of the video processor is not valid: 9"),
        (dict(do_resize=1), "do_resize of the video processor is not valid: 1"),
    ],
)
def test_settings_that_are_not_valid_are_refused(settings: dict[str, Any], error: str, folder: Path) -> None:
    try:
        write(folder, **settings)
        with pytest.raises(ModelError, match=error):
            VideoProcessor(str(folder))
    finally:
        write(folder)


def test_settings_are_found_where_transformers_finds_them(tmp_path: Path) -> None:
    folder = make_vision_model("qwen3_vl", tmp_path)
    with pytest.raises(ModelError, match="no settings of a video processor"):
        VideoProcessor(str(folder))
    for name, content in (
        ("preprocessor_config.json", SETTINGS | dict(fps=1)),
        ("video_preprocessor_config.json", SETTINGS | dict(fps=2)),
        ("processor_config.json", dict(video_processor=SETTINGS | dict(fps=3))),
    ):
        (folder / name).write_text(json.dumps(content))
        assert VideoProcessor(str(folder))._settings.fps == content.get("fps", 3)
    (folder / "processor_config.json").write_text("{}")
    assert VideoProcessor(str(folder))._settings.fps == 2


def test_settings_that_transformers_saves_are_read(tmp_path: Path, theirs: Any) -> None:
    folder = make_vision_model("qwen3_vl", tmp_path)
    theirs(**(SETTINGS | dict(fps=3, max_frames=9))).to_json_file(folder / "video_preprocessor_config.json")
    found = VideoProcessor(str(folder))._settings
    assert found == module._Settings.read(write(folder, fps=3, max_frames=9), VideoProcessor(str(folder)).tower)


def test_defaults_are_those_of_transformers(theirs: Any) -> None:
    found, own = module._Settings(), theirs()
    for name in ("image_mean", "image_std", "rescale_factor", "resample", "fps", "min_frames", "max_frames"):
        assert np.array_equal(getattr(found, name), getattr(own, name)), name
    for name in ("do_resize", "do_rescale", "do_normalize", "do_sample_frames", "max_video_tokens"):
        assert getattr(found, name) == getattr(own, name), name
    assert found.shortest_edge == own.size["shortest_edge"] and found.longest_edge == own.size["longest_edge"]
