"""Requests in OpenAI's Responses API: what a session is asked, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from trueroll.rollout.http.agents.call import AgentCall
from trueroll.rollout.http.agents.responses import read_response_call
from trueroll.rollout.http.errors import HttpError

SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}
TOOL: dict[str, Any] = {"type": "function", "name": "f", "description": "adds", "parameters": SCHEMA, "strict": True}


def read(**fields: Any) -> AgentCall:
    return read_response_call({"model": "tiny", "input": "hi"} | fields)


def part(kind: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "text": text} | fields


def call(number: int, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": '{"a": 1.0}'} | fields


def test_consecutive_items_of_the_assistant_are_one_message() -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [part("reasoning_text", "why")]}
    output = [part("output_text", "I ", annotations=[], logprobs=[]), part("output_text", "call.")]
    given = read(
        instructions="be brief",
        input=[
            {"role": "developer", "content": "now"},
            {"type": "message", "role": "user", "content": [part("input_text", "a"), part("input_text", "b")]},
            reasoning | {"encrypted_content": None, "status": None},
            {"type": "message", "id": "msg_1", "role": "assistant", "content": output, "status": "completed"},
            call(1, id="fc_1", status="completed"),
            {"role": "assistant", "content": " More."},
            {"type": "reasoning", "id": "rs_2", "summary": [part("summary_text", "short")], "encrypted_content": "x"},
            call(2),
            {"type": "function_call_output", "call_id": "c1", "output": "8"},
            {"type": "function_call_output", "call_id": "c2", "output": [part("input_text", "9")], "id": None},
            {"role": "assistant", "content": "Done.", "phase": "final_answer"},
            {"role": "user", "content": "and", "type": None},
        ],
    )
    function = {"name": "f", "arguments": '{"a": 1.0}'}
    calls = [{"id": id, "type": "function", "function": function} for id in ("c1", "c2")]
    assert given.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "developer", "content": "now"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "I call. More.", "reasoning_content": "why", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "8"},
        {"role": "tool", "tool_call_id": "c2", "content": "9"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "and"},
    ]
    assert read(instructions="").messages == [{"role": "user", "content": "hi"}]


def test_sampling_parameters_have_the_names_of_chat_completions() -> None:
    assert read().sampling == {}
    schema = {"name": "n", "schema": SCHEMA, "strict": True}
    given = read(temperature=0.5, top_p=0.9, max_output_tokens=7, text={"format": {"type": "json_schema"} | schema})
    named = dict(temperature=0.5, top_p=0.9, max_tokens=7)
    assert given.sampling == named | {"response_format": {"type": "json_schema", "json_schema": schema}}
    assert read(text={"format": {"type": "json_object"}}).sampling["response_format"]["type"] == "json_object"
    assert read(text={"format": {"type": "text"}, "verbosity": None}).sampling == {}


def test_tools_and_their_choice_have_the_form_of_chat_completions() -> None:
    given = read(tools=[TOOL, {"type": "function", "name": "g", "parameters": None}])
    functions = [{"name": "f", "description": "adds", "parameters": SCHEMA}, {"name": "g"}]
    assert given.tools == [{"type": "function", "function": each} for each in functions]
    for choice in ("auto", "none", "required"):
        assert read(tools=[TOOL], tool_choice=choice).tool_choice == choice
    named = read(tools=[TOOL], tool_choice={"type": "function", "name": "f"}, parallel_tool_calls=False)
    assert named.tool_choice == {"type": "function", "function": {"name": "f"}}


def test_fields_without_an_effect_are_accepted() -> None:
    given = read(
        store=True,
        include=["reasoning.encrypted_content"],
        reasoning={"effort": None, "summary": "auto"},
        truncation="disabled",
        metadata={"a": "b"},
        previous_response_id=None,
        background=False,
        service_tier="auto",
        prompt_cache_key="k",
        parallel_tool_calls=False,
        stream=True,
        stream_options={"include_obfuscation": False},
        user="u",
    )
    assert (given.messages, given.sampling) == (read().messages, {})
    assert (given.is_stream, given.names_events) == (True, True)
    assert not read().is_stream


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"input": None}, "input", "required"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", r"input\.0: .*item_reference"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input",
            r"content\.0\.type: .*input_image",
        ),
        ({"input": [{"role": "tool", "content": "8"}]}, "input", "'user', 'assistant'"),
        ({"input": [call(1, arguments={})]}, "input", "arguments"),
        ({"input": [call(1, namespace="n")]}, "namespace", "null"),
        ({"input": [call(1, more=1)]}, "input", "more"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'function'"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls", "'required'"),
        ({"tool_choice": "any"}, "tool_choice", "'required'"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice", "'required'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text", "the schema .* must be a JSON object"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "null"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "null"),
        ({"include": ["message.output_text.logprobs"]}, "include", "encrypted_content"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "null"),
        ({"background": True}, "background", "False"),
        ({"background": 0}, "background", "False"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"metadata": {"a": 1}}, "metadata", "string"),
        ({"metadata": {"a": "x" * 513}}, "metadata", "512"),
        ({"metadata": {"x" * 65: "a"}}, "metadata", "64"),
        ({"metadata": {str(i): 1 for i in range(17)}}, "metadata", r"^metadata: must have at most 16 fields"),
        ({"max_tokens": 3}, "max_tokens", "unknown parameter"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(HttpError) as caught:
        read(**fields)
    assert (caught.value.status, caught.value.field) == (400, field)
    assert re.search(said, str(caught.value)), str(caught.value)
