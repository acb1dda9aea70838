"""From logits to tokens and log-probs, each row with its own parameters.

Owns what `temperature`, the filters, `min_tokens` and `logprobs` mean in arithmetic. Holds no state: a draw is a
function of its logits, its parameters, its seed and its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.ops import Backend
from .request import Distribution, SamplingParams

# A lower temperature is taken as this one: the same distribution, but the quotients stay within float32.
_LOWEST_TEMPERATURE = 1e-30


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be drawn at absolute `position` from logits row `row`. `banned` ids cannot be drawn."""

    row: int
    params: SamplingParams
    seed: int
    position: int
    banned: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Drawn:
    """A drawn token. `logprob` is None if none was asked for; `is_finite` is false if its logit is no number."""

    token_id: int
    logprob: float | None
    is_finite: bool


class Sampler:
    """Draws tokens with the ops of one backend."""

    def __init__(self, backend: Backend) -> None:
        self.ops = backend

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """One token for each draw. logits: float32 [M, vocab_size]."""
        raw = logits[[draw.row for draw in draws]]
        params = [draw.params for draw in draws]
        scaled = _divide_by_temperature(raw, params)
        processed = self._filter(_ban(scaled, draws), params)
        token_ids = self._choose(processed, draws)
        basis = processed.clone()
        for source, mode in ((raw, "raw"), (scaled, "temperature")):
            rows = [i for i, p in enumerate(params) if p.logprobs == mode]
            basis[rows] = source[rows]
        logprobs = self._pick(basis, token_ids).tolist()
        finite = processed.gather(1, token_ids[:, None]).isfinite().squeeze(1).tolist()
        return [
            Drawn(token, None if p.logprobs is None else logprob, is_finite)
            for token, p, logprob, is_finite in zip(token_ids.tolist(), params, logprobs, finite, strict=True)
        ]

    def score(self, logits: Tensor, token_ids: Tensor, distribution: Distribution) -> Tensor:
        """Log-probs, float32 [M], of `token_ids` (int64 [M]) under `distribution` of logits [M, vocab_size]."""
        distributions = [distribution] * len(token_ids)
        return self._pick(self._filter(_divide_by_temperature(logits, distributions), distributions), token_ids)

    def _filter(self, scaled: Tensor, distributions: Sequence[Distribution]) -> Tensor:
        rows = [i for i, d in enumerate(distributions) if d.has_filters]
        if not rows:
            return scaled
        filters = [distributions[i] for i in rows]
        filtered = scaled.clone()
        filtered[rows] = self.ops.filter_logits(
            scaled[rows],
            torch.tensor([f.top_k for f in filters], device=scaled.device),
            torch.tensor([f.top_p for f in filters], dtype=torch.float32, device=scaled.device),
            torch.tensor([f.min_p for f in filters], dtype=torch.float32, device=scaled.device),
        )
        return filtered

    def _choose(self, processed: Tensor, draws: Sequence[Draw]) -> Tensor:
        """The greedy choice for greedy rows (the lowest id among equals), a random one for the others."""
        token_ids = processed.argmax(-1)
        rows = [i for i, draw in enumerate(draws) if not draw.params.is_greedy]
        if rows:
            seeds = [_as_signed(draws[i].seed) for i in rows]
            positions = [draws[i].position for i in rows]
            token_ids[rows] = self.ops.sample(
                processed[rows],
                torch.tensor(seeds, device=processed.device),
                torch.tensor(positions, device=processed.device),
            )
        return token_ids

    def _pick(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        return self.ops.log_softmax(logits).gather(1, token_ids[:, None]).squeeze(1)


def _divide_by_temperature(logits: Tensor, distributions: Sequence[Distribution]) -> Tensor:
    """Greedy rows keep their logits."""
    temperatures = [1.0 if d.is_greedy else max(d.temperature, _LOWEST_TEMPERATURE) for d in distributions]
    return logits / torch.tensor(temperatures, dtype=torch.float32, device=logits.device)[:, None]


def _ban(scaled: Tensor, draws: Sequence[Draw]) -> Tensor:
    cells = [(i, token) for i, draw in enumerate(draws) for token in draw.banned]
    if not cells:
        return scaled
    rows, tokens = torch.tensor(cells, device=scaled.device).unbind(1)
    return scaled.index_put((rows, tokens), torch.tensor(-torch.inf, device=scaled.device))


def _as_signed(seed: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return seed - 2**64 if seed >= 2**63 else seed
