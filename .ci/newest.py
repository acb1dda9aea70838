"""List the packages of .venv that pyproject.toml allows in a newer version: `newest.py FILE`.

FILE gets the newest allowed version of each. The package index is asked about the dependencies of trueroll and of the
extras in EXTRAS. An indirect requirement is upgraded only if a direct requirement needs a newer version. torch and
triton are left out because they are large. .venv already has the newest minor release that their ranges allow. FILE is
written only if it changes, so that make reinstalls only after a change.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

EXTRAS = ("demo", "grpo", "http", "ray", "trl")
LEFT_OUT = ("torch", "triton", "trueroll[", "reasoning-gym")
HEADER = "# The newest allowed versions that differ from those of .venv, found by .ci/newest.py.\n"


def wanted() -> list[str]:
    """Return the requirements of pyproject.toml that are tested with their newest versions."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for name in EXTRAS for line in project["optional-dependencies"][name])]
    return [line for line in lines if not line.startswith(LEFT_OUT)]


def resolve(python: str, requirements: list[str]) -> list[str]:
    """Return `name==version` for each package that `pip install --upgrade` would install for the requirements."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [python, "-m", "pip", "install", "--quiet", "--dry-run", "--upgrade", "--report", str(report)]
        environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
        subprocess.run([*command, *requirements], check=True, env=environment, stderr=subprocess.DEVNULL)
        found = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    return sorted(f"{each['name']}=={each['version']}" for each in found)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    text = HEADER + "".join(f"{line}\n" for line in resolve(sys.executable, wanted()))
    if not file.exists() or file.read_text() != text:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    print(f"newest allowed: {', '.join(text.splitlines()[1:]) or 'the same as in .venv'}")
