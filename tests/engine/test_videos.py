"""Prompts with videos: against transformers, and part by part through the caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from vision_models import PLACEHOLDER, VIDEO_PLACEHOLDER, VISION_END, VISION_START

from trueroll.engine.media import ImageInput
from trueroll.engine.models.decoder import Decoder
from trueroll.engine.request import GenerateRequest, SampleOutput, SamplingParams
from trueroll.engine.running.loading import LoadedModel
from trueroll.engine.scheduling.media import SequenceMedia, spans_of
from trueroll.errors import AlignmentError
from trueroll.kernels.media import patches_of
from trueroll.kernels.specs import TowerSpec
from trueroll.kernels.training import align, token_log_probs

from .drive import tokens
from .models.test_towers import LOGITS_LIMITS, TOWER_LIMIT, encode, forward
from .test_images import bits_of, engine_of, image_of, loaded_model, run, tower_of

CPU = torch.device("cpu")
FAMILIES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
GRID = 4, 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("videos")


@pytest.fixture(params=FAMILIES)
def loaded(request: pytest.FixtureRequest, folders: Path) -> tuple[str, LoadedModel]:
    return request.param, loaded_model(request.param, "float32", folders / request.param)


def part_of(tower: TowerSpec, seed: int, grid: tuple[int, int] = GRID) -> ImageInput:
    """Return a part of a video with random pixels. Its frames differ."""
    first, second = (image_of(tower, grid, seed=2 * seed + i) for i in range(2))
    each = [image.levels.reshape(len(image.levels), tower.channels, 1, -1) for image in (first, second)]
    return replace(first, frames=2, levels=np.concatenate(each, 2).reshape(len(first.levels), -1))


def prompt_of(
    tower: TowerSpec, parts: Sequence[ImageInput], seed: int = 0
) -> tuple[np.ndarray, tuple[ImageInput, ...]]:
    """Return a prompt that begins and ends with text. Before each part comes text that stands for the part's time.
    Parts may be images.
    """
    pieces, placed, length = [tokens(7, seed=seed)], list[ImageInput](), 7
    for number, part in enumerate(parts):
        pieces.append(np.concatenate([tokens(4, seed=90 + number), [VISION_START]]))
        placed.append(replace(part, start=length + 5))
        marker = VIDEO_PLACEHOLDER if part.frames == 2 else PLACEHOLDER
        pieces.append(np.array([marker] * tower.num_tokens(part.rows, part.columns) + [VISION_END]))
        length += len(pieces[-1]) + 5
    return np.concatenate([*pieces, tokens(6, seed=seed + 9)]).astype(np.int32), tuple(placed)


def given_to_transformers(tower: TowerSpec, ids: np.ndarray, items: Sequence[ImageInput]) -> dict[str, Tensor]:
    """Return the arguments of transformers. All parts of videos together are one video."""
    inputs = dict[str, Tensor]()
    for frames, pixels, grid in ((1, "pixel_values", "image_grid_thw"), (2, "pixel_values_videos", "video_grid_thw")):
        if each := [item for item in items if item.frames == frames]:
            inputs[pixels] = torch.cat([patches_of(item, tower, torch.float32, CPU) for item in each])
            sizes = [[1, item.rows, item.columns] for item in each]
            inputs[grid] = torch.tensor(sizes if frames == 1 else [[len(sizes), *sizes[0][1:]]])
    given = torch.from_numpy(ids).long()[None]
    inputs["mm_token_type_ids"] = (given == PLACEHOLDER).int() + 2 * (given == VIDEO_PLACEHOLDER).int()
    return inputs | dict(input_ids=given)


def rows_of(model: Decoder, tower: TowerSpec, part: ImageInput) -> Tensor:
    return encode(model, patches_of(part, tower, torch.float32, CPU), (part.rows, part.columns))


def model_of_transformers(loaded: LoadedModel) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(loaded.folder, dtype=torch.float32).eval()


def test_a_video_agrees_with_transformers(loaded: tuple[str, LoadedModel]) -> None:
    """Towers, positions and logits are compared. trueroll encodes each part separately."""
    family, ours = loaded
    tower, theirs, limit = tower_of(ours.folder), model_of_transformers(ours), LOGITS_LIMITS.get(family, 1e-5)
    parts = [part_of(tower, seed) for seed in range(3)]
    ids, items = prompt_of(tower, [*parts, image_of(tower, (10, 4), seed=9)])
    inputs = given_to_transformers(tower, ids, items)
    assert inputs["video_grid_thw"].tolist() == [[3, *GRID]] and inputs["image_grid_thw"].tolist() == [[1, 10, 4]]
    expected = theirs.model.get_rope_index(**{n: each for n, each in inputs.items() if "pixel" not in n})
    media = SequenceMedia(items, tower, has_axes=True)
    assert torch.equal(torch.from_numpy(media.positions(0, len(ids))), expected[0][:, 0])
    assert media.shift == int(expected[1])
    with torch.inference_mode():
        found = theirs.model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"])
        deep = getattr(found, "deepstack_features", None) or []
        video = torch.cat([torch.cat(list(each)) for each in (found.pooler_output, *deep)], -1)
        rows = torch.cat([rows_of(ours.model, tower, item) for item in items])
        own = rows[: len(parts) * tower.num_tokens(*GRID)]
        logits = theirs(**inputs).logits[0]
        hidden = forward(ours.model, ids, spans_of(items, tower), rows)
    video = video.reshape(own.shape)
    assert (own - video).abs().max() <= TOWER_LIMIT * video.abs().max()
    error = (ours.model.ops.lm_head(hidden, ours.model.head) - logits).abs().max() / logits.abs().max()
    assert error <= limit


def test_greedy_samples_agree_with_transformers(loaded: tuple[str, LoadedModel]) -> None:
    _, ours = loaded
    tower = tower_of(ours.folder)
    ids, items = prompt_of(tower, [part_of(tower, seed) for seed in (4, 5)], seed=2)
    inputs = given_to_transformers(tower, ids, items)
    settings: dict[str, Any] = dict(max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    out = model_of_transformers(ours).generate(**inputs, **settings)
    params = SamplingParams(max_tokens=10, temperature=0.0, seed=1, ignore_eos=True)
    [sample] = run(
        engine_of(ours, max_num_batched_tokens=11, max_num_seqs=4), [GenerateRequest("one", ids, params, images=items)]
    )
    assert isinstance(sample, SampleOutput)
    assert list(sample.token_ids) == out[0, len(ids) :].tolist()


def test_each_frame_of_a_part_matters(loaded: tuple[str, LoadedModel]) -> None:
    _, ours = loaded
    tower = tower_of(ours.folder)
    part = part_of(tower, seed=1)
    frames = part.levels.reshape(len(part.levels), tower.channels, 2, -1)
    swapped = replace(part, levels=frames[:, :, ::-1].reshape(part.levels.shape).copy())
    still = replace(part, levels=frames[:, :, [0, 0]].reshape(part.levels.shape).copy())
    image = replace(part, frames=1, levels=frames[:, :, 0].reshape(len(part.levels), -1).copy())
    items = part, swapped, still, image
    assert len({item.content_hash for item in items}) == 4
    rows = [rows_of(ours.model, tower, item) for item in items]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (rows[one] - rows[other]).abs().max() > 0.01 * rows[one].abs().max()
    assert torch.equal(rows[2], rows[3]), "a still part has the rows of its image"


def test_a_hash_tells_images_from_parts_with_the_same_bytes(loaded: tuple[str, LoadedModel]) -> None:
    """A part of half the size has as many levels as an image."""
    _, ours = loaded
    tower = tower_of(ours.folder)
    part, image = part_of(tower, seed=1, grid=(4, 4)), image_of(tower, (4, 8), seed=1)
    image = replace(image, levels=part.levels.reshape(image.levels.shape).copy())
    assert part.levels.tobytes() == image.levels.tobytes() and part.content_hash != image.content_hash
    one_size = replace(image, rows=4, columns=4, levels=part.levels)
    assert one_size.content_hash != part.content_hash, "they differ only in `frames`"


def ask(name: str, tower: TowerSpec, parts: Sequence[ImageInput], seed: int = 1) -> GenerateRequest:
    prompt, placed = prompt_of(tower, parts)
    params = SamplingParams(max_tokens=8, seed=seed, ignore_eos=True, top_logprobs=2)
    return GenerateRequest(name, prompt, params, images=placed)


def test_videos_share_their_first_parts(loaded: tuple[str, LoadedModel]) -> None:
    """A part that a video has twice is encoded only once. No circumstance changes a bit."""
    _, ours = loaded
    tower = tower_of(ours.folder)
    a, b, c, d = (part_of(tower, seed) for seed in range(4))
    requests = [ask("one", tower, [a, b, c]), ask("two", tower, [a, b, d]), ask("twice", tower, [a, b, a])]
    expected = {}
    for request in requests:
        expected |= bits_of(run(engine_of(ours, enable_prefix_caching=False, max_images=3), [request]))
    assert len({*expected.values()}) == 3, "premise: the samples differ"
    engine = engine_of(ours, max_images=3)
    encodings = engine._scheduler.running.encodings
    assert encodings is not None
    found, encoded, cached = {}, [], []
    for request in requests:
        [sample] = outputs = run(engine, [request])
        assert isinstance(sample, SampleOutput)
        found |= bits_of(outputs)
        encoded.append(encodings.stats.encoded)
        cached.append(sample.num_cached_tokens)
    assert found == expected
    assert encoded == [3, 4, 4]
    third = requests[0].images[2].start
    assert cached[0] == 0
    assert all(third - 8 <= each < third + 8 for each in cached[1:]), "hits end near the start of the third part"
    chunked = engine_of(ours, max_images=3, max_num_batched_tokens=7, max_num_seqs=4)
    assert bits_of(run(chunked, requests)) == expected


def test_other_parts_share_no_block(loaded: tuple[str, LoadedModel]) -> None:
    """The prompts have the same tokens, and their parts have the same first frames."""
    _, ours = loaded
    tower = tower_of(ours.folder)
    part = part_of(tower, seed=1)
    frames = part.levels.reshape(len(part.levels), tower.channels, 2, -1)
    still = replace(part, levels=frames[:, :, [0, 0]].reshape(part.levels.shape).copy())
    one, other = ask("one", tower, [part]), ask("other", tower, [still])
    assert (one.prompt_token_ids == other.prompt_token_ids).all(), "premise"
    alone = bits_of(run(engine_of(ours), [other]))
    engine = engine_of(ours)
    run(engine, [one])
    [sample] = run(engine, [other])
    assert isinstance(sample, SampleOutput) and sample.num_cached_tokens <= one.images[0].start
    assert bits_of([sample]) == alone


def test_a_trainer_has_the_bits_of_samples_with_videos(folders: Path) -> None:
    loaded = loaded_model("qwen3_vl", "float32", folders / "qwen3_vl")
    tower = tower_of(loaded.folder)
    ids, items = prompt_of(tower, [part_of(tower, 1), image_of(tower, GRID, seed=9), part_of(tower, 2)])
    request = GenerateRequest("a", ids, SamplingParams(max_tokens=6, seed=3), images=items)
    [sample] = run(engine_of(loaded), [request])
    assert isinstance(sample, SampleOutput) and sample.logprobs is not None
    model = transformers.AutoModelForImageTextToText.from_pretrained(loaded.folder, dtype=torch.float32)
    align(model)
    row = torch.tensor([*ids.tolist(), *sample.token_ids])[None]
    found = token_log_probs(model, row, torch.ones_like(row, dtype=torch.bool), media=[items])[0, len(ids) :]
    assert torch.equal(found.detach().view(torch.int32), torch.tensor(sample.logprobs).view(torch.int32))
    one_frame = [
        replace(item, frames=1, levels=item.levels[:, : tower.channels * tower.patch_size**2]) for item in items
    ]
    with pytest.raises(AlignmentError, match=f"must be the placeholder {PLACEHOLDER}"):
        token_log_probs(model, row, torch.ones_like(row, dtype=torch.bool), media=[one_frame])
