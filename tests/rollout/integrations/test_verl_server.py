"""verl's server with images, on a real worker. Small stand-ins replace the four things that it imports from verl."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vision_models import PLACEHOLDER
from vision_processors import make_chat_model, photo, processor_of

from tiny import make_tiny_model
from trueroll.engine.media import ImageInput
from trueroll.engine.request import WeightSpan
from trueroll.errors import InvalidRequestError
from trueroll.rollout import AsyncRolloutClient, RolloutClient, SamplingParams

from .test_verl_settings import section

VIDEO = 501
GREEDY = dict(temperature=0.0, logprobs=True)
SIX = [1, *[PLACEHOLDER] * 6, 2]
"""A prompt for `photo(0)`, which has 24 x 16 pixels and six tokens."""


PROCESSORS: dict[str, Any] = {}
"""The processor of each model's folder. A folder without one has no processor."""


class TokenOutput(SimpleNamespace):
    """The fields of verl's class."""


@pytest.fixture(scope="module")
def server_class() -> Iterator[Any]:
    """The class `TruerollServer`."""
    contents: dict[str, dict[str, Any]] = {
        "verl": {},
        "verl.utils": {
            "normalize_token_ids": list,
            "hf_processor": lambda path, trust_remote_code: PROCESSORS.get(path),
        },
        "verl.utils.fs": {"copy_to_local": lambda path, use_shm: path},
        "verl.workers": {},
        "verl.workers.rollout": {},
        "verl.workers.rollout.replica": {"TokenOutput": TokenOutput},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, content in contents.items():
            module = ModuleType(name)
            vars(module).update(content)
            patch.setitem(sys.modules, name, module)
        name = "trueroll.rollout.integrations.verl.server"
        patch.delitem(sys.modules, name, raising=False)
        yield importlib.import_module(name).TruerollServer
        sys.modules.pop(name)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model("qwen3_vl", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def run(server_class: Any, model: Path, forked_workers: None) -> Iterator[Callable[..., Any]]:
    """A function that calls a coroutine function with the server, in the loop of the server."""
    with asyncio.Runner() as runner:
        server = runner.run(make_server(server_class, model, processor_of("qwen3_vl", model)))
        with server._worker:
            yield lambda work: runner.run(work(server))
            runner.run(server._client.close())


async def make_server(server_class: Any, model: Path, processor: Any, **more: Any) -> Any:
    own = dict(num_blocks=128, num_threads=1, max_images=2 if processor else 0)
    config = section(
        dtype="float32",
        full_determinism=True,
        seed=7,
        prompt_length=100,
        response_length=900,
        engine_kwargs={"trueroll": own},
        **more,
    )
    if processor is not None:
        processor.video_token_id = VIDEO
    PROCESSORS[str(model)] = processor
    model_config = SimpleNamespace(path=str(model), get=lambda name, default: default)
    return server_class(config, model_config, "cpu", False)


def test_tokens_over_old_kv_are_refused(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(server: Any) -> None:
        generate = server._client.generate

        async def keeping(*args: Any, **options: Any) -> list[Any]:
            [group] = await generate(*args, **options)
            span = WeightSpan(0, 0, len(group.samples[0].token_ids))
            return [SimpleNamespace(samples=[replace(group.samples[0], old_kv=(span,))])]

        monkeypatch.setattr(server._client, "generate", keeping)
        await server.generate("kept", [1, 2], dict(GREEDY, max_tokens=2))

    with pytest.raises(InvalidRequestError, match="drawn over KV of version 0"):
        run(work)


def placed(server: Any, *images: Any) -> list[ImageInput]:
    prompt = [token for _ in images for token in SIX]
    return server._images.place([prompt], [images])[0]


def test_an_image_reaches_the_worker_and_its_seed(run: Callable[..., Any]) -> None:
    sampling, other = dict(temperature=1.0, logprobs=True, max_tokens=8), photo(3)
    assert other.size == photo(0).size

    async def work(server: Any) -> list[Any]:
        found = [await server.generate("id", SIX, dict(sampling), image_data=[image]) for image in (photo(0), other)]
        server.set_version(0)
        found += [await server.generate("id", SIX, dict(sampling), image_data=[image]) for image in (other, photo(0))]
        again = await server.generate("id", SIX, dict(sampling), image_data=[photo(0)])
        options = {"images_kwargs": {"image_mean": [0.1, 0.2, 0.3]}}
        return [*found, again, await server.generate("id", SIX, GREEDY, [photo(0)], options), server.address()]

    first, second, second_again, first_again, next_one, changed, address = run(work)
    assert (first.token_ids, first.log_probs) == (first_again.token_ids, first_again.log_probs)
    assert (second.token_ids, second.log_probs) == (second_again.token_ids, second_again.log_probs)
    assert first.token_ids != second.token_ids and first.token_ids != next_one.token_ids
    with RolloutClient(address) as client:

        async def place(server: Any) -> list[ImageInput]:
            return placed(server, photo(0))

        [group] = client.generate([SIX], SamplingParams(temperature=0.0, max_tokens=8), media=[run(place)])
    assert group.samples[0].logprobs is not None and group.samples[0].logprobs[0] != changed.log_probs[0]


def test_the_log_probs_are_those_of_the_image(run: Callable[..., Any]) -> None:
    async def work(server: Any) -> tuple[Any, Any]:
        output = await server.generate("id", SIX, GREEDY | dict(max_tokens=6), image_data=[photo(0)])
        [score] = await server._client.score([SIX + output.token_ids], 0.0, media=[placed(server, photo(0))])
        return output, score

    output, score = run(work)
    assert len(output.token_ids) == 6 and output.stop_reason == "completed"
    assert np.array_equal(np.float32(output.log_probs), score.logprobs[len(SIX) - 1 :])


def test_a_sample_ends_before_a_placeholder_that_the_model_samples(run: Callable[..., Any]) -> None:
    """At a high temperature, all tokens of the vocabulary are about equally probable."""
    sampling = dict(temperature=100.0, logprobs=True, max_tokens=12, ignore_eos=True)

    async def work(server: Any) -> list[tuple[Any, Any]]:
        found = []
        for seed in (102, 105, 120):
            output = await server.generate("id", SIX, sampling | dict(seed=seed), image_data=[photo(0)])
            params = SamplingParams(temperature=100.0, max_tokens=12, ignore_eos=True, seed=seed)
            [group] = await server._client.generate([SIX], params, media=[placed(server, photo(0))])
            found.append((output, group.samples[0]))
        return found

    ends = []
    for output, whole in run(work):
        count = len(output.token_ids)
        assert output.stop_reason == "completed" and not {PLACEHOLDER, VIDEO} & {*output.token_ids}
        assert output.token_ids == whole.token_ids[:count] and output.log_probs == whole.logprobs[:count].tolist()
        ends.append((count, whole.token_ids[count]))
    assert ends == [(7, PLACEHOLDER), (2, VIDEO), (0, PLACEHOLDER)], "premise: the model samples placeholders"


def test_an_abort_includes_a_request_with_images_that_has_passed_the_gate(run: Callable[..., Any]) -> None:
    async def work(server: Any) -> Any:
        processed, process = asyncio.Event(), server._processed

        async def process_and_tell(*args: Any) -> Any:
            found = await process(*args)
            processed.set()
            return found

        server._processed = process_and_tell
        await server.abort_all_requests()
        sampling = dict(temperature=1.0, logprobs=True, ignore_eos=True)
        task = asyncio.create_task(server.generate("late", SIX, sampling, image_data=[photo(0)]))
        await processed.wait()
        await asyncio.sleep(0)
        await server.resume_generation()
        await asyncio.sleep(0)
        await server.abort_all_requests()
        await server.resume_generation()
        server._processed = process
        return await task

    output = run(work)
    assert output.stop_reason == "aborted" and len(output.token_ids) < 800


@pytest.mark.parametrize(
    ("media", "message"),
    [
        (dict(video_data=["a video"]), "video_data: not supported, because a worker takes texts and images only"),
        (dict(audio_data=["a sound"]), "audio_data: not supported"),
        (dict(image_data=[photo(0), photo(0)]), "its 2 images have 12 tokens, but the prompt has 6 placeholders"),
        (dict(image_data=["file:///etc/passwd"]), r"must be a PIL image \(got str\)"),
        (
            dict(image_data=[photo(0)], mm_processor_kwargs={"patch_size": -1}),
            "the trainer's processor refuses the image",
        ),
    ],
)
def test_media_that_a_worker_cannot_take_are_refused(
    run: Callable[..., Any], media: dict[str, Any], message: str
) -> None:
    async def work(server: Any) -> Any:
        return await server.generate("id", SIX, GREEDY, **media)

    with pytest.raises(InvalidRequestError, match=message):
        run(work)


def test_images_for_a_model_without_a_tower_are_refused(
    server_class: Any, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[server_class.__module__]
    monkeypatch.setattr(module, "launch_worker", lambda folder, **_: SimpleNamespace(address="tcp://127.0.0.1:1"))

    async def work() -> None:
        server = await make_server(server_class, tiny_llama, None)
        assert isinstance(server._client, AsyncRolloutClient)
        with pytest.raises(InvalidRequestError, match="image_data: the model has no vision tower"):
            await server.generate("id", [1, 2], GREEDY, image_data=[photo(0)])
        await server._client.close()

    asyncio.run(work())


@pytest.fixture(scope="module")
def run_moe(
    server_class: Any, tmp_path_factory: pytest.TempPathFactory, forked_workers: None
) -> Iterator[Callable[..., Any]]:
    """As `run`, for a mixture of experts with verl's replay of routed experts."""
    model = make_tiny_model("qwen3_moe", tmp_path_factory.mktemp("moe"))
    with asyncio.Runner() as runner:
        server = runner.run(make_server(server_class, model, None, enable_rollout_routing_replay=True))
        with server._worker:
            yield lambda work: runner.run(work(server))
            runner.run(server._client.close())


def test_routed_experts_of_a_partial_rollout_join_as_verl_joins_them(run_moe: Callable[..., Any]) -> None:
    """verl sends the tokens so far as the prompt, and appends as many rows as there are new tokens."""
    prompt = [*range(40, 60)]

    async def work(server: Any) -> list[Any]:
        whole = await server.generate("a", prompt, GREEDY | {"max_tokens": 8})
        first = await server.generate("b", prompt, GREEDY | {"max_tokens": 3})
        return [whole, first, await server.generate("b", prompt + first.token_ids, GREEDY | {"max_tokens": 5})]

    whole, first, rest = run_moe(work)
    assert first.token_ids + rest.token_ids == whole.token_ids
    assert whole.routed_experts.shape[0] == len(prompt) + 7 and whole.routed_experts.dtype == np.uint8
    joined = np.concatenate([first.routed_experts, rest.routed_experts[-len(rest.token_ids) :]])
    assert joined.tobytes() == whole.routed_experts.tobytes()


@pytest.mark.parametrize("k", [0, 3])
def test_a_teachers_log_probs_have_the_bits_of_scores(k: int, run_moe: Callable[..., Any]) -> None:
    prompt = [*range(40, 60)]
    asked = dict(max_tokens=1, temperature=1.0, prompt_logprobs=k, detokenize=False)

    async def work(server: Any) -> tuple[Any, str]:
        return await server.generate("a", prompt, asked), server.address()

    output, address = run_moe(work)
    with RolloutClient(address) as client:
        [score] = client.score([prompt], top_logprobs=k)
    assert score.top_token_ids is not None and score.top_logprobs is not None
    ids = score.top_token_ids.tolist() if k else [[token] for token in prompt[1:]]
    logprobs = score.top_logprobs.tolist() if k else score.logprobs[:, None].tolist()
    assert output.extra_fields["prompt_ids"] == [*ids, [0] * max(k, 1)]
    assert output.extra_fields["prompt_logprobs"] == [*logprobs, [0.0] * max(k, 1)]
    assert (output.token_ids, output.stop_reason) == ([], "completed")
