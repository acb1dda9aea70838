"""Prompts with images: the bits of a sample do not depend on the circumstances, and images are encoded once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from vision_models import GRIDS, MODELS, PLACEHOLDER, make_vision_model

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.media import ImageInput
from trueroll.engine.models.loader import read_config
from trueroll.engine.request import GenerateRequest, Output, SampleOutput, SamplingParams, ScoreOutput, ScoreRequest
from trueroll.engine.running.loading import LoadedModel, load_model
from trueroll.errors import ConfigError, InvalidRequestError
from trueroll.kernels.families import describe
from trueroll.kernels.media import patches_of
from trueroll.kernels.specs import TowerSpec

from .drive import tokens
from .models.test_towers import pixels_for_transformers

CPU = torch.device("cpu")
MAX_IMAGES = 4


@cache
def loaded_model(family: str, dtype: str, folder: Path) -> LoadedModel:
    if not folder.exists():
        folder.mkdir(parents=True)
        make_vision_model(family, folder)
    return load_model(EngineConfig(model=str(folder), dtype=dtype, max_images=MAX_IMAGES))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision")


@pytest.fixture(params=MODELS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def tower_of(folder: Path) -> TowerSpec:
    tower = describe(read_config(folder)).tower
    assert tower is not None
    return tower


def image_of(tower: TowerSpec, grid: tuple[int, int], seed: int, start: int = 0) -> ImageInput:
    generator = np.random.default_rng(seed)
    shape = grid[0] * grid[1], tower.channels * tower.patch_size**2
    table = np.linspace(-1.5, 1.5, tower.channels * 256, dtype=np.float32).reshape(tower.channels, 256)
    return ImageInput(start, *grid, generator.integers(0, 256, shape, np.uint8), table)


def prompt_of(
    tower: TowerSpec, images: Sequence[ImageInput], seed: int = 0, lead: int = 5
) -> tuple[np.ndarray, tuple[ImageInput, ...]]:
    """Return a prompt with the images between texts."""
    parts, placed, length = [], list[ImageInput](), 0
    for number, image in enumerate(images):
        parts.append(tokens(lead + 2 * number, seed=seed + number))
        length += len(parts[-1])
        placed.append(replace(image, start=length))
        parts.append(np.full(tower.num_tokens(image.rows, image.columns), PLACEHOLDER, np.int32))
        length += len(parts[-1])
    return np.concatenate([*parts, tokens(6, seed=seed + 9)]), tuple(placed)


def request_of(
    name: str, tower: TowerSpec, images: Sequence[ImageInput], seed: int = 0, **params: Any
) -> GenerateRequest:
    prompt, placed = prompt_of(tower, images, seed)
    others: dict[str, Any] = dict(max_tokens=10, seed=seed, ignore_eos=True, top_logprobs=3)
    settings = SamplingParams(**(others | params))
    return GenerateRequest(name, prompt, settings, images=placed)


def run(engine: Engine, requests: Sequence[GenerateRequest | ScoreRequest], most_steps: int = 2000) -> list[Output]:
    outputs = list[Output]()
    for request in requests:
        engine.add(request)
    for _ in range(most_steps):
        outputs += engine.step()
        if not engine.has_unfinished:
            engine.check_integrity()
            return outputs
    raise AssertionError("the engine does not finish")


def bits_of(outputs: Sequence[Output]) -> dict[tuple[str, int], bytes]:
    found = {}
    for output in outputs:
        assert isinstance(output, SampleOutput) and output.logprobs is not None and output.finish_reason == "length"
        found[output.request_id, output.index] = (
            np.array(output.token_ids, np.int64).tobytes() + np.asarray(output.logprobs, np.float32).tobytes()
        )
    return found


@pytest.fixture(params=["float32", "bfloat16"])
def served(family: str, folders: Path, request: pytest.FixtureRequest) -> tuple[str, LoadedModel]:
    return family, loaded_model(family, request.param, folders / family)


def engine_of(loaded: LoadedModel, **settings: Any) -> Engine:
    sizes: dict[str, Any] = dict(num_blocks=200, block_size=8, max_model_len=400, state_interval=8)
    config = dict(model=str(loaded.folder), dtype=loaded.dtype_name, max_images=MAX_IMAGES)
    return Engine(EngineConfig(**(config | sizes | settings)), loaded)


def asked(family: str, tower: TowerSpec) -> list[GenerateRequest]:
    """Return requests with one or two images, which share images and texts, and a request without images."""
    grids = GRIDS[family]
    first, second = (image_of(tower, grids[i % len(grids)], seed=i) for i in range(2))
    text = GenerateRequest("text", tokens(40, seed=5), SamplingParams(max_tokens=10, seed=5, ignore_eos=True))
    return [
        request_of("one", tower, [first], seed=1),
        request_of("two", tower, [first, second], seed=1, n=3, temperature=0.9, top_p=0.95),
        request_of("other", tower, [second], seed=1),
        request_of("greedy", tower, [second, first], seed=2, temperature=0.0),
        text,
    ]


def test_the_circumstances_change_no_bit(served: tuple[str, LoadedModel]) -> None:
    family, loaded = served
    tower = tower_of(loaded.folder)
    requests, expected = asked(family, tower), dict[tuple[str, int], bytes]()
    for request in requests:
        expected |= bits_of(run(engine_of(loaded, enable_prefix_caching=False), [request]))
    assert len(set(expected.values())) == len(expected), "premise: the samples differ"
    # All requests together, twice. The second time, the cache has the prompts.
    together = engine_of(loaded)
    assert bits_of(run(together, requests)) == expected
    hits = together.stats().prefix_hits
    assert bits_of(run(together, requests)) == expected
    assert together.stats().prefix_hits > hits + 30, "premise: later prompts hit"
    # Chunks that cut images, unless the images must be whole.
    budget = 20 if tower.sees_span else 7
    chunked = engine_of(loaded, max_num_batched_tokens=budget, max_num_seqs=4)
    assert bits_of(run(chunked, requests)) == expected
    assert chunked.stats().steps > together.stats().steps, "premise: more steps than both runs"
    # Too few blocks for all, and memory for one encoded image only.
    size = max(tower.num_tokens(image.rows, image.columns) for each in requests for image in each.images)
    memory = size * tower.row_size * loaded.model.dtype.itemsize
    starved = engine_of(loaded, num_blocks=22 if tower.pooled else 14, image_cache_bytes=memory)
    assert bits_of(run(starved, requests)) == expected
    assert starved.stats().preemptions > 0, "premise"
    encodings = starved._scheduler.running.encodings
    assert encodings is not None and encodings.stats.evictions > 0, "premise"
    drafting = engine_of(loaded, speculative="ngram")
    assert bits_of(run(drafting, requests)) == expected


def test_an_interruption_and_a_sleep_change_no_bit(served: tuple[str, LoadedModel]) -> None:
    family, loaded = served
    requests = asked(family, tower_of(loaded.folder))
    expected, engine = bits_of(run(engine_of(loaded), requests)), engine_of(loaded)
    for event in ("interrupt", "sleep"):
        outputs, recomputed = list[Output](), engine.stats().recomputed
        for request in requests:
            engine.add(request)
        for _ in range(6):
            outputs += engine.step()
        if event == "sleep":
            outputs += engine.sleep(1, ["kv_cache"], "recompute")
            encodings = engine._scheduler.running.encodings
            assert encodings is not None and encodings.num_bytes == 0
            engine.wake_up(["kv_cache"])
        else:
            outputs += engine.interrupt("recompute")
        while engine.has_unfinished:
            outputs += engine.step()
        assert bits_of(outputs) == expected, event
        assert engine.stats().recomputed > recomputed, "premise"


def test_scores_with_images_have_the_bits_of_samples(served: tuple[str, LoadedModel]) -> None:
    family, loaded = served
    tower = tower_of(loaded.folder)
    one, two = asked(family, tower)[:2]
    for request in (one, replace(two, params=one.params)):
        [sample] = [s for s in run(engine_of(loaded), [request]) if isinstance(s, SampleOutput) and s.index == 0]
        together = np.concatenate([request.prompt_token_ids, np.array(sample.token_ids, np.int32)])
        score = ScoreRequest("score", together, images=request.images)
        [found] = run(engine_of(loaded, max_num_batched_tokens=32, max_num_seqs=8), [score])
        assert isinstance(found, ScoreOutput) and found.logprobs is not None and sample.logprobs is not None
        given = np.asarray(found.logprobs, np.float32)[-len(sample.token_ids) :]
        assert given.tobytes() == np.asarray(sample.logprobs, np.float32).tobytes()


def test_greedy_samples_agree_with_transformers(family: str, folders: Path) -> None:
    loaded = loaded_model(family, "float32", folders / family)
    tower = tower_of(loaded.folder)
    theirs: Any = transformers.AutoModelForImageTextToText.from_pretrained(loaded.folder)
    request = asked(family, tower)[3]
    each = [
        pixels_for_transformers(tower, patches_of(image, tower, torch.float32, CPU), (image.rows, image.columns))
        for image in request.images
    ]
    inputs = {name: torch.cat([one[name] for one in each]) for name in each[0]}
    ids = torch.from_numpy(request.prompt_token_ids).long()[None]
    types = (ids == PLACEHOLDER).int()
    inputs["mm_token_type_ids" if "image_grid_thw" in inputs else "token_type_ids"] = types
    out = theirs.generate(ids, **inputs, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    [sample] = run(engine_of(loaded), [request])
    assert isinstance(sample, SampleOutput)
    assert list(sample.token_ids) == out[0, ids.shape[1] :].tolist()


def test_an_image_is_encoded_once(family: str, folders: Path) -> None:
    """The samples of a group, a second question and a request that joins share the encoded image."""
    loaded = loaded_model(family, "float32", folders / family)
    tower, engine = tower_of(loaded.folder), engine_of(loaded)
    image = image_of(tower, GRIDS[family][0], seed=3)
    encodings = engine._scheduler.running.encodings
    assert encodings is not None
    group = request_of("group", tower, [image], seed=1, n=8)
    outputs = run(engine, [group, replace(group, id="again")])
    for turn in range(2):
        prompt = np.concatenate([group.prompt_token_ids, tokens(7, seed=20 + turn)])
        outputs += run(engine, [replace(group, id=f"turn {turn}", prompt_token_ids=prompt)])
    assert len(outputs) == 32 and encodings.stats.encoded == 1
    assert encodings.num_bytes == tower.num_tokens(image.rows, image.columns) * tower.row_size * 4


def test_images_that_look_alike_share_no_block(family: str, folders: Path) -> None:
    """Two images have equal placeholders and levels, but different sizes. Two other images have equal sizes, but
    different levels or tables.
    """
    loaded = loaded_model(family, "float32", folders / family)
    tower = tower_of(loaded.folder)
    rows, columns = GRIDS[family][0]
    one = image_of(tower, (rows, columns), seed=3)
    brighter = np.ascontiguousarray(one.table * np.float32(1.01))
    others = [replace(one, table=brighter), replace(one, levels=one.levels[::-1].copy())]
    others += [] if tower.grid else [replace(one, rows=columns, columns=rows)]
    engine = engine_of(loaded)
    run(engine, [request_of("one", tower, [one], seed=1)])
    for number, other in enumerate(others):
        request = request_of(f"other {number}", tower, [other], seed=1)
        assert (request.prompt_token_ids == request_of("one", tower, [one], seed=1).prompt_token_ids).all(), "premise"
        [sample] = run(engine, [request])
        [alone] = run(engine_of(loaded), [request])
        assert isinstance(sample, SampleOutput) and sample.num_cached_tokens <= 8
        assert bits_of([sample]) == bits_of([alone])
    [again] = run(engine, [request_of("again", tower, [one], seed=1)])
    assert isinstance(again, SampleOutput) and again.num_cached_tokens >= (0 if tower.sees_span else 8)


def test_an_image_may_begin_and_end_a_prompt(family: str, folders: Path) -> None:
    """A sequence that waits for its image has no block yet."""
    loaded = loaded_model(family, "float32", folders / family)
    tower = tower_of(loaded.folder)
    image = image_of(tower, GRIDS[family][0], seed=3)
    placeholders = np.full(tower.num_tokens(image.rows, image.columns), PLACEHOLDER, np.int32)
    prompts = {"alone": placeholders, "first": np.concatenate([placeholders, tokens(5)])}
    params = SamplingParams(max_tokens=5, seed=1, ignore_eos=True)
    requests = [GenerateRequest(name, prompt, params, images=(image,)) for name, prompt in prompts.items()]
    text = GenerateRequest("text", tokens(9), params)
    expected: dict[tuple[str, int], bytes] = {}
    for request in (*requests, text):
        expected |= bits_of(run(engine_of(loaded), [request]))
    assert bits_of(run(engine_of(loaded, max_num_seqs=2), [*requests, text])) == expected
    score = ScoreRequest("score", np.concatenate([prompts["first"], tokens(3)]), images=(image,))
    assert len(run(engine_of(loaded), [score])) == 1


def test_an_image_that_never_finds_its_blocks_is_refused(tmp_path: Path) -> None:
    """All layers have a window, so a few blocks would suffice for text."""
    folder = make_vision_model("gemma3", tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"]["layer_types"] = ["sliding_attention"] * len(raw["text_config"]["layer_types"])
    (folder / "config.json").write_text(json.dumps(raw))
    loaded = load_model(EngineConfig(model=str(folder), max_images=1))
    tower = tower_of(folder)
    request = request_of("one", tower, [image_of(tower, (8, 8), seed=0)])
    finished = 0
    for num_blocks in range(4, 10):
        engine = engine_of(loaded, num_blocks=num_blocks)
        try:
            finished += len(run(engine, [request]))
        except InvalidRequestError as error:
            assert "blocks" in str(error) and not finished
    assert 0 < finished < 6


def test_a_commit_drops_encoded_images(folders: Path, tmp_path: Path) -> None:
    """A push changes the tower. Later samples have the bits of an engine that loaded the pushed weights."""
    family = "qwen3_vl"
    make_vision_model(family, tmp_path)
    loaded = load_model(EngineConfig(model=str(tmp_path), max_images=MAX_IMAGES))
    tower, engine = tower_of(loaded.folder), engine_of(loaded)
    request = request_of("one", tower, [image_of(tower, (4, 6), seed=3)], seed=1)
    before = bits_of(run(engine, [request]))
    weights = engine.weights
    staging = weights.new_staging(in_place=False)
    for name, shape in weights.shapes.items():
        staging.rows(name, 0, shape[0]).copy_(weights.served(name) * (1.5 if ".visual.blocks.1." in name else 1.0))
    engine.commit_weights(staging, 1, "abort")
    encodings = engine._scheduler.running.encodings
    assert encodings is not None and encodings.num_bytes == 0
    after = bits_of(run(engine, [request]))
    assert after != before
    assert bits_of(run(engine_of(loaded), [request])) == after, "the loaded model has the pushed weights"


def faulty(tower: TowerSpec) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return, for each fault, the expected error and the changes of the image."""
    good = image_of(tower, (4, 6), seed=0, start=5)
    return {
        "elsewhere": ("must be the placeholder", dict(start=4)),
        "outside": (r"exceed the prompt's 17 tokens", dict(start=90)),
        "before": (r"overlap the previous image", dict(start=-3)),
        "a float start": ("start must be an integer .got 5.0", dict(start=5.0)),
        "a small start": ("start must be an integer", dict(start=np.uint8(5))),
        "a list": ("levels must be a uint8 array of shape", dict(levels=good.levels.tolist())),
        "nothing": ("table must be a float32 array of shape", dict(table=None)),
        "odd": ("multiples of 2 .got 3 and 8", dict(rows=3, columns=8)),
        "none": ("multiples of 2 .got 0 and 6", dict(rows=0)),
        "a float": ("multiples of 2 .got 4.0 and 6", dict(rows=4.0)),
        "huge": ("at most 16384 patches .got 1048576", dict(rows=1024, columns=1024)),
        "few levels": (r"levels must be a uint8 array of shape \[24, 48\]", dict(levels=good.levels[:-1])),
        "signed levels": ("levels must be a uint8 array", dict(levels=good.levels.astype(np.int8))),
        "a short table": (r"table must be a float32 array of shape \[3, 256\]", dict(table=good.table[:, :255])),
        "a wide table": ("table must be a float32 array", dict(table=good.table.astype(np.float64))),
        "nan": ("table has values that are not finite", dict(table=np.full_like(good.table, np.nan))),
        "three frames": (
            r"frames must be 1 or 2 .got 3., because this model takes videos in parts of 2",
            dict(frames=3),
        ),
        "true frames": (r"frames must be 1 or 2 .got True", dict(frames=True)),
        "one frame as two": ("must be the placeholder 501", dict(frames=2)),
        "a video": ("must be the placeholder 501", dict(frames=2, levels=good.levels.repeat(2, 1))),
        "other size": ("must be the placeholder", dict(rows=4, columns=8, levels=np.zeros((32, 48), np.uint8))),
    }


