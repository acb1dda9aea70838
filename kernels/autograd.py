"""The ops of a layer and of the head, with gradients: `GradientOps`.

The forward pass of each op calls the backend's op, so the results are bit-identical to a rollout. The backward pass
uses torch in the dtype of the forward pass, and its gradients are accurate up to rounding. If torch multiplies matrices
slowly in the dtype of the forward pass, the backward pass multiplies in float32 (`product_dtype`). Three parts of the
backward pass also use the backend's ops: rotations, recomputed logits, and recomputed inner rows of experts (the rows
that an expert multiplies by its `down` matrix).
The backward pass of a recurrence recomputes the recurrence in float32, in chunks of `_CHUNK` tokens: products over all
tokens of a chunk give the chunk's outputs and final state, without a loop over tokens. Torch differentiates the
products of each chunk, and therefore keeps one state per chunk instead of one per token. Forward and backward passes
disable autocast, which would change dtypes inside an op. The caller of an op converts the dtypes instead.

M is the number of rows. The rows are the tokens of any number of sequences. The floating-point tensors of a call share
one dtype and device unless stated otherwise. The module owns no state. Each call packs its weights into the backend's
layout anew. Packed weights are not cached, because torch's version counter misses changes through `.data`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.nn.utils.rnn import pad_sequence

from .contract import (
    CLAMP,
    CLAMPED_SLOPE,
    L2_EPS,
    Backend,
    DeltaNetWeights,
    ExpertsWeights,
    Mamba2Weights,
    Rotation,
    TokenStatistics,
    Wanted,
    Weight,
    as_weight,
)
from .distributions import Processing
from .dynamic import DynamicValues, apart
from .gates import plain_gates
from .layer import absorb
from .packed import Packed, attend, attend_latent
from .precision import Rounding
from .quantization import Format
from .specs import (
    PLAIN_HEAD,
    WHOLE,
    Activation,
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    HeadSpec,
    LatentSpec,
    LayerNormSpec,
    Mamba2Spec,
    NormSpec,
    Pieces,
)

Matrix: TypeAlias = Tensor | DynamicValues
NO_TOKEN = -1
"""The id that pads a row of token ids that is shorter than other rows."""
# Tokens per chunk; any size gives the same gradients within rounding.
_CHUNK = 64
# Limit on the bytes of logits that a backward pass holds at once. A single row of logits may exceed the limit.
_LOGITS_BYTES = 2**27


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which the backward pass multiplies matrices: float32 where torch has no fast product in the
    dtype of `x`, else the dtype of `x`.

    On a CPU without AVX-512, torch multiplies bfloat16 matrices without vector instructions and on one thread, which
    takes about 20 times as long as float32. Few CPUs have instructions for float16.
    """
    is_slow = x.dtype == torch.float16 or torch.backends.cpu.get_cpu_capability() != "AVX512"
    return torch.float32 if x.device.type == "cpu" and is_slow else x.dtype


