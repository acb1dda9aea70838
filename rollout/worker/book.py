"""The requests of a worker, from submission to terminal reply.

Owns: entries of requests (`ledger`), admission (`admission`), requests that wait for the engine (`WaitingRoom`), images
(`images`), streams (`streams`), and pending aborts. Does not own: sockets, the engine, or the state of the worker. All
code here runs on the thread of `Worker.run`.

Guarantees: every submission of an accepted request gets exactly one terminal reply, provided that the client reads
replies. Every request ends through `RequestBook.end`, after success, an error, an abort, a lost client or a shutdown.
After a request has ended, only the result of the request may be kept. No user can access the requests or the cached
prefixes of another user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from trueroll.errors import InvalidRequestError, StaleWeightsError, TruerollError, UnknownRequestError

from ...engine.grammars.source import Grammar
from ...engine.media import ImageInput
from ...engine.request import (
    GenerateRequest,
    Output,
    Request,
    SampleDelta,
    SampleOutput,
    ScoreOutput,
    ScoreRequest,
    derive_seed,
    seed_of,
)
from .. import protocol
from ..config import WorkerConfig
from ..protocol import Generate, GetScores
from .admission import (
    Conditions,
    Versions,
    check_admission,
    check_joining,
    check_succession,
    serves,
    targets_of,
    too_old,
)
from .engine_thread import Add, Command, End, Ended, Run, Stream
from .grammars import GrammarThread, Preparation
from .images import ImageStore, Supplier
from .ledger import Calls, Entry, Ledger, Submission, asked_by, salt_of, scoped, submission_of
from .streams import Streams


@dataclass
class Waiting:
    """A waiting request and its message. `ended`: indices of the aborted samples; {0} for an aborted score.
    `preparation`: the last preparation of the request's grammar.
    """

    request: Request
    message: Generate | GetScores
    ended: set[int] = field(default_factory=set)
    preparation: Preparation | None = None

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
    """The requests that have not been sent to the engine yet, by key. The requests wait for the engine, for newer
    weights, for their images, or for the preparation of their grammar.

    Owns the indices of the samples that were aborted while their request waited. Does not own the ledger entries of the
    requests, or the engine. Guarantees: an aborted sample is never computed, and requests leave the waiting room in the
    order of their arrival, except that later requests may overtake requests that lack images, have a new grammar or
    wait for newer weights. The waiting room checks requests that wait for newer weights only when the weights may
    have changed.
    """

    def __init__(self) -> None:
        self._due: dict[str, Waiting] = {}
        self._early: dict[str, Waiting] = {}
        self._held: dict[str, Waiting] = {}

    def __len__(self) -> int:
        return len(self._due) + len(self._early) + len(self._held)

    def __contains__(self, key: str) -> bool:
        return key in self._due or key in self._early or key in self._held

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys of all requests."""
        return chain(self._due, self._early, self._held)

    def add(self, key: str, waiting: Waiting) -> None:
        """Add a request. The next `take_due` checks the request."""
        self._due[key] = waiting

    def hold(self, key: str, waiting: Waiting) -> None:
        """Add a request that waits for its images or its grammar."""
        self._held[key] = waiting

    def postpone(self, key: str, waiting: Waiting) -> None:
        """Add a request that will be checked by the first `take_due` after the next `look_at_all`."""
        self._early[key] = waiting

    def give_images(self, key: str, images: tuple[ImageInput, ...]) -> None:
        """Add the images of a held request. The next `take_due` checks the request."""
        waiting = self._held[key]
        waiting.request = replace(waiting.request, images=images)
        self.release(key)

    def release(self, key: str) -> None:
        """Let the next `take_due` check a held request."""
        self._due[key] = self._held.pop(key)

    def get(self, key: str) -> Waiting | None:
        return self._due.get(key) or self._early.get(key) or self._held.get(key)

    def discard(self, key: str) -> None:
        """Remove a request that has ended."""
        if (waiting := self.get(key)) is not None and waiting.preparation is not None:
            waiting.preparation.is_wanted = False
        for requests in (self._due, self._early, self._held):
            requests.pop(key, None)

    def look_at_all(self) -> None:
        """Make the next `take_due` check all requests again, because the weights may have changed."""
        self._due, self._early = self._early | self._due, {}

    def take_due(self, versions: Versions | None) -> tuple[dict[str, Waiting], dict[str, StaleWeightsError]]:
        """Remove and return the due requests that can be served with weights of `versions`, and the due requests that
        must be refused.

        Refused requests are returned with their errors. Requests that wait for newer weights stay in the waiting room.
        `versions`: None if the model has not loaded; all requests with a `min_weight_version` then stay in the waiting
        room.
        """
        due, self._due = self._due, {}
        ready: dict[str, Waiting] = {}
        refused: dict[str, StaleWeightsError] = {}
        for key, waiting in due.items():
            if serves(waiting.message, versions):
                ready[key] = waiting
            elif versions is None or waiting.message.wait_for_weights:
                self._early[key] = waiting
            else:
                refused[key] = too_old(waiting.message, versions)
        return ready, refused

    def take_early(self) -> list[Waiting]:
        """Remove and return the requests that wait for weights. Called when the worker accepts no more pushes."""
        early, self._early = self._early, {}
        return list(early.values())


