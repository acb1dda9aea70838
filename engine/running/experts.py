"""Routed experts of a step: rows and counts, which are copied to the host asynchronously.

A row lists the recorded experts of one token of the step. The counts are the numbers of tokens routed to each expert so
far. This module owns the counts on the device, and does not synchronize the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.specs import DecoderSpec
from ..outputs.routes import RouteFormat
from .host_copies import HostCopies

_ID_TYPES = {1: torch.uint8, 2: torch.uint16}


@dataclass(frozen=True)
class StepRoutes:
    """The routed experts of a step.

    `rows`: [M, layers, top_k], the rows of the step's tokens; None if the step records no experts. `counts`: int64
    [layers, num_experts], the number of tokens routed to each expert up to and including this step.
    """

    rows: HostCopies | None
    counts: HostCopies


class ExpertCounts:
    """Counts the tokens routed to each expert of a model."""

    def __init__(self, format: RouteFormat, device: torch.device) -> None:
        self.format = format
        self._counts = torch.zeros(format.layers, format.num_experts, dtype=torch.int64, device=device)
        self._one = torch.ones(1, 1, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def take(self, routes: Tensor, counted: Tensor | None, is_recorded: bool) -> StepRoutes:
        """Count the tokens that a step routes to each expert, and start to copy the results to the host.

        `routes`: the chosen experts, int32 [layers, M, top_k]. `counted`: the int64 indices of the tokens to count;
        None means all tokens. `is_recorded`: whether to return the rows of the step's tokens.
        """
        chosen = (routes if counted is None else routes[:, counted]).flatten(1).long()
        self._counts.scatter_add_(1, chosen, self._one.expand_as(chosen))
        rows = HostCopies([self._rows(routes)]) if is_recorded else None
        return StepRoutes(rows, HostCopies([self._counts]))

    def _rows(self, routes: Tensor) -> Tensor:
        id_type = _ID_TYPES[self.format.dtype.itemsize]
        return routes.transpose(0, 1).to(id_type, memory_format=torch.contiguous_format)


def route_format(spec: DecoderSpec) -> RouteFormat | None:
    """Return the route format of a model, or None for a model without experts."""
    if not (experts := spec.experts):
        return None
    return RouteFormat(len(experts), experts[0].top_k, experts[0].num_experts)
