"""A decoder on several ranks: what each rank holds and computes, and what the ranks exchange.

A rank is a process with a device. A decoder may be cut into stages of neighbouring layers (`stage_of`), and the layers
of a stage may be divided among ranks (`part_of`). Stages change no arithmetic. The rest of this module is about the
ranks of one stage.

Each rank holds a part of each large weight and computes a part of each layer: neighbouring heads of attention and of
delta nets, neighbouring inner features of an MLP, and neighbouring experts. Norms of hidden states, routers and
embeddings are whole on every rank. The head is divided by sections of the vocabulary, and every rank folds the results
of all sections. Every rank therefore has the same hidden states, routes and tokens.

A rank's part consists of whole pieces (`pieces`). Where a layer projects back to the hidden size, the products of all
pieces are added in float32 as a balanced binary tree. Each rank adds the products of its own pieces, which form a
subtree. The sums of the ranks are then added as the upper levels of the tree (`Exchange.add`). The order of the
additions, and therefore the bits, do not depend on the number of ranks. Either every rank computes the totals of all
rows, or, for large tensors, each rank computes the totals of some rows. A product that quantizes activations first
needs the largest magnitude of each whole row, so the ranks exchange the largest magnitudes of their parts
(`dynamic.row_peaks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from trueroll.errors import ConfigError

from .contract import (
    LOGITS_ROWS,
    AttentionWeights,
    Backend,
    ExpertsWeights,
    FoldedHead,
    Layer,
    Memory,
    Pages,
    Rotation,
    StateBatch,
    TokenStatistics,
    Wanted,
    Weight,
)
from .dynamic import row_peaks
from .layer import project, run_layers, store
from .quantization import format_of
from .specs import (
    HEAD_ROLE,
    PIECE_UNIT,
    PLAIN,
    PLAIN_HEAD,
    WHOLE,
    AttentionSpec,
    DecoderSpec,
    DeltaNetSpec,
    ExpertsSpec,
    HeadSpec,
    LatentSpec,
    LayerSpec,
    Mamba2Spec,
    MlpSpec,
    NormSpec,
    Pieces,
    Slice,
    Stage,
    WeightSpec,
    pieces_of,
)


class Rank(NamedTuple):
    """One of `size` ranks."""

    index: int
    size: int


class Meetings(Protocol):
    """The meetings of ranks in the native library. A meeting is a barrier (`kernels.cpu.ranks`)."""

    @property
    def address(self) -> int: ...

    def raise_failure(self) -> None: ...


class Exchange(Protocol):
    """Moves tensors between the ranks. All ranks make the same calls in the same order.

    `native`: for ranks that share the memory of one machine, the meetings through which a backend can exchange sums
    while it runs layers; None if there are no such meetings.
    """

    rank: Rank

    @property
    def native(self) -> Meetings | None: ...

    def gather(self, x: Tensor) -> Sequence[Tensor]:
        """Return the tensors of all ranks, in the order of the ranks. All ranks pass tensors of the same shape and
        dtype. The result is valid until the next call.
        """
        ...

    def add(self, own: Tensor, finish: Finish) -> Tensor:
        """Add the tensors [M, N] of all ranks as `fold` does, and return the result of `finish` for the sum. An
        exchange may divide the rows among the ranks, and then gather the finished rows.
        """
        ...


Finish: TypeAlias = Callable[[Tensor, int], Tensor]
"""finish(total, start): return the result that a layer computes from the sums `total` [rows, N], which begin with row
`start`. Each row of the result [rows, N] depends on the same row of `total` only.
"""


def fold(sums: Sequence[Tensor]) -> Tensor:
    """Add tensors as a balanced binary tree. The number of tensors is a power of two."""
    sums = list(sums)
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def part_of(spec: DecoderSpec, rank: Rank, section: int) -> DecoderSpec:
    """Return the part of a decoder that a rank holds and computes. `held` of the returned spec says which parts of a
    checkpoint's tensors the rank holds. `section`: as `Backend.HEAD_SECTION`.

    Raise ConfigError if the decoder has too few pieces for this many ranks, or if layers with weights of the same role
    have different sizes.
    """
    size = rank.size
    if size == 1:
        return spec
    if size < 1 or size & (size - 1) or size > spec.pieces:
        sizes = "1" if spec.pieces == 1 else f"a power of two up to {spec.pieces}"
        raise ConfigError(
            f"tensor_parallel_size must be {sizes} for this model, because its number of pieces per sum is "
            f"{spec.pieces} (got {size})",
            field="tensor_parallel_size",
            value=size,
        )
    held = {**spec.held, HEAD_ROLE: WeightSpec(None, _part_of_head(spec.vocab_size, rank, section))}
    layers = tuple(_part_of_layer(layer, spec.pieces, rank, held, spec.held) for layer in spec.layers)
    mtp = spec.mtp if spec.served_mtp is None else _part_of_layer(spec.served_mtp, spec.pieces, rank, held, spec.held)
    return replace(spec, layers=layers, mtp=mtp, held=held, ranks=size)


def stage_of(spec: DecoderSpec, stage: Stage) -> DecoderSpec:
    """Return the stage of a decoder. Raise ConfigError if the decoder has fewer layers than stages."""
    if stage.size > len(spec.layers):
        raise ConfigError(
            f"pipeline_parallel_size must be at most {len(spec.layers)}, the number of layers of this model (got "
            f"{stage.size})",
            field="pipeline_parallel_size",
            value=stage.size,
            limit=len(spec.layers),
        )
    return replace(spec, stage=stage)


def _part_of_layer(layer: LayerSpec, pieces: int, rank: Rank, held: dict[str, WeightSpec], whole: Any) -> LayerSpec:
    """Return the rank's part of a layer, and add the parts of its weights to `held`. `whole`: how the undivided decoder
    holds its weights.
    """
    (mixer, of_mixer), (second, of_second) = (_part_of_mixer(x, rank) for x in (layer.mixer, layer.recurrent_mixer))
    mlp, of_roles = None, of_mixer | of_second
    if layer.mlp is not None:
        of_mlp = _part_of_mlp if isinstance(layer.mlp, MlpSpec) else _part_of_experts
        mlp, others = of_mlp(cast(Any, layer.mlp), pieces, rank)
        of_roles |= others
    for role, part in of_roles.items():
        found = replace(whole.get(role, PLAIN), part=part)
        if held.setdefault(role, found) != found and held[role].part is not None:
            raise ConfigError(
                f"tensor_parallel_size must be 1 for this model, because its layers differ in the size of {role} (got "
                f"{rank.size})",
                field="tensor_parallel_size",
                value=rank.size,
            )
        held[role] = found
    return replace(layer, mixer=mixer, recurrent_mixer=second, mlp=mlp)


def _part_of_head(vocab_size: int, rank: Rank, section: int) -> Slice:
    """Return the rank's share of the head's sections. Ranks may have different numbers of sections."""
    count = -(-vocab_size // section)
    start, end = (min(vocab_size, count * i // rank.size * section) for i in (rank.index, rank.index + 1))
    return Slice(0, vocab_size, ((start, end - start),))


def _share(rank: Rank, total: int, unit: int, dim: int = 0) -> Slice:
    """Return the rank's equal share of `total` blocks of `unit` rows or columns."""
    own = total // rank.size * unit
    return Slice(dim, total * unit, ((rank.index * own, own),))


