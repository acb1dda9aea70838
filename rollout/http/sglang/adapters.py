"""SGLang's paths that load and unload named adapters."""

from __future__ import annotations

from collections.abc import Awaitable

from starlette.requests import Request
from starlette.responses import Response

from trueroll.errors import TruerollError

from ....weight_sync.payload.manifest import AdapterName
from ..adapters import Adapters, FolderPath, UnloadFields
from ..errors import as_http_error, error_body
from ..fields import Fields, checked, given
from ..lifecycle import changing
from ..wire import answer, read_json


class LoadFields(Fields):
    """Fields of `/load_lora_adapter`.

    `lora_name`: the name of the adapter; a request to `/generate` gives this name in its field `lora_path`.
    `lora_path`: here, a folder in PEFT's format. `pinned`: has no effect, because an adapter stays loaded until it is
    unloaded.
    """

    lora_name: AdapterName
    lora_path: FolderPath
    pinned: bool = False


class SglangAdapters:
    """Handlers of SGLang's paths for adapters."""

    def __init__(self, adapters: Adapters) -> None:
        self.watch = adapters.watch
        self._adapters = adapters

    @changing
    async def load(self, request: Request) -> Response:
        """Load an adapter from a folder. As in SGLang, a loaded adapter is not replaced."""
        own = checked(LoadFields, given(read_json(request), set(), {}))
        return await self._told(self._adapters.load(own.lora_name, own.lora_path, False, "unload it first"))

    @changing
    async def unload(self, request: Request) -> Response:
        own = checked(UnloadFields, given(read_json(request), set(), {}))
        return await self._told(self._adapters.unload(own.lora_name, 400))

    async def _told(self, change: Awaitable[None]) -> Response:
        """Return SGLang's answer to a change: whether it succeeded, and the version of each loaded adapter."""
        try:
            await change
        except TruerollError as error:
            told = as_http_error(error)
            return answer({"success": False, "error_message": str(told)} | error_body(told), told.status)
        versions = {name: str(version) for name, version in (await self.watch.adapters()).items()}
        return answer({"success": True, "error_message": None, "loaded_adapters": versions})
