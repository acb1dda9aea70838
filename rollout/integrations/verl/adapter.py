"""What verl calls a server adapter: in each process that has weights, the one who pushes them to a worker or a fleet.

Owns the publisher. Does not own the workers, which the server's actor does. Promises: `update_weights` returns when
they serve the new weights, under a version that they never had before.
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
    """Of the replica `replica_rank`, or of the one that belongs to this rank of the trainer."""

    is_leader_rank = True
    """Every rank has a replica of its own."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self._publisher = WeightPublisher("shared")
        self._found: Any = None

    async def resume(self, tags: list[str]) -> None:
        """Let the worker take the memory of `tags` again."""
        await (await self._server()).wake_up.remote(tags)

    async def release(self) -> None:
        """Let the worker sleep."""
        await (await self._server()).sleep.remote()

    async def update_weights(
        self,
        weights: Weights,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        """Push Hugging Face names with whole tensors. The version is `global_steps` + 1, since 0 is the checkpoint;
        without `global_steps`, the weights that the worker dropped in its sleep come again, under their own version.
        """
        _check_kind(wire_format, peft_config)
        server = await self._server()
        version = await server.version.remote() if global_steps is None else global_steps + 1
        pairs = _taken_on(asyncio.get_running_loop(), weights)
        await asyncio.to_thread(self._publisher.push, pairs, version, allow_older=global_steps is None)
        await server.set_version.remote(version)

    async def _server(self) -> Any:
        """verl makes its servers after its adapters."""
        if self._found is None:
            server: Any = ray.get_actor(server_name(self.replica_rank))
            address = await server.address.remote()
            connect_to(self._publisher, address)
            self._found = server
        return self._found


def _check_kind(wire_format: str, peft_config: Any) -> None:
    if wire_format != "named_tensors":
        raise ConfigError(
            f"checkpoint_engine.backend: expected one that sends whole tensors, found one that sends {wire_format}; "
            "choose another one"
        )
    if peft_config is not None:
        raise ConfigError(
            "model.lora: expected none, or one that is merged before it is sent, found an adapter, which a worker does "
            "not serve; set model.lora.merge=True"
        )


def _taken_on(loop: asyncio.AbstractEventLoop, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """For another thread, the pairs, of which each is made on the loop's: there verl has its device and its groups."""
    pairs = ensure_async_iterator(weights)

    async def take() -> tuple[str, torch.Tensor] | None:
        return await anext(pairs, None)

    while (pair := asyncio.run_coroutine_threadsafe(take(), loop).result()) is not None:
        yield pair
