"""Sampling: computes tokens and log-probs from hidden states. Each row has its own sampling parameters.

Owns the order in which the edits of logits, `temperature` and filters are applied, and the distributions under which
`logprobs` and `top_logprobs` are computed. The sampler has no state: a draw depends only on logits, sampling
parameters, seed and position. Only `Drawing.wait` synchronizes the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from ...kernels.contract import SAMPLE, Backend, EditingBackend, TokenStatistics, Wanted, Weight
from ...kernels.edits import edit_, edits_packer
from ...kernels.specs import HeadSpec
from ...kernels.transfer import all_to_device, to_device
from ..outputs.open_requests import BASES, DRAW, DrawRecord, divisor
from ..request import NO_TARGET, Distribution
from .host_copies import HostCopies
from .step import Draws, ScoredRows

# The maximum number of rows with logits in memory at the same time.
_LOGITS_ROWS = 64

# The indices of some draws, and float32 [draws, K] with the log-probs of the target tokens.
_Targets = tuple[list[int], Tensor]
# The indices of some draws; uint8 [draws, ceil(V / 8)], in which the bits of the tokens that could be drawn are 1, the
# lowest bit first, or all bits are 0 if the whole vocabulary could be drawn; and float32 [draws] with the logarithm of
# the total probability that these tokens have before filters.
_Kept = tuple[list[int], Tensor, Tensor]

WHOLE_VOCABULARY = np.int32(0).tobytes(), np.float32(0).tobytes(), b""
"""The bytes of each column of `request.KEPT` for a token that was drawn from the whole vocabulary."""


class _Part(NamedTuple):
    """The results of the draws with the indices `places`, in ascending order. `columns`: the result of `next_tokens`.
    `statistics`: None if no draw of the part requests statistics. `targets`, `kept`: the results of some draws, which
    are given as indices into `places`.
    """

    places: np.ndarray
    columns: tuple[Tensor, Tensor, Tensor]
    statistics: TokenStatistics | None = None
    targets: Sequence[_Targets] = ()
    kept: Sequence[_Kept] = ()


class Drawn(NamedTuple):
    """Drawn tokens, in the order of their draws.

    `token_ids`: int64 [N]. `logprobs`: float32 [N]. `is_finite`: bool [N], false if the logit of the token is NaN or
    infinite. `records`: maps the index of each draw with statistics to the bytes of each column of `request.TOPS`.
    `targets`: maps the index of each draw with targets to the bytes of the targets' log-probs. `kept`: maps the indices
    of draws that record their kept set (the tokens that could be drawn) to the bytes of each column of `request.KEPT`.
    If a draw that records its kept set is not in `kept`, the whole vocabulary could be drawn.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    is_finite: np.ndarray
    records: Mapping[int, tuple[bytes, ...]]
    targets: Mapping[int, bytes]
    kept: Mapping[int, tuple[bytes, ...]]


class Drawing:
    """A draw of tokens; the draw may still be running on the device. `token_ids`: int64 [R], on the device.

    `recorded`: a pair for each row of `statistics`: the index of the draw, and the number of top tokens to record. The
    number of top tokens is -1 for a draw that requests no statistics. `targets`, `kept`: the results for the draws that
    record targets or kept sets.
    """

    def __init__(
        self,
        token_ids: Tensor,
        logprobs: Tensor,
        is_finite: Tensor,
        *,
        recorded: Sequence[tuple[int, int]] = (),
        statistics: Sequence[TokenStatistics] = (),
        targets: Sequence[_Targets] = (),
        kept: Sequence[_Kept] = (),
    ) -> None:
        self.token_ids = token_ids
        self._recorded, self._with_targets = recorded, [places for places, _ in targets]
        self._with_kept = [places for places, _, _ in kept]
        joined = [torch.cat(column) for column in list(zip(*statistics, strict=True))[1:]]
        given = [*(found for _, found in targets), *chain.from_iterable(found for _, *found in kept)]
        self._copies = HostCopies([token_ids, logprobs, is_finite, *given, *joined])

    def wait(self) -> Drawn:
        """Wait for the device and return the tokens."""
        token_ids, logprobs, is_finite, *rest = self._copies.wait()
        first = len(self._with_targets)
        end = first + 2 * len(self._with_kept)
        targets = {
            place: row.tobytes()
            for places, found in zip(self._with_targets, rest, strict=False)
            for place, row in zip(places, found, strict=True)
        }
        return Drawn(token_ids, logprobs, is_finite, self._records(rest[end:]), targets, self._kept(rest[first:end]))

    def _kept(self, found: Sequence[np.ndarray]) -> dict[int, tuple[bytes, ...]]:
        kept = dict[int, tuple[bytes, ...]]()
        for places, bits, log_mass in zip(self._with_kept, found[::2], found[1::2], strict=True):
            counts, ids = kept_ids(bits)
            columns = _cut_bytes(counts), _cut_bytes(log_mass), _cut_bytes(ids, counts)
            kept |= zip(places, zip(*columns, strict=True), strict=True)
        return kept

    def _records(self, statistics: Sequence[np.ndarray]) -> dict[int, tuple[bytes, ...]]:
        if not statistics:
            return {}
        entropy, token_ids, logprobs = statistics
        rows = zip(self._recorded, entropy, token_ids.astype(np.int32), logprobs, strict=True)
        return {i: (nats.tobytes(), ids[:k].tobytes(), top[:k].tobytes()) for (i, k), nats, ids, top in rows if k >= 0}


