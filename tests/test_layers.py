"""The import rules between modules, checked on the syntax tree of every file, including imports in functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("rollout", "engine", "kernels", "weight_sync")

# For each folder: the parts of trueroll that the folder may import, and the third-party packages that it must not
# import. `errors`, `versions` and `__init__` are the modules of the package `trueroll` itself.
OWN = {
    "__init__": set(),
    "errors": set(),
    "versions": set(),
    "kernels": {"errors", "versions", "kernels"},
    "weight_sync": {"errors", "weight_sync", "engine", "kernels"},
    "engine": {"errors", "engine", "kernels"},
    "rollout": {"errors", "versions", "rollout", "engine", "kernels", "weight_sync"},
}
FOREIGN_FORBIDDEN = {
    "weight_sync": {"transformers"},
    "engine": {"zmq"},
    "rollout": {"starlette", "h11", "uvicorn", "opentelemetry", "ray", "verl"},
}
# For folders that promise few dependencies: the only third-party packages that the folder may import.
FOREIGN_ALLOWED = {"__init__": set(), "errors": set(), "versions": set(), "kernels": {"torch"}}
FOREIGN_ALLOWED_TO = {
    "kernels.training": {"transformers"},
    "kernels.edits": {"numpy"},
    "kernels.families.settings": {"transformers", "huggingface_hub"},
    **{
        f"kernels.triton.{name}": {"triton"}
        for name in ("launch", "products", "attention", "experts", "peers", "rows", "recurrence", "head", "weights")
    },
    **{f"rollout.http.{name}": {"starlette"} for name in ("adapters", "bodies", "guard", "lifecycle", "pages", "wire")},
    **{f"rollout.http.{name}": {"opentelemetry", "starlette"} for name in ("app", "tracing")},
    **{f"rollout.{name}": {"opentelemetry"} for name in ("tracing", "client.client", "fleet.client", "http.server")},
    **{f"rollout.http.{room}.endpoints": {"starlette"} for room in ("agents", "tinker")},
    **{f"rollout.http.sglang.{name}": {"starlette"} for name in ("adapters", "control", "generate", "info", "weights")},
    "rollout.http.vllm.phases": {"starlette"},
    "rollout.http.bounds": {"h11"},
    **{f"rollout.http.{name}": {"h11", "starlette"} for name in ("connections", "exchange")},
    "rollout.integrations.vllm": {"vllm"},
    "rollout.integrations.verl.plugin": {"verl"},
    "rollout.integrations.verl.server": {"verl"},
    **{f"rollout.integrations.verl.{name}": {"ray", "verl"} for name in ("adapter", "replica")},
    **{f"rollout.fleet.{name}": {"ray"} for name in ("ray_access", "ray_cluster")},
}

# For each module or package of a folder: the modules or whole packages of that folder that it may import. A module
# without an entry breaks the rule, except the `__init__` of a nested package, which imports nothing.
SPEC = {"specs", "contract"}
KERNELS = {
    "__init__": set(),
    "quantization": set(),
    "cache_formats": {"quantization"},
    "specs": {"cache_formats", "quantization", "spellings"},
    "journal": set(),
    "contract": {"cache_formats", "journal", "quantization", "specs"},
    "spellings": set(),
    "stored": set(),
    "dynamic": {"quantization"},
    "coded": {"quantization"},
    "stacks": {"contract", "quantization"},
    "rounded": {"contract", "quantization"},
    "shards": {"quantization", "rounded", "specs", "stacks"},
    "keeping": {"coded", "quantization", "rounded", "shards", "stacks"},
    "layer": SPEC | {"cache_formats", "stacks"},
    "pieces": {"layer", "specs"},
    "precision": {"cache_formats", "dynamic", "layer", "quantization", "specs", "stacks", "stored"},
    "ranks": SPEC | {"dynamic", "layer", "quantization"},
    "families": {"families", "pieces", "specs", "stored"},
    "transfer": set(),
    "edits": {"contract", "transfer"},
    "distributions": SPEC | {"edits", "packed"},
    "reference": SPEC | {"coded", "dynamic", "layer", "quantization"},
    "cpu": SPEC | {"cache_formats", "cpu", "layer", "quantization", "reference"},
    "triton": SPEC | {"coded", "triton", "layer", "quantization", "reference", "transfer"},
    "selection": SPEC | {"cpu", "triton", "reference"},
    "packed": SPEC,
    "media": {"specs", "transfer"},
    "towers": SPEC | {"layer", "packed"},
    "autograd": SPEC | {"distributions", "dynamic", "gates", "layer", "packed", "precision", "quantization"},
    "gates": {"specs"},
    "batches": SPEC | {"packed"},
    "wrappers": set(),
    "plain_models": {"families", "specs", "wrappers"},
    "replay": {"batches", "gates", "plain_models", "specs", "wrappers"},
    "lora_config": set(),
    "adapters": SPEC | {"lora_config", "quantization", "wrappers"},
    "arguments": set(),
    "aligned": {"adapters", "autograd", "plain_models", "precision", "selection", "specs", "stacks", "wrappers"},
    "training_images": {"media", "packed", "specs"},
    "training_towers": {"adapters", "aligned", "autograd", "specs", "towers", "training_images", "wrappers"},
    "training": SPEC
    | {
        "adapters",
        "aligned",
        "arguments",
        "autograd",
        "batches",
        "cache_formats",
        "distributions",
        "dynamic",
        "edits",
        "layer",
        "packed",
        "pieces",
        "plain_models",
        "precision",
    }
    | {"replay", "selection", "stacks", "training_images", "training_towers", "wrappers"},
    "importance": set(),
}
OUTPUTS = {"request", "outputs"}
ENGINE = {
    "commits": set(),
    "media": set(),
    "request": {"grammars.source", "media"},
    "grammars.source": set(),
    "grammars.matching": {"grammars.source"},
    "grammars.child": {"grammars.matching", "grammars.source", "models"},
    "grammars.masks": {"grammars.child", "grammars.matching", "grammars.source", "models"},
    "config": {"request"},
    "stats": set(),
    "outputs.routes": set(),
    "outputs.stop_strings": {"models"},
    "outputs.open_requests": OUTPUTS | {"commits", "grammars.masks"},
    "cache.memory": set(),
    "cache.shared": {"cache.memory"},
    "cache.lending": {"cache.memory", "cache.shared"},
    "cache.pool": set(),
    "cache.host_tier": {"cache.pool"},
    "cache.prefix_cache": {"commits", "request", "stats", "cache.host_tier", "cache.pool"},
    "cache.routes": {"cache.prefix_cache"},
    "scheduling.media": {"media"},
    "scheduling.encodings": {"media"},
    "scheduling.deferred": set(),
    "scheduling.sequence": {"outputs", "cache.prefix_cache", "scheduling.deferred", "scheduling.media"},
    "scheduling.recurrent": {"cache.host_tier", "cache.prefix_cache", "scheduling.sequence"},
    "scheduling.scheduler": OUTPUTS
    | {"cache.host_tier", "cache.prefix_cache", "cache.routes"}
    | {f"scheduling.{name}" for name in ("encodings", "media", "recurrent", "sequence")},
    "models": {"models"},
    "running.step": OUTPUTS | {"cache.host_tier", "scheduling.media", "scheduling.sequence"},
    "running.encoder": {"media", "models", "scheduling.encodings", "scheduling.media"},
    "running.host_copies": set(),
    "running.sampler": OUTPUTS | {"running.host_copies", "running.step"},
    "running.model_runner": {"cache.memory", "models"}
    | {f"running.{name}" for name in ("encoder", "host_memory", "mtp", "ranks", "step")},
    "running.experts": {"outputs.routes", "running.host_copies"},
    "running.graphs": {"models", "running.model_runner", "running.sampler", "running.step"},
    "running.weight_memory": {"cache.memory", "models"},
    "running.weights": {"cache.lending", "models", "running.weight_memory"},
    "running.adapters": {"cache.memory", "commits", "models", "running.weight_memory", "running.weights"},
    "running.planner": {"config"},
    "running.ranks": {"config"},
    "running.mtp": {"cache.memory", "models", "running.planner", "running.sampler", "running.step"},
    "running.loading": {"config", "grammars.matching", "models"}
    | {f"running.{name}" for name in ("experts", "planner", "ranks", "weight_memory", "weights")},
    "running.host_memory": {"cache.memory", "running.loading"},
    "running.warm_up": {"config", "models", "request"}
    | {f"running.{name}" for name in ("graphs", "loading", "model_runner", "sampler", "step")},
    "running.executor": {"config", "models", "outputs.routes", "request"}
    | {f"running.{name}" for name in ("experts", "graphs", "loading", "model_runner", "mtp", "ranks", "sampler")}
    | {f"running.{name}" for name in ("adapters", "encoder", "step", "warm_up", "weights")},
    "parallel.exchange": {"running.ranks"},
    "parallel.groups": {"parallel.exchange", "running.ranks"},
    "parallel.place": {"config", "parallel.exchange", "parallel.groups"},
    "parallel.computation": {"parallel.agreement", "parallel.exchange", "running.executor", "running.step"},
    "parallel.agreement": {"parallel.exchange", "running.executor", "running.step"},
    "parallel.weights": {"cache.memory", "cache.shared", "models", "running.ranks", "running.weight_memory"},
    "parallel.wire": {"grammars.source", "media", "outputs.open_requests", "request", "running.mtp", "running.step"}
    | {"scheduling.encodings", "scheduling.media"},
    "parallel.encoding": {"running.encoder", "scheduling.encodings"},
    "parallel.follower": {"config", "parallel"}
    | {f"running.{name}" for name in ("executor", "loading", "ranks", "weight_memory")},
    "parallel.leader": {"config", "outputs.routes", "parallel", "request"}
    | {f"running.{name}" for name in ("executor", "loading", "mtp", "ranks", "step", "weight_memory", "weights")},
    "drafting.drafter": {"scheduling.sequence"},
    "drafting.odds": set(),
    "drafting.repeats": {"drafting.odds", "scheduling.sequence"},
    "drafting.mtp": {"drafting.odds", "running.executor", "running.mtp", "running.step"}
    | {f"scheduling.{name}" for name in ("scheduler", "sequence")},
    "drafting.rule": set(),
    "drafting.drafting": {"drafting.drafter", "drafting.rule", "outputs.open_requests", "stats"}
    | {f"scheduling.{name}" for name in ("scheduler", "sequence")},
    "experts": {"outputs.routes", "scheduling.sequence"},
    "pipeline": OUTPUTS
    | {"commits", "drafting.drafting", "experts", "grammars.masks"}
    | {"running.executor", "running.sampler", "running.step"}
    | {f"scheduling.{name}" for name in ("scheduler", "sequence")},
    "admission": OUTPUTS
    | {"cache.prefix_cache", "commits", "grammars.masks", "media", "pipeline"}
    | {"running.adapters", "running.loading"}
    | {f"scheduling.{name}" for name in ("media", "scheduler", "sequence")},
}
ENGINE["engine"] = {*ENGINE}
ENGINE["__init__"] = set()
WEIGHT_SYNC = {
    "__init__": set(),
    "payload": {"payload"},
    "transports": {"payload", "transports"},
    "deltas": {"payload", "transports", "deltas"},
    "trainer": {"payload", "transports", "deltas", "trainer"},
    "worker": {"payload", "transports", "deltas", "worker"},
}
ROLLOUT = {
    "__init__": {"protocol", "images", "client", "fleet", "publisher", "auditing", "sessions", "text"},
    "auditing": {"protocol", "client"},
    "foreign": {"auditing", "foreign"},
    "config": set(),
    "logs": set(),
    "garbage": set(),
    "protocol": {"protocol"},
    "network": {"config", "protocol", "network"},
    "monitoring": {"protocol", "monitoring"},
    "tracing": {"protocol"},
    "client": {"config", "protocol", "network", "images", "tracing", "client"},
    "fleet": {"config", "protocol", "network", "monitoring", "images", "client", "publisher", "fleet"},
    "publisher": {"protocol", "client", "publisher"},
    "worker": {"config", "garbage", "logs", "protocol", "network", "monitoring", "worker"},
    "grammar": set(),
    "images": set(),
    "videos": {"images"},
    "text_child": set(),
    "plain_tokenizer": set(),
    "text": {"plain_tokenizer", "protocol", "text_child"},
    "parsing": {"parsing"},
    "sessions": {"protocol", "client", "parsing", "text", "tracing", "sessions"},
    "http": {
        "parsing",
        "sessions",
        "config",
        "protocol",
        "network",
        "monitoring",
        "client",
        "fleet",
        "publisher",
        "text",
        "http",
    }
    | {"images", "tracing"},
    "tools": {
        "auditing",
        "foreign",
        "config",
        "logs",
        "protocol",
        "network",
        "monitoring",
        "client",
        "fleet",
        "publisher",
        "worker",
        "text",
        "sessions",
        "http",
        "tools",
    },
    "integrations": {"grammar", "images", "client", "fleet", "publisher", "integrations"},
}
PARTS = {"kernels": KERNELS, "engine": ENGINE, "weight_sync": WEIGHT_SYNC, "rollout": ROLLOUT}

SHARED_WITH_PUSHES = {
    "engine.request",
    "kernels.cpu.copies",
    "kernels.lora_config",
    "kernels.spellings",
    "kernels.transfer",
}
RUNS_AN_ENGINE = {
    "rollout.worker.process",
    "rollout.tools.verify",
    "rollout.tools.verify_drafts",
    "rollout.tools.verify_premises",
    "rollout.tools.bench",
    "rollout.tools.plan",
}
LIGHT = (
    "trueroll.errors",
    "trueroll.rollout.client.client",
    "trueroll.rollout.protocol",
    "trueroll.rollout.fleet.client",
    "trueroll.rollout.fleet.placement",
    "trueroll.engine.request",
)


def read_sources() -> dict[str, str]:
    """Return source texts by module name, such as `engine.models.loader`, `engine.__init__` or `errors`."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return {_name(path.relative_to(ROOT).with_suffix("")): path.read_text() for path in paths}


