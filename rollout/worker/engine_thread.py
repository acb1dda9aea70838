"""The thread that owns the engine. No other thread builds the engine, adds requests or runs steps.

Commands arrive through a queue, and events leave through a callback. The engine needs no locks, because threads do not
share the engine. A command waits for at most one step. After each step, the thread replaces the `Snapshot` from which
health and stats are answered. Guarantees: commands are applied in order, and every exception of the engine becomes an
event.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from trueroll.errors import TruerollError, UnknownRequestError

from ...engine.media import ImageLimits
from ...engine.request import InFlight, Output, Request, SampleDelta, SleepInFlight, Tag
from ..monitoring.timings import Histogram
from .admission import Versions
from .grammars import Preparing
from .reply_bytes import check_reply

if TYPE_CHECKING:
    from ...weight_sync.worker.assembly import Destination, StagingArea


SECONDS_BETWEEN_CHECKS = 1.0
"""Time, in seconds, between two checks of the engine's other processes while the engine has no work."""


class ServedAdapters(Protocol):
    """The named adapters of an engine: an `AdapterDestination`. `versions`: the version of each adapter, by name."""

    def new_staging(self, name: str) -> StagingArea: ...

    @property
    def versions(self) -> dict[str, int]: ...


class ServedEngine(Protocol):
    """The interface that the worker needs from its engine. `trueroll.engine.engine.Engine` implements this protocol."""

    info: Any
    """A dataclass that describes the engine, with fields `backend` and `backend_note`."""

    @property
    def images(self) -> ImageLimits: ...

    @property
    def grammars(self) -> Preparing: ...

    @property
    def weights(self) -> Destination: ...

    @property
    def adapters(self) -> ServedAdapters | None:
        """The named adapters; None if the engine serves none."""
        ...

    @property
    def weight_version(self) -> int: ...

    @property
    def has_unfinished(self) -> bool: ...

    def add(self, request: Request) -> None: ...

    def abort(self, request_id: str, index: int | None = None) -> list[Output]: ...

    def stream(self, request_id: str) -> None: ...

    def take_deltas(self) -> list[SampleDelta]: ...

    def step(self) -> list[Output]: ...

    def settle(self) -> list[Output]: ...

    def commit_weights(self, staging: Any, version: int, in_flight: InFlight) -> list[Output]:
        """Commit new weights. `staging`: the new weights, in a staging area that this engine's `weights.new_staging`
        has returned.
        """
        ...

    def commit_adapter(self, staging: Any, name: str, version: int, in_flight: SleepInFlight) -> list[Output]:
        """Load a named adapter. `staging`: the LoRA matrices A and B, in a staging area of this engine's `adapters`."""
        ...

    def remove_adapter(self, name: str) -> list[Output]: ...

    def sleep(self, level: int, tags: Collection[Tag], in_flight: SleepInFlight) -> list[Output]: ...

    def wake_up(self, tags: Collection[Tag]) -> None: ...

    def interrupt(self, in_flight: InFlight) -> list[Output]: ...

    def invalidate_prefix_cache(self) -> None: ...

    def check(self) -> None:
        """Raise an exception if another process of the engine has failed. The engine thread calls this method now and
        then while the engine has no work.
        """
        ...

    def stats(self) -> Any:
        """Return a new frozen dataclass of counters with `computed_tokens`, `num_running` and `num_waiting`."""
        ...

    def memory(self) -> dict[str, int]:
        """Return the current memory use of each tag, in bytes."""
        ...


@dataclass(frozen=True)
class Add:
    """Add a request to the engine. The response is the request's outputs, or `Refused`.

    `ended`: indices of samples that are already aborted and must not be generated. `prepared`: an object that keeps the
    request's grammar prepared until the engine has the request. Without this object, steps would wait while the engine
    prepares the grammar again.
    """

    request: Request
    ended: tuple[int, ...] = ()
    prepared: object | None = None


@dataclass(frozen=True)
class Stream:
    """Begin to stream a request: from now on, `Finished` events contain deltas of the request's samples.

    The first delta of a sample contains all tokens so far. No-op if the request has ended.
    """

    request_id: str


@dataclass(frozen=True)
class End:
    """End all unfinished samples of a request, or only sample `index`.

    The response is `Ended`, which contains this command. `tag`: any object, with which the sender recognizes the
    response.
    """

    request_id: str
    index: int | None
    tag: Any


@dataclass(frozen=True)
class Run:
    """Run an action on the engine between two steps. The response is `Ran`.

    `hold`: after the action, run no steps until a `Run` without `hold` arrives.
    """

    action: Callable[[ServedEngine], list[Output]]
    hold: bool


@dataclass(frozen=True)
class Stop:
    """End the thread, even if requests are unfinished. `Stop` has no response."""


@dataclass(frozen=True)
class Loaded:
    """The engine is built. `info`: the EngineInfo as a dictionary. `weights`: the destination of pushes. `adapters`:
    the destination of named adapters, or None. `images`: the limits on images. `grammars`: prepares grammars.
    """

    info: dict[str, Any]
    weights: Destination
    adapters: ServedAdapters | None
    images: ImageLimits
    grammars: Preparing


