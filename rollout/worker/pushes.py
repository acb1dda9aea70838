"""The weight pushes of a worker: the push in progress, and the push that delivered the served weights.

`Pushes` owns the destination of pushes, the current push with its thread, and the calls that wait for that thread.
`Operations` owns the current operation, which is a call that the engine executes between two steps. This module does
not own the transport and the received bytes (`weight_sync.worker.receiver`), or the queue of waiting calls (`control`).
The code here runs on the thread of `Worker.run`. Only the staging of a push runs on a separate thread, because staging
is slow.

Guarantees:

- An operation either runs completely or changes nothing. For each operation, either `done` or `cancelled` is called,
  exactly once.
- A push is committed as a whole or not at all. A failed push leaves the weights unchanged, unless the push is in place
  and fails after its source was opened: in this case, the worker becomes `dirty`. The staging of a failed push is
  freed.
- If the thread of a push hangs, the push is abandoned `MARGIN_SECONDS` after its timeout. While `MOST_ABANDONED`
  abandoned threads still run, new pushes are refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from trueroll.errors import (
    DeadlineError,
    IllegalStateError,
    OtherBaseError,
    PushError,
    TruerollError,
    UnavailableError,
    VersionGapError,
)

from ...engine.request import InFlight, Output
from ...weight_sync.transports.policy import PushPolicy
from ...weight_sync.worker.events import Broken, Opened, PushEvent, Reached
from .. import protocol
from ..monitoring.timings import Timings
from ..protocol import State
from .admission import Versions
from .engine_thread import Run, ServedEngine
from .ledger import Calls
from .lifecycle import Lifecycle, Standing

if TYPE_CHECKING:
    from ...weight_sync.payload.manifest import LentSource
    from ...weight_sync.worker.assembly import AdapterDestination, Destination, StagingArea
    from ...weight_sync.worker.receiver import Receiver

MARGIN_SECONDS = 5.0
"""Additional time, in seconds, in which the thread of a push can report a timeout itself, because the thread's error is
more precise.
"""
MOST_ABANDONED = 4
NO_VERSION = -1
"""The version of an adapter that is not loaded: smaller than any version."""

log = logging.getLogger(__name__)


class EngineHost(Protocol):
    """The interface that `Operations` needs from the worker."""

    def command(self, command: Run, aborts: bool, adapter: str | None = None) -> None:
        """Send the engine a command. `aborts`: whether the command aborts requests. If it does, it aborts all
        requests of `adapter`; if `adapter` is None, it aborts all requests in the engine.
        """
        ...

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished requests in the engine."""
        ...

    @property
    def num_one_version(self) -> int:
        """Number of unfinished requests in the engine that set `one_version`."""
        ...


def settle(engine: ServedEngine, in_flight: InFlight) -> list[Output]:
    """The default action of an operation: wait for the engine's step in flight, and return the outputs of the step."""
    return engine.settle()


