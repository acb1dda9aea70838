"""The matrices of a layer's experts by name: stacked in one tensor, or one by one.

A model has them as stacks [E, R, C]. Checkpoints and pushes may bring parts in place of one: of each expert some
tensors [rows, C], which below one another are its matrix. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

Shape: TypeAlias = tuple[int, ...]
Parts: TypeAlias = Mapping[str, Sequence[str]]
"""By the names of stacks that may come in parts: what those of an expert are called, in the order of their rows, of
which each has as many. `{}` stands for the expert's number."""

_NUMBERED = re.compile(r"(.*\.)(0|[1-9][0-9]{0,5})(\..*)", re.DOTALL)


class Part(NamedTuple):
    """Rows [start, start + shape[0]) of the matrix of an expert in a stack, as a tensor of that shape."""

    stack: str
    expert: int
    start: int
    shape: tuple[int, int]


class Spellings:
    """The names that tensors of these shapes may come by."""

    def __init__(self, shapes: Mapping[str, Shape], parts: Parts) -> None:
        self._shapes, self._parts = shapes, parts
        self._places = {
            tuple(name.split("{}")): (stack, place)
            for stack, names in parts.items()
            for place, name in enumerate(names)
        }

    def part(self, name: str) -> Part | None:
        """What part of a stack is called so; None if there is none."""
        match = _NUMBERED.fullmatch(name) if self._places else None
        if match is None or (found := self._places.get((match[1], match[3]))) is None:
            return None
        (stack, place), expert = found, int(match[2])
        experts, rows, columns = self._shapes[stack]
        length = rows // len(self._parts[stack])
        return Part(stack, expert, place * length, (length, columns)) if expert < experts else None

    def shape(self, name: str) -> Shape | None:
        """That of the tensor or part of this name; None if there is none."""
        if name in self._shapes:
            return self._shapes[name]
        part = self.part(name)
        return None if part is None else part.shape

    def count(self, name: str) -> int:
        """How many parts a tensor has; 0 if it is no stack that may come in parts."""
        return len(self._parts[name]) * self._shapes[name][0] if name in self._parts else 0

    def parts(self, name: str) -> Iterator[str]:
        """The names of all parts of a tensor, expert by expert."""
        for expert in range(self._shapes[name][0] if name in self._parts else 0):
            yield from (template.replace("{}", str(expert)) for template in self._parts[name])

    @property
    def most(self) -> int:
        """How many tensors there are if all come in parts that may."""
        return sum(self.count(name) or 1 for name in self._shapes)

    def all_shapes(self) -> dict[str, Shape]:
        """Of all tensors and parts, by name."""
        parts = (part for name in self._parts for part in self.parts(name))
        return {name: self.shape(name) or () for name in [*self._shapes, *parts]}

    def parts_among(self, names: Iterable[str]) -> dict[str, dict[str, Shape]]:
        """Those of `names` that are parts, with their shapes, by their stacks."""
        found: dict[str, dict[str, Shape]] = {}
        for name in names:
            if (part := self.part(name)) is not None:
                found.setdefault(part.stack, {})[name] = part.shape
        return found
