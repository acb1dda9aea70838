"""Choose tokens from hidden states, compute log-probs, and filter distributions.

This module defines the arithmetic on logits: the softmax, the noise of a draw, the choice of a token, and which tokens
a filter drops. The product that the logits are computed from is in products.py.

All ops here that return log-probs run the same two kernels, compiled identically for any number of rows. Log-probs from
different ops therefore have equal bits. The first kernel cuts each row at absolute multiples of SECTION and reduces
each section to its highest logit, its sum of exponentials and its best token. The second kernel folds the sections. A
NaN logit makes the sum NaN. If the sum of a row is NaN, every log-prob of the row is NaN. `token_statistics` reuses the
folded sums, because a separate kernel with a different number of warps would add numbers in a different order. No op
copies a value from the GPU to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import LOGITS_ROWS, MASK_BITS, SAMPLE, FoldedHead, TokenStatistics, Wanted
from ..specs import PLAIN_HEAD, HeadSpec
from . import products
from .launch import aligned, device_function, exact_jit, launch

SECTION = 2048
_LISTED = 32  # the number of tokens for which log-probs are stored at a time
_SAMPLE = tl.constexpr(SAMPLE)


def lm_head(hidden: Tensor, weight: Tensor, head: HeadSpec = PLAIN_HEAD) -> Tensor:
    """Return the logits of hidden [M, H] for weight [V, H]: float32 [M, V]."""
    logits = products.lm_head(hidden, weight)
    if head != PLAIN_HEAD:
        rows, columns = logits.shape
        grid, sizes = (rows, -(-columns // SECTION)), dict(V=columns, SECTION=SECTION)
        launch(_shape_logits_kernel, grid, logits, float(head.scale), warps=4, SOFT_CAP=head.soft_cap, **sizes)
    return logits


def next_tokens(
    hidden: Tensor, weight: Tensor, wanted: Wanted, head: HeadSpec = PLAIN_HEAD
) -> tuple[Tensor, Tensor, Tensor]:
    columns = (getattr(wanted, field.name).split(LOGITS_ROWS) for field in fields(Wanted))
    results = [
        _choose(lm_head(hidden.index_select(0, rows), weight, head), *asked)
        for rows, *asked in zip(*columns, strict=True)
    ]
    token_ids, logprobs, finite = (torch.cat(column) for column in zip(*results, strict=True))
    return token_ids, logprobs, finite


def next_token_statistics(
    hidden: Tensor, weight: Tensor, wanted: Wanted, k: int, head: HeadSpec = PLAIN_HEAD
) -> tuple[Tensor, TokenStatistics, Tensor]:
    columns = (getattr(wanted, field.name).split(LOGITS_ROWS) for field in fields(Wanted))
    results = []
    for rows, *asked in zip(*columns, strict=True):
        logits, (_, temperatures, raw, *_) = lm_head(hidden.index_select(0, rows), weight, head), asked
        token_ids, _, finite = _choose(logits, *asked)
        basis = torch.where(raw[:, None], logits, logits / temperatures[:, None])
        results.append((token_ids, finite, *token_statistics(basis, token_ids, k)))
    token_ids, finite, *found = (torch.cat(column) for column in zip(*results, strict=True))
    return token_ids, TokenStatistics._make(found), finite


def head_sections(
    hidden: Tensor, weight: Tensor, wanted: Wanted, k: int | None, first: int, head: HeadSpec = PLAIN_HEAD
) -> tuple[Tensor, ...]:
    """Return the logits."""
    return (lm_head(hidden.index_select(0, wanted.rows), weight, head),)


def fold_sections(found: Sequence[Tensor], wanted: Wanted, k: int | None) -> FoldedHead:
    logits = found[0]
    asked = [getattr(wanted, field.name) for field in fields(Wanted)[1:]]
    token_ids, logprobs, finite = _choose(logits, *asked)
    if k is None:
        return FoldedHead(token_ids, logprobs, finite, None)
    basis = torch.where(wanted.raw[:, None], logits, logits / wanted.temperatures[:, None])
    return FoldedHead(token_ids, logprobs, finite, token_statistics(basis, token_ids, k))


def log_probs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """See `Backend.log_probs`. torch's gather only moves data; the kernels do all arithmetic."""
    logits, listed = aligned(logits), token_ids if token_ids.dim() == 2 else token_ids[:, None]
    unread = listed[:, 0].contiguous()
    ones = torch.ones_like(unread, dtype=torch.float32)
    _, _, _, peaks, totals = _choose_and_sum(logits, unread, ones, ones.bool(), unread, unread)
    found = aligned(logits.gather(1, listed))
    out, count = torch.empty_like(found), listed.shape[1]
    launch(_log_probs_kernel, (len(logits),), peaks, totals, found, out, count, warps=4, WIDTH=_LISTED)
    return out.view_as(token_ids)


