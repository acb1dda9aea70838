"""The requests of a worker, from their submission to their one terminal reply.

Owns: each request with all that hangs on it, wherever it is: its entry (`ledger`), its place among those that the
engine was not given yet (`waiting_room`), who reads how it grows (`streams`), and the aborts of it that are under way.
Does not own: sockets, the engine, or the state of the worker. It runs on the worker's thread.

Promises: every accepted request gets exactly one terminal reply for each time that it was submitted, unless its client
does not read. However a request ends (finished, failed, aborted, refused, with its owner or with the worker), it passes
`_end`, after which nothing of it is left but what is kept. A user's requests and cached prefixes are nobody else's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from trueroll.errors import TruerollError, UnknownRequestError

from ...engine.request import GenerateRequest, Output, Request, SampleDelta, SampleOutput, ScoreRequest, seed_of
from .. import protocol
from ..config import WorkerConfig
from .admission import Conditions, check_admission, check_joining, check_succession
from .calls import Calls
from .engine_thread import Add, Command, End, Ended, Run, Stream
from .ledger import Entry, Ledger, Submission, asked_by, num_streamed_by
from .streams import Streams
from .users import salt_of, scoped
from .waiting_room import Waiting, WaitingRoom


class Abortion(NamedTuple):
    """Why the engine was told to end samples of `entry`. `call`: the key of the call that asked for it, and
    `message`, that; both None if nobody waits for the answer.
    """

    entry: Entry
    call: str | None = None
    message: protocol.Abort | None = None


class RequestBook:
    """Requests of all users. `command` gives the engine a command; `send` sends a client a frame, and returns False if
    it gets no more; `takes` tells whether a client has read what was sent before; `conditions` how the worker stands.
    `waiting_room`: the requests that the engine was not given yet.
    """

    def __init__(
        self,
        config: WorkerConfig,
        command: Callable[[Command], object],
        send: Callable[[bytes, bytes], bool],
        takes: Callable[[bytes], bool],
        conditions: Callable[[], Conditions],
    ) -> None:
        self._config, self._command, self._send, self._conditions = config, command, send, conditions
        self.ledger = Ledger(config.max_kept_results, config.max_kept_bytes)
        self.waiting_room = WaitingRoom()
        self.streams = Streams(self._tell, takes)
        self._aborts = Calls(send, config.max_queued_requests)
        self._interrupted: list[Entry] = []

    @property
    def has_unanswered(self) -> bool:
        """Whether somebody is owed a reply."""
        return bool(self.ledger.open or self._aborts.under_way)

    @property
    def num_unfinished(self) -> int:
        """Of the requests that the engine was given, how many have not ended."""
        return len(self.ledger.open) - len(self.waiting_room)

    # From clients.

    def submit(self, identity: bytes, user: str | None, message: protocol.Generate | protocol.GetScores) -> None:
        """Take a request, new or known. Raise TruerollError if it is refused."""
        submission = Submission(identity, message.caller, num_streamed_by(message))
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
        check_admission(message, self._conditions(), self._config, self.ledger)
        params = None
        if isinstance(message, protocol.Generate):
            params = message.params
            if params.seed is None:
                params = params.model_copy(update={"seed": seed_of(message.id, message.prompt_token_ids)})
        entry = self.ledger.add(user, message, params)
        self.waiting_room.add(entry.key, Waiting(_request_of(entry), message))
        self.admit()
        return entry

    def _stream(self, key: str, submission: Submission) -> None:
        is_streamed = key in self.streams
        self.streams.add(key, (submission.identity, submission.caller))
        if not is_streamed and key not in self.waiting_room:
            self._command(Stream(key))

    def acknowledge(self, user: str | None, message: protocol.Ack) -> None:
        """The results of some requests have arrived."""
        for id in message.ids:
            self.ledger.acknowledge(scoped(user, id))

    def abort(self, identity: bytes, user: str | None, message: protocol.Abort) -> None:
        """End a request, or a caller's part in it. Raise TruerollError if the call is refused."""
        call, key = scoped(user, message.id), scoped(user, message.request_id)
        if not self._aborts.is_new(call, identity, message):
            return
        if message.caller is not None:
            self.streams.withdraw(key, message.caller)
        if message.caller is not None and self.ledger.withdraw(key, message.caller):
            self._answer_abort(call, message, 0)
        elif (entry := self.ledger.open.get(key)) is None:
            unknown = f"request_id: expected the id of an unfinished request, found {message.request_id!r}"
            self._aborts.refuse(call, UnknownRequestError(unknown))
        elif (waiting := self.waiting_room.get(key)) is not None:
            self._finish_abort(call, message, waiting.abort(message.index))
        else:
            self._tell_engine(Abortion(entry, call, message))

    def lose(self, identity: bytes) -> None:
        """A client gets no more replies. What nobody waits for any more ends, if it is to do so or waits for weights
        itself: the client asks again if it comes back.
        """
        self.streams.lose(identity)
        for entry in self.ledger.awaited.lose(identity):
            waits = self.waiting_room.get(entry.key)
            if waits is not None and (_ends_with_client(entry) or self.waiting_room.early(entry.key)):
                entry.is_wanted = False
                self.take_outputs(waits.abort(None))
            elif _ends_with_client(entry):
                entry.is_wanted = False
                self._tell_engine(Abortion(entry))

    # To and from the engine.

    def admit(self, whatever_state: bool = False) -> None:
        """Give the engine the requests that wait, if it is to have them; `whatever_state`: all that its weights are new
        enough for.
        """
        conditions = self._conditions()
        if not (conditions.takes_requests or whatever_state):
            return
        ready, refused = self.waiting_room.take_due(conditions.version)
        for key, waiting in ready.items():
            self._command(Add(waiting.request, tuple(waiting.ended)))
            if key in self.streams:
                self._command(Stream(key))
        for key, error in refused.items():
            self.refuse(key, error)

    def take_deltas(self, deltas: list[SampleDelta]) -> None:
        """Streamed samples have grown."""
        for delta in deltas:
            entry = self.ledger.open[delta.request_id]
            self.streams.grow(entry.key, protocol.delta_message(entry.message.id, delta))

    def take_outputs(self, outputs: list[Output]) -> None:
        """Samples and scores have ended."""
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
                    self._publish(entry, _done(entry, self._conditions().max_model_len))
                self._end(entry)

    def take_ended(self, event: Ended) -> None:
        """The engine has ended what it was told to."""
        abortion: Abortion = event.command.tag
        if abortion.call is None or abortion.message is None:
            self.take_outputs(event.outputs)
        else:
            self._finish_abort(abortion.call, abortion.message, event.outputs)
        abortion.entry.num_aborts -= 1
        self._submit_successors(abortion.entry)

    def refuse(self, key: str, error: TruerollError) -> None:
        """A request gets no result."""
        self._end(self.ledger.open[key], error)

    def command(self, command: Run, aborts: bool) -> None:
        """Give the engine a command. If it `aborts` what the engine has, who asks for some of that from now on waits
        for the end of it.
        """
        if aborts:
            self._interrupted = [entry for key, entry in self.ledger.open.items() if key not in self.waiting_room]
        for entry in self._interrupted:
            entry.num_aborts += 1
        self._command(command)

    def resume(self, outputs: list[Output]) -> None:
        """The engine has done what it was told between two steps, which ended these."""
        self.take_outputs(outputs)
        interrupted, self._interrupted = self._interrupted, []
        for entry in interrupted:
            entry.num_aborts -= 1
            self._submit_successors(entry)
        self.waiting_room.look_at_all()

    # The end of the worker.

    def let_in_the_last(self) -> None:
        """The engine gets what its weights are new enough for. The rest ends, for the worker takes no more pushes."""
        self.waiting_room.look_at_all()
        self.admit(whatever_state=True)
        for waiting in self.waiting_room.take_early():
            self.take_outputs(waiting.abort(None))

    def abort_all(self) -> None:
        """Tell the engine to end every request."""
        for entry in list(self.ledger.open.values()):
            self._tell_engine(Abortion(entry))

    def fail_all(self, error: TruerollError) -> None:
        """Answer every request and abort with an error."""
        for key in list(self.ledger.open):
            self.refuse(key, error)
        for call in self._aborts.under_way:
            self._aborts.refuse(call, error)

    # What all ways have in common.

    def _end(self, entry: Entry, error: TruerollError | None = None) -> None:
        """A request is over: all of its samples have ended, or it gets an error instead."""
        self.streams.end(entry.key)
        self.waiting_room.discard(entry.key)
        if error is None:
            self.ledger.finish(entry.key)
        else:
            self.ledger.fail(entry.key)
            for identity, caller, _ in self.ledger.awaited.release(entry, entry.subscribers):
                self._send(identity, _error_frame(entry, error, caller))
        self._submit_successors(entry)

    def _submit_successors(self, entry: Entry) -> None:
        """An abort of the entry has been answered, or it has ended: if nothing is aborted, or all is over, go on."""
        if entry.is_aborted and self.ledger.open.get(entry.key) is entry:
            return
        for identity, caller, num_streamed in self.ledger.awaited.release(entry, entry.successors):
            try:
                self.submit(identity, entry.user, asked_by(entry.message, caller, num_streamed > 0))
            except TruerollError as error:
                self._send(identity, _error_frame(entry, error, caller))

    def _tell_engine(self, abortion: Abortion) -> None:
        """Let the engine end what an abort names, or all of the entry."""
        abortion.entry.num_aborts += 1
        index = None if abortion.message is None else abortion.message.index
        self._command(End(abortion.entry.key, index, abortion))

    def _finish_abort(self, call: str, message: protocol.Abort, outputs: list[Output]) -> None:
        """It has ended these; none if there was nothing to end."""
        self.take_outputs(outputs)
        if outputs:
            self._answer_abort(call, message, len(outputs))
        else:
            what = f"request {message.request_id!r}" + ("" if message.index is None else f", sample {message.index}")
            unknown = f"abort: expected a running request or sample, found none for {what}"
            self._aborts.refuse(call, UnknownRequestError(unknown))

    def _answer_abort(self, call: str, message: protocol.Abort, num_samples: int) -> None:
        reply = protocol.Aborted(id=message.id, request_id=message.request_id, num_samples=num_samples)
        self._aborts.answer(call, reply)

    def _publish(self, entry: Entry, message: protocol.FinishedSample | protocol.Done | protocol.Scores) -> None:
        reply = protocol.encode_for_anyone(message)
        entry.replies.append(reply)
        for identity, caller, _ in entry.subscribers:
            if not self._send(identity, protocol.address(reply, caller)):
                self.lose(identity)

    def _tell(self, identity: bytes, deltas: protocol.Deltas) -> None:
        if not self._send(identity, protocol.encode(deltas)):
            self.lose(identity)


