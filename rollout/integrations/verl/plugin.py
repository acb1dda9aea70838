"""The plugin that `import verl` loads through the entry point `verl.plugins`. The plugin adds trueroll to verl's
registry of rollout adapters and to verl's registry of replicas.

verl imports plugins in each of its processes. If a plugin fails, verl continues without the plugin.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry


def _load_replica() -> type[RolloutReplica]:
    from .replica import TruerollReplica

    return TruerollReplica


_ROLLOUT_REGISTRY["trueroll", "async"] = f"{__package__}.adapter.TruerollAdapter"
RolloutReplicaRegistry.register("trueroll", _load_replica)
