"""How kernels are compiled and launched, with the settings that change bits pinned.

The order of a sum follows the layout of its tile, and the compiler chooses layouts by what it knows of a kernel's
arguments. So it is told the same each time: pointers are multiples of 16 bytes (checked at each launch), numbers are
known by their type alone, and what a layout may depend on is a constant of the kernel. What the environment can change
in the compiler all the same, `describe_settings` reports.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.nvidia.compiler import CUDAOptions
from triton.compiler.compiler import get_cache_invalidating_env_vars
from triton.runtime.interpreter import InterpretedFunction

ALIGNMENT = 16
_TOOLS = ("TRITON_LIBDEVICE_PATH", "TRITON_PTXAS_PATH", "TRITON_KERNEL_OVERRIDE")
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "u1",
}


@dataclass(frozen=True)
class Launch:
    """One compiled form of a kernel: the types of its arguments, its constants, its warps and pipeline stages.

    `grid`, `values`: how one launch of it was called. A tensor's value is its size in bytes.
    """

    kernel: Any
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int
    grid: tuple[int, ...] = field(compare=False)
    values: tuple[float, ...] = field(compare=False)


def _pinned() -> dict[str, Any]:
    """Compiler options that change bits, which the environment could set.

    A version of Triton without one of them always behaves so.
    """
    wanted = dict(enable_fp_fusion=False, enable_reflect_ftz=True, ptx_options="")
    return {name: value for name, value in wanted.items() if name in CUDAOptions.__dataclass_fields__}


PINNED = _pinned()
device_function: Any = triton.jit  # the type checker takes a call of a triton.jit function for NoReturn
_recorded: list[Launch] | None = None


def exact_jit(function: Callable[..., None]) -> Any:
    """`triton.jit` for a kernel whose pointers are named `*_ptr`; its other arguments are numbers or `tl.constexpr`."""
    parameters = signature(function).parameters.values()
    numbers = [p.name for p in parameters if not p.name.endswith("_ptr") and "constexpr" not in str(p.annotation)]
    return triton.jit(do_not_specialize=numbers)(function)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, warps: int, stages: int = 1, **constants: Any) -> None:
    """Runs a kernel of `exact_jit` on a grid of programs, or nothing if the grid is empty.

    `args`: tensors, ints below 2**31 and floats, in the kernel's order; `constants`: its `tl.constexpr`. Raise
    ValueError for a tensor that is not contiguous or does not begin at a multiple of 16 bytes.
    """
    if 0 in grid:
        return
    if _recorded is not None:
        names = signature(kernel.fn).parameters
        types = tuple((name, _type(arg)) for name, arg in zip(names, args, strict=False))
        values = tuple(arg.nbytes if isinstance(arg, Tensor) else arg for arg in args)
        _recorded.append(Launch(kernel, types, tuple(constants.items()), warps, stages, grid, values))
        return
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    _check_places(tensors)
    if isinstance(kernel, InterpretedFunction):
        kernel[grid](*args, **constants)
        return
    device = tensors[0].device
    with torch.cuda.device(device):  # Triton takes the current one
        kernel[grid](*args, **constants, num_warps=warps, num_stages=stages, arch=_architecture(device), **PINNED)


def _check_places(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.data_ptr() % ALIGNMENT or not tensor.is_contiguous():
            raise ValueError(
                f"launch: expected contiguous tensors at multiples of {ALIGNMENT} bytes, found one with strides "
                f"{tensor.stride()} at {tensor.data_ptr():#x}; pass it through `aligned`"
            )


@cache
def _architecture(device: torch.device) -> str:
    """What kernels are compiled for, whatever TRITON_OVERRIDE_ARCH says."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def aligned(x: Tensor) -> Tensor:
    """`x`, or a copy of it that is contiguous and begins at a multiple of 16 bytes."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """While it lasts, launches are not run but listed, whatever device their tensors are on."""
    global _recorded
    _recorded = launches = []
    try:
        yield launches
    finally:
        _recorded = None


def describe_settings() -> str:
    """The version of Triton, the pinned options, and what is set in the environment for its compiler; for health."""
    settings = [f"{name}={value!r}" for name, value in PINNED.items()]
    settings += [f"{name}={value}" for name, value in sorted(get_cache_invalidating_env_vars().items())]
    settings += [f"{name}={os.environ[name]}" for name in _TOOLS if name in os.environ]
    return ", ".join((f"triton {triton.__version__}", *settings))


def _type(arg: Any) -> str:
    if isinstance(arg, Tensor):
        return f"*{_TYPES[arg.dtype]}"
    return "fp32" if isinstance(arg, float) else "i32"
