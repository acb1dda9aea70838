"""Sessions over HTTP in the three APIs of agents: an agent changes one URL, and samples have the model's tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from chat_templates import TEMPLATES, make_chat_folder
from http_fronts import Front, error_of, front_end
from safetensors.numpy import load

from tiny import make_tiny_model
from trueroll.rollout import RolloutClient, WorkerProcess, launch_worker

TOOLS: list[Any] = [
    dict(
        type="function",
        function=dict(name="get", parameters=dict(type="object", properties={}, additionalProperties=False)),
    )
]
GO = dict(role="user", content="go")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("agents")
    model = make_tiny_model("llama", root / "model", max_position_embeddings=4096)
    return make_chat_folder(root / "chat", TEMPLATES["qwen2_5"], "<|im_end|>", model)


@pytest.fixture(scope="module")
def worker(folder: Path, forked_workers: None) -> Iterator[WorkerProcess]:
    with launch_worker(str(folder), num_blocks=256, num_threads=1) as running:
        yield running


@pytest.fixture(scope="module")
def front(worker: WorkerProcess) -> Iterator[Front]:
    with front_end(worker.address, model_name="tiny") as running:
        yield running


def begin(front: Front) -> str:
    """Begin a session, and return its URL."""
    return front.url + front.post("/sessions", {"seed": 7, "sampling_params": {"max_tokens": 12}}).json()["url"]


@pytest.fixture
def session(front: Front) -> Iterator[str]:
    """The URL of a session."""
    url = begin(front)
    yield url
    assert front.delete(url.removeprefix(front.url).removesuffix("/v1")).status_code == 200


def agent(url: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=url, api_key="any", max_retries=0, http_client=openai.DefaultHttpxClient(verify=False)
    )


def chat(client: openai.OpenAI, messages: list[Any], **fields: Any) -> Any:
    return client.chat.completions.create(model="any name", messages=messages, **fields)


def samples_of(front: Front, url: str) -> list[dict[str, Any]]:
    return front.get(f"{url.removeprefix(front.url).removesuffix('/v1')}/samples").json()["samples"]


def test_turns_keep_their_tokens(front: Front, session: str, worker: WorkerProcess) -> None:
    """Each prompt begins with the tokens of the turn before. The samples have the tokens and the bits of a score."""
    client, history, tokens = agent(session), [GO], list[int]()
    for _ in range(3):
        told = chat(client, history, extra_body={"return_token_ids": True}, logprobs=True)
        assert told.prompt_token_ids[: len(tokens)] == tokens
        tokens = [*told.prompt_token_ids, *told.choices[0].token_ids]
        history += [told.choices[0].message.model_dump(exclude_none=True), GO]
    [sample] = samples_of(front, session)
    assert sample["token_ids"] == tokens and sum(sample["mask"]) == 36 == 3 * 12
    with RolloutClient(worker.address) as scorer:
        [score] = scorer.score([tokens])
    mask = np.array(sample["mask"][1:], bool)
    drawn = np.array(sample["logprobs"], np.float32)[1:]
    assert np.array_equal(score.logprobs.view(np.int32)[mask], drawn.view(np.int32)[mask])


def test_a_stream_is_the_answer(front: Front, session: str) -> None:
    """A stream has the tokens, the text and the node of the answer; an equal session draws the same."""
    told = chat(agent(session), [GO], extra_body={"return_token_ids": True}, logprobs=True)
    with agent(begin(front)) as client:
        events = [
            *chat(
                client,
                [GO],
                stream=True,
                stream_options=dict(include_usage=True),
                extra_body={"return_token_ids": True},
                logprobs=True,
            )
        ]
    choices = [event.choices[0] for event in events if event.choices]
    assert len(choices) > 2 and events[-1].usage == told.usage
    assert sum((choice.token_ids for choice in choices), []) == told.choices[0].token_ids
    assert "".join(choice.delta.content or "" for choice in choices) == told.choices[0].message.content
    assert choices[0].delta.session_node == told.choices[0].message.session_node
    assert events[0].prompt_token_ids == told.prompt_token_ids and events[0].id == told.id
    told_tokens = [each for choice in choices if choice.logprobs for each in choice.logprobs.content]
    assert told_tokens == told.choices[0].logprobs.content


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_retry_is_answered_from_the_record(front: Front, session: str, is_stream: bool) -> None:
    client, fields = agent(session), dict(extra_body={"return_token_ids": True})
    first, twin = (chat(client, [GO], **fields) for _ in range(2))
    assert first.id != twin.id
    shown = front.get("/ui/live").json()["groups"]
    assert [group["preview"] for group in shown[-2:]] == ["go", "go"]
    again = chat(client, [GO], stream=is_stream, extra_headers={"x-stainless-retry-count": "1"}, **fields)
    if is_stream:
        events = [event for event in again if event.choices]
        assert sum((event.choices[0].token_ids for event in events), []) == twin.choices[0].token_ids
        assert {event.id for event in events} == {twin.id}
    else:
        assert again.id == twin.id and again.choices[0].token_ids == twin.choices[0].token_ids
    assert len(samples_of(front, session)) == 2
    assert front.get("/ui/live").json()["groups"] == shown


def test_a_required_call_and_its_result(front: Front) -> None:
    """`tool_choice` makes a random model call. The agent drops the ids of its session, and the conversation goes on."""
    session = front.url + front.post("/sessions", {"seed": 7}).json()["url"]
    client = agent(session)
    called = chat(client, [GO], tools=TOOLS, tool_choice="required", max_tokens=400)
    [call] = called.choices[0].message.tool_calls
    assert called.choices[0].finish_reason == "tool_calls" and call.function.name == "get"
    result = dict(role="tool", tool_call_id=call.id, content="7")
    message = dict(role="assistant", content=None, tool_calls=[call.model_dump()])
    after = chat(client, [GO, message, result], tools=TOOLS, max_tokens=5, extra_body={"return_token_ids": True})
    [sample] = samples_of(front, session)
    assert len(sample["turns"]) == 2 and sample["token_ids"][: len(after.prompt_token_ids)] == after.prompt_token_ids


def test_a_cancelled_stream_leaves_nothing(front: Front) -> None:
    settings = {"seed": 1, "sampling_params": {"max_tokens": 3000, "ignore_eos": True}}
    begun = front.post("/sessions", settings).json()
    with chat(agent(front.url + begun["url"]), [GO], stream=True) as stream:
        assert next(iter(stream)).choices[0].finish_reason is None
    front.wait_for("trueroll_http_open_requests", 0)
    assert front.get(f"/sessions/{begun['session_id']}").json()["num_messages"] == 0
    assert front.get(f"/sessions/{begun['session_id']}/samples").json() == {"samples": []}


def test_rewards_and_exports(front: Front, session: str) -> None:
    told = chat(agent(session), [GO])
    path = session.removeprefix(front.url).removesuffix("/v1")
    node = told.choices[0].message.session_node
    assert told.id == f"chatcmpl-{node}"
    assert front.post(f"{path}/reward", {"reward": 0.5, "node": node}).status_code == 200
    [sample] = samples_of(front, session)
    assert sample["reward"] == 0.5 and sample["node"] == node
    tensors = load(front.get(f"{path}/samples?format=safetensors").content)
    assert np.array_equal(tensors["tokens.0"], np.array(sample["token_ids"], np.int32))
    record = front.get(f"{path}/samples?format=record").text.splitlines()
    assert len(record) == 2 and json.loads(record[1])["token_ids"] == sample["token_ids"][-12:]
    [entry] = front.get(f"{path}/samples?format=nemo_gym").json()["entries"]
    assert entry["prompt_token_ids"] + entry["generation_token_ids"] == sample["token_ids"]
    for body in ({"reward": "x"}, {"reward": 1.0, "node": "none"}, {}):
        assert front.post(f"{path}/reward", body).status_code == 400
    for query in ("format=x", "format=json&format=json"):
        assert error_of(front.get(f"{path}/samples?{query}"))["param"] == "format"


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        (dict(n=2), "n", "must be 1"),
        (dict(seed=1), "seed", "seed of its own"),
        (dict(temperature=1e308, tools=TOOLS, tool_choice="required"), "temperature", "got 1e+308"),
        (dict(extra_body=dict(unknown=1)), "unknown", "unknown parameter"),
        (dict(tools=TOOLS, tool_choice="always"), "tool_choice", "'always'"),
        (dict(max_tokens=5000), "messages", "max_tokens"),
    ],
)
def test_what_a_session_refuses(front: Front, fields: dict[str, Any], param: str, said: str) -> None:
    url = front.post("/sessions", {}).json()["url"]
    with pytest.raises(openai.BadRequestError) as caught:
        chat(agent(front.url + url), [GO], **fields)
    assert caught.value.param == param and said in str(caught.value)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"seed": -1}, "seed"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"seed": 1}}, "seed"),
        ({"sampling_params": {"n": 2}}, "n"),
        ({"sampling_params": {"max_completion_tokens": 2}}, "max_completion_tokens"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"other": 1}, "other"),
    ],
)
def test_a_session_does_not_begin_with_wrong_settings(front: Front, body: dict[str, Any], param: str) -> None:
    refused = front.post("/sessions", body)
    assert refused.status_code == 400 and error_of(refused)["param"] == param


@pytest.mark.parametrize("path", ["chat/completions", "messages", "messages/count_tokens", "responses"])
def test_a_text_that_cannot_fit_is_not_rendered(front: Front, session: str, path: str) -> None:
    message = GO | {"content": "x" * 2_000_000}
    body = {"input": [message]} if path == "responses" else {"messages": [message]}
    body |= {"max_tokens": 1} if path == "messages" else {}
    refused = front.post(f"{session.removeprefix(front.url)}/{path}", body)
    assert error_of(refused)["code"] == "context_length_exceeded" and "2000" in error_of(refused)["message"]
    assert "characters" in error_of(refused)["message"]


def test_null_among_the_sampling_parameters_replaces_nothing(front: Front) -> None:
    url = front.post("/sessions", {"sampling_params": {"max_tokens": None, "temperature": 1.0}}).json()["url"]
    assert chat(agent(front.url + url), [GO], max_tokens=3).usage.completion_tokens == 3


def anthropic_events(front: Front, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream. Each event's name must be its type."""
    lines = front.post(path, body | {"stream": True}).text.split("\n")
    told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [line for line in lines if line.startswith("event: ")] == [f"event: {event['type']}" for event in told]
    return told


