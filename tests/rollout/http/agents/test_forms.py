"""Answers in Anthropic's and OpenAI's APIs: an agent that sends an answer back continues the session's message."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from trueroll.engine.request import FinishReason, SampleOutput, SamplingParams
from trueroll.rollout.http.agents.call import AgentCall, Context
from trueroll.rollout.http.agents.messages import read_messages_call
from trueroll.rollout.http.agents.responses import read_response_call
from trueroll.rollout.http.parsed import ChoiceParser
from trueroll.rollout.http.pieces import Form, Piece, Usage
from trueroll.rollout.parsing.parser import parser_for
from trueroll.rollout.sessions.answers import ParserSettings, call_id, read_answer
from trueroll.rollout.sessions.messages import Message, read_messages

EOS, SEED, NODE = 3, 7, "0a1b"
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
HERMES: Any = SimpleNamespace(
    chat_templates={"default": "<think> <tool_call>"},
    added_tokens={},
    decode=lambda token_ids, skip_special_tokens=True: "".join(map(chr, token_ids)),
)
"""A model with characters as tokens."""
ARGUMENTS = '{"a": 1.0, "b": [1e16, -0.5, null, true], "": {"é\\n\\"": 123456789012345678901234567890}}'
CALL = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'


def call_of(value: object) -> str:
    return f'<tool_call>{{"name": "f", "arguments": {{"a": {value}}}}}</tool_call>'


EMPTY_CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
STOP: tuple[FinishReason, int | str | None] = "stop", EOS
LENGTH: tuple[FinishReason, int | str | None] = "length", None
ANSWERS: dict[str, tuple[str, tuple[FinishReason, int | str | None]]] = {
    "text": ("Hello, wörld. \n", STOP),
    "reasoning and text": ("<think>\nwhy\n</think>\n\nBecause.", STOP),
    "reasoning only": ("<think>\nwhy\n</think>", STOP),
    "text and call": ("I call.\n" + CALL, STOP),
    "reasoning and calls": (f"<think>why</think>{CALL}\n{EMPTY_CALL}", STOP),
    "text around calls": (f"One{CALL}two\n{EMPTY_CALL} three", STOP),
    "reasoning twice": (f"<think>why</think>a{EMPTY_CALL}<think>then</think>b", STOP),
    "malformed call": ('<tool_call>{"name": 3}</tool_call>', STOP),
    "deep call": (call_of("[" * 57 + "]" * 57), STOP),
    "too deep call": (call_of("[" * 58 + "]" * 58), STOP),
    "large integer": (call_of(2**4096 - 1), STOP),
    "too large integer": (call_of(2**4096), STOP),
    "spaces": ("  \n", STOP),
    "empty": ("", STOP),
    "stop string": ("One ", ("stop", "END")),
    "call before a stop string": (CALL, ("stop", "END")),
    "cut text": ("One tw", LENGTH),
    "cut reasoning": ("<think>why no", LENGTH),
    "cut call": ("One " + CALL[:30], LENGTH),
    "cut after a call": (EMPTY_CALL + "Then", LENGTH),
    "cut at once": ("", LENGTH),
}


def context_of(prompt_token_ids: list[int]) -> Context:
    return Context(
        node=NODE,
        created=5,
        model="tiny",
        token_text=chr,
        prompt_token_ids=prompt_token_ids,
        params=SamplingParams(max_tokens=9, temperature=0.5, top_p=0.9),
        new_parser=partial(ChoiceParser, parser_for(HERMES, TOOLS), "", partial(call_id, SEED)),
        eos_token_ids=frozenset({EOS}),
    )


def sample_of(name: str) -> SampleOutput:
    text, (finish_reason, stop_reason) = ANSWERS[name]
    end = [stop_reason] if isinstance(stop_reason, int) else [ord(char) for char in stop_reason or ""]
    token_ids = [*map(ord, text), *end]
    return SampleOutput("r", 0, token_ids, None, finish_reason, SEED, 6, (), stop_reason=stop_reason)


def pieces_of(name: str, size: int) -> Iterator[Piece]:
    """Yield pieces with `size` characters, and the last piece."""
    sample, text = sample_of(name), ANSWERS[name][0]
    for at in range(0, len(text), size):
        yield piece(at, text[at : at + size], sample.token_ids[at : at + size])
    yield piece(len(sample.token_ids), "", [], sample)


def piece(start: int, text: str, token_ids: list[int], ended: SampleOutput | None = None) -> Piece:
    return Piece(0, 0, start, text, token_ids, None, None, None, {}, ended)


def usage_of(name: str) -> Usage:
    usage = Usage(10)
    usage.add(0, sample_of(name))
    return usage


def whole_of(form: Form, name: str) -> dict[str, Any]:
    sample = sample_of(name)
    return as_sent(form.whole([piece(0, ANSWERS[name][0], sample.token_ids, sample)], usage_of(name)))


def events_of(form: Form, name: str, size: int) -> list[dict[str, Any]]:
    events = [as_sent(event) for each in pieces_of(name, size) for event in form.events(each)]
    return events + [as_sent(event) for event in form.last_events(usage_of(name))]


def as_sent(value: Any) -> Any:
    return json.loads(json.dumps(value))


def session_message(name: str) -> Message:
    return read_answer(sample_of(name), HERMES, None, ParserSettings(tuple(TOOLS)), [1], SEED)


def check_recognized(call: AgentCall, name: str, names_node: bool) -> None:
    """Assert that the session recognizes its answer among the messages. `names_node`: whether the message names the
    answer's node, which tells equal answers apart.
    """
    given, stored = read_messages(call.messages, call.tools)[2], session_message(name)
    assert [message["role"] for message in call.messages[:3]] == ["system", "user", "assistant"]
    assert given.is_(stored), (given.fields, stored.fields)
    assert given.reasoning == stored.reasoning
    assert given.node == (NODE if names_node else None)
    assert [each.get("id") for each in given.calls] == [each["id"] for each in stored.calls]


# Anthropic


def message_form() -> Form:
    body = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    return read_messages_call(body).form(context_of([1] * 10))


def continued_message(content: list[dict[str, Any]]) -> AgentCall:
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "8"}
        for block in content
        if block["type"] == "tool_use"
    ]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": content},
        {"role": "user", "content": results or "and"},
    ]
    return read_messages_call({"max_tokens": 9, "messages": messages, "system": "be brief"})


def grown_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a stream, as Anthropic's clients join its events."""
    message, arguments = events[0]["message"], defaultdict[int, str](str)
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    is_open = False
    for event in events[1:-2]:
        assert is_open == (event["type"] != "content_block_start")
        is_open = event["type"] != "content_block_stop"
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
        assert event["index"] == len(message["content"]) - 1
        if event["type"] == "content_block_delta":
            delta = dict(event["delta"])
            if delta.pop("type") == "input_json_delta":
                arguments[event["index"]] += delta["partial_json"]
            else:
                [(key, text)] = delta.items()
                message["content"][-1][key] += text
    assert not is_open
    for index, text in arguments.items():
        message["content"][index]["input"] = json.loads(text)
    return message | events[-2]["delta"] | {"usage": events[-2]["usage"]}