class Scoring:
    """The columns of scored tokens, as `Sampler.score` returns them; the device may still be computing the columns.
    `has_mask`: as in `ScoredRows`.
    """

    def __init__(self, columns: Sequence[Tensor], has_mask: bool) -> None:
        self._copies, self._has_mask = HostCopies(columns), has_mask

    def wait(self) -> list[np.ndarray]:
        """Wait for the device, and return the columns. With `has_mask`, the last columns are `kept_counts`,
        `kept_log_mass` and the kept tokens as `packed_bits`, which `kept_ids` converts to ids.
        """
        columns = self._copies.wait()
        if not self._has_mask:
            return columns
        *columns, log_mass, bits = columns
        return [*columns, np.bitwise_count(bits).sum(1, dtype=np.int32), log_mass, bits]


class Sampler:
    """Draws tokens with the ops of one backend and a model's head [vocab_size, hidden_size]. `spec`: how the
    products of hidden states and the head become logits.

    Rows that have neither filters nor edits nor targets are drawn by `next_tokens`, or by `next_token_statistics` if
    the rows have `top_logprobs`. If the backend sets `FUSES_EDITS`, `edited_tokens` draws most rows with edits or
    targets.
    `next_tokens`, `next_token_statistics` and `edited_tokens` do not store the logits. Other rows are drawn by several
    separate ops.
    """

    def __init__(self, backend: Backend, head: Weight, spec: HeadSpec) -> None:
        self.ops, self.head, self.spec = backend, head, spec
        self._editing = cast(EditingBackend, backend) if backend.FUSES_EDITS else None

    def draw(self, hidden: Tensor, draws: Draws) -> Drawing:
        """Draw the tokens of `draws`, which must not be empty. `hidden`: [M, hidden_size]."""
        return self.prepared(draws, hidden.device)(hidden)

    def prepared(self, draws: Draws, device: torch.device) -> Callable[[Tensor], Drawing]:
        """Prepare a draw before the hidden states are computed, and return a function that draws. The host prepares a
        draw faster before a long computation than afterwards, because the computation displaces the content of the
        host's caches.
        """
        if draws.are_plain:
            wanted = make_wanted(draws, device)
            return lambda hidden: Drawing(*self.next_tokens(hidden, wanted))
        num_tops = draws.records["num_tops"]
        k = int(num_tops.max())  # draws that record fewer than k tokens use the first ones
        whole, processed, plain = self._sorted_by_kind(draws)
        kinds = (whole, k), (plain, None)
        fused = [self._fused(draws, places, tops, device) for places, tops in kinds if len(places)]

        def draw(hidden: Tensor) -> Drawing:
            parts = [each(hidden) for each in fused]
            parts += [self._draw_processed(hidden, draws, places, k) for places in _cut(processed)]
            return _drawing_of(parts, num_tops)

        return draw

    def next_tokens(self, hidden: Tensor, wanted: Wanted) -> tuple[Tensor, Tensor, Tensor]:
        """Call the backend's `next_tokens` with the model's head."""
        return self.ops.next_tokens(hidden, self.head, wanted, self.spec)

    def score(self, hidden: Tensor, token_ids: Tensor, rows: ScoredRows) -> list[Tensor]:
        """Return the columns of scored tokens. The first column has the tokens' log-probs (float32 [M]). If `rows` has
        `top_logprobs`, the next columns are the other columns of `TokenStatistics`. If `rows` has targets, the next
        column has the targets' log-probs (float32 [M, K]). If `rows` has a mask, the last two columns are
        `kept_log_mass` (float32 [M]) and the kept tokens as `packed_bits`.

        `hidden`: [M, hidden_size], the hidden states of `rows`. `token_ids`: int64 [M], on the device of `hidden`.
        """
        k = rows.top_logprobs
        if not rows.is_cut:
            asked = hidden, self.head, _make_wanted_of(token_ids, rows.distribution)
            if k is None:
                found = [self.ops.next_tokens(*asked, self.spec)[1]]
            else:
                found = [*self.ops.next_token_statistics(*asked, k, self.spec)[1]]
            return found + (_whole_vocabulary(found[0]) if rows.has_mask else [])
        parts = list[list[Tensor]]()
        for part, unfiltered, logits in self._processed_parts(hidden, rows):
            ids = token_ids[part]
            found = [self.ops.log_probs(logits, ids)] if k is None else [*self.ops.token_statistics(logits, ids, k)]
            if rows.targets is not None:
                found.append(self._target_log_probs(logits, rows.targets[part]))
            if rows.has_mask:
                found += self._kept_of_scores(unfiltered, logits, ids, found[0])
            parts.append(found)
        return [torch.cat(column) for column in zip(*parts, strict=True)]

    def _target_log_probs(self, logits: Tensor, targets: np.ndarray) -> Tensor:
        """Return the log-probs of `targets` (int64 [M, K]), with 0 for NO_TARGET: float32 [M, K]."""
        ids = _tensor(targets, logits)
        return self.ops.log_probs(logits, ids.clamp(min=0)).masked_fill(ids == NO_TARGET, 0.0)

    def _kept_of_scores(
        self, unfiltered: Tensor, processed: Tensor, token_ids: Tensor, logprobs: Tensor
    ) -> list[Tensor]:
        """Return `kept_log_mass` (float32 [M]) and the kept tokens (`packed_bits`) of scored tokens.

        The mass is the difference of a kept token's log-probs before and after the filters. All kept tokens give the
        same mass, except for rounding. If the filters kept the scored token, the mass is computed from the scored
        token, so that the mass has the same bits as the recorded mass of a sample that drew this token. If the filters
        dropped the scored token, the most probable token is used instead.
        """
        kept = torch.where(logprobs.isneginf(), processed.argmax(-1), token_ids)
        log_mass = self.ops.log_probs(unfiltered, kept) - self.ops.log_probs(processed, kept)
        return [log_mass, packed_bits(processed)]

    def _processed_parts(self, hidden: Tensor, rows: ScoredRows) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield (slice, unfiltered logits, filtered logits) for at most `_LOGITS_ROWS` rows at a time. The logits are
        edited and divided by the temperature. If `rows` has no mask, both values are the same filtered tensor.
        """
        record = DrawRecord.of_scores(rows.distribution)
        temperature = _divisors(rows.distribution, hidden.device)
        for start in range(0, len(hidden), _LOGITS_ROWS):
            part = slice(start, start + _LOGITS_ROWS)
            logits = self.ops.lm_head(hidden[part], self.head, self.spec)
            scaled = edit_(self.ops, logits, rows.edits(part)).div_(temperature)
            unfiltered = scaled.clone() if rows.has_mask else scaled
            yield part, unfiltered, self._filter(scaled, np.array([record] * len(scaled), DRAW))

    def _sorted_by_kind(self, draws: Draws) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sort draws into three groups, and return the indices of the draws in each group. The groups are: draws with
        statistics that need no stored logits, draws that need stored logits, and other draws.
        """
        records = draws.records
        if self._editing is None:
            is_stored = records["has_filters"] | records["has_targets"] | draws.is_edited
        else:
            # If the basis of the log-probs is not `processed`, the logits before and after edits are needed. To record
            # a kept set, the edited logits are needed.
            keeps = (records["basis"] != BASES.index("processed")) | records["has_mask"]
            is_stored = records["has_filters"] | (draws.is_edited & keeps if keeps.any() else keeps)
        has_statistics = ~is_stored & (records["num_tops"] >= 0)
        groups = has_statistics, is_stored, ~is_stored & ~has_statistics
        whole, processed, plain = map(np.flatnonzero, groups)
        return whole, processed, plain

    def _fused(
        self, draws: Draws, places: np.ndarray, k: int | None, device: torch.device
    ) -> Callable[[Tensor], _Part]:
        """Prepare the draws with the indices `places`, which need no stored logits. Return a function that draws the
        tokens, with statistics if `k` is not None.
        """
        own, head = _taken(draws, places), self.head
        wanted = make_wanted(own, device)
        if own.edits or own.targets:
            assert self._editing is not None
            op, prepare = self._editing.edited_tokens, self._editing.prepare_edits
            pack = edits_packer(own.edits, own.targets, len(own), head.shape[0])
            waits = any(each.await_mask is not None for each in own.edits.values())
            packed = None if waits else prepare(pack())  # masks of grammars arrive while the layers are computed

            def draw_edited(hidden: Tensor) -> _Part:
                found, of_targets = op(hidden, head, wanted, packed or prepare(pack()), k, self.spec)
                targets = _cut_targets(own.targets, of_targets) if own.targets else []
                return _Part(places, found[:3], found.statistics, targets)

            return draw_edited

        def draw(hidden: Tensor) -> _Part:
            if k is None:
                return _Part(places, self.next_tokens(hidden, wanted))
            token_ids, found, finite = self.ops.next_token_statistics(hidden, head, wanted, k, self.spec)
            return _Part(places, (token_ids, found.logprobs, finite), found)

        return draw

    def _draw_processed(self, hidden: Tensor, draws: Draws, places: np.ndarray, k: int) -> _Part:
        """Draw the tokens of the draws with the indices `places` as `next_tokens` does, but with edits and filters.
        Also compute the log-probs of targets, the kept sets (see `Drawn`), and, if k >= 0, statistics.
        """
        draws = draws.take(places)
        wanted = make_wanted(draws, hidden.device)
        raw = self.ops.lm_head(hidden[wanted.rows], self.head, self.spec)
        is_one = bool((draws.records["basis"] == BASES.index("processed")).all())  # `raw` is not needed again
        edited = edit_(self.ops, raw if is_one else raw.clone(), draws.edits)
        scaled = _scaled(edited, wanted, draws, out=edited)
        is_dropped = draws.records["has_mask"] & draws.records["has_filters"]
        recorded, processed, unfiltered = None, scaled, scaled
        if self._editing is not None and is_dropped.all():
            recorded = self._editing.filter_recorded(scaled, *_filters(draws.records, scaled))
        else:
            unfiltered = scaled.clone() if is_dropped.any() else scaled
            processed = self._filter(scaled, draws.records)
        token_ids = self._choose(processed, draws.records, wanted)
        basis = processed if is_one else _basis(raw, processed, wanted, draws)
        found = None if k < 0 else self.ops.token_statistics(basis, token_ids, k)
        logprobs = self.ops.log_probs(basis, token_ids) if found is None else found.logprobs
        finite = processed.gather(1, token_ids[:, None]).isfinite().squeeze(1) & ~logprobs.isnan()
        targets = list[_Targets]()
        for equal in _of_equal_length(draws.targets):
            ids = np.stack([draws.targets[i] for i in equal])
            targets.append((equal, self._target_log_probs(basis[_tensor(equal, basis)], ids)))
        of_processed = logprobs if is_one else None
        if recorded is None:
            kept = self._kept(unfiltered, processed, token_ids, of_processed, draws)
        else:
            kept = self._recorded(*recorded, processed, token_ids, of_processed)
        return _Part(places, (token_ids, logprobs, finite), found, targets, kept)

    def _kept(
        self, unfiltered: Tensor, processed: Tensor, token_ids: Tensor, logprobs: Tensor | None, draws: Draws
    ) -> list[_Kept]:
        """For the draws that record kept sets, return which tokens could be drawn. `unfiltered`: the logits before
        filters. `logprobs`: the log-probs of the drawn tokens under `processed`, float32 [M], or None if they are not
        computed yet.
        """
        places = np.flatnonzero(draws.records["has_mask"])
        if not len(places):
            return []
        if logprobs is None:
            logprobs = self.ops.log_probs(processed, token_ids)
        if len(places) < len(draws):
            rows, tensors = _tensor(places, processed), (unfiltered, processed, token_ids, logprobs)
            unfiltered, processed, token_ids, logprobs = (x[rows] for x in tensors)
        log_mass = self.ops.log_probs(unfiltered, token_ids) - logprobs
        return [(places.tolist(), packed_bits(processed), log_mass)]

    def _recorded(
        self, bits: Tensor, sums: Tensor, processed: Tensor, token_ids: Tensor, logprobs: Tensor | None
    ) -> list[_Kept]:
        """Return which tokens could be drawn, from the `bits` and `sums` that `filter_recorded` recorded for all draws.
        The logits before filters are not needed, because filters do not change the logit of a token that they keep.
        `logprobs`: as in `_kept`.
        """
        assert self._editing is not None
        if logprobs is None:
            logprobs = self.ops.log_probs(processed, token_ids)
        logits = processed.gather(1, token_ids[:, None]).squeeze(1)
        return [(list(range(len(bits))), bits, self._editing.log_probs_of(logits, sums) - logprobs)]

    def _choose(self, processed: Tensor, records: np.ndarray, wanted: Wanted) -> Tensor:
        """Return a token for each row of logits: the token with the highest logit, or a random one."""
        sampled = np.flatnonzero(records["target"] == SAMPLE)
        if len(sampled) == len(records):
            return self.ops.sample(processed, wanted.seeds, wanted.positions)
        token_ids = processed.argmax(-1)
        if len(sampled):
            rows = _tensor(sampled, processed)
            token_ids[rows] = self.ops.sample(processed[rows], wanted.seeds[rows], wanted.positions[rows])
        return token_ids

    def _filter(self, scaled: Tensor, records: np.ndarray) -> Tensor:
        """Apply the filters of each row in place, and return the logits. `records`: an array of dtype `DRAW`, with one
        element per row.
        """
        chosen = np.flatnonzero(records["has_filters"])
        if not len(chosen):
            return scaled
        columns = _filters(records[chosen], scaled)
        if len(chosen) == len(records):
            return self.ops.filter_logits(scaled, *columns)
        rows = _tensor(chosen, scaled)
        scaled[rows] = self.ops.filter_logits(scaled[rows], *columns)
        return scaled


