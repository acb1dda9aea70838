"""The parser of one growing answer."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from .answers import Answer, Call, Writer
from .literals import after_space
from .markers import Markers

_MAX_RETRIES = 16
"""Maximum number of retries per answer. After a malformed region, a retry parses the following text again, which takes
time proportional to the length of the answer.
"""


@lru_cache(256)
def any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that matches each of the texts, and nothing else."""
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


@dataclass(frozen=True)
class Region:
    """The syntax of a region, which is a part of the text that holds tool calls. All texts are marked text.

    `read`: returns the calls in the text of a region, or None if the text is malformed. `end`: the text that ends the
    region, except inside quotes; empty if only the end of the answer ends the region. `open`, `close`: the texts that
    begin and end a quote; empty if the format has no quotes. `escapes`: whether a backslash in a quote escapes the next
    character. `tail`: text that is dropped after the region. `may_lack_end`: whether the end of the answer also ends
    the region. `is_doubtful`: whether an unfinished region at the end of a cut-off answer is content. `begins`: takes a
    text and the position after the beginning of a possible region, and returns whether the text really begins a region
    there; None if the decision needs later text.
    """

    read: Callable[[str], list[Call] | None]
    end: str = ""
    open: str = ""
    close: str = ""
    escapes: bool = False
    tail: str = ""
    may_lack_end: bool = False
    is_doubtful: bool = False
    begins: Callable[[str, int], bool | None] = lambda text, at: True

    @cached_property
    def outside(self) -> re.Pattern[str]:
        """A pattern that matches the end of the region or the beginning of a quote."""
        return any_of(tuple(text for text in (self.end, self.open) if text))

    @cached_property
    def inside(self) -> re.Pattern[str]:
        """A pattern that matches the end of a quote, or an escaped character in a quote."""
        return re.compile(re.escape(self.close) + (r"|\\." if self.escapes else ""), re.DOTALL)

    @cached_property
    def most_held(self) -> int:
        """Number of characters at the end of a text that must be held back, because a match of a pattern may begin
        there and end in later text.
        """
        return max(2, *map(len, (self.end, self.open, self.close))) - 1


_NO_REGION = Region(lambda _: None)


@dataclass(frozen=True)
class Syntax:
    """The syntax of a format. All texts are marked text.

    `reasoning`: the texts that begin and end the reasoning. `after_reasoning`: texts that also end the reasoning, if
    the text that normally ends the reasoning is missing. `regions`: the regions of calls, by the text that begins the
    region. `section`: the texts that begin and end a section; if `section` is given, regions occur only in sections.
    `silent`: texts that are dropped from the content. `at_start`: regions that occur only at the start of the content,
    by the text that begins the region.
    """

    reasoning: tuple[str, str] | None = None
    regions: Mapping[str, Region] = field(default_factory=dict)
    section: tuple[str, str] | None = None
    silent: tuple[str, ...] = ()
    after_reasoning: tuple[str, ...] = ()
    at_start: Mapping[str, Region] = field(default_factory=dict)

    @cached_property
    def in_content(self) -> tuple[str, ...]:
        """The texts that interrupt the content: the beginnings of sections or regions, and the silent texts."""
        return (*(self.section[:1] if self.section else self.regions), *self.silent)

    @cached_property
    def in_section(self) -> tuple[str, ...]:
        """The texts that end a section, or begin a region in a section."""
        return (*self.regions, *(self.section or ())[1:])

    def stream(self, markers: Markers, in_reasoning: bool) -> Reading:
        """Return a parser of one growing answer. `in_reasoning`: whether the prompt has begun the reasoning."""
        return AnswerStream(self, markers, in_reasoning)


