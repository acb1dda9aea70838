"""trueroll: a rollout generation service for reinforcement learning. The same request gives the same bits.

- `trueroll.rollout`: clients, worker and weight publisher
- `trueroll.kernels.training`: the operations for a trainer
- `trueroll.errors`: all exceptions
"""

from importlib.metadata import version

__version__ = version("trueroll")
