"""The states of a worker: which moves are legal, which calls a state allows, and what the state follows from.

Owns the facts that outlast a call (loaded, paused, asleep, dirty, ending, failed) and the state that they add up to.
Does nothing by itself: the worker acts, then tells what has become true. A call that a state does not allow raises
IllegalStateError, which names the state; a move that is not in the table is a bug and raises RuntimeError.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ..engine.request import Tag
from .errors import IllegalStateError
from .protocol import ALL_TAGS, State

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
    "drain": frozenset({"ready"}),
    "sleep": _STANDING,
    "wake_up": _STANDING,
    "invalidate": _STANDING,
    "weights": _STANDING | _BUSY,
    "begin_push": _STANDING,
    "commit_push": _STANDING,
}
"""What is not named here is legal in every state. A call that asks for what is so already succeeds."""

log = logging.getLogger(__name__)


class Lifecycle:
    """The state of one worker. Every method that changes a fact moves `state` along."""

    def __init__(self) -> None:
        self.state: State = "loading"
        self.sleeping: frozenset[Tag] = frozenset()
        self.is_paused = False
        self.is_dirty = False
        self.is_ending = False
        self._is_loaded = False
        self._has_failed = False
        self._busy: State | None = None
        self._is_waking = False

    @property
    def is_held(self) -> bool:
        """Whether the engine must not step."""
        return self.is_paused or self.is_dirty or bool(self.sleeping)

    def check(self, call: str) -> None:
        """Raise IllegalStateError unless the state allows `call`."""
        legal = LEGAL_CALLS.get(call)
        if legal is not None and self.state not in legal:
            raise IllegalStateError(
                f"{call}: expected state {', '.join(sorted(legal))}, found {self.state}; {_ADVICE.get(self.state, '')}"
            )

    def check_weights_awake(self, call: str) -> None:
        """Raise IllegalStateError while the memory of the weights is given back."""
        if "weights" in self.sleeping:
            raise IllegalStateError(
                f"{call}: expected weights that are awake, found state {self.state} with weights asleep; "
                'call wake_up(tags=["weights"]) first'
            )

    def finish_loading(self) -> None:
        self._is_loaded = True
        self._follow()

    def begin(self, busy: State | None) -> None:
        """A call that takes a while has begun; `busy`, or the state of now, is shown until `end`."""
        self._busy = busy or self.state
        self._follow()

    def end(self) -> None:
        """The call that `begin` announced is over."""
        self._busy = None
        self._follow()

    def pause(self, is_paused: bool) -> None:
        self.is_paused = is_paused
        self._follow()

    def sleep(self, tags: Iterable[Tag], drops_weights: bool) -> None:
        """The memory of `tags` was given back. If the weights are gone for good, a push must follow."""
        self.sleeping |= frozenset(tags)
        self.is_dirty |= drops_weights
        self._is_waking = False
        self._follow()

    def wake_up(self, tags: Iterable[Tag]) -> None:
        self.sleeping -= frozenset(tags)
        self._is_waking = bool(self.sleeping)
        self._follow()

    def set_dirty(self, is_dirty: bool) -> None:
        """The weights are being overwritten, or whole again."""
        self.is_dirty = is_dirty
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
        return self._busy or self._standing()

    def _standing(self) -> State:
        if self.sleeping:
            return "waking" if self._is_waking else "asleep"
        if self.is_dirty:
            return "dirty"
        return "paused" if self.is_paused else "ready"


_ADVICE: dict[State, str] = {
    "loading": "wait until the worker is ready",
    "paused": "call resume first",
    "draining": "wait until it is over; a worker that ends accepts nothing more",
    "asleep": f"call wake_up first (tags: {', '.join(ALL_TAGS)})",
    "waking": "wake up the other tags first",
    "updating": "wait until the push is committed",
    "dirty": "push whole weights first",
    "failed": "start the worker anew",
}
