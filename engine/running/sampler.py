"""Sampling: computes tokens and log-probs from hidden states. Each row has its own sampling parameters.

Owns the order of edits, `temperature` and filters, and the distributions of `logprobs` and `top_logprobs`. The sampler
has no state: a draw depends only on logits, sampling parameters, seed and position. Only `Drawing.wait` synchronizes
the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.contract import SAMPLE, Backend, TokenStatistics, Wanted, Weight
from ...kernels.edits import edit
from ...kernels.specs import HeadSpec
from ...kernels.transfer import HostCopies, all_to_device, to_device
from ..outputs.open_requests import BASES, DRAW, DrawRecord, divisor
from ..request import Distribution
from .step import Draws, ScoredRows

# The maximum number of rows with logits in memory at the same time.
_LOGITS_ROWS = 64


# The result of `next_tokens` for some draws, and their statistics if requested.
_Part = tuple[tuple[Tensor, Tensor, Tensor], TokenStatistics | None]


class Drawn(NamedTuple):
    """Drawn tokens, in the order of their draws.

    `is_finite`: false if the logit of the token is NaN or infinite. `records`: maps the index of each draw with
    statistics to the bytes of each column of `request.TOPS`.
    """

    token_ids: list[int]
    logprobs: list[float]
    is_finite: list[bool]
    records: Mapping[int, tuple[bytes, ...]]


class Drawing:
    """A draw of tokens; the draw may still be running on the device. `token_ids`: int64 [R], on the device.

    `recorded`: a pair for each row of `statistics`: the index of the draw, and the number of top tokens to record. The
    number is -1 for a draw that requests no statistics.
    """

    def __init__(
        self,
        token_ids: Tensor,
        logprobs: Tensor,
        is_finite: Tensor,
        *,
        recorded: Sequence[tuple[int, int]] = (),
        statistics: Sequence[TokenStatistics] = (),
    ) -> None:
        self.token_ids = token_ids
        self._recorded = recorded
        joined = [torch.cat(column) for column in list(zip(*statistics, strict=True))[1:]]
        self._copies = HostCopies([token_ids, logprobs, is_finite, *joined])

    def wait(self) -> Drawn:
        """Wait for the device and return the tokens."""
        token_ids, logprobs, is_finite, *statistics = self._copies.wait()
        return Drawn(token_ids.tolist(), logprobs.tolist(), is_finite.tolist(), self._records(statistics))

    def _records(self, statistics: Sequence[Tensor]) -> dict[int, tuple[bytes, ...]]:
        if not statistics:
            return {}
        entropy, token_ids, logprobs = (column.numpy() for column in statistics)
        rows = zip(self._recorded, entropy, token_ids.astype(np.int32), logprobs, strict=True)
        return {i: (nats.tobytes(), ids[:k].tobytes(), top[:k].tobytes()) for (i, k), nats, ids, top in rows if k >= 0}


class Sampler:
    """Draws tokens with the ops of one backend and a model's head [vocab_size, hidden_size]. `spec`: how the head's
    products become logits.

    Rows that have neither filters nor edits are drawn by `next_tokens`, or by `next_token_statistics` if they have
    `top_logprobs`. Neither op stores the logits. Rows with filters or edits are drawn by several separate ops.
    """

    def __init__(self, backend: Backend, head: Weight, spec: HeadSpec) -> None:
        self.ops, self.head, self.spec = backend, head, spec

    def draw(self, hidden: Tensor, draws: Draws) -> Drawing:
        """Draw the tokens of `draws`, which must not be empty. `hidden`: [M, hidden_size]."""
        if draws.are_plain:
            return Drawing(*self.next_tokens(hidden, make_wanted(draws, hidden.device)))
        num_tops = draws.records["num_tops"]
        k = int(num_tops.max())  # draws that list fewer than k tokens use the first ones
        whole, processed, plain = _sorted_by_kind(draws)
        parts: list[_Part] = [self._draw_processed(hidden, draws.take(part), k) for part in _cut(processed)]
        if len(whole):
            parts.insert(0, self._draw_recorded(hidden, draws.take(whole), k))
        results = [result for result, _ in parts]
        if len(plain):
            results.append(self.next_tokens(hidden, make_wanted(draws.take(plain), hidden.device)))
        order = _tensor(np.argsort(np.concatenate((whole, processed, plain))), hidden)
        columns = [torch.cat(column)[order] for column in zip(*results, strict=True)]
        with_statistics = np.concatenate((whole, processed))
        recorded = list(zip(with_statistics.tolist(), num_tops[with_statistics].tolist(), strict=True))
        statistics = [found for _, found in parts if found is not None]
        return Drawing(*columns, recorded=recorded, statistics=statistics)

    def next_tokens(self, hidden: Tensor, wanted: Wanted) -> tuple[Tensor, Tensor, Tensor]:
        """Call the backend's `next_tokens` with the model's head."""
        return self.ops.next_tokens(hidden, self.head, wanted, self.spec)

    def score(self, hidden: Tensor, token_ids: Tensor, rows: ScoredRows) -> Tensor:
        """Return the log-probs of `token_ids` (int64 [M], on the device of `hidden`): float32 [M].

        `hidden`: [M, hidden_size], the hidden states of `rows`.
        """
        if rows.is_cut:
            parts = self._processed_parts(hidden, token_ids, rows)
            return torch.cat([self.ops.log_probs(logits, tokens) for logits, tokens in parts])
        return self.next_tokens(hidden, _make_wanted_of(token_ids, rows.distribution))[1]

    def score_statistics(self, hidden: Tensor, token_ids: Tensor, rows: ScoredRows, k: int) -> TokenStatistics:
        """Return the same log-probs as `score`, and also the entropy and the k most probable tokens of each row."""
        if not rows.is_cut:
            wanted = _make_wanted_of(token_ids, rows.distribution)
            return self.ops.next_token_statistics(hidden, self.head, wanted, k, self.spec)[1]
        parts = self._processed_parts(hidden, token_ids, rows)
        found = [self.ops.token_statistics(logits, tokens, k) for logits, tokens in parts]
        return TokenStatistics._make(torch.cat(column) for column in zip(*found, strict=True))

    def _processed_parts(self, hidden: Tensor, token_ids: Tensor, rows: ScoredRows) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs (logits after edits, temperature and filters; token ids), each for at most `_LOGITS_ROWS`
        rows.
        """
        record = DrawRecord.of_scores(rows.distribution)
        divisor = _divisors(rows.distribution, hidden.device)
        for start in range(0, len(token_ids), _LOGITS_ROWS):
            part = slice(start, start + _LOGITS_ROWS)
            logits = self.ops.lm_head(hidden[part], self.head, self.spec)
            scaled = edit(logits, rows.edits(part)) / divisor
            yield self._filter(scaled, np.array([record] * len(scaled), DRAW)), token_ids[part]

    def _draw_recorded(self, hidden: Tensor, draws: Draws, k: int) -> _Part:
        wanted = make_wanted(draws, hidden.device)
        token_ids, found, finite = self.ops.next_token_statistics(hidden, self.head, wanted, k, self.spec)
        return (token_ids, found.logprobs, finite), found

    def _draw_processed(self, hidden: Tensor, draws: Draws, k: int) -> _Part:
        """Draw tokens as `next_tokens` does, but with edits and filters. Also compute statistics if k >= 0."""
        wanted = make_wanted(draws, hidden.device)
        raw = self.ops.lm_head(hidden[wanted.rows], self.head, self.spec)
        divisors = wanted.temperatures[:, None]
        processed = self._filter(edit(raw, draws.edits) / divisors, draws.records)
        token_ids = processed.argmax(-1)
        sampled = np.flatnonzero(draws.records["target"] == SAMPLE)
        if len(sampled):
            rows = _tensor(sampled, hidden)
            token_ids[rows] = self.ops.sample(processed[rows], wanted.seeds[rows], wanted.positions[rows])
        sources = {"raw": raw, "temperature": raw / divisors, "processed": processed}
        basis = torch.stack([sources[BASES[place]][i] for i, place in enumerate(draws.records["basis"].tolist())])
        found = None if k < 0 else self.ops.token_statistics(basis, token_ids, k)
        logprobs = self.ops.log_probs(basis, token_ids) if found is None else found.logprobs
        finite = processed.gather(1, token_ids[:, None]).isfinite().squeeze(1) & ~logprobs.isnan()
        return (token_ids, logprobs, finite), found

    def _filter(self, scaled: Tensor, records: np.ndarray) -> Tensor:
        """Apply the filters of each row. `records`: `DRAW`, one per row."""
        chosen = np.flatnonzero(records["has_filters"])
        if not len(chosen):
            return scaled
        rows, filters = _tensor(chosen, scaled), records[chosen]
        filtered = scaled.clone()
        filtered[rows] = self.ops.filter_logits(
            scaled[rows],
            _tensor(filters["top_k"], scaled),
            _tensor(filters["top_p"], scaled, torch.float32),
            _tensor(filters["min_p"], scaled, torch.float32),
        )
        return filtered


