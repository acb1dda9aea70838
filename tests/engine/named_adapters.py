"""Random LoRA adapters for tests, staged in an engine under a name, or merged into its weights without a name."""

from __future__ import annotations

from typing import Any

import torch

from trueroll.engine.engine import Engine
from trueroll.engine.request import Output

RANK, SCALE = 4, 0.5


def staged(engine: Engine, seed: int, name: str | None = None, part: str = "proj") -> Any:
    """Return a staging with random A and B for each matrix with `part` in its name. Equal seeds give equal values.

    `name`: stage the adapter under this name; None: stage it to be merged into the engine's weights.
    """
    weights = engine.weights
    chosen = {own: shape for own, shape in weights.shapes.items() if part in own and len(shape) == 2}
    assert chosen
    if name is None:
        staging: Any = weights.new_staging(in_place=False)
    elif engine.adapters is None:
        raise RuntimeError("set adapter_bytes")
    else:
        staging = engine.adapters.new_staging(name)
    staging.adapt({own: (f"{own}.a", f"{own}.b", RANK, SCALE) for own in chosen}, alone=True)
    generator = torch.Generator().manual_seed(seed)
    for own, (rows, columns) in chosen.items():
        a, b = (torch.empty(*shape).normal_(generator=generator) for shape in ((RANK, columns), (rows, RANK)))
        staging.rows(f"{own}.a", 0, RANK).copy_(a * 0.2)
        staging.rows(f"{own}.b", 0, rows).copy_(b * 0.2)
    assert all(staging.merge(own) for own in staging.to_merge())
    return staging


def load(engine: Engine, name: str, seed: int, version: int = 1, in_flight: Any = "recompute") -> list[Output]:
    """Load the adapter of `seed` under a name."""
    return engine.commit_adapter(staged(engine, seed, name), name, version, in_flight)


def merge(engine: Engine, seed: int) -> None:
    """Merge the adapter of `seed` into the engine's weights, as a push without a name does."""
    engine.commit_weights(staged(engine, seed), 1, "recompute")