def _drawing_of(parts: Sequence[_Part], num_tops: np.ndarray) -> Drawing:
    """Return the draws of all parts, in the order of their indices."""
    columns = [*parts[0].columns]
    if len(parts) > 1:
        order = _tensor(np.argsort(np.concatenate([part.places for part in parts])), columns[0])
        columns = [torch.cat(column)[order] for column in zip(*(part.columns for part in parts), strict=True)]
    recorded, statistics = list[tuple[int, int]](), list[TokenStatistics]()
    for part in parts:
        if part.statistics is not None:
            recorded += zip(part.places.tolist(), num_tops[part.places].tolist(), strict=True)
            statistics.append(part.statistics)
    targets = [(part.places[own].tolist(), found) for part in parts for own, found in part.targets]
    kept = [(part.places[own].tolist(), bits, log_mass) for part in parts for own, bits, log_mass in part.kept]
    return Drawing(*columns, recorded=recorded, statistics=statistics, targets=targets, kept=kept)


def _filters(records: np.ndarray, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `top_k`, `top_p` and `min_p` of draws, as in `filter_logits`, on the device of `like`."""
    top_p, min_p = (_tensor(records[name], like, torch.float32) for name in ("top_p", "min_p"))
    return _tensor(records["top_k"], like), top_p, min_p


def packed_bits(logits: Tensor) -> Tensor:
    """Return one bit for each of the logits [M, V], uint8 [M, ceil(V / 8)], the lowest bit first. The bit of the logit
    -inf is 0. A row without -inf becomes a row of zero bits.
    """
    bits = pack_on_host(logits) if logits.device.type == "cpu" else pack_on_device(logits)
    last = 255 >> -logits.shape[1] % 8
    is_cut = (bits[:, :-1] != 255).any(1) | (bits[:, -1] != last)
    return bits.mul_(is_cut[:, None])


def pack_on_host(logits: Tensor) -> Tensor:
    """Return the bits of all rows, as in `packed_bits`. On a CPU, this function is several times faster than
    `pack_on_device`.
    """
    return torch.from_numpy(np.packbits(logits.numpy() != -np.inf, axis=1, bitorder="little"))


def pack_on_device(logits: Tensor) -> Tensor:
    """Return the bits of all rows, as in `packed_bits`."""
    count = logits.shape[1]
    mask = torch.zeros(len(logits), -(-count // 8) * 8, dtype=torch.bool, device=logits.device)
    mask[:, :count] = ~logits.isneginf()
    # The factor moves bit 0 of byte i of the int64 to bit 56 + i. No two of the products overlap.
    return (mask.view(torch.int64) * 0x0102040810204080 >> 56).to(torch.uint8)


def _whole_vocabulary(logprobs: Tensor) -> list[Tensor]:
    """Return `kept_log_mass` (float32 [M]) and the kept tokens (`packed_bits`) of M rows in which no token was dropped.
    `logprobs`: float32 [M].
    """
    return [torch.zeros_like(logprobs), torch.zeros(len(logprobs), 1, dtype=torch.uint8, device=logprobs.device)]


def kept_ids(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two int32 arrays: the number of kept ids in each row of `packed_bits`, and the kept ids of all rows,
    ascending within each row. There must be at least one row. The work is done in parts, because the intermediate
    results are several times as large as the ids.
    """
    parts = [_ids_of(bits[start : start + _LOGITS_ROWS]) for start in range(0, len(bits), _LOGITS_ROWS)]
    counts, ids = zip(*parts, strict=True)
    return np.concatenate(counts), np.concatenate(ids)


def _ids_of(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    places = np.flatnonzero(bits != 0)  # many times faster than `np.nonzero(bits)`
    rows, groups = np.divmod(places, bits.shape[1])
    parts = np.unpackbits(bits.reshape(-1)[places][:, None], axis=1, bitorder="little")
    found, offsets = np.nonzero(parts.view(np.bool_))
    counts = np.bincount(rows[found], minlength=len(bits)).astype(np.int32)
    return counts, (groups[found] * 8 + offsets).astype(np.int32)


def _cut_bytes(values: np.ndarray, counts: np.ndarray | None = None) -> list[bytes]:
    """Return the bytes of the values of each row. `counts` (integers): how many values each row has, by default 1."""
    content = values.tobytes()
    ends = np.arange(1, len(values) + 1) if counts is None else counts.cumsum()
    ends = (values.itemsize * ends).tolist()
    return [content[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _scaled(logits: Tensor, wanted: Wanted, draws: Draws, out: Tensor | None = None) -> Tensor:
    """Return logits [M, V] divided by the temperatures. `out`: the memory for the result; None for new memory."""
    is_one = (draws.records["temperature"] == 1.0).all()
    return logits if is_one else torch.div(logits, wanted.temperatures[:, None], out=out)


def _basis(raw: Tensor, processed: Tensor, wanted: Wanted, draws: Draws) -> Tensor:
    """Return, for each row, the logits [M, V] of the distribution to which the row's log-probs refer."""
    sources = {"raw": raw, "temperature": _scaled(raw, wanted, draws), "processed": processed}
    return torch.stack([sources[BASES[place]][i] for i, place in enumerate(draws.records["basis"].tolist())])


def _of_equal_length(targets: Mapping[int, np.ndarray]) -> list[list[int]]:
    """Group the indices of draws by the number of their targets."""
    lengths = {place: len(ids) for place, ids in targets.items()}
    return [[i for i, found in lengths.items() if found == length] for length in sorted({*lengths.values()})]


def _taken(draws: Draws, places: np.ndarray) -> Draws:
    """Return the draws at the given indices, which are ascending."""
    return draws if len(places) == len(draws) else draws.take(places)


def _cut_targets(targets: Mapping[int, np.ndarray], log_probs: Tensor) -> list[_Targets]:
    """Split the log-probs of all targets (float32 [K]) into those of each draw. `targets`: for each draw, its
    targets.
    """
    places = sorted(targets)
    lengths = [len(targets[place]) for place in places]
    if len({*lengths}) == 1:
        return [(places, log_probs.view(len(places), -1))]
    return [([place], found[None]) for place, found in zip(places, log_probs.split(lengths), strict=True)]


def make_wanted(draws: Draws, device: torch.device) -> Wanted:
    """Return the input of `next_tokens` for draws. Filters and edits are ignored. `draws` must not be empty."""
    records = draws.records
    integers = np.array((draws.rows, records["target"], records["seed"], draws.positions))
    others = records["temperature"].copy(), records["basis"] == BASES.index("raw")
    if device.type == "cpu":
        rows, targets, seeds, positions, temperatures, raw = map(torch.from_numpy, (*integers, *others))
    else:
        found, temperatures, raw = all_to_device(map(torch.from_numpy, (integers, *others)), device)
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
