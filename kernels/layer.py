"""The arithmetic of a layer, defined once in terms of the ops.

A worker runs a layer on a backend, with the layer's memory (`run_layers`). A trainer runs a layer on ops with gradients
(`training`). A backend may fuse steps or whole layers, but it gives the same bits as this definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from .cache_formats import round_trip
from .contract import (
    AttentionWeights,
    Backend,
    DeltaNetWeights,
    ExpertsWeights,
    LatentWeights,
    Layer,
    Mamba2Weights,
    Memory,
    MlpWeights,
    Norms,
    Pages,
    Rotation,
    StateBatch,
    Weight,
    full_rows_of,
    mark_rows,
)
from .specs import (
    PLAIN,
    WHOLE,
    Activation,
    AttentionSpec,
    CachedSpec,
    DecoderSpec,
    DeltaNetSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    Mamba2Spec,
    MlpSpec,
    NormSpec,
    Pieces,
    RecurrentSpec,
    RotationSpec,
    pieces_of,
)
from .stacks import HeadLayout, StackLayout

GetWeight: TypeAlias = Callable[..., Any]
"""get(name, *shape, held=..., layout=...): return the weight `name`: a `Weight` for two dimensions, else a tensor.
`held`: a `WeightSpec`, which says how the weight is held. If `layout` is a `StackLayout`, return the matrices of a
layer's experts, of shape [E, rows, columns], or their biases, [E, rows], in the order of `ExpertsWeights`. If `layout`
is a `HeadLayout`, return the two matrices of latent attention's heads.
"""

Attend: TypeAlias = Callable[[Tensor, Any, Any], Tensor]
"""attend(hidden, spec, weights): return the heads' outputs [M, heads * D] for hidden states [M, H]. The spec and the
weights belong to an attention or to a latent attention.
"""

Recur: TypeAlias = Callable[..., Tensor]
"""recur(spec, weights, x, *gates): return the outputs of a mixer's recurrence over the convolution of x [M, channels]:
`delta_rule` with the gates b and a, or `state_space` with the time steps. The result is [M, heads, V].
"""

Choose: TypeAlias = Callable[[Tensor, ExpertsSpec, Tensor | None], tuple[Tensor, Tensor]]
"""choose(logits, spec, correction): return the experts of each row and their gates, in the form of `Backend.route`."""


class LayerOps(Protocol):
    """The ops of a layer: either the ops of `Backend`, which take `Weight` matrices, or ops with gradients,
    which take plain tensors.
    """

    def rmsnorm(self, x: Tensor, weight: Tensor, norm: NormSpec) -> Tensor: ...

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor: ...

    def wide_linear(self, x: Tensor, weight: Any) -> Tensor: ...

    def project_back(
        self,
        x: Tensor,
        weight: Any,
        residual: Tensor | None = None,
        bias: Tensor | None = None,
        pieces: Pieces = WHOLE,
    ) -> Tensor: ...

    def gate_up(self, x: Tensor, gate: Any, up: Any, activation: Activation) -> Tensor: ...

    def gate_mul(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor: ...

    def rope(self, x: Tensor, rotation: Rotation, interleaved: bool = False) -> Tensor: ...

    def experts(
        self,
        x: Tensor,
        spec: ExpertsSpec,
        weights: Any,
        experts: Tensor,
        gates: Tensor,
        shared: Tensor | None = None,
        groups: int = 1,
    ) -> Tensor: ...


class HeadOps(Protocol):
    """The op of `Backend` that multiplies each head by a matrix of its own."""

    def head_linear(self, x: Tensor, weight: Any) -> Tensor: ...


# The name of the head's weight, and the prefix of the names inside layers.
HEAD, LAYERS = "lm_head.weight", "model.layers"


def make_layer(decoder: DecoderSpec, index: int, get: GetWeight) -> Layer:
    """Return a layer with the weights that `get` returns. Every call requests the weights in the same order."""
    return layer_of(decoder, decoder.layers[index], f"{LAYERS}.{index}", get)


def layer_of(decoder: DecoderSpec, spec: LayerSpec, prefix: str, get: GetWeight) -> Layer:
    """Return a layer of `decoder`. `prefix`: the names of the layer's weights begin with `prefix` and a dot."""
    hidden = decoder.hidden_size

    def of(role: str, *shape: int, **layout: StackLayout | HeadLayout) -> Any:
        return get(f"{prefix}.{decoder.names[role]}", *shape, held=decoder.held.get(role, PLAIN), **layout)

    def norms(role: str) -> Norms:
        before = of(f"{role}.before", hidden) if spec.norm_before else None
        return Norms(before, of(f"{role}.after", hidden) if spec.norm_after else None)

    nothing, own = (Norms(None, None), None), decoder.pieces // decoder.ranks
    mixer = nothing if spec.mixer is None else (norms("mixer_norm"), _mixer_weights(spec.mixer, hidden, of))
    second: Any = None if spec.recurrent_mixer is None else _mixer_weights(spec.recurrent_mixer, hidden, of)
    mlp = nothing if spec.mlp is None else (norms("mlp_norm"), _mlp_weights(spec.mlp, hidden, of))
    pieces = _mixer_pieces(spec.mixer, own), _mlp_pieces(spec.mlp, own)
    return Layer(spec, *mixer, *mlp, *pieces, second, _mixer_pieces(spec.recurrent_mixer, own))


