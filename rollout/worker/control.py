"""Lifecycle calls and pushes of weights: what a worker does beside serving requests.

Owns: the state (`lifecycle`), the operation under way and the calls that wait for their turn, the push under way.
Does not own: the socket, the requests, the engine. It runs on the worker's thread; what touches the engine goes there
as a command, and what takes long (staging a push) runs on the push's own thread.

Promises: one operation at a time, in the order of the calls; every call gets exactly one reply, also when the worker
ends or fails; a push is committed as a whole or not at all, and one that breaks off leaves the weights as they were
(or `dirty`, if it was to write in place and its source was open); a push whose thread hangs is given up
`MARGIN_SECONDS` after its timeout, and while `MOST_ABANDONED` threads that were given up go on, no other push begins.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

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
from .calls import Calls
from .engine_thread import Ran, Run, ServedEngine
from .lifecycle import Lifecycle, Standing

if TYPE_CHECKING:
    from ...weight_sync.payload.manifest import LentSource
    from ...weight_sync.worker.assembly import Destination, StagingArea
    from ...weight_sync.worker.receiver import Receiver

log = logging.getLogger(__name__)

MARGIN_SECONDS = 5.0
"""How much longer than the timeout of a push its thread may take to answer: what it says itself tells more."""
MOST_ABANDONED = 4


class Host(Protocol):
    """What control needs of the worker around it."""

    def reply(self, identity: bytes, message: protocol.FromWorker) -> None: ...

    def command(self, command: Run, aborts: bool) -> None:
        """Gives the engine a command, which `aborts` what it has or not."""
        ...

    def publish_event(self, event: PushNews) -> None:
        """Callable from any thread: brings the event to `Control.handle_push_news`."""
        ...

    def admit_requests(self) -> None:
        """Gives the engine the requests that wait, if `Control.takes_requests`."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Of the requests that the engine was given, how many have not ended."""
        ...

    @property
    def instance(self) -> str:
        """Random for each process."""
        ...

    def weight_version(self) -> int: ...


@dataclass(eq=False)
class _Operation:
    """A call that changes what the engine does.

    If it begins a `push` in place, the source of that is opened first (`is_opening`). With `in_flight` `drain` it then
    waits until the engine has nothing unfinished, for at most `timeout` seconds. Then the push under way ends with
    `breaks_push`, if that is given, and `action` runs between two steps. `busy` is the state until then, `then` the
    standing afterwards. `error`: what kept the action from its end, if it may fail. `checksums`: what it has computed,
    if that is its purpose.
    """

    call: protocol.LifecycleCall | protocol.PushCall
    busy: State | None
    then: Standing
    action: Callable[[ServedEngine, InFlight], list[Output]] = lambda engine, in_flight: engine.settle()
    in_flight: InFlight = "recompute"
    timeout: float = float("inf")
    breaks_push: PushError | None = None
    started: float = field(default_factory=time.monotonic)
    run: Run | None = None
    error: TruerollError | None = None
    checksums: dict[str, int] = field(default_factory=dict)
    push: _Push | None = None
    is_opening: bool = False

    @property
    def deadline(self) -> float:
        if self.is_opening:
            return float("inf") if self.push is None else self.push.deadline
        return self.started + self.timeout


@dataclass(eq=False)
class _Push:
    """The push under way. `calls`: ids of the calls that wait for its thread, with the time (monotonic seconds) at
    which each is given up. `staging`: once it is verified.
    """

    begin: protocol.BeginPush
    receiver: Receiver
    calls: dict[str, float] = field(default_factory=dict)
    staging: StagingArea | None = None

    def expect(self, id: str, seconds: float) -> None:
        """The call waits for the thread from now on, which has so long to answer."""
        self.calls[id] = time.monotonic() + seconds + MARGIN_SECONDS

    @property
    def deadline(self) -> float:
        return min(self.calls.values(), default=float("inf"))


