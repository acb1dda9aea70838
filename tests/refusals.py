"""Checks of an error beyond its class: `pytest.raises(InvalidRequestError, check=about("n", value=0))`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def about(field: str | None, **expected: Any) -> Callable[[Any], bool]:
    """Return a check that an error has this `field`, and this `value` and `limit` if they are given."""
    expected["field"] = field

    def check(error: Any) -> bool:
        assert {name: getattr(error, name) for name in expected} == expected, str(error)
        return True

    return check
