"""The states of a worker: the legal moves between them, and the calls that each state allows.

This module only records the worker's state. The worker acts first, and then reports the result to `Lifecycle`. A call
that the current state does not allow raises IllegalStateError, or UnavailableError if the worker is shutting down. A
move that is not in `LEGAL_MOVES` is a bug and raises RuntimeError.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

from trueroll.errors import IllegalStateError, UnavailableError

from ...engine.request import Tag
from ..protocol import ALL_TAGS, State

LEGAL_MOVES: dict[State, frozenset[State]] = {
    "loading": frozenset({"ready", "draining", "failed"}),
    "ready": frozenset({"paused", "draining", "updating", "failed"}),
    "paused": frozenset({"ready", "draining", "updating", "failed"}),
    "draining": frozenset({"ready", "paused", "asleep", "waking", "dirty", "failed"}),
    "asleep": frozenset({"waking", "draining", "updating", "failed"}),
    "waking": frozenset({"ready", "paused", "asleep", "dirty", "draining", "updating", "failed"}),
    "updating": frozenset({"ready", "paused", "asleep", "waking", "dirty", "draining", "failed"}),
    "dirty": frozenset({"draining", "updating", "failed"}),
    "failed": frozenset(),
}
_STANDING: frozenset[State] = frozenset({"ready", "paused", "asleep", "waking", "dirty"})
_BUSY: frozenset[State] = frozenset({"draining", "updating"})
LEGAL_CALLS: dict[str, frozenset[State]] = {
    "pause": frozenset({"ready", "paused"}),
    "resume": frozenset({"ready", "paused"}),
    "drain": frozenset({"ready", "paused"}),
    "sleep": _STANDING,
    "wake_up": _STANDING,
    "invalidate": _STANDING,
    "unload_adapter": _STANDING,
    "save_weights": frozenset({"ready", "paused"}),
    "checksums": _STANDING,
    "weights": _STANDING | _BUSY,
    "begin_push": _STANDING,
    "commit_push": _STANDING,
}
"""States in which a call is legal. Calls without an entry are legal in every state. A call that requests the current
state is a no-op and succeeds.
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Standing:
    """The part of a worker's state that persists between calls.

    `is_paused`: generation is paused. `sleeping`: tags of the memory that is asleep. `is_waking`: since the last sleep,
    some memory was woken, but other memory is still asleep. `is_dirty`: the weights are missing or partly overwritten.
    """

    is_paused: bool = False
    sleeping: frozenset[Tag] = frozenset()
    is_waking: bool = False
    is_dirty: bool = False

    @property
    def is_held(self) -> bool:
        """Return whether the engine must not step."""
        return self.state != "ready"

    @property
    def state(self) -> State:
        """State of a worker with this `Standing` while no call is in progress."""
        if self.sleeping:
            return "waking" if self.is_waking else "asleep"
        if self.is_dirty:
            return "dirty"
        return "paused" if self.is_paused else "ready"

    def paused(self, is_paused: bool) -> Standing:
        return replace(self, is_paused=is_paused)

    def slept(self, tags: Iterable[Tag], drops_weights: bool) -> Standing:
        """Return the `Standing` after the memory with the tags `tags` is put to sleep.

        `drops_weights`: whether the sleep drops the weights; if so, a push of all weights must follow.
        """
        sleeping, is_dirty = self.sleeping | frozenset(tags), self.is_dirty or drops_weights
        return replace(self, sleeping=sleeping, is_waking=False, is_dirty=is_dirty)

    def woken(self, tags: Iterable[Tag]) -> Standing:
        sleeping = self.sleeping - frozenset(tags)
        return replace(self, sleeping=sleeping, is_waking=bool(sleeping))

    def overwritten(self, is_whole: bool) -> Standing:
        """Return the `Standing` after the weights were overwritten, partly (`is_whole` False) or completely (True)."""
        return replace(self, is_dirty=not is_whole)


class Lifecycle:
    """The state of one worker.

    `standing` determines the state, except while the worker is loading, busy or shutting down, or after the worker has
    failed.
    """

    def __init__(self) -> None:
        self.state: State = "loading"
        self.standing = Standing()
        self.is_ending = False
        self._is_loaded = False
        self._has_failed = False
        self._busy: State | None = None

    def check(self, call: str) -> None:
        """Check whether the state allows `call`.

        Raise IllegalStateError if the state does not allow the call. During a shutdown, raise UnavailableError instead
        of IllegalStateError, because no later state will allow the call.
        """
        legal = LEGAL_CALLS.get(call)
        if legal is not None and self.state not in legal:
            if self.is_ending:
                text = f"{call}: worker is shutting down; use another worker"
                raise UnavailableError(text, value=self.state)
            raise IllegalStateError(
                f"{call}: is not allowed in state {self.state} (needs {' or '.join(sorted(legal))}); "
                f"{_ADVICE.get(self.state, '')}",
                value=self.state,
            )

    def check_weights_awake(self, call: str) -> None:
        """Raise IllegalStateError if the memory of the weights is asleep."""
        if "weights" in self.standing.sleeping:
            raise IllegalStateError(
                f"{call}: is not allowed in state {self.state} while the weights are asleep; call "
                'wake_up(tags=["weights"]) first',
                value=self.state,
            )

    def finish_loading(self) -> None:
        self._is_loaded = True
        self._follow()

    def begin(self, busy: State | None) -> None:
        """Record that a long call has begun. `busy`: the state until `end` is called; None keeps the current state."""
        self._busy = busy or self.state
        self._follow()

    def end(self, standing: Standing) -> None:
        """Record that the call passed to `begin` is over. `standing`: the `Standing` after the call."""
        self._busy, self.standing = None, standing
        self._follow()

    def start_ending(self) -> None:
        self.is_ending = True
        self._follow()

    def fail(self) -> None:
        self._has_failed = True
        self._follow()

    def _follow(self) -> None:
        state = self._derive()
        if state == self.state:
            return
        if state not in LEGAL_MOVES[self.state]:
            raise RuntimeError(f"state: cannot move from {self.state} to {state}")
        log.info("%s -> %s", self.state, state)
        self.state = state

    def _derive(self) -> State:
        if self._has_failed:
            return "failed"
        if self.is_ending:
            return "draining"
        if not self._is_loaded:
            return "loading"
        return self._busy or self.standing.state


_ADVICE: dict[State, str] = {
    "loading": "wait until the worker is ready",
    "paused": "call resume first",
    "draining": "wait until the drain is over",
    "asleep": f"call wake_up first (tags: {', '.join(ALL_TAGS)})",
    "waking": "wake up the other tags first",
    "updating": "wait until the push is committed",
    "dirty": "push whole weights first",
    "failed": "restart the worker",
}