def _without_autocast(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(ctx: Any, *args: Any) -> Any:
        device = next(arg.device for arg in args if isinstance(arg, Tensor))
        with torch.autocast(device.type, enabled=False):
            return method(ctx, *args)

    return run


class _Product(Function):
    """`product` is an op of the backend, called as `product(x, weight, *bias)`: x is [M, K], `weight` is [N, K], and
    the optional `bias` is [N]. `format`: None for plain products. Otherwise, it is a format that also quantizes
    activations (`kernels.dynamic`), and the product quantizes the weight in this format. The backward pass computes the
    gradients of the plain product, whatever the format.
    """

    @staticmethod
    @_without_autocast
    def forward(
        ctx: Any,
        ops: Backend,
        product: Callable[..., Tensor],
        format: Format | None,
        x: Tensor,
        weight: Tensor,
        *bias: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, as_weight(ops, weight, format), *bias)

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, dtype = grad.to(weight.dtype), product_dtype(weight)
        _, _, _, needs_x, needs_weight, *needs_bias = ctx.needs_input_grad
        wide = grad.to(dtype)
        grad_x = (wide @ weight.to(dtype)).to(x.dtype) if needs_x else None
        grad_weight = (wide.T @ x.to(dtype)).to(weight.dtype) if needs_weight else None
        return None, None, None, grad_x, grad_weight, *(grad.sum(0) if needed else None for needed in needs_bias)


class _WideProduct(Function):
    """`Backend.wide_linear`. The gradients are computed in float32."""

    @staticmethod
    @_without_autocast
    def forward(ctx: Any, ops: Backend, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return ops.wide_linear(x, as_weight(ops, weight))

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, needs_x, needs_weight = ctx.needs_input_grad
        grad_x = (grad @ weight.float()).to(x.dtype) if needs_x else None
        return None, grad_x, (grad.T @ x.float()).to(weight.dtype) if needs_weight else None


class _Merge(Function):
    """A weight with a merged adapter. The gradient ignores the rounding of the merged weight."""

    @staticmethod
    @_without_autocast
    def forward(ctx: Any, ops: Backend, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        return ops.merge(weight, a, b, scale)

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (a, b), (_, needs_weight, needs_a, needs_b, _) = ctx.saved_tensors, ctx.needs_input_grad
        wide = grad.to(dtype := product_dtype(grad))
        grad_a = (b.T.to(dtype) @ wide).mul_(ctx.scale).to(a.dtype) if needs_a else None
        grad_b = (wide @ a.T.to(dtype)).mul_(ctx.scale).to(b.dtype) if needs_b else None
        return None, grad if needs_weight else None, grad_a, grad_b, None


class _Rounded(Function):
    """The values of a quantized weight. The gradient passes through the rounding unchanged (the straight-through
    estimator, Bengio et al. 2013).
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rounding: Rounding) -> Tensor:
        return rounding(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _Rmsnorm(Function):
    @staticmethod
    @_without_autocast
    def forward(ctx: Any, ops: Backend, x: Tensor, weight: Tensor, norm: NormSpec) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.norm = norm
        return ops.rmsnorm(x, weight, norm)

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wide, grad = x.float(), grad.float()
        rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + ctx.norm.eps)
        normed = wide * rstd
        grad_weight = (grad * normed).sum(0).to(weight.dtype)
        grad = grad * (weight.float() + float(ctx.norm.zero_centered))
        projection = (grad * normed).mean(-1, keepdim=True)
        grad_x = grad.addcmul_(normed, projection, value=-1.0).mul_(rstd).to(x.dtype)
        return None, grad_x, grad_weight, None


class _LayerNorm(Function):
    @staticmethod
    @_without_autocast
    def forward(ctx: Any, ops: Backend, x: Tensor, weight: Tensor, bias: Tensor, norm: LayerNormSpec) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.norm = norm
        return ops.layer_norm(x, weight, bias, norm)

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.layer_norm(x, x.shape[-1:], weight, bias, ctx.norm.eps)

        return None, *_float32_gradients(layer_norm, ctx.saved_tensors, grad), None


class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, ops: Backend, x: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool) -> Tensor:
        ctx.ops, ctx.interleaved = ops, interleaved
        ctx.save_for_backward(cosines, sines)
        return ops.rope(x, Rotation(cosines, sines), interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cosines, sines = ctx.saved_tensors
        return None, ctx.ops.rope(grad, Rotation(cosines, -sines), ctx.interleaved), None, None, None


class _GateMul(Function):
    @staticmethod
    def forward(ctx: Any, ops: Backend, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return ops.gate_mul(gate, up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return None, *_gate_gradients(gate, up, grad, ctx.activation), None


def _gate_gradients(gate: Tensor, up: Tensor, grad: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Return the gradients of `gate` and `up`, given the gradient of `gate_mul(gate, up)`. All tensors have the same
    shape.
    """
    if activation == "sigmoid":
        sigmoid = torch.sigmoid(gate)
        return torch.ops.aten.sigmoid_backward(grad * up, sigmoid), grad * sigmoid
    if activation == "silu":
        return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)
    if activation == "clamped_silu":
        return _clamped_gradients(gate, up, grad)
    if activation == "relu":
        return (grad * up).where(gate > 0.0, 0.0), grad * gate.relu()
    kind = "tanh" if activation == "gelu_tanh" else "none"
    return torch.ops.aten.gelu_backward(grad * up, gate, approximate=kind), grad * F.gelu(gate, approximate=kind)


def _clamped_gradients(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `gate` and `up` for `clamped_silu`, computed in float32.

    g * sigmoid(slope * g) is SiLU(slope * g) / slope. A clamped element has gradient 0.
    """
    wide, raised = gate.float().clamp(max=CLAMP) * CLAMPED_SLOPE, up.float().clamp(-CLAMP, CLAMP) + 1.0
    grad_gate = torch.ops.aten.silu_backward(grad * raised, wide).where(gate <= CLAMP, 0.0)
    grad_up = (grad * F.silu(wide) / CLAMPED_SLOPE).where(up.abs() <= CLAMP, 0.0)
    return grad_gate.to(gate.dtype), grad_up.to(up.dtype)


class _Route(Function):
    @staticmethod
    def forward(
        ctx: Any, ops: Backend, logits: Tensor, spec: ExpertsSpec, chosen: Tensor | None, correction: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        experts, gates = ops.route(logits, spec, chosen, correction)
        ctx.save_for_backward(logits, experts)
        ctx.mark_non_differentiable(experts)
        ctx.router = spec.router
        return experts, gates

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient through the gates. Neither the choice of experts nor the correction bias has a
        gradient.
        """
        logits, experts = ctx.saved_tensors

        def gates(logits: Tensor) -> Tensor:
            return plain_gates(logits, experts, ctx.router)

        return None, *_float32_gradients(gates, [logits], grad), None, None, None


class _Experts(Function):
    """`Backend.experts`. The weights `gate_up` and `down` are matrices [E, rows, columns]. The biases of `gate_up` and
    `down` are [E, rows] or None.
    """

    @staticmethod
    @_without_autocast
    def forward(
        ctx: Any,
        ops: Backend,
        spec: ExpertsSpec,
        weights: ExpertsWeights,
        format: Format | None,
        experts: Tensor,
        groups: int,
        x: Tensor,
        gates: Tensor,
        shared: Tensor | None,
        gate_up: Tensor,
        gate_up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(experts, x, gates, gate_up, gate_up_bias, down, down_bias)
        ctx.ops, ctx.spec = ops, spec
        stacks = {"gate_up": gate_up, "down": down}
        matrices = {name: as_weight(ops, stack.flatten(0, 1), format) for name, stack in stacks.items()}
        return ops.experts(x, spec, replace(weights, **matrices), experts, gates, shared, groups)

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute gradients expert by expert, and recompute each expert's inner rows, which the forward pass does not
        keep.
        """
        experts, x, gates, *parameters = ctx.saved_tensors
        needed = ctx.needs_input_grad[6:]
        grad_x, grad_gates = torch.zeros_like(x, dtype=torch.float32), torch.zeros_like(gates)
        found = [torch.zeros_like(p) if wanted else None for p, wanted in zip(parameters, needed[3:], strict=True)]
        for expert, rows, places in _rows_by_expert(experts, len(parameters[0])):
            own: list[Any] = [None if p is None else p[expert] for p in parameters]
            inputs = x[rows], gates[rows, places, None], grad[rows]
            rows_x, rows_gates, *each = _expert_gradients(ctx.ops, ctx.spec, *inputs, *own)
            grad_x[rows] += rows_x.float()
            grad_gates[rows, places] = rows_gates
            for whole, part in zip(found, each, strict=True):
                if whole is not None:
                    whole[expert] = part
        shared = grad if needed[2] else None
        return *(None,) * 6, grad_x.to(x.dtype), grad_gates, shared, *found


def _expert_gradients(
    ops: Backend,
    spec: ExpertsSpec,
    x: Tensor,
    gates: Tensor,
    grad: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
) -> tuple[Tensor, ...]:
    """Compute gradients for one expert and the M rows that are routed to this expert. Return the gradients of x [M, H],
    of the gates [M] and of the expert's four parameters.

    `gates` is [M, 1]; `grad` is the gradient of the M output rows.
    """
    dtype = product_dtype(x)
    wide_x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)
    product = F.linear(wide_x, gate_up, None if gate_up_bias is None else gate_up_bias.to(dtype)).to(x.dtype)
    gate, up = product.chunk(2, 1) if spec.gated else (product, product)
    inner, ungated = ops.gate_mul(gate, up, spec.activation), grad.to(dtype) @ down
    grad_gates = (ungated.float() * inner.float()).sum(-1)
    if down_bias is not None:
        grad_gates += grad.float() @ down_bias.float()
    grad_inner, grad_out = ((part * gates).to(x.dtype) for part in (ungated, grad))
    of_gate, of_up = _gate_gradients(gate, up, grad_inner, spec.activation)
    of_product = torch.cat((of_gate, of_up), 1) if spec.gated else of_gate + of_up
    wide, of_down = of_product.to(dtype), grad_out.T.to(dtype) @ inner.to(dtype)
    return wide @ gate_up, grad_gates, wide.T @ wide_x, of_product.sum(0), of_down, grad_out.sum(0)


def _rows_by_expert(experts: Tensor, count: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each expert id that occurs in `experts` [M, k], yield the id and the rows and columns in which the id occurs.
    All ids are below `count`.
    """
    flat = experts.flatten()
    order, counts = flat.argsort(stable=True), flat.bincount(minlength=count).tolist()
    for expert, found in enumerate(order.split(counts)):
        if len(found):
            yield expert, found // experts.shape[1], found % experts.shape[1]


class _Attention(Function):
    @staticmethod
    @_without_autocast
    def forward(
        ctx: Any,
        ops: Backend,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        packed: Packed,
        spec: AttentionSpec,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, sinks)
        ctx.packed, ctx.spec = packed, spec
        return attend(ops, q, k, v, packed, spec, sinks)

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, sinks = ctx.saved_tensors  # read only once, because a checkpointed layer allows only one read
        return None, *_packed_gradients(inputs, sinks, grad, ctx.packed, ctx.spec), None, None


def _packed_gradients(
    inputs: Sequence[Tensor], sinks: Tensor | None, grad: Tensor, packed: Packed, spec: AttentionSpec
) -> list[Tensor | None]:
    """Return the gradients of `inputs` (q, k and v) and of the sinks, for attention within each sequence."""
    lens = list(packed.lens)
    rows = [x.split(lens) for x in inputs]
    outputs = [torch.empty_like(x) for x in inputs]
    places = [x.split(lens) for x in outputs]
    grads, of_sinks = grad.split(lens), []
    ends = None if packed.ends is None else packed.ends.split(lens)
    for group in packed.groups():
        padded = [pad_sequence([x[i] for i in group], batch_first=True) for x in (*rows, grads)]
        # Padded queries see the first row, since the softmax of a row that sees nothing is undefined.
        own = None if ends is None else pad_sequence([ends[i] for i in group], True, 1.0)
        found = _attention_gradients(padded, own, sinks, spec)
        for part, place in zip(found[:3], places, strict=True):
            for i, of_sequence in zip(group, part, strict=True):
                place[i].copy_(of_sequence[: lens[i]])
        of_sinks += found[3:]
    grad_sinks = None if sinks is None else torch.stack(of_sinks).sum(0).to(sinks.dtype)
    return [*outputs, grad_sinks]


def _attention_gradients(
    padded: Sequence[Tensor], ends: Tensor | None, sinks: Tensor | None, spec: AttentionSpec
) -> list[Tensor]:
    """Return the gradients of q, k and v, and float32 gradients of `sinks` [heads] if there are sinks.

    `padded`: q, k, v and the gradient of the output, each padded to [B, T, heads, D]. Sequences are padded on the
    right, so no real query sees padding. `ends`: [B, T], or None if attention is causal.
    """
    dtype = product_dtype(padded[0])
    *inputs, grad = (x.to(dtype).transpose(1, 2) for x in padded)
    q, k, v = inputs = [x.requires_grad_() for x in inputs]
    sinks = None if sinks is None else sinks.float().clone().requires_grad_()
    with torch.enable_grad():
        out = _attend(q, k, v, ends, sinks, spec)
    found = torch.autograd.grad(out, inputs if sinks is None else [*inputs, sinks], grad)
    return [*(x.transpose(1, 2) for x in found[:3]), *found[3:]]


def _attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None, sinks: Tensor | None, spec: AttentionSpec) -> Tensor:
    """Compute attention with torch from q [B, heads, T, D], k and v [B, kv_heads, T, D], ends [B, T] or None for causal
    attention, and sinks [heads].
    """
    length = q.shape[2]
    is_whole = spec.window is None or spec.window >= length
    is_plain = spec.soft_cap is None and sinks is None
    if is_plain and is_whole and ends is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale, enable_gqa=True)
    places = torch.arange(length, device=q.device)
    visible = places < (places + 1 if ends is None else ends[:, None])[..., None]
    visible = visible & (places[:, None] - places < (length if spec.window is None else spec.window))
    if is_plain:
        return F.scaled_dot_product_attention(q, k, v, visible, scale=spec.scale, enable_gqa=True)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q.float() @ k.float().mT) * spec.scale
    if spec.soft_cap is not None:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), -1)
    return scores.softmax(-1)[..., :length].to(q.dtype) @ v


