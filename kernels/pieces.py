"""The number of pieces in which a decoder's sums are computed.

Tensor parallelism splits some sums over the devices: the products that project back to the hidden size
(`Backend.project_back`), and the sum over a row's experts. A sum of float32 numbers depends on the order of the
additions. Each sum that may be split over devices is therefore cut into pieces, and the pieces are added as a balanced
binary tree. With several devices, each device computes a subtree, which gives the same bits.

The number of pieces depends only on the decoder, so that a worker on several devices, a worker on one device and a
trainer agree to the bit. A different number of pieces may give different bits. A decoder in n pieces can run on at most
n devices.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trueroll.errors import ConfigError

from .layer import HEAD, make_layer
from .specs import DecoderSpec, Mamba2Spec, RecurrentSpec

MOST_PIECES = 8
_MULTIPLE = 16
"""A piece ends at a multiple of this number, because native kernels process neighbouring columns together."""
_USUAL_PIECES = 4
_LARGE = 40e9
"""Decoders with more parameters are cut into `MOST_PIECES`, because most of them need several devices."""


def with_pieces(spec: DecoderSpec, count: int | None = None) -> DecoderSpec:
    """Return a copy of the spec with `count` pieces. If `count` is None, use the number that suits the decoder.

    The number that suits a decoder is 4, or 8 for more than 40e9 parameters. If the decoder cannot be cut into this
    many pieces, the number is halved until the cut is possible. Raise ConfigError if `count` is given, and the decoder
    cannot be cut into `count` pieces.
    """
    if count is not None:
        if found := requirement(spec, count):
            text = f"pieces must be {found} (got {count}); leave it unset to use the model's number"
            raise ConfigError(text, field="pieces", value=count)
        return replace(spec, pieces=count)
    count = MOST_PIECES if num_parameters(spec) > _LARGE else _USUAL_PIECES
    while requirement(spec, count):
        count //= 2
    return replace(spec, pieces=count)


def requirement(spec: DecoderSpec, count: int) -> str:
    """Return a requirement that `count` pieces do not meet, such as `a divisor of 12 heads`; an empty string if `count`
    is allowed.
    """
    if count < 1 or count > MOST_PIECES or count & (count - 1):
        return "1, 2, 4 or 8"
    for mixer in spec.attentions:
        if mixer.num_heads % count:
            return f"a divisor of {mixer.num_heads} heads"
        if mixer.num_kv_heads % count and count % mixer.num_kv_heads:
            return f"a divisor or a multiple of {mixer.num_kv_heads} key-value heads"
        if count > 1 and mixer.num_heads // count * mixer.value_dim % _MULTIPLE:
            return f"1, or a number for which pieces of o have a multiple of {_MULTIPLE} columns"
    for mixer in spec.recurrent:
        if found := _requirement_of_recurrence(mixer, count):
            return found
    for experts in spec.experts:
        if experts.num_experts % count:
            return f"a divisor of {experts.num_experts} experts"
    return ""


def _requirement_of_recurrence(spec: RecurrentSpec, count: int) -> str:
    """Return the result of `requirement` for a mixer with a recurrent state. Heads that share keys or a norm stay in
    one piece.
    """
    is_mamba2 = isinstance(spec, Mamba2Spec)
    together, size = (spec.num_groups, spec.inner_size) if is_mamba2 else (spec.num_key_heads, spec.value_size)
    if together % count:
        return f"a divisor of {together} {'groups of heads' if is_mamba2 else 'key heads'}"
    if count > 1 and size // count % _MULTIPLE:
        return f"1, or a number for which pieces of o have a multiple of {_MULTIPLE} columns"
    return ""


def num_parameters(spec: DecoderSpec) -> int:
    """Return the number of a decoder's parameters, without an MTP module."""
    vocabulary = spec.vocab_size * spec.hidden_size
    found = {spec.embedding: vocabulary, spec.last_norm: spec.hidden_size}
    if not spec.tie_word_embeddings:
        found[HEAD] = vocabulary

    def count(name: str, *shape: int, **_: Any) -> Tensor:
        found[name] = math.prod(shape)
        return torch.empty(shape, device="meta")

    for index in range(len(spec.layers)):
        make_layer(spec, index, count)
    return sum(found.values())
