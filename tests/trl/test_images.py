"""GRPOTrainer on image datasets: samples from the worker, and log-probs with the worker's bits."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoImageProcessor, AutoTokenizer
from trl_setup import CheckingPublisher, ServedEngine, grpo_settings, serve
from vision_models import PLACEHOLDER
from vision_processors import make_chat_model, photo, processor_of

from trueroll.engine.media import ImageInput
from trueroll.errors import ConfigError, InvalidRequestError, ModelError
from trueroll.rollout import RolloutClient, WeightPublisher
from trueroll.rollout.integrations.trl import (
    AlignedGRPOTrainer,
    QwenProcessor,
    TruerollGeneration,
    rollout_func,
    trueroll_generation,
)
from trueroll.rollout.integrations.trl.async_grpo import _endless

from .test_grpo import DIFFERENCE, SAMPLING, reported, small_ids


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model("qwen3_vl", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def qwen_served(qwen: Path) -> Iterator[ServedEngine]:
    with serve(qwen, max_images=3) as served:
        yield served


class RecordingClient(RolloutClient):
    """Records the arguments of all calls."""

    def __init__(self, address: str) -> None:
        super().__init__(address, timeout=10.0)
        self.prompts: list[list[int]] = []
        self.media: list[list[ImageInput]] = []
        self.groups: list[Any] = []

    def __enter__(self) -> RecordingClient:
        return self

    def generate(self, prompts: Any, *args: Any, media: Any = None, **options: Any) -> Any:
        groups = super().generate(prompts, *args, media=media, **options)
        self.prompts += prompts
        self.media += [[] for _ in prompts] if media is None else media
        self.groups += groups
        return groups


def train(
    served: ServedEngine, model: Path, processor: Any, dataset: Any, output: Path, **changes: Any
) -> tuple[AlignedGRPOTrainer, RecordingClient, CheckingPublisher]:
    """Run a training that pushes the weights after each step."""
    args = grpo_settings(output, use_vllm=True, vllm_mode="server", learning_rate=1e-2, **changes)
    with RecordingClient(served.address) as client, CheckingPublisher(served) as publisher:
        with trueroll_generation(client, publisher):
            trainer = AlignedGRPOTrainer(str(model), small_ids, args, dataset, processing_class=processor)
        tower = next(name for name in trainer.model.state_dict() if "blocks.0" in name or "layers.0" in name)
        before = trainer.model.state_dict()[tower].clone()
        trainer.train()
        assert not torch.equal(trainer.model.state_dict()[tower], before), "premise: the tower is trained"
    return trainer, client, publisher


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "gemma3"])
def test_trl_finds_no_difference_on_a_dataset_with_images(family: str, tmp_path: Path) -> None:
    model = make_chat_model(family, tmp_path / "model")
    dataset = Dataset.from_list([dict(prompt=chat("What?"), image=photo(i)) for i in range(4)])
    with serve(model, max_images=1) as served:
        trainer, client, publisher = train(
            served, model, processor_of(family, model), dataset, tmp_path / "out", max_steps=2
        )
    assert reported(trainer, DIFFERENCE) == [0.0] * 2
    assert publisher.differing == [[]] * 2 and len(set(publisher.embeddings)) == 2
    assert [len(group.samples) for group in client.groups] == [4] * 2
    assert len({images[0].content_hash for images in client.media}) == 2, "premise: each step has another image"


def test_rows_with_several_images_and_with_none_are_mixed_in_a_batch(
    qwen: Path, qwen_served: ServedEngine, tmp_path: Path
) -> None:
    """A batch of four groups is trained on in chunks of two rows, one of which has no images."""
    rows = [dict(prompt=chat("Name all."), images=[photo(i) for i in range(count)]) for count in (2, 0, 1, 3)]
    changes = dict(max_steps=2, num_generations=2, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    trainer, client, _ = train(
        qwen_served, qwen, processor_of("qwen3_vl", qwen), Dataset.from_list(rows), tmp_path, **changes
    )
    assert reported(trainer, DIFFERENCE) == [0.0] * 2
    assert sorted(map(len, client.media)) == sorted([2, 0, 1, 3] * 2)


def test_the_worker_gets_the_values_that_trl_trains_on(
    qwen: Path, qwen_served: ServedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grayscale and transparent images are converted by the processor."""
    seen: list[torch.Tensor] = []
    compute = AlignedGRPOTrainer._get_per_token_logps_and_entropies

    def record(self: Any, *args: Any, **inputs: Any) -> Any:
        seen.append(inputs["pixel_values"])
        return compute(self, *args, **inputs)

    monkeypatch.setattr(AlignedGRPOTrainer, "_get_per_token_logps_and_entropies", record)
    images = [photo(0, "L"), photo(1, "RGBA")]
    dataset = Dataset.from_list([dict(prompt=chat("What?"), images=images)])
    _, client, _ = train(qwen_served, qwen, processor_of("qwen3_vl", qwen), dataset, tmp_path, max_steps=1)
    patches = [image.table[np.arange(3)[:, None], image.levels.reshape(-1, 3, 16)] for image in client.media[0]]
    sent = torch.from_numpy(np.concatenate(patches))[:, :, None].expand(-1, -1, 2, -1).flatten(1)
    assert torch.equal(seen[0], sent.repeat(4, 1))


