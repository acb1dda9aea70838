"""What `top_logprobs` records beside each token: the entropy and the most probable tokens of its distribution."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Top(NamedTuple):
    """What `top_logprobs` asks for of one token; `token_ids` int32 [k] and `logprobs` float32 [k] as their bytes."""

    entropy: float
    token_ids: bytes
    logprobs: bytes


@dataclass(eq=False, slots=True)
class TopColumns:
    """What `top_logprobs` asks for, of the tokens that a sample has so far: the most probable `k` for each."""

    k: int
    entropy: array[float] = field(default_factory=lambda: array("f"))
    token_ids: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)

    def append(self, top: Top) -> None:
        self.entropy.append(top.entropy)
        self.token_ids += top.token_ids
        self.logprobs += top.logprobs

    def arrays(self, start: int = 0) -> dict[str, np.ndarray]:
        """The fields of `SampleOutput`, for the tokens from `start` on."""
        shape = len(self.entropy) - start, self.k
        return {
            "entropy": np.array(self.entropy[start:], np.float32),
            "top_token_ids": np.frombuffer(self.token_ids[4 * self.k * start :], np.int32).reshape(shape).copy(),
            "top_logprobs": np.frombuffer(self.logprobs[4 * self.k * start :], np.float32).reshape(shape).copy(),
        }
