"""Helpers shared by tests with TRL:

- workers in this process, so that tests can read the live weights;
- a publisher that compares the weights after each push;
- settings of both trainers for a CPU;
- a reward.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # read when trl is imported

import torch
from serving import WorkerOnThread
from trl import GRPOConfig
from trl.experimental.async_grpo import AsyncGRPOConfig

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.kernels.spellings import own_name
from trueroll.rollout import RolloutClient, WeightPublisher
from trueroll.rollout.config import WorkerConfig

MAX_STALENESS = 2


class ServedEngine:
    """An engine behind a worker at `address`, in this process."""

    def __init__(self, engine: Engine, address: str) -> None:
        self.engine, self.address = engine, address

    def differing(self, model: torch.nn.Module) -> list[str]:
        """Return the names of the worker's parameters for which the live weights differ from the model's in any bit."""
        live, own = self.engine.weights.tensors, self.engine.weights
        theirs = {own_name(name, own): tensor for name, tensor in model.state_dict().items()}
        return [name for name in live if bits(live[name].to_dense()) != bits(theirs[name])]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


@contextmanager
def serve(model: Path, dtype: Any = "float32", **settings: Any) -> Iterator[ServedEngine]:
    """Run a worker with the model on a thread. `settings`: further settings of EngineConfig."""
    engines: list[Engine] = []

    def make_engine() -> Engine:
        config = EngineConfig(model=str(model), dtype=dtype, device="cpu", num_blocks=256, **settings)
        engines.append(Engine(config))
        return engines[0]

    running = WorkerOnThread(WorkerConfig(), make_engine)
    try:
        with RolloutClient(running.address) as client:
            client.score([[1, 2]])  # the reply arrives once the engine is loaded
        yield ServedEngine(engines[0], running.address)
    finally:
        running.worker.drain()
        running.worker.drain()
        running.join()


class CheckingPublisher(WeightPublisher):
    """After each push, records the names of weights that differ between worker and model, and the model's embedding.
    Once `skips` is set, pushes are skipped and nothing more is recorded.
    """

    def __init__(self, served: ServedEngine) -> None:
        super().__init__(timeout=20.0)
        self.connect([served.address])
        self.served, self.skips = served, False
        self.differing: list[list[str]] = []
        self.embeddings: list[bytes] = []

    def __enter__(self) -> CheckingPublisher:
        return self

    def push(self, tensors: Any, version: int, *, allow_older: bool = False) -> Any:
        result = None if self.skips else super().push(tensors, version, allow_older=allow_older)
        self.differing.append(self.served.differing(tensors))
        self.embeddings.append(bits(tensors.get_input_embeddings().weight))
        return result


def short_training(output: Path) -> dict[str, Any]:
    """Return settings for float32 on a CPU: one group of four samples of at most eight tokens per step."""
    return dict(
        output_dir=str(output),
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        temperature=0.8,
        num_generations=4,
        per_device_train_batch_size=4,
        max_completion_length=8,
        learning_rate=1e-5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def grpo_settings(output: Path, **changes: Any) -> GRPOConfig:
    return GRPOConfig(**(short_training(output) | changes))


def async_settings(output: Path, **changes: Any) -> AsyncGRPOConfig:
    fields: dict[str, Any] = dict(token_budget=0, max_staleness=MAX_STALENESS, max_inflight_tasks=16)
    return AsyncGRPOConfig(**(short_training(output) | fields | changes))


def num_vowels(completions: list[Any], **_: Any) -> list[float | None]:
    """Return a reward for each completion. A completion is a text, or the messages of an answer."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [float(sum(letter in "aeiou" for letter in text)) for text in texts]
