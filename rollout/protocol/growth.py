"""A sample while it grows, put together from deltas and cut into others: the worker does that for clients which read
slowly, the client for callers who take slowly.
"""

from __future__ import annotations

from .messages import Delta, FinishedSample, TopArrays

_TOPS = ("entropy", "token_ids", "logprobs")


class Growth:
    """A sample from its first token on, as far as `first` and what was put behind it say.

    `first` begins with token 0; its id and its index are the sample's.
    """

    def __init__(self, first: Delta) -> None:
        self.id, self.index = first.id, first.index
        self._has_logprobs, self._k = first.logprobs is not None, first.tops and first.tops.k
        self._columns = [(bytearray(content), width) for content, width in _columns(first)]

    @property
    def num_tokens(self) -> int:
        """How many are known."""
        return len(self._columns[0][0]) // 4

    def put(self, delta: Delta) -> bool:
        """Adds what is new in a delta. False, and nothing changes, if it differs from what is known or leaves tokens
        out.
        """
        found, num_known = _columns(delta), self.num_tokens - delta.start
        if num_known < 0 or [width for _, width in found] != [width for _, width in self._columns]:
            return False
        pairs = list(zip(self._columns, found, strict=True))
        if not all(_agree(known, new, width * delta.start) for (known, width), (new, _) in pairs):
            return False
        for (known, width), (new, _) in pairs:
            known += new[width * num_known :]
        return True

    def part(self, start: int, max_bytes: int | None = None) -> Delta:
        """The tokens from `start` on; with `max_bytes` only those which take no more than that, but at least one."""
        room = self.num_tokens if max_bytes is None else max(1, max_bytes // sum(width for _, width in self._columns))
        token_ids, *others = (bytes(known[width * start : width * (start + room)]) for known, width in self._columns)
        logprobs = others.pop(0) if self._has_logprobs else None
        tops = None if self._k is None else TopArrays(k=self._k, **dict(zip(_TOPS, others, strict=True)))
        return Delta(id=self.id, index=self.index, start=start, token_ids=token_ids, logprobs=logprobs, tops=tops)


def delta_of(sample: FinishedSample) -> Delta:
    """All of a finished sample, as one delta."""
    return Delta(
        id=sample.id,
        index=sample.index,
        start=0,
        token_ids=sample.token_ids,
        logprobs=sample.logprobs,
        tops=sample.tops,
    )


def _columns(delta: Delta) -> list[tuple[bytes, int]]:
    """The arrays of a delta, and the bytes that each has for a token."""
    columns = [(delta.token_ids, 4)] + ([] if delta.logprobs is None else [(delta.logprobs, 4)])
    if (tops := delta.tops) is not None:
        columns += [(tops.entropy, 4), (tops.token_ids, 4 * tops.k), (tops.logprobs, 4 * tops.k)]
    return columns


def _agree(known: bytearray, new: bytes, start: int) -> bool:
    """Whether what begins at byte `start` has the bytes that are known, as far as both go."""
    count = min(len(known) - start, len(new))
    return known[start : start + count] == new[:count]
