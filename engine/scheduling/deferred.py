"""Tokens that samples have drawn but not received yet.

Most drawn tokens only extend the lists of tokens and log-probs of their sample and sequence, and change the edits of
the sample's next logits. Such a token does not end the sample, and is not streamed, decoded or recorded. With thousands
of samples, visiting each sample in every step takes longer than all other work of the host. `Deferred` therefore stores
the drawn tokens in arrays, and a sample receives several tokens at once. `Lanes` delivers the stored tokens before
anything reads the tokens of the sample or of its sequence.

Owns the stored tokens. Does not know samples and sequences.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

MOST = 16
"""The most tokens that are stored for a lane."""
_MOST_ENDING = 8  # samples with more ending tokens are not worth the search for these tokens in every step


class Deferred:
    """For each lane, the drawn tokens and log-probs that the lane's sample has not received yet. Each array has one
    element or row per lane.

    `is_open` (bool): whether tokens of the lane may be stored. `counts` (int64): the number of stored tokens.
    `num_open`: the number of open lanes.
    """

    def __init__(self, capacity: int) -> None:
        self.is_open, self.counts = np.zeros(capacity, np.bool_), np.zeros(capacity, np.int64)
        self.num_open = 0
        self._tokens, self._logprobs = np.zeros((capacity, MOST), np.int32), np.zeros((capacity, MOST), np.float32)
        self._ending: list[frozenset[int]] = [frozenset()] * capacity
        self._num_lanes = Counter[int]()  # for each token: in how many open lanes it may end the sample
        self._all_ending: np.ndarray | None = None  # the keys of `_num_lanes`, until they change

    def open(self, lane: int, ending: frozenset[int]) -> None:
        """Allow tokens of a lane to be stored. `ending`: the tokens that may end the lane's sample, which are not
        stored. Change nothing if the lane is open, or if `ending` has more than `_MOST_ENDING` tokens.
        """
        if self.is_open[lane] or len(ending) > _MOST_ENDING:
            return
        self.is_open[lane], self._ending[lane] = True, ending
        self.num_open += 1
        for token in ending:
            self._num_lanes[token] += 1
            if self._num_lanes[token] == 1:
                self._all_ending = None

    def close(self, lane: int) -> None:
        """Store no more tokens of a lane. All stored tokens of the lane must already have been taken."""
        assert not self.counts[lane], f"tokens of lane {lane} are not delivered"
        if self.is_open[lane]:
            self.is_open[lane] = False
            self.num_open -= 1
            for token in self._ending[lane]:
                self._num_lanes[token] -= 1
                if not self._num_lanes[token]:
                    del self._num_lanes[token]
                    self._all_ending = None

    def add(self, lanes: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, may_defer: np.ndarray) -> np.ndarray:
        """Store the next token of each lane in `lanes`, if possible. Return, as bool [N], which tokens are stored.

        `lanes`, `tokens`: int64 [N], with distinct lanes. `logprobs`: float32 [N]. `may_defer`: bool [N]. A token is
        not stored if `may_defer` is false, if its lane is closed or full, or if the token may end a sample.
        """
        stored = may_defer & self.is_open[lanes] & (self.counts[lanes] < MOST)
        if self._all_ending is None:
            self._all_ending = np.array([*self._num_lanes], np.int64)
        stored &= ~np.isin(tokens, self._all_ending)
        chosen = lanes[stored]
        places = chosen, self.counts[chosen]
        self._tokens[places], self._logprobs[places] = tokens[stored], logprobs[stored]
        self.counts[chosen] += 1
        return stored

    def take(self, lane: int) -> tuple[bytes, bytes]:
        """Remove and return the stored tokens (int32) and log-probs (float32) of a lane."""
        count, self.counts[lane] = int(self.counts[lane]), 0
        return self._tokens[lane, :count].tobytes(), self._logprobs[lane, :count].tobytes()

    def last(self, lane: int) -> int:
        """Return the last stored token of a lane, which must have one."""
        return int(self._tokens[lane, self.counts[lane] - 1])
