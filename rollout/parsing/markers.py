"""Marked text: text in which each token that is a marker is one character."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_FIRST = 0xD800
"""Tokens become surrogates, because the decoded text of a model, which is valid Unicode, has none."""


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
        """Return marked text in which every marker of the text is a token, if such a token exists."""
        for marker, char in self._chars.items():
            text = text.replace(marker, char)
        return text

    def plain(self, text: str) -> str:
        """Return the text of marked text."""
        return text.translate(self._texts) if self._texts else text
