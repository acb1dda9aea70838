"""A decoder on several ranks: what each rank holds and computes, and what the ranks exchange.

A rank is a process with a device. Each rank holds a part of each large weight and computes a part of each layer:
neighbouring heads of attention and of delta nets, neighbouring inner features of an MLP, and neighbouring experts.
Norms of hidden states, routers, embeddings and the head are whole on every rank, so that every rank has the same hidden
states, routes and tokens.

A rank's part consists of whole pieces (`pieces`). Where a layer leads back to the hidden states, each rank computes the
subtree of its own pieces in float32. The ranks exchange these sums, and every rank adds all of them as the rest of the
balanced binary tree. Bits therefore do not depend on the number of ranks. `Exchange` only moves bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from trueroll.errors import ConfigError

from .contract import AttentionWeights, Backend, ExpertsWeights, Layer, Rotation, Weight
from .layer import project, run_layers
from .specs import (
    PIECE_UNIT,
    WHOLE,
    AttentionSpec,
    DecoderSpec,
    DeltaNetSpec,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    Pieces,
    Slice,
    WeightSpec,
    pieces_of,
)


class Rank(NamedTuple):
    """One of `size` ranks."""

    index: int
    size: int


class Exchange(Protocol):
    """Moves tensors between the ranks. All ranks make the same calls in the same order."""

    rank: Rank

    def gather(self, x: Tensor) -> Sequence[Tensor]:
        """Return the tensors of all ranks, in their order. All ranks pass tensors of the same shape and dtype. The
        result is valid until the next call.
        """
        ...


def part_of(spec: DecoderSpec, rank: Rank) -> DecoderSpec:
    """Return the part of a decoder that a rank holds and computes. `held` says which part of a checkpoint's tensors it
    is.

    Raise ConfigError if the decoder has too few pieces for this many ranks, or if layers with weights of the same role
    have different sizes.
    """
    size = rank.size
    if size < 1 or size & (size - 1) or size > spec.pieces:
        sizes = "1" if spec.pieces == 1 else f"a power of two up to {spec.pieces}"
        raise ConfigError(
            f"tensor_parallel_size must be {sizes}, the number of pieces in which this model computes sums (got "
            f"{size})",
            field="tensor_parallel_size",
            value=size,
        )
    held = dict(spec.held)
    layers = tuple(_part_of_layer(layer, spec.pieces, rank, held, spec.held) for layer in spec.layers)
    mtp = spec.mtp if spec.served_mtp is None else _part_of_layer(spec.served_mtp, spec.pieces, rank, held, spec.held)
    return replace(spec, layers=layers, mtp=mtp, held=held, ranks=size)


def _part_of_layer(layer: LayerSpec, pieces: int, rank: Rank, held: dict[str, WeightSpec], whole: Any) -> LayerSpec:
    """Return the rank's part of a layer, and add the parts of its weights to `held`. `whole`: how the whole decoder
    holds its weights.
    """
    of_mixer = _part_of_attention if isinstance(layer.mixer, AttentionSpec) else _part_of_delta_net
    mixer, of_roles = of_mixer(cast(Any, layer.mixer), rank)
    of_mlp = _part_of_mlp if isinstance(layer.mlp, MlpSpec) else _part_of_experts
    mlp, others = of_mlp(cast(Any, layer.mlp), pieces, rank)
    for role, part in (of_roles | others).items():
        found = WeightSpec(whole[role].dtype if role in whole else None, part)
        if held.setdefault(role, found) != found and held[role].part is not None:
            raise ConfigError(
                f"tensor_parallel_size must be 1 for a model in which layers differ in the size of {role} (got "
                f"{rank.size})",
                field="tensor_parallel_size",
                value=rank.size,
            )
        held[role] = found
    return replace(layer, mixer=mixer, mlp=mlp)


def _share(rank: Rank, total: int, unit: int, dim: int = 0) -> Slice:
    """Return the rank's equal share of `total` blocks of `unit` rows or columns."""
    own = total // rank.size * unit
    return Slice(dim, total * unit, ((rank.index * own, own),))


