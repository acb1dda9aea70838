"""Model input other than text: rows of embeddings, and positions with several axes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from mixers import attention_of
from torch import Tensor

from tiny import make_tiny_model
from trueroll.engine.models.decoder import Decoder, EmbeddedRows, ModelInput
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
    model = executor_of(make_engine(make_tiny_model("gemma3", tmp_path), dtype=dtype, backend=backend))._runner.model
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
            assert all(torch.equal(f[:, pair], e[:, pair]) for f, e in zip(found, expected, strict=True))


def test_text_beside_an_image_rotates_as_in_transformers(tmp_path: Path, backend: str) -> None:
    """The text model of Qwen3-VL has the weights of Qwen3.

    Its input contains the positions and embeddings of an image.
    """
    folder = make_tiny_model("qwen3", tmp_path)
    own = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sections = dict(rope_type="default", rope_theta=1e6, mrope_section=[4, 2, 2], mrope_interleaved=True)
    config: dict[str, Any] = {**own.config.to_dict(), "rope_parameters": sections, "model_type": "qwen3_vl_text"}
    config |= dict(_attn_implementation="eager")
    theirs = transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLTextModel(
        transformers.Qwen3VLTextConfig(**config)
    ).eval()
    theirs.load_state_dict(own.model.state_dict())
    model = executor_of(make_engine(folder, backend=backend))._runner.model
    inv_freq = tuple(theirs.rotary_emb.inv_freq.tolist())
    in_turn = tuple(1 if i % 3 == 1 and i < 6 else 2 if i % 3 == 2 and i < 6 else 0 for i in range(len(inv_freq)))
    model.spec = replace(model.spec, rotations=(RotationSpec(inv_freq, axes=in_turn),))
    model._inv_freqs = [torch.tensor(inv_freq)]
    before, height, width = 10, 4, 3
    grid = torch.stack((torch.zeros(12), torch.arange(12) // width, torch.arange(12) % width)).long() + before
    rest = torch.arange(LEN - before - height * width) + before + max(height, width)
    positions = torch.cat((torch.arange(before).expand(3, -1), grid, rest.expand(3, -1)), 1)
    places = torch.arange(before, before + height * width)
    rows = torch.randn(len(places), model.spec.hidden_size)
    x = own.model.embed_tokens(torch.from_numpy(tokens(LEN)).long()).index_copy(0, places, rows)
    with torch.inference_mode():
        expected = theirs(inputs_embeds=x[None], position_ids=positions[:, None]).last_hidden_state[0]
    found = forward(model, positions, EmbeddedRows(places, rows))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    plain = forward(model, torch.arange(LEN), EmbeddedRows(places, rows))
    assert (plain - expected).abs().max() > 1e-2 * expected.abs().max(), "premise: the positions matter"
