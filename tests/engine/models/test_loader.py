"""The loader: loading the tensors of a model folder from complete and damaged files."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from trueroll.engine.models import loader
from trueroll.engine.models.loader import check_checkpoint, copy_checkpoint, read_config
from trueroll.errors import ModelError

INDEX = "model.safetensors.index.json"


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"embed": (7, 4), "q": (4, 4), "k": (2, 4), "norm": (4,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _destinations(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return destination tensors filled with NaN. q and k are views of one fused tensor."""
    embed, fused, norm = (torch.full(shape, torch.nan, dtype=dtype) for shape in ((7, 4), (6, 4), (4,)))
    return {"embed": embed, "q": fused[:4], "k": fused[4:], "norm": norm}


def load_checkpoint(folder: Path, destinations: dict[str, torch.Tensor], ignored: Collection[str]) -> None:
    copy_checkpoint(check_checkpoint(folder, destinations, ignored), destinations)


def _save_shards(folder: Path, *shards: dict[str, torch.Tensor]) -> list[Path]:
    files = [folder / f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for file, tensors in zip(files, shards, strict=True):
        save_file(tensors, file)
    weight_map = {name: file.name for file, tensors in zip(files, shards, strict=True) for name in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return files


def _split(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    first = {name: tensors[name] for name in ("embed", "k")}
    return first, {name: tensor for name, tensor in tensors.items() if name not in first}


def _assert_loaded(destinations: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert destinations.keys() == expected.keys()
    for name, tensor in destinations.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


def _assert_untouched(destinations: dict[str, torch.Tensor]) -> None:
    assert all(tensor.isnan().all() for tensor in destinations.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_file_is_copied_into_views_with_conversion(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file(_tensors(), tmp_path / "model.safetensors")
    destinations = _destinations(dtype)
    load_checkpoint(tmp_path, destinations, ignored=())
    _assert_loaded(destinations, _tensors())
    fused = destinations["q"]._base
    assert fused is not None and torch.equal(fused, torch.cat([destinations["q"], destinations["k"]]))


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    _save_shards(tmp_path, *_split(_tensors()))
    destinations = _destinations()
    load_checkpoint(tmp_path, destinations, ignored=())
    _assert_loaded(destinations, _tensors())


def test_shards_that_transformers_wrote_equal_the_single_file(tiny_llama: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = load_file(tiny_llama / "model.safetensors")
    destinations = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    load_checkpoint(tmp_path, destinations, ignored=())
    _assert_loaded(destinations, expected)


def test_ignored_tensors_may_be_present(tmp_path: Path) -> None:
    save_file(_tensors() | {"rotary": torch.ones(2)}, tmp_path / "model.safetensors")
    destinations = _destinations()
    load_checkpoint(tmp_path, destinations, ignored={"rotary", "never_there"})
    _assert_loaded(destinations, _tensors())


@pytest.mark.parametrize("change", [None, "value", "dtype", "shape"])
@pytest.mark.parametrize("rows_at_once", [3, 100])
def test_a_copy_must_equal_its_original(
    tmp_path: Path, change: str | None, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tied model would silently serve the original instead."""
    monkeypatch.setattr(loader, "_MAX_OPEN_BYTES", rows_at_once * 4 * 4)
    tensors, destinations = _tensors(), _destinations()
    copy = tensors["embed"].clone()
    if change == "value":
        copy[6, 3] = 0.5
    copy = copy.half() if change == "dtype" else copy[:6] if change == "shape" else copy
    _save_shards(tmp_path, tensors, {"head": copy})
    if change is None:
        check_checkpoint(tmp_path, destinations, (), tied={"head": "embed", "never_there": "embed"})
        return
    with pytest.raises(ModelError, match="head differs from embed, .* set tie_word_embeddings to false"):
        check_checkpoint(tmp_path, destinations, (), tied={"head": "embed"})


def test_missing_unknown_and_misshapen_tensors_are_named_together_before_any_copy(tmp_path: Path) -> None:
    tensors = _tensors() | {"extra": torch.ones(1), "norm": torch.ones(5)}
    del tensors["q"]
    save_file(tensors, tmp_path / "model.safetensors")
    destinations = _destinations()
    with pytest.raises(ModelError) as caught:
        load_checkpoint(tmp_path, destinations, ignored=())
    for part in ("1 missing: q;", "1 unknown: extra;", "1 of the wrong shape: norm (expected [4], found [5])"):
        assert part in str(caught.value)
    _assert_untouched(destinations)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    first, second = _split(_tensors())
    _save_shards(tmp_path, first, second | {"k": first["k"]})
    destinations = _destinations()
    with pytest.raises(ModelError, match="1 there more than once: k;"):
        load_checkpoint(tmp_path, destinations, ignored=())
    _assert_untouched(destinations)


def test_a_long_list_of_names_ends_in_a_count(tmp_path: Path) -> None:
    save_file(_tensors() | {f"extra{i:02}": torch.ones(1) for i in range(23)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"23 unknown: extra00, .*extra09 and 13 more;"):
        load_checkpoint(tmp_path, _destinations(), ignored=())


@pytest.mark.parametrize("num_bytes", [0, 5, 40, -1])
def test_a_truncated_file_is_named(tmp_path: Path, num_bytes: int) -> None:
    file = _save_shards(tmp_path, *_split(_tensors()))[1]
    file.write_bytes(file.read_bytes()[:num_bytes])
    destinations = _destinations()
    with pytest.raises(ModelError, match=f"{file.name}: is not a complete safetensors file.* again"):
        load_checkpoint(tmp_path, destinations, ignored=())
    _assert_untouched(destinations)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    file = _save_shards(tmp_path, *_split(_tensors()))[1]
    file.unlink()
    destinations = _destinations()
    with pytest.raises(ModelError, match=f"{file.name}: cannot be read: No such"):
        load_checkpoint(tmp_path, destinations, ignored=())
    _assert_untouched(destinations)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {"q": 3}}'])
def test_a_broken_index_is_named(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ModelError, match=INDEX):
        load_checkpoint(tmp_path, _destinations(), ignored=())


@pytest.mark.parametrize("content", [None, b"", b'{"model_type": ', b"\xff\xfe", b"[1]"])
def test_a_missing_or_broken_config_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(
        ModelError, match=r"config\.json: (cannot be read|is not valid JSON|must contain a JSON object)"
    ):
        read_config(tmp_path)
