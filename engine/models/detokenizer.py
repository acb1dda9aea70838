"""The detokenizer: converts tokens to text one by one, for stop strings and for streams.

Guarantees: the cost per token does not grow with the number of earlier tokens. Text is held back while the text may end
in an incomplete character. No text is held back for more than three further tokens that have text.
"""

from __future__ import annotations

from collections.abc import Callable

REPLACEMENT = "\ufffd"
_MOST_INCOMPLETE = 3
"""The maximum number of bytes in an incomplete character. At most this many tokens contain bytes of the character."""


class Detokenizer:
    """Converts tokens to text, one token at a time.

    `decode`: returns the text of a list of tokens. `is_silent`: returns whether a token never adds text; called only
    for tokens that did not add text.

    The concatenated results of `add` and `rest` are the text of all tokens, with one exception. A token may change text
    that was already returned, for example if its bytes make the previous bytes invalid. Returned text is never
    corrected: if a token changes returned text, later tokens are decoded without the earlier tokens.

    A decoder may treat the first token of a text differently from later tokens. Each token is therefore decoded
    together with the tokens before it. `tokenizers.decoders.DecodeStream` is not used, because it raises an exception
    if the bytes of tokens are not valid UTF-8.
    """

    def __init__(self, decode: Callable[[list[int]], str], is_silent: Callable[[int], bool]) -> None:
        self._decode, self._is_silent = decode, is_silent
        # The last tokens: `_num_settled` tokens with returned text, followed by tokens without returned text.
        self._window: list[int] = []
        self._num_settled = 0
        self._returned = ""  # the part of the window's text that was returned before

    def add(self, token_id: int) -> str:
        """Return the text that this token completes. The result is empty while the text may end within a character."""
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
        """Return the text that `add` has held back."""
        return self._new_in(self._decode(self._window), 0)

    def _num_uncertain(self, text: str) -> int:
        """Return the number of characters at the end of `text` that later tokens may change."""
        num_marks = len(text) - len(text.rstrip(REPLACEMENT))
        before = self._decode(self._window[:-_MOST_INCOMPLETE])
        num_certain = max(len(before), len(self._returned))
        return max(0, min(num_marks, _MOST_INCOMPLETE, len(text) - num_certain))

    def _advance(self, text: str, window: list[int], num_uncertain: int) -> str:
        """Return the new part of `text`, without the uncertain characters at its end.

        `window`: the tokens that replace the current window.
        """
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
