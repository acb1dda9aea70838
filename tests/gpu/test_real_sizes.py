"""The kernels at the sizes of Qwen2.5-7B: close to float64, and a row's bits do not depend on other rows or tiles.

Experts are tested at the sizes of Qwen3-30B-A3B and gpt-oss-20b.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mixers import attention_of
from torch import Tensor

from trueroll.kernels.contract import GREEDY, SAMPLE, Backend, ExpertsWeights, Rotation, Wanted
from trueroll.kernels.layer import project
from trueroll.kernels.specs import Activation, ExpertsSpec

from ..kernels.accuracy import EPSILON, FLOAT32
from ..kernels.backends import Served
from ..kernels.inputs import Paged, layer_spec, make_layers, same_bits
from ..kernels.test_joined_ops import step_by_step, wanted
from ..kernels.triton import test_experts as of_experts
from .moved import DEVICE, Moved, move, random, same, sized

DTYPES = sized([torch.bfloat16, torch.float16], [torch.bfloat16])
ROWS = sized(8192, 144)
# Numbers of rows around every tile size, and around the numbers at which the tables change tiles.
COUNTS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 97, 127, 128, 129, 144, 145, 192, 193, 255, 256, 257, 288, 289)
COUNTS += (320, 321, 511, 512, 513, 1024, 1025, 2047, 4096)
Product = Callable[[Backend, Tensor, Tensor], Tensor]
COUNTS = sized(COUNTS, (1, 17, 129))
HIDDEN, INTERMEDIATE, KEYS, VOCABULARY = sized((3584, 18944, 512, 152064), (96, 160, 32, 512))


def gate_up(activation: Activation) -> Product:
    """Return the op for one weight with the rows of gate above the rows of up."""
    return lambda ops, x, weight: ops.gate_up(x, *weight.chunk(2), activation=activation)


# Number of rows to compute, the weight's shape, and the op.
PRODUCTS: dict[str, tuple[Any, ...]] = {
    "q": (ROWS, HIDDEN, HIDDEN, lambda ops, x, weight: ops.linear(x, weight)),
    "k": (ROWS, KEYS, HIDDEN, lambda ops, x, weight: ops.linear(x, weight, weight[:, 0])),
    "down": (ROWS, HIDDEN, INTERMEDIATE, lambda ops, x, weight: ops.project_back(x, weight, x[:, :HIDDEN])),
    "gate and up": (ROWS, 2 * INTERMEDIATE, HIDDEN, gate_up("silu")),
    "gate and up of Gemma 3": (
        ROWS,
        *sized((2 * 15360, 3840), (2 * 96, 80)),
        gate_up("gelu_tanh"),
    ),
    "head": (sized(520, 20), VOCABULARY, HIDDEN, lambda ops, x, weight: ops.lm_head(x, weight)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_does_not_depend_on_the_number_of_rows(kernels: Backend, name: str, dtype: torch.dtype) -> None:
    rows, n, k, product = PRODUCTS[name]
    x, weight = random(rows, k, dtype=dtype), random(n, k, dtype=dtype, scale=k**-0.5, seed=1)
    everything = product(kernels, x, weight)
    assert len(everything) == rows and everything.isfinite().all()
    for count in (count for count in COUNTS if count < rows):
        for start in {0, 1000 % (rows + 1 - count), rows - count}:
            part = slice(start, start + count)
            assert same(product(kernels, x[part], weight), everything[part]), f"{count} rows from {start}"


EXPERTS: dict[str, tuple[ExpertsSpec, int]] = {
    "Qwen3-30B-A3B": (sized(ExpertsSpec(128, 8, 768), ExpertsSpec(4, 2, 40)), sized(2048, 72)),
    "gpt-oss-20b": (
        ExpertsSpec(*sized((32, 4, 2880), (4, 2, 40)), activation="clamped_silu", bias=True),
        sized(2880, 72),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_do_not_depend_on_the_number_of_rows(kernels: Backend, name: str, dtype: torch.dtype) -> None:
    """Also check that a few rows have the same bits as the separate products of each expert."""
    spec, hidden = EXPERTS[name]
    count, inner = spec.num_experts, spec.intermediate_size
    new = partial(random, dtype=dtype, scale=hidden**-0.5)
    gate_up, down = new(count * 2 * inner, hidden, seed=1), new(count * hidden, inner, seed=2)
    biases = (new(count, 2 * inner, seed=3), new(count, hidden, seed=4)) if spec.bias else (None, None)
    weights = ExpertsWeights(gate_up, None, gate_up, biases[0], down, biases[1])
    x, logits = random(ROWS, hidden, dtype=dtype), random(ROWS, count, dtype=dtype, seed=5)

    def compute(part: slice) -> tuple[Tensor, Tensor, Tensor]:
        chosen, gates = kernels.route(logits[part], spec)
        return chosen, gates, kernels.experts(x[part], spec, weights, chosen, gates, x[part])

    everything = compute(slice(None))
    assert all(out.isfinite().all() for out in everything)
    for rows in (rows for rows in COUNTS if rows < ROWS):
        for start in {0, 1000 % (ROWS + 1 - rows), ROWS - rows}:
            part = slice(start, start + rows)
            assert all(same(a, b[part]) for a, b in zip(compute(part), everything, strict=True)), (
                f"{rows} rows from {start}"
            )
    few = slice(17)
    chosen, gates = (out[few] for out in everything[:2])
    expected = of_experts.step_by_step(x[few], spec, weights, chosen, gates, x[few])
    assert same(expected, everything[2][few])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(HIDDEN, HIDDEN), (KEYS, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)])
def test_products_against_float64(kernels: Backend, n: int, k: int, dtype: torch.dtype) -> None:
    """The bound is one rounding to the dtype and a float32 rounding per term of a sum, as in `tests/kernels`."""
    for rows in sized((1, 16, 64, 128, 1024), (1, 16)):
        x, weight = random(rows, k, dtype=dtype), random(n, k, dtype=dtype, scale=k**-0.5, seed=1)
        exact, magnitude = (a.double() @ b.double().T for a, b in ((x, weight), (x.abs(), weight.abs())))
        for op, rounding in ((kernels.linear, EPSILON[dtype]), (kernels.lm_head, FLOAT32)):
            error = (op(x, weight).double() - exact).abs()
            assert (error <= 1.01 * rounding * exact.abs() + k * FLOAT32 * magnitude).all(), (
                f"{op.__name__}, {rows} rows"
            )
        torch_error = (F.linear(x, weight).double() - exact).abs()
        assert (kernels.linear(x, weight).double() - exact).abs().mean() <= 1.01 * torch_error.mean()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_qkv(kernels: Backend, dtype: torch.dtype) -> None:
    """A row's query, key and value equal the results of the separate ops, for any number of rows in the call."""
    heads, kv_heads, size = sized((28, 4, 128), (3, 1, 32))
    spec = layer_spec(heads, kv_heads, size, qkv_bias=True)
    mixer = attention_of(spec)
    weights = move(make_layers(Served(kernels, dtype), spec, hidden=HIDDEN)[0].mixer, DEVICE)
    x, slots = random(ROWS, HIDDEN, dtype=dtype), torch.arange(ROWS, device=DEVICE)
    inv_freq = 1e6 ** (-torch.arange(0, size, 2, device=DEVICE) / size)
    rotation = Rotation(*kernels.rotation(slots, inv_freq, 1.0))

    def compute(part: slice) -> tuple[Tensor, Tensor, Tensor]:
        shape = (ROWS // 16, 16, kv_heads, size)
        k_cache, v_cache = (torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in range(2))
        angles = Rotation(rotation.cosines[part], rotation.sines[part])
        q = kernels.qkv(x[part], mixer, weights, angles, k_cache, v_cache, slots[part])
        return q, k_cache.flatten(0, 1)[part], v_cache.flatten(0, 1)[part]

    everything = compute(slice(None))
    expected = project(kernels, x, mixer, weights, rotation)
    assert all(same(a, b) for a, b in zip(everything, expected, strict=True))
    for count in COUNTS:
        part = slice(sized(1000, 3), sized(1000, 3) + count)
        assert all(same(a, b[part]) for a, b in zip(compute(part), everything, strict=True)), f"{count} rows"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), sized([(28, 4, 128), (16, 8, 128), (9, 3, 64), (16, 8, 256)], [(3, 1, 32)])
)
@pytest.mark.parametrize(
    "attention", sized([{}, {"window": 1024}, {"window": 600, "soft_cap": 5.0}], [{"window": 500}]), ids=str
)
def test_decode_has_the_bits_of_prefill(
    ops: Moved, dtype: torch.dtype, heads: int, kv_heads: int, size: int, attention: dict[str, Any]
) -> None:
    """Compare whole prompts, prompts in chunks, single tokens in a batch with others, and single tokens by a CUDA
    graph.
    """
    lens = sized([1, 63, 64, 65, 511, 512, 513, 1600, 5000], [1, 65, 530])
    longest = lens[-1]
    paged = Paged(Served(ops, dtype), lens, heads, kv_heads, size, **attention)  # type: ignore[arg-type]
    whole = [paged.whole(i) for i in range(len(lens))]
    assert all(out.isfinite().all() for out in whole)
    for step, first in ((1, longest - sized(10, 2)), (7, longest - sized(500, 14)), (sized(600, 265), 0)):
        chunks = [(len(lens) - 1, start, min(start + step, longest)) for start in range(first, longest, step)]
        for (_, start, end), out in zip(chunks, paged.attend(chunks), strict=True):
            assert same_bits(out, whole[-1][start:end]), f"tokens {start} to {end}"
    last = [(i, n - 1, n) for i, n in enumerate(lens)]
    q, batch = paged.batch(last)
    tables = F.pad(batch.block_tables, (0, 512 - batch.block_tables.shape[1]))
    replayed = dataclasses.replace(batch, context_lens=[8192] * len(lens), block_tables=tables, lens=torch.tensor(lens))
    for each in (batch, replayed):
        found = ops.paged_attention(q, paged.k_cache, paged.v_cache, each, size**-0.5, **attention)
        assert all(same_bits(row, out[-1]) for row, out in zip(found, whole, strict=True))
    assert all(same_bits(paged.attend([chunk])[0], whole[chunk[0]][-1:]) for chunk in last)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_next_tokens_are_those_of_its_steps(kernels: Backend, dtype: torch.dtype) -> None:
    repeats = sized(60, 5)
    hidden = random(5 * repeats, HIDDEN, dtype=dtype)
    weight = random(VOCABULARY, HIDDEN, dtype=dtype, scale=HIDDEN**-0.5, seed=1)
    asked: Wanted = move(wanted(torch.tensor([SAMPLE, GREEDY, VOCABULARY - 1, 0, SAMPLE] * repeats)), DEVICE)
    expected = step_by_step(kernels, hidden, weight, asked)
    assert expected[2].all() and expected[1].isfinite().all() and len(expected[0].unique()) > repeats
    for rows in (slice(None), slice(7, 8), slice(0, 16), *sized((slice(40, 105), slice(20, 277)), (slice(3, 22),))):
        columns: dict[str, Any] = {field.name: getattr(asked, field.name)[rows] for field in dataclasses.fields(Wanted)}
        found = kernels.next_tokens(hidden, weight, Wanted(**columns))
        assert all(same(a, b[rows]) for a, b in zip(found, expected, strict=True)), rows