@dataclass(eq=False)
class Operation:
    """A call that the engine executes between two steps.

    - `busy`: state of the worker during the operation; None keeps the current state. `then`: the worker's `Standing`
      after the operation.
    - `in_flight`: what happens to running requests. With `drain`, the operation first waits up to `timeout` seconds for
      the engine to finish all requests.
    - `before`: called right before `action` is sent to the engine. The engine runs `action` between two steps.
    - `done`: called with the duration of `action`, in seconds. `cancelled`: called with the error that becomes the
      reply to the call.
    - `adapter`: if given, `in_flight` applies only to running requests of this named adapter. A drain waits for all
      requests, even if `adapter` is given.
    - `opens_by`: for a push in place, the time by which the source must be open, in monotonic seconds. The operation of
      a push in place waits until the source is open. `opens_by` is None if the operation does not wait for a source.
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
    adapter: str | None = None
    started: float = field(default_factory=time.monotonic)
    run: Run | None = None

    @property
    def deadline(self) -> float:
        return self.started + self.timeout if self.opens_by is None else self.opens_by


class Operations:
    """Runs operations by sending commands to the engine of `host`. `refuse`: answers a call with an error."""

    def __init__(self, host: EngineHost, lifecycle: Lifecycle, refuse: Callable[[str, TruerollError], None]) -> None:
        self.current: Operation | None = None
        self._host, self._lifecycle, self._refuse = host, lifecycle, refuse

    @property
    def deadline(self) -> float:
        """Time, in monotonic seconds, by which `follow` must be called again."""
        return float("inf") if self.current is None or self.current.run else self.current.deadline

    @property
    def is_in_engine(self) -> bool:
        """Return whether the current operation was sent to the engine and can no longer be cancelled."""
        return self.current is not None and self.current.run is not None

    def begin(self, operation: Operation) -> None:
        """Start an operation. No other operation may be running.

        Raise IllegalStateError for a drain that would never end because the engine does not step. Raise PushError if
        the operation keeps old KV while a request with `one_version` is unfinished.
        """
        self.check_keeping(operation.call, operation.in_flight)
        if operation.in_flight == "drain" and self._lifecycle.standing.is_held:
            if count := self._host.num_unfinished:
                way_out = "" if operation.call.type == "drain" else ", or set in_flight to recompute or abort"
                raise IllegalStateError(
                    f"{operation.call.type}: the worker is {self._lifecycle.state} and computes nothing, so its "
                    f"{count} unfinished requests cannot be drained; call resume first{way_out}",
                    value=count,
                )
            operation.in_flight = "recompute"  # no effect, because the engine has no requests
        self.current = operation
        self._lifecycle.begin(operation.busy)
        self.follow()

    def check_keeping(self, call: protocol.LifecycleCall | protocol.PushCall, in_flight: InFlight) -> None:
        """Raise PushError if `in_flight` keeps old KV while a request with `one_version` is unfinished."""
        if in_flight == "keep" and (count := self._host.num_one_version):
            raise PushError(
                f"{call.type}: in_flight keep would draw samples of {count} unfinished requests that set one_version "
                "with two versions; push again when they have finished, or set in_flight to recompute, drain or abort",
                field="in_flight",
                value="keep",
            )

    def follow(self) -> None:
        """Send the current operation to the engine if the engine may run the operation now.

        Cancel the operation after its deadline.
        """
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
        self._host.command(operation.run, operation.in_flight == "abort", operation.adapter)

    def cancel(self, error: TruerollError) -> None:
        """Cancel the current operation, and answer its call with an error.

        The operation must not have been sent to the engine.
        """
        assert self.current is not None
        operation, self.current = self.current, None
        self._lifecycle.end(self._lifecycle.standing)
        operation.cancelled(error)
        self._refuse(operation.call.id, error)

    def fail(self, error: TruerollError) -> None:
        """Answer the call of the current operation with an error, because the worker has failed."""
        operation, self.current = self.current, None
        if operation is not None:
            operation.cancelled(error)
            self._refuse(operation.call.id, error)

    def finish(self, run: Run, seconds: float) -> None:
        """Finish the current operation after the engine has run the operation's action."""
        operation, self.current = self.current, None
        assert operation is not None and operation.run is run
        self._lifecycle.end(operation.then)
        operation.done(seconds)


def hangs(call: protocol.LifecycleCall | protocol.PushCall) -> DeadlineError:
    """Return the error that a pending call of a push gets if the thread of the push hangs."""
    assert isinstance(call, protocol.BeginPush)
    return DeadlineError(
        f"push {call.push_id}: the worker made no progress within the timeout of {call.timeout:g} s; check that the "
        "worker's file system responds, then push again"
    )


def _took_too_long(operation: Operation, num_unfinished: int) -> DeadlineError:
    return DeadlineError(
        f"{operation.call.type}: timed out with {num_unfinished} unfinished requests, and changed nothing; try again "
        "with a longer timeout, or set in_flight to recompute or abort"
    )


class PushHost(Protocol):
    """The interface that `Pushes` needs from the worker."""

    def publish_event(self, event: PushNews) -> None:
        """Pass the event to `Pushes.handle_news`. May be called from any thread."""
        ...

    def versions(self) -> Versions: ...


@dataclass(eq=False)
class Push:
    """A push in progress.

    `calls`: maps the id of each call that waits for the thread of the push to the call's deadline, in monotonic
    seconds. `staging`: the staged weights, from verification until the end of the push. `staging` is None before
    verification and after the push, so that the memory is freed even if a reference to the push remains.
    `is_committing`: the commit has begun.
    """

    begin: protocol.BeginPush
    receiver: Receiver
    calls: dict[str, float] = field(default_factory=dict)
    staging: StagingArea | None = None
    is_committing: bool = False

    def expect(self, id: str, seconds: float) -> None:
        """Register a call that waits for the thread of the push, for at most `seconds` plus `MARGIN_SECONDS`."""
        self.calls[id] = time.monotonic() + seconds + MARGIN_SECONDS

    @property
    def deadline(self) -> float:
        return min(self.calls.values(), default=float("inf"))


