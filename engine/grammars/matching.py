"""Matching of grammars with llguidance: the language, the vocabulary, and the masks of one sample.

A mask depends only on the grammar, the vocabulary and the tokens of the sample so far. The package llguidance
(Microsoft, MIT), which the extra `grammar` installs, computes the masks. The parser of llguidance is an Earley parser
(Earley 1970) over lexemes, which are matched with derivatives of regular expressions (Brzozowski 1964).

Guarantees:

- A mask allows exactly the tokens after which the text is still a prefix of some text that the grammar allows. This
  module therefore sets llguidance's option `no_forcing`. Without this option, if the grammar permits only one
  continuation, llguidance would allow only the tokens into which its own tokenizer splits this continuation.
- A grammar that llguidance cannot match exactly raises GrammarError. A matcher that has reached a limit raises
  GrammarError instead of returning a mask. Earlier requests for masks may affect whether a limit is reached, but never
  the bits of a mask.

Compiling and matching an untrusted grammar may take much time and memory, so workers match grammars in child processes
only (`masks`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np

from ...kernels.edits import mask_of
from .source import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_HEADER = '%llguidance {"no_forcing": true}\n'
_FUEL: dict[str, Any] = dict(
    step_lexer_fuel=200_000, step_max_items=20_000, max_items_in_row=2_000, verbose_errors=False
)
"""The limits of llguidance's parser."""
_MAX_ERROR_CHARS = 300
_STOPS = {
    "NoExtensionBias": "no text matches the grammar",
    "ParserTooComplex": "the grammar is too ambiguous (the limit of parser items was reached)",
    "LexerTooComplex": "the regular expressions of the grammar are too complex (the limit of lexer states was reached)",
}


class GrammarError(Exception):
    """A grammar or a tokenizer is not supported, or a limit was reached. The message says, in one line, what is not
    supported or which limit was reached.
    """


def installed_version() -> str | None:
    """Return the version of llguidance; None if llguidance is not installed. Other versions of llguidance may compute
    other masks.
    """
    try:
        return version("llguidance")
    except PackageNotFoundError:
        return None


def translated(grammar: Grammar) -> str:
    """Return a grammar in llguidance's syntax. Raise GrammarError if the grammar cannot be translated.

    A grammar in GBNF is parsed in Python and may take seconds, so untrusted grammars must not be translated in the
    worker's process.
    """
    if grammar.json is not None or grammar.json_object:
        return f"{_HEADER}start: %json {_with_options(grammar)}"
    if grammar.choice:
        # The choices form a single terminal. As alternatives of a rule, they would become parser items, and the number
        # of parser items is limited.
        return f"{_HEADER}start: T\nT: {' | '.join(map(_quoted, grammar.choice))}"
    if grammar.regex is not None:
        return f"{_HEADER}start: /{_regex(grammar.regex)}/"
    return _HEADER + _from_gbnf(grammar.grammar or "")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON does not escape this character


def _with_options(grammar: Grammar) -> str:
    """Return a JSON schema with fixed values for llguidance's own options, because other values could make the matching
    lenient.
    """
    schema = {"type": "object"} if grammar.json is None else json.loads(grammar.json)
    options = dict(lenient=False, coerce_one_of=False, whitespace_flexible=not grammar.disable_any_whitespace)
    return json.dumps(schema | {"x-guidance": options | {"json_allow_general_unicode_escapes": False}})


def _regex(regex: str) -> str:
    from llguidance import regex_to_lark

    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise GrammarError("regex: ends within an escape sequence")
    return regex_to_lark(regex, "dws")


