"""Tensors as bytes: the dtypes of pushes, views without copies, and checksums on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import xxhash

from trueroll.errors import ConfigError

from ...kernels.cpu.copies import LEAST_BYTES, can_copy, copy_bytes
from .manifest import Parameters, checksum, own_dtypes

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
INDEX_DTYPE = torch.int32
_CHUNK_ELEMENTS = 2**20
_BITS = {2: torch.int16, 4: torch.int32}
_UNSIGNED = {2: np.uint16, 4: np.uint32}
_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}
"""The bits of infinity. Without the sign bit, the bits of a NaN are greater than the bits of infinity, and the bits of
a finite number are smaller.
"""
_CACHED_BYTES = 2**18
"""Number of bytes copied or checked at a time. A chunk of this size stays in a core's cache, so that further reads of
the chunk cost little.
"""
_WORD_BYTES = 8
_CHUNK_WORDS = 2**21
"""Number of words hashed at a time. Hashing takes three times the memory of these words."""
# The increment of SplitMix64, and the (shift, factor) pairs of its output function, as signed numbers.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_LAST_SHIFT = 31


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype with this name. Raise ConfigError if a push cannot have this dtype."""
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r:.80} is not supported; serve the model in one of {', '.join(DTYPES)}")
    return DTYPES[name]


def dtypes_of(wanted: Parameters) -> Callable[[str], torch.dtype]:
    """Return a function that maps a tensor's name to the tensor's dtype in a push. A parameter in `wanted.dtypes` and
    its parts have the parameter's own dtype. All other tensors have the common dtype.
    """
    common, own = dtype_named(wanted.dtype), {name: dtype_named(each) for name, each in own_dtypes(wanted).items()}
    return lambda name: own.get(name, common)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous tensor in host memory."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def raw_bits(tensor: torch.Tensor) -> np.ndarray:
    """Return a flat view of a contiguous tensor in host memory. Each element is an integer with the bits of the
    tensor's element.
    """
    return tensor.view(-1).view(_BITS[tensor.dtype.itemsize]).numpy()


def copy_and_checksum(place: torch.Tensor, source: torch.Tensor, dtype: torch.dtype) -> int:
    """Copy a tensor to `place`, converted to `dtype`. Return the `checksum` of the copied bytes.

    `place`: uint8, in host memory. The copy and the checksum take one pass over the memory if the tensor is contiguous
    and in host memory. Without a conversion, the native library makes this pass in one call.
    """
    if source.dtype == dtype and is_plain(source):
        assert place.nbytes == source.nbytes
        return copy_bytes(source.data_ptr(), place.nbytes, place.data_ptr(), 0)[0]
    written = place.numpy()
    if source.device.type != "cpu" or not source.is_contiguous():
        place.view(dtype).view(source.shape).copy_(source)
        return checksum(written)
    hashed, is_converted = xxhash.xxh3_64(), source.dtype != dtype
    given, length = source.view(-1).view(torch.uint8).numpy(), _CACHED_BYTES // dtype.itemsize
    for start in range(0, len(written), _CACHED_BYTES):
        part = written[start : start + _CACHED_BYTES]
        if is_converted:
            first = start // dtype.itemsize
            torch.from_numpy(part).view(dtype).copy_(source.view(-1)[first : first + length])
        else:
            # A plain copy does not use torch's threads, which would take cores that the worker's side needs at the
            # same time.
            np.copyto(part, given[start : start + _CACHED_BYTES])
        hashed.update(part.data)
    return hashed.intdigest()


