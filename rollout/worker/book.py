"""The requests of a worker, from submission to terminal reply.

Owns: entries of requests (`ledger`), admission, requests that wait for the engine (`WaitingRoom`), streams (`Streams`),
and pending aborts. Does not own: sockets, the engine, or the state of the worker. All code here runs on the thread of
`Worker.run`.

Guarantees: every submission of an accepted request gets exactly one terminal reply, provided that the client reads
replies. Every request ends through `RequestBook.end`, after success, an error, an abort, a lost client or a shutdown.
After a request has ended, only the result of the request may be kept. No user can access the requests or the cached
prefixes of another user.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np

from trueroll.errors import (
    InvalidRequestError,
    QueueFullError,
    StaleWeightsError,
    TruerollError,
    UnavailableError,
    UnknownRequestError,
)

from ...engine.request import (
    GenerateRequest,
    Output,
    Request,
    SampleDelta,
    SampleOutput,
    ScoreOutput,
    ScoreRequest,
    check_length,
    derive_seed,
    seed_of,
)
from .. import protocol
from ..config import WorkerConfig
from ..protocol import Delta, Deltas, Generate, GetScores, Growth, State
from .engine_thread import Add, Command, End, Ended, Run, Stream
from .ledger import Calls, Entry, Ledger, Submission, asked_by, num_bytes_of, salt_of, scoped, submission_of

FEW_READERS = 8
"""While at most this number of readers stream requests, every reader gets every token at once."""
MOST_CALLERS = 1024
"""Maximum number of callers that can submit the same request."""


class Conditions(NamedTuple):
    """The parts of the worker's state that determine the admission of a request.

    `takes_requests`: the engine accepts requests now. `version`: version of the served weights; None until the model
    has loaded.
    """

    state: State
    is_ending: bool
    takes_requests: bool
    version: int | None


def check_admission(
    message: Generate | GetScores,
    conditions: Conditions,
    config: WorkerConfig,
    ledger: Ledger,
    max_model_len: int | None,
) -> None:
    """Raise an error if the worker cannot accept a new request.

    The error is UnavailableError, InvalidRequestError, QueueFullError or StaleWeightsError.
    """
    _check_state(conditions, config)
    num_samples = message.params.n if isinstance(message, Generate) else 1
    if num_samples > config.max_n:
        text = f"n: must be at most max_n = {config.max_n} (got {num_samples})"
        raise InvalidRequestError(text, field="n", value=num_samples, limit=config.max_n)
    _check_limit(config, "max_queued_requests", len(ledger.open), 1)
    _check_limit(config, "max_queued_samples", ledger.num_samples_left, num_samples)
    _check_limit(config, "max_queued_bytes", ledger.num_bytes_open, num_bytes_of(message))
    if conditions.takes_requests and (version := conditions.version) is not None:
        if not (message.wait_for_weights or serves(message, version)):
            raise too_old(message, version)
    if max_model_len is not None:
        check_length(*_length(message), max_model_len)


def check_joining(entry: Entry, submission: Submission, config: WorkerConfig, ledger: Ledger) -> None:
    """Raise QueueFullError if a known request cannot accept another submission."""
    is_open = entry.key in ledger.open
    if is_open and len(entry.subscribers) >= (most := config.max_queued_requests):
        raise _too_many("clients are waiting for", entry, most)
    if len(entry.callers) + (submission.caller not in entry.callers) > MOST_CALLERS:
        raise _too_many("callers of", entry, MOST_CALLERS)
    if is_open:
        _check_room_to_wait(submission, config, ledger)


def check_succession(entry: Entry, submission: Submission, config: WorkerConfig, ledger: Ledger) -> None:
    """Raise QueueFullError if no more submissions may wait for an open request to end."""
    if len(entry.successors) >= (most := config.max_queued_requests):
        raise _too_many("clients are waiting for the end of", entry, most)
    _check_room_to_wait(submission, config, ledger)


def _check_room_to_wait(submission: Submission, config: WorkerConfig, ledger: Ledger) -> None:
    """Raise QueueFullError if the submissions of known requests would exceed `max_queued_bytes`.

    Submissions of known requests have a separate budget, so that a client can submit a request again after a lost
    connection.
    """
    more, of = submission.num_bytes, " by submissions of known requests"
    _check_limit(config, "max_queued_bytes", ledger.awaited.num_bytes, more, of)


def _too_many(which: str, entry: Entry, most: int) -> QueueFullError:
    return QueueFullError(
        f"queue: too many {which} request {entry.message.id!r} (limit {most}); try again later",
        value=most + 1,
        limit=most,
    )


def _check_state(conditions: Conditions, config: WorkerConfig) -> None:
    state = conditions.state
    if conditions.is_ending or state == "failed":
        raise UnavailableError(f"worker is shutting down (state {state}); use another worker", value=state)
    if config.while_unavailable == "reject" and state not in ("loading", "ready"):
        raise UnavailableError(
            f"worker: accepts no requests in state {state}; try again later, or start the worker with "
            "while_unavailable = queue",
            value=state,
        )


def _check_limit(config: WorkerConfig, limit: str, held: int, more: int, of: str = "") -> None:
    if held + more > (most := getattr(config, limit)):
        raise QueueFullError(
            f"queue: {limit} = {most} is exceeded ({held} in use{of}, {more} more requested); wait for results, then "
            "retry",
            field=limit,
            value=held + more,
            limit=most,
        )


def _length(message: Generate | GetScores) -> tuple[str, int, int]:
    """Return the name of the prompt field, the length of the prompt in tokens, and the number of new tokens that must
    also fit in the context.
    """
    if isinstance(message, GetScores):
        return "token_ids", len(message.token_ids) // 4, 0
    num_new = 1 if (most := message.params.max_tokens) is None else most
    return "prompt_token_ids", len(message.prompt_token_ids) // 4, num_new


MOST_BYTES = 2**20
"""Maximum size of a message in bytes. A message with a single token may be larger."""
Reader: TypeAlias = tuple[bytes, str | None]
"""The identity of a connection, and the caller that uses the connection."""
_Place: TypeAlias = tuple[str, int]
"""A sample, as the key of the request and the index of the sample."""


@dataclass
class _Stream:
    """A streamed request.

    `growths`: the tokens received so far for each unfinished sample, by sample index. `readers`: the request's readers.
    """

    growths: dict[int, Growth] = field(default_factory=dict)
    readers: set[Reader] = field(default_factory=set)


@dataclass
class _Progress:
    """The progress of a reader.

    `keys`: keys of the requests that the reader streams. `told`: for each sample, the number of tokens that were
    already sent to the reader. `due`: samples with unsent tokens. `pause`: see `Streams.add`.
    `next_at`: earliest time of the next message, in monotonic seconds.
    """

    keys: set[str] = field(default_factory=set)
    told: dict[_Place, int] = field(default_factory=dict)
    due: dict[_Place, None] = field(default_factory=dict)
    pause: float = 0.0
    next_at: float = 0.0

    def forget(self, place: _Place) -> None:
        self.told.pop(place, None)
        self.due.pop(place, None)


class Streams:
    """The streamed requests, by key, and their readers.

    `send`: sends a message to a connection. `takes`: returns whether a connection has read all messages sent so far.

    Owns: the tokens of unfinished samples in streamed requests, stored once for all readers; and the progress of each
    reader. Does not own: sockets, the ledger, or the replies that end a sample.

    Guarantees: a reader gets each token once and in order, from the first token on. A reader that joins late also
    starts with the first token. Deltas stop when a sample ends, because the finished sample contains the remaining
    tokens. Once a reader has read all earlier messages and its pause is over, the stream sends all unsent tokens in one
    message, or in several messages of about `MOST_BYTES`. A slow reader needs little memory: only its position in each
    sample is stored. A request without readers needs no memory in `Streams`.
    """

    def __init__(self, send: Callable[[bytes, Deltas], object], takes: Callable[[bytes], bool]) -> None:
        self._send, self._takes = send, takes
        self._streams: dict[str, _Stream] = {}
        self._progress: dict[Reader, _Progress] = {}
        self._by_identity: defaultdict[bytes, set[Reader]] = defaultdict(set)
        self._due: dict[Reader, None] = {}

    def __contains__(self, key: str) -> bool:
        """Return whether a request is streamed."""
        return key in self._streams

    def add(self, key: str, reader: Reader, pause: float = 0.0) -> None:
        """Add a reader of a request. A reader that is added again starts over with the first token.

        `pause`: minimum time between two messages to the reader while there are more than `FEW_READERS` readers, in
        seconds. The latest pause of a reader applies to all requests of the reader.
        """
        self._remove(key, reader)
        stream = self._streams.setdefault(key, _Stream())
        stream.readers.add(reader)
        progress = self._progress.setdefault(reader, _Progress())
        progress.keys.add(key)
        progress.pause = pause
        self._by_identity[reader[0]].add(reader)
        for index in stream.growths:
            self._fall_due(reader, (key, index))

    def grow(self, key: str, delta: Delta) -> None:
        """Add new tokens to a sample of a streamed request."""
        stream = self._streams[key]
        growth = stream.growths.get(delta.index)
        if growth is None:
            stream.growths[delta.index] = Growth(delta)
        elif not growth.put(delta):
            raise RuntimeError(
                f"streams: the delta of {key!r} at token {delta.start} does not continue the {growth.num_tokens} "
                "tokens received so far"
            )
        for reader in stream.readers:
            self._fall_due(reader, (key, delta.index))

    def end_sample(self, key: str, index: int) -> None:
        """End a sample for all readers. No reader gets another delta of the sample."""
        if stream := self._streams.get(key):
            stream.growths.pop(index, None)
            for reader in stream.readers:
                self._progress[reader].forget((key, index))

    def end(self, key: str) -> None:
        """End the stream of a request."""
        if stream := self._streams.get(key):
            for reader in list(stream.readers):
                self._remove(key, reader)
            del self._streams[key]

    def withdraw(self, key: str, caller: str) -> None:
        """Remove the request's readers that belong to `caller`."""
        if stream := self._streams.get(key):
            for reader in [reader for reader in stream.readers if reader[1] == caller]:
                self._remove(key, reader)

    def lose(self, identity: bytes) -> None:
        """Remove the readers of a lost connection."""
        for reader in list(self._by_identity.get(identity, ())):
            for key in list(self._progress[reader].keys):
                self._remove(key, reader)

    def flush(self, now: float) -> float:
        """Send unsent tokens to each reader that has read all earlier messages and does not pause.

        `now`: the current time, in monotonic seconds. Return the time at which the next pause ends; infinity if no
        reader with unsent tokens pauses.
        """
        next_at, has_many = inf, len(self._progress) > FEW_READERS
        for reader in list(self._due):
            if (progress := self._progress.get(reader)) is None:
                continue  # lost while an earlier message was sent
            if has_many and progress.next_at > now:
                next_at = min(next_at, progress.next_at)
                continue
            while reader in self._due and self._takes(reader[0]):
                if parts := self._take(progress):
                    self._send(reader[0], Deltas(samples=tuple(parts), caller=reader[1]))
                    progress.next_at = now + progress.pause
                if not progress.due:
                    self._due.pop(reader, None)
        return next_at

    def _take(self, progress: _Progress) -> list[Delta]:
        """Return the deltas for one message."""
        parts: list[Delta] = []
        room = MOST_BYTES
        while progress.due and room > 0:
            key, index = place = next(iter(progress.due))
            growth = self._streams[key].growths[index]
            part = growth.part(progress.told.get(place, 0), room)
            parts.append(part)
            room -= part.num_bytes
            progress.told[place] = part.start + part.num_tokens
            if progress.told[place] == growth.num_tokens:
                del progress.due[place]
        return parts

    def _fall_due(self, reader: Reader, place: _Place) -> None:
        self._progress[reader].due[place] = None
        self._due[reader] = None

    def _remove(self, key: str, reader: Reader) -> None:
        progress = self._progress.get(reader)
        if progress is None or key not in progress.keys:
            return
        progress.keys.remove(key)
        stream = self._streams[key]
        stream.readers.remove(reader)
        for index in stream.growths:
            progress.forget((key, index))
        if not progress.keys:
            self._forget(reader)

    def _forget(self, reader: Reader) -> None:
        del self._progress[reader]
        self._due.pop(reader, None)
        readers = self._by_identity[reader[0]]
        readers.remove(reader)
        if not readers:
            del self._by_identity[reader[0]]


