"""Text in and out of token ids, for the tools and the HTTP front end. The service itself speaks token ids only.

Promises that a model's folder runs no code of its own here: a tokenizer is loaded without it, and a chat template,
which is a program, is rendered in a child process with little time and memory. Imports transformers when a tokenizer
is loaded, not before.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from trueroll.errors import ConfigError, ModelError, brief, said

from . import protocol

_TOKENIZER_FILES = {".json", ".jinja", ".txt", ".model"}
# Of the child that renders a chat template.
_MAX_CPU_SECONDS = 10
_MAX_SECONDS = 60
_MAX_MORE_BYTES = 2**30  # of memory, beyond this process's
_MAX_CHARS = 2**22


class TextModel:
    """The tokenizer and the chat template of a model. Raise ModelError if the model has no tokenizer that can be used
    without running code of the model's own, as the methods do where it fails. Any thread may use it.
    """

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer, PreTrainedTokenizerBase

        from ..engine.models.loader import resolve_model

        self._folder = resolve_model(model)
        _check_files(self._folder)
        with self._explained("beside the model, found none"):
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                self._folder, trust_remote_code=False, local_files_only=True
            )
            if not isinstance(self._tokenizer, PreTrainedTokenizerBase):
                raise TypeError(f"{type(self._tokenizer).__name__} is another thing")
        self._renderer = _Renderer(self._tokenizer)

    @property
    def chat_template(self) -> str | None:
        """The text of the model's chat template; None if it has none, or several."""
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of plain text, by default with what the tokenizer puts around every text."""
        with self._explained("that encodes text, found that it does not"):
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(self, text: str, system: str | None = None) -> list[int]:
        """The token ids of a conversation in which the user has said `text` and the assistant is to answer."""
        messages = [] if system is None else [{"role": "system", "content": system}]
        return self.encode_conversation(
            [*messages, {"role": "user", "content": text}], dict(add_generation_prompt=True)
        )

    def encode_conversation(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> list[int]:
        """The token ids of a conversation in the model's chat template, which gets `arguments` such as `tools`."""
        if not self._tokenizer.chat_template:
            raise ModelError("chat: expected a model with a chat template, found one without; use plain prompts")
        rendered = self._renderer.render(messages, arguments)
        return self.encode(rendered, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """The text of token ids, by default without special tokens."""
        with self._explained("that decodes tokens, found that it does not"):
            return self._tokenizer.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )

    def close(self) -> None:
        """End the process that renders conversations."""
        self._renderer.close()

    @contextmanager
    def _explained(self, expected: str) -> Iterator[None]:
        """Raises ModelError for whatever a tokenizer raises, of which its files decide."""
        try:
            yield
        except Exception as error:
            cause = said(f"{type(error).__name__}: {error}")
            raise ModelError(f"{self._folder}: expected a tokenizer {expected}: {cause}; check its files") from None


def model_served_here(health: protocol.Health) -> str:
    """What a worker serves, if nothing has to be fetched for it. Raise ConfigError otherwise: nothing is looked up
    anywhere because a worker names it.
    """
    from ..engine.models.files import local_path

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


def needs_tokenizer(address: str) -> ConfigError:
    """What to say where a worker may run elsewhere and no tokenizer is named."""
    return ConfigError(
        f"tokenizer: expected one for a worker that may run elsewhere, at {address}, found none; give --tokenizer "
        "MODEL, the model that it serves"
    )


def _check_files(folder: Path) -> None:
    from ..engine.models.files import MAX_TOKENIZER_BYTES, check_file

    for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if path.suffix in _TOKENIZER_FILES:
            check_file(path, MAX_TOKENIZER_BYTES)


class _Renderer:
    """Renders conversations, one at a time, in a child process that is made when it is needed, and anew after one that
    did not do what was asked.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def render(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
        with self._lock:
            child = self._child or _Child(self._tokenizer)
            reply = child.ask((messages, arguments))
            self._child = child if reply[:1] == b"+" else None
        if reply[:1] != b"+":
            child.end()
            raise ModelError(
                f"chat: expected a chat template that renders within {_MAX_CPU_SECONDS} s and {_MAX_MORE_BYTES} bytes, "
                f"found {reply[1:].decode() or 'that it does not'}; check the model's chat template, or use plain "
                "prompts"
            )
        return reply[1:].decode()

    def close(self) -> None:
        if (child := self._child) is not None:
            child.end()


class _Child:
    """A process that renders, until this object is gone or this process has ended."""

    def __init__(self, tokenizer: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_render_in_child, args=(other, tokenizer), daemon=True)
        self._process.start()
        other.close()
        self.end = weakref.finalize(self, _end, self._process, self._pipe)

    def ask(self, conversation: tuple[list[dict[str, Any]], dict[str, Any]]) -> bytes:
        """`+` and the text, or `-` and what is wrong; empty if the child was killed or takes too long."""
        try:
            self._pipe.send(conversation)
            return self._pipe.recv_bytes() if self._pipe.poll(_MAX_SECONDS) else b""
        except (EOFError, OSError):
            return b""
        except RecursionError:  # of what is to be sent
            return b"-a conversation nested too deeply"


def _end(process: Any, pipe: Connection) -> None:
    process.kill()
    process.join()
    pipe.close()


def _render_in_child(pipe: Connection, tokenizer: Any) -> None:
    """Answers each conversation by `+` and the text, or by `-` and what is wrong."""
    _close_all_but(pipe)
    _limit(resource.RLIMIT_AS, psutil.Process().memory_info().vms + _MAX_MORE_BYTES)
    with suppress(EOFError):
        while True:
            messages, arguments = pipe.recv()
            used = resource.getrusage(resource.RUSAGE_SELF)
            _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + _MAX_CPU_SECONDS)
            pipe.send_bytes(_rendered(tokenizer, messages, arguments))


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> bytes:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
        if len(text) > _MAX_CHARS:
            raise ValueError(f"{len(text)} characters, more than {_MAX_CHARS}")
        return b"+" + text.encode()
    except Exception as error:  # of any kind, as the template is a program
        return b"-" + said(f"{type(error).__name__}: {error}").encode()


def _close_all_but(pipe: Connection) -> None:
    """The parent's connections must end when the parent ends them."""
    os.closerange(3, pipe.fileno())
    os.closerange(pipe.fileno() + 1, max(map(int, os.listdir("/proc/self/fd"))) + 1)


def _limit(kind: int, most: int) -> None:
    """The kernel ends a process that reaches its limit of processor time."""
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, hard))