def _mixer_pieces(spec: CachedSpec | RecurrentSpec | None, count: int) -> Pieces:
    """Return the pieces of the output projection `o`. Each piece consists of whole heads, or of whole groups of heads
    that share keys.
    """
    if spec is None:
        return WHOLE
    if isinstance(spec, CachedSpec):
        return pieces_of(count, spec.num_heads * spec.value_dim, spec.value_dim)
    if isinstance(spec, Mamba2Spec):
        return pieces_of(count, spec.inner_size, spec.inner_size // spec.num_groups)
    return pieces_of(count, spec.value_size, spec.value_size // spec.num_key_heads)


def _mlp_pieces(spec: MlpSpec | ExpertsSpec | None, count: int) -> Pieces:
    if spec is None:
        return WHOLE
    return pieces_of(count, spec.intermediate_size if isinstance(spec, MlpSpec) else spec.shared_size, spec.unit)


def _mixer_weights(
    spec: CachedSpec | RecurrentSpec, hidden: int, of: GetWeight
) -> AttentionWeights | LatentWeights | DeltaNetWeights | Mamba2Weights:
    if isinstance(spec, AttentionSpec):
        return _attention_weights(spec, hidden, of)
    if isinstance(spec, LatentSpec):
        return _latent_weights(spec, hidden, of)
    if isinstance(spec, Mamba2Spec):
        return _mamba2_weights(spec, hidden, of)
    return _delta_net_weights(spec, hidden, of)


def _mlp_weights(spec: MlpSpec | ExpertsSpec, hidden: int, of: GetWeight) -> MlpWeights | ExpertsWeights:
    if isinstance(spec, MlpSpec):
        return _one_mlp_weights("mlp", spec.intermediate_size, hidden, of, spec.gated, spec.bias, spec.joined)
    (_, count), inner, size = spec.own, spec.intermediate_size, spec.latent_size or hidden
    sides, is_latent = 2 if spec.gated else 1, spec.latent_size > 0
    gate_up = StackLayout(spec.transposed, spec.transposed, spec.or_transposed, sides)
    down = StackLayout(spec.transposed, False, spec.or_transposed)
    return ExpertsWeights(
        of("router", spec.num_experts, hidden),
        of("router_bias", spec.num_experts) if spec.bias else None,
        of("experts.gate_up", count, sides * inner, size, layout=gate_up),
        of("experts.gate_up_bias", count, sides * inner, layout=gate_up) if spec.bias else None,
        of("experts.down", count, size, inner, layout=down),
        of("experts.down_bias", count, size, layout=down) if spec.bias else None,
        _one_mlp_weights("shared", spec.shared_size, hidden, of, spec.gated, joined=spec.shared_joined)
        if spec.has_shared
        else None,
        of("shared.score", 1, hidden) if spec.has_shared and spec.shared_gated else None,
        of("router_correction", spec.num_experts) if spec.router.correction else None,
        (of("latent.before", size, hidden), of("latent.after", hidden, size)) if is_latent else None,
    )


def _one_mlp_weights(
    role: str, inner: int, hidden: int, of: GetWeight, gated: bool = True, bias: bool = False, joined: bool = False
) -> MlpWeights:
    if joined:
        gate, up = _parts_of_rows(of(f"{role}.gate_up", 2 * inner, hidden), [inner] * 2, [1] * 2)
    else:
        gate = of(f"{role}.gate", inner, hidden) if gated else None
        up = of(f"{role}.up", inner, hidden)
    down, rows = of(f"{role}.down", hidden, inner), {"gate": inner, "up": inner, "down": hidden}
    biases = tuple(of(f"{role}.{part}_bias", count) for part, count in rows.items()) if bias else None
    return MlpWeights(gate, up, down, biases)  # type: ignore[arg-type]


def _delta_net_weights(spec: DeltaNetSpec, hidden: int, of: GetWeight) -> DeltaNetWeights:
    heads, value_size = spec.num_value_heads, spec.value_size
    parts = {"qkv": spec.channels, "z": value_size, "b": heads, "a": heads}
    rows = {"qkvz": spec.channels + value_size, "ba": 2 * heads} if spec.joined else parts
    return DeltaNetWeights(
        tuple(of(f"delta.{part}", count, hidden) for part, count in rows.items()),
        of("delta.convolution", spec.channels, 1, spec.kernel_size),
        of("delta.decay", heads),
        of("delta.bias", heads),
        of("delta.norm", spec.value_head_dim),
        of("delta.o", hidden, value_size),
    )


def _mamba2_weights(spec: Mamba2Spec, hidden: int, of: GetWeight) -> Mamba2Weights:
    heads, inner = spec.num_heads, spec.inner_size
    return Mamba2Weights(
        of("mamba.inputs", inner + spec.channels + heads, hidden),
        of("mamba.convolution", spec.channels, 1, spec.kernel_size),
        of("mamba.convolution_bias", spec.channels) if spec.convolution_bias else None,
        of("mamba.decay", heads),
        of("mamba.bias", heads),
        of("mamba.skip", heads),
        None if spec.norm is None else of("mamba.norm", inner),
        of("mamba.o", hidden, inner),
    )


def _attention_weights(spec: AttentionSpec, hidden: int, of: GetWeight) -> AttentionWeights:
    size, over_heads = spec.head_dim, spec.qk_norm_over_heads
    heads = spec.num_heads * (2 if spec.output_gate and not spec.gate_apart else 1)
    rows = {"q": heads * size, "k": spec.num_kv_heads * size, "v": spec.num_kv_heads * size}
    normed = {part: rows[part] if over_heads else size for part in "qk"}
    if spec.joined:
        shares = [heads * spec.kv_sharers] + [spec.num_kv_heads] * 2
        q, k, v = _parts_of_rows(of("mixer.qkv", sum(rows.values()), hidden), [*rows.values()], shares)
    else:
        q, k, v = (of(f"mixer.{part}", count, hidden) for part, count in rows.items())
    biases = tuple(of(f"mixer.{part}_bias", count) for part, count in rows.items()) if spec.qkv_bias else None
    norms = tuple(of(f"mixer.{part}_norm", n) for part, n in normed.items()) if spec.qk_norm is not None else None
    o = of("mixer.o", hidden, spec.num_heads * size)
    o_bias = of("mixer.o_bias", hidden) if spec.o_bias else None
    sinks = of("mixer.sinks", spec.num_heads) if spec.sinks else None
    gate = of("mixer.gate", spec.num_heads * size, hidden) if spec.gate_apart else None
    return AttentionWeights(q, k, v, biases, norms, o, o_bias, sinks, gate)  # type: ignore[arg-type]


def _parts_of_rows(joined: Any, counts: list[int], shares: list[int]) -> list[Any]:
    """Cut a matrix into parts that share the matrix's memory. `counts`: the number of rows of each part. The matrix may
    hold only some rows of a whole weight. `shares`: the proportions of the parts in the whole weight.
    """
    ends, full = [*accumulate(counts)], full_rows_of(joined)
    parts = [joined.narrow(0, end - count, count) for end, count in zip(ends, counts, strict=True)]
    return [mark_rows(part, full * share // sum(shares)) for part, share in zip(parts, shares, strict=True)]


def _latent_weights(spec: LatentSpec, hidden: int, of: GetWeight) -> LatentWeights:
    heads, rank, bias = spec.num_heads, spec.q_rank, spec.bias
    layout = HeadLayout(spec.nope_dim, spec.value_dim)
    q_a = None if rank is None else of("latent.q_a", rank, hidden)
    q_a_bias = of("latent.q_a_bias", rank) if rank is not None and bias else None
    q_norm = None if rank is None else of("latent.q_norm", rank)
    q = of("mixer.q" if rank is None else "latent.q_b", heads * spec.query_dim, rank or hidden)
    kv_a = of("latent.kv_a", spec.head_dim, hidden)
    kv_a_bias = of("latent.kv_a_bias", spec.head_dim) if bias else None
    kv_norm = of("latent.kv_norm", spec.latent_dim)
    up = of("latent.kv_b", heads * layout.head_rows, spec.latent_dim, layout=layout)
    o = of("mixer.o", hidden, heads * spec.value_dim)
    o_bias = of("mixer.o_bias", hidden) if bias else None
    return LatentWeights(q_a, q_a_bias, q_norm, q, kv_a, kv_a_bias, kv_norm, up, o, o_bias)


def scale_embedding(x: Tensor, decoder: DecoderSpec) -> Tensor:
    """Return embeddings x [M, H] multiplied by the decoder's `embed_scale`."""
    scale = decoder.embed_scale
    return _times(
        x, torch.tensor(scale, dtype=torch.float32).to(x.dtype).item() if decoder.rounds_embed_scale else scale
    )


def turn(ops: Backend, spec: RotationSpec, inv_freq: Tensor, positions: Tensor) -> Rotation:
    """Return the rotation of M tokens. `positions`: an int64 tensor [M] or [axes, M]. `inv_freq`: the tensor form of
    `spec.inv_freq`.

    If the positions are equal on all axes, the result has the same bits as for positions of shape [M].
    """
    if positions.ndim == 1:
        return Rotation(*ops.rotation(positions, inv_freq, spec.scale), _q_scale(spec, positions))
    pairs = range(len(inv_freq))
    axes = spec.axes or [0] * len(pairs)
    by_axis = [ops.rotation(axis, inv_freq, spec.scale) for axis in positions]
    cosines, sines = (torch.stack(parts)[axes, :, pairs].T.contiguous() for parts in zip(*by_axis, strict=True))
    return Rotation(cosines, sines, _q_scale(spec, positions[0]))


def _q_scale(spec: RotationSpec, positions: Tensor) -> Tensor | None:
    if spec.q_growth is None:
        return None
    beta, length = spec.q_growth
    return 1.0 + beta * torch.log(1.0 + (positions // length).float())


def run_layer(ops: LayerOps, layer: Layer, x: Tensor, attend: Attend, recur: Recur, choose: Choose) -> Tensor:
    """Return the hidden states [M, H] that a layer computes from x [M, H]."""
    x = x if layer.mixer is None else _mix(ops, layer, x, attend, recur)
    return x if layer.mlp is None else _transform(ops, layer, x, choose)


def _mix(ops: LayerOps, layer: Layer, x: Tensor, attend: Attend, recur: Recur) -> Tensor:
    """Return x [M, H] plus the output of the layer's mixer, or the sum of the outputs of its mixers."""
    spec, hidden = layer.spec, _normed(ops, x, layer.mixer_norms.before, layer.spec.norm)
    found: list[tuple[Any, Any, Pieces]] = [(spec.mixer, layer.mixer, layer.mixer_pieces)]
    if spec.recurrent_mixer is not None:
        found.append((spec.recurrent_mixer, layer.recurrent_mixer, layer.recurrent_pieces))
    outputs = [_output_of_mixer(ops, hidden, *each, attend=attend, recur=recur) for each in found]
    return _added(ops, spec, x, layer.mixer_norms.after, *outputs)


def _output_of_mixer(
    ops: LayerOps,
    x: Tensor,
    spec: CachedSpec | RecurrentSpec,
    weights: Any,
    pieces: Pieces,
    attend: Attend,
    recur: Recur,
) -> _Output:
    """Return the output of a mixer for hidden states x [M, H]."""
    if isinstance(spec, CachedSpec):
        return _Output(attend(x, spec, weights), weights.o, weights.o_bias, pieces, spec.out_scale)
    run = _mamba2 if isinstance(spec, Mamba2Spec) else _delta_net
    return _Output(run(ops, x, cast(Any, spec), weights, recur), weights.o, None, pieces, spec.out_scale)


def _transform(ops: LayerOps, layer: Layer, x: Tensor, choose: Choose) -> Tensor:
    """Return x [M, H] plus the output of the layer's MLP or experts."""
    spec = layer.spec
    hidden = _normed(ops, x, layer.mlp_norms.before, spec.norm)
    if isinstance(spec.mlp, ExpertsSpec):
        mixture, after = _mixture(ops, layer, hidden, spec.mlp, choose), layer.mlp_norms.after
        return _with_residual(spec, x, mixture if after is None else ops.rmsnorm(mixture, after, spec.norm))
    weights, mlp = cast(MlpWeights, layer.mlp), cast(MlpSpec, spec.mlp)
    active = _active(ops, hidden, weights, mlp.activation, mlp.gate_scale)
    bias = None if weights.biases is None else weights.biases[2]
    output = _Output(active, weights.down, bias, layer.mlp_pieces, mlp.out_scale)
    return _added(ops, spec, x, layer.mlp_norms.after, output)


def _active(ops: LayerOps, x: Tensor, weights: MlpWeights, activation: Activation, gate_scale: float = 1.0) -> Tensor:
    """Return the inner features [M, I] of an MLP for x [M, H]."""
    if weights.gate is None:
        up = ops.linear(x, weights.up)
        return ops.gate_mul(up, up, activation)
    if weights.biases is None and gate_scale == 1.0:
        return ops.gate_up(x, weights.gate, weights.up, activation)
    gate_bias, up_bias, _ = weights.biases or (None,) * 3
    gate = _times(ops.linear(x, weights.gate, gate_bias), gate_scale)
    return ops.gate_mul(gate, ops.linear(x, weights.up, up_bias), activation)


def _mixture(ops: LayerOps, layer: Layer, x: Tensor, spec: ExpertsSpec, choose: Choose) -> Tensor:
    """For each row of x [M, H], add the outputs of the row's experts and of the shared expert. Return [M, H]."""
    weights = cast(ExpertsWeights, layer.mlp)
    wide = spec.router.wide
    logits = ops.wide_linear(x, weights.router) if wide else ops.linear(x, weights.router, weights.router_bias)
    experts, gates = choose(logits, spec, weights.correction)
    shared = None
    if (mlp := weights.shared) is not None:
        active = _active(ops, x, mlp, spec.activation)
        shared = ops.project_back(active, mlp.down, pieces=layer.mlp_pieces)
        if weights.shared_score is not None:
            score = ops.linear(x, weights.shared_score)
            shared = ops.gate_mul(score.expand_as(shared), shared, "sigmoid")
    groups = layer.mlp_pieces.count
    if weights.latent is None:
        return ops.experts(x, spec, weights, experts, gates, shared, groups)
    before, after = weights.latent
    out = ops.linear(ops.experts(ops.linear(x, before), spec, weights, experts, gates, None, groups), after)
    return out if shared is None else out + shared


def _normed(ops: LayerOps, x: Tensor, weight: Tensor | None, norm: NormSpec) -> Tensor:
    return x if weight is None else ops.rmsnorm(x, weight, norm)


class _Output(NamedTuple):
    """The output [M, H] of a mixer or an MLP: `scale` times the result of `project_back` for the other fields."""

    inner: Tensor
    weight: Weight
    bias: Tensor | None
    pieces: Pieces
    scale: float

    def compute(self, ops: LayerOps) -> Tensor:
        return _times(ops.project_back(self.inner, self.weight, None, self.bias, self.pieces), self.scale)


def _added(
    ops: LayerOps, spec: LayerSpec, x: Tensor, after: Tensor | None, output: _Output, *others: _Output
) -> Tensor:
    """Return x plus the sum of the given outputs of mixers or of an MLP. If the norm `after` is given, the sum of the
    outputs is normalized before it is added.
    """
    if after is None and not others and spec.residual_scale == output.scale == 1.0:
        return ops.project_back(output.inner, output.weight, x, output.bias, output.pieces)
    total = output.compute(ops)
    for other in others:
        total = total + other.compute(ops)
    return _with_residual(spec, x, total if after is None else ops.rmsnorm(total, after, spec.norm))


def _with_residual(spec: LayerSpec, x: Tensor, product: Tensor) -> Tensor:
    """Return x plus `residual_scale` times `product`, the output of a mixer or an MLP."""
    return x + _times(product, spec.residual_scale)


def _times(x: Tensor, scale: float) -> Tensor:
    """Return x multiplied by a scale, computed in float32 and rounded to the dtype of x."""
    return x if scale == 1.0 else (x.float() * scale).to(x.dtype)


def project(
    ops: LayerOps,
    x: Tensor,
    spec: AttentionSpec,
    weights: AttentionWeights,
    rotation: Rotation,
    norm_heads: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute queries, keys and values from hidden states x [M, H]. Queries are [M, heads, D], and keys and values are
    [M, kv_heads, D].

    With an output gate, each head's query is followed by its gate values: [M, heads, 2 * D]. `norm_heads(q, k)`:
    replaces the norms of q [M, heads * D] and k [M, kv_heads * D].
    """
    biases = weights.biases or (None, None, None)
    matrices = zip((weights.q, weights.k, weights.v), biases, strict=True)
    q, k, v = (ops.linear(x, weight, bias) for weight, bias in matrices)
    if weights.gate is not None:
        gate = ops.linear(x, weights.gate).unflatten(1, (spec.num_heads, -1))
    else:
        q, gate = q.unflatten(1, (spec.num_heads, -1)).tensor_split([spec.head_dim], 2)
        q = q.flatten(1)
    if spec.qk_norm is not None and weights.qk_norms is not None:
        q_norm, k_norm = weights.qk_norms
        if norm_heads is None:
            q, k = _norm_heads(ops, q, q_norm, spec.qk_norm), _norm_heads(ops, k, k_norm, spec.qk_norm)
        else:
            q, k = norm_heads(q, k)
    q, k, v = (part.unflatten(1, (-1, spec.head_dim)) for part in (q, k, v))
    q, k = (ops.rope(part, rotation, spec.interleaved) for part in (q, k))
    q = _scaled(q, rotation)
    return torch.cat((q, gate), 2) if spec.output_gate else q, k, v


def store(
    ops: Backend, spec: CachedSpec, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> None:
    """Store keys and values from `project` or `project_latent` in the caches (see `Backend.write_kv`). If the spec has
    a `cache_format`, caches of codes receive the codes, and plain caches receive the values of the codes.
    """
    if k_cache.dtype == k.dtype:
        k, v = (round_trip(x, spec.cache_format, sizes) for x, sizes in ((k, spec.key_sizes), (v, v.shape[2:])))
    ops.write_kv(k, v, k_cache, v_cache, slots)


def _scaled(q: Tensor, rotation: Rotation) -> Tensor:
    """Return rotated queries [M, heads, D] multiplied by `q_scale`."""
    if rotation.q_scale is None:
        return q
    return (q.float() * rotation.q_scale[:, None, None]).to(q.dtype)


def gated(ops: LayerOps, q: Tensor, spec: AttentionSpec, attend: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the attention outputs of the heads as [M, heads * D]. If there is an output gate, the outputs are
    multiplied by the gate.

    `q`: queries from `project`. `attend`: computes the attention for queries [M, heads, D]; the result has the same
    shape.
    """
    if not spec.output_gate:
        return attend(q).flatten(1)
    q, gate = q.chunk(2, 2)
    return ops.gate_mul(gate.flatten(1), attend(q).flatten(1), "sigmoid")


def project_latent(
    ops: LayerOps, x: Tensor, spec: LatentSpec, weights: LatentWeights, rotation: Rotation
) -> tuple[Tensor, Tensor]:
    """Compute the queries [M, heads, query_dim] and the keys [M, 1, head_dim] of a latent attention from hidden states
    x [M, H]. A query consists of the part for `k_up` and the rotated part. A key consists of the latent row and the
    rotated key.
    """
    rows = x
    if weights.q_a is not None and weights.q_norm is not None:
        rows = ops.rmsnorm(ops.linear(x, weights.q_a, weights.q_a_bias), weights.q_norm, spec.norm)
    q = ops.linear(rows, weights.q).unflatten(1, (spec.num_heads, -1))
    of_latent, q_rope = q.tensor_split([spec.nope_dim], 2)
    latent, k_rope = ops.linear(x, weights.kv_a, weights.kv_a_bias).tensor_split([spec.latent_dim], 1)
    latent = ops.rmsnorm(latent.contiguous(), weights.kv_norm, spec.norm)
    parts = q_rope.contiguous(), k_rope[:, None].contiguous()
    q_rope, k_rope = (ops.rope(part, rotation, spec.interleaved) for part in parts)
    q = _scaled(torch.cat((of_latent, q_rope), 2), rotation)
    return q, torch.cat((latent[:, None], k_rope), 2)


def absorb(ops: HeadOps, q: Tensor, k_up: Any, spec: LatentSpec) -> Tensor:
    """Convert queries from `project_latent` to queries [M, heads, head_dim] for the cached keys.

    The query for the latent row is rounded to the dtype of q. The attention returns each head's weighted sum of latent
    rows, which is also rounded to the dtype of q. Scores and sums are computed in float32.
    """
    of_latent, q_rope = q.tensor_split([spec.nope_dim], 2)
    return torch.cat((ops.head_linear(of_latent, k_up), q_rope), 2)


def _delta_net(ops: LayerOps, x: Tensor, spec: DeltaNetSpec, weights: DeltaNetWeights, recur: Recur) -> Tensor:
    """Return the outputs [M, value_size] of a delta net's heads for hidden states x [M, H]."""
    qkv, z, b, a = _project_delta_net(ops, x, spec, weights)
    out = recur(spec, weights, qkv, b, a)
    normed = ops.rmsnorm(out.reshape(-1, spec.value_head_dim), weights.norm, spec.norm)
    return ops.gate_mul(z, normed.view_as(z), "silu")


def _project_delta_net(
    ops: LayerOps, x: Tensor, spec: DeltaNetSpec, weights: DeltaNetWeights
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four projections of x [M, H]: [M, channels], with q, k and v side by side; z [M, value_size]; `b` [M,
    value_heads]; and `a` [M, value_heads].
    """
    products = [ops.linear(x, weight) for weight in weights.inputs]
    if not spec.joined:
        qkv, z, b, a = products
        return qkv, z, b, a
    qkvz, ba = (product.unflatten(1, (spec.num_key_heads, -1)) for product in products)
    share = spec.value_size // spec.num_key_heads
    q, k, v, z = (part.flatten(1) for part in qkvz.split([spec.key_head_dim] * 2 + [share] * 2, 2))
    b, a = (part.flatten(1) for part in ba.chunk(2, 2))
    return torch.cat((q, k, v), 1), z, b, a


def _mamba2(ops: LayerOps, x: Tensor, spec: Mamba2Spec, weights: Mamba2Weights, recur: Recur) -> Tensor:
    """Return the outputs [M, inner_size] of the heads of a state space for hidden states x [M, H].

    The output gate is applied before or after the norm, and each group of heads has a norm of its own.
    """
    inputs = ops.linear(x, weights.inputs)
    if spec.input_scales is not None:
        parts = zip(inputs.float().split(spec.input_sizes, 1), spec.input_scales, strict=True)
        inputs = torch.cat([part * scale for part, scale in parts], 1).to(inputs.dtype)
    z, inner, steps = inputs.split([spec.inner_size, spec.channels, spec.num_heads], 1)
    out = recur(spec, weights, inner, steps).flatten(1)
    if spec.norm_before_gate:
        return ops.gate_mul(z, _norm_groups(ops, out, spec, weights), "silu")
    return _norm_groups(ops, ops.gate_mul(z, out, "silu"), spec, weights)


def _norm_groups(ops: LayerOps, x: Tensor, spec: Mamba2Spec, weights: Mamba2Weights) -> Tensor:
    """Normalize the channels [M, inner_size] of each group of heads, if the state space has a norm."""
    if spec.norm is None or weights.norm is None:
        return x
    groups = zip(x.chunk(spec.num_groups, 1), weights.norm.chunk(spec.num_groups), strict=True)
    return torch.cat([ops.rmsnorm(group, weight, spec.norm) for group, weight in groups], 1)


def _norm_heads(ops: LayerOps, x: Tensor, weight: Tensor, norm: NormSpec) -> Tensor:
    """Cut each row of x [M, heads * D] into slices of the weight's length, and normalize each slice separately."""
    return ops.rmsnorm(x.reshape(-1, len(weight)), weight, norm).view_as(x)


def run_layers(
    ops: Backend,
    x: Tensor,
    layers: Sequence[Layer],
    rotations: Sequence[Rotation],
    memories: Sequence[Memory],
    pages: Sequence[Pages],
    states: StateBatch | None = None,
    routes: Tensor | None = None,
) -> Tensor:
    """Compute `Backend.layers` with the other ops of the backend."""
    records = iter(()) if routes is None else iter(routes)

    def choose(logits: Tensor, spec: ExpertsSpec, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        experts, gates = ops.route(logits, spec, correction=correction)
        if (record := next(records, None)) is not None:
            record.copy_(experts)
        return experts, gates

    for i, (layer, memory, page) in enumerate(zip(layers, memories, pages, strict=True)):

        def attend(x: Tensor, spec: CachedSpec, weights: Any, memory: Memory = memory, page: Pages = page) -> Tensor:
            caches = memory[0], memory[1]
            if isinstance(spec, LatentSpec):
                q, k = project_latent(ops, x, spec, weights, rotations[spec.rotation])
                store(ops, spec, k, k[..., : spec.latent_dim], *caches, page.slots)
                k_up, v_up = weights.up
                sums = ops.paged_attention(absorb(ops, q, k_up, spec), *caches, page.batch, spec.scale)
                return ops.head_linear(sums, v_up).flatten(1)
            q = ops.qkv(x, spec, weights, rotations[spec.rotation], *caches, page.slots)
            scoring = spec.scale, spec.window, spec.soft_cap
            return gated(ops, q, spec, lambda q: ops.paged_attention(q, *caches, page.batch, *scoring, weights.sinks))

        def recur(
            spec: RecurrentSpec, weights: Any, x: Tensor, *gates: Tensor, memory: Memory = memory, i: int = i
        ) -> Tensor:
            assert states is not None, "a recurrence needs states"
            (state, tails), journal = memory[-2:], states.journal
            rows = [x, *gates] if journal is None else journal.splice(i, x, *gates)
            if isinstance(spec, Mamba2Spec):
                x, steps = rows
                x = ops.convolve(x, weights.convolution, tails, states, weights.convolution_bias)
                out = ops.state_space(x, steps, spec, weights, state, states)
            else:
                x, b, a = rows
                x = ops.convolve(x, weights.convolution, tails, states)
                out = ops.delta_rule(x, b, a, spec, weights, state, states)
            return out if journal is None else out[journal.own]

        x = run_layer(ops, layer, x, attend, recur, choose)
    return x
