"""The formats in which models write reasoning and tool calls, and the choice of a model's format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from . import harmony
from .answers import Call, make_call, parsed_json
from .literals import gemma_call, python_calls
from .markers import Markers
from .schemas import Tools
from .streams import Region, Syntax
from .tags import Tags, tagged_call

THINK = ("<think>", "</think>")
_JSON_QUOTES: dict[str, Any] = dict(open='"', close='"', escapes=True)


@dataclass(frozen=True)
class Format:
    """A format of tool calls.

    `name`: as in docs/http.md. `signs`: a chat template with all of these texts uses the format. `markers`: the texts
    that may be tokens. `syntax`: returns the syntax for markers and tools. `reasoning`: the beginning and the end of
    the reasoning; None if the chat template decides.
    """

    name: str
    signs: tuple[str, ...]
    markers: tuple[str, ...]
    syntax: Callable[[Markers, Tools], Syntax]
    reasoning: tuple[str, str] | None = None


def _one(call: Call | None) -> list[Call] | None:
    return None if call is None else [call]


def _object_call(value: Any, *arguments: str) -> Call | None:
    """Return the call that a JSON value describes. `arguments`: possible names of the arguments."""
    if not isinstance(value, dict):
        return None
    return make_call(value.get("name"), next((value[name] for name in arguments if name in value), {}))


def _hermes(markers: Markers, tools: Tools) -> Syntax:
    def read(text: str) -> list[Call] | None:
        return _one(_object_call(parsed_json(markers.plain(text)), "arguments"))

    return Syntax(
        markers, regions={markers.marked("<tool_call>"): Region(read, markers.marked("</tool_call>"), **_JSON_QUOTES)}
    )


def _tagged(markers: Markers, tools: Tools, tags: Tags, opened: str = "") -> Callable[[str], list[Call] | None]:
    """Return a reader of tagged calls. `opened`: the beginning of the call, if it also begins the region."""
    return lambda text: _one(tagged_call(opened + text, tags, tools, markers.plain))


def _qwen(markers: Markers, tools: Tools) -> Syntax:
    end = markers.marked("</tool_call>")
    border = rf"</function>\s*{end}"
    tags = Tags(
        r"<function=([^<>\s]+)>", r"<parameter=([^<>\n]+)>", "</parameter>", "</function>", border, is_line=True
    )
    read, read_bare = _tagged(markers, tools, tags), _tagged(markers, tools, tags, "<function=")
    region = Region(read, end, "<parameter=", "</parameter>")

    def read_offered(text: str) -> list[Call] | None:
        return read_bare(text) if text.partition(">")[0] in tools else None

    bare = replace(region, read=read_offered, may_lack_end=True, is_doubtful=True)
    return Syntax(markers, regions={markers.marked("<tool_call>"): region, "<function=": bare})


def _glm(markers: Markers, tools: Tools) -> Syntax:
    opened, end, *tags = map(markers.marked, _GLM)
    key, key_end, value, value_end = tags
    parameter = rf"{key}([^{key_end[0]}]*){key_end}\s*{value}"  # no marker has a character that patterns interpret
    head = rf"([^{key[0]}\s]+)"
    read = _tagged(markers, tools, Tags(head, parameter, value_end, "", rf"{end}\s*{opened}"))
    return Syntax(markers, regions={opened: Region(read, end, value, value_end)})


_GLM = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def _invoked(section: str, prefix: str, kind: str) -> Callable[[Markers, Tools], Syntax]:
    """Return the syntax of calls in tags `invoke` and `parameter`. `section`, `prefix`: of the tags. `kind`: pattern of
    what follows the name of a parameter.
    """

    def syntax(markers: Markers, tools: Tools) -> Syntax:
        begin, finish, mark = map(markers.marked, (f"<{section}>", f"</{section}>", prefix))
        opened, end, close = f"<{mark}invoke name=", f"</{mark}invoke>", f"</{mark}parameter>"
        tags = Tags(r'"?([^"<>]+)"?>', rf'<{mark}parameter name="?([^"<>]+)"?{kind}>', close, "", rf"{end}\s*{opened}")
        region = Region(_tagged(markers, tools, tags), end, f"<{mark}parameter ", close)
        return Syntax(markers, regions={opened: region}, section=(begin, finish))

    return syntax


def _deepseek(markers: Markers, tools: Tools) -> Syntax:
    begin, end, opened, close, between = map(markers.marked, _DEEPSEEK)

    def read(text: str) -> list[Call] | None:
        name, _, rest = markers.plain(text).partition(_DEEPSEEK[-1])
        if name.strip() == "function":
            name, _, rest = rest.partition("\n")
            rest = rest.strip()
            if not rest.startswith("```json") or not rest.endswith("```"):
                return None
            rest = rest.removeprefix("```json").removesuffix("```")
        return _one(make_call(name.strip(), parsed_json(rest)))

    return Syntax(markers, regions={opened: Region(read, close, **_JSON_QUOTES)}, section=(begin, end))


_DEEPSEEK = (
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
)


def _kimi(markers: Markers, tools: Tools) -> Syntax:
    begin, end, opened, close, between = map(markers.marked, _KIMI)

    def read(text: str) -> list[Call] | None:
        id, _, arguments = text.partition(between)
        id = id.strip()
        name = _KIMI_ID.fullmatch(id)
        return _one(make_call(name and name[1], parsed_json(markers.plain(arguments)), id))

    return Syntax(markers, regions={opened: Region(read, close, **_JSON_QUOTES)}, section=(begin, end))


_KIMI = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
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
        markers,
        regions={f"{opened}call tool=": region},
        section=(tag("open", "tools"), tag("close", "tools")),
        silent=(tag("open", "response"), tag("close", "response"), tag("close", "message")),
        after_reasoning=(tag("open", "response"), tag("open", "tools")),
    )


def _gemma(markers: Markers, tools: Tools) -> Syntax:
    opened, end, quote = map(markers.marked, _GEMMA)

    def read(text: str) -> list[Call] | None:
        return _one(gemma_call(text, quote, markers.plain))

    return Syntax(markers, regions={opened: Region(read, end, quote, quote)})


_GEMMA = ("<|tool_call>", "<tool_call|>", '<|"|>')


def _llama(markers: Markers, tools: Tools) -> Syntax:
    tag, begin, end = map(markers.marked, _LLAMA)

    def read(text: str) -> list[Call] | None:
        text = markers.plain(text).strip().removesuffix(_LLAMA[2]).strip()
        calls = python_calls(text) if text.startswith("[") else _json_calls(text)
        return calls if calls and all(call.name in tools for call in calls) else None

    region = Region(read, may_lack_end=True)
    starts = {
        first: replace(region, read=lambda text, first=first: read(first + text), is_doubtful=True) for first in "{["
    }
    return Syntax(markers, regions={tag: region, begin: region}, at_start=starts)


_LLAMA = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")


def _json_calls(text: str) -> list[Call] | None:
    """Return the calls in JSON objects that semicolons may separate; None if the text has another form."""
    calls, decoder, at = list[Call](), json.JSONDecoder(), 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        if (call := _object_call(value, "arguments", "parameters")) is None:
            return None
        calls.append(call)
        found = _BETWEEN.match(text, at)
        at = found.end() if found else at
    return calls


_BETWEEN = re.compile(r"\s*;?\s*")


def _object(markers: Markers, tools: Tools) -> Syntax:
    """Return the syntax of an answer that a grammar forces to be one call, as a JSON object."""

    def read(text: str) -> list[Call] | None:
        return _one(_object_call(parsed_json("{" + text), "arguments"))

    return Syntax(markers, at_start={"{": Region(read, may_lack_end=True, is_doubtful=True)})


def _no_calls(markers: Markers, tools: Tools) -> Syntax:
    return Syntax(markers)


_DSML = "｜DSML｜"
_TYPED = ' string="(true|false)"'
FORCED = Format("json", (), (), _object)
"""One call, as a JSON object with `name` and `arguments`. A grammar forces the model to write it."""
HARMONY = Format("harmony", ("<|channel|>", "<|message|>"), harmony.MARKERS, _no_calls)
FORMATS = (
    HARMONY,
    Format("deepseek-v4.1", (f"<{_DSML} calls>",), (_DSML,), _invoked(f"{_DSML} calls", f"{_DSML} ", _TYPED)),
    Format("deepseek-v4", (f"<{_DSML}tool_calls>",), (_DSML,), _invoked(f"{_DSML}tool_calls", _DSML, _TYPED)),
    Format("deepseek-v3.2", (f"<{_DSML}function_calls>",), (_DSML,), _invoked(f"{_DSML}function_calls", _DSML, _TYPED)),
    Format("deepseek", (_DEEPSEEK[0],), _DEEPSEEK, _deepseek),
    Format(
        *("kimi-k3", ("<|open|>", "<|sep|>"), ("<|open|>", "<|close|>", "<|sep|>"), _kimi3),
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
    *[Format("llama", (sign,), _LLAMA, _llama) for sign in ("<|python_tag|>", "<|header_start|>")],
)
"""The formats. A chat template has the first format with all of its signs in the template."""


def format_of(chat_template: str) -> Format | None:
    """Return the format of a chat template; None if it has no known format."""
    return next((each for each in FORMATS if all(sign in chat_template for sign in each.signs)), None)
