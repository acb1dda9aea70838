"""Batches as trainers have them, padded or packed, as rows: which tokens there are, and which experts they go to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from trueroll.errors import AlignmentError

from .autograd import Packed
from .specs import DecoderSpec

OWN_CHOICE = -1
"""In place of the experts of a token that goes where the model sends it."""


def locate(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    lengths: Sequence[int] | None,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Packed]:
    """The flat indices of the tokens of `input_ids` [B, T] that are not padding, or of all of packed ones [M], which
    have `lengths`; and the sequences that they make.

    Raise AlignmentError for shapes that do not fit together, and for a batch without tokens.
    """
    if lengths is None:
        return unpad(input_ids, attention_mask, position_ids)
    _check_lengths(input_ids, attention_mask, lengths)
    if position_ids is not None:
        raise AlignmentError("position_ids: expected none with lengths, found both; lengths say where sequences begin")
    return torch.arange(len(input_ids), device=input_ids.device), Packed.of(lengths, input_ids.device)


def unpad(
    input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None = None
) -> tuple[Tensor, Packed]:
    """`locate` of padded tokens, where a sequence begins with each row of `input_ids`, and wherever `position_ids` are
    0.
    """
    indices = _unpadded_indices(input_ids, attention_mask)
    if not len(indices):
        raise AlignmentError("attention_mask: expected tokens that are not padding, found none; leave such batches out")
    begins = torch.diff(indices // input_ids.shape[1], prepend=indices.new_full((1,), -1)) != 0
    if position_ids is None:
        return indices, _sequences(begins)
    if position_ids.shape not in (input_ids.shape, (1, input_ids.shape[1])):
        raise AlignmentError(
            f"position_ids: expected {list(input_ids.shape)} like input_ids, found {list(position_ids.shape)}"
        )
    given = position_ids.expand(input_ids.shape).flatten()[indices]
    packed = _sequences(begins | (given == 0))
    if not torch.equal(given, packed.positions):
        raise AlignmentError(
            "position_ids: expected to count up from 0 in each sequence, found something else; leave them out, and "
            "mark padding in attention_mask"
        )
    return indices, packed


def spread(found: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """`found` [M, ...] at flat `places` of [*shape, ...], which is 0 elsewhere."""
    spread = found.new_zeros(shape.numel(), *found.shape[1:]).index_copy(0, places, found)
    return spread.view(*shape, *found.shape[1:])


def check_shape(name: str, found: Tensor, expected: torch.Size) -> None:
    """Raise AlignmentError unless `found` has the shape of input_ids."""
    if found.shape != expected:
        raise AlignmentError(
            f"{name}: expected {list(expected)} like input_ids, found {list(found.shape)}; one entry per token"
        )


def read_routes(
    routed_experts: Tensor, spec: DecoderSpec, shape: torch.Size, indices: Tensor, packed: Packed
) -> Tensor:
    """The experts of the tokens at flat `indices` into `shape`, that of input_ids: int32 [layers with experts, M,
    top_k], ascending in each row. A sequence's last token is fed to no worker, so what is there for it is not read: its
    row is of OWN_CHOICE.

    Raise AlignmentError for a model without experts, and for what are not `routed_experts` of it.
    """
    if not spec.experts:
        raise AlignmentError(
            f"routed_experts: expected none for {spec.architecture}, which has no experts, found "
            f"{list(routed_experts.shape)}; leave them out"
        )
    count, top_k = spec.experts[0].num_experts, spec.experts[0].top_k
    _check_routes(routed_experts, (*shape, len(spec.experts), top_k))
    rows = routed_experts.to(indices.device, torch.int64).flatten(0, len(shape) - 1)[indices].sort(-1).values
    is_last = torch.zeros_like(packed.positions, dtype=torch.bool)
    is_last[torch.tensor(packed.batch.query_starts[1:], device=is_last.device) - 1] = True
    _check_ids(rows[~is_last], count)
    return rows.masked_fill(is_last[:, None, None], OWN_CHOICE).transpose(0, 1).int().contiguous()


def _check_routes(found: Tensor, shape: tuple[int, ...]) -> None:
    if found.shape != shape:
        raise AlignmentError(
            f"routed_experts: expected {list(shape)}, the shape of input_ids with layers of experts and experts per "
            f"token, found {list(found.shape)}; give a row for each token, also for those whose row is not read"
        )
    if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise AlignmentError(f"routed_experts: expected integers, found {found.dtype}; give the ids of experts")


def _check_ids(routes: Tensor, count: int) -> None:
    """`routes`: ascending in each row."""
    wrong = routes[(routes < 0) | (routes >= count)]
    if len(wrong):
        raise AlignmentError(
            f"routed_experts: expected ids from 0 to {count - 1}, found {int(wrong[0])}; give those of this model, and "
            "mark padding in attention_mask"
        )
    twice = (routes[..., 1:] == routes[..., :-1]).any(-1)
    if twice.any():
        raise AlignmentError(
            f"routed_experts: expected different experts in each row, found {routes[twice][0].tolist()}; give rows of "
            "all tokens but the last of each sequence, and mark padding in attention_mask"
        )


def _sequences(begins: Tensor) -> Packed:
    """Sequences that begin where `begins` (bool [M]) says, the first of them at 0."""
    starts = [*begins.nonzero().flatten().tolist(), len(begins)]
    return Packed.of([end - start for start, end in pairwise(starts)], begins.device)


def _unpadded_indices(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    if input_ids.dim() != 2:
        raise AlignmentError(
            f"input_ids: expected [B, T], found {list(input_ids.shape)}; pack with lengths, or add [None]"
        )
    if attention_mask is None:
        return torch.arange(input_ids.numel(), device=input_ids.device)
    check_shape("attention_mask", attention_mask, input_ids.shape)
    return attention_mask.flatten().nonzero().flatten()


def _check_lengths(input_ids: Tensor, attention_mask: Tensor | None, lengths: Sequence[int]) -> None:
    if attention_mask is not None:
        raise AlignmentError("attention_mask: expected none with lengths, found both; packed tokens have no padding")
    if input_ids.dim() != 1 or min(lengths, default=0) < 1 or sum(lengths) != len(input_ids):
        raise AlignmentError(
            f"lengths: expected at least 1 each and {list(input_ids.shape)} in sum, the shape of input_ids, found "
            f"{list(lengths)[:8]} with sum {sum(lengths)}; give one for each packed sequence"
        )
