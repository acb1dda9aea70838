"""Load a tokenizer with only the package `tokenizers`, if transformers would load its tokenizer.json without changes.

Importing transformers' AutoTokenizer imports torch, which takes seconds. For most models, transformers also rebuilds
the tokenizer with a class for the model. This module recognizes the folders for which transformers does not rebuild the
tokenizer, and leaves all other folders to transformers. Chat templates are always rendered by transformers, which is
imported for the first conversation.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from trueroll.errors import ModelError

from ..engine.models.files import MAX_TOKENIZER_BYTES, read_json
from ..engine.models.tokenizer import check_tokenizer

_CLASSES = {"TokenizersBackend", "PreTrainedTokenizerFast"}
"""The names of transformers' general tokenizer class, which serves all models without a special class."""
_MODEL_TYPES = {"gpt_oss", "llama"}
"""The types of models for which transformers always uses the class that the folder names."""
_OTHER_FILES = ("added_tokens.json", "additional_chat_templates", "special_tokens_map.json")
_WITHOUT_EFFECT = {
    "added_tokens_decoder",
    "additional_special_tokens",
    "backend",
    "chat_template",
    "clean_up_tokenization_spaces",
    "extra_special_tokens",
    "is_local",
    "local_files_only",
    "model_input_names",
    "model_max_length",
    "name_or_path",
    "padding_side",
    "tokenizer_class",
    "truncation_side",
}
"""Settings that change neither encoding nor decoding, provided that tokenizer.json contains every token that these
settings name.
"""
_FLAGS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")


class PlainTokenizer:
    """A tokenizer loaded from tokenizer.json, with those methods of transformers' tokenizers that trueroll calls."""

    def __init__(self, folder: Path, backend: Tokenizer, chat_template: str | None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend_tokenizer, self.chat_template = backend, chat_template
        self.get_vocab, self.convert_ids_to_tokens = backend.get_vocab, backend.id_to_token
        self._folder = folder
        self._renderer: Any = None

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The added tokens, by token id."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool, **_: Any) -> str:
        """Return the text of token ids."""
        return self.backend_tokenizer.decode(token_ids, skip_special_tokens)

    def apply_chat_template(self, messages: list[dict[str, Any]], **arguments: Any) -> str:
        """Render a conversation with transformers, which loads the folder's tokenizer again on the first call."""
        if self._renderer is None:
            from transformers import PreTrainedTokenizerFast

            self._renderer = PreTrainedTokenizerFast.from_pretrained(self._folder, local_files_only=True)
        return self._renderer.apply_chat_template(messages, **arguments)


def is_plain(folder: Path) -> bool:
    """Return whether the settings in a model folder allow `load_plain` to load the tokenizer. Return False if the
    settings cannot be read.
    """
    try:
        own, model = _settings(folder), read_json(folder / "config.json", MAX_TOKENIZER_BYTES)
    except ModelError:
        return False
    return (
        own.get("tokenizer_class") in _CLASSES
        and model.get("model_type") in _MODEL_TYPES
        and "model_name" not in model
        and all(key in _WITHOUT_EFFECT or key.endswith("_token") for key in own)
        and not any(key.startswith("add_") and key.endswith("_token") for key in own)
        and isinstance(own.get("chat_template", ""), str)
        and not any((folder / name).exists() for name in _OTHER_FILES)
    )


def load_plain(folder: Path) -> PlainTokenizer | None:
    """Load the tokenizer of a folder that `is_plain` accepts. Return None if the settings name a token that
    tokenizer.json lacks or describes differently. Raise ModelError if `check_tokenizer` rejects the tokenizer. Errors
    of the package `tokenizers` are not caught.
    """
    own = _settings(folder)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    check_tokenizer(backend)
    added = backend.get_added_tokens_decoder()
    if not {token.content for token in added.values()}.issuperset(_named(own)) or not _agree(own, added):
        return None
    template = folder / "chat_template.jinja"
    return PlainTokenizer(
        folder, backend, template.read_text(encoding="utf-8") if template.exists() else own.get("chat_template")
    )


def _settings(folder: Path) -> dict[str, Any]:
    return read_json(folder / "tokenizer_config.json", MAX_TOKENIZER_BYTES)


def _named(own: dict[str, Any]) -> Iterator[Any]:
    """Yield the texts of the special tokens that the settings name."""
    values = [value for key, value in own.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        extra = own.get(key) or []
        values += extra.values() if isinstance(extra, dict) else extra
    yield from (str(value.get("content")) if isinstance(value, dict) else value for value in values if value)


def _agree(own: dict[str, Any], added: dict[int, AddedToken]) -> bool:
    """Return whether tokenizer.json contains all added tokens of the settings, with the same properties."""
    listed = (own.get("added_tokens_decoder") or {}).items()
    flags = {str(id): {name: getattr(token, name) for name in _FLAGS} for id, token in added.items()}
    return all(flags.get(id) == {name: token.get(name) for name in _FLAGS} for id, token in listed)