def test_the_processor_is_saved_as_in_the_folder_of_a_model(qwen: Path, tmp_path: Path) -> None:
    processor = QwenProcessor.from_pretrained(qwen)
    processor.save_pretrained(tmp_path)
    again = QwenProcessor.from_pretrained(tmp_path)
    texts = [f"a<{PLACEHOLDER}>b", "no image", f"<{PLACEHOLDER}><{PLACEHOLDER}>"]
    given: Any = dict(images=[[photo(0)], None, [photo(1), photo(2)]], text=texts, padding=True, return_tensors="pt")
    found, expected = again(**given), processor(**given)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert torch.equal(found["mm_token_type_ids"], (found["input_ids"] == PLACEHOLDER).long())
    counts = (found["input_ids"] == PLACEHOLDER).sum(1).tolist()
    grids = found["image_grid_thw"].prod(1) // 4
    assert counts == [grids[0], 0, grids[1:].sum()]


def test_a_tokenizer_without_a_placeholder_is_refused(qwen: Path, tiny_llama: Path) -> None:
    image_processor = AutoImageProcessor.from_pretrained(qwen, backend="pil")
    with pytest.raises(ModelError, match=r"tokenizer: has no token <\|image_pad\|>"):
        QwenProcessor(image_processor, AutoTokenizer.from_pretrained(tiny_llama))


def generation_of(client: RolloutClient, publisher: WeightPublisher, processor: Any, model: Any) -> Any:
    accelerator = SimpleNamespace(num_processes=1, unwrap_model=lambda model: model)
    settings = SAMPLING | dict(structured_outputs_regex=None)
    return TruerollGeneration(client, publisher, model, accelerator, processor, **settings)


def test_images_that_do_not_fit_the_prompt_are_refused(qwen: Path, qwen_served: ServedEngine) -> None:
    from transformers import AutoModelForImageTextToText

    model, image = AutoModelForImageTextToText.from_pretrained(qwen), photo(0)  # 24 x 16: 6 tokens
    six, two = [1, *[PLACEHOLDER] * 6, 2], [1, PLACEHOLDER, 3, *[PLACEHOLDER] * 5]
    cases: list[tuple[list[int], Any, str]] = [
        (six, None, "its 0 images have 0 tokens, but the prompt has 6 placeholders"),
        (six, [image, image], "its 2 images have 12 tokens, but the prompt has 6 placeholders"),
        (two, [image], "the 6 placeholders of image 0 are not consecutive"),
        (six, ["http://example.com/cat.png"], r"must be a PIL image \(got str\)"),
        (six, [photo(0).resize((4000, 3))], "the trainer's processor refuses the image"),
    ]
    with RolloutClient(qwen_served.address) as client, WeightPublisher() as publisher:
        generation = generation_of(client, publisher, QwenProcessor.from_pretrained(qwen), model)
        for prompt, images, message in cases:
            with pytest.raises(InvalidRequestError, match=message):
                generation.generate([prompt], images=[images], num_generations=1, profiler=nullcontext())


def test_images_for_a_model_without_a_tower_are_refused(tiny_llama: Path, tiny_served: ServedEngine) -> None:
    from transformers import AutoModelForCausalLM

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_llama), AutoTokenizer.from_pretrained(tiny_llama)
    with RolloutClient(tiny_served.address) as client, WeightPublisher() as publisher:
        generation = generation_of(client, publisher, tokenizer, model)
        with pytest.raises(ModelError, match="LlamaForCausalLM has no vision tower"):
            generation.generate([[1, 2]], images=[[photo(0)]], num_generations=1, profiler=nullcontext())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_images=[2]), r"num_images: must have one number for each of 2 rows, with the sum 2 \(got \[2\]\)"),
        (
            dict(num_images=[1, 2]),
            r"num_images: must have one number for each of 2 rows, with the sum 2 \(got \[1, 2\]\)",
        ),
        (dict(num_images=None), r"num_images: .* \(got \[\]\)"),
        (dict(image_sizes=torch.ones(2)), "inputs: image_sizes is not supported"),
    ],
)
def test_inputs_that_are_not_those_of_the_rows_are_refused(changes: dict[str, Any], message: str) -> None:
    inputs = dict(pixel_values=torch.zeros(2, 3, 8, 8), num_images=[1, 1]) | changes
    ids = torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(ConfigError, match=message):
        AlignedGRPOTrainer._get_per_token_logps_and_entropies(None, None, ids, ids, 1, **inputs)  # type: ignore[arg-type]


def test_other_doors_of_trl_refuse_images(qwen: Path, qwen_served: ServedEngine) -> None:
    prompt = [{"role": "user", "content": [{"type": "image", "image": photo(0)}, {"type": "text", "text": "What?"}]}]
    trainer: Any = SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=1),
        args=SimpleNamespace(**SAMPLING),
        state=SimpleNamespace(global_step=0),
        model=None,
        processing_class=QwenProcessor.from_pretrained(qwen),
        eos_token_ids=[2],
        chat_template=None,
        chat_template_kwargs={},
    )
    trainer.accelerator.unwrap_model = lambda model: model
    publisher: Any = SimpleNamespace(push=lambda *_, **__: None)
    with RolloutClient(qwen_served.address) as client:
        with pytest.raises(ConfigError, match="images are supported only by GRPOTrainer with trueroll_generation"):
            rollout_func(client, publisher)([prompt], trainer)
    for row in (dict(image=photo(0)), dict(images=[photo(0)])):
        with pytest.raises(ConfigError, match="AsyncGRPOTrainer does not support images"):
            next(_endless([dict(prompt="a") | row]))
