"""Every option, metric, file and port named in examples/deploy exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from trueroll.rollout.http.config import HttpConfig
from trueroll.rollout.tools.cli import app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
METRICS = set(re.findall(r"^\| `(trueroll_\w+)`", (ROOT / "docs" / "operations.md").read_text(), re.M))


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


@pytest.mark.parametrize("service", ["worker", "http"])
def test_every_option_of_a_command_exists(service: str) -> None:
    name, *words = load("compose.yaml")["services"][service]["command"]
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    assert [word for word in words if word.startswith("--") and word not in known] == []


def test_every_metric_of_a_rule_exists() -> None:
    [group] = load("rules.yml")["groups"]
    named = {name for rule in group["rules"] for name in re.findall(r"trueroll_\w+", rule["expr"])}
    assert len(named) == 6 and named <= METRICS


def test_every_mounted_file_exists_and_ports_agree() -> None:
    services = load("compose.yaml")["services"]
    mounted = [volume.split(":")[0] for each in services.values() for volume in each["volumes"]]
    files = [file for file in mounted if file.startswith(".")]
    assert len(files) == 5 and [file for file in files if not (DEPLOY / file).is_file()] == []
    [job] = load("prometheus.yml")["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    command = services["worker"]["command"]
    assert target == f"127.0.0.1:{command[command.index('--metrics-port') + 1]}"
    assert f"127.0.0.1:{HttpConfig.model_fields['port'].default}:8000" in services["worker"]["ports"]


def test_published_ports_are_on_loopback_and_the_user_is_not_root() -> None:
    ports = load("compose.yaml")["services"]["worker"]["ports"]
    assert len(ports) == 3 and all(port.startswith("127.0.0.1:") for port in ports)
    assert re.findall(r"^USER (\d+)$", (DEPLOY / "Dockerfile").read_text(), re.M) == ["10001"]