def begun(text: str, start: int, texts: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text[start:]` that may be the beginning of one of `texts`."""
    most = min(len(text) - start, max(map(len, texts), default=1) - 1)
    return next((n for n in range(most, 0, -1) if any(each.startswith(text[-n:]) for each in texts)), 0)


class Reading(ABC):
    """Base class of the parsers of a growing answer. Holds the text that is not parsed yet, and the state of the
    parser.

    A state is a method that parses a part of the text, and returns whether the state has ended. If the state has ended,
    the method has set `_state` to the next state. `add` takes marked text. `finish` takes the finish reason, as in
    `SampleOutput`. `add` and `finish` return the new parts of the answer.
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

    @abstractmethod
    def finish(self, finish_reason: str) -> Answer:
        """Return the remaining parts of a finished answer."""

    def _run(self) -> None:
        while self._state():
            pass

    def _take(self, end: int) -> str:
        """Return the text up to `end`, and advance to `end`."""
        text = self._rest[self._at : end]
        self._at += len(text)
        return text

    def _take_before(self, texts: Sequence[str]) -> str:
        """Return the unparsed text, except for a suffix that may be the beginning of one of `texts`. Advance past the
        returned text.
        """
        return self._take(len(self._rest) - begun(self._rest, self._at, texts))


class AnswerStream(Reading):
    """Parses a growing answer in a format with regions. `in_reasoning`: whether the prompt has begun the reasoning."""

    def __init__(self, syntax: Syntax, markers: Markers, in_reasoning: bool) -> None:
        super().__init__(markers)
        self._syntax = syntax
        self._reasoning = syntax.reasoning or ()
        self._starts = (*syntax.at_start, *self._reasoning[:1])  # the texts that end the state `_beginning`
        self._state = self._in_reasoning if in_reasoning else self._beginning
        self._section: _Section | None = None
        self._opened, self._body, self._is_quoted = "", list[str](), False
        self._region: Region = _NO_REGION
        self._retries = _MAX_RETRIES

    def finish(self, finish_reason: str) -> Answer:
        is_cut = finish_reason != "stop"
        while self._state == self._in_region:
            self._finish_region(is_cut)
            self._run()
        write = self._out.reasoning if self._state == self._in_reasoning else self._text
        write(self._take_before(self._sought))
        rest = self._take(len(self._rest))
        if not is_cut or (self._section is None and rest == self._out.plain(rest)):
            write(rest)
        if self._section is not None and not (is_cut and self._section.is_blank()):
            self._out.content(self._section.shown())
        return self._out.finish()

    @property
    def _sought(self) -> tuple[str, ...]:
        """The texts that end the current part of the answer."""
        if self._state == self._in_reasoning:
            return (*self._reasoning[1:], *self._syntax.after_reasoning)
        if self._section is not None:
            return self._syntax.in_section
        if self._state == self._content:
            return self._syntax.in_content
        return (*self._starts, *self._syntax.in_content)

    def _beginning(self) -> bool:
        at = after_space(self._rest, self._at)
        self._out.content(self._take(at))
        found = next((each for each in self._starts if self._rest.startswith(each, at)), None)
        if found is None:
            if any(each.startswith(self._rest[at : at + len(each)]) for each in self._starts):
                return False
            self._state = self._content
            return True
        if found in self._reasoning:
            self._at += len(found)
            self._out.separate()
            self._state = self._in_reasoning
            return True
        region = self._syntax.at_start[found]
        if begins := region.begins(self._rest, at + len(found)):
            self._at += len(found)
            self._begin_region(found, region)
        elif begins is False:
            self._state = self._content
        return begins is not None

    def _in_reasoning(self) -> bool:
        if (found := any_of(self._sought).search(self._rest, self._at)) is None:
            self._out.reasoning(self._take_before(self._sought))
            return False
        self._out.reasoning(self._take(found.start()))
        self._at = found.end() if found.group() in self._reasoning else found.start()
        self._out.separate()
        self._starts = tuple(self._syntax.at_start)
        self._state = self._beginning
        return True

    def _content(self) -> bool:
        if (found := any_of(self._sought).search(self._rest, self._at)) is None:
            self._text(self._take_before(self._sought))
            return False
        self._text(self._take(found.start()))
        text, region = found.group(), self._syntax.regions.get(found.group())
        begins = region.begins(self._rest, found.end()) if region is not None else True
        if begins is None:
            return False
        self._at = found.end()
        if not begins:
            self._text(text)
        elif region is not None:
            self._begin_region(text, region)
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
            if self._section.has_call:
                self._resume()
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
        text = "".join(self._body)
        if calls := region.read(text.removesuffix(region.end)):
            self._calls(calls)
        else:
            self._retry(text)
        return True

    def _finish_region(self, is_cut: bool) -> None:
        """Read a region without an end. If the answer was cut off, drop the incomplete call."""
        region, text = self._region, "".join(self._body) + self._take(len(self._rest))
        if region.may_lack_end and (calls := region.read(text)):
            self._calls(calls)
        elif region.end and region.end in text:
            self._retry(text)
        elif is_cut and not region.is_doubtful:
            self._state = self._content
        else:
            self._malformed(text)

    def _retry(self, text: str) -> None:
        """Read a malformed region as if it ended at the first occurrence of `end`, even inside quotes. Parse the text
        after this `end` again.

        The shortened region counts as a region only if it has calls, and if another region, the end of the section, or
        the end of the text follows. If the shortened region does not count as a region, the first `end` was probably
        inside quotes, and the shortened region is content.
        """
        if not self._retries:
            return self._malformed(text)
        self._retries -= 1
        end, tail = self._region.end, self._region.tail
        body, _, again = text.partition(end)
        follows = again.lstrip()
        ends = (self._opened, *(self._syntax.section or ())[1:], *([tail] if tail else []))
        if (not follows or follows.startswith(ends)) and (calls := self._region.read(body)):
            self._calls(calls)
        else:
            self._malformed(body + end)
        self._rest, self._at = again + self._rest[self._at :], 0

    def _calls(self, calls: list[Call]) -> None:
        if self._section is not None:
            self._section.take_call()
        self._out.calls(calls)
        self._state = self._in_tail

    def _in_tail(self) -> bool:
        """The state after the calls of a region: skip the region's tail."""
        self._text(self._take(after_space(self._rest, self._at)))
        if tail := self._region.tail:
            text = self._rest[self._at : self._at + len(tail)]
            if text == tail:
                self._at += len(tail)
            elif tail.startswith(text):
                return False
        if self._section is None:
            self._resume()
        else:
            self._state = self._content
        return True

    def _resume(self) -> None:
        """Set the state that follows a region of calls. In this state, the reasoning may resume."""
        self._starts, self._state = self._reasoning[:1], self._beginning

    def _malformed(self, text: str) -> None:
        if self._section is not None:
            self._out.content(self._section.shown())
        self._out.content(self._opened + text)
        self._state = self._content


class _Section:
    """The text of a section, without the section's regions. `opened`: the text that begins the section.

    If the section has calls, the text after the first call is content, except for pieces of only white space. If the
    section has no calls, the whole section is content. `has_call`: whether the section has calls, and no part of it
    became content before the first call.
    """

    def __init__(self, opened: str) -> None:
        self._opened, self._held = opened, list[str]()
        self.has_call = self._passes = False

    def is_blank(self) -> bool:
        """Return whether the held text is only white space."""
        return not "".join(self._held).strip()

    def text(self, text: str) -> str:
        """Add text. Return the text that is now known to be content."""
        self._held.append(text)
        self._passes = self._passes or (self.has_call and bool(text.strip()))
        return self._take() if self._passes else ""

    def take_call(self) -> None:
        """Record a call, and drop the held text. If a part of the section is already content, later text of the section
        stays content.
        """
        self._held = []
        if self.has_call or not self._passes:
            self.has_call, self._passes = True, False

    def shown(self, last: str = "") -> str:
        """Return the section's text so far, followed by `last`; from now on, later text of the section is content. If
        the section has a call, drop the held text and return an empty string.
        """
        if self.has_call:
            self.take_call()
            return ""
        opened, self._opened, self._passes = self._opened, "", True
        return opened + self._take() + last

    def _take(self) -> str:
        held, self._held = "".join(self._held), []
        return held
