"""Triton's interpreter, mended where it does not compute what a GPU does.

A GPU's matrix instruction gives each element of a product from its row and its column alone, in one order; the
interpreter asks the CPU's matrix library, whose order depends on the shapes. It multiplies bfloat16 as if its bits were
integers, rounds to bfloat16 by cutting bits off, and takes one truth for all elements of a tile to be a number, which
is no mask. `install` puts these four right; call it before any kernel runs.
It also spares the interpreter a search of the whole language at each call of a device function, and one for the type of
each value, which makes it faster.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Mend the interpreter of this process."""
    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter.InterpreterBuilder.create_splat = _create_splat  # type: ignore[method-assign]
    interpreter._convert_float = _convert_float  # type: ignore[assignment]
    interpreter._patch_builtin = _patch_builtin  # type: ignore[assignment]
    interpreter._get_np_dtype = _get_np_dtype


def widen(data: np.ndarray, dtype: Any) -> np.ndarray:
    """The interpreter's data of a floating-point dtype as float32."""
    if dtype.scalar == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)


def round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to nearest, ties to even; uint16 with the bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def _create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: int) -> Any:
    """d + a @ b in float32, one column of `a` and one row of `b` after the other."""
    left, right = widen(a.data, a.dtype), widen(b.data, b.dtype)
    total = d.data.copy()
    with np.errstate(invalid="ignore", over="ignore"):
        for k in range(left.shape[-1]):
            total += left[..., :, k, None] * right[..., k, None, :]
    return interpreter.TensorHandle(total, d.dtype.scalar)


def _create_splat(self: Any, tile: Any, x: Any) -> Any:
    """One value for all elements of a tile, of the kind that its data is; a comparison's handle names its operands'."""
    return interpreter.TensorHandle(np.full(tile.shape, x.data.flat[0]), x.dtype.scalar)


_dtype_of_scalar = cache(interpreter._get_np_dtype)


def _get_np_dtype(dtype: Any) -> np.dtype[Any]:
    """As the interpreter's own, found once for each scalar; pointers, which have no hash, are 64 bits."""
    return np.dtype(np.uint64) if dtype.scalar.is_ptr() else _dtype_of_scalar(dtype.scalar)


_convert_float_as_it_was = interpreter._convert_float


def _convert_float(data: np.ndarray, source: Any, destination: Any, rounding_mode: Any) -> np.ndarray:
    if source == tl.bfloat16 and destination == tl.float32:
        return widen(data, source)
    if source == tl.float32 and destination == tl.bfloat16:
        return round_to_bfloat16(data)
    return _convert_float_as_it_was(data, source, destination, rounding_mode)


@cache
def _builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtins(package):
        if tl.core.is_builtin(member := getattr(package, name)):
            interpreter._patch_attr(package, name, member, builder, scope)
