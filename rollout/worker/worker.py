"""The worker: a ZMQ ROUTER socket in front of one engine.

Two threads: the one that calls `Worker.run` does all input and output, and the engine thread does all computing.
Events of the engine come to the first through its `inbox`. Health and stats are answered from snapshots, also while a
step runs long.

Owns: the loop that brings messages and events to the parts that they are for, how the worker ends, and what is told of
it. Does not own: messages (`dispatch`), requests (`book`), the state of the worker and pushes (`control`), the
engine (`engine_thread`), connections (`router`).
Promises: when the engine fails or the worker is told to end, everybody is answered
before it does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import zmq

from trueroll.errors import TruerollError, UnavailableError, WorkerFailedError

from ...weight_sync.transports.policy import PushPolicy
from .. import protocol
from ..config import WorkerConfig
from ..monitoring.metrics import MetricsServer, SourceMetrics
from ..monitoring.timings import Timings
from ..network.router import Router
from .book import RequestBook
from .calls import Calls
from .control import Control
from .dispatch import Dispatch
from .ending import ABORT_SECONDS, Ending
from .engine_thread import (
    Ended,
    EngineThread,
    Event,
    Failed,
    Finished,
    Loaded,
    Ran,
    Refused,
    ServedEngine,
    Stop,
)
from .inbox import Inbox
from .pushes import PushNews
from .vitals import Vitals

if TYPE_CHECKING:
    from ...weight_sync.worker.assembly import Destination

MOST_CALLS = 1024
"""Calls to control the worker that may be under way, and times that one of them may be asked for."""
TURN_SECONDS = 0.01
"""After so long with messages, other work has its turn; one message may take longer."""

log = logging.getLogger(__name__)


class Worker:
    """Serves the engine that `make_engine` builds, on the address of `config`.

    The constructor binds the socket and raises ConfigError if it cannot. `on_ready` is called once, with the engine's
    info, when requests can run. `address` is where clients connect.
    """

    def __init__(
        self,
        config: WorkerConfig,
        make_engine: Callable[[], ServedEngine],
        on_ready: Callable[[dict[str, Any]], None] = lambda info: None,
    ) -> None:
        self._on_ready = on_ready
        self._failure: BaseException | None = None
        self._ending = Ending(config.drain_seconds)
        self._inbox: Inbox[Event | PushNews] = Inbox()
        timings = Timings()
        self._engine_thread = EngineThread(make_engine, self.publish_event, timings.step)
        self._router = Router(config, lambda identity: self._book.lose(identity))
        send, takes = self._router.send, self._router.takes
        self._book = RequestBook(
            config, self._engine_thread.commands.put, send, takes, lambda: self._vitals.conditions()
        )
        self._calls = Calls(send, MOST_CALLS)
        policy = PushPolicy(config.push_folder, tuple(config.push_hosts))
        self._control = Control(self, self._book, self._calls, timings, policy)
        self._vitals = Vitals(config, self._engine_thread, self._book.ledger, self._control, timings)
        self._dispatch = Dispatch(self._router, self._book, self._control, self._vitals, config.max_message_bytes)
        self._metrics: MetricsServer | None = None
        if config.metrics_port is not None:
            try:
                self._metrics = MetricsServer(config.metrics_port, self._vitals, SourceMetrics(self._vitals))
            except BaseException:
                self._close_system()
                raise

    # Callable from other threads, `drain` from signal handlers too.

    @property
    def address(self) -> str:
        """Where clients connect."""
        return self._router.address

    def drain(self) -> None:
        """Refuse new requests, let running ones go on for `drain_seconds`, abort the rest, end.

        Called again: abort at once.
        """
        self._ending.ask()
        self._inbox.wake()

    def publish_event(self, event: Event | PushNews) -> None:
        """Bring an event of another thread to the worker's own."""
        self._inbox.put(event)

    @property
    def wake_fd(self) -> int:
        """Any byte written here makes the worker look around; never blocks."""
        return self._inbox.wake_fd

    @property
    def is_computing(self) -> bool:
        """Whether the engine thread still runs, which after `run` means that it is stuck in a step or in loading."""
        return self._engine_thread.is_alive()

    # Everything below runs on the thread that called `run`.

    def run(self) -> None:
        """Serve until drained. Raises ConfigError or ModelError if the engine cannot load, else WorkerFailedError."""
        self._engine_thread.start()
        try:
            self._loop()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._close()
        if self._failure is not None:
            raise self._failure

    def _loop(self) -> None:
        poller = zmq.Poller()
        self._router.register(poller)
        poller.register(self._inbox, zmq.POLLIN)
        while not self._is_over():
            readable = dict(poller.poll(self._poll_ms()))
            if self._inbox.fileno() in readable:
                self._inbox.clear()
            self._router.maintain()
            self._take_events()
            self._take_messages()
            self._follow_ending()
            self._control.follow()
            self._book.streams.flush()

    @property
    def _state(self) -> protocol.State:
        return self._control.lifecycle.state

    def _is_over(self) -> bool:
        if self._state == "failed":
            return self._ending.is_due
        return self._control.lifecycle.is_ending and not self._has_unanswered

    @property
    def _has_unanswered(self) -> bool:
        return self._book.has_unanswered or bool(self._calls.under_way)

    def _poll_ms(self) -> int | None:
        to_deadline = 1000 * (min(self._ending.deadline, self._control.deadline) - time.monotonic())
        ms = min(max(0.0, to_deadline), self._router.poll_ms)
        return None if ms == float("inf") else round(ms) + 1

    def _close(self) -> None:
        self._engine_thread.commands.put(Stop())
        self._engine_thread.join(timeout=1.0)
        if self._metrics is not None:
            self._metrics.close()
        self._close_system()

    def _close_system(self) -> None:
        self._router.close()
        self._vitals.close()

    # What `control` needs, beside `publish_event`.

    def reply(self, identity: bytes, message: protocol.FromWorker) -> None:
        """Send a message to a client."""
        self._router.send(identity, protocol.encode(message))

    def weight_version(self) -> int:
        """Of the weights that the engine had after its last step or command."""
        assert self._vitals.version is not None
        return self._vitals.version

    @property
    def instance(self) -> str:
        """Random for each process."""
        return self._vitals.instance

    def _take_messages(self) -> None:
        end = time.monotonic() + TURN_SECONDS
        while (received := self._router.receive()) is not None:
            self._dispatch.take(*received)
            if time.monotonic() >= end:
                return

    # Events from the engine and from pushes.

    def _take_events(self) -> None:
        while (event := self._inbox.get()) is not None:
            self._handle_event(event)

    def _handle_event(self, event: Event | PushNews) -> None:
        if self._state == "failed":
            return  # everyone was answered already
        match event:
            case Loaded(info, weights):
                self._finish_loading(info, weights)
            case Finished(outputs, deltas):
                self._book.take_deltas(deltas)
                self._book.take_outputs(outputs)
            case Refused(key, error):
                self._book.refuse(key, error)
            case Ended():
                self._book.take_ended(event)
            case Ran():
                self._book.resume(event.outputs)
                self._control.handle_ran(event)
            case Failed(error):
                self._fail(error)
            case _:
                self._control.pushes.handle_news(event)

    def _finish_loading(self, info: dict[str, Any], weights: Destination) -> None:
        self._vitals.info = info
        if info["backend_note"]:
            log.warning("backend %s, not a faster one: %s", info["backend"], info["backend_note"])
        self._control.finish_loading(weights, info["device"])
        self._book.waiting_room.look_at_all()
        if self._control.lifecycle.is_ending:
            self._book.let_in_the_last()
        if self._state == "ready":
            self._on_ready(info)

    # Ending.

    def _follow_ending(self) -> None:
        """Act on calls of `drain`, and on the deadline that the first of them set."""
        if self._state == "failed" or not self._ending.is_asked:
            return
        if not self._control.lifecycle.is_ending:
            self._control.start_ending()
            if self._vitals.info is not None:
                self._book.let_in_the_last()
            self._ending.start()
        if self._ending.is_urgent or self._control.lifecycle.standing.is_held:
            self._ending.hurry()  # what nothing computes need not be waited for
        if self._ending.is_due and self._has_unanswered:
            self._abort_open_requests()

    def _abort_open_requests(self) -> None:
        if self._vitals.info is None:
            self._fail_everything(UnavailableError("worker: it ended before its model was loaded; use another worker"))
        elif self._ending.is_aborting:
            self._fail(TimeoutError(f"the engine did not end what was under way within {ABORT_SECONDS} s"))
        else:
            log.warning("aborting %d unfinished requests", len(self._book.ledger.open))
            self._book.abort_all()
            self._ending.start_aborting()

    def _fail(self, cause: BaseException) -> None:
        """Answer every open request with the cause, and let the loop end soon."""
        if self._state == "failed":
            return
        log.error("%s: %s", type(cause).__name__, cause, exc_info=None if isinstance(cause, TruerollError) else cause)
        self._failure = _explain(cause, was_loading=self._state == "loading")
        self._control.lifecycle.fail()
        self._fail_everything(WorkerFailedError(str(self._failure)))
        self._ending.fail()

    def _fail_everything(self, error: TruerollError) -> None:
        """Answer every open request and call with an error."""
        self._book.fail_all(error)
        self._control.fail_calls(error)


def _explain(cause: BaseException, was_loading: bool) -> TruerollError:
    if was_loading and isinstance(cause, TruerollError):
        return cause
    what = "could not load" if was_loading else "failed"
    return WorkerFailedError(
        f"worker: the engine {what} ({type(cause).__name__}: {cause}); start the worker anew, its log says more"
    )