def _name(path: Path) -> str:
    return ".".join(path.parts).removeprefix("rollout.trueroll.")


def violations(sources: dict[str, str]) -> list[str]:
    return [
        fault for module, text in sources.items() for fault in _faults(module, set(_imports(module, text, sources)))
    ]


def _imports(module: str, text: str, sources: dict[str, str]) -> Iterator[str]:
    """Yield the names of imported modules. A module of trueroll has its name in `sources`. Any other module has the
    name of its top-level package.
    """
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
    """Resolve `from base import name`: return the submodule if there is one, otherwise the module or package `base`."""
    if not base.startswith("trueroll"):
        return base.split(".")[0]
    ours = base.removeprefix("trueroll").removeprefix(".")
    candidates = [f"{ours}.{name}".lstrip("."), f"{ours}.{name}.__init__".lstrip("."), ours, f"{ours}.__init__"]
    return next((candidate for candidate in candidates if candidate in sources), ours or str(name))


def _faults(module: str, imported: set[str]) -> Iterator[str]:
    folder = module.split(".")[0]
    ours = {name for name in imported if name.split(".")[0] in OWN}
    for name in ours:
        if name.split(".")[0] not in OWN[folder]:
            yield f"{module} imports {name}: {folder} may import only {sorted(OWN[folder])} of ours"
    for name in _forbidden(folder, imported - ours) - FOREIGN_ALLOWED_TO.get(module, set()):
        yield f"{module} imports {name}, which {folder} must not import"
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
    table, part = PARTS[folder], module.removeprefix(f"{folder}.")
    allowed = next((table[line] for line in table if _is_in(part, line)), None)
    if allowed is None and not part.endswith(".__init__"):
        yield f"{module} has no line in the table {folder.upper()} of tests/test_layers.py; add its allowed imports"
        return
    for name in ours:
        found = name.removeprefix(f"{folder}.")
        if name != found and not any(_is_in(found, line) for line in allowed or ()):
            yield f"{module} imports {name}: it may import only {sorted(allowed or ())} of {folder}"