def joined_blocks(content: list[dict[str, Any]]) -> tuple[str, str, list[dict[str, Any]]]:
    thinking = "".join(block["thinking"] for block in content if block["type"] == "thinking")
    text = "".join(block["text"] for block in content if block["type"] == "text")
    return thinking, text, [block for block in content if block["type"] == "tool_use"]


@pytest.mark.parametrize("name", ANSWERS)
def test_an_agent_of_anthropics_api_continues_the_message(name: str) -> None:
    whole = whole_of(message_form(), name)
    check_recognized(continued_message(whole["content"]), name, "reasoning" in name)
    for size in (1, 7, 1000):
        grown = grown_message(events_of(message_form(), name, size))
        check_recognized(continued_message(grown["content"]), name, "reasoning" in name)
        if name == "reasoning twice":
            assert (grown == whole) == (size == 1000)
            assert joined_blocks(grown["content"]) == joined_blocks(whole["content"])
            assert grown | {"content": []} == whole | {"content": []}
        else:
            assert grown == whole


@pytest.mark.parametrize(
    ("name", "types", "ending"),
    [
        ("reasoning and text", ["thinking", "text"], ("end_turn", None)),
        ("text around calls", ["text", "tool_use", "tool_use"], ("tool_use", None)),
        ("deep call", ["tool_use"], ("tool_use", None)),
        ("too deep call", ["text"], ("end_turn", None)),
        ("large integer", ["tool_use"], ("tool_use", None)),
        ("too large integer", ["text"], ("end_turn", None)),
        ("empty", [], ("end_turn", None)),
        ("stop string", ["text"], ("stop_sequence", "END")),
        ("call before a stop string", ["tool_use"], ("tool_use", None)),
        ("cut reasoning", ["thinking"], ("max_tokens", None)),
    ],
)
def test_a_message_has_blocks_and_says_why_it_ended(
    name: str, types: list[str], ending: tuple[str, str | None]
) -> None:
    whole = whole_of(message_form(), name)
    assert [block["type"] for block in whole["content"]] == types
    assert (whole["stop_reason"], whole["stop_sequence"]) == ending
    assert (whole["id"], whole["type"], whole["role"], whole["model"]) == ("msg_0a1b", "message", "assistant", "tiny")
    tokens = {"input_tokens": 4, "cache_read_input_tokens": 6, "cache_creation_input_tokens": 0}
    assert whole["usage"] == tokens | {"output_tokens": len(sample_of(name).token_ids)}


# OpenAI


