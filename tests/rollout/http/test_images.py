"""Prompts with images: the bits of the client, the prompt of the model's own processor, and hostile images."""

from __future__ import annotations

import asyncio
import gc
import io
import sys
import threading
from base64 import b64decode, b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from http_fronts import Front, error_of, events, front_end
from PIL import Image
from vision_chats import BEGIN, IMAGE, as_fields, as_file, as_part, make_vision_chat_model, picture
from vision_models import PLACEHOLDER

from trueroll.rollout import RolloutClient, SamplingParams, WorkerProcess, launch_worker
from trueroll.rollout.http import images, samples
from trueroll.rollout.http.config import HttpConfig
from trueroll.rollout.http.errors import HttpError
from trueroll.rollout.http.images import ImageMemory, Images, ImageUrl, RecentImages
from trueroll.rollout.images import ImageProcessor

from ..test_images import bomb

MAX_IMAGES = 2
MAX_PATCHES = 200
PART = as_part(as_file(picture(0)))
ONE_FAMILY = pytest.mark.parametrize("model", ["qwen3_vl"], indirect=True, scope="module")
SAMPLING: dict[str, Any] = dict(max_tokens=8, temperature=0.9, seed=5)


@pytest.fixture(scope="module", params=["qwen3_vl", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_chat_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def vision_worker(model: Path, forked_workers: None) -> Iterator[WorkerProcess]:
    limits = dict(max_images=MAX_IMAGES, max_image_patches=MAX_PATCHES)
    with launch_worker(str(model), num_blocks=256, num_threads=1, **limits) as running:
        yield running


@pytest.fixture(scope="module")
def vision(vision_worker: WorkerProcess) -> Iterator[Front]:
    with front_end(vision_worker.address, model_name="tiny", max_image_pixels=2**16) as running:
        yield running


@pytest.fixture(scope="module")
def processor(model: Path) -> ImageProcessor:
    return ImageProcessor(str(model))


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def conversation(*parts: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [*parts]}]}


def seen(vision: Front, processor: ImageProcessor, *seeds: int) -> tuple[list[int], list[Any]]:
    """Return the prompt and the processed images of a question about pictures."""
    parts = [as_part(as_file(picture(seed))) for seed in seeds]
    told = vision.post("/tokenize", conversation(*parts, text("what?"))).raise_for_status().json()
    placeholders = np.flatnonzero(np.array(told["tokens"]) == PLACEHOLDER)
    each = len(placeholders) // len(seeds)
    made = [processor.process(picture(seed)) for seed in seeds]
    assert [processor.tower.num_tokens(image.rows, image.columns) for image in made] == [each] * len(seeds)
    short = np.delete(told["tokens"], [place for i, place in enumerate(placeholders) if i % each])
    tokens, placed = processor.expand(short.tolist(), made)
    assert tokens.tolist() == told["tokens"]
    return told["tokens"], placed


