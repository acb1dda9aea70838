"""What the tests prove of each family of models: which claim, on which backend, and in which dtype.

A test states its claims with the mark `proves`. This module is a pytest plugin, loaded by `conftest`. It reads the
marks of the tests that every run of `make test` includes. `.ci/support.py` writes them into the table in
docs/support.md.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
from matrix import is_in_every_run
from vision_models import MODELS

from tiny import ARCHITECTURES
from trueroll.kernels.families import families

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- families: written by .ci/support.py -->", "<!-- families: end -->"
CLAIMS = {
    "transformers": "log-probs of transformers",
    "company": "bits in company",
    "ranks": "bits on ranks",
    "trainer": "bits in a trainer",
    "gradients": "gradients",
    "pushes": "pushes",
}
"""The claims about a family, with the headings of their columns."""
_SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_Names: TypeAlias = str | Iterable[str] | Callable[..., Any] | None


class Proof(NamedTuple):
    """A test proves a claim about an architecture."""

    architecture: str
    claim: str
    backend: str
    dtype: str


class Proofs(NamedTuple):
    """The proofs of the tests that pytest collected, and the files of these tests."""

    proofs: frozenset[Proof]
    files: frozenset[Path]


COLLECTED = pytest.StashKey[Proofs]()


def proves(
    *claims: str, family: _Names = None, backend: _Names = None, dtype: _Names = None, vision: bool = False
) -> pytest.MarkDecorator:
    """Mark a test that proves these `CLAIMS` about a family.

    `family`: tiny models by name; with `vision`, models of `vision_models`. `backend`, `dtype`: as for a worker. Each
    argument is one name, several names, or a function that returns names. The function gets the parameters of a cell of
    the test, by name. By default, the names are the values of the parameter that names a model, and of the parameters
    `backend` and `dtype`.
    """
    assert CLAIMS.keys() >= {*claims}
    return pytest.mark.proves(claims, family, backend, dtype, vision)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note what the collected tests prove."""
    found = frozenset(proof for item in items if _runs(item) for proof in _proofs_of(item))
    config.stash[COLLECTED] = Proofs(found, frozenset(item.path for item in items))


def marked_files() -> frozenset[Path]:
    """Return the files with tests that prove something, and the files that import such a file, and maybe its tests."""
    texts = {path: path.read_text() for path in ROOT.glob("tests/**/test_*.py")}
    marked = {path for path, text in texts.items() if "\n@proves(" in text}
    importing = re.compile(rf"^from \S*\b({'|'.join(path.stem for path in marked)}) import", re.MULTILINE)
    return frozenset(marked | {path for path, text in texts.items() if importing.search(text)})


def _runs(item: pytest.Item) -> bool:
    return is_in_every_run(item) and item.get_closest_marker("skip") is None


def _proofs_of(item: pytest.Item) -> Iterator[Proof]:
    callspec = getattr(item, "callspec", None)
    params: dict[str, Any] = {} if callspec is None else callspec.params
    for mark in item.iter_markers("proves"):
        claims, family, backend, dtype, vision = mark.args
        known = _vision_architectures() if vision else ARCHITECTURES
        named = next((value for value in params.values() if isinstance(value, str) and value in known), None)
        families = _read(family, params, named)
        backends, dtypes = _read(backend, params, params.get("backend")), _read(dtype, params, params.get("dtype"))
        assert families and backends and dtypes, f"{item.nodeid}: the mark proves needs a family, a backend and a dtype"
        for one, claim, *others in product(families, claims, backends, dtypes):
            yield Proof(known[one], claim, *others)


def _read(given: _Names, params: dict[str, Any], default: Any) -> list[str]:
    found: Any = given(**params) if callable(given) else default if given is None else given
    names = [found] if isinstance(found, str | torch.dtype) else found or []
    return [str(name).removeprefix("torch.") for name in names]


@cache
def _vision_architectures() -> dict[str, str]:
    with torch.device("meta"):
        return {name: type(make()).__name__ for name, make in MODELS.items()}


def table(proofs: Iterable[Proof]) -> str:
    """Return the table of all families, in Markdown."""
    cells: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for architecture, claim, backend, dtype in proofs:
        cells[architecture, claim][backend].add(dtype)
    rows = [["architecture", *CLAIMS.values()], ["---"] * (1 + len(CLAIMS))]
    for name in sorted(families()):
        rows.append([f"`{name}`", *(_cell(cells[name, claim]) for claim in CLAIMS)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(found: dict[str, set[str]]) -> str:
    """Return the backends, grouped by their dtypes."""
    together = defaultdict(list[str])
    for backend in sorted(found):
        dtypes = [short for dtype, short in _SHORT.items() if dtype in found[backend]]
        together[" ".join(dtypes)].append(f"`{backend}`")
    return "; ".join(f"{', '.join(backends)} {dtypes}" for dtypes, backends in together.items()) or "–"


def read_table() -> str:
    """Return the table in docs/support.md."""
    return PAGE.read_text().split(BEGIN)[1].split(END)[0].strip()


def write_table(text: str) -> None:
    """Replace the table in docs/support.md."""
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")
