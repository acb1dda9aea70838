"""The parser of answers: formats without recorded answers, markers, types of arguments, and hostile texts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trueroll.rollout.parsing.answers import Answer
from trueroll.rollout.parsing.formats import FORMATS, THINK, format_of
from trueroll.rollout.parsing.parser import AnswerParser, parser_for
from trueroll.rollout.parsing.schemas import Tools

BY_NAME = {each.name: each for each in FORMATS}
_SCHEMA = {"properties": {"a": {"type": "integer"}}}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": _SCHEMA}} for name in ("f", "g")]
ONE = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "ü<"}}\n</tool_call>'
TWO = ONE + '\n<tool_call>{"name": "g"}</tool_call>\n'
CALLS = [("f", {"a": 1, "b": "ü<"}), ("g", {})]


def parser(name: str, token_ids: dict[str, int] | None = None) -> AnswerParser:
    return AnswerParser(BY_NAME[name], BY_NAME[name].reasoning or THINK, TOOLS, token_ids or {})


def calls_of(answer: Answer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("just text \n", "just text \n", []),
        ("a <tool", "a <tool", []),
        (ONE, "", CALLS[:1]),
        ("First. " + TWO, "First.", CALLS),
        (TWO + "Last.", "\n\nLast.", CALLS),
        (ONE + "and then", "and then", CALLS[:1]),
        ("<tool_call>{'name'", "<tool_call>{'name'", []),
        ("<tool_call>{bad}</tool_call>" + ONE, "<tool_call>{bad}</tool_call>", CALLS[:1]),
        ('<tool_call>{"name": "f" "}</tool_call>' + ONE, '<tool_call>{"name": "f" "}</tool_call>', CALLS[:1]),
        ("x<tool_call>[]</tool_call>", "x<tool_call>[]</tool_call>", []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        *[
            (text, text, [])
            for value in ("NaN", "1e999", '"\\ud800"', "[" * 100_000, "9" * 5000)
            for text in [f'<tool_call>{{"name": "f", "arguments": {{"a": {value}}}}}</tool_call>']
        ],
    ],
)
def test_calls_are_found_however_the_text_is_divided(
    size: int, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    stream, told = parser("hermes").stream(), Answer()
    for at in range(0, len(text), size if len(text) < 10_000 else 1000):
        told.extend(stream.add(text[at : at + (size if len(text) < 10_000 else 1000)]))
    told.extend(stream.finish("stop"))
    assert (told.content, calls_of(told)) == (content, calls)


def test_the_beginning_of_a_call_that_was_cut_off_is_dropped() -> None:
    cut = parser("hermes").whole("a\n" + ONE + "\n" + ONE[:-3], "length")
    assert (cut.content, calls_of(cut)) == ("a", CALLS[:1])
    assert parser("qwen-xml").whole("see <function=f>", "length").content == "see <function=f>"


def test_minimax() -> None:
    call = '<invoke name="f">\n<parameter name="a">1</parameter>\n<parameter name="b">x\ny</parameter>\n</invoke>'
    text = f"<think>hm\n</think>\n\nSo.\n<minimax:tool_call>\n{call}\n{call}\n</minimax:tool_call>"
    token_ids = {"<think>": 1, "</think>": 2, "<minimax:tool_call>": 3, "</minimax:tool_call>": 4}
    for known in ({}, token_ids):
        found = parser("minimax", known)
        told = found.whole(found._markers.marked(text), "stop")
        assert (told.content, told.reasoning, calls_of(told)) == ("So.", "hm", [("f", {"a": 1, "b": "x\ny"})] * 2)


def test_the_text_of_a_marker_in_other_tokens_is_plain_text() -> None:
    found = parser("hermes", {"<tool_call>": 1, "</tool_call>": 2, "<think>": 3, "</think>": 4})
    assert len(found.marks) == 4 and set("".join(found.marks.values())) <= {chr(each) for each in range(0xD800, 0xE000)}
    assert found.whole(ONE, "stop") == Answer(ONE)
    marked = ONE.replace("<tool_call>", found.marks[1]).replace("</tool_call>", found.marks[2])
    assert calls_of(found.whole(marked, "stop")) == CALLS[:1]
    assert found.whole(found.marks[2] + "x", "stop") == Answer("</tool_call>x")


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "5", 5),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "integer"}, "true", "true"),
        ({"anyOf": [{"type": "array"}, {"type": "string"}]}, "[1]", [1]),
        ({"anyOf": [{"type": "array"}, {"type": "string"}]}, "{}", "{}"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "string", "nullable": True}, "null", None),
        (None, '{"a": 1}', {"a": 1}),
        (None, "word", "word"),
        ({"type": {"a": 1}, "anyOf": 3, "enum": {}}, "1", 1),
    ],
)
def test_the_schema_gives_the_type_of_an_argument(schema: Any, text: str, value: Any) -> None:
    tools = Tools([{"function": {"name": "f", "parameters": {"properties": {"a": schema}}}}])
    found = tools.typed("f", "a", text)
    assert (found, type(found)) == (value, type(value))


def test_malformed_tools_are_known_by_no_name() -> None:
    for tool in ({}, {"function": 3}, {"function": {"name": 3}}, {"function": {"name": "f", "parameters": [1]}}):
        assert Tools([tool]).typed("f", "a", "1") == 1


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ x }}<tool_call>{{ y }}", "hermes"),
        ("<tool_call>\n<function=f>", "qwen-xml"),
        ("<tool_call>f<arg_key>", "glm"),
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
        ("<|tool_calls_section_begin|>", "kimi-k2"),
        ("<minimax:tool_call>", "minimax"),
        ("<|tool_call>call:", "gemma"),
        ("<|python_tag|>", "llama"),
    ],
)
def test_the_chat_template_tells_the_format(template: str, name: str) -> None:
    found = format_of(template)
    assert found is not None and found.name == name and format_of("{{ messages }}") is None


class Model:
    def __init__(self, chat_template: str) -> None:
        self.chat_templates, self.added_tokens = {"default": chat_template}, {"<think>": 7}


def test_only_what_the_request_and_the_template_allow_is_parsed() -> None:
    assert parser_for(Model("plain"), TOOLS) is None and parser_for(Model("<tool_call>"), []) is None
    reasons = parser_for(Model("<think><tool_call>"), [])
    assert reasons is not None and [*reasons.marks] == [7]
    assert reasons.whole(ONE, "stop") == Answer(ONE)
    assert reasons.whole(f"{reasons.marks[7]}\na</think> b", "stop") == Answer("b", "a")
    assert reasons.whole("a</think>b", "stop", f"<x>{reasons.marks[7]}\n") == Answer("b", "a")
    assert parser_for(Model("<|channel|><|message|>"), []) is not None


def test_the_number_of_times_that_text_is_parsed_again_is_limited() -> None:
    """Without the limit, the end of each region of this text would be searched up to the end of the text."""
    again = '<tool_call>\\"</tool_call>'
    assert parser("hermes").whole(again * 5000 + ONE, "stop") == Answer(again * 5000 + ONE)
    few = parser("hermes").whole(again * 10 + ONE, "stop")
    assert (few.content, calls_of(few)) == (again * 10, CALLS[:1])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma", "<|tool_call>call:f{a:" + "[" * 65 + "]" * 65 + "}<tool_call|>"),
        ("gemma", "<|tool_call>call:f{a:b c}<tool_call|>"),
        ("llama", "[f(a=" + "[" * 65 + "]" * 65 + ")]"),
        ("llama", "[f(a=g())]"),
        ("llama", "[f(a='x' 'y')]"),
        ("llama", "[other(a=1)]"),
        ("llama", '{"name": "f"} and more'),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1 </tool_call> x"),
        ("qwen-xml", "<tool_call><function=f><parameter=a>1</parameter>x</function></tool_call>"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{"),
        ("harmony", "no header" * 100),
    ],
)
def test_malformed_calls_are_content(name: str, text: str) -> None:
    assert parser(name).whole(text, "stop").content == text
    assert parser(name).whole(text, "stop").calls == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>\n"),
        ("minimax", '<minimax:tool_call><invoke name="f"><parameter name="a">1</invoke></minimax:tool_call>'),
        ("qwen-xml", "<tool_call><function=f><parameter=a>\n1\n</function></tool_call>"),
    ],
)
def test_the_last_argument_of_a_call_may_lack_its_end(name: str, text: str) -> None:
    assert calls_of(parser(name).whole(text + text, "stop")) == [("f", {"a": 1})] * 2
