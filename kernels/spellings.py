"""The names of tensors in checkpoints and pushes.

A model uses the names that transformers gives to the tensors (`own_name` translates other names). The matrices of
experts are stacked in one tensor or split into parts. A model holds the matrices of experts as stacks [E, R, C]. A
checkpoint or push may have parts instead of a stack. The parts of an expert are tensors [rows, C]. Concatenated along
the rows, the parts of an expert form the expert's matrix. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

Shape: TypeAlias = tuple[int, ...]
Parts: TypeAlias = Mapping[str, Sequence[str]]
"""For each stack that may be split: the name templates of an expert's parts, in the order of their rows. All parts of a
stack have the same number of rows. `{}` stands for the expert's number.
"""

_NUMBERED = re.compile(r"(.*\.)(0|[1-9][0-9]{0,5})(\..*)", re.DOTALL)


class Names(Protocol):
    """How a model names its tensors.

    `renamed`: maps prefixes of names in checkpoints and pushes to prefixes of the model's names. `respelled`: maps
    substrings of names in checkpoints and pushes to substrings of the model's names. `left_out`: prefixes of the names
    of tensors that the model does not use, such as the tensors of a vision tower.
    """

    @property
    def renamed(self) -> Mapping[str, str]: ...
    @property
    def respelled(self) -> Mapping[str, str]: ...
    @property
    def left_out(self) -> tuple[str, ...]: ...


def own_name(name: str, names: Names) -> str | None:
    """Return the model's name for a tensor of a checkpoint or push; None if the model does not use the tensor.

    At most one prefix is replaced: the first key of `renamed` with which the name begins. Then each key of `respelled`
    is replaced, in order.
    """
    beginning = next((other for other in names.renamed if name.startswith(other)), "")
    own = names.renamed.get(beginning, "") + name.removeprefix(beginning)
    for other, text in names.respelled.items():
        own = own.replace(other, text)
    return None if own.startswith(names.left_out) else own


class Part(NamedTuple):
    """A part: rows [start, start + shape[0]) of one expert's matrix in a stack, as a tensor of shape `shape`."""

    stack: str
    expert: int
    start: int
    shape: tuple[int, int]


class Spellings:
    """The names under which a model's tensors may arrive in a push or checkpoint."""

    def __init__(self, shapes: Mapping[str, Shape], parts: Parts) -> None:
        self._shapes, self._parts = shapes, parts
        self._places = {
            tuple(name.split("{}")): (stack, place)
            for stack, names in parts.items()
            for place, name in enumerate(names)
        }

    def part(self, name: str) -> Part | None:
        """Return the part with this name, or None if no stack has such a part."""
        match = _NUMBERED.fullmatch(name) if self._places else None
        if match is None or (found := self._places.get((match[1], match[3]))) is None:
            return None
        (stack, place), expert = found, int(match[2])
        experts, rows, columns = self._shapes[stack]
        length = rows // len(self._parts[stack])
        return Part(stack, expert, place * length, (length, columns)) if expert < experts else None

    def shape(self, name: str) -> Shape | None:
        """Return the shape of the tensor or part that has this name; None for an unknown name."""
        if name in self._shapes:
            return self._shapes[name]
        part = self.part(name)
        return None if part is None else part.shape

    def count(self, name: str) -> int:
        """Return the number of parts that may replace a stack; 0 for a tensor that cannot come in parts."""
        return len(self._parts[name]) * self._shapes[name][0] if name in self._parts else 0

    def parts(self, name: str) -> Iterator[str]:
        """Yield the names of all parts of a tensor, expert by expert."""
        for expert in range(self._shapes[name][0] if name in self._parts else 0):
            yield from (template.replace("{}", str(expert)) for template in self._parts[name])

    @property
    def most(self) -> int:
        """The number of tensors if every stack with known parts is split into parts."""
        return sum(self.count(name) or 1 for name in self._shapes)

    def all_shapes(self) -> dict[str, Shape]:
        """Return the shapes of all tensors and parts, by name."""
        parts = (part for name in self._parts for part in self.parts(name))
        return {name: self.shape(name) or () for name in [*self._shapes, *parts]}

    def parts_among(self, names: Iterable[str]) -> dict[str, dict[str, Shape]]:
        """Return the parts among `names`, with their shapes, grouped by stack."""
        found: dict[str, dict[str, Shape]] = {}
        for name in names:
            if (part := self.part(name)) is not None:
                found.setdefault(part.stack, {})[name] = part.shape
        return found
