"""A worker with a tiny Qwen3 that has the chat format of the real Qwen3, a front end of the worker, and a client."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # read when trl is imported

import pytest
from http_fronts import Front, front_end
from transformers import AutoTokenizer

from trueroll.rollout import RolloutClient, WorkerProcess, launch_worker

SPECIAL_TOKENS = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def chat_model(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with Qwen3's special tokens, which replace words that no text contains."""
    folder = shutil.copytree(tiny_qwen3, tmp_path_factory.mktemp("models") / "chat")
    words = (folder / "tokenizer.json").read_text()
    for i, token in enumerate(SPECIAL_TOKENS):
        assert f'"<{300 + i}>"' in words
        words = words.replace(f'"<{300 + i}>"', json.dumps(token))
    (folder / "tokenizer.json").write_text(words)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(SPECIAL_TOKENS), special_tokens=True)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 301
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def worker(chat_model: Path) -> Iterator[WorkerProcess]:
    with launch_worker(str(chat_model), device="cpu", num_blocks=256, num_threads=1) as running:
        yield running


@pytest.fixture(scope="module")
def front(worker: WorkerProcess) -> Iterator[Front]:
    with front_end(worker.address) as running:
        yield running


@pytest.fixture(scope="module")
def client(worker: WorkerProcess) -> Iterator[RolloutClient]:
    with RolloutClient(worker.address) as running:
        yield running