@dataclass
class Waiting:
    """A waiting request and its message. `ended`: indices of the aborted samples; {0} for an aborted score."""

    request: Request
    message: Generate | GetScores
    ended: set[int] = field(default_factory=set)

    def abort(self, index: int | None) -> list[Output]:
        """End sample `index`, or all remaining samples if `index` is None.

        Return the outputs of the ended samples; an empty list if no sample was left to end.
        """
        if not isinstance(self.request, GenerateRequest):
            if index is not None or self.ended:
                return []
            self.ended.add(0)
            return [_empty_scores(self.request.id)]
        left = [i for i in range(self.request.params.n) if i not in self.ended]
        chosen = [i for i in left if index in (None, i)]
        self.ended.update(chosen)
        return [_empty_sample(self.request, i) for i in chosen]


class WaitingRoom:
    """The requests that have not been sent to the engine yet, by key.

    Owns the indices of the samples that were aborted while their request waited. Does not own the ledger entries of the
    requests, or the engine. Guarantees: requests leave the waiting room in the order of their arrival, and an aborted
    sample is never computed. Requests that wait for newer weights may be overtaken by later requests, because the
    waiting room checks its requests again only when the weights may have changed.
    """

    def __init__(self) -> None:
        self._due: dict[str, Waiting] = {}
        self._early: dict[str, Waiting] = {}

    def __len__(self) -> int:
        return len(self._due) + len(self._early)

    def __contains__(self, key: str) -> bool:
        return key in self._due or key in self._early

    def add(self, key: str, waiting: Waiting) -> None:
        """Add a request, to be checked by the next `take_due`."""
        self._due[key] = waiting

    def get(self, key: str) -> Waiting | None:
        return self._due.get(key) or self._early.get(key)

    def discard(self, key: str) -> None:
        """Remove a request that has ended."""
        self._due.pop(key, None)
        self._early.pop(key, None)

    def look_at_all(self) -> None:
        """Make the next `take_due` check all requests again, because the weights may have changed."""
        self._due, self._early = self._early | self._due, {}

    def take_due(self, version: int | None) -> tuple[dict[str, Waiting], dict[str, StaleWeightsError]]:
        """Remove and return the due requests that can be served with weights of version `version`, and the due requests
        that must be refused.

        Refused requests are returned with their errors. Requests that wait for newer weights stay in the waiting room.
        `version`: None if the model has not loaded; all requests with a `min_weight_version` then stay in the waiting
        room.
        """
        due, self._due = self._due, {}
        ready: dict[str, Waiting] = {}
        refused: dict[str, StaleWeightsError] = {}
        for key, waiting in due.items():
            if serves(waiting.message, version):
                ready[key] = waiting
            elif version is None or waiting.message.wait_for_weights:
                self._early[key] = waiting
            else:
                refused[key] = too_old(waiting.message, version)
        return ready, refused

    def take_early(self) -> list[Waiting]:
        """Remove and return the requests that wait for weights. Called when the worker accepts no more pushes."""
        early, self._early = self._early, {}
        return list(early.values())


