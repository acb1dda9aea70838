"""Check the promises of trueroll on a GPU, and measure the speed of trueroll.

`python3 examples/benchmarks/gpu_check.py [PART ...]` runs from a checkout, with torch and Triton from the Python
interpreter that runs the command. Nothing is downloaded. Nothing is compiled, except Triton's kernels. Missing packages
come from the folder of wheels that `--wheels` names. docs/gpu.md has the command that creates this folder. For each
part, a log and the figures of `gpu_report.py` are written to the folder `--out`. The subfolder `site` of the folder
`--out` holds the packages and links to the checkout. The tables of `gpu_report.py` are printed too.

The tests of each promise run in their own process, so a GPU fault ends only that process. A promise that exceeds its
time limit is reported as broken. All promises of a part together take less than ten minutes. These ten minutes include
the promise about the machine, which always runs first. The last lines give the verdict of each promise. The exit code
is 1 if a promise was broken, or if a test was skipped for an unexpected reason.

`--rehearse` runs the same tests on a CPU, in Triton's interpreter, with tiny sizes. A rehearsal shows only that the
check itself works. A rehearsal shows nothing about a GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/gpu"
REPORT = "examples/benchmarks/gpu_report.py"
TEST_TOOLS = ("hypothesis>=6.100", "pytest>=8.4", "pytest-timeout>=2.2", "pytest-xdist>=3.7")
MOST_PROCESSES = 8
MOST_SHOWN = 5  # maximum number of failed tests listed per promise
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@dataclass(frozen=True)
class Promise:
    """A promise and its check: files and tests of `tests/gpu`, or sections of `gpu_report.py`.

    `seconds`: the time limit; a promise that takes longer counts as broken. `parallel`: True if the tests may run in
    parallel; False for tests that measure memory. `settings`: environment variables. `rehearsed`: the tests that a
    rehearsal runs, as an expression for pytest's `-k`.
    """

    text: str
    seconds: int
    tests: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    parallel: bool = False
    settings: dict[str, str] = field(default_factory=dict)
    rehearsed: str = ""


MACHINE = Promise("the versions and the driver are known", 60, ("test_machine.py::test_versions_and_driver",))
COMMITS = "test_commits.py", "test_engine.py::test_a_commit_while_the_device_is_busy"
SLEEP = ("test_engine.py::test_sleep_gives_the_memory_of_the_device_back",)
PUSH = ("test_push.py",)
PARTS: dict[str, tuple[Promise, ...]] = {
    "products": (
        Promise(
            "each loaded kernel uses only one matrix instruction",
            115,
            ("test_machine.py::test_each_loaded_kernel_multiplies_by_one_instruction",),
        ),
        Promise(
            "a row has the same bits in every tile, for both dtypes and every tail of K",
            260,
            ("test_real_sizes.py", "test_tails.py"),
            parallel=True,
        ),
        Promise(
            "products have the same bits as the software model of the tensor cores",
            160,
            ("test_tensor_cores.py",),
            parallel=True,
        ),
    ),
    "ops": (
        Promise(
            "every op is close to float64 and keeps its contract",
            520,
            ("test_ops.py",),
            parallel=True,
            rehearsed="test_rmsnorm or test_equal_logits or test_a_sequence_without_rows",
        ),
    ),
    "engine": (
        Promise(
            "decode, prefill and graphs give the same bits, for 1 to 520 sequences",
            180,
            ("test_decode.py", "test_engine.py::test_graphs_change_no_bit", "test_stand_ins.py"),
        ),
        Promise(
            "no bit differs in any cell of the exactness matrix",
            200,
            (
                "test_engine.py::test_no_bit_differs_in_any_cell",
                "test_engine.py::test_no_bit_differs_for_layers_of_real_size",
            ),
            parallel=True,
        ),
        Promise("drafts change no bit", 60, ("test_drafts.py",)),
        Promise(
            "a step does not synchronize, compile or capture",
            90,
            (
                "test_engine.py::test_a_step_is_queued_without_waiting_for_the_device",
                "test_engine.py::test_serving_compiles_no_kernel_and_captures_no_graph",
            ),
        ),
    ),
    "hybrids": (
        Promise(
            "models with gated delta nets give the same bits by decode and by graphs, and in the exactness matrix",
            400,
            ("test_hybrids.py",),
        ),
    ),
    "weights": (
        Promise("a commit during a step does not change samples of other versions", 130, COMMITS),
        Promise("a commit during a step is as safe with expandable segments", 130, COMMITS, settings=EXPANDABLE),
        Promise(
            "a trainer's log-probs have the bits of the rollout's",
            200,
            ("test_trainer.py", "test_engine.py::test_a_trainer_computes_the_bits_of_the_rollout"),
        ),
    ),
    "memory": (
        Promise("caches and logits of more than 2**31 elements are computed correctly", 90, ("test_large_tensors.py",)),
        Promise("a sleep releases all memory, and a wake-up allocates it again", 160, SLEEP),
        Promise("sleep and wake-up do the same with expandable segments", 160, SLEEP, settings=EXPANDABLE),
    ),
    "push": (
        Promise("every bit of a push arrives, and a push leaks no memory", 260, PUSH),
        Promise("a push with expandable segments is complete and leaks no memory", 260, PUSH, settings=EXPANDABLE),
    ),
    "quantized": (
        Promise(
            "products with quantized weights have the bits of products with their values",
            500,
            ("test_quantized.py",),
            parallel=True,
        ),
    ),
    "ranks": (Promise("several ranks give the bits of one GPU", 500, ("test_ranks.py",)),),
    "speed": (
        Promise("products, attention and decode steps are measured", 520, sections=("products", "attention", "steps")),
    ),
    "serving": (Promise("requests/s and tokens/s are measured", 520, sections=("workloads", "serving")),),
}


@dataclass(frozen=True)
class Verdict:
    """`word`: kept, BROKEN, skipped (expected) or SKIPPED (unexpected). `lines`: findings, failures and skips."""

    promise: Promise
    word: str
    is_fine: bool
    detail: str
    lines: Sequence[str] = ()

    def __str__(self) -> str:
        return "\n".join((f"{self.word:8} {self.promise.text}: {self.detail}", *(f"{'':8}   {x}" for x in self.lines)))


class Check:
    """Runs the checks of promises, with the packages in the folder `site`. `out`: the folder for the logs. `site`: a
    subfolder of `out`, and the first entry of PYTHONPATH.
    """

    def __init__(self, out: Path, is_rehearsal: bool) -> None:
        self.out, self.is_rehearsal, self.site = out, is_rehearsal, out / "site"

    def judge(self, promise: Promise, part: str) -> Verdict:
        start = time.monotonic()
        results = self.out / f"{part}.xml"
        results.unlink(missing_ok=True)
        command = self._report(promise, part) if promise.sections else self._pytest(promise, results)
        with (self.out / f"{part}.log").open("a") as log:
            code = run(command, promise.seconds, self._environment(promise), log)
        if promise.sections:
            print(Path(log.name).read_text(), flush=True)
        seconds = time.monotonic() - start
        if code is None:
            return Verdict(promise, "BROKEN", False, f"not done within {promise.seconds} s; see {log.name}")
        if promise.sections:
            return Verdict(promise, "BROKEN" if code else "kept", not code, f"{seconds:.0f} s; see {log.name}")
        return self._read(promise, code, results, f"{seconds:.0f} s", log.name)

    def _pytest(self, promise: Promise, results: Path) -> list[str]:
        command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-q", f"--junitxml={results}"]
        if promise.parallel:
            command += ["-n", str(min(MOST_PROCESSES, os.cpu_count() or 1))]
        if self.is_rehearsal and promise.rehearsed:
            command += ["-k", promise.rehearsed]
        return command + [f"{TESTS}/{test}" for test in promise.tests]

    def _report(self, promise: Promise, part: str) -> list[str]:
        rehearse = ["--rehearse"] if self.is_rehearsal else []
        file = self.out / f"{part}.json"
        return [sys.executable, "-P", REPORT, *promise.sections, "--json", str(file), *rehearse]

    def _environment(self, promise: Promise) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(self.site), os.environ.get("PYTHONPATH"))))
        interpreted = str(int(self.is_rehearsal))
        ours = {"PYTHONPATH": path, "TRITON_INTERPRET": interpreted, "TRUEROLL_REHEARSAL": interpreted}
        return os.environ | ours | promise.settings

    def _read(self, promise: Promise, code: int, results: Path, seconds: str, log: str) -> Verdict:
        cases = list(ET.parse(results).iter("testcase")) if results.exists() else []
        failed = [f"{name_of(case)}: {message}" for case in cases for message in messages(case, "failure", "error")]
        skipped = Counter(message for case in cases for message in messages(case, "skipped"))
        if code or failed or not cases:
            return Verdict(promise, "BROKEN", False, f"pytest exited with {code}; see {log}", failed[:MOST_SHOWN])
        reasons = [f"{count} skipped: {reason}" for reason, count in skipped.items()]
        is_fine = all(self._is_expected(reason) for reason in skipped)
        if not is_fine or skipped.total() == len(cases):
            return Verdict(promise, "skipped" if is_fine else "SKIPPED", is_fine, f"see {log}", reasons)
        found = [str(each.get("value")) for case in cases for each in case.iter("property")]
        return Verdict(promise, "kept", True, f"{len(cases) - skipped.total()} tests, {seconds}", [*found, *reasons])

    def _is_expected(self, reason: str) -> bool:
        return reason.startswith("needs two GPUs") or self.is_rehearsal and reason.startswith("needs a GPU, which")


def run(command: Sequence[str], seconds: float, environment: dict[str, str], log: Any) -> int | None:
    """Run a command and return its exit code. After `seconds`, kill the command with all its child processes and return
    None.
    """
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def name_of(case: ET.Element) -> str:
    return f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}"


def messages(case: ET.Element, *kinds: str) -> Iterator[str]:
    """Yield the first line of each message that pytest recorded for a test."""
    for kind in kinds:
        for element in case.iter(kind):
            yield element.get("message", "").partition("\n")[0]


def lay_out(site: Path, wheels: Path | None) -> None:
    """Make a folder for `sys.path`: the checkout as the package trueroll, and the contents of the wheels."""
    shutil.rmtree(site, ignore_errors=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    package, version = site / "trueroll", project["project"]["version"]
    package.mkdir(parents=True)
    for name, folder in project["tool"]["setuptools"]["package-dir"].items():
        if name == package.name:
            for file in (ROOT / folder).glob("*.*"):
                (package / file.name).symlink_to(file)
        elif name.count(".") == 1:
            (package / name.removeprefix("trueroll.")).symlink_to(ROOT / folder)
    (metadata := site / f"trueroll-{version}.dist-info").mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: trueroll\nVersion: {version}\n")
    if wheels is not None:
        if not (files := sorted(map(str, wheels.glob("*.whl")))):
            sys.exit(f"gpu_check: --wheels: {wheels} has no wheels; docs/gpu.md has the command that makes them")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site)]
        if subprocess.run([*pip, *files]).returncode:
            sys.exit("gpu_check: --wheels: pip cannot install these wheels here; see docs/gpu.md")


def unmet(site: Path) -> list[str]:
    """Return the unmet requirements: packages that trueroll, its tests or the packages in `site` need, but that neither
    `site` nor the interpreter has in a suitable version.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    there: dict[str, Distribution] = {}
    for each in distributions(path=[str(site), *sys.path]):
        there.setdefault(canonicalize_name(each.metadata["Name"]), each)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *TEST_TOOLS]
    lines += [line for each in distributions(path=[str(site)]) for line in each.requires or ()]
    found = []
    for wanted in map(Requirement, lines):
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            has = there.get(canonicalize_name(wanted.name))
            if has is None or not wanted.specifier.contains(has.version, prereleases=True):
                found.append(f"{wanted.name}{wanted.specifier} (found {has.version if has else 'none'})")
    return sorted(set(found))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Checks the promises of trueroll on a GPU, and measures its speed.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}; default: all")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="wheels of packages that this interpreter lacks")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=ROOT / "build" / "gpu_check", help="for the logs")
    parser.add_argument("--rehearse", action="store_true", help="use tiny sizes on a CPU, in Triton's interpreter")
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"unknown parts: {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    return arguments


