"""From a model's name to weights in memory: finds the folder, reads its settings, copies its tensors.

Owns nothing that lasts: files are closed when a function returns. Knows no architecture: whoever calls says which
tensors it expects and where they go. Promises that a checkpoint is checked as a whole before the first tensor is
copied, and that beside its destination at most one tensor, or `_MAX_OPEN_BYTES` of smaller ones, is in memory.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open

from trueroll.errors import ModelError, brief, said

from ...kernels.contract import Weight
from .files import check_file, local_path, read_json
from .folders import INDEX_FILE, SINGLE_FILE, no_weights
from .smollm2 import smollm2_folder

MAX_HEADER_BYTES = 2**24
"""Of all headers of a checkpoint, and of its index. 100,000 tensors need 12 MB; a decoder has some thousands."""
MAX_FILES = 1024
"""Of a checkpoint. Files of 5 GB hold 5 TB so."""
HUB = "hf://"
_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+\Z", re.ASCII)
_MAX_OPEN_BYTES = 2**26
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_NAMES = 10
_MAX_NAME_CHARS = 200
_DOWNLOADED = ["*.json", "*.jinja", "*.txt", "*.model", "model*.safetensors"]


class _Found(NamedTuple):
    """A tensor as the header of its file has it, where it is called `name`."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str


class Checkpoint(NamedTuple):
    """What is to be copied. `files`: for each file the names of its tensors, there and in the decoder. `dtypes`: how
    many tensors are stored in each.
    """

    files: dict[Path, list[tuple[str, str]]]
    dtypes: Counter[torch.dtype]


def resolve_model(name: str) -> Path:
    """The folder of a model: `smollm2`; `hf://ORG/NAME` or `hf://ORG/NAME@REVISION`, a model of the Hugging Face hub,
    downloaded if need be; or any other name, a local folder. No code is downloaded.

    Raise ModelError if there is no such folder, or if the download fails.
    """
    if name == "smollm2":
        return smollm2_folder()
    if name.startswith(HUB):
        return _download(name)
    if (path := local_path(name)) is not None and path.is_dir():
        return path
    found = "nothing there" if path is None else "a file"
    hint = f"; a model of the Hugging Face hub is written {HUB}{name}" if path is None and _ON_HUB.match(name) else ""
    raise ModelError(f"{name}: expected a model folder in Hugging Face format, found {found}; check the path{hint}")


def _download(name: str) -> Path:
    repository, at, revision = name.removeprefix(HUB).partition("@")
    if not _ON_HUB.match(repository) or bool(at) != bool(revision):
        raise ModelError(
            f"{name}: expected {HUB}ORG/NAME or {HUB}ORG/NAME@REVISION, with the revision a commit, a tag or a branch, "
            "found another form; correct it"
        )
    try:
        folder = snapshot_download(
            repository, revision=revision or None, allow_patterns=_DOWNLOADED, ignore_patterns=["*/*"]
        )
    except (OSError, ValueError, HfHubHTTPError) as error:
        cause = said(error).rstrip(".")
        raise ModelError(
            f"{name}: expected a model of the Hugging Face hub, found that the download failed: {cause}; check the "
            "name and the network, or give a local folder"
        ) from error
    return Path(folder)


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json of a model folder holds. Raise ModelError if it is missing or broken."""
    return read_json(folder / "config.json")


def read_checkpoint(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of a folder's safetensors files with its name there, one at a time. Raise ModelError if a file is
    missing, broken or out of proportion.
    """
    files = _checkpoint_files(folder)
    _check_headers(folder, files)
    for file in files:
        with _open(file) as checkpoint:
            for name in checkpoint.keys():
                yield name, checkpoint.get_tensor(name)


def copy_checkpoint(checkpoint: Checkpoint, destinations: Mapping[str, Weight]) -> None:
    """Copy each tensor of a checkpoint into `destinations[its name in the decoder]`, converting dtype and device.

    Raise ModelError if a file can no longer be read.
    """
    for file, names in checkpoint.files.items():
        left = [*names]
        while left:
            # Opened anew now and then: what was read of an open file stays in memory.
            with _open(file) as opened:
                _copy_some(opened, left, destinations)


def _copy_some(opened: Any, names: list[tuple[str, str]], destinations: Mapping[str, Weight]) -> None:
    """Copies tensors, and takes their names off the list, until _MAX_OPEN_BYTES were read."""
    num_bytes = 0
    while names and num_bytes < _MAX_OPEN_BYTES:
        name, own_name = names.pop()
        tensor = opened.get_tensor(name)
        destinations[own_name].copy_(tensor)
        num_bytes += tensor.nbytes


