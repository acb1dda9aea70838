"""The field `tool_choice`, and grammars for answers that must be a tool call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trueroll.errors import InvalidRequestError, brief

from ...engine.request import SamplingParams
from .parser import AnswerParser

_CHOICES = "'auto', 'none', 'required' or {'type': 'function', 'function': {'name': NAME}}"
_DEFINITIONS = ("$defs", "definitions")


def forced_tools(choice: str | dict[str, Any], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """If `tool_choice` requires a call, return the tools that the model may call; otherwise, return an empty list.

    Raise InvalidRequestError if the choice is not supported, or if it names no tool of the request.
    """
    if choice in ("auto", "none"):
        return []
    if choice == "required":
        found = [*tools]
    elif (name := _chosen(choice)) is not None:
        found = [tool for tool in tools if name_of(tool) == name]
    else:
        text = f"tool_choice: {brief(choice)} is not supported; omit the field, or set it to {_CHOICES}"
        raise InvalidRequestError(text, field="tool_choice", value=choice)
    if not found:
        raise InvalidRequestError(
            f"tool_choice: {brief(choice)} needs a tool of the request; add the tool to tools, or set tool_choice to "
            "'auto'",
            field="tool_choice",
        )
    return found


def name_of(tool: Mapping[str, Any]) -> str | None:
    """Return the name of a tool; None if the tool has no name."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def forcing(params: SamplingParams, tools: Sequence[Mapping[str, Any]]) -> SamplingParams:
    """Return a copy of `params` with a grammar that makes each sample one call to one of the tools: a JSON object with
    `name` and `arguments`.

    Raise InvalidRequestError if the parameters already have a grammar, or if a tool's schema is not supported.
    """
    if params.structured_outputs is not None:
        raise InvalidRequestError(
            "tool_choice: a required tool call is not supported together with structured_outputs or response_format; "
            "remove one of them",
            field="tool_choice",
        )
    values: dict[str, Any] = dict(params) | {"structured_outputs": {"json": _schema_of(tools)}}
    return SamplingParams(**values)


def check_reasoning(parser: AnswerParser, prompt_end: str) -> None:
    """Raise InvalidRequestError if the end of a prompt begins the reasoning, because an answer that must be a call
    cannot contain reasoning.

    `prompt_end`: the end of the prompt, as marked text.
    """
    if parser.begins_reasoning(prompt_end):
        raise InvalidRequestError(
            "tool_choice: a required tool call is not supported if the chat template begins the reasoning; turn "
            "reasoning off in chat_template_kwargs, or set tool_choice to 'auto'",
            field="tool_choice",
        )


def _chosen(choice: Any) -> str | None:
    is_named = isinstance(choice, dict) and choice.keys() == {"type", "function"} and choice["type"] == "function"
    return name_of(choice) if is_named and choice["function"].keys() == {"name"} else None


def _schema_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the JSON schema of a call to one of the tools. The schema has the definitions of all tools, so references
    to them stay valid.
    """
    calls, definitions = list[dict[str, Any]](), dict[str, dict[str, Any]]()
    for tool in tools:
        if (name := name_of(tool)) is None:
            raise InvalidRequestError(f"tools: {brief(tool)} has no function with a name; add the name", field="tools")
        parameters = _object(tool["function"].get("parameters") or {"type": "object"})
        for key in _DEFINITIONS:
            _merge(definitions.setdefault(key, {}), _object(parameters.pop(key, {})))
        fields = {"name": {"const": name}, "arguments": parameters}
        calls.append(dict(type="object", properties=fields, required=[*fields], additionalProperties=False))
    return (calls[0] if len(calls) == 1 else {"anyOf": calls}) | {
        key: each for key, each in definitions.items() if each
    }


def _object(schema: Any) -> dict[str, Any]:
    if not isinstance(schema, Mapping):
        text = f"tools: parameters must be a JSON schema, in which definitions are objects (got {brief(schema)})"
        raise InvalidRequestError(text, field="tools")
    return dict(schema)


def _merge(known: dict[str, Any], new: Mapping[str, Any]) -> None:
    for name, schema in new.items():
        if known.setdefault(name, schema) != schema:
            raise InvalidRequestError(
                f"tools: two tools define {brief(name)} differently in $defs, which a required tool call does not "
                "support; rename one, or choose one function",
                field="tools",
            )
