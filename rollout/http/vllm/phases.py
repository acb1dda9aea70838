"""vLLM's update of weights in phases, and the fetch that SkyRL adds before `/start_weight_update`.

`/fetch_weights` stages a version of a chain of deltas while the worker generates. `/start_weight_update` begins an
update. `/update_weights` names the new weights: the staged version, or a folder with a checkpoint.
`/finish_weight_update` makes the worker serve the new weights.

Owns: the update in progress. Promises: until the last phase of an update, the worker serves its previous weights. If a
phase fails, the update is over. The first phase of a new trainer, `/init_weight_transfer_engine`, ends an update that
an earlier trainer left behind.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from trueroll.errors import IllegalStateError, PushError, brief

from ..adapters import Adapters
from ..errors import HttpError
from ..fields import checked, given
from ..lifecycle import Lifecycle, UpdateFields, changing, queries_of, version_in
from ..staging import Pulled, Staging
from ..wire import answer, read_json
from .fields import FinishFields, LoadFields, NoFields, PathInfo, VersionInfo, check_init, read_update


@dataclass
class _Update:
    """An update that has begun. `named`: the version or the folder that the worker will serve; None before
    `/update_weights`.
    """

    named: VersionInfo | PathInfo | None = None


class Phases:
    """Handlers of vLLM's and SkyRL's paths for updates of weights."""

    def __init__(self, lifecycle: Lifecycle, staging: Staging, adapters: Adapters) -> None:
        self.watch = lifecycle.watch
        self._lifecycle, self._staging, self._adapters = lifecycle, staging, adapters
        self._update: _Update | None = None

    async def init(self, request: Request) -> Response:
        """Accept a trainer if the updates need no connection to the trainer."""
        check_init(read_json(request))
        self._update = None
        return answer({"message": "Weight transfer initialized"})

    @changing
    async def shut_down(self, request: Request) -> Response:
        """End the update in progress, and drop the staged version."""
        checked(NoFields, read_json(request))
        self._update = None
        async with self._lifecycle.push_lock:
            await self._staging.drop()
        return answer({"message": "Weight transfer shut down"})

    @changing
    async def fetch(self, request: Request) -> Response:
        """Stage a version while the worker generates. The worker reads the chain of deltas; the front end does not read
        it. Fetching the version that this front end staged or served last is a no-op.
        """
        own = checked(VersionInfo, given(read_json(request), set(), {}))
        version, place = own.target_version, own.place
        async with self._lifecycle.push_lock:
            is_ours = self._staging.pulled == Pulled(place, version, is_served=True)
            if not is_ours or (await self._lifecycle.report()).weight_version != version:
                await self._staging.stage(place, version, reads_chain=False)
        return answer({"status": "ok", "target_version": version})

    async def start(self, request: Request) -> Response:
        """Begin an update."""
        checked(NoFields, read_json(request))
        if self._update is not None:
            raise IllegalStateError("start_weight_update: an update has begun already; call /finish_weight_update")
        self._update = _Update()
        return answer({"message": "Weight update started"})

    @changing
    async def update(self, request: Request) -> Response:
        """Record which weights the update will serve: a fetched version, or a checkpoint. A request without
        `update_info` is not a phase: it makes the worker serve the weights in a folder at once.
        """
        queries_of(request, {})
        body = read_json(request)
        if "update_info" not in body:
            return await self._lifecycle.serve_folder(body)
        update, self._update = self._update, None
        if update is None:
            raise IllegalStateError("update_weights: no update has begun; call /start_weight_update first")
        if update.named is not None:
            raise IllegalStateError(
                "update_weights: an update serves one version, and this is a second; call /start_weight_update again"
            )
        named = read_update(body)
        if isinstance(named, VersionInfo):
            self._check_staged(named)
        self._update = _Update(named)
        return answer({"message": "Weights updated"})

    @changing
    async def finish(self, request: Request) -> Response:
        """Make the worker serve the weights that the update named."""
        own = checked(FinishFields, given(read_json(request), set(), {}))
        update, self._update = self._update, None
        version = version_in(own.weight_version)
        if update is None or update.named is None:
            text = "finish_weight_update: no update has named weights; call /start_weight_update and /update_weights"
            raise IllegalStateError(text)
        async with self._lifecycle.push_lock:
            if isinstance(update.named, PathInfo):
                await self._staging.drop()
                await self._lifecycle.push(UpdateFields(weight_dir=update.named.path, weight_version=version))
            else:
                self._check_staged(update.named)
                await self._staging.commit(update.named.target_version if version is None else version)
        return answer({"message": "Weight update finished", "weight_version": await self._served()})

    async def weight_info(self, request: Request) -> Response:
        queries_of(request, {})
        return answer({"weight_version": await self._served()})

    async def world_size(self, request: Request) -> Response:
        """Return the number of the worker's ranks."""
        queries_of(request, {"include_dp": ("true", "false")})
        engine = (await self._lifecycle.report()).engine
        if engine is None:
            raise HttpError(503, "worker: loads its model; try again later", code="unavailable")
        return answer({"world_size": engine["tensor_parallel_size"] * engine["pipeline_parallel_size"]})

    async def abort(self, request: Request) -> Response:
        """End all requests of this front end. The answers of ended requests contain the tokens generated so far."""
        checked(NoFields, given(read_json(request), set(), {"request_ids": ([],)}))
        return answer({"status": "aborted", "aborted": await self._lifecycle.client.abort_all()})

    @changing
    async def load_adapter(self, request: Request) -> Response:
        """Load or replace an adapter from a folder."""
        own = checked(LoadFields, given(read_json(request), set(), {}))
        await self._adapters.load(own.lora_name, own.lora_path, True, "")
        return answer({"status": "ok", "lora_name": own.lora_name})

    async def finish_session(self, request: Request) -> Response:
        """Accept SkyRL's notification that a trajectory has ended, and ignore it. The notification is meant for SkyRL's
        router.
        """
        return answer({"status": "ok"})

    def _check_staged(self, named: VersionInfo) -> None:
        """Raise PushError if the named version is not the version that was fetched last."""
        place, pulled = named.place, self._staging.pulled
        if pulled is None or (pulled.place, pulled.version) != (place, named.target_version):
            raise PushError(
                f"target_version: version {named.target_version} of {brief(place)} is not staged; call /fetch_weights "
                "first",
                field="target_version",
                value=named.target_version,
            )

    async def _served(self) -> str:
        return str((await self._lifecycle.report()).weight_version)
