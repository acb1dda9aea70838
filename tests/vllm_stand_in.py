"""A stand-in for the parts of vLLM's trainer side that trueroll uses, with the behavior of vLLM 0.32.0
(`vllm/distributed/weight_transfer`, `base.py` and `factory.py`). vLLM needs packages that conflict with those of the
tests.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

BASE, FACTORY = (f"vllm.distributed.weight_transfer.{name}" for name in ("base", "factory"))
BACKEND = "trueroll.rollout.integrations.vllm"


@dataclass
class TrainerInitInfo:
    rank: int = field(kw_only=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        assert cls.backend

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class TrainerWeightTransferEngine:
    def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True) -> None:
        self.client, self.source, self.is_sender = client, source, is_sender

    def shutdown(self) -> None: ...


class WeightTransferTrainerFactory:
    registry: dict[str, type]

    @classmethod
    def register_engine(cls, name: str, engine: type) -> None:
        if name in cls.registry:
            raise ValueError(f"Weight transfer trainer engine {name!r} is already registered.")
        cls.registry[name] = engine

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        return cls.registry[init_info.backend].trainer_init(init_info=init_info, client=client, source=source)


@pytest.fixture
def vllm_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module with trueroll's backend, imported with the stand-in."""
    WeightTransferTrainerFactory.registry = {}
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer", BASE, FACTORY):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[BASE].TrainerInitInfo = TrainerInitInfo
    sys.modules[BASE].TrainerWeightTransferEngine = TrainerWeightTransferEngine
    sys.modules[FACTORY].WeightTransferTrainerFactory = WeightTransferTrainerFactory
    yield importlib.import_module(BACKEND)
    del sys.modules[BACKEND]
