"""The trainer of an audit: computes the log-probs of an engine's samples with the weights of a checkpoint, in any
dtype, with or without alignment.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from trueroll.errors import ModelError, brief

from ...engine.models.loader import read_config
from ...engine.models.names import resolve_model
from ...engine.request import SamplingParams
from ...kernels.training import align, token_log_probs
from ..auditing import load_trainer
from .engines import Ask

DistributionName: TypeAlias = Literal["raw", "temperature", "processed"]
"""The distribution to which log-probs refer: the model's own distribution, the distribution after the temperature, or
the distribution after temperature and filters.
"""
DISTRIBUTIONS: tuple[DistributionName, ...] = ("raw", "temperature", "processed")
Sampled: TypeAlias = tuple[Ask, tuple[int, ...]]
"""A request and the token ids of its sample."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_log = logging.getLogger(__name__)


class Trainer:
    """Computes log-probs with the weights of a checkpoint. Holds one copy of the weights at a time.

    `model`: name or folder of the model, as in `launch_worker`. Raise ModelError if the model's config.json cannot be
    used. Methods raise ModelError if the checkpoint cannot be loaded. `dtype`: name of the checkpoint's dtype.
    `vocab_size`, `max_len`: limits of the model.
    """

    def __init__(self, model: str) -> None:
        self._folder = resolve_model(model)
        config = read_config(self._folder)
        text = {**config, **(config.get("text_config") or {})}
        self.dtype = str(text.get("dtype") or text.get("torch_dtype") or "float32")
        if self.dtype not in DTYPES:
            raise ModelError(
                f"{self._folder}: an audit of an HTTP server needs a checkpoint in {', '.join(DTYPES)} (got "
                f"{brief(self.dtype)}); convert the checkpoint"
            )
        self.vocab_size, self.max_len = int(text["vocab_size"]), int(text.get("max_position_embeddings") or 2**20)

    def plain(self, samples: Sequence[Sampled], dtype: str) -> dict[DistributionName, list[np.ndarray]]:
        """Return the log-probs that transformers' own forward pass computes for each sample's tokens, under each
        distribution: one float32 array per sample.
        """
        _log.info("computing log-probs in %s", dtype)
        model = load_trainer(self._folder, DTYPES[dtype])
        found = [_plain(model, *sample) for sample in samples]
        return {name: [row[name] for row in found] for name in DISTRIBUTIONS}

    def aligned(self, samples: Sequence[Sampled], dtype: str, distribution: DistributionName) -> list[np.ndarray]:
        """Return the log-probs that the aligned model computes for each sample's tokens, one float32 array per sample.

        Raise AlignmentError if trueroll's ops cannot compute the model.
        """
        _log.info("computing log-probs in %s, aligned", dtype)
        model = load_trainer(self._folder, DTYPES[dtype])
        align(model)
        return list(_aligned(model, samples, distribution))


def _plain(model: Any, ask: Ask, token_ids: tuple[int, ...]) -> dict[DistributionName, np.ndarray]:
    ids = torch.tensor([[*ask.prompt, *token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(ask.prompt) - 1 : -1].float()
    cooled = logits / (ask.temperature or 1.0)
    kept = cooled
    if ask.top_k > 0:
        least = cooled.topk(min(ask.top_k, cooled.shape[-1])).values[:, -1:]
        kept = cooled.masked_fill(cooled < least, -torch.inf)
    tokens = torch.tensor(token_ids)[:, None]
    by_name: dict[DistributionName, Tensor] = {"raw": logits, "temperature": cooled, "processed": kept}
    return {name: each.log_softmax(-1).gather(1, tokens)[:, 0].numpy() for name, each in by_name.items()}


def _aligned(model: Any, samples: Sequence[Sampled], distribution: DistributionName) -> Iterator[np.ndarray]:
    for ask, token_ids in samples:
        ids = torch.tensor([[*ask.prompt, *token_ids]])
        start = len(ask.prompt)
        options: dict[str, Any] = {"temperature": 1.0 if distribution == "raw" else ask.temperature}
        if distribution == "processed":
            params = SamplingParams(temperature=ask.temperature, top_k=ask.top_k, ignore_eos=True)
            options = {"distribution": params, "eos_token_ids": []}
        with torch.no_grad():
            found = token_log_probs(model, ids, completion_mask=(torch.arange(ids.shape[1]) >= start)[None], **options)
        yield found[0, start:].numpy()
