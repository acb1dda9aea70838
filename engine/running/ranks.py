"""The places of an engine's ranks, and how a rank reaches the other ranks.

A rank computes a part of each layer of one stage. Rank 0, the leader, belongs to the last stage, because the last stage
draws the tokens.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from ...kernels.ranks import Exchange, Rank
from ...kernels.specs import Stage
from ..config import EngineConfig


class Topology(NamedTuple):
    """The places of all ranks: each of `stages` stages has `tensor` ranks. The last stage has the ranks with the lowest
    indices.
    """

    tensor: int
    stages: int

    @classmethod
    def of(cls, config: EngineConfig) -> Topology:
        """Return the topology that a configuration asks for."""
        return cls(config.tensor_parallel_size, config.pipeline_parallel_size)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.tensor * self.stages

    @property
    def text(self) -> str:
        """The numbers of ranks and stages, such as `4 ranks in 2 stages`."""
        return f"{self.size} ranks" + (f" in {self.stages} stages" if self.stages > 1 else "")

    def stage(self, index: int) -> Stage:
        """Return the stage of a rank."""
        return Stage(self.stages - 1 - index // self.tensor, self.stages)

    def rank(self, index: int) -> Rank:
        """Return the index of a rank among the ranks of its stage."""
        return Rank(index % self.tensor, self.tensor)

    def of_stage(self, index: int) -> list[int]:
        """Return the ranks in the stage of a rank, itself included, in ascending order."""
        first = index - index % self.tensor
        return [*range(first, first + self.tensor)]

    def before(self, index: int) -> int | None:
        """Return the rank from which the rank `index` receives hidden states, or None in the first stage."""
        return None if self.stage(index).is_first else index + self.tensor

    def after(self, index: int) -> int | None:
        """Return the rank to which the rank `index` sends hidden states, or None in the last stage."""
        return None if self.stage(index).is_last else index - self.tensor


class Link(Protocol):
    """Moves tensors from a rank to the rank of the next stage."""

    def send(self, x: Tensor) -> None:
        """Send a tensor."""
        ...

    def receive(self, out: Tensor) -> None:
        """Wait for the next tensor from the other rank, and copy it to `out`, which has the same shape and dtype."""
        ...


class Links(NamedTuple):
    """How a rank reaches the other ranks.

    `everyone`: the exchange with all ranks. `stage`: the exchange with the ranks of this rank's stage. `before`,
    `after`: the links to the rank of the previous stage and to the rank of the next stage, if there is one.
    `num_sharers`: the number of ranks that share the memory of this rank's device. `can_capture`: whether a CUDA graph
    can capture the exchanges of a stage's ranks.
    """

    topology: Topology
    everyone: Exchange
    stage: Exchange
    before: Link | None = None
    after: Link | None = None
    num_sharers: int = 1
    can_capture: bool = False
