"""Packed sequences, and attention within each of them through a temporary KV cache, for trainers and vision towers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from .contract import NO_SLOT, AttentionBatch, Backend, StateBatch, new_caches
from .specs import AttentionSpec, LatentSpec

# Block size of the cache; any even size gives the same bits.
_BLOCK_SIZE = 16
# Backends need a head size that is a multiple of this number.
_HEAD_UNIT = 16


@dataclass(frozen=True)
class Packed:
    """Sequences with the lengths `lens`, packed one after the other as rows.

    `positions`: the position of each row in its sequence, counted from 0, as int64 [M]. `ends`: for each row, the end
    of the rows that the row sees in its sequence, as int64 [M] (`AttentionBatch.ends`); None if attention is causal.
    """

    lens: Sequence[int]
    positions: Tensor
    ends: Tensor | None = None

    @classmethod
    def of(cls, lens: Sequence[int], device: torch.device, see_all: bool = False) -> Packed:
        """Return sequences with these lengths; the tensors are on `device`. `see_all`: whether each row sees all rows
        of its sequence.
        """
        ends = torch.cat([torch.full((n,), n, device=device) for n in lens]) if see_all else None
        return cls(lens, torch.cat([torch.arange(n, device=device) for n in lens]), ends)

    @cached_property
    def batch(self) -> AttentionBatch:
        """The attention batch. Each sequence has its own cache blocks."""
        counts = torch.tensor([-(-n // _BLOCK_SIZE) for n in self.lens], device=self.positions.device)
        first = counts.cumsum(0) - counts
        tables = first[:, None] + torch.arange(int(counts.max()), device=counts.device)
        return AttentionBatch(
            query_starts=[0, *torch.tensor(self.lens).cumsum(0).tolist()],
            context_lens=list(self.lens),
            block_tables=torch.minimum(tables, counts.sum() - 1),
            ends=self.ends,
        )

    @cached_property
    def num_blocks(self) -> int:
        """The number of cache blocks."""
        return int(self.batch.block_tables.max()) + 1

    @cached_property
    def slots(self) -> Tensor:
        """The cache slot of each row's key and value: int64 [M]."""
        lens = torch.tensor(self.lens, device=self.positions.device)
        return self.batch.block_tables[:, 0].repeat_interleave(lens) * _BLOCK_SIZE + self.positions

    @cached_property
    def states(self) -> StateBatch:
        """The state batch: each sequence starts from zeros and stores its state in a slot of its own."""
        slots = torch.arange(len(self.lens), device=self.positions.device)
        return StateBatch(self.batch.query_starts, torch.full_like(slots, NO_SLOT), slots)

    def groups(self) -> list[list[int]]:
        """Group the sequences by length. Each sequence of a group is longer than half of the group's longest sequence,
        so padding a group does not double its number of tokens.
        """
        alike: dict[int, list[int]] = defaultdict(list)
        for i, length in enumerate(self.lens):
            alike[length.bit_length()].append(i)
        return list(alike.values())


def attend(
    ops: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention within each sequence, [M, heads, D], for q [M, heads, D] and k and v [M, kv_heads, D].

    Keys and values go through a temporary cache. Heads are padded with zeros to a multiple of 16 elements, which
    changes no score.
    """
    size = q.shape[2]
    q, k, v = (F.pad(x, (0, -size % _HEAD_UNIT)) for x in (q, k, v))
    caches = k.new_zeros(2, packed.num_blocks, _BLOCK_SIZE, *k.shape[1:])
    ops.write_kv(k, v, caches[0], caches[1], packed.slots)
    scoring = spec.scale, spec.window, spec.soft_cap, sinks
    return ops.paged_attention(q, caches[0], caches[1], packed.batch, *scoring)[..., :size]


def attend_latent(ops: Backend, q: Tensor, k: Tensor, packed: Packed, spec: LatentSpec) -> Tensor:
    """Return the attention over latent rows within each sequence, [M, heads, latent_dim], for q [M, heads, head_dim]
    and k [M, 1, head_dim]. Keys go through a temporary plain cache.
    """
    caches = new_caches(ops, replace(spec, cache_format=None), packed.num_blocks, _BLOCK_SIZE, k.new_zeros)
    ops.write_kv(k, k[..., : spec.latent_dim], *caches, packed.slots)
    return ops.paged_attention(q, *caches, packed.batch, spec.scale)
