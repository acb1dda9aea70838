"""What the device itself keeps of running sequences from step to step: state of sampling that depends on their tokens.

A step may be queued before the tokens of the step before it are seen. What it needs of them it finds here: each draw
names the lane of its sequence (`Draws.lanes`), and its token updates the row of that lane as soon as it is drawn. The
row of a lane means nothing until a draw has written it; what the host has seen travels with the step.

Owns, today, the last token of each lane. Whatever else of sampling follows from the tokens so far, such as the counts
of a penalty, belongs here as well.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...kernels.transfer import to_device
from .draws import NO_LANE, Draws


class LaneState:
    """`last_tokens`: int64 [capacity + 1], the last token that was drawn for each lane; the last element is of none."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.last_tokens = torch.zeros(capacity + 1, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def update(self, draws: Draws, token_ids: Tensor) -> None:
        """Take the tokens of draws, int64 [R], without waiting for them."""
        none = len(self.last_tokens) - 1
        lanes = np.where(draws.lanes == NO_LANE, none, draws.lanes)
        self.last_tokens.index_copy_(0, to_device(torch.from_numpy(lanes), token_ids.device), token_ids)