def _is_in(module: str, line: str) -> bool:
    """Return whether an entry of a table, which names a module or a package, covers this module."""
    return f"{module}.".startswith(f"{line}.")


def _rollout_faults(module: str, ours: set[str]) -> Iterator[str]:
    runs_an_engine = bool(ours & {"engine.engine", "engine.__init__"})
    if runs_an_engine and module not in RUNS_AN_ENGINE:
        yield f"{module} imports the engine: only {sorted(RUNS_AN_ENGINE)} may"
    if runs_an_engine and any(name.split(".")[0] == "weight_sync" for name in ours):
        yield f"{module} imports engine and weight_sync, which must not know each other: only a worker joins them"


def _weight_sync_faults(module: str, ours: set[str]) -> Iterator[str]:
    for name in ours:
        if name.startswith(("engine.", "kernels.")) and name not in SHARED_WITH_PUSHES:
            yield f"{module} imports {name}: it may import only {sorted(SHARED_WITH_PUSHES)} of engine and kernels"


def test_every_import_keeps_the_layers() -> None:
    sources = read_sources()
    assert {"errors", "kernels.__init__", "kernels.cpu.backend", "weight_sync.__init__"} <= sources.keys()
    assert violations(sources) == []


@pytest.mark.parametrize(
    "table", [KERNELS, ENGINE, WEIGHT_SYNC, ROLLOUT], ids=["kernels", "engine", "weight_sync", "rollout"]
)
def test_no_folder_has_circular_imports(table: dict[str, set[str]]) -> None:
    others: dict[str, set[str]] = {}
    for part, allowed in table.items():
        folder = part.split(".")[0]
        others.setdefault(folder, set()).update({line.split(".")[0] for line in allowed} - {folder})
    assert len([*TopologicalSorter(others).static_order()]) == len(others)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("errors", "import pydantic"),
        ("errors", "from .engine import request"),
        ("kernels.contract", "from ..engine import request"),
        ("kernels.contract", "import trueroll.engine.config"),
        ("kernels.contract", "def f():\n    from .selection import select_backend"),
        ("kernels.layer", "from .reference import linear"),
        ("kernels.families.llama", "from ..contract import Backend"),
        ("kernels.cpu.backend", "from ...engine import request"),
        ("kernels.cpu.library", "import numpy"),
        ("kernels.reference", "def f():\n    from .cpu.backend import linear"),
        ("kernels.autograd", "import transformers"),
        ("kernels.training", "from ..engine.models import decoder"),
        ("weight_sync.worker.receiver", "from ...engine.config import EngineConfig"),
        ("weight_sync.worker.receiver", "from ...kernels.stacks import Stack"),
        ("weight_sync.worker.receiver", "from trueroll import rollout"),
        ("weight_sync.worker.receiver", "from ..trainer.sender import WeightSender"),
        ("weight_sync.payload.messages", "from ...rollout.protocol.messages import Status"),
        ("weight_sync.trainer.sender", "def f():\n    from ...rollout.publisher.publisher import WorkerClients"),
        ("weight_sync.transports.shared", "if TYPE_CHECKING:\n    from ..worker.receiver import Receiver"),
        ("weight_sync.nobody_knows", "import math"),
        ("weight_sync.nobody_knows.at_all", "import math"),
        ("engine.scheduling.scheduler", "from ..running.model_runner import ModelRunner"),
        ("engine.scheduling.scheduler", "def f():\n    from ..running import model_runner"),
        ("engine.scheduling.scheduler", "from ..models import loader"),
        ("engine.scheduling.sequence", "from .scheduler import Scheduler"),
        ("engine.scheduling.__init__", "from .scheduler import Scheduler"),
        ("engine.running.model_runner", "if TYPE_CHECKING:\n    from ..scheduling.scheduler import Scheduler"),
        ("engine.running.model_runner", "from ...rollout.worker.process import serve"),
        ("engine.running.sampler", "from ..cache.prefix_cache import PrefixCache"),
        ("engine.cache.prefix_cache", "from ..scheduling.scheduler import Scheduler"),
        ("engine.outputs.stop_strings", "from ..cache.prefix_cache import PrefixCache"),
        ("engine.request", "from .config import EngineConfig"),
        ("engine.models.loader", "from ..running.model_runner import ModelRunner"),
        ("engine.engine", "import zmq.asyncio"),
        ("engine.engine", "from ..weight_sync import manifest"),
        ("engine.nobody_knows", "import math"),
        ("engine.running.nobody_knows", "import math"),
        ("kernels.nobody_knows", "import math"),
        ("rollout.client.client", "from ...engine.engine import Engine"),
        ("rollout.client.client", "from ...engine import Engine"),
        ("rollout.client.client", "from ..publisher.publisher import WorkerClients"),
        ("rollout.http.server", "from ..worker.worker import Worker"),
        ("rollout.http.chat", "from starlette.requests import Request"),
        ("rollout.http.samples", "from starlette.requests import Request"),
        ("rollout.tools.top", "import uvicorn"),
        ("rollout.integrations.verl.settings", "from verl.workers.config import RolloutConfig"),
        ("rollout.protocol.messages", "from ..client import client"),
        ("rollout.monitoring.metrics", "from ..worker.worker import Worker"),
        ("rollout.worker.worker", "from ..tools import cli"),
        ("rollout.tools.verify", "from ...engine.engine import Engine\nfrom ... import weight_sync"),
        ("rollout.nobody_knows.at_all", "import math"),
    ],
)
def test_a_planted_violation_is_found(module: str, line: str) -> None:
    sources = dict.fromkeys(["errors", "engine.request", "engine.config", "engine.engine", "engine.models.loader"], "")
    sources |= dict.fromkeys(["engine.running.model_runner", "engine.scheduling.scheduler"], "")
    sources |= dict.fromkeys(["engine.cache.prefix_cache"], "")
    sources |= dict.fromkeys(["kernels.cpu.backend", "kernels.cpu.library"], "")
    sources |= dict.fromkeys(["engine.__init__", "weight_sync.__init__", "rollout.__init__"], "")
    sources |= dict.fromkeys(["rollout.client.client", "rollout.publisher.publisher", "rollout.worker.worker"], "")
    sources |= dict.fromkeys(["weight_sync.worker.receiver", "weight_sync.trainer.sender"], "")
    assert violations(sources) == []
    faults = violations(sources | {module: line})
    assert len(faults) == 1 and module in faults[0]


@pytest.mark.parametrize("module", LIGHT)
def test_a_client_needs_neither_torch_nor_transformers(module: str) -> None:
    code = f"import sys, {module}; print(*[m for m in ('torch', 'transformers', {module!r}) if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [module]
