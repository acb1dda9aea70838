"""Pushes of weights as a worker takes them: the one under way, and the one whose weights are served.

`Pushes` owns where pushes go, the push under way with its thread, and the calls that wait for that; `Operations` owns
what changes how the engine computes, one operation at a time, each between two steps. Not owned here: the transport and
the arriving bytes (`weight_sync.worker.receiver`), and the calls that wait for their turn (`control`). It runs on the
worker's thread; what takes long, staging a push, runs on the push's own.

Promises: an operation either runs as a whole or leaves everything as it was; exactly one of its `done` and `cancelled`
is called. A push is committed as a whole or not at all, and one that breaks off leaves the weights as they were, or
`dirty`, if it was to write in place and its source was open. A push whose thread hangs is given up `MARGIN_SECONDS`
after its timeout, and while `MOST_ABANDONED` threads that were given up go on, no other push begins. What a push has
staged goes with it.
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
from .engine_thread import Run, ServedEngine
from .ledger import Calls
from .lifecycle import Lifecycle, Standing

if TYPE_CHECKING:
    from ...weight_sync.payload.manifest import LentSource
    from ...weight_sync.worker.assembly import Destination, StagingArea
    from ...weight_sync.worker.receiver import Receiver

MARGIN_SECONDS = 5.0
"""How much longer than the timeout of a push its thread may take to answer: its own error says more."""
MOST_ABANDONED = 4

log = logging.getLogger(__name__)


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

    def finish(self, run: Run, seconds: float) -> None:
        """The engine has done what the current operation asked of it."""
        operation, self.current = self.current, None
        assert operation is not None and operation.run is run
        self._lifecycle.end(operation.then)
        operation.done(seconds)


def hangs(call: protocol.LifecycleCall | protocol.PushCall) -> DeadlineError:
    """The error for the calls of a push whose thread does not answer."""
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


class PushHost(Protocol):
    """What pushes need of the worker around them."""

    def publish_event(self, event: PushNews) -> None:
        """Callable from any thread: brings the event to `Pushes.handle_news`."""
        ...

    def weight_version(self) -> int: ...


@dataclass(eq=False)
class Push:
    """A push under way. `calls`: ids of the calls that wait for its thread, with the time (monotonic seconds) at which
    each is given up. `staging`: from when it is verified until it is over, so that its memory is freed even where
    something still refers to the push. `is_committing`: the engine was told to take it, or is about to be.
    """

    begin: protocol.BeginPush
    receiver: Receiver
    calls: dict[str, float] = field(default_factory=dict)
    staging: StagingArea | None = None
    is_committing: bool = False

    def expect(self, id: str, seconds: float) -> None:
        """The call waits for the thread from now on, which has so long to answer."""
        self.calls[id] = time.monotonic() + seconds + MARGIN_SECONDS

    @property
    def deadline(self) -> float:
        return min(self.calls.values(), default=float("inf"))


@dataclass(frozen=True)
class PushNews:
    """An event of the thread that receives `push`."""

    push: Push
    event: PushEvent


class Target(NamedTuple):
    """Where pushes go, on which device, and the UUID of that if it is a GPU."""

    weights: Destination
    device: str
    gpu: str | None


class Pushes:
    """Takes the calls of pushes that `Control` has checked. `target`: None until the model has loaded. `served`: the
    push whose weights are served.
    """

    def __init__(
        self,
        host: PushHost,
        calls: Calls,
        lifecycle: Lifecycle,
        operations: Operations,
        timings: Timings,
        policy: PushPolicy,
    ) -> None:
        self.target: Target | None = None
        self.served: str | None = None
        self._host, self._calls, self._lifecycle, self._operations = host, calls, lifecycle, operations
        self._timings, self._policy = timings, policy
        self._push: Push | None = None
        self._abandoned: list[Receiver] = []
        """Those that owed an answer when their push was given up."""

    @property
    def weights(self) -> Destination:
        """Where pushes go, once the model has loaded."""
        assert self.target is not None, "no call comes past the check before the model has loaded"
        return self.target.weights

    @property
    def deadline(self) -> float:
        """When (monotonic seconds) `follow` has something to do at the latest."""
        return float("inf") if self._push is None else self._push.deadline

    @property
    def staging_bytes(self) -> int:
        """What the push under way holds beside the live weights. Callable from any thread."""
        push = self._push
        staging = push and (push.staging or push.receiver.staging)
        return 0 if staging is None else staging.num_bytes

    def progress(self) -> protocol.PushProgress | None:
        """The push under way, for `health`. Callable from any thread."""
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
        """Begin a push, in the place of the one under way. Raise TruerollError if it cannot be."""
        self._lifecycle.check_weights_awake(call.type)
        self._check_abandoned()
        check_begin(call, self.weights.dtype, self._host.weight_version(), self._lifecycle.standing, self.served)
        if call.in_place:
            self._begin_in_place(call)
            return
        if self._push is not None:
            self.break_off(_superseded_by(call))
        if self._lifecycle.is_ending:
            raise ending()
        self._push = self._new_push(call)

    def _begin_in_place(self, call: protocol.BeginPush) -> None:
        """Open the source, then interrupt the engine, which lets go of its weights."""

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
        """The engine has let go of its weights, for a push in place."""
        self.served = None
        if self._lifecycle.is_ending:
            self._close(push, is_owing=False)
            self._calls.refuse(push.begin.id, ending())
            return
        push.expect(push.begin.id, push.begin.timeout)
        self._push = push
        push.receiver.proceed()

    def _new_push(self, call: protocol.BeginPush) -> Push:
        """Start the thread that receives a push. Raise PushError if none can be started."""
        from ...weight_sync.worker.receiver import Receiver, begin_seconds

        assert self.target is not None
        log.info("push %s of version %d begins (%s)", call.push_id, call.weight_version, call.source.kind)
        weights, device, _ = self.target
        receiver = Receiver(
            call, weights, lambda event: self._host.publish_event(PushNews(push, event)), device, self._policy
        )
        push = Push(call, receiver)
        try:
            receiver.start()
        except RuntimeError:
            raise _no_thread() from None
        push.expect(call.id, begin_seconds(call))
        return push

    def pass_on(self, call: protocol.StageBucket | protocol.VerifyPush) -> None:
        """Give a call to the push's thread. Raise TruerollError if there is none for it."""
        push = self._find(call.push_id)
        if push.is_committing:
            raise PushError(f"{call.type}: expected a push that is staged, found one that is being committed")
        push.expect(call.id, push.begin.timeout)
        push.receiver.take(call)

    def _find(self, push_id: str) -> Push:
        if self._push is None or self._push.begin.push_id != push_id:
            if self._lifecycle.is_ending:
                raise ending()  # which broke it off: there is no use in beginning it again here
            raise PushError(f"push: expected one that is under way, found {push_id}, which is not; begin it again")
        return self._push

    def commit(self, call: protocol.CommitPush) -> None:
        """Let the engine take what was staged. Raise TruerollError if nothing whole is."""
        if self._push is None and call.push_id == self.served:
            self._reply(call.id, call.push_id, "committed")
            return
        push = self._find(call.push_id)
        if push.staging is None:
            raise PushError("commit_push: expected a push that was verified, found one that was not; verify it first")
        self._lifecycle.check_weights_awake(call.type)
        served = self._host.weight_version()
        if push.begin.allow_older and push.begin.weight_version <= served:
            log.warning(
                "push %s: version %d takes the place of version %d, though it is not later, as its trainer allowed; "
                "samples of different weights may now carry the same version",
                call.push_id,
                push.begin.weight_version,
                served,
            )

        def take(engine: ServedEngine, in_flight: InFlight) -> list[Output]:
            return engine.commit_weights(push.staging, push.begin.weight_version, in_flight)

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
        )
        self._operations.begin(operation)
        push.is_committing = True
        push.receiver.close()  # whatever becomes of the commit, no trainer is waited for any more
        if push.calls:
            self._refuse_all(push, PushError("push: it is being committed, which ends what else was asked of it"))

    def _finish_commit(self, call: protocol.CommitPush, push: Push, seconds: float) -> None:
        self._timings.commit_pause.observe(seconds)
        self._timings.push.observe(time.monotonic() - push.receiver.progress.started)
        push.staging = None
        self._push, self.served = None, call.push_id
        log.info("push %s: version %d is served", call.push_id, self._host.weight_version())
        self._reply(call.id, call.push_id, "committed", seconds)

    def abort(self, call: protocol.AbortPush) -> None:
        """Break off this push, if it is under way, and answer how it stands. Raise UnavailableError at the end."""
        if self._push is not None and self._push.begin.push_id == call.push_id:
            self.break_off(aborted())
        if self._lifecycle.is_ending:
            raise ending()  # what another worker lacked of it is lost with this one
        self._reply(call.id, call.push_id, "committed" if call.push_id == self.served else "aborted")

    def break_off(self, error: TruerollError) -> None:
        """Forget the push under way, if any, and answer the calls that wait for it with an error."""
        push, self._push = self._push, None
        if push is None:
            return
        log.warning("push %s of version %d broke off: %s", push.begin.push_id, push.begin.weight_version, error)
        is_owing = bool(push.calls)
        self._refuse_all(push, error)
        self._close(push, is_owing)

    def break_off_unless_committing(self, error: TruerollError) -> None:
        """Forget the push under way, unless the engine is taking it."""
        if self._push is not None and not self._push.is_committing:
            self.break_off(error)

    def follow(self) -> None:
        """Give up a push whose thread hangs."""
        if self._push is not None and time.monotonic() >= self._push.deadline:
            self.break_off(hangs(self._push.begin))

    def handle_news(self, news: PushNews) -> None:
        """The thread of a push has come to an end of something."""
        if self._is_opening(news.push):
            self._handle_opening(news.event)
            return
        if news.push is not self._push or news.push.is_committing:
            return  # it is over or as good as that, and its calls were answered
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
        """Whether the operation under way waits for the source of this push to open."""
        operation = self._operations.current
        return operation is not None and operation.opens_by is not None and operation.call is push.begin

    def _handle_opening(self, event: PushEvent) -> None:
        """Interrupt the engine for a push in place if its source is open; else nothing has changed."""
        operation = self._operations.current
        assert operation is not None
        match event:
            case Broken(error):
                self._operations.cancel(error)
            case Opened():
                operation.opens_by, operation.started = None, time.monotonic()
                self._operations.follow()

    def _close(self, push: Push, is_owing: bool) -> None:
        """Let go of a push. `is_owing`: its thread has not answered, and may hang."""
        self._abandoned += [push.receiver] * is_owing
        push.receiver.close()
        push.staging = None

    def _refuse_all(self, push: Push, error: TruerollError) -> None:
        while push.calls:
            self._calls.refuse(push.calls.popitem()[0], error)

    def _check_abandoned(self) -> None:
        """Raise PushError if too many threads hang."""
        self._abandoned = [receiver for receiver in self._abandoned if receiver.is_alive()]
        if len(self._abandoned) >= MOST_ABANDONED:
            raise PushError(
                f"begin_push: expected fewer than {MOST_ABANDONED} pushes that were given up and go on all the same, "
                f"found {len(self._abandoned)}; push again, and if they hang, as in reads from a file system that does "
                "not answer, mend that or start the worker anew"
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
            weight_version=self._host.weight_version(),
            pause_seconds=pause_seconds,
            lent=lent,
        )
        self._calls.answer(id, reply)