def serves(message: Generate | GetScores, version: int | None) -> bool:
    """Return whether weights of version `version` are new enough for the request."""
    demanded = message.min_weight_version
    return demanded is None or (version is not None and version >= demanded)


def too_old(message: Generate | GetScores, version: int) -> StaleWeightsError:
    """Return the error for a request that demands newer weights than `version`."""
    return StaleWeightsError(
        f"min_weight_version: the request needs version {message.min_weight_version} or later, but the worker serves "
        f"version {version} (a restarted worker has lost its pushes); push newer weights, or set wait_for_weights",
        field="min_weight_version",
        value=message.min_weight_version,
        limit=version,
    )


def _empty_sample(request: GenerateRequest, index: int) -> SampleOutput:
    assert request.params.seed is not None
    seed = derive_seed(request.params.seed, index)
    return SampleOutput.empty(request.id, index, seed, request.params)


def _empty_scores(id: str) -> ScoreOutput:
    return ScoreOutput(id, np.empty(0, np.float32), "abort", ())


class Abortion(NamedTuple):
    """An abort that was sent to the engine, for one sample or all samples of `entry`.

    `call`, `message`: key of the abort call, and the call itself; both None if no client waits for a reply.
    `ends_successors`: whether the entry had successors when the abort call arrived. If `ends_successors` is True, the
    abort also ends the successors.
    """

    entry: Entry
    call: str | None = None
    message: protocol.Abort | None = None
    ends_successors: bool = False


