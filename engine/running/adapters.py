"""The weights of named adapters: the matrices A and B of each loaded adapter, and merged weights for the adapters that
were used last.

An adapter is served with merged weights: the base weights, plus the product of B and A in the weights that the adapter
changes. A push of adapters without a name merges in the same way (`Backend.merge`), so an adapter gives the same bits
with and without a name. Merged weights form a separate model. Every weight that the adapter does not change shares the
memory of the base weight.

`AdapterStore` owns the loaded adapters and the merged weights, within a budget of bytes. Merged weights are made when a
step first needs them. If the budget has no room for new merged weights, the least recently used merged weights are
freed. A and B stay in memory until the adapter is removed. `AdapterStaging` receives A and B. Does not own requests or
blocks.

Guarantees:

- The budget has room for A and B of all adapters and, in addition, for the merged weights of any one adapter. An
  adapter that would not fit is refused, and nothing changes.
- The base weights never change while an adapter is loaded. `Engine` refuses calls that would change the base weights of
  a loaded adapter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import cast

import torch
from torch import Tensor

from ...kernels.contract import Weight
from ...kernels.keeping import copy_of
from ...kernels.quantization import Format, format_of
from ...kernels.transfer import wait_for_stream
from ..cache.memory import Arena
from ..commits import Adapter, Commit
from ..models.decoder import Decoder, Owner
from .weight_memory import LocalWeights
from .weights import Factors, WeightStore, merge_into


class AdapterStaging:
    """The matrices A and B of an adapter that is being received. Implements `StagingArea`.

    `check`: called by `adapt` with the sizes of A and B; raises ValueError if A and B do not fit. `factors`: A and B,
    by the name of the weight that A and B change; filled by `adapt` and `rows`. `base`: the base weights of the store
    when the staging began. `merged_bytes`: the size of the merged weights.
    """

    def __init__(self, store: WeightStore, check: Callable[[AdapterStaging], None]) -> None:
        self.factors: dict[str, Factors] = {}
        self.base, self.merged_bytes = store.base, 0
        self._store, self._check = store, check
        self._by_name: dict[str, Tensor] = {}
        self._scratch: dict[tuple[int, int, torch.dtype, Format | None], Weight] = {}

    @property
    def num_bytes(self) -> int:
        """The number of bytes of A and B."""
        return sum(tensor.nbytes for tensor in self._by_name.values())

    def adapt(self, weights: Mapping[str, tuple[str, str, int, float]], alone: bool) -> None:
        """Allocate A and B. `weights`, `alone`: as for `WeightStaging.adapt`; `alone` must be set.

        Raise ValueError if the base weights are incomplete, if `weights` is empty or has a weight of the vision tower,
        or if the adapter does not fit into the budget.
        """
        if not alone or not self._store.is_whole or not weights:
            raise ValueError("staging: a named adapter must consist of A and B alone, and needs complete base weights")
        owners = self._store.model.owners
        if of_tower := [name for name in weights if owners.get(name) is Owner.TOWER]:
            raise ValueError(f"staging: a named adapter cannot change the vision tower (got {of_tower[0]!r})")
        for name, (a, b, rank, scale) in weights.items():
            rows, columns = self._store.shape(name)
            empty = partial(torch.empty, dtype=self._store.dtype_of(name), device=self._store.memory.device)
            self.factors[name] = Factors(empty((rank, columns)), empty((rows, rank)), scale)
            self._by_name |= {a: self.factors[name].a, b: self.factors[name].b}
        self.merged_bytes = _memory_of(self._store).overlay_bytes(_own_names(self._store, self.factors))
        self._check(self)

    def rows(self, name: str, start: int, length: int) -> Tensor:
        """Return rows [start, start + length) of A or B. Raise ValueError if `name` is not the name of an A or B."""
        if name not in self._by_name:
            raise ValueError(f"staging: a named adapter has only A and B, but {name!r} is a whole tensor")
        return self._by_name[name].narrow(0, start, length)

    def put(self, name: str, indices: Tensor, values: Tensor) -> None:
        """Raise ValueError, because A and B are always sent whole."""
        raise ValueError(f"staging: a named adapter must be sent whole, not as single elements of {name!r}")

    def to_merge(self) -> list[str]:
        """Return the weights that the adapter changes."""
        return list(self.factors)

    def merge(self, name: str) -> bool:
        """Return whether the sum of a weight and its adapter is finite. The sum is not stored. Raise ValueError for a
        sum that the format of the weight cannot store.
        """
        store, plain = self._store, self._store.before_adapters(name)
        (rows, columns), dtype, format = plain.shape, plain.dtype, format_of(store.tensors[name])
        if (key := (rows, columns, dtype, format)) not in self._scratch:
            empty = partial(torch.empty, dtype=dtype, device=plain.device)
            new = partial(store.model.ops.new_weight, rows, columns, empty)
            self._scratch = {key: new() if format is None else copy_of(store.tensors[name], plain.device)}
        return merge_into(store.model.ops, self._scratch[key], plain, self.factors[name])

    def drop(self) -> None:
        """Free the memory, except the factors that a loaded adapter has taken over."""
        self.factors, self._by_name, self._scratch = {}, {}, {}


@dataclass(frozen=True, eq=False)
class _Loaded:
    """A loaded adapter. `factors`: A and B, by the name of the weight that A and B change. `num_bytes`: the size of A
    and B. `merged_bytes`: the size of the merged weights.
    """

    adapter: Adapter
    factors: Mapping[str, Factors]
    num_bytes: int
    merged_bytes: int


@dataclass(frozen=True, eq=False)
class _Merged:
    """Merged weights. `arena`: the memory of the weights that differ from the live weights."""

    model: Decoder
    arena: Arena


class AdapterStore:
    """The loaded adapters of an engine, by name. `budget`: the limit on `num_held`, in bytes."""

    def __init__(self, store: WeightStore, budget: int) -> None:
        self.budget = budget
        self._store = store
        self._loaded: dict[str, _Loaded] = {}
        self._merged: OrderedDict[str, _Merged] = OrderedDict()  # in order of last use
        self._epochs = count(1)

    def __len__(self) -> int:
        return len(self._loaded)

    @property
    def names(self) -> list[str]:
        """The names of the loaded adapters, in the order in which they were loaded."""
        return list(self._loaded)

    @property
    def num_held(self) -> int:
        """The bytes of A and B of all adapters, and of the merged weights, that the device holds now."""
        return self._factor_bytes() + sum(merged.arena.num_held for merged in self._merged.values())

    def find(self, name: str) -> Adapter | None:
        """Return the adapter with this name, or None."""
        loaded = self._loaded.get(name)
        return None if loaded is None else loaded.adapter

    @property
    def versions(self) -> dict[str, int]:
        """The version of each loaded adapter, by name."""
        return {name: each.adapter.commit.version for name, each in self._loaded.items()}

    def new_staging(self, name: str) -> AdapterStaging:
        """Return a staging for the adapter `name`. A second thread may call this method and fill the staging, as long
        as no adapter is loaded meanwhile. Adapters may be removed while the staging is filled.
        """
        return AdapterStaging(self._store, partial(self.check, name))

    def check(self, name: str, staging: AdapterStaging) -> None:
        """Raise ValueError unless the budget has room for the staged adapter in addition to A and B of all other
        adapters. Also raise ValueError if the base weights have changed since the staging began.
        """
        if staging.base is not self._store.base:
            raise ValueError(f"adapter {name!r} was staged for base weights that have been replaced; stage it again")
        others = [each for each in list(self._loaded.values()) if each.adapter.name != name]
        of_others = sum(each.num_bytes for each in others)
        largest = max(staging.merged_bytes, *(each.merged_bytes for each in others), 0)
        needed = of_others + staging.num_bytes + largest
        if needed > self.budget:
            raise ValueError(
                f"adapter {name!r} needs {needed} bytes (limit {self.budget}, adapter_bytes): {of_others} for A and B "
                f"of other adapters, {staging.num_bytes} for its own, and {largest} for the largest merged weights; "
                "unload other adapters, or raise adapter_bytes"
            )

    def install(self, name: str, staging: AdapterStaging, version: int) -> Adapter:
        """Take over the staged adapter, and return it. Raise the errors of `check`, with nothing changed.

        If an adapter with this name is already loaded, the existing `Adapter` object is updated and returned.
        """
        self.check(name, staging)
        wait_for_stream(self._store.memory.device)  # A and B belong to the stream that filled them
        adapter = self.find(name) or Adapter(name, Commit(version), 0)
        adapter.commit, adapter.epoch = Commit(version), next(self._epochs)
        self._drop(name)
        self._loaded[name] = _Loaded(adapter, staging.factors, staging.num_bytes, staging.merged_bytes)
        staging.drop()
        self._make_room(0)
        return adapter

    def remove(self, name: str) -> None:
        """Forget a loaded adapter."""
        self._drop(name)
        del self._loaded[name]

    def model_of(self, name: str) -> Decoder:
        """Return the model with the merged weights of an adapter. Make the merged weights if they do not exist."""
        if name not in self._merged:
            self._merged[name] = self._merge(self._loaded[name])
        self._merged.move_to_end(name)
        return self._merged[name].model

    def drop_merged(self) -> None:
        """Free the merged weights of all adapters. A and B stay in memory."""
        for name in [*self._merged]:
            self._drop(name)

    def _merge(self, loaded: _Loaded) -> _Merged:
        store, memory, factors = self._store, _memory_of(self._store), loaded.factors
        self._make_room(loaded.merged_bytes)
        names = _own_names(store, factors)
        arena = memory.new_overlay(loaded.merged_bytes)
        found = memory.weights_over(cast(Arena, store.arena), arena, names)
        for name in names:
            out = found.tensors[name]
            if name in factors:
                merge_into(store.model.ops, out, store.before_adapters(name), factors[name])
            else:
                out.copy_(store.base.kept[name])
        return _Merged(found.model, arena)

    def _make_room(self, num_bytes: int) -> None:
        """Free merged weights until `num_bytes` more bytes are within the budget."""
        while self._merged and self.num_held + num_bytes > self.budget:
            self._drop(next(iter(self._merged)))

    def _drop(self, name: str) -> None:
        if (merged := self._merged.pop(name, None)) is not None:
            wait_for_stream(self._store.memory.device)  # a step in flight may read the weights
            merged.arena.drop(keep=False)

    def _factor_bytes(self) -> int:
        return sum(each.num_bytes for each in self._loaded.values())


def _own_names(store: WeightStore, factors: Mapping[str, Factors]) -> frozenset[str]:
    """Return the names of the weights that merged weights do not share with the live weights: the weights that the
    adapter changes, and the live weights into which adapters without a name are merged.
    """
    return frozenset(factors) | frozenset(store.base.kept)


def _memory_of(store: WeightStore) -> LocalWeights:
    assert isinstance(store.memory, LocalWeights), "several ranks have no named adapters"
    return store.memory
