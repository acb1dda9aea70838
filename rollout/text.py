"""Conversion between text and token ids, for the tools and the HTTP front end. Workers use token ids only.

Never runs Python code from a model's folder. A tokenizer is loaded without the model's own code, after a trial in a
child process with limits. A chat template is a program, so a child process renders the template and encodes the result.
Short and long texts have separate child processes. Imports transformers only for a tokenizer or a conversation that
needs transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from time import time
from typing import Any

import numpy as np

from trueroll.errors import ConfigError, ModelError, UnavailableError, brief, said

from ..engine.models.child_process import IsAbandoned, never
from ..engine.models.trials import TrialError, attempt
from . import protocol
from .text_child import LIMITS, MAX_CHARS, ChildError, EncodingError, TextChild, TooMany, image_mark

ANY = 2**31
"""The value of `most` that means no limit on the number of tokens."""
LONG_CHARS = 2**15
"""Texts with more characters are encoded in the process for long texts, so that short texts never wait for long ones.
"""
LONG_NICENESS = 10
"""Niceness of the process for long texts, so that long texts delay short requests less on a machine with few cores."""
_PART_TOKENS = 2**14
_TOKENIZER_FILES = {".json", ".jinja", ".txt", ".model"}


class TextModel:
    """A model's tokenizer and chat template. Thread-safe.

    The constructor raises ModelError if the model has no tokenizer, or if the tokenizer needs code from the model's
    folder. The methods raise ModelError if the tokenizer fails.

    The argument `is_abandoned` is a function. Methods with this argument call the function while they wait, and raise
    ModelError once the function returns True. Methods with the argument `most` raise TooMany if the text has more than
    `most` tokens.
    `name`: the name of the model. `longest_token`: length of the longest token in characters. `added_tokens`: ids of
    the tokens that were added to the vocabulary, such as special tokens, by text.
    """

    def __init__(self, model: str) -> None:
        from ..engine.models.names import resolve_model
        from ..engine.models.tokenizer import longest_token
        from .plain_tokenizer import is_plain

        self.name = model
        self._folder = resolve_model(model)
        _check_files(self._folder)
        if not is_plain(self._folder):
            from transformers import AutoTokenizer, PreTrainedConfig  # noqa: F401, before the fork for the child

        with self._explained("the model's tokenizer does not load"):
            attempt(partial(_load, self._folder))
            self._tokenizer = _load(self._folder)
        self._decode = _decoder_of(self._tokenizer)
        added = self._tokenizer.added_tokens_decoder
        self._special = {id for id, token in added.items() if token.special}
        self.added_tokens = {token.content: id for id, token in added.items()}
        self.longest_token = longest_token(self._tokenizer.get_vocab())
        self._children = {False: TextChild(self._tokenizer), True: TextChild(self._tokenizer, niceness=LONG_NICENESS)}

    @property
    def chat_templates(self) -> dict[str, str]:
        """Texts of the model's chat templates, by name. A single template has the name `default`."""
        found = self._tokenizer.chat_template or {}
        return {"default": found} if isinstance(found, str) else {name: str(text) for name, text in found.items()}

    def image_texts(self, placeholder: int) -> tuple[str, ...]:
        """Return the texts that stand for an image in a rendered conversation. `placeholder`: the token id of the
        model's placeholder.
        """
        mark = image_mark(self._tokenizer)
        return (self.decode([placeholder], False), *(mark[:1] if mark else ()))

    def encode(
        self, text: str, add_special_tokens: bool = True, most: int = ANY, is_abandoned: IsAbandoned = never
    ) -> list[int]:
        """Return the token ids of plain text, by default with the special tokens that the tokenizer adds to texts."""
        with self._explained("the tokenizer does not encode the text"):
            child = self._children[is_long(len(text))]
            return _listed(child.encode(text, add_special_tokens, most, is_abandoned))

    def encode_chat(self, text: str, system: str | None = None) -> list[int]:
        """Return the token ids of a conversation with the user message `text`, up to the start of the answer."""
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
        """Return the token ids of a conversation, rendered by the model's chat template.

        `arguments`: arguments of the template, such as `tools`. The content of a message may be a list with parts
        `{"type": "image"}`, which become one placeholder each. Also raise TooMany if the rendered text has more than
        `most_chars` characters.
        """
        with self._rendering(messages, arguments) as child:
            return _listed(child.encode_conversation(messages, arguments, most_chars, most, is_abandoned))

    def render(
        self,
        messages: list[dict[str, Any]],
        arguments: dict[str, Any],
        at: float | None = None,
        is_abandoned: IsAbandoned = never,
    ) -> str:
        """Return the text of a conversation, rendered by the model's chat template.

        `at`: the time that the template gets as the current time, in seconds since 1970; None: now. Other arguments and
        errors: see `encode_conversation`.
        """
        with self._rendering(messages, arguments) as child:
            return child.render(messages, arguments, MAX_CHARS, time() if at is None else at, is_abandoned)

    @contextmanager
    def _rendering(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> Iterator[TextChild]:
        """Yield the child process for a conversation, and convert its errors to ModelError."""
        if not self._tokenizer.chat_template:
            raise ModelError("chat: the model has no chat template; use plain prompts")
        with self._explained("the tokenizer does not encode the text"):
            try:
                yield self._children[is_long(num_chars((messages, arguments)))]
            except EncodingError:
                raise
            except ChildError as error:
                limits = f"{LIMITS.cpu_seconds} s or {LIMITS.more_bytes} bytes"
                cause = str(error) or f"rendering needs more than {limits}, or crashes"
                raise ModelError(
                    f"chat: the model's chat template cannot be rendered: {cause}; check the template, or use plain "
                    "prompts"
                ) from None

    def decode(self, token_ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, by default without special tokens.

        Decodes in this process, which is safe: when the tokenizer was loaded, `check_tokenizer` limited the cost of
        decoding.
        """
        try:  # a context manager would double the time of this frequent call
            return self._decode(list(token_ids), skip_special_tokens)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic of the Rust library is not an Exception
            raise self._explanation("the tokenizer cannot decode the tokens", error) from None

    def is_silent(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Return whether a token never adds text. Unknown tokens never add text. Special tokens never add text while
        special tokens are skipped.
        """
        with self._explained("the tokenizer cannot decode the tokens"):
            is_skipped = skip_special_tokens and token_id in self._special
            return is_skipped or self._tokenizer.convert_ids_to_tokens(token_id) is None

    def decode_long(
        self, token_ids: Sequence[int], skip_special_tokens: bool = True, is_abandoned: IsAbandoned = never
    ) -> str:
        """Return the text of many token ids. Decodes in the process for long texts, to keep other work unblocked."""
        with self._explained("the tokenizer cannot decode the tokens"):
            return self._children[True].decode(token_ids, skip_special_tokens, is_abandoned)

    def close(self) -> None:
        """Stop the child processes."""
        for child in self._children.values():
            child.close()

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Convert all exceptions to ModelError, because malformed tokenizer files can cause exceptions of any type."""
        try:
            yield
        except (ModelError, TooMany, UnavailableError):
            raise
        except Exception as error:
            raise self._explanation(what, error) from None

    def _explanation(self, what: str, error: BaseException) -> ModelError:
        if isinstance(error, ChildError | TrialError):
            cause = str(error) or f"the tokenizer needs more than {LIMITS}, or crashes"
        else:
            cause = said(f"{type(error).__name__}: {error}")
        return ModelError(f"{self._folder}: {what}: {cause}; check the tokenizer's files")


def decode_marked(
    decode: Callable[[Sequence[int], bool], str],
    token_ids: Sequence[int],
    skip_special_tokens: bool,
    marks: Mapping[int, str],
) -> str:
    """Return the text of token ids. `decode`: a function like `TextModel.decode`. `marks`: for some token ids, a text
    that replaces the token's text in the vocabulary.
    """
    if not marks or marks.keys().isdisjoint(token_ids):
        return decode(token_ids, skip_special_tokens)
    told, start = list[str](), 0
    for at, token_id in enumerate(token_ids):
        if token_id in marks:
            told += (decode(token_ids[start:at], skip_special_tokens), marks[token_id])
            start = at + 1
    return "".join([*told, decode(token_ids[start:], skip_special_tokens)])


def texts_of_marks(decode: Callable[[Sequence[int], bool], str], marks: Mapping[int, str]) -> dict[int, str]:
    """For each mark, return the text that a worker sees instead of the mark when the worker searches for stop strings.
    This is the text of the mark's token, which is empty for a special token. The keys of the result are the code points
    of the marks. `decode`, `marks`: as in `decode_marked`; each mark is one character.
    """
    return {ord(mark): decode([token_id], True) for token_id, mark in marks.items()}


def place_in(text: str, end: int, mark_texts: Mapping[int, str], at: int = 0, start: int = 0) -> tuple[int, int]:
    """Return the last position in `text` that has at most `end` plain characters before it, and the number of plain
    characters before this position. `text`: a text with marks, as `decode_marked` returns it. Plain characters are the
    characters of this text after `mark_texts` have replaced the marks. A mark is never divided, so the position is
    either before or after all plain characters of the mark.

    `mark_texts`: the result of `texts_of_marks`. `at`, `start`: an earlier position, and the number of plain characters
    before that position.
    """
    while at < len(text) and start < end:
        size = len(mark_texts.get(ord(text[at]), " "))
        if start + size > end:
            break
        at, start = at + 1, start + size
    return at, start


def before_stop(text: str, stop: str, start: int, mark_texts: Mapping[int, str]) -> str:
    """Return the part of `text`, a text with marks, before a stop string. Return the whole text if the stop string is
    not found.

    The stop string is searched in the plain characters of `text` (see `place_in`), after the first `start` of them. If
    the stop string begins within the plain characters of a mark, the returned part ends with those plain characters of
    the mark that come before the stop string. `mark_texts`: the result of `texts_of_marks`.
    """
    end = text.translate(mark_texts).find(stop, start)
    if end < 0:
        return text
    at, size = place_in(text, end, mark_texts)
    return text[:at] + text[at : at + 1].translate(mark_texts)[: end - size]


def prepare_for_conversations() -> None:
    """Import the modules that render chat templates, so that the child processes need not import them. The import takes
    a second.
    """
    from transformers import PreTrainedTokenizerFast  # noqa: F401


def _load(folder: Path) -> Any:
    """Return the tokenizer of a model folder. Raise an exception of any type if the tokenizer cannot be loaded or must
    not be used.
    """
    from .plain_tokenizer import is_plain, load_plain

    tokenizer = load_plain(folder) if is_plain(folder) else None
    return _load_by_transformers(folder) if tokenizer is None else tokenizer


def _load_by_transformers(folder: Path) -> Any:
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
    """Return the part of a model's config that transformers needs to choose the tokenizer's class.

    Reading the whole config would import model classes and torch's compiler, which takes seconds and 150 MB. Return
    None if transformers needs the whole config: if the tokenizer's config names no class, or names a class in the
    model's own code, or if the model's config has no `model_type`.
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
    """Return a function like `tokenizer.decode`.

    If transformers would only pass the tokens to the Rust library, the returned function calls the library directly. A
    direct call takes a fifth of the time, which matters because streams decode each token as it arrives.
    """
    from .plain_tokenizer import PlainTokenizer

    if isinstance(tokenizer, PlainTokenizer):
        return tokenizer.backend_tokenizer.decode
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
    """Return the tokens as a list. Converts in chunks, so that other threads can run between two chunks."""
    parts = (tokens[at : at + _PART_TOKENS].tolist() for at in range(0, len(tokens), _PART_TOKENS))
    return list(chain.from_iterable(parts))


def is_long(num_chars: int) -> bool:
    """Return whether a text with `num_chars` characters is encoded in the process for long texts."""
    return num_chars > LONG_CHARS


def num_chars(value: Any) -> int:
    """Return the number of characters in all strings of a JSON value."""
    return sum(map(len, strings_in(value)))


def strings_in(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, including the keys of objects."""
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
    """Return the name of the worker's model if the model is available on this machine.

    Raise ConfigError if the model is not available here, because a model name from a worker must never cause a
    download.
    """
    from ..engine.models.files import local_path

    if health.engine is None:
        raise ConfigError(
            f"tokenizer: the worker is {health.state} and its model is not known yet; wait, or give --tokenizer MODEL"
        )
    model = health.engine.get("model")
    path = local_path(model) if isinstance(model, str) else None
    if not isinstance(model, str) or model != "smollm2" and (path is None or not path.is_dir()):
        raise ConfigError(
            f"tokenizer: the worker serves {brief(model)}, which is neither smollm2 nor a folder on this machine; give "
            "the model as --tokenizer MODEL"
        )
    return model


def needs_tokenizer(address: str) -> ConfigError:
    """Return the error for a command without `--tokenizer`, if the worker may run on another machine."""
    return ConfigError(
        f"tokenizer: the worker at {address} may run on another machine; give the model that it serves as --tokenizer "
        "MODEL"
    )


def _check_files(folder: Path) -> None:
    from ..engine.models.files import MAX_TOKENIZER_BYTES, check_file

    for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if path.suffix in _TOKENIZER_FILES:
            check_file(path, MAX_TOKENIZER_BYTES)