def test_a_conversation_has_the_prompt_of_the_models_processor(vision: Front, model: Path) -> None:
    """Images may be in all turns, also in the results of tools."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    theirs = transformers.AutoImageProcessor.from_pretrained(model)
    pictures = [picture(0), picture(1, 64, 40)]
    parts = [as_part(as_file(pictures[0])), as_part(as_file(pictures[1], "WEBP"), "image/webp")]
    turns: list[Any] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [text("a"), parts[0], text("b")]},
        {"role": "assistant", "content": [text("c"), text("d")]},
        {"role": "tool", "content": [parts[1]]},
    ]
    rendered = "<system>be brief\n<user>aMARKb\n<assistant>c\nd\n<tool>MARK\n<assistant>"
    if "gemma3" in str(model):
        whole: Any = transformers.Gemma3Processor(theirs, tokenizer, image_seq_length=16)
        made = whole(images=pictures, text=rendered.replace("MARK", BEGIN), add_special_tokens=False)
        expected = made["input_ids"][0]
    else:
        for _, rows, columns in theirs(images=pictures, return_tensors="np")["image_grid_thw"].tolist():
            rendered = rendered.replace("MARK", IMAGE * (rows * columns // 4), 1)
        expected = tokenizer.encode(rendered, add_special_tokens=False)
    told = vision.post("/tokenize", {"messages": turns}).raise_for_status().json()
    assert told["tokens"] == list(expected) and told["count"] == len(expected) > 32


@pytest.mark.parametrize("is_stream", [False, True])
def test_all_endpoints_have_the_bits_of_the_client(
    vision: Front, vision_worker: WorkerProcess, processor: ImageProcessor, is_stream: bool
) -> None:
    prompt, placed = seen(vision, processor, 0, 1)
    with RolloutClient(vision_worker.address) as client:
        params = SamplingParams(max_tokens=8, temperature=0.9, n=2)
        [group] = client.generate([prompt], params, seed=5, media=[placed])
    asked = SAMPLING | {"n": 2, "logprobs": 0}
    chat = conversation(*(as_part(as_file(picture(seed))) for seed in (0, 1)), text("what?"))
    tokens = {"return_token_ids": True, "stream": is_stream}
    bodies = {
        "/v1/chat/completions": chat | asked | tokens | {"logprobs": True},
        "/v1/completions": {"prompt": prompt, "images": [*map(as_fields, placed)]} | asked | tokens,
        "/inference/v1/generate": {
            "token_ids": prompt,
            "images": [*map(as_fields, placed)],
            "sampling_params": asked,
            "stream": is_stream,
        },
    }
    count = processor.tower.num_tokens(placed[0].rows, placed[0].columns)
    places = [{"start": each.start, "end": each.start + count, "hash": each.content_hash.hex()} for each in placed]
    for path, body in bodies.items():
        response = vision.post(path, body).raise_for_status()
        answers = events(response)[:-1] if is_stream else [response.json()]
        choices = [choice for answer in answers for choice in answer["choices"]]
        told = [each["prompt_images"] for each in answers + choices if "prompt_images" in each]
        assert told == [places] * (1 if path != "/v1/completions" and not is_stream else 2)
        ids = [each["prompt_token_ids"] for each in answers + choices if each.get("prompt_token_ids")]
        assert all(each == prompt for each in ids) and bool(ids) == ("generate" not in path)
        for sample in group.samples:
            own = [choice for choice in choices if choice["index"] == sample.index]
            assert [token for choice in own for token in choice["token_ids"]] == sample.token_ids
            found = [each for choice in own for each in logprobs_of(choice)]
            assert sample.logprobs is not None and np.array(found, np.float32).tobytes() == sample.logprobs.tobytes()


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    told = choice["logprobs"] or {}
    return told["token_logprobs"] if "token_logprobs" in told else [each["logprob"] for each in told.get("content", ())]


def test_a_prompt_with_images_can_be_scored(
    vision: Front, vision_worker: WorkerProcess, processor: ImageProcessor
) -> None:
    prompt, placed = seen(vision, processor, 0, 1)
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 0.9}
    with RolloutClient(vision_worker.address) as client:
        [expected] = client.score([prompt], temperature=0.9, media=[placed])
    told = [
        vision.post("/v1/completions", body | more).raise_for_status().json()["choices"][0]["logprobs"]
        for more in ({"images": [*map(as_fields, placed)]}, {})
    ]
    found = [np.array(each["token_logprobs"][1 : len(prompt)], np.float32) for each in told]
    assert found[0].tobytes() == expected.logprobs.tobytes() != found[1].tobytes()


def test_an_image_that_comes_again_is_processed_once(vision: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures: list[Any] = []
    process = ImageProcessor.process

    def counted(self: ImageProcessor, image: Any, most_pixels: int) -> Any:
        pictures.append(image)
        return process(self, image, most_pixels)

    monkeypatch.setattr(ImageProcessor, "process", counted)
    first = conversation(as_part(as_file(picture(7))), text("what?"))["messages"]
    asked: dict[str, Any] = dict(max_tokens=4, return_token_ids=True, temperature=0.0)
    one = vision.post("/v1/chat/completions", asked | {"messages": first}).raise_for_status().json()
    turns = [*first, one["choices"][0]["message"], {"role": "user", "content": "and now?"}]
    two = vision.post("/v1/chat/completions", asked | {"messages": turns}).raise_for_status().json()
    assert len(pictures) == 1 and one["prompt_images"] == two["prompt_images"]
    assert two["usage"]["prompt_tokens_details"]["cached_tokens"] >= one["prompt_images"][0]["end"]
    changed = [conversation(as_part(as_file(picture(8))), text("what?"))["messages"][0], *turns[1:]]
    three = vision.post("/v1/chat/completions", asked | {"messages": changed}).raise_for_status().json()
    assert len(pictures) == 2 and three["prompt_token_ids"] == two["prompt_token_ids"]
    assert three["usage"]["prompt_tokens_details"]["cached_tokens"] < one["prompt_images"][0]["end"]


def url_part(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


URL = PART["image_url"]["url"]
HOSTILE = {
    "http": ([url_part("http://127.0.0.1:1/x.png")], "nothing was fetched"),
    "https": ([url_part("https://example.org/x.png")], "nothing was fetched"),
    "file": ([url_part("file:///etc/passwd")], "nothing was fetched"),
    "svg": ([as_part(b"<svg onload='x()'/>", "image/svg+xml")], "send the image in the request"),
    "gif": ([as_part(as_file(picture(0), "GIF"), "image/gif")], "send the image in the request"),
    "gif as png": ([as_part(as_file(picture(0), "GIF"))], "not a readable PNG, JPEG or WebP image"),
    "svg as png": ([as_part(b"<svg/>")], "not a readable PNG, JPEG or WebP image"),
    "not base64": ([url_part("data:image/png,abc")], "send the image in the request"),
    "characters": ([url_part(URL + "!!!!")], "not valid base64"),
    "line break": ([url_part(URL[:60] + "\n" + URL[60:])], "not valid base64"),
    "padding within": ([url_part("data:image/png;base64,QQ==" + URL[22:])], "not valid base64"),
    "cut off": ([url_part(URL[:-1])], "not valid base64"),
    "nothing": ([url_part("data:image/png;base64,")], "not a readable PNG, JPEG or WebP image"),
    "half a file": ([as_part(as_file(picture(0))[:-60])], "not a readable PNG, JPEG or WebP image"),
    "bomb": ([as_part(bomb(10000))], "10000 x 10000 pixels are too many (limit 65536 pixels)"),
    "large bomb": ([as_part(bomb(60000))], "exceeds limit"),
    "count": ([PART] * (MAX_IMAGES + 1), "3 images are too many (limit 2, the worker's max_images)"),
    "text for url": ([{"type": "image_url", "image_url": URL}], "must be an object with a string `url`"),
    "number": ([url_part(5)], "must be an object with a string `url`"),
    "detail": ([url_part(URL, detail="low")], "image_url.detail: 'low' is not supported"),
    "more": ([url_part(URL, uuid="x")], "image_url.uuid: 'x' is not supported"),
    "type": ([{"type": "image"}], "parts of type 'image' are not supported"),
    "audio": ([PART, {"type": "input_audio"}], "parts of type 'input_audio' are not supported"),
}


@ONE_FAMILY
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_images_are_refused(vision: Front, name: str) -> None:
    parts, message = HOSTILE[name]
    response = vision.post("/v1/chat/completions", conversation(text("what?"), *parts))
    error = error_of(response)
    assert response.status_code == 400 and error["param"].startswith("messages"), error
    assert message in error["message"], error


@pytest.mark.parametrize("step_chars", [4, 64, 2**18])
def test_base64_is_decoded_in_steps(step_chars: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_STEP_CHARS", step_chars)
    for size in (0, 1, 2, 3, 47, 48, 49, 1000):
        data = np.random.default_rng(size).bytes(size)
        encoded = b64encode(data).decode()
        assert images._decoded("x", "head" + encoded, 4) == data
        for wrong in (
            encoded + "=",
            encoded + "=" * 4,
            encoded + "A",
            encoded + "QQ==" * 2,
            "=" + encoded,
            encoded + "\n",
            "é" + encoded,
        ):
            with pytest.raises(HttpError, match="x: the text is not valid base64"):
                images._decoded("x", wrong)


@ONE_FAMILY
def test_an_image_with_too_many_patches_is_refused(vision: Front) -> None:
    response = vision.post("/tokenize", conversation(as_part(as_file(picture(0, 64, 64)))))
    assert response.status_code == 400
    assert "the image has 256 patches (limit 200, the worker's max_image_patches)" in error_of(response)["message"]


@pytest.mark.parametrize(
    "conversed",
    [
        conversation(text(f"a {IMAGE} b"), PART),
        conversation(PART) | {"tools": [{"type": "function", "function": {"name": IMAGE}}]},
        conversation(PART) | {"chat_template_kwargs": {"name": [IMAGE]}},
        {"messages": [{"role": "system", "content": [PART]}, {"role": "user", "content": IMAGE}]},
    ],
    ids=["text", "tools", "arguments", "instead"],
)
def test_a_typed_placeholder_is_never_an_image(vision: Front, conversed: dict[str, Any]) -> None:
    error = error_of(vision.post("/v1/chat/completions", conversed))
    assert error["param"] == "messages" and "which stands for an image" in error["message"]


@ONE_FAMILY
def test_without_images_a_typed_placeholder_is_text(vision: Front) -> None:
    tokens = vision.post("/tokenize", conversation(text(IMAGE))).raise_for_status().json()["tokens"]
    assert tokens.count(PLACEHOLDER) == 1


@ONE_FAMILY
@pytest.mark.parametrize("joined", ["<5", "<50"])
def test_a_placeholder_that_two_texts_form_is_counted(vision: Front, joined: str) -> None:
    error = error_of(vision.post("/tokenize", conversation(PART, text(joined), text(IMAGE.removeprefix(joined)))))
    assert "the model's chat template wrote 2 placeholders for 1 images" in error["message"]


@ONE_FAMILY
def test_an_image_that_the_template_ignores_is_refused(vision: Front) -> None:
    error = error_of(vision.post("/v1/chat/completions", conversation(PART, role="system")))
    assert "the model's chat template wrote 0 placeholders for 1 images" in error["message"]
    assert error["param"] == "messages"


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "start": ({"start": 0}, "must be the placeholder"),
    "negative": ({"start": -1}, "images"),
    "beyond": ({"start": 5000}, "exceed the prompt's"),
    "float": ({"start": 1.0}, "images"),
    "rows": ({"rows": 3}, "rows and columns of patches must be"),
    "huge": ({"rows": 2**20, "columns": 2**20}, "images[0]"),
    "frames": ({"frames": 3}, "frames must be 1 or 2"),
    "levels": ({"levels": "AAAA"}, "cannot be divided among"),
    "no levels": ({"levels": ""}, "levels must be a uint8 array"),
    "broken": ({"levels": "A" * 41}, "images[0].levels: the text is not valid base64"),
    "table": ({"table": "AAAA"}, "are not float32 [channels, 256]"),
    "no table": ({"table": ""}, "table must be a float32 array"),
    "not finite": (
        {"table": b64encode(np.full((3, 256), np.nan, "<f4").tobytes()).decode()},
        "values that are not finite",
    ),
    "unknown": ({"url": URL}, "images"),
}


@ONE_FAMILY
@pytest.mark.parametrize("name", CHANGES)
def test_processed_images_that_do_not_fit_are_refused(vision: Front, processor: ImageProcessor, name: str) -> None:
    prompt, [placed] = seen(vision, processor, 0)
    changes, message = CHANGES[name]
    fields = [as_fields(placed) | changes]
    asked = {"token_ids": prompt, "sampling_params": {"max_tokens": 1}, "images": fields}
    for path, body in (("/inference/v1/generate", asked), ("/v1/completions", {"prompt": prompt, "images": fields})):
        response = vision.post(path, body)
        error = error_of(response)
        assert response.status_code == 400 and error["param"].startswith("images"), error
        assert message in error["message"], error


@ONE_FAMILY
def test_other_forms_of_images_are_refused_by_name(vision: Front, processor: ImageProcessor) -> None:
    prompt, placed = seen(vision, processor, 0, 1)
    fields = [as_fields(each) for each in placed]
    generate = {"token_ids": prompt, "sampling_params": {}}
    completion = {"prompt": prompt, "max_tokens": 1}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/inference/v1/generate", generate | {"features": {"mm_hashes": {}}}, "features"),
        ("/inference/v1/generate", generate | {"images": fields[::-1]}, "images"),
        ("/inference/v1/generate", generate | {"images": [fields[0]] * 2}, "images"),
        ("/inference/v1/generate", generate | {"images": [*fields, fields[0]]}, "images"),
        ("/v1/completions", completion | {"prompt": "a", "images": fields}, "images"),
        ("/v1/completions", completion | {"prompt": [prompt, prompt], "images": fields}, "images"),
        ("/v1/completions", completion | {"prompt": [PART]}, "prompt"),
        ("/v1/chat/completions", conversation(text("a")) | {"images": fields}, "images"),
        ("/tokenize", {"prompt": "a", "images": fields}, "images"),
        ("/detokenize", {"tokens": prompt, "images": fields}, "images"),
    ]
    for path, body, field in cases:
        response = vision.post(path, body)
        error = error_of(response)
        assert response.status_code == 400 and error["param"].startswith(field) and field in error["message"], error


@ONE_FAMILY
def test_a_worker_without_a_tower_refuses_images(front: Front, vision: Front, processor: ImageProcessor) -> None:
    _, [placed] = seen(vision, processor, 0)
    chat = front.post("/v1/chat/completions", conversation(PART))
    generate = front.post(
        "/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {}, "images": [as_fields(placed)]}
    )
    for response in (chat, generate):
        assert response.status_code == 400 and "the worker takes no images" in error_of(response)["message"]


@ONE_FAMILY
def test_without_pillow_only_processed_images_are_served(
    vision: Front, vision_worker: WorkerProcess, processor: ImageProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, [placed] = seen(vision, processor, 0)
    body = {"token_ids": prompt, "sampling_params": SAMPLING, "images": [as_fields(placed)]}
    expected = vision.post("/inference/v1/generate", body).raise_for_status().json()["choices"]
    monkeypatch.setitem(sys.modules, "PIL", None)
    with front_end(vision_worker.address) as front:
        response = front.post("/v1/chat/completions", conversation(PART))
        assert response.status_code == 501 and "trueroll[vision]" in error_of(response)["message"]
        assert front.post("/inference/v1/generate", body).raise_for_status().json()["choices"] == expected
        shown = newest(front)
        assert shown["num_images"] == 1 and shown["images"] == []


@ONE_FAMILY
def test_other_requests_are_served_while_an_image_is_processed(vision: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()
    process = ImageProcessor.process

    def slow(*arguments: Any) -> Any:
        begun.set()
        assert may_end.wait(60)
        return process(*arguments)

    monkeypatch.setattr(ImageProcessor, "process", slow)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(vision.post, "/tokenize", conversation(as_part(as_file(picture(11)))))
        assert begun.wait(60)
        assert vision.post("/tokenize", conversation(text("a"))).status_code == 200
        assert vision.post("/tokenize", {"prompt": "a"}).status_code == 200 and not asked.done()
        may_end.set()
        assert asked.result().status_code == 200


def newest(front: Front) -> dict[str, Any]:
    id = front.get("/ui/live").json()["groups"][-1]["id"]
    return front.get(f"/ui/group?group={id}").json()


def test_the_page_shows_what_the_tower_sees(vision: Front, model: Path) -> None:
    chat = conversation(*(as_part(as_file(picture(seed))) for seed in (0, 1)), text("what?")) | SAMPLING
    vision.post("/v1/chat/completions", chat | {"logprobs": True}).raise_for_status()
    group = newest(vision)
    assert group["preview"] == "what?" and group["num_images"] == 2
    for shown, seed in zip(group["images"], (0, 1), strict=True):
        kind, _, data = shown["picture"].partition(",")
        file = b64decode(data, validate=True)
        assert kind == "data:image/png;base64" and file.startswith(b"\x89PNG") and len(file) < 2**15
        found = Image.open(io.BytesIO(file))
        size = (32, 32) if "gemma3" in str(model) else (48, 32)
        expected = picture(seed) if found.size == (48, 32) else picture(seed).resize(size, Image.Resampling.BILINEAR)
        assert found.size == size
        difference = np.abs(np.asarray(found, float) - np.asarray(expected, float))
        assert difference.max() == 0 if found.size == (48, 32) else difference.mean() < 8
    told = vision.post("/ui/score", {"group": group["id"], "sample": 0}).raise_for_status().json()
    assert told["num_equal"] == told["num_compared"] == 8 and told["difference"] is None


@ONE_FAMILY
def test_large_images_are_not_kept_for_the_page(vision: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MOST_IMAGE_BYTES", 100)
    vision.post("/v1/chat/completions", conversation(PART) | SAMPLING).raise_for_status()
    group = newest(vision)
    assert group["num_images"] == 1 and group["images"] == []
    response = vision.post("/ui/score", {"group": group["id"], "sample": 0})
    assert response.status_code == 400 and "too large to be kept" in error_of(response)["message"]


def test_the_bytes_of_images_are_bounded_until_they_are_freed() -> None:
    memory = ImageMemory(100)
    array: Any = np.zeros(60, np.uint8)
    memory.hold(array, array.nbytes)
    with pytest.raises(HttpError, match="more than 100 bytes") as raised, memory.room(41):
        pass
    assert (raised.value.status, raised.value.code) == (429, "images_full") and "Retry-After" in raised.value.headers
    with memory.room(40):
        assert memory.num_bytes == 100
    assert memory.num_bytes == 60
    del array
    gc.collect()
    assert memory.num_bytes == 0


@ONE_FAMILY
def test_recent_images_are_bounded_in_bytes(processor: ImageProcessor) -> None:
    made = [processor.process(picture(seed)) for seed in range(3)]
    size = images.num_bytes(made[0])
    recent = RecentImages(2 * size)
    for i in (0, 1):
        recent.add(bytes([i]), made[i])
    assert recent.get(b"\0") is made[0]
    recent.add(b"\2", made[2])
    assert [recent.get(bytes([i])) for i in range(3)] == [made[0], None, made[2]]


@ONE_FAMILY
def test_clients_with_different_salts_share_no_images(model: Path) -> None:
    own = Images(str(model), MAX_IMAGES, MAX_PATCHES, HttpConfig(address="ipc://x"))
    url = ImageUrl("here", URL)

    async def opened(salt: str | None) -> Any:
        return (await own.open([url], salt))[0]

    async def all_opened() -> list[Any]:
        return [await opened(salt) for salt in (None, None, "a", "a", "b")]

    found = asyncio.run(all_opened())
    own.close()
    assert found[0] is found[1] and found[2] is found[3] and len({*map(id, found)}) == 3
    assert own.memory.num_bytes == 3 * images.num_bytes(found[0])
    assert len({each.content_hash for each in found}) == 1
