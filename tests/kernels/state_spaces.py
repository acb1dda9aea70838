"""State spaces (Mamba 2): sizes, weights, and the recurrence in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trueroll.kernels.contract import Mamba2Weights
from trueroll.kernels.specs import Mamba2Spec, NormSpec

from .inputs import randn

NORM = NormSpec(1e-6)
STATE_SPACES = {
    "one head": Mamba2Spec(1, 16, 1, 16, 4, NORM),
    "groups of heads": Mamba2Spec(6, 16, 2, 32, 4, NORM, time_step_limit=(0.1, 1.5)),
    "odd state space": Mamba2Spec(3, 5, 3, 7, 3, NORM, convolution_bias=False),
    "wide heads": Mamba2Spec(2, 246, 1, 16, 2, NORM),
    "real state space": Mamba2Spec(4, 64, 2, 128, 4, NORM),
}
RARE_SPACES = ("one head", "wide heads", "real state space")
"""Sizes that run only in `make test-all`."""
THIN_SPACE = Mamba2Spec(2, 5, 1, 7, 3, NORM, time_step_limit=(0.1, 1.5))
"""Sizes for an interpreter, where time is proportional to tokens and heads."""


def make_space_weights(spec: Mamba2Spec, dtype: torch.dtype) -> Mamba2Weights:
    """Make weights so that some heads forget at once and others remember nearly everything."""
    heads, nothing = spec.num_heads, torch.empty(0)
    convolution = randn(spec.channels, 1, spec.kernel_size, dtype=dtype, seed=50)
    bias = randn(spec.channels, dtype=dtype, seed=53) if spec.convolution_bias else None
    decay, (of_steps, skip) = torch.linspace(-5, 1, heads).to(dtype), randn(2, heads, dtype=dtype, seed=51)
    return Mamba2Weights(nothing, convolution, bias, decay, of_steps, skip, nothing, nothing)


def exact_state_space(xbc: Tensor, steps: Tensor, spec: Mamba2Spec, weights: Mamba2Weights) -> tuple[Tensor, Tensor]:
    """Compute the recurrence in float64, token by token, as in its definition. Return the outputs, and the sum of the
    sizes of the values that float32 rounds on the way.

    A time step and a decay have errors of up to 8 roundings, and exponents have a relative error.
    """
    x, b, c = xbc.double().split([spec.inner_size, spec.vector_size, spec.vector_size], 1)
    b, c = (part.unflatten(1, (spec.num_groups, -1)) for part in (b, c))
    b, c = (part.repeat_interleave(spec.num_heads // spec.num_groups, 1) for part in (b, c))
    x = x.unflatten(1, (spec.num_heads, -1))
    sizes = F.softplus(steps.double() + weights.bias.double()).clamp(*spec.time_step_limit)
    speeds = weights.decay.double().exp() * sizes
    state = magnitude = errors = torch.zeros(spec.state_shape, dtype=torch.float64)
    outs, bounds = [], []
    for t in range(len(x)):
        decay, added = torch.exp(-speeds[t])[:, None, None], torch.einsum("hk,h,hv->hkv", b[t], sizes[t], x[t])
        roundings = 10 + 16 * speeds[t][:, None, None]
        errors = decay * (errors + roundings * magnitude) + 12 * added.abs()
        state, magnitude = state * decay + added, magnitude * decay + added.abs()
        skipped = weights.skip.double()[:, None] * x[t]
        outs.append(torch.einsum("hkv,hk->hv", state, c[t]) + skipped)
        terms = errors + (spec.state_size + 2) * magnitude
        bounds.append(torch.einsum("hkv,hk->hv", terms, c[t].abs()) + 2 * skipped.abs())
    return torch.stack(outs), torch.stack(bounds)
