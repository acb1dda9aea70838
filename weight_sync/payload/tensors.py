"""Tensors as bytes: the dtypes that weights travel in, views without copies, and checksums for any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import xxhash

from trueroll.errors import ConfigError

from .manifest import Parameters, own_dtypes

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
INDEX_DTYPE = torch.int32
_CHUNK_ELEMENTS = 2**20
_BITS = {2: torch.int16, 4: torch.int32}
_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}
"""Its bits. Those of NaN, the sign left out, are greater, and those of a finite number smaller."""
_CACHED_BYTES = 2**18
"""How much is looked at at a time: what a core's cache holds is read thrice for the price of once."""
_WORD_BYTES = 8
_CHUNK_WORDS = 2**21
"""How many words are hashed at a time: it takes three times their memory."""
# SplitMix64's increment, and the (shift, factor) pairs of its output function, as signed numbers.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_LAST_SHIFT = 31


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name. Raise ConfigError if no weights travel in it."""
    if name not in DTYPES:
        raise ConfigError(
            f"dtype: expected one of {', '.join(DTYPES)}, found {name!r:.80}; serve the model in one of them"
        )
    return DTYPES[name]


def dtypes_of(wanted: Parameters) -> Callable[[str], torch.dtype]:
    """Find the dtype that a parameter, a part of one or another tensor of a push has on its way, by its name."""
    common, own = dtype_named(wanted.dtype), {name: dtype_named(each) for name, each in own_dtypes(wanted).items()}
    return lambda name: own.get(name, common)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, as a view."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def raw_bits(tensor: torch.Tensor) -> np.ndarray:
    """The elements of a contiguous tensor in host memory as integers, a flat view: equal where the bits are."""
    return tensor.view(-1).view(_BITS[tensor.dtype.itemsize]).numpy()


def checksum_and_finiteness(data: torch.Tensor, start: int, dtype: torch.dtype) -> tuple[int, bool]:
    """The `checksum` of bytes in host memory, and whether the numbers of `dtype` from byte `start` on have neither
    infinities nor NaN: in one pass over memory, at a small part of what `isfinite` costs.
    """
    values, length = raw_bits(data[start:].view(dtype)), _CACHED_BYTES // dtype.itemsize
    hashed, is_finite = xxhash.xxh3_64(data[:start].numpy().data), True
    for first in range(0, len(values), length):
        part = values[first : first + length]
        hashed.update(part.data)
        is_finite = is_finite and _are_finite(part, _INFINITY[dtype])
    return hashed.intdigest(), is_finite


def _are_finite(bits: np.ndarray, infinity: int) -> bool:
    """Of numbers with these bits, where those are of infinity."""
    # With a sign they are the greatest unsigned numbers, without one the greatest signed ones.
    most = infinity + 2 ** (8 * bits.itemsize - 1)
    return bool(bits.max() < infinity and bits.view(f"u{bits.itemsize}").max() < most)


def tensor_checksum(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """The `checksum` of a tensor's bytes in `dtype`, on whichever device it is."""
    hashed = xxhash.xxh3_64()
    for _, chunk in host_chunks(tensor, dtype):
        hashed.update(raw_bytes(chunk))
    return hashed.intdigest()


def host_chunks(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    """Runs of rows, of about a million elements each: (first row, the rows as contiguous `dtype` in host memory)."""
    length = max(1, _CHUNK_ELEMENTS // max(1, tensor[0].numel())) if len(tensor) else 1
    for start in range(0, len(tensor), length):
        yield start, tensor[start : start + length].to("cpu", dtype).contiguous()


def word_sum(data: torch.Tensor) -> int:
    """The checksum of a flat uint8 tensor on any device, in [0, 2**64). Waits for the device once.

    The bytes, with 1 to 8 bytes of zeros behind them, are little-endian words of 64 bits. Word i becomes h(w ^ i * c)
    with the increment c and the output function h of SplitMix64 (Steele, Lea and Flood, 2014), and all are added modulo
    2**64: in any order, so that every device gives the same sum. As h is a bijection, no change within one word goes
    unnoticed; words in other places, or others altogether, do with probability 2**-64 if h is seen as random.
    """
    whole = len(data) // _WORD_BYTES * _WORD_BYTES
    rest = torch.nn.functional.pad(data[whole:], (0, whole + _WORD_BYTES - len(data)))
    total = _hash_words(rest.view(torch.int64), whole // _WORD_BYTES).sum()
    for number, words in enumerate(data[:whole].view(torch.int64).split(_CHUNK_WORDS)):
        total += _hash_words(words, number * _CHUNK_WORDS).sum()
    return int(total) % 2**64


def _hash_words(words: torch.Tensor, start: int) -> torch.Tensor:
    """Of the words from place `start` on. int64 wraps around on every device."""
    hashed = torch.arange(start, start + len(words), device=words.device).mul_(_INCREMENT).bitwise_xor_(words)
    for shift, factor in _ROUNDS:
        _xor_shifted(hashed, shift).mul_(factor)
    return _xor_shifted(hashed, _LAST_SHIFT)


def _xor_shifted(words: torch.Tensor, shift: int) -> torch.Tensor:
    """`words ^= words >> shift`, zeros shifted in."""
    return words.bitwise_xor_((words >> shift).bitwise_and_(2 ** (64 - shift) - 1))
