"""Text in and out of token ids, for the tools and the HTTP front end. The service itself speaks token ids only.

Promises that no Python code in a model's folder is run: a tokenizer is loaded without it, in a child process with
limits first. A chat template is a program, too; it is rendered in a child process, which also encodes. Short and long
texts have a process each. Imports transformers when a tokenizer is loaded, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from trueroll.errors import ConfigError, ModelError, UnavailableError, brief, said

from ..engine.models.trials import TrialError, attempt
from . import protocol
from .text_child import LIMITS, MAX_CHARS, ChildError, EncodingError, IsAbandoned, TextChild, TooMany, never

ANY = 2**31
"""For any number of tokens."""
LONG_CHARS = 2**15
"""A text of more characters is long: only long texts wait for it."""
_PART_TOKENS = 2**14
_TOKENIZER_FILES = {".json", ".jinja", ".txt", ".model"}


class TextModel:
    """The tokenizer and the chat template of a model. Raise ModelError if the model has no tokenizer that can be used
    without running code of the model's own, as the methods do where it fails. Any thread may use it.

    `longest_token`: in characters. A method calls `is_abandoned` while it waits, and raises ModelError once that
    returns True. It raises TooMany for more than `most` tokens.
    """

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer, PreTrainedConfig  # noqa: F401, before the child that needs them

        from ..engine.models.loader import resolve_model
        from ..engine.models.tokenizer import longest_token

        self._folder = resolve_model(model)
        _check_files(self._folder)
        with self._explained("beside the model, found none"):
            attempt(partial(_load, self._folder))
            self._tokenizer = _load(self._folder)
        self._decode = _decoder_of(self._tokenizer)
        self._special = {id for id, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        self.longest_token = longest_token(self._tokenizer.get_vocab())
        self._children = {is_long: TextChild(self._tokenizer) for is_long in (False, True)}

    @property
    def chat_template(self) -> str | None:
        """The text of the model's chat template; None if it has none, or several."""
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else None

    def encode(
        self, text: str, add_special_tokens: bool = True, most: int = ANY, is_abandoned: IsAbandoned = never
    ) -> list[int]:
        """The token ids of plain text, by default with what the tokenizer puts around every text."""
        with self._explained("that encodes text, found that it does not"):
            child = self._children[is_long(len(text))]
            return _listed(child.encode(text, add_special_tokens, most, is_abandoned))

    def encode_chat(self, text: str, system: str | None = None) -> list[int]:
        """The token ids of a conversation in which the user has said `text` and the assistant is to answer."""
        messages = [] if system is None else [{"role": "system", "content": system}]
        return self.encode_conversation(
            [*messages, {"role": "user", "content": text}], dict(add_generation_prompt=True)
        )

    def encode_conversation(
        self,
        messages: list[dict[str, Any]],
        arguments: dict[str, Any],
        most_chars: int = MAX_CHARS,
        most: int = ANY,
        is_abandoned: IsAbandoned = never,
    ) -> list[int]:
        """The token ids of a conversation in the model's chat template, which gets `arguments` such as `tools`. Raise
        TooMany also for a text of more than `most_chars` characters.
        """
        if not self._tokenizer.chat_template:
            raise ModelError("chat: expected a model with a chat template, found one without; use plain prompts")
        child = self._children[is_long(num_chars((messages, arguments)))]
        with self._explained("that encodes text, found that it does not"):
            try:
                return _listed(child.encode_conversation(messages, arguments, most_chars, most, is_abandoned))
            except EncodingError:
                raise
            except ChildError as error:
                raise ModelError(
                    f"chat: expected a chat template that renders within {LIMITS.cpu_seconds} s and "
                    f"{LIMITS.more_bytes} bytes, found {str(error) or 'that it does not'}; check the model's chat "
                    "template, or use plain prompts"
                ) from None

    def decode(self, token_ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """The text of token ids, by default without special tokens. In this process: `check_tokenizer` bounds it."""
        try:  # streams do this for each token: a context manager would take half of the time
            return self._decode(list(token_ids), skip_special_tokens)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise self._explanation("that decodes tokens, found that it does not", error) from None

    def is_silent(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Whether a token adds no text wherever it stands: it is unknown, or special where these are skipped."""
        with self._explained("that decodes tokens, found that it does not"):
            is_skipped = skip_special_tokens and token_id in self._special
            return is_skipped or self._tokenizer.convert_ids_to_tokens(token_id) is None

    def decode_long(
        self, token_ids: Sequence[int], skip_special_tokens: bool = True, is_abandoned: IsAbandoned = never
    ) -> str:
        """Decode so many tokens that nothing else should wait for it, in the child process for long texts."""
        with self._explained("that decodes tokens, found that it does not"):
            return self._children[True].decode(token_ids, skip_special_tokens, is_abandoned)

    def close(self) -> None:
        """End the processes that encode."""
        for child in self._children.values():
            child.close()

    @contextmanager
    def _explained(self, expected: str) -> Iterator[None]:
        """Raises ModelError for whatever a tokenizer raises, of which its files decide."""
        try:
            yield
        except (ModelError, TooMany, UnavailableError):
            raise
        except Exception as error:
            raise self._explanation(expected, error) from None

    def _explanation(self, expected: str, error: BaseException) -> ModelError:
        if isinstance(error, ChildError | TrialError):
            cause = str(error) or f"it needs more than {LIMITS}, or crashes"
        else:
            cause = said(f"{type(error).__name__}: {error}")
        return ModelError(f"{self._folder}: expected a tokenizer {expected}: {cause}; check its files")


def _load(folder: Path) -> Any:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    from ..engine.models.tokenizer import check_tokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        folder, config=_short_config(folder), trust_remote_code=False, local_files_only=True
    )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(f"{type(tokenizer).__name__} is not a tokenizer")
    if isinstance(backend := getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
        check_tokenizer(backend)
    return tokenizer


def _short_config(folder: Path) -> Any:
    """The part of a model's config that transformers needs to choose the class of the tokenizer: to read the whole
    config imports the classes of models and torch's compiler, which takes seconds and 150 MB. None where the
    tokenizer's own config names no class, or one in code of its own: then transformers needs the whole config.
    """
    from transformers import PreTrainedConfig

    from ..engine.models.files import MAX_TOKENIZER_BYTES, read_json

    own, model = (
        read_json(path, MAX_TOKENIZER_BYTES) if (path := folder / name).exists() else {}
        for name in ("tokenizer_config.json", "config.json")
    )
    named = own.get("tokenizer_class"), model.get("model_type")
    if "auto_map" in own or not all(isinstance(name, str) and name for name in named):
        return None
    config = PreTrainedConfig()
    config.name_or_path = str(folder)
    for name in ("model_type", "model_name"):
        if name in model:
            setattr(config, name, model[name])
    return config


def _decoder_of(tokenizer: Any) -> Callable[[list[int], bool], str]:
    """A function like `tokenizer.decode`. Where transformers only hands the tokens on to the library in Rust, that
    library is called directly, which takes a fifth of the time: streams decode each token as it comes.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind, backend = type(tokenizer), getattr(tokenizer, "backend_tokenizer", None)
    own = getattr(kind, "_decode", None)
    hands_on = own is not None and own is getattr(PreTrainedTokenizerFast, "_decode", None)
    if isinstance(backend, Tokenizer) and hands_on and kind.decode is PreTrainedTokenizerBase.decode:
        return backend.decode
    return lambda token_ids, skip_special_tokens: tokenizer.decode(
        token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


def _listed(tokens: np.ndarray) -> list[int]:
    """The tokens as a list, made in parts, between which other threads have their turn."""
    parts = (tokens[at : at + _PART_TOKENS].tolist() for at in range(0, len(tokens), _PART_TOKENS))
    return list(chain.from_iterable(parts))


def is_long(num_chars: int) -> bool:
    """Whether a text of so many characters is encoded in the process for long texts."""
    return num_chars > LONG_CHARS


def num_chars(value: Any) -> int:
    """The characters of all strings in a JSON value."""
    return sum(map(len, strings_in(value)))


def strings_in(value: Any) -> Iterator[str]:
    """All strings in a JSON value, names of members included."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            waiting += each.keys()
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each


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
