"""The detokenizer: text of tokens that arrive one by one, for stop strings and for streams.

Promises: each token costs the same, however many tokens came before it. Text is returned once it is certain, at most
three tokens later, not counting tokens without text. Until then, the last bytes may belong to an incomplete character.
"""

from __future__ import annotations

from collections.abc import Callable

REPLACEMENT = "\ufffd"
_MOST_INCOMPLETE = 3
"""The most bytes of an incomplete character, and therefore the most tokens that can hold them."""


class Detokenizer:
    """Turns tokens into text.

    `decode`: returns the text of tokens. `is_silent`: returns whether a token never adds text; called only for tokens
    that complete no text.

    Joined together, the parts that `add` and `rest` return are the text of all tokens, with one exception: a later
    token may change text that was already returned, for example if it adds a byte that makes the bytes before it
    invalid. The returned text then stands, and the following tokens are decoded alone.

    A decoder may treat the first token of a text specially, so tokens are decoded together with the tokens before them.
    (`tokenizers.decoders.DecodeStream` is not used, because it raises if tokens are not valid UTF-8.)
    """

    def __init__(self, decode: Callable[[list[int]], str], is_silent: Callable[[int], bool]) -> None:
        self._decode, self._is_silent = decode, is_silent
        # The last tokens: `_num_settled` tokens with text that was returned, then tokens that completed no text.
        self._window: list[int] = []
        self._num_settled = 0
        self._returned = ""  # the start of the window's text, which was returned before

    def add(self, token_id: int) -> str:
        """Return the text that this token completes; empty while it may end in the middle of a character."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if len(text) > len(self._returned) and not text.endswith(REPLACEMENT):
            return self._advance(text, self._window[self._num_settled :], 0)
        if self._is_silent(token_id):
            self._window.pop()
        elif len(self._window) - self._num_settled > _MOST_INCOMPLETE:
            return self._advance(text, self._window[-_MOST_INCOMPLETE:], self._num_uncertain(text))
        return ""

    def rest(self) -> str:
        """Return the text of the last tokens, which completed no text."""
        return self._new_in(self._decode(self._window), 0)

    def _num_uncertain(self, text: str) -> int:
        """Return the number of uncertain characters at the end of `text`: more tokens may change them."""
        num_marks = len(text) - len(text.rstrip(REPLACEMENT))
        before = self._decode(self._window[:-_MOST_INCOMPLETE])
        num_certain = max(len(before), len(self._returned))
        return max(0, min(num_marks, _MOST_INCOMPLETE, len(text) - num_certain))

    def _advance(self, text: str, window: list[int], num_uncertain: int) -> str:
        """Return the new part of `text`, the window's text, without uncertain characters. Continue with `window`."""
        new = self._new_in(text, num_uncertain)
        self._window = window
        self._num_settled = 0 if num_uncertain else len(window)
        text = self._decode(window)
        self._returned = text[: max(0, len(text) - num_uncertain)]
        return new

    def _new_in(self, text: str, num_uncertain: int) -> str:
        start = len(self._returned)
        if not text.startswith(self._returned):
            text, start = self._decode(self._window[self._num_settled :]), 0
        return text[start : len(text) - num_uncertain]
