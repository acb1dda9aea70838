"""Importance weights for a loss, and measures of how far trainer and rollout differ.

The ratio of a token is r = p / q. `log_probs` is log p under the policy in training. `sampled` is log q under the
policy that drew the token. The policy that drew the token has older weights, or the same weights with different
arithmetic. If a token was sampled with the trainer's current weights, an aligned trainer computes r = 1 exactly. For
tokens with r = 1, every importance weight is exactly 1.

All functions take the same tensors. `log_probs` and `sampled` have any float dtype. `log_probs` and `sampled` are
either padded [B, T], with one sequence per row, or packed [M]. Packed tensors need the `lengths` of the sequences (0 or
more each), unless `level` is `token`. `mask` (bool, in the shape of `log_probs`): the tokens to use; None for all
tokens. Values outside the mask, NaN included, are not read. Ratios and sums are float64. A sequence's ratios and sums
depend only on its own tokens. Padding and packing do not change the bits of ratios and sums.

`level` selects the ratio that a token gets:

- `token`: the token's own ratio. A weight at level `token` is biased, since the ratios of earlier tokens are ignored.
- `sequence`: the product of the ratios in the token's sequence. The product is an unbiased weight if no ratio is
  truncated or masked. The variance of the weight grows with the length of the sequence.
- `geometric`: the geometric mean of the ratios in the token's sequence, as in GSPO (Zheng et al. 2025, "Group Sequence
  Policy Optimization", arXiv 2507.18071). The geometric mean is comparable across short and long sequences, but biased.

No gradient flows through any returned value: the loss treats a weight as a constant. The gradient of the loss comes
from the `log_probs` that the weight multiplies.

All functions raise AlignmentError for invalid bounds, for shapes or lengths that do not fit together, for a mask that
selects no token, and for log-probs in the mask that are not finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trueroll.errors import AlignmentError, brief

__all__ = ["Diagnostics", "diagnose", "log_ratios", "masked_weights", "truncated_weights"]

Level = Literal["token", "sequence", "geometric"]
_LARGEST = torch.finfo(torch.float32).max


class Diagnostics(NamedTuple):
    """Measures of how far trainer and rollout differ on given tokens. If trainer and rollout agree, `largest_ratio` is
    1.0 and all other values are 0.0.

    `k1`, `k2`, `k3`: Schulman's estimators of KL[rollout, trainer], averaged over the tokens, in nats per token
    (Schulman 2020, "Approximating KL Divergence", joschu.net/blog/kl-approx.html). `k1` = -log r is unbiased and can be
    negative. `k2` = (log r)^2 / 2 is biased and has a lower variance than `k1`. `k3` = (r - 1) - log r is unbiased and
    never negative, but a single large ratio dominates the mean. `perplexity_gap`: the perplexity of the tokens under
    the trainer minus their perplexity under the rollout. `clipped_share`: the share of tokens with a ratio outside the
    bounds. `largest_ratio`: the largest ratio. If a ratio exceeds e^709, the limit of float64, `largest_ratio` and `k3`
    are inf.
    """

    k1: float
    k2: float
    k3: float
    perplexity_gap: float
    clipped_share: float
    largest_ratio: float


def log_ratios(
    log_probs: Tensor,
    sampled: Tensor,
    mask: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    level: Level = "token",
) -> Tensor:
    """Return log r of each token at `level`. The result is float64, has the shape of `log_probs`, and is 0.0 outside
    the mask.
    """
    own, mask = _own_log_ratios(log_probs, sampled, mask)
    return _spread(_at_level(own, mask, lengths, level), mask)


def truncated_weights(
    log_probs: Tensor,
    sampled: Tensor,
    mask: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    level: Level = "token",
    *,
    cap: float,
) -> Tensor:
    """Return min(r, cap) for each token. The result is float32, has the shape of `log_probs`, and is 0.0 outside the
    mask. `cap`: at least 1.

    The method is truncated importance sampling, which reduces variance at the cost of bias (Ionides 2008, "Truncated
    Importance Sampling"). Truncated importance sampling between the policies of rollout and trainer is known as TIS
    (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
    fengyao.notion.site/off-policy-rl).
    """
    _check_bound("cap", cap, 1.0, _LARGEST)
    own, mask = _own_log_ratios(log_probs, sampled, mask)
    ratios = _at_level(own, mask, lengths, level).exp()
    return _spread(ratios.clamp(max=cap).float(), mask)


def masked_weights(
    log_probs: Tensor,
    sampled: Tensor,
    mask: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    level: Level = "token",
    *,
    low: float = 0.0,
    high: float,
) -> Tensor:
    """Return r for each token with low <= r <= high, and 0.0 for all other tokens. The result is float32, has the shape
    of `log_probs`, and is 0.0 outside the mask.

    `low`: from 0 to 1; `high`: at least 1. The method is masked importance sampling. A token is dropped if its
    ratio is outside the bounds, because the two policies differ too much. A dropped token gets the weight 0, not a
    reduced weight. Masked
    importance sampling between rollout and trainer is known as MIS (Liu, Li et al. 2025, "When Speed Kills Stability:
    Demystifying RL Collapse from the Training-Inference Mismatch", richardli.xyz/rl-collapse). At level `token` with
    both bounds, the method is known as IcePop (Ling Team 2025, "Every Step Evolves", arXiv 2510.18855). With `low`
    above 0, `masked_weights(...) > 0` is the mask of the kept tokens. A loss that divides by the number of tokens must
    decide whether to count dropped tokens.
    """
    _check_bounds(low, high)
    own, mask = _own_log_ratios(log_probs, sampled, mask)
    ratios = _at_level(own, mask, lengths, level).exp()
    return _spread(torch.where(_beyond(ratios, low, high), 0.0, ratios).float(), mask)


def diagnose(
    log_probs: Tensor,
    sampled: Tensor,
    mask: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    level: Level = "token",
    *,
    low: float = 0.0,
    high: float,
) -> Diagnostics:
    """Return the measures to log at each training step.

    `level` and the bounds affect `clipped_share` and `largest_ratio` only. Pass the bounds that the loss uses. If the
    loss uses truncated weights, pass the `cap` of `truncated_weights` as `high`.
    """
    _check_bounds(low, high)
    own, mask = _own_log_ratios(log_probs, sampled, mask)
    ratios = _at_level(own, mask, lengths, level).exp()
    k1 = 0.0 - own.mean()  # a minus sign would turn 0.0 into -0.0
    k2, k3 = (own.square() / 2).mean(), (own.expm1() - own).mean()
    perplexity_gap = (-sampled.detach().double()[mask].mean()).exp() * k1.expm1()
    clipped_share = _beyond(ratios, low, high).double().mean()
    return Diagnostics._make(torch.stack([k1, k2, k3, perplexity_gap, clipped_share, ratios.max()]).tolist())


def _own_log_ratios(log_probs: Tensor, sampled: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return two tensors: log r of each of the N tokens in the mask (float64 [N]), and the mask as bool."""
    mask = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask.bool()
    _check_shapes(log_probs, sampled, mask)
    own = log_probs.detach().double()[mask] - sampled.detach().double()[mask]
    if not own.isfinite().all():
        raise AlignmentError(
            "log_probs or sampled has NaN or infinity within the mask; mask out tokens without a log-prob"
        )
    return own, mask


def _at_level(own: Tensor, mask: Tensor, lengths: Sequence[int] | None, level: Level) -> Tensor:
    """Return the log ratios [N] of the tokens at this level. `own`: the tokens' own log ratios [N], one sequence after
    the other.
    """
    if level == "token":
        return own
    if level not in ("sequence", "geometric"):
        raise AlignmentError(f"level must be token, sequence or geometric (got {brief(level)})")
    parts = own.split(_counts(mask, lengths))
    return torch.cat([(part.sum() if level == "sequence" else part.mean()).expand(len(part)) for part in parts])


def _counts(mask: Tensor, lengths: Sequence[int] | None) -> list[int]:
    """For each sequence, return how many of its tokens are in the mask."""
    if mask.dim() == 2 and lengths is None:
        return mask.sum(1).tolist()
    if mask.dim() != 1 or lengths is None or min(lengths, default=0) < 0 or sum(lengths) != len(mask):
        found = "none" if lengths is None else f"{list(lengths)[:8]} with sum {sum(lengths)}"
        raise AlignmentError(
            "lengths must be None for tensors of shape [B, T], and must sum to M for tensors of shape [M] (got "
            f"{found} for shape {list(mask.shape)}); pass the length of each packed sequence"
        )
    return [int(part.sum()) for part in mask.cpu().split(list(lengths))]


def _spread(own: Tensor, mask: Tensor) -> Tensor:
    """Return a tensor in the shape of `mask` that holds `own` [N] at the N tokens of the mask, and 0 elsewhere."""
    return own.new_zeros(mask.shape).masked_scatter(mask, own)


def _beyond(ratios: Tensor, low: float, high: float) -> Tensor:
    return (ratios < low) | (ratios > high)


def _check_bounds(low: float, high: float) -> None:
    _check_bound("low", low, 0.0, 1.0)
    _check_bound("high", high, 1.0, _LARGEST)


def _check_bound(name: str, bound: float, least: float, most: float) -> None:
    if not least <= bound <= most:
        raise AlignmentError(
            f"{name} must be from {least:.4g} to {most:.4g} (got {bound}); the bounds must leave a ratio of 1 unchanged"
        )


def _check_shapes(log_probs: Tensor, sampled: Tensor, mask: Tensor) -> None:
    for name, tensor in (("sampled", sampled), ("mask", mask)):
        if tensor.shape != log_probs.shape:
            raise AlignmentError(
                f"{name} must have shape {list(log_probs.shape)} like log_probs (got {list(tensor.shape)}); pass one "
                "entry per token"
            )
    if not mask.any():
        raise AlignmentError("mask selects no token; skip such batches")
