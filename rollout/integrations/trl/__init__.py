"""TRL's `GRPOTrainer` and `AsyncGRPOTrainer` on trueroll workers. `AlignedGRPOTrainer` is a `GRPOTrainer` with an
aligned model.

Requires the extra `trl`.
"""

from ..processor import QwenProcessor
from .aligned import AlignedGRPOTrainer
from .async_grpo import TruerollWeightTransfer, TruerollWorker
from .common import WeightsError
from .grpo import TruerollGeneration, rollout_func, trueroll_generation

__all__ = [
    "AlignedGRPOTrainer",
    "QwenProcessor",
    "TruerollGeneration",
    "TruerollWeightTransfer",
    "TruerollWorker",
    "WeightsError",
    "rollout_func",
    "trueroll_generation",
]
