"""Recorded answers of models, from the fixtures of the package canitoolcall (Apache-2.0), as marked text.

`python tests/recorded_answers.py` prints the results of the parser, by family and half, and each miss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from canitoolcall.checks import canonical, expected_as_result
from canitoolcall.fixtures import Family, Fixture, load_families, load_fixtures
from canitoolcall.results import ParsedToolCall, ParseResult

from trueroll.rollout.parsing.answers import Answer
from trueroll.rollout.parsing.formats import FORMATS, THINK
from trueroll.rollout.parsing.parser import AnswerParser

QWEN3: dict[str, int] = {"<tool_call>": 151657, "</tool_call>": 151658, "<think>": 151667, "</think>": 151668}
QWEN35: dict[str, int] = {"<tool_call>": 248058, "</tool_call>": 248059, "<think>": 248068, "</think>": 248069}
DEEPSEEK3: dict[str, int] = {
    **{"<｜tool▁calls▁begin｜>": 128806, "<｜tool▁calls▁end｜>": 128807, "<｜tool▁call▁begin｜>": 128808},
    **{"<｜tool▁call▁end｜>": 128809, "<｜tool▁sep｜>": 128814, "<think>": 128798, "</think>": 128799},
    "｜DSML｜": 128793,
}
DEEPSEEK4: dict[str, int] = {"｜DSML｜": 128825, "<think>": 128821, "</think>": 128822}
_GLM = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_GLM_ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def _numbered(first: int) -> dict[str, int]:
    """Return the ids of GLM's markers, which begin with `first`."""
    ids = {text: first + i for i, text in enumerate(_GLM)}
    return ids | {text: first + 6 + i for i, text in enumerate(_GLM_ARGUMENTS)}


GLM4, GLM5 = _numbered(151350), _numbered(154841)
KIMI2: dict[str, int] = {
    **{"<|tool_calls_section_begin|>": 163595, "<|tool_calls_section_end|>": 163596, "<|tool_call_begin|>": 163597},
    **{"<|tool_call_argument_begin|>": 163598, "<|tool_call_end|>": 163599, "<think>": 163606, "</think>": 163607},
}
KIMI3: dict[str, int] = {"<|open|>": 163587, "<|close|>": 163588, "<|sep|>": 163589}
HARMONY: dict[str, int] = {
    **{"<|constrain|>": 200003, "<|channel|>": 200005, "<|start|>": 200006, "<|end|>": 200007, "<|message|>": 200008},
    **{"<|return|>": 200002, "<|call|>": 200012},
}
GEMMA: dict[str, int] = {"<|tool_call>": 48, "<tool_call|>": 49, '<|"|>': 52, "<|channel>": 100, "<channel|>": 101}
LLAMA3: dict[str, int] = {"<|python_tag|>": 128010}
LLAMA4: dict[str, int] = {"<|python_start|>": 200016, "<|python_end|>": 200017}

MODELS: Mapping[str, tuple[str, Mapping[str, int], bool]] = {
    "Qwen/Qwen3-Coder": ("qwen-xml", QWEN3, False),
    "Qwen/Qwen3.": ("qwen-xml", QWEN35, True),
    "Qwen/Qwen3-": ("hermes", QWEN3, True),
    "deepseek-ai/DeepSeek-V3.2": ("deepseek-v3.2", DEEPSEEK3, True),
    "deepseek-ai/DeepSeek-V3": ("deepseek", DEEPSEEK3, True),
    "deepseek-ai/DeepSeek-V4.1": ("deepseek-v4.1", DEEPSEEK4, True),
    "deepseek-ai/DeepSeek-V4": ("deepseek-v4", DEEPSEEK4, True),
    "zai-org/GLM-5": ("glm", GLM5, True),
    "zai-org/GLM-4": ("glm", GLM4, True),
    "moonshotai/Kimi-K3": ("kimi-k3", KIMI3, True),
    "moonshotai/Kimi-K2": ("kimi-k2", KIMI2, True),
    "openai/gpt-oss": ("harmony", HARMONY, False),
    "google/gemma-4": ("gemma", GEMMA, True),
    "meta-llama/Llama-3": ("llama", LLAMA3, False),
    "meta-llama/Llama-4": ("llama", LLAMA4, False),
}
"""By prefix of a model's name: its format, the ids of its tokens that are markers, and whether it reasons."""


@dataclass(frozen=True)
class Recorded:
    """A recorded answer. `text`, `prompt`: the answer and the end of its prompt, as marked text."""

    fixture: Fixture
    parser: AnswerParser
    text: str
    prompt: str

    @property
    def finish_reason(self) -> str:
        return "length" if "truncated" in self.fixture.tags else "stop"

    def whole(self) -> Answer:
        return self.parser.whole(self.text, self.finish_reason, self.prompt)


@cache
def recorded() -> tuple[Recorded, ...]:
    """Return the recorded answers of all families that trueroll parses."""
    families = load_families()
    return tuple(
        _recorded(fixture, families[fixture.family])
        for fixture in load_fixtures()
        if fixture.reference_model.startswith(tuple(MODELS))
    )