@dataclass(frozen=True)
class PushNews:
    """An event of the thread that receives `push`."""

    push: _Push
    event: PushEvent


_NEEDS_NO_ENGINE = (protocol.StageBucket, protocol.VerifyPush, protocol.AbortPush)
"""Calls that go on while an operation waits for the engine."""


class Control:
    """Takes control calls by `handle`; `follow` is to be called whenever something may have changed."""

    def __init__(self, host: Host, calls: Calls, timings: Timings, policy: PushPolicy) -> None:
        self.lifecycle = Lifecycle()
        self._host = host
        self._calls = calls
        self._timings = timings
        self._policy = policy
        self._loaded: Destination | None = None
        self._device = "cpu"
        self._gpu: str | None = None
        self._served_push: str | None = None
        self._waiting: deque[protocol.LifecycleCall | protocol.PushCall] = deque()
        self._operation: _Operation | None = None
        self._push: _Push | None = None
        self._abandoned: list[Receiver] = []
        """Those that owed an answer when their push was given up."""

    @property
    def takes_requests(self) -> bool:
        """Whether the engine may be given a new request now."""
        return self.lifecycle.state in ("loading", "ready") and self._operation is None

    @property
    def _weights(self) -> Destination:
        assert self._loaded is not None, "no call comes past `_check` before the model has loaded"
        return self._loaded

    @property
    def commit_note(self) -> str:
        """Why commits take longer than they could; empty if they do not. Callable from any thread."""
        return "" if self._loaded is None else self._loaded.commit_note

    @property
    def deadline(self) -> float:
        """When (monotonic seconds) `follow` has something to do at the latest."""
        operation = float("inf") if self._operation is None or self._operation.run else self._operation.deadline
        return operation if self._push is None else min(operation, self._push.deadline)

    @property
    def staging_bytes(self) -> int:
        """What the push under way holds beside the live weights. Callable from any thread."""
        push = self._push
        staging = push and (push.staging or push.receiver.staging)
        return 0 if staging is None else staging.num_bytes

    def finish_loading(self, weights: Destination, device: str) -> None:
        """The engine stands; `weights` is where pushes go, on `device`."""
        from ...weight_sync.transports.gpu import gpu_of

        self._loaded, self._device, self._gpu = weights, device, gpu_of(device)
        self.lifecycle.finish_loading()

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

    # Calls.

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
        if self._loaded is None:
            raise IllegalStateError(
                f"{call.type}: expected a model that has loaded, found state {self.lifecycle.state}; wait for ready"
            )
        self.lifecycle.check(call.type)

    def follow(self) -> None:
        """Go on with the operation under way, and begin what waits."""
        self._follow_operation()
        self._follow_push()
        self._host.admit_requests()
        while self._waiting and self._operation is None:
            self._try(self._waiting.popleft())
            self._host.admit_requests()  # a call that comes after a request, such as a drain, is about it too

    def _try(self, call: protocol.LifecycleCall | protocol.PushCall) -> None:
        try:
            self._start(call)
        except TruerollError as error:
            self._calls.refuse(call.id, error)

    def _start(self, call: protocol.LifecycleCall | protocol.PushCall) -> None:
        self.lifecycle.check(call.type)
        match call:
            case protocol.Pause() | protocol.Resume():
                self._start_pause(call)
            case protocol.Drain():
                self._start_drain(call)
            case protocol.Sleep():
                self._start_sleep(call)
            case protocol.WakeUp():
                self._start_wake_up(call)
            case protocol.Invalidate():
                self._start_invalidate(call)
            case protocol.SaveWeights():
                self._start_saving(call)
            case protocol.GetChecksums():
                self._start_checksums(call)
            case protocol.BeginPush():
                self._start_push(call)
            case protocol.StageBucket() | protocol.VerifyPush():
                self._pass_on(call)
            case protocol.CommitPush():
                self._start_commit(call)
            case protocol.AbortPush():
                self._abort_push(call)

    def _describe_weights(self, call: protocol.GetWeights) -> protocol.Weights:
        return protocol.Weights(
            id=call.id,
            dtype=self._weights.dtype,
            shapes=dict(self._weights.shapes),
            parts={name: tuple(parts) for name, parts in self._weights.parts.items()},
            tied=dict(self._weights.tied),
            ignored=tuple(sorted(self._weights.ignored)),
            weight_version=self._host.weight_version(),
            push_id=self._served_push,
            gpu=self._gpu,
            kin=self._weights.kin,
            instance=self._host.instance,
        )

    def _reply_status(self, id: str) -> None:
        state = self.lifecycle.state
        self._calls.answer(id, protocol.Status(id=id, state=state, weight_version=self._host.weight_version()))

    def _reply_checksums(self, id: str, checksums: dict[str, int]) -> None:
        reply = protocol.Checksums(
            id=id,
            dtype=self._weights.dtype,
            checksums=checksums,
            weight_version=self._host.weight_version(),
            push_id=self._served_push,
        )
        self._calls.answer(id, reply)

    # Operations.

    def _begin(self, operation: _Operation) -> None:
        if operation.in_flight == "drain" and self.lifecycle.standing.is_held:
            if count := self._host.num_unfinished:
                raise IllegalStateError(
                    f"{operation.call.type}: cannot drain in state {self.lifecycle.state}, found {count} unfinished "
                    "requests that nothing computes; resume first, or choose in_flight recompute or abort if it is not "
                    "a drain"
                )
            operation.in_flight = "recompute"  # of nothing: what is there has not begun
        self._operation = operation
        self.lifecycle.begin(operation.busy)
        self._follow_operation()

    def _follow_operation(self) -> None:
        operation = self._operation
        if operation is None or operation.run is not None:
            return
        if operation.is_opening:
            if time.monotonic() >= operation.deadline:
                assert operation.push is not None
                self._cancel_operation(_hangs(operation.push.begin))
            return
        if operation.in_flight != "drain" or self._host.num_unfinished == 0:
            if operation.breaks_push is not None:
                self._break_push(operation.breaks_push)
            operation.run = Run(
                lambda engine: operation.action(engine, operation.in_flight), hold=operation.then.is_held
            )
            self._host.command(operation.run, aborts=operation.in_flight == "abort")
        elif time.monotonic() >= operation.deadline:
            count = self._host.num_unfinished
            self._cancel_operation(
                DeadlineError(
                    f"{operation.call.type}: expected running requests to end within its timeout, found {count} "
                    "unfinished; nothing was changed; try again with more time, or with in_flight recompute or abort"
                )
            )

    def _cancel_operation(self, error: TruerollError) -> None:
        assert self._operation is not None
        operation, self._operation = self._operation, None
        call = operation.call
        self._close_opened(operation)
        self.lifecycle.end(self.lifecycle.standing)
        self._calls.refuse(call.id, error)
        if isinstance(call, protocol.CommitPush):
            self._break_push(error)

    def _close_opened(self, operation: _Operation) -> None:
        """Let go of the source of a push in place that will not begin. It may hang, if it is not open yet."""
        if operation.push is not None:
            self._abandoned += [operation.push.receiver] * operation.is_opening
            operation.push.receiver.close()

    def handle_ran(self, event: Ran) -> None:
        """The engine has done what the operation under way asked of it."""
        operation, self._operation = self._operation, None
        assert operation is not None and operation.run is event.command
        self.lifecycle.end(operation.then)
        if operation.then.is_dirty:
            self._served_push = None
        match operation.call:
            case protocol.BeginPush():
                self._begin_overwriting(operation)
            case protocol.CommitPush() as call:
                self._finish_commit(call, event.seconds)
            case protocol.SaveWeights() as call if operation.error is not None:
                self._calls.refuse(call.id, operation.error)
            case protocol.Sleep() | protocol.WakeUp() as call:
                getattr(self._timings, call.type).observe(time.monotonic() - operation.started)
                self._reply_status(call.id)
            case protocol.GetChecksums() as call:
                self._reply_checksums(call.id, operation.checksums)
            case call:
                self._reply_status(call.id)
        self.follow()

    def _start_pause(self, call: protocol.Pause | protocol.Resume) -> None:
        standing, pauses = self.lifecycle.standing, isinstance(call, protocol.Pause)
        if pauses == standing.is_paused:
            self._reply_status(call.id)
        else:
            self._begin(_Operation(call, "paused", standing.paused(pauses)))

    def _start_drain(self, call: protocol.Drain) -> None:
        then = self.lifecycle.standing.paused(True)
        self._begin(_Operation(call, "draining", then, in_flight="drain", timeout=call.timeout))

    def _start_sleep(self, call: protocol.Sleep) -> None:
        drops_weights = call.level == 2 and "weights" in call.tags

        def sleep(engine: ServedEngine, in_flight: InFlight) -> list[Output]:
            return engine.sleep(call.level, call.tags, in_flight)

        then = self.lifecycle.standing.slept(call.tags, drops_weights)
        slept = PushError("push: the weights that it was to replace went to sleep; wake them up and push again")
        operation = _Operation(call, "draining", then, sleep, call.in_flight, call.timeout)
        operation.breaks_push = slept if "weights" in call.tags else None
        self._begin(operation)

    def _start_wake_up(self, call: protocol.WakeUp) -> None:
        def wake(engine: ServedEngine, in_flight: InFlight) -> list[Output]:
            engine.wake_up(call.tags)
            return []

        standing = self.lifecycle.standing
        if standing.sleeping.isdisjoint(call.tags):
            self._reply_status(call.id)
        else:
            self._begin(_Operation(call, "waking", standing.woken(call.tags), wake))

    def _start_invalidate(self, call: protocol.Invalidate) -> None:
        def invalidate(engine: ServedEngine, in_flight: InFlight) -> list[Output]:
            engine.invalidate_prefix_cache()
            return []

        self._begin(_Operation(call, None, self.lifecycle.standing, invalidate))

    def _start_saving(self, call: protocol.SaveWeights) -> None:
        from ...weight_sync.worker.saving import save_weights

        push_id, version, weights = self._served_push, self._host.weight_version(), self._weights
        if push_id is None:
            raise PushError(
                "save_weights: expected weights that a push brought, found those of the model's own checkpoint; load it"
            )
        self._policy.check_writable(call.folder)

        def save(engine: ServedEngine, in_flight: InFlight) -> list[Output]:
            try:
                save_weights(Path(call.folder), push_id, version, weights)
            except PushError as error:
                operation.error = error
            return []

        operation = _Operation(call, None, self.lifecycle.standing, save)
        self._begin(operation)

    def _start_checksums(self, call: protocol.GetChecksums) -> None:
        from ...weight_sync.worker.adapting import served_checksums

        self.lifecycle.check_weights_awake(call.type)
        if self.lifecycle.standing.is_dirty:
            raise IllegalStateError(f"{call.type}: expected whole weights, found state dirty; push some first")

        def compute(engine: ServedEngine, in_flight: InFlight) -> list[Output]:
            operation.checksums = served_checksums(self._weights)
            return engine.settle()

        operation = _Operation(call, None, self.lifecycle.standing, compute)
        self._begin(operation)

    # Pushes.

    def _start_push(self, call: protocol.BeginPush) -> None:
        self.lifecycle.check_weights_awake(call.type)
        self._check_begin(call)
        superseded = PushError(f"push {call.push_id} of version {call.weight_version} took the place of this one")
        if not call.in_place:
            self._break_push(superseded)
            self._receive(call)
            return

        def interrupt(engine: ServedEngine, in_flight: InFlight) -> list[Output]:
            return engine.interrupt(in_flight)

        then = self.lifecycle.standing.overwritten(is_whole=False)
        operation = _Operation(call, "updating", then, interrupt, call.in_flight, call.drain_timeout)
        operation.breaks_push, operation.is_opening = superseded, True
        self._begin(operation)
        try:
            operation.push = self._new_push(call)
        except PushError as error:
            self._cancel_operation(error)

    def _handle_opening(self, operation: _Operation, event: PushEvent) -> None:
        """Interrupt the engine for a push in place if its source is open; else nothing has changed."""
        match event:
            case Broken(error):
                self._cancel_operation(error)
            case Opened():
                operation.is_opening, operation.started = False, time.monotonic()
                self._follow_operation()

    def _begin_overwriting(self, operation: _Operation) -> None:
        """The engine has let go of its weights, for a push in place."""
        push = operation.push
        assert push is not None
        if self.lifecycle.is_ending:
            self._close_opened(operation)
            self._calls.refuse(push.begin.id, _ending())
            return
        push.expect(push.begin.id, push.begin.timeout)
        self._push = push
        push.receiver.proceed()

    def _check_begin(self, call: protocol.BeginPush) -> None:
        """Raise PushError for what can be seen before anything is interrupted."""
        if call.dtype != self._weights.dtype:
            raise PushError(
                f"dtype: expected {self._weights.dtype}, as this worker serves, found {call.dtype!r:.80}; push in that"
            )
        self._check_version(call)
        self._check_abandoned()
        self._check_adapters(call)
        if call.base is None:
            return
        if call.in_place:
            raise PushError("begin_push: expected whole tensors for in_place, found base; push without base")
        if call.base != self._served_push:
            raise VersionGapError(
                f"begin_push: expected changes to the push that is served ({self._served_push or 'none'}), found "
                f"changes to {call.base}; push every tensor whole"
            )

    def _check_adapters(self, call: protocol.BeginPush) -> None:
        """Raise PushError for adapters that can be added to nothing."""
        if call.adapters is None:
            return
        if call.in_place or call.base is not None:
            name = "in_place" if call.in_place else "base"
            raise PushError(f"begin_push: expected no {name} with adapters, found it; push without, or merged weights")
        if call.adapters.is_alone and self.lifecycle.standing.is_dirty:
            raise OtherBaseError(
                "begin_push: expected weights that adapters can be added to, found that this worker's are lost; push "
                "the model without adapters=True, which brings the weights too"
            )

    def _check_version(self, call: protocol.BeginPush) -> None:
        """Raise PushError for a version that is not later, unless that is asked for, or it replaces what was lost."""
        served = self._host.weight_version()
        is_lost_one = self.lifecycle.standing.is_dirty and call.weight_version == served
        if call.weight_version <= served and not (call.allow_older or is_lost_one):
            raise PushError(
                f"begin_push: expected a version later than {served}, which this worker serves, found "
                f"{call.weight_version}; push a later one, or push with allow_older if samples of both may be confused"
            )

    def _check_abandoned(self) -> None:
        """Raise PushError if too many threads hang."""
        self._abandoned = [receiver for receiver in self._abandoned if receiver.is_alive()]
        if len(self._abandoned) >= MOST_ABANDONED:
            raise PushError(
                f"begin_push: expected fewer than {MOST_ABANDONED} pushes that were given up and go on all the same, "
                f"found {len(self._abandoned)}; push again, and if they hang, as in reads from a file system that does "
                "not answer, mend that or start the worker anew"
            )

    def _receive(self, call: protocol.BeginPush) -> None:
        if self.lifecycle.is_ending:
            self._calls.refuse(call.id, _ending())
            return
        try:
            self._push = self._new_push(call)
        except PushError as error:
            self._calls.refuse(call.id, error)

    def _new_push(self, call: protocol.BeginPush) -> _Push:
        """Start the thread that receives a push. Raise PushError if none can be started."""
        from ...weight_sync.worker.receiver import Receiver, begin_seconds

        log.info("push %s of version %d begins (%s)", call.push_id, call.weight_version, call.source.kind)
        receiver = Receiver(
            call,
            self._weights,
            lambda event: self._host.publish_event(PushNews(push, event)),
            self._device,
            self._policy,
        )
        push = _Push(call, receiver)
        try:
            receiver.start()
        except RuntimeError:
            raise _no_thread() from None
        push.expect(call.id, begin_seconds(call))
        return push

    def _pass_on(self, call: protocol.StageBucket | protocol.VerifyPush) -> None:
        push = self._find_push(call.push_id)
        if self._is_committing:
            raise PushError(f"{call.type}: expected a push that is staged, found one that is being committed")
        push.expect(call.id, push.begin.timeout)
        push.receiver.take(call)

    @property
    def _is_committing(self) -> bool:
        return self._operation is not None and isinstance(self._operation.call, protocol.CommitPush)

    def _find_push(self, push_id: str) -> _Push:
        if self._push is None or self._push.begin.push_id != push_id:
            if self.lifecycle.is_ending:
                raise _ending()  # which broke it off: there is no use in beginning it again here
            raise PushError(f"push: expected one that is under way, found {push_id}, which is not; begin it again")
        return self._push

    def _start_commit(self, call: protocol.CommitPush) -> None:
        if self._push is None and call.push_id == self._served_push:
            self._reply_push(call.id, call.push_id, "committed")
            return
        push = self._find_push(call.push_id)
        if push.staging is None:
            raise PushError("commit_push: expected a push that was verified, found one that was not; verify it first")
        self.lifecycle.check_weights_awake(call.type)

        def commit(engine: ServedEngine, in_flight: InFlight) -> list[Output]:
            return engine.commit_weights(push.staging, push.begin.weight_version, in_flight)

        if push.begin.allow_older and push.begin.weight_version <= (served := self._host.weight_version()):
            log.warning(
                "push %s: version %d takes the place of version %d, though it is not later, as its trainer allowed; "
                "whoever compares the versions of samples will take some for what they are not",
                call.push_id,
                push.begin.weight_version,
                served,
            )
        then = self.lifecycle.standing.overwritten(is_whole=True)
        self._begin(_Operation(call, "updating", then, commit, call.in_flight, call.timeout))
        push.receiver.close()  # whatever becomes of the commit, no trainer is waited for any more
        self._refuse_all(push, PushError("push: it is being committed, which ends what else was asked of it"))

    def _finish_commit(self, call: protocol.CommitPush, seconds: float) -> None:
        assert self._push is not None
        self._timings.commit_pause.observe(seconds)
        self._timings.push.observe(time.monotonic() - self._push.receiver.progress.started)
        self._push.staging = None
        self._push, self._served_push = None, call.push_id
        log.info("push %s: version %d is served", call.push_id, self._host.weight_version())
        self._reply_push(call.id, call.push_id, "committed", seconds)

    def _abort_push(self, call: protocol.AbortPush) -> None:
        operation = self._operation
        if operation is not None and _is_of_push(operation.call, call.push_id):
            if operation.run is not None:
                self._waiting.appendleft(call)  # too late to stop it: the answer follows when it is over
                return
            self._cancel_operation(_aborted())
        for waiting in [waiting for waiting in self._waiting if _is_of_push(waiting, call.push_id)]:
            self._waiting.remove(waiting)
            self._calls.refuse(waiting.id, _aborted())
        if self._push is not None and self._push.begin.push_id == call.push_id:
            self._break_push(_aborted())
        if self.lifecycle.is_ending:
            raise _ending()  # what another worker lacked of it is lost with this one
        self._reply_push(call.id, call.push_id, "committed" if call.push_id == self._served_push else "aborted")

    def _break_push(self, error: TruerollError) -> None:
        """Forget the push under way, if any, and tell who waits for it."""
        if self._push is None:
            return
        log.warning(
            "push %s of version %d broke off: %s", self._push.begin.push_id, self._push.begin.weight_version, error
        )
        if self._push.calls:
            self._abandoned.append(self._push.receiver)
        self._refuse_all(self._push, error)
        self._push.receiver.close()
        self._push.staging = None
        self._push = None

    def _refuse_all(self, push: _Push, error: TruerollError) -> None:
        while push.calls:
            self._calls.refuse(push.calls.popitem()[0], error)

    def _follow_push(self) -> None:
        push = self._push
        if push is not None and time.monotonic() >= push.deadline:
            self._break_push(_hangs(push.begin))

    def handle_push_news(self, news: PushNews) -> None:
        """The thread of a push has come to an end of something."""
        operation = self._operation
        if operation is not None and operation.is_opening and news.push is operation.push:
            self._handle_opening(operation, news.event)
            return
        if self._push is None or news.push is not self._push or self._is_committing:
            return  # it is over or as good as that, and whoever waited was told
        match news.event:
            case Broken(error):
                self._break_push(error)
            case Reached(id, phase, lent):
                if phase == "verified" and self._push.staging is None:
                    self._push.staging = self._push.receiver.staging
                    self._timings.stage.observe(time.monotonic() - self._push.receiver.progress.started)
                self._answer_push(id, phase, lent)

    def _answer_push(self, id: str, phase: protocol.PushPhase, lent: LentSource | None) -> None:
        assert self._push is not None
        del self._push.calls[id]
        self._reply_push(id, self._push.begin.push_id, phase, lent=lent)

    def _reply_push(
        self,
        id: str,
        push_id: str,
        phase: protocol.PushPhase,
        pause_seconds: float | None = None,
        lent: LentSource | None = None,
    ) -> None:
        version = self._host.weight_version()
        reply = protocol.PushStatus(
            id=id,
            push_id=push_id,
            phase=phase,
            state=self.lifecycle.state,
            weight_version=version,
            pause_seconds=pause_seconds,
            lent=lent,
        )
        self._calls.answer(id, reply)

    # The end.

    def start_ending(self) -> None:
        """Refuse what waits and what has not reached the engine; an operation that has goes on."""
        if self._operation is not None and self._operation.run is None:
            self._cancel_operation(_ending())
        self._refuse_waiting(_ending())
        self.lifecycle.start_ending()

    def fail_calls(self, error: TruerollError) -> None:
        """Answer every call with `error`."""
        if self._operation is not None:
            self._close_opened(self._operation)
            self._calls.refuse(self._operation.call.id, error)
            self._operation = None
        self._refuse_waiting(error)

    def _refuse_waiting(self, error: TruerollError) -> None:
        if not self._is_committing:
            self._break_push(error)
        while self._waiting:
            self._calls.refuse(self._waiting.popleft().id, error)


def _is_of_push(call: protocol.LifecycleCall | protocol.PushCall, push_id: str) -> bool:
    return isinstance(call, protocol.BeginPush | protocol.CommitPush) and call.push_id == push_id


def _hangs(begin: protocol.BeginPush) -> DeadlineError:
    return DeadlineError(
        f"push {begin.push_id}: the worker hangs, and made no progress within the timeout of {begin.timeout:g} s; see "
        "whether its file system answers, then push again"
    )


def _aborted() -> PushError:
    return PushError("push: aborted by its trainer")


def _no_thread() -> PushError:
    return PushError(
        "begin_push: expected a thread to receive on, found that the system has none left; let the worker have more "
        "(ulimit -u, or the container's limit of processes), and push again"
    )


def _ending() -> TruerollError:
    return UnavailableError("worker: it ends; use another worker")
