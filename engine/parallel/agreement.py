"""Checks that all ranks compute the same steps and have the same results."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch

from ...kernels.ranks import Exchange
from ..running.executor import StepResults
from ..running.step import Step
from .exchange import RankError

STEPS = 64
"""The number of steps between two comparisons."""


class Agreement:
    """Every `STEPS` steps, compares checksums of the inputs (token ids, positions and rows of images), of the drawn
    tokens, and of the bits of their log-probs. `exchange`: connects all ranks; the first `num_drawing` ranks draw
    tokens.

    The results alone would not show that one rank has wrong inputs: the ranks share the sums and the head, so all ranks
    would draw the same wrong tokens.
    """

    def __init__(self, exchange: Exchange, num_drawing: int) -> None:
        self._exchange, self._num_drawing, self._steps = exchange, num_drawing, 0
        self._inputs = self._drawn = 0

    def add(self, step: Step, results: StepResults, images: Sequence[int] = ()) -> None:
        """Add a step and its results. All ranks must call this method after the same step. `images`: a checksum of each
        image in the step. Raise RankError if the checksums of the ranks differ.
        """
        for rows in (step.token_ids, step.positions, np.array(images, np.int64)):
            self._inputs = zlib.crc32(rows.tobytes(), self._inputs)
        if results.drawn is not None:
            tokens = np.array(results.drawn.token_ids, np.int64).tobytes()
            logprobs = np.array(results.drawn.logprobs, np.float64).tobytes()
            self._drawn = zlib.crc32(logprobs, zlib.crc32(tokens, self._drawn))
        self._steps += 1
        if self._steps % STEPS == 0:
            found = [each.tolist() for each in self._exchange.gather(torch.tensor([self._inputs, self._drawn]))]
            odd = [i for i, each in enumerate(found) if each[0] != found[0][0]]
            odd += [i for i, each in enumerate(found[: self._num_drawing]) if each[1] != found[0][1] and i not in odd]
            if odd:
                raise RankError(
                    f"ranks {odd} differ from rank 0 in inputs, tokens or log-probs of the last {STEPS} steps, up to "
                    f"step {self._steps}"
                )
