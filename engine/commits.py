"""The weights that tokens are computed with: commits of the base weights, and named adapters with their own commits.

A named adapter is a LoRA adapter of the base weights. Requests select a named adapter by its name. Requests, sequences
and blocks refer to the objects of this module. The weights themselves are in `running.weights` and `running.adapters`.
Imports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False, slots=True)
class Commit:
    """The weights that are in use from one commit until the next commit. Two commits may have the same version of the
    weights.
    """

    version: int


@dataclass(eq=False, slots=True)
class Adapter:
    """A loaded adapter. A later commit under the same name changes this object.

    `commit`: the adapter's last commit. `epoch`: a positive number. Each commit of any adapter of an engine has a
    different epoch. KV that was computed in one epoch is never reused in another epoch.
    """

    name: str
    commit: Commit
    epoch: int
