"""docs/http.md names every path, field, option, metric and error code."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.metrics_core import Metric

from trueroll.rollout.http import app, guard, pages, server
from trueroll.rollout.http.bodies import Bodies
from trueroll.rollout.http.chat import ChatFields
from trueroll.rollout.http.completions import CompletionFields
from trueroll.rollout.http.config import API_KEY_VARIABLE, HttpConfig
from trueroll.rollout.http.connections import Connections
from trueroll.rollout.http.errors import STATUSES
from trueroll.rollout.http.fields import IGNORED, OFF, SAMPLING
from trueroll.rollout.http.generate import GenerateFields
from trueroll.rollout.http.paths import SESSION, SESSIONS

PAGE = (Path(__file__).parents[3] / "docs" / "http.md").read_text()
WORDS = {word for code in re.findall(r"`([^`\n]+)`", PAGE) for word in re.findall(r"[\w./-]+", code)}


def test_every_field_is_described() -> None:
    fields = {*SAMPLING, "seed", *IGNORED, *OFF}
    for kind in (CompletionFields, ChatFields, GenerateFields):
        fields |= kind.model_fields.keys()
    assert fields - WORDS == set()


def test_every_option_is_described() -> None:
    options = {f"--{name.replace('_', '-')}" for name in HttpConfig.model_fields if name != "address"}
    assert (options | {API_KEY_VARIABLE}) - WORDS == set()


def test_every_path_is_described() -> None:
    source = Path(app.__file__).read_text()
    paths = set(re.findall(r'Route\(\s*"([^"]+)"', source)) | pages.FILES.keys() | {SESSION, SESSIONS}
    paths |= {f"{SESSION}{path}" for path in re.findall(r'Route\(\s*f"{SESSION}([^"]+)"', source)}
    words = {path.replace("{name:path}", "NAME").replace("{id}", "ID") for path in paths}
    assert len(words) > 20 and words - WORDS == set() and guard.WORK_PATHS | guard.OPEN_PATHS <= paths


def test_every_code_and_metric_is_described() -> None:
    not_met = {"invalid_config", "invalid_model", "unknown_request", "id_conflict"}
    assert {kind.code for kind in STATUSES} - not_met - WORDS == set()
    config = HttpConfig(address="ipc://x")
    parts = guard.Counters(), Bodies(config), Connections(app.Starlette(), config)
    families: list[Metric] = [family for part in parts for family in part.collect()]
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert len(names) == 8 and names - WORDS == set()
    assert f"after {server.WORKER_SECONDS:.0f} s" in PAGE
