"""`/v1/chat/completions`: the model's chat template, tools, streams, and the same bits as from the client."""

from __future__ import annotations

import functools
import json
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
from trueroll.rollout.http.tools import ToolText

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
        assert choice.message.content == tokenizer.decode(sample.token_ids, skip_special_tokens=True)
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
    error = error_of(front.post("/v1/chat/completions", FIELDS | {"tools": TOOLS, "tool_choice": "required"}))
    assert (error["param"], error["code"]) == ("tool_choice", "unsupported_parameter")


ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü<"}}\n</tool_call>'
CALL = '<tool_call>{{"name": "add", "arguments": {{"a": {}}}}}</tool_call>'
TWO = ONE + '\n<tool_call>{"name": "stop"}</tool_call>\n'


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("just text", "just text", []),
        ("a <tool", "a <tool", []),
        (ONE, "", [("add", {"a": 1, "b": "ü<"})]),
        ("First. " + TWO, "First. ", [("add", {"a": 1, "b": "ü<"}), ("stop", {})]),
        ("<tool_call>{'name'", "<tool_call>{'name'", []),
        ("x<tool_call>[]</tool_call>", "x<tool_call>[]</tool_call>", []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        (ONE + "and then", ONE + "and then", []),
        *[(text, text, []) for text in map(CALL.format, ("NaN", "1e999", '"\\ud800"'))],
    ],
)
def test_tool_calls_are_found_however_the_text_is_split(
    size: int, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    parted = ToolText()
    told = "".join(parted.add(text[at : at + size]) for at in range(0, len(text), size))
    rest, found = parted.finish()
    assert told + rest == content
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found] == calls
    assert [call["index"] for call in found] == list(range(len(found)))
    assert len({call["id"] for call in found}) == len(found)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_call_that_a_model_writes_reaches_the_openai_package(
    chat_model: Path, is_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeEngine()
    token_ids = AutoTokenizer.from_pretrained(chat_model).encode("Let me see." + ONE, add_special_tokens=False)
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
        [call] = [call for choice in choices for call in choice.delta.tool_calls or []]
        assert call.index == 0
    else:
        choices = answer.choices
        content, [call] = choices[0].message.content, choices[0].message.tool_calls
    assert content == "Let me see." and choices[-1].finish_reason == "tool_calls"
    assert (call.type, call.function.name) == ("function", "add") and call.id.startswith("call_")
    assert json.loads(call.function.arguments) == {"a": 1, "b": "ü<"}
    assert (plain.message.content, plain.finish_reason) == ("Let me see." + ONE, "stop"), "no tools were named"


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