def _below(*parts: Slice) -> Slice:
    """Return a slice of a tensor that stacks several tensors, one below the other. `parts`: the rows of each stacked
    tensor that belong to the slice.
    """
    starts = accumulate((part.total for part in parts), initial=0)
    ranges = [(first + start, n) for first, part in zip(starts, parts, strict=False) for start, n in part.ranges]
    return Slice(0, sum(part.total for part in parts), tuple(ranges))


def _part_of_attention(spec: AttentionSpec, rank: Rank) -> tuple[AttentionSpec, dict[str, Slice]]:
    size, heads, kv_heads = spec.head_dim, spec.num_heads // rank.size, max(1, spec.num_kv_heads // rank.size)
    first = rank.index * spec.num_kv_heads // rank.size  # ranks may share a key-value head
    q = _share(rank, spec.num_heads, size * (2 if spec.output_gate and not spec.gate_apart else 1))
    kv = Slice(0, spec.num_kv_heads * size, ((first * size, kv_heads * size),))
    parts = {"q": q, "k": kv, "v": kv}
    found = {f"mixer.{name}": part for name, part in parts.items()}
    if spec.joined:
        found = {"mixer.qkv": _below(q, kv, kv)}
    if spec.gate_apart:
        found["mixer.gate"] = _share(rank, spec.num_heads, size)
    if spec.qkv_bias:
        found |= {f"mixer.{name}_bias": part for name, part in parts.items()}
    if spec.qk_norm_over_heads:
        found |= {"mixer.q_norm": _share(rank, spec.num_heads, size), "mixer.k_norm": kv}
    if spec.sinks:
        found["mixer.sinks"] = _share(rank, spec.num_heads, 1)
    found["mixer.o"] = _share(rank, spec.num_heads, size, dim=1)
    sharers = max(1, rank.size // spec.num_kv_heads)
    return replace(spec, num_heads=heads, num_kv_heads=kv_heads, kv_sharers=sharers), found


def _part_of_latent(spec: LatentSpec, rank: Rank) -> tuple[LatentSpec, dict[str, Slice]]:
    """Each rank has some heads of a latent attention, but the whole cache, since all heads share the cached rows."""
    heads = spec.num_heads
    found = {
        "mixer.q" if spec.q_rank is None else "latent.q_b": _share(rank, heads, spec.query_dim),
        "latent.kv_b": _share(rank, heads, spec.nope_dim + spec.value_dim),
        "mixer.o": _share(rank, heads, spec.value_dim, dim=1),
    }
    return replace(spec, num_heads=heads // rank.size), found


def _part_of_delta_net(spec: DeltaNetSpec, rank: Rank) -> tuple[DeltaNetSpec, dict[str, Slice]]:
    own = replace(
        spec, num_key_heads=spec.num_key_heads // rank.size, num_value_heads=spec.num_value_heads // rank.size
    )
    keys, values, i = own.key_size, own.value_size, rank.index
    channels = Slice(
        0,
        spec.channels,
        ((i * keys, keys), (spec.key_size + i * keys, keys), (2 * spec.key_size + i * values, values)),
    )
    of_values, of_heads = _share(rank, spec.value_size, 1), _share(rank, spec.num_value_heads, 1)
    found = {"delta.convolution": channels, "delta.decay": of_heads, "delta.bias": of_heads}
    if spec.joined:
        found |= {
            "delta.qkvz": _share(rank, spec.channels + spec.value_size, 1),
            "delta.ba": _share(rank, spec.num_value_heads, 2),
        }
    else:
        found |= {"delta.qkv": channels, "delta.z": of_values, "delta.b": of_heads, "delta.a": of_heads}
    found["delta.o"] = _share(rank, spec.value_size, 1, dim=1)
    return own, found


def _part_of_mamba2(spec: Mamba2Spec, rank: Rank) -> tuple[Mamba2Spec, dict[str, Slice]]:
    own = replace(spec, num_heads=spec.num_heads // rank.size, num_groups=spec.num_groups // rank.size)
    inner, vectors, i = own.inner_size, own.vector_size, rank.index

    def parts(*sizes: int) -> tuple[tuple[int, int], ...]:
        """For rows that consist of several parts, return the rank's range of rows in each part. `sizes`: the number of
        the rank's rows in each part.
        """
        return tuple((rank.size * sum(sizes[:n]) + i * size, size) for n, size in enumerate(sizes))

    channels = inner, vectors, vectors
    of_channels = Slice(0, spec.channels, parts(*channels))
    rows = parts(*own.input_sizes)
    of_inner, of_heads = _share(rank, spec.inner_size, 1), _share(rank, spec.num_heads, 1)
    found = {"mamba.inputs": Slice(0, spec.inner_size + spec.channels + spec.num_heads, rows)}
    found["mamba.convolution"] = of_channels
    if spec.norm is not None:
        found["mamba.norm"] = of_inner
    found |= dict.fromkeys(("mamba.decay", "mamba.bias", "mamba.skip"), of_heads)
    if spec.convolution_bias:
        found["mamba.convolution_bias"] = of_channels
    found["mamba.o"] = _share(rank, spec.inner_size, 1, dim=1)
    return own, found


def _part_of_mixer(spec: Any, rank: Rank) -> tuple[Any, dict[str, Slice]]:
    if spec is None:
        return None, {}
    if isinstance(spec, AttentionSpec):
        return _part_of_attention(spec, rank)
    if isinstance(spec, LatentSpec):
        return _part_of_latent(spec, rank)
    return _part_of_mamba2(spec, rank) if isinstance(spec, Mamba2Spec) else _part_of_delta_net(spec, rank)


def _part_of_mlp(spec: MlpSpec, pieces: int, rank: Rank) -> tuple[MlpSpec, dict[str, Slice]]:
    own, unit, found = _part_of_one_mlp("mlp", spec.intermediate_size, pieces, rank, spec.gated)
    if spec.bias:
        found |= {f"mlp.{part}_bias": found[f"mlp.{part}"] for part in ("gate", "up")}
    if spec.joined:
        found["mlp.gate_up"] = _below(found.pop("mlp.gate"), found.pop("mlp.up"))
    return replace(spec, intermediate_size=own, unit=unit), found


def _part_of_experts(spec: ExpertsSpec, pieces: int, rank: Rank) -> tuple[ExpertsSpec, dict[str, Slice]]:
    experts = _share(rank, spec.num_experts, 1)
    roles = ["experts.gate_up", "experts.down"]
    if spec.bias:
        roles += ["experts.gate_up_bias", "experts.down_bias"]
    found, own, unit = dict.fromkeys(roles, experts), 0, PIECE_UNIT
    if spec.shared_size:
        own, unit, of_shared = _part_of_one_mlp("shared", spec.shared_size, pieces, rank, spec.gated)
        if spec.shared_joined:
            of_shared["shared.gate_up"] = _below(of_shared.pop("shared.gate"), of_shared.pop("shared.up"))
        found |= of_shared
    elsewhere = spec.shared_size > 0 and own == 0
    return replace(spec, held=experts.ranges[0], shared_size=own, shared_elsewhere=elsewhere, unit=unit), found


def _part_of_one_mlp(
    role: str, inner: int, pieces: int, rank: Rank, gated: bool = True
) -> tuple[int, int, dict[str, Slice]]:
    """Return the rank's number of inner features, the length of a piece, and the parts of the weights."""
    cut, own = pieces_of(pieces, inner, PIECE_UNIT), pieces // rank.size
    bounds = cut.bounds(inner)[rank.index * own : (rank.index + 1) * own]
    start, end = bounds[0][0], bounds[-1][1]
    rows, columns = (Slice(dim, inner, ((start, end - start),)) for dim in (0, 1))
    found = {f"{role}.gate": rows} if gated else {}
    return end - start, cut.length, found | {f"{role}.up": rows, f"{role}.down": columns}


class RankedHead:
    """The ops of `backend` for a head that is divided among the ranks. `first_id`: the first token id of this rank's
    part.
    """

    FUSES_EDITS = False

    def __init__(self, backend: Backend, exchange: Exchange, first_id: int) -> None:
        self.backend, self.exchange, self._first_id = backend, exchange, first_id
        self._widths = dict[tuple[object, ...], list[int]]()

    def next_tokens(
        self, hidden: Tensor, weight: Weight, wanted: Wanted, head: HeadSpec = PLAIN_HEAD
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Backend.next_tokens`. `weight` has the rank's part of the head."""
        found = [self._of_head(hidden, weight, tile, None, head)[:3] for tile in _tiles(wanted)]
        if len(found) == 1:
            return found[0]
        token_ids, logprobs, finite = (torch.cat(column) for column in zip(*found, strict=True))
        return token_ids, logprobs, finite

    def next_token_statistics(
        self, hidden: Tensor, weight: Weight, wanted: Wanted, k: int, head: HeadSpec = PLAIN_HEAD
    ) -> tuple[Tensor, TokenStatistics, Tensor]:
        """See `Backend.next_token_statistics`. `weight` has the rank's part of the head."""
        found = [self._of_head(hidden, weight, tile, k, head) for tile in _tiles(wanted)]
        token_ids, finite = torch.cat([each.token_ids for each in found]), torch.cat([each.finite for each in found])
        columns = zip(*(cast(TokenStatistics, each.statistics) for each in found), strict=True)
        return token_ids, TokenStatistics._make(map(torch.cat, columns)), finite

    def lm_head(self, hidden: Tensor, weight: Weight, head: HeadSpec = PLAIN_HEAD) -> Tensor:
        """See `Backend.lm_head`. `weight` has the rank's part of the head; the result has all logits."""
        return self._joined(self.backend.lm_head(hidden, weight, head), ("logits",))

    def _of_head(self, hidden: Tensor, weight: Weight, wanted: Wanted, k: int | None, head: HeadSpec) -> FoldedHead:
        own = self.backend.head_sections(hidden, weight, wanted, k, self._first_id, head)
        found = [self._joined(each, ("sections", i, k)) for i, each in enumerate(own)]
        return self.backend.fold_sections(found, wanted, k)

    def _joined(self, own: Tensor, kind: tuple[object, ...]) -> Tensor:
        """Join the tensors of all ranks along their second axis, which may have a different length on each rank. In all
        calls with the same `kind`, a rank must pass tensors of the same length.
        """
        if own.is_meta:
            return torch.cat([own] * self.exchange.rank.size, 1)
        if kind not in self._widths:
            found = self.exchange.gather(torch.tensor([own.shape[1]], device=own.device))
            self._widths[kind] = [int(width) for width in found]
        widths = self._widths[kind]
        padded = own
        if own.shape[1] < max(widths):
            padded = own.new_zeros(len(own), max(widths), *own.shape[2:])
            padded[:, : own.shape[1]] = own
        parts = zip(self.exchange.gather(padded), widths, strict=True)
        return torch.cat([part[:, :width] for part, width in parts], 1)


class RankedOps(RankedHead):
    """The ops of `backend` on one rank of a decoder. Implements `Backend`.

    `exchange` moves the sums of each layer between the ranks. If the ranks share memory and the backend can exchange
    sums there, the backend runs several layers in one call.
    """

    def __init__(self, backend: Backend, exchange: Exchange, first_id: int) -> None:
        super().__init__(backend, exchange, first_id)
        self._native = exchange.native if hasattr(backend, "packed_layers") else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def new_layers(self, layers: Sequence[Layer]) -> Sequence[Layer]:
        """See `Backend.new_layers`."""
        if self._native is None or any(_has_norm_over_heads(layer) for layer in layers):
            return tuple(layers)
        return self.backend.new_layers(layers)

    def layers(
        self,
        x: Tensor,
        layers: Sequence[Layer],
        rotations: Sequence[Rotation],
        memories: Sequence[Memory],
        pages: Sequence[Pages],
        states: StateBatch | None = None,
        routes: Tensor | None = None,
    ) -> Tensor:
        """See `Backend.layers`."""
        backend: Any = self.backend
        arguments = x, layers, rotations, memories, pages, states, routes
        if self._native is None or not backend.runs_packed(layers, states):
            return run_layers(cast(Backend, self), *arguments)
        out = backend.packed_layers(*arguments, ranks=self._native.address)
        self._native.raise_failure()
        return out

    def merge_into(self, out: Weight, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> bool:
        """See `Backend.merge_into`. `out` may be the shards of all ranks."""
        merged = self.backend.merge(weight, a, b, scale)
        out.copy_(merged)
        return bool(merged.isfinite().all())

    def gate_up(self, x: Tensor, gate: Weight, up: Weight, activation: Any) -> Tensor:
        """See `Backend.gate_up`. A rank may hold no inner features; the result then has no columns."""
        return self.backend.gate_up(x, gate, up, activation) if gate.shape[0] else x.new_empty(len(x), 0)

    def project_back(
        self,
        x: Tensor,
        weight: Weight,
        residual: Tensor | None = None,
        bias: Tensor | None = None,
        pieces: Pieces = WHOLE,
    ) -> Tensor:
        """See `Backend.project_back`. `x` and `weight` have the columns of this rank's `pieces`."""
        rows, columns = weight.shape
        empty = columns == 0
        peaks = () if (found := self._peaks(x, weight)) is None else (found,)
        own = x.new_zeros(len(x), rows, dtype=torch.float32)
        if not empty:
            own = self.backend.back_sums(x, weight, pieces, *peaks)

        def finish(total: Tensor, start: int) -> Tensor:
            return (total if bias is None else total + bias.float()).to(x.dtype)

        out = self._added(own, finish)
        return out if residual is None else out + residual

    def _peaks(self, x: Tensor, weight: Weight) -> Tensor | None:
        """Return the peaks of the whole rows of x, which has the columns of this rank; None if the product does not
        quantize activations.
        """
        format = format_of(weight)
        if format is None or format.activations is None:
            return None
        return torch.stack([*self._gathered(row_peaks(x))]).amax(0)  # NaN if any rank has NaN

    def experts(
        self,
        x: Tensor,
        spec: ExpertsSpec,
        weights: ExpertsWeights,
        experts: Tensor,
        gates: Tensor,
        shared: Tensor | None = None,
        groups: int = 1,
    ) -> Tensor:
        """See `Backend.experts`. `weights` holds only this rank's experts, and `groups` is the number of groups
        that these experts form.
        """

        def finish(total: Tensor, start: int) -> Tensor:
            rows = slice(start, start + len(total))
            return (total if shared is None else total + shared[rows].float()).to(x.dtype)

        return self._added(self.backend.expert_sums(x, spec, weights, experts, gates, groups), finish)

    def qkv(
        self,
        x: Tensor,
        spec: AttentionSpec,
        weights: AttentionWeights,
        rotation: Rotation,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """See `Backend.qkv`. A norm over all heads needs the queries and keys of all ranks."""
        if spec.qk_norm is None or not spec.qk_norm_over_heads:
            return self.backend.qkv(x, spec, weights, rotation, k_cache, v_cache, slots)
        q_norm, k_norm = cast(tuple[Tensor, Tensor], weights.qk_norms)
        of_heads = spec.qk_norm

        def norm_heads(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            return self._normed(q, q_norm, of_heads, 1), self._normed(k, k_norm, of_heads, spec.kv_sharers)

        q, k, v = project(self.backend, x, spec, weights, rotation, norm_heads)
        store(self.backend, spec, k, v, k_cache, v_cache, slots)
        return q

    def _normed(self, x: Tensor, weight: Tensor, norm: NormSpec, sharers: int) -> Tensor:
        """Return this rank's columns of a norm over the columns of all ranks. `sharers`: the number of neighbouring
        ranks that hold the same columns.
        """
        rows, (whole,) = (torch.cat(list(self._gathered(each))[::sharers], 1) for each in (x, weight[None]))
        start = self.exchange.rank.index // sharers * x.shape[1]
        return self.backend.rmsnorm(rows, whole, norm)[:, start : start + x.shape[1]]

    def _gathered(self, x: Tensor) -> Sequence[Tensor]:
        """Return the tensors of all ranks. In a dry run, tensors have no memory and are not exchanged."""
        return [x] * self.exchange.rank.size if x.is_meta else self.exchange.gather(x)

    def _added(self, own: Tensor, finish: Finish) -> Tensor:
        """Add the sums of all ranks, and return the result of `finish`."""
        return finish(own, 0) if own.is_meta else self.exchange.add(own, finish)


def _tiles(wanted: Wanted) -> list[Wanted]:
    if len(wanted.rows) <= LOGITS_ROWS:
        return [wanted]
    columns = (getattr(wanted, field.name).split(LOGITS_ROWS) for field in fields(Wanted))
    return [Wanted(*tile) for tile in zip(*columns, strict=True)]


def _has_norm_over_heads(layer: Layer) -> bool:
    """Return whether the ranks exchange the queries and keys of this layer, because its norm covers all heads."""
    return isinstance(layer.spec.mixer, AttentionSpec) and layer.spec.mixer.qk_norm_over_heads