class RequestBook:
    """The requests of all users.

    - `command`: sends a command to the engine.
    - `send`: sends a frame to a client. If the client is lost during `send`, `lose` is called later, when no method of
      the book is running.
    - `takes`: returns whether a client has read all messages sent so far.
    - `conditions`: returns the current `Conditions`.
    - `waiting_room`: the requests that have not been sent to the engine yet.
    - `max_model_len`: maximum context length in tokens; None until the model has loaded.
    """

    def __init__(
        self,
        config: WorkerConfig,
        command: Callable[[Command], object],
        send: Callable[[bytes, bytes], object],
        takes: Callable[[bytes], bool],
        conditions: Callable[[], Conditions],
    ) -> None:
        self._config, self._command, self._send, self._conditions = config, command, send, conditions
        self.ledger = Ledger(config.max_kept_results, config.max_kept_bytes)
        self.waiting_room = WaitingRoom()
        self.max_model_len: int | None = None
        self.streams = Streams(self._tell, takes)
        self._aborts = Calls(send, config.max_queued_requests)
        self._interrupted: list[Entry] = []

    @property
    def has_unanswered(self) -> bool:
        """Return whether any client still waits for a reply."""
        return bool(self.ledger.open or self._aborts.under_way)

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished requests in the engine."""
        return len(self.ledger.open) - len(self.waiting_room)

    # Calls of clients.

    def submit(self, identity: bytes, user: str | None, message: protocol.Generate | protocol.GetScores) -> None:
        """Accept a new request, or another submission of a known request.

        Raise TruerollError if the submission is refused.
        """
        submission = submission_of(identity, message)
        entry = self.ledger.find(user, message)
        is_open = entry is not None and entry.key in self.ledger.open
        if entry is None or not (is_open or entry.serves(message.caller)):
            entry = self._open(user, message)
        elif entry.serves(message.caller):
            check_joining(entry, submission, self._config, self.ledger)
            self.ledger.join(entry)
        else:
            check_succession(entry, submission, self._config, self.ledger)
            self.ledger.awaited.add(entry, entry.successors, submission)
            return
        for reply in entry.replies:
            self._send(identity, protocol.address(reply, message.caller))
        self.ledger.subscribe(entry, submission)
        if submission.num_streamed and entry.key in self.ledger.open:
            self._stream(entry.key, submission)

    def _open(self, user: str | None, message: protocol.Generate | protocol.GetScores) -> Entry:
        conditions = self._conditions()
        check_admission(message, conditions, self._config, self.ledger, self.max_model_len)
        params = None
        if isinstance(message, protocol.Generate):
            params = message.params
            if params.seed is None:
                params = params.model_copy(update={"seed": seed_of(message.id, message.prompt_token_ids)})
        entry = self.ledger.add(user, message, params)
        self.waiting_room.add(entry.key, Waiting(_request_of(entry), message))
        if conditions.takes_requests:
            self._give(conditions.version)
        return entry

    def _stream(self, key: str, submission: Submission) -> None:
        is_streamed = key in self.streams
        self.streams.add(key, (submission.identity, submission.caller), submission.delta_seconds)
        if not is_streamed and key not in self.waiting_room:
            self._command(Stream(key))

    def acknowledge(self, user: str | None, message: protocol.Ack) -> None:
        """Record that the client has received the results of these requests."""
        for id in message.ids:
            self.ledger.acknowledge(scoped(user, id))

    def abort(self, identity: bytes, user: str | None, message: protocol.Abort) -> None:
        """End a request, or only remove a caller from the request. Raise TruerollError if the call is refused."""
        call, key = scoped(user, message.id), scoped(user, message.request_id)
        if not self._aborts.is_new(call, identity, message):
            return
        if message.caller is not None:
            self.streams.withdraw(key, message.caller)
        if message.caller is not None and self.ledger.withdraw(key, message.caller):
            self._aborts.answer(call, _aborted(message, 0))
        else:
            self._end_named(call, key, message)

    def _end_named(self, call: str, key: str, message: protocol.Abort) -> None:
        """End the request or sample that an abort call names."""
        if (entry := self.ledger.open.get(key)) is None:
            unknown = f"request_id: no unfinished request has the id {message.request_id!r}"
            self._aborts.refuse(call, UnknownRequestError(unknown))
        elif (waiting := self.waiting_room.get(key)) is not None:
            self._finish_abort(call, message, waiting.abort(message.index))
        else:
            self._tell_engine(Abortion(entry, call, message, bool(entry.successors)))

    def lose(self, identity: bytes) -> None:
        """Remove a lost client.

        End each request that has no waiting client left, if the request is `while_connected` or waits for weights. A
        client that reconnects submits the request again.
        """
        self.streams.lose(identity)
        for entry in self.ledger.awaited.lose(identity):
            waits = self.waiting_room.get(entry.key)
            if waits is not None and (
                _ends_with_client(entry) or _waits_for_weights(waits, self._conditions().version)
            ):
                entry.is_wanted = False
                self.take_outputs(waits.abort(None))
            elif _ends_with_client(entry):
                entry.is_wanted = False
                self._tell_engine(Abortion(entry))

    # Commands and events of the engine.

    def admit(self, whatever_state: bool = False) -> None:
        """Send the waiting requests to the engine if the current state allows this or `whatever_state` is True.

        Requests that need newer weights keep waiting or are refused.
        """
        if not len(self.waiting_room):
            return
        conditions = self._conditions()
        if conditions.takes_requests or whatever_state:
            self._give(conditions.version)

    def _give(self, version: int | None) -> None:
        """Send the engine the waiting requests that can be served with weights of version `version`."""
        ready, refused = self.waiting_room.take_due(version)
        for key, waiting in ready.items():
            self._command(Add(waiting.request, tuple(waiting.ended)))
            if key in self.streams:
                self._command(Stream(key))
        for key, error in refused.items():
            self.end(key, error)

    def take_deltas(self, deltas: list[SampleDelta]) -> None:
        """Handle the engine's deltas of streamed samples."""
        for delta in deltas:
            entry = self.ledger.open[delta.request_id]
            self.streams.grow(entry.key, protocol.delta_message(entry.message.id, delta))

    def take_outputs(self, outputs: list[Output]) -> None:
        """Handle finished samples and scores from the engine."""
        for output in outputs:
            entry = self.ledger.open[output.request_id]
            if isinstance(output, SampleOutput):
                self.streams.end_sample(entry.key, output.index)
                self._publish(entry, protocol.sample_message(entry.message.id, output))
            else:
                self._publish(entry, protocol.scores_message(entry.message.id, output))
            self.ledger.end_sample(entry, output.finish_reason)
            if entry.num_unfinished == 0:
                if isinstance(output, SampleOutput):
                    self._publish(entry, _done(entry, self.max_model_len))
                self.end(entry.key)

    def take_ended(self, event: Ended) -> None:
        """Handle the engine's response to an abort."""
        abortion: Abortion = event.command.tag
        key = abortion.entry.key
        if abortion.call is None or abortion.message is None:
            self.take_outputs(event.outputs)
        elif abortion.ends_successors and self.ledger.open.get(key, abortion.entry) is not abortion.entry:
            # An earlier abort has already ended the entry, and the successors have opened the request again.
            self._end_named(abortion.call, key, abortion.message)
        else:
            self._finish_abort(abortion.call, abortion.message, event.outputs)
        abortion.entry.num_aborts -= 1
        self._submit_successors(abortion.entry)

    def end(self, key: str, error: TruerollError | None = None) -> None:
        """End a request, because all its samples have ended or because of `error`."""
        entry = self.ledger.open[key]
        self.streams.end(key)
        self.waiting_room.discard(key)
        if error is None:
            self.ledger.finish(key)
        else:
            self.ledger.fail(key)
            for identity, caller, *_ in self.ledger.awaited.release(entry, entry.subscribers):
                self._send(identity, _error_frame(entry, error, caller))
        self._submit_successors(entry)

    def command(self, command: Run, aborts: bool) -> None:
        """Send a command to the engine.

        `aborts`: whether the command aborts all requests in the engine. Later submissions of an aborted request wait
        until the request has ended.
        """
        if aborts:
            self._interrupted = [entry for key, entry in self.ledger.open.items() if key not in self.waiting_room]
            for entry in self._interrupted:
                entry.num_aborts += 1
        self._command(command)

    def resume(self, outputs: list[Output]) -> None:
        """Handle the outputs of a command that ran between two steps."""
        self.take_outputs(outputs)
        interrupted, self._interrupted = self._interrupted, []
        for entry in interrupted:
            entry.num_aborts -= 1
            self._submit_successors(entry)
        self.waiting_room.look_at_all()

    # The end of the worker.

    def let_in_the_last(self) -> None:
        """Send all waiting requests to the engine.

        Abort the requests that need newer weights, because the worker accepts no more pushes.
        """
        self.waiting_room.look_at_all()
        self.admit(whatever_state=True)
        for waiting in self.waiting_room.take_early():
            self.take_outputs(waiting.abort(None))

    def abort_all(self) -> None:
        """Tell the engine to abort every request."""
        for entry in list(self.ledger.open.values()):
            self._tell_engine(Abortion(entry))

    def fail_all(self, error: TruerollError) -> None:
        """Answer every request and every abort call with an error."""
        for key in list(self.ledger.open):
            self.end(key, error)
        for call in self._aborts.under_way:
            self._aborts.refuse(call, error)

    # Helpers.

    def _submit_successors(self, entry: Entry) -> None:
        """Submit the entry's successors again. Do nothing if the entry is still open and has aborted samples or a
        pending abort.
        """
        if entry.is_aborted and self.ledger.open.get(entry.key) is entry:
            return
        for submission in self.ledger.awaited.release(entry, entry.successors):
            try:
                self.submit(submission.identity, entry.user, asked_by(entry.message, submission))
            except TruerollError as error:
                self._send(submission.identity, _error_frame(entry, error, submission.caller))

    def _tell_engine(self, abortion: Abortion) -> None:
        """Tell the engine to abort the sample that the abort call names, or all samples if the call names no sample."""
        abortion.entry.num_aborts += 1
        index = None if abortion.message is None else abortion.message.index
        self._command(End(abortion.entry.key, index, abortion))

    def _finish_abort(self, call: str, message: protocol.Abort, outputs: list[Output]) -> None:
        """Handle the outputs of the samples that an abort has ended, and answer the abort call. If there are no
        outputs, answer with an error.
        """
        self.take_outputs(outputs)
        if outputs:
            self._aborts.answer(call, _aborted(message, len(outputs)))
        else:
            what = f"request {message.request_id!r}" + ("" if message.index is None else f", sample {message.index}")
            unknown = f"abort: {what} is not running"
            self._aborts.refuse(call, UnknownRequestError(unknown))

    def _publish(self, entry: Entry, message: protocol.FinishedSample | protocol.Done | protocol.Scores) -> None:
        reply = protocol.encode_for_anyone(message)
        entry.replies.append(reply)
        for identity, caller, *_ in entry.subscribers:
            self._send(identity, protocol.address(reply, caller))

    def _tell(self, identity: bytes, deltas: protocol.Deltas) -> None:
        self._send(identity, protocol.encode(deltas))


