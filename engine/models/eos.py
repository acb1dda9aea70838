"""End-of-sequence tokens, read from the files of a model folder.

Owns nothing. Guarantees: the result is the union of the tokens named in generation_config.json, config.json and the
tokenizer. A sample therefore ends wherever transformers or another server would end it. Only the JSON files of a
tokenizer are read, and no code in the model folder runs. The result contains only token ids in the model's vocabulary.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from trueroll.errors import ModelError, brief

from .files import MAX_SETTINGS_BYTES, MAX_TOKENIZER_BYTES, read_json

MAX_EOS_TOKENS = 256
"""The maximum number of end-of-sequence tokens that one file may name."""
_NAMING = ("tokenizer_config.json", "special_tokens_map.json")
_TOKENIZER = "tokenizer.json"
log = logging.getLogger(__name__)


def find_eos_tokens(folder: Path, config: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that end a text, in [0, vocab_size).

    The result has the ids in generation_config.json, the ids in `config` (the content of config.json), and the id of
    the tokenizer's `eos_token`. Other settings in these files are ignored, so that a file cannot change how a request
    is sampled. The log shows which file named which token, and a warning if no file names a token.

    Raise ModelError if a file cannot be read, or if a setting is not a token id in the vocabulary. If the tokenizer's
    `eos_token` has no id in the vocabulary, log a warning and skip the token.
    """
    generation = folder / "generation_config.json"
    files = {
        generation: _read_ids(generation, _read_optional(generation, MAX_SETTINGS_BYTES), vocab_size),
        folder / "config.json": _read_config_ids(folder / "config.json", config, vocab_size),
        folder / _TOKENIZER: _tokenizer_ids(folder, vocab_size),
    }
    sources: dict[int, list[str]] = {}
    for path, token_ids in files.items():
        for token_id in token_ids:
            sources.setdefault(token_id, []).append(path.name)
    _log_sources(folder, sources)
    return tuple(sources)


def _log_sources(folder: Path, sources: dict[int, list[str]]) -> None:
    if sources:
        named = ", ".join(f"{token_id} ({', '.join(files)})" for token_id, files in sources.items())
        log.info("%s: samples end at the tokens %s", folder, named)
        return
    log.warning(
        "%s: generation_config.json, config.json and the tokenizer name no end-of-sequence token; samples end only at "
        "max_tokens, stop_token_ids and stop; set eos_token_id in generation_config.json",
        folder,
    )


def _read_optional(path: Path, max_bytes: int) -> dict[str, Any]:
    return read_json(path, max_bytes) if os.path.lexists(path) else {}


def _read_config_ids(path: Path, config: dict[str, Any], vocab_size: int) -> list[int]:
    """Return the token ids that `eos_token_id` gives in a config.json and, if present, in its `text_config`."""
    text = config.get("text_config")
    nested = _read_ids(path, text, vocab_size) if isinstance(text, dict) else []
    return list(dict.fromkeys([*_read_ids(path, config, vocab_size), *nested]))


def _read_ids(path: Path, settings: dict[str, Any], vocab_size: int) -> list[int]:
    """Return the ids in `eos_token_id` of a file's settings, without duplicates."""
    found = settings.get("eos_token_id")
    token_ids = found if isinstance(found, list) else [] if found is None else [found]
    if len(token_ids) > MAX_EOS_TOKENS or not all(type(token_id) is int for token_id in token_ids):
        raise ModelError(
            f"{path}: eos_token_id must be a token id or a list of at most {MAX_EOS_TOKENS} token ids (got "
            f"{brief(found)}); correct it"
        )
    outside = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if outside:
        raise ModelError(f"{path}: eos_token_id must be in [0, {vocab_size}) (got {brief(outside[0])}); correct it")
    return list(dict.fromkeys(token_ids))


def _tokenizer_ids(folder: Path, vocab_size: int) -> list[int]:
    """Return a list with the id of the tokenizer's `eos_token`. The list is empty if the tokenizer has no such token,
    or if the token has no id.
    """
    token = next(filter(None, (_read_token(folder / name) for name in _NAMING)), None)
    if token is None:
        return []
    found = _look_up(folder / _TOKENIZER, token)
    if isinstance(found, int) and 0 <= found < vocab_size:
        return [found]
    log.warning(
        "%s: the tokenizer's eos_token %s has %s; samples do not end at it; correct the tokenizer, or set eos_token_id "
        "in generation_config.json",
        folder / _TOKENIZER,
        brief(token),
        f"id {brief(found)}, outside [0, {vocab_size})" if isinstance(found, int) else f"no id ({found})",
    )
    return []


def _read_token(path: Path) -> str | None:
    """Return `eos_token` of a tokenizer file, or None."""
    found = _read_optional(path, MAX_TOKENIZER_BYTES).get("eos_token")
    token = found.get("content") if isinstance(found, dict) else found
    if not isinstance(token, str) and found is not None:
        raise ModelError(
            f"{path}: eos_token must be a string, or an object with a string in `content` (got {brief(found)}); "
            "save the tokenizer again"
        )
    return token


def _look_up(path: Path, token: str) -> int | str:
    """Look up a token in the added tokens, then in the vocabulary.

    Return the token's id, or the reason why the token has no id.
    """
    if not os.path.lexists(path):
        return "no such file"
    tokenizer = read_json(path, MAX_TOKENIZER_BYTES)
    added, model = tokenizer.get("added_tokens"), tokenizer.get("model")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and entry.get("content") == token and type(entry.get("id")) is int:
            return entry["id"]
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found = vocabulary.get(token) if isinstance(vocabulary, dict) else None
    return found if type(found) is int else "no such token"
