"""Compute and check the tokens that new messages add to a conversation, with the checkpoint's own chat template.

Owns: the border between a drawn message and the messages that follow it. The template is rendered in the child process
of `TextModel`, and never in this process. To render a conversation, the content of each drawn message is replaced by a
mark, and its reasoning by another mark. The rendered text then alternates between openings and spans:

- An opening is the text between two drawn messages: the end of the earlier message's turn, the messages that the agent
  gave, and the beginning of the next answer. Only the text of a new opening is encoded.
- A span is the rendering of a drawn message: its marks, and its tool calls as the template writes them. In the
  session's tokens, the tokens that the model drew replace the span.

Promises: `Templates.open` returns tokens only if the new rendering begins with all earlier openings and spans, and if
the template writes the drawn message completely. The text of the session then equals the new rendering with each span
replaced by the drawn text. If the new rendering does not agree with the session, for example because the template
removes the reasoning of earlier turns, `open` raises an error that names the first token that would change. No rule in
this module depends on the model family.

The last drawn tokens of a message are kept if the template also writes these tokens after the message. For example,
Qwen's `<|im_end|>` is kept, and the template's line break follows; the two tokens with which Cohere's models end an
answer are kept; and GLM's `<|user|>` is kept as the beginning of the next message. The last drawn tokens, up to the
token that
ended the message, are also kept if the template writes the same text but the tokenizer would encode it as other tokens.
If the template does not write the token that ended the message, this token is dropped. If the message was cut off, for
example by `max_tokens`, it lacks the text with which the template ends a message. This text is then added, without the
part that the model has drawn.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from time import time
from typing import Any

from trueroll.errors import InvalidRequestError, ModelError, brief

from ...engine.models.child_process import IsAbandoned, never
from ..protocol import new_id
from ..text import ANY, TextModel
from .messages import Message

SWITCHES: dict[str, Any] = dict(clear_thinking=False, preserve_thinking=True, truncate_history_thinking=False)
"""Arguments with which templates of GLM, Qwen and Nemotron keep the reasoning of earlier turns. Other templates ignore
these arguments.
"""
RESERVED = {
    *("tools", "messages", "add_generation_prompt", "continue_final_message"),
    # Other parameters of transformers' `apply_chat_template`, which are not passed to the template.
    *("self", "conversation", "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "sanitize_control_tokens", "tokenizer_kwargs", "processor_kwargs"),
}
"""Arguments that a call cannot set."""
_SHOWN_CHARS = 40
_BORDER_TOKENS = 16
"""Number of tokens on each side of a border that are decoded to check the border."""
_MAX_END_TOKENS = 64
"""Maximum number of tokens that end a drawn message."""


def check_template_arguments(arguments: Any) -> None:
    """Raise InvalidRequestError if the template's arguments are not an object, or if they include an argument that a
    call cannot set.
    """
    field = "chat_template_kwargs"
    if not isinstance(arguments, dict):
        raise InvalidRequestError(f"{field}: must be an object (got {brief(arguments)})", field=field)
    if found := RESERVED & arguments.keys():
        raise InvalidRequestError(f"{field}: {sorted(found)} cannot be set here; remove them", field=field)


@dataclass(frozen=True)
class Opening:
    """The tokens from the end of the previous drawn message, or from the start of the conversation, to a drawn message.

    `span`: the rendering of the previous drawn message, with marks in place of its content and its reasoning. `text`:
    the text from the end of `span` to the drawn message. `token_ids`: the tokens of `text`, without those tokens at
    the beginning that the model has already drawn. `dropped`: whether the last token of the previous drawn message is
    not part of this conversation.
    """

    span: str
    text: str
    token_ids: tuple[int, ...]
    dropped: bool = False


@dataclass(frozen=True)
class Turn:
    """A message of a conversation. A message that the model drew also has its opening, its tokens, and the token that
    ended it (`stop_token_id`), which is the last of its tokens.
    """

    message: Message
    opening: Opening | None = None
    token_ids: Sequence[int] = ()
    stop_token_id: int | None = None


class Templates:
    """Renders the conversations of one session. Thread-safe. All calls block, and raise ModelError, UnavailableError
    and TooMany as `TextModel.render` does. A template that writes the date gets the time at which the session began.
    """

    def __init__(self, texts: TextModel) -> None:
        self._texts = texts
        self._nonce, self._at = f"m{new_id()}", time()

    def open(self, turns: Sequence[Turn], arguments: dict[str, Any], is_abandoned: IsAbandoned = never) -> Opening:
        """Return the opening of the answer to a conversation.

        `turns`: all messages, the last of which is not drawn. `arguments`: arguments of the template, such as `tools`.
        Raise InvalidRequestError if the template rewrites an earlier message.
        """
        rendering = _Rendering(self._texts, self._nonce, self._at, turns, arguments, is_abandoned)
        rendered = rendering.text(turns)
        if rendering.last is None:
            return Opening("", rendered, self._encode(rendered, is_abandoned))
        span, text = rendering.split(rendered)
        turn = turns[rendering.last]
        token_ids = self._encode(text, is_abandoned)
        num_shared, dropped = self._shared(turn, token_ids)
        opening = Opening(span, text, token_ids[num_shared:], dropped)
        if dropped and (end := self._end_in_other_tokens(turn, text)):
            opening = Opening(span, text, self._encode(text[len(end) :], is_abandoned))
        self._check_border(rendering.last, turn, opening)
        return opening

    def _encode(self, text: str, is_abandoned: IsAbandoned) -> tuple[int, ...]:
        return tuple(self._texts.encode(text, False, ANY, is_abandoned))

    def _shared(self, turn: Turn, token_ids: tuple[int, ...]) -> tuple[int, bool]:
        """Return how many of the last drawn tokens are also the first tokens of `token_ids`. Also return whether the
        token that ended the message must be dropped, because the template does not write it.
        """
        drawn = tuple(turn.token_ids[-_MAX_END_TOKENS:])
        if turn.stop_token_id is None:
            return _num_shared(drawn, token_ids, self._texts.is_silent), False
        if shared := _num_shared(drawn, token_ids):
            return shared, False
        return _num_shared(drawn[:-1], token_ids, self._texts.is_silent), True

    def _end_in_other_tokens(self, turn: Turn, text: str) -> str:
        """Return the longest end of the drawn text, in whole tokens, that is also the beginning of `text`; empty if
        there is no such end.
        """
        drawn = list(turn.token_ids[-_MAX_END_TOKENS:])
        return next((end for i in range(len(drawn)) if text.startswith(end := self._decode(drawn[i:])) and end), "")

    def _check_border(self, index: int, turn: Turn, opening: Opening) -> None:
        """Raise InvalidRequestError if the new tokens decode to another text after the drawn tokens than on their own.
        For example, some tokenizers encode a text as if a space preceded it.
        """
        drawn = list(turn.token_ids[: len(turn.token_ids) - opening.dropped][-_BORDER_TOKENS:])
        new = list(opening.token_ids[:_BORDER_TOKENS])
        apart, together = self._decode(drawn) + self._decode(new), self._decode(drawn + new)
        if new and apart != together:
            raise InvalidRequestError(
                f"messages[{index + 1}]: the tokenizer gives token {brief(new[0])} another text after an answer "
                f"({brief(together[-_SHOWN_CHARS:])} instead of {brief(apart[-_SHOWN_CHARS:])}); use a model "
                "with a template that begins each message with a special token",
                field="messages",
            )

    def _decode(self, token_ids: list[int]) -> str:
        return self._texts.decode(token_ids, skip_special_tokens=False)


class _Rendering:
    """Renderings of one conversation. `last`: the index of the last drawn message, or None."""

    def __init__(
        self,
        texts: TextModel,
        nonce: str,
        at: float,
        turns: Sequence[Turn],
        arguments: dict[str, Any],
        is_abandoned: IsAbandoned,
    ) -> None:
        self._texts, self._nonce, self._at, self._turns = texts, nonce, at, turns
        self._is_abandoned = is_abandoned
        self._arguments = SWITCHES | arguments
        self._drawn = [i for i, turn in enumerate(turns) if turn.opening is not None]
        self.last = self._drawn[-1] if self._drawn else None

    def text(self, turns: Sequence[Turn], opens: bool = True) -> str:
        """Return the rendering of `turns`, with marks. `opens`: whether the rendering ends with the beginning of an
        answer.
        """
        messages = [self._marked(i, turn) for i, turn in enumerate(turns)]
        try:
            return self._render(messages, opens)
        except ModelError as error:
            if not any(turn.message.calls for turn in turns):
                raise
            first = error
        try:
            return self._render([_with_texts(message) for message in messages], opens)
        except ModelError:
            raise first from None

    def _render(self, messages: list[dict[str, Any]], opens: bool) -> str:
        arguments = self._arguments | dict(add_generation_prompt=opens)
        return self._texts.render(messages, arguments, self._at, self._is_abandoned)

    def split(self, rendered: str) -> tuple[str, str]:
        """Return the last span and the new opening of a rendering. Raise InvalidRequestError if the earlier text has
        changed, or if the span lacks a part of the drawn message.
        """
        assert self.last is not None
        before = self._before()
        if not rendered.startswith(before):
            raise self._rewritten(before, rendered)
        rest = rendered[len(before) :]
        text = self._following(before, rest)
        span = rest[: len(rest) - len(text)]
        self._check_span(span, text)
        return span, text

    def _marks(self, index: int) -> tuple[str, str]:
        """Return the marks for the content and the reasoning of a drawn message."""
        return f"{self._nonce}c{index}e", f"{self._nonce}r{index}e"

    def _marked(self, index: int, turn: Turn) -> dict[str, Any]:
        message = turn.message
        if turn.opening is None:
            return message.fields
        content, reasoning = self._marks(index)
        is_marked = message.fields["content"] or not message.calls
        marked = message.fields | dict(content=content if is_marked else "")
        return marked | (dict(reasoning_content=reasoning) if message.reasoning else {})

    def _before(self) -> str:
        """Return the rendering of everything before the last drawn message."""
        openings = [turn.opening for turn in self._turns if turn.opening is not None]
        return "".join(opening.span + opening.text for opening in openings)

    def _following(self, before: str, rest: str) -> str:
        """Return the part of a rendering after the last span. `rest`: the rendering from the last span on."""
        assert self.last is not None
        turn, stop = self._turns[self.last], self._stop()
        if not turn.message.calls:
            text = _after(rest, self._marks(self.last)[0])
        else:
            text = self._after_closed(before, rest, stop) if stop else None
            text = self._after_plain(before, rest) if text is None else text
        if text is None:
            raise self._lost("the end")
        bare = text.lstrip()
        return bare if any(map(bare.startswith, self._ends(turn))) else text

    def _ends(self, turn: Turn) -> list[str]:
        """Return the texts with which a drawn message may end. Each text begins with one of the last special tokens of
        the message, and extends to the end of the message, with or without the token that ended it.
        """
        drawn, stop = list(turn.token_ids[-_MAX_END_TOKENS:]), turn.stop_token_id
        starts = [i for i, each in enumerate(drawn) if each == stop or self._texts.is_silent(each)]
        wholes = [drawn] if stop is None else [drawn, drawn[:-1]]
        texts = (self._texts.decode(whole[i:], False) for whole in wholes for i in starts if i < len(whole))
        return [text for text in texts if text]

    def _stop(self) -> str:
        """Return the text of the token that ended the last drawn message; empty if no token ended it."""
        assert self.last is not None
        stop = self._turns[self.last].stop_token_id
        return "" if stop is None else self._texts.decode([stop], skip_special_tokens=False)

    def _after_closed(self, before: str, rest: str, stop: str) -> str | None:
        """For a last drawn message with tool calls, return the rendered text from the token that ended the message on.
        To find this token, render the conversation without later messages; the token must be at the end of this
        rendering, or directly after it. Return None if the token is not found.
        """
        assert self.last is not None
        closed, whole = self.text(self._turns[: self.last + 1], opens=False), before + rest
        if not whole.startswith(closed):
            return None
        if whole.startswith(stop, len(closed)):
            return whole[len(closed) :]
        at = closed.rfind(stop, len(before))
        return whole[at:] if at >= 0 and not closed[at + len(stop) :].strip() else None

    def _after_plain(self, before: str, rest: str) -> str | None:
        """Return the text that the template writes after the last drawn message if its tool calls are removed. Return
        None if the rendering with tool calls does not end with this text.
        """
        assert self.last is not None
        turn = self._turns[self.last]
        fields = {name: value for name, value in turn.message.fields.items() if name != "tool_calls"}
        plain = Turn(Message(fields), turn.opening)
        try:
            rendered = self.text([*self._turns[: self.last], plain, *self._turns[self.last + 1 :]])
        except ModelError:  # some templates refuse a tool's result if there is no tool call
            return None
        found = _after(rendered, self._marks(self.last)[0]) if rendered.startswith(before) else None
        return found if found and rest.endswith(found) else None

    def _check_span(self, span: str, text: str) -> None:
        assert self.last is not None
        message = self._turns[self.last].message
        content, reasoning = self._marks(self.last)
        if message.reasoning and reasoning not in span:
            raise self._lost("the reasoning")
        if message.fields["content"] and content not in span:
            raise self._lost("the content")
        bare = self._without_marks(span, lambda _: "")
        if not all(call["function"]["name"] in bare or call.get("id", bare) in bare for call in message.calls):
            raise self._lost("the tool calls")
        if self._nonce in text:
            raise self._lost("the order")

    def _lost(self, what: str) -> InvalidRequestError:
        """Return the error for a template that removes a part of the last drawn message."""
        assert self.last is not None
        turn = self._turns[self.last]
        first = turn.token_ids[0] if turn.token_ids else None
        return self._changed(
            f"messages[{self.last}]",
            self._num_tokens(self.last),
            first,
            f"the template does not keep {what} of this message once {brief(self._turns[-1].message.role)} messages "
            "follow",
        )

    def _rewritten(self, before: str, rendered: str) -> InvalidRequestError:
        """Return the error for a template that changes the text of earlier messages."""
        at = len(commonprefix((before, rendered)))
        start = before.rfind(self._nonce, 0, at + len(self._nonce))
        torn = re.match(self._mark_pattern(), before[start:]) if start >= 0 else None
        at = start if torn and start < at < start + torn.end() else at
        was, now = (self._shown(text[at:]) for text in (before, rendered))
        change = f"{was} becomes {now}"
        end = 0
        for previous, index in zip((None, *self._drawn), self._drawn, strict=False):
            turn = self._turns[index]
            assert turn.opening is not None
            if at < (end := end + len(turn.opening.span)) and previous is not None:
                first = next(iter(self._turns[previous].token_ids), None)
                return self._changed(f"messages[{previous}]", self._num_tokens(previous), first, change)
            if at < (end := end + len(turn.opening.text)):
                num_kept = self._num_kept(turn.opening, at - end + len(turn.opening.text))
                place = self._num_tokens(index) - len(turn.opening.token_ids) + num_kept
                first = next(iter(turn.opening.token_ids[num_kept:]), None)
                return self._changed(f"before the answer messages[{index}]", place, first, change)
        raise AssertionError("the texts are equal")

    def _num_kept(self, opening: Opening, num_chars: int) -> int:
        """Return how many tokens of an opening belong completely to the first `num_chars` characters of its text."""
        missing = len(opening.text) - len(self._texts.decode(opening.token_ids, skip_special_tokens=False))

        def end(count: int) -> int:
            return missing + len(self._texts.decode(opening.token_ids[:count], skip_special_tokens=False))

        return max(0, bisect_right(range(len(opening.token_ids)), num_chars, key=end) - 1)

    def _num_tokens(self, index: int) -> int:
        """Return the number of tokens of the conversation before the drawn message `index`."""
        total = 0
        for i in self._drawn:
            opening = self._turns[i].opening
            assert opening is not None
            total += len(opening.token_ids) - opening.dropped
            if i == index:
                break
            total += len(self._turns[i].token_ids)
        return total

    def _changed(self, where: str, place: int, token_id: int | None, how: str) -> InvalidRequestError:
        token = "" if token_id is None else f" ({token_id}, {brief(self._texts.decode([token_id], False))})"
        return InvalidRequestError(
            f"{where}: the chat template would rewrite tokens of the session, beginning with token {place}"
            f"{token}: {how}; use a template that keeps earlier messages as they are, or begin a new session",
            field="messages",
            value=place,
        )

    def _shown(self, text: str) -> str:
        fields = {"c": "content", "r": "reasoning_content"}
        whole = self._without_marks(
            text, lambda mark: self._turns[int(mark[2])].message.fields.get(fields[mark[1]], "")[:_SHOWN_CHARS]
        )
        return brief(whole[:_SHOWN_CHARS])

    def _without_marks(self, text: str, replaced: Callable[[re.Match[str]], str]) -> str:
        return re.sub(self._mark_pattern(), replaced, text)

    def _mark_pattern(self) -> str:
        return rf"{self._nonce}([cr])(\d+)e"


def _with_texts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of tool calls as JSON texts, which DeepSeek's template needs."""
    calls = [
        call | dict(function=call["function"] | dict(arguments=_json(call))) for call in message.get("tool_calls", [])
    ]
    return message | dict(tool_calls=calls) if calls else message


def _json(call: dict[str, Any]) -> str:
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)


def _num_shared(
    drawn: tuple[int, ...], new: tuple[int, ...], may_begin: Callable[[int], bool] = lambda token_id: True
) -> int:
    """Return the largest number n for which the last n drawn tokens are the first n new tokens. `may_begin`: returns
    whether a token may be the first of these n tokens.
    """
    counts = range(min(len(drawn), len(new)), 0, -1)
    return next((n for n in counts if drawn[-n:] == new[:n] and may_begin(drawn[-n])), 0)


def _after(text: str, mark: str) -> str | None:
    """Return the text after the only occurrence of a mark. Return None if the mark does not occur exactly once."""
    _, found, rest = text.partition(mark)
    return rest if found and mark not in rest else None
