"""Replaceable weights: new weights are staged next to the live weights, and committed between two steps.

Owns the memory of the live weights and of stagings. While adapters are merged into the live weights, also owns the
unmerged base weights (`AdapterBase`). Does not know the source or the version of new weights, or what happens to
requests and the KV cache. Workers with the same `WeightStore.kin` may share the memory of a staging. Each worker that
shares a staging commits the staging separately.

Guarantees: in host memory, the addresses of live weights never change. Only an in-place staging writes to the live
weights before the commit. If a commit raises an error, nothing has changed. A second thread may call `new_staging` and
fill a staging while the engine computes steps. All other calls must come from the engine's thread.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import version
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ...kernels.contract import Backend, Weight
from ...kernels.keeping import copy_of, device_of, on_device
from ...kernels.quantization import format_of, refuse_elements
from ...kernels.specs import MTP_PREFIX
from ...kernels.spellings import Spellings
from ...kernels.stacks import Stack
from ...kernels.transfer import wait_for_stream
from ..cache.lending import BorrowedArena, LendableArena, LentMemory, place_to_lend
from .weight_memory import LocalWeights, WeightArena, WeightMemory


@dataclass
class AdapterBase:
    """The base weights of live weights into which adapters are merged.

    `kept`: the base values of the parameters that the adapters changed, as `copy_of` returns them. `checksums`: the
    checksums that adapter pushes have computed so far for base parameters.
    """

    kept: dict[str, Weight] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)


class Factors(NamedTuple):
    """What an adapter adds to a weight [N, K]: A [R, K], B [N, R], and the scale of the product of B and A."""

    a: Tensor
    b: Tensor
    scale: float


def merge_into(ops: Backend, out: Weight, plain: Tensor, factors: Factors) -> bool:
    """Store the sum of a weight and an adapter's product in `out`. If `out` is quantized, quantize the sum. Return
    whether all values are finite.

    `plain`: the weight without the adapter; for a quantized weight, the dequantized values. Raise ValueError for a sum
    that the format of `out` cannot store, such as a sum that is not finite.
    """
    if format_of(out) is None:
        return ops.merge_into(out, plain, *factors)
    out.copy_(ops.merge(plain, *factors))
    return True


class OptionalWeights:
    """The weights of a model's MTP module. `names`: the names of the module's weights. New weights may lack the
    module's weights, because no sample depends on the module.

    Most trainers cannot push the module, because transformers drops the module when it loads a model. If new weights
    lack the module's weights, the worker keeps its current weights of the module. Owns the record of whether the last
    commit replaced the module's weights, and the values of these weights during a sleep.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names, self._is_whole, self._is_stale = names, True, False
        self._kept: dict[str, Weight] = {}

    @property
    def names(self) -> frozenset[str]:
        """The weights that the next commit may lack. A commit must replace either all optional weights or none.

        The result is empty from the first write of an in-place staging to one of these weights until the next commit.
        """
        return self._names if self._is_whole else frozenset()

    @property
    def note(self) -> str:
        """A text that tells which weights the last commit did not replace; empty if it replaced all weights."""
        if not self._is_stale:
            return ""
        return f"the last push had no {MTP_PREFIX}* tensors, so the MTP module keeps its earlier weights"

    def note_overwriting(self) -> None:
        """Record that a staging overwrites live values."""
        self._is_whole = False

    def note_commit(self, were_staged: bool) -> None:
        """Record a commit. `were_staged`: whether the commit replaced the weights of the MTP module."""
        self._is_stale = bool(self._names) and not were_staged
        self._is_whole = True

    def keep(self, tensors: Mapping[str, Weight]) -> None:
        """Copy the live values to the host."""
        self._kept = {name: copy_of(tensors[name], torch.device("cpu")) for name in self._names}

    def put_back(self, tensors: Mapping[str, Weight]) -> None:
        """Copy the kept values to the live weights."""
        for name, weight in self._kept.items():
            tensors[name].copy_(weight)
        self._kept = {}


