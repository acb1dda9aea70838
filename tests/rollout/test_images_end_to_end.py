"""Images from clients to engines: the bits of the engine in this process, whatever the client and the kind of image."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import WorkerOnThread
from vision_models import PLACEHOLDER, make_vision_model

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.request import GenerateRequest, SampleOutput
from trueroll.engine.running.loading import LoadedModel, load_model
from trueroll.rollout import FleetClient, Group, ImageProcessor, RolloutClient, SamplingParams, derive_seed, protocol
from trueroll.rollout.client.connection import Connection
from trueroll.rollout.config import WorkerConfig

from .test_images import QWEN, photo

PROMPTS = [[5, PLACEHOLDER, 6, 7], [8, PLACEHOLDER, 9, PLACEHOLDER, 3], [4, 5, 6]]
PHOTOS = photo(), photo(33, 90, seed=1)
MEDIA = [[PHOTOS[0]], [PHOTOS[1], PHOTOS[0]], []]
PARAMS = SamplingParams(n=2, max_tokens=8, ignore_eos=True)
SEED = 7


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_vision_model("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))
    (folder / "preprocessor_config.json").write_text(json.dumps(QWEN))
    return load_model(config_of(folder))


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=str(folder), dtype="float32", max_images=4, num_blocks=200, block_size=8, max_model_len=400, num_threads=1
    )


def engine_of(loaded: LoadedModel) -> Engine:
    return Engine(config_of(loaded.folder), loaded)


@pytest.fixture
def addresses(loaded: LoadedModel) -> Iterator[list[str]]:
    """Yield the addresses of two workers."""
    workers = [WorkerOnThread(WorkerConfig(), lambda: engine_of(loaded)) for _ in range(2)]
    yield [worker.address for worker in workers]
    for worker in workers:
        worker.worker.drain()
        worker.worker.drain()
        worker.join()


@pytest.fixture(params=["one worker", "fleet"])
def client(request: pytest.FixtureRequest, addresses: list[str]) -> Iterator[RolloutClient]:
    with RolloutClient(addresses[0]) if request.param == "one worker" else FleetClient(addresses) as client:
        yield client


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[protocol.NeedImage]:
    """The questions that clients have answered."""
    answered: list[protocol.NeedImage] = []
    put = Connection._put_image
    monkeypatch.setattr(Connection, "_put_image", lambda self, need: (answered.append(need), put(self, need))[1])
    return answered


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> list[tuple[bytes, ...]]:
    """The bits of the samples of each prompt, from an engine in this process."""
    engine, processor = engine_of(loaded), ImageProcessor(str(loaded.folder))
    for i, (prompt, pictures) in enumerate(zip(PROMPTS, MEDIA, strict=True)):
        tokens, images = processor.expand(prompt, [processor.process(picture) for picture in pictures])
        params = PARAMS.model_copy(update=dict(seed=derive_seed(SEED, i)))
        engine.add(GenerateRequest(str(i), tokens, params, images=tuple(images)))
    samples: list[SampleOutput] = []
    while engine.has_unfinished:
        samples += [output for output in engine.step() if isinstance(output, SampleOutput)]
    samples.sort(key=lambda sample: (sample.request_id, sample.index))
    found = [bits([sample for sample in samples if sample.request_id == str(i)]) for i in range(len(PROMPTS))]
    assert len({*found}) == len(PROMPTS) and all(len(each) == PARAMS.n for each in found)
    return found


def bits(samples: Sequence[SampleOutput]) -> tuple[bytes, ...]:
    return tuple(np.array(each.token_ids, "<i4").tobytes() + floats(each.logprobs) for each in samples)


def floats(values: np.ndarray | None) -> bytes:
    assert values is not None and values.dtype == np.float32
    return values.tobytes()


def processed(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the prompts and images of groups as arguments of a call."""
    return dict(prompts=[group.prompt_token_ids for group in groups], media=[group.images for group in groups])


