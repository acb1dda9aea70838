"""The arguments of `Fleet`, and the TOML file from which `trueroll fleet` reads these arguments. Does not import
ray.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trueroll.errors import ConfigError, said

from ...engine.config import EngineConfig
from ...engine.request import from_validation
from ..client.small_file import check_printable, open_regular, read_text
from ..config import WorkerConfig
from ..network.keys import Key

DRAIN_SECONDS = 5.0
"""Default of `drain_seconds` for the workers of a fleet. If the fleet's process ends, workers drain for at most this
time.
"""


MOST_WORKERS = 2**10
"""Maximum number of workers. The entries of this many workers fit into the fleet's file."""
MOST_CONFIG_BYTES = 2**16
"""Maximum size of the TOML file, checked before it is parsed."""


class FleetConfig(BaseModel):
    """Settings of a fleet, without the settings of its workers and engines. `Fleet` describes the settings. Raise
    ConfigError if a key is unknown or a value is out of range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    num_workers: int = Field(ge=1, le=MOST_WORKERS)
    cpus: float = Field(1.0, ge=0.0)
    gpus: float = Field(0.0, ge=0.0)
    resources: dict[str, float] = {}
    ray_address: str | None = None
    ray_without_authentication: bool = False
    file: str | Path | None = None
    weights_folder: str | Path | None = None
    server_public_key: Key | None = None
    client_key: Key | None = None
    startup_timeout: float = Field(600.0, gt=0.0)
    hang_seconds: float = Field(600.0, gt=0.0)
    drain_timeout: float = Field(600.0, ge=0.0)
    metrics_port: int | None = Field(None, ge=0, le=65535)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise from_validation(ConfigError, error) from None


def split_settings(settings: Mapping[str, Any]) -> tuple[FleetConfig, WorkerConfig, EngineConfig]:
    """Split the arguments of `Fleet` into the settings of the fleet, of each worker and of each engine. Raise
    ConfigError if a setting is unknown or invalid.
    """
    of_worker = {*WorkerConfig.model_fields} - {*FleetConfig.model_fields}
    of_engine = {*EngineConfig.model_fields} - {*FleetConfig.model_fields}
    fleet = FleetConfig(**{name: value for name, value in settings.items() if name not in of_worker | of_engine})
    worker = WorkerConfig(
        **{"drain_seconds": DRAIN_SECONDS} | {name: settings[name] for name in of_worker & settings.keys()}
    )
    if worker.address is not None:
        raise ConfigError(
            f"address: a fleet gives each worker its own address (got {worker.address!r}); remove the setting address"
        )
    if worker.save_folder is not None:
        raise ConfigError(
            "save_folder: a fleet gives a restarted worker the weights of another worker, or of the last push by disk "
            f"(got {worker.save_folder!r}); remove the setting save_folder, and push by disk to survive a restart of "
            "the whole fleet"
        )
    engine = EngineConfig(model=fleet.model, **{name: settings[name] for name in of_engine & settings.keys()})
    if not engine.keeps_values:
        raise ConfigError(
            f"quantization: {engine.quantization} is not supported in a fleet, because a fleet gives a restarted "
            "worker the weights of another worker, which may not have the same bits after they are quantized again; "
            "name a format other than nvfp4 and awq",
            field="quantization",
            value=engine.quantization,
        )
    return fleet, worker, engine


def read_config(path: Path) -> dict[str, Any]:
    """Read the arguments of `Fleet` from a TOML file, and check the arguments. Raise ConfigError if the file or a
    setting is invalid.
    """
    try:
        with open_regular(path) as file:
            settings = tomllib.loads(read_text(file, MOST_CONFIG_BYTES))
        check_printable(settings)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"fleet: cannot read {path} as a TOML file ({said(error)}); correct the file") from None
    split_settings(settings)
    return settings