def sample(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    ones = torch.ones_like(seeds, dtype=torch.float32)
    return _choose(logits, torch.full_like(seeds, SAMPLE), ones, ones.bool(), seeds, positions)[0]


def _choose(
    logits: Tensor, targets: Tensor, temperatures: Tensor, raw: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `next_tokens` for float32 logits [M, V]; the other arguments are columns of `Wanted`."""
    return _choose_and_sum(logits, targets, temperatures, raw, seeds, positions)[:3]


def _choose_and_sum(
    logits: Tensor, targets: Tensor, temperatures: Tensor, raw: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the results of `_choose`, followed by two float32 tensors [M]: the highest logit of each row, and the sum
    of exp(logit - highest) over each row.
    """
    rows, vocab_size = logits.shape
    sections = -(-vocab_size // SECTION)
    asked = [aligned(x) for x in (logits, targets, temperatures, raw)]
    draws = aligned(seeds), aligned(positions)
    peaks, totals, bests = (logits.new_empty(rows, sections) for _ in range(3))
    parts = peaks, totals, bests, torch.empty_like(bests, dtype=torch.int32)
    launch(_reduce_section_kernel, (rows, sections), *asked, *draws, *parts, warps=4, V=vocab_size, SECTION=SECTION)
    out = torch.empty_like(targets), torch.empty_like(temperatures), torch.empty_like(raw)
    sums = logits.new_empty(rows), logits.new_empty(rows)
    sizes = dict(V=vocab_size, SECTIONS=sections, SPAN=triton.next_power_of_2(sections))
    launch(_fold_sections_kernel, (rows,), *asked, *parts, *out, *sums, warps=1, **sizes)
    return *out, *sums


def token_statistics(logits: Tensor, token_ids: Tensor, k: int) -> TokenStatistics:
    """See `Backend.token_statistics`. torch's sort and gather only move data; the kernels do all arithmetic."""
    logits, ids = aligned(logits), aligned(token_ids)
    ones = torch.ones_like(ids, dtype=torch.float32)
    _, log_probs, _, peaks, totals = _choose_and_sum(logits, ids, ones, ones.bool(), ids, ids)
    top_ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k]
    top_logits, entropy = aligned(logits.gather(1, top_ids)), torch.empty_like(ones)
    top_log_probs = torch.empty_like(top_logits)
    args = logits, peaks, totals, top_logits, top_log_probs, entropy, k
    sizes = dict(V=logits.shape[1], SECTION=SECTION, WIDTH=_LISTED)
    launch(_statistics_kernel, (len(logits),), *args, warps=4, **sizes)
    return TokenStatistics(log_probs, entropy, top_ids, top_log_probs)


def mask_logits(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    sections = -(-logits.shape[1] // SECTION)
    sizes = dict(V=logits.shape[1], WORDS=masks.shape[1], SECTION=SECTION, BITS=MASK_BITS)
    launch(_mask_kernel, (len(rows), sections), logits, aligned(rows), aligned(masks), warps=4, **sizes)


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """See `Backend.filter_logits`. torch's sort and scatter only move data; the kernel does all arithmetic."""
    rows, vocab_size = logits.shape
    ordered, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    kept = torch.empty_like(top_k)
    filters = (aligned(x) for x in (top_k, top_p, min_p))
    launch(_count_kept_kernel, (rows,), ordered, *filters, kept, warps=4, V=vocab_size, TILE=SECTION)
    ranks = torch.arange(vocab_size, device=logits.device)
    dropped = torch.empty_like(logits, dtype=torch.bool).scatter_(1, ids, ranks >= kept[:, None])
    # torch's sort orders a NaN by its sign, so the ranks in a row with NaN have no meaning. Such a row stays unchanged.
    return logits.masked_fill_(dropped & ~logits.isnan().any(-1, keepdim=True), -torch.inf)


@exact_jit
def _shape_logits_kernel(logits_ptr, scale, V: tl.constexpr, SECTION: tl.constexpr, SOFT_CAP: tl.constexpr):
    """One program per section of a row: convert the products of hidden states and the head's weight to logits, in
    place.
    """
    ids = tl.program_id(1) * SECTION + tl.arange(0, SECTION)
    place, inside = tl.program_id(0).to(tl.int64) * V + ids, ids < V
    logits = tl.load(logits_ptr + place, mask=inside, other=0.0) * scale
    if SOFT_CAP is not None:
        decay = tl.exp(tl.abs(logits) * (-2.0 / SOFT_CAP))
        capped = (1.0 - decay) / (1.0 + decay) * SOFT_CAP
        logits = tl.where(logits < 0, -capped, capped)
    tl.store(logits_ptr + place, logits, mask=inside)


@exact_jit
def _reduce_section_kernel(
    logits_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    raw_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    bests_ptr: tl.tensor,
    best_ids_ptr: tl.tensor,
    V: tl.constexpr,
    SECTION: tl.constexpr,
) -> None:
    """One program per section of a row: compute the partial results that `_fold_sections_kernel` folds.

    `peaks`: the highest logit in the section. For `peaks` and `totals`, logits are divided by the temperature unless
    `raw` is set, as for the log-prob. `totals`: the sum of exp(logit - peak) over the section's logits. `bests`: the
    highest score in the section; the token with the highest score is chosen. `best_ids`: the lowest id with the highest
    score. NaN ranks highest.
    """
    row, section = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = section * SECTION + tl.arange(0, SECTION)
    logits = tl.load(logits_ptr + row * V + ids, mask=ids < V, other=-float("inf"))
    scaled = tl.div_rn(logits, tl.load(temperatures_ptr + row))
    if tl.load(targets_ptr + row) == _SAMPLE:
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        score = scaled + gumbel_noise(philox_words(seed, position, section * (SECTION // 4), SECTION))
    else:
        score = scaled
    score = _nan_as_highest(score)
    best = tl.max(score, 0)
    basis = tl.where(tl.load(raw_ptr + row), logits, scaled)
    peak = tl.max(_nan_as_highest(basis), 0)
    part = row * tl.num_programs(1) + section
    tl.store(peaks_ptr + part, peak)
    tl.store(totals_ptr + part, tl.sum(tl.exp(basis - _zero_if_none(peak)), 0))
    tl.store(bests_ptr + part, best)
    tl.store(best_ids_ptr + part, tl.min(tl.where(score == best, ids, V), 0))


@exact_jit
def _fold_sections_kernel(
    logits_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    raw_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    bests_ptr: tl.tensor,
    best_ids_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    logprobs_ptr: tl.tensor,
    finite_ptr: tl.tensor,
    peak_ptr: tl.tensor,
    total_ptr: tl.tensor,
    V: tl.constexpr,
    SECTIONS: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    """One program per row: compute the row's token, the token's log-prob, whether the result is valid, and the folded
    sums of the row's sections.
    """
    row = tl.program_id(0).to(tl.int64)
    sections = tl.arange(0, SPAN)
    parts, real = row * SECTIONS + sections, sections < SECTIONS
    bests = tl.load(bests_ptr + parts, mask=real, other=-float("inf"))
    best_ids = tl.load(best_ids_ptr + parts, mask=real, other=V)
    target = tl.load(targets_ptr + row)
    token = tl.where(target < 0, tl.min(tl.where(bests == tl.max(bests, 0), best_ids, V), 0), target)

    peaks = tl.load(peaks_ptr + parts, mask=real, other=-float("inf"))
    totals = tl.load(totals_ptr + parts, mask=real, other=0.0)
    peak = tl.max(peaks, 0)
    total = tl.sum(totals * tl.exp(peaks - _zero_if_none(peak)), 0)
    logit = tl.load(logits_ptr + row * V + token)
    scaled = tl.div_rn(logit, tl.load(temperatures_ptr + row))
    logprob = tl.where(tl.load(raw_ptr + row), logit, scaled) - peak - tl.log(total)
    tl.store(token_ids_ptr + row, token)
    tl.store(logprobs_ptr + row, logprob)
    tl.store(finite_ptr + row, (tl.abs(scaled) < float("inf")) & (logprob == logprob))
    tl.store(peak_ptr + row, peak)
    tl.store(total_ptr + row, total)


@exact_jit
def _statistics_kernel(
    logits_ptr: tl.tensor,
    peak_ptr: tl.tensor,
    total_ptr: tl.tensor,
    found_ptr: tl.tensor,
    log_probs_ptr: tl.tensor,
    entropy_ptr: tl.tensor,
    count: tl.tensor,
    V: tl.constexpr,
    SECTION: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """One program per row: compute the log-probs of `count` listed logits of the row, and the row's entropy."""
    row = tl.program_id(0).to(tl.int64)
    peak, total = tl.load(peak_ptr + row), tl.load(total_ptr + row)
    weighted = 0.0  # the sum of (logit - peak) * exp(logit - peak)
    for start in range(0, V, SECTION):
        ids = start + tl.arange(0, SECTION)
        distance = tl.load(logits_ptr + row * V + ids, mask=ids < V, other=-float("inf")) - _zero_if_none(peak)
        terms = tl.where(distance == -float("inf"), 0.0, distance * tl.exp(distance))
        weighted = tl.sum(terms, 0) + weighted
    tl.store(entropy_ptr + row, tl.log(total) - weighted / total)
    _list_log_probs(peak, total, found_ptr + row * count, log_probs_ptr + row * count, count, WIDTH)


@exact_jit
def _log_probs_kernel(
    peak_ptr: tl.tensor,
    total_ptr: tl.tensor,
    found_ptr: tl.tensor,
    log_probs_ptr: tl.tensor,
    count: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """One program per row: compute the log-probs of `count` listed logits of the row."""
    row = tl.program_id(0).to(tl.int64)
    peak, total = tl.load(peak_ptr + row), tl.load(total_ptr + row)
    _list_log_probs(peak, total, found_ptr + row * count, log_probs_ptr + row * count, count, WIDTH)


@device_function
def _list_log_probs(
    peak: tl.tensor,
    total: tl.tensor,
    found_ptr: tl.tensor,
    log_probs_ptr: tl.tensor,
    count: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """Compute the log-probs of `count` logits of a row, in parts of `WIDTH`."""
    for start in tl.range(0, count, WIDTH):  # type: ignore[reportGeneralTypeIssues]
        places = start + tl.arange(0, WIDTH)
        found = tl.load(found_ptr + places, mask=places < count, other=0.0)
        tl.store(log_probs_ptr + places, found - peak - tl.log(total), mask=places < count)


@exact_jit
def _mask_kernel(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    V: tl.constexpr,
    WORDS: tl.constexpr,
    SECTION: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """One program per section of a masked row: set the logits of tokens with mask bit 0 to -inf. Reads no logit."""
    mask, ids = tl.program_id(0).to(tl.int64), tl.program_id(1) * SECTION + tl.arange(0, SECTION)
    words = tl.load(masks_ptr + mask * WORDS + ids // BITS, mask=ids < V, other=-1)
    place = tl.load(rows_ptr + mask) * V + ids
    tl.store(logits_ptr + place, -float("inf"), mask=(ids < V) & ((words >> (ids % BITS) & 1) == 0))


@exact_jit
def _count_kept_kernel(
    ordered_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    V: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Count the logits that the filters keep in a row. The row's logits are sorted in descending order. The count of a
    row with NaN is arbitrary.

    All logits after the first dropped logit are dropped, so that rounding can never drop one logit and keep a lower
    one.
    """
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    limit = tl.where(top_k < 0, V, tl.minimum(top_k, V))
    best = tl.load(ordered_ptr + row * V)
    total = 0.0
    for start in range(0, V, TILE):
        total = tl.sum(_weights(ordered_ptr + row * V, start, best, limit, V, TILE), 0) + total
    bound = tl.where(top_p >= 1.0, float("inf"), top_p * total)
    kept, before = limit, 0.0
    for start in range(0, V, TILE):
        weights = _weights(ordered_ptr + row * V, start, best, limit, V, TILE)
        stays = (before + (tl.cumsum(weights, 0) - weights) < bound) & (weights >= min_p)
        kept = tl.minimum(kept, tl.min(tl.where(stays, V, start + tl.arange(0, TILE)), 0))
        before = tl.sum(weights, 0) + before
    tl.store(kept_ptr + row, tl.maximum(kept, 1))


@device_function
def _weights(
    row_ptr: tl.tensor, start: tl.tensor, best: tl.tensor, limit: tl.tensor, V: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """Return exp(logit - best) for the sorted logits at ranks [start, start + TILE), and 0 for ranks from `limit`
    on.
    """
    ranks = start + tl.arange(0, TILE)
    logits = tl.load(row_ptr + ranks, mask=ranks < V, other=-float("inf"))
    return tl.where(ranks < limit, tl.exp(logits - best), 0.0)


@device_function
def philox_words(seed: tl.tensor, position: tl.tensor, counter: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """Return COUNT random words (uint32) for the ids that begin at 4 * counter. The words equal the words of
    `reference.philox`.
    """
    counters = counter + tl.arange(0, COUNT // 4)
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    words = tl.philox(seed, counters, low, high, 0)
    return tl.interleave(tl.interleave(words[0], words[2]), tl.interleave(words[1], words[3]))


@device_function
def gumbel_noise(words: tl.tensor) -> tl.tensor:
    """Return standard Gumbel noise for random words, as `reference` defines it."""
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -tl.log(-log1p(-uniform))


@device_function
def log1p(x: tl.tensor) -> tl.tensor:
    """Return log(1 + x) as the logarithm of the rounded sum, corrected to first order for the rounding error."""
    rounded = 1.0 + x
    return tl.log(rounded) + (x - (rounded - 1.0)) / rounded


@device_function
def _nan_as_highest(x: tl.tensor) -> tl.tensor:
    return tl.where(x != x, float("inf"), x)


@device_function
def _zero_if_none(peak: tl.tensor) -> tl.tensor:
    """Return the value to subtract from logits: the highest logit, or 0 if all logits are -inf, so that exp gives 0 and
    not NaN.
    """
    return tl.where(peak == -float("inf"), 0.0, peak)
