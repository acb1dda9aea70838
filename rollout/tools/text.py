"""Text in and out of token ids, and `trueroll generate`, which needs both. The service itself speaks token ids only.

Promises that a model's folder runs no code of its own here: a tokenizer is loaded without it, and a chat template,
which is a program, is rendered in a child process with little time and memory. Imports transformers when a tokenizer
is loaded, not before.
"""

from __future__ import annotations

import multiprocessing
import resource
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from trueroll.errors import ConfigError, ModelError, brief

from ...engine.request import SamplingParams
from ..client.client import Group, RolloutClient
from ..client.local_worker import launch_worker
from ..network.keys import Key

_TOKENIZER_FILES = {".json", ".jinja", ".txt", ".model"}
# Of the child that renders a chat template.
_MAX_CPU_SECONDS = 10
_MAX_SECONDS = 60
_MAX_MORE_BYTES = 2**30  # of memory, beyond this process's
_MAX_CHARS = 2**22


class TextModel:
    """The tokenizer and the chat template of a model. Raise ModelError if the model has no tokenizer that can be used
    without running code of the model's own, as the methods do where it fails.
    """

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer, PreTrainedTokenizerBase

        from ...engine.models.loader import resolve_model

        self._folder = resolve_model(model)
        _check_files(self._folder)
        with self._explained("beside the model, found none"):
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                self._folder, trust_remote_code=False, local_files_only=True
            )
            if not isinstance(self._tokenizer, PreTrainedTokenizerBase):
                raise TypeError(f"{type(self._tokenizer).__name__} is another thing")

    def encode(self, text: str) -> list[int]:
        """The token ids of plain text."""
        with self._explained("that encodes text, found that it does not"):
            return self._tokenizer.encode(text)

    def encode_chat(self, text: str, system: str | None = None) -> list[int]:
        """The token ids of a conversation in which the user has said `text` and the assistant is to answer."""
        if self._tokenizer.chat_template is None:
            raise ModelError("chat: expected a model with a chat template, found one without; leave out --chat")
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": text})
        rendered = _render(self._tokenizer, messages)
        with self._explained("that encodes text, found that it does not"):
            return self._tokenizer.encode(rendered, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """The text of token ids, without special tokens."""
        with self._explained("that decodes tokens, found that it does not"):
            return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    @contextmanager
    def _explained(self, expected: str) -> Iterator[None]:
        """Raises ModelError for whatever a tokenizer raises, of which its files decide."""
        from trueroll.errors import said

        try:
            yield
        except Exception as error:
            cause = said(f"{type(error).__name__}: {error}")
            raise ModelError(f"{self._folder}: expected a tokenizer {expected}: {cause}; check its files") from None


def _check_files(folder: Path) -> None:
    from ...engine.models.files import MAX_TOKENIZER_BYTES, check_file

    for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if path.suffix in _TOKENIZER_FILES:
            check_file(path, MAX_TOKENIZER_BYTES)


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """The text of a conversation. In a child process, which can be killed, from whichever thread this is called."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_render_in_child, args=(sender, tokenizer, messages))
    child.start()
    sender.close()
    reply = b""  # of a child that is killed
    try:
        if receiver.poll(_MAX_SECONDS):
            reply = receiver.recv_bytes()
    except (EOFError, OSError):
        pass
    finally:
        child.kill()
        child.join()
        receiver.close()
    text = reply[1:].decode()
    if reply[:1] != b"+":
        raise ModelError(
            f"chat: expected a chat template that renders within {_MAX_CPU_SECONDS} s and {_MAX_MORE_BYTES} bytes, "
            f"found {text or 'that it does not'}; check the model's chat template, or leave out --chat"
        )
    return text


def _render_in_child(sender: Connection, tokenizer: Any, messages: list[dict[str, str]]) -> None:
    """Sends `+` and the text, or `-` and what is wrong."""
    from trueroll.errors import said

    _limit(resource.RLIMIT_CPU, _MAX_CPU_SECONDS)
    _limit(resource.RLIMIT_AS, psutil.Process().memory_info().vms + _MAX_MORE_BYTES)
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        if len(text) > _MAX_CHARS:
            raise ValueError(f"{len(text)} characters, more than {_MAX_CHARS}")
        reply = b"+" + text.encode()
    except Exception as error:  # of any kind, as the template is a program
        reply = b"-" + said(f"{type(error).__name__}: {error}").encode()
    sender.send_bytes(reply)


def _limit(kind: int, most: int) -> None:
    """The kernel kills a process that reaches its hard limit of processor time."""
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def print_completions(
    model_or_address: str,
    prompts: Sequence[str],
    params: SamplingParams,
    seed: int | None,
    chat: bool,
    tokenizer: str | None,
    keys: tuple[Key | None, Key | None] = (None, None),
) -> None:
    """Completes prompts with the worker at an address, or with one started for a model, and prints all samples.

    `seed`: of all prompts, see `RolloutClient.generate`; None: a new one. `tokenizer`: the model whose tokenizer is
    used; None: the one that is served, where this process or this machine serves it. `keys`: `server_public_key` and
    `client_key` of `RolloutClient`. Raise ConfigError if `tokenizer` has to be given: nothing is looked up anywhere
    because a worker names it.
    """
    seed = secrets.randbits(63) if seed is None else seed
    address = model_or_address
    if tokenizer is None and address.startswith("tcp://"):
        raise ConfigError(
            "tokenizer: expected one for a worker that may run elsewhere, found none; give --tokenizer MODEL, the "
            "model that it serves"
        )
    with ExitStack() as stack:
        if not address.startswith(("ipc://", "tcp://")):
            tokenizer = tokenizer or model_or_address
            address = stack.enter_context(launch_worker(model_or_address)).address
        client = stack.enter_context(RolloutClient(address, 30.0, *keys))
        text = TextModel(tokenizer or _served_model(client))
        token_ids = [text.encode_chat(prompt) if chat else text.encode(prompt) for prompt in prompts]
        groups = client.generate(token_ids, params, seed=seed, progress=sys.stderr.isatty())
    for prompt, group in zip(prompts, groups, strict=True):
        _print_group(text, f"{prompt} (seed {seed})", group)


def _served_model(client: RolloutClient) -> str:
    """What a worker of this machine serves, if nothing has to be fetched for it."""
    from ...engine.models.files import local_path

    health = client.health()
    if health.engine is None:
        raise ConfigError(
            f"tokenizer: expected a worker that is ready, found it {health.state}; wait, or give --tokenizer MODEL"
        )
    model = health.engine.get("model")
    path = local_path(model) if isinstance(model, str) else None
    if not isinstance(model, str) or model != "smollm2" and (path is None or not path.is_dir()):
        raise ConfigError(
            f"tokenizer: expected a worker that serves smollm2 or a folder of this machine, found {brief(model)}; give "
            "--tokenizer MODEL, the model that it serves"
        )
    return model


def _print_group(text: TextModel, title: str, group: Group) -> None:
    print(f"=== {title}")
    for sample in group.samples:
        print(f"--- sample {sample.index}: {len(sample.token_ids)} tokens, finish reason {sample.finish_reason}")
        print(text.decode(sample.token_ids))
