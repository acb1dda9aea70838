"""trueroll: a rollout generation service for reinforcement learning, in which the same request gives the same bits.

`trueroll.rollout` has the clients, the worker and the publisher of weights, `trueroll.kernels.training` what a trainer
computes with, and `trueroll.errors` all errors.
"""

from importlib.metadata import version

__version__ = version("trueroll")
