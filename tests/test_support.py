"""The table of families in docs/support.md is what the tests prove, and every family is proven."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from matrix import thinned
from proofs import (
    CLAIMS,
    COLLECTED,
    ROOT,
    Proof,
    marked_files,
    proves,
    pytest_collection_modifyitems,
    read_table,
    table,
)

from trueroll.kernels.families import families

SCRIPT = ROOT / ".ci" / "support.py"


@pytest.fixture(scope="module")
def proven(pytestconfig: pytest.Config) -> str:
    """The table. If a run includes only some tests, a separate process collects all other tests."""
    proofs, files = pytestconfig.stash[COLLECTED]
    is_whole = files >= marked_files() and not any("::" in argument for argument in pytestconfig.args)
    if is_whole:
        return table(proofs)
    command = [sys.executable, "-P", str(SCRIPT), "--print"]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout.strip()


def test_the_table_of_families_is_up_to_date(proven: str) -> None:
    assert read_table() == proven, "run .venv/bin/python -P .ci/support.py"


@pytest.mark.parametrize("claim", ["transformers", "trainer", "pushes"])
def test_every_family_is_proven(proven: str, claim: str) -> None:
    column = 2 + [*CLAIMS].index(claim)
    rows = [[cell.strip() for cell in line.split("|")] for line in proven.splitlines()[2:]]
    assert [row[1] for row in rows] == [f"`{name}`" for name in sorted(families())]
    assert [row[1] for row in rows if row[column] == "–"] == []


def test_a_cell_lists_the_dtypes_of_each_backend() -> None:
    proofs = [Proof("LlamaForCausalLM", "ranks", *cell) for cell in [("cpu", "float32"), ("triton", "bfloat16")]]
    proofs += [Proof("LlamaForCausalLM", "ranks", "reference", dtype) for dtype in ("bfloat16", "float32")]
    proofs.append(Proof("LlamaForCausalLM", "ranks", "cpu", "bfloat16"))
    [row] = [line for line in table(proofs).splitlines() if "`LlamaForCausalLM`" in line]
    assert row == "| `LlamaForCausalLM` | – | – | `cpu`, `reference` f32 bf16; `triton` bf16 | – | – | – |"


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ([], 1),
        ([pytest.mark.exhaustive], 0),
        (["skip"], 0),
        ([thinned(lambda family, dtype: dtype == "float32")], 0),
        ([thinned(lambda family, dtype: dtype == "bfloat16")], 1),
    ],
)
def test_only_tests_that_every_run_includes_prove_something(
    request: pytest.FixtureRequest, marks: list[Any], expected: int
) -> None:
    item = pytest.Function.from_parent(request.node.parent, name="test_x", callobj=lambda: None)
    item.callspec = SimpleNamespace(params=dict(family="olmo2", dtype="bfloat16"))  # type: ignore[assignment]
    for mark in (*marks, proves("ranks", backend="cpu")):
        item.add_marker(mark)
    config = pytest.Config.fromdictargs({}, [])
    pytest_collection_modifyitems(config, [item])
    proofs = [Proof("Olmo2ForCausalLM", "ranks", "cpu", "bfloat16")] * expected
    assert config.stash[COLLECTED] == (frozenset(proofs), frozenset([item.path]))


def test_a_mark_without_a_backend_is_refused(request: pytest.FixtureRequest) -> None:
    item = pytest.Function.from_parent(request.node.parent, name="test_x", callobj=lambda: None)
    item.add_marker(proves("ranks", family="olmo2", dtype="float32"))
    with pytest.raises(AssertionError, match="test_x: the mark proves needs a family, a backend and a dtype"):
        pytest_collection_modifyitems(pytest.Config.fromdictargs({}, []), [item])