def _error_frame(entry: Entry, error: TruerollError, caller: str | None) -> bytes:
    return protocol.encode(protocol.error_message(entry.message.id, error, caller))


def _request_of(entry: Entry) -> Request:
    """What the engine is asked for."""
    message, params = entry.message, entry.params
    if isinstance(message, protocol.GetScores):
        tokens, salt = protocol.bytes_to_tokens(message.token_ids), salt_of(entry.user, message.cache_salt)
        recorded = message.top_logprobs, message.return_routed_experts
        return ScoreRequest(entry.key, tokens, message.distribution, salt, *recorded, message.spans)
    assert params is not None
    salted = params.model_copy(update={"cache_salt": salt_of(entry.user, params.cache_salt)})
    tokens = protocol.bytes_to_tokens(message.prompt_token_ids)
    return GenerateRequest(entry.key, tokens, salted, message.num_prior_tokens, message.spans)


def _ends_with_client(entry: Entry) -> bool:
    return isinstance(entry.message, protocol.Generate) and entry.message.while_connected


def _done(entry: Entry, max_model_len: int | None) -> protocol.Done:
    """`max_model_len` None: it was aborted before the model was there, with parameters that nothing used."""
    assert isinstance(entry.message, protocol.Generate) and entry.params is not None
    num_prompt_tokens = len(entry.message.prompt_token_ids) // 4
    params = entry.params
    return protocol.Done(
        id=entry.message.id,
        params=params if max_model_len is None else params.with_max_tokens(num_prompt_tokens, max_model_len),
        num_prompt_tokens=num_prompt_tokens,
        finish_reasons=dict(entry.finish_reasons),
    )
