"""Aligned models: gradients, independence of batches and padding, `unalign`, and refused models and calls.
tests/engine/test_trainer_log_probs.py tests that log-probs have the bits of a rollout.
"""

from __future__ import annotations

import copy
import inspect
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from matrix import thinned
from proofs import proves
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from tiny import MIXTURES, make_tiny_model
from trueroll.errors import AlignmentError, ConfigError
from trueroll.kernels import aligned, autograd, reference
from trueroll.kernels.autograd import GradientOps, GradientTowerOps
from trueroll.kernels.contract import ExpertsWeights, Rotation
from trueroll.kernels.packed import Packed
from trueroll.kernels.selection import select_backend
from trueroll.kernels.specs import (
    Activation,
    AttentionSpec,
    ExpertsSpec,
    HeadSpec,
    LayerNormSpec,
    NormSpec,
    RouterSpec,
    Score,
)
from trueroll.kernels.training import Arithmetic, align, aligned_with, replayed, token_experts, token_log_probs, unalign

from .delta_nets import SPECS, exact_convolution, exact_recurrence, make_weights
from .inputs import randn, same_bits

DTYPES = [torch.float32, torch.bfloat16]
HYBRID_MIXTURES = ("qwen3_next_moe", "qwen3_5_moe")
LENS = (40, 33, 5, 17, 1)


def load(folder: Path, dtype: torch.dtype = torch.float32, backend: str = "") -> Any:
    """Return the model, aligned if a backend is given."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if backend:
        align(model, backend)
    return model


def sequences(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 500, (n,), generator=generator) for n in LENS]


def pad(rows: list[Tensor], left: int = 0, width: int = 48) -> tuple[Tensor, Tensor]:
    """Return (ids, mask) of rows that begin after `left` columns of padding."""
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, left : left + len(row)], mask[i, left : left + len(row)] = row, 1
    return ids, mask


def plain_log_probs(model: Any, ids: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """Compute `token_log_probs` with plain torch, for rows padded on the right."""
    log_probs = torch.log_softmax(model(ids, attention_mask=mask).logits / temperature, -1)
    found = log_probs[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    return F.pad(found, (1, 0)).masked_fill(mask == 0, 0.0)


def loss(log_probs: Tensor) -> Tensor:
    """Return a loss that gives every token a different weight."""
    return (log_probs * torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs).to(log_probs.dtype)).sum()


def gradients(model: Any, log_probs: Tensor) -> dict[str, Tensor]:
    """Return the gradients of `loss`; the graph is kept. Parameters that only choose experts have no gradient."""
    given = (named for named in model.named_parameters() if not named[0].endswith(("correction_bias", "expert_bias")))
    names, parameters = zip(*given, strict=True)
    return dict(zip(names, torch.autograd.grad(loss(log_probs), parameters, retain_graph=True), strict=True))


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@proves("gradients")
@pytest.mark.parametrize(
    "dtype,temperature", [(torch.float32, 0.7), (torch.float32, 0.001), (torch.bfloat16, 0.7)], ids=str
)
def test_gradients_are_as_good_as_those_of_the_unaligned_model(
    tiny_model: Path, dtype: torch.dtype, backend: str, temperature: float
) -> None:
    """The median of several batches is compared: at a low temperature, the rounding of a few logits decides."""
    batches = [three_gradients(tiny_model, dtype, backend, temperature, seed=seed) for seed in range(5)]
    for name in batches[0][0]:
        errors = [[error(each[name], exact[name]) for each in (found, plain)] for exact, plain, found in batches]
        assert statistics.median(ours / theirs for ours, theirs in errors) < 2, name


@pytest.mark.parametrize("capability,computed", [("AVX2", torch.float32), ("AVX512", torch.bfloat16)])
def test_gradients_on_each_kind_of_cpu(
    tiny_llama: Path, capability: str, computed: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert autograd.product_dtype(torch.zeros(1, dtype=torch.bfloat16)) == computed
    exact, unaligned, found = three_gradients(tiny_llama, torch.bfloat16, "cpu", 0.7)
    expected, theirs, ours = (torch.cat([each[name].flatten() for name in exact]) for each in (exact, unaligned, found))
    assert error(ours, expected) < 2 * error(theirs, expected)


@proves("gradients")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_windowed_families(windowed_model: Path, dtype: torch.dtype, backend: str) -> None:
    """The gradients of the head norms are concatenated. A single head norm has only 16 elements in up to six layers,
    too few to judge an error by.
    """
    check_errors(*map(with_joined_head_norms, three_gradients(windowed_model, dtype, backend, temperature=0.7)))


@proves("gradients")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_hybrid_families(
    hybrid_model: Path, dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients of value heads and of head norms are concatenated, because each tensor has too few elements to
    judge an error by. A single rounding early in a recurrence shifts the gradients of all weights, so several batches
    are compared.
    """
    recur_exactly(monkeypatch)
    batches = [three_gradients(hybrid_model, dtype, backend, temperature=0.7, seed=seed) for seed in range(3)]
    check_errors(*(joined([*map(with_joined_few, each)]) for each in zip(*batches, strict=True)))


