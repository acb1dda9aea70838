"""From hidden states to tokens and log-probs, each row with its own parameters.

Owns what `temperature`, the filters, `min_tokens` and `logprobs` mean in arithmetic. Holds no state: a draw is a
function of its logits, its parameters, its seed and its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.ops import GREEDY, SAMPLE, Backend, Wanted, Weight
from .request import Distribution, SamplingParams

# A lower temperature is taken as this one: the same distribution, but the quotients stay within float32.
_LOWEST_TEMPERATURE = 1e-30
# Rows whose logits are in memory at once.
_LOGITS_ROWS = 64


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be drawn at absolute `position` from hidden state `row`. `banned` ids cannot be drawn."""

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
    """Draws tokens with the ops of one backend and a model's head [vocab_size, hidden_size].

    Rows with neither filters nor banned tokens go to `next_tokens`, which keeps no logits; the others take the same
    steps one by one.
    """

    def __init__(self, backend: Backend, head: Weight) -> None:
        self.ops, self.head = backend, head

    def draw(self, hidden: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """One token for each draw. hidden: [M, hidden_size]."""
        drawn: dict[int, Drawn] = {}
        changed = [i for i, draw in enumerate(draws) if draw.banned or draw.params.has_filters]
        plain = [i for i, draw in enumerate(draws) if not (draw.banned or draw.params.has_filters)]
        parts = [changed[start : start + _LOGITS_ROWS] for start in range(0, len(changed), _LOGITS_ROWS)]
        for indices, compute in [(plain, self._draw_plain), *((part, self._draw_changed) for part in parts)]:
            some = [draws[i] for i in indices]
            if some:
                columns = (column.tolist() for column in compute(hidden, some))
                for i, draw, token, logprob, is_finite in zip(indices, some, *columns, strict=True):
                    drawn[i] = Drawn(token, None if draw.params.logprobs is None else logprob, is_finite)
        return [drawn[i] for i in range(len(draws))]

    def score(self, hidden: Tensor, token_ids: Tensor, distribution: Distribution) -> Tensor:
        """Log-probs, float32 [M], of `token_ids` (int64 [M]) under `distribution` of hidden states [M, hidden_size]."""
        temperatures = torch.full(token_ids.shape, _divisor(distribution), dtype=torch.float32, device=hidden.device)
        if not distribution.has_filters:
            unused = torch.zeros_like(token_ids)
            rows = torch.arange(len(token_ids), device=hidden.device)
            wanted = Wanted(rows, token_ids, temperatures, unused.bool(), unused, unused)
            return self.ops.next_tokens(hidden, self.head, wanted)[1]
        scores = []
        for start in range(0, len(token_ids), _LOGITS_ROWS):
            rows = slice(start, start + _LOGITS_ROWS)
            scaled = self.ops.lm_head(hidden[rows], self.head) / temperatures[rows, None]
            filtered = self._filter(scaled, [distribution] * len(scaled))
            scores.append(self.ops.log_probs(filtered, token_ids[rows]))
        return torch.cat(scores)

    def _draw_plain(self, hidden: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor, Tensor]:
        return self.ops.next_tokens(hidden, self.head, _wanted(draws, hidden.device))

    def _draw_changed(self, hidden: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor, Tensor]:
        """The steps of `next_tokens`, with banned tokens and filters between them."""
        wanted = _wanted(draws, hidden.device)
        raw = self.ops.lm_head(hidden[wanted.rows], self.head)
        scaled = raw / wanted.temperatures[:, None]
        processed = self._filter(_ban(scaled, draws), [draw.params for draw in draws])
        token_ids = processed.argmax(-1)
        rows = (wanted.targets == SAMPLE).nonzero().flatten()
        if len(rows):
            token_ids[rows] = self.ops.sample(processed[rows], wanted.seeds[rows], wanted.positions[rows])
        sources = {"raw": raw, "temperature": scaled, "processed": processed, None: processed}
        basis = torch.stack([sources[draw.params.logprobs][i] for i, draw in enumerate(draws)])
        logprobs = self.ops.log_probs(basis, token_ids)
        finite = processed.gather(1, token_ids[:, None]).isfinite().squeeze(1) & ~logprobs.isnan()
        return token_ids, logprobs, finite

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


def _wanted(draws: Sequence[Draw], device: torch.device) -> Wanted:
    params = [draw.params for draw in draws]
    return Wanted(
        rows=torch.tensor([draw.row for draw in draws], device=device),
        targets=torch.tensor([GREEDY if p.is_greedy else SAMPLE for p in params], device=device),
        temperatures=torch.tensor([_divisor(p) for p in params], dtype=torch.float32, device=device),
        raw=torch.tensor([p.logprobs == "raw" for p in params], device=device),
        seeds=torch.tensor([_as_signed(draw.seed) for draw in draws], device=device),
        positions=torch.tensor([draw.position for draw in draws], device=device),
    )


def _divisor(distribution: Distribution) -> float:
    """What logits are divided by. Greedy rows keep theirs."""
    return 1.0 if distribution.is_greedy else max(distribution.temperature, _LOWEST_TEMPERATURE)


def _ban(scaled: Tensor, draws: Sequence[Draw]) -> Tensor:
    cells = [(i, token) for i, draw in enumerate(draws) for token in draw.banned]
    if not cells:
        return scaled
    rows, tokens = torch.tensor(cells, device=scaled.device).unbind(1)
    return scaled.index_put((rows, tokens), torch.tensor(-torch.inf, device=scaled.device))


def _as_signed(seed: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return seed - 2**64 if seed >= 2**63 else seed
