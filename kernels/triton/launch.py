"""Compile and launch kernels. Settings that could change bits are pinned.

The layout of a tile determines the order in which the tile's sums are added. The compiler chooses layouts by the known
properties of a kernel's arguments, so each compilation must know the same properties. Pointers are multiples of 16
bytes, and each launch checks the pointers. For an argument that is a number, the compiler knows the type but not the
value. Any value that may influence a layout is a constant of the kernel. `describe_settings` reports the compiler
settings that the environment can still change.

Each form of a kernel (`Launch`) is compiled separately. `recording` lists forms without running kernels. `compile_all`
compiles forms before their first launch. Triton's disk cache keeps compiled forms for the next process.
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
    torch.uint8: "u8",
}
_NUMBERS = {"i32": 16, "fp32": 1.0}  # placeholders for arguments of these types


@dataclass(frozen=True)
class Launch:
    """One compiled form of a kernel: the types of its arguments, its constants, its warps and pipeline stages.

    `grid`, `values`: the grid and arguments of one launch that used this form.
    For a tensor argument, the value is the tensor's size in
    bytes.
    """

    kernel: Any
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int
    grid: tuple[int, ...] = field(compare=False)
    values: tuple[float, ...] = field(compare=False)


def _pinned() -> dict[str, Any]:
    """Return the compiler options that change bits and would otherwise depend on environment variables.

    A version of Triton that lacks one of these options always behaves as if the option had the value set here.
    """
    wanted = dict(enable_fp_fusion=False, enable_reflect_ftz=True, ptx_options="")
    return {name: value for name, value in wanted.items() if name in CUDAOptions.__dataclass_fields__}


PINNED = _pinned()
device_function: Any = triton.jit  # the type checker thinks that a call of a triton.jit function is NoReturn
_recorded: ContextVar[list[Launch] | None] = ContextVar("recorded", default=None)


def exact_jit(function: Callable[..., None]) -> Any:
    """Return the result of `triton.jit` for a kernel. Pointer arguments of the kernel are named `*_ptr`. All other
    arguments are numbers or `tl.constexpr`.
    """
    parameters = signature(function).parameters.values()
    numbers = [p.name for p in parameters if not p.name.endswith("_ptr") and "constexpr" not in str(p.annotation)]
    return triton.jit(do_not_specialize=numbers)(function)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, warps: int, stages: int = 1, **constants: Any) -> None:
    """Run a kernel of `exact_jit` on a grid of programs; do nothing if the grid is empty.

    `args`: tensors, floats, and ints below 2**31, in the kernel's order. `constants`: the kernel's `tl.constexpr`
    arguments. Raise ValueError for a tensor that is not contiguous or does not begin at a multiple of 16 bytes.
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
    with torch.cuda.device(device):  # Triton uses the current device
        kernel[grid](*args, **constants, **_options(warps, stages), arch=_architecture(device))


def form_of(
    kernel: Any, grid: tuple[int, ...], args: Sequence[Any], warps: int, stages: int, constants: dict[str, Any]
) -> Launch:
    """Return the form that a launch with these arguments needs."""
    types = tuple((name, _type(arg)) for name, arg in zip(kernel.arg_names, args, strict=False))
    values = tuple(arg.nbytes if isinstance(arg, Tensor) else arg for arg in args)
    return Launch(kernel, types, tuple(constants.items()), warps, stages, grid, values)


def _options(warps: int, stages: int) -> dict[str, Any]:
    return dict(num_warps=warps, num_stages=stages, **PINNED)


def _check_places(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.data_ptr() % ALIGNMENT or not tensor.is_contiguous():
            raise ValueError(
                f"launch: tensors must be contiguous and begin at addresses that are multiples of {ALIGNMENT} (got "
                f"strides {tensor.stride()} at {tensor.data_ptr():#x}); pass them through `aligned`"
            )


@cache
def _architecture(device: torch.device) -> str:
    """Return the architecture to compile for, independent of TRITON_OVERRIDE_ARCH."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def aligned(x: Tensor) -> Tensor:
    """Return `x`, or a copy of `x` that is contiguous and begins at a multiple of 16 bytes."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Context manager: this thread's launches, for any device, are recorded instead of run."""
    launches: list[Launch] = []
    token = _recorded.set(launches)
    try:
        yield launches
    finally:
        _recorded.reset(token)


def compile_form(launch: Launch, **options: Any) -> Any:
    """Compile a form for the current device, or load it from one of Triton's caches, and return Triton's compiled
    kernel.
    """
    arguments = [MockTensor(kind[1:]) if kind[0] == "*" else _NUMBERS[kind] for _, kind in launch.types]
    settings = dict(launch.constants) | _options(launch.warps, launch.stages) | options  # in the order of `launch`
    return launch.kernel.warmup(*arguments, grid=(1,), **settings)


def compile_all(launches: Collection[Launch], device: torch.device) -> None:
    """Compile forms in parallel, on as many threads as this process has cores, and load the compiled forms."""
    log.info("compiling %d forms of kernels, or reading them from Triton's cache", len(launches))
    with torch.cuda.device(device):
        with _Compilers(len(launches)) as compilers, triton.AsyncCompileMode(compilers):
            for launch in launches:
                compile_form(launch, arch=_architecture(device))
        for launch in launches:
            # Triton's own tutorials load a kernel before its first launch in the same way.
            compile_form(launch, arch=_architecture(device))._init_handles()


def describe_fault(error: OSError) -> str:
    """Return the error text for an OSError that occurred during compilation. The error comes from Triton's cache or
    from a program that compiles kernels.
    """
    folder, file = Path(knobs.cache.dir).absolute(), error.filename
    if file is None or folder.is_relative_to(file) or Path(file).absolute().is_relative_to(folder):
        return f"TRITON_CACHE_DIR: cannot use this folder for compiled kernels: {error}; name another folder"
    return f"triton: cannot run the programs that compile kernels: {error}; install a C compiler, or set CC to one"


class _Compilers(ThreadPoolExecutor):
    """A pool of threads that compile forms, and log how many of the `total` forms are done."""

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
    """Return Triton's version, the pinned options, and the compiler settings from the environment, for the health
    report.
    """
    settings = [f"{name}={value!r}" for name, value in PINNED.items()]
    settings += [f"{name}={value}" for name, value in sorted(get_cache_invalidating_env_vars().items())]
    settings += [f"{name}={os.environ[name]}" for name in _TOOLS if name in os.environ]
    return ", ".join((f"triton {triton.__version__}", *settings))


def _type(arg: Any) -> str:
    if isinstance(arg, Tensor):
        return f"*{_TYPES[arg.dtype]}"
    return "fp32" if isinstance(arg, float) else "i32"
