"""Text in and out of token ids, and `trueroll generate`, which needs both. The service itself speaks token ids only.

Imports transformers when a tokenizer is loaded, not before.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from ..engine.errors import ConfigError, ModelError
from ..engine.request import SamplingParams
from .client import Group, RolloutClient
from .launch import launch_worker


class TextModel:
    """The tokenizer and the chat template of a model. Raise ModelError if the model has no tokenizer."""

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer

        from ..engine.models.loader import resolve_model

        folder = resolve_model(model)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            cause = " ".join(str(error).split())
            raise ModelError(f"{folder}: expected a tokenizer beside the model, found none: {cause}") from None

    def encode(self, text: str) -> list[int]:
        """The token ids of plain text."""
        return self._tokenizer.encode(text)

    def encode_chat(self, text: str, system: str | None = None) -> list[int]:
        """The token ids of a conversation in which the user has said `text` and the assistant is to answer."""
        if self._tokenizer.chat_template is None:
            raise ModelError("chat: expected a model with a chat template, found one without; leave out --chat")
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": text})
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """The text of token ids, without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)


def print_completions(
    model_or_address: str,
    prompts: Sequence[str],
    params: SamplingParams,
    chat: bool,
    tokenizer: str | None,
    keys: tuple[str | None, str | None] = (None, None),
) -> None:
    """Completes prompts with the worker at an address, or with one started for a model, and prints all samples.

    `tokenizer`: the model whose tokenizer is used; None: the one that the worker serves. `keys`: `server_public_key`
    and `client_key_file` of `RolloutClient`.
    """
    with ExitStack() as stack:
        address = model_or_address
        if not address.startswith(("ipc://", "tcp://")):
            address = stack.enter_context(launch_worker(model_or_address)).address
        client = stack.enter_context(RolloutClient(address, 30.0, *keys))
        text = TextModel(tokenizer or _served_model(client))
        token_ids = [text.encode_chat(prompt) if chat else text.encode(prompt) for prompt in prompts]
        groups = client.generate(token_ids, params, progress=sys.stderr.isatty())
    for prompt, group in zip(prompts, groups, strict=True):
        _print_group(text, prompt, group)


def _served_model(client: RolloutClient) -> str:
    health = client.health()
    if health.engine is None:
        raise ConfigError(
            f"tokenizer: expected a worker that is ready, found it {health.state}; wait, or give --tokenizer MODEL"
        )
    return health.engine["model"]


def _print_group(text: TextModel, prompt: str, group: Group) -> None:
    print(f"=== {prompt} (seed {group.params.seed})")
    for sample in group.samples:
        print(f"--- sample {sample.index}: {len(sample.token_ids)} tokens, finish reason {sample.finish_reason}")
        print(text.decode(sample.token_ids))