def test_turns_in_anthropics_api(front: Front, session: str) -> None:
    """Whole answers, streams and counts have the same tokens, and each turn continues the one before."""
    path = f"{session.removeprefix(front.url)}/messages"
    other = begin(front)
    history: list[dict[str, Any]] = [GO]
    for _ in range(3):
        body = {"model": "any", "max_tokens": 50, "messages": history, "system": "Help."}
        count = front.post(f"{path}/count_tokens", {"model": "any", "messages": history, "system": "Help."}).json()
        told = front.post(path, body).json()
        usage = told["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count["input_tokens"]
        events = anthropic_events(front, f"{other.removeprefix(front.url)}/messages", body)
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(delta["text"] for delta in deltas) == "".join(block["text"] for block in told["content"])
        assert events[0]["message"]["id"] == told["id"] and events[-1]["type"] == "message_stop"
        assert (told["stop_reason"], usage["output_tokens"]) == ("max_tokens", 12)
        history += [dict(role="assistant", content=told["content"]), GO]
    [sample], [streamed] = samples_of(front, session), samples_of(front, other)
    assert len(sample["turns"]) == 3 and streamed["token_ids"] == sample["token_ids"]
    refused = front.post(path, body | {"thread": "auto"})
    assert refused.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_turns_in_openais_responses_api(front: Front, session: str) -> None:
    client, history = agent(session), list[Any]([GO])
    other = agent(begin(front))
    for _ in range(3):
        told = client.responses.create(model="any", input=history, instructions="Help.")
        with other.responses.create(model="any", input=history, instructions="Help.", stream=True) as stream:
            events = [*stream]
        assert events[-1].type == "response.incomplete" and events[-1].response.output == told.output
        assert told.incomplete_details is not None and told.incomplete_details.reason == "max_output_tokens"
        history += [*told.output, GO]
    [sample], [streamed] = samples_of(front, session), samples_of(front, str(other.base_url).rstrip("/"))
    assert len(sample["turns"]) == 3 and streamed["token_ids"] == sample["token_ids"]
