"""The format of gpt-oss (OpenAI's harmony): messages, each with a header that names a channel and a recipient."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from .answers import Answer, make_call, parsed_json
from .markers import Markers
from .schemas import Tools
from .streams import Reading, Syntax, any_of, begun

MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_MAX_HEADER_CHARS = 512
"""Maximum length of a header, in characters. A longer text without `<|message|>` is content, not a header.
"""
_RECIPIENT = re.compile(r"\bto=(functions\.)?([\w.\-]+)")


@dataclass(frozen=True)
class HarmonySyntax(Syntax):
    """The syntax of harmony. `tools`: the tools of the request; without tools, no message is a call."""

    tools: Tools = Tools(())

    def stream(self, markers: Markers, in_reasoning: bool) -> Reading:
        return HarmonyStream(markers, self.tools)


class HarmonyStream(Reading):
    """Parses a growing answer that begins within a header, after `<|start|>assistant`."""

    def __init__(self, markers: Markers, tools: Tools) -> None:
        super().__init__(markers)
        self._tools = tools
        start, self._channel, self._constrain, message, *ends = map(markers.marked, MARKERS)
        self._message = message
        self._header_ends = (message, start, *ends)
        self._body_ends = (start, *ends)
        self._start = start
        self._bare = re.compile(rf"\s*(assistant)?\s*({re.escape(self._channel)}\s*\w*\s*)?")
        self._header, self._name, self._body, self._has_message = "", "", list[str](), False
        self._write: Callable[[str], None] = self._out.content
        self._state = self._in_header

    def finish(self, finish_reason: str) -> Answer:
        is_whole = finish_reason == "stop"
        if self._state == self._in_header:
            self._header += self._take(len(self._rest))
            if is_whole or not (self._has_message or self._channel in self._header):
                self._out.content(self._shown_header())
            return self._out.finish()
        self._write(self._take_before(self._body_ends))
        rest = self._take(len(self._rest))
        if is_whole or rest == self._out.plain(rest):
            self._write(rest)
        if self._name and is_whole:
            self._end_call("")
        return self._out.finish()

    def _in_header(self) -> bool:
        found = any_of(self._header_ends).search(self._rest, self._at)
        end = found.start() if found else len(self._rest) - begun(self._rest, self._at, self._header_ends)
        if len(self._header) + end - self._at > _MAX_HEADER_CHARS:
            self._out.content(self._header)
            self._header, self._write, self._state = "", self._out.content, self._in_body
            return True
        if found is None:
            return False
        self._header += self._take(end)
        self._at, text = found.end(), found.group()
        if text == self._message:
            self._begin_body()
        elif text == self._start:
            self._out.content(self._shown_header())
        else:
            self._header += text
        return True

    def _shown_header(self) -> str:
        """Return the text of a header without a message, as content; empty if the header only names a role and a
        channel.
        """
        header, self._header = self._header, ""
        return "" if self._bare.fullmatch(header) else header.lstrip()

    def _begin_body(self) -> None:
        role, _, header = self._header.rpartition(self._channel)
        channel = header.partition(self._constrain)[0].split()[:1]
        recipient = _RECIPIENT.search(header) or _RECIPIENT.search(role)
        if recipient and self._tools and (recipient[1] or recipient[2] in self._tools):
            self._name = recipient[2]
        else:
            self._name = ""
        if self._has_message:
            self._out.separate()
        self._has_message = True
        self._write = self._out.reasoning if channel == ["analysis"] else self._out.content
        if self._name:
            self._body = []
            self._write = self._body.append
        self._state = self._in_body

    def _in_body(self) -> bool:
        if (found := any_of(self._body_ends).search(self._rest, self._at)) is None:
            self._write(self._take_before(self._body_ends))
            return False
        self._write(self._take(found.start()))
        self._at = found.end()
        if self._name:
            self._end_call(found.group())
        self._header, self._state = "", self._in_header
        return True

    def _end_call(self, end: str) -> None:
        """Write the call that a message contains. If the call is malformed, write the message as content."""
        text = "".join(self._body)
        if call := make_call(self._name, parsed_json(self._out.plain(text))):
            self._out.calls([call])
        else:
            self._out.content(self._header + self._message + text + end)
