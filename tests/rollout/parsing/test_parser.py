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


KIMI = "<|tool_calls_section_begin|>"
KIMI_CALL = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
QUOTED = ONE.replace("ü<", "</tool_call>")
BARE = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"


@pytest.mark.parametrize(
    ("name", "text", "content", "num_calls"),
    [
        ("hermes", "a\n" + ONE + "\n" + ONE[:-3], "a", 1),
        ("hermes", 'a<tool_call>{"name": "}</tool_call> b' + ONE + " c", 'a<tool_call>{"name": "}</tool_call> b c', 1),
        ("hermes", QUOTED + "\n" + ONE[:-3], "", 1),
        ("qwen-xml", "see <function=f>", "see <function=f>", 0),
        ("minimax", "a<minimax:tool_call>\n", "a", 0),
        ("minimax", "a<minimax:tool_call>\n<invoke na", "a", 0),
        ("minimax", "a<minimax:tool_call>\nnote", "a<minimax:tool_call>\nnote", 0),
        ("kimi-k2", "a" + KIMI + KIMI_CALL + KIMI_CALL[:40], "a", 1),
        ("deepseek", "a<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f", "a", 0),
        ("deepseek-v3.2", 'a<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">', "a", 0),
        ("kimi-k3", "a<|open|>too", "a", 0),
        ("harmony", "<|channel|>commentary to=functions.f <|constr", "", 0),
        ("harmony", "<|channel|>final<|message|>a<|end|><|start|>assis", "a", 0),
        ("harmony", "plain", "plain", 0),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {}}', "", 1),
        ("llama", '<|python_tag|>{"name": "f", "param', "", 0),
        ("llama", '{"name": "f", "param', '{"name": "f", "param', 0),
    ],
)
def test_the_beginning_of_a_call_that_was_cut_off_is_dropped(
    name: str, text: str, content: str, num_calls: int
) -> None:
    """The markers are tokens."""
    found = parser(name, {text: i for i, text in enumerate(BY_NAME[name].markers)})
    cut = found.whole(found._markers.marked(text), "length")
    assert (cut.content, cut.reasoning, len(cut.calls)) == (content, "", num_calls)


@pytest.mark.parametrize(
    ("finish_reason", "text", "content", "num_calls"),
    [
        ("length", '{"name": "f", "arguments": {}}', "", 1),
        ("length", '{"name": "f", "argum', "", 0),
        ("stop", '{"name": "f", "argum', '{"name": "f", "argum', 0),
    ],
)
def test_a_forced_call_may_end_with_the_last_token(finish_reason: str, text: str, content: str, num_calls: int) -> None:
    forced = parser_for(Model("plain"), TOOLS, is_forced=True)
    assert forced is not None
    told = forced.whole(text, finish_reason)
    assert (told.content, len(told.calls)) == (content, num_calls)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("name", "text", "content", "num_calls"),
    [
        ("kimi-k2", f"{KIMI}{KIMI_CALL} tail <|tool_calls_section_end|>after", " tail after", 1),
        ("kimi-k2", f"{KIMI}note{KIMI_CALL}\n{KIMI_CALL}\n", "", 2),
        ("kimi-k2", f"{KIMI}{KIMI_CALL} and more", " and more", 1),
        ("kimi-k2", f"{KIMI} note ", f"{KIMI} note ", 0),
        ("minimax", '<minimax:tool_call><invoke name="f"></invoke>\nIt is 42.', "\nIt is 42.", 1),
        ("qwen-xml", f"a {BARE}\n{BARE}\n</tool_call>\nDone.", "a \n\n\nDone.", 2),
        ("qwen-xml", f"a {BARE} b", "a  b", 1),
        ("qwen-xml", "<function=other></function>", "<function=other></function>", 0),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "", 1),
        ("glm", "The tag <tool_call>yes</tool_call>.", "The tag <tool_call>yes</tool_call>.", 0),
        ("glm", "<tool_call>g</tool_call>", "", 1),
        ("llama", '{"name": "f", "age": 3}', '{"name": "f", "age": 3}', 0),
        ("llama", '{"type": "function", "name": "f", "parameters": {"a": 1}}', "", 1),
        ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "", 1),
        ("harmony", "<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>final", "a", 0),
        ("harmony", "<|channel|>final<|message|>a<|end|><|start|>x<|channel|>final<|message|>b", "a\nb", 0),
        ("harmony", "<|channel|>" + "y" * 494 + "<|message|>b", "b", 0),
    ],
)
def test_text_around_calls_stays(size: int, name: str, text: str, content: str, num_calls: int) -> None:
    stream, told = parser(name).stream(), Answer()
    for at in range(0, len(text), size):
        told.extend(stream.add(text[at : at + size]))
    told.extend(stream.finish("stop"))
    assert (told.content, len(told.calls)) == (content, num_calls)


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "f", "args": {"a": 1}}',
        '{"name": "f", "arguments": {"a": 1, "a": 2}}',
        '{"name": "f", "arguments": {}, "name": "g"}',
        '{"name": "f", "arguments": {}, "parameters": {}}',
        '{"name": "f", "type": "tool"}',
        '{"name": " "}',
        '{"name": "\\u0000"}',
    ],
)
def test_a_call_is_not_returned_without_what_the_model_wrote(call: str) -> None:
    text = f"<tool_call>{call}</tool_call>"
    assert parser("hermes").whole(text, "stop") == Answer(text)


