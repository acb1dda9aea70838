"""Folders with a saved LoRA adapter, in the format of PEFT's `save_pretrained`.

A folder holds a config (`CONFIG_FILE`) and one safetensors file with the matrices A and B (`ADAPTER_FILE`). The worker
reads only what its `PushPolicy` allows, and checks all data before use. A folder has no checksums, so a changed value
in a file goes undetected, unless the value is not finite. A file that changes while it is read is detected.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from trueroll.errors import PushError

from ...kernels.spellings import Names, own_name
from ..payload.adapters import Adapted, factors_alone
from ..payload.lora_config import MOST_CONFIG_BYTES, LoraConfig, read_config
from ..payload.manifest import (
    Adapters,
    Bucket,
    Parameters,
    Rows,
    checksum,
    describe_unknown,
    factor_names,
    spellings_of,
)
from ..payload.tensor_file import DTYPE_CODES, LocalFile, TensorEntry, TensorFile, max_header_bytes
from ..payload.tensors import DTYPES, dtypes_of
from .policy import PushPolicy

CONFIG_FILE = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_DTYPES = {DTYPE_CODES[name]: dtype for name, dtype in DTYPES.items()}


class NamedParameters(Parameters, Names, Protocol):
    """A worker's parameters, and the other names under which the parameters may arrive."""


class PeftFolder:
    """Reads the adapter in `folder`. Implements `Reader`.

    `weights`: the worker's parameters, to which the adapter is added. `adapters`: the adapted weights under the
    worker's names; adapters-only, with an empty `base`, because a folder does not say which base weights it belongs to.
    `wanted`: the tensors that `read_unannounced` yields, which are A and B of each weight in `adapters`.

    Modules that the worker's model leaves out, such as a vision tower, are skipped, as in a push.

    Raise PushError if `policy` forbids reading the folder. Also raise PushError if a file is missing, invalid or too
    long, if the adapter is not plain LoRA of linear layers, or if the adapter does not fit `weights`.
    """

    adapters: Adapters
    wanted: Adapted

    def __init__(self, folder: str, weights: NamedParameters, policy: PushPolicy) -> None:
        self._path = Path(folder) / ADAPTER_FILE
        with ExitStack() as opened:
            config, model = self._files = [opened.enter_context(file) for file in _open(folder, policy)]
            self._states = [_state(file) for file in self._files]
            most = max_header_bytes(2 * len(weights.shapes))
            self._tensors = TensorFile(LocalFile(model, self._path), lambda _: None, most)
            told = _read_config(config, Path(folder) / CONFIG_FILE)
            self._entries: dict[str, TensorEntry] = {}
            self.adapters = Adapters(weights=self._take(told, weights), base=())
            self.wanted = factors_alone(weights, self.adapters)
            for name, entry in self._entries.items():
                self._check_shape(entry, self.wanted.shapes[name])
            self._opened = opened.pop_all()

    def prepare(self, bucket: Bucket) -> None:
        """Do nothing. A folder has no buckets, and `read` refuses any bucket."""

    def read(self, bucket: Bucket) -> torch.Tensor:
        raise PushError(f"bucket {bucket.index}: a saved adapter has no buckets; send verify_push instead")

    def read_unannounced(self) -> Iterator[tuple[Bucket, Callable[[], torch.Tensor]]]:
        """Yield each matrix, in the dtype that the worker uses, as a bucket of one piece, together with a function that
        returns the matrix's bytes. Values are converted as in a push by a trainer, so the folder and the push give the
        same bits.

        Raise PushError if a file cannot be read, or has changed since the constructor opened it.
        """
        dtype_of = dtypes_of(self.wanted)
        for name, entry in self._entries.items():
            values = self._tensors.read(entry).view(_DTYPES[entry.dtype]).to(dtype_of(name))
            data = values.view(torch.uint8)
            yield _bucket(name, entry, data), lambda data=data: data
        if [_state(file) for file in self._files] != self._states:
            raise PushError(f"peft: {self._path.parent} was changed while it was read; load the adapter again")

    def close(self) -> None:
        self._opened.close()

    def _take(self, config: LoraConfig, weights: NamedParameters) -> tuple[tuple[str, int, float], ...]:
        """Return (name, rank, scale) of each adapted weight that the worker has, and add A and B to `_entries`."""
        modules: dict[str, str] = {}
        for module, pair in self._pairs().items():
            own = own_name(f"{module}.weight", weights)
            if own is None:
                continue
            self._check_weight(pair[0], own, weights)
            if factor_names(own)[0] in self._entries:
                self._refuse(pair[0], f"belongs to {own}, which has another adapter")
            self._entries |= zip(factor_names(own), pair, strict=True)
            modules[own] = module
        if not modules:
            raise PushError(f"peft: {self._path} has no matrices for the worker's model; give the folder of an adapter")
        ranks = config.ranks_and_scales([*modules.values()])
        return tuple((own, rank, scale) for own, (rank, scale) in zip(modules, ranks, strict=True))

    def _check_weight(self, entry: TensorEntry, own: str, weights: NamedParameters) -> None:
        """Raise PushError unless the worker has the weight `own`. After this check, only modules of the worker's model
        are matched against the config's patterns.
        """
        if own in weights.shapes:
            return
        if spellings_of(weights).part(own) is not None:
            self._refuse(entry, "changes one expert of a mixture, which only a push of the merged weights can")
        raise PushError(describe_unknown(own, weights))

    def _pairs(self) -> dict[str, tuple[TensorEntry, TensorEntry]]:
        """Return the matrices A and B of each adapted module, by the module's name."""
        found: dict[str, dict[str, TensorEntry]] = {}
        for entry in self._tensors.entries:
            match = _FACTOR.fullmatch(entry.name)
            if match is None:
                self._refuse(
                    entry,
                    "is not supported; save plain LoRA of linear layers, with tensors named lora_A and lora_B",
                )
            self._check_bytes(entry)
            found.setdefault(match[1], {})[match[2]] = entry
        for pair in found.values():
            if len(pair) < 2:
                self._refuse(next(iter(pair.values())), "has no counterpart, since A and B belong together")
        return {module: (pair["A"], pair["B"]) for module, pair in found.items()}

    def _check_bytes(self, entry: TensorEntry) -> None:
        if entry.dtype not in _DTYPES:
            self._refuse(entry, f"has the dtype {entry.dtype:.20}, not one of {', '.join(_DTYPES)}")
        expected = math.prod(entry.shape) * _DTYPES[entry.dtype].itemsize
        if entry.num_bytes != expected:
            self._refuse(entry, f"has {entry.num_bytes} bytes, but its shape takes {expected} bytes")

    def _check_shape(self, entry: TensorEntry, expected: tuple[int, ...]) -> None:
        if entry.shape != expected:
            self._refuse(
                entry,
                f"has the shape {list(entry.shape)}, but {CONFIG_FILE} and the worker's model need {list(expected)}",
            )

    def _refuse(self, entry: TensorEntry, found: str) -> NoReturn:
        raise PushError(f"peft: {self._path}: tensor {entry.name!a:.200} {found}")