def check_checkpoint(
    folder: Path,
    expected: Mapping[str, Weight],
    ignored: Collection[str],
    own_name: Callable[[str], str | None] = str,
) -> Checkpoint:
    """The tensors `expected` of the folder's safetensors files. Reads nothing but headers, and of `expected` uses only
    the shapes. Names in `ignored` may be in a file and are left out. `own_name(name)`: what a file's tensor is called
    in `expected` and `ignored`; None if it is left out.

    Raise ModelError if a file is missing, broken or out of proportion, or if a tensor is missing, unknown, in two
    files, or of another shape or kind of numbers than expected.
    """
    files = _checkpoint_files(folder)
    _check_headers(folder, files)
    found = _read_headers(files, own_name)
    _check_tensors(folder, found, expected, ignored)
    names: dict[Path, list[tuple[str, str]]] = {}
    for name in sorted(expected):
        [tensor] = found[name]
        names.setdefault(tensor.file, []).append((tensor.name, name))
    return Checkpoint(names, Counter(_DTYPES[found[name][0].dtype] for name in expected))


def _checkpoint_files(folder: Path) -> list[Path]:
    if os.path.lexists(folder / SINGLE_FILE):
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if not os.path.lexists(index):
        raise no_weights(folder)
    weight_map = read_json(index, MAX_HEADER_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index}: expected a weight_map of tensors to files; save the model again")
    names = sorted(set(weight_map.values()))
    if len(names) > MAX_FILES:
        raise ModelError(f"{index}: expected at most {MAX_FILES} files, found {len(names)}; save it in fewer")
    outside = [name for name in names if not _is_plain(name)]
    if outside:
        raise ModelError(
            f"{index}: expected names of .safetensors files in this folder, found {brief(outside[0])}; check where the "
            "model comes from"
        )
    return [folder / name for name in names]


def _is_plain(name: str) -> bool:
    return name.endswith(".safetensors") and name.isprintable() and "/" not in name


def _check_headers(folder: Path, files: Sequence[Path]) -> None:
    """Before a header is parsed, which takes up to 50 times its bytes of memory."""
    num_bytes = sum(_header_bytes(file) for file in files)
    if num_bytes > MAX_HEADER_BYTES:
        raise ModelError(
            f"{folder}: expected headers of at most {MAX_HEADER_BYTES} bytes in its safetensors, found {num_bytes}; "
            "no model that is served here needs so many, so check where it comes from"
        )


def _header_bytes(file: Path) -> int:
    check_file(file)
    try:
        with file.open("rb") as opened:
            header, rest = int.from_bytes(opened.read(8), "little"), os.fstat(opened.fileno()).st_size - 8
    except OSError as error:
        raise _incomplete(file, error) from None
    if header > rest:
        raise _incomplete(file, f"a header of {header} bytes in a file with {rest} more")
    return header


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as checkpoint:
            yield checkpoint
    except (OSError, SafetensorError) as error:
        raise _incomplete(file, error) from error


def _incomplete(file: Path, found: object) -> ModelError:
    return ModelError(
        f"{file}: expected a complete safetensors file, found: {said(found)}; download or save the model again"
    )


def _read_headers(files: Sequence[Path], own_name: Callable[[str], str | None]) -> dict[str, list[_Found]]:
    """For each name in the decoder the tensors that carry it, which should be one."""
    headers: dict[str, list[_Found]] = {}
    for file in files:
        with _open(file) as checkpoint:
            for name in checkpoint.keys():
                if (own := own_name(name)) is None:
                    continue
                tensor = checkpoint.get_slice(name)
                headers.setdefault(own, []).append(_Found(name, file, tuple(tensor.get_shape()), tensor.get_dtype()))
    return headers


def _check_tensors(
    folder: Path,
    found: dict[str, list[_Found]],
    expected: Mapping[str, Weight],
    ignored: Collection[str],
) -> None:
    both = {name: (tuple(tensor.shape), found[name][0]) for name, tensor in expected.items() if name in found}
    faults = {
        "missing": sorted(expected.keys() - found.keys()),
        "unknown": sorted(found.keys() - expected.keys() - set(ignored)),
        "there more than once": sorted(name for name, tensors in found.items() if len(tensors) > 1),
        "of the wrong shape": [
            f"{name} (expected {list(wanted)}, found {brief(list(tensor.shape))})"
            for name, (wanted, tensor) in both.items()
            if wanted != tensor.shape
        ],
        f"not of {', '.join(_DTYPES)}": [
            f"{name} ({tensor.dtype})" for name, (_, tensor) in both.items() if tensor.dtype not in _DTYPES
        ],
    }
    described = [f"{len(names)} {fault}: {_list_names(names)}" for fault, names in faults.items() if names]
    if described:
        raise ModelError(
            f"{folder}: the tensors do not fit the model that config.json describes: {'; '.join(described)}; "
            "check that config.json and the safetensors files belong together"
        )


def _list_names(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMES
    listed = (
        name if name.isprintable() and len(name) <= _MAX_NAME_CHARS else brief(name) for name in names[:_MAX_NAMES]
    )
    return ", ".join(listed) + (f" and {more} more" if more > 0 else "")
