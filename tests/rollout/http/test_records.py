"""Records over HTTP: log-probs of given tokens, kept sets and log-probs of prompts, with the bits of the client."""

from __future__ import annotations

import asyncio
import shutil
import tracemalloc
from base64 import b64decode
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine
from http_fronts import CHAT_TEMPLATE, Front, error_of, events, front_end
from serving import serving

from tiny import make_tiny_model
from trueroll.engine.request import NO_TARGET, SampleOutput
from trueroll.rollout import AsyncRolloutClient, RolloutClient, SamplingParams, launch_worker, protocol
from trueroll.rollout.http import server
from trueroll.rollout.http.answers import Binary, encoded
from trueroll.rollout.http.generate import GenerateForm, SamplingFields
from trueroll.rollout.http.images import Prompt
from trueroll.rollout.http.pieces import Asker, Task
from trueroll.rollout.http.samples import SampleLog
from trueroll.rollout.http.turns import Turns
from trueroll.rollout.http.wire import long_answer

PROMPT = list(range(40, 80))
SAMPLING: dict[str, Any] = dict(n=2, max_tokens=12, temperature=0.8, top_k=30, seed=11)
RECORDS: dict[str, Any] = dict(target_token_ids=[7, 300, 9], return_sampling_mask=True)


def array_of(text: str) -> np.ndarray:
    return np.load(BytesIO(b64decode(text)), allow_pickle=False)


def body_for(path: str, **more: Any) -> dict[str, Any]:
    fields = SAMPLING | RECORDS | more
    if path == "/inference/v1/generate":
        return dict(token_ids=PROMPT, sampling_params=fields)
    content: dict[str, Any] = dict(prompt=PROMPT) if path == "/v1/completions" else dict(messages=MESSAGES)
    return content | fields | {"return_token_ids": True}


MESSAGES = [{"role": "user", "content": "once"}]
PATHS = ["/inference/v1/generate", "/v1/completions", "/v1/chat/completions"]


@pytest.mark.parametrize("path", PATHS)
def test_records_have_the_bits_of_the_client(path: str, front: Front, client: RolloutClient) -> None:
    answer = front.post(path, body_for(path)).json()
    prompt = answer.get("prompt_token_ids") or PROMPT
    given: dict[str, Any] = SAMPLING | RECORDS | {"seed": None}
    params = SamplingParams(**given)
    [group] = client.generate([prompt], params, seed=SAMPLING["seed"])
    for choice, sample in zip(answer["choices"], group.samples, strict=True):
        assert choice["token_ids"] == sample.token_ids and choice["logprobs"] is None
        assert sample.target_logprobs is not None and sample.kept_log_mass is not None
        targets, log_mass = array_of(choice["target_logprobs"]), array_of(choice["sampling_mask_log_mass"])
        assert (targets.shape, targets.tobytes()) == (sample.target_logprobs.shape, sample.target_logprobs.tobytes())
        assert log_mass.tobytes() == sample.kept_log_mass.tobytes()
        assert [len(ids) for ids in choice["sampling_mask"]] == [30] * len(sample.token_ids)
        assert sum(choice["sampling_mask"], []) == np.array(sample.kept_token_ids).tolist()
    plain = front.post(path, body_for(path, target_token_ids=None, return_sampling_mask=None)).json()
    assert not plain["choices"][0].keys() & {"target_logprobs", "sampling_mask", "sampling_mask_log_mass"}
    assert plain["choices"][0]["token_ids"] == group.samples[0].token_ids


def test_the_events_of_a_stream_have_the_records_of_its_samples(front: Front) -> None:
    body = body_for("/v1/completions", n=1)
    [whole] = front.post("/v1/completions", body).json()["choices"]
    streamed = events(front.post("/v1/completions", body | {"stream": True}))
    told = [event["choices"][0] for event in streamed[:-1]]
    parts = [array_of(choice["target_logprobs"]) for choice in told if "target_logprobs" in choice]
    assert np.concatenate(parts).tobytes() == array_of(whole["target_logprobs"]).tobytes()
    assert sum((choice.get("sampling_mask", []) for choice in told), []) == whole["sampling_mask"]


