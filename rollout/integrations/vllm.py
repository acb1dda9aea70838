"""trueroll workers as a backend of vLLM's trainer side: `send_weights` pushes with a `WeightPublisher`.

vLLM's trainers build an engine with `WeightTransferTrainerFactory.trainer_init`, and call its `send_weights` after each
step. Importing this module registers the backend `trueroll` with the factory. Requires vLLM in the trainer's process;
the workers do not need vLLM. The module implements the interface of vLLM 0.29 to 0.32.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from trueroll.errors import ConfigError

from ..publisher.publisher import WeightPublisher

BACKEND = "trueroll"


@dataclass
class TruerollInitInfo(TrainerInitInfo):
    """The arguments of `trainer_init`. `publisher`: a publisher that is connected to the workers; only rank 0 needs a
    publisher. `version`: the version that the workers serve; each push increases the version by 1. `rank`: this
    trainer's rank.
    """

    backend: ClassVar[str] = BACKEND

    publisher: WeightPublisher | None = None
    version: int = 0


class TruerollTrainerEngine(TrainerWeightTransferEngine):
    """Pushes the weights of a `WeightSource` to trueroll workers. `version`: the version of the last push.

    The engine never uses vLLM's client, because trueroll's workers do not divide a weight update into phases. Workers
    serve the old weights until the push is complete. When the push is complete, the publisher's `in_flight` determines
    what happens to running requests.
    """

    init_info_cls = TruerollInitInfo

    def __init__(self, init_info: TruerollInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.version, self._publisher = init_info.version, init_info.publisher

    @classmethod
    def trainer_init(
        cls, init_info: TruerollInitInfo, *, client: Any = None, source: Any = None
    ) -> TruerollTrainerEngine:
        """Return a `TruerollTrainerEngine`. Raise ConfigError if the source or, on rank 0, the publisher is missing."""
        if source is None:
            raise ConfigError("source: is missing; pass a WeightSource, such as vLLM's ModuleSource(model)")
        if init_info.is_sender and init_info.publisher is None:
            raise ConfigError("publisher: is missing on rank 0; pass a WeightPublisher, connected to the workers")
        return cls(init_info, client=client, source=source)

    def send_weights(self) -> None:
        """Push the weights as the next version. Every rank calls this method, because reading the source may gather
        shards from all ranks. Only rank 0 pushes. Raise PushError if a worker has not committed the push.
        """
        pairs = iter(self.source)
        try:
            if self.is_sender:
                assert self._publisher is not None  # `trainer_init` checks this
                self._publisher.push(pairs, self.version + 1)
            self.version += 1
        finally:
            for _ in pairs:  # so that no other rank waits for this rank, even after an error
                pass


WeightTransferTrainerFactory.register_engine(BACKEND, TruerollTrainerEngine)
