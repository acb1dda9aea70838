"""Importance ratios that are not 1: weights for a loss, and how far trainer and rollout are apart.

A token's ratio is r = p / q, with `log_probs`, log p, of the policy that is trained, and `sampled`, log q, of the
policy that the token was drawn with: older weights, or the same weights with other arithmetic. An aligned trainer has
r = 1, exactly, for the tokens of its own weights, and every weight here is then exactly 1.

All functions take the same tensors. `log_probs` and `sampled`, of any float dtype: padded [B, T], a sequence in each
row, or packed [M], with the `lengths` of the sequences (from 0 on) unless `level` is `token`. `mask` (bool, in their
shape): the tokens that count, all if it is None; what the others have, NaN included, is not read. Ratios and sums are
float64, and those of a sequence depend on its own tokens alone: neither padding nor packing changes a bit.

`level` says whose ratio a token has:

- `token`: its own. Biased, since the tokens before it have ratios, too.
- `sequence`: the product of the ratios in its sequence. Unbiased as long as nothing is truncated or masked; its
  variance grows with the length.
- `geometric`: their geometric mean, the ratio of GSPO (Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv
  2507.18071), which means the same for short sequences and for long ones. Biased.

No gradient flows through anything that is returned: a weight is a constant of the loss, which has its gradient from
the `log_probs` that it multiplies.

All raise AlignmentError for shapes, lengths or bounds that do not fit, for a mask without a token, and for log-probs of
its tokens that are not finite.
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
    """How far trainer and rollout are apart on given tokens; all 0.0, and `largest_ratio` 1.0, where they agree.

    `k1`, `k2`, `k3`: means over the tokens of Schulman's estimators of KL[rollout, trainer], in nats a token (2020,
    "Approximating KL Divergence", joschu.net/blog/kl-approx.html). `k1` = -log r is unbiased, and of either sign;
    `k2` = (log r)^2 / 2 is biased, and varies less; `k3` = (r - 1) - log r is unbiased and never negative, but one
    large ratio dominates it. `perplexity_gap`: the trainer's perplexity of the tokens less the rollout's.
    `clipped_share`: of the tokens, those whose ratio lies beyond the bounds. `largest_ratio`: inf above e^709, where
    float64 ends, and so is `k3`.
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
    """log r of each token, at its `level`: float64 in the shape of `log_probs`, 0.0 outside of `mask`."""
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
    """min(r, cap) of each token: float32 in the shape of `log_probs`, 0.0 outside of `mask`. `cap`: from 1 on.

    Truncated importance sampling, which trades variance for bias (Ionides 2008, "Truncated Importance Sampling"), here
    between the policies of rollout and trainer (TIS: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training", fengyao.notion.site/off-policy-rl).
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
    """r of each token where low <= r <= high, and 0.0 elsewhere: float32 in the shape of `log_probs`.

    `low`: from 0 to 1; `high`: from 1 on. Masked importance sampling: what one of the policies hardly has is left out,
    instead of being trained on with less weight (MIS: Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL
    Collapse from the Training-Inference Mismatch", richardli.xyz/rl-collapse; of tokens, with both bounds: IcePop, Ling
    Team 2025, "Every Step Evolves", arXiv 2510.18855). With `low` above 0, `masked_weights(...) > 0` is the mask
    without the weights. A loss that divides by the number of tokens has to say whether those left out count.
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
    """What to log at each step. `level` and the bounds, which are those of the weights, concern `clipped_share` and
    `largest_ratio` alone; the `cap` of truncated weights is `high` here.
    """
    _check_bounds(low, high)
    own, mask = _own_log_ratios(log_probs, sampled, mask)
    ratios = _at_level(own, mask, lengths, level).exp()
    k1 = 0.0 - own.mean()  # a minus sign would make -0.0 of 0.0
    k2, k3 = (own.square() / 2).mean(), (own.expm1() - own).mean()
    perplexity_gap = (-sampled.detach().double()[mask].mean()).exp() * k1.expm1()
    clipped_share = _beyond(ratios, low, high).double().mean()
    return Diagnostics._make(torch.stack([k1, k2, k3, perplexity_gap, clipped_share, ratios.max()]).tolist())


def _own_log_ratios(log_probs: Tensor, sampled: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """log r of the N tokens of the mask, each its own, float64 [N]; and the mask."""
    mask = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask.bool()
    _check_shapes(log_probs, sampled, mask)
    own = log_probs.detach().double()[mask] - sampled.detach().double()[mask]
    if not own.isfinite().all():
        raise AlignmentError(
            "log_probs and sampled: expected finite numbers, found others among the tokens of the mask; leave tokens "
            "without a log-prob out of it"
        )
    return own, mask


def _at_level(own: Tensor, mask: Tensor, lengths: Sequence[int] | None, level: Level) -> Tensor:
    """`own` [N], sequence after sequence, with what each token has at this level."""
    if level == "token":
        return own
    if level not in ("sequence", "geometric"):
        raise AlignmentError(f"level: expected token, sequence or geometric, found {brief(level)}; give one of these")
    parts = own.split(_counts(mask, lengths))
    return torch.cat([(part.sum() if level == "sequence" else part.mean()).expand(len(part)) for part in parts])


def _counts(mask: Tensor, lengths: Sequence[int] | None) -> list[int]:
    """How many tokens of the mask each sequence has."""
    if mask.dim() == 2 and lengths is None:
        return mask.sum(1).tolist()
    if mask.dim() != 1 or lengths is None or min(lengths, default=0) < 0 or sum(lengths) != len(mask):
        found = "none" if lengths is None else f"{list(lengths)[:8]} with sum {sum(lengths)}"
        raise AlignmentError(
            f"lengths: expected none for [B, T], and for [M] one for each sequence, M in sum, found {found} for "
            f"{list(mask.shape)}; say where each sequence ends"
        )
    return [int(part.sum()) for part in mask.cpu().split(list(lengths))]


def _spread(own: Tensor, mask: Tensor) -> Tensor:
    """`own` [N] at the N tokens of the mask, and 0 elsewhere."""
    return own.new_zeros(mask.shape).masked_scatter(mask, own)


def _beyond(ratios: Tensor, low: float, high: float) -> Tensor:
    return (ratios < low) | (ratios > high)


def _check_bounds(low: float, high: float) -> None:
    _check_bound("low", low, 0.0, 1.0)
    _check_bound("high", high, 1.0, _LARGEST)


def _check_bound(name: str, bound: float, least: float, most: float) -> None:
    if not least <= bound <= most:
        raise AlignmentError(
            f"{name}: expected a number from {least:.4g} to {most:.4g}, found {bound}; ratios of 1 have to stay"
        )


def _check_shapes(log_probs: Tensor, sampled: Tensor, mask: Tensor) -> None:
    for name, tensor in (("sampled", sampled), ("mask", mask)):
        if tensor.shape != log_probs.shape:
            raise AlignmentError(
                f"{name}: expected {list(log_probs.shape)} like log_probs, found {list(tensor.shape)}; one entry per "
                "token"
            )
    if not mask.any():
        raise AlignmentError("mask: expected tokens that count, found none; leave such batches out")
