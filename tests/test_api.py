"""The public names, and the pages of the Python API that `make docs` builds from their docstrings."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import trueroll.errors
import trueroll.rollout
from trueroll.rollout.protocol.error_codes import SENT_ERRORS

SCRIPT = Path(__file__).parents[1] / "docs" / "api.py"
MODULES = ("trueroll.rollout", "trueroll.kernels.training", "trueroll.kernels.importance")


def public_members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the methods and properties that a class itself defines, by name."""
    for name, member in vars(kind).items():
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            yield name, member


def docstrings(module: str) -> dict[str, str | None]:
    """Return the docstrings of a module's public names: `name`, and `Class.name`."""
    found: dict[str, str | None] = {}
    for name in import_module(module).__all__:
        public = getattr(import_module(module), name)
        found[name] = public.__doc__
        if inspect.isclass(public):
            found |= {f"{name}.{inner}": member.__doc__ for inner, member in public_members(public)}
    return found


def _is_of(value: object, module: str) -> bool:
    return getattr(value, "__module__", None) == module


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_docstring(module: str) -> None:
    found = docstrings(module)
    own = {name for name, value in vars(import_module(module)).items() if _is_of(value, module) and name[0] != "_"}
    assert own <= {*import_module(module).__all__} and len(found) > 2
    # A dataclass without a docstring gets its signature as one.
    made_up = [name for name, text in found.items() if text and text.startswith(f"{name}(")]
    assert made_up == [] and [name for name, text in found.items() if not text] == []


def test_the_errors_are_one_tree_and_public() -> None:
    found = {name: kind for name, kind in vars(trueroll.errors).items() if isinstance(kind, type)}
    kinds = {name: kind for name, kind in found.items() if issubclass(kind, BaseException)}
    assert {kind.__name__ for kind in SENT_ERRORS} < kinds.keys() <= {*trueroll.rollout.__all__}
    assert [name for name, kind in kinds.items() if not issubclass(kind, trueroll.errors.TruerollError)] == []


def test_the_pages_have_every_public_name(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("api", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.MODULES == MODULES
    script.build(tmp_path)
    assert (tmp_path / "index.html").is_file()
    for module in MODULES:
        page = (tmp_path / (module.replace(".", "/") + ".html")).read_text()
        # pdoc shows a name that it cannot resolve as a variable without a docstring.
        shown = re.findall(r'<section id="([\w.]+)">\s*<div class="attr (?:class|function)">', page)
        shown += re.findall(r'<div id="([\w.]+)" class="classattr">\s*<div class="attr (?:function|variable)">', page)
        assert docstrings(module).keys() - {*shown} == set()
