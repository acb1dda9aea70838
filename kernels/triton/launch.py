"""How kernels are compiled and launched, with the settings that change bits pinned.

The order of a sum follows the layout of its tile, and the compiler chooses layouts by what it knows of a kernel's
arguments. So it is told the same each time: pointers are multiples of 16 bytes (checked at each launch), numbers are
known by their type alone, and what a layout may depend on is a constant of the kernel. What the environment can change
in the compiler all the same, `describe_settings` reports.

A kernel is compiled for each form that it is launched in. `recording` lists forms without running them, and
`compile_all` compiles them before they are launched; Triton's cache on disk keeps them for the next process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from itertools import count
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.nvidia.compiler import CUDAOptions
from triton.compiler.compiler import get_cache_invalidating_env_vars
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import MockTensor

log = logging.getLogger(__name__)
ALIGNMENT = 16
_PROGRESS_LINES = 10
_TOOLS = ("TRITON_LIBDEVICE_PATH", "TRITON_PTXAS_PATH", "TRITON_KERNEL_OVERRIDE")
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "u1",
}
_NUMBERS = {"i32": 16, "fp32": 1.0}  # what stands for arguments of these types


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
_recorded: ContextVar[list[Launch] | None] = ContextVar("recorded", default=None)


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
    if (recorded := _recorded.get()) is not None:
        recorded.append(form_of(kernel, grid, args, warps, stages, constants))
        return
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    _check_places(tensors)
    if isinstance(kernel, InterpretedFunction):
        kernel[grid](*args, **constants)
        return
    device = tensors[0].device
    with torch.cuda.device(device):  # Triton takes the current one
        kernel[grid](*args, **constants, **_options(warps, stages), arch=_architecture(device))


def form_of(
    kernel: Any, grid: tuple[int, ...], args: Sequence[Any], warps: int, stages: int, constants: dict[str, Any]
) -> Launch:
    """The form that such a launch needs."""
    types = tuple((name, _type(arg)) for name, arg in zip(kernel.arg_names, args, strict=False))
    values = tuple(arg.nbytes if isinstance(arg, Tensor) else arg for arg in args)
    return Launch(kernel, types, tuple(constants.items()), warps, stages, grid, values)


def _options(warps: int, stages: int) -> dict[str, Any]:
    return dict(num_warps=warps, num_stages=stages, **PINNED)


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
    """While it lasts, this thread's launches are not run but listed, whatever device their tensors are on."""
    launches: list[Launch] = []
    token = _recorded.set(launches)
    try:
        yield launches
    finally:
        _recorded.reset(token)


def compile_form(launch: Launch, **options: Any) -> Any:
    """What Triton makes of a form on the current device, compiled now unless it is in one of its caches."""
    arguments = [MockTensor(kind[1:]) if kind[0] == "*" else _NUMBERS[kind] for _, kind in launch.types]
    settings = dict(launch.constants) | _options(launch.warps, launch.stages) | options  # in the order of a launch's
    return launch.kernel.warmup(*arguments, grid=(1,), **settings)


def compile_all(launches: Collection[Launch], device: torch.device) -> None:
    """Compiles forms side by side, on as many threads as there are cores for this process, and loads them."""
    log.info("compiling %d forms of kernels, or reading them from Triton's cache", len(launches))
    with torch.cuda.device(device):
        with _Compilers(len(launches)) as compilers, triton.AsyncCompileMode(compilers):
            for launch in launches:
                compile_form(launch, arch=_architecture(device))
        for launch in launches:
            # As Triton's own tutorials load a kernel that they do not launch yet.
            compile_form(launch, arch=_architecture(device))._init_handles()


def describe_fault(error: OSError) -> str:
    """What to do about a fault while kernels are compiled: of Triton's cache, or of a program that compiles."""
    folder, file = Path(knobs.cache.dir).absolute(), error.filename
    if file is None or folder.is_relative_to(file) or Path(file).absolute().is_relative_to(folder):
        return (
            f"TRITON_CACHE_DIR: expected a folder that compiled kernels can be written to, found: {error}; name another"
        )
    return (
        f"triton: expected the programs that compile kernels, found: {error}; install a C compiler, or name one by CC"
    )


class _Compilers(ThreadPoolExecutor):
    """Threads that compile, and say in the log how far they are with `total` forms."""

    def __init__(self, total: int) -> None:
        super().__init__(len(os.sched_getaffinity(0)), thread_name_prefix="compile")
        self._total, self._done = total, count(1)

    def submit(self, *args: Any, **options: Any) -> Any:
        future = super().submit(*args, **options)
        future.add_done_callback(self._tell)
        return future

    def _tell(self, _: Any) -> None:
        done = next(self._done)
        if done * _PROGRESS_LINES // self._total > (done - 1) * _PROGRESS_LINES // self._total:
            log.info("compiled %d of %d forms of kernels", done, self._total)


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