class _LatentAttention(Function):
    """Latent attention. As in a worker, the forward pass multiplies the queries by `k_up` and attends to latent rows
    (`layer.absorb`). The backward pass recomputes each head's keys and values (`_expanded`), and differentiates plain
    attention, which takes fewer products.
    """

    @staticmethod
    @_without_autocast
    def forward(
        ctx: Any, ops: Backend, q: Tensor, k: Tensor, k_up: Tensor, v_up: Tensor, packed: Packed, spec: LatentSpec
    ) -> Tensor:
        ctx.save_for_backward(q, k, k_up, v_up)
        ctx.packed, ctx.spec = packed, spec
        sums = attend_latent(ops, absorb(ops, q, as_weight(ops, k_up), spec), k, packed, spec)
        return ops.head_linear(sums, as_weight(ops, v_up)).flatten(1)

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (q, *saved), spec = ctx.saved_tensors, ctx.spec
        saved = [x.detach().requires_grad_() for x in saved]
        with torch.enable_grad():
            expanded = _expanded(*(x.to(product_dtype(x)) for x in saved), spec=spec)
        inputs, heads = [q, *(x.detach().to(q.dtype) for x in expanded)], spec.num_heads
        plain = AttentionSpec(heads, heads, spec.query_dim, spec.scale)
        grad_q, *others, _ = _packed_gradients(inputs, None, grad.unflatten(1, (heads, -1)), ctx.packed, plain)
        grads = [found.to(expanded[0].dtype) for found in others if found is not None]
        return None, grad_q, *torch.autograd.grad(expanded, saved, grads), None, None


