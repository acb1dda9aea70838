"""Sends hostile grammars to `Grammars`: `.venv/bin/python -P tests/fuzz/grammars.py --values 50000 [--seed 1]`.

Each value is a random JSON schema, regular expression, EBNF or choice, or a value of another kind, often invalid.
Checked: a value is prepared, or refused with InvalidRequestError; a prepared grammar ends in an error, or accepts the
tokens that its masks allow and excludes the others; and an innocent sample gets the same masks all the time. Exits
with 1 after a violation. The longest time of a value is printed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from byte_tokenizers import byte_level_tokenizer  # noqa: E402

from trueroll.engine.grammars.masks import TRIAL, Grammars, Place  # noqa: E402
from trueroll.engine.request import Distribution  # noqa: E402
from trueroll.errors import InvalidRequestError  # noqa: E402

EOS = 256
_NUMBERS = (0, 1, -1, 3, 2**31, 2**63, 10**40, 1e308, 0.1, -0.0, None, "3")
_KEYS = (
    *("type", "properties", "items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "pattern"),
    *("enum", "const", "anyOf", "oneOf", "allOf", "$ref", "required", "additionalProperties", "patternProperties"),
    *("minimum", "maximum", "multipleOf", "format", "$defs", "x-guidance", "not", "uniqueItems", "\0", "é"),
)
_ATOMS = ("a", "b", "[^a]", r"\d", r"\w", r"\b", "^", "$", "(?i)", r"\p{L}", r"\x00", "é", "\U0001f600", "\\", "(", "[")
_RULES = ('"a"', "[a-c]", "a", "root", '"\\"', "(", ")", "|", "*", "{2,9}", "::=", "\n", "#", '"é"', "%", "<eos>", ".")


def schema(rng: random.Random, depth: int = 0) -> Any:
    """Return a JSON schema, or a value in its place."""
    if depth > 4 or rng.random() < 0.1:
        return rng.choice([True, False, {}, {"type": "string"}, None, 3, "x", []])
    return {key: _value(key, rng, depth + 1) for key in rng.sample(_KEYS, rng.randint(0, 4))}


def _value(key: str, rng: random.Random, depth: int) -> Any:
    if rng.random() < 0.1:
        return rng.choice([*_NUMBERS, [], {}, "a", schema(rng, depth)])
    match key:
        case "type":
            return rng.choice(["string", "integer", "number", "object", "array", "null", ["string", "null"], "foo"])
        case "properties" | "$defs" | "patternProperties":
            return {rng.choice(["a", "b", "", "\0", "\U0001f600", regex(rng)]): schema(rng, depth) for _ in range(2)}
        case "anyOf" | "oneOf" | "allOf" | "prefixItems":
            return [schema(rng, depth), schema(rng, depth)]
        case "items" | "additionalProperties" | "not":
            return schema(rng, depth)
        case "pattern":
            return regex(rng)
        case "$ref":
            return rng.choice(["#", "#/$defs/a", "http://x/y", "#/properties/a", "file:///etc/passwd"])
        case "x-guidance":
            return {"lenient": True, "whitespace_pattern": regex(rng)}
    return rng.choice([*_NUMBERS, ["a", 1, None], {"a": [1]}])


def regex(rng: random.Random, depth: int = 0) -> str:
    """Return a regular expression, or nearly one."""
    parts = list[str]()
    for _ in range(rng.randint(0, 5)):
        inner = regex(rng, depth + 1) if depth < 4 else "a"
        count = rng.choice(["1000", "0,7", "1000000", "5,", "1,1000000000000"])
        parts.append(rng.choice([*_ATOMS, f"({inner}){{{count}}}", f"({inner}|b)*", f"(?:{inner})+?"]))
    return "".join(parts)


def value(rng: random.Random) -> Any:
    """Return a value for `structured_outputs`."""
    kinds = {
        "json": lambda: schema(rng),
        "regex": lambda: regex(rng),
        "choice": lambda: [regex(rng) for _ in range(rng.randint(0, 4))],
        "grammar": lambda: "root ::= " + " ".join(rng.choice(_RULES) for _ in range(rng.randint(0, 20))),
        "json_object": lambda: rng.choice([True, False, 1]),
        "disable_any_whitespace": lambda: rng.choice([True, False]),
        "structural_tag": lambda: {},
    }
    weights = (8, 8, 2, 4, 1, 1, 0.2)
    chosen = rng.choices([*kinds], weights, k=rng.choices([1, 2], [9, 1])[0])
    return {name: kinds[name]() for name in chosen}


def allowed(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(grammars: Grammars, place: Place, rng: random.Random) -> str:
    """Walk some tokens, check the masks, and return how the walk ended."""
    for _ in range(6):
        grammars.fill([(place, ())])
        if place.error is not None:
            return "ended in an error"
        choices = allowed(place.masks[0])
        wrong = rng.choice([token for token in range(EOS) if token not in choices] or [EOS + 1])
        grammars.fill([(place, [wrong])])
        assert place.error is not None or len(place.masks) == 1, f"the grammar accepts {wrong}, which the mask excludes"
        if not [token for token in choices if token != EOS]:
            return "complete" if choices else "no token left"
        token = rng.choice([token for token in choices if token != EOS])
        grammars.fill([(place, [token])])
        assert place.error is not None or len(place.masks) == 2, f"the grammar excludes {token}, which the mask allows"
        place.token_ids.append(token)
    return "went on"


def campaign(num_values: int, seed: int, folder: Path) -> tuple[Counter[str], float]:
    """Return how the values ended, and the longest time of one. Raise AssertionError after a violation."""
    byte_level_tokenizer([bytes([byte]) for byte in range(EOS)]).save(str(folder / "tokenizer.json"))
    grammars, ended, slowest = Grammars(folder, EOS + 2, [EOS]), Counter[str](), 0.0
    innocent = Distribution(structured_outputs={"json_object": True}).structured_outputs  # type: ignore[arg-type]
    assert innocent is not None
    sample = grammars.open(innocent, [EOS], list(b'{"a": [1, '), False)
    grammars.fill([(sample, [*b"2]}"])])
    expected = sample.next_mask().tobytes()
    for i in range(num_values):
        rng, start = random.Random(f"{seed} {i}"), time.monotonic()
        hostile = value(rng)
        try:
            grammar = Distribution(structured_outputs=hostile).structured_outputs
            assert grammar is not None
            ended[walk(grammars, grammars.open(grammar, [EOS], [], False), rng)] += 1
        except InvalidRequestError as error:
            assert error.field == "structured_outputs" and "\n" not in str(error), (i, str(error))
            ended["crashed or took too long" if "or crashes" in str(error) else "refused"] += 1
        except AssertionError as error:
            raise AssertionError(f"value {i} of seed {seed}: {hostile!r:.300}: {error}") from None
        grammars.fill([(sample, [*b"2]}"])])
        assert sample.next_mask().tobytes() == expected and len(sample.masks) == 1, (
            f"value {i} of seed {seed} changed a mask of another sample"
        )
        slowest = max(slowest, time.monotonic() - start)
    grammars.close()
    return ended, slowest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended, slowest = campaign(arguments.values, arguments.seed, Path(folder))
        except AssertionError as error:
            print(f"FAILED: {error}")
            return 1
    print(f"{arguments.values:,} values in {time.monotonic() - start:.0f} s, the slowest in {slowest:.1f} s; {TRIAL}")
    print(", ".join(f"{name} {count:,}" for name, count in ended.most_common()))
    print("Every promise was kept.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
