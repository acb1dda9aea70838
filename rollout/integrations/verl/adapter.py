"""verl's server adapter: pushes the trainer's weights from each trainer process to a worker or a fleet.

Owns: the publisher. Does not own: the workers, which belong to the server's actor. Guarantees: `update_weights` returns
once the workers serve the pushed weights.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable, Iterable, Iterator
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from trueroll.errors import ConfigError

from ...publisher.publisher import WeightPublisher, connect_to
from .replica import server_name

Weights = Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]]


class TruerollAdapter(BaseRollout):
    """The adapter of replica `replica_rank`. By default, `replica_rank` is the rank of this trainer process."""

    is_leader_rank = True
    """Every rank has its own replica."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self._publisher = WeightPublisher("shared")
        self._found: Any = None

    async def resume(self, tags: list[str]) -> None:
        """Let the worker reallocate the kinds of memory that `tags` names."""
        await (await self._server()).wake_up.remote(tags)

    async def release(self) -> None:
        """Put the worker to sleep."""
        await (await self._server()).sleep.remote()

    async def update_weights(
        self,
        weights: Weights,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        """Push whole tensors with their Hugging Face names.

        The version is `global_steps` + 1, because version 0 is the checkpoint. Without `global_steps`, the push brings
        back the weights that the worker dropped when it went to sleep, and keeps their version.
        """
        _check_kind(wire_format, peft_config)
        server = await self._server()
        version = await server.version.remote() if global_steps is None else global_steps + 1
        pairs = _taken_on(asyncio.get_running_loop(), weights)
        await asyncio.to_thread(self._publisher.push, pairs, version, allow_older=global_steps is None)
        await server.set_version.remote(version)

    async def _server(self) -> Any:
        """Return the server's actor. The first call looks up the server's actor, because verl creates servers after
        adapters.
        """
        if self._found is None:
            server: Any = ray.get_actor(server_name(self.replica_rank))
            address = await server.address.remote()
            connect_to(self._publisher, address)
            self._found = server
        return self._found


def _check_kind(wire_format: str, peft_config: Any) -> None:
    if wire_format != "named_tensors":
        raise ConfigError(
            f"checkpoint_engine.backend: this backend sends {wire_format}, but a worker needs whole tensors; choose "
            "another backend"
        )
    if peft_config is not None:
        raise ConfigError("model.lora: unmerged adapters are not supported; set model.lora.merge=True")


def _taken_on(loop: asyncio.AbstractEventLoop, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the pairs (name, tensor) of `weights` on the calling thread. The pairs are created on the thread of `loop`,
    because verl has set up its device and its process groups on that thread.
    """
    pairs = ensure_async_iterator(weights)

    async def take() -> tuple[str, torch.Tensor] | None:
        return await anext(pairs, None)

    while (pair := asyncio.run_coroutine_threadsafe(take(), loop).result()) is not None:
        yield pair
