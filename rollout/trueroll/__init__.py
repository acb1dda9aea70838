"""trueroll: a rollout generation service for reinforcement learning, in which the same request gives the same bits.

`trueroll.rollout` has the clients and the worker, `trueroll.weight_sync` the publisher of weights, and
`trueroll.kernels.training` what a trainer computes with.
"""

from importlib.metadata import version

__version__ = version("trueroll")
