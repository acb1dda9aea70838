"""From hidden states to tokens and log-probs, each row with its own parameters.

Owns what `temperature`, the filters, `min_tokens`, `logprobs` and `top_logprobs` mean in arithmetic. Holds no
state: a draw is a function of its logits, its parameters, its seed and its position. Nothing here waits for a device
but `Drawing.wait`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.contract import Backend, TokenStatistics, Wanted, Weight
from ...kernels.transfer import HostCopy, to_device
from ..outputs.draw_records import divisor
from ..outputs.tops import Top
from ..request import Distribution
from .draws import Draw, Draws

# Rows whose logits are in memory at once.
_LOGITS_ROWS = 64


# What `next_tokens` gives for some draws, and statistics if they are wanted.
_Part = tuple[tuple[Tensor, Tensor, Tensor], TokenStatistics | None]


class Drawn(NamedTuple):
    """Drawn tokens, in the order of their draws. `is_finite` is false where a token's logit is no number. `tops`: of
    the draws that asked for it, by their place.
    """

    token_ids: list[int]
    logprobs: list[float]
    is_finite: list[bool]
    tops: Mapping[int, Top]


class Drawing:
    """Tokens that are being drawn. `token_ids`: int64 [M], on the device.

    `recorded`: which of the draws have statistics, in the order of the rows of `statistics`.
    """

    def __init__(
        self,
        draws: Draws,
        token_ids: Tensor,
        logprobs: Tensor,
        is_finite: Tensor,
        *,
        recorded: Sequence[int] = (),
        statistics: Sequence[TokenStatistics] = (),
    ) -> None:
        self.token_ids = token_ids
        self._draws, self._recorded = draws, recorded
        self._columns = [HostCopy(column) for column in (token_ids, logprobs, is_finite)]
        self._statistics = [HostCopy(torch.cat(column)) for column in list(zip(*statistics, strict=True))[1:]]

    def wait(self) -> Drawn:
        """The tokens."""
        token_ids, logprobs, is_finite = (column.wait().tolist() for column in self._columns)
        return Drawn(token_ids, logprobs, is_finite, self._wait_for_tops())

    def _wait_for_tops(self) -> dict[int, Top]:
        tops: dict[int, Top] = {}
        if self._statistics:
            entropy, token_ids, logprobs = (column.wait().numpy() for column in self._statistics)
            rows = zip(self._recorded, entropy.tolist(), token_ids.astype(np.int32), logprobs, strict=True)
            for i, nats, ids, listed in rows:
                if (k := self._draws.special[i].params.top_logprobs) is not None:
                    tops[i] = Top(nats, ids[:k].tobytes(), listed[:k].tobytes())
        return tops


class Sampler:
    """Draws tokens with the ops of one backend and a model's head [vocab_size, hidden_size].

    Rows with neither filters nor banned tokens go to `next_tokens`, or with `top_logprobs` to `next_token_statistics`,
    which keep no logits; the others take the same steps one by one.
    """

    def __init__(self, backend: Backend, head: Weight) -> None:
        self.ops, self.head = backend, head

    def draw(self, hidden: Tensor, draws: Draws) -> Drawing:
        """One token for each draw, of which there is at least one. hidden: [M, hidden_size]."""
        if not draws.special:
            return Drawing(draws, *self.next_tokens(hidden, make_wanted(draws, hidden.device)))
        # Of those that list the most tokens, the others take the first ones.
        k = max((n for draw in draws.special.values() if (n := draw.params.top_logprobs) is not None), default=None)
        plain = [i for i in range(len(draws)) if i not in draws.special]
        whole = [i for i, draw in draws.special.items() if draw.is_of_whole]
        processed = [i for i, draw in draws.special.items() if not draw.is_of_whole]
        parts: list[_Part] = [self._draw_processed(hidden, draws.take(part), k) for part in _cut(processed)]
        if whole and k is not None:
            parts.insert(0, self._draw_recorded(hidden, draws.take(whole), k))
        results = [result for result, _ in parts]
        if plain:
            results.append(self.next_tokens(hidden, make_wanted(draws.take(plain), hidden.device)))
        order = _tensor(np.argsort(whole + processed + plain), hidden)
        token_ids, logprobs, finite = (torch.cat(column)[order] for column in zip(*results, strict=True))
        statistics = [found for _, found in parts if found is not None]
        return Drawing(draws, token_ids, logprobs, finite, recorded=whole + processed, statistics=statistics)

    def next_tokens(self, hidden: Tensor, wanted: Wanted) -> tuple[Tensor, Tensor, Tensor]:
        """The backend's `next_tokens` with the head."""
        return self.ops.next_tokens(hidden, self.head, wanted)

    def score(self, hidden: Tensor, token_ids: Tensor, distribution: Distribution) -> Tensor:
        """Log-probs, float32 [M], of `token_ids` (int64 [M]) under `distribution` of hidden states [M, hidden_size]."""
        if distribution.has_filters:
            parts = self._processed_parts(hidden, token_ids, distribution)
            return torch.cat([self.ops.log_probs(logits, tokens) for logits, tokens in parts])
        return self.next_tokens(hidden, _make_wanted_of(token_ids, distribution))[1]

    def score_statistics(
        self, hidden: Tensor, token_ids: Tensor, distribution: Distribution, k: int
    ) -> TokenStatistics:
        """`score`, with the entropy of each row's distribution and its k most probable tokens."""
        if not distribution.has_filters:
            return self.ops.next_token_statistics(hidden, self.head, _make_wanted_of(token_ids, distribution), k)[1]
        parts = self._processed_parts(hidden, token_ids, distribution)
        found = [self.ops.token_statistics(logits, tokens, k) for logits, tokens in parts]
        return TokenStatistics._make(torch.cat(column) for column in zip(*found, strict=True))

    def _processed_parts(
        self, hidden: Tensor, token_ids: Tensor, distribution: Distribution
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits after temperature and filters, of some rows at a time, and their tokens."""
        divisor = _divisors(distribution, hidden.device)
        for start in range(0, len(token_ids), _LOGITS_ROWS):
            rows = slice(start, start + _LOGITS_ROWS)
            scaled = self.ops.lm_head(hidden[rows], self.head) / divisor
            yield self._filter(scaled, [distribution] * len(scaled)), token_ids[rows]

    def _draw_recorded(self, hidden: Tensor, draws: Draws, k: int) -> _Part:
        wanted = make_wanted(draws, hidden.device)
        token_ids, found, finite = self.ops.next_token_statistics(hidden, self.head, wanted, k)
        return (token_ids, found.logprobs, finite), found

    def _draw_processed(self, hidden: Tensor, draws: Draws, k: int | None) -> _Part:
        """The steps of `next_tokens`, with banned tokens and filters between; statistics unless `k` is None."""
        each, wanted = list(draws.special.values()), make_wanted(draws, hidden.device)
        raw = self.ops.lm_head(hidden[wanted.rows], self.head)
        scaled = raw / wanted.temperatures[:, None]
        processed = self._filter(_ban(scaled, each), [draw.params for draw in each])
        token_ids = processed.argmax(-1)
        sampled = [i for i, draw in enumerate(each) if not draw.params.is_greedy]
        if sampled:
            rows = _tensor(sampled, hidden)
            token_ids[rows] = self.ops.sample(processed[rows], wanted.seeds[rows], wanted.positions[rows])
        sources = {"raw": raw, "temperature": scaled, "processed": processed, None: processed}
        basis = torch.stack([sources[draw.params.logprobs][i] for i, draw in enumerate(each)])
        found = None if k is None else self.ops.token_statistics(basis, token_ids, k)
        logprobs = self.ops.log_probs(basis, token_ids) if found is None else found.logprobs
        finite = processed.gather(1, token_ids[:, None]).isfinite().squeeze(1) & ~logprobs.isnan()
        return (token_ids, logprobs, finite), found

    def _filter(self, scaled: Tensor, distributions: Sequence[Distribution]) -> Tensor:
        chosen = [i for i, d in enumerate(distributions) if d.has_filters]
        if not chosen:
            return scaled
        filters = [distributions[i] for i in chosen]
        rows = _tensor(chosen, scaled)
        filtered = scaled.clone()
        filtered[rows] = self.ops.filter_logits(
            scaled[rows],
            _tensor([f.top_k for f in filters], scaled),
            _tensor([f.top_p for f in filters], scaled, torch.float32),
            _tensor([f.min_p for f in filters], scaled, torch.float32),
        )
        return filtered


def make_wanted(draws: Draws, device: torch.device) -> Wanted:
    """What `next_tokens` needs to know of draws, of which there is at least one: all but filters and banned tokens."""
    rows, targets, seeds, positions = to_device(torch.from_numpy(draws.integers), device).unbind()
    temperatures, raw = (to_device(torch.from_numpy(column), device) for column in (draws.temperatures, draws.raw))
    return Wanted(rows, targets, temperatures, raw, seeds, positions)


def _make_wanted_of(token_ids: Tensor, distribution: Distribution) -> Wanted:
    """The log-prob of one token (int64 [M]) of each row."""
    unused, rows = torch.zeros_like(token_ids), torch.arange(len(token_ids), device=token_ids.device)
    temperatures = _divisors(distribution, token_ids.device).repeat(len(token_ids))
    return Wanted(rows, token_ids, temperatures, unused.bool(), unused, unused)


def _divisors(distribution: Distribution, device: torch.device) -> Tensor:
    """float32 [1]."""
    return to_device(torch.tensor([divisor(distribution)], dtype=torch.float32), device)


def _ban(scaled: Tensor, draws: Sequence[Draw]) -> Tensor:
    counts = [len(draw.banned) for draw in draws]
    if not any(counts):
        return scaled
    rows = _tensor(np.repeat(np.arange(len(draws)), counts), scaled)
    tokens = _tensor(np.concatenate([np.asarray(draw.banned, np.int64) for draw in draws]), scaled)
    return scaled.index_put((rows, tokens), scaled.new_full((), -torch.inf))


def _cut(indices: list[int]) -> list[list[int]]:
    """Parts of at most `_LOGITS_ROWS`."""
    return [indices[start : start + _LOGITS_ROWS] for start in range(0, len(indices), _LOGITS_ROWS)]


def _tensor(values: Any, like: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """On the device of `like`."""
    return to_device(torch.as_tensor(values, dtype=dtype), like.device)
