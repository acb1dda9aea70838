"""The supported families of decoders. Each family converts a config.json to a `DecoderSpec`.

Each module here lists one family, or a few related families, in `FAMILIES`. If published files and transformers use
different names for an architecture, `SPELLINGS` of the family's module maps the name in files to the name in
transformers. Modules are discovered automatically. No other code contains the name of an architecture: worker, aligned
trainer, random weights and tests read the spec.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeAlias

from trueroll.errors import ModelError, brief

from ..pieces import with_pieces
from ..specs import DecoderSpec

Describe: TypeAlias = Callable[[dict[str, Any], str], DecoderSpec]
"""describe(raw, architecture): return the decoder that config.json describes. Raise ModelError if the file is broken or
requires something that is not supported.
"""


@cache
def families() -> dict[str, Describe]:
    """Return a map from architecture name, as in transformers, to the `Describe` function of the family."""
    return _gather("FAMILIES")


@cache
def _spellings() -> dict[str, str]:
    return _gather("SPELLINGS")


def _gather(table: str) -> dict[str, Any]:
    """Return the entries of the modules' tables with the name `table`, joined in one map."""
    modules = (import_module(f".{module.name}", __name__) for module in iter_modules(__path__))
    return {name: entry for module in modules for name, entry in getattr(module, table, {}).items()}


def describe(raw: dict[str, Any]) -> DecoderSpec:
    """Return the decoder that is described in `raw`, which is the content of config.json.

    Raise ModelError for an unknown architecture, for a broken file, and for settings that are not supported.
    """
    names = raw.get("architectures")
    given = names[0] if isinstance(names, list) and names else None
    name = _spellings().get(given, given) if isinstance(given, str) else ""
    if name not in families():
        supported = ", ".join(sorted(families()))
        raise ModelError(f"architecture must be one of {supported} (got {brief(given)}); serve another model")
    return with_pieces(families()[name](raw, name))
