"""Weights that new weights may lack: those of a module for multi-token prediction (MTP), on which no sample depends.

transformers drops the module when it loads a model, so most trainers cannot push it. The worker then keeps its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...kernels.specs import MTP_PREFIX


class OptionalWeights:
    """The optional weights `names` of a model. Owns what is known about them, and their values during a sleep."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names, self._is_whole, self._is_stale = names, True, False
        self._kept: dict[str, Tensor] = {}

    @property
    def names(self) -> frozenset[str]:
        """The weights that the next commit may lack, but only all of them together.

        Empty if an in-place staging was dropped after it had written to some of the weights.
        """
        return self._names if self._is_whole else frozenset()

    @property
    def note(self) -> str:
        """Which weights the last commit did not replace; empty if it replaced all weights."""
        if not self._is_stale:
            return ""
        return f"the last push had no {MTP_PREFIX}* tensors, so the MTP module keeps its earlier weights"

    def note_overwriting(self) -> None:
        """Record that a staging overwrites live values."""
        self._is_whole = False

    def note_commit(self, were_staged: bool) -> None:
        """Record a commit. `were_staged`: whether it replaced these weights."""
        self._is_stale = bool(self._names) and not were_staged
        self._is_whole = True

    def keep(self, tensors: Mapping[str, Any]) -> None:
        """Copy the live values to the host."""
        self._kept = {name: tensors[name].to_dense().to("cpu", copy=True) for name in self._names}

    def put_back(self, tensors: Mapping[str, Any]) -> None:
        """Copy the kept values to the live weights."""
        for name, tensor in self._kept.items():
            tensors[name].copy_(tensor)
        self._kept = {}
