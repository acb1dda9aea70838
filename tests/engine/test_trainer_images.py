"""Trainers of models with vision towers: log-probs have the bits of a worker, and gradients reach the tower."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from adapters import change
from peft import LoraConfig, get_peft_model
from proofs import proves
from torch import Tensor
from vision_models import GRIDS, MODELS, PLACEHOLDER

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.media import ImageInput
from trueroll.engine.request import GenerateRequest, SampleOutput, ScoreOutput, ScoreRequest
from trueroll.engine.running.loading import LoadedModel, load_model
from trueroll.errors import AlignmentError
from trueroll.kernels.media import patches_of
from trueroll.kernels.specs import TowerSpec
from trueroll.kernels.spellings import own_name
from trueroll.kernels.training import align, merged_weights, token_log_probs, token_statistics

from .models.test_towers import pixels_for_transformers
from .test_images import asked, engine_of, faulty, image_of, loaded_model, prompt_of, request_of, run, tower_of

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision")


def trained(folder: Path, dtype: str = "float32", is_aligned: bool = True) -> Any:
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=DTYPES[dtype])
    if is_aligned:
        align(model)
    return model.train()


class Sampled:
    """Samples of an engine at temperature 1, as a trainer packs them."""

    def __init__(self, engine: Engine, requests: Sequence[GenerateRequest]) -> None:
        plain = dict(temperature=1.0, top_p=1.0)
        requests = [replace(request, params=request.params.model_copy(update=plain)) for request in requests]
        by_id = {request.id: request for request in requests}
        samples = [sample for sample in run(engine, requests) if isinstance(sample, SampleOutput)]
        self.media = [by_id[sample.request_id].images for sample in samples]
        prompts = [by_id[sample.request_id].prompt_token_ids.tolist() for sample in samples]
        self.rows = [torch.tensor([*prompt, *s.token_ids]) for prompt, s in zip(prompts, samples, strict=True)]
        self.starts = [len(prompt) for prompt in prompts]
        self.logprobs = torch.cat([torch.tensor(sample.logprobs) for sample in samples])
        self.lengths = [len(row) for row in self.rows]

    def of_samples(self, found: Sequence[Tensor]) -> Tensor:
        return torch.cat([row[start:] for row, start in zip(found, self.starts, strict=True)])

    def packed(self, model: Any, **others: Any) -> Tensor:
        found = token_log_probs(model, torch.cat(self.rows), lengths=self.lengths, media=self.media, **others)
        return self.of_samples(found.split(self.lengths))

    def padded(self, model: Any, **others: Any) -> Tensor:
        """Pad on the left and on the right."""
        ids = torch.nn.utils.rnn.pad_sequence(self.rows, batch_first=True, padding_value=-1)
        ids = F.pad(ids, (3, 2), value=-1)
        found = token_log_probs(model, ids.clamp(min=0), ids >= 0, media=self.media, **others)
        return self.of_samples([row[ids_of >= 0] for row, ids_of in zip(found, ids, strict=True)])


def same_bits(found: Tensor, expected: Tensor) -> bool:
    assert found.dtype == expected.dtype == torch.float32
    return torch.equal(found.detach().view(torch.int32), expected.view(torch.int32))


@pytest.fixture(params=MODELS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=DTYPES)
def served(family: str, folders: Path, request: pytest.FixtureRequest) -> tuple[str, LoadedModel]:
    return family, loaded_model(family, request.param, folders / family)


@proves("company", "trainer", backend="cpu", dtype=lambda family, served: served, vision=True)
def test_log_probs_have_the_bits_of_samples(served: tuple[str, LoadedModel]) -> None:
    family, loaded = served
    sampled = Sampled(engine_of(loaded), asked(family, tower_of(loaded.folder)))
    assert [len(images) for images in sampled.media].count(0) == 1 and len(sampled.rows) == 7, "premise"
    model = trained(loaded.folder, loaded.dtype_name)
    for batch in (sampled.packed, sampled.padded):
        assert same_bits(batch(model), sampled.logprobs)


def test_text_only_batches_have_the_bits_of_samples(served: tuple[str, LoadedModel]) -> None:
    """The tower takes no part, but its parameters have gradients, so that all ranks reduce the same tensors."""
    family, loaded = served
    sampled = Sampled(engine_of(loaded), asked(family, tower_of(loaded.folder))[-1:])
    model = trained(loaded.folder, loaded.dtype_name)
    sampled.media = [()]
    found = sampled.packed(model)
    assert same_bits(found, sampled.logprobs)
    found.sum().backward()
    for name, parameter in model.named_parameters():
        assert bool(parameter.grad.any()) != is_of_tower(model, name), name
    with torch.no_grad():
        assert same_bits(sampled.padded(model), sampled.logprobs)


def is_of_tower(model: Any, name: str) -> bool:
    return model._aligned.spec.own_name(name) is None


def test_statistics_have_the_bits_of_a_worker(family: str, folders: Path) -> None:
    loaded = loaded_model(family, "float32", folders / family)
    tower = tower_of(loaded.folder)
    request = request_of("one", tower, [image_of(tower, GRIDS[family][0], seed=3)])
    [sample] = run(engine_of(loaded), [request])
    assert isinstance(sample, SampleOutput) and sample.top_logprobs is not None
    ids = torch.tensor([*request.prompt_token_ids.tolist(), *sample.token_ids])[None]
    found = token_statistics(trained(loaded.folder), ids, media=[request.images], top_logprobs=3)
    own = slice(len(request.prompt_token_ids), None)
    assert same_bits(found.logprobs[0, own], torch.tensor(sample.logprobs))
    assert same_bits(found.top_logprobs[0, own], torch.from_numpy(np.asarray(sample.top_logprobs, np.float32)))


def test_sampled_placeholders_are_text(served: tuple[str, LoadedModel]) -> None:
    family, loaded = served
    tower = tower_of(loaded.folder)
    prompt, images = prompt_of(tower, [image_of(tower, GRIDS[family][0], seed=3)])
    together = np.concatenate([prompt, np.array([7, PLACEHOLDER, PLACEHOLDER, 9, PLACEHOLDER, 11], np.int32)])
    [score] = run(engine_of(loaded), [ScoreRequest("score", together, images=images)])
    assert isinstance(score, ScoreOutput) and score.logprobs is not None
    model, ids = trained(loaded.folder, loaded.dtype_name), torch.from_numpy(together).long()
    found = token_log_probs(model, ids, lengths=[len(ids)], media=[images])
    expected = torch.tensor(np.asarray(score.logprobs, np.float32))
    assert same_bits(found[-len(expected) :], expected)
    with pytest.raises(AlignmentError, match=r"tokens, but the sequences have .* pass token types"):
        token_log_probs(model, ids[None], media=processed(tower, images))
    types = torch.zeros_like(ids)
    for image in images:
        types[image.start : image.start + tower.num_tokens(image.rows, image.columns)] = 1
    media = processed(tower, images) | {"mm_token_type_ids": types[None]}
    assert same_bits(token_log_probs(model, ids[None], media=media)[0], found.detach())


def processed(tower: TowerSpec, images: Sequence[ImageInput]) -> dict[str, Tensor]:
    """Return what an image processor of transformers returns for the images."""
    each = [
        pixels_for_transformers(tower, patches_of(image, tower, torch.float32, CPU), (image.rows, image.columns))
        for image in images
    ]
    return {name: torch.cat([one[name] for one in each]) for name in each[0]}


def batch_of(family: str, tower: TowerSpec) -> tuple[Tensor, list[tuple[ImageInput, ...]]]:
    """Return two sequences of equal length, int64 [2, T], with three images."""
    one, two, three = (image_of(tower, GRIDS[family][i % len(GRIDS[family])], seed=i) for i in range(3))
    prompts = [prompt_of(tower, images, seed=4) for images in ([one, two], [three])]
    ids = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(p).long() for p, _ in prompts], True, 9)
    return ids, [images for _, images in prompts]


def arguments(tower: TowerSpec, ids: Tensor, media: Sequence[Sequence[ImageInput]]) -> dict[str, Tensor]:
    """Return the arguments of transformers for a batch."""
    inputs = processed(tower, [image for images in media for image in images])
    inputs["mm_token_type_ids" if "image_grid_thw" in inputs else "token_type_ids"] = (ids == PLACEHOLDER).int()
    return inputs


def test_arguments_of_transformers_are_served(family: str, folders: Path) -> None:
    loaded = loaded_model(family, "float32", folders / family)
    tower, model = tower_of(loaded.folder), trained(loaded.folder)
    ids, media = batch_of(family, tower)
    inputs = arguments(tower, ids, media)
    found = model(ids, **inputs).logits
    expected = trained(loaded.folder, is_aligned=False)(ids, **inputs).logits
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    log_probs = token_log_probs(model, ids, media=media)
    assert same_bits(token_log_probs(model, ids, media=inputs), log_probs.detach())
    assert same_bits(model(ids, **inputs, labels=ids).logits, found.detach())


def test_positions_with_axes_are_checked(family: str, folders: Path) -> None:
    """Trainers such as verl pass the positions of transformers, perhaps after the index of each token."""
    loaded = loaded_model(family, "float32", folders / family)
    tower, model = tower_of(loaded.folder), trained(loaded.folder)
    ids, media = batch_of(family, tower)
    inputs, index = arguments(tower, ids, media), torch.arange(ids.shape[1]).expand_as(ids)
    expected = token_log_probs(model, ids, media=media).detach()
    axes = index.expand(3, *ids.shape)
    if not tower.sees_span:
        axes, _ = model.model.get_rope_index(ids, inputs["mm_token_type_ids"], inputs["image_grid_thw"])
        assert not torch.equal(axes[1], index), "premise: rows have other positions"
    for given in (axes, torch.cat((index[None], axes))):
        assert same_bits(token_log_probs(model, ids, media=media, position_ids=given), expected)
        assert torch.equal(model(ids, **inputs, position_ids=given).logits, model(ids, **inputs).logits)
        wrong = given.clone()
        wrong[-1, 1, 20] += 1
        for call in (
            lambda wrong=wrong: token_log_probs(model, ids, media=media, position_ids=wrong),
            lambda wrong=wrong: model(ids, **inputs, position_ids=wrong),
        ):
            with pytest.raises(AlignmentError, match=r"position_ids of token .* but workers use"):
                call()


def test_gradients_agree_with_transformers(family: str, folders: Path) -> None:
    loaded = loaded_model(family, "float32", folders / family)
    tower, model = tower_of(loaded.folder), trained(loaded.folder)
    ids, media = batch_of(family, tower)
    inputs, weights = arguments(tower, ids, media), torch.linspace(-1, 1, ids.numel()).view_as(ids)
    theirs = trained(loaded.folder, is_aligned=False)
    logits = theirs(ids, **inputs).logits.log_softmax(-1)[:, :-1]
    (F.pad(logits.gather(2, ids[:, 1:, None])[..., 0], (1, 0)) * weights).sum().backward()
    (token_log_probs(model, ids, media=media) * weights).sum().backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    scale = max(gradient.norm() for gradient in expected.values())
    of_tower = [name for name in expected if is_of_tower(model, name)]
    assert sum(expected[name].norm() > 1e-4 * scale for name in of_tower) > len(of_tower) // 2 > 10, "premise"
    for name, parameter in model.named_parameters():
        limit = 1e-3 * expected[name].norm() + 1e-5 * scale
        assert (parameter.grad - expected[name]).norm() <= limit, name


# The errors of faults that an engine describes in other words.
OTHER_WORDS = {
    "huge": r"levels must be a uint8 array of shape \[1048576, 48\] .got uint8 of shape \[24, 48\]",
    "outside": "exceed the sequence's 17 tokens",
    "a float start": r"start, rows, columns and frames must be integers .got .5.0, 4, 6",
    "a small start": "start, rows, columns and frames must be integers",
    "a float": "start, rows, columns and frames must be integers",
    "none": "multiples of 2 .got 0 and 6",
    "true frames": "start, rows, columns and frames must be integers",
    "one frame as two": r"levels must be a uint8 array of shape \[24, 96\]",
}


def test_faulty_images_are_refused(folders: Path) -> None:
    loaded = loaded_model("qwen3_vl", "float32", folders / "qwen3_vl")
    tower, model = tower_of(loaded.folder), trained(loaded.folder)
    prompt, [image] = prompt_of(tower, [image_of(tower, (4, 6), seed=0)])
    ids = torch.from_numpy(prompt).long()[None]
    inputs = arguments(tower, ids, [[image]])
    cases: list[tuple[str, Any]] = [
        (OTHER_WORDS.get(fault, error), [[replace(image, **changes)]])
        for fault, (error, changes) in faulty(tower).items()
    ]
    cases += [
        ("must have one entry for each of 1 sequences .got 0", []),
        (r"media\[0\]\[1\]: the tokens .* overlap the previous image", [[image, image]]),
        ("media has unknown keys: 'pixels'", {"pixels": inputs["pixel_values"]}),
        ("image_grid_thw must have a row", inputs | {"image_grid_thw": torch.tensor([[2, 4, 6]])}),
        ("rows and columns of patches must be multiples of 2", inputs | {"image_grid_thw": torch.tensor([[1, 3, 8]])}),
        ("pixel_values must have a row for each of 32", inputs | {"image_grid_thw": torch.tensor([[1, 4, 8]])}),
        (r"pixel_values must have shape \[patches, 96\]", inputs | {"pixel_values": torch.ones(24, 3)}),
        ("token types must have shape", inputs | {"mm_token_type_ids": torch.ones(3)}),
        (
            "are not consecutive tokens",
            inputs | {"mm_token_type_ids": torch.tensor([[0] * 5 + [1] * 5 + [0, 1] + [0] * 5])},
        ),
    ]
    for error, media in cases:
        with pytest.raises(AlignmentError, match=error):
            token_log_probs(model, ids, media=media)
    assert (token_log_probs(model, ids, media=[[image]])[0, 1:] < 0).all(), "the good image is served"
    with pytest.raises(AlignmentError, match="pixel_values_videos: an aligned model does not support"):
        model(ids, pixel_values_videos=inputs["pixel_values"])


def test_touching_images_of_gemma_are_refused(folders: Path) -> None:
    loaded = loaded_model("gemma3", "float32", folders / "gemma3")
    tower, model = tower_of(loaded.folder), trained(loaded.folder)
    image, ids = image_of(tower, (8, 8), seed=0, start=3), torch.full((1, 40), PLACEHOLDER)
    ids[0, :3], ids[0, 35:] = 7, 8
    with pytest.raises(AlignmentError, match="begins where the previous image ends"):
        token_log_probs(model, ids, media=[[image, replace(image, start=19)]])
    with pytest.raises(AlignmentError, match=r"pixel_values must have shape \[images, 3, 32, 32\]"):
        token_log_probs(model, ids, media={"pixel_values": torch.ones(1, 3, 32, 16)})
    with pytest.raises(AlignmentError, match="image_grid_thw: an aligned model does not support"):
        model(ids, image_grid_thw=torch.ones(1, 3))


def push(engine: Engine, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
    """Commit a trainer's tensors, as a push does."""
    weights = engine.weights
    staging, names = weights.new_staging(in_place=False), set(weights.shapes)
    for name, tensor in tensors:
        own = own_name(name, weights)
        assert own is not None and tensor.shape == weights.shapes[own], name
        staging.rows(own, 0, len(tensor)).copy_(tensor.detach())
        names.remove(own)
    assert not names
    engine.commit_weights(staging, version, "abort")