@dataclass(frozen=True)
class PushNews:
    """An event of `push`, sent by the thread that receives the push."""

    push: Push
    event: PushEvent


class Target(NamedTuple):
    """The destination of pushes and its device. `adapters`: the destination of named adapters, or None. `gpu`: UUID of
    the device if the device is a GPU.
    """

    weights: Destination
    adapters: AdapterDestination | None
    device: str
    gpu: str | None


class Pushes:
    """Handles the push calls that `Control` has checked.

    `target`: destination of pushes; None until the model has loaded. `served`: id of the push that the served weights
    come from; None if the weights come from the checkpoint or are lost. `served_adapters`: for each named adapter, the
    id of the push that delivered the adapter. `before_change`: called on any thread before the live weights change.
    """

    def __init__(
        self,
        host: PushHost,
        calls: Calls,
        lifecycle: Lifecycle,
        operations: Operations,
        timings: Timings,
        policy: PushPolicy,
        before_change: Callable[[], None],
    ) -> None:
        self.target: Target | None = None
        self.served: str | None = None
        self.served_adapters: dict[str, str] = {}
        self._host, self._calls, self._lifecycle, self._operations = host, calls, lifecycle, operations
        self._timings, self._policy, self._before_change = timings, policy, before_change
        self._push: Push | None = None
        self._abandoned: list[Receiver] = []
        """Receivers that had not responded when their push was dropped."""

    @property
    def weights(self) -> Destination:
        """The destination of pushes. Use this property only after the model has loaded."""
        assert self.target is not None, "calls are refused until the model has loaded"
        return self.target.weights

    @property
    def deadline(self) -> float:
        """Time, in monotonic seconds, by which `follow` must be called again."""
        return float("inf") if self._push is None else self._push.deadline

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging memory that the current push holds in addition to the live weights.

        May be called from any thread.
        """
        push = self._push
        staging = push and (push.staging or push.receiver.staging)
        return 0 if staging is None else staging.num_bytes

    def progress(self) -> protocol.PushProgress | None:
        """Return the progress of the current push, for `health`. May be called from any thread."""
        push = self._push
        if push is None:
            return None
        begin, progress = push.begin, push.receiver.progress
        return protocol.PushProgress(
            push_id=begin.push_id,
            weight_version=begin.weight_version,
            transport=begin.source.kind,
            phase=progress.phase,
            in_place=begin.in_place,
            bytes_staged=progress.bytes_staged,
            seconds=time.monotonic() - progress.started,
        )

    def begin(self, call: protocol.BeginPush) -> None:
        """Begin a push, which replaces the current push. Raise TruerollError if the push is refused."""
        self._lifecycle.check_weights_awake(call.type)
        self._check_abandoned()
        if call.adapter is None:
            self.check_no_adapters("push")
            version = self._host.versions().base
        else:
            assert self.target is not None
            _check_named(call, call.adapter, self.target.adapters, self._lifecycle.standing)
            version = self._host.versions().adapters.get(call.adapter, NO_VERSION)
        check_begin(call, self.weights.dtype, version, self._lifecycle.standing, self.served)
        if call.in_place:
            self._begin_in_place(call)
            return
        if self._push is not None:
            self.break_off(_superseded_by(call))
        if self._lifecycle.is_ending:
            raise ending()
        self._push = self._new_push(call)

    def check_no_adapters(self, what: str) -> None:
        """Raise IllegalStateError if a named adapter is loaded, because its base weights must not change."""
        if names := list(self.served_adapters):
            text = f"{what}: named adapters belong to the present weights ({', '.join(names[:5])!a:.300})"
            raise IllegalStateError(f"{text}; unload the adapters first", value=len(names))

    def _begin_in_place(self, call: protocol.BeginPush) -> None:
        """Begin a push in place: first open the source of the push. Once the source is open, interrupt the engine,
        which releases its weights.
        """

        def interrupt(engine: ServedEngine, in_flight: InFlight) -> list[Output]:
            return engine.interrupt(in_flight)

        operation = Operation(
            call,
            "updating",
            self._lifecycle.standing.overwritten(is_whole=False),
            lambda seconds: self._overwrite(push),
            interrupt,
            call.in_flight,
            call.drain_timeout,
            lambda: self.break_off(_superseded_by(call)),
            opens_by=float("inf"),
        )
        self._operations.begin(operation)
        try:
            push = self._new_push(call)
        except PushError as error:
            self._operations.cancel(error)
            return
        operation.opens_by = push.deadline
        operation.cancelled = lambda error: self._close(push, is_owing=operation.opens_by is not None)

    def _overwrite(self, push: Push) -> None:
        """Allow a push in place to overwrite the weights. Called after the engine has released its weights."""
        self.served = None
        if self._lifecycle.is_ending:
            self._close(push, is_owing=False)
            self._calls.refuse(push.begin.id, ending())
            return
        push.expect(push.begin.id, push.begin.timeout)
        self._push = push
        self._before_change()
        push.receiver.proceed()

    def _new_push(self, call: protocol.BeginPush) -> Push:
        """Return a new push, and start its thread. Raise PushError if the thread cannot be started."""
        from ...weight_sync.deltas.chain import Served
        from ...weight_sync.worker.receiver import Receiver, begin_seconds

        assert self.target is not None
        log.info("push %s of version %d begins (%s)", call.push_id, call.weight_version, call.source.kind)
        weights, named, device, _ = self.target
        is_whole = not self._lifecycle.standing.is_dirty
        served = Served(self._host.versions().base, self.served) if is_whole else None

        def publish(event: PushEvent) -> None:
            self._host.publish_event(PushNews(push, event))

        receiver = Receiver(call, weights, publish, device, self._policy, served, named)
        push = Push(call, receiver)
        try:
            receiver.start()
        except RuntimeError:
            raise _no_thread() from None
        push.expect(call.id, begin_seconds(call))
        return push

    def pass_on(self, call: protocol.StageBucket | protocol.VerifyPush) -> None:
        """Pass a call to the thread of its push. Raise TruerollError if the push is not in progress."""
        push = self._find(call.push_id)
        if push.is_committing:
            raise PushError(f"{call.type}: the push is already being committed; wait for the reply to commit_push")
        if isinstance(call, protocol.VerifyPush):
            # Check before the commit: when this worker refuses its commit, other workers may have committed already.
            self._operations.check_keeping(call, push.begin.in_flight)
        push.expect(call.id, push.begin.timeout)
        push.receiver.take(call)

    def _find(self, push_id: str) -> Push:
        if self._push is None or self._push.begin.push_id != push_id:
            if self._lifecycle.is_ending:
                raise ending()  # the shutdown ended the push, and this worker accepts no new push
            raise PushError(f"push: {push_id} is not in progress; begin the push again")
        return self._push

    def commit(self, call: protocol.CommitPush) -> None:
        """Commit the staged weights to the engine. Raise TruerollError if the push is not verified."""
        if self._push is None and self._is_served(call.push_id):
            self._reply(call.id, call.push_id, "committed")
            return
        push = self._find(call.push_id)
        if push.staging is None:
            raise PushError("commit_push: the push was not verified; call verify_push first")
        self._lifecycle.check_weights_awake(call.type)
        begin, name, versions = push.begin, push.begin.adapter, self._host.versions()
        if name is not None and call.in_flight == "keep":
            raise _no_keeping()
        served = versions.base if name is None else versions.adapters.get(name, NO_VERSION)
        if begin.allow_older and begin.weight_version <= served:
            log.warning(
                "push %s: version %d replaces version %d, because the trainer set allow_older; samples "
                "from different weights may now have the same version",
                call.push_id,
                begin.weight_version,
                served,
            )

        def take(engine: ServedEngine, in_flight: InFlight) -> list[Output]:
            if name is None:
                self._before_change()
                return engine.commit_weights(push.staging, begin.weight_version, in_flight)
            assert in_flight != "keep"
            return engine.commit_adapter(push.staging, name, begin.weight_version, in_flight)

        then = self._lifecycle.standing.overwritten(is_whole=True)
        operation = Operation(
            call,
            "updating",
            then,
            lambda seconds: self._finish_commit(call, push, seconds),
            take,
            call.in_flight,
            call.timeout,
            cancelled=self.break_off,
            adapter=name,
        )
        self._operations.begin(operation)
        push.is_committing = True
        push.receiver.close()  # from now on, the thread of the push receives no calls
        if push.calls:
            self._refuse_all(push, PushError("push: the commit has begun, so this call was cancelled"))

    def _finish_commit(self, call: protocol.CommitPush, push: Push, seconds: float) -> None:
        self._timings.commit_pause.observe(seconds)
        self._timings.push.observe(time.monotonic() - push.receiver.progress.started)
        self._push, push.staging = None, None
        if (name := push.begin.adapter) is None:
            self.served = call.push_id
        else:
            self.served_adapters[name] = call.push_id
        of_adapter = "" if name is None else f" of adapter {name!r}"
        log.info("push %s: serving version %d%s", call.push_id, push.begin.weight_version, of_adapter)
        self._reply(call.id, call.push_id, "committed", seconds)

    def abort(self, call: protocol.AbortPush) -> None:
        """Abort a push that is in progress, and reply with the phase of the push.

        Raise UnavailableError during shutdown.
        """
        if self._push is not None and self._push.begin.push_id == call.push_id:
            self.break_off(aborted())
        if self._lifecycle.is_ending:
            raise ending()  # the trainer then treats this worker, and the memory that it offered, as lost
        self._reply(call.id, call.push_id, "committed" if self._is_served(call.push_id) else "aborted")

    def _is_served(self, push_id: str) -> bool:
        return push_id == self.served or push_id in self.served_adapters.values()

    def break_off(self, error: TruerollError) -> None:
        """Drop the current push, if any, and answer its waiting calls with an error."""
        push, self._push = self._push, None
        if push is None:
            return
        log.warning("push %s of version %d failed: %s", push.begin.push_id, push.begin.weight_version, error)
        is_owing = bool(push.calls)
        self._refuse_all(push, error)
        self._close(push, is_owing)

    def break_off_unless_committing(self, error: TruerollError) -> None:
        """Drop the current push if its commit has not begun."""
        if self._push is not None and not self._push.is_committing:
            self.break_off(error)

    def follow(self) -> None:
        """Abandon the current push if its thread hangs."""
        if self._push is not None and time.monotonic() >= self._push.deadline:
            self.break_off(hangs(self._push.begin))

    def handle_news(self, news: PushNews) -> None:
        """Handle an event from the thread of a push."""
        if self._is_opening(news.push):
            self._handle_opening(news.event)
            return
        if news.push is not self._push or news.push.is_committing:
            return  # the push is over or being committed, so no call waits for this event
        match news.event:
            case Broken(error):
                self.break_off(error)
            case Reached(id, phase, lent):
                if phase == "verified" and news.push.staging is None:
                    news.push.staging = news.push.receiver.staging
                    self._timings.stage.observe(time.monotonic() - news.push.receiver.progress.started)
                del news.push.calls[id]
                self._reply(id, news.push.begin.push_id, phase, lent=lent)

    def _is_opening(self, push: Push) -> bool:
        """Return whether the current operation waits for this push's source to open."""
        operation = self._operations.current
        return operation is not None and operation.opens_by is not None and operation.call is push.begin

    def _handle_opening(self, event: PushEvent) -> None:
        """Handle an event while a push in place waits for its source.

        Once the source is open, interrupt the engine. If the source could not be opened, cancel the operation, and
        leave the weights unchanged.
        """
        operation = self._operations.current
        assert operation is not None
        match event:
            case Broken(error):
                self._operations.cancel(error)
            case Opened():
                operation.opens_by, operation.started = None, time.monotonic()
                self._operations.follow()

    def _close(self, push: Push, is_owing: bool) -> None:
        """Release a push. `is_owing`: True if the thread of the push has not responded to a call yet. A thread that
        owes a response may be stuck.
        """
        self._abandoned += [push.receiver] * is_owing
        push.receiver.close()
        push.staging = None

    def _refuse_all(self, push: Push, error: TruerollError) -> None:
        while push.calls:
            self._calls.refuse(push.calls.popitem()[0], error)

    def _check_abandoned(self) -> None:
        """Raise PushError if too many abandoned threads still run."""
        self._abandoned = [receiver for receiver in self._abandoned if receiver.is_alive()]
        if len(self._abandoned) >= MOST_ABANDONED:
            raise PushError(
                f"begin_push: {len(self._abandoned)} abandoned pushes are still running (limit {MOST_ABANDONED}); try "
                "again later; if these pushes hang, for example because a file system does not respond, repair the "
                "file system or restart the worker"
            )

    def _reply(
        self,
        id: str,
        push_id: str,
        phase: protocol.PushPhase,
        pause_seconds: float | None = None,
        lent: LentSource | None = None,
    ) -> None:
        reply = protocol.PushStatus(
            id=id,
            push_id=push_id,
            phase=phase,
            state=self._lifecycle.state,
            weight_version=self._host.versions().base,
            pause_seconds=pause_seconds,
            lent=lent,
        )
        self._calls.answer(id, reply)


