"""The distribution from which the tokens of a rollout were drawn, computed by a trainer from its own logits.

An aligned model has the worker's logits to the bit. Edits and filters therefore keep the same tokens as on the worker,
and log-probs have the worker's bits. The trainer needs no record of which tokens the worker kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from trueroll.errors import AlignmentError

from .contract import Backend
from .edits import Edited, EditedText, Masks, RowEdits, Rules, edit, edit_slopes
from .packed import Packed


class Drawn(Edited, Protocol):
    """The parameters with which tokens were drawn. `engine.request.Distribution` documents the parameters."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def has_filters(self) -> bool: ...
    @property
    def stop_token_ids(self) -> Sequence[int]: ...
    @property
    def ignore_eos(self) -> bool: ...


class Samples:
    """Which tokens of a packed batch belong to samples, and which tokens belong to prompts.

    `ids`, `is_sampled`: the tokens and whether they were sampled, int64 and bool [M]. A run of sampled tokens in a
    sequence is a sample, and everything before the run is its prompt. `is_sampled` is None if it is not known which
    tokens were sampled.
    """

    def __init__(self, ids: Tensor, packed: Packed, is_sampled: Tensor | None) -> None:
        self.is_known = is_sampled is not None
        places = torch.arange(len(ids), device=ids.device)
        sampled = torch.ones_like(ids, dtype=torch.bool) if is_sampled is None else is_sampled
        begins = sampled & ((packed.positions == 0) | ~sampled.roll(1))
        self._starts = torch.where(begins, places, 0).cummax(0).values.tolist()
        self._positions, self._ids = packed.positions.tolist(), ids.cpu().numpy()

    def edits(self, rules: Rules, tokens: Sequence[int], masks: Masks | None) -> Iterator[RowEdits]:
        """Yield the edits with which `tokens` were drawn. `tokens`: indices of sampled tokens, ascending. `masks`: the
        masks of the grammar, or None.
        """
        runs = groupby(enumerate(tokens), lambda each: (self._starts[each[1]], each[1] - each[0]))
        for (start, _), run in runs:
            found = [token for _, token in run]
            first, end = found[0], found[-1] + 1
            origin = first - self._positions[first]
            own = None if masks is None else masks.rows(self._ids[start:end], first - start)
            text = EditedText(rules, self._ids[origin:end], start - origin, own)
            yield from text.rows(first - origin, end - origin)


class Processing:
    """Applies edits, temperature and filters to logits, to get the distribution of each token in `tokens`.

    `tokens`: the indices of M tokens in `samples`, ascending. `divisor`: the temperature. `masks`: the masks of the
    distribution's grammar, if it has one.
    """

    def __init__(
        self,
        distribution: Drawn,
        rules: Rules | None,
        divisor: float,
        samples: Samples,
        tokens: Tensor,
        masks: Masks | None,
    ) -> None:
        self._distribution, self._rules, self._divisor = distribution, rules, divisor
        self._samples, self._tokens, self._masks = samples, tokens.tolist(), masks

    def apply(self, ops: Backend, logits: Tensor, rows: slice) -> Tensor:
        """Apply edits, temperature and filters to `logits` [m, V] of the tokens in `rows`. Return float32 [m, V]."""
        return self._processed(ops, logits, self._edits(rows))

    def apply_with_slopes(self, ops: Backend, logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the result of `apply`, and the derivatives of the edited logits with respect to the logits: float32
        [m, V].
        """
        edits = self._edits(rows)
        return self._processed(ops, logits, edits), edit_slopes(logits, edits)

    def _processed(self, ops: Backend, logits: Tensor, edits: Mapping[int, RowEdits]) -> Tensor:
        given = self._distribution
        scaled = edit(ops, logits, edits) / torch.tensor(self._divisor, dtype=torch.float64).to(logits)
        if not given.has_filters:
            return scaled
        filters = (given.top_k, torch.int64), (given.top_p, torch.float32), (given.min_p, torch.float32)
        columns = (torch.full((len(logits),), value, dtype=dtype, device=logits.device) for value, dtype in filters)
        return ops.filter_logits(scaled, *columns)

    def _edits(self, rows: slice) -> dict[int, RowEdits]:
        if self._rules is None:
            return {}
        return dict(enumerate(self._samples.edits(self._rules, self._tokens[rows], self._masks)))


def rules_of(
    distribution: Drawn,
    eos_token_ids: Sequence[int] | None,
    samples: Samples,
    vocab_size: int,
    masks: Masks | None,
) -> Rules | None:
    """Return the edits that a worker made for a distribution. `eos_token_ids`: the tokens that end the worker's
    samples. `masks`: as in `Processing`.

    Raise AlignmentError if the edits depend on an argument that is missing.
    """
    needs_eos = distribution.min_tokens > 0 and not distribution.ignore_eos
    if needs_eos and eos_token_ids is None:
        raise AlignmentError(
            f"eos_token_ids must be given, since min_tokens = {distribution.min_tokens} excludes these tokens at the "
            "start of a sample; pass client.health().engine['eos_token_ids']"
        )
    if distribution.structured_outputs is not None and masks is None:
        raise AlignmentError(
            "masks must be given, since the distribution has structured_outputs; pass "
            "trueroll.rollout.grammar.GrammarMasks(distribution, tokenizer, client.health().engine)"
        )
    ending = {*distribution.stop_token_ids, *((eos_token_ids or ()) if needs_eos else ())}
    rules = Rules.of(distribution, sorted(ending), vocab_size)
    if rules is not None and not samples.is_known and (rules.reads_tokens or rules.min_tokens):
        raise AlignmentError(
            "completion_mask must be given, since the distribution depends on where a sample begins; pass a "
            "completion_mask that marks the sampled tokens"
        )
    return rules
