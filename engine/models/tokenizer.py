"""Tokenizers: loads a tokenizer from an untrusted file, and checks the tokenizer before use.

Decoding runs in the worker process, token by token. The length of a text must therefore be bounded by the number of
tokens. Guarantees: no token is longer than `MAX_TOKEN_CHARS`. A decoder lengthens a text at most by the factor
`MAX_GROWTH`, and takes time proportional to the length of the text.
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
"""The longest tokens of widely used models have a few hundred characters."""
MAX_GROWTH = 16
"""The largest factor by which a decoder may lengthen a text. Decoders in wide use add at most one space per token."""
_MAX_STEPS = 64
_NEVER_GROW = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Strip"}
_REGEX_OPERATORS = frozenset(b"*+?{(\\")


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer.json, after a trial load in a child process.

    Raise ModelError if the trial fails or exceeds its limits, or if `check_tokenizer` rejects the tokenizer.
    """
    check_file(path, MAX_TOKENIZER_BYTES)
    try:
        attempt(lambda: _loaded(path))
    except TrialError as error:
        raise ModelError(f"{path}: the tokenizer cannot be loaded: {error}; save the tokenizer again") from None
    return _loaded(path)


def _loaded(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(path))
    check_tokenizer(tokenizer)
    return tokenizer


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Raise ModelError if a token is too long, or if the decoder may lengthen a text too much or take too long."""
    if (longest := longest_token(tokenizer.get_vocab())) > MAX_TOKEN_CHARS:
        raise ModelError(
            f"the tokenizer has a token with {longest} characters (limit {MAX_TOKEN_CHARS}); use another tokenizer"
        )
    if tokenizer.decoder is not None:
        state: Any = tokenizer.decoder
        check_decoder(json.loads(state.__getstate__()))


def longest_token(vocabulary: dict[str, int]) -> int:
    """Return the number of characters of the longest token."""
    return max(map(len, vocabulary), default=0)


def check_decoder(decoder: dict[str, Any]) -> None:
    """Raise ModelError if a decoder may lengthen a text by more than the factor `MAX_GROWTH`, or may take too long.

    `decoder`: the decoder as described in tokenizer.json.
    """
    steps, waiting = [], [decoder]
    while waiting and len(steps) <= _MAX_STEPS:
        step = waiting.pop()
        steps.append(step)
        waiting += step["decoders"] if step["type"] == "Sequence" else []
    if len(steps) > _MAX_STEPS:
        raise ModelError(f"the tokenizer's decoder has more than {_MAX_STEPS} steps; use another tokenizer")
    growth = 1.0
    for step in steps:
        growth *= _growth(step)
        if growth > MAX_GROWTH:
            raise ModelError(
                f"the tokenizer's decoder can make a text more than {MAX_GROWTH} times as long (in step "
                f"{step['type']}); use another tokenizer"
            )


def _growth(step: dict[str, Any]) -> float:
    """Return the largest factor by which a decoding step lengthens a text. One extra character per token counts as the
    factor 2.
    """
    match step["type"]:
        case "Sequence":
            return 1
        case kind if kind in _NEVER_GROW:
            return 1
        case "WordPiece":
            return 2  # a space before each token
        case "BPEDecoder":
            return 1 if step["suffix"] else 2  # an empty suffix matches between all characters
        case "CTC":
            return 1 if step["word_delimiter_token"] else 2
        case "Replace":
            return _growth_by_replacing(step["pattern"], step["content"])
    raise ModelError(
        f"the tokenizer's decoder has a step of the unknown type {brief(step['type'])}; use another tokenizer"
    )


def _growth_by_replacing(pattern: dict[str, str], content: str) -> float:
    if (text := pattern.get("String")) is not None:
        return max(1, len(content) / len(text)) if text else 1 + len(content)
    regex = pattern["Regex"]
    if _REGEX_OPERATORS.intersection(regex.encode()):
        raise ModelError(
            f"the tokenizer's decoder uses the regular expression {brief(regex)}, which may be slow; use another "
            "tokenizer"
        )
    return 1 + len(content)
