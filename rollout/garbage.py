"""Garbage collection in a worker: the pauses do not grow with the number of objects.

Python's garbage collector sometimes traverses all objects that can be part of a cycle. In a worker with 100,000 waiting
requests, such a collection takes about a second. During this second, the worker runs no engine step and serves no
socket. After a call to `bound_pauses`, a garbage collection leaves out all objects that survived an earlier full
collection. Once `WHOLE_SECONDS` have passed since all objects were last traversed, the next full collection
traverses all objects again. This collection also frees unused cycles that earlier collections left out. Objects outside
of cycles are freed at once, as always. Collections in a forked child leave out the parent's objects.
"""

from __future__ import annotations

import gc
import os
import time
from contextlib import suppress
from typing import Any

WHOLE_SECONDS = 600.0
"""Minimum time in seconds between two collections that traverse all objects."""
_OLDEST = 2
_last_whole = 0.0


def bound_pauses() -> None:
    """Bound the pauses of the garbage collector in this process, from now on. A second call has no effect."""
    global _last_whole
    if _around_collection not in gc.callbacks:
        _last_whole = time.monotonic()
        gc.callbacks.append(_around_collection)
        os.register_at_fork(after_in_child=_forget)
        gc.freeze()


def _forget() -> None:
    """In a forked child, stop bounding collections. The parent's objects stay frozen (`gc.freeze`), so the child's
    collections leave them out. If these objects were unfrozen, a collection would copy the memory that the child shares
    with the parent, and would free cycles that belong to the parent.
    """
    with suppress(ValueError):
        gc.callbacks.remove(_around_collection)


def _around_collection(phase: str, info: dict[str, Any]) -> None:
    global _last_whole
    if info["generation"] < _OLDEST:
        return
    if phase == "stop":
        gc.freeze()
    elif time.monotonic() - _last_whole >= WHOLE_SECONDS:
        _last_whole = time.monotonic()
        gc.unfreeze()
