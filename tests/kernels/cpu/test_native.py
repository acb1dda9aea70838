"""The native kernels under sanitizers: no access beyond a buffer, no undefined behaviour, no race.

The driver calls every function of the C interface with buffers of exactly the required sizes. The driver uses the
instruction set that trueroll selects on this machine. `make test-all` uses all instruction sets of the machine, and
emulated tiles.
"""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import thinned

from trueroll.errors import ConfigError
from trueroll.kernels.cpu import obstacle
from trueroll.kernels.cpu.library import Library, load_library
from trueroll.kernels.specs import LayerSpec

from ..inputs import EXPERTS, decoder_spec, layer_spec
from .native_build import ROOT, build

DRIVER = Path(__file__).parent / "native" / "driver.cpp"
POOL_DRIVER = DRIVER.with_name("pool_driver.cpp")

pytestmark = pytest.mark.timeout(900)  # compiling with sanitizers takes a minute on two idle cores


ISAS = ("amx_bf16", "avx512_bf16", "avx512", "avx2", "portable")


def run(driver: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([driver, *arguments], capture_output=True, text=True, preexec_fn=_keep_addresses_in_order)


def _keep_addresses_in_order() -> None:
    """Turn off address randomization: ThreadSanitizer does not start if a kernel places memory too randomly."""
    ctypes.CDLL(None).personality(0x0040000)


@pytest.mark.parametrize("which", ["the best", "all"])
@thinned(lambda which: which == "the best")
def test_no_access_beyond_a_buffer_and_no_undefined_behaviour(which: str, tmp_path: Path) -> None:
    available = load_library().instruction_sets()
    tested = {available[0]} if which == "the best" else {"amx_bf16", *available}
    # -O1 nearly doubles the compile time and makes the driver only a little faster.
    flags = ["-Og", "-g1", "-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"]
    others = set(ISAS) - tested
    build(tmp_path / "driver", flags, [DRIVER], others)
    misused = run(tmp_path / "driver", "misuse")
    assert misused.returncode != 0 and "heap-buffer-overflow" in misused.stderr, "the sanitizer finds the error"
    done = run(tmp_path / "driver", *others)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()[::2]) == tested


def test_no_race_between_threads(tmp_path: Path) -> None:
    """One instruction set suffices, because all instruction sets distribute work to threads with the same code."""
    others = set(ISAS) - {"portable"}
    build(tmp_path / "driver", ["-O1", "-g1", "-fsanitize=thread"], [DRIVER], others)
    misused = run(tmp_path / "driver", "misuse")
    assert misused.returncode != 0 and "data race" in misused.stderr, "the sanitizer finds the race"
    done = run(tmp_path / "driver", *others)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[::2] == ["portable"]


@pytest.fixture(scope="module")
def pool_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver of the thread pool, built without the other parts of the library."""
    driver = tmp_path_factory.mktemp("pool") / "driver"
    sources = [POOL_DRIVER, ROOT / "kernels" / "cpu" / "native" / "pool.cpp"]
    subprocess.run(["g++", "-std=c++17", "-O1", "-pthread", *sources, "-o", driver], check=True)
    return driver


@pytest.mark.parametrize("promise", ["sleep", "keep"])
def test_waiting_threads_sleep_and_are_reused(pool_driver: Path, promise: str) -> None:
    assert subprocess.run([pool_driver, promise]).returncode == 0


def test_an_unknown_instruction_set_is_refused() -> None:
    library = load_library()
    before = library.instruction_set()
    with pytest.raises(ConfigError, match="must be one of this machine's instruction sets: .*portable.* .got 'sse2'"):
        library.choose("sse2")
    assert library.instruction_set() == before


@pytest.mark.parametrize(
    "text,fault",
    [
        ("int nothing;", "trueroll_declarations"),
        (
            'extern "C" const char* trueroll_declarations() { return "void trueroll_pack(int k);"; }',
            "other arguments",
        ),
    ],
)
def test_a_library_of_other_functions_is_refused(text: str, fault: str, tmp_path: Path) -> None:
    source, path = tmp_path / "other.cpp", tmp_path / "other.so"
    source.write_text(text)
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    with pytest.raises(OSError, match=f"other.so is from a different version: .*{fault}"):
        Library(path)


def test_a_function_has_the_declared_arguments_or_does_not_compile(tmp_path: Path) -> None:
    source = tmp_path / "other.cpp"
    include = f'#include "{ROOT}/kernels/cpu/native/api.h"'
    for arguments, fault in (("int, const void*, void*, long, long", ""), ("int", "conflicting declaration")):
        source.write_text(f'{include}\nextern "C" void trueroll::trueroll_pack({arguments}) {{}}')
        done = subprocess.run(["g++", "-std=c++17", "-fsyntax-only", source], capture_output=True, text=True)
        assert (done.returncode != 0) == bool(fault) and fault in done.stderr


@pytest.mark.parametrize("count", [4, 6])
def test_a_call_with_another_number_of_arguments_is_refused(count: int) -> None:
    with pytest.raises(TypeError, match=f"takes 5 arguments .{count} given"):
        load_library().pack(*[0] * count)


def test_one_unsupported_layer_rules_out_the_kernels() -> None:
    layers = [layer_spec(size=size) for size in (16, 20, 512)]
    odd = [layer_spec(experts=replace(EXPERTS, intermediate_size=size)) for size in (48, 40)]

    def found(*layers: LayerSpec, hidden: int = 130, device: str = "cpu", **changes: Any) -> str:
        spec = replace(decoder_spec(*layers, hidden=hidden), **changes)
        return obstacle(torch.device(device), torch.float32, spec)

    assert "a multiple of 16 up to 512 (got 20)" in found(*layers)
    assert found(layers[0], layers[2]) == ""
    assert found(layers[0], device="cuda") == "native CPU kernels do not run on cuda"
    assert "intermediate and hidden sizes that are multiples of 16 (got 40)" in found(*odd, hidden=144)
    assert "(got 130); use the backend 'reference'" in found(odd[0], hidden=130)
    assert found(odd[0], hidden=144) == "" == found(layers[0], hidden=130)
