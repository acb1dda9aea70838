"""A worker with a tiny model that calls tools, its client and its front end."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # read when litellm is imported; it would download a file
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"  # read when agents is imported; it would send traces

import pytest
from chat_templates import SPECIAL, TEMPLATES, make_chat_folder
from http_fronts import Front, front_end
from scripted_models import give_texts, prefer
from serving import WorkerOnThread

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.rollout import RolloutClient
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.worker.process import load_engine

END = "<|im_end|>"
SAID = {
    400: '<tool_call>Ċ{"name":Ġ"add",Ġ"arguments":Ġ{"number":Ġ3}}Ċ</tool_call>',
    401: '<tool_call>Ċ{"name":Ġ"add",Ġ"arguments":Ġ{"number":Ġ-1}}Ċ</tool_call>',
    402: "ĠWell,",
    403: "Ġthen",
    404: "Ġagain.",
}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerOnThread]:
    """A worker with a model that writes calls of `add` and a text in any order, and then the end of its turn."""
    root = tmp_path_factory.mktemp("agents")
    model = make_tiny_model("llama", root / "model", max_position_embeddings=16384)
    folder = make_chat_folder(root / "chat", TEMPLATES["qwen2_5"], END, model)
    give_texts(folder, SAID)
    prefer(folder, [*SAID], logit=14.0, end=SPECIAL.index(END))
    config = EngineConfig(model=str(folder), num_blocks=2048, num_threads=1, backend="cpu")
    running = WorkerOnThread(WorkerConfig(), lambda: load_engine(config))
    yield running
    running.worker.drain()
    running.join()
    assert running.error is None


@pytest.fixture(scope="module")
def client(worker: WorkerOnThread) -> Iterator[RolloutClient]:
    with RolloutClient(worker.address) as running:
        yield running


@pytest.fixture(scope="module")
def front(worker: WorkerOnThread) -> Iterator[Front]:
    with front_end(worker.address) as running:
        yield running
