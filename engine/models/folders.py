"""Errors for folders that contain no model, and for folders that contain an adapter beside a model.

Each error says what the folder contains and what to do. Owns nothing. Guarantees: only the names of files and the
settings of an adapter are read. Pickles are never opened.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from trueroll.errors import ModelError, brief

from .files import list_names, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_FILES = {_ADAPTER_CONFIG, "adapter_model.safetensors", "adapter_model.bin"}
_PICKLES = re.compile(r"pytorch_model[\w.-]*\.bin(\.index\.json)?", re.ASCII)
_CHECKPOINT = re.compile(r"checkpoint-([0-9]{1,18})")
_MAX_CHECKPOINTS = 10


def refuse_what_is_no_model(folder: Path) -> None:
    """Raise ModelError if a folder contains an adapter, or contains a trainer's checkpoints but no weights of its own.

    An adapter beside weights is also rejected, because the weights may be the adapter's base model or may already
    include the adapter.
    """
    names = set(list_names(folder))
    has_weights = bool({SINGLE_FILE, INDEX_FILE} & names)
    if _ADAPTER_FILES & names:
        raise _is_adapter(folder, has_weights)
    if not has_weights and not any(map(_PICKLES.fullmatch, names)) and (checkpoints := _checkpoints(folder, names)):
        raise _holds_checkpoints(folder, checkpoints)


def no_weights(folder: Path) -> ModelError:
    """Return the error for a model folder without safetensors files."""
    lacking = f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}"
    pickles = sorted(filter(_PICKLES.fullmatch, list_names(folder)))
    if not pickles:
        return ModelError(f"{lacking}; save the model there, as transformers' save_pretrained does")
    more = f" and {len(pickles) - 1} more" if len(pickles) > 1 else ""
    return ModelError(
        f"{lacking}, but {pickles[0]}{more}: pickles, which may run code and are therefore not opened; if you trust "
        f"the pickles, convert them with transformers, `AutoModelForCausalLM.from_pretrained('{folder}', dtype='auto')"
        ".save_pretrained('NEW')`, copy the files of the tokenizer to NEW as well, and serve NEW"
    )


def _is_adapter(folder: Path, has_weights: bool) -> ModelError:
    adapter = f"an adapter of {_base_model(folder)}"
    found = (
        f"holds a model and {adapter}, which would not be applied" if has_weights else f"holds no model, but {adapter}"
    )
    moved = "; if the adapter is merged into these weights already, or is not wanted, move adapter_* elsewhere"
    return ModelError(
        f"{folder}: {found}; merge it with peft, `AutoPeftModelForCausalLM.from_pretrained('{folder}')"
        ".merge_and_unload().save_pretrained('MERGED')`, copy the files of the tokenizer to MERGED as well, and serve "
        f"MERGED{moved if has_weights else ''}"
    )


def _base_model(folder: Path) -> str:
    path = folder / _ADAPTER_CONFIG
    name = read_json(path).get("base_model_name_or_path") if os.path.lexists(path) else None
    return f"the model {brief(name)}" if isinstance(name, str) else "a model that it does not name"


def _checkpoints(folder: Path, names: set[str]) -> list[str]:
    """Return the names of a trainer's checkpoints, sorted by number."""
    matches = [match for match in map(_CHECKPOINT.fullmatch, names) if match and (folder / match[0]).is_dir()]
    return [match[0] for match in sorted(matches, key=lambda match: int(match[1]))]


def _holds_checkpoints(folder: Path, checkpoints: list[str]) -> ModelError:
    earlier = len(checkpoints) - _MAX_CHECKPOINTS
    listed = (f"{earlier} earlier and " if earlier > 0 else "") + ", ".join(checkpoints[-_MAX_CHECKPOINTS:])
    return ModelError(
        f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}, but checkpoints of a trainer: {listed}; serve one of "
        f"them, such as {folder / checkpoints[-1]}"
    )
