"""Tokenizers, which are files that anyone may have made: how one is loaded, and what is checked before it is used.

Decoding happens beside everything else, token by token, so it runs in this process. Promises therefore that the text of
tokens is in proportion to them: no token is longer than `MAX_TOKEN_CHARS`, and a decoder makes of a text at most
`MAX_GROWTH` times as much, in time that is in proportion, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from trueroll.errors import ModelError, brief

from .files import MAX_TOKENIZER_BYTES, check_file
from .trials import TrialError, attempt

MAX_TOKEN_CHARS = 4096
"""The longest token of models in wide use has some hundred."""
MAX_GROWTH = 16
"""How much longer a decoder may make a text. Those in wide use put in at most a space before each token."""
_MAX_STEPS = 64
_NEVER_GROW = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Strip"}
_REGEX_OPERATORS = frozenset(b"*+?{(\\")


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json, loaded in a child process first. Raise ModelError if that does not succeed
    within its limits, or if `check_tokenizer` refuses it.
    """
    check_file(path, MAX_TOKENIZER_BYTES)
    try:
        attempt(lambda: _loaded(path))
    except TrialError as error:
        raise ModelError(f"{path}: the tokenizer cannot be loaded: {error}; save it again") from None
    return _loaded(path)


def _loaded(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(path))
    check_tokenizer(tokenizer)
    return tokenizer


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Raise ModelError for a token that is too long, and for a decoder whose text is out of proportion."""
    if (longest := longest_token(tokenizer.get_vocab())) > MAX_TOKEN_CHARS:
        raise ModelError(f"a token has {longest} characters, more than {MAX_TOKEN_CHARS}; use another tokenizer")
    if tokenizer.decoder is not None:
        state: Any = tokenizer.decoder
        check_decoder(json.loads(state.__getstate__()))


def longest_token(vocabulary: dict[str, int]) -> int:
    """The characters of the longest token."""
    return max(map(len, vocabulary), default=0)


def check_decoder(decoder: dict[str, Any]) -> None:
    """Raise ModelError for a decoder, as tokenizer.json has it, that can make a text more than `MAX_GROWTH` times as
    long, or may take time out of proportion.
    """
    steps, waiting = [], [decoder]
    while waiting and len(steps) <= _MAX_STEPS:
        step = waiting.pop()
        steps.append(step)
        waiting += step["decoders"] if step["type"] == "Sequence" else []
    if len(steps) > _MAX_STEPS:
        raise ModelError(f"the decoder has more than {_MAX_STEPS} steps; use another tokenizer")
    growth = 1.0
    for step in steps:
        growth *= _growth(step)
        if growth > MAX_GROWTH:
            raise ModelError(
                f"the decoder can make a text more than {MAX_GROWTH} times as long, by {step['type']}; use another "
                "tokenizer"
            )


def _growth(step: dict[str, Any]) -> float:
    """The greatest factor by which a step of a decoder lengthens a text; each token counts as one more character."""
    match step["type"]:
        case "Sequence":
            return 1
        case kind if kind in _NEVER_GROW:
            return 1
        case "WordPiece":
            return 2  # a space before each token
        case "BPEDecoder":
            return 1 if step["suffix"] else 2  # nothing is found between all characters
        case "CTC":
            return 1 if step["word_delimiter_token"] else 2
        case "Replace":
            return _growth_by_replacing(step["pattern"], step["content"])
    raise ModelError(f"the decoder has a step of an unknown type, {brief(step['type'])}; use another tokenizer")


def _growth_by_replacing(pattern: dict[str, str], content: str) -> float:
    if (text := pattern.get("String")) is not None:
        return max(1, len(content) / len(text)) if text else 1 + len(content)
    regex = pattern["Regex"]
    if _REGEX_OPERATORS.intersection(regex.encode()):
        raise ModelError(
            f"the decoder uses a regular expression that may be slow, {brief(regex)}; use another tokenizer"
        )
    return 1 + len(content)
