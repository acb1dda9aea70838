"""Installed and tested versions of the libraries that trueroll plugs into.

The tested ranges come from pyproject.toml, through the installed metadata. Imports the standard library only.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires, version


def installed(package: str) -> str:
    """Return the package's name and installed version, such as `peft 0.21.2`. Return only the name if there is no
    metadata.
    """
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package


def range_of(package: str) -> str:
    """Return the package's name and the version range that trueroll is tested with, such as `peft>=0.21,<0.22`."""
    for line in requires("trueroll") or ():
        found = re.match(r"([\w.-]+)\s*([^;\s]*)", line)
        if found and found[1].lower() == package:
            return package + ",".join(sorted(found[2].split(","), reverse=True))
    return package


def untested(package: str, what: str) -> str:
    """Return the error text for a library that does not behave like the tested versions. `what`: the difference."""
    return f"{installed(package)}: {what}; install {range_of(package)}, which trueroll is tested with"
