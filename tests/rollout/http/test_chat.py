"""`/v1/chat/completions`: the model's chat template, tools, streams, and the same bits as from the client."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine
from http_fronts import Front, error_of, front_end
from serving import serving
from transformers import AutoTokenizer

from trueroll.engine.request import FinishReason
from trueroll.rollout import RolloutClient, SamplingParams

TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
]
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
MESSAGES: Any = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "what"}, {"type": "text", "text": "now"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "8", "tool_call_id": "c"},
]
RENDERED = "<system>be brief\n<user>what\nnow\n<assistant><tool_call>7</tool_call>\n<tool>8\n<assistant>"
FIELDS: dict[str, Any] = dict(model="tiny", messages=MESSAGES, max_tokens=20, temperature=0.9, seed=5)


def test_chat_has_the_prompt_and_the_bits_that_the_template_gives(
    front: Front, client: RolloutClient, chat_model: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    prompt = tokenizer.encode(f"<tools>{json.dumps(TOOLS)}</tools>\n{RENDERED}<think>", add_special_tokens=False)
    extra = {"return_token_ids": True, "chat_template_kwargs": {"thinks": True}}
    fields = dict(**FIELDS, n=2, tools=TOOLS, logprobs=True, top_logprobs=2)
    answer: Any = front.openai().chat.completions.create(**fields, extra_body=extra)
    assert tokenizer.decode(answer.prompt_token_ids) == tokenizer.decode(prompt)
    params = SamplingParams(n=2, max_tokens=20, temperature=0.9, top_logprobs=2)
    [group] = client.generate([prompt], params, seed=5)
    for choice, sample in zip(answer.choices, group.samples, strict=True):
        assert choice.token_ids == sample.token_ids and sample.logprobs is not None
        logprobs = np.array([entry.logprob for entry in choice.logprobs.content], np.float32)
        assert logprobs.tobytes() == sample.logprobs.tobytes()
        assert [entry.token for entry in choice.logprobs.content] == [tokenizer.decode([i]) for i in sample.token_ids]
        assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * len(sample.token_ids)
        assert (choice.message.role, choice.message.tool_calls) == ("assistant", None)
        text = tokenizer.decode(sample.token_ids, skip_special_tokens=True)
        assert (choice.message.content, choice.message.reasoning_content) == ("", text.strip())
    assert answer.usage.prompt_tokens == len(prompt)


def test_a_streamed_chat_equals_the_whole_one(front: Front) -> None:
    fields: dict[str, Any] = FIELDS | {"max_tokens": 400, "logprobs": True}
    whole: Any = front.openai().chat.completions.create(**fields)
    stream = front.openai().chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    told = [*stream]
    choices = [choice for event in told for choice in event.choices]
    assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1) and len(choices) > 2
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    content = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or []]
    assert content == whole.choices[0].logprobs.content
    assert choices[-1].finish_reason == whole.choices[0].finish_reason
    assert told[-1].usage is not None and told[-1].usage.model_dump() | {"prompt_tokens_details": None} == (
        whole.usage.model_dump() | {"prompt_tokens_details": None}
    )
    assert all(event.usage is None for event in told[:-1])


def test_template_arguments_may_have_any_name_and_depth(front: Front) -> None:
    nested: Any = functools.reduce(lambda inner, _: {"a": inner}, range(300), {})
    told = FIELDS | {"messages": [{"role": "user", "content": "x", "more": nested}], "max_tokens": 1}
    for name, status in (("function", 200), ("self", 400)):  # `self` is a parameter name of transformers' method
        response = front.post("/v1/chat/completions", told | {"chat_template_kwargs": {name: 1}})
        assert response.status_code == status, response.text


def test_tools_may_be_left_out_by_choice(front: Front) -> None:
    with_tools = front.post("/tokenize", {"messages": MESSAGES, "tools": TOOLS}).json()["count"]
    without = front.post("/tokenize", {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "none"}).json()["count"]
    assert without == front.post("/tokenize", {"messages": MESSAGES}).json()["count"] < with_tools


def _chosen(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_a_required_call_is_one_call_with_valid_arguments(front: Front) -> None:
    schema: Any = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"]}
    schema |= {"$defs": {"A": {"enum": [7]}}, "additionalProperties": False}
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("add", "stop")]
    for choice, names in (("required", {"add", "stop"}), (_chosen("stop"), {"stop"})):
        fields = FIELDS | {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 400}
        response = front.post("/v1/chat/completions", fields | {"logit_bias": {"220": -100, "198": -100}})
        [choice] = response.json()["choices"]
        [call] = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        assert call["function"]["name"] in names and json.loads(call["function"]["arguments"]) == {"a": 7}


@pytest.mark.parametrize(
    ("changed", "param", "code"),
    [
        ({"tool_choice": "always"}, "tool_choice", "invalid_request"),
        ({"tool_choice": _chosen("add") | {"x": 1}}, "tool_choice", "invalid_request"),
        ({"tool_choice": _chosen("sub")}, "tool_choice", "invalid_request"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "invalid_request"),
        ({"tool_choice": "required", "tools": [{"type": "function"}]}, "tools", "invalid_request"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice", "invalid_request"),
        ({"tool_choice": "required", "chat_template_kwargs": {"thinks": True}}, "tool_choice", "invalid_request"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "unsupported_parameter"),
    ],
)
def test_an_unsupported_choice_of_tools_is_refused(front: Front, changed: Any, param: str, code: str) -> None:
    error = error_of(front.post("/v1/chat/completions", FIELDS | {"tools": TOOLS} | changed))
    assert (error["param"], error["code"]) == (param, code), error


ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü<"}}\n</tool_call>'


@pytest.fixture(scope="module")
def marking_model(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with special tokens as markers. Decoded text does not contain special tokens."""
    folder = shutil.copytree(chat_model, tmp_path_factory.mktemp("models") / "marking")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("model", "is_stream"), [("chat_model", False), ("chat_model", True), ("marking_model", True)])
