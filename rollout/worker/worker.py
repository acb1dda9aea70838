"""The worker: a ZMQ ROUTER socket in front of one engine.

A worker has two main threads. The thread that calls `Worker.run` does all input and output, and the engine thread does
all computation. Engine events reach the thread of `Worker.run` through an `Inbox`. Health and stats come from
snapshots, so that a long step does not delay the replies.

Owns: the main loop; the checks and the dispatch of messages (`Dispatch`); the shutdown (`Ending`); and health, counters
and timings (`Vitals`). Does not own: requests (`book`), pushes and the state of the worker (`control`), the engine
(`engine_thread`), or connections (`router`).

Guarantees: received bytes cannot crash the process. If the engine fails or the worker shuts down, every caller gets a
reply before the worker exits.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import zmq

from trueroll.errors import (
    ForbiddenError,
    MessageTooLargeError,
    ProtocolError,
    TruerollError,
    UnavailableError,
    WorkerFailedError,
)

from ...weight_sync.transports.policy import PushPolicy
from .. import protocol
from ..config import WorkerConfig
from ..monitoring.metrics import MetricsServer, SourceMetrics
from ..monitoring.resident import ResidentMemory
from ..monitoring.timings import Timings
from ..network.keys import Role
from ..network.router import Peer, Router
from .admission import Conditions, Versions
from .book import RequestBook
from .control import Control
from .engine_thread import Ended, EngineThread, Event, Failed, Finished, Loaded, Ran, Refused, ServedEngine, Stop
from .grammars import GrammarThread, Preparation
from .ledger import Calls
from .pushes import PushNews
from .saving import Saving

log = logging.getLogger(__name__)


class Vitals:
    """Health, counters and timings of one worker.

    `info`: the EngineInfo as a dictionary; None until the thread of `Worker.run` has handled the event `Loaded`.
    """

    def __init__(
        self,
        config: WorkerConfig,
        engine_thread: EngineThread,
        book: RequestBook,
        control: Control,
        timings: Timings,
        saving: Saving,
    ) -> None:
        self.instance = secrets.token_hex(8)
        self.info: dict[str, Any] | None = None
        self._config, self._engine_thread, self._book, self._control = config, engine_thread, book, control
        self._timings, self._saving = timings, saving
        self._resident = ResidentMemory()

    def health(self, id: str = "metrics") -> protocol.Health:
        """Return the worker's health."""
        snapshot, lifecycle = self._engine_thread.snapshot, self._control.lifecycle
        requests = {"open": len(self._book.ledger.open), "kept": len(self._book.ledger.kept)}
        if snapshot is not None:
            requests |= {"running": snapshot.stats.num_running, "waiting": snapshot.stats.num_waiting}
        return protocol.Health(
            id=id,
            state=lifecycle.state,
            instance=self.instance,
            seconds_since_progress=None if snapshot is None else time.monotonic() - snapshot.progress_at,
            weight_version=None if snapshot is None else snapshot.versions.base,
            adapters={} if snapshot is None else dict(snapshot.versions.adapters),
            requests=requests,
            memory=self._memory(),
            limits=self._config.limits(),
            engine=self._engine(),
            sleeping=tuple(sorted(lifecycle.standing.sleeping)),
            push=self._control.pushes.progress(),
            saved=self._saving.describe(),
        )

    def stats(self, id: str = "metrics") -> protocol.Stats:
        """Return the lifetime counters."""
        snapshot = self._engine_thread.snapshot
        engine = {} if snapshot is None else dataclasses.asdict(snapshot.stats)
        return protocol.Stats(id=id, engine=engine, service=dataclasses.asdict(self._book.ledger.stats))

    def timings(self) -> Timings:
        """Return the durations of steps, pushes and sleeps."""
        return self._timings

    def conditions(self) -> Conditions:
        """Return the conditions of the worker, which decide whether a new request is accepted."""
        lifecycle = self._control.lifecycle
        return Conditions(lifecycle.state, lifecycle.is_ending, self._control.takes_requests, self.versions)

    @property
    def versions(self) -> Versions | None:
        """Versions of the engine's weights after the engine's last step or command.

        None until `info` is set, so that the value cannot change from None to a version while a message is being
        handled.
        """
        snapshot = self._engine_thread.snapshot
        return None if self.info is None or snapshot is None else snapshot.versions

    def close(self) -> None:
        """Stop measuring."""
        self._resident.close()

    def _engine(self) -> dict[str, Any] | None:
        """Return `info` with the notes of the weights: `commit_note` has the cause of slow commits, and `optional_note`
        says which weights the last push lacked. Both notes are usually empty.
        """
        target = self._control.pushes.target
        if self.info is None or target is None:
            return None
        weights = target.weights
        return self.info | {"commit_note": weights.commit_note, "optional_note": weights.optional_note}

    def _memory(self) -> dict[str, int]:
        memory = {
            "process": self._resident.num_bytes(),
            "images": self._book.images.num_bytes,
            "replies": self._book.ledger.num_bytes_replied,
        }
        if (snapshot := self._engine_thread.snapshot) is not None:
            memory |= snapshot.memory | {"staging": self._control.pushes.staging_bytes}
        return memory


