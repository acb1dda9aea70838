"""The information that SGLang's routers and trainers request about a server: sizes, model, weight version and load."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ... import protocol
from ..errors import HttpError
from ..guard import Counters
from ..lifecycle import Lifecycle
from ..model import ServedModel
from ..wire import answer


class Info:
    """Handlers of SGLang's paths about the server. `counters`: counts the open requests of this front end."""

    def __init__(self, served: ServedModel, lifecycle: Lifecycle, counters: Counters) -> None:
        self._served, self._lifecycle, self._counters = served, lifecycle, counters

    async def server(self, request: Request) -> Response:
        """Return the settings that routers read, and that slime and miles compare with their own settings."""
        health, engine = await self._health()
        return answer(
            self._model(engine)
            | {
                "host": request.url.hostname,
                "port": request.url.port,
                "tp_size": engine["tensor_parallel_size"],
                "pp_size": engine["pipeline_parallel_size"],
                "num_gpus": engine["tensor_parallel_size"] * engine["pipeline_parallel_size"],
                "dp_size": 1,
                "ep_size": 1,
                "nnodes": 1,
                "node_rank": 0,
                "base_gpu_id": 0,
                "gpu_id_step": 1,
                "dtype": engine["dtype"],
                "context_length": self._served.max_model_len,
                "max_running_requests": engine["max_num_seqs"],
                "disaggregation_mode": "null",
                "enable_memory_saver": False,
                "enable_metrics": True,
                "enable_return_routed_experts": engine["num_experts"] > 0,
                "skip_tokenizer_init": False,
                "weight_version": _named(health),
                "version": version("trueroll"),
            }
        )

    async def model(self, request: Request) -> Response:
        health, engine = await self._health()
        return answer(
            self._model(engine)
            | {
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": _named(health),
                "has_image_understanding": engine["max_images"] > 0,
                "has_audio_understanding": False,
                "model_type": None,
                "architectures": [engine["architecture"]],
            }
        )

    async def weight_version(self, request: Request) -> Response:
        health, _ = await self._health()
        return answer({"weight_version": _named(health)})

    async def loads(self, request: Request) -> Response:
        """Return the load. `num_reqs` counts the requests that `/abort_request` can end."""
        health, _ = await self._health()
        now = datetime.now(UTC).isoformat()
        return answer({"timestamp": now, "version": version("trueroll"), "loads": [self._load(health)]})

    async def load(self, request: Request) -> Response:
        health, _ = await self._health()
        return answer([self._load(health)])

    def _load(self, health: protocol.Health) -> dict[str, int]:
        running, waiting = health.requests["running"], health.requests["waiting"]
        counts = {"num_running_reqs": running, "num_waiting_reqs": waiting, "num_reqs": self._counters.open}
        return {"dp_rank": 0} | counts

    def _model(self, engine: dict[str, Any]) -> dict[str, Any]:
        model = str(engine["model"])
        return {"model_path": model, "tokenizer_path": model, "served_model_name": self._served.name}

    async def _health(self) -> tuple[protocol.Health, dict[str, Any]]:
        """Return the worker's health report and the description of the engine in this report. Raise HttpError while the
        worker loads its model.
        """
        health = await self._lifecycle.report()
        if health.engine is None:
            raise HttpError(503, "worker: loads its model; try again later", code="unavailable")
        return health, health.engine


def _named(health: protocol.Health) -> str:
    return str(health.weight_version)