def _open(folder: str, policy: PushPolicy) -> list[FileIO]:
    """Open the config and the model. Raise PushError, with advice if the folder has a pickle instead of the model."""
    try:
        return policy.open_files(folder, (CONFIG_FILE, ADAPTER_FILE))
    except PushError:
        if _has_only_a_pickle(folder, policy):
            raise PushError(
                f"peft: {folder} has no {ADAPTER_FILE}, and {_PICKLE} is not read, because loading a pickle can run "
                "any code; save the adapter with safe_serialization=True"
            ) from None
        raise


def _has_only_a_pickle(folder: str, policy: PushPolicy) -> bool:
    """Return whether the folder has a pickle but no safetensors file. Return False if the worker may not read the
    files.
    """
    try:
        with ExitStack() as opened:
            found = [policy.open_if_there(folder, name) for name in (ADAPTER_FILE, _PICKLE)]
            for file in filter(None, found):
                opened.enter_context(file)
            return found[0] is None and found[1] is not None
    except PushError:
        return False


def _read_config(file: FileIO, path: Path) -> LoraConfig:
    try:
        text = file.read(MOST_CONFIG_BYTES + 1)
    except OSError as error:
        raise PushError(f"peft: cannot read {path}: {error.strerror}; load the adapter again") from None
    return read_config(text, str(path))


def _state(file: FileIO) -> tuple[int, int]:
    """Return values that change when a file is written."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _bucket(name: str, entry: TensorEntry, data: torch.Tensor) -> Bucket:
    place: Any = {"start": 0, "length": entry.shape[0], "offset": 0, "num_bytes": len(data)}
    piece = Rows(name=name, shape=entry.shape, checksum=checksum(data.numpy()), **place)
    return Bucket(index=0, num_bytes=len(data), pieces=(piece,))
