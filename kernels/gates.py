"""The gates of given experts in plain torch, for gradients and for models that are not aligned."""

from __future__ import annotations

from torch import Tensor

from .specs import RouterSpec


def plain_gates(logits: Tensor, experts: Tensor, router: RouterSpec) -> Tensor:
    """Return the gates of `Backend.route` for given `experts` (integers [M, top_k]), computed by torch in the dtype of
    the logits [M, E].
    """
    experts = experts.long()
    scores = logits.sigmoid() if router.score == "sigmoid" else logits
    scores = (scores.softmax(-1) if router.score == "softmax" else scores).gather(1, experts)
    gates = scores.softmax(-1) if router.score == "softmax_of_chosen" else scores
    if router.normed:
        gates = gates / (gates.sum(-1, keepdim=True) + router.eps).clamp(min=router.floor)
    return gates * router.scale
