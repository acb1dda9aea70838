"""The ops of a layer, and those of the head, with gradients: `GradientOps`.

The forward pass of each is a backend's op, so it has the bits of a rollout. The backward pass is torch's, in the dtype
of the forward pass, apart from rotation and recomputed logits, which are ops too; it promises gradients within
rounding. Both ignore autocast, which would change a dtype in between; the caller casts.

M: rows, which are tokens of any number of sequences. The floating-point tensors of a call share one dtype and device
where nothing else is said. Owns nothing: a weight is put into the backend's layout anew for each call, since not every
change of a weight can be noticed: one through `.data` does not raise torch's version counter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.nn.utils.rnn import pad_sequence

from .contract import AttentionBatch, Backend, Rotation, TokenStatistics, Wanted, Weight
from .specs import Activation, AttentionSpec, NormSpec

# Any even size gives the same bits.
_BLOCK_SIZE = 16
# The most memory that the logits of a backward pass take at once, if those of one row fit in.
_LOGITS_BYTES = 2**27


def _backend_weight(ops: Backend, weight: Tensor) -> Weight:
    rows, columns = weight.shape
    stored = ops.new_weight(rows, columns, weight.new_empty)
    stored.copy_(weight)
    return stored


def _without_autocast(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(ctx: Any, *args: Any) -> Any:
        device = next(arg.device for arg in args if isinstance(arg, Tensor))
        with torch.autocast(device.type, enabled=False):
            return method(ctx, *args)

    return run


class _Product(Function):
    """`product(x, weight, *bias)`, an op of the backend; x [M, K], weight [N, K], bias [N] or nothing."""

    @staticmethod
    @_without_autocast
    def forward(
        ctx: Any, ops: Backend, product: Callable[..., Tensor], x: Tensor, weight: Tensor, *bias: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, _backend_weight(ops, weight), *bias)

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        _, _, needs_x, needs_weight, *needs_bias = ctx.needs_input_grad
        grad_x = grad @ weight if needs_x else None
        grad_weight = grad.T @ x if needs_weight else None
        return None, None, grad_x, grad_weight, *(grad.sum(0) if needed else None for needed in needs_bias)


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


class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, ops: Backend, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.ops = ops
        ctx.save_for_backward(cosines, sines)
        return ops.rope(x, (cosines, sines))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cosines, sines = ctx.saved_tensors
        return None, ctx.ops.rope(grad, (cosines, -sines)), None, None


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
        if ctx.activation == "silu":
            return None, torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate), None
        grad_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
        return None, grad_gate, grad * F.gelu(gate, approximate="tanh"), None


@dataclass(frozen=True)
class Packed:
    """Sequences of `lens` tokens each, all of which are rows, one sequence after the other.

    `positions` int64 [M]: of each row in its sequence, from 0 on.
    """

    lens: Sequence[int]
    positions: Tensor

    @classmethod
    def of(cls, lens: Sequence[int], device: torch.device) -> Packed:
        """Sequences of these lengths, with their positions on `device`."""
        return cls(lens, torch.cat([torch.arange(n, device=device) for n in lens]))

    @cached_property
    def batch(self) -> AttentionBatch:
        """Every row attends to the rows of its sequence up to itself, in a cache where each has blocks of its own."""
        counts = torch.tensor([-(-n // _BLOCK_SIZE) for n in self.lens], device=self.positions.device)
        first = counts.cumsum(0) - counts
        tables = first[:, None] + torch.arange(int(counts.max()), device=counts.device)
        return AttentionBatch(
            query_starts=[0, *torch.tensor(self.lens).cumsum(0).tolist()],
            context_lens=list(self.lens),
            block_tables=torch.minimum(tables, counts.sum() - 1),
        )

    @cached_property
    def slots(self) -> Tensor:
        """Where in the cache each row's key and value stand: int64 [M]."""
        lens = torch.tensor(self.lens, device=self.positions.device)
        return self.batch.block_tables[:, 0].repeat_interleave(lens) * _BLOCK_SIZE + self.positions

    def groups(self) -> list[list[int]]:
        """The sequences by length, so that a group padded to its longest has less than twice its tokens."""
        alike: dict[int, list[int]] = defaultdict(list)
        for i, length in enumerate(self.lens):
            alike[length.bit_length()].append(i)
        return list(alike.values())


