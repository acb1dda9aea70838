"""Lifecycle calls and pushes of weights: what a worker does beside serving requests.

Owns: the state (`lifecycle`), the operation under way and the calls that wait for their turn, the push under way.
Does not own: the socket, the requests, the engine. It runs on the worker's thread; what touches the engine goes there
as a command, and what takes long (staging a push) runs on the push's own thread.

Promises: one operation at a time, in the order of the calls; every call gets exactly one reply, also when the worker
ends or fails; a push is committed as a whole or not at all, and one that breaks off leaves the weights as they were
(or `dirty`, if it wrote in place).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..engine.errors import TruerollError
from ..engine.request import InFlight, Output, Tag
from ..weight_sync.events import Begun, Broken, PushEvent, Staged, Verified
from . import protocol
from .engine_thread import Engine, Ran, Run
from .errors import DeadlineError, IllegalStateError, PushError, UnavailableError, VersionGapError
from .lifecycle import Lifecycle
from .protocol import State
from .timings import Timings

if TYPE_CHECKING:
    from ..weight_sync.receiver import Receiver

log = logging.getLogger(__name__)


class Host(Protocol):
    """What control needs of the worker around it."""

    def reply(self, identity: bytes, message: protocol.FromWorker) -> None: ...

    def reply_error(self, identity: bytes, id: str, error: TruerollError) -> None: ...

    def command(self, command: Run) -> None: ...

    def publish_event(self, event: PushNews) -> None:
        """Callable from any thread: brings the event to `Control.handle_push_news`."""
        ...

    def admit_requests(self) -> None:
        """Gives the engine the requests that wait, if `Control.takes_requests`."""
        ...

    def unfinished_requests(self) -> Collection[str]:
        """Of the requests that the engine was given, those that have not ended."""
        ...

    def weight_version(self) -> int: ...


@dataclass(eq=False)
class _Operation:
    """A call that changes what the engine does.

    With `in_flight` `drain` it waits until the engine has nothing unfinished, at most until `deadline`. Then the push
    under way ends with `breaks_push`, if that is given, `action` runs between two steps, the engine is held or not as
    `hold` says, and `finish` gets the seconds that took.
    """

    call: protocol.LifecycleCall | protocol.PushCall
    busy: State | None
    action: Callable[[Engine], list[Output]]
    hold: bool
    finish: Callable[[float], None]
    in_flight: InFlight = "recompute"
    deadline: float = float("inf")
    breaks_push: PushError | None = None
    run: Run | None = None


@dataclass(eq=False)
class _Push:
    """The push under way. `calls`: ids of the calls that wait for its thread."""

    begin: protocol.BeginPush
    receiver: Receiver
    calls: set[str]
    is_verified: bool = False


@dataclass(frozen=True)
class PushNews:
    """An event of the thread that receives `push`."""

    push: Any
    event: PushEvent


_NEEDS_NO_ENGINE = (protocol.StageBucket, protocol.VerifyPush, protocol.AbortPush)
"""Calls that go on while an operation waits for the engine."""


class Control:
    """Takes control calls by `handle`; `follow` is to be called whenever something may have changed."""

    def __init__(self, host: Host, timings: Timings) -> None:
        self.lifecycle = Lifecycle()
        self._host = host
        self._timings = timings
        self._weights: Any = None
        self._served_push: str | None = None
        self._callers: dict[str, bytes] = {}
        self._waiting: deque[protocol.LifecycleCall | protocol.PushCall] = deque()
        self._operation: _Operation | None = None
        self._push: _Push | None = None

    @property
    def takes_requests(self) -> bool:
        """Whether the engine may be given a new request now."""
        return self.lifecycle.state in ("loading", "ready") and self._operation is None

    @property
    def is_working(self) -> bool:
        """Whether the engine has yet to answer an operation."""
        return self._operation is not None

    @property
    def deadline(self) -> float:
        """When (monotonic seconds) `follow` has something to do at the latest."""
        return float("inf") if self._operation is None or self._operation.run else self._operation.deadline

    @property
    def staging_bytes(self) -> int:
        """What the push under way holds beside the live weights. Callable from any thread."""
        push = self._push
        staging = None if push is None else push.receiver.staging
        return 0 if staging is None else staging.num_bytes

    def finish_loading(self, weights: Any) -> None:
        """The engine stands; `weights` is where pushes go."""
        self._weights = weights
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
        """Take a call. Raises what refuses it at once; anything else is answered later."""
        if isinstance(call, protocol.GetWeights):
            self._host.reply(identity, self._describe_weights(call))
            return
        if call.id in self._callers:  # sent again after a reconnect
            self._callers[call.id] = identity
            return
        self.lifecycle.check(call.type)
        self._callers[call.id] = identity
        if isinstance(call, _NEEDS_NO_ENGINE):
            self._try(call)
        else:
            self._waiting.append(call)
            self.follow()

    def follow(self) -> None:
        """Go on with the operation under way, and begin what waits."""
        self._follow_operation()
        self._host.admit_requests()
        while self._waiting and self._operation is None:
            self._try(self._waiting.popleft())
            self._host.admit_requests()  # a call that comes after a request, such as a drain, is about it too

    def _try(self, call: protocol.LifecycleCall | protocol.PushCall) -> None:
        try:
            self._start(call)
        except TruerollError as error:
            self._refuse(call.id, error)

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
            case protocol.BeginPush():
                self._start_push(call)
            case protocol.StageBucket() | protocol.VerifyPush():
                self._pass_on(call)
            case protocol.CommitPush():
                self._start_commit(call)
            case protocol.AbortPush():
                self._abort_push(call)

    def _describe_weights(self, call: protocol.GetWeights) -> protocol.Weights:
        self.lifecycle.check(call.type)
        return protocol.Weights(
            id=call.id,
            dtype=self._weights.dtype,
            shapes=self._weights.shapes,
            tied=self._weights.tied,
            ignored=tuple(sorted(self._weights.ignored)),
            weight_version=self._host.weight_version(),
            push_id=None if self.lifecycle.is_dirty else self._served_push,
        )

    def _reply(self, id: str, message: protocol.FromWorker) -> None:
        self._host.reply(self._callers.pop(id), message)

    def _reply_status(self, id: str) -> None:
        state = self.lifecycle.state
        self._reply(id, protocol.Status(id=id, state=state, weight_version=self._host.weight_version()))

    def _refuse(self, id: str, error: TruerollError) -> None:
        self._host.reply_error(self._callers.pop(id), id, error)

    # Operations.

    def _begin(self, operation: _Operation) -> None:
        if operation.in_flight == "drain" and self.lifecycle.is_held and self._host.unfinished_requests():
            count = len(self._host.unfinished_requests())
            raise IllegalStateError(
                f"{operation.call.type}: cannot drain in state {self.lifecycle.state}, found {count} unfinished "
                "requests that nothing computes; choose in_flight recompute or abort, or resume first"
            )
        self._operation = operation
        self.lifecycle.begin(operation.busy)
        self._follow_operation()

    def _follow_operation(self) -> None:
        operation = self._operation
        if operation is None or operation.run is not None:
            return
        if operation.in_flight != "drain" or not self._host.unfinished_requests():
            if operation.breaks_push is not None:
                self._break_push(operation.breaks_push)
            operation.run = Run(operation.action, operation.hold)
            self._host.command(operation.run)
        elif time.monotonic() >= operation.deadline:
            count = len(self._host.unfinished_requests())
            self._cancel_operation(
                DeadlineError(
                    f"{operation.call.type}: expected running requests to end within its timeout, found {count} "
                    "unfinished; nothing was changed; try again with more time, or with in_flight recompute or abort"
                )
            )

    def _cancel_operation(self, error: TruerollError) -> None:
        assert self._operation is not None
        call, self._operation = self._operation.call, None
        self.lifecycle.end()
        self._refuse(call.id, error)

    def handle_ran(self, event: Ran) -> None:
        """The engine has done what the operation under way asked of it, or refused to."""
        operation, self._operation = self._operation, None
        assert operation is not None and operation.run is event.command
        if event.error is None:
            operation.finish(event.seconds)
        self.lifecycle.end()
        if event.error is not None:
            self._refuse(operation.call.id, event.error)
        elif isinstance(operation.call, protocol.LifecycleCall):
            self._reply_status(operation.call.id)
        self.follow()

    def _start_pause(self, call: protocol.Pause | protocol.Resume) -> None:
        pauses = isinstance(call, protocol.Pause)
        if pauses == self.lifecycle.is_paused:
            self._reply_status(call.id)
            return
        self._begin(_Operation(call, "paused", _nothing, hold=pauses, finish=lambda _: self.lifecycle.pause(pauses)))

    def _start_drain(self, call: protocol.Drain) -> None:
        deadline = time.monotonic() + call.timeout
        self._begin(
            _Operation(
                call,
                "draining",
                _nothing,
                hold=True,
                finish=lambda _: self.lifecycle.pause(True),
                in_flight="drain",
                deadline=deadline,
            )
        )

    def _start_sleep(self, call: protocol.Sleep) -> None:
        drops_weights = call.level == 2 and "weights" in call.tags
        tags = _in_order(set(call.tags) - self.lifecycle.sleeping | ({"weights"} if drops_weights else set()))
        started = time.monotonic()

        def finish(_: float) -> None:
            self._timings.sleep.observe(time.monotonic() - started)
            self.lifecycle.sleep(tags, drops_weights)

        self._begin(
            _Operation(
                call,
                "draining",
                lambda engine: engine.sleep(call.level, tags, call.in_flight),
                hold=True,
                finish=finish,
                in_flight=call.in_flight,
                deadline=time.monotonic() + call.timeout,
                breaks_push=_slept() if drops_weights else None,
            )
        )

    def _start_wake_up(self, call: protocol.WakeUp) -> None:
        tags = _in_order(self.lifecycle.sleeping & set(call.tags))
        if not tags:
            self._reply_status(call.id)
            return

        started = time.monotonic()

        def wake(engine: Engine) -> list[Output]:
            engine.wake_up(tags)
            return []

        def finish(_: float) -> None:
            self._timings.wake_up.observe(time.monotonic() - started)
            self.lifecycle.wake_up(tags)

        hold = self._would_hold(sleeping=self.lifecycle.sleeping - set(tags))
        self._begin(_Operation(call, "waking", wake, hold, finish))

    def _start_invalidate(self, call: protocol.Invalidate) -> None:
        def invalidate(engine: Engine) -> list[Output]:
            engine.invalidate_prefix_cache()
            return []

        self._begin(_Operation(call, None, invalidate, hold=self.lifecycle.is_held, finish=lambda _: None))

    def _would_hold(self, sleeping: Collection[Tag] | None = None, is_dirty: bool | None = None) -> bool:
        """Whether the engine must not step once these facts have changed."""
        lifecycle = self.lifecycle
        sleeping = lifecycle.sleeping if sleeping is None else sleeping
        return lifecycle.is_paused or bool(sleeping) or (lifecycle.is_dirty if is_dirty is None else is_dirty)

    # Pushes.

    def _start_push(self, call: protocol.BeginPush) -> None:
        self.lifecycle.check_weights_awake(call.type)
        if self._push is not None and self._push.begin == call:  # sent again after its reply was lost
            self._reply_push(call.id, call.push_id, "begun")
            return
        self._check_base(call)
        superseded = PushError(f"push {call.push_id} of version {call.weight_version} took the place of this one")
        if not call.in_place:
            self._break_push(superseded)
            self._receive(call)
            return

        def finish(_: float) -> None:
            self.lifecycle.set_dirty(True)
            self._receive(call)

        self._begin(
            _Operation(
                call,
                "updating",
                lambda engine: engine.interrupt(call.in_flight),
                hold=True,
                finish=finish,
                in_flight=call.in_flight,
                deadline=time.monotonic() + call.timeout,
                breaks_push=superseded,
            )
        )

    def _check_base(self, call: protocol.BeginPush) -> None:
        if call.base is None:
            return
        if call.in_place:
            raise PushError("begin_push: expected whole tensors for in_place, found base; push without base")
        served = None if self.lifecycle.is_dirty else self._served_push
        if call.base != served:
            raise VersionGapError(
                f"begin_push: expected changes to the push that is served ({served or 'none'}), found changes to "
                f"{call.base}; push every tensor whole"
            )

    def _receive(self, call: protocol.BeginPush) -> None:
        from ..weight_sync.receiver import Receiver  # imports torch, which is there once the engine stands

        log.info("push %s of version %d begins (%s)", call.push_id, call.weight_version, call.source.kind)
        receiver = Receiver(call, self._weights, lambda event: self._host.publish_event(PushNews(push, event)))
        push = self._push = _Push(call, receiver, {call.id})
        receiver.start()

    def _pass_on(self, call: protocol.StageBucket | protocol.VerifyPush) -> None:
        push = self._find_push(call.push_id)
        push.calls.add(call.id)
        if isinstance(call, protocol.StageBucket):
            push.receiver.stage(call, call.id)
        else:
            push.receiver.verify(call, call.id)

    def _find_push(self, push_id: str) -> _Push:
        if self._push is None or self._push.begin.push_id != push_id:
            raise PushError(f"push: expected one that is under way, found {push_id}, which is not; begin it again")
        return self._push

    def _start_commit(self, call: protocol.CommitPush) -> None:
        if self._push is None and call.push_id == self._served_push and not self.lifecycle.is_dirty:
            self._reply_push(call.id, call.push_id, "committed")  # sent again after its reply was lost
            return
        push = self._find_push(call.push_id)
        if not push.is_verified:
            raise PushError("commit_push: expected a push that was verified, found one that was not; verify it first")
        self.lifecycle.check_weights_awake(call.type)
        version, staging = push.begin.weight_version, push.receiver.staging

        def finish(seconds: float) -> None:
            self._served_push = call.push_id
            self.lifecycle.set_dirty(False)
            self._timings.commit_pause.observe(seconds)
            self._timings.push.observe(time.monotonic() - push.receiver.progress.started)
            log.info("push %s: version %d is served", call.push_id, version)
            self._reply_push(call.id, call.push_id, "committed", seconds)

        self._begin(
            _Operation(
                call,
                "updating",
                lambda engine: engine.commit_weights(staging, version, call.in_flight),
                hold=self._would_hold(is_dirty=False),
                finish=finish,
                in_flight=call.in_flight,
                deadline=time.monotonic() + call.timeout,
            )
        )
        self._close_push()  # from here on it is the operation's

    def _abort_push(self, call: protocol.AbortPush) -> None:
        operation = self._operation
        if operation is not None and _is_of_push(operation.call, call.push_id):
            if operation.run is not None:
                self._waiting.appendleft(call)  # too late to stop it: the answer follows when it is over
                return
            self._cancel_operation(_aborted())
        for waiting in [waiting for waiting in self._waiting if _is_of_push(waiting, call.push_id)]:
            self._waiting.remove(waiting)
            self._refuse(waiting.id, _aborted())
        if self._push is not None and self._push.begin.push_id == call.push_id:
            self._break_push(_aborted())
        self._reply_push(call.id, call.push_id, "committed" if call.push_id == self._served_push else "aborted")

    def _break_push(self, error: TruerollError) -> None:
        """Forget the push under way, if any, and tell who waits for it."""
        if self._push is None:
            return
        log.warning(
            "push %s of version %d broke off: %s", self._push.begin.push_id, self._push.begin.weight_version, error
        )
        for id in self._push.calls:
            self._refuse(id, error)
        self._close_push()

    def _close_push(self) -> None:
        assert self._push is not None
        self._push.receiver.close()
        self._push = None

    def handle_push_news(self, news: PushNews) -> None:
        """The thread of a push has come to an end of something."""
        if self._push is None or news.push is not self._push:
            return  # it was superseded or aborted, and whoever waited was told
        match news.event:
            case Broken(error=error):
                self._break_push(error)
            case Begun():
                self._answer_push(self._push.begin.id, "begun")
            case Staged(tag=id):
                self._answer_push(id, "staged")
            case Verified(tag=id):
                self._push.is_verified = True
                self._timings.stage.observe(time.monotonic() - self._push.receiver.progress.started)
                self._answer_push(id, "verified")

    def _answer_push(self, id: str, phase: protocol.PushPhase) -> None:
        assert self._push is not None
        self._push.calls.remove(id)
        self._reply_push(id, self._push.begin.push_id, phase)

    def _reply_push(self, id: str, push_id: str, phase: protocol.PushPhase, pause_seconds: float | None = None) -> None:
        version = self._host.weight_version()
        reply = protocol.PushStatus(
            id=id,
            push_id=push_id,
            phase=phase,
            state=self.lifecycle.state,
            weight_version=version,
            pause_seconds=pause_seconds,
        )
        self._reply(id, reply)

    # The end.

    def start_ending(self) -> None:
        """Refuse what waits and what has not reached the engine; an operation that has goes on."""
        if self._operation is not None and self._operation.run is None:
            self._cancel_operation(_ending())
        self._refuse_waiting(_ending())
        self.lifecycle.start_ending()

    def fail(self, error: TruerollError) -> None:
        """Answer every call with `error`."""
        if self._operation is not None:
            self._refuse(self._operation.call.id, error)
            self._operation = None
        self._refuse_waiting(error)
        self.lifecycle.fail()

    def _refuse_waiting(self, error: TruerollError) -> None:
        self._break_push(error)
        while self._waiting:
            self._refuse(self._waiting.popleft().id, error)


def _nothing(engine: Engine) -> list[Output]:
    return []


def _in_order(tags: Collection[Tag]) -> list[Tag]:
    return [tag for tag in protocol.ALL_TAGS if tag in tags]


def _is_of_push(call: protocol.LifecycleCall | protocol.PushCall, push_id: str) -> bool:
    return isinstance(call, protocol.BeginPush | protocol.CommitPush) and call.push_id == push_id


def _aborted() -> PushError:
    return PushError("push: aborted by its trainer")


def _slept() -> PushError:
    return PushError("push: the weights it was to replace went to sleep at level 2; push again")


def _ending() -> TruerollError:
    return UnavailableError("worker: it ends; use another worker")
