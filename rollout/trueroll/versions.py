"""Versions of the libraries that trueroll plugs into: the installed one, and those that trueroll is tested with.

The ranges are the ones in pyproject.toml, read from the installed metadata. Imports the standard library alone.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires, version


def installed(package: str) -> str:
    """The package with its installed version, such as `peft 0.21.2`; without one where no metadata says it."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package


def range_of(package: str) -> str:
    """The package with the versions that trueroll is tested with, such as `peft>=0.21,<0.22`."""
    for line in requires("trueroll") or ():
        found = re.match(r"([\w.-]+)\s*([^;\s]*)", line)
        if found and found[1].lower() == package:
            return package + ",".join(sorted(found[2].split(","), reverse=True))
    return package


def untested(package: str, what: str) -> str:
    """The text of an error about a library which is not as trueroll knows it: `what` says in which point."""
    return f"{installed(package)}: {what}; install {range_of(package)}, which trueroll is tested with"
