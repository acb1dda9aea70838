"""The decoder: the weights and the forward pass of the model that a `DecoderSpec` describes.

Owns the layout of the weights. Each weight has the form that the backend requires, and the name that a checkpoint uses
(`checkpoint_tensors`). The caller allocates the memory of the weights. The decoder does not own the memory of
sequences, keeps no state between calls, and has no code for particular model families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from ...kernels.contract import Backend, Memory, Pages, Rotation, StateBatch, Weight, mark_rows
from ...kernels.layer import HEAD, LAYERS, make_layer, scale_embedding, turn
from ...kernels.rounded import RoundedWeight, plain_of
from ...kernels.shards import Shard
from ...kernels.specs import HEAD_ROLE, PLAIN, DecoderSpec, ExpertsSpec, WeightSpec, is_of_mtp
from ...kernels.stacks import HeadLayout, HeadMatrices, Stack, StackLayout
from .mtp import MTP_LAYER, Mtp
from .tower import EmbeddedRows, Tower

Empty: TypeAlias = Callable[..., Tensor]
ROUTES = "routed_experts"


def _parts_of_stacks(spec: ExpertsSpec) -> dict[str, tuple[str, ...]]:
    """A stack holds one matrix of each expert. For each stack, return the roles of the parts that form such a matrix,
    in the order of the matrix's rows.
    """
    gate_up = ("expert.gate", "expert.up") if spec.gated else ("expert.up",)
    return {"experts.gate_up": gate_up, "experts.down": ("expert.down",)}


@dataclass(frozen=True)
class ModelInput:
    """The input of a forward pass: M tokens of a mixed batch.

    `token_ids`: int64 [M]. `positions`: int64 [M], or [axes, M] (`RotationSpec.axes`). `memories`: the memory of each
    layer, in the form that the layer's mixer requires. `pages`: for each layer, where to write the keys and values of
    the M tokens, and where attention reads keys and values. `states`: for each sequence, where to read the recurrent
    states and where to write the new states; None if no layer has recurrent states. `embedded`: embeddings that replace
    the embeddings of some tokens, or None; all stages get the same embeddings. The replacing embeddings are not scaled.
    `before`: the output of the previous stage, which the forward pass overwrites; None in the first stage.

    In the input of a stage, `memories` and `pages` have one entry for each layer of that stage, and none for the layers
    of other stages.
    """

    token_ids: Tensor
    positions: Tensor
    memories: Sequence[Memory]
    pages: Sequence[Pages]
    states: StateBatch | None = None
    embedded: EmbeddedRows | None = None
    before: ModelOutput | None = None


class ModelOutput(NamedTuple):
    """The output of a forward pass.

    `hidden`: [M, hidden_size], the hidden states after the last norm; in a stage before the last one, the hidden states
    after the stage's last layer. `records`: maps the name of each further value to the values of all tokens. For a
    model with experts, `records[ROUTES]` is an int32 tensor [layers with experts, M, top_k] that lists the experts of
    each token. In `records[ROUTES]`, the entries for the layers of later stages are uninitialized.
    """

    hidden: Tensor
    records: dict[str, Tensor]


class Owner(Enum):
    """The ranks that share the memory of a weight. `ALL`, for the embeddings: the ranks that hold the embeddings,
    whichever stage they belong to. `TOWER`, for the vision tower: all ranks. `STAGE`, for the other weights that are
    not divided: the ranks of one stage. `RANK`, for a part of a divided weight: one rank.
    """

    ALL = auto()
    TOWER = auto()
    STAGE = auto()
    RANK = auto()


class Decoder:
    """The weights and forward pass of a decoder, or of a rank's part of a decoder. The weights are uninitialized until
    a checkpoint is copied into them.

    `empty(*shape)` allocates an uninitialized tensor for a weight. All tensors must be on the same device. The tensors
    must have the same dtype, except those for which the decoder passes a `dtype` to `empty`. The calls to
    `empty` and their order depend only on the spec and the backend.
    `of_owner`: allocators that replace `empty` for the weights of some owners. `of_name`: allocators that replace
    `empty` and `of_owner` for some weights, by the names of the weights.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        backend: Backend,
        empty: Empty,
        of_owner: Mapping[Owner, Empty] | None = None,
        of_name: Mapping[str, Empty] | None = None,
    ) -> None:
        self.spec, self.ops = spec, backend
        self._tensors: dict[str, Weight] = {}
        self.owners: dict[str, Owner] = {}
        new = partial(self._new_weight, dict.fromkeys(Owner, empty) | dict(of_owner or {}), of_name or {})
        if spec.holds_embeddings:
            new(spec.embedding, spec.vocab_size, spec.hidden_size, whole=Owner.ALL)
        layers = [make_layer(spec, i, new) for i in spec.own_layers]
        self.layers = backend.new_layers(layers)
        self.tower: Tower | None = None
        if spec.served_tower is not None:
            get = partial(new, whole=Owner.TOWER)
            self.tower = Tower(spec.served_tower, backend, get, layers, spec.own_layers.start)
        self.mtp: Mtp | None = None
        if spec.stage.is_last:
            new(spec.last_norm, spec.hidden_size)
            if not spec.tie_word_embeddings:
                new(HEAD, spec.head_range[1], spec.hidden_size, held=spec.held.get(HEAD_ROLE, PLAIN))
            if spec.served_mtp is not None:
                self.mtp = Mtp(spec, spec.served_mtp, backend, new)
        self._like = empty(0)

    def _new_weight(
        self,
        memories: Mapping[Owner, Empty],
        of_name: Mapping[str, Empty],
        name: str,
        *shape: int,
        layout: StackLayout | HeadLayout | None = None,
        held: WeightSpec = PLAIN,
        whole: Owner = Owner.STAGE,
    ) -> Any:
        """Add an uninitialized weight, and return it as `layer.GetWeight` does. `whole`: the owner of the weight if the
        weight is not divided among ranks.
        """
        self.owners[name] = owner = whole if held.part is None else Owner.RANK
        memory = of_name.get(name, memories[owner])
        if held.dtype is not None:
            memory = partial(memory, dtype=held.dtype)
        new = partial(self._new_matrix, held)
        if isinstance(layout, StackLayout):
            weight: Any = Stack.new(new, memory, shape, layout)
        elif layout is not None:
            weight = HeadMatrices.new(self.ops.new_weight, memory, shape, layout)
        else:
            weight = new(*shape, memory) if len(shape) == 2 else memory(*shape)
            if held.part is not None and held.part.dim == 0:
                mark_rows(plain_of(weight), held.part.total)
        stored = weight if held.shape is None else weight.view(held.shape)
        if isinstance(stored, HeadMatrices) and held.format is not None:
            stored = RoundedWeight(stored, held.format)
        self._tensors[name] = stored if held.part is None else Shard(stored, held.part)
        return plain_of(weight if layout is None else weight.matrix)

    def _new_matrix(self, held: WeightSpec, rows: int, columns: int, empty: Empty, unit: int | None = None) -> Weight:
        """Return an uninitialized matrix. A quantized matrix takes as much memory as a plain matrix if the backend does
        not store the format, or if the first column of this rank's part lies inside a group (`Format.group`).
        """
        format = held.format
        if format is None:
            return self.ops.new_weight(rows, columns, empty)
        if format.name in self.ops.FORMATS and not _begins_within_group(held):
            return self.ops.new_weight(rows, columns, empty, format, unit)
        return cast(Weight, RoundedWeight(self.ops.new_weight(rows, columns, empty), format, unit))

    @property
    def embed(self) -> Any:
        """The embeddings, [vocab_size, hidden_size]. Some stages have no embeddings
        (`DecoderSpec.holds_embeddings`).
        """
        return self._tensors[self.spec.embedding]

    @property
    def head(self) -> Any:
        """The weight that computes logits, [vocab_size, hidden_size], or this rank's rows of that weight. A tied head
        consists of rows of the embeddings. The result is None in every stage except the last.
        """
        if not self.spec.stage.is_last:
            return None
        if self.spec.tie_word_embeddings:
            if self.spec.ranks == 1:
                return self.embed
            return mark_rows(self.embed.narrow(0, *self.spec.head_range), self.spec.vocab_size)
        weight: Any = self._tensors[HEAD]
        return weight.own if isinstance(weight, Shard) else weight

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of hidden states."""
        return self._like.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._like.device

    def checkpoint_tensors(self) -> Mapping[str, Weight]:
        """Return the weights, by their Hugging Face names. A checkpoint must have a tensor for each weight."""
        return self._tensors

    def stack_parts(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the parts (`Parts`) that a checkpoint may contain instead of a whole tensor."""
        spec = self.spec
        layers = {f"{LAYERS}.{i}": layer for i, layer in enumerate(spec.layers)}
        if spec.served_mtp is not None:
            layers[MTP_LAYER] = spec.served_mtp
        return {
            f"{prefix}.{spec.names[stack]}": tuple(f"{prefix}.{spec.names[role]}" for role in roles)
            for prefix, layer in layers.items()
            if isinstance(layer.mlp, ExpertsSpec)
            for stack, roles in _parts_of_stacks(layer.mlp).items()
            if all(role in spec.names for role in roles)
        }

    def tied_tensors(self) -> dict[str, str]:
        """Return the tensors that a checkpoint may repeat, as a map from the name of each copy to the name of the
        original.
        """
        return {HEAD: self.spec.embedding} if self.spec.tie_word_embeddings else {}

    def ignored_tensors(self) -> frozenset[str]:
        """Return the names of tensors that a checkpoint may have, but that the decoder computes itself."""
        return frozenset(f"{LAYERS}.{i}.self_attn.rotary_emb.inv_freq" for i in range(len(self.spec.layers)))

    def optional_tensors(self) -> frozenset[str]:
        """Return the names of the weights on which no bit of a sample depends."""
        return frozenset(name for name in self._tensors if is_of_mtp(name))

    @property
    def num_bytes(self) -> int:
        """The size of the weights, in bytes."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    @cached_property
    def _inv_freqs(self) -> list[Tensor]:
        frequencies = (rotation.inv_freq for rotation in self.spec.rotations)
        return [torch.tensor(each, dtype=torch.float32, device=self.device) for each in frequencies]

    def rotations(self, positions: Tensor) -> list[Rotation]:
        """Return the rotations of tokens. `positions`: as in `ModelInput`."""
        pairs = zip(self._inv_freqs, self.spec.rotations, strict=True)
        return [turn(self.ops, rotation, inv_freq, positions) for inv_freq, rotation in pairs]

    def embedded(self, token_ids: Tensor) -> Tensor:
        """Return the scaled embeddings [M, hidden_size] of `token_ids`, which are int64 [M]."""
        return scale_embedding(self.ops.embedding(token_ids, self.embed), self.spec)

    def forward(self, tokens: ModelInput) -> ModelOutput:
        """Return the hidden states and the records of the tokens."""
        ops, spec, rotations = self.ops, self.spec, self.rotations(tokens.positions)
        x, records = tokens.before or new_output(spec, self.embedded(tokens.token_ids))
        routes = records[ROUTES][spec.own_experts] if ROUTES in records else None
        context = rotations, tokens.memories, tokens.pages, tokens.states, routes
        if tokens.embedded is not None:
            assert self.tower is not None, "only a model with a tower takes embeddings"
            x = self.tower.run_layers(x, tokens.embedded, *context)
        else:
            x = ops.layers(x, self.layers, *context)
        if spec.stage.is_last:
            x = ops.rmsnorm(x, cast(Tensor, self._tensors[spec.last_norm]), spec.norm)
        return ModelOutput(x, records)


def _begins_within_group(held: WeightSpec) -> bool:
    part, group = held.part, None if held.format is None else held.format.columns
    return part is not None and part.dim == 1 and group is not None and any(start % group for start, _ in part.ranges)


def new_output(spec: DecoderSpec, hidden: Tensor) -> ModelOutput:
    """Return an output with the given hidden states and with uninitialized records."""
    if not (experts := spec.experts):
        return ModelOutput(hidden, {})
    shape = len(experts), len(hidden), experts[0].top_k
    return ModelOutput(hidden, {ROUTES: torch.empty(shape, dtype=torch.int32, device=hidden.device)})