T = TypeVar("T")


class Inbox(Generic[T]):
    """A queue that any thread can fill. One thread waits on `fileno` and empties the queue."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def put(self, item: T) -> None:
        """Add an item and wake the waiting thread. May be called from any thread."""
        self._items.put(item)
        self.wake()

    def wake(self) -> None:
        """Wake the waiting thread. May be called from any thread and from signal handlers."""
        try:
            self._writer.send(b"\0")
        except BlockingIOError:
            pass  # the buffer is full of wake-ups, and a single wake-up is enough

    def fileno(self) -> int:
        """Return a descriptor that is readable after a wake-up."""
        return self._reader.fileno()

    @property
    def wake_fd(self) -> int:
        """A descriptor for writing.

        Each byte that is written to this descriptor wakes the waiting thread. Writes do not block.
        """
        return self._writer.fileno()

    def clear(self) -> None:
        """Consume all pending wake-ups. Call this method when `fileno` is readable."""
        self._reader.recv(4096)

    def get(self) -> T | None:
        """Return the next item; None if the queue is empty."""
        try:
            return self._items.get_nowait()
        except queue.Empty:
            return None


ABORT_SECONDS = 5.0
"""Maximum time, in seconds, for the engine to abort the remaining requests after the drain deadline."""
FAILED_SECONDS = 0.5
"""Time, in seconds, for which a failed worker keeps answering, so that health checks can see the state `failed`."""


class Ending:
    """The shutdown of a worker.

    `deadline`: time of the next action of the shutdown, in monotonic seconds. `is_aborting`: the engine has received
    the command to abort the remaining requests.
    """

    def __init__(self, drain_seconds: float) -> None:
        self.deadline = float("inf")
        self.is_aborting = False
        self._drain_seconds = drain_seconds
        self._num_asked = 0

    def ask(self) -> None:
        """Request a shutdown.

        A second shutdown request makes the shutdown immediate. May be called from any thread and from signal handlers.
        """
        self._num_asked += 1

    @property
    def is_asked(self) -> bool:
        """Return whether a shutdown was requested."""
        return self._num_asked > 0

    @property
    def is_urgent(self) -> bool:
        """Return whether a shutdown was requested more than once."""
        return self._num_asked > 1

    @property
    def is_due(self) -> bool:
        """Return whether the deadline has passed."""
        return time.monotonic() >= self.deadline

    def start(self) -> None:
        """Set the deadline: running requests may continue for `drain_seconds`."""
        self.deadline = time.monotonic() + self._drain_seconds

    def hurry(self) -> None:
        """Move the deadline to now. No-op if the remaining requests are already being aborted."""
        if not self.is_aborting:
            self.deadline = time.monotonic()

    def start_aborting(self) -> None:
        """Record that the engine is aborting the remaining requests, and give the engine `ABORT_SECONDS` to finish."""
        self.is_aborting = True
        self.deadline = time.monotonic() + ABORT_SECONDS

    def fail(self) -> None:
        """Record that the worker has failed. The worker keeps answering messages for `FAILED_SECONDS`."""
        self.deadline = time.monotonic() + FAILED_SECONDS


ELEMENTS_BY_ROLE: dict[Role, int] = {"generate": 2**13, "control": protocol.MAX_ELEMENTS}
"""Maximum number of elements in a message, by role. The limit bounds the time to decode a message. Only the buckets of
pushes have many elements.
"""
FOR_ALL_ROLES = protocol.Generate | protocol.GetScores | protocol.Abort | protocol.GetHealth | protocol.GetStats


def read(frames: list[bytes], role: Role, max_message_bytes: int) -> protocol.FromClient:
    """Decode the message in `frames`.

    Raise ProtocolError, MessageTooLargeError or InvalidRequestError if the bytes are invalid. Invalid bytes cannot
    cause errors of other classes.
    """
    frame = _only_frame(frames, max_message_bytes)
    try:
        return protocol.from_client(frame, ELEMENTS_BY_ROLE[role])
    except TruerollError:
        raise
    except Exception as error:  # a bug in a decoding library must not end the worker
        log.exception("could not read a message of %d bytes", len(frame))
        raise ProtocolError(f"message: could not be read ({type(error).__name__})") from None


def _only_frame(frames: list[bytes], limit: int) -> bytes:
    if len(frames) != 1:
        found = len(frames)
        text = f"message: must be a single frame (got {found} frames); use a DEALER socket"
        raise ProtocolError(text, value=found, limit=1)
    if (found := len(frames[0])) > limit:
        raise MessageTooLargeError(
            f"message: has {found} bytes (limit {limit}, max_message_bytes); send less, or raise the limit",
            value=found,
            limit=limit,
        )
    return frames[0]


def check_peer(peer: Peer, message: protocol.Call) -> None:
    """Raise ForbiddenError if the client's role or connection does not allow the call.

    Raise UnavailableError for a `while_connected` request from a connection that has ended. If clients have user names,
    refuse every request from an ended connection, because another user could take over the connection's identity and
    get the replies.
    """
    client = peer.client
    if client.role != "control" and not isinstance(message, FOR_ALL_ROLES):
        raise ForbiddenError(
            f"{message.type}: needs the role 'control', but {client.user} has {client.role!r}; use another key, "
            "or change the worker's clients_file and restart the worker",
            value=client.role,
        )
    # Replies are sent to the identity of the connection that sent the request. A client that chooses its own identity
    # could take over the identity of another user's connection.
    if client.user is not None and not peer.identity.startswith(b"\0"):
        raise ForbiddenError(
            "connection: a client must not choose the identity of its connection; do not set ZMQ_ROUTING_ID"
        )
    needs_peer = client.user is not None or getattr(message, "while_connected", False)
    if needs_peer and peer.is_gone and isinstance(message, protocol.Generate | protocol.GetScores):
        raise UnavailableError("connection: the connection has ended; reconnect and send the request again")


class Dispatch:
    """Passes each message of at most `max_message_bytes` to its handler.

    Requests go to `book`. The calls `health` and `stats` go to `vitals`, and control calls go to `control`.
    """

    def __init__(
        self, router: Router, book: RequestBook, control: Control, vitals: Vitals, max_message_bytes: int
    ) -> None:
        self._router, self._book, self._control, self._vitals = router, book, control, vitals
        self._max_message_bytes = max_message_bytes

    def take(self, peer: Peer, frames: list[bytes]) -> None:
        """Handle a message from a client. If the message is refused, reply with the error."""
        if not frames:
            return  # the worker dropped replies to this client, and ignores its messages until the client knows this
        try:
            message = read(frames, peer.client.role, self._max_message_bytes)
        except TruerollError as error:
            log.debug("refused a message: %s", error.code)
            self._refuse(peer, protocol.id_in(frames[-1]), error)
            return
        if isinstance(message, protocol.Ack):
            self._book.acknowledge(peer.client.user, message)
            return
        if isinstance(message, protocol.PutImage):
            self._book.put_image(peer.identity, message)
            return
        try:
            check_peer(peer, message)
            self._handle(peer, message)
        except TruerollError as error:
            log.debug("refused a %s: %s", message.type, error.code)
            self._refuse(peer, message.id, error, getattr(message, "caller", None))
        except OSError as error:  # an unexpected OSError must not end the worker
            log.exception("could not serve a %s", message.type)
            refused = UnavailableError(
                f"worker: the operating system has run out of a resource ({error.strerror}); try again later"
            )
            self._refuse(peer, message.id, refused, getattr(message, "caller", None))

    def _handle(self, peer: Peer, message: protocol.Call) -> None:
        identity, user = peer.identity, peer.client.user
        match message:
            case protocol.Generate() | protocol.GetScores():
                self._book.submit(identity, user, message)
            case protocol.Abort():
                self._book.abort(identity, user, message)
            case protocol.GetHealth():
                self._router.send(identity, protocol.encode(self._vitals.health(message.id)))
            case protocol.GetStats():
                self._router.send(identity, protocol.encode(self._vitals.stats(message.id)))
            case _:
                self._control.handle(identity, message)

    def _refuse(self, peer: Peer, id: str | None, error: TruerollError, caller: str | None = None) -> None:
        self._router.send(peer.identity, protocol.encode(protocol.error_message(id, error, caller)))


MOST_CALLS = 1024
"""Maximum number of pending control calls, and of clients that wait for the reply to the same call."""
TURN_SECONDS = 0.01
"""Maximum time, in seconds, that the loop handles messages before it does other work. Handling a single message may
take longer.
"""


class Worker:
    """Serves an engine at the address of `config`. `make_engine` builds the engine.

    The constructor binds the socket, and raises ConfigError if the socket cannot be bound. `on_ready`: called once,
    with the engine's info, when the worker is ready for requests. `address`: address for clients.
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
        self._flush_at = float("inf")  # the end of the next pause of a stream
        self._inbox: Inbox[Event | PushNews | Preparation] = Inbox()
        timings = Timings()
        self._saving = Saving(config.save_folder, self._inbox.wake)

        def load() -> ServedEngine:
            return self._saving.load(make_engine())

        self._engine_thread = EngineThread(load, self.publish_event, timings.step, config.max_unread_bytes)
        self._router = Router(config, lambda identity: self._book.lose(identity))
        send, takes = self._router.send, self._router.takes
        self._book = RequestBook(
            config, self._engine_thread.commands.put, send, takes, lambda: self._vitals.conditions()
        )
        self._calls = Calls(send, MOST_CALLS)
        policy = PushPolicy(config.push_folder, tuple(config.push_hosts), tuple(config.push_urls))
        self._control = Control(self, self._book, self._calls, timings, policy, self._saving)
        self._vitals = Vitals(config, self._engine_thread, self._book, self._control, timings, self._saving)
        self._dispatch = Dispatch(self._router, self._book, self._control, self._vitals, config.max_message_bytes)
        self._metrics: MetricsServer | None = None
        if config.metrics_port is not None:
            try:
                self._metrics = MetricsServer(config.metrics_port, self._vitals, SourceMetrics(self._vitals))
            except BaseException:
                self._close_system()
                raise

    # The methods in this section may be called from any thread, and `drain` also from signal handlers.

    @property
    def address(self) -> str:
        """Address for clients."""
        return self._router.address

    def drain(self) -> None:
        """Shut down: refuse new requests, give accepted requests `drain_seconds` to finish, abort the remaining
        requests, and end.

        A second call aborts the remaining requests immediately.
        """
        self._ending.ask()
        self._inbox.wake()

    def publish_event(self, event: Event | PushNews | Preparation) -> None:
        """Pass an event from another thread to the worker's thread."""
        self._inbox.put(event)

    @property
    def wake_fd(self) -> int:
        """A descriptor for writing.

        Each byte that is written to this descriptor wakes the worker's loop. Writes do not block.
        """
        return self._inbox.wake_fd

    @property
    def is_computing(self) -> bool:
        """Return whether the engine thread is running.

        A thread that still runs after `run` has returned is stuck in a step or in loading.
        """
        return self._engine_thread.is_alive()

    # All methods below run on the thread that called `run`.

    def run(self) -> None:
        """Serve requests until the worker has drained.

        Raise ConfigError or ModelError if the engine cannot load, and WorkerFailedError for any other failure of the
        engine.
        """
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
            self._book.follow_images()
            self._flush_at = self._book.streams.flush(time.monotonic())

    @property
    def _state(self) -> protocol.State:
        return self._control.lifecycle.state

    def _is_over(self) -> bool:
        if self._state == "failed":
            return self._ending.is_due
        return self._control.lifecycle.is_ending and not self._has_unanswered and not self._waits_for_saving

    @property
    def _has_unanswered(self) -> bool:
        return self._book.has_unanswered or bool(self._calls.under_way)

    @property
    def _waits_for_saving(self) -> bool:
        """Return whether the shutdown waits until the weights are saved: at most until the deadline."""
        return self._saving.is_writing and not self._ending.is_urgent and not self._ending.is_due

    def _poll_ms(self) -> int | None:
        deadlines = self._ending.deadline, self._control.deadline, self._flush_at, self._book.images.deadline
        to_deadline = 1000 * (min(deadlines) - time.monotonic())
        ms = min(max(0.0, to_deadline), self._router.poll_ms)
        return None if ms == float("inf") else round(ms) + 1

    def _close(self) -> None:
        self._engine_thread.commands.put(Stop())
        self._engine_thread.join(timeout=1.0)
        if self._book.grammars is not None:
            self._book.grammars.close()
        if self._metrics is not None:
            self._metrics.close()
        self._close_system()

    def _close_system(self) -> None:
        self._saving.close()
        self._router.close()
        self._vitals.close()

    # The remaining methods of the protocol `control.Host`.

    def reply(self, identity: bytes, message: protocol.FromWorker) -> None:
        """Send a message to a client."""
        self._router.send(identity, protocol.encode(message))

    def versions(self) -> Versions:
        """Return the versions of the engine's weights after the engine's last step or command.

        The model must have loaded.
        """
        assert self._vitals.versions is not None
        return self._vitals.versions

    @property
    def instance(self) -> str:
        """A random identifier of the process."""
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

    def _handle_event(self, event: Event | PushNews | Preparation) -> None:
        if self._state == "failed":
            return  # every caller has already received a reply
        match event:
            case Loaded():
                self._finish_loading(event)
            case Preparation():
                self._book.take_prepared(event)
            case Finished(outputs, deltas):
                self._book.take_deltas(deltas)
                self._book.take_outputs(outputs)
            case Refused(key, error):
                self._book.end(key, error)
            case Ended():
                self._book.take_ended(event)
            case Ran():
                self._book.resume(event.outputs)
                self._control.handle_ran(event)
            case Failed(error):
                self._fail(error)
            case _:
                self._control.pushes.handle_news(event)

    def _finish_loading(self, loaded: Loaded) -> None:
        info = loaded.info
        self._book.images.set_limits(loaded.images)
        self._book.grammars = GrammarThread(loaded.grammars, self.publish_event)
        self._vitals.info = info
        self._book.max_model_len, self._book.max_record_bytes = info["max_model_len"], info["max_record_bytes"]
        if info["backend_note"]:
            log.warning("backend %s, not a faster one: %s", info["backend"], info["backend_note"])
        self._control.finish_loading(loaded.weights, loaded.adapters, info["device"])
        self._book.waiting_room.look_at_all()
        if self._control.lifecycle.is_ending:
            self._book.let_in_the_last()
        if self._state == "ready":
            self._on_ready(info)

    # Shutdown.

    def _follow_ending(self) -> None:
        """Start the shutdown if `drain` was called, and enforce the deadline."""
        if self._state == "failed" or not self._ending.is_asked:
            return
        if not self._control.lifecycle.is_ending:
            self._control.start_ending()
            if self._vitals.info is not None:
                self._book.let_in_the_last()
            self._ending.start()
        if self._has_unanswered and (self._ending.is_urgent or self._control.lifecycle.standing.is_held):
            self._ending.hurry()  # a held engine does not step, so the requests would never finish
        if self._ending.is_due and self._has_unanswered:
            self._abort_open_requests()

    def _abort_open_requests(self) -> None:
        if self._vitals.info is None:
            self._fail_everything(
                UnavailableError("worker: was shut down before its model had loaded; use another worker")
            )
        elif self._ending.is_aborting:
            self._fail(TimeoutError(f"the engine did not abort all requests within {ABORT_SECONDS} s"))
        else:
            log.warning("aborting %d unfinished requests", len(self._book.ledger.open))
            self._book.abort_all()
            self._ending.start_aborting()

    def _fail(self, cause: BaseException) -> None:
        """Mark the worker as failed, and answer every open request with an error that names the cause.

        The loop ends after `FAILED_SECONDS`.
        """
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
        f"worker: the engine {what} ({type(cause).__name__}: {cause}); see the worker's log, then restart the worker"
    )
