"""The implementations under test: the reference, and the native kernels with every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from trueroll.kernels.cpu.library import load_library
from trueroll.kernels.ops import Backend, select_backend

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Implementation:
    """A backend, with one instruction set if it is a native one."""

    backend: str
    instruction_set: str = ""

    def __str__(self) -> str:
        return f"{self.backend}-{self.instruction_set}" if self.instruction_set else self.backend

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        native = (torch.float32, torch.bfloat16)
        return native if self.instruction_set else (*native, torch.float16)

    @contextmanager
    def chosen(self) -> Iterator[Backend]:
        """Its ops, with its instruction set in use for the whole process until the end of the context."""
        ops = select_backend(self.backend, CPU, torch.float32, 64).ops
        if not self.instruction_set:
            yield ops
            return
        library = load_library()
        before = library.instruction_set()
        library.choose(self.instruction_set)
        assert ops.instruction_set() == self.instruction_set
        try:
            yield ops
        finally:
            library.choose(before)


@dataclass(frozen=True)
class Served:
    """The ops of an implementation, for one dtype of weights and activations."""

    ops: Backend
    dtype: torch.dtype


def _instruction_sets() -> list[str]:
    """Those of this machine. Where the library is missing: a name that makes its tests fail and say why."""
    try:
        return load_library().instruction_sets()
    except OSError:
        return ["not_built"]


IMPLEMENTATIONS = (Implementation("reference"), *(Implementation("cpu", name) for name in _instruction_sets()))
SERVED = [(implementation, dtype) for implementation in IMPLEMENTATIONS for dtype in implementation.dtypes]


def served_id(served: tuple[Implementation, torch.dtype]) -> str:
    return f"{served[0]}-{str(served[1]).removeprefix('torch.')}"
