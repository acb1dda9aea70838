"""The formats in which models write reasoning and tool calls, and the choice of a model's format."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from . import harmony
from .answers import DECODER, Call, make_call, parsed_json
from .literals import after_space, gemma_call, python_calls
from .markers import Markers
from .schemas import Tools
from .streams import Region, Syntax
from .tags import Tags, tagged_call

THINK = ("<think>", "</think>")
_JSON_QUOTES: dict[str, Any] = dict(open='"', close='"', escapes=True)


@dataclass(frozen=True)
class Format:
    """A format of tool calls.

    `name`: the format's name in docs/http.md. `signs`: a chat template that contains all of these texts uses the
    format. `markers`: the texts for which the tokenizer may have tokens. `syntax`: a function that returns the format's
    syntax for given markers and tools. `reasoning`: the beginning and the end of the format's own reasoning; None if
    the chat template determines the texts that begin and end the reasoning.
    """

    name: str
    signs: tuple[str, ...]
    markers: tuple[str, ...]
    syntax: Callable[[Markers, Tools], Syntax]
    reasoning: tuple[str, str] | None = None


def _one(call: Call | None) -> list[Call] | None:
    return None if call is None else [call]


def _object_call(value: Any) -> Call | None:
    """Return the call that a JSON value describes; None if the value is not a valid call."""
    if not isinstance(value, dict) or not value.keys() <= _KEYS or value.get("type", "function") != "function":
        return None
    match [value[key] for key in ("arguments", "parameters") if key in value]:
        case []:
            return make_call(value.get("name"), {})
        case [arguments]:
            return make_call(value.get("name"), arguments)
    return None


_KEYS = {"type", "name", "arguments", "parameters"}


def _hermes(markers: Markers, tools: Tools) -> Syntax:
    def read(text: str) -> list[Call] | None:
        return _one(_object_call(parsed_json(markers.plain(text))))

    return Syntax(regions={markers.marked("<tool_call>"): Region(read, markers.marked("</tool_call>"), **_JSON_QUOTES)})


def _tagged(markers: Markers, tools: Tools, tags: Tags, opened: str = "") -> Callable[[str], list[Call] | None]:
    """Return a function that reads a call written in tags. `opened`: the text that begins both the call and its region;
    empty if the call begins inside its region.
    """
    return lambda text: _one(tagged_call(opened + text, tags, tools, markers.plain))


def _qwen(markers: Markers, tools: Tools) -> Syntax:
    end = markers.marked("</tool_call>")
    border = rf"</function>\s*{end}"
    tags = Tags(
        r"<function=([^<>\s]+)>", r"<parameter=([^<>\n]+)>", "</parameter>", "</function>", border, is_line=True
    )

    def begins(text: str, at: int) -> bool | None:
        name, found, _ = text[at : at + tools.longest_name + 1].partition(">")
        if found or len(name) > tools.longest_name:
            return name in tools
        return None

    region = Region(_tagged(markers, tools, tags), end, "<parameter=", "</parameter>")
    bare = replace(
        region,
        read=_tagged(markers, tools, replace(tags, last=""), "<function="),
        end="</function>",
        tail=end,
        is_doubtful=True,
        begins=begins,
    )
    return Syntax(regions={markers.marked("<tool_call>"): region, "<function=": bare})


def _glm(markers: Markers, tools: Tools) -> Syntax:
    opened, end, *tags = map(markers.marked, _GLM)
    key, key_end, value, value_end = tags
    text = f"[^{''.join(marker[0] for marker in (opened, end, *tags))}]"  # not the start of a marker
    parameter = rf"{key}({text}*){key_end}\s*{value}"  # markers have no characters with a special meaning in patterns
    head = rf"([^{key[0]}\s]+)"
    read_any = _tagged(markers, tools, Tags(head, parameter, value_end, "", rf"{end}\s*{opened}"))

    def read(text: str) -> list[Call] | None:
        calls = read_any(text)
        return calls if calls and (calls[0].arguments != "{}" or calls[0].name in tools) else None

    return Syntax(regions={opened: Region(read, end, value, value_end)})


_GLM = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def _invoked(section: str, prefix: str, kind: str) -> Callable[[Markers, Tools], Syntax]:
    """Return the syntax of calls that are written in the tags `invoke` and `parameter`. `section`: name of the tag
    around all calls. `prefix`: prefix of the tag names. `kind`: pattern for the attributes after the name of a
    parameter.
    """

    def syntax(markers: Markers, tools: Tools) -> Syntax:
        begin, finish, mark = map(markers.marked, (f"<{section}>", f"</{section}>", prefix))
        opened, end, close = f"<{mark}invoke name=", f"</{mark}invoke>", f"</{mark}parameter>"
        tags = Tags(r'"?([^"<>]+)"?>', rf'<{mark}parameter name="?([^"<>]+)"?{kind}>', close, "", rf"{end}\s*{opened}")
        region = Region(_tagged(markers, tools, tags), end, f"<{mark}parameter ", close)
        return Syntax(regions={opened: region}, section=(begin, finish))

    return syntax


def _deepseek(markers: Markers, tools: Tools) -> Syntax:
    begin, end, opened, close, between = map(markers.marked, _DEEPSEEK)

    def read(text: str) -> list[Call] | None:
        name, rest = (markers.plain(part).strip() for part in text.partition(between)[::2])
        if name == "function" and (fenced := _FENCED.fullmatch(rest)):
            name, rest = fenced.groups()
        return _one(make_call(name.strip(), parsed_json(rest)))

    return Syntax(regions={opened: Region(read, close, **_JSON_QUOTES)}, section=(begin, end))


_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
_FENCED = re.compile(r"([^\n]*)\n\s*```json(.*)```", re.DOTALL)
"""The name and the arguments of a call as DeepSeek R1 writes it."""


def _kimi(markers: Markers, tools: Tools) -> Syntax:
    begin, end, opened, close, between = map(markers.marked, _KIMI)

    def read(text: str) -> list[Call] | None:
        id, _, arguments = text.partition(between)
        id = id.strip()
        name = _KIMI_ID.fullmatch(id)
        return _one(make_call(name and name[1], parsed_json(markers.plain(arguments)), id))

    return Syntax(regions={opened: Region(read, close, **_JSON_QUOTES)}, section=(begin, end))


_KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)
_KIMI_ID = re.compile(r"(?:functions\.)?([\w.\-]+?)(?::\d+)?")


def _kimi3(markers: Markers, tools: Tools) -> Syntax:
    def tag(which: str, name: str) -> str:
        return markers.marked(f"<|{which}|>{name}<|sep|>")

    opened = markers.marked("<|open|>")
    sep = markers.marked("<|sep|>")
    end, close = tag("close", "call"), tag("close", "argument")
    parameter = rf'{re.escape(opened)}argument key="([^"]*)" type="(\w+)"{re.escape(sep)}'
    head, border = rf'"([^"]+)"[^{sep[0]}]*{re.escape(sep)}', rf"{re.escape(end + opened)}call "
    tags = Tags(head, parameter, close, "", border, has_entities=True)
    region = Region(_tagged(markers, tools, tags), end, f"{opened}argument ", close)
    return Syntax(
        regions={f"{opened}call tool=": region},
        section=(tag("open", "tools"), tag("close", "tools")),
        silent=(tag("open", "response"), tag("close", "response"), tag("close", "message")),
        after_reasoning=(tag("open", "response"), tag("open", "tools")),
    )


def _gemma(markers: Markers, tools: Tools) -> Syntax:
    opened, end, quote = map(markers.marked, _GEMMA)

    def read(text: str) -> list[Call] | None:
        return _one(gemma_call(text, quote, markers.plain))

    return Syntax(regions={opened: Region(read, end, quote, quote)})


_GEMMA = ("<|tool_call>", "<tool_call|>", '<|"|>')


def _llama(markers: Markers, tools: Tools) -> Syntax:
    tag, begin, end = map(markers.marked, _LLAMA)

    def read(text: str) -> list[Call] | None:
        text = markers.plain(text).strip().removesuffix(_LLAMA[2]).strip()
        calls = python_calls(text) if text.startswith("[") else _json_calls(text)
        return calls if calls and all(call.name in tools for call in calls) else None

    def start(first: str, begins: Callable[[str], bool | None]) -> Region:
        return Region(
            lambda text: read(first + text),
            may_lack_end=True,
            is_doubtful=True,
            begins=lambda text, at: begins(text[at : at + _MAX_START_CHARS]),
        )

    def begins_list(text: str) -> bool | None:
        return _begins(_FIRST_CALL, text, lambda first: first.endswith("(") and first[:-1].strip() in tools)

    def begins_object(text: str) -> bool | None:
        return _begins(_FIRST_KEY, text, lambda first: first.strip('"') in _KEYS)

    region = Region(read, may_lack_end=True)
    starts = {"{": start("{", begins_object), "[": start("[", begins_list)}
    return Syntax(regions={tag: region, begin: region}, at_start=starts)


_LLAMA_SIGNS = ("<|python_tag|>", "<|header_start|>", '"parameters": dictionary of argument name')
_LLAMA = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")
_MAX_START_CHARS = 256
"""Maximum number of characters at the start of an answer from which to decide whether the answer consists of calls."""
_FIRST_CALL = re.compile(r"\s*([\w.\-]*\s*[^\w.\-\s]|[\w.\-]+\s+[\w.\-])")
_FIRST_KEY = re.compile(r'\s*("\w*\W|[^"\s])')


def _begins(pattern: re.Pattern[str], text: str, is_call: Callable[[str], bool]) -> bool | None:
    """Return whether the beginning of an answer is the beginning of a call; None if the text is too short to tell.

    `is_call`: takes the text that group 1 of `pattern` matches, and returns whether a call begins.
    """
    if found := pattern.match(text):
        return is_call(found[1])
    return None if len(text) < _MAX_START_CHARS else False


def _json_calls(text: str) -> list[Call] | None:
    """Return the calls in a sequence of JSON objects, which may be separated by semicolons; None if the text is
    anything else.
    """
    calls, at = list[Call](), 0
    while at < len(text):
        try:
            value, at = DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        if (call := _object_call(value)) is None:
            return None
        calls.append(call)
        at = after_space(text, at)
        at = after_space(text, at + 1) if text.startswith(";", at) else at
    return calls


def _object(markers: Markers, tools: Tools) -> Syntax:
    """Return the syntax of an answer that a grammar forces to be a JSON object that describes one call."""

    def read(text: str) -> list[Call] | None:
        return _one(_object_call(parsed_json("{" + text)))

    return Syntax(at_start={"{": Region(read, may_lack_end=True)})


_DSML = "｜DSML｜"
_TYPED = ' string="(true|false)"'
FORCED = Format("json", (), (), _object)
"""One call, as a JSON object with `name` and `arguments`. A grammar forces the model to write such a call."""
FORMATS = (
    Format(
        "harmony",
        ("<|channel|>", "<|message|>"),
        harmony.MARKERS,
        lambda markers, tools: harmony.HarmonySyntax(tools=tools),
        reasoning=("<|channel|>analysis<|message|>", "<|end|>"),
    ),
    Format("deepseek-v4.1", (f"<{_DSML} calls>",), (_DSML,), _invoked(f"{_DSML} calls", f"{_DSML} ", _TYPED)),
    Format("deepseek-v4", (f"<{_DSML}tool_calls>",), (_DSML,), _invoked(f"{_DSML}tool_calls", _DSML, _TYPED)),
    Format("deepseek-v3.2", (f"<{_DSML}function_calls>",), (_DSML,), _invoked(f"{_DSML}function_calls", _DSML, _TYPED)),
    Format("deepseek", (_DEEPSEEK[0],), _DEEPSEEK, _deepseek),
    Format(
        "kimi-k3",
        ("<|open|>", "<|sep|>"),
        ("<|open|>", "<|close|>", "<|sep|>"),
        _kimi3,
        reasoning=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ),
    Format("kimi-k2", (_KIMI[0],), _KIMI, _kimi),
    Format(
        "minimax",
        ("<minimax:tool_call>",),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        _invoked("minimax:tool_call", "", ""),
    ),
    Format("glm", ("<arg_key>", "<tool_call>"), _GLM, _glm),
    Format("qwen-xml", ("<function=", "<tool_call>"), ("<tool_call>", "</tool_call>"), _qwen),
    Format(
        "gemma", ("<|tool_call>",), (*_GEMMA, "<|channel>", "<channel|>"), _gemma, ("<|channel>thought\n", "<channel|>")
    ),
    Format("hermes", ("<tool_call>",), ("<tool_call>", "</tool_call>"), _hermes),
    *[Format("llama", (sign,), _LLAMA, _llama) for sign in _LLAMA_SIGNS],
)
"""The formats, in order of precedence. A chat template uses the first format for which the template contains all signs.
"""


def format_of(chat_template: str) -> Format | None:
    """Return the format of tool calls that a chat template uses; None if the format is unknown."""
    return next((each for each in FORMATS if all(sign in chat_template for sign in each.signs)), None)
