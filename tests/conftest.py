"""Fixtures and settings that all tests share."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from filelock import FileLock

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported; no test may depend on the network
# Read when torch is imported. Tests run several processes on few cores, where busy-waiting threads would starve each
# other.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# Read when a Triton kernel is created. This suite interprets all kernels on the CPU; `make test-gpu` runs the kernels
# on a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

import machines  # noqa: E402, I001
import triton_interpreter  # noqa: E402
from conversion import convert_smollm2  # noqa: E402
from forked import ranks_are_forked, workers_are_forked  # noqa: E402
from tiny import FAMILIES, HYBRID, MIXTURES, WINDOWED, make_tiny_model  # noqa: E402
from trueroll.engine.models.smollm2 import smollm2_folder  # noqa: E402
from trueroll.kernels.cpu.library import Library, load_library  # noqa: E402

pytest_plugins = ["matrix", "proofs", "whole_run"]
triton_interpreter.install()
hypothesis.settings.register_profile("trueroll", deadline=None)
hypothesis.settings.load_profile("trueroll")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Disable garbage collection while tests are collected. Afterwards, exempt the collected tests from garbage
    collection.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """At the end of the process, free objects that libraries would otherwise report as leaked."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the tests that did not run because they need another machine, with one line per reason."""
    write = terminalreporter.write_line
    if missing := machines.missing_instruction_sets():
        write(f"kernels were not run for instruction sets that this machine lacks: {', '.join(missing)}")
    reports = terminalreporter.stats.get("skipped", [])
    for reason, count in Counter(report.longrepr[2] for report in reports).most_common():
        write(f"{count} tests: {reason}")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen2", tmp_path_factory.mktemp("models") / "tiny-qwen2")


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("models") / "tiny-qwen3")


@pytest.fixture(scope="session")
def tiny_qwen3_5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid model: three of four layers are recurrent."""
    return make_tiny_model("qwen3_5", tmp_path_factory.mktemp("models") / "tiny-qwen3_5")


@pytest.fixture(params=FAMILIES)
def tiny_model(request: pytest.FixtureRequest) -> Path:
    """The folder of each family's tiny float32 model, in turn."""
    return request.getfixturevalue(f"tiny_{request.param}")


@pytest.fixture(scope="session")
def windowed_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each windowed family's tiny float32 model."""
    folder = tmp_path_factory.mktemp("models")
    return {family: make_tiny_model(family, folder / f"tiny-{family}") for family in WINDOWED}


@pytest.fixture(params=WINDOWED)
def windowed_model(request: pytest.FixtureRequest, windowed_models: dict[str, Path]) -> Path:
    """Each folder of `windowed_models`, in turn."""
    return windowed_models[request.param]


@pytest.fixture(scope="session")
def hybrid_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of the tiny float32 model of each family with gated delta nets."""
    folder = tmp_path_factory.mktemp("models")
    return {family: make_tiny_model(family, folder / f"tiny-{family}") for family in HYBRID}


@pytest.fixture(params=HYBRID)
def hybrid_model(request: pytest.FixtureRequest, hybrid_models: dict[str, Path]) -> Path:
    """Each folder of `hybrid_models`, in turn."""
    return hybrid_models[request.param]


@pytest.fixture(scope="session")
def mixture_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of the tiny float32 model of each family with experts."""
    folder = tmp_path_factory.mktemp("models")
    return {family: make_tiny_model(family, folder / f"tiny-{family}") for family in MIXTURES}


@pytest.fixture(params=MIXTURES)
def mixture_model(request: pytest.FixtureRequest, mixture_models: dict[str, Path]) -> Path:
    """Each folder of `mixture_models`, in turn."""
    return mixture_models[request.param]


@pytest.fixture(params=FAMILIES + WINDOWED)
def any_model(request: pytest.FixtureRequest) -> Path:
    """The folder of every tiny float32 model, in turn."""
    if request.param in FAMILIES:
        return request.getfixturevalue(f"tiny_{request.param}")
    return request.getfixturevalue("windowed_models")[request.param]


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that runs on a CPU, in turn."""
    return request.param


@pytest.fixture
def native_library() -> Iterator[Library]:
    """The library of native kernels. A test may choose another instruction set. The old instruction set is restored
    after the test.
    """
    library = load_library()
    before = library.instruction_set()
    yield library
    library.choose(before)


@pytest.fixture(scope="module")
def forked_workers() -> Iterator[None]:
    """Fork the workers of a module instead of starting new interpreters, which is much faster. Do not use this fixture
    in tests of the start itself.
    """
    with workers_are_forked():
        yield


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Fork the other ranks of a module's engines, as `forked_workers` forks workers."""
    with ranks_are_forked():
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put the keys for tcp addresses on loopback into a folder of the session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the embedded model, converted once per test run."""
    cache = Path(os.environ["TRUEROLL_CACHE"])
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "conversion.lock"):
        if not any(path.is_dir() for path in cache.glob("smollm2*")):
            convert_smollm2(cache)
    return smollm2_folder()