def fresh(folder: Path, dtype: str) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), dtype=dtype, max_images=4))


def test_trainer_and_worker_agree_after_20_steps_that_train_the_tower(family: str, folders: Path) -> None:
    """The trainer has float32 weights and computes in bfloat16, as the worker does."""
    folder = loaded_model(family, "bfloat16", folders / family).folder
    loaded, model, tower = fresh(folder, "bfloat16"), trained(folder), tower_of(folder)
    engine, requests = engine_of(loaded), asked(family, tower)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampled = Sampled(engine, requests[:1])
    for step in range(20):
        with torch.autocast("cpu", torch.bfloat16):
            found = sampled.packed(model)
        if step == 0:
            assert same_bits(found, sampled.logprobs)
        (found * torch.linspace(-1, 1, len(found))).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    trained_tower = [name for name in before if is_of_tower(model, name)]
    changed = [name for name in trained_tower if not torch.equal(model.get_parameter(name), before[name])]
    assert len(changed) == len(trained_tower) > 20, "premise"
    push(engine, model.state_dict().items(), 1)
    sampled = Sampled(engine, requests)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert same_bits(sampled.packed(model), sampled.logprobs)
        for name in trained_tower:
            model.get_parameter(name).copy_(before[name])
        assert not same_bits(sampled.packed(model), sampled.logprobs), "premise: the tower matters"


