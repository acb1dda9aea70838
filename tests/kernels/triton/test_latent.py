"""Latent attention in Triton's interpreter: against float64, the same bits from every kernel, tokens that are not
finite, and a model that is served and trained.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tiny import make_tiny_model
from trueroll.kernels.training import align, token_log_probs
from trueroll.kernels.triton.attention import PARTITION, groups_of, paged_attention
from trueroll.kernels.triton.rows import write_kv

from ...engine.drive import make_engine, score, tokens
from ..backends import Served
from ..inputs import Paged, same_bits

OPS: Any = SimpleNamespace(paged_attention=paged_attention, write_kv=write_kv)


def sequences_of(lens: list[int], heads: int, size: int, latent: int) -> Paged:
    return Paged(Served(OPS, torch.bfloat16), lens, heads, 1, size, latent=latent)


def attend_in_a_graph(sequences: Paged, chunks: list[tuple[int, int, int]]) -> Tensor:
    q, batch = sequences.batch(chunks)
    batch = dataclasses.replace(
        batch, context_lens=[2 * PARTITION] * len(chunks), lens=torch.tensor(batch.context_lens)
    )
    return paged_attention(q, sequences.k_cache, sequences.v_cache, batch, sequences.size**-0.5)


@pytest.mark.parametrize(("heads", "size", "latent", "length"), [(1, 48, 32, 520), (130, 48, 32, 9), (2, 576, 512, 40)])
def test_chunks_single_queries_and_graphs_give_the_bits_of_the_whole(
    heads: int, size: int, latent: int, length: int
) -> None:
    """130 heads do not fit one tile, and 520 tokens have two partitions."""
    sequences = sequences_of([length], heads, size, latent)
    whole = sequences.whole(0)
    assert whole.shape == (length, heads, latent)
    middle = length // 2
    for start, end in ((0, middle), (middle, length)):
        assert same_bits(sequences.attend([(0, start, end)])[0], whole[start:end])
    singles = [(0, end - 1, end) for end in (1, middle, length)]
    for found in (torch.cat(sequences.attend(singles)), attend_in_a_graph(sequences, singles)):
        assert same_bits(found, whole[[start for _, start, _ in singles]])
    q, k = (x[0].double().transpose(0, 1) for x in (sequences.q, sequences.k))
    scores = (q @ k.mT * size**-0.5).masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf)
    exact = (scores.softmax(-1) @ k[..., :latent]).transpose(0, 1)
    assert (whole.double() - exact).abs().mean() < 2.0**-8 * exact.abs().mean()


def test_groups_have_equal_sizes() -> None:
    assert [groups_of(heads) for heads in (1, 20, 64, 65, 96, 128, 130)] == [1, 1, 1, 5, 2, 2, 5]


@pytest.mark.parametrize("element", [3, 45])
def test_a_token_that_is_not_finite_reaches_only_queries_that_see_it(element: int) -> None:
    """The element lies in the latent row, or in the rotated key."""
    sequences = sequences_of([20], 2, 56, 40)
    before = sequences.whole(0)
    sequences.k[0][12, 0, element] = torch.inf
    sequences.write(0)
    after = sequences.whole(0)
    assert same_bits(after[:12], before[:12]) and after[12:].isnan().all()
    assert sequences.k_cache[..., :40].flatten(0, 1)[sequences.slots(0)].isfinite().all()


def test_a_model_is_served_and_trained_with_the_same_bits(tmp_path: Path) -> None:
    sizes = dict(num_hidden_layers=1, vocab_size=64, first_k_dense_replace=1, num_attention_heads=2)
    folder = make_tiny_model("deepseek_v3", tmp_path, dtype="bfloat16", num_key_value_heads=2, **sizes)
    ids = tokens(9, vocab_size=64)
    found = score(make_engine(folder, backend="triton", num_blocks=16, block_size=2), ids)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    align(model, "triton")
    trained = token_log_probs(model, torch.from_numpy(ids)[None])[0, 1:]
    assert np.array_equal(trained.detach().numpy().view(np.int32), found.view(np.int32))
    trained.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
    reference = score(make_engine(folder, backend="reference", dtype="bfloat16"), ids)
    assert np.abs(found - reference).max() < 0.2