def _sorted_by_kind(draws: Draws) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort draws into three groups, and return the indices of the draws in each group: draws with statistics, but
    without filters or edits; draws with filters or edits; and plain draws.
    """
    is_cut, is_plain = draws.is_cut, draws.is_plain
    return np.flatnonzero(~is_cut & ~is_plain), np.flatnonzero(is_cut), np.flatnonzero(is_plain)


def make_wanted(draws: Draws, device: torch.device) -> Wanted:
    """Return the input of `next_tokens` for draws. Filters and edits are ignored. `draws` must not be empty."""
    records, integers = draws.records, np.empty((4, len(draws)), np.int64)
    integers[:] = draws.rows, records["target"], records["seed"], draws.positions
    columns = integers, records["temperature"].copy(), records["basis"] == BASES.index("raw")
    found, temperatures, raw = all_to_device(map(torch.from_numpy, columns), device)
    rows, targets, seeds, positions = found.unbind()
    return Wanted(rows, targets, temperatures, raw, seeds, positions)


def _make_wanted_of(token_ids: Tensor, distribution: Distribution) -> Wanted:
    """Return the input with which `next_tokens` computes, for each row, the log-prob of one given token. `token_ids`:
    int64 [M].
    """
    unused, rows = torch.zeros_like(token_ids), torch.arange(len(token_ids), device=token_ids.device)
    temperatures = _divisors(distribution, token_ids.device).repeat(len(token_ids))
    return Wanted(rows, token_ids, temperatures, unused.bool(), unused, unused)


def _divisors(distribution: Distribution, device: torch.device) -> Tensor:
    """Return the divisor of the logits as a tensor: float32 [1]."""
    return to_device(torch.tensor([divisor(distribution)], dtype=torch.float32), device)


def _cut(places: np.ndarray) -> list[np.ndarray]:
    """Split indices into parts of at most `_LOGITS_ROWS`."""
    return [places[start : start + _LOGITS_ROWS] for start in range(0, len(places), _LOGITS_ROWS)]


def _tensor(values: Any, like: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Convert `values` to a tensor on the device of `like`."""
    return to_device(torch.as_tensor(values, dtype=dtype), like.device)
