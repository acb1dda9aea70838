"""A fused op gives the bits of its separate steps, on the same backend."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from mixers import attention_of
from torch import Tensor

from trueroll.kernels.contract import (
    GREEDY,
    NO_SLOT,
    SAMPLE,
    AttentionBatch,
    AttentionWeights,
    Backend,
    ExpertsWeights,
    Layer,
    Memory,
    MlpWeights,
    Pages,
    Rotation,
    StateBatch,
    Wanted,
    Weight,
)
from trueroll.kernels.layer import project, run_layers
from trueroll.kernels.specs import (
    Activation,
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    Pieces,
)

from .backends import Served, for_served
from .inputs import (
    EXPERT_LAYERS,
    EXPERTS,
    FAMILY_LAYERS,
    NORM,
    SOFTMAX,
    ZERO_CENTERED,
    Paged,
    decoder_spec,
    empty_caches,
    hidden_size,
    layer_spec,
    make_experts,
    make_layers,
    make_rotations,
    randn,
    same_bits,
    stored,
    strided,
)

ROWS = 37


HEADS = [(2, 1, 128), (4, 2, 16), (6, 2, 64), (3, 3, 80), (9, 3, 96), (2, 2, 256)]
WITH: dict[str, dict[str, Any]] = {
    "biases norms": dict(qkv_bias=True, qk_norm=NORM),
    "": dict(),
    "zero-centered norms": dict(qk_norm=ZERO_CENTERED),
    "biases": dict(qkv_bias=True),
    "biases norms over heads": dict(qkv_bias=True, qk_norm=NORM, qk_norm_over_heads=True),
    "a gate": dict(qk_norm=ZERO_CENTERED, output_gate=True),
    "a gate and a part that turns": dict(qkv_bias=True, output_gate=True, rotated=10),
    "a part that turns": dict(qk_norm=NORM, rotated=8),
    "a part that turns in neighbouring pairs": dict(qkv_bias=True, rotated=12, interleaved=True),
}


@for_served("heads,kv_heads,size,with_", [(*heads, with_) for with_ in WITH for heads in HEADS], interpreted=1)
def test_qkv(served: Served, heads: int, kv_heads: int, size: int, with_: str) -> None:
    check_qkv(served, layer_spec(heads, kv_heads, size, **WITH[with_]))


@for_served("with_", [("a gate",), ("",), ("a part that turns in neighbouring pairs",)], interpreted=1)
def test_qkv_with_scaled_queries(served: Served, with_: str) -> None:
    check_qkv(served, layer_spec(4, 2, 16, **WITH[with_]), 1.0 + torch.rand(ROWS))


def check_qkv(served: Served, spec: LayerSpec, q_scale: Tensor | None = None) -> None:
    ops, dtype, mixer = served.ops, served.dtype, attention_of(spec)
    kv_heads, size = mixer.num_kv_heads, mixer.head_dim
    (layer,) = make_layers(served, spec)
    weights = layer.mixer
    assert isinstance(weights, AttentionWeights)
    x, rotation = randn(ROWS, 130, dtype=dtype), make_rotations(ops, decoder_spec(spec), torch.arange(ROWS) * 11)[0]
    rotation = rotation._replace(q_scale=q_scale)
    slots = torch.randperm(5 * 10, generator=torch.Generator().manual_seed(0))[:ROWS]
    caches, expected_caches = (empty_caches(5, 10, kv_heads, size, dtype) for _ in range(2))

    found = ops.qkv(x, mixer, weights, rotation, *caches, slots)

    q, k, v = project(ops, x, mixer, weights, rotation)
    ops.write_kv(k, v, *expected_caches, slots)
    assert same_bits(found, q)
    for cache, expected in zip(caches, expected_caches, strict=True):
        assert cache.isnan().sum() == (50 - ROWS) * kv_heads * size, "the other places are untouched"
        assert same_bits(cache, expected)


@pytest.mark.parametrize("n,k", [(576, 576), (17, 33), (513, 130)])
def test_project_back(served: Served, n: int, k: int) -> None:
    weight = stored(served.ops, randn(n, k, dtype=served.dtype, seed=1))
    x, residual = randn(ROWS, k, dtype=served.dtype), randn(ROWS, n, dtype=served.dtype, seed=2)
    product = served.ops.linear(x, weight)
    assert same_bits(served.ops.project_back(x, weight), product)
    assert same_bits(served.ops.project_back(x, weight, residual), product + residual)


CUTS = {
    "two": (128, Pieces(2, 64)),
    "an empty piece": (130, Pieces(4, 48)),
    "odd heads": (560, Pieces(4, 144)),
    "single heads of 16": (64, Pieces(4, 16)),
    "eight": (1100, Pieces(8, 144)),
    "several blocks of a panel": (4160, Pieces(4, 1040)),
}


@for_served("name", [(name,) for name in CUTS], interpreted=1)
def test_pieces_of_a_product_are_added_as_a_balanced_tree(served: Served, name: str) -> None:
    """The sum of a piece is the product with the piece as a weight of its own, as another device stores it."""
    ops, dtype, (k, pieces) = served.ops, served.dtype, CUTS[name]
    shapes = (ROWS, k), (70, k), (ROWS, 70), (70,)
    x, dense, residual, bias = (randn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))
    weight = stored(ops, dense)
    sums = [
        ops.lm_head(x[:, start:end], stored(ops, dense[:, start:end])) if start < end else torch.zeros(ROWS, 70)
        for start, end in pieces.bounds(k)
    ]

    found = ops.project_back(x, weight, residual, bias, pieces)

    assert same_bits(found, (tree(sums) + bias.float()).to(dtype) + residual)
    assert same_bits(ops.project_back(x, weight, pieces=pieces), tree(sums).to(dtype))
    if pieces.count > 2 and name != "an empty piece" and dtype == torch.float32:
        from_the_left = functools.reduce(torch.add, sums)
        assert not same_bits(from_the_left, tree(sums)), "the order makes a difference"
    for rows in (1, 3, 8):
        assert same_bits(ops.project_back(x[:rows], weight, residual[:rows], bias, pieces), found[:rows])


@for_served("k,pieces", [(512, Pieces(4, 128)), (560, Pieces(4, 144)), (300, Pieces(4, 112))], interpreted=2)
def test_parts_of_a_product_add_up_to_the_whole(served: Served, k: int, pieces: Pieces) -> None:
    """Two ranks with two pieces each, and four ranks with one piece each."""
    ops, dtype = served.ops, served.dtype
    x, dense = randn(ROWS, k, dtype=dtype), randn(70, k, dtype=dtype, seed=1)
    whole, bounds = ops.back_sums(x, stored(ops, dense), pieces), pieces.bounds(k)
    assert whole.dtype == torch.float32 and same_bits(
        whole.to(dtype), ops.project_back(x, stored(ops, dense), None, None, pieces)
    )
    for size in (2, 4):
        own, sums = pieces.count // size, []
        for rank in range(size):
            start, end = bounds[rank * own][0], bounds[(rank + 1) * own - 1][1]
            part = stored(ops, dense[:, start:end])
            held = start < end
            sums.append(
                ops.back_sums(x[:, start:end], part, Pieces(own, pieces.length)) if held else torch.zeros(ROWS, 70)
            )
        assert same_bits(tree(sums), whole), size


def test_every_backend_has_every_op(served: Served) -> None:
    missing = {name for name in vars(Backend) if not name.startswith("_") and not hasattr(served.ops, name)}
    assert missing == set()


def tree(parts: Sequence[Tensor]) -> Tensor:
    """Add tensors as a balanced binary tree."""
    half = len(parts) // 2
    return parts[0] if half == 0 else tree(parts[:half]) + tree(parts[half:])


@pytest.mark.parametrize("n,k,activation", [(7, 40, "silu"), (130, 577, "silu"), (130, 577, "gelu_tanh")])
def test_gate_up(served: Served, n: int, k: int, activation: Activation) -> None:
    gate, up = (stored(served.ops, randn(n, k, dtype=served.dtype, seed=seed)) for seed in (1, 2))
    x = randn(ROWS, k, dtype=served.dtype)
    expected = served.ops.gate_mul(served.ops.linear(x, gate), served.ops.linear(x, up), activation)
    assert same_bits(served.ops.gate_up(x, gate, up, activation), expected)


def test_ops_of_mixtures(mixing: Served) -> None:
    ops, dtype = mixing.ops, mixing.dtype
    gate, up = (stored(ops, randn(130, 577, dtype=dtype, seed=seed)) for seed in (1, 2))
    x, residual, bias = (randn(*shape, dtype=dtype) for shape in ((ROWS, 577), (ROWS, 130), (130,)))
    expected = ops.gate_mul(ops.linear(x, gate), ops.linear(x, up), "clamped_silu")
    assert same_bits(ops.gate_up(x, gate, up, "clamped_silu"), expected)
    assert same_bits(ops.project_back(x, gate, residual, bias), ops.linear(x, gate, bias) + residual)


SOME_EXPERTS = {
    "": EXPERTS,
    "biases": ExpertsSpec(num_experts=5, top_k=4, intermediate_size=80, activation="clamped_silu", bias=True),
    "all of them": ExpertsSpec(num_experts=3, top_k=3, intermediate_size=16, activation="gelu_tanh", router=SOFTMAX),
}


@pytest.mark.parametrize("name", SOME_EXPERTS)
@pytest.mark.parametrize("has_shared", [False, True])
def test_experts(mixing: Served, name: str, has_shared: bool) -> None:
    ops, dtype, spec = mixing.ops, mixing.dtype, SOME_EXPERTS[name]
    weights, x = make_experts(mixing, spec), randn(ROWS, 144, dtype=dtype)
    experts, gates = ops.route(ops.linear(x, weights.router), spec)
    assert len(experts.unique()) == spec.num_experts and (experts.diff() > 0).all()
    shared = randn(ROWS, 144, dtype=dtype, seed=8) if has_shared else None
    terms = torch.stack([gates[:, [i]] * of_experts(ops, x, spec, weights, experts[:, i]) for i in range(spec.top_k)])

    found = ops.experts(x, spec, weights, experts, gates, shared)

    assert same_bits(found, summed(terms, shared, dtype))
    if dtype == torch.float32:
        assert not same_bits(found, summed(terms.flip(0), shared, dtype)), "another order has other bits"


@pytest.mark.parametrize("groups", [2, 4])
def test_the_sums_of_groups_of_experts_are_added_as_a_balanced_tree(mixing: Served, groups: int) -> None:
    spec = ExpertsSpec(num_experts=8, top_k=5, intermediate_size=48, bias=True)
    ops, dtype = mixing.ops, mixing.dtype
    weights, x, shared = (
        make_experts(mixing, spec),
        randn(ROWS, 144, dtype=dtype),
        randn(ROWS, 144, dtype=dtype, seed=8),
    )
    experts, gates = ops.route(ops.linear(x, weights.router), spec)
    own = (experts * groups // spec.num_experts)[..., None]
    assert any(len(row.unique()) < groups for row in own) or groups == 2, "premise: a row without experts of a group"
    terms = [gates[:, [i]] * of_experts(ops, x, spec, weights, experts[:, i]) for i in range(spec.top_k)]
    sums = []
    for group in range(groups):
        total = torch.zeros(ROWS, 144)
        for i, term in enumerate(terms):
            total = total + torch.where(own[:, i] == group, term, 0.0)
        sums.append(total)

    found = ops.experts(x, spec, weights, experts, gates, shared, groups)

    assert same_bits(found, (tree(sums) + shared.float()).to(dtype))
    if dtype == torch.float32:
        assert not same_bits(found, ops.experts(x, spec, weights, experts, gates, shared)), "premise: another order"
    for rows in (1, 3):
        some = ops.experts(x[:rows], spec, weights, experts[:rows], gates[:rows], shared[:rows], groups)
        assert same_bits(some, found[:rows])


def test_parts_of_experts_add_up_to_the_whole(mixing: Served) -> None:
    check_parts_of_experts(mixing)


def check_parts_of_experts(served: Served) -> None:
    """Ranks with some of the experts: no row's result depends on how the experts are divided."""
    ops, dtype, spec = served.ops, served.dtype, ExpertsSpec(num_experts=8, top_k=3, intermediate_size=48, bias=True)
    weights, x = make_experts(served, spec), randn(ROWS, 144, dtype=dtype)
    experts, gates = ops.route(ops.linear(x, weights.router), spec)
    whole = ops.expert_sums(x, spec, weights, experts, gates, 4)
    assert whole.dtype == torch.float32 and same_bits(
        whole.to(dtype), ops.experts(x, spec, weights, experts, gates, None, 4)
    )
    dense = {name: getattr(weights, name).to_dense() for name in ("gate_up", "down")}
    for size in (2, 4):
        count, sums = spec.num_experts // size, []
        for rank in range(size):
            part = slice(rank * count, (rank + 1) * count)
            matrices = {
                name: stored(ops, each.unflatten(0, (8, -1))[part].flatten(0, 1)) for name, each in dense.items()
            }
            assert weights.gate_up_bias is not None and weights.down_bias is not None
            biases = dict(gate_up_bias=weights.gate_up_bias[part], down_bias=weights.down_bias[part])
            own = dataclasses.replace(spec, held=(rank * count, count))
            parts: Any = matrices | biases
            sums.append(ops.expert_sums(x, own, dataclasses.replace(weights, **parts), experts, gates, 4 // size))
        assert not any(same_bits(each, whole) for each in sums), "premise: every rank has experts of some row"
        assert same_bits(tree(sums), whole), size


def of_experts(ops: Backend, x: Tensor, spec: ExpertsSpec, weights: ExpertsWeights, experts: Tensor) -> Tensor:
    """Return one expert's output for each row, float32 [M, H], computed with the ops of an MLP."""
    rows, count = [], spec.num_experts
    gate_up, down = (weight.to_dense().unflatten(0, (count, -1)) for weight in (weights.gate_up, weights.down))
    for row, expert in zip(x.split(1), experts.tolist(), strict=True):
        biases = (None, None) if weights.gate_up_bias is None else weights.gate_up_bias[expert].chunk(2)
        matrices = zip(gate_up[expert].chunk(2), biases, strict=True)
        gate, up = (ops.linear(row, stored(ops, matrix), bias) for matrix, bias in matrices)
        made = ops.lm_head(ops.gate_mul(gate, up, spec.activation), stored(ops, down[expert]))
        rows.append(made if weights.down_bias is None else made + weights.down_bias[expert].float())
    return torch.cat(rows)


def summed(terms: Tensor, shared: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Add float32 terms [k, M, H] one after the other, then add `shared`, and round the sum."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return (total if shared is None else total + shared.float()).to(dtype)


@dataclass(frozen=True)
class Step:
    """Layers with their own caches, and rows for them: the end of a prompt, two decodes that begin with the same 128
    tokens, and the only token of a prompt.
    """

    layers: Sequence[Layer]
    x: Tensor
    rotations: Sequence[Rotation]
    caches: list[tuple[Tensor, Tensor]]
    pages: Sequence[Pages]

    def run(self, compute: Callable[..., Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the hidden states after the layers, and the contents of their caches."""
        caches = [(keys.clone(), values.clone()) for keys, values in self.caches]
        out = compute(self.x, self.layers, self.rotations, caches, self.pages)
        return out, [cache for pair in caches for cache in pair]


def make_step(served: Served, *specs: LayerSpec) -> Step:
    lens, new, mixer = [40, 150, 150, 1], [23, 1, 1, 1], attention_of((specs or (layer_spec(),))[0])
    paged = Paged(served, lens, mixer.num_heads, mixer.num_kv_heads, mixer.head_dim)
    paged.tables[2, :8] = paged.tables[1, :8]
    chunks = [(i, length - count, length) for i, (length, count) in enumerate(zip(lens, new, strict=True))]
    positions = torch.cat([torch.arange(start, end) for _, start, end in chunks])
    slots = torch.cat([paged.slots(i)[start:end] for i, start, end in chunks])
    return Step(
        layers=served.ops.new_layers(make_layers(served, *specs) if specs else []),
        x=randn(len(positions), hidden_size(specs), dtype=served.dtype),
        rotations=make_rotations(served.ops, decoder_spec(*(specs or (layer_spec(),))), positions),
        caches=[(paged.k_cache * (i + 1), paged.v_cache * (i + 1)) for i in range(len(specs))],
        pages=[Pages(slots, paged.batch(chunks)[1])] * len(specs),
    )


def times(x: Tensor, scale: float) -> Tensor:
    return (x.float() * scale).to(x.dtype)


def step_by_step_layers(ops: Backend, x: Tensor, layers: Sequence[Layer], *rest: Any) -> Tensor:
    """Run every op separately, in the order of the definition."""
    rotations, kv_caches, pages = rest
    for layer, (k_cache, v_cache), (slots, batch) in zip(layers, kv_caches, pages, strict=True):
        spec, (before, after), mlp = layer.spec, (layer.mixer_norms, layer.mlp_norms), layer.mlp
        mixer, weights = attention_of(spec), layer.mixer
        assert isinstance(weights, AttentionWeights) and isinstance(mlp, MlpWeights)
        hidden = x if before.before is None else ops.rmsnorm(x, before.before, spec.norm)
        q, k, v = project(ops, hidden, mixer, weights, rotations[mixer.rotation])
        ops.write_kv(k, v, k_cache, v_cache, slots)
        q, gate = q.tensor_split([mixer.head_dim], dim=2)
        attended = ops.paged_attention(q, k_cache, v_cache, batch, mixer.scale, mixer.window, mixer.soft_cap).flatten(1)
        if mixer.output_gate:
            attended = ops.gate_mul(gate.flatten(1), attended, "sigmoid")
        mixed = times(ops.project_back(attended, weights.o, None, weights.o_bias, layer.mixer_pieces), mixer.out_scale)
        mixed = mixed if before.after is None else ops.rmsnorm(mixed, before.after, spec.norm)
        x = x + times(mixed, spec.residual_scale)
        hidden = x if after.before is None else ops.rmsnorm(x, after.before, spec.norm)
        assert isinstance(spec.mlp, MlpSpec) and mlp.gate is not None
        gate_bias, up_bias, down_bias = mlp.biases or (None,) * 3
        gate, up = ops.linear(hidden, mlp.gate, gate_bias), ops.linear(hidden, mlp.up, up_bias)
        active = ops.gate_mul(times(gate, spec.mlp.gate_scale), up, spec.mlp.activation)
        down = times(ops.project_back(active, mlp.down, None, down_bias, layer.mlp_pieces), spec.mlp.out_scale)
        down = down if after.after is None else ops.rmsnorm(down, after.after, spec.norm)
        x = x + times(down, spec.residual_scale)
    return x


BOTH: dict[str, Any] = dict(qkv_bias=True, qk_norm=NORM)
PLAIN_LAYER = layer_spec(6, 2, 64)
LAYERS: dict[str, list[LayerSpec]] = {
    "one": [layer_spec(4, 2, 16, **BOTH)],
    "80": [layer_spec(3, 3, 80, qk_norm=NORM)] * 2,
    "96": [layer_spec(9, 3, 96)] * 3,
    "128": [layer_spec(2, 1, 128, **BOTH)] * 3,
    "biases": [layer_spec(6, 2, 64, qkv_bias=True)] * 3,
    "norms": [layer_spec(6, 2, 64, qk_norm=NORM)] * 3,
    "factor of attention": [
        dataclasses.replace(PLAIN_LAYER, mixer=dataclasses.replace(attention_of(PLAIN_LAYER), out_scale=0.7))
    ],
    "factors of the mlp": [dataclasses.replace(PLAIN_LAYER, mlp=MlpSpec(77, gate_scale=0.6, out_scale=1.3))],
    **FAMILY_LAYERS,
}


GATED = layer_spec(4, 2, 32, norm=ZERO_CENTERED, qk_norm=ZERO_CENTERED, output_gate=True, rotated=8)


@dataclass(frozen=True)
class HybridStep:
    """Layers that alternate between delta nets and attention, with rows of several sequences as in `Step`. Two
    sequences begin. The other sequences continue from different states, and one of these leaves the slot that it reads
    unchanged.
    """

    step: Step
    states: StateBatch

    @classmethod
    def new(cls, served: Served, *specs: LayerSpec) -> HybridStep:
        attention = next((spec for spec in specs if isinstance(spec.mixer, AttentionSpec)), GATED)
        step, slots = make_step(served, *[attention] * len(specs)), 5
        memories = [
            caches if not isinstance(spec.mixer, DeltaNetSpec) else cls._memory(spec.mixer, served.dtype, slots, i)
            for i, (spec, caches) in enumerate(zip(specs, step.caches, strict=True))
        ]
        layers = served.ops.new_layers(make_layers(served, *specs))
        starts, reads = step.pages[0].batch.query_starts, torch.tensor([NO_SLOT, 4, 1, NO_SLOT])
        batch = StateBatch(starts, reads, torch.tensor([0, 2, 1, 3]))
        x = randn(len(step.x), hidden_size(specs), dtype=served.dtype)
        return cls(dataclasses.replace(step, x=x, layers=layers, caches=memories), batch)

    @staticmethod
    def _memory(spec: DeltaNetSpec, dtype: torch.dtype, slots: int, seed: int) -> Memory:
        tails = randn(slots, *spec.tail_shape, dtype=dtype, seed=2 * seed + 70)
        return randn(slots, *spec.state_shape, seed=2 * seed + 71) / 10, tails

    def run(self, compute: Callable[..., Tensor], **more: Any) -> tuple[Tensor, list[Tensor]]:
        return self.step.run(partial(compute, states=self.states, **more))


def delta_layer(*sizes: int, norm: NormSpec = ZERO_CENTERED, joined: bool = False, **norms: Any) -> LayerSpec:
    """Return a layer with a delta net. `sizes`: key heads, value heads, their dimensions, the convolution's kernel."""
    return LayerSpec(DeltaNetSpec(*sizes, norm=NORM, joined=joined), MlpSpec(77), norm, **norms)


HYBRIDS: dict[str, list[LayerSpec]] = {
    "family": [delta_layer(2, 2, 32, 32, 4), delta_layer(2, 2, 32, 32, 4), GATED, delta_layer(2, 2, 32, 32, 4), GATED],
    "groups and other sizes": [delta_layer(2, 6, 16, 48, 3), GATED, delta_layer(1, 3, 24, 17, 1)],
    "norms after": [delta_layer(1, 2, 16, 16, 4, norm=NORM, norm_before=False, norm_after=True), GATED],
    "delta nets alone": [delta_layer(1, 2, 16, 16, 4)] * 2,
    "joined": [delta_layer(2, 4, 16, 16, 4, joined=True), GATED],
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_layers(quick: Served, name: str) -> None:
    hybrid = HybridStep.new(quick, *HYBRIDS[name])
    x = hybrid.step.x.clone()
    expected, expected_memories = hybrid.run(partial(run_layers, quick.ops))
    assert expected.isfinite().all() and (expected != x).any(1).all(), "the layers change every row"

    found, memories = hybrid.run(quick.ops.layers)

    assert same_bits(found, expected) and same_bits(hybrid.step.x, x)
    for memory, before, after in zip(memories, itertools.chain(*hybrid.step.caches), expected_memories, strict=True):
        assert not same_bits(memory, before) or memory.numel() == 0, "every layer updates its memory"
        assert same_bits(memory, after)


SHARED = dataclasses.replace(EXPERTS, router=SOFTMAX, shared_size=40)
MIXTURES: dict[str, list[LayerSpec]] = {
    **EXPERT_LAYERS,
    "hybrid": [
        dataclasses.replace(delta_layer(2, 2, 32, 32, 4), mlp=SHARED),
        dataclasses.replace(GATED, mlp=SHARED),
        delta_layer(2, 2, 32, 32, 4),
        GATED,
    ],
    "joined": [dataclasses.replace(delta_layer(2, 4, 16, 16, 4, joined=True), mlp=SHARED), GATED],
}


@pytest.mark.parametrize("name", MIXTURES)
def test_layers_with_experts(mixing: Served, name: str) -> None:
    specs = MIXTURES[name]
    step, spec = HybridStep.new(mixing, *specs), next(each.mlp for each in specs if isinstance(each.mlp, ExpertsSpec))
    count = sum(isinstance(each.mlp, ExpertsSpec) for each in specs)
    expected_routes = torch.full((count, len(step.step.x), spec.top_k), -1, dtype=torch.int32)
    expected, expected_memories = step.run(partial(run_layers, mixing.ops), routes=expected_routes)
    assert expected.isfinite().all() and (expected != step.step.x).any(1).all(), "the layers change every row"
    assert all(len(routes.unique()) > spec.top_k for routes in expected_routes), "rows go to different experts"

    for routes in (torch.full_like(expected_routes, -1), strided(torch.full_like(expected_routes, -1)), None):
        found, memories = step.run(mixing.ops.layers, routes=routes)
        assert same_bits(found, expected) and (routes is None or torch.equal(routes, expected_routes))
        assert all(map(same_bits, memories, expected_memories))


@for_served("name", [(name,) for name in LAYERS], interpreted=1)
def test_layers(served: Served, name: str) -> None:
    step = make_step(served, *LAYERS[name])
    x = step.x.clone()
    expected, expected_caches = step.run(partial(step_by_step_layers, served.ops))
    assert expected.isfinite().all() and (expected != x).any(1).all(), "the layers change every row"

    found, caches = step.run(served.ops.layers)

    assert same_bits(found, expected) and same_bits(step.x, x)
    for cache, before, after in zip(caches, itertools.chain(*step.caches), expected_caches, strict=True):
        assert not same_bits(cache, before) and same_bits(cache, after)


def test_layers_from_anywhere_in_memory(quick: Served) -> None:
    step = make_step(quick, layer_spec(**BOTH))
    [(slots, batch)] = step.pages
    batch = dataclasses.replace(batch, block_tables=strided(batch.block_tables))
    rotations = [Rotation(strided(cosines), strided(sines)) for cosines, sines, _ in step.rotations]
    apart = Step(step.layers, strided(step.x), rotations, step.caches, [Pages(strided(slots), batch)])
    (expected, expected_caches), (found, caches) = step.run(quick.ops.layers), apart.run(quick.ops.layers)
    assert same_bits(found, expected) and all(map(same_bits, caches, expected_caches))


def test_each_layer_has_its_caches(quick: Served) -> None:
    step = make_step(quick, layer_spec(), layer_spec())
    for lacking in (dict(caches=step.caches[:1]), dict(pages=step.pages[:1])):
        with pytest.raises(ValueError):
            dataclasses.replace(step, **lacking).run(quick.ops.layers)


@pytest.mark.parametrize("specs", [[layer_spec(window=37), layer_spec()] * 2, [layer_spec()] * 4], ids=["windows", ""])
def test_layers_with_pages_of_their_own(quick: Served, specs: list[LayerSpec]) -> None:
    """Every other layer has the same blocks in another order. The tables of these layers name no blocks behind the
    window.
    """
    step = make_step(quick, *specs)
    order = torch.randperm(len(step.caches[0][0]), generator=torch.Generator().manual_seed(1))
    (slots, batch), window = step.pages[0], attention_of(specs[0]).window
    size = step.caches[0][0].shape[1]
    tables = order[batch.block_tables]
    for row, end in enumerate(batch.context_lens):
        first_query = end - (batch.query_starts[row + 1] - batch.query_starts[row])
        tables[row, : max(0, first_query - window + 1) // size if window else 0] = 0
    moved = Pages(order[slots // size] * size + slots % size, dataclasses.replace(batch, block_tables=tables))
    assert not same_bits(moved.batch.block_tables, batch.block_tables), "premise"
    back = order.argsort()
    caches = [tuple(cache[back] for cache in pair) if i % 2 == 0 else pair for i, pair in enumerate(step.caches)]
    apart = dataclasses.replace(step, caches=caches, pages=[moved, step.pages[0]] * 2)
    (expected, expected_caches), (found, found_caches) = step.run(quick.ops.layers), apart.run(quick.ops.layers)
    assert same_bits(found, expected)
    for i, (cache, own) in enumerate(zip(found_caches, expected_caches, strict=True)):
        assert same_bits(cache[order] if i // 2 % 2 == 0 else cache, own)


def test_no_layers_and_no_rows(quick: Served) -> None:
    step = make_step(quick)
    found, _ = step.run(quick.ops.layers)
    assert same_bits(found, step.x)
    step = make_step(quick, layer_spec(), layer_spec())
    rotations = [Rotation(cosines[:0], sines[:0]) for cosines, sines, _ in step.rotations]
    slots, batch = step.pages[0]
    pages = [Pages(slots[:0], AttentionBatch([0], [], batch.block_tables[:0]))] * 2
    nothing = dataclasses.replace(step, x=step.x[:0], rotations=rotations, pages=pages)
    found, caches = nothing.run(quick.ops.layers)
    assert found.shape == (0, 130) and all(map(same_bits, caches, itertools.chain(*step.caches)))


def wanted(targets: Tensor) -> Wanted:
    rows = torch.arange(len(targets))
    temperatures = torch.tensor([1.0, 0.5, 1.7, 1e-30, 1e6])[rows % 5]
    return Wanted(rows, targets, temperatures, rows % 2 == 0, rows * 2**57 - 5, rows * 2**28 + 3)


def step_by_step(ops: Backend, hidden: Tensor, weight: Weight, wanted: Wanted) -> tuple[Tensor, Tensor, Tensor]:
    logits = ops.lm_head(hidden, weight)
    scaled = logits / wanted.temperatures[:, None]
    drawn = ops.sample(scaled, wanted.seeds, wanted.positions)
    tokens = torch.where(wanted.targets == SAMPLE, drawn, wanted.targets)
    tokens = torch.where(wanted.targets == GREEDY, scaled.argmax(-1), tokens)
    logprobs = ops.log_probs(torch.where(wanted.raw[:, None], logits, scaled), tokens)
    return tokens, logprobs, scaled.gather(1, tokens[:, None]).isfinite()[:, 0]


@for_served("vocab_size", [(1001,), (1,), (17,), (512,), (1040,), (49153,)], interpreted=2)
def test_next_tokens(served: Served, vocab_size: int) -> None:
    weight = stored(served.ops, randn(vocab_size, 33, dtype=served.dtype, seed=1))
    hidden = randn(ROWS, 33, dtype=served.dtype)
    asked = wanted(torch.tensor([SAMPLE, GREEDY, vocab_size - 1, 0, vocab_size // 2] * ROWS)[:ROWS])
    expected = step_by_step(served.ops, hidden, weight, asked)
    found = served.ops.next_tokens(hidden, weight, asked)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    assert found[2].all() and found[1].isfinite().all()


@for_served("vocab_size", [(1001,), (17,), (1,), (49153,)], interpreted=1)
def test_next_token_statistics(served: Served, vocab_size: int) -> None:
    weight = stored(served.ops, randn(vocab_size, 33, dtype=served.dtype, seed=1))
    hidden = randn(ROWS, 33, dtype=served.dtype)
    asked = wanted(torch.tensor([SAMPLE, GREEDY, vocab_size - 1, 0, vocab_size // 2] * ROWS)[:ROWS])
    expected, logprobs, finite = served.ops.next_tokens(hidden, weight, asked)
    logits = served.ops.lm_head(hidden, weight)
    basis = torch.where(asked.raw[:, None], logits, logits / asked.temperatures[:, None])
    for k in (0, min(9, vocab_size)):
        tokens, found, found_finite = served.ops.next_token_statistics(hidden, weight, asked, k)
        assert same_bits(tokens, expected) and same_bits(found_finite, finite) and same_bits(found.logprobs, logprobs)
        for mine, theirs in zip(found, served.ops.token_statistics(basis, expected, k), strict=True):
            assert same_bits(mine, theirs)


def test_next_token_statistics_lists_equal_logits_by_their_ids(quick: Served, two_threads: None) -> None:
    """Several threads search a row for its best tokens. The order of the threads must not matter."""
    third = randn(700, 32, dtype=quick.dtype, seed=1)
    weight, hidden = stored(quick.ops, third.repeat(3, 1)), randn(ROWS, 32, dtype=quick.dtype)
    asked = dataclasses.replace(wanted(torch.full((ROWS,), GREEDY)), raw=torch.zeros(ROWS, dtype=torch.bool))
    logits = quick.ops.lm_head(hidden, weight)
    assert torch.equal(logits[:, :700], logits[:, 1400:])
    expected = torch.sort(logits / asked.temperatures[:, None], descending=True, stable=True).indices[:, :7]
    assert expected[0, 1] == expected[0, 0] + 700
    for _ in range(20):
        found = quick.ops.next_token_statistics(hidden, weight, asked, 7)
        assert torch.equal(found[1].top_token_ids, expected)


def test_next_tokens_scores_what_it_drew(quick: Served) -> None:
    weight = stored(quick.ops, randn(1001, 33, dtype=quick.dtype, seed=1))
    hidden = randn(ROWS, 33, dtype=quick.dtype)
    for target in (SAMPLE, GREEDY):
        drawn, logprobs, _ = quick.ops.next_tokens(hidden, weight, wanted(torch.full((ROWS,), target)))
        assert len(drawn.unique()) > ROWS // 2
        again, scores, _ = quick.ops.next_tokens(hidden, weight, wanted(drawn))
        assert torch.equal(again, drawn) and same_bits(scores, logprobs)


def test_several_draws_may_read_one_hidden_state(served: Served) -> None:
    hidden, weight = randn(4, 64, dtype=served.dtype), stored(served.ops, randn(300, 64, dtype=served.dtype, seed=1))
    rows = torch.tensor([2, 0, 2, 2, 3])
    asked = wanted(torch.tensor([SAMPLE, GREEDY, SAMPLE, 17, SAMPLE]))
    apart = served.ops.next_tokens(hidden[rows], weight, asked)
    together = served.ops.next_tokens(hidden, weight, dataclasses.replace(asked, rows=rows))
    assert all(same_bits(left, right) for left, right in zip(together, apart, strict=True))


def test_equal_logits_go_to_the_lowest_id(served: Served) -> None:
    """The ids are in different lanes, panels and chunks of the native kernels."""
    rows = randn(1500, 64, dtype=served.dtype, seed=1)
    groups = [[3, 4, 19, 600, 1499], [15, 16], [511, 512], [1023, 1040], [40, 1400]]
    hidden = torch.stack([rows[group[0]] for group in groups])
    for group in groups:
        rows[group] = rows[group[0]].clone()
    weight = stored(served.ops, rows)
    logits = served.ops.lm_head(hidden, weight)
    for row, group in zip(logits, groups, strict=True):
        assert (row == row.max()).nonzero().flatten().tolist() == group, "the highest logits are equal"
    unused = torch.zeros(len(groups), dtype=torch.int64)
    asked = Wanted(torch.arange(len(groups)), unused + GREEDY, torch.ones(len(groups)), unused.bool(), unused, unused)
    assert served.ops.next_tokens(hidden, weight, asked)[0].tolist() == [group[0] for group in groups]


def test_next_tokens_takes_the_first_of_infinite_logits(quick: Served, two_threads: None) -> None:
    """Several threads search a row for its best token. The order of the threads must not matter."""
    rows = randn(528, 32, dtype=quick.dtype, seed=1)
    rows[[100, 520], 0] = torch.inf  # in two parts of the vocabulary; the second part is short and finishes early
    weight, hidden = stored(quick.ops, rows), randn(ROWS, 32, dtype=quick.dtype)
    hidden[:, 0] = 1.0
    assert quick.ops.lm_head(hidden, weight).isposinf().sum(1).eq(2).all()
    asked = wanted(torch.tensor([SAMPLE, GREEDY] * ROWS)[:ROWS])
    assert quick.ops.sample(quick.ops.lm_head(hidden, weight), asked.seeds, asked.positions).eq(100).all()
    for _ in range(20):
        tokens, logprobs, finite = quick.ops.next_tokens(hidden, weight, asked)
        assert tokens.eq(100).all() and logprobs.isnan().all() and not finite.any()


def test_next_tokens_never_passes_off_a_row_with_nan(served: Served) -> None:
    """The log-prob of a row with NaN is NaN, and the row must be reported as not finite, for any token."""
    for vocab_size, broken in ((40, 7), (1001, 0), (1001, 600), (1001, 1000)):
        rows = randn(vocab_size, 33, dtype=served.dtype, seed=1)
        rows[broken] = torch.nan
        weight, hidden = stored(served.ops, rows), randn(4, 33, dtype=served.dtype)
        assert served.ops.lm_head(hidden, weight).isnan().sum(1).eq(1).all()
        targets = torch.tensor([SAMPLE, GREEDY, SAMPLE, GREEDY])
        _, logprobs, finite = served.ops.next_tokens(hidden, weight, wanted(targets))
        assert logprobs.isnan().all() and not finite.any(), f"id {broken} of {vocab_size}"