@proves("gradients")
@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", MIXTURES)
@thinned(lambda foreign, dtype, backend, **_: not foreign or (backend, dtype) == ("cpu", torch.float32))
def test_gradients_of_mixtures(
    tmp_path: Path,
    family: str,
    dtype: torch.dtype,
    foreign: bool,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All three models use the same routes, which the aligned model or the test chooses. The models have two layers,
    because more recurrent layers would amplify rounding until gradients cannot be compared.
    """
    recur_exactly(monkeypatch)
    ids, mask = pad(sequences())
    types: dict[str, Any] = (
        dict(layer_types=["linear_attention", "full_attention"]) if family in HYBRID_MIXTURES else {}
    )
    folder = make_tiny_model(family, tmp_path, num_hidden_layers=2, **types)
    model = load(folder, dtype, backend)
    routes = token_experts(model, ids, mask)
    if foreign:
        routes = other_routes(model, routes)
    expected, unaligned, found = three_gradients(folder, dtype, backend, 0.7, routes)
    assert all(expected[name].any() for name in expected), "premise: routers have gradients too"
    check_errors(*map(with_joined_few, (expected, unaligned, found)))


def other_routes(model: Any, routes: Tensor) -> Tensor:
    """Return the neighbour of each expert."""
    found = (routes + 1) % model.model._aligned.spec.experts[0].num_experts
    assert not found.sort(-1).values.equal(routes)
    return found


def recur_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent transformers' float64 models from rounding to float32."""
    for module in (modeling_qwen3_5, modeling_qwen3_next, modeling_qwen3_5_moe):
        chunked = module.torch_chunk_gated_delta_rule

        def recurrence(query: Tensor, *args: Any, chunked: Any = chunked, **kwargs: Any) -> Any:
            return (exact_delta_rule if query.dtype == torch.float64 else chunked)(query, *args, **kwargs)

        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", recurrence)


def exact_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Compute in float64 what transformers computes in float32. All tensors are [B, T, heads, ...]."""
    share = v.shape[2] // k.shape[2]
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(share, 2) for x in (q, k))
    state, outs = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]), []
    for t in range(v.shape[1]):
        state = state * g[:, t, :, None, None].double().exp()
        change = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t, :, :, None] * change[:, :, None]
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) / k.shape[3] ** 0.5)
    return torch.stack(outs, 1), state


def with_joined_few(gradients: dict[str, Tensor], most: int = 32) -> dict[str, Tensor]:
    """Return the gradients, with those of at most `most` elements joined."""
    few = {name: gradient.flatten() for name, gradient in gradients.items() if gradient.numel() <= most}
    large = {name: gradient for name, gradient in gradients.items() if name not in few}
    return large | {"few": torch.cat(list(few.values()))}


def joined(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([gradients[name].flatten() for gradients in batches]) for name in batches[0]}


def three_gradients(
    folder: Path, dtype: torch.dtype, backend: str, temperature: float, routes: Tensor | None = None, seed: int = 0
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return three gradients of one model: in float64, unaligned, and aligned."""
    ids, mask = pad(sequences(seed))
    model = load(folder, dtype)
    exact = load(folder, dtype).double()
    if routes is not None:
        exact.set_experts_implementation("eager")  # torch's grouped products do not support float64

    def plain_gradients(model: Any) -> dict[str, Tensor]:
        with nullcontext() if routes is None else replayed(model, routes, mask):
            return gradients(model, plain_log_probs(model, ids, mask, temperature))

    expected, unaligned = plain_gradients(exact), plain_gradients(model)
    align(model, backend)
    log_probs = token_log_probs(model, ids, mask, temperature=temperature, routed_experts=routes)
    found = gradients(model, log_probs)
    assert found.keys() == expected.keys() and all(found[name].dtype == dtype for name in found)
    return expected, unaligned, found


def with_joined_head_norms(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    few = {name: gradient for name, gradient in gradients.items() if gradient.numel() == 16}
    joined = {"head norms": torch.cat(list(few.values()))} if few else {}
    return {name: gradient for name, gradient in gradients.items() if name not in few} | joined


def check_errors(expected: dict[str, Tensor], unaligned: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    for name, gradient in expected.items():
        # Rounding errors are random, so the errors of two equally accurate backward passes often differ by half.
        assert error(found[name], gradient) < 2 * error(unaligned[name], gradient), name


def native() -> GradientOps:
    return GradientOps(select_backend("cpu", torch.device("cpu"), torch.float32).ops)


def check_gradients(op: Callable[..., Tensor], definition: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Check values and gradients of a float32 op against its definition in float64."""
    ours = [x.clone().requires_grad_() for x in inputs]
    doubles = [x.double().requires_grad_() for x in inputs]
    found, expected = op(*ours), definition(*doubles)
    weights = randn(*expected.shape, seed=9)
    assert error(found.detach(), expected.detach()) < 1e-6
    pairs = zip(
        torch.autograd.grad((found * weights).sum(), ours),
        torch.autograd.grad((expected * weights.double()).sum(), doubles),
        strict=True,
    )
    assert all(same_bits(x.detach(), given) for x, given in zip(ours, inputs, strict=True)), "inputs are only read"
    for ours_of, expected_of in pairs:
        assert ours_of.shape == expected_of.shape and error(ours_of, expected_of) < 2e-6


def test_linear() -> None:
    x, weight, bias = randn(37, 50), randn(21, 50, seed=1), randn(21, seed=2)
    check_gradients(native().linear, F.linear, x, weight, bias)
    check_gradients(native().linear, F.linear, x, weight)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rmsnorm(zero_centered: bool) -> None:
    norm = NormSpec(1e-3, zero_centered)
    check_gradients(
        lambda x, w: native().rmsnorm(x, w, norm),
        lambda x, w: F.rms_norm(x, (50,), w + float(zero_centered), 1e-3),
        randn(37, 50),
        randn(50, seed=1),
    )


def test_layer_norm() -> None:
    norm = LayerNormSpec(1e-3)
    check_gradients(
        lambda x, w, b: GradientTowerOps(native().backend).layer_norm(x, w, b, norm),
        lambda x, w, b: F.layer_norm(x, (50,), w, b, 1e-3),
        *(randn(37, 50), randn(50, seed=1), randn(50, seed=2)),
    )


def test_gelu() -> None:
    check_gradients(lambda x: native().gate_mul(x, torch.ones_like(x), "gelu"), F.gelu, randn(37, 50))


@pytest.mark.parametrize("lens", [[37], [16, 20, 1], [5, 5, 40]])
def test_attention_of_rows_that_see_all(lens: list[int]) -> None:
    """Heads of 24 elements are padded."""
    spec = AttentionSpec(3, 3, 24, 0.3)
    packed = Packed.of(lens, torch.device("cpu"), see_all=True)

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(x.transpose(0, 1).split(lens, 1) for x in (q, k, v)), strict=True)
        return torch.cat([F.scaled_dot_product_attention(*part, scale=0.3) for part in parts], 1).transpose(0, 1)

    inputs = (randn(sum(lens), 3, 24, seed=seed) for seed in range(3))
    check_gradients(lambda q, k, v: native().attention(q, k, v, packed, spec), definition, *inputs)


def test_project_back() -> None:
    inputs = randn(37, 50), randn(21, 50, seed=1), randn(37, 21, seed=2), randn(21, seed=3)
    check_gradients(native().project_back, lambda x, w, residual, bias: F.linear(x, w, bias) + residual, *inputs)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_up(activation: Activation) -> None:
    def definition(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        gated = F.linear(x, gate)
        return (F.silu(gated) if activation == "silu" else F.gelu(gated, approximate="tanh")) * F.linear(x, up)

    check_gradients(
        lambda x, gate, up: native().gate_up(x, gate, up, activation),
        definition,
        randn(9, 50),
        randn(30, 50, seed=1) / 4,
        randn(30, 50, seed=2) / 4,
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(interleaved: bool) -> None:
    rotation = Rotation(*native().backend.rotation(torch.arange(20) * 31, randn(8).abs(), 1.2))

    def definition(x: Tensor) -> Tensor:
        pairs = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        turned = torch.complex(*pairs) * torch.complex(*(part[:, None].double() for part in rotation[:2]))
        if interleaved:
            return torch.view_as_real(turned).flatten(-2)
        return torch.cat((turned.real, turned.imag), -1)

    check_gradients(lambda x: native().rope(x, rotation, interleaved), definition, randn(20, 3, 16))


@pytest.mark.parametrize(
    "heads,kv_heads,window,soft_cap",
    [(4, 2, None, None), (3, 3, None, None), (6, 1, None, None), (4, 2, 33, None), (4, 2, None, 1.0), (4, 2, 33, 1.0)],
)
def test_attention(heads: int, kv_heads: int, window: int | None, soft_cap: float | None) -> None:
    check_attention(native(), AttentionSpec(heads, kv_heads, 16, scale=0.3, window=window, soft_cap=soft_cap))


@pytest.mark.parametrize("window", [None, 33])
def test_attention_with_sinks(window: int | None) -> None:
    """One sink takes nearly all of its head's softmax, and another sink takes nearly nothing."""
    spec = AttentionSpec(4, 2, 16, scale=0.3, window=window, sinks=True)
    check_attention(referenced()[0], spec, torch.tensor([0.5, 9.0, -9.0, 2.0]))


def check_attention(ops: GradientOps, spec: AttentionSpec, sinks: Tensor | None = None) -> None:
    """Check sequences that are padded together, and sequences that are not."""
    heads, kv_heads, window, soft_cap = spec.num_heads, spec.num_kv_heads, spec.window, spec.soft_cap
    lens = (5, 1, 150, 7, 40, 33, 2)
    packed = Packed.of(lens, torch.device("cpu"))
    assert len(list(packed.groups())) > 3 and max(map(len, packed.groups())) > 1

    def definition(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        parts = []
        for one in zip(*(x.split(lens) for x in (q, k, v)), strict=True):
            query, key, value = (x.transpose(0, 1) for x in one)
            key, value = (x.repeat_interleave(heads // kv_heads, 0) for x in (key, value))
            scores = (query @ key.transpose(1, 2)) * 0.3
            scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
            hidden = torch.ones_like(scores[0]).triu(1).bool()
            hidden |= torch.zeros_like(hidden) if window is None else torch.ones_like(scores[0]).tril(-window).bool()
            scores = scores.masked_fill(hidden, -torch.inf)
            of_sinks = [each.view(-1, 1, 1).expand(*scores.shape[:2], 1) for each in sinks]
            shares = torch.cat((scores, *of_sinks), -1).softmax(-1)[..., : scores.shape[-1]]
            parts.append((shares @ value).transpose(0, 1))
        return torch.cat(parts)

    q, k, v = (randn(sum(lens), n, 16, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads)))
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    check_gradients(lambda q, k, v, *sinks: ops.attention(q, k, v, packed, spec, *sinks), definition, *inputs)


RECURRENT_LENS = (5, 1, 150, 7, 64, 70)


def referenced() -> tuple[GradientOps, Packed]:
    """Return the reference, and sequences: some are padded together, and some fill chunks."""
    packed = Packed.of(RECURRENT_LENS, torch.device("cpu"))
    assert 2 < len(packed.groups()) < len(RECURRENT_LENS)
    assert max(RECURRENT_LENS) > 2 * autograd._CHUNK and autograd._CHUNK in RECURRENT_LENS
    return GradientOps(select_backend("reference", torch.device("cpu"), torch.float32).ops), packed


@pytest.mark.parametrize("size", [1, 2, 4])
def test_convolution(size: int) -> None:
    ops, packed = referenced()

    def definition(x: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([exact_convolution(part, weight)[0] for part in x.split(RECURRENT_LENS)])

    x, weight = randn(sum(RECURRENT_LENS), 10), randn(10, 1, size, seed=1)
    check_gradients(lambda x, weight: ops.convolve(x, weight, packed), definition, x, weight)


@pytest.mark.parametrize("name", ["groups", "odd"])
def test_delta_rule(name: str) -> None:
    """Some heads forget at once, and some remember all of a sequence."""
    (ops, packed), spec = referenced(), SPECS[name]
    weights, count = make_weights(spec, torch.float32), sum(RECURRENT_LENS)

    def op(qkv: Tensor, b: Tensor, a: Tensor, decay: Tensor, bias: Tensor) -> Tensor:
        return ops.delta_rule(qkv, b, a, spec, replace(weights, decay=decay, bias=bias), packed)

    def definition(qkv: Tensor, b: Tensor, a: Tensor, decay: Tensor, bias: Tensor) -> Tensor:
        gates = replace(weights, decay=decay, bias=bias)
        rows = zip(*(x.split(RECURRENT_LENS) for x in (qkv, b, a)), strict=True)
        return torch.cat([exact_recurrence(*each, spec=spec, weights=gates) for each in rows])

    sizes = spec.channels, spec.num_value_heads, spec.num_value_heads
    inputs = [randn(count, size, seed=i) for i, size in enumerate(sizes)]
    inputs[2][100::7] += 200.0  # a head that forgets at once must not make other heads less precise
    check_gradients(op, definition, *inputs, weights.decay, weights.bias)


def test_a_gate_of_the_output() -> None:
    ops, _ = referenced()
    inputs = randn(9, 50) * 3, randn(9, 50, seed=1)
    check_gradients(lambda gate, x: ops.gate_mul(gate, x, "sigmoid"), lambda gate, x: torch.sigmoid(gate) * x, *inputs)


def clamped_silu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)


def test_a_clamped_gate() -> None:
    ops, _ = referenced()
    inputs = randn(9, 50) * 9, randn(9, 50, seed=1) * 9
    assert all((x > 7).any() and (x < -7).any() and (x.abs() < 7).any() for x in inputs), "premise: some are clamped"
    check_gradients(lambda gate, up: ops.gate_mul(gate, up, "clamped_silu"), clamped_silu, *inputs)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("score", ["softmax_of_chosen", "softmax"])
def test_route(score: Score, given: bool) -> None:
    """The experts have the highest logits, or are given by the caller."""
    (ops, _), spec = referenced(), ExpertsSpec(num_experts=9, top_k=3, intermediate_size=1, router=RouterSpec(score))
    logits = randn(37, 9) * 2
    best = logits.topk(3).indices.sort().values.int()
    chosen = (randn(37, 9, seed=1).topk(3).indices.sort().values.int()) if given else best
    assert given != torch.equal(chosen, best)
    found, gates = ops.route(logits.requires_grad_(), spec, chosen if given else None)
    assert found.equal(chosen) and gates.requires_grad and not found.requires_grad

    def definition(logits: Tensor) -> Tensor:
        scores = logits.softmax(-1).gather(1, chosen.long())
        return scores / scores.sum(-1, keepdim=True) if score == "softmax_of_chosen" else scores

    given_or_none = chosen if given else None
    check_gradients(lambda logits: ops.route(logits, spec, given_or_none)[1], definition, logits.detach())


@pytest.mark.parametrize("activation", ["silu", "clamped_silu"])
def test_experts(activation: Activation) -> None:
    """Test both with and without biases and a shared expert. One expert has no rows, and some rows have the same
    experts.
    """
    (ops, _), clamped = referenced(), activation == "clamped_silu"
    spec = ExpertsSpec(num_experts=5, top_k=2, intermediate_size=20, activation=activation, bias=clamped)
    chosen = torch.tensor([[0, 1], [1, 4], [0, 1], [1, 2]] * 9, dtype=torch.int32)
    shapes = {"gate_up": (5, 40, 30), "down": (5, 30, 20), "x": (36, 30), "gates": (36, 2)}
    if clamped:
        shapes |= {"gate_up_bias": (5, 40), "down_bias": (5, 30), "shared": (36, 30)}
    inputs = [randn(*shape, seed=i) for i, shape in enumerate(shapes.values())]

    def op(*inputs: Tensor) -> Tensor:
        given: dict[str, Any] = dict(zip(shapes, inputs, strict=True))
        rows = given.pop("x"), given.pop("gates"), given.pop("shared", None)
        others: dict[str, Any] = dict.fromkeys(("router", "router_bias", "gate_up_bias", "down_bias"))
        return ops.experts(rows[0], spec, ExpertsWeights(**others | given), chosen, *rows[1:])

    def definition(*inputs: Tensor) -> Tensor:
        given: dict[str, Any] = dict(zip(shapes, inputs, strict=True))
        rows = []
        for row, experts, gates in zip(given["x"], chosen.tolist(), given["gates"], strict=True):
            rows.append(sum(gate * one(given, row, expert) for gate, expert in zip(gates, experts, strict=True)))
        return torch.stack(rows) + (given["shared"] if clamped else 0.0)

    def one(given: dict[str, Tensor], row: Tensor, expert: int) -> Tensor:
        biases = [given[name][expert] if clamped else None for name in ("gate_up_bias", "down_bias")]
        gate, up = F.linear(row, given["gate_up"][expert], biases[0]).chunk(2)
        return F.linear(clamped_silu(gate, up) if clamped else F.silu(gate) * up, given["down"][expert], biases[1])

    check_gradients(op, definition, *inputs)


@pytest.mark.parametrize("head", [HeadSpec(0.4), HeadSpec(0.8, soft_cap=2.0)])
def test_log_probs_of_scaled_and_capped_logits(head: HeadSpec) -> None:
    ids = torch.arange(9) * 7

    def definition(x: Tensor, w: Tensor) -> Tensor:
        logits = head.scale * (x @ w.T)
        logits = logits if head.soft_cap is None else head.soft_cap * (logits / head.soft_cap).tanh()
        return (logits / 0.7).log_softmax(-1).gather(1, ids[:, None]).squeeze(1)

    op = lambda x, w: native().log_probs(x, w, ids, 0.7, head)  # noqa: E731
    check_gradients(op, definition, randn(9, 32), randn(70, 32, seed=1))


def test_logits() -> None:
    check_gradients(native().logits, F.linear, randn(9, 50), randn(33, 50, seed=1))


@pytest.mark.parametrize("temperature", [0.7, 0.01])
@pytest.mark.parametrize("most_rows", [100, 7, 1])
def test_log_probs(most_rows: int, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op holds the logits of all rows at once, or of some rows at a time.

    A low temperature amplifies small errors.
    """
    monkeypatch.setattr(autograd, "_LOGITS_BYTES", 4 * 101 * most_rows)
    ids = torch.arange(20) * 5
    check_gradients(
        lambda x, w: native().log_probs(x, w, ids, temperature),
        lambda x, w: torch.log_softmax(F.linear(x, w) / temperature, -1).gather(1, ids[:, None])[:, 0],
        randn(20, 50),
        randn(101, 50, seed=1) / 3,
    )


def test_a_second_backward_pass_gives_the_same_gradients(tiny_model: Path, backend: str) -> None:
    model = load(tiny_model, backend=backend)
    log_probs = token_log_probs(model, *pad(sequences()))
    first, second = gradients(model, log_probs), gradients(model, log_probs)
    assert all(same_bits(first[name], second[name]) for name in first)


def test_frozen_parameters_get_no_gradient(tiny_llama: Path) -> None:
    model = load(tiny_llama, backend="cpu")
    model.requires_grad_(False)
    model.model.norm.weight.requires_grad_()
    token_log_probs(model, sequences()[0][None]).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["model.norm.weight"]


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


def test_logits_in_memory_are_bounded(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test checks only memory that torch allocates, because it cannot see memory of the native kernels."""
    monkeypatch.setattr(autograd, "_LOGITS_BYTES", 2**18)
    ids = torch.randint(3, 500, (4, 200), generator=torch.Generator().manual_seed(0))
    model = load(make_tiny_model("llama", tmp_path, vocab_size=4096), backend=backend)
    with Largest() as seen:
        token_log_probs(model, ids).sum().backward()
    with Largest() as seen_with_logits:
        model(ids).logits.sum().backward()
    assert seen_with_logits.numel >= ids.numel() * 4096, "premise: the logits are visible"
    assert seen.numel < ids.numel() * 4096 / 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probs_do_not_depend_on_the_batch(tiny_model: Path, dtype: torch.dtype, backend: str) -> None:
    model, rows = load(tiny_model, dtype, backend), sequences()
    alone = [token_log_probs(model, row[None])[0] for row in rows]
    packed = token_log_probs(model, torch.cat(rows), lengths=LENS).split(LENS)
    for left in (0, 3, 8):
        ids, mask = pad(rows, left)
        found = token_log_probs(model, ids, mask)
        assert found.shape == ids.shape and found[mask == 0].eq(0).all() and found.dtype == torch.float32
        for i, one in enumerate(alone):
            assert same_bits(found[i, left : left + len(one)], one)
            assert same_bits(packed[i], one)
    assert all(one[0] == 0 and one[1:].lt(0).all() for one in alone)


def test_a_completion_mask_leaves_the_rest_out(tiny_llama: Path) -> None:
    model = load(tiny_llama, backend="cpu")
    ids, mask = pad(sequences(), left=2)
    wanted = (torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.5) & mask.bool()
    whole, found = token_log_probs(model, ids, mask), token_log_probs(model, ids, mask, completion_mask=wanted)
    assert same_bits(found, whole.where(wanted, 0.0)) and 0 < (found != 0).sum() < (whole != 0).sum()
    none = token_log_probs(model, ids, mask, completion_mask=torch.zeros_like(wanted))
    assert none.eq(0).all() and none.requires_grad
    none.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters()), "all ranks need the same gradients"


def test_position_ids_tell_packed_sequences(tiny_llama: Path) -> None:
    """Several sequences are packed in one row, or in each of several rows."""
    model, rows = load(tiny_llama, backend="cpu"), [row for row in sequences() if len(row) > 1]
    expected = token_log_probs(model, torch.cat(rows), lengths=[len(row) for row in rows])
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    whole = token_log_probs(model, torch.cat(rows)[None], position_ids=positions[None])
    assert same_bits(whole[0], expected)
    width = len(rows[0]) + len(rows[2])
    ids, mask = pad([torch.cat((rows[0], rows[2])), torch.cat((rows[1],))], width=width)
    each = torch.cat((torch.arange(len(rows[0])), torch.arange(len(rows[2]))))
    placed = token_log_probs(model, ids, mask, position_ids=torch.stack((each, torch.arange(width))))
    first, second, third, _ = expected.split([len(row) for row in rows])
    assert same_bits(placed[0], torch.cat((first, third))) and same_bits(placed[1, : len(second)], second)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_integers_of_any_width_are_taken(tiny_llama: Path, backend: str, dtype: torch.dtype) -> None:
    """The token ids of samples are int32."""
    model, ids = load(tiny_llama, backend=backend), sequences()[0]
    expected = token_log_probs(model, ids[None])
    assert same_bits(token_log_probs(model, ids[None].to(dtype)), expected)
    assert same_bits(token_log_probs(model, ids.to(dtype), lengths=[len(ids)])[None], expected)


def test_a_temperature_beyond_float32_is_infinite(tiny_llama: Path) -> None:
    model, ids = load(tiny_llama, backend="cpu"), sequences()[0][None]
    far, infinite = (token_log_probs(model, ids, temperature=temperature) for temperature in (1e39, float("inf")))
    assert same_bits(far, infinite)
    assert len(far[0, 1:].unique()) == 1 and far[0, 1] < 0.0, "every token is equally probable"


def test_greedy_is_temperature_one(tiny_llama: Path) -> None:
    model, ids = load(tiny_llama, backend="cpu"), sequences()[0][None]
    greedy, warm = token_log_probs(model, ids, temperature=0.0), token_log_probs(model, ids, temperature=2.0)
    assert same_bits(greedy, token_log_probs(model, ids)) and not same_bits(greedy, warm)


def test_logits_of_an_aligned_model(tiny_model: Path, backend: str) -> None:
    """The logits are float32, equal for any padding, and close to those of the unaligned model."""
    model, rows = load(tiny_model), sequences()
    ids, mask = pad(rows)
    expected = model(ids, attention_mask=mask).logits.detach()
    align(model, backend)
    right, (left_ids, left_mask) = model(ids, attention_mask=mask).logits, pad(rows, left=5)
    left = model(left_ids, attention_mask=left_mask).logits
    packed = torch.cat([torch.arange(n) for n in LENS])[None]
    flat = model(torch.cat(rows)[None], position_ids=packed).logits[0].split(LENS)
    for i, n in enumerate(LENS):
        assert right.dtype == torch.float32 and torch.allclose(right[i, :n], expected[i, :n], atol=1e-4)
        assert same_bits(left[i, 5 : 5 + n], right[i, :n]) and same_bits(flat[i], right[i, :n])


def test_float32_parameters_under_autocast(tiny_model: Path, backend: str) -> None:
    """Log-probs and gradients match those of the rounded model, and the gradients are float32. Only the gradient of an
    embedding differs, because it adds the rows of a repeated token in float32.
    """
    masters, rounded = load(tiny_model, backend=backend), load(tiny_model, torch.bfloat16, backend)
    ids, mask = pad(sequences())
    with torch.autocast("cpu", torch.bfloat16):
        found = token_log_probs(masters, ids, mask)
        logits = masters(ids, attention_mask=mask).logits
    assert same_bits(found, token_log_probs(rounded, ids, mask)) and not same_bits(
        found, token_log_probs(masters, ids, mask)
    )
    assert same_bits(logits, rounded(ids, attention_mask=mask).logits)
    ours, expected = gradients(masters, found), gradients(rounded, token_log_probs(rounded, ids, mask))
    for name in ours:
        assert ours[name].dtype == torch.float32
        if name == "model.embed_tokens.weight":
            assert error(ours[name], expected[name].double()) < 5e-3
        else:
            assert same_bits(ours[name], expected[name].float()), name


def test_backward_inside_autocast_changes_nothing(tiny_llama: Path) -> None:
    model, ids = load(tiny_llama, backend="reference"), sequences()[0][None]
    expected = gradients(model, token_log_probs(model, ids))
    found = token_log_probs(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        inside = gradients(model, found)
    assert all(same_bits(inside[name], expected[name]) for name in expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_keeps_the_bits(
    tiny_llama: Path, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (ids, mask) = load(tiny_llama, backend="cpu").train(), pad(sequences())
    whole = token_log_probs(model, ids, mask)
    expected = gradients(model, whole)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    calls = []
    rmsnorm = GradientOps.rmsnorm
    monkeypatch.setattr(GradientOps, "rmsnorm", lambda *args: calls.append(1) or rmsnorm(*args))
    found = token_log_probs(model, ids, mask)
    loss(found).backward()
    assert len(calls) == 2 * 2 * 2 + 1, "premise: both norms of both layers were computed twice, the last norm once"
    assert same_bits(found, whole)
    assert all(same_bits(p.grad, expected[name]) for name, p in model.named_parameters())


def test_unalign_restores_the_model(tiny_model: Path) -> None:
    model, (ids, mask) = load(tiny_model), pad(sequences())
    classes = [type(module) for module in model.modules()]
    names = list(model.state_dict())
    before = model(ids, attention_mask=mask).logits
    align(model, "cpu")
    assert list(model.state_dict()) == names and [c.__name__ for c in classes] == [
        type(module).__name__ for module in model.modules()
    ]
    assert not same_bits(model(ids, attention_mask=mask).logits[mask == 1], before[mask == 1])
    unalign(model)
    assert [type(module) for module in model.modules()] == classes
    assert same_bits(model(ids, attention_mask=mask).logits, before)


def test_a_copy_of_an_aligned_model_is_aligned_by_itself(tiny_llama: Path) -> None:
    model, ids = load(tiny_llama, backend="cpu"), sequences()[0][None]
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.mul_(2.0)
    expected = token_log_probs(model, ids)
    assert not same_bits(token_log_probs(twin, ids), expected)
    unalign(twin)
    assert same_bits(token_log_probs(model, ids), expected)


def test_a_head_that_was_replaced_since_can_be_aligned_again(tiny_llama: Path) -> None:
    """transformers replaces the head when embeddings are resized."""
    model = load(tiny_llama)
    classes = [type(module) for module in model.modules()]
    align(model, "cpu")
    model.resize_token_embeddings(600)
    with pytest.raises(AlignmentError, match="call align"):
        token_log_probs(model, IDS)
    with pytest.raises(AlignmentError, match="call unalign"):
        align(model, "cpu")
    unalign(model)
    assert [type(module) for module in model.modules()] == classes
    align(model, "cpu")
    assert token_log_probs(model, IDS).shape == IDS.shape


def test_an_adapter_put_in_since_is_refused(tiny_llama: Path) -> None:
    model = load(tiny_llama, backend="cpu")
    with_adapter(model)
    with pytest.raises(AlignmentError, match="must be nn.Linear or .* .got Adapter"):
        token_log_probs(model, IDS)


def test_changed_weights_are_seen(tiny_llama: Path, backend: str) -> None:
    """No call caches a weight for the next call, so every kind of change takes effect."""
    model, ids = load(tiny_llama, backend=backend), sequences()[0][None]
    before = token_log_probs(model, ids)
    model.model.layers[0].mlp.up_proj.weight.data[:] *= 1.5
    assert not same_bits(token_log_probs(model, ids), before)


def test_rope_survives_a_cast_of_the_model(tiny_llama: Path) -> None:
    """A cast to bfloat16 rounds the frequencies that the model stores, which would change the rotation angles."""
    loaded, cast = load(tiny_llama, torch.bfloat16, "cpu"), load(tiny_llama).to(torch.bfloat16)
    assert cast.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    align(cast, "cpu")
    ids = sequences()[0][None]
    assert same_bits(token_log_probs(cast, ids), token_log_probs(loaded, ids))


IDS = torch.arange(3, 23).view(2, 10)


@pytest.fixture
def first_choice() -> None:
    """Forget the backends that earlier tests selected."""
    aligned.select_and_log.cache_clear()


FLOAT16_NOTE = "native CPU kernels do not support float16; set dtype to bfloat16 (--dtype bfloat16) or float32"


def test_a_fallback_is_logged_as_a_worker_logs_it(
    tiny_llama: Path, first_choice: None, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(tiny_llama, torch.float16, "auto")
    for _ in range(2):
        token_log_probs(model, IDS)
    assert aligned_with(model) == Arithmetic("reference", reference.instruction_set(), "float16", 4, "none", "auto")
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == [f"backend reference, not a faster one: {FLOAT16_NOTE}"]


def test_a_fallback_under_autocast_is_logged(
    tiny_llama: Path, first_choice: None, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(tiny_llama, backend="auto")
    assert aligned_with(model).backend == "cpu" and not caplog.records, "premise: float32 logs nothing"
    with torch.autocast("cpu", torch.float16):
        token_log_probs(model, IDS)
        found = aligned_with(model)
        assert (found.backend, found.dtype) == ("reference", "float16")
    assert FLOAT16_NOTE in caplog.text


def test_a_backend_that_was_asked_for_is_not_logged(
    tiny_llama: Path, first_choice: None, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(tiny_llama, torch.float16, "reference")
    assert aligned_with(model).backend == "reference" and not caplog.records


def test_aligned_with_refuses_an_unaligned_model(tiny_llama: Path) -> None:
    with pytest.raises(AlignmentError, match="model is not aligned .*; call align"):
        aligned_with(load(tiny_llama))


ONES = torch.ones_like(IDS)
REFUSED_CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "no such shape of mask": ("attention_mask", dict(input_ids=IDS, attention_mask=ONES[:, :9])),
    "all padding": ("attention_mask", dict(input_ids=IDS, attention_mask=ONES * 0)),
    "packed without lengths": ("input_ids", dict(input_ids=IDS.flatten())),
    "wrong lengths": ("lengths", dict(input_ids=IDS.flatten(), lengths=[10, 11])),
    "empty sequence": ("lengths", dict(input_ids=IDS.flatten(), lengths=[20, 0])),
    "lengths of padded": ("lengths", dict(input_ids=IDS, lengths=[20])),
    "lengths and mask": ("attention_mask", dict(input_ids=IDS.flatten(), lengths=[20], attention_mask=ONES)),
    "completion_mask": ("completion_mask", dict(input_ids=IDS, completion_mask=ONES[:1])),
    "negative temperature": ("temperature", dict(input_ids=IDS, temperature=-1.0)),
    "lengths and positions": ("position_ids", dict(input_ids=IDS.flatten(), lengths=[20], position_ids=IDS.flatten())),
    "positions from 1 on": ("position_ids", dict(input_ids=IDS, position_ids=torch.arange(1, 11)[None])),
}


@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_invalid_calls_are_refused(tiny_llama: Path, name: str) -> None:
    argument, call = REFUSED_CALLS[name]
    with pytest.raises(AlignmentError, match=f"^{argument}\\b.*; "):
        token_log_probs(load(tiny_llama, backend="cpu"), **call)


@pytest.mark.parametrize(
    "call",
    [
        dict(position_ids=torch.arange(1, 11)[None]),
        dict(position_ids=torch.zeros(3, 10)),
        dict(attention_mask=torch.ones(2, 1, 10, 10)),
        dict(cu_seq_lens_q=torch.tensor([0, 20])),
        dict(seq_idx=torch.zeros(2, 10, dtype=torch.int32)),
        dict(past_key_values=transformers.DynamicCache()),
        dict(inputs_embeds=torch.zeros(2, 10, 64)),
        dict(output_hidden_states=True),
        dict(output_attentions=True),
    ],
    ids=lambda call: next(iter(call)),
)
def test_unsupported_arguments_are_refused(tiny_llama: Path, call: dict[str, Any]) -> None:
    name = next(iter(call))
    with pytest.raises(AlignmentError, match=f"^position_ids are required with {name}|^{name}\\b"):
        load(tiny_llama, backend="cpu")(IDS, **call)


def test_a_part_of_zero_3_is_refused(tiny_llama: Path) -> None:
    """DeepSpeed ZeRO-3 marks the parameters that it shards across ranks."""
    model = load(tiny_llama, backend="cpu")
    model.model.layers[1].mlp.up_proj.weight.ds_id = 7
    with pytest.raises(
        AlignmentError, match="layers.1.mlp.up_proj.weight: .* sharded by ZeRO-3.*; shard with .*fully_shard"
    ):
        token_log_probs(model, IDS)


def test_a_model_whose_forward_pass_was_replaced_is_refused(tiny_llama: Path) -> None:
    """accelerate replaces the forward pass when it adds autocast. Replacing the forward pass of an aligned model is
    supported.
    """
    model, twin = load(tiny_llama), load(tiny_llama, torch.bfloat16, "cpu")
    plain = model.forward
    model.forward = lambda *args, **kwargs: plain(*args, **kwargs)
    with pytest.raises(AlignmentError, match="call align before accelerator.prepare"):
        align(model)
    del model.forward
    align(model, "cpu")
    aligned = model.forward
    model.forward = torch.autocast("cpu", torch.bfloat16)(lambda *args, **kwargs: aligned(*args, **kwargs))
    assert same_bits(token_log_probs(model, IDS), token_log_probs(twin, IDS))
    assert aligned_with(model) == aligned_with(twin)


def test_a_wrapper_that_drops_the_question_is_refused(tiny_llama: Path) -> None:
    model = load(tiny_llama, backend="cpu")
    model.forward = lambda *args, **kwargs: {"logits": torch.zeros(1)}
    with pytest.raises(
        AlignmentError, match="wrapper around the model must pass the argument `question` on .* .got a dict"
    ):
        token_log_probs(model, IDS)


def test_an_aligned_model_takes_the_arguments_of_a_plain_one(tiny_llama: Path) -> None:
    """Trainers read the signature of `forward` to find the columns that a model can use."""
    assert inspect.signature(load(tiny_llama, backend="cpu").forward) == inspect.signature(load(tiny_llama).forward)


def test_a_model_without_tokens_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(AlignmentError, match="^input_ids is missing"):
        load(tiny_llama, backend="cpu")()


class Adapter(nn.Linear):
    """A linear layer that computes something else."""


def with_adapter(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.__class__ = Adapter


def with_mixed_dtypes(model: Any) -> None:
    model.model.norm.bfloat16()


REFUSED_MODELS: dict[str, Callable[[Any], object]] = {
    "up_proj": with_adapter,
    "parameters": with_mixed_dtypes,
    "torch.float64": lambda model: model.double(),
    "attention_bias": lambda model: setattr(model.config, "attention_bias", True),
    "mlp_bias": lambda model: setattr(model.config, "mlp_bias", True),
    "attention_dropout": lambda model: setattr(model.config, "attention_dropout", 0.1),
    "lm_head": lambda model: setattr(model, "lm_head", nn.Linear(64, 512, bias=True)),
    "like the embedding": lambda model: setattr(model, "lm_head", nn.Linear(64, 300, bias=False)),
    "hidden_act": lambda model: setattr(model.config, "hidden_act", "gelu"),
    "rope_type": lambda model: model.config.rope_parameters.update(rope_type="dynamic"),
    "sliding_window": lambda model: setattr(model.config, "layer_types", ["sliding_attention"] * 2),
    "already aligned": lambda model: align(model, "cpu"),
}


@pytest.mark.parametrize("feature", REFUSED_MODELS)
def test_a_model_that_the_ops_do_not_compute_is_refused(tiny_qwen2: Path, feature: str) -> None:
    model = load(tiny_qwen2)
    REFUSED_MODELS[feature](model)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(AlignmentError, match=feature):
        align(model)
    assert [type(module) for module in model.modules()] == classes, "nothing is half aligned"


def test_other_models_and_backends_are_refused(tiny_llama: Path) -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)
    with pytest.raises(AlignmentError, match="must be one of .*LlamaForCausalLM.* .got GPT2LMHeadModel"):
        align(transformers.GPT2LMHeadModel(config))
    model = load(tiny_llama)
    with pytest.raises(ConfigError, match="backend must be one of auto, cpu, triton, reference .got 'gpu'"):
        align(model, "gpu")
    with pytest.raises(AlignmentError, match="call align"):
        token_log_probs(model, IDS)
    with pytest.raises(AlignmentError, match="model is not aligned .*unalign"):
        unalign(model)
    with pytest.raises(AlignmentError, match="wrapper DataParallel is not supported .*; use DistributedDataParallel"):
        token_log_probs(nn.DataParallel(load(tiny_llama, backend="cpu")), IDS)
    with pytest.raises(AlignmentError, match="wrapper OptimizedModule is not supported .*; do not use torch.compile"):
        token_log_probs(torch.compile(load(tiny_llama, backend="cpu")), IDS)