def test_clients_give_the_bits_of_the_engine(
    client: RolloutClient, expected: list[tuple[bytes, ...]], sent: list[protocol.NeedImage]
) -> None:
    groups = client.generate(PROMPTS, PARAMS, media=MEDIA, seed=SEED)
    assert [bits(group.samples) for group in groups] == expected
    assert [len(group.images) for group in groups] == [1, 2, 0]
    assert all(len(group.prompt_token_ids) == group.num_prompt_tokens for group in groups)
    assert sum(group.num_prompt_tokens for group in groups) > sum(map(len, PROMPTS)) + 20, "placeholders are expanded"
    assert {need.content_hash for need in sent} == {image.content_hash for group in groups for image in group.images}

    again = client.generate(**processed(groups), params=PARAMS, seed=SEED)
    assert [bits(group.samples) for group in again] == expected
    streamed: dict[int, dict[int, SampleOutput]] = {i: {} for i in range(len(PROMPTS))}
    for position, sample in client.stream(PROMPTS, PARAMS, media=MEDIA, seed=SEED):
        streamed[position][sample.index] = sample
    assert [bits([found[i] for i in sorted(found)]) for found in streamed.values()] == expected


def test_scores_and_continued_samples_have_the_same_bits(
    client: RolloutClient, expected: list[tuple[bytes, ...]]
) -> None:
    short = PARAMS.model_copy(update=dict(max_tokens=3))
    groups = client.generate(PROMPTS, short, media=MEDIA, seed=SEED)
    samples = [sample for group in groups for sample in group.samples]
    repeated = [group for group in groups for _ in group.samples]
    assert {len(sample.token_ids) for sample in samples} == {3}
    raw: dict[str, Any] = dict(
        prompts=[prompt for prompt in PROMPTS for _ in range(2)], media=[each for each in MEDIA for _ in range(2)]
    )
    for arguments in (processed(repeated), raw):
        whole = client.continue_samples(samples=samples, params=PARAMS, **arguments)
        assert bits(whole) == tuple(each for group in expected for each in group)
    sequences = [[*group.prompt_token_ids, *sample.token_ids] for group, sample in zip(repeated, whole, strict=True)]
    scores = client.score(sequences, media=[group.images for group in repeated])
    for sample, score in zip(whole, scores, strict=True):
        assert floats(score.logprobs[-len(sample.token_ids) :]) == floats(sample.logprobs)


def test_a_repeated_image_sends_no_pixels(addresses: list[str], sent: list[protocol.NeedImage]) -> None:
    with RolloutClient(addresses[0]) as client:
        groups = client.generate(PROMPTS, PARAMS, media=MEDIA)
        distinct = {image.content_hash: image for group in groups for image in group.images}
        sizes = {hash: image.table.nbytes + image.levels.nbytes for hash, image in distinct.items()}
        assert len(sizes) == 2 and sum(need.num_bytes for need in sent) == sum(sizes.values()), "each is sent once"
        sent.clear()
        client.generate(PROMPTS, PARAMS, media=MEDIA)
        client.score([group.prompt_token_ids for group in groups], media=[group.images for group in groups])
        assert sent == []


def test_without_a_seed_all_clients_draw_the_same_samples(addresses: list[str]) -> None:
    """The seed then depends on the images too."""
    images: list[Any] = [photo(40, 40, seed=seed) for seed in range(2)]
    seeds = []
    for kind, target in ((RolloutClient, addresses[0]), (FleetClient, addresses)):
        with kind(target) as client:  # type: ignore[arg-type]
            for image in images:
                ids = dict(request_ids=["r"])
                (group,) = client.generate([PROMPTS[0]], PARAMS, media=[[image]], **ids)  # type: ignore[arg-type]
                seeds.append(group.params.seed)
    assert seeds[:2] == seeds[2:] and seeds[0] != seeds[1]


def test_an_image_of_another_model_is_refused(addresses: list[str]) -> None:
    with RolloutClient(addresses[0]) as client:
        [group] = client.generate([PROMPTS[0]], PARAMS, media=[[PHOTOS[0]]])
        [image] = group.images
        small = replace(image, levels=np.ascontiguousarray(image.levels[:, ::2]))
        error, other = client.generate([group.prompt_token_ids] * 2, PARAMS, media=[[small], [image]], errors="return")
    assert isinstance(other, Group) and "preprocess the image with this model" in str(error)
