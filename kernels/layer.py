"""What a layer computes: its arithmetic, written once over the ops.

A worker binds it to a backend and a paged cache (`run_layers`), a trainer to ops with gradients (`training`). A
backend that fuses steps, or runs of layers, gives the bits of this definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from .contract import AttentionBatch, AttentionWeights, Backend, Layer, MlpWeights, Norms, Rotation, Weight
from .specs import Activation, AttentionSpec, DecoderSpec, NormSpec

GetWeight: TypeAlias = Callable[..., Any]
"""get(name, *shape): the weight of that name, a `Weight` for two dimensions and a tensor for one."""


class LayerOps(Protocol):
    """The ops of a layer: those of `Backend`, whose matrices are `Weight`, or the same with gradients, for tensors."""

    def rmsnorm(self, x: Tensor, weight: Tensor, norm: NormSpec) -> Tensor: ...

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor: ...

    def linear_add(self, x: Tensor, weight: Any, residual: Tensor) -> Tensor: ...

    def gate_up(self, x: Tensor, gate: Any, up: Any, activation: Activation) -> Tensor: ...

    def rope(self, x: Tensor, rotation: Rotation) -> Tensor: ...


# Names of the weights outside layers, and where a layer's begin.
EMBEDDING, LAST_NORM, HEAD, LAYERS = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "model.layers"


def make_layer(decoder: DecoderSpec, index: int, get: GetWeight) -> Layer:
    """A layer of weights, each of which `get(name, *shape)` makes or finds, always in the same order."""
    spec, hidden = decoder.layers[index], decoder.hidden_size

    def of(role: str, *shape: int) -> Any:
        return get(f"{LAYERS}.{index}.{decoder.names[role]}", *shape)

    def norms(role: str) -> Norms:
        before = of(f"{role}.before", hidden) if spec.norm_before else None
        return Norms(before, of(f"{role}.after", hidden) if spec.norm_after else None)

    inner = spec.mlp.intermediate_size
    return Layer(
        spec,
        norms("mixer_norm"),
        _attention_weights(spec.mixer, hidden, of),
        norms("mlp_norm"),
        MlpWeights(of("mlp.gate", inner, hidden), of("mlp.up", inner, hidden), of("mlp.down", hidden, inner)),
    )


def _attention_weights(spec: AttentionSpec, hidden: int, of: GetWeight) -> AttentionWeights:
    size, over_heads = spec.head_dim, spec.qk_norm_over_heads
    rows = {"q": spec.num_heads * size, "k": spec.num_kv_heads * size, "v": spec.num_kv_heads * size}
    normed = {part: rows[part] if over_heads else size for part in "qk"}
    q, k, v = (of(f"mixer.{part}", count, hidden) for part, count in rows.items())
    biases = tuple(of(f"mixer.{part}_bias", count) for part, count in rows.items()) if spec.qkv_bias else None
    norms = tuple(of(f"mixer.{part}_norm", n) for part, n in normed.items()) if spec.qk_norm is not None else None
    return AttentionWeights(q, k, v, biases, norms, of("mixer.o", hidden, rows["q"]))  # type: ignore[arg-type]


def scale_embedding(x: Tensor, scale: float) -> Tensor:
    """x [M, H] times `scale`, which is rounded to x's dtype first: [M, H]."""
    return x if scale == 1.0 else x * torch.tensor(scale).to(x.dtype).item()


def run_layer(
    ops: LayerOps, layer: Layer, x: Tensor, mix: Callable[[Tensor, AttentionSpec, AttentionWeights], Tensor]
) -> Tensor:
    """Hidden states [M, H] after a layer, from x [M, H].

    `mix(hidden, spec, weights)`: what the mixer's heads make of hidden states [M, H], [M, heads * D].
    """
    spec, mixer, mlp = layer.spec, layer.mixer, layer.mlp
    mixed = mix(_normed(ops, x, layer.mixer_norms.before, spec.norm), spec.mixer, mixer)
    x = _added(ops, x, mixed, mixer.o, layer.mixer_norms.after, spec.norm)
    hidden = _normed(ops, x, layer.mlp_norms.before, spec.norm)
    active = ops.gate_up(hidden, mlp.gate, mlp.up, spec.mlp.activation)
    return _added(ops, x, active, mlp.down, layer.mlp_norms.after, spec.norm)


def _normed(ops: LayerOps, x: Tensor, weight: Tensor | None, norm: NormSpec) -> Tensor:
    return x if weight is None else ops.rmsnorm(x, weight, norm)


def _added(ops: LayerOps, x: Tensor, inner: Tensor, weight: Weight, after: Tensor | None, norm: NormSpec) -> Tensor:
    """x plus the product of `inner` with `weight`, normed if there is a norm after it."""
    if after is None:
        return ops.linear_add(inner, weight, x)
    return x + ops.rmsnorm(ops.linear(inner, weight), after, norm)


def project(
    ops: LayerOps, x: Tensor, spec: AttentionSpec, weights: AttentionWeights, rotation: Rotation
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [M, heads, D], keys and values [M, kv_heads, D] of hidden states x [M, H]."""
    biases = weights.biases or (None, None, None)
    matrices = zip((weights.q, weights.k, weights.v), biases, strict=True)
    q, k, v = (ops.linear(x, weight, bias) for weight, bias in matrices)
    if spec.qk_norm is not None and weights.qk_norms is not None:
        q_norm, k_norm = weights.qk_norms
        q, k = _norm_heads(ops, q, q_norm, spec.qk_norm), _norm_heads(ops, k, k_norm, spec.qk_norm)
    q, k, v = (part.unflatten(1, (-1, spec.head_dim)) for part in (q, k, v))
    return ops.rope(q, rotation), ops.rope(k, rotation), v


def _norm_heads(ops: LayerOps, x: Tensor, weight: Tensor, norm: NormSpec) -> Tensor:
    """x [M, heads * D], normed in pieces of the weight's size."""
    return ops.rmsnorm(x.reshape(-1, len(weight)), weight, norm).view_as(x)


def run_layers(
    ops: Backend,
    x: Tensor,
    layers: Sequence[Layer],
    rotations: Sequence[Rotation],
    kv_caches: Sequence[tuple[Tensor, Tensor]],
    slots: Tensor,
    batch: AttentionBatch,
) -> Tensor:
    """`Backend.layers` by the other ops."""
    for layer, caches in zip(layers, kv_caches, strict=True):

        def attend(
            x: Tensor, spec: AttentionSpec, weights: AttentionWeights, caches: tuple[Tensor, Tensor] = caches
        ) -> Tensor:
            q = ops.qkv(x, spec, weights, rotations[spec.rotation], *caches, slots)
            return ops.paged_attention(q, *caches, batch, spec.scale, spec.window, spec.soft_cap).flatten(1)

        x = run_layer(ops, layer, x, attend)
    return x