def _expanded(k: Tensor, k_up: Tensor, v_up: Tensor, spec: LatentSpec) -> tuple[Tensor, Tensor]:
    """Return each head's keys [M, heads, query_dim] and values [M, heads, value_dim], for k [M, 1, head_dim]."""
    (latent, k_rope), heads = k.tensor_split([spec.latent_dim], 2), spec.num_heads
    of_latent = torch.einsum("ma,han->mhn", latent[:, 0], k_up.unflatten(0, (heads, -1)))
    values = torch.einsum("ma,hva->mhv", latent[:, 0], v_up.unflatten(0, (heads, -1)))
    return torch.cat((of_latent, k_rope.expand(-1, heads, -1)), 2), values


class _Convolution(Function):
    @staticmethod
    @_without_autocast
    def forward(ctx: Any, ops: Backend, packed: Packed, x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, *bias)
        ctx.packed = packed
        tails = x.new_empty(len(packed.lens), weight.shape[2] - 1, x.shape[1])
        return ops.convolve(x, weight, tails, packed.states, *bias)

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        def convolve(*inputs: Tensor) -> Tensor:
            return _convolve(ctx.packed.positions, *inputs)

        return None, None, *_float32_gradients(convolve, ctx.saved_tensors, grad)


def _float32_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of the inputs of `function`, computed in float32 and rounded to the dtypes of the inputs."""
    wide = [x.float().requires_grad_() for x in (y.detach().clone() for y in inputs)]
    with torch.enable_grad():
        out = function(*wide)
    found = torch.autograd.grad(out, wide, grad.float())
    return tuple(gradient.to(x.dtype) for gradient, x in zip(found, inputs, strict=True))


def _convolve(positions: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `Backend.convolve` with torch, for x [M, C] and weight [C, 1, K]. Each sequence starts without a tail."""
    out, size = torch.zeros_like(x) if bias is None else bias.expand_as(x), weight.shape[2]
    for back in range(size):
        earlier = F.pad(x, (0, 0, back, 0))[: len(x)].where((positions >= back)[:, None], 0.0)
        out = out + weight[:, 0, size - 1 - back] * earlier
    return F.silu(out)


class _DeltaRule(Function):
    @staticmethod
    @_without_autocast
    def forward(
        ctx: Any,
        ops: Backend,
        qkv: Tensor,
        b: Tensor,
        a: Tensor,
        decay: Tensor,
        bias: Tensor,
        spec: DeltaNetSpec,
        weights: DeltaNetWeights,
        packed: Packed,
    ) -> Tensor:
        ctx.save_for_backward(qkv, b, a, decay, bias)
        ctx.spec, ctx.packed = spec, packed
        states = qkv.new_empty(len(packed.lens), *spec.state_shape, dtype=torch.float32)
        return ops.delta_rule(qkv, b, a, spec, weights, states, packed.states)

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        def recur(*inputs: Tensor) -> Tensor:
            return _recur(*inputs, spec=ctx.spec, packed=ctx.packed)

        return None, *_float32_gradients(recur, ctx.saved_tensors, grad), None, None, None


