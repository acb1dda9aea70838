"""Every Triton kernel, with every tile of its table, compiled for three generations of GPUs without a GPU.

`examples/benchmarks/triton_report.py` records and compiles the kernels in a separate process, because kernels of the
test process are made for the interpreter. Every run compiles one specialization of each kernel for sm_90. `make
test-all` compiles enough specializations to cover all tiles and constants of the models. For sm_90, `make test-all`
compiles all specializations of Qwen2.5-7B, of delta nets and of gpt-oss-20b's experts. `python
examples/benchmarks/triton_report.py --all` compiles every specialization for every target, which no test does.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from matrix import thinned

from trueroll.kernels.triton import backend, experts, products

ROOT = Path(__file__).parents[3]
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# Kernels that may spill registers on a target: the reason, and the maximum spilled bytes per thread.
NOT_TUNED = "the kernels are compiled for sm_100, but their tiles were chosen for sm_90"
NOT_FOR_80 = (
    "tiles with two accumulators were chosen for sm_90, which multiplies from shared memory, not from registers"
)
SPILLS_ALLOWED = {
    ("attention._prefill_kernel", 100): (NOT_TUNED, 208),
    ("attention._prefill_kernel", 80): (NOT_FOR_80, 264),
    ("products._linear_kernel", 100): (NOT_TUNED, 56),
    ("experts._add_kernel", 100): (NOT_TUNED, 8),
    ("attention._fold_kernel", 80): ("in one form, for heads of 80", 8),
    ("products._linear_kernel", 80): (NOT_FOR_80, 240),
    ("products._gate_up_kernel", 80): (NOT_FOR_80, 240),
    ("products._parts_kernel", 80): (NOT_FOR_80, 240),
    ("experts._down_kernel", 80): (NOT_FOR_80, 128),
}
# The same for latent attention, which sm_80 does not run: a program sums 64 rows of 512 values.
SPILLS_OF_LATENTS = {
    ("attention._decode_kernel", 90): 144,
    ("attention._decode_kernel", 100): 424,
    ("attention._prefill_kernel", 90): 1144,
    ("attention._prefill_kernel", 100): 1136,
    ("attention._fold_kernel", 90): 56,
    ("attention._fold_kernel", 100): 80,
}

IN_A_WARP = "#ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [1, 32], warpsPerCTA = [1, 1], order = [1, 0]}>"

Compiled = dict[str, Any]

pytestmark = [
    pytest.mark.timeout(900),  # the first test waits until everything is compiled: several minutes on one idle core
    thinned(lambda compiled="--few", **_: compiled == "--few"),
]

TUNED_FOR = 90
"""The target that tiles were chosen for."""


@pytest.fixture(scope="module", params=["--few", "--json"], ids=["one form of each", "all that differ"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    command = [str(ROOT / "examples/benchmarks/triton_report.py"), request.param]
    return run_compiler(command, tmp_path_factory.mktemp("triton"))


of_all = pytest.mark.parametrize("compiled", ["--json"], ids=["all that differ"], indirect=True, scope="module")


def run_compiler(script: list[str], cache: Path) -> Any:
    """Return the JSON output of a script that compiles kernels into an empty folder `cache`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run([sys.executable, *script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def kernels_of(module: Path) -> set[str]:
    """Return the kernels of a module: functions decorated with `exact_jit`."""
    functions = [node for node in ast.parse(module.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {f"{module.stem}.{f.name}" for f in functions if "exact_jit" in map(ast.unparse, f.decorator_list)}


def compiled_of(module: str, compiled: list[Compiled]) -> list[Compiled]:
    return [c for c in compiled if c["kernel"].startswith(f"{module}.")]


def is_latent(compiled: Compiled) -> bool:
    return compiled["kernel"].startswith("attention.") and compiled["constants"]["SIZE"] == 512


def most_spilled(compiled: Compiled) -> int:
    if is_latent(compiled):
        return SPILLS_OF_LATENTS[compiled["kernel"], compiled["capability"]]
    _, most = SPILLS_ALLOWED.get((compiled["kernel"], compiled["capability"]), ("", 0))
    return most


def test_every_kernel_is_compiled(compiled: list[Compiled], request: pytest.FixtureRequest) -> None:
    kernels = set().union(*(kernels_of(path) for path in (ROOT / "kernels/triton").glob("*.py")))
    targets = (TUNED_FOR,) if request.node.callspec.params["compiled"] == "--few" else SHARED_MEMORY
    assert {(c["kernel"], c["capability"]) for c in compiled} == {(name, sm) for name in kernels for sm in targets}


TABLES = {"products": (*products.TILES, *products.CUT_TILES), "experts": experts.TILES}


@of_all
@pytest.mark.parametrize("module", TABLES)
def test_every_tile_of_the_tables_is_compiled_for_every_target(module: str, compiled: list[Compiled]) -> None:
    found = {
        (
            c["capability"],
            *(c["constants"].get(name, 0) for name in ("FEATURES", "TOKENS", "MORE", "DEPTH")),
            c["warps"],
            c["stages"],
        )
        for c in compiled_of(module, compiled)
        if "FEATURES" in c["constants"]
    }
    tiles = {*TABLES[module], products.NARROW_TILE}
    assert found == {(sm, *tile) for sm in SHARED_MEMORY for tile in tiles}


@of_all
def test_every_value_of_a_constant_and_every_type_is_compiled_for_every_target(compiled: list[Compiled]) -> None:
    """For the tuned target, every combination of one model is also compiled. sm_80 cannot run latent attention."""
    found = defaultdict(set)
    for c in compiled:
        if is_latent(c):
            continue
        found[c["capability"]] |= {(c["kernel"], *item) for item in (*c["constants"].items(), *c["types"].items())}
    assert all(found[sm] == found[TUNED_FOR] for sm in SHARED_MEMORY) and len(found[TUNED_FOR]) > 100
    latents = {(c["kernel"], c["capability"]) for c in compiled if is_latent(c)}
    assert latents == {*SPILLS_OF_LATENTS}
    number = Counter(c["capability"] for c in compiled)
    assert number.keys() == {*SHARED_MEMORY} and all(number[TUNED_FOR] > number[sm] for sm in (80, 100))


def test_only_known_kernels_spill(compiled: list[Compiled]) -> None:
    unexpected = [c for c in compiled if c["spilled"] > most_spilled(c)]
    assert [(c["kernel"], c["capability"], c["spilled"], c["constants"]) for c in unexpected] == []


def test_shared_memory_suffices(compiled: list[Compiled]) -> None:
    assert [c for c in compiled if c["shared"] > SHARED_MEMORY[c["capability"]]] == []


def test_kernels_know_only_types_and_alignment_of_arguments(compiled: list[Compiled]) -> None:
    """Triton specializes a kernel on the alignment of pointers. For arguments that are numbers, it uses only their
    types.
    """
    for c in compiled:
        assert c["signature"] == c["types"], c
        assert c["aligned"] == [name for name, kind in c["types"].items() if kind.startswith("*")], c


def without_columns(instruction: str) -> str:
    return re.sub(r"n\d+(?=k)", "", instruction)


def is_coded(compiled: Compiled) -> bool:
    return compiled["constants"].get("FORMAT") is not None


def test_formats_are_compiled(compiled: list[Compiled], request: pytest.FixtureRequest) -> None:
    """On sm_90, the values of codes are the factor that comes from registers, and nothing else changes."""
    found = [c for c in compiled if is_coded(c) and c["capability"] == TUNED_FOR]
    few = request.node.callspec.params["compiled"] == "--few"
    assert {c["constants"]["FORMAT"] for c in found} == ({"fp8", "nvfp4"} if few else backend.FORMATS)
    assert {without_columns(each) for c in found for each in c["instructions"]} == {"wgmma m64k16 kWidth=2"}


@of_all
@pytest.mark.parametrize(
    ("module", "coded", "on_90"),
    [
        ("products", False, "wgmma m64k16"),
        ("products", True, "wgmma m64k16 kWidth=2"),
        ("experts", False, "wgmma m64k16"),
        ("experts", True, "wgmma m64k16 kWidth=2"),
        ("attention", False, "wgmma m64k16 kWidth=2"),
    ],
)
def test_products_keep_to_one_matrix_instruction(
    module: str, coded: bool, on_90: str, compiled: list[Compiled]
) -> None:
    """On sm_90, the number of columns of an instruction depends on the number of tokens, keys or elements of a head,
    and may vary. On sm_90, attention and products with codes keep one factor in registers.
    """
    found = defaultdict(set)
    for c in compiled_of(module, compiled):
        if is_coded(c) == coded:
            found[c["capability"]].update(c["instructions"])
    assert {without_columns(instruction) for instruction in found[90]} == {on_90}
    assert len(found[90]) > 1, "premise: the number of columns varies"
    assert found[80] == {"mma m16n8k16 kWidth=2"}
    assert {instruction.split()[0] for instruction in found[100]} == {"tcgen05"}


@of_all
def test_reductions_over_keys_have_one_layout(compiled: list[Compiled]) -> None:
    """All kernels use the same layout for heads of the same size, because the layout determines the order of a sum."""
    layouts = defaultdict(set)
    for c in compiled_of("attention", compiled):
        if c["instructions"]:
            layouts[c["capability"], c["constants"]["SIZE"]].add(tuple(c["reductions"]))
    assert {capability for capability, _ in layouts} == {*SHARED_MEMORY}
    assert all(len(found) == 1 and len(*found) == 1 for found in layouts.values()), layouts


@of_all
def test_the_state_of_a_delta_net_is_summed_in_one_layout(compiled: list[Compiled]) -> None:
    """For decodes and prompts with any number of heads, each thread of one warp holds four keys."""
    layouts = defaultdict(set)
    for c in compiled_of("recurrence", compiled):
        if c["kernel"].endswith("_delta_rule_kernel"):
            layouts[c["capability"]].add((c["warps"], *c["reductions"]))
    forms = {
        (c["constants"]["LISTED"], c["constants"]["HEADS"])
        for c in compiled_of("recurrence", compiled)
        if c["capability"] == 90 and "HEADS" in c["constants"]
    }
    assert forms == {(listed, heads) for listed in (True, False) for heads in (16, 48)}
    assert layouts.keys() == {*SHARED_MEMORY} and all(len(found) == 1 for found in layouts.values()), layouts
    assert {found for [found] in layouts.values()} == {(1, f"1x128 of {IN_A_WARP}", f"8x128 of {IN_A_WARP}")}


MULTIPLY_ADD = """
import json
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from trueroll.kernels.triton.launch import PINNED

@triton.jit
def multiply_add(x_ptr, y_ptr):
    x = tl.load(x_ptr)
    tl.store(y_ptr, x * x + x)

def compiled(capability, options):
    source = ASTSource(multiply_add, {"x_ptr": "*fp32", "y_ptr": "*fp32"})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["sass"]

forms = [{"enable_fp_fusion": True}, PINNED]
print(json.dumps({capability: [compiled(capability, form) for form in forms] for capability in (80, 90, 100)}))
"""


def test_a_product_and_a_sum_are_rounded_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No environment variable changes this rounding."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    script = tmp_path / "multiply_add.py"
    script.write_text(MULTIPLY_ADD)
    found = run_compiler([str(script)], tmp_path / "cache")
    assert found.keys() == {str(capability) for capability in SHARED_MEMORY}
    for joined, apart in found.values():
        assert "FFMA" in joined, "premise: Triton can join them"
        assert "FFMA" not in apart and "FMUL" in apart and "FADD" in apart


AHEAD = """
import contextlib
import json
import logging
from types import SimpleNamespace
import torch
import triton
from triton.backends.compiler import GPUTarget
from trueroll.kernels.specs import NormSpec
from trueroll.kernels.triton import backend, launch

compiled, seen = [], dict(compiled=0, read=0, loaded=0, launched=0)

class Driver:
    utils = SimpleNamespace(
        get_device_properties=lambda device: dict(max_shared_mem=232448), unload_module=lambda module: None)
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0
    def launcher_cls(self, source, metadata):
        return lambda *arguments: count("launched")

def count(what):
    seen[what] += 1

def load_binary(*arguments):
    count("loaded")
    return "module", "function", 0, 0, 1024

def compute(device, rows):
    x, weight = (torch.ones(shape, dtype=torch.bfloat16, device=device) for shape in ((rows, 768), (8192, 768)))
    ids = torch.zeros(rows, dtype=torch.int64, device=device)
    backend.rmsnorm(x, weight[0], NormSpec(1e-6))
    backend.log_probs(backend.lm_head(x, weight), ids)
    for k in (0, 1, 40):
        backend.token_statistics(x[:, :64].float(), ids, k)

Driver.utils.load_binary = load_binary
triton.runtime.driver.set_active(Driver())
triton.knobs.compilation.listener = lambda *, cache_hit, **rest: count("read" if cache_hit else "compiled")
torch.cuda.device = lambda device: contextlib.nullcontext()
launch._architecture = lambda device: "sm90"
records = []
launch.log.setLevel(logging.INFO)
launch.log.info = lambda text, *values: records.append(text % values)
backend.prepare(lambda rows: compute("meta", rows), 40, torch.device("cuda", 0))
prepared = dict(seen)
for rows in range(1, 41):
    compute("cpu", rows)
print(json.dumps(dict(prepared=prepared, served=seen, records=records)))
"""


def test_prepared_kernels_are_neither_compiled_nor_loaded_again_and_stay_cached(
    tmp_path: Path,
) -> None:
    script = tmp_path / "ahead.py"
    script.write_text(AHEAD)
    first, second = (run_compiler([str(script)], tmp_path / "cache") for _ in range(2))
    number = first["prepared"]["compiled"]
    assert number >= 7, "premise: products for several numbers of rows, a norm, and what follows logits"
    assert first["prepared"] == dict(compiled=number, read=0, loaded=number, launched=0)
    assert second["prepared"] == dict(compiled=0, read=number, loaded=number, launched=0)
    for run in (first, second):
        assert run["served"] == run["prepared"] | dict(launched=run["served"]["launched"])
        assert run["served"]["launched"] > 40 * 5
    assert first["records"][0] == f"compiling {number} forms of kernels, or reading them from Triton's cache"
    assert first["records"][-1] == f"compiled {number} of {number} forms of kernels"
    assert 2 < len(first["records"]) <= 11
