"""Matrices in the layout that the native products read, and what a call for a run of layers needs of their weights.

A panel holds 16 rows. For each step along the columns it has the values of its 16 rows side by side: one float32, or
two bfloat16 of neighbouring columns. Rows are filled up with zeros to whole panels, columns of bfloat16 to a multiple
of 32. The same layout serves every instruction set. `copy_` packs into a weight's own memory.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from ..contract import (
    AttentionWeights,
    DeltaNetWeights,
    ExpertsWeights,
    Layer,
    MlpWeights,
    Norms,
    Weight,
    check_pieces,
)
from ..specs import Activation, AttentionSpec, DeltaNetSpec, ExpertsSpec, LayerSpec, MlpSpec, NormSpec
from .library import load_library

PANEL_ROWS = 16
COLUMN_MULTIPLE = {torch.float32: 1, torch.bfloat16: 32}
_PAIR = {torch.float32: 1, torch.bfloat16: 2}
# As `Activation` in native/common.h.
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "sigmoid": 2, "clamped_silu": 3}


class PackedWeight:
    """A matrix [rows, columns] of float32 or bfloat16. `data`: its panels, [padded rows, padded columns] in size."""

    def __init__(self, rows: int, columns: int, data: Tensor) -> None:
        self.shape, self.dtype, self.data = torch.Size((rows, columns)), data.dtype, data

    @classmethod
    def new(cls, rows: int, columns: int, empty: Callable[..., Tensor]) -> PackedWeight:
        """One that is uninitialized until something is copied into it, in memory from `empty(*shape)`."""
        multiple = COLUMN_MULTIPLE[empty(0).dtype]
        return cls(rows, columns, empty(_whole_panels(rows), -(-columns // multiple) * multiple))

    @property
    def pointer(self) -> int:
        """Its address."""
        return self.data.data_ptr()

    @property
    def nbytes(self) -> int:
        """The memory it takes, padding included."""
        return self.data.nbytes

    def copy_(self, source: Tensor | PackedWeight) -> None:
        """Stores a weight, or packs a tensor on any device and of any dtype. Raise ValueError for another shape."""
        if source.shape != self.shape:
            raise ValueError(f"weight: expected shape {list(self.shape)}, found {list(source.shape)}")
        if isinstance(source, PackedWeight):
            # Not by torch, whose threads would have to be waited for beside those of other threads' ops.
            ctypes.memmove(self.pointer, source.pointer, self.nbytes)
            return
        rows = source.to("cpu", self.dtype).contiguous()
        load_library().pack(*self._arguments(rows.data_ptr(), self.pointer))

    def put_(self, index: Tensor, source: Tensor) -> None:
        """Overwrites the elements at flat indices (int64) into [rows, columns]. Raise IndexError if one is outside."""
        rows, columns = self.shape
        pair, row = _PAIR[self.dtype], torch.arange(rows)
        # Where a row begins, and how far from there a column is: a step holds `pair` columns of each row of a panel.
        starts = row // PANEL_ROWS * (PANEL_ROWS * self.data.shape[1]) + row % PANEL_ROWS * pair
        column = torch.arange(columns)
        distances = column // pair * (PANEL_ROWS * pair) + column % pair
        row = index // columns
        self.data.put_(starts[row] + distances[index.sub(row, alpha=columns)], source)

    def narrow(self, dim: int, start: int, length: int) -> PackedWeight:
        """Rows [start, start + length), sharing memory. Raise ValueError unless they are whole panels or the last."""
        end = start + length
        if dim != 0 or start % PANEL_ROWS or not (end % PANEL_ROWS == 0 or end == self.shape[0]):
            raise ValueError(f"weight: expected rows in multiples of {PANEL_ROWS}, found [{start}, {end}) of dim {dim}")
        if not 0 <= start <= end <= self.shape[0]:
            raise ValueError(f"weight: expected rows within [0, {self.shape[0]}), found [{start}, {end})")
        return PackedWeight(length, self.shape[1], self.data.narrow(0, start, _whole_panels(length)))

    def to_dense(self) -> Tensor:
        """A plain tensor [rows, columns] with the same values."""
        rows = torch.empty(self.shape, dtype=self.dtype)
        load_library().unpack(*self._arguments(self.pointer, rows.data_ptr()))
        return rows

    def _arguments(self, source: int, destination: int) -> tuple[int, ...]:
        return (self.dtype == torch.bfloat16, source, destination, *self.shape)


class PackedLayers(tuple[Layer, ...]):
    """Layers, with where their tensors lie: each one's storage, of which all may share one, and its place there.

    `numbers`: what native/api.h reads as an array of `LayerNumbers`. `widths`: of the memory for what passes from
    step to step, in the order in which it is passed. `has_states`: whether a layer is a delta net.

    No address is kept, for a storage's memory may go away and come back elsewhere. Raise ValueError for a tensor whose
    values do not lie side by side, and for experts whose rows are not of whole panels; and ConfigError for layers with
    several `pieces`.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.numbers = array("d", [number for layer in layers for number in _layer_numbers(layer)])
        self.widths = [max(widths) for widths in zip(*map(_widths, layers), strict=True)]
        self.has_states = any(isinstance(layer.spec.mixer, DeltaNetSpec) for layer in layers)
        places = [_place(tensor) for layer in layers for tensor in _layer_tensors(layer)]
        numbers: dict[torch.UntypedStorage | None, int] = {None: 0}
        owners = torch.tensor([numbers.setdefault(storage, len(numbers)) for storage, _ in places])
        self._offsets = torch.tensor([offset for _, offset in places])
        self._storages = [(storage, (owners == i).long()) for storage, i in numbers.items() if storage is not None]

    def addresses(self) -> Tensor:
        """What native/api.h reads as an array of `LayerPointers`, int64. It holds for one call."""
        addresses = self._offsets
        for storage, lie_there in self._storages:
            addresses = torch.add(addresses, lie_there, alpha=storage.data_ptr())
        return addresses


