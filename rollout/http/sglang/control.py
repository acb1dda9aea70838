"""SGLang's paths that control the worker (abort, pause, continue, memory), and SGLang's paths that are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ....engine.request import Tag
from ... import protocol
from ..errors import HttpError
from ..fields import Fields, checked, given, unsupported
from ..lifecycle import Lifecycle, changing
from ..wire import answer, read_json
from .generate import OpenNames

_DISK = "write a checkpoint to a folder and call /update_weights_from_disk, or publish deltas and call /pull_weights"
REFUSED = {
    **dict.fromkeys(
        ("/update_weights_from_tensor", "/update_weights_from_ipc"), f"needs CUDA IPC and unpickles its body; {_DISK}"
    ),
    **dict.fromkeys(
        ("/init_weights_update_group", "/destroy_weights_update_group", "/update_weights_from_distributed"),
        f"needs an NCCL group with the trainer; {_DISK}",
    ),
    "/load_lora_adapter_from_tensors": (
        "unpickles its body; write the adapter to a folder in PEFT's format and call /load_lora_adapter"
    ),
}
"""SGLang's paths that are refused, with the reason and the path to use instead."""


class AbortFields(Fields):
    """Fields of `/abort_request`: end the requests with the name `rid`, or all requests of this front end."""

    rid: Annotated[str, Field(max_length=256)] = ""
    abort_all: bool = False


class PauseFields(Fields):
    """Fields of `/pause_generation`. `mode`: what happens to running requests: they end (`abort`), or continue after
    the pause (`retract`).
    """

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueFields(Fields):
    """Fields of `/continue_generation`. `torch_empty_cache`: has no effect."""

    torch_empty_cache: bool = True


class MemoryFields(Fields):
    """Fields of `/release_memory_occupation` and `/resume_memory_occupation`. `tags`: None means all memory. The memory
    of CUDA graphs is released and allocated together with the weights.
    """

    tags: Annotated[list[Literal["weights", "kv_cache", "cuda_graph"]], Field(fail_fast=True)] | None = None

    @property
    def named(self) -> tuple[Tag, ...]:
        if self.tags is None:
            return protocol.ALL_TAGS
        return tuple(dict.fromkeys(tag for tag in self.tags if tag != "cuda_graph"))


class Control:
    """Handlers of SGLang's paths for the worker as a whole. `names`: the names of open requests."""

    def __init__(self, lifecycle: Lifecycle, names: OpenNames) -> None:
        self.watch = lifecycle.watch
        self._lifecycle, self._client, self._names = lifecycle, lifecycle.client, names

    async def abort(self, request: Request) -> Response:
        """End requests. The answers of ended requests contain the tokens generated so far. If a body has neither a name
        nor `abort_all`, do nothing, as SGLang does.
        """
        own = checked(AbortFields, given(read_json(request), set(), {"prefix": (False,)}))
        if own.abort_all:
            await self._client.abort_all()
        else:
            await self._client.abort(self._names.ids_of(own.rid), missing_ok=True)
        return Response(status_code=200)

    @changing
    async def pause(self, request: Request) -> Response:
        """Stop generating until `/continue_generation`."""
        own = checked(PauseFields, given(read_json(request), set(), {}))
        if own.mode == "in_place":
            expected = "'abort' or 'retract'; to keep the KV of running requests, set in_flight in /update_weights"
            raise unsupported("mode", expected, own.mode)
        await self._client.pause()
        if own.mode == "abort":
            await self._client.abort_all()
        return answer({"message": "generation is paused", "status": "ok"})

    @changing
    async def resume(self, request: Request) -> Response:
        """End a pause."""
        checked(ContinueFields, given(read_json(request), set(), {}))
        await self._client.resume()
        return answer({"message": "generation continues", "status": "ok"})

    @changing
    async def release(self, request: Request) -> Response:
        """Release memory. A copy of the weights stays in host memory. Running requests continue once the memory is
        allocated again.
        """
        own = checked(MemoryFields, given(read_json(request), set(), {}))
        return _told(await self._client.sleep(level=1, tags=own.named, in_flight="recompute"))

    @changing
    async def allocate(self, request: Request) -> Response:
        """Allocate released memory again."""
        own = checked(MemoryFields, given(read_json(request), set(), {}))
        return _told(await self._client.wake_up(own.named))

    @changing
    async def flush(self, request: Request) -> Response:
        """Drop all cached prefixes. Raise HttpError while requests run, because SGLang's clients use this call to wait
        until the server is idle.
        """
        health = await self._lifecycle.report()
        if health.state == "ready" and (num_open := health.requests["open"]):
            text = f"flush_cache: {num_open} requests are running; wait, end them, or pause generation"
            raise HttpError(400, text, value=num_open, code="invalid_request")
        await self._client.invalidate_prefix_cache()
        return answer({"message": "the prefix cache is empty", "status": "ok"})


def _told(status: protocol.Status) -> Response:
    told: dict[str, Any] = {"state": status.state, "weight_version": status.weight_version}
    return answer(told)