def _recorded(fixture: Fixture, family: Family) -> Recorded:
    name, token_ids, reasons = next(MODELS[each] for each in MODELS if fixture.reference_model.startswith(each))
    format = next(each for each in FORMATS if each.name == name)
    reasoning = (format.reasoning or THINK) if reasons else None
    parser = AnswerParser(format, reasoning, fixture.tools, token_ids)
    prompt = fixture.generation_prompt
    if prompt is None:
        model = family.reference_for(fixture.reference_model)
        prompt = (model and model.default_generation_prompt) or ""
    markers = {
        char: next(text for text, id in token_ids.items() if id == token) for token, char in parser.marks.items()
    }
    text = marked(fixture, parser.marks, markers)
    for char, marker in sorted(markers.items(), key=lambda each: -len(each[1])):
        prompt = prompt.replace(marker, char)
    return Recorded(fixture, parser, text, prompt)


def marked(fixture: Fixture, marks: Mapping[int, str], markers: Mapping[str, str]) -> str:
    """Return the text of a recorded answer, in which each token that is a marker is one character.

    The fixtures have the ids of tokens without their texts. The ids tell how many tokens stand between two markers, and
    thus which of the equal texts are markers.
    """
    raw, runs = fixture.raw_output, _runs(fixture.output_token_ids or (), marks)
    assert fixture.output_token_ids, fixture.id

    def placed(at: int, index: int) -> Iterator[list[str]]:
        count, char = runs[index]
        starts = [len(raw)] if not char else list(_finds(raw, markers[char], at))
        for start in starts:
            between = raw[at:start]
            if bool(between) == bool(count) and len(between.encode()) >= count and len(between) <= 40 * count:
                if not char:
                    yield [between]
                else:
                    for rest in placed(start + len(markers[char]), index + 1):
                        yield [between, char, *rest]

    return "".join(next(placed(0, 0)))


def _runs(token_ids: Sequence[int], marks: Mapping[int, str]) -> list[tuple[int, str]]:
    """Return for each marker the number of tokens before it, and its character; the last marker is empty."""
    runs, count = list[tuple[int, str]](), 0
    for token_id in token_ids:
        if token_id in marks:
            runs.append((count, marks[token_id]))
            count = 0
        else:
            count += 1
    return [*runs, (count, "")]


def _finds(text: str, part: str, at: int) -> Iterator[int]:
    while (at := text.find(part, at)) >= 0:
        yield at
        at += 1


def as_result(answer: Answer) -> ParseResult:
    return ParseResult(
        content=answer.content or None,
        reasoning_content=answer.reasoning or None,
        tool_calls=tuple(ParsedToolCall(call.name, call.arguments) for call in answer.calls),
    )


@dataclass
class Count:
    """Counts over recorded answers. `expected`: well-formed answers. `calls`, `texts`: answers with the right calls,
    and answers with the right content and reasoning. `malformed`, `no_call`: malformed answers, and those without a
    call. `misses`: what is wrong, by answer.
    """

    expected: int = 0
    calls: int = 0
    texts: int = 0
    malformed: int = 0
    no_call: int = 0
    misses: list[tuple[str, str]] = field(default_factory=list)

    def add(self, each: Recorded, answer: Answer) -> None:
        found = canonical(as_result(answer), soft=True)
        if each.fixture.expected is None:
            self.malformed += 1
            self.no_call += not answer.calls
            wrong = ["no call is expected"] if answer.calls else []
        else:
            right = canonical(expected_as_result(each.fixture.expected), soft=True)
            calls = found["tool_calls"] == right["tool_calls"]
            wrong = [] if calls else ["tool_calls"]
            wrong += [name for name in ("content", "reasoning_content") if found[name] != right[name]]
            self.expected += 1
            self.calls += calls
            self.texts += not {"content", "reasoning_content"} & set(wrong)
        if wrong:
            self.misses.append((each.fixture.id, ", ".join(wrong)))


def counts() -> dict[str, dict[str, Count]]:
    """Return the counts by family and half. The answers with even indices in a family served to write the formats.

    Three rules came later, from answers of the other half: an argument without an end ends before a line that begins
    another argument, Kimi K3 escapes names, and the beginning of a call that was cut off is no content.
    """
    found: dict[str, dict[str, Count]] = {}
    seen: dict[str, int] = {}
    for each in recorded():
        family = each.fixture.family
        index = seen[family] = seen.get(family, -1) + 1
        halves = found.setdefault(family, {"even": Count(), "odd": Count()})
        halves["odd" if index % 2 else "even"].add(each, each.whole())
    return found


def main() -> None:
    by_id = {each.fixture.id: each for each in recorded()}
    print("| family | half | calls right | texts right | malformed, without a call |\n| --- | --- | --- | --- | --- |")
    misses = list[tuple[str, str]]()
    for family, halves in counts().items():
        for half, each in halves.items():
            shares = f"{each.calls} of {each.expected} | {each.texts} of {each.expected}"
            print(f"| {family} | {half} | {shares} | {each.no_call} of {each.malformed} |")
            misses += each.misses
    for id, wrong in misses:
        each = by_id[id]
        print(f"\n{id}: {wrong}\n  wrote    {each.fixture.raw_output!r}\n  read     {each.whole()}")
        print(f"  expected {each.fixture.expected or each.fixture.expected_error}")


if __name__ == "__main__":
    main()
