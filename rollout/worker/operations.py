"""What changes how the engine computes: one operation at a time, each between two steps.

Owns: the operation under way, and the state that is shown meanwhile. Does not own: the calls that wait for their turn
(`control`), nor what an operation does. Promises: an operation either runs as a whole or leaves everything as it was;
exactly one of its `done` and `cancelled` is called.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from trueroll.errors import DeadlineError, IllegalStateError, TruerollError

from ...engine.request import InFlight, Output
from .. import protocol
from ..protocol import State
from .engine_thread import Run, ServedEngine
from .lifecycle import Lifecycle, Standing


class EngineHost(Protocol):
    """What operations need of the worker around them."""

    def command(self, command: Run, aborts: bool) -> None:
        """Gives the engine a command, which `aborts` what it has or not."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Of the requests that the engine was given, how many have not ended."""
        ...


def settle(engine: ServedEngine, in_flight: InFlight) -> list[Output]:
    """The action of an operation that asks nothing more of the engine."""
    return engine.settle()


@dataclass(eq=False)
class Operation:
    """A call that changes what the engine does.

    `busy`: the state until it is over; None: that of before. `then`: the standing afterwards. With `in_flight` `drain`
    it waits until the engine has nothing unfinished, for at most `timeout` seconds; then `before` is called, and
    `action` runs between two steps. `done` gets the seconds that took, `cancelled` the error that the call is answered
    with. `opens_by`: until when (monotonic seconds) something has to be open first; None once it is.
    """

    call: protocol.LifecycleCall | protocol.PushCall
    busy: State | None
    then: Standing
    done: Callable[[float], None]
    action: Callable[[ServedEngine, InFlight], list[Output]] = settle
    in_flight: InFlight = "recompute"
    timeout: float = float("inf")
    before: Callable[[], None] = lambda: None
    cancelled: Callable[[TruerollError], None] = lambda error: None
    opens_by: float | None = None
    started: float = field(default_factory=time.monotonic)
    run: Run | None = None

    @property
    def deadline(self) -> float:
        return self.started + self.timeout if self.opens_by is None else self.opens_by


class Operations:
    """Runs operations by commands to the engine of `host`. `refuse` answers a call with an error."""

    def __init__(self, host: EngineHost, lifecycle: Lifecycle, refuse: Callable[[str, TruerollError], None]) -> None:
        self.current: Operation | None = None
        self._host, self._lifecycle, self._refuse = host, lifecycle, refuse

    @property
    def deadline(self) -> float:
        """When (monotonic seconds) `follow` has something to do at the latest."""
        return float("inf") if self.current is None or self.current.run else self.current.deadline

    @property
    def is_in_engine(self) -> bool:
        """Whether the engine has been told to do the current one, so that it cannot be cancelled."""
        return self.current is not None and self.current.run is not None

    def begin(self, operation: Operation) -> None:
        """Start an operation; none is under way. Raise IllegalStateError for a drain that would never end."""
        if operation.in_flight == "drain" and self._lifecycle.standing.is_held:
            if count := self._host.num_unfinished:
                raise IllegalStateError(
                    f"{operation.call.type}: cannot drain in state {self._lifecycle.state}, found {count} unfinished "
                    "requests that nothing computes; resume first, or choose in_flight recompute or abort if it is not "
                    "a drain",
                    value=count,
                )
            operation.in_flight = "recompute"  # of nothing: what is there has not begun
        self.current = operation
        self._lifecycle.begin(operation.busy)
        self.follow()

    def follow(self) -> None:
        """Go on with the operation under way, if it can."""
        operation = self.current
        if operation is None or operation.run is not None:
            return
        is_late = time.monotonic() >= operation.deadline
        if operation.opens_by is not None:
            if is_late:
                self.cancel(hangs(operation.call))
        elif operation.in_flight != "drain" or self._host.num_unfinished == 0:
            self._run(operation)
        elif is_late:
            self.cancel(_took_too_long(operation, self._host.num_unfinished))

    def _run(self, operation: Operation) -> None:
        operation.before()
        operation.run = Run(lambda engine: operation.action(engine, operation.in_flight), hold=operation.then.is_held)
        self._host.command(operation.run, aborts=operation.in_flight == "abort")

    def cancel(self, error: TruerollError) -> None:
        """Refuse the current operation, which has not reached the engine: nothing was changed."""
        assert self.current is not None
        operation, self.current = self.current, None
        self._lifecycle.end(self._lifecycle.standing)
        operation.cancelled(error)
        self._refuse(operation.call.id, error)

    def fail(self, error: TruerollError) -> None:
        """The worker has failed: refuse the current operation, however far it is."""
        operation, self.current = self.current, None
        if operation is not None:
            operation.cancelled(error)
            self._refuse(operation.call.id, error)

    def finish(self, run: Run, seconds: float) -> Operation:
        """The engine has done what the current operation asked of it. Returns that."""
        operation, self.current = self.current, None
        assert operation is not None and operation.run is run
        self._lifecycle.end(operation.then)
        operation.done(seconds)
        return operation


def hangs(call: protocol.LifecycleCall | protocol.PushCall) -> DeadlineError:
    """What to answer if the thread of a push does not."""
    assert isinstance(call, protocol.BeginPush)
    return DeadlineError(
        f"push {call.push_id}: the worker hangs, and made no progress within the timeout of {call.timeout:g} s; see "
        "whether its file system answers, then push again"
    )


def _took_too_long(operation: Operation, num_unfinished: int) -> DeadlineError:
    return DeadlineError(
        f"{operation.call.type}: expected running requests to end within its timeout, found {num_unfinished} "
        "unfinished; nothing was changed; try again with more time, or with in_flight recompute or abort"
    )