def _recur(
    qkv: Tensor, b: Tensor, a: Tensor, decay: Tensor, bias: Tensor, spec: DeltaNetSpec, packed: Packed
) -> Tensor:
    """Compute `Backend.delta_rule` with torch, as [M, value_heads, V], for sequences that start from zero states."""
    q, k, v = qkv.split([spec.key_size, spec.key_size, spec.value_size], 1)
    q, k = (x.unflatten(1, (spec.num_key_heads, -1)) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    q, k = (x.repeat_interleave(spec.num_value_heads // spec.num_key_heads, 1) for x in (q, k))
    v = v.unflatten(1, (spec.num_value_heads, -1))
    logs = -decay.exp() * F.softplus(a + bias)
    return _recur_in_chunks(_delta_chunk, packed, q * spec.key_head_dim**-0.5, k, v, logs, b.sigmoid())


class _StateSpace(Function):
    @staticmethod
    @_without_autocast
    def forward(
        ctx: Any, ops: Backend, spec: Mamba2Spec, weights: Mamba2Weights, packed: Packed, *inputs: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.spec, ctx.packed = spec, packed
        xbc, steps = inputs[:2]
        states = xbc.new_empty(len(packed.lens), *spec.state_shape, dtype=torch.float32)
        return ops.state_space(xbc, steps, spec, weights, states, packed.states)

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        def scan(*inputs: Tensor) -> Tensor:
            return _scan(*inputs, spec=ctx.spec, packed=ctx.packed)

        return None, None, None, None, *_float32_gradients(scan, ctx.saved_tensors, grad)


def _scan(
    xbc: Tensor, steps: Tensor, decay: Tensor, bias: Tensor, skip: Tensor, spec: Mamba2Spec, packed: Packed
) -> Tensor:
    """Compute `Backend.state_space` with torch, as [M, heads, V], for sequences that start from zero states."""
    x, b, c = xbc.split([spec.inner_size, spec.vector_size, spec.vector_size], 1)
    share = spec.num_heads // spec.num_groups
    b, c = (part.unflatten(1, (spec.num_groups, -1)).repeat_interleave(share, 1) for part in (b, c))
    x = x.unflatten(1, (spec.num_heads, -1))
    sizes = F.softplus(steps + bias).clamp(*spec.time_step_limit)
    changes, logs = sizes[..., None] * x, -decay.exp() * sizes
    return _recur_in_chunks(_state_space_chunk, packed, c, b, changes, logs) + skip[:, None] * x


def _recur_in_chunks(recur_chunk: Callable[..., tuple[Tensor, Tensor]], packed: Packed, *inputs: Tensor) -> Tensor:
    """Return the outputs [M, heads, V] of a recurrence that starts from zero states in each sequence.

    `recur_chunk(state, *inputs)`: return the outputs [B, heads, T, V] of a chunk of T tokens, and the states [B, heads,
    K, V] after the chunk. The first inputs are queries and keys, [B, heads, T, K], and values, [B, heads, T, V];
    further inputs are [B, heads, T]. The arguments `inputs` of `_recur_in_chunks` are the same inputs for all packed
    tokens, each [M, heads, ...]. Sequences of a batch are padded with zeros on the right.
    """
    rows, found = [x.split(list(packed.lens)) for x in inputs], dict[int, Tensor]()
    for group in packed.groups():
        padded = [pad_sequence([x[i] for i in group], batch_first=True).transpose(1, 2) for x in rows]
        keys, values, outs = padded[1], padded[2], list[Tensor]()
        state = values.new_zeros(*values.shape[:2], keys.shape[3], values.shape[3])
        for chunk in zip(*(x.split(_CHUNK, 2) for x in padded), strict=True):
            out, state = recur_chunk(state, *chunk)
            outs.append(out)
        sequences = torch.cat(outs, 2).transpose(1, 2)
        found |= {i: sequence[: packed.lens[i]] for i, sequence in zip(group, sequences, strict=True)}
    return torch.cat([found[i] for i in range(len(found))])


def _delta_chunk(state: Tensor, q: Tensor, k: Tensor, v: Tensor, logs: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """`recur_chunk` of a delta rule (Yang et al. 2024). After q, k and v, the inputs are the logarithms of the decays,
    and the update rates.

    Token i changes the state by k_i u_i^T, where u_i = rate_i (v_i - r_i). r_i is the product of k_i and the state that
    token i reads. The state that token i reads is the state before the chunk plus the changes by tokens j < i, after
    all decays up to token i. The equations for all u_i form a triangular system.
    """
    decays = _decays_between(logs)
    since_start = logs.cumsum(-1).exp()[..., None]
    rates = rates[..., None]
    before = rates * (decays * (k @ k.mT)).tril(-1)
    wanted = rates * (v - since_start * (k @ state))
    changes = torch.linalg.solve_triangular(before, wanted, upper=False, unitriangular=True)
    return _changed(state, q, k, changes, decays, since_start)


def _state_space_chunk(state: Tensor, c: Tensor, b: Tensor, changes: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    """`recur_chunk` of a state space (Dao and Gu 2024). Token i changes the state by b_i u_i^T, where u_i is row i of
    `changes`. `logs`: the logarithms of the decays.
    """
    return _changed(state, c, b, changes, _decays_between(logs), logs.cumsum(-1).exp()[..., None])


def _changed(
    state: Tensor, q: Tensor, k: Tensor, changes: Tensor, decays: Tensor, since_start: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs of a chunk, and the state after the chunk. Token i changes the state by k_i u_i^T, where u_i
    is row i of `changes`. `decays`: from `_decays_between`. `since_start`: the decay since the chunk began, [..., T,
    1].
    """
    out = since_start * (q @ state) + (decays * (q @ k.mT)) @ changes
    until_end = decays[..., -1, :, None]
    return out, since_start[..., -1:, :] * state + (until_end * k).mT @ changes


def _decays_between(logs: Tensor) -> Tensor:
    """Return a tensor [..., T, T]; element (i, j) is e^(logs[j + 1] + ... + logs[i]), or 0 for j > i.

    Differences of cumulative sums are not used, since they would lose small terms next to large ones.
    """
    each = logs[..., None].expand(*logs.shape, logs.shape[-1]).tril(-1)
    return each.cumsum(-2).exp().tril()


def _wanted(token_ids: Tensor, temperature: float) -> Wanted:
    """Return the `Wanted` that requests the log-prob of one given token in each row."""
    divisor = _divisor(temperature, token_ids.device)
    unused = torch.zeros_like(token_ids)
    rows = torch.arange(len(token_ids), device=token_ids.device)
    return Wanted(rows, token_ids, divisor.repeat(len(token_ids)), unused.bool(), unused, unused)


def _divisor(temperature: float, device: torch.device) -> Tensor:
    """Return the temperature as float32. A temperature beyond float32 becomes infinity; torch.full would raise."""
    return torch.tensor(temperature, dtype=torch.float64, device=device).to(torch.float32)


def _slopes(logits: Tensor, head: HeadSpec) -> Tensor | float:
    """Return the derivative of each logit in `logits` [M, V] with respect to the product from which the head computed
    the logit: a hidden state times a row of the head's weight.
    """
    if head.soft_cap is None:
        return head.scale
    return (1.0 - (logits / head.soft_cap).square_()).mul_(head.scale)


class _LogProbs(Function):
    @staticmethod
    @_without_autocast
    def forward(
        ctx: Any,
        ops: Backend,
        hidden: Tensor,
        weight: Tensor,
        token_ids: Tensor,
        temperature: float,
        head: HeadSpec,
        processing: Processing | None = None,
        found: Tensor | None = None,
    ) -> Tensor:
        """Return the log-probs. `token_ids`: int64 [M] or [M, K]. `found`: the log-probs, if the caller has already
        computed them.
        """
        ctx.ops, ctx.temperature, ctx.head, ctx.processing = ops, temperature, head, processing
        ctx.save_for_backward(hidden, weight, token_ids)
        if found is not None:
            return found.clone()
        stored = as_weight(ops, weight)
        if processing is None and token_ids.dim() == 1:
            return ops.next_tokens(hidden, stored, _wanted(token_ids, temperature), head)[1]
        out = torch.empty_like(token_ids, dtype=torch.float32)
        for rows, logits in _processed_parts(ops, hidden, stored, temperature, head, processing):
            found = ops.log_probs(logits, token_ids[rows].clamp(min=0))
            out[rows] = found.masked_fill(token_ids[rows] == NO_TOKEN, 0.0)
        return out

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute gradients by d log p(t) / d logit(i) = ((i == t) - p(i)) / temperature, some rows at a time. If a row
        has several tokens, the gradients of these tokens are added.

        The probabilities are computed from the logits that the backend's op computes. Torch would round the logits
        differently, and division by a low temperature would turn this difference into a large error. The gradients of
        logits are multiplied by the derivatives of the edits and of the head's scale and cap (`_probs_and_slopes`). The
        logit of a token that filters or edits have dropped gets no gradient.
        """
        hidden, weight, token_ids = ctx.saved_tensors
        stored = as_weight(ctx.ops, weight)
        grad_hidden, dtype = torch.empty_like(hidden), product_dtype(hidden)
        wide = weight.to(dtype)
        # If there are no rows, the gradient is zeros instead of None, because all ranks must reduce the same gradients.
        grad_weight = None if len(hidden) else torch.zeros_like(weight)
        for rows in _row_parts(hidden, weight):
            logits = ctx.ops.lm_head(hidden[rows], stored, ctx.head)
            probs, slopes = _probs_and_slopes(ctx, logits, rows)
            ids, scale = _listed(token_ids[rows]), _listed(grad[rows]) / ctx.temperature
            scale = scale.masked_fill(ids == NO_TOKEN, 0.0)
            grad_logits = probs.mul_(-scale.sum(-1, keepdim=True)).scatter_add_(1, ids.clamp(min=0), scale)
            grad_products = (grad_logits if slopes is None else grad_logits.mul_(slopes)).to(dtype)
            grad_hidden[rows] = grad_products @ wide
            if ctx.needs_input_grad[2]:
                product = grad_products.T @ hidden[rows].to(dtype)
                grad_weight = product if grad_weight is None else product.float().add_(grad_weight)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return None, grad_hidden, grad_weight, *[None] * 5


def _row_parts(hidden: Tensor, weight: Weight | Tensor) -> Iterator[slice]:
    """Yield slices of the rows of `hidden`, such that the logits of a slice have at most `_LOGITS_BYTES`."""
    size = max(1, _LOGITS_BYTES // (4 * weight.shape[0]))
    return (slice(start, start + size) for start in range(0, len(hidden), size))


def _processed_parts(
    ops: Backend, hidden: Tensor, weight: Weight, temperature: float, head: HeadSpec, processing: Processing | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of rows, each with the logits of its rows after `processing`. If `processing` is None, the logits
    are divided by the temperature instead.
    """
    for rows in _row_parts(hidden, weight):
        logits = ops.lm_head(hidden[rows], weight, head)
        if processing is None:
            yield rows, logits / _divisor(temperature, logits.device)
        else:
            yield rows, processing.apply(ops, logits, rows)


def _listed(columns: Tensor) -> Tensor:
    """Return `columns` as [M, K]. A tensor [M] becomes [M, 1]."""
    return columns if columns.dim() == 2 else columns[:, None]


def _probs_and_slopes(ctx: Any, logits: Tensor, rows: slice) -> tuple[Tensor, Tensor | float | None]:
    """Return the probabilities [m, V] of logits [m, V], and the slopes. A slope is the derivative of a processed logit,
    before the division by the temperature, with respect to the product from which the head computed this logit: a
    hidden state times a row of the head's weight. The slopes are None if every slope is 1. May overwrite the logits.
    """
    slopes = None if ctx.head == PLAIN_HEAD else _slopes(logits, ctx.head)
    if ctx.processing is None:
        return logits.div_(ctx.temperature).softmax(-1), slopes
    processed, own = ctx.processing.apply_with_slopes(ctx.ops, logits, rows)
    own = own.masked_fill_(processed == -torch.inf, 0.0)
    return processed.softmax(-1), own if slopes is None else own.mul_(slopes)


@dataclass(frozen=True)
class GradientOps:
    """The ops of a decoder, computed by `backend`, with gradients. The methods include the ops of `layer.LayerOps`,
    with plain tensors as weights, or `DynamicValues` for products with quantized activations.
    """

    backend: Backend

    def merge(self, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """`Backend.merge`. The gradient of the merged weight is freed once the gradients of `a` and `b` are
        computed.
        """
        return _Merge.apply(self.backend, weight, a, b, scale)  # type: ignore[return-value]

    def rounded(self, weight: Tensor, rounding: Rounding | None) -> Tensor:
        """Return the values that `weight` has after `rounding` quantizes it. Without a rounding, return `weight`."""
        return weight if rounding is None else _Rounded.apply(weight, rounding)  # type: ignore[return-value]

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        """Return the matrix product of x [M, K] and the transposed weight [N, K], plus bias [N]. The result is [M,
        N].
        """
        return self._product(self.backend.linear, x, weight, bias)

    def wide_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """`Backend.wide_linear`."""
        return _WideProduct.apply(self.backend, x, weight)  # type: ignore[return-value]

    def project_back(
        self,
        x: Tensor,
        weight: Matrix,
        residual: Tensor | None = None,
        bias: Tensor | None = None,
        pieces: Pieces = WHOLE,
    ) -> Tensor:
        """`Backend.project_back`. The backward pass is the same as for `linear`, for any number of pieces along K."""

        def product(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
            return self.backend.project_back(x, weight, None, bias, pieces)

        out = self._product(product, x, weight, bias)
        return out if residual is None else out + residual

    def _product(self, product: Callable[..., Tensor], x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
        matrix, format = apart(weight)
        others = [] if bias is None else [bias]
        return _Product.apply(self.backend, product, format, x, matrix, *others)  # type: ignore[return-value]

    def rmsnorm(self, x: Tensor, weight: Tensor, norm: NormSpec) -> Tensor:
        """Divide each row of x [M, H] by its root mean square. Then multiply the row by weight [H], or by 1 +
        weight.
        """
        return _Rmsnorm.apply(self.backend, x, weight, norm)  # type: ignore[return-value]

    def rope(self, x: Tensor, rotation: Rotation, interleaved: bool = False) -> Tensor:
        """`Backend.rope`. The cosines and sines in `rotation` are constants."""
        return _Rope.apply(self.backend, x, *rotation[:2], interleaved)  # type: ignore[return-value]

    def gate_up(self, x: Tensor, gate: Matrix, up: Matrix, activation: Activation) -> Tensor:
        """Return activation(linear(x, gate)) * linear(x, up) as [M, I]. The weights `gate` and `up` are [I, H]."""
        return self.gate_mul(self.linear(x, gate), self.linear(x, up), activation)

    def gate_mul(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up for tensors of the same shape."""
        return _GateMul.apply(self.backend, gate, up, activation)  # type: ignore[return-value]

    def route(
        self, logits: Tensor, spec: ExpertsSpec, chosen: Tensor | None = None, correction: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the experts (int32 [M, top_k]) and gates (float32 [M, top_k]) for router logits [M, E].

        `chosen` (int32 [M, top_k]) lists experts to use instead of the router's choice. The ids in each row of `chosen`
        are ascending. The gates have gradients; the choice of experts has no gradient.
        """
        return _Route.apply(self.backend, logits, spec, chosen, correction)  # type: ignore[return-value]

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
        """Pass each row of x [M, H] through the experts that `route` returned for the row, and add `shared` [M, H].

        `weights` has matrices [E, rows, columns]. The backward pass holds the inner rows of one expert at a time.
        """
        (gate_up, format), (down, _) = apart(weights.gate_up), apart(weights.down)
        parameters = gate_up, weights.gate_up_bias, down, weights.down_bias
        others = spec, weights, format, experts, groups
        return _Experts.apply(self.backend, *others, x, gates, shared, *parameters)  # type: ignore[return-value]

    def convolve(self, x: Tensor, weight: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
        """Convolve each channel of x [M, C] causally within each sequence, and return the SiLU of the result.

        `weight` is [C, 1, K]; `bias` is [C].
        """
        inputs = x, weight, *([] if bias is None else [bias])
        return _Convolution.apply(self.backend, packed, *inputs)  # type: ignore[return-value]

    def delta_rule(
        self, qkv: Tensor, b: Tensor, a: Tensor, spec: DeltaNetSpec, weights: DeltaNetWeights, packed: Packed
    ) -> Tensor:
        """Run the recurrence of a gated delta net from the start of each sequence, and return [M, value_heads, V].

        `qkv` is [M, channels]; `b` and `a` are [M, value_heads].
        """
        gates = weights.decay, weights.bias
        return _DeltaRule.apply(self.backend, qkv, b, a, *gates, spec, weights, packed)  # type: ignore[return-value]

    def state_space(
        self, xbc: Tensor, steps: Tensor, spec: Mamba2Spec, weights: Mamba2Weights, packed: Packed
    ) -> Tensor:
        """Run the recurrence of a state space from the start of each sequence, and return [M, heads, V].

        `xbc` is [M, channels]; `steps` is [M, heads].
        """
        inputs = xbc, steps, weights.decay, weights.bias, weights.skip
        return _StateSpace.apply(self.backend, spec, weights, packed, *inputs)  # type: ignore[return-value]

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        """Return the attention within each sequence, as [M, heads, D].

        q is [M, heads, D], k and v are [M, kv_heads, D]. `sinks` is [heads] if the spec has sinks.
        """
        return _Attention.apply(self.backend, q, k, v, sinks, packed, spec)  # type: ignore[return-value]

    def latent_attention(
        self, q: Tensor, k: Tensor, k_up: Tensor, v_up: Tensor, packed: Packed, spec: LatentSpec
    ) -> Tensor:
        """Return the outputs [M, heads * value_dim] of latent attention within each sequence, for q [M, heads,
        query_dim] and k [M, 1, head_dim]. `k_up` and `v_up`: as in `LatentWeights`.
        """
        return _LatentAttention.apply(self.backend, q, k, k_up, v_up, packed, spec)  # type: ignore[return-value]

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return the products of `hidden` [M, H] and the head's `weight` [V, H]: float32 [M, V]. If the head has no
        scale and no cap, the products are the logits.
        """
        return self._product(self.backend.lm_head, hidden, weight, None)

    def log_probs(
        self,
        hidden: Tensor,
        weight: Tensor,
        token_ids: Tensor,
        temperature: float,
        head: HeadSpec = PLAIN_HEAD,
        processing: Processing | None = None,
    ) -> Tensor:
        """Return the log-probs of `token_ids`, which has one token (int64 [M]) or K tokens (int64 [M, K]) for each row
        of `hidden` [M, H]. The log-probs are float32, in the shape of `token_ids`; `weight` is [V, H]. The log-prob of
        NO_TOKEN is 0.

        The log-probs are computed from the logits after `processing`. If `processing` is None, they are computed from
        the logits divided by `temperature`. At any time, the backward pass holds at most
        `_LOGITS_BYTES` of logits, and at most `_LOGITS_BYTES` of probabilities. If the head has a cap, the backward
        pass also holds up to `_LOGITS_BYTES` of slopes. With `processing`, the backward pass also holds up to
        `_LOGITS_BYTES` of processed logits.
        """
        given = self.backend, hidden, weight, token_ids, temperature, head, processing
        return _LogProbs.apply(*given)  # type: ignore[return-value]

    def statistics(
        self,
        hidden: Tensor,
        weight: Tensor,
        token_ids: Tensor,
        temperature: float,
        head: HeadSpec = PLAIN_HEAD,
        processing: Processing | None = None,
        *,
        k: int,
    ) -> TokenStatistics:
        """Return `log_probs` with gradients. The entropy and the k most probable tokens of each row are returned
        without gradients.
        """
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            wanted, stored = _wanted(token_ids, temperature), as_weight(self.backend, weight)
            if processing is None or not len(hidden):
                found = self.backend.next_token_statistics(hidden, stored, wanted, k, head)[1]
            else:
                parts = _processed_parts(self.backend, hidden, stored, temperature, head, processing)
                each = [self.backend.token_statistics(logits, token_ids[rows], k) for rows, logits in parts]
                found = TokenStatistics._make(map(torch.cat, zip(*each, strict=True)))
        given = self.backend, hidden, weight, token_ids, temperature, head, processing, found.logprobs
        return found._replace(logprobs=_LogProbs.apply(*given))


class GradientTowerOps(GradientOps):
    """The ops of a vision tower, computed by `backend`, with gradients. See `towers.TowerOps`."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, norm: LayerNormSpec) -> Tensor:
        """`Backend.layer_norm`."""
        return _LayerNorm.apply(self.backend, x, weight, bias, norm)  # type: ignore[return-value]

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """`Backend.embedding`."""
        return F.embedding(token_ids, table)

    def matrix(self, tensor: Tensor) -> Tensor:
        """See `TowerOps.matrix`."""
        return tensor

    def transposed(self, weight: Tensor) -> Tensor:
        """See `TowerOps.transposed`."""
        return weight.T
