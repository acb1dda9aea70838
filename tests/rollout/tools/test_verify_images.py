"""The cells of the exactness matrix with images: no bit differs, and planted differences are found."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from matrix import thinned
from proofs import proves
from rich.console import Console
from vision_models import MODELS, make_vision_model

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.media import ImageInput
from trueroll.engine.running.loading import LoadedModel, load_model
from trueroll.engine.running.ranks import Topology
from trueroll.engine.scheduling.media import ImageRows, SequenceMedia
from trueroll.rollout.tools import verify
from trueroll.rollout.tools.verify import CellResult
from trueroll.rollout.tools.verify_images import IMAGE_LEGEND, MAX_IMAGES, ImageCell, ImageSubjects, image_cells

MAX_TOKENS = 12


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LoadedModel]:
    whole = tmp_path_factory.mktemp("vision")

    def load(family: str, dtype: str = "float32") -> LoadedModel:
        folder = whole / family
        if not folder.exists():
            make_vision_model(family, folder)
        return load_model(EngineConfig(model=str(folder), dtype=dtype, max_images=MAX_IMAGES))

    return load


def cells_of(loaded: LoadedModel) -> list[ImageCell]:
    assert loaded.model.spec.served_tower is not None
    return image_cells(loaded.model.spec.served_tower)


def results_of(loaded: LoadedModel, cells: Sequence[ImageCell]) -> list[CellResult]:
    """Return the results of the cells. The baseline must pass."""
    baseline, *results = matrix_of(loaded, cells)
    assert baseline.passed and len(results) == len(cells)
    return results


def matrix_of(loaded: LoadedModel, cells: Sequence[ImageCell]) -> list[CellResult]:
    config = EngineConfig(model=str(loaded.folder), dtype=loaded.dtype_name)
    return list(verify._run_cells(verify._ImageLab(config, loaded, MAX_TOKENS), ImageCell(), cells))


def failures(result: CellResult) -> list[str]:
    return [premise.name for premise in result.failed_premises]


@proves("company", backend="cpu", vision=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", MODELS)
@thinned(lambda family, dtype: (family, dtype) in (("gemma3", "float32"), ("qwen3_vl", "bfloat16")))
def test_no_bit_differs_in_any_cell_with_images(
    family: str, dtype: str, loaded_model: Callable[..., LoadedModel]
) -> None:
    loaded = loaded_model(family, dtype)
    results = results_of(loaded, cells_of(loaded))
    assert len(results) == (14 if family == "gemma3" else 13)
    assert [(each.cell.name, each.differences, failures(each)) for each in results if not each.passed] == []
    compared = [each.tokens for each in results if "refused" not in each.cell.name]
    assert min(compared) > 0 and len(results) - len(compared) == (family == "gemma3")
    named = {premise.name for result in results for premise in result.premises} - {"failed"}
    legend = verify.LEGEND + IMAGE_LEGEND
    assert [name for name in named if name.split()[0] not in legend] == []


def without_the_size(image: ImageInput) -> bytes:
    return hashlib.sha256(image.table.tobytes() + image.levels.tobytes()).digest()


def from_the_first_row(media: SequenceMedia, start: int, end: int) -> Iterator[ImageRows]:
    for rows in ROWS(media, start, end):
        yield replace(rows, start=0, end=rows.end - rows.start)


ROWS = SequenceMedia.rows


def test_images_that_are_confused_are_found(
    loaded_model: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two images have the same levels, but different sizes."""
    loaded = loaded_model("qwen3_vl")
    assert loaded.model.spec.served_tower is not None
    first, second = ImageSubjects(loaded.model.spec.served_tower, 512, MAX_TOKENS).requests[1].images
    assert (first.levels == second.levels).all() and first.rows == second.columns, "premise"
    monkeypatch.setattr(ImageInput, "content_hash", property(without_the_size))
    [baseline] = matrix_of(loaded, [])
    assert failures(baseline) == ["encoded"], "one image was taken for the other"


def test_a_chunk_that_begins_an_image_anew_is_found(
    loaded_model: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SequenceMedia, "rows", from_the_first_row)
    loaded = loaded_model("qwen3_vl")
    cuts = [cell for cell in cells_of(loaded) if cell.cuts]
    assert [result.differences > 0 for result in results_of(loaded, cuts)] == [True]


def test_a_push_that_keeps_encoded_images_fails_the_premise(
    loaded_model: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "_forget_images", lambda engine: None)
    loaded = loaded_model("gemma3")
    pushes = [cell for cell in cells_of(loaded) if cell.event == "push"]
    assert [failures(result) for result in results_of(loaded, pushes)] == [["encoded"]]


def test_claims_without_evidence_fail(loaded_model: Callable[..., LoadedModel]) -> None:
    """The false claims are a budget that cuts no image, an encoder that evicts nothing, and a budget that is large
    enough.
    """
    loaded = loaded_model("gemma3")
    claims = {
        ImageCell(interval=16, encoder="hit", cuts=True): ["cut images"],
        ImageCell(interval=16, encoder="evicted"): [],
        ImageCell(interval=16, is_refused=True): ["refused"],
    }
    results = results_of(loaded, [*claims])
    assert [failures(result) for result in results] == [*claims.values()]


def test_verify_finds_the_tower_and_compares_its_ranks(
    loaded_model: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CELLS", "QUICK_CELLS", "STATE_CELLS", "RANK_CELLS"):
        monkeypatch.setattr(verify, name, ())
    loaded = loaded_model("qwen3_vl")
    ranked = verify.cells_of(loaded, Topology(2, 2))
    assert [replace(cell, ranks=1, stages=1) for cell in ranked] == cells_of(loaded)
    assert {cell.topology for cell in ranked} == {Topology(2, 2)}
    console = Console(record=True, width=160)
    sizes = verify.Sizes(prompt_lengths=(64, 5))
    assert verify.verify(EngineConfig(model=str(loaded.folder)), console, sizes=sizes, quick=True)
    text = console.export_text()
    assert "passed: 3 cells" in text and "images, cache warm, encoded before" in text and IMAGE_LEGEND[:30] in text