class _Attention(Function):
    @staticmethod
    @_without_autocast
    def forward(ctx: Any, ops: Backend, q: Tensor, k: Tensor, v: Tensor, packed: Packed, spec: AttentionSpec) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.packed, ctx.spec = packed, spec
        num_blocks = int(packed.batch.block_tables.max()) + 1
        caches = k.new_zeros(2, num_blocks, _BLOCK_SIZE, *k.shape[1:])
        ops.write_kv(k, v, caches[0], caches[1], packed.slots)
        return ops.paged_attention(q, caches[0], caches[1], packed.batch, spec.scale, spec.window, spec.soft_cap)

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lens = list(ctx.packed.lens)
        saved = ctx.saved_tensors  # a checkpointed layer lets them be read once
        inputs = [x.split(lens) for x in saved]
        outputs = [torch.empty_like(x) for x in saved]
        places = [x.split(lens) for x in outputs]
        grads = grad.split(lens)
        for group in ctx.packed.groups():
            padded = [pad_sequence([x[i] for i in group], batch_first=True) for x in (*inputs, grads)]
            for found, place in zip(_attention_gradients(padded, ctx.spec), places, strict=True):
                for i, rows in zip(group, found, strict=True):
                    place[i].copy_(rows[: lens[i]])
        return None, *outputs, None, None


def _attention_gradients(padded: Sequence[Tensor], spec: AttentionSpec) -> list[Tensor]:
    """Those of q, k and v, of sequences padded on the right: causal attention keeps real queries from the padding.

    `padded`: q, k, v and the gradient of the output, each [B, T, heads, D].
    """
    *inputs, grad = (x.transpose(1, 2) for x in padded)
    q, k, v = inputs = [x.requires_grad_() for x in inputs]
    with torch.enable_grad():
        out = _attend(q, k, v, spec)
    return [x.transpose(1, 2) for x in torch.autograd.grad(out, inputs, grad)]


