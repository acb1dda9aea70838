"""Marked text. The markers of a format are the texts that structure an answer, such as `<tool_call>`. In marked text, a
single character stands for each marker that is a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_FIRST = 0xD800
"""The first character that stands for a marker. These characters are surrogates, because decoded text is valid Unicode
and contains no surrogates.
"""


class Markers:
    """The markers of a format. `texts`: the markers. `token_ids`: the added tokens of the tokenizer, by text.

    `by_id`: the character of each marker that is a token, by token id.
    """

    def __init__(self, texts: Iterable[str], token_ids: Mapping[str, int]) -> None:
        known = [text for text in dict.fromkeys(texts) if text in token_ids]
        self._chars = {text: chr(_FIRST + i) for i, text in enumerate(sorted(known, key=len, reverse=True))}
        self._texts = {ord(char): text for text, char in self._chars.items()}
        self.by_id = {token_ids[text]: char for text, char in self._chars.items()}

    def marked(self, text: str) -> str:
        """Convert text to marked text, in which one character stands for each marker that has a token."""
        for marker, char in self._chars.items():
            text = text.replace(marker, char)
        return text

    def plain(self, text: str) -> str:
        """Convert marked text to text."""
        return text.translate(self._texts) if self._texts else text
