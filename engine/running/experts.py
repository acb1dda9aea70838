"""Which experts a step chose, on its way to the host: the rows of its tokens where somebody records them, and how many
tokens each expert has had so far. Owns those counts, on the device. Waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.specs import DecoderSpec
from ...kernels.transfer import HostCopies
from ..outputs.routes import RouteFormat

_ID_TYPES = {1: torch.uint8, 2: torch.uint16}


@dataclass(frozen=True)
class StepRoutes:
    """`rows`: those of the step's tokens, [M, layers, top_k], as a record has them; None if nobody records them.
    `counts`: int64 [layers, num_experts], the tokens that each expert of a layer was given, this step's included.
    """

    rows: HostCopies | None
    counts: HostCopies


class ExpertCounts:
    """Takes what the steps of a model chose."""

    def __init__(self, format: RouteFormat, device: torch.device) -> None:
        self.format = format
        self._counts = torch.zeros(format.layers, format.num_experts, dtype=torch.int64, device=device)
        self._one = torch.ones(1, 1, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def take(self, routes: Tensor, is_recorded: bool) -> StepRoutes:
        """`routes`: int32 [layers, M, top_k], of a step. `is_recorded`: somebody wants the rows of its tokens."""
        chosen = routes.flatten(1).long()
        self._counts.scatter_add_(1, chosen, self._one.expand_as(chosen))
        rows = HostCopies([self._rows(routes)]) if is_recorded else None
        return StepRoutes(rows, HostCopies([self._counts]))

    def _rows(self, routes: Tensor) -> Tensor:
        id_type = _ID_TYPES[self.format.dtype.itemsize]
        return routes.transpose(0, 1).to(id_type, memory_format=torch.contiguous_format)


def route_format(spec: DecoderSpec) -> RouteFormat | None:
    """That of a model; None without experts."""
    if not (experts := spec.experts):
        return None
    return RouteFormat(len(experts), experts[0].top_k, experts[0].num_experts)
