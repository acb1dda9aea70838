"""Model input other than text: rows of embeddings, and positions with several axes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mixers import attention_of
from torch import Tensor
from vision_models import make_vision_model

from trueroll.engine.models.decoder import Decoder, ModelInput
from trueroll.engine.models.tower import EmbeddedRows
from trueroll.kernels.contract import AttentionBatch, Pages
from trueroll.kernels.layer import turn
from trueroll.kernels.specs import RotationSpec

from ..drive import executor_of, make_engine, tokens

LEN = 50
AXES = (0, 1, 2, 0, 1, 2, 0, 0)


def forward(model: Decoder, positions: Tensor, embedded: EmbeddedRows | None = None) -> Tensor:
    """Return the hidden states of a prompt of `LEN` tokens, computed in one step."""
    tables = torch.arange(-(-LEN // 16))[None]
    mixers = [attention_of(layer) for layer in model.spec.layers]
    shapes = [(tables.numel(), 16, mixer.num_kv_heads, mixer.head_dim) for mixer in mixers]
    caches = [(torch.zeros(s, dtype=model.dtype), torch.zeros(s, dtype=model.dtype)) for s in shapes]
    pages = [Pages(torch.arange(LEN), AttentionBatch([0, LEN], [LEN], tables))] * len(caches)
    ids = torch.from_numpy(tokens(LEN)).long()
    with torch.inference_mode():
        return model.forward(ModelInput(ids, positions, caches, pages, embedded=embedded)).hidden


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_replace_embeddings(tmp_path: Path, dtype: str, backend: str) -> None:
    """The family scales the embeddings of text tokens, but not rows given as embeddings."""
    folder = make_vision_model("gemma3", tmp_path)
    model = executor_of(make_engine(folder, dtype=dtype, backend=backend, max_images=1))._runner.model
    positions, ids = torch.arange(LEN), torch.from_numpy(tokens(LEN)).long()
    plain = forward(model, positions)
    places = torch.tensor([20, 7, 21])
    table = model.ops.embedding(ids[places], model.embed)
    scale = torch.tensor(model.spec.embed_scale).to(model.dtype)
    assert scale != 1, "premise"
    assert torch.equal(forward(model, positions, EmbeddedRows(places, table * scale)), plain)
    others = forward(model, positions, EmbeddedRows(places, table))
    is_same = (others == plain).all(1)
    assert is_same[:7].all() and not is_same[[7, 20, 21]].any()


def test_equal_positions_on_all_axes_have_the_bits_of_text(tiny_llama: Path, backend: str) -> None:
    model = executor_of(make_engine(tiny_llama, backend=backend))._runner.model
    model.spec = replace(model.spec, rotations=tuple(replace(r, axes=AXES) for r in model.spec.rotations))
    assert {len(rotation.inv_freq) for rotation in model.spec.rotations} == {len(AXES)}, "premise"
    plain = forward(model, torch.arange(LEN))
    assert torch.equal(forward(model, torch.arange(LEN).expand(3, -1)), plain)
    rows = torch.stack((torch.arange(LEN), torch.arange(LEN), torch.arange(LEN).clamp(max=30)))
    is_same = (forward(model, rows) == plain).all(1)
    assert is_same[:31].all() and not is_same[31:].any()


def test_each_pair_rotates_by_its_axis(tiny_llama: Path, backend: str) -> None:
    ops = executor_of(make_engine(tiny_llama, backend=backend))._runner.model.ops
    inv_freq = torch.rand(len(AXES))
    positions = torch.randint(0, 1000, (3, LEN))
    for axes in (AXES, ()):
        found = turn(ops, RotationSpec(tuple(inv_freq.tolist()), 1.2, axes), inv_freq, positions)
        for pair, axis in enumerate(axes or [0] * len(AXES)):
            expected = ops.rotation(positions[axis], inv_freq, 1.2)
            assert all(torch.equal(f[:, pair], e[:, pair]) for f, e in zip(found[:2], expected, strict=True))
