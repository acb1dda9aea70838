"""What a push must bring, and the words for what is wrong with it, which trainer and worker share. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from trueroll.errors import PushError

from ...kernels.spellings import Parts, Spellings
from .manifest import Shape

_MOST_NAMES = 10
_MOST_WORDS = 32


class Parameters(Protocol):
    """The parameters that a push must bring. `dtypes`: of those that have another than the push; `parts`: what may come
    in place of some; `tied` and `ignored`: names that may be left out. See `Weights`.
    """

    @property
    def dtype(self) -> str: ...
    @property
    def dtypes(self) -> Mapping[str, str]: ...
    @property
    def shapes(self) -> Mapping[str, Shape]: ...
    @property
    def parts(self) -> Parts: ...
    @property
    def tied(self) -> Mapping[str, str]: ...
    @property
    def ignored(self) -> Collection[str]: ...


def check_complete(names: Collection[str], wanted: Parameters) -> None:
    """Raise PushError unless of every parameter either its own name or those of all its parts are among the names."""
    spellings = spellings_of(wanted)
    parts = spellings.parts_among(names)
    if doubled := sorted(name for name in parts if name in names):
        raise PushError(
            f"push: expected each parameter whole or in parts, but both ways came {list_names(doubled)}; leave one out"
        )
    missing = sorted(name for name in wanted.shapes if name not in names and name not in parts)
    missing += [
        next(part for part in spellings.parts(name) if part not in came)
        for name, came in parts.items()
        if len(came) < spellings.count(name)
    ]
    if missing:
        raise PushError(f"push: expected every parameter, but missing are {list_names(missing)}; push all of them")


def spellings_of(wanted: Parameters) -> Spellings:
    """The names that parameters may come by."""
    return Spellings(wanted.shapes, wanted.parts)


def own_dtypes(wanted: Parameters) -> dict[str, str]:
    """`Parameters.dtypes` by all names that these parameters and their parts may come by."""
    spellings = spellings_of(wanted)
    return {each: dtype for name, dtype in wanted.dtypes.items() for each in (name, *spellings.parts(name))}


def describe_unknown(name: str, wanted: Parameters) -> str:
    """What is wrong with a name that is none of the parameters, and what to do."""
    if name in wanted.tied:
        return f"tensor {name}: expected to be left out, for it is tied to {wanted.tied[name]}; send that one alone"
    if name in wanted.ignored:
        return f"tensor {name}: expected to be left out, for the worker's model does not use it"
    spellings, words = spellings_of(wanted), name.split(".")[:_MOST_WORDS]
    inners = (name.split(".", count)[-1] for count in range(1, len(words)))
    inner = next((inner for inner in inners if spellings.shape(inner) is not None), None)
    if inner is not None:
        prefix = name.removesuffix(inner)[:80]
        return f"tensor {name:.80}: unknown, but {inner} is known; push what is inside the wrapper that adds {prefix!r}"
    return f"tensor {name:.80}: unknown to the worker's model; check that trainer and worker have the same model"


def describe_tie(name: str, other: str) -> str:
    """What is wrong with a tensor that has other values than the one that the worker has tied it to."""
    return (
        f"tensor {name}: expected the values of {other}, which the worker has tied to it, found others; tie them in "
        "the trainer too, or serve a model whose config.json does not tie them"
    )


def list_names(names: list[str]) -> str:
    """Up to ten of the names, and how many there are beside."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
