"""The types of arguments that a model writes without quotes, according to the schemas of the request's tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .answers import parsed_json

_MAX_DEPTH = 8
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


class Tools:
    """The tools of a request, as in OpenAI's field `tools`. Malformed tools have no names and no schemas."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
                schema = function.get("parameters")
                found = schema.get("properties") if isinstance(schema, Mapping) else None
                self._parameters[name] = found if isinstance(found, Mapping) else {}

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def has(self, name: str, parameter: str) -> bool:
        """Return whether a tool has a parameter."""
        return parameter in self._parameters.get(name, {})

    def typed(self, name: str, parameter: str, text: str) -> Any:
        """Return the value of an argument. The text is parsed as JSON, unless the schema asks for a text, or for a type
        that the value does not have.
        """
        types = types_of(self._parameters.get(name, {}).get(parameter))
        return text if types == {"string"} else value_of(text, types)


def types_of(schema: Any, depth: int = 0) -> set[str]:
    """Return the JSON types that a schema names; an empty set if it names none."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return set()
    named = schema.get("type")
    types = {each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        for each in schema[key] if isinstance(schema.get(key), list) else []:
            types |= types_of(each, depth + 1)
    if not types:
        values = (
            schema["enum"] if isinstance(schema.get("enum"), list) else [schema[k] for k in ("const",) if k in schema]
        )
        types = {_type_name(value) for value in values}
    return types | ({"null"} if types and schema.get("nullable") is True else set())


def value_of(text: str, types: set[str]) -> Any:
    """Return the value that a text stands for, if it is of one of the types; otherwise return the text. Python's
    spelling of constants is accepted. An empty set of types allows all types.
    """
    bare = text.strip()
    if bare.lower() in _CONSTANTS:
        value = _CONSTANTS[bare.lower()] if types or bare.islower() else text
    elif (value := parsed_json(bare)) is None:
        return text
    if "integer" in types and isinstance(value, float) and value.is_integer():
        return int(value)
    return value if not types or types & {_type_name(value), *(["number"] if type(value) is int else [])} else text


def _type_name(value: Any) -> str:
    return _NAMES.get(type(value), "null")
