"""slime's push in two calls: `/pull_weights` stages a weight version while the worker generates, and
`/update_weights_from_disk` commits this version. Without a pull, `/update_weights_from_disk` pushes the checkpoint in a
folder.

slime copies a version into the folder `local_checkpoint_dir` of each machine, and names this folder in
`/update_weights_from_disk`. This server neither reads nor writes `local_checkpoint_dir`: the path only identifies the
pull. If the pulled version is no longer staged, the commit is refused. The server does not push the content of
`local_checkpoint_dir` instead, because the folder may contain the checkpoint from which slime began.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from trueroll.errors import InvalidRequestError, PushError, TruerollError, brief

from ....weight_sync.payload.manifest import Version
from ..errors import as_http_error, error_body
from ..fields import Fields, checked, given
from ..lifecycle import Lifecycle, UpdateFields, changing, version_in
from ..staging import Staging
from ..wire import answer, read_json

IGNORED = {"torch_empty_cache", "flush_cache", "token_step"}
"""Fields of `/update_weights_from_disk` that never change the result. A push always drops cached blocks that were
computed with the old weights, so `flush_cache` has no effect.
"""
OFF: dict[str, tuple[Any, ...]] = {
    "load_format": ("auto", "safetensors"),
    "is_async": (False,),
    "keep_pause": (False,),
    "recapture_cuda_graph": (False,),
    "manifest": (),
}


class PullFields(Fields):
    """Fields of `/pull_weights`.

    `source_dir`: the folder in which the trainer writes a folder `weight_v000123` for each version. A URL is refused,
    because the front end itself would open the URL, and the front end has no list of allowed URLs. `target_version`:
    the version to stage. `local_checkpoint_dir`: the name under which `/update_weights_from_disk` refers to this pull.
    """

    local_checkpoint_dir: str
    source_dir: str
    target_version: Version


class FromDiskFields(Fields):
    """Fields of `/update_weights_from_disk`.

    `model_path`: `local_checkpoint_dir` of the last pull, or a folder with weights. `weight_version`: the version as a
    decimal number; None means the pulled version or, for a folder with weights, the served version plus 1.
    `abort_all_requests`: first end all running requests of this front end.
    """

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False


def _telling(handle: Callable[[Any, Request], Awaitable[str]]) -> Callable[[Any, Request], Awaitable[Response]]:
    """Decorator that converts the result of a handler to SGLang's answer for a push. The result is the message that the
    handler returns, or the error that the handler raises.
    """

    @wraps(handle)
    async def tell(self: Weights, request: Request) -> Response:
        try:
            message = await handle(self, request)
        except TruerollError as error:
            told = as_http_error(error)
            body = {"success": False, "message": str(told)} | error_body(told)
            return answer(body, told.status)
        return answer({"success": True, "message": message})

    return tell


class Weights:
    """Handlers of SGLang's paths for pushes."""

    def __init__(self, lifecycle: Lifecycle, staging: Staging) -> None:
        self.watch = lifecycle.watch
        self._lifecycle, self._staging = lifecycle, staging
        self._local_dir: str | None = None
        """The folder `local_checkpoint_dir` of the last pull."""

    @changing
    @_telling
    async def pull(self, request: Request) -> str:
        """Stage a version while the worker generates."""
        own = checked(PullFields, given(read_json(request), set(), {}))
        if "://" in own.source_dir:
            text = "source_dir: must be a folder, not a URL; mount or copy the chain to a folder"
            raise InvalidRequestError(text, field="source_dir")
        async with self._lifecycle.push_lock:
            self._local_dir = own.local_checkpoint_dir
            if (await self._lifecycle.report()).weight_version == own.target_version:
                await self._staging.note_served(own.source_dir, own.target_version)
                return f"weight version {own.target_version} is served already"
            await self._staging.stage(own.source_dir, own.target_version, reads_chain=True)
        return f"weight version {own.target_version} is staged"

    @changing
    @_telling
    async def update(self, request: Request) -> str:
        """Commit the pulled version, or push the weights in a folder."""
        own = checked(FromDiskFields, given(read_json(request), IGNORED, OFF))
        version = version_in(own.weight_version)
        async with self._lifecycle.push_lock:
            if own.abort_all_requests:
                await self._lifecycle.client.abort_all()
            if own.model_path != self._local_dir:
                await self._staging.drop()
                await self._lifecycle.push(UpdateFields(weight_dir=own.model_path, weight_version=version))
            elif self._staging.pulled is None:
                text = f"model_path: no version is staged for {brief(own.model_path)} any more; pull the version again"
                raise PushError(text, field="model_path")
            else:
                await self._staging.commit(version)
        return f"weight version {(await self._lifecycle.report()).weight_version} is served"