@dataclass(frozen=True)
class Finished:
    """The finished samples and scores of a step, and the new tokens of unfinished samples in streamed requests."""

    outputs: list[Output]
    deltas: list[SampleDelta]


@dataclass(frozen=True)
class Refused:
    """The engine refused a request."""

    request_id: str
    error: TruerollError


@dataclass(frozen=True)
class Ended:
    """The outputs of the samples that an `End` command ended; empty if the command found no unfinished samples."""

    command: End
    outputs: list[Output]


@dataclass(frozen=True)
class Ran:
    """The outputs of the samples and scores that a `Run` command finished.

    `seconds`: duration of the action, during which the engine did not step.
    """

    command: Run
    outputs: list[Output]
    seconds: float


@dataclass(frozen=True)
class Failed:
    """The engine could not be built, or raised a fatal error. The thread has ended."""

    error: BaseException


Command: TypeAlias = Add | Stream | End | Run | Stop
Event: TypeAlias = Loaded | Finished | Refused | Ended | Ran | Failed


@dataclass(frozen=True)
class Snapshot:
    """The state of the engine after its last step.

    `stats`: lifetime counters, as `ServedEngine.stats` returns them. `memory`: bytes by tag. `progress_at`: time at
    which the engine last made progress, in monotonic seconds.
    """

    stats: Any
    memory: dict[str, int]
    versions: Versions
    progress_at: float


class EngineThread(threading.Thread):
    """Builds the engine, and then applies commands and runs steps until a `Stop` command arrives. Put each `Command`
    into `commands`.

    `publish`: called on the engine thread with every event. `step_seconds`: histogram of step durations.
    `max_reply_bytes`: requests with larger replies are refused. `snapshot`: None until the engine is built.
    """

    def __init__(
        self,
        make_engine: Callable[[], ServedEngine],
        publish: Callable[[Event], None],
        step_seconds: Histogram,
        max_reply_bytes: int,
    ) -> None:
        super().__init__(name="engine", daemon=True)
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.snapshot: Snapshot | None = None
        self._make_engine = make_engine
        self._publish = publish
        self._step_seconds = step_seconds
        self._max_reply_bytes = max_reply_bytes
        self._is_held = False

    def run(self) -> None:
        try:
            engine = self._make_engine()
            self._take_snapshot(engine, made_progress=True)
            info, images = dataclasses.asdict(engine.info), engine.images
            self._publish(Loaded(info, engine.weights, engine.adapters, images, engine.grammars))
            self._loop(engine)
        except BaseException as error:  # every cause of the thread's end must be reported
            self._publish(Failed(error))

    def _loop(self, engine: ServedEngine) -> None:
        while self._apply_commands(engine):
            started = time.monotonic()
            outputs = engine.step()
            self._step_seconds.observe(time.monotonic() - started)
            self._take_snapshot(engine, made_progress=bool(outputs))
            deltas = engine.take_deltas()
            if outputs or deltas:
                self._publish(Finished(outputs, deltas))

    def _has_work(self, engine: ServedEngine) -> bool:
        return engine.has_unfinished and not self._is_held

    def _apply_commands(self, engine: ServedEngine) -> bool:
        """Apply all pending commands.

        While the engine has no work, wait for more commands. Return False after `Stop`.
        """
        has_work = self._has_work(engine)
        while True:
            try:
                command = self.commands.get(block=not has_work, timeout=SECONDS_BETWEEN_CHECKS)
            except queue.Empty:
                if has_work:
                    return True
                engine.check()
                continue
            if isinstance(command, Stop):
                return False
            self._apply(engine, command)
            was_idle, has_work = not has_work, self._has_work(engine)
            if was_idle or not has_work:
                self._take_snapshot(engine, made_progress=True)

    def _apply(self, engine: ServedEngine, command: Add | Stream | End | Run) -> None:
        match command:
            case Add(request, ended):
                try:
                    check_reply(request, engine.info, self._max_reply_bytes)
                    engine.add(request)
                    for index in ended:
                        engine.abort(request.id, index)
                except TruerollError as error:
                    self._publish(Refused(request.id, error))
            case Stream(request_id):
                with suppress(UnknownRequestError):
                    engine.stream(request_id)
                    self._publish(Finished([], engine.take_deltas()))
            case End(request_id, index):
                outputs: list[Output] = []
                with suppress(UnknownRequestError):
                    outputs = engine.abort(request_id, index)
                self._publish(Ended(command, outputs))
            case Run():
                self._run_between_steps(engine, command)

    def _run_between_steps(self, engine: ServedEngine, command: Run) -> None:
        started = time.monotonic()
        outputs = command.action(engine)
        self._is_held = command.hold
        seconds = time.monotonic() - started
        self._take_snapshot(engine, made_progress=True)
        self._publish(Ran(command, outputs, seconds))

    def _take_snapshot(self, engine: ServedEngine, made_progress: bool) -> None:
        stats, before = engine.stats(), self.snapshot
        if before is None or made_progress or stats.computed_tokens > before.stats.computed_tokens:
            progress_at = time.monotonic()
        else:
            progress_at = before.progress_at
        versions = Versions(engine.weight_version, {} if engine.adapters is None else engine.adapters.versions)
        self.snapshot = Snapshot(stats, engine.memory(), versions, progress_at)