def response_form(**fields: Any) -> Form:
    return read_response_call({"model": "tiny", "input": "hi"} | fields).form(context_of([1] * 10))


def continued_response(output: list[dict[str, Any]]) -> AgentCall:
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "8"}
        for item in output
        if item["type"] == "function_call"
    ]
    last = results or [{"role": "user", "content": "and"}]
    body = {"input": [{"role": "user", "content": "hi"}, *output, *last], "instructions": "be brief"}
    return read_response_call(body)


def sent_back(output: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield items in the forms in which agents send them back."""
    yield output
    told = response_of(output).output
    yield as_sent([item.model_dump(exclude_unset=True) for item in told])
    yield as_sent([item.model_dump() for item in told])


def response_of(output: list[dict[str, Any]]) -> Response:
    fields = dict(id="r", created_at=0, model="m", object="response", parallel_tool_calls=True, tool_choice="auto")
    return Response.model_validate(fields | {"tools": [], "output": output})


EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
GROWN: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "message": lambda item: item["content"][0]["text"],
    "reasoning": lambda item: item["content"][0]["text"],
    "function_call": lambda item: item["arguments"],
}


def grown_response(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Check the order of a stream's events, and return its response."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert all(event["response"]["output"] == [] for event in events[:2])
    response = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}"
    texts, done = defaultdict[int, str](str), list[dict[str, Any]]()
    for event in events[2:-1]:
        assert event["output_index"] == len(done), "an item ends before the next one begins"
        if event["type"].endswith(".delta"):
            texts[len(done)] += event["delta"]
        elif event["type"].endswith(("text.done", "arguments.done")):
            assert (event.get("text") or event.get("arguments") or "") == texts[len(done)]
        elif event["type"] == "response.output_item.done":
            done.append(event["item"])
    assert done == response["output"]
    assert [GROWN[item["type"]](item) for item in done] == [texts[index] for index in range(len(done))]
    return response


def joined_items(output: list[dict[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {"message": "", "reasoning": ""}
    for kind in joined:
        joined[kind] = "".join(GROWN[kind](item) for item in output if item["type"] == kind)
    calls = [item for item in output if item["type"] == "function_call"]
    return joined | {"calls": [(call["call_id"], call["name"], call["arguments"]) for call in calls]}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_agent_of_openais_responses_continues_the_message(name: str) -> None:
    whole = whole_of(response_form(), name)
    for output in sent_back(whole["output"]):
        check_recognized(continued_response(output), name, True)
    for size in (1, 7, 1000):
        grown = grown_response(events_of(response_form(stream=True), name, size))
        check_recognized(continued_response(grown["output"]), name, True)
        if name == "reasoning twice":
            assert (grown == whole) == (size == 1000)
            assert joined_items(grown["output"]) == joined_items(whole["output"])
            assert grown | {"output": []} == whole | {"output": []}
        else:
            assert grown == whole


@pytest.mark.parametrize("name", ["reasoning and calls", "text around calls", "cut text"])
def test_openais_client_accepts_responses_and_their_events(name: str) -> None:
    text = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}]
    fields: dict[str, Any] = dict(text=text, tools=tools, instructions="be brief", temperature=1, metadata={"a": "b"})
    told = Response.model_validate(whole_of(response_form(**fields), name))
    assert told.text and told.text.format and told.text.format.type == "json_schema"
    assert (told.tools[0].type, told.instructions, told.metadata) == ("function", "be brief", {"a": "b"})
    assert (told.max_output_tokens, told.temperature, told.top_p) == (9, 0.5, 0.9), "those of the call's parameters"
    for event in events_of(response_form(**fields), name, 7):
        read = EVENT.validate_python(event)
        assert read.type == event["type"] and read.to_dict() == event


@pytest.mark.parametrize(
    ("name", "items", "status"),
    [
        ("reasoning and text", [("reasoning", "completed"), ("message", "completed")], "completed"),
        ("text and call", [("message", "completed"), ("function_call", "completed")], "completed"),
        ("empty", [("message", "completed")], "completed"),
        ("reasoning only", [("reasoning", "completed"), ("message", "completed")], "completed"),
        ("cut text", [("message", "incomplete")], "incomplete"),
        ("cut reasoning", [("reasoning", "completed"), ("message", "incomplete")], "incomplete"),
    ],
)
def test_a_response_has_items_and_says_whether_it_is_complete(
    name: str, items: list[tuple[str, str]], status: str
) -> None:
    whole = whole_of(response_form(), name)
    assert [(item["type"], item["status"]) for item in whole["output"]] == items
    reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
    assert (whole["status"], whole["incomplete_details"]) == (status, reason)
    usage, num_tokens = whole["usage"], len(sample_of(name).token_ids)
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (10, num_tokens, 10 + num_tokens)
    assert usage["input_tokens_details"]["cached_tokens"] == 6
