"""The parser of one growing answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from .answers import Answer, Call, Writer
from .markers import Markers

_MAX_RETRIES = 16
"""Maximum number of malformed regions, per answer, after which the text is parsed again. A retry takes time
proportional to the length of the answer.
"""


@lru_cache(256)
def any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that matches each of the texts, and nothing else."""
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


@dataclass(frozen=True)
class Region:
    """A region that holds a tool call, as marked text.

    `read`: returns the calls in the text of a region, or None if the text is malformed. `end`: ends the region, unless
    it is quoted; empty if only the end of the answer ends the region. `open`, `close`: begin and end quoted text; empty
    if there is none. In quoted text, a backslash escapes the next character if `escapes` is true. `may_lack_end`:
    whether the end of the answer also ends the region. `is_doubtful`: whether content may begin in the same way.
    """

    read: Callable[[str], list[Call] | None]
    end: str = ""
    open: str = ""
    close: str = ""
    escapes: bool = False
    may_lack_end: bool = False
    is_doubtful: bool = False

    @cached_property
    def outside(self) -> re.Pattern[str]:
        """What ends the region or begins quoted text."""
        return any_of(tuple(text for text in (self.end, self.open) if text))

    @cached_property
    def inside(self) -> re.Pattern[str]:
        """What ends quoted text or is escaped in it."""
        return re.compile(re.escape(self.close) + (r"|\\." if self.escapes else ""), re.DOTALL)

    @cached_property
    def most_held(self) -> int:
        """The number of characters at the end of a text that later text may join to a match of a pattern."""
        return max(2, *map(len, (self.end, self.open, self.close))) - 1


_NO_REGION = Region(lambda _: None)


@dataclass(frozen=True)
class Syntax:
    """The syntax of a format, as marked text.

    `reasoning`: the beginning and the end of the reasoning. `after_reasoning`: texts that also end the reasoning, of
    which they are no part. `regions`: the regions of calls, by the text that begins them. `section`: the beginning and
    the end of a section; if it is given, regions begin only in sections. `silent`: texts that are not content.
    `at_start`: like `regions`, for texts that begin a region only at the start of the content.
    """

    markers: Markers
    reasoning: tuple[str, str] | None = None
    regions: Mapping[str, Region] = field(default_factory=dict)
    section: tuple[str, str] | None = None
    silent: tuple[str, ...] = ()
    after_reasoning: tuple[str, ...] = ()
    at_start: Mapping[str, Region] = field(default_factory=dict)

    @cached_property
    def in_content(self) -> tuple[str, ...]:
        """The texts that are not content."""
        return (*(self.section[:1] if self.section else self.regions), *self.silent)

    @cached_property
    def in_section(self) -> tuple[str, ...]:
        """The texts that end a section or begin a region in it."""
        return (*self.regions, *(self.section or ())[1:])


def begun(text: str, start: int, texts: Sequence[str]) -> int:
    """Return the length of the longest end of `text[start:]` that may begin one of `texts`."""
    most = min(len(text) - start, max(map(len, texts), default=1) - 1)
    return next((n for n in range(most, 0, -1) if any(each.startswith(text[-n:]) for each in texts)), 0)


class Reading:
    """What all parsers of a growing answer share: the text that is not parsed yet, and the state of the parser.

    A state is a method that parses a part of the text. It returns whether it has ended, and `_state` is then the next
    one. `add` takes marked text, and `finish` the finish reason as in `SampleOutput`. Both return the new parts.
    """

    _state: Callable[[], bool]

    def __init__(self, markers: Markers) -> None:
        self._out = Writer(markers.plain)
        self._rest, self._at = "", 0  # the text from `_at` on is not parsed yet

    def add(self, text: str) -> Answer:
        """Add text. Return the new parts that later text cannot change."""
        self._rest, self._at = self._rest[self._at :] + text, 0
        self._run()
        return self._out.take()

    def finish(self, finish_reason: str) -> Answer:
        """Return the remaining parts of a finished answer."""
        raise NotImplementedError

    def _run(self) -> None:
        while self._state():
            pass

    def _take(self, end: int) -> str:
        """Return the text up to `end`, and advance to `end`."""
        text = self._rest[self._at : end]
        self._at += len(text)
        return text

    def _take_before(self, texts: Sequence[str]) -> str:
        """Return the text, without the end that may begin one of `texts`."""
        return self._take(len(self._rest) - begun(self._rest, self._at, texts))