def _empty_sample(request: GenerateRequest, index: int) -> SampleOutput:
    assert request.params.seed is not None
    seed = derive_seed(request.params.seed, index)
    return SampleOutput.empty(request.id, index, seed, request.params)


def _empty_scores(id: str) -> ScoreOutput:
    return ScoreOutput(id, np.empty(0, np.float32), "abort", ())


class Abortion(NamedTuple):
    """An abort that was sent to the engine, for one sample or all samples of `entry`.

    `call`: the key of the abort call. `message`: the abort call itself. `call` and `message` are None if no client
    waits for a reply. The successors of an entry are submissions that wait for the request of the entry to end.
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
    - `max_record_bytes`: maximum size of the stored replies of unfinished requests; None until the model has loaded.
    - `grammars`: prepares grammars; None until the model has loaded.
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
        self.max_record_bytes: int | None = None
        self.grammars: GrammarThread | None = None
        self.streams = Streams(self._tell, takes)
        self.images = ImageStore(
            config.max_image_bytes, config.image_seconds, config.max_message_bytes // 2, self._tell
        )
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

    @property
    def num_one_version(self) -> int:
        """Number of unfinished requests in the engine that set `one_version`."""
        entries = (entry for key, entry in self.ledger.open.items() if key not in self.waiting_room)
        return sum(entry.params is not None and entry.params.one_version for entry in entries)

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
        if message.images:
            self.images.offer(entry.key, Supplier(identity, message.caller))

    def _open(self, user: str | None, message: protocol.Generate | protocol.GetScores) -> Entry:
        conditions = self._conditions()
        check_admission(message, conditions, self._config, self.ledger, self.max_model_len)
        if message.images:
            self.images.check(message.images, _shown_tokens(message))
        params = None
        if isinstance(message, protocol.Generate):
            params = message.params
            if params.seed is None:
                content = message.prompt_token_ids + protocol.content_of_images(message.images)
                params = params.model_copy(update={"seed": seed_of(message.id, content)})
        entry = self.ledger.add(user, message, params)
        self.waiting_room.add(entry.key, Waiting(_request_of(entry), message))
        if conditions.takes_requests:
            self._give(conditions.versions)
        return entry

    def _stream(self, key: str, submission: Submission) -> None:
        is_streamed = key in self.streams
        self.streams.add(key, (submission.identity, submission.caller), submission.delta_seconds)
        if not is_streamed and key not in self.waiting_room:
            self._command(Stream(key))

    def acknowledge(self, user: str | None, message: protocol.Ack) -> None:
        """Record that the client has received the results of the requests in `message`."""
        for id in message.ids:
            self.ledger.acknowledge(scoped(user, id))

    def abort(self, identity: bytes, user: str | None, message: protocol.Abort) -> None:
        """End a request, or only remove a caller from the request. Raise TruerollError if the call is refused."""
        call, key = scoped(user, message.id), scoped(user, message.request_id)
        if not self._aborts.is_new(call, identity, message):
            return
        if message.caller is not None:
            self.streams.withdraw(key, message.caller)
            self.images.withdraw(key, message.caller)
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

        If a request then has no waiting client left, and the request is `while_connected` or waits for weights, end the
        request. A client that reconnects submits the request again.
        """
        self.streams.lose(identity)
        self.images.lose(identity)
        for entry in self.ledger.awaited.lose(identity):
            waits = self.waiting_room.get(entry.key)
            if waits is not None and (
                _ends_with_client(entry) or _waits_for_weights(waits, self._conditions().versions)
            ):
                entry.is_wanted = False
                self.take_outputs(waits.abort(None))
            elif _ends_with_client(entry):
                entry.is_wanted = False
                self._tell_engine(Abortion(entry))

    # Images and grammars.

    def put_image(self, identity: bytes, message: protocol.PutImage) -> None:
        """Handle a part of an image."""
        self.images.put(identity, message)

    def follow_images(self) -> None:
        """Admit the requests for which all images have arrived, and end the requests for which an image cannot arrive.
        Call this method regularly, at the latest when `images.deadline` has passed.
        """
        self.images.follow()
        for key, error in self.images.take_failed().items():
            self.end(key, error)
        if ready := self.images.take_ready():
            for key in ready:
                self.waiting_room.give_images(key, self.images.images_of(key))
            self._admit_released()

    def take_prepared(self, preparation: Preparation) -> None:
        """Admit a request after the preparation of its grammar, or end the request with an error. No-op if the request
        has ended, even if a new request has the same id.
        """
        if not preparation.is_wanted:
            return
        if preparation.error is not None:
            self.end(preparation.key, preparation.error)
        else:
            self.waiting_room.release(preparation.key)
            self._admit_released()

    def _admit_released(self) -> None:
        is_ending = self._conditions().is_ending
        self.admit(is_ending)
        if is_ending:
            self._abort_early()

    # Commands and events of the engine.

    def admit(self, whatever_state: bool = False) -> None:
        """Send the waiting requests to the engine if the current state allows this or `whatever_state` is True.

        Requests that need newer weights keep waiting or are refused.
        """
        if not len(self.waiting_room):
            return
        conditions = self._conditions()
        if conditions.takes_requests or whatever_state:
            self._give(conditions.versions)

    def _give(self, versions: Versions | None) -> None:
        """Send each waiting request to the engine if weights of `versions` can serve the request."""
        ready, refused = self.waiting_room.take_due(versions)
        for key, waiting in ready.items():
            if len(waiting.request.images) < len(waiting.message.images):
                self._ask_for_images(key, waiting)
                continue
            grammar, prepared = _grammar_of(waiting.request), None
            if grammar is not None and (prepared := self._find(grammar)) is None:
                self._prepare(key, waiting, grammar)
                continue
            self._command(Add(waiting.request, tuple(waiting.ended), prepared))
            if key in self.streams:
                self._command(Stream(key))
        for key, error in refused.items():
            self.end(key, error)

    def _find(self, grammar: Grammar) -> object | None:
        return None if self.grammars is None else self.grammars.find(grammar)

    def _prepare(self, key: str, waiting: Waiting, grammar: Grammar) -> None:
        """Prepare the grammar of a request before the engine gets the request."""
        if self.grammars is None:
            self.waiting_room.postpone(key, waiting)  # requests wait until the model has loaded
        else:
            self.waiting_room.hold(key, waiting)
            waiting.preparation = self.grammars.prepare(self.ledger.open[key].user, key, grammar)

    def _ask_for_images(self, key: str, waiting: Waiting) -> None:
        """Get the images of a request before the request is sent to the engine. Memory for images is reserved only if
        the current weights are new enough for the request.
        """
        if not self.images.has_limits:
            self.waiting_room.postpone(key, waiting)  # requests wait until the model has loaded
            return
        entry, message = self.ledger.open[key], waiting.message
        self.waiting_room.hold(key, waiting)
        try:
            self.images.check(message.images, _shown_tokens(message))
        except InvalidRequestError as error:
            self.end(key, error)
            return
        self.images.add(key, message.id, entry.user, message.images)
        for submission in entry.subscribers:
            self.images.offer(key, Supplier(submission.identity, submission.caller))

    def take_deltas(self, deltas: list[SampleDelta]) -> None:
        """Handle the engine's deltas of streamed samples."""
        for delta in deltas:
            entry = self.ledger.open[delta.request_id]
            self.streams.grow(entry.key, protocol.delta_message(entry.message.id, delta))

    def take_outputs(self, outputs: list[Output]) -> None:
        """Handle finished samples and scores from the engine."""
        for output in outputs:
            self._take_output(self.ledger.open[output.request_id], output)
        self._bound_replies()

    def _take_output(self, entry: Entry, output: Output) -> None:
        if isinstance(output, ScoreOutput) and output.error is not None:
            self.end(entry.key, entry.error or InvalidRequestError(output.error))
            return
        if isinstance(output, SampleOutput):
            self.streams.end_sample(entry.key, output.index)
        if entry.error is None:
            self._publish(entry, _message_of(entry, output))
        self.ledger.end_sample(entry, output.finish_reason)
        if entry.num_unfinished == 0:
            if isinstance(output, SampleOutput) and entry.error is None:
                self._publish(entry, _done(entry, self.max_model_len))
            self.end(entry.key, entry.error)

    def _bound_replies(self) -> None:
        """Fail the requests with the most reply bytes, until the replies of unfinished requests are within their limit.
        The failed requests end when the engine has aborted their running samples.
        """
        ledger, limit = self.ledger, self.max_record_bytes
        while limit is not None and (found := ledger.num_bytes_replied) > limit:
            entry = ledger.most_replied()
            error = InvalidRequestError(
                f"records: the stored replies of unfinished requests take {found} bytes (limit {limit}, "
                f"max_record_bytes), and this request's {entry.num_bytes_replied} bytes are the most; record less, "
                "request fewer samples or tokens, or raise the limit",
                value=found,
                limit=limit,
            )
            ledger.begin_failure(entry, error)
            ledger.stats.reply_errors += 1
            if entry.key in self.waiting_room:
                self.end(entry.key, error)
            else:
                self._tell_engine(Abortion(entry))

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
        self.images.end(key)
        if error is None:
            self.ledger.finish(key)
        else:
            self.ledger.fail(key)
            for identity, caller, *_ in self.ledger.awaited.release(entry, entry.subscribers):
                self._send(identity, _error_frame(entry, error, caller))
        self._submit_successors(entry)

    def command(self, command: Run, aborts: bool, adapter: str | None = None) -> None:
        """Send a command to the engine.

        `aborts`: whether the command aborts all requests in the engine, or all requests of `adapter`. Later submissions
        of an aborted request wait until the request has ended.
        """
        if aborts:
            in_engine = [entry for key, entry in self.ledger.open.items() if key not in self.waiting_room]
            self._interrupted = [e for e in in_engine if adapter is None or e.message.adapter == adapter]
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
        """Send all waiting requests to the engine, except for the requests that wait for images or for their grammar.

        Abort the requests that need newer weights, because the worker accepts no more pushes.
        """
        self.waiting_room.look_at_all()
        self.admit(whatever_state=True)
        self._abort_early()

    def _abort_early(self) -> None:
        """Abort the requests that wait for weights."""
        for waiting in self.waiting_room.take_early():
            self.take_outputs(waiting.abort(None))

    def abort_all(self) -> None:
        """Abort every request."""
        for key, entry in list(self.ledger.open.items()):
            if (waiting := self.waiting_room.get(key)) is not None:
                self.take_outputs(waiting.abort(None))
            else:
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
        self.ledger.add_reply(entry, reply)
        for identity, caller, *_ in entry.subscribers:
            self._send(identity, protocol.address(reply, caller))

    def _tell(self, identity: bytes, message: protocol.Deltas | protocol.NeedImage) -> None:
        self._send(identity, protocol.encode(message))


