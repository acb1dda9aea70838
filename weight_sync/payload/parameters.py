"""What a push must bring, and the words for what is wrong with it, which trainer and worker share. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from trueroll.errors import PushError

from .manifest import Shape

_MOST_NAMES = 10


class Parameters(Protocol):
    """The parameters that a push must bring. `tied` and `ignored`: names that may be left out, see `Weights`."""

    @property
    def dtype(self) -> str: ...
    @property
    def shapes(self) -> Mapping[str, Shape]: ...
    @property
    def tied(self) -> Mapping[str, str]: ...
    @property
    def ignored(self) -> Collection[str]: ...


def check_complete(names: Collection[str], wanted: Parameters) -> None:
    """Raise PushError unless every parameter is among the names."""
    missing = sorted(name for name in wanted.shapes if name not in names)
    if missing:
        raise PushError(f"push: expected every parameter, but missing are {list_names(missing)}; push all of them")


def describe_unknown(name: str, wanted: Parameters) -> str:
    """What is wrong with a name that is none of the parameters, and what to do."""
    if name in wanted.tied:
        return f"tensor {name}: expected to be left out, for it is tied to {wanted.tied[name]}; send that one alone"
    if name in wanted.ignored:
        return f"tensor {name}: expected to be left out, for the worker's model does not use it"
    inner = next((known for known in wanted.shapes if name.endswith(f".{known}")), None)
    if inner is not None:
        prefix = name.removesuffix(inner)[:80]
        return f"tensor {name:.80}: unknown, but {inner} is known; push what is inside the wrapper that adds {prefix!r}"
    return f"tensor {name:.80}: unknown to the worker's model; check that trainer and worker have the same model"


def list_names(names: list[str]) -> str:
    """Up to ten of the names, and how many there are beside."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
