"""What `trueroll fleet` reads: a file in TOML with the arguments of `Fleet`. Imports no ray."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trueroll.errors import ConfigError

from ...engine.config import EngineConfig
from ...engine.request import describe_validation_error
from ..config import WorkerConfig


class FleetConfig(BaseModel):
    """The arguments of `Fleet` but for the settings of workers and engines, and `metrics_port`: where 127.0.0.1 serves
    the metrics of all workers; None: nowhere. Unknown keys and values out of range raise ConfigError.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    num_workers: int = Field(ge=1)
    cpus: float = Field(1.0, ge=0.0)
    gpus: float = Field(0.0, ge=0.0)
    resources: dict[str, float] = {}
    ray_address: str | None = None
    file: str | None = None
    weights_folder: str | None = None
    server_public_key: str | None = None
    client_key: str | None = None
    startup_timeout: float = Field(600.0, gt=0.0)
    hang_seconds: float = Field(600.0, gt=0.0)
    drain_timeout: float = Field(600.0, ge=0.0)
    metrics_port: int | None = Field(None, ge=0, le=65535)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(describe_validation_error(error)) from None


def read_config(path: Path) -> tuple[FleetConfig, dict[str, Any]]:
    """The fleet that a file describes, and the settings of each worker and engine in it, which are checked. Raise
    ConfigError.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"fleet: expected a file in TOML at {path}, found {error}; correct it") from None
    names = {*WorkerConfig.model_fields, *EngineConfig.model_fields} - {*FleetConfig.model_fields, "address"}
    settings = {name: values.pop(name) for name in [*values] if name in names}
    config = FleetConfig(**values)
    WorkerConfig(**{name: value for name, value in settings.items() if name in WorkerConfig.model_fields})
    of_engine = {name: value for name, value in settings.items() if name in EngineConfig.model_fields}
    EngineConfig(model=config.model, **of_engine)
    return config, settings
