"""Pushes of a trainer of a model with a vision tower, to workers with and without the tower, and audits of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import change
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText
from vision_models import make_vision_model

from tiny import make_tiny_model
from trueroll.errors import PushError
from trueroll.kernels.training import align
from trueroll.rollout import RolloutClient, SamplingParams, WeightPublisher, audit, auditing, launch_worker

PROMPTS = [[*range(3, 20)], [7, 8]]
PARAMS = SamplingParams(n=2, max_tokens=6, seed=5, ignore_eos=True)


def trained(folder: Path) -> Any:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    align(model)
    return model


def test_a_push_brings_the_tower(tmp_path: Path, forked_workers: None) -> None:
    """In Gemma 3, the names of checkpoints, trainers and workers differ most."""
    folder, tower = make_vision_model("gemma3", tmp_path), "model.vision_tower."
    model = trained(folder)
    rest = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(tower)}
    settings: dict[str, Any] = dict(num_blocks=32, num_threads=1)
    with launch_worker(str(folder), max_images=1, **settings) as whole, launch_worker(str(folder), **settings) as text:
        for worker, serves_tower in ((whole, True), (text, False)):
            with RolloutClient(worker.address) as client, WeightPublisher() as publisher:
                publisher.connect([worker.address])
                if serves_tower:
                    with pytest.raises(PushError, match=f"parameters are missing: {tower}"):
                        publisher.push(rest, version=1)
                publisher.push(model, version=1)
                found = audit(model, client, PROMPTS, PARAMS, version=1)
                assert (found.num_different, found.causes, found.tensors) == (0, (), ()), str(found)
                names = client.weight_checksums().checksums
                assert any(name.startswith(tower) for name in names) is serves_tower
                assert any("multi_modal_projector" in name for name in names) is serves_tower
                with torch.no_grad():
                    model.model.vision_tower.post_layernorm.weight[0] += 1
                changed = audit(model, client, PROMPTS, PARAMS, version=1)
                expected = ("weights",) if serves_tower else ()
                assert tuple(cause.name for cause in changed.causes) == expected and not changed.num_different


def test_a_push_of_adapters_brings_those_of_the_tower(tmp_path: Path, forked_workers: None) -> None:
    folder = make_vision_model("qwen3_vl", tmp_path)
    model = get_peft_model(
        AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32),
        LoraConfig(r=4, target_modules="all-linear", modules_to_save=["merger"]),
    )
    align(model)
    settings: dict[str, Any] = dict(num_blocks=32, num_threads=1)
    with launch_worker(str(folder), max_images=1, **settings) as whole, launch_worker(str(folder), **settings) as text:
        for worker in (whole, text):
            with RolloutClient(worker.address) as client, WeightPublisher() as publisher:
                publisher.connect([worker.address])
                for version in (1, 2):
                    change(model, seed=version)
                    publisher.push(model, version, adapters=version > 1)
                    found = audit(model, client, PROMPTS, PARAMS, version=version)
                    assert (found.num_different, found.causes, found.tensors) == (0, (), ()), str(found)


@pytest.mark.parametrize("with_lora", [False, True])
def test_a_push_leaves_out_a_tower_that_is_not_supported(tmp_path: Path, forked_workers: None, with_lora: bool) -> None:
    folder = make_tiny_model("mistral3", tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    if with_lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    align(model)
    with (
        launch_worker(str(folder), num_blocks=32, num_threads=1) as worker,
        RolloutClient(worker.address) as client,
        WeightPublisher() as publisher,
    ):
        publisher.connect([worker.address])
        for version in (1, 2):
            if with_lora:
                change(model, seed=version)
            else:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.25)
            publisher.push(model, version, adapters=with_lora and version > 1)
            found = audit(model, client, PROMPTS, PARAMS, version=version)
            assert (found.num_different, found.causes, found.tensors) == (0, (), ()), str(found)
        assert not any("vision_tower" in name for name in client.weight_checksums().checksums)


def test_a_folder_is_audited_as_a_whole(tmp_path: Path, forked_workers: None) -> None:
    folder = make_vision_model("qwen3_5", tmp_path)
    with (
        launch_worker(str(folder), max_images=1, num_blocks=32, num_threads=1) as worker,
        RolloutClient(worker.address) as client,
    ):
        [found] = auditing.audit_folder(str(folder), client, params=PARAMS)
        assert (found.num_different, found.causes, found.tensors) == (0, (), ()), str(found)