def is_packed(spec: LayerSpec) -> bool:
    """Whether `PackedLayers` may hold such a layer; a run of layers with others is computed op by op."""
    mixer = spec.mixer
    if isinstance(mixer, DeltaNetSpec):
        return not mixer.joined
    return not (mixer.output_gate and mixer.qk_norm_over_heads)


def qkv_tensors(weights: AttentionWeights) -> tuple[Tensor | None, ...]:
    """What `QkvPointers` in native/api.h points to, in its order."""
    matrices = _panels(weights.q), _panels(weights.k), _panels(weights.v)
    return *matrices, *(weights.biases or (None,) * 3), *(weights.qk_norms or (None,) * 2)


def attention_numbers(spec: AttentionSpec) -> tuple[float, ...]:
    """What `AttentionNumbers` in native/api.h holds, in its order."""
    sizes = spec.num_heads, spec.num_kv_heads, spec.head_dim
    scoring = spec.scale, spec.window or 0, spec.soft_cap or 0.0
    over_heads = spec.qk_norm is not None and spec.qk_norm_over_heads
    pairs = (spec.head_dim if spec.rotated is None else spec.rotated) // 2
    return *sizes, *_norm_numbers(spec.qk_norm), over_heads, *scoring, spec.rotation, pairs, spec.output_gate


def _layer_tensors(layer: Layer) -> tuple[Tensor | None, ...]:
    """What `LayerPointers` points to, in its order."""
    weights = layer.mixer
    inputs = qkv_tensors(weights) if isinstance(weights, AttentionWeights) else _delta_net_tensors(weights)
    behind = (weights.o_bias, weights.sinks) if isinstance(weights, AttentionWeights) else (None, None)
    mixer = *_norm_tensors(layer.mixer_norms), *inputs, _panels(weights.o), *behind
    return *mixer, *_norm_tensors(layer.mlp_norms), *_mlp_tensors(layer.mlp)


def _mlp_tensors(weights: MlpWeights | ExpertsWeights) -> tuple[Tensor | None, ...]:
    """What `MlpPointers` or `ExpertsPointers` points to, in its order, as many of nothing as the latter has more."""
    if isinstance(weights, ExpertsWeights):
        return _experts_tensors(weights)
    return _panels(weights.gate), _panels(weights.up), _panels(weights.down), *[None] * 7


def _experts_tensors(weights: ExpertsWeights) -> tuple[Tensor | None, ...]:
    """What `ExpertsPointers` points to, in its order."""
    shared = (None,) * 4
    if weights.shared is not None and weights.shared_score is not None:
        mlp = weights.shared
        shared = _panels(mlp.gate), _panels(mlp.up), _panels(mlp.down), _panels(weights.shared_score)
    router = _panels(weights.router), weights.router_bias
    return *router, *stack_tensors(weights, weights.router.shape[0]), *shared


