"""The worker: a ZMQ ROUTER socket in front of one engine.

Two threads: the one that calls `Worker.run` does all input and output, and the engine thread does all computing.
Events of the engine wake the first through a socket pair. Health and stats are answered from snapshots, also while a
step runs long.

Owns: the ledger of requests, the streamed ones (`streams`), and those that wait because the worker is not ready; what
each role may ask for. Does not own: the engine (the engine thread does), the state of the worker (`control` does),
connections (`router` does).
Promises: every accepted request gets exactly one terminal reply for each time it was submitted, also when the engine
fails or the worker is told to end, unless its client does not read; no received bytes end the process; a user's
requests and cached prefixes are nobody else's.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import secrets
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import zmq

from trueroll.errors import (
    ForbiddenError,
    InvalidRequestError,
    MessageTooLargeError,
    ProtocolError,
    QueueFullError,
    TruerollError,
    UnavailableError,
    UnknownRequestError,
    WorkerFailedError,
)

from ...engine.request import GenerateRequest, Output, SampleDelta, SampleOutput, ScoreRequest, check_length, seed_of
from ...weight_sync.transports.policy import PushPolicy
from .. import protocol
from ..config import WorkerConfig
from ..monitoring.metrics import MetricsServer, SourceMetrics
from ..monitoring.resident import ResidentMemory
from ..monitoring.timings import Timings
from ..network.keys import Role
from ..network.router import Peer, Router
from .calls import Calls
from .control import Control
from .engine_thread import (
    Add,
    End,
    Ended,
    EngineThread,
    Event,
    Failed,
    Finished,
    Loaded,
    Ran,
    Refused,
    Run,
    ServedEngine,
    Stop,
    Stream,
)
from .ledger import Entry, Ledger, Submission, asked_by, num_bytes_of, num_streamed_by
from .pushes import PushNews
from .streams import Streams
from .users import salt_of, scoped
from .waiting_room import Waiting, WaitingRoom, serves, too_old

if TYPE_CHECKING:
    from ...weight_sync.worker.assembly import Destination

MOST_CALLS = 1024
"""Calls to control the worker that may be under way, and times that one of them may be asked for."""
MOST_CALLERS = 1024
"""Who may ask for the same request by different names."""
ABORT_SECONDS = 5.0
"""How long the engine may take to abort what is left after the drain deadline."""
FAILED_SECONDS = 0.5
"""How long a failed worker still answers, so that a health check can see the state."""
TURN_SECONDS = 0.01
"""After so long with messages, other work has its turn; one message may take longer."""
ELEMENTS_BY_ROLE: dict[Role, int] = {"generate": 2**13, "control": protocol.MAX_ELEMENTS}
"""Of a message. Reading costs time for each, and only a bucket of a push has many."""

FOR_ALL_ROLES = protocol.Generate | protocol.GetScores | protocol.Abort | protocol.GetHealth | protocol.GetStats

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
        self._config = config
        self._on_ready = on_ready
        self.instance = secrets.token_hex(8)
        self._info: dict[str, Any] | None = None
        self._failure: BaseException | None = None
        self._deadline = float("inf")
        self._drain_calls = 0
        self._aborts_sent = False
        self._calls = Calls(self._send, MOST_CALLS)
        self._aborts = Calls(self._send, config.max_queued_requests)  # of their own, as they are many
        self._interrupted: list[Entry] = []
        self._ledger = Ledger(config.max_kept_results, config.max_kept_bytes)
        self._waiting_room = WaitingRoom()
        self._events: queue.SimpleQueue[Event | PushNews] = queue.SimpleQueue()
        self._timings = Timings()
        self._engine_thread = EngineThread(make_engine, self.publish_event, self._timings.step)
        policy = PushPolicy(config.push_folder, tuple(config.push_hosts))
        self._control = Control(self, self._calls, self._timings, policy)
        self._resident = ResidentMemory()
        self._router = Router(config, self._lose)
        self._streams = Streams(self._tell, self._router.takes)
        self.address = self._router.address
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._metrics: MetricsServer | None = None
        if config.metrics_port is not None:
            try:
                self._metrics = MetricsServer(config.metrics_port, self, SourceMetrics(self))
            except BaseException:
                self._close_system()
                raise

    # Callable from other threads, `drain` from signal handlers too.

    def drain(self) -> None:
        """Refuse new requests, let running ones go on for `drain_seconds`, abort the rest, end.

        Called again: abort at once.
        """
        self._drain_calls += 1
        self._wake()

    def _wake(self) -> None:
        try:
            self._wake_writer.send(b"\0")
        except BlockingIOError:
            pass  # unread bytes are there already, and one is enough

    def publish_event(self, event: Event | PushNews) -> None:
        """Bring an event of another thread to the worker's own."""
        self._events.put(event)
        self._wake()

    @property
    def wake_fd(self) -> int:
        """Any byte written here makes the worker look around; never blocks."""
        return self._wake_writer.fileno()

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
        poller.register(self._wake_reader, zmq.POLLIN)
        while not self._is_over():
            readable = dict(poller.poll(self._poll_ms()))
            if self._wake_reader.fileno() in readable:
                self._wake_reader.recv(4096)
            self._router.maintain()
            self._handle_events()
            self._handle_messages()
            self._follow_drain()
            self._control.follow()
            self._streams.flush()

    @property
    def _state(self) -> protocol.State:
        return self._control.lifecycle.state

    def _is_over(self) -> bool:
        if self._state == "failed":
            return time.monotonic() >= self._deadline
        return self._control.lifecycle.is_ending and not self._has_unanswered()

    def _has_unanswered(self) -> bool:
        return bool(self._ledger.open or self._calls.under_way or self._aborts.under_way)

    def _poll_ms(self) -> int | None:
        to_deadline = 1000 * (min(self._deadline, self._control.deadline) - time.monotonic())
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
        self._resident.close()

    # What `control` needs, beside `publish_event`.

    def reply(self, identity: bytes, message: protocol.FromWorker) -> None:
        """Send a message to a client."""
        self._send(identity, protocol.encode(message))

    def command(self, command: Run, aborts: bool) -> None:
        """Give the engine thread a command, which `aborts` what it has or not."""
        if aborts:
            self._interrupted = [entry for key, entry in self._ledger.open.items() if key not in self._waiting_room]
        for entry in self._interrupted:
            entry.num_aborts += 1
        self._engine_thread.commands.put(command)

    def _finish_command(self, event: Ran) -> None:
        self._publish_outputs(event.outputs)
        interrupted, self._interrupted = self._interrupted, []
        for entry in interrupted:
            entry.num_aborts -= 1
            self._submit_successors(entry)
        self._waiting_room.look_at_all()
        self._control.handle_ran(event)

    def admit_requests(self) -> None:
        """Give the engine the requests that wait, if it is to have them."""
        if self._control.takes_requests:
            self._let_in()

    def _let_in(self) -> None:
        ready, refused = self._waiting_room.take_due(self._version)
        for key, waiting in ready.items():
            self._engine_thread.commands.put(Add(waiting.request, tuple(waiting.ended)))
            if key in self._streams:
                self._engine_thread.commands.put(Stream(key))
        for key, error in refused.items():
            self._publish_error(key, error)

    @property
    def num_unfinished(self) -> int:
        """Of the requests that the engine was given, how many have not ended."""
        return len(self._ledger.open) - len(self._waiting_room)

    def weight_version(self) -> int:
        """Of the weights that the engine had after its last step or command."""
        assert self._version is not None
        return self._version

    @property
    def _version(self) -> int | None:
        """Of the weights in use; None until this thread knows that the model is there, so that it never changes while
        one message is handled.
        """
        snapshot = self._engine_thread.snapshot
        return None if self._info is None or snapshot is None else snapshot.weight_version

    # Messages from clients.

    def _handle_messages(self) -> None:
        end = time.monotonic() + TURN_SECONDS
        while (received := self._router.receive()) is not None:
            self._handle_message(*received)
            if time.monotonic() >= end:
                return

    def _handle_message(self, peer: Peer, frames: list[bytes]) -> None:
        if not frames:
            return  # of a client that is to be told first that its replies are lost
        try:
            message = self._read(frames, peer.client.role)
        except TruerollError as error:
            log.debug("refused a message: %s", error.code)
            self._reply_error(peer.identity, protocol.id_in(frames[-1]), error)
            return
        if isinstance(message, protocol.Ack):
            for id in message.ids:
                self._ledger.acknowledge(scoped(peer.client.user, id))
            return
        try:
            _check_peer(peer, message)
            self._handle(peer, message)
        except TruerollError as error:
            log.debug("refused a %s: %s", message.type, error.code)
            self._reply_error(peer.identity, message.id, error, getattr(message, "caller", None))
        except OSError as error:  # nothing that is known raises it; if something does, the worker goes on
            log.exception("could not serve a %s", message.type)
            refused = UnavailableError(f"worker: the system refused what it needs ({error.strerror}); try again later")
            self._reply_error(peer.identity, message.id, refused, getattr(message, "caller", None))

    def _read(self, frames: list[bytes], role: Role) -> protocol.FromClient:
        """The message in frames. Raises ProtocolError or MessageTooLargeError, whatever the bytes are."""
        frame = self._check_frames(frames)
        try:
            return protocol.from_client(frame, ELEMENTS_BY_ROLE[role])
        except TruerollError:
            raise
        except Exception as error:  # a fault of the libraries that read it, which must not become everybody's
            log.exception("could not read a message of %d bytes", len(frame))
            raise ProtocolError(f"message: expected one that can be read, found {type(error).__name__}") from None

    def _check_frames(self, frames: list[bytes]) -> bytes:
        if len(frames) != 1:
            raise ProtocolError(f"message: expected one frame (a DEALER socket sends that), found {len(frames)}")
        limit = self._config.max_message_bytes
        if len(frames[0]) > limit:
            found = len(frames[0])
            raise MessageTooLargeError(
                f"message: expected at most max_message_bytes = {limit}, found {found}; send less, or raise the limit"
            )
        return frames[0]

    def _handle(self, peer: Peer, message: protocol.Call) -> None:
        match message:
            case protocol.Generate() | protocol.GetScores():
                self._submit(peer.identity, peer.client.user, message)
            case protocol.Abort():
                call = scoped(peer.client.user, message.id)
                if self._aborts.is_new(call, peer.identity, message):
                    self._abort(call, scoped(peer.client.user, message.request_id), message)
            case protocol.GetHealth():
                self.reply(peer.identity, self.health(message.id))
            case protocol.GetStats():
                self.reply(peer.identity, self.stats(message.id))
            case _:
                self._control.handle(peer.identity, message)

    def _submit(self, identity: bytes, user: str | None, message: protocol.Generate | protocol.GetScores) -> None:
        submission = Submission(identity, message.caller, num_streamed_by(message))
        entry = self._ledger.find(user, message)
        is_open = entry is not None and entry.key in self._ledger.open
        if entry is not None and entry.serves(message.caller):
            if is_open and len(entry.subscribers) >= self._config.max_queued_requests:
                raise _too_many("who wait for", entry, self._config.max_queued_requests)
            if len(entry.callers) + (message.caller not in entry.callers) > MOST_CALLERS:
                raise _too_many("callers of", entry, MOST_CALLERS)
            if is_open:
                self._check_room_to_wait(submission)
            self._ledger.join(entry)
        elif entry is not None and is_open:
            if len(entry.successors) >= (most := self._config.max_queued_requests):
                raise _too_many("who wait for the end of", entry, most)
            self._check_room_to_wait(submission)
            self._ledger.wait_for_end(entry, submission)
            return
        else:
            entry = self._admit(user, message)
        for reply in entry.replies:
            self._send(identity, protocol.address(reply, message.caller))
        self._ledger.subscribe(entry, submission)
        if submission.num_streamed and entry.key in self._ledger.open:
            self._stream(entry.key, submission)

    def _stream(self, key: str, submission: Submission) -> None:
        is_streamed = key in self._streams
        self._streams.add(key, (submission.identity, submission.caller))
        if not is_streamed and key not in self._waiting_room:
            self._engine_thread.commands.put(Stream(key))

    def _submit_successors(self, entry: Entry) -> None:
        """An abort of the entry has been answered, or it has ended: if nothing is aborted, or all is over, go on."""
        if entry.is_aborted and self._ledger.open.get(entry.key) is entry:
            return
        for identity, caller, num_streamed in self._ledger.release(entry, entry.successors):
            try:
                self._submit(identity, entry.user, asked_by(entry.message, caller, num_streamed > 0))
            except TruerollError as error:
                self._reply_error(identity, entry.message.id, error, caller)

    def _lose(self, identity: bytes) -> None:
        """A client gets no more replies. What nobody waits for any more ends, if it is to do so or waits for weights
        itself: the client asks again if it comes back.
        """
        self._streams.lose(identity)
        for entry in self._ledger.lose(identity):
            waits = self._waiting_room.get(entry.key)
            if waits is not None and (_ends_with_client(entry) or self._waiting_room.early(entry.key)):
                entry.is_wanted = False
                self._publish_outputs(waits.abort(None))
            elif _ends_with_client(entry):
                entry.is_wanted = False
                entry.num_aborts += 1
                self._engine_thread.commands.put(End(entry.key, None, tag=entry))

    def _check_admission(self, message: protocol.Generate | protocol.GetScores) -> None:
        if self._control.lifecycle.is_ending or self._state == "failed":
            raise UnavailableError(f"worker: found state {self._state}, in which it ends; use another worker")
        if self._config.while_unavailable == "reject" and self._state not in ("loading", "ready"):
            raise UnavailableError(
                f"worker: expected state ready, found {self._state}; try again later, or start the worker with "
                "while_unavailable = queue"
            )
        config, num_samples = self._config, message.params.n if isinstance(message, protocol.Generate) else 1
        if num_samples > config.max_n:
            raise InvalidRequestError(f"n: expected at most max_n = {config.max_n}, found {num_samples}")
        self._check_room(num_samples, num_bytes_of(message))
        if self._control.takes_requests and (version := self._version) is not None:
            if not (message.wait_for_weights or serves(message, version)):
                raise too_old(message, version)
        if self._info is not None:
            check_length(*_length(message), self._info["max_model_len"])

    def _check_room(self, num_samples: int, num_bytes: int) -> None:
        self._check_limit("max_queued_requests", len(self._ledger.open), 1)
        self._check_limit("max_queued_samples", self._ledger.num_samples_left, num_samples)
        self._check_limit("max_queued_bytes", self._ledger.num_bytes_open, num_bytes)

    def _check_room_to_wait(self, submission: Submission) -> None:
        """For what is known already there is room of its own, as whoever lost a connection asks again."""
        more = submission.num_bytes
        self._check_limit("max_queued_bytes", self._ledger.num_bytes_waiting, more, " for who waits for known requests")

    def _check_limit(self, limit: str, held: int, more: int, of: str = "") -> None:
        if held + more > (most := getattr(self._config, limit)):
            raise QueueFullError(
                f"queue: holds {held} of {limit} = {most}{of}, no room for {more} more; wait for results and try again"
            )

    def _admit(self, user: str | None, message: protocol.Generate | protocol.GetScores) -> Entry:
        self._check_admission(message)
        if isinstance(message, protocol.GetScores):
            entry = self._ledger.add(user, message, None)
            tokens, salt = protocol.bytes_to_tokens(message.token_ids), salt_of(user, message.cache_salt)
            recorded = message.top_logprobs, message.return_routed_experts
            request = ScoreRequest(entry.key, tokens, message.distribution, salt, *recorded)
        else:
            params = message.params
            if params.seed is None:
                params = params.model_copy(update={"seed": seed_of(message.id, message.prompt_token_ids)})
            entry = self._ledger.add(user, message, params)
            salted = params.model_copy(update={"cache_salt": salt_of(user, params.cache_salt)})
            tokens = protocol.bytes_to_tokens(message.prompt_token_ids)
            request = GenerateRequest(entry.key, tokens, salted, message.num_prior_tokens)
        self._waiting_room.add(entry.key, Waiting(request, message))
        self.admit_requests()
        return entry

    def _abort(self, call: str, key: str, message: protocol.Abort) -> None:
        if message.caller is not None:
            self._streams.withdraw(key, message.caller)
        if message.caller is not None and self._ledger.withdraw(key, message.caller):
            self._finish_abort(call, message, 0)
        elif (entry := self._ledger.open.get(key)) is None:
            unknown = f"request_id: expected the id of an unfinished request, found {message.request_id!r}"
            self._aborts.refuse(call, UnknownRequestError(unknown))
        elif (waiting := self._waiting_room.get(key)) is not None:
            self._end_abort(call, message, waiting.abort(message.index))
        else:
            entry.num_aborts += 1
            self._engine_thread.commands.put(End(key, message.index, tag=(call, message, entry)))

    def _end_abort(self, call: str, message: protocol.Abort, outputs: list[Output]) -> None:
        """It has ended these; none if there was nothing to end."""
        self._publish_outputs(outputs)
        if outputs:
            self._finish_abort(call, message, len(outputs))
        else:
            what = f"request {message.request_id!r}" + ("" if message.index is None else f", sample {message.index}")
            unknown = f"abort: expected a running request or sample, found none for {what}"
            self._aborts.refuse(call, UnknownRequestError(unknown))

    def _finish_abort(self, call: str, message: protocol.Abort, num_samples: int) -> None:
        reply = protocol.Aborted(id=message.id, request_id=message.request_id, num_samples=num_samples)
        self._aborts.answer(call, reply)

    # Callable from any thread: they read what changes as a whole, and wait for nothing.

    def health(self, id: str = "metrics") -> protocol.Health:
        """How the worker is."""
        snapshot = self._engine_thread.snapshot
        requests = {"open": len(self._ledger.open), "kept": len(self._ledger.kept)}
        if snapshot is not None:
            requests |= {"running": snapshot.stats["num_running"], "waiting": snapshot.stats["num_waiting"]}
        return protocol.Health(
            id=id,
            state=self._state,
            instance=self.instance,
            seconds_since_progress=None if snapshot is None else time.monotonic() - snapshot.progress_at,
            weight_version=None if snapshot is None else snapshot.weight_version,
            requests=requests,
            memory=self._memory(),
            limits=self._config.limits(),
            engine=self._engine_info(),
            sleeping=tuple(sorted(self._control.lifecycle.standing.sleeping)),
            push=self._control.pushes.progress(),
        )

    def _engine_info(self) -> dict[str, Any] | None:
        """With why commits take longer than they could; empty if they do not."""
        target = self._control.pushes.target
        if self._info is None or target is None:
            return None
        return self._info | {"commit_note": target.weights.commit_note}

    def _memory(self) -> dict[str, int]:
        memory = {"process": self._resident.num_bytes()}
        if (snapshot := self._engine_thread.snapshot) is not None:
            memory |= snapshot.memory | {"staging": self._control.pushes.staging_bytes}
        return memory

    def stats(self, id: str = "metrics") -> protocol.Stats:
        """The lifetime counters."""
        snapshot = self._engine_thread.snapshot
        engine = {} if snapshot is None else snapshot.stats
        return protocol.Stats(id=id, engine=engine, service=dataclasses.asdict(self._ledger.stats))

    def timings(self) -> Timings:
        """How long steps, pushes and sleeps took."""
        return self._timings

    # Events from the engine and from pushes.

    def _handle_events(self) -> None:
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return
            self._handle_event(event)

    def _handle_event(self, event: Event | PushNews) -> None:
        if self._state == "failed":
            return  # everyone was answered already
        match event:
            case Loaded(info, weights):
                self._finish_loading(info, weights)
            case Finished(outputs, deltas):
                self._grow(deltas)
                self._publish_outputs(outputs)
            case Refused(key, error):
                self._publish_error(key, error)
            case Ended():
                self._publish_end(event)
            case Ran():
                self._finish_command(event)
            case Failed(error):
                self._fail(error)
            case _:
                self._control.pushes.handle_news(event)

    def _finish_loading(self, info: dict[str, Any], weights: Destination) -> None:
        self._info = info
        if info["backend_note"]:
            log.warning("backend %s, not a faster one: %s", info["backend"], info["backend_note"])
        self._control.finish_loading(weights, info["device"])
        self._waiting_room.look_at_all()
        if self._control.lifecycle.is_ending:
            self._empty_waiting_room()
        if self._state == "ready":
            self._on_ready(info)

    def _grow(self, deltas: list[SampleDelta]) -> None:
        for delta in deltas:
            entry = self._ledger.open[delta.request_id]
            self._streams.grow(entry.key, protocol.delta_message(entry.message.id, delta))

    def _tell(self, identity: bytes, deltas: protocol.Deltas) -> None:
        if not self._send(identity, protocol.encode(deltas)):
            self._lose(identity)

    def _publish_outputs(self, outputs: list[Output]) -> None:
        for output in outputs:
            entry = self._ledger.open[output.request_id]
            if isinstance(output, SampleOutput):
                self._publish_sample(entry, output)
            else:
                self._publish(entry, protocol.scores_message(entry.message.id, output))
                self._ledger.end_sample(entry, output.finish_reason)
                self._finish(entry)

    def _publish_sample(self, entry: Entry, output: SampleOutput) -> None:
        self._streams.end_sample(entry.key, output.index)
        self._publish(entry, protocol.sample_message(entry.message.id, output))
        self._ledger.end_sample(entry, output.finish_reason)
        if entry.num_unfinished == 0:
            self._publish(entry, _done(entry, None if self._info is None else self._info["max_model_len"]))
            self._finish(entry)

    def _finish(self, entry: Entry) -> None:
        self._streams.end(entry.key)
        self._ledger.finish(entry.key)
        self._waiting_room.discard(entry.key)
        self._submit_successors(entry)

    def _publish(self, entry: Entry, message: protocol.FinishedSample | protocol.Done | protocol.Scores) -> None:
        reply = protocol.encode_for_anyone(message)
        entry.replies.append(reply)
        for identity, caller, _ in entry.subscribers:
            if not self._send(identity, protocol.address(reply, caller)):
                self._lose(identity)

    def _publish_error(self, key: str, error: TruerollError) -> None:
        entry = self._ledger.fail(key)
        self._streams.end(key)
        self._waiting_room.discard(key)
        for identity, caller, _ in self._ledger.release(entry, entry.subscribers):
            self._reply_error(identity, entry.message.id, error, caller)
        self._submit_successors(entry)

    def _publish_end(self, event: Ended) -> None:
        if event.command.tag is None:
            self._publish_outputs(event.outputs)  # nobody asked: the worker ends
            return
        if isinstance(entry := event.command.tag, Entry):
            self._publish_outputs(event.outputs)  # nobody waits for it
        else:
            call, message, entry = event.command.tag
            self._end_abort(call, message, event.outputs)
        entry.num_aborts -= 1
        self._submit_successors(entry)

    # Ending.

    def _follow_drain(self) -> None:
        """Act on calls of `drain`, and on the deadline that the first of them set."""
        if self._state == "failed" or not self._drain_calls:
            return
        if not self._control.lifecycle.is_ending:
            self._start_ending()
        # What nothing computes need not be waited for.
        if (self._drain_calls > 1 or self._control.lifecycle.standing.is_held) and not self._aborts_sent:
            self._deadline = time.monotonic()
        if time.monotonic() >= self._deadline and self._has_unanswered():
            self._abort_open_requests()

    def _start_ending(self) -> None:
        self._control.start_ending()
        if self._info is not None:
            self._empty_waiting_room()
        self._deadline = time.monotonic() + self._config.drain_seconds

    def _empty_waiting_room(self) -> None:
        """The engine gets what its weights are new enough for. The rest ends, for the worker takes no more pushes."""
        self._waiting_room.look_at_all()
        self._let_in()
        for waiting in self._waiting_room.take_early():
            self._publish_outputs(waiting.abort(None))

    def _fail_everything(self, error: TruerollError) -> None:
        """Answer every open request and call with an error."""
        for key in list(self._ledger.open):
            self._publish_error(key, error)
        self._control.fail_calls(error)
        for call in self._aborts.under_way:
            self._aborts.refuse(call, error)

    def _abort_open_requests(self) -> None:
        if self._info is None:
            self._fail_everything(UnavailableError("worker: it ended before its model was loaded; use another worker"))
            return
        if self._aborts_sent:
            self._fail(TimeoutError(f"the engine did not end what was under way within {ABORT_SECONDS} s"))
            return
        log.warning("aborting %d unfinished requests", len(self._ledger.open))
        for key, entry in self._ledger.open.items():
            entry.num_aborts += 1
            self._engine_thread.commands.put(End(key, None, tag=None))
        self._aborts_sent = True
        self._deadline = time.monotonic() + ABORT_SECONDS

    def _fail(self, cause: BaseException) -> None:
        """Answer every open request with the cause, and let the loop end soon."""
        if self._state == "failed":
            return
        log.error("%s: %s", type(cause).__name__, cause, exc_info=None if isinstance(cause, TruerollError) else cause)
        self._failure = _explain(cause, was_loading=self._state == "loading")
        self._control.lifecycle.fail()
        self._fail_everything(WorkerFailedError(str(self._failure)))
        self._deadline = time.monotonic() + FAILED_SECONDS

    def _reply_error(self, identity: bytes, id: str | None, error: TruerollError, caller: str | None = None) -> None:
        self.reply(identity, protocol.error_message(id, error, caller))

    def _send(self, identity: bytes, frame: bytes) -> bool:
        """Send to a client; False if it gets no more replies."""
        return self._router.send(identity, frame)


