"""The implementations under test: the reference, the native kernels with every instruction set of this machine, and the
Triton kernels in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from trueroll.kernels.contract import Backend
from trueroll.kernels.cpu.library import load_library
from trueroll.kernels.selection import select_backend

from .cpu.native_build import emulated_library

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Implementation:
    """A backend. A native backend is tested with one instruction set at a time. `emulated`: True for the library with
    emulated tiles.
    """

    backend: str
    instruction_set: str = ""
    emulated: bool = False

    def __str__(self) -> str:
        parts = (self.backend, self.instruction_set, "emulated" if self.emulated else "")
        return "-".join(part for part in parts if part)

    @property
    def interpreted(self) -> bool:
        """True if the implementation runs in an interpreter, which is a hundred times slower than the other
        implementations.
        """
        return self.backend == "triton"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        if self.emulated:
            return (torch.bfloat16,)  # the only dtype of tiles
        if self.interpreted:
            return (torch.bfloat16, torch.float16)
        native = (torch.float32, torch.bfloat16)
        return native if self.instruction_set else (*native, torch.float16)

    @contextmanager
    def chosen(self) -> Iterator[Backend]:
        """Context that yields the ops of this implementation. Inside the context, the whole process uses the
        implementation's library and instruction set.
        """
        ops = select_backend(self.backend, CPU, self.dtypes[0]).ops
        if not self.instruction_set:
            yield ops
            return
        from trueroll.kernels.cpu import backend
        from trueroll.kernels.cpu import backend as weight

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
    """Return the instruction sets of this machine. If the library is missing, return a name for which every test fails
    with the reason.
    """
    try:
        return load_library().instruction_sets()
    except OSError:
        return ["not_built"]


IMPLEMENTATIONS = (
    Implementation("reference"),
    *(Implementation("cpu", name) for name in _instruction_sets()),
    Implementation("triton"),
)
# Tiles only affect ops that have a dtype.
SERVED = [
    (implementation, dtype)
    for implementation in (*IMPLEMENTATIONS, Implementation("cpu", "amx_bf16", emulated=True))
    for dtype in implementation.dtypes
]
# Implementations that support experts, sinks, biases after attention and the clamped activation. Interpreted
# implementations are not listed.
MIXING = [served for served in SERVED if not served[0].interpreted]


def param(served: tuple[Implementation, torch.dtype], *values: Any, id: str, rarely: bool = False) -> Any:
    """Return a pytest parameter for an implementation and dtype.

    float16 runs only in `make test-all`. Only the reference and the interpreted kernels support float16; both are slow,
    and use the same code for bfloat16. `rarely`: run this parameter only in `make test-all`.
    """
    marks = [pytest.mark.exhaustive] if served[1] == torch.float16 or rarely else []
    return pytest.param(*values, id=id, marks=marks)


both_dtypes = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.exhaustive)], ids=str
)
"""Parametrizes tests of single kernels in the interpreter. float16 runs only in `make test-all`."""


def served_id(served: tuple[Implementation, torch.dtype]) -> str:
    return f"{served[0]}-{str(served[1]).removeprefix('torch.')}"


def for_served(names: str, values: Sequence[tuple[Any, ...]], interpreted: int) -> pytest.MarkDecorator:
    """Parametrize `served` with each of the values, or with only the first `interpreted` values in an interpreter."""
    cases = [
        param(
            served, served, *value, id="-".join((served_id(served), *(getattr(x, "__name__", str(x)) for x in value)))
        )
        for served in SERVED
        for value in (values[:interpreted] if served[0].interpreted else values)
    ]
    return pytest.mark.parametrize(f"served,{names}", cases, indirect=["served"])


def params_of(all_served: Sequence[tuple[Implementation, torch.dtype]]) -> list[Any]:
    """Return a pytest parameter for each implementation and dtype."""
    return [param(served, served, id=served_id(served)) for served in all_served]
