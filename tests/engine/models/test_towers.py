"""Models with vision towers agree with transformers: towers, positions and logits."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from mixers import attention_of
from proofs import proves
from safetensors.torch import load_file, save_file
from torch import Tensor
from vision_models import GRIDS, MODELS, PLACEHOLDER, make_vision_model, random_patches

from trueroll.engine.models.decoder import Decoder, ModelInput
from trueroll.engine.models.loader import check_checkpoint, copy_checkpoint, read_config
from trueroll.engine.models.tower import EmbeddedRows, Tower
from trueroll.kernels import towers
from trueroll.kernels.autograd import GradientTowerOps
from trueroll.kernels.contract import AttentionBatch, Pages, StateBatch
from trueroll.kernels.families import describe
from trueroll.kernels.media import ImageSpan, axis_positions, span_ends
from trueroll.kernels.selection import select_backend
from trueroll.kernels.specs import Activation, DecoderSpec, DeltaNetSpec, TowerSpec
from trueroll.kernels.towers import BackendTowerOps, Grid, TowerOps, TowerParts, finish, make_tower

from ..drive import tokens

CPU = torch.device("cpu")
# The limits of errors, relative to the largest value. The delta nets of the random Qwen3.5 turn a change of the rows by
# 1e-6 into a change of the logits by 1.6e-5. The logits differ from float64 by 2.0e-5 (those of transformers by
# 0.6e-5), and for Qwen3.5-MoE by 0.7e-5 (those of transformers by 1.7e-5).
TOWER_LIMIT, LOGITS_LIMITS = 1e-5, {"qwen3_5": 3e-5, "qwen3_5_moe": 3e-5}
# The prefixes of names on the hub, where they differ from those that transformers saves.
HUB = {"gemma3": {"vision_tower.": "vision_tower.vision_model."}}


def load(folder: Path, dtype: torch.dtype = torch.float32, backend: str = "auto", tower: bool = True) -> Decoder:
    spec = describe(read_config(folder)).serving(mtp=False, tower=tower)
    ops = select_backend(backend, CPU, dtype, spec).ops
    model = Decoder(spec, ops, partial(torch.empty, dtype=dtype))
    ignored = model.ignored_tensors() | model.tied_tensors().keys()
    checkpoint = check_checkpoint(folder, model.checkpoint_tensors(), ignored, spec.own_name, model.stack_parts())
    copy_checkpoint(checkpoint, model.checkpoint_tensors())
    return model


def tower_of(model: Decoder) -> TowerSpec:
    assert model.spec.tower is not None
    return model.spec.tower


def images_of(family: str, tower: TowerSpec) -> list[tuple[Tensor, Grid]]:
    return [
        (random_patches(rows * columns, tower.patch_values, seed), (rows, columns))
        for seed, (rows, columns) in enumerate(GRIDS[family])
    ]


def of(model: Decoder) -> Tower:
    assert model.tower is not None
    return model.tower


def encode(model: Decoder, patches: Tensor, grid: Grid) -> Tensor:
    with torch.inference_mode():
        return finish(of(model).encode(patches.to(model.dtype), grid))


def pixels_for_transformers(tower: TowerSpec, patches: Tensor, grid: Grid) -> dict[str, Tensor]:
    """Return the arguments of transformers for one image."""
    rows, columns = grid
    if not tower.pooled:
        return dict(pixel_values=patches, image_grid_thw=torch.tensor([[1, rows, columns]]))
    side, merge, size = tower.patch_size, tower.merge, tower.channels
    blocks = patches.view(rows // merge, columns // merge, merge, merge, size, side, side)
    return dict(pixel_values=blocks.permute(4, 0, 2, 5, 1, 3, 6).reshape(1, size, rows * side, columns * side))


@cache
def models_of(family: str, folder: Path) -> tuple[Any, Decoder]:
    """Return the model of transformers, and ours, with the same weights."""
    folder.mkdir(parents=True, exist_ok=True)
    make_vision_model(family, folder)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return theirs.eval(), load(folder)


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Decoder]:
    family = request.param
    return family, *models_of(family, tmp_path_factory.getbasetemp() / "vision" / family)


for_families = pytest.mark.parametrize("pair", MODELS, indirect=True)


def rows_of_transformers(model: Any, tower: TowerSpec, patches: Tensor, grid: Grid) -> Tensor:
    found = model.model.get_image_features(**pixels_for_transformers(tower, patches, grid))
    parts = [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]
    return torch.cat([torch.cat(list(part)) for part in parts], -1).reshape(tower.num_tokens(*grid), -1)


def tower_error(theirs: Any, ours: Decoder, family: str) -> float:
    """Return the largest error of the rows of the family's images, relative to the largest value of an image."""
    tower, errors = tower_of(ours), []
    for patches, grid in images_of(family, tower):
        with torch.inference_mode():
            expected = rows_of_transformers(theirs, tower, patches, grid)
        rows = encode(ours, patches, grid)
        assert rows.shape == expected.shape == (tower.num_tokens(*grid), tower.row_size)
        assert expected.abs().mean() > 0.01, "premise: the rows are not zeros"
        errors.append(float((rows - expected).abs().max() / expected.abs().max()))
    return max(errors)