def _check_peer(peer: Peer, message: protocol.Call) -> None:
    """Raise ForbiddenError unless the client's role and its connection allow the call, UnavailableError if its
    connection has ended where it matters: the replies could come to whoever gets the connection's identity next, or the
    request was to end with it.
    """
    client = peer.client
    if client.role != "control" and not isinstance(message, FOR_ALL_ROLES):
        raise ForbiddenError(
            f"{message.type}: expected a client with the role control, found {client.user} with the role "
            f"{client.role}; use another key, or change the worker's clients_file and start it anew"
        )
    # Replies to a request go to the identity that asked for it, which another user could take up once it is free.
    if client.user is not None and not peer.identity.startswith(b"\0"):
        raise ForbiddenError("connection: expected no identity of its own (ZMQ_ROUTING_ID), found one; set none")
    needs_peer = client.user is not None or getattr(message, "while_connected", False)
    if needs_peer and peer.is_gone and isinstance(message, protocol.Generate | protocol.GetScores):
        raise UnavailableError("connection: expected one that is there, found that it has ended; connect and ask again")


def _ends_with_client(entry: Entry) -> bool:
    return isinstance(entry.message, protocol.Generate) and entry.message.while_connected


def _too_many(which: str, entry: Entry, most: int) -> QueueFullError:
    return QueueFullError(
        f"queue: expected at most {most} {which} {entry.message.id!r}, found so many already; try again later"
    )


def _length(message: protocol.Generate | protocol.GetScores) -> tuple[int, int]:
    """Tokens of the prompt, and how many may follow."""
    if isinstance(message, protocol.GetScores):
        return len(message.token_ids) // 4, 0
    return len(message.prompt_token_ids) // 4, 1 if (most := message.params.max_tokens) is None else most


def _done(entry: Entry, max_model_len: int | None) -> protocol.Done:
    """`max_model_len` None: it was aborted before the model was there, with parameters that nothing used."""
    assert isinstance(entry.message, protocol.Generate) and entry.params is not None
    num_prompt_tokens = len(entry.message.prompt_token_ids) // 4
    return protocol.Done(
        id=entry.message.id,
        params=entry.params
        if max_model_len is None
        else entry.params.with_max_tokens(num_prompt_tokens, max_model_len),
        num_prompt_tokens=num_prompt_tokens,
        finish_reasons=dict(entry.finish_reasons),
    )


def _explain(cause: BaseException, was_loading: bool) -> TruerollError:
    if was_loading and isinstance(cause, TruerollError):
        return cause
    what = "could not load" if was_loading else "failed"
    return WorkerFailedError(
        f"worker: the engine {what} ({type(cause).__name__}: {cause}); start the worker anew, its log says more"
    )
