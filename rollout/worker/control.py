"""Calls that control a worker: what it does beside serving requests.

Owns: the state (`lifecycle`), and the calls that wait for their turn. Does not own: the operation and the push under
way (`pushes`), the socket, the requests, the engine. It runs on the worker's thread; what touches the engine goes there
as a command.

Promises: one operation at a time, in the order of the calls; every call gets exactly one reply, also when the worker
ends or fails.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trueroll.errors import IllegalStateError, PushError, TruerollError

from ...engine.request import InFlight, Output
from ...weight_sync.transports.policy import PushPolicy
from .. import protocol
from ..monitoring.timings import Histogram, Timings
from .engine_thread import Ran, ServedEngine
from .ledger import Calls
from .lifecycle import Lifecycle
from .pushes import EngineHost, Operation, Operations, Pushes, PushHost, Target, aborted, ending, is_of_push

if TYPE_CHECKING:
    from ...weight_sync.worker.assembly import Destination


class Host(PushHost, Protocol):
    """What control needs of the worker around it."""

    def reply(self, identity: bytes, message: protocol.FromWorker) -> None: ...

    @property
    def instance(self) -> str:
        """Random for each process."""
        ...


class Requests(EngineHost, Protocol):
    """What control needs of the requests beside it."""

    def admit(self) -> None:
        """Gives the engine the requests that wait, if `Control.takes_requests`."""
        ...


_NEEDS_NO_ENGINE = (protocol.StageBucket, protocol.VerifyPush, protocol.AbortPush)
"""Calls that go on while an operation waits for the engine."""


class Control:
    """Takes control calls by `handle`; `follow` is to be called whenever something may have changed."""

    def __init__(self, host: Host, requests: Requests, calls: Calls, timings: Timings, policy: PushPolicy) -> None:
        self.lifecycle = Lifecycle()
        self._operations = Operations(requests, self.lifecycle, calls.refuse)
        self.pushes = Pushes(host, calls, self.lifecycle, self._operations, timings, policy)
        self._host, self._requests, self._calls = host, requests, calls
        self._timings, self._policy = timings, policy
        self._waiting: deque[protocol.LifecycleCall | protocol.PushCall] = deque()

    @property
    def takes_requests(self) -> bool:
        """Whether the engine may be given a new request now."""
        return self.lifecycle.state in ("loading", "ready") and self._operations.current is None

    @property
    def deadline(self) -> float:
        """When (monotonic seconds) `follow` has something to do at the latest."""
        return min(self._operations.deadline, self.pushes.deadline)

    def finish_loading(self, weights: Destination, device: str) -> None:
        """The model has loaded; `weights` is where pushes go, on `device`."""
        from ...weight_sync.transports.gpu import gpu_of

        self.pushes.target = Target(weights, device, gpu_of(device))
        self.lifecycle.finish_loading()

    def handle(self, identity: bytes, call: protocol.LifecycleCall | protocol.PushCall | protocol.GetWeights) -> None:
        """Take a call, and answer it now or later. Raises IdConflictError; for GetWeights IllegalStateError."""
        if isinstance(call, protocol.GetWeights):
            self._check(call)
            self._host.reply(identity, self._describe_weights(call))
        elif self._calls.is_new(call.id, identity, call):
            self._take(call)

    def _take(self, call: protocol.LifecycleCall | protocol.PushCall) -> None:
        try:
            self._check(call)
        except TruerollError as error:
            self._calls.refuse(call.id, error)
            return
        if isinstance(call, _NEEDS_NO_ENGINE):
            self._try(call)
        else:
            self._waiting.append(call)
            self.follow()

    def _check(self, call: protocol.LifecycleCall | protocol.PushCall | protocol.GetWeights) -> None:
        if self.pushes.target is None:
            raise IllegalStateError(
                f"{call.type}: expected a model that has loaded, found state {self.lifecycle.state}; wait for ready",
                value=self.lifecycle.state,
            )
        self.lifecycle.check(call.type)

    def follow(self) -> None:
        """Go on with the operation under way, and begin what waits."""
        self._operations.follow()
        self.pushes.follow()
        self._requests.admit()
        while self._waiting and self._operations.current is None:
            self._try(self._waiting.popleft())
            self._requests.admit()  # a call that comes after a request, such as a drain, is about it too

    def handle_ran(self, event: Ran) -> None:
        """The engine has done what the operation under way asked of it."""
        self._operations.finish(event.command, event.seconds)
        self.follow()

    def _try(self, call: protocol.LifecycleCall | protocol.PushCall) -> None:
        try:
            self._start(call)
        except TruerollError as error:
            self._calls.refuse(call.id, error)

    def _start(self, call: protocol.LifecycleCall | protocol.PushCall) -> None:
        self.lifecycle.check(call.type)
        match call:
            case protocol.BeginPush():
                self.pushes.begin(call)
            case protocol.StageBucket() | protocol.VerifyPush():
                self.pushes.pass_on(call)
            case protocol.CommitPush():
                self.pushes.commit(call)
            case protocol.AbortPush():
                self._abort_push(call)
            case _:
                if (operation := self._operation_of(call)) is None:
                    self._reply_status(call.id)
                else:
                    self._operations.begin(operation)

    def _operation_of(self, call: protocol.LifecycleCall) -> Operation | None:
        """What a call asks for; None if that is the state already. Raise TruerollError if it cannot be done."""
        standing = self.lifecycle.standing
        match call:
            case protocol.Pause() | protocol.Resume():
                pauses = isinstance(call, protocol.Pause)
                is_so = pauses == standing.is_paused
                return None if is_so else Operation(call, "paused", standing.paused(pauses), self._done(call))
            case protocol.Drain():
                then, done = standing.paused(True), self._done(call)
                return Operation(call, "draining", then, done, in_flight="drain", timeout=call.timeout)
            case protocol.Sleep():
                return self._sleep(call)
            case protocol.WakeUp():
                if standing.sleeping.isdisjoint(call.tags):
                    return None
                done = self._done(call, self._timings.wake_up)
                return Operation(call, "waking", standing.woken(call.tags), done, _wake_up(call))
            case protocol.Invalidate():
                return Operation(call, None, standing, self._done(call), _invalidate)
            case protocol.SaveWeights():
                return self._save(call)
            case protocol.GetChecksums():
                return self._compute_checksums(call)

    def _done(self, call: protocol.LifecycleCall, took: Histogram | None = None) -> Callable[[float], None]:
        """What to do once the engine has done what a call asks for. `took` observes the seconds from now on."""
        started = time.monotonic()

        def done(seconds: float) -> None:
            if took is not None:
                took.observe(time.monotonic() - started)
            self._reply_status(call.id)

        return done

    def _sleep(self, call: protocol.Sleep) -> Operation:
        then = self.lifecycle.standing.slept(call.tags, call.level == 2 and "weights" in call.tags)
        slept = PushError("push: the weights that it was to replace went to sleep; wake them up and push again")
        reply = self._done(call, self._timings.sleep)

        def sleep(engine: ServedEngine, in_flight: InFlight) -> list[Output]:
            return engine.sleep(call.level, call.tags, in_flight)

        def before() -> None:
            if "weights" in call.tags:
                self.pushes.break_off(slept)

        def done(seconds: float) -> None:
            if then.is_dirty:
                self.pushes.served = None
            reply(seconds)

        return Operation(call, "draining", then, done, sleep, call.in_flight, call.timeout, before)

    def _save(self, call: protocol.SaveWeights) -> Operation:
        from ...weight_sync.worker.saving import save_weights

        push_id, version, weights = self.pushes.served, self._host.weight_version(), self.pushes.weights
        if push_id is None:
            raise PushError(
                "save_weights: expected weights that a push brought, found those of the model's own checkpoint; load it"
            )
        self._policy.check_writable(call.folder)
        failed: list[PushError] = []

        def save(engine: ServedEngine, in_flight: InFlight) -> list[Output]:
            try:
                save_weights(Path(call.folder), push_id, version, weights)
            except PushError as error:
                failed.append(error)
            return []

        def done(seconds: float) -> None:
            self._calls.refuse(call.id, failed[0]) if failed else self._reply_status(call.id)

        return Operation(call, None, self.lifecycle.standing, done, save)

    def _compute_checksums(self, call: protocol.GetChecksums) -> Operation:
        from ...weight_sync.worker.adapters import served_checksums

        self.lifecycle.check_weights_awake(call.type)
        if self.lifecycle.standing.is_dirty:
            text = f"{call.type}: expected whole weights, found state dirty; push some first"
            raise IllegalStateError(text, value="dirty")
        weights, checksums = self.pushes.weights, {}

        def compute(engine: ServedEngine, in_flight: InFlight) -> list[Output]:
            checksums.update(served_checksums(weights))
            return engine.settle()

        def done(seconds: float) -> None:
            reply = protocol.Checksums(
                id=call.id,
                dtype=weights.dtype,
                dtypes=dict(weights.dtypes),
                checksums=checksums,
                weight_version=self._host.weight_version(),
                push_id=self.pushes.served,
            )
            self._calls.answer(call.id, reply)

        return Operation(call, None, self.lifecycle.standing, done, compute)

    def _abort_push(self, call: protocol.AbortPush) -> None:
        operation = self._operations.current
        if operation is not None and is_of_push(operation.call, call.push_id):
            if operation.run is not None:
                self._waiting.appendleft(call)  # too late to stop it: the answer follows when it is over
                return
            self._operations.cancel(aborted())
        for waiting in [waiting for waiting in self._waiting if is_of_push(waiting, call.push_id)]:
            self._waiting.remove(waiting)
            self._calls.refuse(waiting.id, aborted())
        self.pushes.abort(call)

    def _describe_weights(self, call: protocol.GetWeights) -> protocol.Weights:
        assert self.pushes.target is not None
        weights, _, gpu = self.pushes.target
        return protocol.Weights(
            id=call.id,
            dtype=weights.dtype,
            dtypes=dict(weights.dtypes),
            shapes=dict(weights.shapes),
            parts={name: tuple(parts) for name, parts in weights.parts.items()},
            tied=dict(weights.tied),
            ignored=tuple(sorted(weights.ignored)),
            weight_version=self._host.weight_version(),
            push_id=self.pushes.served,
            gpu=gpu,
            kin=weights.kin,
            instance=self._host.instance,
        )

    def _reply_status(self, id: str) -> None:
        state = self.lifecycle.state
        self._calls.answer(id, protocol.Status(id=id, state=state, weight_version=self._host.weight_version()))

    def start_ending(self) -> None:
        """Refuse what waits and what has not reached the engine; an operation that has goes on."""
        if self._operations.current is not None and not self._operations.is_in_engine:
            self._operations.cancel(ending())
        self._refuse_waiting(ending())
        self.lifecycle.start_ending()

    def fail_calls(self, error: TruerollError) -> None:
        """Answer every call with `error`."""
        self._operations.fail(error)
        self._refuse_waiting(error)

    def _refuse_waiting(self, error: TruerollError) -> None:
        self.pushes.break_off_unless_committing(error)
        while self._waiting:
            self._calls.refuse(self._waiting.popleft().id, error)


def _wake_up(call: protocol.WakeUp) -> Callable[[ServedEngine, InFlight], list[Output]]:
    def wake(engine: ServedEngine, in_flight: InFlight) -> list[Output]:
        engine.wake_up(call.tags)
        return []

    return wake


def _invalidate(engine: ServedEngine, in_flight: InFlight) -> list[Output]:
    engine.invalidate_prefix_cache()
    return []
