"""The thread that prepares the grammars of requests, so that neither messages nor steps wait for a slow grammar.

Grammars are prepared one at a time, in the order of arrival. A grammar that was prepared before does not come here.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from trueroll.errors import TruerollError, UnavailableError

from ...engine.grammars.source import Grammar


class Preparing(Protocol):
    """What the worker needs from `trueroll.engine.grammars.masks.Grammars`. Any thread may call the methods."""

    def is_prepared(self, grammar: Grammar) -> bool: ...

    def prepare(self, grammar: Grammar) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Prepared:
    """The end of a preparation. `key`: the request. `error`: the reason why it cannot be served, or None."""

    key: str
    error: TruerollError | None


class GrammarThread:
    """Prepares grammars in a thread, which the first grammar starts. `publish`: called there after each grammar."""

    def __init__(self, grammars: Preparing, publish: Callable[[Prepared], None]) -> None:
        self.is_prepared, self.close = grammars.is_prepared, grammars.close
        self._grammars, self._publish = grammars, publish
        self._queue: queue.SimpleQueue[tuple[str, Grammar]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def prepare(self, key: str, grammar: Grammar) -> None:
        """Prepare the grammar of request `key`, after the grammars of earlier calls."""
        self._queue.put((key, grammar))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            key, grammar = self._queue.get()
            try:
                self._grammars.prepare(grammar)
                self._publish(Prepared(key, None))
            except TruerollError as error:
                self._publish(Prepared(key, error))
            except Exception as error:  # must not end the thread, because requests would wait forever
                failed = UnavailableError(f"structured_outputs: the grammar could not be prepared ({error}); try again")
                self._publish(Prepared(key, failed))
