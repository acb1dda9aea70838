"""The types of arguments in formats that write texts without quotes. The schemas of the request's tools define the
types.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .answers import parsed_json

_MAX_SCHEMAS = 64
"""Maximum number of schemas that are read to find the types of one argument. Also the maximum number of values that are
read from an `enum`.
"""
_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
ANY = frozenset({*_NAMES.values(), "null"})
"""All types."""
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "none": "null"}


class Tools:
    """The tools of a request, as in OpenAI's field `tools`. Malformed tools have no names and no schemas.

    `longest_name`: length of the longest name.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
                schema = function.get("parameters")
                self._schemas[name] = schema if isinstance(schema, Mapping) else {}
        self.longest_name = max(map(len, self._schemas), default=0)

    def __len__(self) -> int:
        return len(self._schemas)

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    def has(self, name: str, parameter: str) -> bool:
        """Return whether a tool has a parameter."""
        return parameter in self._parameters(name)

    def typed(self, name: str, parameter: str, text: str) -> Any:
        """Return the value of an argument. If the schema allows only texts, the value is the text itself. If the schema
        allows other types, the text is parsed as JSON; if the schema does not allow the type of the parsed value, the
        value is the text.
        """
        types = types_of(self._parameters(name).get(parameter), self._schemas.get(name, {}))
        return text if types == {"string"} else value_of(text, types)

    def _parameters(self, name: str) -> Mapping[str, Any]:
        found = self._schemas.get(name, {}).get("properties")
        return found if isinstance(found, Mapping) else {}


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows; all types if the schema names no types, or is malformed.

    `root`: the schema with the definitions to which `$ref` refers. A `$ref` that refers to nothing in `root` allows all
    types.
    """
    return _types(schema, root, iter(range(_MAX_SCHEMAS)))


def _types(schema: Any, root: Mapping[str, Any], left: Iterator[int]) -> frozenset[str]:
    """Return the JSON types that a schema allows. `left`: an iterator with one item for each schema that may still be
    read.
    """
    if not isinstance(schema, Mapping) or next(left, None) is None:
        return ANY
    types = _own_types(schema)
    if types == ANY and "$ref" in schema:
        types = _types(_referred(schema["$ref"], root), root, left)
    for key in ("anyOf", "oneOf"):
        if types == ANY and (choices := _listed(schema.get(key))):
            types = _union(_types(each, root, left) for each in choices)
    for each in _listed(schema.get("allOf")) if types == ANY else ():
        types &= _types(each, root, left)
    return types | {"null"} if schema.get("nullable") is True else types


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    named = schema.get("type")
    if types := frozenset(each for each in _listed(named) or [named] if isinstance(each, str)):
        return types
    values = [schema["const"]] if "const" in schema else _listed(schema.get("enum"))
    return frozenset(map(_type_name, values[:_MAX_SCHEMAS])) or ANY


def _union(all: Iterable[frozenset[str]]) -> frozenset[str]:
    types = frozenset[str]()
    for each in all:
        if (types := types | each) == ANY:
            break
    return types


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(reference: Any, root: Any) -> Any:
    """Return the schema at a reference such as `#/$defs/A`; None if `root` has no schema there."""
    first, *names = reference.split("/", 8) if isinstance(reference, str) else [None]
    for name in names:
        root = root.get(name) if isinstance(root, Mapping) else None
    return root if first == "#" else None


def value_of(text: str, types: frozenset[str]) -> Any:
    """Parse a text as a value of one of the types. If the text is not a value of one of the types, return the text
    itself. If `types` does not contain all JSON types, Python's spelling of constants is also accepted.
    """
    word = text.strip()
    if types != ANY:
        word = _CONSTANTS.get(word.lower(), word)
    value = parsed_json(word)
    if types == ANY:
        return text if value is None and word != "null" else value
    if "integer" in types and isinstance(value, float) and value.is_integer():
        return int(value)
    names = {_type_name(value), "number"} if type(value) is int else {_type_name(value)}
    return value if types & names and (value is not None or word == "null") else text


def _type_name(value: Any) -> str:
    return _NAMES.get(type(value), "null")