@pytest.mark.parametrize(
    "fault",
    [
        *(
            "elsewhere",
            "outside",
            "before",
            "a float start",
            "odd",
            "none",
            "a float",
            "huge",
            "few levels",
            "signed levels",
        ),
        *("a short table", "a wide table", "nan", "other size"),
        *("three frames", "true frames", "one frame as two", "a video"),
    ],
)
def test_faulty_images_are_refused(fault: str, folders: Path) -> None:
    loaded = loaded_model("qwen3_vl", "float32", folders / "qwen3_vl")
    tower, engine = tower_of(loaded.folder), engine_of(loaded)
    request = request_of("one", tower, [image_of(tower, (4, 6), seed=0)])
    error, changes = faulty(tower)[fault]
    with pytest.raises(InvalidRequestError, match=error):
        engine.add(replace(request, images=(replace(request.images[0], **changes),)))
    assert not engine.has_unfinished
    assert len(run(engine, [request])) == 1


def test_what_cannot_be_served_is_refused(folders: Path) -> None:
    loaded = loaded_model("gemma3", "float32", folders / "gemma3")
    tower, image = tower_of(loaded.folder), image_of(tower_of(loaded.folder), (8, 8), seed=0)
    request = request_of("one", tower, [image])
    touching = np.concatenate([tokens(3), np.full(32, PLACEHOLDER, np.int32), tokens(2)])
    images = replace(image, start=3), replace(image, start=19)
    video = replace(request.images[0], frames=2, levels=image.levels.repeat(2, 1))
    cases: list[tuple[str, GenerateRequest, dict[str, Any]]] = [
        ("16 tokens of the image must be computed in one step .limit 15", request, dict(max_num_batched_tokens=22)),
        ("encoded image has 4096 bytes .limit 4095", request, dict(image_cache_bytes=4095)),
        ("at most 4 images .got 5", request_of("five", tower, [image] * 5), {}),
        ("begins where the previous image ends", replace(request, prompt_token_ids=touching, images=images), {}),
        ("rows and columns of patches must be 8 and 8", replace(request, images=(replace(images[0], rows=4),)), {}),
        ("frames must be 1 .got 2., because this model takes no videos", replace(request, images=(video,)), {}),
    ]
    for error, wrong, settings in cases:
        engine = engine_of(loaded, **({"max_num_seqs": 8} | settings))
        with pytest.raises(InvalidRequestError, match=error):
            engine.add(wrong)
    with pytest.raises(ConfigError, match="no vision tower"):
        load_model(EngineConfig(model="smollm2", max_images=1))
    text_only = Engine(EngineConfig(model=str(loaded.folder), num_blocks=64))
    with pytest.raises(InvalidRequestError, match="at most 0 images"):
        text_only.add(request)
