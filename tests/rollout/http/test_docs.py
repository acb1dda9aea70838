"""docs/http.md names every path, field, option, metric and error code."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import MagicMock

from prometheus_client.metrics_core import Metric

from trueroll.rollout.http import app, guard, pages, server, staging
from trueroll.rollout.http.bodies import Bodies
from trueroll.rollout.http.chat import ChatFields
from trueroll.rollout.http.completions import CompletionFields
from trueroll.rollout.http.config import API_KEY_VARIABLE, HttpConfig
from trueroll.rollout.http.connections import Connections
from trueroll.rollout.http.errors import STATUSES
from trueroll.rollout.http.fields import IGNORED, OFF, SAMPLING
from trueroll.rollout.http.generate import GenerateFields
from trueroll.rollout.http.paths import SESSION, SESSIONS
from trueroll.rollout.http.sglang import control, fields, weights
from trueroll.rollout.http.sglang.routes import sglang_routes
from trueroll.rollout.http.tinker import endpoints as tinker_endpoints
from trueroll.rollout.http.tinker import fields as tinker_fields
from trueroll.rollout.http.tinker import promises, targets
from trueroll.rollout.http.tinker.routes import REST, tinker_routes
from trueroll.rollout.http.vllm import fields as vllm_fields
from trueroll.rollout.http.vllm.routes import vllm_routes
from trueroll.weight_sync.deltas import reader

DOCS = Path(__file__).parents[3] / "docs"
PAGE, SGLANG_PAGE, VLLM_PAGE, TINKER_PAGE = (
    (DOCS / f"{name}.md").read_text() for name in ("http", "sglang", "skyrl", "tinker")
)


def words(page: str) -> set[str]:
    return {word for code in re.findall(r"`([^`\n]+)`", page) for word in re.findall(r"[\w./-]+", code)}


WORDS, SGLANG_WORDS, VLLM_WORDS, TINKER_WORDS = map(words, (PAGE, SGLANG_PAGE, VLLM_PAGE, TINKER_PAGE))
SGLANG_ROUTES = [*sglang_routes(*[MagicMock()] * 6)]
VLLM_ROUTES = [*vllm_routes(MagicMock())]
TINKER_ROUTES = [*tinker_routes(MagicMock())]


def test_every_field_is_described() -> None:
    named = {*SAMPLING, "seed", *IGNORED, *OFF}
    for kind in (CompletionFields, ChatFields, GenerateFields):
        named |= kind.model_fields.keys()
    assert named - WORDS == set()


def test_every_option_is_described() -> None:
    options = {f"--{name.replace('_', '-')}" for name in HttpConfig.model_fields if name != "address"}
    assert (options | {API_KEY_VARIABLE}) - WORDS == set()


def test_every_path_is_described() -> None:
    source = Path(app.__file__).read_text()
    paths = set(re.findall(r'Route\(\s*"([^"]+)"', source)) | pages.FILES.keys() | {SESSION, SESSIONS}
    paths |= {f"{SESSION}{path}" for path in re.findall(r'Route\(\s*f"{SESSION}([^"]+)"', source)}
    named = {path.replace("{name:path}", "NAME").replace("{id}", "ID") for path in paths}
    assert len(named) > 20 and named - WORDS == set()
    of_sglang = {path for path, _, _ in SGLANG_ROUTES}
    assert len(of_sglang) > 20 and of_sglang - SGLANG_WORDS == set()
    of_vllm = {path for path, _, _ in VLLM_ROUTES}
    assert len(of_vllm) > 10 and of_vllm - VLLM_WORDS == set()
    of_tinker = {path.replace("{id}", "ID") for path, _, _ in TINKER_ROUTES} - {REST}
    assert len(of_tinker) > 10 and of_tinker - TINKER_WORDS == set()
    assert guard.WORK_PATHS | guard.OPEN_PATHS <= paths | of_sglang | of_tinker


def test_every_field_of_sglang_is_described() -> None:
    named = {*fields.SHARED, *fields.IGNORED, *fields.OFF, *fields.SAMPLING_OFF, *weights.IGNORED, *weights.OFF}
    kinds = (fields.GenerateFields, fields.SamplingFields, fields.CustomParams, weights.PullFields)
    kinds += (weights.FromDiskFields, control.AbortFields, control.PauseFields, control.ContinueFields)
    for kind in (*kinds, control.MemoryFields):
        named |= kind.model_fields.keys()
    assert named - SGLANG_WORDS == set()


def test_every_field_of_vllm_is_described() -> None:
    kinds = (vllm_fields.InitFields, vllm_fields.InitInfo, vllm_fields.VersionInfo, vllm_fields.PathInfo)
    kinds += (vllm_fields.InfoFields, vllm_fields.FinishFields, vllm_fields.LoadFields)
    named = {name for kind in kinds for name in kind.model_fields}
    assert named - VLLM_WORDS == set()
    assert f"within {staging.STAGED_SECONDS / 60:.0f} minutes" in VLLM_PAGE and str(reader.MOST_FILES) in VLLM_PAGE


def test_every_field_of_tinker_is_described() -> None:
    named = {*tinker_fields.IGNORED, *tinker_fields.OFF, *tinker_endpoints.SESSION_LABELS}
    kinds = (tinker_fields.ChunkFields, tinker_fields.PromptFields, tinker_fields.SamplingFields)
    kinds += (tinker_fields.SampleFields, targets.TensorFields, tinker_endpoints.SamplingSessionFields)
    for kind in (*kinds, tinker_endpoints.RetrieveFields, tinker_endpoints.CancelFields):
        named |= kind.model_fields.keys()
    assert named - TINKER_WORDS == set()
    metrics = {family.name for family in promises.Promises(HttpConfig(address="ipc://x")).collect()}
    assert len(metrics) == 3 and metrics - TINKER_WORDS == set()
    for seconds in (promises.POLL_SECONDS, promises.TOLD_SECONDS, promises.SILENT_SECONDS):
        assert f" {seconds:.0f} s" in TINKER_PAGE


def test_every_code_and_metric_is_described() -> None:
    not_met = {"invalid_config", "invalid_model", "unknown_request", "id_conflict"}
    assert {kind.code for kind in STATUSES} - not_met - WORDS == set()
    config = HttpConfig(address="ipc://x")
    parts = guard.Counters(), Bodies(config), Connections(app.Starlette(), config)
    families: list[Metric] = [family for part in parts for family in part.collect()]
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert len(names) == 8 and names - WORDS == set()
    assert f"after {server.WORKER_SECONDS:.0f} s" in PAGE
