"""Progress messages of the commands. The messages go to stderr, so that stdout contains only results. Owns nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from trueroll.errors import printable

SECONDS_BETWEEN_LINES = 5.0

T = TypeVar("T")


def tell(line: str) -> None:
    """Print a line to stderr immediately. Unprintable characters are escaped."""
    print(printable(line), file=sys.stderr, flush=True)


def tracked(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Yield the items. Show a progress bar if stderr is a terminal, otherwise a line every few seconds.

    `what`: name of the work, such as `verifying`. `total`: the number of items.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        yield from track(items, what, total=total, console=Console(stderr=True), transient=True)
        return
    told = time.monotonic()
    for number, item in enumerate(items, 1):
        if time.monotonic() - told >= SECONDS_BETWEEN_LINES:
            tell(f"{what}: {number} of {total}")
            told = time.monotonic()
        yield item