def check_begin(
    call: protocol.BeginPush, dtype: str, served_version: int, standing: Standing, served: str | None
) -> None:
    """Raise PushError if a push cannot succeed. Called before the push interrupts the engine.

    `dtype`, `served_version`, `served`: dtype, version and push id of the served weights.
    """
    if call.dtype != dtype:
        text = f"dtype: this worker serves {dtype} (got {call.dtype!r:.80}); push in {dtype}"
        raise PushError(text, field="dtype", value=call.dtype)
    # The version must be newer than the served version, except for pushes with `allow_older`. A push that replaces lost
    # weights may have the served version.
    is_lost_one = standing.is_dirty and call.weight_version == served_version
    if call.weight_version <= served_version and not (call.allow_older or is_lost_one):
        raise PushError(
            f"begin_push: version {call.weight_version} is not newer than the served version {served_version}; push a "
            "newer version, or set allow_older to accept that different weights can have the same version",
            field="weight_version",
            value=call.weight_version,
            limit=served_version + 1,
        )
    if call.source.kind == "chain" and (call.in_place or call.lends or not call.is_whole):
        raise PushError(
            "begin_push: a chain of deltas is not possible with in_place, lends, base or adapters; push without them",
            field="source",
            value="chain",
        )
    _check_adapters(call, standing)
    if call.base is None:
        return
    if call.in_place:
        text = "begin_push: in_place needs whole tensors, but the push has a base; push without base"
        raise PushError(text, field="base", value=call.base)
    if call.base != served:
        raise VersionGapError(
            f"begin_push: the changes are relative to push {call.base}, but the served weights are from "
            f"{served or 'no push'}; push complete tensors, without base",
            field="base",
            value=call.base,
        )


