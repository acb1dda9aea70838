"""Control of a worker: the lifecycle calls and the push calls.

Owns: the state (`lifecycle`), and the queue of waiting calls. Does not own: the current operation and push (`pushes`),
the socket, the requests, or the engine. The code here runs on the thread of `Worker.run`, and reaches the engine only
through commands.

Guarantees: operations run one at a time, in the order of their calls. Every call gets exactly one reply, even if the
worker shuts down or fails.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trueroll.errors import IllegalStateError, InvalidRequestError, PushError, TruerollError

from ...engine.request import InFlight, Output
from ...weight_sync.transports.policy import PushPolicy
from .. import protocol
from ..monitoring.timings import Histogram, Timings
from .engine_thread import Ran, ServedEngine
from .ledger import Calls
from .lifecycle import Lifecycle
from .pushes import EngineHost, Operation, Operations, Pushes, PushHost, Target, aborted, ending, is_of_push
from .saving import Saving

if TYPE_CHECKING:
    from ...weight_sync.worker.assembly import AdapterDestination, Destination


class Host(PushHost, Protocol):
    """The interface that `Control` needs from the worker."""

    def reply(self, identity: bytes, message: protocol.FromWorker) -> None: ...

    @property
    def instance(self) -> str:
        """A random identifier of the process."""
        ...


class Requests(EngineHost, Protocol):
    """The interface that `Control` needs from the request book."""

    def admit(self) -> None:
        """Send the waiting requests to the engine if `Control.takes_requests` is True."""
        ...


_NEEDS_NO_ENGINE = (protocol.StageBucket, protocol.VerifyPush, protocol.AbortPush)
"""Calls that are handled immediately, even while an operation waits for the engine."""


class Control:
    """Handles control calls (`handle`). Call `follow` after every event and at `deadline`."""

    def __init__(
        self, host: Host, requests: Requests, calls: Calls, timings: Timings, policy: PushPolicy, saving: Saving
    ) -> None:
        self.lifecycle = Lifecycle()
        self._saving = saving
        self._operations = Operations(requests, self.lifecycle, calls.refuse)
        self.pushes = Pushes(host, calls, self.lifecycle, self._operations, timings, policy, saving.interrupt)
        self._host, self._requests, self._calls = host, requests, calls
        self._timings, self._policy = timings, policy
        self._waiting: deque[protocol.LifecycleCall | protocol.PushCall] = deque()

    @property
    def takes_requests(self) -> bool:
        """Return whether new requests may be sent to the engine now."""
        return self.lifecycle.state in ("loading", "ready") and self._operations.current is None

    @property
    def deadline(self) -> float:
        """Time, in monotonic seconds, by which `follow` must be called again."""
        return min(self._operations.deadline, self.pushes.deadline)

    def finish_loading(self, weights: Destination, adapters: AdapterDestination | None, device: str) -> None:
        """Record that the model has loaded. `weights`, `adapters`: destinations of pushes, on `device`."""
        from ...weight_sync.transports.gpu import gpu_of

        self.pushes.target = Target(weights, adapters, device, gpu_of(device))
        self.pushes.served = self._saving.restored
        self.lifecycle.finish_loading()

    def handle(self, identity: bytes, call: protocol.LifecycleCall | protocol.PushCall | protocol.GetWeights) -> None:
        """Handle a call. The reply to the call is sent before this method returns, or later.

        Raise IdConflictError if a different call has the same id, and QueueFullError if too many calls are pending. For
        GetWeights, raise IllegalStateError or UnavailableError if the state does not allow the call. All other errors
        of the call are sent as the reply.
        """
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
                f"{call.type}: the model has not loaded (state {self.lifecycle.state}); wait until the worker is ready",
                value=self.lifecycle.state,
            )
        self.lifecycle.check(call.type)

    def follow(self) -> None:
        """Continue the current operation, then start the calls that are waiting."""
        self._operations.follow()
        self.pushes.follow()
        self._requests.admit()
        while self._waiting and self._operations.current is None:
            self._try(self._waiting.popleft())
            self._requests.admit()  # so that a later call, such as a drain, covers earlier requests
        if self._operations.current is None and self.pushes.target is not None:
            self._saving.follow(self.pushes.served, self._host.versions().base, self.lifecycle.standing)

    def handle_ran(self, event: Ran) -> None:
        """Record that the engine has finished the action of the current operation."""
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
        """Return the operation for a call; None if the worker is already in the requested state.

        Raise TruerollError if the call is not possible.
        """
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
            case protocol.UnloadAdapter():
                return self._unload(call)
            case protocol.SaveWeights():
                return self._save(call)
            case protocol.GetChecksums():
                return self._compute_checksums(call)

    def _done(self, call: protocol.LifecycleCall, took: Histogram | None = None) -> Callable[[float], None]:
        """Return the `done` callback for a call.

        `took`: histogram that records the time from now until the operation is done.
        """
        started = time.monotonic()

        def done(seconds: float) -> None:
            if took is not None:
                took.observe(time.monotonic() - started)
            self._reply_status(call.id)

        return done

    def _sleep(self, call: protocol.Sleep) -> Operation:
        if call.level == 2 and "weights" in call.tags:
            self.pushes.check_no_adapters("sleep")
        then = self.lifecycle.standing.slept(call.tags, call.level == 2 and "weights" in call.tags)
        slept = PushError("push: the weights went to sleep before the commit; wake up the weights and push again")
        reply = self._done(call, self._timings.sleep)

        def sleep(engine: ServedEngine, in_flight: InFlight) -> list[Output]:
            assert in_flight != "keep"
            if "weights" in call.tags:
                self._saving.interrupt()
            return engine.sleep(call.level, call.tags, in_flight)

        def before() -> None:
            if "weights" in call.tags:
                self.pushes.break_off(slept)

        def done(seconds: float) -> None:
            if then.is_dirty:
                self.pushes.served = None
            reply(seconds)

        return Operation(call, "draining", then, done, sleep, call.in_flight, call.timeout, before)

    def _unload(self, call: protocol.UnloadAdapter) -> Operation:
        if call.name not in self._host.versions().adapters:
            text = f"unload_adapter: adapter {call.name!r} is not loaded"
            raise InvalidRequestError(text, field="name", value=call.name)

        def remove(engine: ServedEngine, in_flight: InFlight) -> list[Output]:
            return engine.remove_adapter(call.name)

        def done(seconds: float) -> None:
            del self.pushes.served_adapters[call.name]
            self._reply_status(call.id)

        standing = self.lifecycle.standing
        return Operation(call, None, standing, done, remove, in_flight="abort", adapter=call.name)

    def _save(self, call: protocol.SaveWeights) -> Operation:
        from ...weight_sync.worker.saving import save_weights

        push_id, version, weights = self.pushes.served, self._host.versions().base, self.pushes.weights
        if push_id is None:
            raise PushError(
                "save_weights: only pushed weights can be saved, but this worker serves the original checkpoint; "
                "use the original checkpoint"
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
            text = f"{call.type}: is not allowed in state dirty (incomplete weights); push whole weights first"
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
                renamed=dict(weights.renamed),
                respelled=dict(weights.respelled),
                left_out=weights.left_out,
                weight_version=self._host.versions().base,
                push_id=self.pushes.served,
            )
            self._calls.answer(call.id, reply)

        return Operation(call, None, self.lifecycle.standing, done, compute)

    def _abort_push(self, call: protocol.AbortPush) -> None:
        operation = self._operations.current
        if operation is not None and is_of_push(operation.call, call.push_id):
            if operation.run is not None:
                self._waiting.appendleft(call)  # too late to abort, so reply after the operation
                return
            self._operations.cancel(aborted())
        for waiting in [waiting for waiting in self._waiting if is_of_push(waiting, call.push_id)]:
            self._waiting.remove(waiting)
            self._calls.refuse(waiting.id, aborted())
        self.pushes.abort(call)

    def _describe_weights(self, call: protocol.GetWeights) -> protocol.Weights:
        assert self.pushes.target is not None
        weights, _, _, gpu = self.pushes.target
        return protocol.Weights(
            id=call.id,
            dtype=weights.dtype,
            dtypes=dict(weights.dtypes),
            shapes=dict(weights.shapes),
            parts={name: tuple(parts) for name, parts in weights.parts.items()},
            tied=dict(weights.tied),
            ignored=tuple(sorted(weights.ignored)),
            optional=tuple(sorted(weights.optional)),
            renamed=dict(weights.renamed),
            respelled=dict(weights.respelled),
            left_out=weights.left_out,
            quantization=weights.quantization,
            weight_version=self._host.versions().base,
            adapters=dict(self._host.versions().adapters),
            push_id=self.pushes.served,
            gpu=gpu,
            kin=weights.kin,
            instance=self._host.instance,
        )

    def _reply_status(self, id: str) -> None:
        state = self.lifecycle.state
        self._calls.answer(id, protocol.Status(id=id, state=state, weight_version=self._host.versions().base))

    def start_ending(self) -> None:
        """Refuse waiting calls, and cancel the current operation if the engine has not received the operation yet."""
        if self._operations.current is not None and not self._operations.is_in_engine:
            self._operations.cancel(ending())
        self._refuse_waiting(ending())
        self.lifecycle.start_ending()

    def fail_calls(self, error: TruerollError) -> None:
        """Answer every pending call with `error`."""
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