def stack_tensors(weights: ExpertsWeights, count: int) -> tuple[Tensor | None, ...]:
    """The matrices of all experts, each with its bias or None. Raise ValueError unless each begins with a panel."""
    hidden, inner = weights.down.shape[0] // count, weights.down.shape[1]
    if hidden % PANEL_ROWS or inner % PANEL_ROWS:
        expected = f"experts of hidden and intermediate sizes that are multiples of {PANEL_ROWS}"
        raise ValueError(f"layers: expected {expected}, found {hidden} and {inner}; take the backend reference")
    return _panels(weights.gate_up), weights.gate_up_bias, _panels(weights.down), weights.down_bias


def _delta_net_tensors(weights: DeltaNetWeights) -> tuple[Tensor, ...]:
    """What `DeltaNetPointers` points to, in its order."""
    return *map(_panels, weights.inputs), weights.convolution, weights.decay, weights.bias, weights.norm


def _widths(layer: Layer) -> tuple[int, ...]:
    """`PackedLayers.widths` of one layer: what it projects, that after a convolution, gates of what comes out and of a
    recurrence, what comes out, hidden states, inside the MLP, hidden states."""
    spec, hidden, inner = layer.spec.mixer, layer.mixer.o.shape[0], _inner_width(layer.spec.mlp)
    if isinstance(spec, DeltaNetSpec):
        widths = spec.channels, spec.channels, spec.value_size, 2 * spec.num_value_heads, spec.value_size
    else:
        size = spec.num_heads * spec.head_dim
        widths = size, 0, size if spec.output_gate else 0, 0, size
    return *widths, hidden, inner, hidden


def _inner_width(spec: MlpSpec | ExpertsSpec) -> int:
    """Of the MLP that all tokens go through."""
    return spec.shared_size if isinstance(spec, ExpertsSpec) else spec.intermediate_size


def _norm_tensors(norms: Norms) -> tuple[Tensor | None, ...]:
    return norms.before, norms.after


def _layer_numbers(layer: Layer) -> tuple[float, ...]:
    """What `LayerNumbers` holds, in its order."""
    check_pieces(layer.pieces)
    spec, mixer = layer.spec, layer.spec.mixer
    mlp = (spec.mlp.intermediate_size, ACTIVATIONS[spec.mlp.activation])
    others = *mlp, *_norm_numbers(spec.norm), *_experts_numbers(spec.mlp), layer.pieces
    if isinstance(mixer, AttentionSpec):
        return False, *attention_numbers(mixer), *others
    return True, *_delta_net_numbers(mixer), *others


def _experts_numbers(spec: MlpSpec | ExpertsSpec) -> tuple[float, ...]:
    if isinstance(spec, MlpSpec):
        return 0, 0, False, 0
    return spec.num_experts, spec.top_k, spec.normed, spec.shared_size


def _delta_net_numbers(spec: DeltaNetSpec) -> tuple[float, ...]:
    """What `DeltaNetNumbers` holds, in its order, and as many zeros as `AttentionNumbers` holds more."""
    sizes = spec.num_key_heads, spec.num_value_heads, spec.key_head_dim, spec.value_head_dim, spec.kernel_size
    return *sizes, *_norm_numbers(spec.norm), *[0.0] * 5


def _norm_numbers(norm: NormSpec | None) -> tuple[float, ...]:
    return (0.0, False) if norm is None else (norm.eps, norm.zero_centered)


def _panels(weight: Weight) -> Tensor:
    return cast(PackedWeight, weight).data


def _place(tensor: Tensor | None) -> tuple[torch.UntypedStorage | None, int]:
    """A tensor's storage, and how many bytes of it lie before the tensor."""
    if tensor is None:
        return None, 0
    if not tensor.is_contiguous():
        found = f"shape {list(tensor.shape)} with strides {list(tensor.stride())}"
        raise ValueError(f"layers: expected values that lie side by side, found {found}; take the contiguous tensor")
    return tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize


def _whole_panels(rows: int) -> int:
    return -(-rows // PANEL_ROWS) * PANEL_ROWS