class Spare:
    """Memory that a commit left over, which the next staging uses. Thread-safe.

    The system must clear new memory, and clearing takes as long as a copy. The system does not clear memory that a
    staging has used before. The system may reclaim the memory at any time. The worker releases the memory when the
    weights go to sleep. Only an arena in private host memory is kept (`Arena.set_aside`).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: tuple[WeightArena, Mapping[str, Weight]] | None = None

    @property
    def num_held(self) -> int:
        """The bytes of memory that are kept."""
        with self._lock:
            return 0 if self._kept is None else self._kept[0].num_held

    def keep(self, arena: WeightArena, tensors: Mapping[str, Weight]) -> bool:
        """Keep the memory of an arena, without its content. Return False if the arena cannot be kept."""
        if not arena.set_aside():
            return False
        with self._lock:
            self._kept = arena, tensors
        return True

    def take(self) -> tuple[WeightArena, Mapping[str, Weight]] | None:
        """Return an arena and the weights in it, with undefined content; None if no memory is kept."""
        with self._lock:
            kept, self._kept = self._kept, None
            return kept

    def drop(self) -> None:
        """Release the memory."""
        if (kept := self.take()) is not None:
            kept[0].drop(keep=False)


class WeightStore:
    """The live weights, which lie in an arena of `memory`, and the requirements for new weights.

    `shapes`: the shape of every parameter, by its Hugging Face name. `spellings`: the names under which parameters and
    `parts` may be pushed. `is_whole`: whether the live weights are complete and of one version. `is_whole` becomes
    False at a sleep at level 2 or at the first write to an in-place staging, and True again when every required
    parameter is committed.
    """

    def __init__(self, memory: WeightMemory) -> None:
        self.memory = memory
        self.arena: WeightArena = memory.new_arena(is_live=True)
        self.model, self.tensors, self.to_load = memory.weights_in(self.arena)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        self.spellings = Spellings(self.shapes, self.parts)
        self.is_whole = True
        self.spare = Spare()
        self.base = AdapterBase()
        self.optional_weights = OptionalWeights(self.model.optional_tensors())

    @property
    def dtype(self) -> str:
        """The dtype of the weights, such as `bfloat16`."""
        return _dtype_name(self.model.dtype)

    @property
    def dtypes(self) -> dict[str, str]:
        """The parameters with a dtype other than `dtype`, as a map from name to dtype."""
        return self._dtypes

    @cached_property
    def _dtypes(self) -> dict[str, str]:
        own = {name: tensor.dtype for name, tensor in self.tensors.items() if tensor.dtype != self.model.dtype}
        return {name: _dtype_name(found) for name, found in own.items()}

    @property
    def parts(self) -> Mapping[str, tuple[str, ...]]:
        """The names of the parts (`Parts`) that new weights may contain instead of a whole parameter."""
        return self.model.stack_parts()

    @property
    def tied(self) -> Mapping[str, str]:
        """Maps the names of tied parameters to the parameters that they copy."""
        return self.model.tied_tensors()

    @property
    def ignored(self) -> frozenset[str]:
        """The names of tensors that new weights may contain, but that are ignored."""
        return self.model.ignored_tensors()

    @property
    def quantization(self) -> str:
        """See `DecoderSpec.quantization`."""
        return self.model.spec.quantization

    @property
    def renamed(self) -> Mapping[str, str]:
        """Maps prefixes of trainers' names to the prefixes that names in `shapes` have instead."""
        return self.model.spec.renamed

    @property
    def respelled(self) -> Mapping[str, str]:
        """Maps substrings of trainers' names to the substrings that names in `shapes` have instead."""
        return self.model.spec.respelled

    @property
    def left_out(self) -> tuple[str, ...]:
        """Prefixes of tensor names. Trainers push no tensors with these prefixes, for example the tensors of an unused
        tower.
        """
        return self.model.spec.left_out

    @property
    def optional(self) -> frozenset[str]:
        """See `OptionalWeights.names`. Weights that are missing from new weights keep their live values."""
        return self.optional_weights.names

    @property
    def optional_note(self) -> str:
        """See `OptionalWeights.note`."""
        return self.optional_weights.note

    @cached_property
    def num_bytes(self) -> int:
        """The size of the weights, of all ranks together, in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def num_held(self) -> int:
        """The device memory that the live weights and the base weights of adapters hold now, in bytes."""
        kept = [weight.nbytes for weight in self.base.kept.values() if device_of(weight) == self.memory.device]
        return self.arena.num_held + sum(kept)

    @property
    def commit_note(self) -> str:
        """The reason why commits are slow; empty if commits are fast, and before the first commit."""
        return self.arena.copy_note

    @property
    def kin(self) -> str | None:
        """An identifier of the group of processes that can share the memory of weights.

        Processes with equal `kin` can lend memory to each other, and have the same layout of weights. `kin` is None if
        this process cannot share memory.
        """
        if not isinstance(self.memory, LocalWeights) or self.memory.device.type != "cpu":
            return None
        if (place := place_to_lend()) is None:
            return None
        return hashlib.sha256(f"{place} {self._layout}".encode()).hexdigest()

    @cached_property
    def _layout(self) -> str:
        """A text that is equal for processes with the same layout of weights."""
        ops = type(self.model.ops)
        kinds = [(name, type(weight).__name__) for name, weight in self.tensors.items()]
        words = version("trueroll"), ops.__module__, ops.__name__, self.model.spec, kinds, self.dtype
        return hashlib.sha256(repr((*words, self.memory.num_bytes)).encode()).hexdigest()

    def new_staging(self, in_place: bool) -> WeightStaging:
        """Return a staging. `in_place`: whether to overwrite the live weights, to save the memory of a second set."""
        return WeightStaging(self, in_place)

    def new_lendable(self) -> LendableStaging:
        """Return a staging in memory that other processes can map when the weights are complete."""
        self.spare.drop()  # memory that is lent is always new
        return LendableStaging(self, LendableArena(self.memory.num_bytes))

    def borrow(self, lent: tuple[int, int, int, int], has_optional: bool = True) -> BorrowedStaging:
        """Return a staging with the complete weights that a process of the same `kin` lends.

        `lent`: the fields of `LentMemory`. `has_optional`: whether the lent weights include the optional weights. Raise
        OSError if the lent memory is gone.
        """
        found = LentMemory(*lent)
        if found.num_bytes != self.memory.num_bytes:  # before pages are allocated
            raise FileNotFoundError(f"lent weights must have {self.memory.num_bytes} bytes (got {found.num_bytes})")
        self.spare.drop()
        return BorrowedStaging(self, BorrowedArena(found), has_optional)

    def commit(self, staging: WeightStaging) -> None:
        """Replace the live weights with the staged weights, wait for the device, and free the staging.

        Raise ValueError if only some rows of a parameter or of a part are staged. Raise ValueError if parameters are
        missing and the live weights cannot supply them, because the staging is in place or the live weights are
        incomplete.
        """
        staged = staging.check()
        if (staging.in_place or not self.is_whole) and (missing := self._missing(staged)) is not None:
            raise ValueError(
                f"weights: {missing} is missing, and the old weights are no longer complete; stage every parameter"
            )
        if not staging.in_place:
            self._install(staging, staged)
            # The staging's memory belongs to the stream that filled the staging. Without a wait, the memory could be
            # reused too early.
            wait_for_stream(self.memory.device)
        if not staging.is_alone:
            self.optional_weights.note_commit(staging.has_optional)
        self.is_whole = True
        self.base = AdapterBase() if staging.base is None else staging.base
        staging.drop(self.spare)

    def sleep(self, level: int) -> None:
        """Release the device memory. `level`: 1 keeps all weights in host memory, 2 keeps only the optional weights."""
        if self.arena.num_held:  # the content exists: the weights are awake, or asleep with their content kept in place
            self.optional_weights.keep(self.tensors)
        self.arena.drop(keep=level == 1)
        self.spare.drop()
        self.is_whole &= level == 1
        if level == 1:  # The base weights stay on the host until adapters need them again.
            host = torch.device("cpu")
            self.base.kept.update({name: on_device(weight, host) for name, weight in self.base.kept.items()})
        else:
            self.base = AdapterBase()

    def wake_up(self) -> None:
        """Reallocate the memory."""
        self.arena.restore()
        self.optional_weights.put_back(self.tensors)

    def served(self, name: str) -> Tensor:
        """Return a live parameter or part as a dense tensor. The result may share memory with the live weights."""
        is_part = name not in self.tensors
        return (self.rows(self.tensors, name) if is_part else self.tensors[name]).to_dense()

    def served_rows(self, name: str, start: int, length: int) -> Tensor:
        """Return rows [start, start + length) of a live parameter as a dense tensor, which may share memory with the
        live weights. For a matrix, `start` must be a multiple of 16. `length` must also be a multiple of 16, unless the
        rows include the last row. Each row of a stack is the matrix of one expert.
        """
        return self.rows(self.tensors, name, start, length).to_dense()

    def before_adapters(self, name: str) -> Tensor:
        """Return a parameter's base value, without adapters, as a dense tensor that does not change. The live weights
        must be complete.
        """
        if (kept := self.base.kept.get(name)) is not None:
            return kept.to_dense().to(self.memory.device)
        return self.tensors[name].to_dense().clone()

    def kept_base(self, name: str) -> Weight:
        """Return a parameter's base value, without adapters, as `copy_of` returns it. The live weights must be
        complete.
        """
        kept, device = self.base.kept.get(name), self.memory.device
        return copy_of(self.tensors[name], device) if kept is None else on_device(kept, device)

    def rows(self, tensors: Mapping[str, Weight], name: str, start: int = 0, length: int | None = None) -> Weight:
        """Return rows of the parameter or part `name`, taken from `tensors`. By default, return all rows from `start`
        on.
        """
        part = self.spellings.part(name)
        length = self.shape(name)[0] - start if length is None else length
        if part is None:
            return tensors[name].narrow(0, start, length)
        return cast(Stack, tensors[part.stack]).part(part.expert, part.start + start, length)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter or of a part. Raise ValueError if the name is unknown."""
        if (shape := self.spellings.shape(name)) is None:
            raise ValueError(f"staging: {name!r} is not the name of a parameter")
        return shape

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter or of a part."""
        part = self.spellings.part(name)
        return self.tensors[name if part is None else part.stack].dtype

    def _missing(self, staged: set[str]) -> str | None:
        """Return the first parameter that is not completely staged, or None. A parameter may be staged as a whole or as
        all of its parts. Optional parameters may be missing.
        """
        parts = self.spellings.parts_among(staged)
        names = (name for name in self.shapes if name not in staged and (name in parts or name not in self.optional))
        return next((name for name in names if len(parts.get(name, ())) < (self.spellings.count(name) or 1)), None)

    def _install(self, staging: WeightStaging, staged: set[str]) -> None:
        if staging.arena is not None and self._missing(staged) is None:
            if not staging.has_optional:
                for name in self.optional:
                    self.rows(staging.tensors, name).copy_(self.rows(self.tensors, name))
            self.arena.take(staging.arena)
        else:
            for name in staged:
                self.rows(self.tensors, name).copy_(self.rows(staging.tensors, name))
        for name, indices, values in staging.elements:
            self.tensors[name].put_(indices, values)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class WeightStaging:
    """New weights that are being received. The memory is freed by a commit, by `drop`, or when the last reference is
    dropped.

    `arena`, `tensors`: the memory to which rows are written, allocated by the first call to `rows`. `elements`: new
    values of single elements, which the commit writes. `base`: the base weights to which the adapters are added; None
    before `adapt` or `keep_base`. `is_alone`: see `adapt`.
    """

    def __init__(self, store: WeightStore, in_place: bool) -> None:
        self.in_place = in_place
        self.arena: WeightArena | None = None
        self.tensors: Mapping[str, Weight] = store.tensors if in_place else {}
        self.elements: list[tuple[str, Tensor, Tensor]] = []
        self._store = store
        self._staged_rows: Counter[str] = Counter()
        self._others_bytes = 0
        self.base: AdapterBase | None = None
        self.is_alone = False
        self._factors: dict[str, Factors] = {}
        self._by_name: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """The number of bytes that the staging holds in addition to the live weights."""
        arena = self.arena  # read once, because another thread may drop the arena
        return self._others_bytes + (0 if arena is None else arena.num_held)

    def adapt(self, weights: Mapping[str, tuple[str, str, int, float]], alone: bool) -> None:
        """Announce adapters: `rows` then also accepts A and B of the given weights, and `merge` adds the product of B
        and A.

        `weights`: maps the name of each adapted weight to (name of A, name of B, rank, scale). `alone`: whether the
        adapters are added to the base weights of the live weights; otherwise, the adapters are added to the staged
        rows.

        Raise ValueError if the push overwrites the live weights in place, or if `alone` is set and the live weights are
        incomplete.
        """
        if self.in_place or (alone and not self._store.is_whole):
            raise ValueError(
                "staging: adapters require that the live weights are complete and that the staging is not in place"
            )
        self.base = AdapterBase(checksums=self._store.base.checksums if alone else {})
        for name, (a, b, rank, scale) in weights.items():
            rows, columns = self._store.shape(name)
            empty = partial(torch.empty, dtype=self._store.dtype_of(name), device=self._store.memory.device)
            self._factors[name] = Factors(empty((rank, columns)), empty((rows, rank)), scale)
            self._by_name |= {a: self._factors[name].a, b: self._factors[name].b}
        self._others_bytes += sum(tensor.nbytes for tensor in self._by_name.values())
        self.is_alone = alone

    @property
    def has_optional(self) -> bool:
        """Return whether optional parameters are staged."""
        return any(name.startswith(MTP_PREFIX) for name in (*self._staged_rows, *(name for name, *_ in self.elements)))

    def to_merge(self) -> list[str]:
        """Return the parameters for which `merge` must be called after all rows are staged."""
        if self.base is None:
            return []
        store, names = self._store, dict.fromkeys(self._factors)
        if self.is_alone:
            names |= dict.fromkeys((*store.base.kept, *self._staged_rows))
            if 2 * sum(store.tensors[name].nbytes for name in names) > store.num_bytes:
                names |= dict.fromkeys(store.tensors)  # so that the commit moves pages instead of copying
        return list(names)

    def merge(self, name: str) -> bool:
        """Stage a parameter with its adapter merged. Return False if a merged value is not finite.

        If a parameter has neither an adapter nor staged rows, its value without the adapters of earlier pushes is
        staged.
        """
        assert self.base is not None, "adapt was called"
        store, factors, is_staged = self._store, self._factors.get(name), name in self._staged_rows
        if factors is None and not is_staged:
            self.rows(name, 0, store.shape(name)[0]).copy_(store.base.kept.get(name, store.tensors[name]))
            return True
        if self.is_alone:
            kept = store.kept_base(name)
        else:
            kept = copy_of(store.rows(self.tensors, name), store.memory.device)
        self.base.kept[name] = kept
        self._others_bytes += 0 if kept is store.base.kept.get(name) else kept.nbytes
        if factors is None:
            return True
        out = store.rows(self.tensors, name) if is_staged else self.rows(name, 0, store.shape(name)[0])
        return merge_into(store.model.ops, out, kept.to_dense(), factors)

    def keep_base(self, tensors: Mapping[str, Tensor]) -> None:
        """Record that the staged rows have merged adapters. `tensors`: the dense base values of the parameters that the
        adapters changed. The staging keeps these tensors, which must not change; for a quantized parameter, the staging
        keeps the quantized values.
        """
        self.base = AdapterBase(kept={name: self._as_kept(name, tensor) for name, tensor in tensors.items()})
        self._others_bytes += sum(weight.nbytes for weight in self.base.kept.values())

    def _as_kept(self, name: str, tensor: Tensor) -> Weight:
        if format_of(self._store.tensors[name]) is None:
            return tensor
        kept = copy_of(self._store.tensors[name], self._store.memory.device)
        kept.copy_(tensor)
        return kept

    def rows(self, name: str, start: int, length: int) -> Weight:
        """Return rows [start, start + length) of a parameter or a part.

        The caller must write the rows once, immediately, with `copy_`.

        For a matrix, `start` must be a multiple of 16. `length` must also be a multiple of 16, unless the rows include
        the last row. Each row of a stack is the matrix of one expert. After `adapt`, `name` may also be the name of an
        adapter's A or B.
        """
        if name in self._by_name:
            return self._by_name[name].narrow(0, start, length)
        self._store.shape(name)
        if self.in_place:
            self._store.is_whole = False
            if name.startswith(MTP_PREFIX):
                self._store.optional_weights.note_overwriting()
        elif self.arena is None:
            self.arena, self.tensors = self._store.spare.take() or self._new_memory()
        part = self._store.rows(self.tensors, name, start, length)
        self._staged_rows[name] += length
        return part

    def put(self, name: str, indices: Tensor, values: Tensor) -> None:
        """Record new values for elements of a parameter or a part. The commit writes the recorded values.

        `indices`: flat, int64 [n]. `values`: [n]. The call copies indices and values. Raise ValueError if the staging
        is in place, or if indices or values do not fit the parameter.
        """
        if self.in_place:
            raise ValueError("staging: an in-place staging accepts only whole rows, not single elements")
        if (format := format_of(self._store.rows(self._store.tensors, name))) is not None:
            refuse_elements(format, indices)
        numel, dtype = torch.Size(self._store.shape(name)).numel(), self._store.dtype_of(name)
        if indices.dtype != torch.int64 or values.dtype != dtype or indices.shape != (values.numel(),):
            raise ValueError(
                f"{name}: each {dtype} value needs one int64 index (got {list(indices.shape)} indices of "
                f"{indices.dtype} and {list(values.shape)} values of {values.dtype})"
            )
        least, most = indices.aminmax() if len(indices) else (0, 0)
        if least < 0 or most >= numel:
            raise ValueError(f"{name}: indices must be in [0, {numel}) (got {least} to {most})")
        device, (own_name, first) = self._store.memory.device, self._place(name)
        self.elements.append((own_name, indices.to(device, copy=True).add_(first), values.to(device, copy=True)))
        self._others_bytes += indices.nbytes + values.nbytes

    def check(self) -> set[str]:
        """Return the staged parameters and parts. Raise ValueError if a parameter or part is only partly staged."""
        for name, count in self._staged_rows.items():
            if count != self._store.shape(name)[0]:
                raise ValueError(f"{name}: all {self._store.shape(name)[0]} rows must be staged (got {count} rows)")
        return set(self._staged_rows)

    def drop(self, spare: Spare | None = None) -> None:
        """Free the memory and forget the staged weights. Do not write to rows of the staging after this call.

        `spare`: keeps the memory for the next staging, if possible.
        """
        if self.arena is not None and not (spare and spare.keep(self.arena, self.tensors)):
            self.arena.drop(keep=False)
        self.arena, self.tensors, self.elements = None, self._store.tensors if self.in_place else {}, []
        self._staged_rows.clear()
        self._factors, self._by_name, self.base = {}, {}, None
        self._others_bytes = 0

    def _new_memory(self) -> tuple[WeightArena, Mapping[str, Weight]]:
        arena = self._store.memory.new_arena(is_live=False)
        return arena, self._store.memory.weights_in(arena).tensors

    def _place(self, name: str) -> tuple[str, int]:
        """Return the parameter that contains the part `name`, and the part's first flat index in the parameter."""
        part = self._store.spellings.part(name)
        if part is None:
            return name, 0
        rows, columns = self._store.shapes[part.stack][1:]
        return part.stack, (part.expert * rows + part.start) * columns


class LendableStaging(WeightStaging):
    """A staging in memory that other processes can map. `lendable`: the memory."""

    def __init__(self, store: WeightStore, lendable: LendableArena) -> None:
        super().__init__(store, in_place=False)
        self.arena, self._lendable = lendable, lendable
        self.tensors = store.memory.weights_in(lendable).tensors

    def lend(self) -> LentMemory:
        """Let other processes map the weights, which must be complete. Borrowers do not see writes after this call."""
        return self._lendable.lend()

    def withdraw(self) -> None:
        """Prevent further processes from mapping the weights."""
        self._lendable.withdraw()


class BorrowedStaging(WeightStaging):
    """A staging with the weights that another process has staged. `has_optional`: see `WeightStore.borrow`."""

    def __init__(self, store: WeightStore, arena: BorrowedArena, has_optional: bool) -> None:
        super().__init__(store, in_place=False)
        self.arena, self.tensors = arena, store.memory.weights_in(arena).tensors
        names = (name for name in store.shapes if has_optional or name not in store.optional)
        self._staged_rows.update({name: store.shapes[name][0] for name in names})