@for_families
def test_towers_agree_with_transformers(pair: tuple[str, Any, Decoder]) -> None:
    family, theirs, ours = pair
    assert tower_error(theirs, ours, family) <= TOWER_LIMIT


def raster(spec: TowerSpec, grid: Grid) -> Tensor:
    rows, columns = (torch.arange(size) for size in grid)
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij")).flatten(1)


def tanh_for_erf(ops: BackendTowerOps, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    return ops.backend.gate_mul(gate, up, "gelu_tanh" if activation == "gelu" else activation)


@pytest.mark.parametrize(
    ("pair", "part", "broken"),
    [
        ("qwen3_vl", "patch_places", raster),
        ("qwen3_5", "BackendTowerOps.gate_mul", tanh_for_erf),
        ("qwen2_5_vl", "_window_order", lambda spec, grid: None),
        ("gemma3", "_mean", lambda x: x[:, 0]),
    ],
    indirect=["pair"],
)
def test_a_broken_tower_is_noticed(
    pair: tuple[str, Any, Decoder], part: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, theirs, ours = pair
    monkeypatch.setattr(f"trueroll.kernels.towers.{part}", broken)
    assert tower_error(theirs, ours, family) > 10 * TOWER_LIMIT


def test_a_deepstack_layer_too_late_is_noticed(tmp_path: Path) -> None:
    theirs, ours = models_of("qwen3_vl", tmp_path)
    of(ours)._spec = replace(tower_of(ours), deepstack=(0, 1, 3))
    assert tower_error(theirs, ours, "qwen3_vl") > 10 * TOWER_LIMIT


def trained_tower(model: Any, spec: DecoderSpec, ops: TowerOps, dtype: torch.dtype) -> TowerParts:
    """Return the tower of a model of transformers, with its parameters as weights."""
    assert spec.tower is not None
    named = {spec.own_name(name): parameter for name, parameter in model.named_parameters()}

    def get(name: str, *shape: int) -> Tensor:
        assert named[name].shape == shape, name
        return named[name].to(dtype)

    return make_tower(spec.tower, ops, get)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@for_families
def test_worker_and_trainer_compute_the_same_bits(
    pair: tuple[str, Any, Decoder], dtype: torch.dtype, backend: str, tmp_path: Path
) -> None:
    """A worker pauses between the layers of an image and encodes another one meanwhile."""
    family, theirs, _ = pair
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path, dtype, backend)
    tower, images = tower_of(ours), images_of(family, tower_of(ours))
    trained = trained_tower(theirs, ours.spec, GradientTowerOps(ours.ops), dtype)
    with torch.no_grad():
        patches = torch.cat([patches for patches, _ in images]).to(dtype)
        expected = finish(towers.encode(tower, trained, patches, [grid for _, grid in images]))
        steps = [of(ours).encode(patches.to(dtype), grid) for patches, grid in images]
        for _ in range(tower.num_layers):
            for step in steps:
                next(step)
        found = torch.cat(list(map(finish, steps)))
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@proves("gradients", backend="cpu", dtype="float32", vision=True)
@for_families
def test_gradients_of_a_tower_agree_with_transformers(pair: tuple[str, Any, Decoder]) -> None:
    family, theirs, ours = pair
    tower, spec = tower_of(ours), ours.spec
    patches, grid = images_of(family, tower)[0]
    weights = torch.randn(tower.num_tokens(*grid), tower.row_size, generator=torch.Generator().manual_seed(1))
    parameters = [one for name, one in theirs.named_parameters() if is_of_tower(spec, name)]
    exact = copy.deepcopy(theirs).double()
    exact_parameters = [one for name, one in exact.named_parameters() if is_of_tower(spec, name)]
    exact_rows = rows_of_transformers(exact, tower, patches.double(), grid)
    expected = torch.autograd.grad((exact_rows * weights.double()).sum(), exact_parameters)
    trained = trained_tower(theirs, spec, GradientTowerOps(ours.ops), torch.float32)
    rows = finish(towers.encode(tower, trained, patches, [grid]))
    found = torch.autograd.grad((rows * weights).sum(), parameters)
    scale = max(gradient.norm() for gradient in expected)
    assert sum(gradient.norm() > 1e-3 * scale for gradient in expected) > len(expected) // 2 > 10, "premise"
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm() + 1e-6 * scale


def is_of_tower(spec: DecoderSpec, name: str) -> bool:
    return spec.serving(mtp=False, tower=False).own_name(name) is None


@for_families
def test_the_number_of_threads_changes_no_bit_of_a_tower(pair: tuple[str, Any, Decoder]) -> None:
    family, _, ours = pair
    image, before = images_of(family, tower_of(ours))[0], torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        expected = encode(ours, *image)
        torch.set_num_threads(1)
        assert torch.equal(encode(ours, *image), expected)
    finally:
        torch.set_num_threads(before)


def prompt_with_images(family: str, tower: TowerSpec) -> tuple[np.ndarray, list[ImageSpan]]:
    """Return the tokens of a prompt with all images of the family, and the spans of the images."""
    parts, spans, length = [], list[ImageSpan](), 0
    for number, (rows, columns) in enumerate(GRIDS[family]):
        parts.append(tokens(5 + 3 * number, seed=number))
        length += len(parts[-1])
        spans.append(ImageSpan(length, rows // tower.merge, columns // tower.merge))
        parts.append(np.full(spans[-1].end - length, PLACEHOLDER, np.int32))
        length = spans[-1].end
    return np.concatenate([*parts, tokens(9, seed=9)]), spans


def forward(model: Decoder, ids: np.ndarray, spans: list[ImageSpan], rows: Tensor | None) -> Tensor:
    """Return the hidden states of a prompt with images, computed in one step. `rows`: None without images."""
    length = len(ids)
    tables = torch.arange(-(-length // 16))[None]
    ends = span_ends(length, spans) if tower_of(model).sees_span else None
    page = Pages(torch.arange(length), AttentionBatch([0, length], [length], tables, ends=ends))
    memories: list[tuple[Tensor, Tensor]] = []
    for layer in model.spec.layers:
        if isinstance(layer.mixer, DeltaNetSpec):
            states = torch.zeros(1, *layer.mixer.state_shape)
            memories.append((states, torch.zeros(1, *layer.mixer.tail_shape, dtype=model.dtype)))
        else:
            mixer = attention_of(layer)
            shape = tables.numel(), 16, mixer.num_kv_heads, mixer.head_dim
            memories.append((torch.zeros(shape, dtype=model.dtype), torch.zeros(shape, dtype=model.dtype)))
    has_axes = any(rotation.axes for rotation in model.spec.rotations)
    positions = axis_positions(length, spans) if has_axes else torch.arange(length)
    places = torch.cat([torch.arange(0), *(torch.arange(span.start, span.end) for span in spans)])
    states = StateBatch([0, length], torch.tensor([-1]), torch.tensor([0])) if model.spec.recurrent else None
    given = torch.from_numpy(ids).long(), positions, memories, [page] * len(memories), states
    with torch.inference_mode():
        return model.forward(ModelInput(*given, embedded=None if rows is None else EmbeddedRows(places, rows))).hidden


@for_families
def test_positions_and_logits_agree_with_transformers(pair: tuple[str, Any, Decoder]) -> None:
    family, theirs, ours = pair
    tower, limit = tower_of(ours), LOGITS_LIMITS.get(family, 1e-5)
    ids, spans = prompt_with_images(family, tower)
    images, given = images_of(family, tower), torch.from_numpy(ids).long()[None]
    each = [pixels_for_transformers(tower, *image) for image in images]
    types = (given == PLACEHOLDER).int()
    inputs = {name: torch.cat([one[name] for one in each]) for name in each[0]}
    if "image_grid_thw" in inputs:
        expected = theirs.model.get_rope_index(given, mm_token_type_ids=types, image_grid_thw=inputs["image_grid_thw"])
        assert torch.equal(axis_positions(len(ids), spans), expected[0][:, 0])
        inputs["mm_token_type_ids"] = types
    else:
        inputs["token_type_ids"] = types
    with torch.inference_mode():
        expected = theirs(input_ids=given, **inputs).logits[0]
        rows = torch.cat([encode(ours, *image) for image in images])
        found = ours.ops.lm_head(forward(ours, ids, spans, rows), ours.head)
    assert (found - expected).abs().max() <= limit * expected.abs().max()
    assert (expected.topk(2).values.diff().abs() > 100 * limit * expected.abs().max()).any(), "premise"


@proves("transformers", backend="cpu", dtype="float32", vision=True)
@for_families
def test_text_alone_agrees_with_transformers(pair: tuple[str, Any, Decoder], tmp_path: Path) -> None:
    family, theirs, _ = pair
    theirs.save_pretrained(tmp_path)
    ours, ids, limit = load(tmp_path, tower=False), tokens(40, seed=3), LOGITS_LIMITS.get(family, 1e-5)
    assert ours.tower is None
    with torch.inference_mode():
        expected = theirs(input_ids=torch.from_numpy(ids).long()[None]).logits[0]
        found = ours.ops.lm_head(forward(ours, ids, [], None), ours.head)
    assert (found - expected).abs().max() <= limit * expected.abs().max()


@for_families
def test_checkpoints_as_the_hub_has_them(pair: tuple[str, Any, Decoder], tmp_path: Path) -> None:
    family, theirs, ours = pair
    theirs.save_pretrained(tmp_path)
    tensors, prefixes = load_file(tmp_path / "model.safetensors"), HUB.get(family, {})
    renamed = {}
    for name, tensor in tensors.items():
        beginning = next((one for one in prefixes if name.startswith(one)), "")
        renamed[prefixes.get(beginning, "") + name.removeprefix(beginning)] = tensor
    save_file(renamed, tmp_path / "model.safetensors")
    if prefixes:
        assert renamed.keys() != tensors.keys(), "premise"
    found, expected = load(tmp_path).checkpoint_tensors(), ours.checkpoint_tensors()
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        one, other = (w if isinstance(w, Tensor) else w.to_dense() for w in (weight, expected[name]))
        assert torch.equal(one, other), name


@proves("pushes", backend="cpu", dtype="float32", vision=True)
@for_families
def test_trainers_push_the_names_of_the_worker(pair: tuple[str, Any, Decoder]) -> None:
    _, theirs, ours = pair
    own_name = ours.spec.own_name
    names = {own_name(name) for name in theirs.state_dict()} - ours.tied_tensors().keys()
    assert names == ours.checkpoint_tensors().keys()


@for_families
def test_without_its_tower_a_model_is_served_as_text(pair: tuple[str, Any, Decoder]) -> None:
    _, theirs, ours = pair
    spec = ours.spec.serving(mtp=False, tower=False)
    assert spec.served_tower is None
    model = Decoder(spec, ours.ops, partial(torch.empty, device="meta"))
    names = {spec.own_name(name) for name in theirs.state_dict()} - {None} - model.tied_tensors().keys()
    assert names == model.checkpoint_tensors().keys()
    assert len(names) < len(ours.checkpoint_tensors())
