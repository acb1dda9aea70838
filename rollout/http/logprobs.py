"""Log-probs of tokens in the formats of the endpoints. Parsing the JSON numbers restores the exact float32 values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, islice
from math import inf
from typing import Any, TypeAlias

import numpy as np

from .answers import TokenBytes, rows
from .pieces import Piece

TokenName: TypeAlias = Callable[[int], str]
NEVER = -9999.0
"""The number that replaces -inf, which JSON cannot represent. A token that a sampling filter dropped has the log-prob
-inf.
"""


def name_by_id(token_id: int) -> str:
    """Return the name of a token for requests with `return_tokens_as_token_ids`."""
    return f"token_id:{token_id}"


def chat_logprobs(
    piece: Piece, name: TokenName, has_bytes: bool = True, has_ids: bool = False
) -> dict[str, Any] | None:
    """Return log-probs in the format of chat completions; None if the piece has no log-probs. `has_ids`: whether each
    entry also has the field `token_id`, as in vLLM's `/inference/v1/generate`.

    The entry of a token contains its log-prob, and also the most probable tokens with their log-probs.
    """
    if piece.logprobs is None:
        return None
    entries = _chat_entries(piece, partial(_entry, name, has_bytes, has_ids))
    return {"content": rows(entries, len(piece.token_ids), piece.num_entries_by_token)}


def _chat_entries(piece: Piece, told: Callable[[int, float], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    assert piece.logprobs is not None
    tops = _tops(piece) or ([] for _ in piece.token_ids)
    for token_id, logprob, best in zip(piece.token_ids, numbers(piece.logprobs), tops, strict=True):
        entry = told(token_id, logprob)
        entry["top_logprobs"] = [told(top, value) for top, value in best]
        yield entry


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Iterable[list[tuple[int, float]] | None] | None,
    name: TokenName,
    first_offset: int,
    width: int,
) -> dict[str, Any]:
    """Return log-probs in the format of completions.

    The format has four columns: tokens, log-probs of the tokens, most probable tokens plus the drawn token, and text
    offsets. A text offset is `first_offset` plus the total length of the names of all earlier tokens. `width`: number
    of log-probs per token, see `Piece.num_entries_by_token`.
    """
    lens = accumulate((len(name(token_id)) for token_id in token_ids), initial=first_offset)
    told = None if tops is None else (_by_name(*each, name) for each in zip(tops, token_ids, logprobs, strict=True))
    count = len(token_ids)
    return {
        "tokens": rows(map(name, token_ids), count),
        "token_logprobs": list(logprobs),
        "top_logprobs": None if told is None else rows(told, count, width),
        "text_offset": rows(islice(lens, count), count),
    }


def piece_columns(piece: Piece) -> tuple[list[float], Iterator[list[tuple[int, float]]] | None]:
    """Return the log-probs of a piece, and the most probable tokens at each position."""
    return [] if piece.logprobs is None else numbers(piece.logprobs), _tops(piece)


def top_rows(token_ids: np.ndarray | None, logprobs: np.ndarray | None) -> Iterator[list[tuple[int, float]]] | None:
    """Return an iterator that yields, for each position, the most probable tokens with their log-probs, beginning with
    the most probable token.

    Return None if the request did not ask for the most probable tokens.
    """
    if token_ids is None or logprobs is None or token_ids.shape[1] == 0:
        return None
    rows = zip(token_ids, logprobs, strict=True)
    return (list(zip(ids.tolist(), numbers(row), strict=True)) for ids, row in rows)


def _tops(piece: Piece) -> Iterator[list[tuple[int, float]]] | None:
    return top_rows(piece.top_token_ids, piece.top_logprobs)


def numbers(logprobs: np.ndarray) -> list[float]:
    """Return log-probs as numbers for JSON, with `NEVER` in place of -inf."""
    return [NEVER if logprob == -inf else logprob for logprob in logprobs.tolist()]


def chat_logprobs_bytes(num_top: int | None, has_bytes: bool = True) -> int:
    """Return the estimated size of `chat_logprobs` per token, in bytes.

    `num_top`: number of most probable tokens; None means no log-probs at all.
    """
    entry = 48 + TokenBytes.ID + TokenBytes.TEXT + TokenBytes.NUMBER + (2 * TokenBytes.TEXT if has_bytes else 4)
    return 0 if num_top is None else 20 + (1 + num_top) * entry


def completion_logprobs_bytes(num_top: int | None) -> int:
    """Return the estimated size of `completion_logprobs` per token, in bytes.

    `num_top`: number of most probable tokens; None means no log-probs at all.
    """
    entry = TokenBytes.TEXT + TokenBytes.NUMBER + 4
    return 0 if num_top is None else entry + TokenBytes.ID + (num_top + 1) * entry * (num_top > 0)


def _entry(name: TokenName, has_bytes: bool, has_id: bool, token_id: int, logprob: float) -> dict[str, Any]:
    text = name(token_id)
    told = {"token": text, "logprob": logprob, "bytes": list(text.encode()) if has_bytes else None}
    return told | {"token_id": token_id} if has_id else told


def _by_name(
    tops: list[tuple[int, float]] | None, token_id: int, logprob: float | None, name: TokenName
) -> dict[str, float] | None:
    """Return a dictionary from token name to log-prob, for the most probable tokens and the drawn token.

    If several tokens have the same name, the result contains only the log-prob of the most probable token with this
    name.
    """
    if tops is None or logprob is None:
        return None
    found: dict[str, float] = {}
    for each, value in [*tops, (token_id, logprob)]:
        found.setdefault(name(each), value)
    return found