def verdicts_of(check: Check, parts: Sequence[str]) -> Iterator[Verdict]:
    """Yield the verdict on the machine, then the verdicts on the parts. Stop after the machine's verdict if the promise
    about the machine is broken.
    """
    for part, promises in {"machine": (MACHINE,), **{part: PARTS[part] for part in parts}}.items():
        (check.out / f"{part}.log").unlink(missing_ok=True)
        for promise in promises:
            yield (verdict := check.judge(promise, part))
            if promise is MACHINE and not verdict.is_fine:
                return


def main() -> None:
    arguments = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu_check: terminated"))  # lets `run` kill child processes
    check = Check(arguments.out.resolve(), arguments.rehearse)
    try:
        lay_out(check.site, arguments.wheels)
    except OSError as error:
        sys.exit(f"gpu_check: --out: the folder cannot be written ({error}); name another one")
    if missing := unmet(check.site):
        sys.exit(
            f"gpu_check: missing packages: {', '.join(missing)}; "
            "add them to the folder of --wheels with the command in docs/gpu.md"
        )
    verdicts = []
    for verdict in verdicts_of(check, arguments.parts or list(PARTS)):
        print(verdict, flush=True)
        verdicts.append(verdict)
    print("", *verdicts, sep="\n")
    broken = sum(not verdict.is_fine for verdict in verdicts)
    print(f"{len(verdicts)} promises, {broken or 'none'} broken")
    sys.exit(int(broken > 0))


if __name__ == "__main__":
    main()
