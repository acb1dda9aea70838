"""The paths `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, which load and unload named adapters as in vLLM.

The front end never opens the folder of the adapter. The worker reads the folder of the adapter if the worker's settings
for pushes allow this. The front end keeps no list of adapters, because pushes and other front ends also load and unload
adapters. Instead, `Watch` asks the worker which adapters are loaded.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from trueroll.errors import InvalidRequestError, brief

from ...weight_sync.payload.manifest import MAX_PATH_CHARS, AdapterName
from .errors import HttpError
from .fields import Fields, checked, given
from .lifecycle import Lifecycle, changing
from .model import ServedModel
from .wire import read_json


def _absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise ValueError(f"must be an absolute path on the worker's machine (got {brief(path)})")
    return path


FolderPath = Annotated[str, Field(max_length=MAX_PATH_CHARS), AfterValidator(_absolute)]


class LoadFields(Fields):
    """Fields of `/v1/load_lora_adapter`.

    `lora_name`: the name of the adapter; requests that use the adapter give this name as `model`. `lora_path`: a folder
    in PEFT's format. `load_inplace`: whether to replace a loaded adapter with the same name.
    """

    lora_name: AdapterName
    lora_path: FolderPath
    load_inplace: bool = False


class UnloadFields(Fields):
    """Fields of `/v1/unload_lora_adapter`."""

    lora_name: AdapterName


class Adapters:
    """Handlers that load and unload named adapters. `served`: the served model; no adapter may have the same name as
    this model.
    """

    def __init__(self, served: ServedModel, lifecycle: Lifecycle) -> None:
        self.watch = lifecycle.watch
        self._served, self._lifecycle = served, lifecycle

    @changing
    async def load_route(self, request: Request) -> Response:
        own = checked(LoadFields, given(read_json(request), set(), {"is_3d_lora_weight": (False,)}))
        await self.load(own.lora_name, own.lora_path, own.load_inplace, "set load_inplace to true to replace it")
        return PlainTextResponse(f"Success: LoRA adapter {own.lora_name!r} added successfully.")

    @changing
    async def unload_route(self, request: Request) -> Response:
        own = checked(UnloadFields, given(read_json(request), {"lora_int_id"}, {}))
        await self.unload(own.lora_name, 404)
        return PlainTextResponse(f"Success: LoRA adapter {own.lora_name!r} removed successfully.")

    async def load(self, name: str, path: str, replaces: bool, advice: str) -> None:
        """Load an adapter.

        `replaces`: whether to replace a loaded adapter with the same name. If `replaces` is false and an adapter with
        the same name is loaded, raise HttpError; its text ends with `advice`. Raise PushError if the worker refuses the
        folder or the adapter.
        """
        if name == self._served.name:
            raise _refused(name, "is the name of the served model; give the adapter another name")
        async with self._lifecycle.push_lock:
            if not replaces and name in await self.watch.adapters():
                raise _refused(name, f"has already been loaded; {advice}")
            await self._lifecycle.client.load_adapter(name, path)

    async def unload(self, name: str, status: int) -> None:
        """Unload an adapter. Raise HttpError with `status` if the adapter is not loaded."""
        try:
            await self._lifecycle.client.unload_adapter(name)
        except InvalidRequestError:
            raise _refused(name, "cannot be found; no adapter with this name is loaded", status) from None


def _refused(name: str, why: str, status: int = 400) -> HttpError:
    code = "model_not_found" if status == 404 else "invalid_request"
    return HttpError(status, f"lora_name: the adapter {brief(name)} {why}", field="lora_name", value=name, code=code)
