"""Fixes for Triton's interpreter, in four cases in which its results differ from a GPU's.

On a GPU, a matrix instruction computes each element of a product only from the element's row and column, in a fixed
order. The interpreter calls the CPU's matrix library, in which the order depends on the shapes. The interpreter also
multiplies bfloat16 values as if their bits were integers, and rounds to bfloat16 by truncation. If a mask for a whole
tile is a scalar bool, the interpreter treats the mask as a number, which is not a valid mask. `install` fixes all four
cases. Call `install` before any kernel runs.

`install` also makes the interpreter faster. The original interpreter searches the whole Triton language at each call of
a device function, and for the type of each value.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Apply the fixes to the interpreter of this process."""
    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter.InterpreterBuilder.create_splat = _create_splat  # type: ignore[method-assign]
    interpreter._convert_float = _convert_float  # type: ignore[assignment]
    interpreter._patch_builtin = _patch_builtin  # type: ignore[assignment]
    interpreter._get_np_dtype = _get_np_dtype


def widen(data: np.ndarray, dtype: Any) -> np.ndarray:
    """Return the interpreter's data of a floating-point dtype as float32."""
    if dtype.scalar == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)


def round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16, ties to even. Return the bits as uint16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def _create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: int) -> Any:
    """Return d + a @ b in float32. Adds one column of `a` times one row of `b` at a time."""
    left, right = widen(a.data, a.dtype), widen(b.data, b.dtype)
    total = d.data.copy()
    with np.errstate(invalid="ignore", over="ignore"):
        for k in range(left.shape[-1]):
            total += left[..., :, k, None] * right[..., k, None, :]
    return interpreter.TensorHandle(total, d.dtype.scalar)


def _create_splat(self: Any, tile: Any, x: Any) -> Any:
    """Fill a tile with one value. The tile gets the dtype of the value's data, because the handle of a comparison's
    result has the operands' dtype.
    """
    return interpreter.TensorHandle(np.full(tile.shape, x.data.flat[0]), x.dtype.scalar)


_dtype_of_scalar = cache(interpreter._get_np_dtype)


def _get_np_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the interpreter's own result, cached by scalar type. Pointer types cannot be hashed, so they are handled
    separately: a pointer has 64 bits.
    """
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