def _from_gbnf(grammar: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark = gbnf_to_lark(grammar)
    except RecursionError:
        raise GrammarError("grammar: is nested too deeply") from None
    except Exception as error:
        raise GrammarError(_line(f"grammar: {error}")) from None
    return lark.removeprefix("%llguidance {}\n")


class TokenText:
    """The text of a model's tokens. `tokenizer`: the content of tokenizer.json. `eos_token_ids`: tokens that are never
    part of a text. Special tokens, and token ids above the tokenizer's ids, are never part of a text.

    Raise GrammarError if llguidance does not support the tokenizer, or if there is no end-of-sequence token. The
    constructor takes seconds for a large vocabulary.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        from llguidance import LLTokenizer

        if not eos_token_ids:
            raise GrammarError("the model has no end-of-sequence token")
        self.vocab_size = vocab_size
        try:
            self.tokens: LLTokenizer = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=[*eos_token_ids])
        except Exception as error:
            raise GrammarError(_line(f"the tokenizer is not supported: {error}")) from None
        self.without_eos = ~mask_of(eos_token_ids, vocab_size)


class Template:
    """A compiled grammar. `lark`: the result of `translated`. Raise GrammarError if the grammar does not compile, or if
    no text matches it.
    """

    def __init__(self, text: TokenText, lark: str) -> None:
        from llguidance import LLMatcher, LLParserLimits

        self.text = text
        self._matcher = LLMatcher(text.tokens, lark, log_level=0, limits=LLParserLimits(**_FUEL))
        _check(self._matcher)
        Walk(self, ()).masks(())  # some errors appear only when a mask is computed

    def copied(self) -> LLMatcher:
        """Return a new matcher, at the beginning of a text."""
        return self._matcher.deep_copy()


class Walk:
    """The progress of one sample in a text that a grammar restricts. `ending_token_ids`: the tokens that end the
    sample; masks allow these tokens where the text is complete.
    """

    def __init__(self, template: Template, ending_token_ids: Sequence[int]) -> None:
        self.num_tokens = 0
        self._text, self._matcher = template.text, template.copied()
        self._ending = mask_of(ending_token_ids, template.text.vocab_size)

    def append(self, token_ids: Sequence[int]) -> int:
        """Append the tokens before the first token that the grammar excludes. Return the number of appended tokens."""
        count = self._matcher.try_consume_tokens([*token_ids])
        _check(self._matcher)
        self.num_tokens += count
        return count

    def masks(self, following: Sequence[int]) -> np.ndarray:
        """Return the masks (`RowEdits.mask`) of the next token and of the token after each accepted token of
        `following`: int32 [n + 1, ceil(V / 32)]. The n accepted tokens are the tokens before the first token that the
        grammar excludes. The walk does not change.
        """
        masks = np.zeros((len(following) + 1, len(self._ending)), np.int32)
        self._fill(masks[0])
        count = 0
        for token in following:
            if not self._matcher.try_consume_tokens([token]):
                break
            count += 1
            self._fill(masks[count])
        _check(self._matcher)
        if count and not self._matcher.rollback(count):
            _check(self._matcher)
        return masks[: count + 1]

    def _fill(self, mask: np.ndarray) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        _check(self._matcher)  # the mask of a failed matcher is wrong
        mask &= self._text.without_eos
        if self._matcher.is_accepting():
            mask |= self._ending


def _check(matcher: LLMatcher) -> None:
    """Raise GrammarError if a matcher has failed. The matcher's own methods never raise errors."""
    if matcher.is_error():
        raise GrammarError(_STOPS.get(matcher.stop_reason()) or _line(matcher.get_error()))


def _line(text: str) -> str:
    """Return the text of an error in one line: the error's first line, without the position in the translated grammar,
    and the error's cause.
    """
    lines = [line.strip() for line in text.strip().splitlines()] or [""]
    at, colon, rest = lines[0].partition(": ")
    first = rest if colon and at.removeprefix("at ")[:1].isdigit() else lines[0]
    cause = next((line.removeprefix("error:") for line in lines[1:] if line.startswith("error:")), "")
    return (first[: _MAX_ERROR_CHARS // 2] + cause[: _MAX_ERROR_CHARS // 2]).rstrip(":")