@pytest.mark.parametrize("path", PATHS)
def test_log_probs_of_a_prompt_have_the_bits_of_scores(path: str, front: Front, client: RolloutClient) -> None:
    """The most probable tokens and the token itself have vLLM's form. Given tokens are an array."""
    sampling = dict(n=1, max_tokens=1, temperature=0.8, top_k=None, target_token_ids=None, return_sampling_mask=None)
    prompt = front.post(path, body_for(path)).json().get("prompt_token_ids") or PROMPT
    start = 5
    targets = np.random.default_rng(0).integers(NO_TARGET, 512, (len(prompt) - 1 - start, 3))
    asked = dict(prompt_logprobs=4, prompt_logprob_start=start, prompt_logprob_token_ids=targets.tolist())
    answer = front.post(path, body_for(path, **sampling, **asked)).json()
    told = answer["choices"][0] if path == "/v1/completions" else answer
    [score] = client.score([prompt], temperature=0.8, top_logprobs=4)
    assert score.top_token_ids is not None and score.top_logprobs is not None
    rows = told["prompt_logprobs"]
    assert rows[0] is None and len(rows) == len(prompt)
    for i, row in enumerate(rows[1:]):
        assert row[str(prompt[i + 1])]["logprob"] == float(score.logprobs[i])
        best = sorted(row.items(), key=lambda item: item[1]["rank"])[:4]
        assert [(int(id), each["logprob"]) for id, each in best] == [
            *zip(score.top_token_ids[i].tolist(), score.top_logprobs[i].tolist(), strict=True)
        ]
        assert len(row) == 4 + (prompt[i + 1] not in score.top_token_ids[i])
    [given] = client.score([prompt], temperature=0.8, start=start + 1, target_token_ids=[targets])
    found = array_of(told["prompt_token_id_logprobs"])
    assert given.target_logprobs is not None
    assert (found.shape, found.tobytes()) == (given.target_logprobs.shape, given.target_logprobs.tobytes())


