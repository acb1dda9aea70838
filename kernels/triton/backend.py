"""The ops of `contract.Backend` with Triton kernels, for bfloat16 and float16.

Builds the ops from the kernels of this package. The module `launch` describes how kernels keep the contract. A weight
is a plain tensor, or a `CodedWeight` of a format that does not quantize activations. The tensors of a call are all on
one CUDA device, or all on the CPU if kernels are interpreted. No op reads a tensor on the host, and no shape depends on
a tensor's contents. A CUDA graph can therefore capture any op. To capture attention, pass `AttentionBatch.lens`. To
capture the ops of a delta net, pass one row for each sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor

from trueroll.errors import ConfigError

from ..coded import CodedWeight
from ..contract import AttentionWeights, Backend, Rotation
from ..layer import project, run_layers, store
from ..quantization import FORMATS as ALL_FORMATS
from ..quantization import Format, format_of
from ..reference import embedding as embedding
from ..reference import merge as merge
from ..reference import merge_into as merge_into
from ..reference import new_layers as new_layers
from ..reference import rotation as rotation
from ..specs import Activation, AttentionSpec
from . import is_interpreted, products
from .attention import paged_attention as paged_attention
from .experts import expert_sums as expert_sums
from .experts import experts as experts
from .experts import route as route
from .experts import wide_linear as wide_linear
from .head import SECTION
from .head import filter_logits as filter_logits
from .head import fold_sections as fold_sections
from .head import head_sections as head_sections
from .head import lm_head as lm_head
from .head import log_probs as log_probs
from .head import mask_logits as mask_logits
from .head import next_token_statistics as next_token_statistics
from .head import next_tokens as next_tokens
from .head import sample as sample
from .head import token_statistics as token_statistics
from .launch import Launch, compile_all, describe_fault, describe_settings, recording
from .products import Matrix, qkv_parts
from .products import back_sums as back_sums
from .products import head_linear as head_linear
from .products import linear as linear
from .products import project_back as project_back
from .recurrence import convolve as convolve
from .recurrence import delta_rule as delta_rule
from .recurrence import state_space as state_space
from .rows import gate_mul as gate_mul
from .rows import layer_norm as layer_norm
from .rows import qkv_epilogue
from .rows import rmsnorm as rmsnorm
from .rows import rope as rope
from .rows import write_kv as write_kv

_SELF = cast(Backend, sys.modules[__name__])
HEAD_SECTION = SECTION
HOLDS_VALUES = False
FUSES_EDITS = False
FORMATS = frozenset(name for name, format in ALL_FORMATS.items() if format.activations is None)
CACHE_FORMATS: frozenset[str] = frozenset()


def instruction_set() -> str:
    """Return the current GPU's architecture, or `interpreter`, and the settings that kernels are compiled with."""
    return f"{_processor()}, {describe_settings()}"


def _processor() -> str:
    if is_interpreted():
        return "interpreter"
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def prepare(compute: Callable[[int], object], most_rows: int, device: torch.device) -> None:
    try:
        compile_all(forms_of(compute, most_rows), device)
    except OSError as error:
        raise ConfigError(describe_fault(error)) from error


def forms_of(compute: Callable[[int], object], most_rows: int) -> list[Launch]:
    """Return the distinct forms of kernels that `compute(rows)` launches for all numbers of rows up to `most_rows`."""
    with recording() as launches:
        for rows in _row_counts(most_rows):
            compute(rows)
    return list(dict.fromkeys(launches))


def _row_counts(most: int) -> list[int]:
    """Return a list of row counts. Every kernel form that a row count up to `most` needs is also needed by a row count
    in this list.

    The number of filled tiles changes only at multiples of 16. A row count between two multiples therefore needs the
    same forms as one of the two multiples.
    """
    return sorted({min(rows, most) for rows in (1, *range(16, most + 16, 16))})


def new_weight(
    rows: int, columns: int, empty: Callable[..., Tensor], format: Format | None = None, unit: int | None = None
) -> Matrix:
    if format is None:
        return empty(rows, columns)
    assert format.name in FORMATS, f"this backend stores no matrices of this format (got {format})"
    return CodedWeight.new(rows, columns, empty, format, unit)


def gate_up(x: Tensor, gate: Matrix, up: Matrix, activation: Activation) -> Tensor:
    if format_of(gate) == format_of(up):
        return products.gate_up(x, gate, up, activation)
    return gate_mul(linear(x, gate), linear(x, up), activation)


def qkv(
    x: Tensor,
    spec: AttentionSpec,
    weights: AttentionWeights,
    rotation: Rotation,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    is_partly_rotated, is_plain = spec.rotated is not None, rotation.q_scale is None and not spec.interleaved
    is_rounded = spec.cache_format is not None
    matrices = cast(tuple[Matrix, Matrix, Matrix], (weights.q, weights.k, weights.v))
    is_mixed = len({*map(format_of, matrices)}) > 1
    if spec.qk_norm_over_heads or spec.output_gate or is_partly_rotated or is_rounded or is_mixed or not is_plain:
        q, k, v = project(_SELF, x, spec, weights, rotation)
        store(_SELF, spec, k, v, k_cache, v_cache, slots)
        return q
    parts = qkv_parts(x, matrices)
    return qkv_epilogue(parts, weights.biases, weights.qk_norms, spec.qk_norm, rotation[:2], k_cache, v_cache, slots)


layers = partial(run_layers, _SELF)