def _shown_tokens(message: Generate | GetScores) -> np.ndarray:
    """Return the tokens that the model reads, which do not include the last token of a scored sequence."""
    if isinstance(message, GetScores):
        return protocol.bytes_to_tokens(message.token_ids)[:-1]
    return protocol.bytes_to_tokens(message.prompt_token_ids)


def _grammar_of(request: Request) -> Grammar | None:
    distribution = request.params if isinstance(request, GenerateRequest) else request.distribution
    return distribution.structured_outputs


def _message_of(entry: Entry, output: Output) -> protocol.FinishedSample | protocol.Scores:
    if isinstance(output, SampleOutput):
        return protocol.sample_message(entry.message.id, output)
    return protocol.scores_message(entry.message.id, output)


def _error_frame(entry: Entry, error: TruerollError, caller: str | None) -> bytes:
    return protocol.encode(protocol.error_message(entry.message.id, error, caller))


def _request_of(entry: Entry) -> Request:
    """Convert an entry to a request for the engine."""
    message, params = entry.message, entry.params
    if isinstance(message, protocol.GetScores):
        tokens, salt = protocol.bytes_to_tokens(message.token_ids), salt_of(entry.user, message.cache_salt)
        recorded = message.top_logprobs, message.return_routed_experts, message.start, targets_of(message)
        parts = entry.key, tokens, message.distribution, salt, *recorded, message.spans
        return ScoreRequest(*parts, adapter=message.adapter, return_sampling_mask=message.return_sampling_mask)
    assert params is not None
    salted = params.model_copy(update={"cache_salt": salt_of(entry.user, params.cache_salt)})
    tokens = protocol.bytes_to_tokens(message.prompt_token_ids)
    parts = entry.key, tokens, salted, message.num_prior_tokens, message.spans
    return GenerateRequest(*parts, adapter=message.adapter)


def _aborted(message: protocol.Abort, num_samples: int) -> protocol.Aborted:
    return protocol.Aborted(id=message.id, request_id=message.request_id, num_samples=num_samples)


def _waits_for_weights(waiting: Waiting, versions: Versions | None) -> bool:
    return waiting.message.wait_for_weights and not serves(waiting.message, versions)


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
