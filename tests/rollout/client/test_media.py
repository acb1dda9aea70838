"""What callers may give as `media`, and the prompts that workers get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from refusals import about
from vision_models import PLACEHOLDER, make_vision_model

from trueroll.engine.media import ImageInput
from trueroll.errors import ConfigError, InvalidRequestError, ModelError, WorkerFailedError
from trueroll.rollout import ImageProcessor, protocol
from trueroll.rollout.client import media
from trueroll.rollout.client.media import Prompt, PromptMaker, contents

from ..test_images import QWEN, photo
from .test_images import random_image
from .test_odd_replies import HEALTH

RAW = [5, PLACEHOLDER, 6, PLACEHOLDER]


class Counting(ImageProcessor):
    """Counts the processed images."""

    num_processed = 0

    def process(self, image: Any, *others: Any) -> ImageInput:
        self.num_processed += 1
        return super().process(image, *others)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_vision_model("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))
    (folder / "preprocessor_config.json").write_text(json.dumps(QWEN))
    return folder


@pytest.fixture
def processor(folder: Path) -> Counting:
    return Counting(str(folder))


def serving(*engines: dict[str, Any] | None, state: str = "ready") -> Callable[[], Any]:
    """Return a function for the health of a worker. Its engine is each of `engines` in turn, and then the last."""
    left = list(engines)

    async def health() -> protocol.Health:
        engine = left.pop(0) if len(left) > 1 else left[0]
        return protocol.Health.model_validate(HEALTH | dict(id="h", engine=engine, state=state))

    return health


def make(
    maker: PromptMaker | ImageProcessor, prompts: Any, images: Any, field: str = "prompts", errors: str = "raise"
) -> list[Any]:
    maker = PromptMaker(maker, serving(None)) if isinstance(maker, ImageProcessor) else maker
    return asyncio.run(maker.make(prompts, images, field, errors))


def test_raw_images_are_processed_once_and_expanded(processor: Counting) -> None:
    first, second = photo(), np.asarray(photo(33, 90, seed=1))
    found = make(processor, [RAW, [7, 8], RAW], [[first, second], (), [second, first]])
    assert processor.num_processed == 2
    images = [processor.process(each) for each in (first, second)]
    for prompt, given in ((found[0], images), (found[2], images[::-1])):
        tokens, placed = processor.expand(RAW, given)
        assert prompt.token_ids == tokens.tobytes() and len(tokens) > len(RAW)
        assert prompt.refs == tuple(map(protocol.ref_of, placed)) == tuple(map(protocol.ref_of, prompt.images))
    assert found[1] == Prompt(np.array([7, 8], "<i4").tobytes())
    assert contents(found).keys() == {image.content_hash for image in images}


def test_a_sequence_may_make_new_images_at_each_access(processor: Counting) -> None:
    class Lazy(Sequence[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, i: Any) -> Any:
            if not 0 <= i < 2:
                raise IndexError(i)
            return photo(seed=i)

    [lazy], [plain] = make(processor, [RAW], [Lazy()]), make(processor, [RAW], [[photo(seed=0), photo(seed=1)]])
    assert lazy.refs == plain.refs and len({ref.content_hash for ref in lazy.refs}) == 2


def test_processed_images_stay_as_they_are() -> None:
    images = random_image(), random_image(1, start=3)
    [prompt] = make(PromptMaker(None, serving(None)), [RAW], [images])
    assert prompt == Prompt(np.array(RAW, "<i4").tobytes(), images, tuple(map(protocol.ref_of, images)))


def test_without_media_prompts_have_no_images() -> None:
    found = make(PromptMaker(None, serving(None)), [RAW, []], None)
    assert found == [Prompt(np.array(RAW, "<i4").tobytes()), Prompt(b"")] and contents(found) == {}


BAD = {
    "text": (RAW, ["x", photo()], "media", r"media\[1\]\[0\]: image: must be a PIL image or an array .got str"),
    "floats": (RAW, [photo(), np.zeros((4, 4, 3))], "media", r"media\[1\]\[1\]: image: an array must be uint8"),
    "too few images": (RAW, [photo()], "prompts", r"prompts\[1\]: images: the prompt must have one placeholder"),
    "too few placeholders": ([1], [photo()], "prompts", r"prompts\[1\]: images: the prompt must have one placeholder"),
    "mixed": (RAW, [random_image(), photo()], "media", r"media\[1\]: 1 of 2 images are processed; process all images"),
    "rows": (RAW, [replace(random_image(), rows=5)], "media", r"media\[1\]\[0\]: levels must be uint8 \[5 \* 6, n\]"),
    "levels": (RAW, [replace(random_image(), levels=[1])], "media", r"media\[1\]\[0\]: levels must .* None \[\]"),
    "table": (RAW, [replace(random_image(), table=np.zeros((3, 256)))], "media", r"table must be float32 .*float64"),
    "start": (RAW, [random_image(start=-1)], "media", r"media\[1\]: start: "),
    "tokens": ([1.5], [photo()], "prompts", r"prompts\[1\]: must be a flat sequence of token ids"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_image_fails_only_its_prompt(processor: Counting, case: str) -> None:
    prompt, images, field, text = BAD[case]
    for errors in ("raise", "return"):
        call = [RAW, prompt, [3]], [[photo(), photo()], images, []], "prompts", errors
        if errors == "raise":
            with pytest.raises(InvalidRequestError, match=text, check=about(f"{field}[1]")):
                make(processor, *call)
            continue
        first, error, last = make(processor, *call)
        assert isinstance(first, Prompt) and isinstance(last, Prompt) and len(first.images) == 2
        with pytest.raises(InvalidRequestError, match=text):
            raise error


@pytest.mark.parametrize(
    ("images", "field", "text"),
    [
        ([[]], "media", "must have a list of images for each of 2 sequences .got 1"),
        (photo(), "media", "must have a list of images for each of 2 sequences .got Image"),
        ([[], photo()], "media[1]", r"media\[1\]: must be a list of images, which may be empty .got Image"),
        ([None, []], "media[0]", "got NoneType"),
        (["ab", []], "media[0]", "got str"),
    ],
)
def test_media_must_have_a_list_for_each_prompt(images: Any, field: str, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text, check=about(field)):
        make(PromptMaker(None, serving(None)), [[1], [2]], images, "sequences", "return")


def test_the_processor_of_the_workers_model_is_loaded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    load = media._load
    monkeypatch.setattr(media, "_load", lambda model: loaded.append(model) or load(model))
    monkeypatch.setattr(media, "LOOK_SECONDS", 0.0)
    maker = PromptMaker(None, serving(None, None, dict(model=str(folder))))

    async def several() -> list[list[Any]]:
        calls = [maker.make([[PLACEHOLDER]], [[photo()]], "prompts") for _ in range(3)]
        return await asyncio.gather(*calls)

    found = asyncio.run(several())
    assert loaded == [str(folder)] and len({prompt.token_ids for [prompt] in found}) == 1
    assert found[0][0].refs[0].content_hash == ImageProcessor(str(folder)).process(photo()).content_hash


@pytest.mark.parametrize(
    ("health", "kind", "text"),
    [
        (serving(None, state="failed"), WorkerFailedError, "could not load its model"),
        (serving(dict(model="hf://a/b")), ConfigError, "serves 'hf://a/b', which is not a folder on this machine"),
        (serving(dict(model=7)), ConfigError, "create the client with image_processor=ImageProcessor"),
    ],
)
def test_a_model_that_is_not_here_is_an_error(health: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        make(PromptMaker(None, health), [[PLACEHOLDER]], [[photo()]], errors="return")


def test_a_model_without_a_tower_is_an_error(tiny_llama: Path) -> None:
    maker = PromptMaker(None, serving(dict(model=str(tiny_llama))))
    with pytest.raises(ModelError, match="no vision tower"):
        make(maker, [[PLACEHOLDER]], [[Image.new("RGB", (8, 8))]])