def test_a_call_that_a_model_writes_reaches_the_openai_package(
    model: str, is_stream: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat_model = request.getfixturevalue(model)
    fake = FakeEngine()
    text = "<think>\nhm\n</think>\n\nLet me see." + ONE
    token_ids = AutoTokenizer.from_pretrained(chat_model).encode(text, add_special_tokens=False)
    finish = fake._finish

    def drawn(id: str, index: int, count: int) -> tuple[list[int], None]:
        return token_ids[:count], None

    def stop(request_id: str, index: int, reason: FinishReason) -> Any:
        output: Any = finish(request_id, index, reason)
        return type(output)(**vars(output) | {"finish_reason": "stop"})

    monkeypatch.setattr(fake, "_drawn", drawn)
    monkeypatch.setattr(fake, "_finish", stop)
    question: Any = [{"role": "user", "content": "?"}]
    fields: dict[str, Any] = dict(model="fake", messages=question, max_tokens=len(token_ids))
    with serving(fake) as worker, front_end(worker.address, tokenizer=str(chat_model)) as front:
        ask = front.openai().chat.completions.create
        answer: Any = ask(**fields, tools=TOOLS, stream=is_stream)
        plain: Any = ask(**fields).choices[0]
    if is_stream:
        choices = [choice for event in answer for choice in event.choices]
        content = "".join(choice.delta.content or "" for choice in choices)
        reasoning = "".join(getattr(choice.delta, "reasoning_content", "") for choice in choices)
        [call] = [call for choice in choices for call in choice.delta.tool_calls or []]
        assert call.index == 0
    else:
        choices = answer.choices
        content, [call] = choices[0].message.content, choices[0].message.tool_calls
        reasoning = choices[0].message.reasoning_content
    assert (content, reasoning) == ("Let me see.", "hm") and choices[-1].finish_reason == "tool_calls"
    assert (call.type, call.function.name) == ("function", "add") and call.id.startswith("call_")
    assert json.loads(call.function.arguments) == {"a": 1, "b": "ü<"}
    untold = ONE.removeprefix("<tool_call>").removesuffix("</tool_call>") if model == "marking_model" else ONE
    assert (plain.message.content, plain.finish_reason) == ("Let me see." + untold, "stop"), "no tools were named"


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, None),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
    ],
)
def test_an_invalid_conversation_is_refused(front: Front, changed: dict[str, Any], param: str | None) -> None:
    response = front.post("/v1/chat/completions", FIELDS | changed)
    assert response.status_code == 400
    error = error_of(response)
    assert param is None or error["param"] == param, error
    assert next(iter(changed)) in error["message"]