def _attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention by torch: q [B, heads, T, D], k and v [B, kv_heads, T, D]."""
    length = q.shape[2]
    is_whole = spec.window is None or spec.window >= length
    if spec.soft_cap is None and is_whole:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale, enable_gqa=True)
    places = torch.arange(length, device=q.device)
    distance = places[:, None] - places
    visible = (distance >= 0) & (distance < (length if spec.window is None else spec.window))
    if spec.soft_cap is None:
        return F.scaled_dot_product_attention(q, k, v, visible, scale=spec.scale, enable_gqa=True)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.tanh((q.float() @ k.float().mT) * (spec.scale / spec.soft_cap)) * spec.soft_cap
    return scores.masked_fill(~visible, -torch.inf).softmax(-1).to(q.dtype) @ v


def _wanted(token_ids: Tensor, temperature: float) -> Wanted:
    """The log-prob of one token of each row."""
    # Beyond float32 it is infinite, which torch.full refuses.
    divisor = torch.tensor(temperature, dtype=torch.float64, device=token_ids.device).to(torch.float32)
    unused = torch.zeros_like(token_ids)
    rows = torch.arange(len(token_ids), device=token_ids.device)
    return Wanted(rows, token_ids, divisor.repeat(len(token_ids)), unused.bool(), unused, unused)


class _LogProbs(Function):
    @staticmethod
    @_without_autocast
    def forward(
        ctx: Any, ops: Backend, hidden: Tensor, weight: Tensor, token_ids: Tensor, temperature: float
    ) -> Tensor:
        ctx.ops, ctx.temperature = ops, temperature
        ctx.save_for_backward(hidden, weight, token_ids)
        return ops.next_tokens(hidden, _backend_weight(ops, weight), _wanted(token_ids, temperature))[1]

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """d log p(t) / d logit(i) = ((i == t) - p(i)) / temperature, for some rows at a time.

        The probabilities are those of the op's own logits: what differs from them by rounding is far off when it is
        divided by a low temperature.
        """
        hidden, weight, token_ids = ctx.saved_tensors
        stored = _backend_weight(ctx.ops, weight)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        size = max(1, _LOGITS_BYTES // (4 * len(weight)))
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            scale = grad[rows, None] / ctx.temperature
            probs = ctx.ops.lm_head(hidden[rows], stored).div_(ctx.temperature).softmax(-1)
            grad_logits = probs.mul_(-scale).scatter_add_(1, token_ids[rows, None], scale).to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ weight
            if ctx.needs_input_grad[2]:
                product = grad_logits.T @ hidden[rows]
                grad_weight = product if grad_weight is None else product.float().add_(grad_weight)
        return None, grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


@dataclass(frozen=True)
class GradientOps:
    """The ops of `backend` with gradients. Those of `layer.LayerOps`, on plain tensors for weights, and what a decoder
    needs beside its layers.
    """

    backend: Backend

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [M, K] times weight [N, K] transposed, plus bias [N]: [M, N]."""
        return _Product.apply(self.backend, self.backend.linear, x, weight, *([] if bias is None else [bias]))  # type: ignore[return-value]

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        """linear(x, weight) + residual [M, N]."""
        return self.linear(x, weight) + residual

    def rmsnorm(self, x: Tensor, weight: Tensor, norm: NormSpec) -> Tensor:
        """x [M, H] over its root mean square, times weight [H], or 1 + weight: [M, H]."""
        return _Rmsnorm.apply(self.backend, x, weight, norm)  # type: ignore[return-value]

    def rope(self, x: Tensor, rotation: Rotation) -> Tensor:
        """x [M, heads, D] rotated by constant (cosines, sines), each float32 [M, D / 2]: [M, heads, D]."""
        return _Rope.apply(self.backend, x, *rotation)  # type: ignore[return-value]

    def gate_up(self, x: Tensor, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """activation(linear(x, gate)) * linear(x, up), gate and up [I, H]: [M, I]."""
        return _GateMul.apply(self.backend, self.linear(x, gate), self.linear(x, up), activation)  # type: ignore[return-value]

    def attention(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, spec: AttentionSpec) -> Tensor:
        """Causal attention within each sequence: q [M, heads, D], k and v [M, kv_heads, D]; returns [M, heads, D]."""
        return _Attention.apply(self.backend, q, k, v, packed, spec)  # type: ignore[return-value]

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Logits of hidden [M, H] with weight [V, H]: float32 [M, V]."""
        return _Product.apply(self.backend, self.backend.lm_head, hidden, weight)  # type: ignore[return-value]

    def log_probs(self, hidden: Tensor, weight: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        """The log-prob, at `temperature`, of one token (int64 [M]) after each of hidden [M, H], with weight [V, H].

        float32 [M]. The backward pass holds at most `_LOGITS_BYTES` of logits at once, and as much of probabilities.
        """
        return _LogProbs.apply(self.backend, hidden, weight, token_ids, temperature)  # type: ignore[return-value]

    def statistics(
        self, hidden: Tensor, weight: Tensor, token_ids: Tensor, temperature: float, k: int
    ) -> TokenStatistics:
        """What `log_probs` gives, with the entropy and the k most probable tokens of each row. It has no gradient."""
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            wanted = _wanted(token_ids, temperature)
            return self.backend.next_token_statistics(hidden, _backend_weight(self.backend, weight), wanted, k)[1]
