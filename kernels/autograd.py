"""The ops that training needs, with gradients.

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

from .contract import AttentionBatch, Backend, TokenStatistics, Wanted, Weight

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


def linear(ops: Backend, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N]: [M, N]."""
    return _Product.apply(ops, ops.linear, x, weight, *([] if bias is None else [bias]))  # type: ignore[return-value]


def logits(ops: Backend, hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits of hidden [M, H] with weight [V, H]: float32 [M, V]."""
    return _Product.apply(ops, ops.lm_head, hidden, weight)  # type: ignore[return-value]


class _Rmsnorm(Function):
    @staticmethod
    @_without_autocast
    def forward(ctx: Any, ops: Backend, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return ops.rmsnorm(x, weight, eps)

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wide, grad = x.float(), grad.float()
        rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + ctx.eps)
        normed = wide * rstd
        grad_weight = (grad * normed).sum(0).to(weight.dtype)
        grad = grad * weight
        projection = (grad * normed).mean(-1, keepdim=True)
        grad_x = grad.addcmul_(normed, projection, value=-1.0).mul_(rstd).to(x.dtype)
        return None, grad_x, grad_weight, None


def rmsnorm(ops: Backend, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [M, H] over its root mean square, times weight [H]: [M, H]."""
    return _Rmsnorm.apply(ops, x, weight, eps)  # type: ignore[return-value]


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


def rope(ops: Backend, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """x [M, heads, D] rotated by constant (cosines, sines), each float32 [M, D / 2]: [M, heads, D]."""
    return _Rope.apply(ops, x, *rotation)  # type: ignore[return-value]


class _SiluMul(Function):
    @staticmethod
    def forward(ctx: Any, ops: Backend, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return ops.silu_mul(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return None, torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)


def silu_mul(ops: Backend, gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [M, I]: [M, I]."""
    return _SiluMul.apply(ops, gate, up)  # type: ignore[return-value]


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
    def forward(ctx: Any, ops: Backend, q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.packed, ctx.scale = packed, scale
        num_blocks = int(packed.batch.block_tables.max()) + 1
        caches = k.new_zeros(2, num_blocks, _BLOCK_SIZE, *k.shape[1:])
        ops.write_kv(k, v, caches[0], caches[1], packed.slots)
        return ops.paged_attention(q, caches[0], caches[1], packed.batch, scale)

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
            for found, place in zip(_attention_gradients(padded, ctx.scale), places, strict=True):
                for i, rows in zip(group, found, strict=True):
                    place[i].copy_(rows[: lens[i]])
        return None, *outputs, None, None


def _attention_gradients(padded: Sequence[Tensor], scale: float) -> list[Tensor]:
    """Those of q, k and v, of sequences padded on the right: causal attention keeps real queries from the padding.

    `padded`: q, k, v and the gradient of the output, each [B, T, heads, D].
    """
    *inputs, grad = (x.transpose(1, 2) for x in padded)
    q, k, v = inputs = [x.requires_grad_() for x in inputs]
    with torch.enable_grad():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return [x.transpose(1, 2) for x in torch.autograd.grad(out, inputs, grad)]


def attention(ops: Backend, q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float) -> Tensor:
    """Causal attention within each sequence: q [M, heads, D], k and v [M, kv_heads, D]; returns [M, heads, D]."""
    return _Attention.apply(ops, q, k, v, packed, scale)  # type: ignore[return-value]


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


def log_probs(ops: Backend, hidden: Tensor, weight: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    """The log-prob, at `temperature`, of one token (int64 [M]) after each of hidden [M, H], with weight [V, H].

    float32 [M]. The backward pass holds at most `_LOGITS_BYTES` of logits at once, and as much of probabilities.
    """
    return _LogProbs.apply(ops, hidden, weight, token_ids, temperature)  # type: ignore[return-value]


def statistics(
    ops: Backend, hidden: Tensor, weight: Tensor, token_ids: Tensor, temperature: float, k: int
) -> TokenStatistics:
    """What `log_probs` gives, with the entropy and the k most probable tokens of each row. It has no gradient."""
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        wanted = _wanted(token_ids, temperature)
        return ops.next_token_statistics(hidden, _backend_weight(ops, weight), wanted, k)[1]
