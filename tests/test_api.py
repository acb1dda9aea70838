"""The public names, and the pages of the Python API that `make docs` builds from their docstrings."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import trueroll.errors
import trueroll.rollout
from trueroll.engine.config import EngineConfig
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.protocol.error_codes import SENT_ERRORS

ROOT = Path(__file__).parents[1]
BLOCKING = {"RolloutClient": "AsyncRolloutClient", "FleetClient": "AsyncFleetClient", "Session": "AsyncSession"}
"""Clients with the same calls as another client. The page describes the calls under the other client."""
MODULES = ("trueroll.rollout", "trueroll.kernels.training", "trueroll.kernels.importance")


def public_members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the names of the methods and properties that a class itself defines."""
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
    # A dataclass without a docstring gets its signature as docstring.
    made_up = [name for name, text in found.items() if text and text.startswith(f"{name}(")]
    assert made_up == [] and [name for name, text in found.items() if not text] == []


def test_the_errors_are_one_tree_and_public() -> None:
    found = {name: kind for name, kind in vars(trueroll.errors).items() if isinstance(kind, type)}
    kinds = {name: kind for name, kind in found.items() if issubclass(kind, BaseException)}
    assert {kind.__name__ for kind in SENT_ERRORS} < kinds.keys() <= {*trueroll.rollout.__all__}
    assert [name for name, kind in kinds.items() if not issubclass(kind, trueroll.errors.TruerollError)] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site that `make docs` builds. A warning, such as one about a broken link, is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-2000:]
    return folder


@pytest.mark.parametrize("module", MODULES)
def test_the_pages_have_every_public_name(site: Path, module: str) -> None:
    page = (site / "reference" / f"{module.rpartition('.')[2]}.html").read_text()
    shown = {name.removeprefix(f"{module}.") for name in re.findall(rf'id="({module}[\w.]+)"', page)}
    missing = docstrings(module).keys() - shown
    assert {BLOCKING.get(name.partition(".")[0], name) for name in missing} <= {*BLOCKING.values()}
    assert {f"{BLOCKING[name.partition('.')[0]]}.{name.partition('.')[2]}" for name in missing} <= shown


def test_the_pages_have_every_command_and_setting(site: Path) -> None:
    commands = (site / "reference" / "commands.html").read_text()
    assert all(f'id="trueroll-{name}"' in commands for name in ("serve", "http", "verify", "fleet"))
    settings = (site / "reference" / "settings.html").read_text()
    assert all(f"<code>{name}</code>" in settings for name in [*EngineConfig.model_fields, *WorkerConfig.model_fields])


def test_search_needs_no_network(site: Path) -> None:
    assert (site / "search" / "search_index.js").stat().st_size > 10**5
    outside = re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css))"', (site / "index.html").read_text())
    assert outside == []
