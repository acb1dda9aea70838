"""The model's weights as something that is replaced: staged beside the live ones, committed between two steps.

Owns the arena of the weights, and through it the arenas of stagings; and, while adapters are in the weights, what these
were before (`AdapterBase`). Does not know where new weights come from, which version they are, or what becomes of
requests and of the KV cache: that is the engine's part. Workers of one `kin` may share the memory of a staging, which
each makes its live weights by a commit of its own.

Promises: addresses of live weights never change on a host; until the commit nothing is written to them, unless the
staging is in place; a commit that raises has changed nothing. `new_staging` may be called, and a staging be filled,
from another thread while the engine steps; everything else belongs to the engine's thread.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ...kernels.contract import Weight
from ...kernels.spellings import Spellings
from ...kernels.stacks import Stack
from ...kernels.transfer import wait_for_stream
from ..cache.lending import BorrowedArena, LendableArena, LentMemory, place_to_lend
from ..cache.memory import Arena, bytes_needed, new_arena
from ..models.decoder import Decoder, Empty


@dataclass
class AdapterBase:
    """The weights that adapters were added to. `kept`: the parameters that the adapters changed, dense.

    `checksums`: of its parameters, as far as pushes of adapters needed them.
    """

    kept: dict[str, Tensor] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)


class Factors(NamedTuple):
    """An adapter on its way: A [R, K] and B [N, R] of a weight [N, K], and what multiplies their product."""

    a: Tensor
    b: Tensor
    scale: float


class WeightStore:
    """The weights of the model that `build(empty)` makes, and what a new set of them must bring.

    `shapes`: of every parameter, by its Hugging Face name; `spellings`: these names, and those that `parts` make.
    `is_whole`: whether the live weights are those of one version; not after level 2 of `sleep`, nor once a staging in
    place is written to, until a commit of every parameter.
    """

    def __init__(self, build: Callable[[Empty], Decoder], dtype: torch.dtype, device: torch.device) -> None:
        self._build, self._dtype, self._device = build, dtype, device
        self._num_bytes = bytes_needed(build, dtype)
        self._arena = self.new_arena()
        self.model = self.model_in(self._arena)
        self.tensors: Mapping[str, Weight] = self.model.checkpoint_tensors()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        self.spellings = Spellings(self.shapes, self.parts)
        self.is_whole = True
        self.base = AdapterBase()

    @property
    def dtype(self) -> str:
        """Such as `bfloat16`."""
        return _dtype_name(self._dtype)

    @property
    def dtypes(self) -> dict[str, str]:
        """Of parameters that are held in another dtype than `dtype`."""
        own = {name: tensor.dtype for name, tensor in self.tensors.items() if tensor.dtype != self._dtype}
        return {name: _dtype_name(found) for name, found in own.items()}

    @property
    def parts(self) -> Mapping[str, tuple[str, ...]]:
        """What may come in place of some parameters (`Parts`)."""
        return self.model.stack_parts()

    @property
    def tied(self) -> Mapping[str, str]:
        """Names of copies of parameters, and of which."""
        return self.model.tied_tensors()

    @property
    def ignored(self) -> frozenset[str]:
        """Further names that a set of weights may have."""
        return self.model.ignored_tensors()

    @property
    def num_held(self) -> int:
        """Bytes of the live weights' device that they, and what they were before adapters, hold now."""
        kept = [tensor.nbytes for tensor in self.base.kept.values() if tensor.device == self.model.device]
        return self._arena.num_held + sum(kept)

    @property
    def commit_note(self) -> str:
        """Why commits take longer than they could; empty if they do not, or before the first one."""
        return self._arena.copy_note

    @property
    def kin(self) -> str | None:
        """Equal for processes that may share the memory of their weights: each can lend it to the others, and has the
        same weights in the same places. None where no other process could map it.
        """
        if self._device.type != "cpu" or (place := place_to_lend()) is None:
            return None
        ops = type(self.model.ops)
        kinds = [(name, type(weight).__name__) for name, weight in self.tensors.items()]
        words = place, version("trueroll"), ops.__module__, ops.__name__, self.model.spec, kinds, self.dtype
        return hashlib.sha256(repr((*words, self._num_bytes)).encode()).hexdigest()

    def new_arena(self) -> Arena:
        """Memory for a set of weights."""
        return new_arena(self._num_bytes, self._device, huge_pages=True)

    def model_in(self, arena: Arena) -> Decoder:
        """A model with weights in an arena, laid out like the live ones, with whatever values they have there."""

        def empty(*shape: int, dtype: torch.dtype = self._dtype) -> Tensor:
            return arena.empty(dtype, *shape)

        return self._build(empty)

    def new_staging(self, in_place: bool) -> WeightStaging:
        """A place for new weights: the live ones themselves if `in_place`, for want of memory for others."""
        return WeightStaging(self, in_place)

    def new_lendable(self) -> LendableStaging:
        """A place for new weights whose memory others may use as well, once all weights are there."""
        return LendableStaging(self, LendableArena(self._num_bytes))

    def borrow(self, lent: tuple[int, int, int, int]) -> BorrowedStaging:
        """The weights that a process of this `kin` lends, all of them, by the fields of `LentMemory`. Raise OSError if
        they are not there.
        """
        found = LentMemory(*lent)
        if found.num_bytes != self._num_bytes:  # before pages are taken for it
            raise FileNotFoundError(f"expected {self._num_bytes} bytes of weights, found {found.num_bytes}")
        return BorrowedStaging(self, BorrowedArena(found))

    def commit(self, staging: WeightStaging) -> None:
        """Makes what was staged the live weights, waits for the device to have it, and frees the staging.

        Raise ValueError if the rows of a parameter or of a part are not all there, or if some are missing though the
        staging is in place or the live weights are not whole.
        """
        staged = staging.check()
        if (staging.in_place or not self.is_whole) and (missing := self._missing(staged)) is not None:
            raise ValueError(f"weights: expected every parameter, as the old ones are lost, {missing} is missing")
        if not staging.in_place:
            self._install(staging, staged)
            # The staging's memory belongs to the stream that it was filled on, which knows nothing of these copies.
            wait_for_stream(self._device)
        self.is_whole = True
        self.base = AdapterBase() if staging.base is None else staging.base
        staging.drop()

    def sleep(self, level: int) -> None:
        """Gives the device's memory back. `level` 1 keeps the weights on the host, 2 drops them."""
        self._arena.drop(keep=level == 1)
        self.is_whole &= level == 1
        if level == 1:  # on the host, where it stays until adapters need it again
            self.base.kept.update({name: tensor.to("cpu") for name, tensor in self.base.kept.items()})
        else:
            self.base = AdapterBase()

    def wake_up(self) -> None:
        """Takes the memory again."""
        self._arena.restore()

    def served(self, name: str) -> Tensor:
        """A live parameter as a checkpoint has it, perhaps sharing its memory."""
        return self.tensors[name].to_dense()

    def before_adapters(self, name: str) -> Tensor:
        """A parameter of the base, dense, in memory that the live weights do not share. They must be whole."""
        if (kept := self.base.kept.get(name)) is not None:
            return kept.to(self.model.device)
        return self.tensors[name].to_dense().clone()

    def rows(self, tensors: Mapping[str, Weight], name: str, start: int = 0, length: int | None = None) -> Weight:
        """Rows of a parameter in `tensors`, or of a part of one; all by default."""
        part = self.spellings.part(name)
        length = self.shape(name)[0] - start if length is None else length
        if part is None:
            return tensors[name].narrow(0, start, length)
        return cast(Stack, tensors[part.stack]).part(part.expert, part.start + start, length)

    def shape(self, name: str) -> tuple[int, ...]:
        """That of a parameter or of a part. Raise ValueError for another name."""
        if (shape := self.spellings.shape(name)) is None:
            raise ValueError(f"staging: expected the name of a parameter, found {name!r}")
        return shape

    def dtype_of(self, name: str) -> torch.dtype:
        """That of a parameter or of a part."""
        part = self.spellings.part(name)
        return self.tensors[name if part is None else part.stack].dtype

    def _missing(self, staged: set[str]) -> str | None:
        """A parameter of which neither all nor all parts are staged."""
        parts = self.spellings.parts_among(staged)
        names = (name for name in self.shapes if name not in staged)
        return next((name for name in names if len(parts.get(name, ())) < (self.spellings.count(name) or 1)), None)

    def _install(self, staging: WeightStaging, staged: set[str]) -> None:
        if staging.arena is not None and self._missing(staged) is None:
            self._arena.take(staging.arena)
        else:
            for name in staged:
                self.rows(self.tensors, name).copy_(self.rows(staging.tensors, name))
        for name, indices, values in staging.elements:
            self.tensors[name].put_(indices, values)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class WeightStaging:
    """New weights in the making. Its memory is freed by the commit, by `drop`, or with the last reference to it.

    `arena`, `tensors`: where rows are written, once some are. `elements`: what is to be overwritten at the commit.
    `base`: after `adapt`, what the weights in the making are without adapters.
    """

    def __init__(self, store: WeightStore, in_place: bool) -> None:
        self.in_place = in_place
        self.arena: Arena | None = None
        self.tensors: Mapping[str, Weight] = store.tensors if in_place else {}
        self.elements: list[tuple[str, Tensor, Tensor]] = []
        self._store = store
        self._staged_rows: Counter[str] = Counter()
        self._others_bytes = 0
        self.base: AdapterBase | None = None
        self._is_alone = False
        self._factors: dict[str, Factors] = {}
        self._by_name: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds beside the live weights."""
        arena = self.arena  # another thread may drop it
        return self._others_bytes + (0 if arena is None else arena.num_held)

    def adapt(self, weights: Mapping[str, tuple[str, str, int, float]], alone: bool) -> None:
        """From now on `rows` takes A and B of these weights, too, which have (name of A, name of B, rank, scale); and
        `merge` adds them: if they come `alone` to what the live weights were before adapters, else to staged rows.

        Raise ValueError for a staging in place, and for live weights that are not whole where those are added to.
        """
        if self.in_place or (alone and not self._store.is_whole):
            raise ValueError("staging: expected whole weights beside the live ones for adapters, found others")
        self.base = AdapterBase(checksums=self._store.base.checksums if alone else {})
        for name, (a, b, rank, scale) in weights.items():
            rows, columns = self._store.shape(name)
            empty = partial(torch.empty, dtype=self._store.dtype_of(name), device=self._store.model.device)
            self._factors[name] = Factors(empty((rank, columns)), empty((rows, rank)), scale)
            self._by_name |= {a: self._factors[name].a, b: self._factors[name].b}
        self._others_bytes += sum(tensor.nbytes for tensor in self._by_name.values())
        self._is_alone = alone

    def to_merge(self) -> list[str]:
        """The parameters that `merge` is to be called for once all rows are staged."""
        if self.base is None:
            return []
        store, names = self._store, dict.fromkeys(self._factors)
        if self._is_alone:
            names |= dict.fromkeys((*store.base.kept, *self._staged_rows))
            if 2 * sum(store.tensors[name].nbytes for name in names) > store.model.num_bytes:
                names |= dict.fromkeys(store.tensors)  # then the commit moves pages, and copies nothing
        return list(names)

    def merge(self, name: str) -> bool:
        """Stages a parameter with its adapter; or, if it has neither an adapter nor staged rows, as it was before the
        adapters that are in the live weights. False if an adapter made values that are not finite.
        """
        assert self.base is not None, "adapt was called"
        store, factors, is_staged = self._store, self._factors.get(name), name in self._staged_rows
        if factors is None and not is_staged:
            self.rows(name, 0, store.shape(name)[0]).copy_(store.base.kept.get(name, store.tensors[name]))
            return True
        plain = store.before_adapters(name) if self._is_alone else store.rows(self.tensors, name).to_dense().clone()
        self.base.kept[name] = plain
        self._others_bytes += 0 if plain is store.base.kept.get(name) else plain.nbytes
        if factors is None:
            return True
        out = store.rows(self.tensors, name) if is_staged else self.rows(name, 0, store.shape(name)[0])
        return store.model.ops.merge_into(out, plain, *factors)

    def rows(self, name: str, start: int, length: int) -> Weight:
        """Rows [start, start + length) of a parameter or a part, to be written by `copy_` right away and once.

        `start` is a multiple of 16 for a matrix; `length` too, unless the rows reach the end. A row of a stack is the
        matrix of an expert. After `adapt` it may also be A or B of an adapter.
        """
        if name in self._by_name:
            return self._by_name[name].narrow(0, start, length)
        self._store.shape(name)
        if self.in_place:
            self._store.is_whole = False
        elif self.arena is None:
            self.arena = self._store.new_arena()
            self.tensors = self._store.model_in(self.arena).checkpoint_tensors()
        part = self._store.rows(self.tensors, name, start, length)
        self._staged_rows[name] += length
        return part

    def put(self, name: str, indices: Tensor, values: Tensor) -> None:
        """Elements of a parameter, or of a part of one, to overwrite at the commit: flat indices int64 [n] and values
        [n], both copied at once.

        Raise ValueError for a staging in place, and for what does not fit the parameter.
        """
        if self.in_place:
            raise ValueError("staging: expected whole rows for weights that are replaced in place, found elements")
        numel, dtype = torch.Size(self._store.shape(name)).numel(), self._store.dtype_of(name)
        if indices.dtype != torch.int64 or values.dtype != dtype or indices.shape != (values.numel(),):
            raise ValueError(
                f"{name}: expected as many int64 indices as {dtype} values, found {list(indices.shape)} of "
                f"{indices.dtype} and {list(values.shape)} of {values.dtype}"
            )
        least, most = indices.aminmax() if len(indices) else (0, 0)
        if least < 0 or most >= numel:
            raise ValueError(f"{name}: expected indices in [0, {numel}), found one outside")
        device, (own_name, first) = self._store.model.device, self._place(name)
        self.elements.append((own_name, indices.to(device, copy=True).add_(first), values.to(device, copy=True)))
        self._others_bytes += indices.nbytes + values.nbytes

    def check(self) -> set[str]:
        """The parameters and parts that are staged in rows. Raise ValueError if only some rows of one are."""
        for name, count in self._staged_rows.items():
            if count != self._store.shape(name)[0]:
                raise ValueError(f"{name}: expected {self._store.shape(name)[0]} staged rows, found {count}")
        return set(self._staged_rows)

    def drop(self) -> None:
        """Frees its memory and forgets what was staged. Nothing may be written to its rows afterwards."""
        if self.arena is not None:
            self.arena.drop(keep=False)
        self.arena, self.tensors, self.elements = None, self._store.tensors if self.in_place else {}, []
        self._staged_rows.clear()
        self._factors, self._by_name, self.base = {}, {}, None
        self._others_bytes = 0

    def _place(self, name: str) -> tuple[str, int]:
        """The parameter, and where in it the first element is."""
        part = self._store.spellings.part(name)
        if part is None:
            return name, 0
        rows, columns = self._store.shapes[part.stack][1:]
        return part.stack, (part.expert * rows + part.start) * columns


class LendableStaging(WeightStaging):
    """New weights in `lendable`, which others use as well."""

    def __init__(self, store: WeightStore, lendable: LendableArena) -> None:
        super().__init__(store, in_place=False)
        self.arena, self._lendable = lendable, lendable
        self.tensors = store.model_in(lendable).checkpoint_tensors()

    def lend(self) -> LentMemory:
        """Let others map the weights, all of which are there. Nothing more is written here."""
        return self._lendable.lend()

    def withdraw(self) -> None:
        """Let no process map them from now on."""
        self._lendable.withdraw()


class BorrowedStaging(WeightStaging):
    """All weights, as another process has staged them."""

    def __init__(self, store: WeightStore, arena: BorrowedArena) -> None:
        super().__init__(store, in_place=False)
        self.arena, self.tensors = arena, store.model_in(arena).checkpoint_tensors()
        self._staged_rows.update({name: shape[0] for name, shape in store.shapes.items()})
