"""Convert trainers' batches, padded or packed, to rows of tokens, and read the experts of each token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from trueroll.errors import AlignmentError

from .packed import Packed
from .specs import DecoderSpec

OWN_CHOICE = -1
"""Placeholder in a token's list of experts: the router of the model chooses the token's experts."""


def locate(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    lengths: Sequence[int] | None,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Packed]:
    """Return the flat indices of the real tokens of a batch, and the sequences that these tokens form.

    A padded batch has `input_ids` [B, T] and `attention_mask`. A packed batch has `input_ids` [M], the `lengths` of its
    sequences, and no padding. Raise AlignmentError for shapes that do not fit together, and for a batch without tokens.
    """
    if lengths is None:
        return unpad(input_ids, attention_mask, position_ids)
    _check_lengths(input_ids, attention_mask, lengths)
    if position_ids is not None:
        raise AlignmentError(
            "position_ids must be None if lengths is given; leave position_ids out, since lengths say where sequences "
            "begin"
        )
    return torch.arange(len(input_ids), device=input_ids.device), Packed.of(lengths, input_ids.device)


def unpad(
    input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None = None
) -> tuple[Tensor, Packed]:
    """`locate` for padded tokens. A sequence begins at the start of each row of `input_ids`, and wherever
    `position_ids` is 0.
    """
    indices = _unpadded_indices(input_ids, attention_mask)
    if not len(indices):
        raise AlignmentError("attention_mask marks every token as padding; skip such batches")
    begins = torch.diff(indices // input_ids.shape[1], prepend=indices.new_full((1,), -1)) != 0
    if position_ids is None:
        return indices, _sequences(begins)
    if position_ids.shape not in (input_ids.shape, (1, input_ids.shape[1])):
        raise AlignmentError(
            f"position_ids must have shape {list(input_ids.shape)} like input_ids (got {list(position_ids.shape)})"
        )
    given = position_ids.expand(input_ids.shape).flatten()[indices]
    packed = _sequences(begins | (given == 0))
    if not torch.equal(given, packed.positions):
        raise AlignmentError(
            "position_ids do not count up from 0 in each sequence; leave them out, and mark padding in attention_mask"
        )
    return indices, packed


def spread(found: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Return a tensor [*shape, ...] with the rows of `found` [M, ...] at the flat indices `places`, and 0 elsewhere."""
    spread = found.new_zeros(shape.numel(), *found.shape[1:]).index_copy(0, places, found)
    return spread.view(*shape, *found.shape[1:])


def check_shape(name: str, found: Tensor, expected: torch.Size) -> None:
    """Raise AlignmentError unless the shape of `found` is `expected`, which is the shape of input_ids."""
    if found.shape != expected:
        raise AlignmentError(
            f"{name} must have shape {list(expected)} like input_ids (got {list(found.shape)}); pass one entry per "
            "token"
        )


def read_routes(
    routed_experts: Tensor, spec: DecoderSpec, shape: torch.Size, indices: Tensor, packed: Packed
) -> Tensor:
    """Return the experts of the tokens at flat `indices` of a batch. The result is an int32 tensor [layers with
    experts, M, top_k], and each row is in ascending order.

    `shape`: the shape of input_ids. A worker never computes the last token of a sequence. The entries in
    `routed_experts` for the last token are therefore ignored, and the token's row of the result is OWN_CHOICE. Raise
    AlignmentError for a model without experts, and for `routed_experts` that do not fit the model.
    """
    if not spec.experts:
        raise AlignmentError(
            f"routed_experts must be None for {spec.architecture}, which has no experts (got shape "
            f"{list(routed_experts.shape)}); leave it out"
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
            f"routed_experts must have shape {list(shape)}: the shape of input_ids, then the number of layers with "
            f"experts, then the number of experts per token (got {list(found.shape)}); pass a row for every token, "
            "even where the row is not read"
        )
    if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise AlignmentError(f"routed_experts must be integers (got {found.dtype}); pass the ids of experts")


def _check_ids(routes: Tensor, count: int) -> None:
    """Raise AlignmentError unless all ids are below `count` and no row repeats an id. The ids in each row of `routes`
    are in ascending order.
    """
    wrong = routes[(routes < 0) | (routes >= count)]
    if len(wrong):
        raise AlignmentError(
            f"routed_experts must be ids from 0 to {count - 1} (got {int(wrong[0])}); pass the ids of this model's "
            "experts, and mark padding in attention_mask"
        )
    twice = (routes[..., 1:] == routes[..., :-1]).any(-1)
    if twice.any():
        raise AlignmentError(
            f"routed_experts must not repeat an expert within a row (got {routes[twice][0].tolist()}); pass a row for "
            "each token except the last token of each sequence, and mark padding in attention_mask"
        )


def _sequences(begins: Tensor) -> Packed:
    """Return the sequences that begin where `begins` (bool [M]) is True. The first element of `begins` must be True."""
    starts = [*begins.nonzero().flatten().tolist(), len(begins)]
    return Packed.of([end - start for start, end in pairwise(starts)], begins.device)


def _unpadded_indices(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    if input_ids.dim() != 2:
        raise AlignmentError(
            f"input_ids must have shape [B, T] (got {list(input_ids.shape)}); pass a padded batch, or pass packed "
            "tokens together with lengths"
        )
    if attention_mask is None:
        return torch.arange(input_ids.numel(), device=input_ids.device)
    check_shape("attention_mask", attention_mask, input_ids.shape)
    return attention_mask.flatten().nonzero().flatten()


def _check_lengths(input_ids: Tensor, attention_mask: Tensor | None, lengths: Sequence[int]) -> None:
    if attention_mask is not None:
        raise AlignmentError(
            "attention_mask must be None if lengths is given; leave attention_mask out, since packed tokens have no "
            "padding"
        )
    if input_ids.dim() != 1 or min(lengths, default=0) < 1 or sum(lengths) != len(input_ids):
        raise AlignmentError(
            "lengths must be at least 1 for each packed sequence and sum to the number of tokens (got "
            f"{list(lengths)[:8]} with sum {sum(lengths)} for input_ids of shape {list(input_ids.shape)}); correct the "
            "lengths"
        )