@pytest.mark.parametrize("has_targets", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_kept_sets_of_a_prompt_have_the_bits_of_scores(
    path: str, has_targets: bool, front: Front, client: RolloutClient
) -> None:
    prompt, start = front.post(path, body_for(path)).json().get("prompt_token_ids") or PROMPT, 2
    asked: dict[str, Any] = dict(prompt_sampling_mask=True, prompt_logprob_start=start)
    if has_targets:
        asked["prompt_logprob_token_ids"] = [[7]] * (len(prompt) - 1 - start)
    sampling = dict(n=1, max_tokens=1, temperature=0.8, top_k=None, top_p=0.9)
    answer = front.post(path, body_for(path, **sampling, **asked)).json()
    told = answer["choices"][0] if path == "/v1/completions" else answer
    [score] = client.score([prompt], temperature=0.8, top_p=0.9, start=start + 1, return_sampling_mask=True)
    assert score.kept_counts is not None and score.kept_token_ids is not None and score.kept_log_mass is not None
    assert [len(ids) for ids in told["prompt_sampling_mask"]] == score.kept_counts.tolist() and score.kept_counts.all()
    assert sum(told["prompt_sampling_mask"], []) == score.kept_token_ids.tolist()
    assert array_of(told["prompt_sampling_mask_log_mass"]).tobytes() == score.kept_log_mass.tobytes()
    assert ("prompt_token_id_logprobs" in told) == has_targets


def test_a_prompt_without_tokens_to_record_has_empty_kept_sets(front: Front) -> None:
    body = dict(prompt=[PROMPT, PROMPT[:1]], max_tokens=1, top_k=3, prompt_sampling_mask=True, prompt_logprob_start=38)
    long, short = front.post("/v1/completions", body).json()["choices"]
    assert [len(ids) for ids in long["prompt_sampling_mask"]] == [3] and short["prompt_sampling_mask"] == []
    assert array_of(short["prompt_sampling_mask_log_mass"]).shape == (0,)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("prompt_sampling_mask", dict(prompt_sampling_mask=1)),
        ("prompt_sampling_mask", dict(prompt_sampling_mask=True, stream=True)),
        ("max_tokens", dict(prompt=[PROMPT] * 4, n=1000, prompt_sampling_mask=True, top_p=0.9)),
        ("prompt_logprob_token_ids", dict(prompt_logprob_token_ids=[[1]] * 3)),
        ("prompt_logprob_token_ids", dict(prompt_logprob_token_ids=[[1, 2], *[[1]] * 38])),
        ("prompt_logprob_token_ids", dict(prompt_logprob_token_ids=[[-2]] * 39)),
        ("prompt_logprob_token_ids", dict(prompt_logprob_token_ids=[[1]] * 39, prompt_logprob_start=1)),
        ("prompt_logprobs", dict(prompt_logprobs=1025)),
        ("prompt_logprobs", dict(prompt_logprobs=1, stream=True)),
        ("target_token_ids", dict(target_token_ids=[512])),
        ("target_token_ids", dict(target_token_ids=[*range(1025)])),
        ("return_sampling_mask", dict(return_sampling_mask=1)),
        ("routed_experts_prompt_start", dict(return_routed_experts=True, routed_experts_prompt_start=41)),
        ("return_routed_experts", dict(return_routed_experts=True)),
        ("max_tokens", dict(prompt=[PROMPT] * 2, n=1000, max_tokens=80, target_token_ids=[*range(512)] * 2)),
    ],
)
def test_records_that_cannot_be_had_are_refused(field: str, fields: dict[str, Any], front: Front) -> None:
    body = dict(prompt=PROMPT, max_tokens=2) | fields
    assert error_of(front.post("/v1/completions", body))["param"] == field


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5000, 3), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.uint16])
def test_an_array_is_written_in_parts_as_one_file(shape: tuple[int, ...], dtype: type) -> None:
    array = np.random.default_rng(0).integers(0, 255, shape).astype(dtype)
    found = array_of(encoded({"array": Binary(array)}).decode()[10:-2])
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, shape, array.tobytes())
    assert max(map(len, Binary(array).parts())) <= 2**13


@pytest.mark.parametrize("name", ["target_logprobs", "sampling_mask"])
def test_a_long_reply_takes_at_most_one_and_a_half_times_the_bytes_of_its_answer(name: str) -> None:
    """2,000 tokens with 128 records each. The frame of the reply counts until the end."""
    rows, generator = 2000, np.random.default_rng(0)
    ones = np.ones(rows, np.float32)
    columns: dict[str, Any] = dict(target_logprobs=-generator.random((rows, 128), np.float32))
    if name == "sampling_mask":
        ids = generator.integers(0, 32768, rows * 128).astype(np.int32)
        columns = dict(kept_counts=np.full(rows, 128, np.int32), kept_log_mass=ones, kept_token_ids=ids)
    sample = SampleOutput("r", 0, [*range(rows)], ones, "length", 7, 0, (), **columns)
    frame = protocol.encode(protocol.sample_message("r", sample))

    class Reply:
        async def samples(self) -> list[list[SampleOutput]]:
            message = protocol.from_worker(frame)
            assert isinstance(message, protocol.FinishedSample)
            return [[protocol.sample_output(message, read_only=True)]]

        def stream(self) -> Any:
            raise NotImplementedError

    async def answered() -> int:
        task = Task([PROMPT], [()], SamplingParams(), None, is_stream=False)
        form = GenerateForm("r", 0, "m", frozenset(), Prompt(PROMPT), SamplingFields(), {}, tells_usage=False)
        content = await Asker(Reply(), None, frozenset(), SampleLog(), Turns()).whole(task, form)
        sent = list[int]()

        async def send(message: Any) -> None:
            sent.append(len(message.get("body", b"")))

        async def receive() -> Any:
            await asyncio.Event().wait()

        await (await long_answer(content, Turns()))({"type": "http"}, receive, send)
        return sum(sent)

    asyncio.run(answered())  # imports and caches are not counted
    tracemalloc.start()
    try:
        length = asyncio.run(answered())
        peak = tracemalloc.get_traced_memory()[1] + len(frame)
    finally:
        tracemalloc.stop()
    assert length > 1_300_000 and peak < 1.5 * length


