"""Kernels compiled before the first step: every number of rows needs only specializations that were compiled for the
prepared numbers of rows.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from matrix import thinned

from trueroll.kernels.contract import ExpertsWeights
from trueroll.kernels.specs import ExpertsSpec, RouterSpec
from trueroll.kernels.triton import backend, experts, products
from trueroll.kernels.triton.launch import recording

MOST = 3072


@pytest.mark.parametrize(
    ("hidden", "inner", "heads", "kv_heads"),
    [(3584, 18944, 3584, 512), (1024, 3072, 2048, 1024), (576, 1536, 576, 192), (256, 520, 256, 64)],
)
@thinned(lambda hidden, **_: hidden in (3584, 256))
def test_the_numbers_of_rows_that_are_prepared_need_all_tiles(
    hidden: int, inner: int, heads: int, kv_heads: int
) -> None:
    """The models are Qwen2.5-7B, Qwen3-0.6B, SmolLM2-135M, and a small model with a tile for 2945 to 3008 rows."""
    empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    down, gate, o = empty(hidden, inner), empty(inner, hidden), empty(hidden, heads)
    qkv = empty(heads, hidden), empty(kv_heads, hidden), empty(kv_heads, hidden)

    def compute(rows: int) -> None:
        x = empty(rows, hidden)
        products.qkv_parts(x, qkv)
        products.project_back(empty(rows, heads), o, x)
        products.project_back(products.gate_up(x, gate, gate, "silu"), down, x)

    with recording() as launches:
        for rows in range(1, MOST + 1):
            compute(rows)
    needed = set(launches)
    assert len(needed) > 12, "premise: several tiles"
    assert set(backend.forms_of(compute, MOST)) == needed


@pytest.mark.parametrize(
    ("spec", "hidden", "tiles"),
    [
        (ExpertsSpec(128, 8, 768), 2048, 4),
        (ExpertsSpec(32, 4, 2880, activation="clamped_silu", bias=True), 2880, 4),
        (ExpertsSpec(300, 77, 64, router=RouterSpec("softmax")), 640, 4),
        (ExpertsSpec(5, 4, 33), 99, 1),
    ],
    ids=["Qwen3-30B-A3B", "gpt-oss-20b", "a tile for 32 to 62 rows", "odd"],
)
@thinned(lambda hidden, **_: hidden in (2880, 99))
def test_the_numbers_of_rows_that_are_prepared_need_all_tiles_of_experts(
    spec: ExpertsSpec, hidden: int, tiles: int
) -> None:
    """The tensors have no memory, so the host cannot read any value. The cases include rows that are processed in
    parts.
    """
    empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    count, inner = spec.num_experts, spec.intermediate_size
    biases = (empty(count, 2 * inner), empty(count, hidden)) if spec.bias else (None, None)
    gate_up, down = empty(count * 2 * inner, hidden), empty(count * hidden, inner)
    weights = ExpertsWeights(empty(count, hidden), None, gate_up, biases[0], down, biases[1])

    def compute(rows: int) -> None:
        chosen, gates = backend.route(empty(rows, count), spec)
        backend.experts(empty(rows, hidden), spec, weights, chosen, gates)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "MOST_MADE", 4 * spec.top_k * hidden * 1500)
        for most in (MOST, 61, 7):
            with recording() as launches:
                for rows in range(1, most + 1):
                    compute(rows)
            assert set(backend.forms_of(compute, most)) == set(launches), most
            found = {dict(launch.constants).get("TOKENS") for launch in launches} - {None}
            assert most < MOST or len(found) == tiles, "premise"


def test_no_more_rows_are_prepared_than_a_step_may_have() -> None:
    for most in (1, 15, 16, 100, 8192):
        seen: list[int] = []
        assert backend.forms_of(seen.append, most) == []
        assert seen[0] == 1 and seen[-1] == most and seen == sorted(set(seen))
    assert len(seen) == 8192 // 16 + 1