def _error_frame(entry: Entry, error: TruerollError, caller: str | None) -> bytes:
    return protocol.encode(protocol.error_message(entry.message.id, error, caller))


def _request_of(entry: Entry) -> Request:
    """Convert an entry to a request for the engine."""
    message, params = entry.message, entry.params
    if isinstance(message, protocol.GetScores):
        tokens, salt = protocol.bytes_to_tokens(message.token_ids), salt_of(entry.user, message.cache_salt)
        recorded = message.top_logprobs, message.return_routed_experts
        return ScoreRequest(entry.key, tokens, message.distribution, salt, *recorded, message.spans)
    assert params is not None
    salted = params.model_copy(update={"cache_salt": salt_of(entry.user, params.cache_salt)})
    tokens = protocol.bytes_to_tokens(message.prompt_token_ids)
    return GenerateRequest(entry.key, tokens, salted, message.num_prior_tokens, message.spans)


def _aborted(message: protocol.Abort, num_samples: int) -> protocol.Aborted:
    return protocol.Aborted(id=message.id, request_id=message.request_id, num_samples=num_samples)


def _waits_for_weights(waiting: Waiting, version: int | None) -> bool:
    return waiting.message.wait_for_weights and (version is None or not serves(waiting.message, version))


def _ends_with_client(entry: Entry) -> bool:
    return isinstance(entry.message, protocol.Generate) and entry.message.while_connected


def _done(entry: Entry, max_model_len: int | None) -> protocol.Done:
    """Return the final message for a request.

    `max_model_len`: None if the request was aborted before the model had loaded. If `max_model_len` is None, the reply
    contains `max_tokens` as submitted.
    """
    assert isinstance(entry.message, protocol.Generate) and entry.params is not None
    num_prompt_tokens = len(entry.message.prompt_token_ids) // 4
    params = entry.params
    return protocol.Done(
        id=entry.message.id,
        params=params if max_model_len is None else params.with_max_tokens(num_prompt_tokens, max_model_len),
        num_prompt_tokens=num_prompt_tokens,
        finish_reasons=dict(entry.finish_reasons),
    )
