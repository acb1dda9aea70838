"""Gated delta nets: sizes, weights, and the convolution and recurrence in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trueroll.kernels.contract import L2_EPS, DeltaNetWeights
from trueroll.kernels.specs import DeltaNetSpec, NormSpec

from .inputs import randn

SPECS = {
    "small": DeltaNetSpec(1, 1, 16, 16, 4, NormSpec(1e-6)),
    "groups": DeltaNetSpec(2, 6, 16, 32, 4, NormSpec(1e-6)),
    "odd": DeltaNetSpec(3, 3, 7, 5, 3, NormSpec(1e-6)),
    "wide values": DeltaNetSpec(1, 1, 16, 150, 2, NormSpec(1e-6)),
    "no tail": DeltaNetSpec(1, 2, 24, 16, 1, NormSpec(1e-6)),
    "real heads": DeltaNetSpec(2, 4, 128, 128, 4, NormSpec(1e-6)),
}

THIN = DeltaNetSpec(1, 2, 7, 5, 3, NormSpec(1e-6))
"""Sizes for an interpreter, where time is proportional to tokens and heads."""


def make_weights(spec: DeltaNetSpec, dtype: torch.dtype) -> DeltaNetWeights:
    """Make weights so that some heads forget at once and others remember nearly everything."""
    heads = spec.num_value_heads
    convolution = randn(spec.channels, 1, spec.kernel_size, dtype=dtype, seed=50)
    decay = torch.linspace(-5, 1, heads).to(dtype)
    nothing = torch.empty(0)
    return DeltaNetWeights((), convolution, decay, randn(heads, dtype=dtype, seed=51), nothing, nothing)


def exact_convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the float64 convolution of a sequence without a tail, and the sum of the absolute values of its terms."""
    bias = torch.zeros(len(weight)) if bias is None else bias
    size = weight.shape[2]
    rows = F.pad(x.double().T, (size - 1, 0))
    given = rows, weight.double(), bias.double()
    found, sizes = (F.conv1d(x, w, b, groups=len(rows)).T for x, w, b in (given, [each.abs() for each in given]))
    return F.silu(found), sizes


def exact_recurrence(qkv: Tensor, b: Tensor, a: Tensor, spec: DeltaNetSpec, weights: DeltaNetWeights) -> Tensor:
    """Compute the recurrence in float64, token by token, as in its definition."""
    q, k, v = qkv.double().split([spec.key_size, spec.key_size, spec.value_size], 1)
    q, k, v = (x.unflatten(1, (heads, -1)) for x, heads in zip((q, k, v), _heads(spec), strict=True))
    share = spec.num_value_heads // spec.num_key_heads
    q, k = (x.div((x.square().sum(-1, keepdim=True) + L2_EPS).sqrt()).repeat_interleave(share, 1) for x in (q, k))
    decays = torch.exp(-weights.decay.double().exp() * F.softplus(a.double() + weights.bias.double()))
    state, outs = torch.zeros(spec.state_shape, dtype=torch.float64), []
    for t in range(len(qkv)):
        state = state * decays[t, :, None, None]
        read = torch.einsum("hkv,hk->hv", state, k[t])
        change = b[t].double().sigmoid()[:, None] * (v[t] - read)
        state = state + k[t, :, :, None] * change[:, None]
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]) / spec.key_head_dim**0.5)
    return torch.stack(outs)


def _heads(spec: DeltaNetSpec) -> tuple[int, int, int]:
    return spec.num_key_heads, spec.num_key_heads, spec.num_value_heads
