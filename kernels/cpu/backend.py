"""The ops of `kernels.contract.Backend` with native kernels.

native/kernels.h describes how the kernels keep the contract. Kernels run on `torch.get_num_threads()` threads.

Matrices are stored in panels of 16 rows. For each step along the columns, a panel holds the values of its 16 rows side
by side: one float32 value per row, or, for bfloat16, two values per row, from neighbouring columns. A matrix is padded
with rows of zeros to whole panels. A bfloat16 matrix is also padded with columns of zeros to a multiple of 32 columns.
The same layout serves every instruction set. `copy_` packs a tensor directly into the weight's memory. The
module `quantized` describes the layout of quantized matrices.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor, get_num_threads

from .. import cache_formats, reference
from ..contract import (
    AttentionBatch,
    AttentionWeights,
    Backend,
    DeltaNetWeights,
    Edits,
    ExpertsWeights,
    FoldedHead,
    Layer,
    Mamba2Weights,
    Memories,
    Memory,
    Norms,
    Pages,
    Rotation,
    StateBatch,
    TokenStatistics,
    Wanted,
    Weight,
)
from ..layer import project, run_layers, store
from ..quantization import Format
from ..reference import layer_norm as layer_norm
from ..reference import prepare as prepare
from ..reference import rope as rope
from ..specs import (
    PLAIN_HEAD,
    WHOLE,
    Activation,
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    HeadSpec,
    LatentSpec,
    Mamba2Spec,
    MlpSpec,
    NormSpec,
    Pieces,
    RouterSpec,
    Score,
)
from .copies import pack_rows
from .library import load_library
from .quantized import FORMAT_NUMBERS, PANEL_ROWS, QuantizedWeight, check_rows

HEAD_SECTION = 512
HOLDS_VALUES = True
FUSES_EDITS = True
FORMATS = frozenset(FORMAT_NUMBERS)
CACHE_FORMATS = frozenset(cache_formats.CACHE_FORMATS)
# The numbers of `CacheFormat` in native/common.h.
CACHE_FORMAT_NUMBERS = {format.dtype: number for number, format in enumerate(cache_formats.CACHE_FORMATS.values(), 1)}
_SECTION_BYTES = 32
_LINE = 64 // torch.bfloat16.itemsize
_SHARED_BYTES = {format.dtype: format.shared_bytes for format in cache_formats.CACHE_FORMATS.values()}
COLUMN_MULTIPLE = {torch.float32: 1, torch.bfloat16: 32}
_PAIR = {torch.float32: 1, torch.bfloat16: 2}
# The numbers of `Activation` in native/common.h.
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "sigmoid": 2, "clamped_silu": 3, "relu": 4}

# The numbers of `Score` in native/common.h.
SCORES: dict[Score, int] = {"softmax_of_chosen": 0, "softmax": 1, "sigmoid": 2}


class PackedWeight:
    """A matrix [rows, columns] of float32 or bfloat16. `data`: the panels, with (padded rows) * (padded columns)
    elements in total.
    """

    def __init__(self, rows: int, columns: int, data: Tensor) -> None:
        self.shape, self.dtype, self.data = torch.Size((rows, columns)), data.dtype, data

    @classmethod
    def new(cls, rows: int, columns: int, empty: Callable[..., Tensor]) -> PackedWeight:
        """Return an uninitialized weight. The weight's memory comes from `empty(*shape)`."""
        multiple = COLUMN_MULTIPLE[empty(0).dtype]
        return cls(rows, columns, empty(_whole_panels(rows), -(-columns // multiple) * multiple))

    @property
    def pointer(self) -> int:
        """The address of the panels."""
        return self.data.data_ptr()

    @property
    def nbytes(self) -> int:
        """The memory size of the weight in bytes, padding included."""
        return self.data.nbytes

    def copy_(self, source: Tensor | PackedWeight) -> None:
        """Copy a packed weight, or pack a tensor. The tensor may be on any device and have any dtype. Raise ValueError
        if the tensor has another shape than the weight.
        """
        if source.shape != self.shape:
            raise ValueError(f"weight must have shape {list(self.shape)} (got {list(source.shape)})")
        if isinstance(source, PackedWeight):
            # torch is not used here, since torch's threads would compete with ops that run in other threads.
            ctypes.memmove(self.pointer, source.pointer, self.nbytes)
            return
        rows = source.to("cpu", self.dtype).contiguous()
        load_library().pack(*self._arguments(rows.data_ptr(), self.pointer))

    def copy_checked(self, rows: Tensor, infinity: int) -> tuple[int, bool]:
        """Pack a contiguous tensor in host memory, of this weight's shape and dtype and of at least
        `copies.LEAST_BYTES` bytes. For `infinity` and the result see `copies.copy_bytes`.
        """
        assert rows.shape == self.shape and rows.dtype == self.dtype
        count, columns = self.shape
        return pack_rows(self.dtype == torch.bfloat16, rows.data_ptr(), count, columns, self.pointer, infinity)

    def put_(self, index: Tensor, source: Tensor) -> None:
        """Overwrite the elements at these flat indices (int64) of the matrix [rows, columns]. Raise IndexError if an
        index is out of range.
        """
        rows, columns = self.shape
        pair, row = _PAIR[self.dtype], torch.arange(rows)
        # `starts`: the offset of each row's first element; `distances`: the offset of each column from the first
        # element. In a panel, `pair` columns of a row are adjacent.
        starts = row // PANEL_ROWS * (PANEL_ROWS * self.data.shape[1]) + row % PANEL_ROWS * pair
        column = torch.arange(columns)
        distances = column // pair * (PANEL_ROWS * pair) + column % pair
        row = index // columns
        self.data.put_(starts[row] + distances[index.sub(row, alpha=columns)], source)

    def narrow(self, dim: int, start: int, length: int) -> PackedWeight:
        """Return rows [start, start + length) as a weight that shares this weight's memory. Raise ValueError unless the
        first row begins a panel, and the last row ends a panel or is the last row of the weight.
        """
        if dim == 0 and start == 0 and length == self.shape[0]:
            return self
        check_rows(self.shape[0], dim, start, length)
        return PackedWeight(length, self.shape[1], self.data.narrow(0, start, _whole_panels(length)))

    def to_dense(self) -> Tensor:
        """Return a plain tensor [rows, columns] with the same values."""
        rows = torch.empty(self.shape, dtype=self.dtype)
        load_library().unpack(*self._arguments(self.pointer, rows.data_ptr()))
        return rows

    def _arguments(self, source: int, destination: int) -> tuple[int, ...]:
        return (self.dtype == torch.bfloat16, source, destination, *self.shape)


Stored: TypeAlias = PackedWeight | QuantizedWeight


class PackedLayers(tuple[Layer, ...]):
    """Layers, with the storage of each tensor and the tensor's offset in that storage. Tensors may share a storage.
    `numbers`: an array of `LayerNumbers` (native/api.h). The steps of a layer write to buffers, and the last buffer
    receives the result. `width`: the sum of the row widths of all other buffers. `starts`: for each of these other
    buffers, the sum of the row widths of the buffers that the kernel takes before it. Row widths are rounded up to
    whole cache lines. `has_states`: whether any layer is a delta net.

    The addresses are computed again when a storage's memory was freed and allocated elsewhere. Raise ValueError for a
    tensor that is not contiguous, and for experts with rows that do not fill whole panels.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.numbers = array("d", [number for layer in layers for number in _layer_numbers(layer)])
        widths = [max(widths) for widths in zip(*map(_widths, layers), strict=True)]
        ends = [*accumulate(_whole_lines(width) for width in widths)]
        self.starts, self.width = [0, *ends[:-2]], sum(ends[-2:-1])
        self.has_states = any(layer.spec.recurrent is not None for layer in layers)
        places = [_place(tensor) for layer in layers for tensor in _layer_tensors(layer)]
        numbers: dict[torch.UntypedStorage | None, int] = {None: 0}
        self._owners = torch.tensor([numbers.setdefault(storage, len(numbers)) for storage, _ in places])
        self._offsets = torch.tensor([offset for _, offset in places])
        self._storages = [storage for storage in numbers if storage is not None]
        self._found: tuple[list[int], Tensor] = [], self._offsets

    def addresses(self) -> Tensor:
        """Return an int64 array of `LayerPointers` (native/api.h). The returned array is valid for one call of the
        kernel.
        """
        starts, addresses = self._found
        if (now := [storage.data_ptr() for storage in self._storages]) != starts:
            addresses = self._offsets + torch.tensor([0, *now])[self._owners]
            self._found = now, addresses
        return addresses


def is_packed(layer: Layer) -> bool:
    """Return whether `PackedLayers` supports a layer. If a list of layers contains a layer that `PackedLayers` does not
    support, all layers of the list are computed op by op.
    """
    mixer, mlp = layer.spec.mixer, layer.spec.mlp
    if mixer is None or mlp is None or isinstance(mixer, Mamba2Spec) or not mlp.gated:
        return False
    if layer.spec.recurrent_mixer is not None or mixer.out_scale != 1.0:
        return False
    if isinstance(mlp, MlpSpec) and not mlp.gate_scale == mlp.out_scale == 1.0:
        return False
    if isinstance(layer.mlp, ExpertsWeights) and layer.mlp.router.dtype != layer.mlp.down.dtype:
        return False
    if isinstance(layer.mlp, ExpertsWeights) and layer.spec.residual_scale != 1.0:
        return False
    if isinstance(mixer, LatentSpec):
        return False
    if isinstance(mixer, DeltaNetSpec):
        return not mixer.joined
    return not (mixer.gate_apart or (mixer.output_gate and mixer.qk_norm_over_heads))


def qkv_tensors(weights: AttentionWeights) -> tuple[Tensor | None, ...]:
    """Return the tensors that `QkvPointers` in native/api.h points to, in the order of the struct's fields."""
    matrices = _panels(weights.q), _panels(weights.k), _panels(weights.v)
    return *matrices, *(weights.biases or (None,) * 3), *(weights.qk_norms or (None,) * 2)


def attention_numbers(spec: AttentionSpec) -> tuple[float, ...]:
    """Return the values of `AttentionNumbers` in native/api.h, in the order of the struct's fields."""
    sizes = spec.num_heads, spec.num_kv_heads, spec.head_dim
    scoring = spec.scale, spec.window or 0, spec.soft_cap or 0.0
    over_heads = spec.qk_norm is not None and spec.qk_norm_over_heads
    pairs = (spec.head_dim if spec.rotated is None else spec.rotated) // 2
    turning = spec.rotation, pairs, spec.interleaved
    format = 0 if spec.cache_format is None else CACHE_FORMAT_NUMBERS[spec.cache_format.dtype]
    return *sizes, *_norm_numbers(spec.qk_norm), over_heads, *scoring, *turning, spec.output_gate, format


def _layer_tensors(layer: Layer) -> tuple[Tensor | None, ...]:
    """Return the tensors that `LayerPointers` points to, in the order of the struct's fields."""
    weights: Any = layer.mixer
    inputs = qkv_tensors(weights) if isinstance(weights, AttentionWeights) else _delta_net_tensors(weights)
    behind = (weights.o_bias, weights.sinks) if isinstance(weights, AttentionWeights) else (None, None)
    mixer = *_norm_tensors(layer.mixer_norms), *inputs, _panels(weights.o), *behind
    return *mixer, *_norm_tensors(layer.mlp_norms), *_mlp_tensors(layer)


def _mlp_tensors(layer: Layer) -> tuple[Tensor | None, ...]:
    """Return the tensors that `BiasedMlpPointers` or `ExpertsPointers` points to, in the order of the struct. The
    tensors of `BiasedMlpPointers` are padded with None to the length of `ExpertsPointers`.
    """
    weights: Any = layer.mlp
    if isinstance(weights, ExpertsWeights):
        return _experts_tensors(weights, cast(ExpertsSpec, layer.spec.mlp).own[1])
    matrices = _panels(weights.gate), _panels(weights.up), _panels(weights.down)
    return *matrices, *(weights.biases or (None,) * 3), *[None] * 5


def _experts_tensors(weights: ExpertsWeights, count: int) -> tuple[Tensor | None, ...]:
    """Return the tensors that `ExpertsPointers` points to, in the order of the struct's fields. `count`: the number of
    experts that this process holds.
    """
    shared = (None,) * 3
    if (mlp := weights.shared) is not None:
        shared = _panels(cast(PackedWeight, mlp.gate)), _panels(mlp.up), _panels(mlp.down)
    score = None if weights.shared_score is None else _panels(weights.shared_score)
    router = _panels(weights.router), weights.router_bias
    return *router, *stack_tensors(weights, count), *shared, score, weights.correction


def stack_tensors(weights: ExpertsWeights, count: int) -> tuple[Tensor | None, ...]:
    """Return four tensors: the stacked gate_up matrices of all experts, their biases or None, the stacked down
    matrices, and their biases or None. Raise ValueError unless each expert's rows fill whole panels.
    """
    hidden, inner = weights.down.shape[0] // count, weights.down.shape[1]
    if hidden % PANEL_ROWS or inner % PANEL_ROWS:
        expected = f"multiples of {PANEL_ROWS}"
        raise ValueError(
            f"layers: the hidden and intermediate sizes of experts must be {expected} (got {hidden} and {inner}); use "
            "the backend 'reference'"
        )
    return _panels(weights.gate_up), weights.gate_up_bias, _panels(weights.down), weights.down_bias


def _delta_net_tensors(weights: DeltaNetWeights) -> tuple[Tensor, ...]:
    """Return the tensors that `DeltaNetPointers` points to, in the order of the struct's fields."""
    return *map(_panels, weights.inputs), weights.convolution, weights.decay, weights.bias, weights.norm


def _widths(layer: Layer) -> tuple[int, ...]:
    """Return the row widths of the buffers of one layer, in the order in which the kernel takes the buffers.

    The result has the widths of the following rows, in this order: the mixer's projected input, the projected input
    after a convolution, the gate of the mixer's output, the gates of a recurrence, the mixer's output, hidden states,
    the inner features of the MLP, hidden states.
    """
    spec, mixer, mlp = cast(tuple[Any, Any, Any], (layer.spec.mixer, layer.mixer, layer.spec.mlp))
    hidden, inner = mixer.o.shape[0], _inner_width(mlp)
    if isinstance(spec, DeltaNetSpec):
        widths = spec.channels, spec.channels, spec.value_size, 2 * spec.num_value_heads, spec.value_size
    else:
        assert isinstance(spec, AttentionSpec)
        size = spec.num_heads * spec.head_dim
        widths = size, 0, size if spec.output_gate else 0, 0, size
    return *widths, hidden, inner, hidden


def _inner_width(spec: MlpSpec | ExpertsSpec) -> int:
    """Return the intermediate size of the MLP that all tokens pass through."""
    return spec.shared_size if isinstance(spec, ExpertsSpec) else spec.intermediate_size


def _norm_tensors(norms: Norms) -> tuple[Tensor | None, ...]:
    return norms.before, norms.after


def _layer_numbers(layer: Layer) -> tuple[float, ...]:
    """Return the values of `LayerNumbers`, in the order of the struct's fields."""
    spec, mixer, inner = layer.spec, cast(Any, layer.spec.mixer), cast(Any, layer.spec.mlp)
    mlp = (inner.intermediate_size, ACTIVATIONS[inner.activation])
    pieces = layer.mlp_pieces.count, layer.mixer_pieces.length, layer.mlp_pieces.length
    others = *mlp, *_norm_numbers(spec.norm), *_experts_numbers(inner), *pieces, spec.residual_scale
    others = *others, *_layer_formats(layer)
    if isinstance(mixer, AttentionSpec):
        return False, *attention_numbers(mixer), *others
    return True, *_delta_net_numbers(mixer), *others


def _layer_formats(layer: Layer) -> tuple[int, ...]:
    """Return the values of `LayerFormats`, in the order of the struct's fields."""
    mixer, mlp = cast(tuple[Any, Any], (layer.mixer, layer.mlp))
    inputs = mixer.inputs if isinstance(mixer, DeltaNetWeights) else (mixer.q, mixer.k, mixer.v, None)
    is_mixture = isinstance(mlp, ExpertsWeights)
    dense = mlp.shared if is_mixture else mlp
    of_mlp = (None,) * 3 if dense is None else (dense.gate, dense.up, dense.down)
    of_experts = (mlp.gate_up, mlp.down) if is_mixture else (None,) * 2
    return tuple(map(_format, (*inputs, mixer.o, *of_mlp, *of_experts)))


def _experts_numbers(spec: MlpSpec | ExpertsSpec) -> tuple[float, ...]:
    if isinstance(spec, MlpSpec):
        return (0,) * 16
    shared = spec.has_shared, spec.shared_size
    return spec.num_experts, spec.top_k, *shared, *spec.own, *router_numbers(spec.router)


def router_numbers(spec: RouterSpec) -> tuple[float, ...]:
    """Return the values of `RouterNumbers` in native/api.h, in the order of the struct's fields."""
    groups = spec.groups, spec.kept_groups, spec.group_best
    return SCORES[spec.score], spec.wide, spec.ranks_scores, *groups, spec.normed, spec.eps, spec.floor, spec.scale


def _delta_net_numbers(spec: DeltaNetSpec) -> tuple[float, ...]:
    """Return the values of `DeltaNetNumbers`, in the order of the struct's fields, padded with zeros to the length of
    `AttentionNumbers`.
    """
    sizes = spec.num_key_heads, spec.num_value_heads, spec.key_head_dim, spec.value_head_dim, spec.kernel_size
    return *sizes, *_norm_numbers(spec.norm), *[0.0] * 7


def _norm_numbers(norm: NormSpec | None) -> tuple[float, ...]:
    return (0.0, False) if norm is None else (norm.eps, norm.zero_centered)


def _panels(weight: Weight) -> Tensor:
    return cast(Stored, weight).data


def _format(weight: Weight | None) -> int:
    """Return the number of a weight's `Format` in native/common.h; 0 for None."""
    return FORMAT_NUMBERS[weight.format.name] if isinstance(weight, QuantizedWeight) else 0


def _place(tensor: Tensor | None) -> tuple[torch.UntypedStorage | None, int]:
    """Return a tensor's storage and the tensor's byte offset in this storage."""
    if tensor is None:
        return None, 0
    if not tensor.is_contiguous():
        found = f"shape {list(tensor.shape)} with strides {list(tensor.stride())}"
        raise ValueError(f"layers: tensors must be contiguous (got {found}); pass tensor.contiguous()")
    return tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize


def _whole_lines(width: int) -> int:
    """Return `width`, rounded up to a number of elements that fills whole cache lines in any dtype."""
    return -(-width // _LINE) * _LINE


def _whole_panels(rows: int) -> int:
    return -(-rows // PANEL_ROWS) * PANEL_ROWS


_library = load_library()
_SELF = cast(Backend, sys.modules[__name__])


def instruction_set() -> str:
    """Return the instruction set that the process uses."""
    return _library.instruction_set()


def new_weight(
    rows: int, columns: int, empty: Callable[..., Tensor], format: Format | None = None, unit: int | None = None
) -> PackedWeight | QuantizedWeight:
    if format is not None:
        return QuantizedWeight.new(rows, columns, empty, format, unit)
    return PackedWeight.new(rows, columns, empty)


def new_layers(layers: Sequence[Layer]) -> PackedLayers | tuple[Layer, ...]:
    return PackedLayers(layers) if all(map(is_packed, layers)) else tuple(layers)


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    weight, a, b = weight.contiguous(), a.float().contiguous(), b.float().contiguous()
    out, pointers = torch.empty_like(weight), (a.data_ptr(), b.data_ptr())
    _library.merge(_is_bfloat16(weight), weight.data_ptr(), *weight.shape, *pointers, len(a), scale, out.data_ptr())
    return out


def merge_into(out: Weight, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> bool:
    if not isinstance(out, PackedWeight):  # a quantized weight, or the matrices of the heads of latent attention
        merged = merge(weight, a, b, scale)
        is_finite = bool(merged.isfinite().all())
        if is_finite or not isinstance(out, QuantizedWeight):
            out.copy_(merged)
        return is_finite
    weight, a, b, finite = weight.contiguous(), a.float().contiguous(), b.float().contiguous(), ctypes.c_bool()
    inputs = weight.data_ptr(), *weight.shape, a.data_ptr(), b.data_ptr(), len(a), scale
    _library.merge_into(_is_bfloat16(weight), *inputs, out.pointer, ctypes.addressof(finite))
    return finite.value


def embedding(token_ids: Tensor, weight: PackedWeight) -> Tensor:
    ids, count = token_ids.contiguous(), token_ids.shape[0]
    out = torch.empty(count, weight.shape[1], dtype=weight.dtype)
    inputs = ids.data_ptr(), count, weight.pointer, *weight.shape
    _library.embedding(get_num_threads(), _is_bfloat16(out), *inputs, out.data_ptr())
    return out


def rmsnorm(x: Tensor, weight: Tensor, norm: NormSpec) -> Tensor:
    x, weight, out = x.contiguous(), weight.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    _library.rmsnorm(*_rows(x), weight.data_ptr(), norm.eps, norm.zero_centered, out.data_ptr())
    return out


def rotation(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    positions, inv_freq = positions.contiguous(), inv_freq.contiguous()
    rows, half = positions.shape[0], inv_freq.shape[0]
    cosines, sines = torch.empty(rows, half, dtype=torch.float32), torch.empty(rows, half, dtype=torch.float32)
    inputs = positions.data_ptr(), rows, inv_freq.data_ptr(), half
    _library.rotation(get_num_threads(), *inputs, scale, cosines.data_ptr(), sines.data_ptr())
    return cosines, sines


def linear(x: Tensor, weight: Stored, bias: Tensor | None = None) -> Tensor:
    return project_back(x, weight, None, bias)


def head_linear(x: Tensor, weight: PackedWeight) -> Tensor:
    x, (count, heads, _), rows = x.contiguous(), x.shape, weight.shape[0] // x.shape[1]
    out = torch.empty(count, heads, rows, dtype=x.dtype)
    inputs = x.data_ptr(), *x.shape, weight.pointer, rows
    _library.head_linear(get_num_threads(), _is_bfloat16(x), *inputs, out.data_ptr())
    return out


def project_back(
    x: Tensor, weight: Stored, residual: Tensor | None = None, bias: Tensor | None = None, pieces: Pieces = WHOLE
) -> Tensor:
    x, rows = x.contiguous(), weight.shape[0]
    bias, residual = _contiguous(bias), _contiguous(residual)
    out = torch.empty(x.shape[0], rows, dtype=x.dtype)
    extras = _pointer(bias), _pointer(residual), pieces.count, pieces.length
    _library.linear(*_rows(x), weight.pointer, _format(weight), rows, *extras, out.data_ptr())
    return out


def back_sums(x: Tensor, weight: Stored, pieces: Pieces, peaks: Tensor | None = None) -> Tensor:
    x, rows, peaks = x.contiguous(), weight.shape[0], _contiguous(peaks)
    out = torch.empty(x.shape[0], rows, dtype=torch.float32)
    matrix = weight.pointer, _format(weight), rows
    _library.back_sums(*_rows(x), *matrix, pieces.count, pieces.length, _pointer(peaks), out.data_ptr())
    return out


def gate_mul(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    if activation == "gelu":
        return reference.gate_mul(gate, up, activation)
    gate, up, out = gate.contiguous(), up.contiguous(), torch.empty_like(gate, memory_format=torch.contiguous_format)
    inputs = gate.data_ptr(), up.data_ptr(), gate.numel(), ACTIVATIONS[activation]
    _library.gate_mul(get_num_threads(), _is_bfloat16(gate), *inputs, out.data_ptr())
    return out


def gate_up(x: Tensor, gate: Stored, up: Stored, activation: Activation) -> Tensor:
    x, rows = x.contiguous(), gate.shape[0]
    out = torch.empty(x.shape[0], rows, dtype=x.dtype)
    matrices = gate.pointer, _format(gate), up.pointer, _format(up)
    _library.gate_up(*_rows(x), *matrices, rows, ACTIVATIONS[activation], out.data_ptr())
    return out


def route(
    logits: Tensor, spec: ExpertsSpec, chosen: Tensor | None = None, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    logits, correction, is_replayed = logits.contiguous(), _contiguous(correction), chosen is not None
    (rows, count), numbers = logits.shape, array("d", router_numbers(spec.router))
    experts = torch.empty(rows, spec.top_k, dtype=torch.int32) if chosen is None else chosen.contiguous()
    gates = torch.empty(rows, spec.top_k, dtype=torch.float32)
    _library.route(
        *(get_num_threads(), _is_bfloat16(logits), logits.data_ptr(), rows, count, spec.top_k),
        *(_address(numbers), _pointer(correction), is_replayed, experts.data_ptr(), gates.data_ptr()),
    )
    return experts, gates


def experts(
    x: Tensor,
    spec: ExpertsSpec,
    weights: ExpertsWeights,
    experts: Tensor,
    gates: Tensor,
    shared: Tensor | None = None,
    groups: int = 1,
) -> Tensor:
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    inputs = experts.contiguous(), gates.contiguous(), _contiguous(shared)
    stacks = stack_tensors(weights, spec.num_experts)
    stacks = [*map(_contiguous, stacks)]
    _library.experts(
        *(*_rows(x), *map(_pointer, stacks), _format(weights.gate_up), _format(weights.down)),
        *(spec.num_experts, spec.intermediate_size, spec.top_k),
        *(spec.gated, ACTIVATIONS[spec.activation], *map(_pointer, inputs), groups, out.data_ptr()),
    )
    return out


def expert_sums(
    x: Tensor, spec: ExpertsSpec, weights: ExpertsWeights, experts: Tensor, gates: Tensor, groups: int
) -> Tensor:
    x, out = x.contiguous(), torch.empty(x.shape, dtype=torch.float32)
    inputs, (first, count) = (experts.contiguous(), gates.contiguous()), spec.own
    stacks = [*map(_contiguous, stack_tensors(weights, count))]
    _library.expert_sums(
        *(*_rows(x), *map(_pointer, stacks), _format(weights.gate_up), _format(weights.down)),
        *(first, count, spec.intermediate_size, spec.top_k),
        *(spec.gated, ACTIVATIONS[spec.activation], *map(_pointer, inputs), groups, out.data_ptr()),
    )
    return out


def qkv(
    x: Tensor,
    spec: AttentionSpec,
    weights: AttentionWeights,
    rotation: Rotation,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    is_rounded = spec.cache_format is not None and k_cache.dtype == x.dtype
    if spec.gate_apart or (spec.output_gate and spec.qk_norm_over_heads) or is_rounded:
        q, k, v = project(_SELF, x, spec, weights, rotation)
        store(_SELF, spec, k, v, k_cache, v_cache, slots)
        return q
    x, slots = x.contiguous(), slots.contiguous()
    turns = [*map(_contiguous, rotation)]
    q = torch.empty(x.shape[0], spec.num_heads, spec.head_dim * (2 if spec.output_gate else 1), dtype=x.dtype)
    tensors = [*map(_contiguous, qkv_tensors(weights))]
    pointers, numbers = array("Q", [_pointer(tensor) or 0 for tensor in tensors]), array("d", attention_numbers(spec))
    _library.qkv(
        *(*_rows(x), _address(numbers), _address(pointers), *map(_format, (weights.q, weights.k, weights.v))),
        *(k_cache.data_ptr(), v_cache.data_ptr()),
        *(*map(_pointer, turns), slots.data_ptr(), k_cache.shape[1], q.data_ptr()),
    )
    return q


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    k, v, slots = k.contiguous(), v.contiguous(), slots.contiguous()
    format = CACHE_FORMAT_NUMBERS.get(k_cache.dtype, 0)
    _library.write_kv(
        *(get_num_threads(), _is_bfloat16(k), k.data_ptr(), v.data_ptr(), slots.data_ptr(), len(slots)),
        *(k_cache.data_ptr(), v_cache.data_ptr(), format, *k_cache.shape[1:3], k.shape[2], v.shape[2]),
    )


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    sinks = _contiguous(sinks)
    q, (_, block_size, kv_heads, value_dim) = q.contiguous(), v_cache.shape
    if format := CACHE_FORMAT_NUMBERS.get(k_cache.dtype, 0):
        value_dim -= _SHARED_BYTES[k_cache.dtype]
    out = torch.empty(*q.shape[:2], value_dim, dtype=q.dtype)
    starts, lens = array("q", batch.query_starts), array("q", batch.context_lens)
    tables, ends = batch.block_tables.contiguous(), _contiguous(batch.ends)
    _library.attention(
        *(get_num_threads(), _is_bfloat16(q), q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), format),
        *(q.shape[1], kv_heads, q.shape[2], value_dim, block_size),
        *(len(lens), _address(starts), _address(lens), tables.data_ptr(), tables.shape[1], _pointer(ends)),
        *(scale, window or 0, soft_cap or 0.0, _pointer(sinks), out.data_ptr()),
    )
    return out


def convolve(x: Tensor, weight: Tensor, tails: Tensor, batch: StateBatch, bias: Tensor | None = None) -> Tensor:
    x, weight, out = x.contiguous(), weight.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    sequences, bias = _sequences(batch), _contiguous(bias)
    _library.convolve(
        *(*_rows(x), weight.data_ptr(), _pointer(bias), weight.shape[2], tails.data_ptr()),
        *(len(batch.reads), *map(_pointer, sequences), out.data_ptr()),
    )
    return out


def delta_rule(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    spec: DeltaNetSpec,
    weights: DeltaNetWeights,
    states: Tensor,
    batch: StateBatch,
) -> Tensor:
    inputs = [tensor.contiguous() for tensor in (qkv, b, a, weights.decay, weights.bias)]
    out = torch.empty(len(qkv), spec.num_value_heads, spec.value_head_dim, dtype=qkv.dtype)
    sequences = _sequences(batch)
    _library.delta_rule(
        *(get_num_threads(), _is_bfloat16(qkv), *(tensor.data_ptr() for tensor in inputs)),
        *(spec.num_key_heads, spec.num_value_heads, spec.key_head_dim, spec.value_head_dim, states.data_ptr()),
        *(len(batch.reads), *map(_pointer, sequences), out.data_ptr()),
    )
    return out


def state_space(
    xbc: Tensor, steps: Tensor, spec: Mamba2Spec, weights: Mamba2Weights, states: Tensor, batch: StateBatch
) -> Tensor:
    inputs = [tensor.contiguous() for tensor in (xbc, steps, weights.decay, weights.bias, weights.skip)]
    out = torch.empty(len(xbc), spec.num_heads, spec.head_dim, dtype=xbc.dtype)
    sequences = _sequences(batch)
    _library.state_space(
        *(get_num_threads(), _is_bfloat16(xbc), *(tensor.data_ptr() for tensor in inputs), *spec.time_step_limit),
        *(spec.num_groups, spec.num_heads, spec.state_size, spec.head_dim, states.data_ptr()),
        *(len(batch.reads), *map(_pointer, sequences), out.data_ptr()),
    )
    return out


def _sequences(batch: StateBatch) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    drafted = torch.tensor(batch.drafted, dtype=torch.int64) if any(batch.drafted) else None
    return batch.starts, batch.reads.contiguous(), batch.writes.contiguous(), drafted


def layers(
    x: Tensor,
    layers: PackedLayers | tuple[Layer, ...],
    rotations: Sequence[Rotation],
    memories: Sequence[Memory],
    pages: Sequence[Pages],
    states: StateBatch | None = None,
    routes: Tensor | None = None,
) -> Tensor:
    if not runs_packed(layers, states):
        return run_layers(_SELF, x, layers, rotations, memories, pages, states, routes)
    return packed_layers(x, layers, rotations, memories, pages, states, routes)


def runs_packed(layers: Sequence[Layer], states: StateBatch | None) -> TypeGuard[PackedLayers]:
    """Return whether one call of the library can run the layers."""
    return isinstance(layers, PackedLayers) and (states is None or states.journal is None)


def packed_layers(
    x: Tensor,
    layers: PackedLayers,
    rotations: Sequence[Rotation],
    memories: Sequence[Memory],
    pages: Sequence[Pages],
    states: StateBatch | None = None,
    routes: Tensor | None = None,
    ranks: int | None = None,
) -> Tensor:
    """Run layers in one call of the library. `ranks`: the address of a `RankExchange` (native/api.h), or None; if the
    exchange fails, the result is arbitrary.
    """
    if not len(memories) == len(pages) == len(layers):
        raise ValueError(
            f"layers: got {len(memories)} memories and {len(pages)} `Pages` for {len(layers)} layers; pass one memory "
            "and one `Pages` for each layer"
        )
    if not layers:
        return x
    x, groups = x.contiguous(), {id(page): page for page in pages}
    numbers = {key: _PageNumbers(page) for key, page in groups.items()}
    turns = [_contiguous(part) for rotation in rotations for part in rotation]
    starts, lens = array("q", pages[0].batch.query_starts), array("q", pages[0].batch.context_lens)
    ends = _contiguous(pages[0].batch.ends)
    places = memories.addresses if isinstance(memories, Memories) else Memories(memories).addresses
    weights, turned = layers.addresses(), _addresses(turns)
    paged = array("Q", b"".join([numbers[id(page)].pointers for page in pages]))
    reads, writes = _slots(layers, states)
    record = _contiguous(routes)
    # One tensor holds all buffers except the result, since allocations take long.
    buffers, out = torch.empty(x.shape[0] * layers.width, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    start, row = buffers.data_ptr(), x.shape[0] * x.itemsize
    _library.layers(
        *(*_rows(x), _address(layers.numbers), weights.data_ptr(), _address(places), _address(paged), len(layers)),
        *(_address(turned), _block_size(layers, memories), len(lens), _address(starts), _address(lens)),
        _pointer(ends),
        *(_pointer(reads), _pointer(writes), _pointer(record)),
        *(*[start + row * place for place in layers.starts], out.data_ptr(), ranks),
    )
    if routes is not None and record is not None and record is not routes:
        routes.copy_(record)
    return out


class _PageNumbers:
    """The values of `PagePointers` in native/api.h. The values are valid as long as this object lives."""

    def __init__(self, page: Pages) -> None:
        self._slots, self._tables = page.slots.contiguous(), page.batch.block_tables.contiguous()
        numbers = self._slots.data_ptr(), self._tables.data_ptr(), self._tables.shape[1]
        self.pointers = array("Q", numbers).tobytes()


def _slots(layers: PackedLayers, states: StateBatch | None) -> tuple[Tensor, Tensor] | tuple[None, None]:
    if not layers.has_states:
        return None, None
    assert states is not None, "a delta net needs states"
    return states.reads.contiguous(), states.writes.contiguous()


def _block_size(layers: PackedLayers, memories: Sequence[Memory]) -> int:
    """Return the block size of the caches, or 0 without caches."""
    pairs = zip(layers, memories, strict=True)
    return next((keys.shape[1] for layer, (keys, _) in pairs if layer.spec.cached is not None), 0)


def next_tokens(
    hidden: Tensor, weight: PackedWeight, wanted: Wanted, head: HeadSpec = PLAIN_HEAD
) -> tuple[Tensor, Tensor, Tensor]:
    # Allocating the results before the head is computed is faster, because the head displaces the contents of caches.
    results = _empty_results(wanted.rows.shape[0], None)
    return _fold(head_sections(hidden, weight, wanted, None, 0, head), results)[:3]


def next_token_statistics(
    hidden: Tensor, weight: PackedWeight, wanted: Wanted, k: int, head: HeadSpec = PLAIN_HEAD
) -> tuple[Tensor, TokenStatistics, Tensor]:
    token_ids, _, finite, found = fold_sections(head_sections(hidden, weight, wanted, k, 0, head), wanted, k)
    return token_ids, cast(TokenStatistics, found), finite


class HeadEdits:
    """The values of `HeadEdits` in native/api.h. The values are valid as long as this object lives. `address`: of the
    values. `num_targets`: K.
    """

    def __init__(self, edits: Edits) -> None:
        self.num_targets = len(edits.targets)
        columns = edits.starts, edits.entries, edits.penalties, edits.mask_places, edits.masks
        targets = edits.target_starts, edits.targets, torch.empty(self.num_targets, dtype=torch.float32)
        self._tensors = *columns, *targets
        assert all(column.is_contiguous() for column in self._tensors)
        pointers = [column.data_ptr() for column in self._tensors]
        self._values = array("q", [*pointers[:5], edits.masks.shape[1], *pointers[5:]])
        self.address = _address(self._values)


prepare_edits = HeadEdits


def edited_tokens(
    hidden: Tensor, weight: PackedWeight, wanted: Wanted, edits: HeadEdits, k: int | None, head: HeadSpec = PLAIN_HEAD
) -> tuple[FoldedHead, Tensor]:
    results, of_targets = _empty_results(wanted.rows.shape[0], k), torch.empty(edits.num_targets, dtype=torch.float32)
    sections = head_sections(hidden, weight, wanted, k, 0, head, edits)
    return _fold(sections, results, edits, of_targets), of_targets


def head_sections(
    hidden: Tensor,
    weight: PackedWeight,
    wanted: Wanted,
    k: int | None,
    first: int,
    head: HeadSpec = PLAIN_HEAD,
    edits: HeadEdits | None = None,
) -> tuple[Tensor, ...]:
    """Return the `SectionResult`s (native/api.h) as uint8 [M, sections, 32], and the top logits and their ids."""
    hidden, count, (rows, columns) = hidden.contiguous(), wanted.rows.shape[0], weight.shape
    inputs = (wanted.rows, wanted.temperatures, wanted.raw, wanted.seeds, wanted.positions, wanted.targets)
    inputs = [column.contiguous() for column in inputs]
    sections = torch.empty(count, -(-rows // HEAD_SECTION), _SECTION_BYTES, dtype=torch.uint8)
    tops = _empty_tops(count, k)
    _library.head_sections(
        *(get_num_threads(), _is_bfloat16(hidden), hidden.data_ptr(), columns, weight.pointer, rows),
        *(head.scale, head.soft_cap or 0.0, first, count),
        *map(Tensor.data_ptr, inputs),
        *(sections.data_ptr(), k is not None, k or 0, *map(_pointer, tops), edits and edits.address),
    )
    return (sections,) if k is None else (sections, *cast(tuple[Tensor, Tensor], tops))


def fold_sections(found: Sequence[Tensor], wanted: Wanted, k: int | None) -> FoldedHead:
    return _fold(found, _empty_results(found[0].shape[0], k))


def _fold(
    found: Sequence[Tensor], results: FoldedHead, edits: HeadEdits | None = None, of_targets: Tensor | None = None
) -> FoldedHead:
    """Compute the result of `fold_sections`, write it to the tensors in `results`, and return `results`. If
    `of_targets` is given, also write the log-probs of the targets of `edits` to it.
    """
    sections, *tops = [each.contiguous() for each in found]
    values, ids = tops or (None, None)
    _, entropy, top_ids, top_logprobs = results.statistics or (None,) * 4
    _library.fold_sections(
        *(get_num_threads(), *sections.shape[:2], sections.data_ptr()),
        *(0 if values is None else values.shape[1], _pointer(values), _pointer(ids)),
        *map(Tensor.data_ptr, results[:3]),
        *(0 if top_ids is None else top_ids.shape[1], *map(_pointer, (entropy, top_ids, top_logprobs))),
        *(edits and edits.address, _pointer(of_targets)),
    )
    return results


def _empty_results(rows: int, k: int | None) -> FoldedHead:
    """Return uninitialized results of `fold_sections`."""
    tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
    finite, (top_logprobs, top_ids) = torch.empty(rows, dtype=torch.bool), _empty_tops(rows, k)
    if top_logprobs is None or top_ids is None:
        return FoldedHead(tokens, logprobs, finite, None)
    entropy = torch.empty(rows, dtype=torch.float32)
    return FoldedHead(tokens, logprobs, finite, TokenStatistics(logprobs, entropy, top_ids, top_logprobs))


def _empty_tops(rows: int, k: int | None) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return uninitialized tensors for the values and the ids of the k top tokens; None without statistics."""
    if k is None:
        return None, None
    return torch.empty(rows, k, dtype=torch.float32), torch.empty(rows, k, dtype=torch.int64)


def lm_head(hidden: Tensor, weight: PackedWeight, head: HeadSpec = PLAIN_HEAD) -> Tensor:
    hidden, out = hidden.contiguous(), torch.empty(len(hidden), weight.shape[0], dtype=torch.float32)
    shape = head.scale, head.soft_cap or 0.0
    _library.logits(*_rows(hidden), weight.pointer, weight.shape[0], *shape, out.data_ptr())
    return out


def wide_linear(x: Tensor, weight: PackedWeight) -> Tensor:
    return lm_head(x.to(weight.dtype), weight)


def log_probs(logits: Tensor, token_ids: Tensor) -> Tensor:
    logits, token_ids = logits.contiguous(), token_ids.contiguous()
    out = torch.empty(token_ids.shape, dtype=torch.float32)
    sizes = *logits.shape, token_ids.data_ptr(), token_ids[:1].numel()
    _library.log_probs(get_num_threads(), logits.data_ptr(), *sizes, out.data_ptr())
    return out


def token_statistics(logits: Tensor, token_ids: Tensor, k: int) -> TokenStatistics:
    logits, token_ids = logits.contiguous(), token_ids.contiguous()
    found, entropy = (torch.empty(len(logits), dtype=torch.float32) for _ in range(2))
    top_logprobs, top_ids = cast(tuple[Tensor, Tensor], _empty_tops(len(logits), k))
    out = TokenStatistics(found, entropy, top_ids, top_logprobs)
    pointers = (column.data_ptr() for column in out)
    _library.token_statistics(get_num_threads(), logits.data_ptr(), *logits.shape, token_ids.data_ptr(), k, *pointers)
    return out


def mask_logits(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    rows, masks = rows.contiguous(), masks.contiguous()
    pointers = rows.data_ptr(), len(rows), masks.data_ptr()
    _library.mask_logits(get_num_threads(), logits.data_ptr(), logits.shape[1], *pointers)


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    filters = [column.contiguous() for column in (top_k, top_p, min_p)]
    pointers = (column.data_ptr() for column in filters)
    _library.filter(get_num_threads(), logits.data_ptr(), *logits.shape, *pointers, None, None)
    return logits


def filter_recorded(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    count, vocab_size = logits.shape
    sums, bits = torch.empty(count, 2), torch.empty(count, -(-vocab_size // 8), dtype=torch.uint8)
    columns = [column.contiguous() for column in (top_k, top_p, min_p)]
    pointers = (column.data_ptr() for column in (*columns, sums, bits))
    _library.filter(get_num_threads(), logits.data_ptr(), count, vocab_size, *pointers)
    return bits, sums


def log_probs_of(logits: Tensor, sums: Tensor) -> Tensor:
    logits, sums = logits.contiguous(), sums.contiguous()
    out = torch.empty(len(logits), dtype=torch.float32)
    _library.log_probs_of(len(logits), logits.data_ptr(), sums.data_ptr(), out.data_ptr())
    return out


def sample(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    logits, seeds, positions = logits.contiguous(), seeds.contiguous(), positions.contiguous()
    out = torch.empty(len(logits), dtype=torch.int64)
    pointers = seeds.data_ptr(), positions.data_ptr(), out.data_ptr()
    _library.sample(get_num_threads(), logits.data_ptr(), *logits.shape, *pointers)
    return out


def _is_bfloat16(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def _rows(x: Tensor) -> tuple[int, int, int, int, int]:
    """Return a tuple: the number of threads, whether x is bfloat16, and the address, rows and columns of x."""
    rows, columns = x.shape
    return get_num_threads(), _is_bfloat16(x), x.data_ptr(), rows, columns


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _addresses(tensors: Iterable[Tensor | None]) -> array[int]:
    """Return the addresses of tensors as an array of pointers; null for None."""
    return array("Q", [0 if tensor is None else tensor.data_ptr() for tensor in tensors])


def _address(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]