def test_the_client_of_a_front_end_copies_no_arrays(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, client_for = list[dict[str, Any]](), server.client_for

    def recorded(*arguments: Any, **settings: Any) -> AsyncRolloutClient:
        made.append(settings)
        return client_for(*arguments, **settings)

    monkeypatch.setattr(server, "client_for", recorded)
    with serving(FakeEngine()) as running, front_end(running.address, tokenizer=str(chat_model)):
        pass
    assert [settings["read_only"] for settings in made] == [True]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory, forked_workers: None) -> Iterator[tuple[Front, RolloutClient]]:
    """A front end and a client of a worker with a mixture of experts."""
    made = make_tiny_model("qwen3_moe", tmp_path_factory.mktemp("moe"))
    folder = shutil.copytree(made, tmp_path_factory.mktemp("chat") / "moe")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    with launch_worker(str(folder), num_blocks=64, num_threads=1) as worker, RolloutClient(worker.address) as client:
        with front_end(worker.address) as front:
            yield front, client


@pytest.mark.parametrize("path", PATHS)
def test_routed_experts_have_the_bits_of_the_client_and_continue_without_a_gap(
    path: str, experts: tuple[Front, RolloutClient]
) -> None:
    front, client = experts
    sampling = dict(n=1, target_token_ids=None, return_sampling_mask=None, return_routed_experts=True)
    answer = front.post(path, body_for(path, **sampling, routed_experts_prompt_start=7)).json()
    prompt, [choice] = answer.get("prompt_token_ids") or PROMPT, answer["choices"]
    sampled = choice["token_ids"]
    given: dict[str, Any] = SAMPLING | dict(n=1, seed=None, return_routed_experts=True)
    params = SamplingParams(**given)
    [[sample]] = [group.samples for group in client.generate([prompt], params, seed=SAMPLING["seed"])]
    whole = sample.routed_experts
    assert whole is not None and sample.token_ids == sampled and len(whole) == len(prompt) + len(sampled) - 1
    found = array_of(choice["routed_experts"])
    assert found.dtype == np.uint8 and found.tobytes() == whole[7:].tobytes()
    if path == "/inference/v1/generate":
        turn = prompt + sampled + [5, 6, 7]
        asked = SAMPLING | sampling | dict(temperature=0.0, routed_experts_prompt_start=len(prompt + sampled) - 1)
        [next_turn] = front.post(path, dict(token_ids=turn, sampling_params=asked)).json()["choices"]
        joined = np.concatenate((whole, array_of(next_turn["routed_experts"])))
        params = params.model_copy(update=dict(temperature=0.0))
        [[expected]] = [group.samples for group in client.generate([turn], params, seed=1)]
        assert expected.routed_experts is not None and joined.tobytes() == expected.routed_experts.tobytes()


def test_a_stream_ends_with_routed_experts(experts: tuple[Front, RolloutClient]) -> None:
    front, _ = experts
    body = body_for(PATHS[1], n=1, target_token_ids=None, return_sampling_mask=None, return_routed_experts=True)
    [whole] = front.post(PATHS[1], body).json()["choices"]
    told = [event["choices"][0] for event in events(front.post(PATHS[1], body | {"stream": True}))[:-1]]
    assert [choice["routed_experts"] for choice in told if "routed_experts" in choice] == [whole["routed_experts"]]
