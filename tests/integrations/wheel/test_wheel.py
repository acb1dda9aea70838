"""The wheel in dist, in an environment without a compiler: it installs, runs, and has the bits of the source build.

`make test-wheel` builds the wheel first. The packages that the wheel requires come from the environment of the tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from trueroll.kernels.cpu import library

ROOT = Path(__file__).parents[3]
SOURCE_BUILD = Path(library.__file__).with_name("_native.so")
DRIVER = ROOT / "tests/kernels/cpu/native/driver.cpp"
NOWHERE = "/nowhere"
COMPILERS = ("gcc", "g++", "cc", "c++", "clang", "make")
WITHOUT_COMPILER = os.environ | {"PATH": NOWHERE, "CC": f"{NOWHERE}/cc", "CXX": f"{NOWHERE}/c++", "PYTHONPATH": ""}
FIND_COMPILERS = "import shutil, sys; print([name for name in sys.argv[1:] if shutil.which(name)])"
GENERATE = """
import sys
from pathlib import Path
import numpy as np
from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.request import GenerateRequest, SamplingParams

engine = Engine(EngineConfig(model=sys.argv[1], device="cpu", num_blocks=64, num_threads=1))
params = SamplingParams(n=4, temperature=1.0, max_tokens=12, seed=7, ignore_eos=True)
engine.add(GenerateRequest("0", np.arange(1, 90, dtype=np.int32), params))
samples = []
while engine.has_unfinished:
    samples += engine.step()
for sample in sorted(samples, key=lambda sample: sample.index):
    print(list(sample.token_ids), sample.logprobs.view(np.int32).tolist())
loaded = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/_native" in line]
print(engine.info.backend, *sorted(set(loaded)))
"""


def run(*command: str | Path, environment: dict[str, str] | None = None) -> str:
    """Run a command that must succeed, and return its output."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel() -> Path:
    [wheel] = (ROOT / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def packages(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of a new environment: the wheel, in front of the packages of the tests. pip finds no compiler."""
    folder = tmp_path_factory.mktemp("wheel") / "env"
    venv.create(folder)
    pip = [sys.executable, "-P", "-m", "pip", "--python", folder / "bin/python", "install", "--no-index", "--no-deps"]
    run(*pip, wheel, environment=WITHOUT_COMPILER)
    [packages] = folder.glob("lib/python*/site-packages")
    behind = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (packages / "behind.pth").write_text(behind)
    return packages


@pytest.fixture(scope="module")
def programs(packages: Path) -> Path:
    """The folder of the environment's `python` and `trueroll`."""
    return packages.parents[2] / "bin"


def test_one_wheel_serves_every_python_of_the_metadata(wheel: Path) -> None:
    assert re.fullmatch(r"trueroll-[\d.]+-py3-none-manylinux_2_\d+_x86_64\.whl", wheel.name), wheel.name
    contents = zipfile.ZipFile(wheel)
    libraries = [name for name in contents.namelist() if ".so" in name]
    assert libraries == ["trueroll/kernels/cpu/_native.so"], "nothing else is bundled"
    [metadata] = [name for name in contents.namelist() if name.endswith(".dist-info/METADATA")]
    assert "Requires-Python: <3.15,>=3.11" in contents.read(metadata).decode()


def test_every_kernel_has_the_bits_of_the_source_build(packages: Path, tmp_path: Path) -> None:
    """The driver calls every function of the libraries, with each instruction set of this machine."""
    compiled = tmp_path / "driver.o"
    run("g++", "-std=c++17", "-O0", "-pthread", "-c", DRIVER, "-o", compiled)
    digests = []
    for number, built in enumerate((SOURCE_BUILD, packages / "trueroll/kernels/cpu/_native.so")):
        driver = tmp_path / f"driver-{number}"
        run("g++", "-pthread", compiled, built, "-o", driver)
        digests.append(dict(line.split() for line in run(driver).splitlines()))
    assert list(digests[0]) == library.load_library().instruction_sets()
    assert digests[0] == digests[1]


def test_a_sample_has_the_bits_of_the_source_build(packages: Path, programs: Path, tiny_qwen3_5: Path) -> None:
    assert run(programs / "python", "-c", FIND_COMPILERS, *COMPILERS, environment=WITHOUT_COMPILER) == "[]\n"
    script = ("-P", "-c", GENERATE, tiny_qwen3_5)
    *of_wheel, loaded = run(programs / "python", *script, environment=WITHOUT_COMPILER).splitlines()
    *of_source, other = run(sys.executable, *script).splitlines()
    assert loaded == f"cpu {packages / 'trueroll/kernels/cpu/_native.so'}", "premise: the library of the wheel"
    assert other == f"cpu {SOURCE_BUILD.resolve()}", "premise: the library of the source build"
    assert len(of_wheel) == 4 and of_wheel == of_source


def test_the_command_starts_a_worker_without_a_compiler(programs: Path, tiny_qwen3: Path) -> None:
    arguments = (str(tiny_qwen3), "--prompt", "<7> <8>", "--max-tokens", "4")
    assert "<7> <8>" in run(programs / "trueroll", "generate", *arguments, environment=WITHOUT_COMPILER)
