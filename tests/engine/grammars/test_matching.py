"""Masks of grammars: compared with independent matchers over all tokens, and with JSON schemas' own validation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
import regex
from byte_tokenizers import byte_level_tokenizer

from trueroll.engine.grammars.matching import GrammarError, Template, TokenText, Walk, translated
from trueroll.engine.grammars.source import Grammar

PIECES = [
    *(bytes([byte]) for byte in range(256)),
    *(b"ab", b"aba", b"foo", b"fob", b" b", b'{"', b'"}', b'":', b"1,", b"true", b"null", b"\\n", b"\\u00"),
    *("é".encode(), "é".encode() + b"\xc3", b"2024-", b"-1", b".5", b'"a', b"\xf0\x9f", b"yes", b" so"),
]
EOS, STOP, VOCAB = len(PIECES), 10, len(PIECES) + 40  # the last ids belong to no token


@pytest.fixture(scope="module")
def text() -> TokenText:
    return TokenText(byte_level_tokenizer(PIECES).to_str(), VOCAB, [EOS])


def walk_of(text: TokenText, **grammar: Any) -> Walk:
    return Walk(Template(text, translated(Grammar(**grammar))), [EOS, STOP])


def allowed(mask: np.ndarray) -> set[int]:
    return {*np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()}


def accepts(text: TokenText, string: str, **grammar: Any) -> bool:
    """Return whether the grammar accepts a text, token by token. Each token is one byte."""
    walk, ids = walk_of(text, **grammar), string.encode()
    return walk.append(ids) == len(ids) and EOS in allowed(walk.masks(())[0])


PATTERNS = [
    r"\d{4}-\d{2}-\d{2}",
    r"(foo|fob|bar)+( [a-z]{2,5}){0,3}",
    r"-?(0|[1-9][0-9]*)(\.[0-9]+)?",
    r'[^"\\\n]{0,12}',
    r"(yes|no|maybe so)",
    r".{1,6}",
    r"[\w.]+@\w+\.com",
    r"(é|ü)+x?",
    r"\s*def \w+\(\):",
    r"a(ba)*|^ab{2,}$",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_mask_allows_what_begins_a_match(pattern: str, text: TokenText) -> None:
    """The package regex says, for each token, whether the text with the token begins a match."""
    oracle, rng = regex.compile(pattern, regex.ASCII), np.random.default_rng(3)
    readable = {i: piece.decode() for i, piece in enumerate(PIECES) if is_valid(piece)}
    assert "é" in readable.values() and len(readable) < EOS, "premise: some tokens end within a character"
    walk, so_far = walk_of(text, regex=pattern), ""
    for _ in range(8):
        [mask] = walk.masks(())
        found = allowed(mask)
        expected = {i for i, piece in readable.items() if oracle.fullmatch(so_far + piece, partial=True)}
        is_complete = oracle.fullmatch(so_far) is not None
        assert (EOS in found) == is_complete and not found.intersection(range(EOS + 1, VOCAB))
        assert found.intersection(readable) - {STOP} == expected - {STOP}
        if not (next_ids := sorted(expected)):
            break
        token = int(rng.choice(next_ids))
        assert walk.append([token]) == 1
        so_far += readable[token]
    assert len(so_far) > 1, "premise"


def is_valid(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_a_character_may_be_split_between_tokens(text: TokenText) -> None:
    walk, letter = walk_of(text, regex="é"), "é".encode()
    first, second, third = walk.masks(letter)
    assert (allowed(first), allowed(second)) == ({letter[0], PIECES.index(letter)}, {letter[1]})
    assert allowed(third) == {EOS, STOP}, "the tokens that end the sample"


SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 4},
            "sizes": {"type": "array", "items": {"type": "integer", "minimum": -3, "maximum": 12}, "maxItems": 2},
            "kind": {"enum": ["a", 1, None, {"x": True}]},
        },
        "required": ["name", "kind"],
        "additionalProperties": False,
    },
    {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2}}, "$ref": "#/$defs/n"},
    {"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^[ab]+$", "minLength": 2}]},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_random_walks_are_valid_json(schema: dict[str, Any], text: TokenText) -> None:
    rng, finished = np.random.default_rng(5), 0
    for _ in range(12):
        walk, ids = walk_of(text, json=schema, disable_any_whitespace=True), list[int]()
        while len(ids) < 200:
            choices = sorted(allowed(walk.masks(())[0]) - {STOP})
            ids.append(EOS if EOS in choices else int(rng.choice(choices)))
            if ids[-1] == EOS:
                break
            assert walk.append(ids[-1:]) == 1
        if ids[-1] == EOS:
            jsonschema.validate(json.loads(b"".join(PIECES[i] for i in ids[:-1])), schema)
            finished += 1
    assert finished > 3, "premise"


EXACT: dict[str, tuple[Any, Sequence[str], Sequence[str]]] = {
    "lengths and pattern": (
        {"type": "string", "pattern": "^[ab]+$", "minLength": 2, "maxLength": 3},
        ['"aba"'],
        ['"a"', '"xyz"', '"abab"'],
    ),
    "pattern within": ({"type": "string", "pattern": "b"}, ['"abc"', '"b"'], ['"ac"']),
    "escapes count once": ({"type": "string", "maxLength": 5}, ['"a\\"b"', '"\\n"', '"\\u0000"'], ['"abcdef"']),
    "closed object": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
        ['{"a":1}', "{}"],
        ['{"b":1}'],
    ),
    "open object": (
        {"type": "object", "properties": {"a": {"type": "integer"}}},
        ['{"a":1}', '{"b":1}', '{"a":1,"b":2}'],
        ['{"a":"x"}', '{"a":1,"a":2}'],
    ),
    "format": ({"type": "string", "format": "date"}, ['"2024-01-31"'], ['"abc"', '"2024-13-01"']),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, ["14"], ["15"]),
    "number range": ({"type": "number", "minimum": 1.5, "exclusiveMaximum": 2}, ["1.5", "1.99"], ["1.4", "2", "2.0"]),
    "no type": ({"minimum": 10}, ["15", '"x"'], ["9"]),
    "tuple": (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
        ['[1,"a"]'],
        ['["a",1]'],
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
        ['{"xa":1}'],
        ['{"ya":1}', '{"xa":"s"}'],
    ),
    "disjoint oneOf": ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["3", '"a"'], ["true"]),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, ["4"], ["2", "6"]),
    "beside anyOf": (
        {"type": "string", "anyOf": [{"minLength": 2}, {"const": "x"}]},
        ['"ab"', '"x"'],
        ['"a"', "1"],
    ),
    "beside $ref": (
        {"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s", "maxLength": 1},
        ['"a"'],
        ['"ab"'],
    ),
    "const": ({"const": {"a": [1, 2]}}, ['{"a":[1,2]}', '{"a": [1, 2]}'], ['{"a":[1]}']),
    "required of its own": ({"type": "object", "required": ["z"]}, ['{"z":1}'], ["{}"]),
    "numbers": ({"type": "number"}, ["1e5", "1.5E-3", "-0", "0.5"], ["01", ".5", "1.", " 1", "1 "]),
    "lenient in the schema": ({"type": "string", "x-guidance": {"lenient": True}}, ['"a"'], ["1"]),
}
REFUSED: dict[str, Any] = {
    "uniqueItems": {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "not": {"not": {"type": "string"}},
    "if": {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a+$"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "overlapping oneOf": {"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 5}]},
    "format": {"type": "string", "format": "frob"},
    "remote $ref": {"$ref": "http://example.com/schema"},
    "endless $ref": {"$ref": "#"},
}


@pytest.mark.parametrize("name", EXACT)
def test_a_schema_is_matched_exactly(name: str, text: TokenText) -> None:
    schema, good, bad = EXACT[name]
    assert [each for each in good if not accepts(text, each, json=schema)] == []
    assert [each for each in bad if accepts(text, each, json=schema)] == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_would_be_matched_inexactly_is_refused(name: str, text: TokenText) -> None:
    with pytest.raises(GrammarError):
        walk_of(text, json=REFUSED[name])


def test_other_kinds_of_grammars(text: TokenText) -> None:
    ebnf = 'root ::= item ("," item)*\nitem ::= [a-c]{2} | "é" # a comment\n'
    assert accepts(text, "ab,é,cc", grammar=ebnf) and not accepts(text, "ab,", grammar=ebnf)
    choice = ["yes", "maybe so", 'a"b\\\n', "\U0001f600", *map(chr, range(1, 161))]
    assert all(accepts(text, each, choice=choice) for each in choice) and not accepts(text, "maybe", choice=choice)
    assert accepts(text, '{ "a": [1] }', json_object=True) and not accepts(text, "[1]", json_object=True)
    assert not accepts(text, '{ "a":1}', json_object=True, disable_any_whitespace=True)


@pytest.mark.parametrize(
    "grammar",
    [
        dict(regex=r"\bab"),
        dict(regex="(?=a)b"),
        dict(regex="(a"),
        dict(regex="a\\"),
        dict(regex="a$b"),
        dict(grammar='start: "a"'),
        dict(grammar='root ::= %json {"type":"object"}'),
        dict(grammar="root ::= <[0-100]>"),
        dict(grammar='root ::= "a'),
        dict(grammar="root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000),
    ],
)
def test_what_is_no_grammar_is_refused(grammar: dict[str, str], text: TokenText) -> None:
    with pytest.raises(GrammarError) as error:
        walk_of(text, **grammar)
    assert "\n" not in str(error.value) and 0 < len(str(error.value)) <= 300
    if grammar == dict(regex="(a"):
        assert str(error.value) == 'invalid regex "(a" (in regex): regex parse error: unclosed group'


def test_masks_are_the_same_along_all_ways(text: TokenText) -> None:
    """Tokens are appended one by one, replayed, and taken back."""
    string = b'{"a": [1, "foo\\n"], "b": null}'
    whole = walk_of(text, json_object=True).masks(string)
    assert len(whole) == len(string) + 1
    for start in range(0, len(string), 4):
        walk = walk_of(text, json_object=True)
        assert walk.append(string[:start]) == start
        for _ in range(2):
            assert np.array_equal(walk.masks(string[start : start + 5]), whole[start : start + 6])
    walk = walk_of(text, json_object=True)
    assert len(walk.masks(b'{"a"x')) == 5, "cut off before the excluded token"
    assert np.array_equal(walk.masks(())[0], whole[0]), "and taken back"


@pytest.mark.parametrize("tokenizer", ["{}", byte_level_tokenizer(PIECES).to_str()])
def test_an_unsupported_tokenizer_is_refused(tokenizer: str) -> None:
    with pytest.raises(GrammarError, match="tokenizer"):
        TokenText(tokenizer, 20, [3])
    with pytest.raises(GrammarError, match="no end-of-sequence token"):
        TokenText(tokenizer, VOCAB, [])