def _check_named(call: protocol.BeginPush, name: str, adapters: AdapterDestination | None, standing: Standing) -> None:
    """Raise PushError if a push of the named adapter `name` cannot succeed. `adapters`: the destination of pushes of
    named adapters.
    """
    if adapters is None:
        text = "adapter: this worker has no memory for named adapters; start it with adapter_bytes"
        raise PushError(text, field="adapter", value=name)
    if (call.adapters is None) == (call.source.kind != "peft") or call.source.kind == "chain":
        raise PushError(
            "adapter: a push of a named adapter needs either adapters alone, or a folder in PEFT's format; push a PEFT "
            "model with adapters=True",
            field="adapter",
            value=name,
        )
    if call.in_place or call.lends or call.base is not None:
        text = "adapter: in_place, lends and base are not possible with a named adapter; push without them"
        raise PushError(text, field="adapter", value=name)
    if call.in_flight == "keep":
        raise _no_keeping()
    if standing.is_dirty:
        raise OtherBaseError("begin_push: this worker has lost the adapter's base weights; push whole weights first")


def _no_keeping() -> PushError:
    return PushError(
        "in_flight: keep is not possible with a named adapter; set in_flight to recompute, drain or abort",
        field="in_flight",
        value="keep",
    )


def _check_adapters(call: protocol.BeginPush, standing: Standing) -> None:
    """Raise PushError if the push has adapters that cannot be added to this worker's weights."""
    if call.adapters is None:
        return
    if call.in_place or call.base is not None:
        name = "in_place" if call.in_place else "base"
        text = f"begin_push: {name} is not possible with adapters; push without {name}, or push merged weights"
        raise PushError(text, field=name, value=getattr(call, name))
    if call.adapters.is_alone and standing.is_dirty:
        raise OtherBaseError(
            "begin_push: this worker has lost the base weights of the adapters; push the model without "
            "adapters=True, so that the push contains the base weights too",
            field="adapters",
        )


def is_of_push(call: protocol.LifecycleCall | protocol.PushCall, push_id: str) -> bool:
    """Return whether the call begins or commits this push."""
    return isinstance(call, protocol.BeginPush | protocol.CommitPush) and call.push_id == push_id


def _superseded_by(call: protocol.BeginPush) -> PushError:
    return PushError(f"push: was replaced by push {call.push_id} of version {call.weight_version}")


def aborted() -> PushError:
    """Return the error that the pending calls of a push get when the trainer aborts the push."""
    return PushError("push: was aborted by its trainer")


def ending() -> TruerollError:
    """Return the error for calls to a worker that is shutting down."""
    return UnavailableError("worker is shutting down; use another worker")


def _no_thread() -> PushError:
    return PushError(
        "begin_push: the system cannot start another thread; raise the limit (ulimit -u, or the container's process "
        "limit) and push again"
    )
