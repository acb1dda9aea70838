"""Whether a trainer's tensors are those that the workers want: each parameter once, in the right shape, ties alike.

Keeps names and checksums, no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trueroll.errors import PushError

from ..payload.manifest import Shape
from ..payload.parameters import Parameters, check_complete, describe_tie, describe_unknown, spellings_of
from ..payload.tensors import dtypes_of, tensor_checksum
from .trainer_tensors import check_is_tensor, memory_of


class Checklist:
    """`wanted`: what the workers say. `mapping`: all tensors, if they are known in advance: then they are checked at
    once.

    Raise PushError for a tensor that is unknown, misshapen or missing.
    """

    def __init__(self, wanted: Parameters, mapping: Mapping[str, torch.Tensor] | None) -> None:
        self._wanted = wanted
        self._spellings = spellings_of(wanted)
        self._seen: set[str] = set()
        self._dtype_of = dtypes_of(wanted)
        self._checksums: dict[str, int] = {}
        self._ties = dict(wanted.tied)
        if mapping is not None:
            for name, tensor in mapping.items():
                check_is_tensor(name, tensor)
                self._check(name, tuple(tensor.shape))
            check_complete(mapping.keys(), wanted)
            self._ties = {name: other for name, other in wanted.tied.items() if _are_apart(mapping, name, other)}

    def take(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the tensor is to be sent. Raise PushError if it is wrong, or came before."""
        self._check(name, tuple(tensor.shape))
        if name in self._seen:
            raise PushError(f"tensor {name}: expected each tensor once, found it twice; leave one out")
        self._seen.add(name)
        if name in self._ties or name in self._ties.values():
            self._checksums[name] = tensor_checksum(tensor, self._dtype_of(self._wanted.tied.get(name, name)))
        return self._spellings.shape(name) is not None

    def finish(self) -> None:
        """Raise PushError if a parameter has not come, or if two that the worker has tied have different values."""
        check_complete(self._seen, self._wanted)
        for name, other in self._ties.items():
            if name in self._checksums and self._checksums[name] != self._checksums[other]:
                raise PushError(describe_tie(name, other))

    def _check(self, name: str, shape: Shape) -> None:
        wanted = self._wanted
        if name in wanted.ignored:
            return
        expected = self._spellings.shape(wanted.tied.get(name, name))
        if expected is None:
            raise PushError(describe_unknown(name, wanted))
        if shape != expected:
            raise PushError(
                f"tensor {name}: expected shape {list(expected)}, found {list(shape)}; check that trainer and worker "
                "have the same model"
            )


def _are_apart(mapping: Mapping[str, torch.Tensor], name: str, other: str) -> bool:
    return name in mapping and memory_of(mapping[name]) != memory_of(mapping[other])