class AnswerStream(Reading):
    """Parses a growing answer. `in_reasoning`: whether the prompt has begun the reasoning."""

    def __init__(self, syntax: Syntax, in_reasoning: bool) -> None:
        super().__init__(syntax.markers)
        self._syntax = syntax
        self._reasoning_open, self._reasoning_close = syntax.reasoning or ("", "")
        self._state = self._in_reasoning if in_reasoning else self._beginning
        self._section: _Section | None = None
        self._opened, self._body, self._is_quoted = "", list[str](), False
        self._region: Region = _NO_REGION
        self._retries = _MAX_RETRIES

    def finish(self, finish_reason: str) -> Answer:
        while self._state == self._in_region:
            self._finish_region(finish_reason)
            self._run()
        rest = self._take(len(self._rest))
        if self._state == self._in_reasoning:
            self._out.reasoning(rest)
        else:
            self._text(rest)
        if self._section is not None:
            self._out.content(self._section.shown())
        return self._out.finish()

    def _beginning(self) -> bool:
        text = self._rest[self._at :].lstrip()
        self._out.content(self._take(len(self._rest) - len(text)))
        starts = [*self._syntax.at_start, *([self._reasoning_open] if self._reasoning_open else [])]
        found = next((each for each in starts if text.startswith(each)), None)
        if found is None and any(each.startswith(text) for each in starts):
            return False
        self._at += len(found or "")
        if found is None:
            self._state = self._content
        elif found in self._syntax.at_start:
            self._begin_region(found, self._syntax.at_start[found])
        else:
            self._out.begin_reasoning()
            self._state = self._in_reasoning
        return True

    def _in_reasoning(self) -> bool:
        ends = (self._reasoning_close, *self._syntax.after_reasoning)
        if (found := any_of(ends).search(self._rest, self._at)) is None:
            self._out.reasoning(self._take_before(ends))
            return False
        self._out.reasoning(self._take(found.start()))
        self._at = found.end() if found.group() == self._reasoning_close else found.start()
        self._out.end_reasoning()
        self._reasoning_open = ""
        self._state = self._beginning
        return True

    def _content(self) -> bool:
        texts = self._syntax.in_section if self._section else self._syntax.in_content
        if (found := any_of(texts).search(self._rest, self._at)) is None:
            self._text(self._take_before(texts))
            return False
        self._text(self._take(found.start()))
        self._at, text = found.end(), found.group()
        if text in self._syntax.regions:
            self._begin_region(text, self._syntax.regions[text])
        elif text not in self._syntax.silent:
            self._begin_or_end_section(text)
        return True

    def _text(self, text: str) -> None:
        self._out.content(text if self._section is None else self._section.text(text))

    def _begin_or_end_section(self, text: str) -> None:
        if self._section is None:
            self._section = _Section(text)
        else:
            self._out.content(self._section.shown(text))
            self._section = None

    def _begin_region(self, opened: str, region: Region) -> None:
        self._opened, self._body, self._is_quoted, self._region = opened, [], False, region
        self._state = self._in_region

    def _in_region(self) -> bool:
        region = self._region
        while True:
            pattern = region.inside if self._is_quoted else region.outside
            if (found := pattern.search(self._rest, self._at)) is None:
                self._body.append(self._take(max(self._at, len(self._rest) - region.most_held)))
                return False
            self._body.append(self._take(found.end()))
            if self._is_quoted:
                self._is_quoted = found.group() != region.close
            elif found.group() == region.end:
                break
            else:
                self._is_quoted = True
        self._end_region("".join(self._body), region.end)
        return True

    def _finish_region(self, finish_reason: str) -> None:
        """Read a region that has no end. If the answer was cut off, the beginning of a call is dropped."""
        text = "".join(self._body) + self._take(len(self._rest))
        if finish_reason != "stop" and not self._region.is_doubtful:
            self._state = self._content
        elif finish_reason == "stop" and self._region.may_lack_end and (calls := self._region.read(text)):
            self._calls(calls)
        elif finish_reason == "stop" and self._region.end and self._region.end in text:
            self._retry(text, self._region.end)
        else:
            self._malformed(text)

    def _end_region(self, text: str, end: str) -> None:
        if calls := self._region.read(text.removesuffix(end)):
            self._calls(calls)
        else:
            self._retry(text, end)

    def _retry(self, text: str, end: str) -> None:
        """Read a malformed region as if it ended at the first `end`, quoted or not. Parse the text after it again.

        Unless such an end is followed by another region, by the end of the section or by nothing, it is likely to be
        quoted, and the region is content.
        """
        if not self._retries:
            return self._malformed(text)
        self._retries -= 1
        body, _, again = text.partition(end)
        follows, ends = again.lstrip(), (self._opened, *(self._syntax.section or ())[1:])
        if (not follows or follows.startswith(ends)) and (calls := self._region.read(body)):
            self._calls(calls)
        else:
            self._malformed(body + end)
        self._rest, self._at = again + self._rest[self._at :], 0

    def _calls(self, calls: list[Call]) -> None:
        if self._section is not None:
            self._section.has_call()
        self._out.calls(calls)
        self._state = self._content

    def _malformed(self, text: str) -> None:
        if self._section is not None:
            self._out.content(self._section.shown())
        self._out.content(self._opened + text)
        self._state = self._content


class _Section:
    """The text of a section outside of calls, which is content unless the first region is a call.

    `opened`: begins the section.
    """

    def __init__(self, opened: str) -> None:
        self._held: list[str] = [opened]
        self._is_content = self._is_dropped = False

    def text(self, text: str) -> str:
        """Add text. Return the part of it that is content."""
        if not self._is_content and not self._is_dropped:
            self._held.append(text)
        return text if self._is_content else ""

    def has_call(self) -> None:
        """Take note of a call: the section's text is dropped, if it is not content already."""
        self._held, self._is_dropped = [], not self._is_content

    def shown(self, last: str = "") -> str:
        """Return the held text and `last`; an empty string if the text is dropped. Later text is content, too."""
        if self._is_dropped:
            return ""
        told, self._held, self._is_content = "".join(self._held) + last, [], True
        return told