def check_begin(
    call: protocol.BeginPush, dtype: str, served_version: int, standing: Standing, served: str | None
) -> None:
    """Raise PushError for what can be seen before anything is interrupted. `dtype`, `served_version`, `served`: of the
    weights that are served, and the push that brought them.
    """
    if call.dtype != dtype:
        text = f"dtype: expected {dtype}, as this worker serves, found {call.dtype!r:.80}; push in that"
        raise PushError(text, field="dtype", value=call.dtype)
    # A version that is not later is fine if that is asked for, or if it replaces what was lost.
    is_lost_one = standing.is_dirty and call.weight_version == served_version
    if call.weight_version <= served_version and not (call.allow_older or is_lost_one):
        raise PushError(
            f"begin_push: expected a version later than {served_version}, which this worker serves, found "
            f"{call.weight_version}; push a later one, or push with allow_older if samples of both may be confused",
            field="weight_version",
            value=call.weight_version,
            limit=served_version + 1,
        )
    _check_adapters(call, standing)
    if call.base is None:
        return
    if call.in_place:
        text = "begin_push: expected whole tensors for in_place, found base; push without base"
        raise PushError(text, field="base", value=call.base)
    if call.base != served:
        raise VersionGapError(
            f"begin_push: expected changes to the push that is served ({served or 'none'}), found changes to "
            f"{call.base}; push every tensor whole",
            field="base",
            value=call.base,
        )


