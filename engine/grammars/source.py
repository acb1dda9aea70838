"""The grammar of a request, with the field names of vLLM's `structured_outputs`, and the limits on a grammar.

This module checks only the form and the size of a grammar. Whether a grammar compiles is known only after a trial
(`masks`). Clients use this module without torch and without llguidance.
"""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, FailFast, Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from trueroll.errors import brief

MAX_GRAMMAR_BYTES = 2**18
MAX_CHOICES = 10_000
MAX_JSON_DEPTH = 64
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Grammar:
    """A grammar that the whole text of a sample must match. Exactly one of the first five fields must be set.

    `json`: a JSON schema, as an object or as its text; stored as text. `regex`: a regular expression in the syntax of
    Rust's `regex`, where `\\d`, `\\w` and `\\s` stand for ASCII characters. `choice`: the texts to choose from.
    `grammar`: a context-free grammar in llama.cpp's GBNF (the EBNF of vLLM), with the rule `root`. `json_object`: any
    JSON object. `disable_any_whitespace`: allow no whitespace between the tokens of JSON.

    Sizes are limited: `MAX_GRAMMAR_BYTES` in UTF-8, `MAX_CHOICES`, and `MAX_JSON_DEPTH` for a schema.
    """

    json: str | None = None
    regex: str | None = None
    choice: Annotated[tuple[str, ...], FailFast(), Field(strict=False, max_length=MAX_CHOICES)] = ()
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False

    @field_validator("json", mode="before")
    @classmethod
    def _schema_is_text(cls, schema: Any) -> Any:
        return _schema_text(schema) if isinstance(schema, Mapping | str) else schema

    @model_validator(mode="after")
    def _is_one_grammar(self) -> Grammar:
        found = [name for name in _KINDS if getattr(self, name) not in (None, (), False)]
        if len(found) != 1:
            named = " and ".join(found) or "none of them"
            raise ValueError(f"exactly one of {', '.join(_KINDS)} must be given (got {named})")
        if self.disable_any_whitespace and found[0] not in ("json", "json_object"):
            raise ValueError("disable_any_whitespace needs json or json_object, because only JSON has whitespace")
        if "" in (self.regex, self.grammar, *self.choice):
            raise ValueError(f"{found[0]}: an empty text is not allowed; leave it out")
        _check_text(found[0], "".join(self.choice) or self.json or self.regex or self.grammar or "")
        return self

    @property
    def num_chars(self) -> int:
        """The total number of characters in the texts of the grammar's fields."""
        return sum(map(len, (self.json or "", self.regex or "", self.grammar or "", *self.choice)))


def as_grammar(value: Any) -> Any:
    """If `value` is a map, return the grammar that the map describes. Return any other value unchanged. Fields with the
    value None are left out.

    Raise pydantic's ValidationError for a map that describes no grammar.
    """
    if not isinstance(value, Mapping):
        return value
    return Grammar(**{str(name): each for name, each in value.items() if each is not None})


def _schema_text(schema: Mapping[str, Any] | str) -> str:
    """Return a JSON schema as text. Raise ValueError if the schema is not a JSON object, or is nested too deeply."""
    if isinstance(schema, str):
        _check_text("json", schema)
    try:
        found = json_text.loads(schema, parse_constant=_refuse_constant) if isinstance(schema, str) else schema
        if isinstance(found, Mapping):
            _check_depth(found)
            return json_text.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError) as error:
        raise ValueError(f"json: the schema is not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"json: the schema is nested more than {MAX_JSON_DEPTH} levels deep") from None
    raise ValueError(f"json: the schema must be a JSON object (got {brief(found)})")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _check_depth(schema: Any) -> None:
    level = [schema]
    for _ in range(MAX_JSON_DEPTH):
        level = [each for value in level for each in (value.values() if isinstance(value, Mapping) else value)]
        level = [each for each in level if isinstance(each, Mapping | list | tuple)]
        if not level:
            return
    raise RecursionError


def _check_text(name: str, text: str) -> None:
    size = len(text) if len(text) > MAX_GRAMMAR_BYTES else len(_encoded(name, text))
    if size > MAX_GRAMMAR_BYTES:
        raise ValueError(f"{name}: must have at most {MAX_GRAMMAR_BYTES} bytes in UTF-8 (got at least {size})")
    if "\0" in text:
        raise ValueError(f"{name}: must not contain the character U+0000")


def _encoded(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: {brief(text[error.start])} is not a valid character") from None
