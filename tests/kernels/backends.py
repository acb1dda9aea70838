"""The implementations under test: the reference, and the native kernels with every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from trueroll.kernels.cpu.library import load_library
from trueroll.kernels.ops import Backend, select_backend

from .native_build import emulated_library

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Implementation:
    """A backend, with one instruction set if it is a native one. `emulated`: in the library with emulated tiles."""

    backend: str
    instruction_set: str = ""
    emulated: bool = False

    def __str__(self) -> str:
        parts = (self.backend, self.instruction_set, "emulated" if self.emulated else "")
        return "-".join(part for part in parts if part)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        if self.emulated:
            return (torch.bfloat16,)  # which is all that tiles compute
        native = (torch.float32, torch.bfloat16)
        return native if self.instruction_set else (*native, torch.float16)

    @contextmanager
    def chosen(self) -> Iterator[Backend]:
        """Its ops, with its library and instruction set in use for the whole process until the end of the context."""
        ops = select_backend(self.backend, CPU, torch.float32, 64).ops
        if not self.instruction_set:
            yield ops
            return
        from trueroll.kernels.cpu import backend, weight

        library = emulated_library() if self.emulated else load_library()
        before = library.instruction_set()
        library.choose(self.instruction_set)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(backend, "_library", library)
                patch.setattr(weight, "load_library", lambda: library)
                assert ops.instruction_set() == self.instruction_set
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
# Tiles take part in ops that have a dtype only.
SERVED = [
    (implementation, dtype)
    for implementation in (*IMPLEMENTATIONS, Implementation("cpu", "amx_bf16", emulated=True))
    for dtype in implementation.dtypes
]


def served_id(served: tuple[Implementation, torch.dtype]) -> str:
    return f"{served[0]}-{str(served[1]).removeprefix('torch.')}"