def copy_checked(place: object, source: torch.Tensor, reject_nonfinite: bool) -> tuple[int, bool] | None:
    """Copy a tensor to `place` in one pass over the memory. `place`: rows of a weight, in any storage layout. Return
    the `checksum` of the tensor's bytes, and a bool.
    The bool is True if all numbers are finite or `reject_nonfinite` is
    False.

    `source`: a tensor for which `is_plain` holds. Return None, without a copy, if the native library cannot write to
    `place`.
    """
    infinity = _INFINITY[source.dtype] if reject_nonfinite else 0
    if isinstance(place, torch.Tensor):
        if place.dtype != source.dtype or place.shape != source.shape or not is_plain(place):
            return None
        return copy_bytes(source.data_ptr(), source.nbytes, place.data_ptr(), infinity)
    if (copy := getattr(place, "copy_checked", None)) is None or getattr(place, "dtype", None) != source.dtype:
        return None
    return copy(source, infinity)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the native library can read or write the tensor's memory directly. The result is False for
    subclasses of torch.Tensor, because such a tensor may keep its values in other tensors.
    """
    is_dense = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.is_contiguous()
    return is_dense and tensor.nbytes >= LEAST_BYTES and can_copy()


class BytePass:
    """Computes the `checksum` of bytes in host memory, and checks whether numbers are finite, in one pass over the
    memory. The check takes a fraction of the time that `isfinite` takes.

    `dtype`: dtype of the numbers that `update` checks; None to check no numbers. `are_finite`: whether all numbers so
    far are finite.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.are_finite = True
        self._dtype = dtype
        self._hashed = xxhash.xxh3_64()

    def update(self, data: torch.Tensor) -> None:
        """Append the bytes of a contiguous tensor, and check the bytes as numbers."""
        if self._dtype is None:
            self.update_plain(data)
            return
        values, length = raw_bits(data.view(-1).view(self._dtype)), _CACHED_BYTES // self._dtype.itemsize
        for first in range(0, len(values), length):
            part = values[first : first + length]
            self._hashed.update(part.data)
            self.are_finite = self.are_finite and _are_finite(part, _INFINITY[self._dtype])

    def update_plain(self, data: torch.Tensor) -> None:
        """Append the bytes of a contiguous tensor."""
        self._hashed.update(raw_bytes(data))

    @property
    def checksum(self) -> int:
        """The checksum of all bytes so far."""
        return self._hashed.intdigest()


def _are_finite(bits: np.ndarray, infinity: int) -> bool:
    """Return whether all numbers with the bits in `bits` are finite. `infinity`: the bits of infinity."""
    # Read as unsigned integers, negative infinity and negative NaNs are the largest. Read as signed integers, positive
    # infinity and positive NaNs are the largest.
    most = infinity + 2 ** (8 * bits.itemsize - 1)
    largest = np.maximum.reduce
    return bool(largest(bits) < infinity and largest(bits.view(_UNSIGNED[bits.itemsize])) < most)


def tensor_checksum(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Return the `checksum` of a tensor's bytes after conversion to `dtype`. The tensor may be on any device."""
    hashed = xxhash.xxh3_64()
    for _, chunk in host_chunks(tensor, dtype):
        hashed.update(raw_bytes(chunk))
    return hashed.intdigest()


def host_chunks(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield pairs (first row, rows). The rows of a pair have about a million elements in total, and form a contiguous
    tensor of `dtype` in host memory.
    """
    length = max(1, _CHUNK_ELEMENTS // max(1, tensor[0].numel())) if len(tensor) else 1
    for start in range(0, len(tensor), length):
        yield start, tensor[start : start + length].to("cpu", dtype).contiguous()


def word_sum(data: torch.Tensor) -> int:
    """Return the checksum of a flat uint8 tensor on any device. The checksum is in [0, 2**64). Synchronizes the device
    once.

    The bytes, padded with 1 to 8 zero bytes, are read as little-endian words of 64 bits. Word w with index i is
    replaced by h(w ^ i * c), where c is the increment and h the output function of SplitMix64 (Steele, Lea and Flood,
    2014). The hashes of all words are added modulo 2**64. The order of the additions does not matter, so every device
    computes the same sum. As h is a bijection, every change within one word is detected. Moved words, or several
    changed words, go undetected with probability 2**-64 if h is taken as random.
    """
    whole = len(data) // _WORD_BYTES * _WORD_BYTES
    rest = torch.nn.functional.pad(data[whole:], (0, whole + _WORD_BYTES - len(data)))
    total = _hash_words(rest.view(torch.int64), whole // _WORD_BYTES).sum()
    for number, words in enumerate(data[:whole].view(torch.int64).split(_CHUNK_WORDS)):
        total += _hash_words(words, number * _CHUNK_WORDS).sum()
    return int(total) % 2**64


def _hash_words(words: torch.Tensor, start: int) -> torch.Tensor:
    """Return the hashes of words; the first word has index `start`. Every device wraps int64 around on overflow."""
    hashed = torch.arange(start, start + len(words), device=words.device).mul_(_INCREMENT).bitwise_xor_(words)
    for shift, factor in _ROUNDS:
        _xor_shifted(hashed, shift).mul_(factor)
    return _xor_shifted(hashed, _LAST_SHIFT)


def _xor_shifted(words: torch.Tensor, shift: int) -> torch.Tensor:
    """Compute `words ^= words >> shift` in place, with zeros shifted in."""
    return words.bitwise_xor_((words >> shift).bitwise_and_(2 ** (64 - shift) - 1))
