"""Selects the cells of a test's matrix that every run includes. `make test-all` runs all cells.

This module is a pytest plugin, loaded by `conftest`. All other cells get the mark `exhaustive`. pytest deselects that
mark unless `-m` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest


def thinned(keep: Callable[..., bool]) -> pytest.MarkDecorator:
    """Run only the cells of a test's matrix for which `keep` returns True, except in `make test-all`.

    `keep` gets the parameters of a cell by name, including those of its fixtures. A function's mark overrides its
    module's mark.
    """
    return pytest.mark.thinned(keep)  # type: ignore[return-value]


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cells that only `make test-all` runs."""
    for item in items:
        if not is_in_every_run(item):
            item.add_marker("exhaustive")


def is_in_every_run(item: pytest.Item) -> bool:
    """Return whether every run includes a test, not `make test-all` alone."""
    if item.get_closest_marker("exhaustive") is not None:
        return False
    if (marker := item.get_closest_marker("thinned")) is None:
        return True
    (keep,) = marker.args
    callspec = getattr(item, "callspec", None)
    return bool(keep(**({} if callspec is None else callspec.params)))
