"""The tests of `tests/kernels` for every backend, run on a GPU: accuracy, joined ops, the contract, and delta nets.

The merge of adapters into weights is also tested: the bits must equal those of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from trueroll.kernels.specs import Pieces

from ..kernels import test_accuracy as accuracy
from ..kernels import test_contract as contract
from ..kernels import test_joined_ops as joined
from ..kernels.backends import Served
from ..kernels.delta_nets import SPECS, THIN
from ..kernels.test_accuracy import *  # noqa: F403
from ..kernels.test_contract import (  # noqa: F401
    FLOAT32_OPS,
    TYPED_OPS,
    RowOp,
    test_nan_reaches_only_queries_with_the_token_in_their_window,
    test_the_contract_tests_can_fail,
    test_tokens_behind_the_window_of_a_chunk_are_never_seen,
)
from ..kernels.test_joined_ops import *  # noqa: F403
from ..kernels.test_merge import *  # noqa: F403
from ..kernels.test_recurrence import *  # noqa: F403
from ..kernels.test_recurrence import Recurrent
from .moved import sized

OPS = TYPED_OPS | FLOAT32_OPS
ROW_CHECKS = (
    contract.test_a_row_does_not_depend_on_how_many_share_the_call_or_where_it_stands,
    contract.test_a_row_does_not_depend_on_what_the_others_hold,
    partial(contract.test_a_row_does_not_depend_on_threads_or_its_place_in_memory, two_threads=None),
)
PLAIN = dict(heads=6, kv_heads=2, size=64)
HEADS = ((6, 2, 64), (4, 4, 80), (9, 1, 16), (28, 4, 128), (3, 3, 96), (4, 2, 256), (50, 1, 48))
OTHER_CHECKS = (
    partial(contract.test_a_product_does_not_depend_on_the_number_of_rows, threads=1, two_threads=None),
    *(
        partial(contract.test_attention_does_not_depend_on_block_size, block_size=n, **PLAIN, attention=attention)
        for n, attention in ((2, {}), (24, {}), (512, {}), (24, {"window": 140, "sinks": True}))
    ),
    *(
        partial(contract.test_attention_does_not_depend_on_block_sharing, block_size=n, window=window)
        for n, window in ((2, None), (24, None), (256, None), (16, 60), (24, 299))
    ),
    *(
        partial(contract.test_attention_does_not_depend_on_a_place_in_memory, place=place)
        for place in (contract.shifted, contract.strided)
    ),
    contract.test_attention_never_reads_what_others_left_behind,
    contract.test_attention_of_a_sequence_does_not_depend_on_what_the_others_hold,
    contract.test_attention_does_not_depend_on_later_tokens_in_the_call,
    contract.test_the_sign_of_a_zero_does_not_depend_on_later_tokens_in_the_call,
    partial(contract.test_experts_do_not_depend_on_the_number_of_rows, threads=1, two_threads=None),
    contract.test_a_row_with_nan_goes_to_experts_that_exist,
    contract.test_equal_scores_choose_the_lower_expert,
)


@pytest.fixture(params=sized([*SPECS.values()], [THIN]), ids=sized([*SPECS], ["thin"]))
def recurrent(request: pytest.FixtureRequest, served: Served) -> Recurrent:
    return Recurrent(served.ops, served.dtype, request.param, most=sized(200, 40))


def name_of(check: Callable[..., None]) -> str:
    function = check.func if isinstance(check, partial) else check
    return function.__name__.removeprefix("test_")


# Eleven tests have separate cases in this file, because the original cases name backends that run on a CPU.


@pytest.mark.parametrize("with_", joined.WITH)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), HEADS)
def test_qkv(served: Served, heads: int, kv_heads: int, size: int, with_: str) -> None:
    joined.test_qkv(served, heads, kv_heads, size, with_)


@pytest.mark.parametrize("with_", ["a gate", "", "a part that turns in neighbouring pairs"])
def test_qkv_with_scaled_queries(served: Served, with_: str) -> None:
    joined.test_qkv_with_scaled_queries(served, with_)


@pytest.mark.parametrize("name", joined.LAYERS)
def test_layers(served: Served, name: str) -> None:
    joined.test_layers(served, name)


@pytest.mark.parametrize("name", joined.CUTS)
def test_pieces_of_a_product_are_added_as_a_balanced_tree(served: Served, name: str) -> None:
    joined.test_pieces_of_a_product_are_added_as_a_balanced_tree(served, name)


@pytest.mark.parametrize(("k", "pieces"), [(512, Pieces(4, 128)), (560, Pieces(4, 144)), (300, Pieces(4, 112))])
def test_parts_of_a_product_add_up_to_the_whole(served: Served, k: int, pieces: Pieces) -> None:
    joined.test_parts_of_a_product_add_up_to_the_whole(served, k, pieces)


@pytest.mark.parametrize("vocab_size", [1, 17, 512, 1001, 1040, 49153])
def test_next_tokens(served: Served, vocab_size: int) -> None:
    joined.test_next_tokens(served, vocab_size)


@pytest.mark.parametrize("vocab_size", [1, 17, 1001, 49153])
def test_next_token_statistics(served: Served, vocab_size: int) -> None:
    joined.test_next_token_statistics(served, vocab_size)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), HEADS)
def test_attention(served: Served, heads: int, kv_heads: int, size: int) -> None:
    accuracy.test_attention(served, heads, kv_heads, size)


@pytest.mark.parametrize("window", [None, 1, 2, 100, 128])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_attention_with_window_and_soft_cap(served: Served, window: int | None, soft_cap: float | None) -> None:
    accuracy.test_attention_with_window_and_soft_cap(served, window, soft_cap)


@pytest.mark.parametrize("check", ROW_CHECKS, ids=name_of)
@pytest.mark.parametrize("name", OPS)
def test_contract(served: Served, name: str, check: Callable[[RowOp], None], two_threads: None) -> None:
    check(OPS[name](served))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "attention"),
    [(*heads, {}) for heads in HEADS] + [(6, 2, 64, each) for each in contract.ATTENTION],
)
def test_attention_company(served: Served, heads: int, kv_heads: int, size: int, attention: dict[str, Any]) -> None:
    contract.test_attention_does_not_depend_on_chunks_or_company(served, heads, kv_heads, size, attention)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), HEADS)
@pytest.mark.parametrize("attention", [{}, {"window": 60}, {"window": 250, "soft_cap": 3.0, "sinks": True}])
def test_attention_spans(served: Served, heads: int, kv_heads: int, size: int, attention: dict[str, Any]) -> None:
    contract.test_attention_within_spans_does_not_depend_on_chunks_or_company(served, heads, kv_heads, size, attention)


@pytest.mark.parametrize(("window", "spans"), [(None, [(0, 300)]), (None, [(3, 40), (120, 290)]), (60, [(100, 180)])])
def test_attention_of_tokens_that_see_all_of_their_span(
    served: Served, window: int | None, spans: list[tuple[int, int]]
) -> None:
    accuracy.test_attention_of_tokens_that_see_all_of_their_span(served, window, spans)


@pytest.mark.parametrize("check", OTHER_CHECKS, ids=name_of)
def test_other_contract(served: Served, check: Callable[[Served], None], two_threads: None) -> None:
    check(served)
