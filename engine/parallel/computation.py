"""A step in flight on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..running.executor import LocalExecutor, StepResults
from ..running.step import Step
from .agreement import Agreement
from .exchange import RankError, Segment

_SECONDS_BETWEEN_CHECKS = 1e-4


class RankComputation:
    """One rank's part of a step in flight. The constructor computes or queues the rank's part with `executor`.

    `wait` checks the other ranks while it waits for a GPU, because a GPU that exchanges tensors with a rank that has
    ended never finishes.
    """

    def __init__(self, step: Step, executor: LocalExecutor, agreement: Agreement, segment: Segment) -> None:
        self._step, self._agreement, self._segment = step, agreement, segment
        self._images = [] if executor.encoder is None else executor.encoder.checksums(step.images)
        self._own = executor.compute(step)
        self._done: torch.cuda.Event | None = None
        if (device := executor.weights.model.device).type == "cuda":
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(device))

    def wait(self) -> StepResults:
        """Wait for this rank's results. Raise RankError if the checksums of the ranks differ, or if the GPU does not
        finish in time.
        """
        if self._done is not None:
            wait_until(self._done.query, self._segment)
        results = self._own.wait()
        self._agreement.add(self._step, results, self._images)
        return results


def wait_until(is_done: Callable[[], bool], segment: Segment) -> None:
    """Wait until `is_done` returns True, and check the other ranks meanwhile. Raise RankError after the time that
    `segment` allows.
    """
    end = time.monotonic() + segment.most_seconds
    while not is_done():
        segment.check()
        if time.monotonic() > end:
            raise RankError(f"a step did not end within {segment.most_seconds:.0f} s; a rank or its GPU hangs")
        time.sleep(_SECONDS_BETWEEN_CHECKS)
