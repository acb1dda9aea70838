"""Which cells of a test's matrix every run has. `make test-all` has all of them.

A plugin of pytest, which `conftest` loads: the cells that are left to `make test-all` get the mark `exhaustive`, which
pytest is told to leave out unless `-m` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest


def thinned(keep: Callable[..., bool]) -> pytest.MarkDecorator:
    """Have every run take only those cells of a test's matrix for which `keep` holds. It gets the parameters of a cell,
    also those of its fixtures, by their names. The mark of a function stands in place of that of its module.
    """
    return pytest.mark.thinned(keep)  # type: ignore[return-value]


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the cells that are left to `make test-all`."""
    for item in items:
        if (marker := item.get_closest_marker("thinned")) is not None:
            (keep,) = marker.args
            callspec = getattr(item, "callspec", None)
            if not keep(**({} if callspec is None else callspec.params)):
                item.add_marker("exhaustive")
