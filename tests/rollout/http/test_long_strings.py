"""JSON texts that are parsed in steps have the values and the errors of `json.loads`."""

from __future__ import annotations

import json
import random
from typing import Any, TypeVar

import pytest

from trueroll.rollout.http import long_strings, wire
from trueroll.rollout.http.long_strings import Steps, parsed_in_steps

T = TypeVar("T")
STEP = 16
PARTS = ("x", "é", "\U0001f600", '"', "\\", "\n", "\ud83d", "\ude00", "\ud83d\ude00", "u0041", "\\u", "/", "NaN", " ")


def refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def run(steps: Steps[T]) -> tuple[T, int]:
    """Return the result of a generator of steps, and the number of steps."""
    count = 0
    try:
        while True:
            next(steps)
            count += 1
    except StopIteration as done:
        return done.value, count


def parsed(text: str) -> tuple[Any, int]:
    """Return the value of a text, and the number of steps."""
    return run(parsed_in_steps(text, refuse))


def as_text(rng: random.Random, content: Any) -> str:
    """Return a value as JSON, with escapes for all characters that are not ASCII, or only where UTF-8 needs them."""
    text = json.dumps(content, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
    return "".join(rf"\u{ord(each):04x}" if "\ud800" <= each <= "\udfff" else each for each in text)


def value(rng: random.Random, depth: int = 0) -> Any:
    """Return a random value. It has short and long strings with all kinds of escapes."""
    kind = rng.randrange(6 if depth < 3 else 4)
    if kind == 4:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 5:
        return {f"n{i}": value(rng, depth + 1) for i in range(rng.randrange(4))}
    if kind == 3:
        return rng.choice([1, -2.5, True, False, None])
    return "".join(rng.choices(PARTS, k=rng.choice([0, 3, 10, 40])))


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_strings, "STEP_CHARS", STEP)


def test_values_are_those_of_json() -> None:
    rng, num_long = random.Random(0), 0
    for _ in range(3000):
        content = value(rng)
        text = as_text(rng, content)
        found, _ = parsed(text)
        assert found == json.loads(text)
        num_long += bool(run(long_strings._without_long_strings(text))[0][1])
    assert num_long > 1000, "premise: many texts have long strings"


def test_errors_are_those_of_json() -> None:
    rng, num_wrong = random.Random(1), 0
    for _ in range(3000):
        text = as_text(rng, value(rng))
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(["", '"', "\\", "\n", "NaN", "x", "\\u12", "]"]) + text[at + rng.randrange(3) :]
        try:
            expected = json.loads(text, parse_constant=refuse)
        except ValueError:
            num_wrong += 1
            with pytest.raises(ValueError):
                parsed(text)
        else:
            assert parsed(text)[0] == expected
    assert 500 < num_wrong < 2900, "premise: many texts are wrong, and some are not"


@pytest.mark.parametrize("text", ['{"a": NaN, "b": "%s"}', '["%s", NaN]', '["%s", Infinity]', '["%s", "%s", NaN, 1]'])
def test_constants_beside_long_strings_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not JSON"):
        parsed(text.replace("%s", "x" * 2 * STEP))


def test_long_names_are_refused() -> None:
    with pytest.raises(ValueError, match="a name in an object has 16 or more characters"):
        parsed('{"%s": 1}' % ("x" * 2 * STEP))


def test_errors_in_long_strings_have_no_wrong_position() -> None:
    with pytest.raises(ValueError, match="^Invalid control character$"):
        parsed('["%s\n"]' % ("x" * 2 * STEP))


@pytest.mark.parametrize("part", ["x", r"\n", r"\\", r"\ud83d\ude00", r"\"", r"\u0041"])
def test_each_step_is_short(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, decode = [], long_strings._decode

    def noting(text: str) -> tuple[Any, int]:
        decoded.append(len(text))
        return decode(text)

    monkeypatch.setattr(long_strings, "_decode", noting)
    text = json.dumps(dict(a=1)) + "," + f'"{part * 1000}"'
    found, count = parsed(f"[{text}]")
    assert found == json.loads(f"[{text}]")
    assert max(decoded) <= STEP + 2 and count >= len(part) * 1000 // STEP


def test_bodies_are_parsed_in_steps() -> None:
    text = json.dumps(dict(prompt="x" * 1000))
    found, count = run(wire._parse(bytearray(text.encode()), 2**14, is_setting=True))
    assert found == json.loads(text) and count > 1000 // STEP
