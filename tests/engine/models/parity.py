"""The log-probs of a tiny model, compared with those of transformers' whole forward pass in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tiny import make_tiny_model
from trueroll.engine.models.loader import read_config

from .test_hybrid_families import Hybrid, prompt

LIMIT = 1e-4  # nats


def load(folder: Path, dtype: str = "float32", **settings: Any) -> Any:
    """Return the model of transformers, with eager attention. Some architectures have no automatic class."""
    kind = getattr(transformers, read_config(folder)["architectures"][0])
    return kind.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager", **settings)


@torch.no_grad()
def theirs(folder: Path, ids: Tensor) -> Tensor:
    """Return the log-prob of each token of `ids` after the first one."""
    return load(folder)(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def check_parity(family: str, overrides: dict[str, Any], folder: Path) -> None:
    """Compare a tiny model of a family on the backends `reference` and `cpu`."""
    ids = prompt(100)
    expected = theirs(make_tiny_model(family, folder, **overrides), ids)
    for backend in ("reference", "cpu"):
        assert (Hybrid(folder, backend=backend).log_probs(ids) - expected).abs().max() <= LIMIT, backend
