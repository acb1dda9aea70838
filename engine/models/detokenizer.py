"""The text of tokens that come one by one: a stop string is looked for in it, and a stream sends it.

Promises that a token costs the same, whatever came before it, and that a part of the text is returned once it is
certain, at most three tokens with text late: the last bytes may belong to a character that is not complete.
"""

from __future__ import annotations

from collections.abc import Callable

REPLACEMENT = "\ufffd"
_MOST_INCOMPLETE = 3
"""Bytes of a character without its last one, and so the most tokens that can hold them."""


class Detokenizer:
    """Turns tokens into text. `decode`: the text of tokens. `is_silent`: whether a token adds no text wherever it
    stands; it is asked only about tokens that complete none.

    The parts that `add` and `rest` return make the text of all tokens, unless the decoder changes by later tokens what
    was returned, as by a byte that makes the bytes before it invalid: that part stays, and what follows is decoded
    alone.

    A decoder may treat the first token of a text in a way of its own, so tokens are decoded behind those that were read
    before. (`tokenizers.decoders.DecodeStream` raises where tokens are no valid UTF-8.)
    """

    def __init__(self, decode: Callable[[list[int]], str], is_silent: Callable[[int], bool]) -> None:
        self._decode, self._is_silent = decode, is_silent
        # The tokens that were read last: `_num_settled` whose text was returned, then those that completed none.
        self._window: list[int] = []
        self._num_settled = 0
        self._returned = ""  # with what the text of the window begins that was returned before

    def add(self, token_id: int) -> str:
        """The text that this token completes; none while it may end in the middle of a character."""
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
        """The text of the tokens that completed none."""
        return self._new_in(self._decode(self._window), 0)

    def _num_uncertain(self, text: str) -> int:
        """How many characters at the end of `text` the bytes of the last tokens are shown as until more come."""
        num_marks = len(text) - len(text.rstrip(REPLACEMENT))
        before = self._decode(self._window[:-_MOST_INCOMPLETE])
        num_certain = max(len(before), len(self._returned))
        return max(0, min(num_marks, _MOST_INCOMPLETE, len(text) - num_certain))

    def _advance(self, text: str, window: list[int], num_uncertain: int) -> str:
        """What is new in `text`, that of the window, but for the uncertain characters; goes on with `window`."""
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
