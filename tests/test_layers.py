"""Who may import whom, read from the syntax tree of every file, imports inside functions and for types included."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("rollout", "engine", "kernels", "weight_sync")

# What each folder may import of ours, and which third-party packages it must not touch.
OWN = {
    "kernels": {"kernels"},
    "weight_sync": {"weight_sync", "rollout"},
    "engine": {"engine", "kernels"},
    "rollout": {"rollout", "engine", "kernels", "weight_sync"},
}
FOREIGN_FORBIDDEN = {
    "weight_sync": {"transformers"},
    "engine": {"zmq"},
    "rollout": set(),
}
# The only third-party packages of a folder that promises to need little.
FOREIGN_ALLOWED = {"kernels": {"torch"}}
FOREIGN_ALLOWED_TO = {
    "kernels.training": {"transformers"},
    **{f"kernels.triton.{name}": {"triton"} for name in ("launch", "products", "attention", "rows", "head")},
}

# What each module or package of `kernels` and of `engine` may import from its own folder. One that is not here breaks
# the rule until it gets a line.
KERNELS = {
    "__init__": set(),
    "reference": {"ops"},
    "transfer": set(),
    "cpu": {"cpu", "ops", "reference"},
    "triton": {"triton", "ops", "reference", "transfer"},
    "ops": {"cpu", "triton", "reference"},
    "autograd": {"ops"},
    "training": {"autograd", "ops"},
}
BASE = {"errors", "config", "request"}
ENGINE = {
    "errors": set(),
    "request": {"errors"},
    "config": {"errors", "request"},
    "prefix_cache": BASE,
    "sequence": BASE | {"prefix_cache"},
    "scheduler": BASE | {"prefix_cache", "sequence"},
    "stop_strings": BASE,
    "tops": set(),
    "sampler": BASE | {"tops"},
    "sample": BASE | {"sequence", "stop_strings", "tops"},
    "models": BASE | {"models"},
    "memory": set(),
    "weights": {"memory", "models"},
    "loading": BASE | {"models", "weights"},
    "model_runner": BASE | {"memory", "models", "sequence"},
    "graphs": {"model_runner", "sampler", "sequence"},
}
ENGINE["engine"] = {*ENGINE}
ENGINE["__init__"] = BASE | {"engine"}
# The worker's side of weight_sync, which `receiver` joins, and then the trainer's, which `publisher` joins.
RECEIVING = {
    "manifest": set(),
    "events": set(),
    "tensors": set(),
    "wanted": {"manifest"},
    "gpu": set(),
    "nccl": {"gloo", "gpu"},
    "assembly": {"manifest", "tensors", "wanted"},
    "gloo": set(),
    "fork_server": {"gloo"},
    "gloo_reader": {"fork_server", "gloo", "manifest"},
    "collective": {"gloo", "manifest", "nccl"},
    "shared": {"manifest"},
    "cuda_ipc": {"gpu", "manifest"},
    "policy": set(),
    "tensor_file": {"manifest", "tensors"},
    "disk": {"manifest", "policy", "tensor_file", "tensors"},
}
RECEIVING["receiver"] = {*RECEIVING}
WEIGHT_SYNC = RECEIVING | {
    "packing": {"manifest"},
    "trainer": set(),
    "workers": set(),
    "base": {"manifest", "tensors"},
    "checklist": {"manifest", "tensors", "trainer", "wanted"},
    "transaction": {"manifest", "workers"},
    "outbox": {"manifest", "packing", "tensors", "transaction"},
}
WEIGHT_SYNC["publisher"] = {*WEIGHT_SYNC} - {"receiver", "events"}
WEIGHT_SYNC["__init__"] = {"publisher"}
PARTS = {"kernels": KERNELS, "engine": ENGINE, "weight_sync": WEIGHT_SYNC}

# What weight_sync may import of rollout: all of it the words, one module the client and what that runs on.
WORDS = {"rollout.errors", "rollout.protocol"}
USES_THE_CLIENT = {"weight_sync.workers"}

RUNS_AN_ENGINE = {"rollout.worker", "rollout.verify", "rollout.verify_premises", "rollout.bench"}
JOINS_ENGINE_AND_WEIGHTS = {"rollout.worker"}
LIGHT = ("trueroll.rollout.client", "trueroll.rollout.protocol", "trueroll.rollout.errors", "trueroll.engine.request")


def read_sources() -> dict[str, str]:
    """Module name, such as `engine.models.loader` or `engine.__init__`, to source text."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text() for path in paths}


def violations(sources: dict[str, str]) -> list[str]:
    return [
        fault for module, text in sources.items() for fault in _faults(module, set(_imports(module, text, sources)))
    ]


