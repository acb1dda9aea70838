"""The experts' matrices of Qwen3-VL-MoE load from both layouts of checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from vision_models import make_vision_model

from trueroll.engine.models.decoder import Decoder
from trueroll.engine.models.loader import check_checkpoint, copy_checkpoint, read_config
from trueroll.errors import ModelError
from trueroll.kernels.families import describe
from trueroll.kernels.selection import select_backend
from trueroll.kernels.shards import Shard
from trueroll.kernels.specs import Slice
from trueroll.kernels.stacks import Stack

from .test_towers import CPU, load

HIDDEN = 64
SIZES = {"rectangles": 48, "square gate_up": HIDDEN // 2, "square down": HIDDEN}
"""The experts' intermediate sizes. With a square matrix, only the other matrix of a layer tells the layout."""
LAYER = "model.language_model.layers.1.mlp.experts"


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}, file)


def transpose(tensors: dict[str, Tensor], of: str = r"experts\.\w+_proj") -> dict[str, Tensor]:
    """Bring the experts' matrices from the layout that transformers saves to that of the hub, or back."""
    return {name: each.transpose(1, 2) if re.search(of, name) else each for name, each in tensors.items()}


def dense(model: Decoder) -> dict[str, Tensor]:
    return {n: w if isinstance(w, Tensor) else w.to_dense() for n, w in model.checkpoint_tensors().items()}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_both_layouts_give_the_same_weights(size: int, tmp_path: Path) -> None:
    make_vision_model("qwen3_vl_moe", tmp_path, moe_intermediate_size=size)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored[f"{LAYER}.gate_up_proj"].shape == (8, 2 * size, HIDDEN), "premise: transformers saves this layout"
    expected = dense(load(tmp_path))
    rewrite(tmp_path, transpose)
    changed = load_file(tmp_path / "model.safetensors")
    assert not all(torch.equal(changed[name].flatten(), each.flatten()) for name, each in stored.items()), "premise"
    found = dense(load(tmp_path))
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert torch.equal(weight, expected[name]), name
    if size == SIZES["rectangles"]:
        theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
        own = theirs.state_dict()[f"{LAYER}.gate_up_proj"]
        assert torch.equal(own, stored[f"{LAYER}.gate_up_proj"]), "transformers reads the hub's layout"


def test_a_rank_reads_its_experts_from_the_layout_of_the_hub(tmp_path: Path) -> None:
    expected = dense(load(make_vision_model("qwen3_vl_moe", tmp_path)))
    rewrite(tmp_path, transpose)
    spec = describe(read_config(tmp_path))
    model = Decoder(spec, select_backend("reference", CPU, torch.float32, spec).ops, torch.empty)
    weights: dict[str, Any] = {**model.checkpoint_tensors()}
    for name, weight in weights.items():
        if isinstance(weight, Stack):
            own = Stack.new(model.ops.new_weight, torch.empty, (3, *weight.own_shape[1:]), weight.layout)
            weights[name] = Shard(own, Slice(0, 8, ((2, 3),)))
    copy_checkpoint(check_checkpoint(tmp_path, weights, model.tied_tensors(), spec.own_name), weights)
    stacks = [name for name, weight in weights.items() if isinstance(weight, Shard)]
    assert len(stacks) == 8, "premise: two stacks in each layer"
    for name in stacks:
        assert torch.equal(weights[name].to_dense(), expected[name][2:5]), name


def test_mixed_layouts_are_refused(tmp_path: Path) -> None:
    make_vision_model("qwen3_vl_moe", tmp_path)
    rewrite(tmp_path, partial(transpose, of=r"layers\.1\.mlp\.experts\.gate_up_proj"))
    with pytest.raises(ModelError, match=r"1 of the wrong shape: .*\[8, 96, 64\], found .8, 64, 96."):
        load(tmp_path)


def test_square_matrices_alone_are_refused(tmp_path: Path) -> None:
    """The matrices that would tell the layout are stored expert by expert."""
    make_vision_model("qwen3_vl_moe", tmp_path, moe_intermediate_size=HIDDEN // 2)

    def split(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        downs = {name: tensors.pop(name) for name in [*tensors] if name.endswith("experts.down_proj")}
        for name, each in downs.items():
            for expert, matrix in enumerate(each):
                tensors[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = matrix
        return tensors

    rewrite(tmp_path, split)
    with pytest.raises(
        ModelError, match=r"shape \[8, 64, 64\] are square, so it is unclear whether their rows and columns are swapped"
    ):
        load(tmp_path)


def test_other_families_have_one_layout(tmp_path: Path) -> None:
    """Transformers saves each expert of Qwen3.5-MoE by itself, and the hub has stacks."""
    expected = dense(load(make_vision_model("qwen3_5_moe", tmp_path)))
    stacks = {name.replace("model.layers", "model.language_model.layers"): each for name, each in expected.items()}

    def stack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        others = {name: each for name, each in tensors.items() if not re.search(r"experts\.\d", name)}
        assert len(others) < len(tensors), "premise"
        return others | {name: each for name, each in stacks.items() if re.search(r"experts\.\w+_proj", name)}

    rewrite(tmp_path, stack)
    found = dense(load(tmp_path))
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    rewrite(tmp_path, transpose)
    with pytest.raises(ModelError, match="8 of the wrong shape"):
        load(tmp_path)
