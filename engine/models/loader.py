"""From a model's name to weights in memory: finds the folder, reads its settings, copies its tensors.

Owns nothing that lasts: files are closed when a function returns. Knows no architecture: whoever calls says which
tensors it expects and where they go. Promises that a checkpoint is checked as a whole before the first tensor is
copied, and that at most one tensor of it is in memory beside its destination.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open

from ...kernels.ops import Weight
from ..errors import ModelError
from .smollm2 import smollm2_folder

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MOST_NAMES = 10
_DOWNLOADED = ["*.json", "*.jinja", "model*.safetensors", "tokenizer*", "*.txt"]


def resolve_model(name: str) -> Path:
    """The folder of a model: `smollm2`, a local folder, or a Hugging Face hub name, downloaded if need be.

    Raise ModelError if there is no such folder, or if the download fails.
    """
    if name == "smollm2":
        return smollm2_folder()
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        found = "a file" if path.exists() else "nothing there"
        raise ModelError(f"{name}: expected a model folder in Hugging Face format, found {found}; check the path")
    return _download(name)


def _download(name: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=_DOWNLOADED, ignore_patterns=["*/*"]))
    except (OSError, ValueError, HfHubHTTPError) as error:
        cause = " ".join(str(error).split()).rstrip(".")
        raise ModelError(
            f"{name}: expected smollm2, a local folder or the name of a model on the Hugging Face hub; there is no "
            f"such folder, and the download failed: {cause}; check the name and the network, or give a local folder"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json of a model folder holds. Raise ModelError if it is missing or broken."""
    return _read_json(folder / "config.json")


def read_eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text: those of generation_config.json, otherwise those of config.json (`config`).

    Nothing else is read from generation_config.json, so that it cannot change how a request is sampled.
    """
    path = folder / "generation_config.json"
    generation = _read_json(path) if path.exists() else {}
    found = generation.get("eos_token_id", config.get("eos_token_id"))
    if found is None:
        return ()
    token_ids = found if isinstance(found, list) else [found]
    if not all(isinstance(token_id, int) for token_id in token_ids):
        raise ModelError(f"{folder}: eos_token_id: expected a token id or a list of them, found {found!r}")
    return tuple(token_ids)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"{path}: expected a file that can be read, found {error.strerror}; is it a complete model folder?"
        ) from None
    except ValueError as error:
        raise ModelError(f"{path}: expected JSON, found {error}; download or save the model again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(content).__name__}; save the model again")
    return content


def load_checkpoint(folder: Path, destinations: Mapping[str, Weight], ignored: Collection[str]) -> None:
    """Copy every tensor of the folder's safetensors into `destinations[its name]`, converting dtype and device.

    Names in `ignored` may be in the checkpoint and are passed over.
    Raise ModelError, with nothing copied, if a file is missing or broken, or if a tensor is missing, unknown, in two
    files, or of another shape than its destination.
    """
    files = _checkpoint_files(folder)
    _check_tensors(folder, _read_shapes(files), destinations, ignored)
    for file in files:
        for name in _read_names(file) & destinations.keys():
            # Opened anew for each tensor: what was read of an open file stays in memory.
            with _open(file) as checkpoint:
                destinations[name].copy_(checkpoint.get_tensor(name))


def _read_names(file: Path) -> set[str]:
    with _open(file) as checkpoint:
        return set(checkpoint.keys())


def _checkpoint_files(folder: Path) -> list[Path]:
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).exists():
        raise ModelError(f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}, found neither; save it as safetensors")
    weight_map = _read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{folder / INDEX_FILE}: expected a weight_map of tensors to files; save the model again")
    return [folder / name for name in sorted(set(weight_map.values()))]


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as checkpoint:
            yield checkpoint
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{file}: expected a complete safetensors file, found: {error}; download or save the model again"
        ) from error


def _read_shapes(files: Sequence[Path]) -> dict[str, list[tuple[int, ...]]]:
    """For each name the shapes of the tensors that carry it, which should be one."""
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for file in files:
        with _open(file) as checkpoint:
            for name in checkpoint.keys():
                shapes.setdefault(name, []).append(tuple(checkpoint.get_slice(name).get_shape()))
    return shapes


def _check_tensors(
    folder: Path,
    found: dict[str, list[tuple[int, ...]]],
    destinations: Mapping[str, Weight],
    ignored: Collection[str],
) -> None:
    misshapen = [
        f"{name} (expected {list(tensor.shape)}, found {list(found[name][0])})"
        for name, tensor in destinations.items()
        if name in found and found[name][0] != tuple(tensor.shape)
    ]
    faults = {
        "missing": sorted(destinations.keys() - found.keys()),
        "unknown": sorted(found.keys() - destinations.keys() - set(ignored)),
        "in more than one file": sorted(name for name, shapes in found.items() if len(shapes) > 1),
        "of the wrong shape": misshapen,
    }
    described = [f"{len(names)} {fault}: {_list_names(names)}" for fault, names in faults.items() if names]
    if described:
        raise ModelError(
            f"{folder}: the tensors do not fit the model that config.json describes: {'; '.join(described)}; "
            "check that config.json and the safetensors files belong together"
        )


def _list_names(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
