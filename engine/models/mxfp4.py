"""MXFP4, the format of the published gpt-oss checkpoints (Open Compute Project: Microscaling Formats, 2023).

Each row of a matrix is divided into blocks of 32 numbers. The numbers of a block share a scale, which is stored in one
byte: `2 ** (byte-127)`, or NaN for byte 255. A number has 4 bits: a sign and one of eight magnitudes. A byte stores two
numbers, the first in the lower 4 bits. A stack of E matrices [R, C] is stored as two tensors of uint8: `BLOCKS` [E, R,
C / 32, 16] and `SCALES` [E, R, C / 32]. The format is `mxfp4` of `kernels.quantization`.
"""

from __future__ import annotations

from torch import Tensor

from ...kernels.quantization import FORMATS, Quantized
from .quantized.packing import nibbles

BLOCKS, SCALES = "_blocks", "_scales"
"""The suffixes that are appended to the name of a stack to name its two tensors."""
_BLOCK = 32
_NAN_SCALE = 255


def packed_shapes(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the two tensors that store the stack `name`. The keys of the result are the names of the
    tensors.

    The result is empty unless `shape` is [E, R, C] and C is a multiple of the block length.
    """
    *rows, columns = shape
    if len(rows) != 2 or columns % _BLOCK:
        return {}
    return {name + BLOCKS: (*rows, columns // _BLOCK, _BLOCK // 2), name + SCALES: (*rows, columns // _BLOCK)}


def quantized(blocks: Tensor, scales: Tensor) -> Quantized:
    """Return one matrix [R, C], made from its blocks and scales. `blocks`: [R, C / 32, 16]. `scales`: [R, C / 32].
    Raise ValueError if a scale is NaN.
    """
    if num_nan := int((scales == _NAN_SCALE).sum()):
        raise ValueError(f"{num_nan} of {scales.numel()} scales are NaN (byte {_NAN_SCALE})")
    return Quantized(FORMATS["mxfp4"], nibbles(blocks).flatten(1), scales)
