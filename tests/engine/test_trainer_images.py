"""Trainers of models with vision towers: log-probs have the bits of a worker, and gradients reach the tower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from vision_models import MODELS

from trueroll.engine.engine import Engine
from trueroll.engine.request import GenerateRequest, SampleOutput
from trueroll.engine.running.loading import LoadedModel
from trueroll.kernels.training import align, token_log_probs

from .test_images import asked, engine_of, loaded_model, run, tower_of

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


def test_log_probs_have_the_bits_of_samples(served: tuple[str, LoadedModel]) -> None:
    family, loaded = served
    sampled = Sampled(engine_of(loaded), asked(family, tower_of(loaded.folder)))
    assert [len(images) for images in sampled.media].count(0) == 1 and len(sampled.rows) == 7, "premise"
    model = trained(loaded.folder, loaded.dtype_name)
    for batch in (sampled.packed, sampled.padded):
        assert same_bits(batch(model), sampled.logprobs)
