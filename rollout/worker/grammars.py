"""The thread that prepares the grammars of requests, so that neither messages nor steps wait for a slow grammar.

Grammars are prepared one at a time. Users take turns: between two grammars of a user, each other user gets at most one
grammar. A grammar that is already prepared is not sent to the thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from trueroll.errors import TruerollError, UnavailableError

from ...engine.grammars.source import Grammar


class Preparing(Protocol):
    """The interface that the worker needs from `trueroll.engine.grammars.masks.Grammars`. Any thread may call the
    methods.
    """

    def find(self, grammar: Grammar) -> object | None: ...

    def prepare(self, grammar: Grammar) -> object: ...

    def close(self) -> None: ...


@dataclass(eq=False)
class Preparation:
    """The preparation of the grammar of request `key`. `is_wanted`: False if the request has ended in the meantime.
    `prepared`: the prepared grammar; as long as this object exists, the grammar stays prepared. `error`: the reason why
    the request cannot be served, or None.
    """

    key: str
    grammar: Grammar
    is_wanted: bool = True
    prepared: object | None = None
    error: TruerollError | None = None


class GrammarThread:
    """Prepares grammars on a thread that is started for the first grammar. `publish`: called on the grammar thread with
    each finished preparation. Preparations that are no longer wanted are skipped and not published.
    """

    def __init__(self, grammars: Preparing, publish: Callable[[Preparation], None]) -> None:
        self.find, self.close = grammars.find, grammars.close
        self._grammars, self._publish = grammars, publish
        self._waiting = dict[str | None, deque[Preparation]]()  # waiting grammars by user, next user first
        self._has_changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def prepare(self, user: str | None, key: str, grammar: Grammar) -> Preparation:
        """Prepare the grammar of request `key` after all earlier grammars of the same user."""
        preparation = Preparation(key, grammar)
        with self._has_changed:
            self._waiting.setdefault(user, deque()).append(preparation)
            self._has_changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
        return preparation

    def _run(self) -> None:
        while True:
            if (preparation := self._next()).is_wanted:
                self._finish(preparation)
                self._publish(preparation)

    def _next(self) -> Preparation:
        with self._has_changed:
            self._has_changed.wait_for(lambda: self._waiting)
            user, own = next(iter(self._waiting.items()))
            del self._waiting[user]
            preparation = own.popleft()
            if own:
                self._waiting[user] = own  # this user comes after the other users
            return preparation

    def _finish(self, preparation: Preparation) -> None:
        try:
            preparation.prepared = self._grammars.prepare(preparation.grammar)
        except TruerollError as error:
            preparation.error = error
        except Exception as error:  # must not end the thread, because requests would wait forever
            text = f"structured_outputs: the grammar could not be prepared ({error}); try again"
            preparation.error = UnavailableError(text)
