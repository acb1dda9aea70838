"""Tool calls in the text of a model: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.

The chat templates of many models (Hermes, Qwen2.5, Qwen3) specify this format for tool calls. For models with other
templates, all text is content.
"""

from __future__ import annotations

import json
from typing import Any

from ..protocol import new_id

BEGIN, END = "<tool_call>", "</tool_call>"


class ToolText:
    """Splits the growing text of a sample into content and tool calls. Text that is not a valid call is content."""

    def __init__(self) -> None:
        self._held = ""

    def add(self, text: str) -> str:
        """Add text. Return the new content that later text cannot change."""
        self._held += text
        end = self._held.find(BEGIN)
        if end < 0:
            end = len(self._held) - _overlap(self._held)
        content, self._held = self._held[:end], self._held[end:]
        return content

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the remaining content of the sample, and the tool calls."""
        calls = _calls(self._held)
        return ("", calls) if calls else (self._held, [])


def _overlap(text: str) -> int:
    """Return the length of the longest suffix of a text that may begin a tool call."""
    return next((size for size in range(len(BEGIN) - 1, 0, -1) if text.endswith(BEGIN[:size])), 0)


def _calls(text: str) -> list[dict[str, Any]]:
    """Return the tool calls in a text that consists only of tool calls. Return an empty list for any other text."""
    calls: list[dict[str, Any]] = []
    for part in text.split(BEGIN)[1:]:
        call, end, rest = part.partition(END)
        if not end or rest.strip() or (told := _call(call, len(calls))) is None:
            return []
        calls.append(told)
    return calls


def _call(text: str, index: int) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
        told = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + told).encode()  # raises for a lone surrogate, which JSON permits and UTF-8 does not
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    function = {"name": name, "arguments": told}
    return {"index": index, "id": f"call_{new_id()}", "type": "function", "function": function}