def test_adapters_of_tower_and_decoder(family: str, folders: Path) -> None:
    """Adapters cover every linear layer, and the last merger is trained as a whole."""
    loaded = loaded_model(family, "bfloat16", folders / family)
    whole = "multi_modal_projector" if family == "gemma3" else "merger"
    plain = trained(loaded.folder, loaded.dtype_name, is_aligned=False)
    model = get_peft_model(plain, LoraConfig(r=4, target_modules="all-linear", modules_to_save=[whole]))
    change(model, seed=0)
    align(model)
    tower, engine = tower_of(loaded.folder), engine_of(fresh(loaded.folder, loaded.dtype_name))
    untrained = Sampled(engine, asked(family, tower)[:2])
    push(engine, merged_weights(model, torch.bfloat16), 1)
    sampled = Sampled(engine, asked(family, tower)[:2])
    assert not torch.equal(sampled.logprobs, untrained.logprobs), "premise"
    found = sampled.packed(model)
    assert same_bits(found, sampled.logprobs)
    found.mean().backward()
    adapted = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert any("lora_A" in name and (".visual." in name or ".vision_tower." in name) for name in adapted), "premise"
    assert any(f"{whole}.modules_to_save" in name for name in adapted), "premise"
    for name in adapted:
        gradient = model.get_parameter(name).grad
        assert gradient is not None and gradient.any(), name
