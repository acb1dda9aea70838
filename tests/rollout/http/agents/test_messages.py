"""Requests in Anthropic's Messages API: what a session is asked, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from trueroll.rollout.http.agents.call import AgentCall
from trueroll.rollout.http.agents.messages import read_count_call, read_messages_call
from trueroll.rollout.http.errors import HttpError

SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}
TOOL: dict[str, Any] = {"name": "f", "description": "adds", "input_schema": SCHEMA}
USER: dict[str, Any] = {"role": "user", "content": "hi"}
CACHED: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value} | fields


def read(*messages: dict[str, Any], **fields: Any) -> AgentCall:
    return read_messages_call({"model": "tiny", "max_tokens": 9, "messages": [*messages] or [USER]} | fields)


def refused(**fields: Any) -> HttpError:
    with pytest.raises(HttpError) as caught:
        read(**fields)
    return caught.value


def test_a_conversation_has_the_messages_of_chat_completions() -> None:
    call = read(
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "why", "signature": "s"},
                {"type": "redacted_thinking", "data": "eA=="},
                text("I ", citations=None),
                text("call."),
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1.0}, "caller": {"type": "direct"}},
                {"type": "tool_use", "id": "c2", "name": "f", "input": {}} | CACHED,
            ],
        },
        {
            "role": "user",
            "content": [
                text("Well,"),
                {"type": "tool_result", "tool_use_id": "c1", "content": [text("8"), text("9")], "is_error": False},
                {"type": "tool_result", "tool_use_id": "c2", "is_error": True} | CACHED,
                text("go on.", **CACHED),
            ],
        },
        {"role": "system", "content": "hurry"},
        {"role": "user", "content": []},
        system=[text("be", **CACHED), text("brief")],
    )
    arguments = [{"name": "f", "arguments": {"a": 1.0}}, {"name": "f", "arguments": {}}]
    calls = [{"id": f"c{i}", "type": "function", "function": each} for i, each in enumerate(arguments, 1)]
    assert call.messages == [
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "I call.",
            "reasoning_content": "why",
            "tool_calls": calls,
            "session_node": "s",
        },
        {"role": "tool", "tool_call_id": "c1", "content": "8\n9"},
        {"role": "tool", "tool_call_id": "c2", "content": "", "is_error": True},
        {"role": "user", "content": "Well,\ngo on."},
        {"role": "system", "content": "hurry"},
        {"role": "user", "content": ""},
    ]
    assert read(system="").messages == [USER]


def test_results_alone_are_not_followed_by_a_message_of_the_user() -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": "8"}
    assert [message["role"] for message in read({"role": "user", "content": [result]}).messages] == ["tool"]


def test_sampling_parameters_have_the_names_of_chat_completions() -> None:
    assert read().sampling == {"max_tokens": 9}
    fields = dict(temperature=0.5, top_p=0.9, top_k=5, stop_sequences=["a", "b"], metadata={"user_id": "u"})
    json = {"format": {"type": "json_schema", "schema": SCHEMA}}
    call = read(**fields, output_config=json, service_tier="auto", stream=True, inference_geo=None)
    named = dict(max_tokens=9, temperature=0.5, top_p=0.9, top_k=5, stop=["a", "b"])
    assert call.sampling == named | {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
    assert (call.is_stream, call.names_events) == (True, True)
    assert not read().is_stream


def test_tools_have_the_form_of_chat_completions() -> None:
    bare = {"name": "g", "input_schema": {"type": "object"}}
    call = read(tools=[TOOL | CACHED | {"type": "custom", "strict": True, "eager_input_streaming": True}, bare])
    functions = [
        {"name": "f", "description": "adds", "parameters": SCHEMA},
        {"name": "g", "parameters": {"type": "object"}},
    ]
    assert call.tools == [{"type": "function", "function": each} for each in functions]


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        (None, "auto"),
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "any", "disable_parallel_tool_use": True}, "required"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_the_choice_of_tools(choice: Any, told: Any) -> None:
    assert read(tools=[TOOL], tool_choice=choice).tool_choice == told


def test_thinking_is_an_argument_of_the_chat_template() -> None:
    for thinking, told in (
        (None, {}),
        ({"type": "adaptive", "display": "summarized"}, {}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
    ):
        assert read(thinking=thinking).chat_template_kwargs == told


def test_a_request_to_count_tokens_has_the_fields_of_the_prompt() -> None:
    body = {
        "model": "tiny",
        "messages": [USER],
        "system": "be brief",
        "tools": [TOOL],
        "thinking": {"type": "disabled"},
    }
    count, call = read_count_call(body), read_messages_call(body | {"max_tokens": 9})
    for name in ("messages", "tools", "tool_choice", "chat_template_kwargs"):
        assert getattr(count, name) == getattr(call, name)
    with pytest.raises(HttpError, match="max_tokens"):
        read_count_call(body | {"max_tokens": 9})


def image(where: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    return where({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}})


def of_user(block: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [block]}]}


def of_assistant(block: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": [block]}, USER]}


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"max_tokens": None}, "max_tokens", "required"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "tool", "content": "8"}]}, "messages", r"messages\.0: role 'tool' .*assistant"),
        ({"messages": [USER, {"role": "assistant", "content": "The"}]}, "messages", "last message"),
        (image(of_user), "messages", r"messages\.0\.user\.content\.0: type 'image'"),
        (of_user(text("a", more=1)), "messages", "more"),
        (
            of_user({"type": "tool_use", "id": "c", "name": "f", "input": {}}),
            "messages",
            r"type 'tool_use' .*text, tool_result",
        ),
        (of_assistant({"type": "server_tool_use", "id": "c", "name": "f", "input": {}}), "messages", "server_tool_use"),
        (of_assistant({"type": "tool_use", "id": "c", "name": "f", "input": "{}"}), "messages", "input"),
        (
            of_user({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}),
            "messages",
            "'text'",
        ),
        ({"system": [{"type": "image"}]}, "system", "'text'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools", "web_search_20250305"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "defer_loading", "False"),
        ({"tool_choice": {"type": "some"}}, "tool_choice", "type 'some'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice", r"name: .*required"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "tool_choice.disable_parallel_tool_use",
            "'any'",
        ),
        ({"stop_sequences": "a"}, "stop_sequences", "list"),
        ({"stop_sequences": [""]}, "stop_sequences", "at least 1"),
        ({"thinking": {"type": "between_tools"}}, "thinking", "between_tools"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display", "summarized"),
        ({"output_config": {"effort": "high"}}, "output_config.effort", "null"),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            "output_config",
            "must be a JSON object",
        ),
        ({"mcp_servers": [{}]}, "mcp_servers", "null"),
        ({"container": "c"}, "container", "null"),
        ({"thread": {"type": "create"}}, "thread", "all messages"),
        ({"max_token": 3}, "max_token", "unknown parameter"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], field: str, said: str) -> None:
    error = refused(**fields)
    assert (error.status, error.field) == (400, field)
    assert (error.code == "thread_unsupported_request") == (field == "thread")
    assert re.search(said, str(error)), str(error)


def test_one_of_many_faults_is_told() -> None:
    error = refused(messages=[{"role": "user", "content": [{"type": "image"}] * 1000}] * 100)
    assert len(str(error)) < 500