def _imports(module: str, text: str, sources: dict[str, str]) -> Iterator[str]:
    """Imported modules: ours as in `sources`, others by the name of their package."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (_resolve(alias.name, None, sources) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            yield from (_resolve(base, alias.name, sources) for alias in node.names)


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = ["trueroll", *module.split(".")][: -node.level]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _resolve(base: str, name: str | None, sources: dict[str, str]) -> str:
    """`from base import name`: the submodule if there is one, otherwise the module or the package `base` itself."""
    if not base.startswith("trueroll"):
        return base.split(".")[0]
    ours = base.removeprefix("trueroll").removeprefix(".")
    candidates = [f"{ours}.{name}".lstrip("."), f"{ours}.{name}.__init__".lstrip("."), ours, f"{ours}.__init__"]
    return next((candidate for candidate in candidates if candidate in sources), ours or str(name))


def _faults(module: str, imported: set[str]) -> Iterator[str]:
    folder = module.split(".")[0]
    ours = {name for name in imported if name.split(".")[0] in FOLDERS}
    for name in ours:
        if name.split(".")[0] not in OWN[folder]:
            yield f"{module} imports {name}: {folder} may import only {sorted(OWN[folder])} of ours"
    for name in _forbidden(folder, imported - ours) - FOREIGN_ALLOWED_TO.get(module, set()):
        yield f"{module} imports {name}, which {folder} must not touch"
    if folder in PARTS:
        yield from _part_faults(folder, module, ours)
    if folder == "rollout":
        yield from _rollout_faults(module, ours)
    if folder == "weight_sync":
        yield from _weight_sync_faults(module, ours)


def _forbidden(folder: str, foreign: set[str]) -> set[str]:
    if folder in FOREIGN_ALLOWED:
        return foreign - FOREIGN_ALLOWED[folder] - sys.stdlib_module_names
    return foreign & FOREIGN_FORBIDDEN[folder]


def _part_faults(folder: str, module: str, ours: set[str]) -> Iterator[str]:
    table, part = PARTS[folder], module.split(".")[1]
    if part not in table:
        yield f"{module} has no line in the table {folder.upper()} of tests/test_layers.py; add what it may import"
        return
    for name in ours:
        if name.startswith(f"{folder}.") and name.split(".")[1] not in table[part]:
            yield f"{module} imports {name}: it may import only {sorted(table[part])} of {folder}"


def _rollout_faults(module: str, ours: set[str]) -> Iterator[str]:
    runs_an_engine = bool(ours & {"engine.engine", "engine.__init__"})
    uses_weights = any(name.split(".")[0] == "weight_sync" for name in ours)
    if runs_an_engine and module not in RUNS_AN_ENGINE:
        yield f"{module} imports the engine: only {sorted(RUNS_AN_ENGINE)} may"
    if runs_an_engine and uses_weights and module not in JOINS_ENGINE_AND_WEIGHTS:
        yield f"{module} imports engine and weight_sync: they meet only in {sorted(JOINS_ENGINE_AND_WEIGHTS)}"


def _weight_sync_faults(module: str, ours: set[str]) -> Iterator[str]:
    allowed = WORDS | ({"rollout.client", "rollout.loop_thread"} if module in USES_THE_CLIENT else set())
    for name in ours:
        if name.startswith("rollout.") and name not in allowed:
            yield f"{module} imports {name}: it may import only {sorted(allowed)} of rollout"


def test_every_import_keeps_the_layers() -> None:
    sources = read_sources()
    assert {"engine.errors", "kernels.__init__", "kernels.cpu.backend", "weight_sync.__init__"} <= sources.keys()
    assert violations(sources) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("kernels.ops", "from ..engine import errors"),
        ("kernels.ops", "import trueroll.engine.config"),
        ("kernels.cpu.weight", "from ...engine import errors"),
        ("kernels.cpu.library", "import numpy"),
        ("kernels.reference", "def f():\n    from .cpu.backend import linear"),
        ("kernels.autograd", "import transformers"),
        ("kernels.training", "from ..engine.models import dense"),
        ("weight_sync.receiver", "from ..engine.errors import TruerollError"),
        ("weight_sync.receiver", "from trueroll import rollout"),
        ("weight_sync.receiver", "from ..rollout.client import AsyncRolloutClient"),
        ("weight_sync.receiver", "from .workers import Workers"),
        ("weight_sync.publisher", "def f():\n    from ..rollout.worker import Worker"),
        ("weight_sync.nobody_knows", "import math"),
        ("engine.scheduler", "from .model_runner import ModelRunner"),
        ("engine.scheduler", "def f():\n    from . import model_runner"),
        ("engine.model_runner", "if TYPE_CHECKING:\n    from .scheduler import Scheduler"),
        ("engine.model_runner", "from ..rollout.worker import serve"),
        ("engine.sampler", "from .prefix_cache import PrefixCache"),
        ("engine.errors", "from .config import EngineConfig"),
        ("engine.models.loader", "from ..model_runner import ModelRunner"),
        ("engine.scheduler", "from .models import loader"),
        ("engine.engine", "import zmq.asyncio"),
        ("engine.engine", "from ..weight_sync import manifest"),
        ("engine.nobody_knows", "import math"),
        ("kernels.nobody_knows", "import math"),
        ("rollout.client", "from ..engine.engine import Engine"),
        ("rollout.client", "from ..engine import Engine"),
        ("rollout.verify", "from ..engine.engine import Engine\nfrom .. import weight_sync"),
    ],
)
def test_a_planted_violation_is_found(module: str, line: str) -> None:
    sources = dict.fromkeys(["engine.errors", "engine.config", "engine.engine", "engine.model_runner"], "")
    sources |= dict.fromkeys(["engine.scheduler", "engine.prefix_cache", "engine.models.loader"], "")
    sources |= dict.fromkeys(["kernels.cpu.backend", "kernels.cpu.library"], "")
    sources |= dict.fromkeys(["engine.__init__", "weight_sync.__init__", "rollout.__init__", "rollout.worker"], "")
    sources |= dict.fromkeys(["rollout.client", "weight_sync.workers"], "")
    assert violations(sources) == []
    faults = violations(sources | {module: line})
    assert len(faults) == 1 and module in faults[0]


@pytest.mark.parametrize("module", LIGHT)
def test_a_client_needs_neither_torch_nor_transformers(module: str) -> None:
    code = f"import sys, {module}; print(*[m for m in ('torch', 'transformers', {module!r}) if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [module]
