"""The promises of `kernels/contract.py`, to the bit: every op, backend and dtype, and every combination of rows in one
call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import pytest
import torch
from matrix import thinned
from mixers import attention_of
from torch import Tensor

from trueroll.kernels.contract import (
    GREEDY,
    KV_SPLIT,
    SAMPLE,
    AttentionBatch,
    AttentionWeights,
    Pages,
    Rotation,
    Wanted,
)
from trueroll.kernels.specs import Activation, ExpertsSpec, LayerNormSpec, LayerSpec, NormSpec, RouterSpec, Score

from .backends import SERVED, Implementation, Served, for_served, param, served_id
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
    filtered,
    hidden_size,
    layer_spec,
    make_experts,
    make_layers,
    make_rotations,
    randn,
    same_bits,
    some_masks,
    stored,
    strided,
)

ROWS = 100


@dataclass(frozen=True)
class RowOp:
    """An op with its weights: `compute` takes tensors of rows and returns one or several results for each row."""

    compute: Callable[..., Tensor | tuple[Tensor, ...]]
    rows: tuple[Tensor, ...]

    @cached_property
    def together(self) -> tuple[Tensor, ...]:
        """Return the results of all rows in one call."""
        return self(*self.rows)

    def __len__(self) -> int:
        return len(self.rows[0])

    def __call__(self, *rows: Tensor) -> tuple[Tensor, ...]:
        results = self.compute(*rows)
        results = (results,) if isinstance(results, Tensor) else results
        assert all(len(result) == len(rows[0]) for result in results)
        return results

    def check(self, batch: Tensor, expected: tuple[Tensor, ...], case: str) -> None:
        """Compute only the rows `batch`, and compare with the results of all rows."""
        for found, all_rows in zip(self(*(x[batch] for x in self.rows)), expected, strict=True):
            assert same_bits(found, all_rows[batch]), case


def linear(n: int, k: int, bias: bool, served: Served) -> RowOp:
    weight = stored(served.ops, randn(n, k, dtype=served.dtype, seed=1))
    b = randn(n, dtype=served.dtype, seed=2) if bias else None
    return RowOp(lambda x: served.ops.linear(x, weight, b), (randn(ROWS, k, dtype=served.dtype),))


def head_linear(heads: int, n: int, k: int, served: Served) -> RowOp:
    weight = stored(served.ops, randn(heads * n, k, dtype=served.dtype, seed=1))
    rows = randn(ROWS, heads, k, dtype=served.dtype)
    return RowOp(lambda x: served.ops.head_linear(x, weight), (rows,))


def project_back(n: int, k: int, served: Served) -> RowOp:
    weight = stored(served.ops, randn(n, k, dtype=served.dtype, seed=1))
    rows = (randn(ROWS, k, dtype=served.dtype), randn(ROWS, n, dtype=served.dtype, seed=2))
    return RowOp(lambda x, residual: served.ops.project_back(x, weight, residual), rows)


def project_back_bias(n: int, k: int, served: Served) -> RowOp:
    weight, bias = stored(served.ops, randn(n, k, dtype=served.dtype, seed=1)), randn(n, dtype=served.dtype, seed=3)
    rows = (randn(ROWS, k, dtype=served.dtype), randn(ROWS, n, dtype=served.dtype, seed=2))
    return RowOp(lambda x, residual: served.ops.project_back(x, weight, residual, bias), rows)


def router_logits(spec: ExpertsSpec, dtype: torch.dtype, rows: int = ROWS) -> Tensor:
    """Return logits that are rounded, so that rows have many ties."""
    return ((randn(rows, spec.num_experts, seed=6) * 4).round() / 4).to(dtype)


def route(spec: ExpertsSpec, replayed: bool, served: Served) -> RowOp:
    logits = router_logits(spec, served.dtype)
    if not replayed:
        return RowOp(lambda x: served.ops.route(x, spec), (logits,))
    chosen = served.ops.route(randn(ROWS, spec.num_experts, dtype=served.dtype), spec)[0]
    return RowOp(lambda x, chosen: served.ops.route(x, spec, chosen), (logits, chosen))


def experts(spec: ExpertsSpec, shared: bool, served: Served) -> RowOp:
    weights, x = make_experts(served, spec), randn(ROWS, 144, dtype=served.dtype)
    rows = (x, *served.ops.route(router_logits(spec, served.dtype), spec))
    if shared:
        rows = (*rows, randn(ROWS, 144, dtype=served.dtype, seed=7))
    return RowOp(lambda x, *rest: served.ops.experts(x, spec, weights, *rest), rows)


def gate_up(n: int, k: int, activation: Activation, served: Served) -> RowOp:
    gate, up = (stored(served.ops, randn(n, k, dtype=served.dtype, seed=seed)) for seed in (1, 2))
    return RowOp(lambda x: served.ops.gate_up(x, gate, up, activation), (randn(ROWS, k, dtype=served.dtype),))


def gate_mul(n: int, activation: Activation, served: Served) -> RowOp:
    rows = (3 * randn(ROWS, n, dtype=served.dtype), randn(ROWS, n, dtype=served.dtype, seed=1))
    return RowOp(lambda gate, up: served.ops.gate_mul(gate, up, activation), rows)


def rope(size: int, turned: int, served: Served, interleaved: bool = False) -> RowOp:
    rows = (randn(ROWS, 3, size, dtype=served.dtype), *served.ops.rotation(torch.arange(ROWS), randn(turned // 2), 1.2))
    return RowOp(lambda x, cosines, sines: served.ops.rope(x, Rotation(cosines, sines), interleaved), rows)


def qkv(spec: LayerSpec, served: Served) -> RowOp:
    (layer,), mixer = make_layers(served, spec), attention_of(spec)
    weights = layer.mixer
    assert isinstance(weights, AttentionWeights)

    def compute(x: Tensor, cosines: Tensor, sines: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k_cache, v_cache = empty_caches(ROWS, 2, mixer.num_kv_heads, mixer.head_dim, served.dtype)
        q = served.ops.qkv(x, mixer, weights, Rotation(cosines, sines), k_cache, v_cache, slots)
        return q, k_cache[slots // 2], v_cache[slots // 2]

    angles = make_rotations(served.ops, decoder_spec(spec), torch.arange(ROWS))[0]
    return RowOp(compute, (randn(ROWS, 130, dtype=served.dtype), *angles[:2], own_blocks()))


def layers(spec: LayerSpec, served: Served) -> RowOp:
    """Each row is the second token of a sequence. The caches of both layers already have the sequence's first token."""
    mixer, hidden = attention_of(spec), hidden_size([spec])
    shape = (ROWS, 2, mixer.num_kv_heads, mixer.head_dim)
    run = served.ops.new_layers(make_layers(served, spec, spec))
    before = [[randn(*shape, dtype=served.dtype, seed=seed + i) for i in range(2)] for seed in (80, 90)]

    def compute(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        (*angles, slots), caches = rest, [(keys.clone(), values.clone()) for keys, values in before]
        batch = AttentionBatch(range(len(x) + 1), [2] * len(x), (slots // 2)[:, None])
        pages = [Pages(slots, batch)] * 2
        out = served.ops.layers(x, run, [Rotation(*angles[:2]), Rotation(*angles[2:])], caches, pages)
        return out, *(cache[slots // 2] for pair in caches for cache in pair)

    angles = make_rotations(served.ops, decoder_spec(spec), torch.arange(ROWS))
    return RowOp(compute, (randn(ROWS, hidden, dtype=served.dtype), *angles[0][:2], *angles[1][:2], own_blocks()))


def own_blocks() -> Tensor:
    """Return a slot for each row. No two rows share a block, so that the block with 2 slots is the row's result."""
    return torch.arange(ROWS - 1, -1, -1) * 2 + 1


def write_kv(served: Served) -> RowOp:
    def compute(k: Tensor, v: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        k_cache, v_cache = empty_caches(ROWS, 2, 3, 80, served.dtype)
        served.ops.write_kv(k, v, k_cache, v_cache, slots)
        return k_cache[slots // 2], v_cache[slots // 2]

    k, v = (randn(ROWS, 3, 80, dtype=served.dtype, seed=seed) for seed in (1, 2))
    return RowOp(compute, (k, v, own_blocks()))


def rotation(served: Served) -> RowOp:
    inv_freq = 10000.0 ** (-torch.arange(0, 80, 2) / 80)
    return RowOp(lambda positions: served.ops.rotation(positions, inv_freq, 1.2), (torch.arange(ROWS) * 977,))


def rmsnorm(size: int, zero_centered: bool, served: Served) -> RowOp:
    weight, norm = randn(size, dtype=served.dtype, seed=1), NormSpec(1e-6, zero_centered)
    return RowOp(lambda x: served.ops.rmsnorm(x, weight, norm), (randn(ROWS, size, dtype=served.dtype),))


def layer_norm(size: int, served: Served) -> RowOp:
    weight, bias = (randn(size, dtype=served.dtype, seed=seed) for seed in (1, 2))
    norm = LayerNormSpec(1e-6)
    return RowOp(lambda x: served.ops.layer_norm(x, weight, bias, norm), (randn(ROWS, size, dtype=served.dtype),))


def embedding(served: Served) -> RowOp:
    weight = stored(served.ops, randn(ROWS, 577, dtype=served.dtype, seed=1))
    return RowOp(lambda ids: served.ops.embedding(ids, weight), (torch.arange(ROWS) * 7 % 13,))


def lm_head(vocab_size: int, served: Served) -> RowOp:
    weight = stored(served.ops, randn(vocab_size, 130, dtype=served.dtype, seed=1))
    return RowOp(lambda x: served.ops.lm_head(x, weight), (randn(ROWS, 130, dtype=served.dtype),))


def some_seeds(rows: int) -> Tensor:
    return torch.arange(rows) * 2**57 - 5


def some_positions(rows: int) -> Tensor:
    return torch.arange(rows) * 2**28


def next_tokens(vocab_size: int, rows: int, k: int | None, served: Served) -> RowOp:
    """Rows that sample a token, take the best token, or score a given token.

    Log-probs are raw or at the temperature.
    """
    weight = stored(served.ops, randn(vocab_size, 33, dtype=served.dtype, seed=1))
    inputs = (
        randn(rows, 33, dtype=served.dtype),
        torch.tensor([SAMPLE, GREEDY, vocab_size - 1, 0, SAMPLE] * rows)[:rows],
        torch.tensor([1.0, 1.0, 0.7, 3.0] * rows)[:rows],
        torch.tensor([False, True, True] * rows)[:rows],
        some_seeds(rows),
        some_positions(rows),
    )

    def next_tokens(hidden, *wanted):
        asked = hidden, weight, Wanted(torch.arange(len(hidden)), *wanted)
        if k is None:
            return served.ops.next_tokens(*asked)
        token_ids, found, finite = served.ops.next_token_statistics(*asked, k)
        return token_ids, *found, finite

    return RowOp(next_tokens, inputs)


def log_probs(vocab_size: int, rows: int, served: Served) -> RowOp:
    return RowOp(served.ops.log_probs, (randn(rows, vocab_size) * 5, torch.arange(rows) * 31 % vocab_size))


def token_statistics(vocab_size: int, rows: int, served: Served) -> RowOp:
    """Rows with ties. In every third row, a filter has dropped most tokens."""
    logits = (randn(rows, vocab_size) * 8).round() / 4
    logits[::3] = logits[::3].where(logits[::3] >= logits[::3].amax(1, keepdim=True).clamp(max=3), -torch.inf)
    return RowOp(
        lambda x, ids: served.ops.token_statistics(x, ids, min(9, vocab_size)),
        (logits, torch.arange(rows) * 31 % vocab_size),
    )


def mask_logits(vocab_size: int, rows: int, served: Served) -> RowOp:
    def compute(logits: Tensor, masks: Tensor) -> Tensor:
        out = logits.clone(memory_format=torch.contiguous_format)
        served.ops.mask_logits(out, torch.arange(len(out)), masks)
        return out

    return RowOp(compute, (randn(rows, vocab_size), some_masks(rows, vocab_size)))


def filter_logits(vocab_size: int, rows: int, served: Served) -> RowOp:
    inputs = (
        (randn(rows, vocab_size) * 8).round() / 4,  # rounded, so that rows have many ties
        torch.tensor([-1, 1, 40] * rows)[:rows],
        torch.tensor([1.0, 0.9, 0.3, 1e-9] * rows)[:rows],
        torch.tensor([0.0, 0.05] * rows)[:rows],
    )
    return RowOp(partial(filtered, served.ops), inputs)


def sample(vocab_size: int, rows: int, served: Served) -> RowOp:
    return RowOp(served.ops.sample, (randn(rows, vocab_size), some_seeds(rows), some_positions(rows)))


MIXTURE_OPS: dict[str, Callable[[Served], RowOp]] = {
    "project_back 513x130 bias": partial(project_back_bias, 513, 130),
    "gate_mul clamped_silu 130": partial(gate_mul, 130, "clamped_silu"),
    "gate_up clamped_silu 130x577": partial(gate_up, 130, 577, "clamped_silu"),
    "route 3 of 9": partial(route, EXPERTS, False),
    "route 17 of 40 among all": partial(route, replace(EXPERTS, num_experts=40, top_k=17, router=SOFTMAX), False),
    "route again": partial(route, EXPERTS, True),
    "experts 3 of 9": partial(experts, EXPERTS, False),
    "experts 1 of 2 shared": partial(experts, ExpertsSpec(2, 1, 16), True),
    "experts 2 of 5 biases": partial(experts, ExpertsSpec(5, 2, 80, activation="clamped_silu", bias=True), False),
    **{f"layers {name}": partial(layers, each[-1]) for name, each in EXPERT_LAYERS.items() if name != "qwen3_moe"},
}
TYPED_OPS: dict[str, Callable[[Served], RowOp]] = {
    **{f"linear {n}x{k}": partial(linear, n, k, False) for n, k in ((576, 576), (96, 1536), (1, 7), (513, 130))},
    **{f"linear {n}x{k} bias": partial(linear, n, k, True) for n, k in ((96, 64), (1, 7), (513, 130))},
    **{f"head_linear {n}x{k}": partial(head_linear, 3, n, k) for n, k in ((64, 130), (160, 24))},
    **{f"project_back {n}x{k}": partial(project_back, n, k) for n, k in ((576, 576), (17, 33), (513, 130))},
    **{f"gate_mul silu {n}": partial(gate_mul, n, "silu") for n in (7, 130, 1001)},
    "gate_mul gelu_tanh 130": partial(gate_mul, 130, "gelu_tanh"),
    "gate_mul gelu 577": partial(gate_mul, 577, "gelu"),
    "gate_mul sigmoid 130": partial(gate_mul, 130, "sigmoid"),
    **{f"rope {size}": partial(rope, size, size) for size in (16, 80, 128)},
    "rope 20 of 80": partial(rope, 80, 20),
    "rope 20 of 80 interleaved": partial(rope, 80, 20, interleaved=True),
    **{f"gate_up silu {n}x{k}": partial(gate_up, n, k, "silu") for n, k in ((7, 40), (130, 577), (1001, 64))},
    "gate_up gelu_tanh 130x577": partial(gate_up, 130, 577, "gelu_tanh"),
    "qkv 16": partial(qkv, layer_spec(4, 2, 16)),
    "qkv 64 biases": partial(qkv, layer_spec(6, 2, 64, qkv_bias=True)),
    "qkv 80 norms": partial(qkv, layer_spec(3, 3, 80, qk_norm=NORM)),
    "qkv 96": partial(qkv, layer_spec(3, 1, 96)),
    "qkv 128 biases norms": partial(qkv, layer_spec(2, 1, 128, qkv_bias=True, qk_norm=NORM)),
    "qkv 256 zero-centered norms": partial(qkv, layer_spec(4, 2, 256, qk_norm=ZERO_CENTERED)),
    "qkv 80 norms over heads": partial(qkv, layer_spec(3, 3, 80, qk_norm=NORM, qk_norm_over_heads=True)),
    "qkv 80 a gate and a part": partial(qkv, layer_spec(3, 1, 80, qk_norm=NORM, output_gate=True, rotated=16)),
    **MIXTURE_OPS,
    "write_kv": write_kv,
    "layers 64": partial(layers, layer_spec(6, 2, 64)),
    "layers 80 biases norms": partial(layers, layer_spec(3, 3, 80, qkv_bias=True, qk_norm=NORM)),
    **{f"layers {name}": partial(layers, each[-1]) for name, each in FAMILY_LAYERS.items()},
    **{f"rmsnorm {size}": partial(rmsnorm, size, False) for size in (1, 16, 577, 8192)},
    "rmsnorm 577 zero-centered": partial(rmsnorm, 577, True),
    **{f"layer_norm {size}": partial(layer_norm, size) for size in (1, 16, 577, 4608)},
    "embedding": embedding,
    **{f"lm_head {v}": partial(lm_head, v) for v in (17, 1001)},
    **{f"next_tokens {v}": partial(next_tokens, v, rows, None) for v, rows in ((17, ROWS), (1001, ROWS), (49153, 7))},
    "next_token_statistics 1001": partial(next_tokens, 1001, ROWS, 9),
}
FLOAT32_OPS: dict[str, Callable[[Served], RowOp]] = {
    "rotation": rotation,
    **{f"log_probs {v}": partial(log_probs, v, rows) for v, rows in ((17, ROWS), (512, ROWS), (49153, 7))},
    **{
        f"token_statistics {v}": partial(token_statistics, v, rows) for v, rows in ((1, ROWS), (1001, ROWS), (49153, 7))
    },
    **{f"mask_logits {v}": partial(mask_logits, v, ROWS) for v in (17, 1001)},
    **{f"filter_logits {v}": partial(filter_logits, v, rows) for v, rows in ((17, ROWS), (1001, ROWS), (49153, 7))},
    **{f"sample {v}": partial(sample, v, rows) for v, rows in ((1, ROWS), (17, ROWS), (1001, ROWS), (49153, 7))},
}


# The ops that are fast enough for an interpreter, each in one dtype and with this number of rows. `layers` is left out,
# because it only calls other ops.
INTERPRETED_ROWS = 20
INTERPRETED = (
    *(
        "linear 513x130 bias",
        "head_linear 64x130",
        "project_back 17x33",
        "gate_mul silu 130",
        "rope 80",
        "rope 20 of 80",
        "gate_up gelu_tanh 130x577",
    ),
    *("qkv 128 biases norms", "write_kv", "rmsnorm 577 zero-centered", "embedding", "lm_head 1001", "next_tokens 1001"),
    *("qkv 80 a gate and a part", "qkv 80 norms over heads", "gate_up silu 130x577"),
    *(
        "layer_norm 577",
        "gate_mul gelu 577",
        "rotation",
        "log_probs 512",
        "token_statistics 1001",
        "mask_logits 1001",
        "filter_logits 1001",
        "sample 1001",
    ),
)


SLOW = {"qkv 80 norms over heads", "qkv 128 biases norms", "qkv 80 a gate and a part", "gate_up silu 130x577"}
"""The INTERPRETED ops that only `make test-all` runs. These ops take seconds and add the least coverage."""


def cases(implementation: Implementation, dtype: torch.dtype) -> dict[str, Callable[[Served], RowOp]]:
    """Return the ops to test. Ops without a dtype are tested once, and not with tiles, which do not affect them."""
    once = dtype == implementation.dtypes[0] and not implementation.emulated
    if implementation.interpreted:
        return {name: (TYPED_OPS | FLOAT32_OPS)[name] for name in INTERPRETED} if once else {}
    return TYPED_OPS | FLOAT32_OPS if once else TYPED_OPS


CASES = [
    param(served, (*served, make), id=f"{name} {served_id(served)}", rarely=served[0].interpreted and name in SLOW)
    for served in SERVED
    for name, make in cases(*served).items()
]
every_op = pytest.mark.parametrize("row_op", CASES, indirect=True, scope="module")
"""Parametrizes tests in module scope, so that each op is made once and its tests run one after the other."""


@pytest.fixture(scope="module")
def row_op(request: pytest.FixtureRequest) -> Iterator[RowOp]:
    implementation, dtype, make = request.param
    with implementation.chosen() as ops:
        row_op = make(Served(ops, dtype))
        rows = INTERPRETED_ROWS if implementation.interpreted else None
        yield replace(row_op, rows=tuple(x[:rows] for x in row_op.rows))


def batches(rows: int) -> list[Tensor]:
    """Return batches: single rows, slices of many sizes from several positions, all rows in another order, and one row
    at every position.
    """
    sizes = [size for size in (2, 3, 7, 12, 13, 31, 33, 65, 95, 96, 97) if size < rows]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(order, torch.arange(rows))
    alone = [torch.tensor([row]) for row in (0, rows // 2, rows - 1)]
    some = [torch.arange(size) + (i * 5) % (rows - size + 1) for i, size in enumerate(sizes)]
    return [*alone, *some, order, torch.full((rows,), rows // 3)]


@every_op
def test_a_row_does_not_depend_on_how_many_share_the_call_or_where_it_stands(row_op: RowOp) -> None:
    for batch in batches(len(row_op)):
        row_op.check(batch, row_op.together, f"{len(batch)} rows: {batch[0]} to {batch[-1]}")


EXTREMES = (lambda dtype: torch.nan, lambda dtype: torch.inf, lambda dtype: torch.finfo(dtype).max)


@every_op
def test_a_row_does_not_depend_on_what_the_others_hold(row_op: RowOp) -> None:
    kept = torch.arange(len(row_op)) % 3 == 1
    for extreme in EXTREMES:
        rows = [x.clone() for x in row_op.rows]
        for x in rows:
            if x.is_floating_point():
                x[~kept] = extreme(x.dtype)
        for found, before in zip(row_op(*rows), row_op.together, strict=True):
            assert same_bits(found[kept], before[kept]), f"the others hold {extreme(torch.float32)}"


@every_op
@thinned(lambda row_op, **_: not row_op[0].interpreted)
def test_a_row_does_not_depend_on_threads_or_its_place_in_memory(row_op: RowOp, two_threads: None) -> None:
    everything = torch.arange(len(row_op))
    expected = row_op(*row_op.rows)
    torch.set_num_threads(1)
    row_op.check(everything, expected, "one thread")
    for place in (shifted, strided):
        rows = [place(x) for x in row_op.rows]
        for found, before in zip(row_op(*rows), expected, strict=True):
            assert same_bits(found, before), place.__name__


def shifted(x: Tensor) -> Tensor:
    """Return the same values in memory that starts one element later."""
    further = torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    assert further.data_ptr() % 64 != x.data_ptr() % 64
    return further


@pytest.mark.parametrize("threads", [1, 2])
def test_a_product_does_not_depend_on_the_number_of_rows(quick: Served, threads: int, two_threads: None) -> None:
    torch.set_num_threads(threads)
    weight = stored(quick.ops, randn(130, 513, dtype=quick.dtype, seed=1))
    x = randn(4097, 513, dtype=quick.dtype)
    everything = quick.ops.linear(x, weight)
    for count in (1, 2, 3, 12, 13, 15, 16, 17, 32, 33, 95, 96, 97, 4096):
        for start in {0, 1000 % (4098 - count), 4097 - count}:
            rows = slice(start, start + count)
            assert same_bits(quick.ops.linear(x[rows], weight), everything[rows]), f"{count} rows from {start}"


@pytest.mark.parametrize("threads", [1, 2])
def test_experts_do_not_depend_on_the_number_of_rows(mixing: Served, threads: int, two_threads: None) -> None:
    """Native kernels process a limited number of rows at a time, and split an expert with many rows."""
    torch.set_num_threads(threads)
    spec = ExpertsSpec(num_experts=6, top_k=2, intermediate_size=16)
    weights, x = make_experts(mixing, spec, 32), randn(1000, 32, dtype=mixing.dtype)
    experts, gates = mixing.ops.route((randn(1000, 6) + torch.arange(6)).to(mixing.dtype), spec)
    counts = experts.flatten().bincount(minlength=6)
    assert counts[0] < 20 and counts[5] > 500, "some have few rows, and some have many"
    everything = mixing.ops.experts(x, spec, weights, experts, gates)
    for count in (1, 2, 33, 97, 192, 193, 999):
        for start in {0, 700 % (1001 - count), 1000 - count}:
            rows = slice(start, start + count)
            found = mixing.ops.experts(x[rows], spec, weights, experts[rows], gates[rows])
            assert same_bits(found, everything[rows]), f"{count} rows from {start}"


def test_a_row_with_nan_goes_to_experts_that_exist(mixing: Served) -> None:
    spec = replace(EXPERTS, num_experts=21, top_k=8)
    cases: list[tuple[Score, slice]] = [
        ("softmax_of_chosen", slice(0, 1)),
        ("softmax", slice(20, 21)),
        ("softmax_of_chosen", slice(0, 21, 2)),
        ("softmax", slice(0, 21)),
    ]
    for score, broken in cases:
        logits = randn(9, 21, dtype=mixing.dtype)
        expected = mixing.ops.route(logits, replace(spec, router=RouterSpec(score)))
        logits[::2, broken] = torch.nan
        experts, gates = mixing.ops.route(logits, replace(spec, router=RouterSpec(score)))
        assert gates[::2].isnan().all()
        assert all(len(set(row)) == 8 and 0 <= min(row) and max(row) < 21 for row in experts.tolist())
        assert all(map(same_bits, (experts[1::2], gates[1::2]), (column[1::2] for column in expected)))


def test_equal_scores_choose_the_lower_expert(mixing: Served) -> None:
    spec = replace(EXPERTS, num_experts=40)
    rows = {
        (0, 1, 2): torch.zeros(40),
        (5, 17, 39): torch.zeros(40).index_fill(0, torch.tensor([5, 17, 39]), 1.0),
        (3, 8, 30): torch.zeros(40)
        .index_fill(0, torch.tensor([3, 30, 31, 39]), 1.0)
        .index_fill(0, torch.tensor(8), 2.0),
        (0, 1, 39): -torch.zeros(40).index_fill(0, torch.tensor([39]), -1.0),
    }
    experts, gates = mixing.ops.route(torch.stack(list(rows.values())).to(mixing.dtype), spec)
    assert experts.dtype == torch.int32 and gates.dtype == torch.float32
    assert [tuple(row) for row in experts.tolist()] == list(rows)


HEADS = [(6, 2, 64), (4, 4, 80), (9, 1, 16), (8, 1, 128), (3, 3, 96), (4, 2, 256), (2, 1, 512), (50, 1, 48)]
# Windows around the length of a split, and soft caps.
ATTENTION = [dict(window=window) for window in (1, 31, KV_SPLIT, KV_SPLIT + 1, 200)] + [dict(soft_cap=3.0)]
ATTENTION += [dict(window=140, soft_cap=3.0), dict(sinks=True), dict(window=31, soft_cap=3.0, sinks=True)]
LATENT: list[tuple[int, int, int, dict[str, Any]]] = [(5, 1, 80, dict(latent=64)), (4, 1, 576, dict(latent=512))]


@pytest.mark.parametrize(
    "heads,kv_heads,size,attention",
    [(*heads, {}) for heads in HEADS] + [(6, 2, 64, each) for each in ATTENTION] + LATENT,
)
@thinned(lambda quick, size, attention, **_: size <= 80 or not quick[0].emulated)
def test_attention_does_not_depend_on_chunks_or_company(
    quick: Served, heads: int, kv_heads: int, size: int, attention: dict[str, Any]
) -> None:
    lens = [1, 5, KV_SPLIT, KV_SPLIT + 1, 300]
    paged = Paged(quick, lens, heads, kv_heads, size, **attention)
    alone = [paged.whole(i) for i in range(len(lens))]
    assert all(x.isfinite().all() for x in alone)
    everyone = paged.attend([(i, 0, n) for i, n in enumerate(lens)])
    assert all(same_bits(a, b) for a, b in zip(alone, everyone, strict=True))
    for step, first, last in ((1, 120, 140), (7, 0, 300), (64, 0, 300)):
        chunks = [paged.attend([(4, at, min(at + step, last))])[0] for at in range(first, last, step)]
        assert same_bits(torch.cat(chunks), alone[4][first:last]), f"chunks of {step}"
    mixed = [(4, 290, 297), (3, 128, 129), (2, 127, 128), (1, 0, 5), (0, 0, 1), *[(4, 299, 300)] * 13]
    for (i, start, end), out in zip(mixed, paged.attend(mixed), strict=True):
        assert same_bits(out, alone[i][start:end])


@pytest.mark.parametrize("heads,kv_heads,size", [(6, 2, 64), (4, 4, 80), (9, 1, 16)])
@pytest.mark.parametrize("attention", [{}, {"window": 60}, {"window": 250, "soft_cap": 3.0, "sinks": True}])
def test_attention_within_spans_does_not_depend_on_chunks_or_company(
    quick: Served, heads: int, kv_heads: int, size: int, attention: dict[str, Any]
) -> None:
    """Chunks end at the ends of spans, or outside spans. Without a window, a query gets the bits of the only query of a
    sequence that ends with the query's span.
    """
    spans, borders = [(3, 40), (130, 290)], [0, 2, 3, 40, 41, 100, 130, 290, 299, 300]
    paged = Paged(quick, [300, 290, 40], heads, kv_heads, size, spans=spans, **attention)
    alone = [paged.whole(i) for i in range(3)]
    causal = Paged(quick, [300, 290, 40], heads, kv_heads, size, **attention)
    assert not same_bits(alone[0], causal.whole(0))
    assert same_bits(alone[0][290:], causal.whole(0)[290:])
    chunks = [paged.attend([(0, start, end)])[0] for start, end in itertools.pairwise(borders)]
    assert same_bits(torch.cat(chunks), alone[0])
    mixed = [(0, 130, 290), (1, 41, 290), (2, 0, 40), (0, 299, 300), (0, 130, 290)]
    for (i, start, end), out in zip(mixed, paged.attend(mixed), strict=True):
        assert same_bits(out, alone[i][start:end])
    if "window" not in attention:
        for row in (3, 20, 39, 130, 200, 289):
            q, end = paged.q[0][row : row + 1], int(paged.ends[row])
            batch, caches = AttentionBatch([0, 1], [end], paged.tables[:1]), (paged.k_cache, paged.v_cache)
            assert same_bits(quick.ops.paged_attention(q, *caches, batch, size**-0.5), alone[0][row : row + 1])


@pytest.mark.parametrize(
    "heads,kv_heads,size,attention",
    [(6, 2, 64, {}), (4, 4, 80, {}), (6, 2, 64, {"window": 140, "sinks": True}), LATENT[0]],
)
@pytest.mark.parametrize("block_size", [2, 8, 24, 64, 512])
def test_attention_does_not_depend_on_block_size(
    quick: Served, block_size: int, heads: int, kv_heads: int, size: int, attention: dict[str, Any]
) -> None:
    expected = Paged(quick, [300, 41], heads, kv_heads, size, **attention)
    paged = Paged(quick, [300, 41], heads, kv_heads, size, block_size=block_size, seed=1, **attention)
    for chunk in ((0, 0, 300), (0, 299, 300), (1, 30, 41)):
        assert same_bits(paged.attend([chunk])[0], expected.attend([chunk])[0]), chunk


def test_attention_does_not_depend_on_threads(quick: Served, two_threads: None) -> None:
    """Native kernels distribute the splits of a sequence to threads. Splits that several sequences share become one
    task, but only if there are enough such tasks for all threads.
    """
    paged = Paged(quick, [1000] * 8, heads=4, kv_heads=2, sinks=True)
    last = [(i, 999, 1000) for i in range(8)]
    for chunks in ([(0, 999, 1000)], [(0, 990, 1000), (1, 0, 200)], [(0, 0, 1000)], last):
        torch.set_num_threads(2)
        expected = paged.attend(chunks)
        torch.set_num_threads(1)
        assert all(same_bits(a, b) for a, b in zip(paged.attend(chunks), expected, strict=True))
    torch.set_num_threads(2)
    for alone, together in zip(last, paged.attend(last), strict=True):
        assert same_bits(paged.attend([alone])[0], together)
    shared = Paged(quick, [1000] * 6, heads=8, kv_heads=1)
    shared.tables[:, :56] = shared.tables[0, :56]  # 7 splits: one task with one thread, 7 tasks with two threads
    expected = shared.attend(last[:6])
    torch.set_num_threads(1)
    assert all(map(same_bits, shared.attend(last[:6]), expected))


@pytest.mark.parametrize(
    "block_size,window", [(2, None), (16, None), (24, None), (256, None), (16, 60), (16, 200), (24, 299)]
)
@thinned(lambda quick, block_size, window: block_size == 16 or not quick[0].emulated)
def test_attention_does_not_depend_on_block_sharing(quick: Served, block_size: int, window: int | None) -> None:
    """If neighbouring sequences share a block, native kernels read the block once for all these sequences."""
    lens = [300, 290, 257, 256, 255, 128, 300, 129, 153, 300]
    paged = Paged(quick, lens, heads=4, kv_heads=2, block_size=block_size, window=window)
    shared = 256 // block_size
    for i, length in enumerate(lens):
        same = min(shared, length // block_size)
        paged.tables[i, :same] = paged.tables[0, :same]
    members = list(range(len(lens)))
    for length in (1, 2, 23, 24, 25):
        chunks = [(i, n - length, n) for i, n in enumerate(lens)]
        alone = [paged.attend([chunk])[0] for chunk in chunks]
        for order in (members, members[::-1], members * 3):
            for i, out in zip(order, paged.attend([chunks[i] for i in order]), strict=True):
                assert same_bits(out, alone[i]), f"{chunks[i]} among {len(order)}"


@for_served("place", [(shifted,), (strided,)], interpreted=1)
def test_attention_does_not_depend_on_a_place_in_memory(served: Served, place: Callable[[Tensor], Tensor]) -> None:
    paged = Paged(served, [150, 20])
    chunks = [(0, 0, 150), (1, 10, 20)]
    expected = torch.cat(paged.attend(chunks))
    q, batch = paged.batch(chunks)
    batch = replace(batch, block_tables=place(batch.block_tables))
    found = served.ops.paged_attention(place(q), paged.k_cache, paged.v_cache, batch, paged.size**-0.5)
    assert same_bits(found, expected)


def test_attention_never_reads_what_others_left_behind(quick: Served) -> None:
    for block_size in (2, 16, 24, 512):
        for kv_heads, latent in ((2, None), (1, 48)):
            paged = Paged(quick, [1, 300, 17], kv_heads=kv_heads, block_size=block_size, latent=latent)
            assert paged.k_cache.isnan().any() and paged.v_cache.isnan().any(), "the unused places hold NaN"
            for i in range(3):
                assert paged.whole(i).isfinite().all()


@pytest.mark.parametrize("window,block_size", [(1, 16), (31, 2), (32, 24), (KV_SPLIT, 16), (180, 16)])
def test_tokens_behind_the_window_of_a_chunk_are_never_seen(quick: Served, window: int, block_size: int) -> None:
    """The blocks behind the window may already hold another sequence's tokens."""
    for start, end in ((299, 300), (270, 300), (200, 300), (255, 257)):
        paged = Paged(quick, [300], block_size=block_size, window=window)
        expected = paged.attend([(0, start, end)])[0]
        assert expected.isfinite().all()
        behind = paged.slots(0)[: start + 1 - window]
        for cache in (paged.k[0], paged.v[0]):
            cache[: len(behind)] = torch.nan
        paged.write(0)
        assert len(behind) > 0 and same_bits(paged.attend([(0, start, end)])[0], expected), (start, end)
        paged.k[0][len(behind)] = torch.nan
        paged.write(0)
        assert paged.attend([(0, start, end)])[0][0].isnan().all(), "the first token that it sees"


@pytest.mark.parametrize("window", [1, 40, KV_SPLIT, 150])
def test_nan_reaches_only_queries_with_the_token_in_their_window(quick: Served, window: int) -> None:
    paged = Paged(quick, [300], window=window)
    before = paged.whole(0)
    for place, side in itertools.product((0, 100, 127, 128), "kv"):
        broken = Paged(quick, [300], window=window)
        getattr(broken, side)[0][place] = torch.nan
        broken.write(0)
        after, behind = broken.whole(0), place + window
        assert after[place:behind].isnan().all(), (place, side)
        assert same_bits(after[:place], before[:place]) and same_bits(after[behind:], before[behind:]), (place, side)


def test_attention_of_a_sequence_does_not_depend_on_what_the_others_hold(quick: Served) -> None:
    paged = Paged(quick, [40, 300, 150])
    chunks = [(0, 30, 40), (1, 0, 300), (2, 149, 150)]
    expected = paged.attend(chunks)
    for extreme in EXTREMES:
        for x in (paged.q, paged.k, paged.v):
            x[1] = torch.full_like(x[1], extreme(quick.dtype))
        paged.write(1)
        found = paged.attend(chunks)
        assert same_bits(found[0], expected[0]) and same_bits(found[2], expected[2])


def test_attention_does_not_depend_on_later_tokens_in_the_call(quick: Served) -> None:
    """Otherwise, a later token that makes the model overflow would change the values in a prompt's cached blocks."""
    paged = Paged(quick, [200])
    before = paged.whole(0)
    for value in (1.0, torch.inf, torch.nan):
        for x in (paged.k, paged.v):
            x[0][150] = value
        paged.write(0)
        after = paged.whole(0)
        assert same_bits(after[:150], before[:150]), value
        assert (after[150:] != before[150:]).flatten(1).any(1).all(), "every later token sees the change"


def test_the_sign_of_a_zero_does_not_depend_on_later_tokens_in_the_call(quick: Served) -> None:
    """The weighted values of tokens 14 and 15 underflow to -0.0. These tokens do not attend to later tokens."""
    paged = Paged(quick, [48], heads=1, kv_heads=1)
    for x, value in ((paged.q, 8.0), (paged.k, 0.0), (paged.v, 0.0)):
        x[0].zero_()[..., 0] = value
    paged.k[0][14:16, :, 0], paged.v[0][14:16], paged.v[0][16:] = -70.0, -1e-30, 1.0
    paged.write(0)
    assert torch.tensor(-70.0).exp() * -1e-30 == 0, "it underflows"
    whole = paged.whole(0)
    assert not whole[15].any(), "a zero"
    for start in (0, 15):
        assert same_bits(paged.attend([(0, start, 16)])[0], whole[start:16])


def test_the_contract_tests_can_fail(served: Served) -> None:
    """The tests detect a linear op with an order of accumulation that depends on the number of rows."""
    matrix = randn(64, 576, dtype=served.dtype, seed=1)
    whole, left, right = (stored(served.ops, part) for part in (matrix, matrix[:, :288], matrix[:, 288:]))

    def fickle(x: Tensor) -> Tensor:
        if len(x) <= 8:
            return served.ops.linear(x, whole)
        return served.ops.linear(x[:, :288], left) + served.ops.linear(x[:, 288:], right)

    row_op = RowOp(fickle, (randn(ROWS, 576, dtype=served.dtype),))
    with pytest.raises(AssertionError, match="1 rows"):
        row_op.check(torch.tensor([0]), row_op(*row_op.rows), "1 rows")
