"""The fake NCCL and the fake CUDA graphs have the interfaces of the real ones, and behave as their callers need.

tests/gpu/test_stand_ins.py runs these checks on real CUDA graphs.
"""

from __future__ import annotations

import inspect
import re
from datetime import timedelta
from typing import Any

import pytest
import torch

from trueroll.engine.running.graphs import Capture, CudaCapture

from .engine.running.test_graphs import Recomputed
from .gpu.test_stand_ins import check_capture
from .weight_sync.transports.stand_ins import NcclGroup, NcclWork

_TORCH: Any = torch._C._distributed_c10d  # type: ignore[attr-defined]


def parameters_of(documented: str) -> set[tuple[str, ...]]:
    """Return the parameter names of each overload in a docstring of pybind11, without `self`."""
    found = re.findall(r"\(self: [^,)]+(?:, ([^\n]*?))?\) -> ", documented)
    return {tuple(re.findall(r"(?:^|, )(\w+): ", each)) for each in found}


def test_the_parameters_of_overloads_are_read() -> None:
    text = (
        "f(self: a.B, x: list[int], y: c.D | None = None) -> int\n2. f(self: a.B) -> None\n3. f(self: a.B, z: e) -> e"
    )
    assert parameters_of(text) == {("x", "y"), (), ("z",)}


@pytest.mark.parametrize(
    ("stand_in", "real"), [(NcclGroup, _TORCH.Backend), (NcclWork, _TORCH.Work)], ids=["group", "work"]
)
def test_the_stand_in_of_nccl_has_methods_that_torch_has(stand_in: type, real: type) -> None:
    """A torch build without NCCL still has the base class of NCCL's process group, with all operations."""
    methods = {name: each for name, each in vars(stand_in).items() if inspect.isfunction(each) and name[0] != "_"}
    assert len(methods) == {NcclGroup: 3, NcclWork: 1}[stand_in], "the premise"
    for name, method in methods.items():
        names = tuple(inspect.signature(method).parameters)[1:]
        overloads = parameters_of(getattr(real, name).__doc__)
        assert any(len(each) == len(names) and _agree(each, names) for each in overloads), (name, names, overloads)


def _agree(real: tuple[str, ...], ours: tuple[str, ...]) -> bool:
    """Return whether the names are equal. A parameter without a name in torch (`arg0`) equals any name."""
    return all(name == own or re.fullmatch(r"arg\d", name) for name, own in zip(real, ours, strict=True))


def test_the_options_of_the_stand_in_are_those_of_torch() -> None:
    assert isinstance(NcclGroup.Options._timeout, timedelta) and "_timeout" in vars(_TORCH.Backend.Options)


def test_the_stand_in_of_graphs_has_the_signature_of_the_real_one() -> None:
    signatures = [inspect.signature(each.__call__) for each in (Capture, CudaCapture, Recomputed)]
    assert signatures[0] == signatures[1] == signatures[2]


def test_the_stand_in_of_graphs_replays_the_captured_calls() -> None:
    check_capture(Recomputed([]), torch.device("cpu"))
