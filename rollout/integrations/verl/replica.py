"""verl's rollout replica: one server, on the same node and device as one trainer rank."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from trueroll.errors import ConfigError

from .server import TruerollServer
from .settings import NAME, check_rollout


class TruerollReplica(RolloutReplica):
    """A replica that serves the policy. verl's reward models and teachers are not supported, because they need servers
    with other endpoints.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_rollout(self.config)
        if self.is_reward_model or self.is_teacher_model:
            raise ConfigError(
                f"rollout.name: {NAME} serves only the policy, not a reward model or a teacher; choose another engine "
                "for these models"
            )

    async def launch_servers(self) -> None:
        """Start the server and return when its worker is ready. Raise the error of a worker that cannot start."""
        [trainer] = self.workers
        node_id, device_id = await trainer.__ray_call__.remote(_place)
        platform = get_platform()
        # Ray hides all devices from an actor that requests none.
        shown = dict.fromkeys(platform.ray_noset_envvars(), "1") | {platform.visible_devices_envvar(): device_id}
        options = dict(
            name=server_name(self.replica_rank),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
            runtime_env={"env_vars": shown},
            max_concurrency=self.max_concurrency,
        )
        can_sleep = self.config.free_cache_engine and self.rollout_mode is RolloutMode.HYBRID
        server = ray.remote(TruerollServer).options(**options)
        self._server_handle = server.remote(self.config, self.model_config, platform.device_name, can_sleep)
        self.servers = [self._server_handle]
        self._server_address = await self._server_handle.address.remote()

    async def start_profile(self, **_: Any) -> None:
        """Do nothing: a worker has no profiler."""

    async def stop_profile(self) -> None:
        """Do nothing, see `start_profile`."""


def server_name(replica_rank: int) -> str:
    """Return the name under which Ray finds the server of a replica."""
    return f"{NAME}_server_{replica_rank}"


def _place(_: Any) -> tuple[str, str]:
    """Return the node id of the calling process, and the id of the accelerator that Ray assigned to this process."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()[get_platform().ray_resource_name()][0]