def _part_of_attention(spec: AttentionSpec, rank: Rank) -> tuple[AttentionSpec, dict[str, Slice]]:
    size, heads, kv_heads = spec.head_dim, spec.num_heads // rank.size, max(1, spec.num_kv_heads // rank.size)
    first = rank.index * spec.num_kv_heads // rank.size  # ranks may share a key-value head
    q = _share(rank, spec.num_heads, size * (2 if spec.output_gate else 1))
    kv = Slice(0, spec.num_kv_heads * size, ((first * size, kv_heads * size),))
    parts = {"q": q, "k": kv, "v": kv}
    found = {f"mixer.{name}": part for name, part in parts.items()}
    if spec.qkv_bias:
        found |= {f"mixer.{name}_bias": part for name, part in parts.items()}
    if spec.qk_norm_over_heads:
        found |= {"mixer.q_norm": _share(rank, spec.num_heads, size), "mixer.k_norm": kv}
    if spec.sinks:
        found["mixer.sinks"] = _share(rank, spec.num_heads, 1)
    found["mixer.o"] = _share(rank, spec.num_heads, size, dim=1)
    sharers = max(1, rank.size // spec.num_kv_heads)
    return replace(spec, num_heads=heads, num_kv_heads=kv_heads, kv_sharers=sharers), found


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


def _part_of_mlp(spec: MlpSpec, pieces: int, rank: Rank) -> tuple[MlpSpec, dict[str, Slice]]:
    own, unit, found = _part_of_gated("mlp", spec.intermediate_size, pieces, rank)
    return replace(spec, intermediate_size=own, unit=unit), found


def _part_of_experts(spec: ExpertsSpec, pieces: int, rank: Rank) -> tuple[ExpertsSpec, dict[str, Slice]]:
    experts = _share(rank, spec.num_experts, 1)
    roles = ["experts.gate_up", "experts.down"]
    if spec.bias:
        roles += ["experts.gate_up_bias", "experts.down_bias"]
    found, own, unit = dict.fromkeys(roles, experts), 0, PIECE_UNIT
    if spec.shared_size:
        own, unit, of_shared = _part_of_gated("shared", spec.shared_size, pieces, rank)
        found |= of_shared
    elsewhere = spec.shared_size > 0 and own == 0
    return replace(spec, held=experts.ranges[0], shared_size=own, shared_elsewhere=elsewhere, unit=unit), found


def _part_of_gated(role: str, inner: int, pieces: int, rank: Rank) -> tuple[int, int, dict[str, Slice]]:
    """Return the rank's number of inner features, the length of a piece, and the parts of the weights."""
    cut, own = pieces_of(pieces, inner, PIECE_UNIT), pieces // rank.size
    bounds = cut.bounds(inner)[rank.index * own : (rank.index + 1) * own]
    start, end = bounds[0][0], bounds[-1][1]
    rows, columns = (Slice(dim, inner, ((start, end - start),)) for dim in (0, 1))
    return end - start, cut.length, {f"{role}.gate": rows, f"{role}.up": rows, f"{role}.down": columns}


class RankedOps:
    """The ops of `backend` on one rank of a decoder. Implements `Backend`.

    Layers are computed op by op. `exchange` moves the sums of each layer between the ranks.
    """

    def __init__(self, backend: Backend, exchange: Exchange) -> None:
        self.backend, self.exchange = backend, exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def new_layers(self, layers: Sequence[Layer]) -> tuple[Layer, ...]:
        """See `Backend.new_layers`."""
        return tuple(layers)

    def layers(self, *arguments: Any) -> Tensor:
        """See `Backend.layers`."""
        return run_layers(cast(Backend, self), *arguments)

    def merge_into(self, out: Weight, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> bool:
        """See `Backend.merge_into`. `out` may be the shards of all ranks."""
        merged = self.backend.merge(weight, a, b, scale)
        out.copy_(merged)
        return bool(merged.isfinite().all())

    def gate_up(self, x: Tensor, gate: Weight, up: Weight, activation: Any) -> Tensor:
        """See `Backend.gate_up`. A rank may hold no inner features."""
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
        own = x.new_zeros(len(x), rows, dtype=torch.float32) if empty else self.backend.back_sums(x, weight, pieces)
        total = self._added(own)
        out = (total if bias is None else total + bias.float()).to(x.dtype)
        return out if residual is None else out + residual

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
        """See `Backend.experts`. `weights` has the experts of this rank's `groups`."""
        total = self._added(self.backend.expert_sums(x, spec, weights, experts, gates, groups))
        return (total if shared is None else total + shared.float()).to(x.dtype)

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
        self.backend.write_kv(k, v, k_cache, v_cache, slots)
        return q

    def _normed(self, x: Tensor, weight: Tensor, norm: NormSpec, sharers: int) -> Tensor:
        """Return this rank's columns of a norm over the columns of all ranks. `sharers`: the number of neighbouring
        ranks that hold the same columns.
        """
        rows, (whole,) = (torch.cat(list(self.exchange.gather(each))[::sharers], 1) for each in (x, weight[None]))
        start = self.exchange.rank.index // sharers * x.shape[1]
        return self.backend.rmsnorm(rows, whole, norm)[:, start : start + x.shape[1]]

    def _added(self, own: Tensor) -> Tensor:
        """Add the sums of all ranks as a balanced binary tree."""
        sums = list(self.exchange.gather(own))
        while len(sums) > 1:
            sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
        return sums[0]