def _check_adapters(call: protocol.BeginPush, standing: Standing) -> None:
    """Raise PushError for adapters that can be added to nothing."""
    if call.adapters is None:
        return
    if call.in_place or call.base is not None:
        name = "in_place" if call.in_place else "base"
        text = f"begin_push: expected no {name} with adapters, found it; push without, or merged weights"
        raise PushError(text, field=name, value=getattr(call, name))
    if call.adapters.is_alone and standing.is_dirty:
        raise OtherBaseError(
            "begin_push: expected weights that adapters can be added to, found that this worker's are lost; push "
            "the model without adapters=True, which brings the weights too",
            field="adapters",
        )


def is_of_push(call: protocol.LifecycleCall | protocol.PushCall, push_id: str) -> bool:
    """Whether a call that waits for the engine begins or commits this push."""
    return isinstance(call, protocol.BeginPush | protocol.CommitPush) and call.push_id == push_id


def _superseded_by(call: protocol.BeginPush) -> PushError:
    return PushError(f"push {call.push_id} of version {call.weight_version} took the place of this one")


def aborted() -> PushError:
    """The error for the calls of a push that its trainer has aborted."""
    return PushError("push: aborted by its trainer")


def ending() -> TruerollError:
    """The error for calls once the worker ends."""
    return UnavailableError("worker is shutting down; use another worker")


def _no_thread() -> PushError:
    return PushError(
        "begin_push: expected a thread to receive on, found that the system has none left; let the worker have more "
        "(ulimit -u, or the container's limit of processes), and push again"
    )