def test_an_answer_to_a_request_without_tools_has_no_calls() -> None:
    call = '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>'
    for tools, num_calls in ((TOOLS, 1), ([], 0)):
        assert len(AnswerParser(BY_NAME["harmony"], None, tools, {}).whole(call, "stop").calls) == num_calls
    text = "<|open|>think<|sep|>a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|>"
    plain = parser_for(Model("<|open|><|sep|>"), [])
    assert plain is not None and plain.whole(text, "stop") == Answer("b", "a")


def test_reasoning_and_messages_are_joined_by_line_breaks() -> None:
    thought, call = "<|channel>thought\n{}<channel|>", "<|tool_call>call:f{a:1}<tool_call|>"
    told = parser("gemma").whole(thought.format("A") + "x" + call + thought.format("B") + "y", "stop")
    assert (told.content, told.reasoning, calls_of(told)) == ("x\ny", "A\nB", [("f", {"a": 1})])
    thought = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
    told = parser("harmony").whole(thought.format("A") + thought.format("B") + "<|channel|>final<|message|> y", "stop")
    assert (told.content, told.reasoning) == ("y", "A\nB")


def test_two_calls_have_different_ids() -> None:
    calls = parser("kimi-k2").whole(KIMI + KIMI_CALL + KIMI_CALL, "stop").calls
    assert [call.id for call in calls] == ["functions.f:0", None]


@pytest.mark.parametrize(
    ("name", "parts", "shown"),
    [
        ("llama", ["[No", "te] ", "b"], ["", "[Note]", " b"]),
        ("llama", ["{", '"x', '": 1'], ["", "", '{"x": 1']),
        ("qwen-xml", ["a<function=n", ">b", "c"], ["a", "<function=n>b", "c"]),
        ("qwen-xml", ["a<function=no", ">b"], ["a<function=no", ">b"]),
    ],
)
def test_text_that_cannot_become_a_call_is_not_held_back(name: str, parts: list[str], shown: list[str]) -> None:
    stream = parser(name).stream()
    assert [stream.add(part).content for part in parts] == shown


def test_a_marker_in_other_tokens_does_not_divide_a_call() -> None:
    found = parser("deepseek", {text: i for i, text in enumerate(BY_NAME["deepseek"].markers)})
    begun, call = map(found._markers.marked, ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"))
    assert found.whole(begun + "f<｜tool▁sep｜>{}" + call, "stop").calls == []


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
        (None, "none", "none"),
        (None, "NaN", "NaN"),
        (None, "1e999", "1e999"),
        (None, '"\\ud800"', '"\\ud800"'),
        (None, '{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ({"$ref": "#/$defs/E"}, "1", "1"),
        ({"anyOf": [{"$ref": "#/$defs/C"}, {"type": "null"}]}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [{"$ref": "#/$defs/E"}, {"type": "null"}]}, "none", None),
        ({"anyOf": [{"$ref": "https://x.y/z"}, {"type": "null"}]}, '{"x": 1}', {"x": 1}),
        ({"allOf": [{"$ref": "#/$defs/E"}, {"description": "x"}]}, "1", "1"),
        ({"$ref": "#/$defs/Loop"}, "1", 1),
        ({"type": {"a": 1}, "anyOf": 3, "enum": {}}, "1", 1),
    ],
)
def test_the_schema_gives_the_type_of_an_argument(schema: Any, text: str, value: Any) -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/Loop"}] * 100}
    definitions = {"E": {"enum": ["1", "2"]}, "C": {"type": "object"}, "Loop": loop}
    parameters = {"properties": {"a": schema}, "$defs": definitions}
    tools = Tools([{"function": {"name": "f", "parameters": parameters}}])
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
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama"),
    ],
)
def test_the_chat_template_tells_the_format(template: str, name: str) -> None:
    found = format_of(template)
    assert found is not None and found.name == name and format_of("{{ messages }}") is None


class Model:
    def __init__(self, chat_template: str, **more: str) -> None:
        self.chat_templates, self.added_tokens = {"default": chat_template} | more, {"<think>": 7}


def test_the_template_for_tools_tells_the_format_of_calls() -> None:
    model = Model("<think>", tool_use="<tool_call>")
    found = parser_for(model, TOOLS)
    assert found is not None and calls_of(found.whole(ONE, "stop")) == CALLS[:1]
    plain = parser_for(model, [])
    assert plain is not None and plain.whole(f"{plain.marks[7]}a</think>b", "stop") == Answer("b", "a")


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


def test_the_time_is_proportional_to_the_number_of_tags() -> None:
    """A quadratic search for the ends of arguments would take minutes."""
    found = parser("glm", {text: i for i, text in enumerate(BY_NAME["glm"].markers)})
    text = "<tool_call>f" + "</arg_value><arg_key>" * 200_000 + "</tool_call>"
    assert found.whole(found._markers.marked(text), "stop") == Answer(text)


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
