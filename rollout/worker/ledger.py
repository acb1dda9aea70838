"""Stores requests and calls, so that submissions are idempotent and results survive a lost connection.

`Ledger` owns the request ids of all users. For each id, `Ledger` stores the content of the request, the waiting
submissions, and the replies that were already sent (as encoded frames). `Ledger` does not send replies. `Calls` owns
the pending calls that get a single reply, and the clients of each pending call. `Calls` also keeps the latest replies,
for clients that lost a reply. This module does not own sockets, the engine, the effect of a call, or the decision to
accept a request.

Guarantees:

- A known id always belongs to the same content. Each user has a separate set of ids.
- An open entry is never dropped. Finished entries are kept until they are acknowledged or evicted. If a limit is
  exceeded, the entry that finished first is evicted first.
- The replies of open entries are counted in bytes. An entry that fails while the engine runs its request stores no
  replies, and stays open until the engine has ended its samples.
- Aborted results are sent only to callers that submitted the request before the abort.
- Open entries are indexed by the connections that wait for them.
- A call that is sent several times, for example after a reconnect, is executed once, and each copy is answered. The
  ledger recognizes copies of pending calls and of the `MAX_REMEMBERED` calls that were answered last. A different call
  with the same id is refused.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trueroll.errors import IdConflictError, QueueFullError, TruerollError

from ...engine.request import FinishReason, SamplingParams
from .. import protocol
from ..protocol import Generate, GetScores


def scoped(user: str | None, id: str) -> str:
    """Return the key of the request or call with id `id` of user `user`. The keys of different users differ, because
    user names contain no slash.
    """
    return id if user is None else f"{user}/{id}"


def salt_of(user: str | None, cache_salt: str | None) -> str | None:
    """Return the cache salt that the engine uses for a request.

    A request without `cache_salt` gets a salt that only requests of the same user have, so prefixes are not shared
    between users. Requests with the same `cache_salt` share prefixes even across users.
    """
    if user is None:
        return cache_salt
    return f"user:{user}" if cache_salt is None else f"named:{cache_salt}"


FIXED_BYTES = 4096
"""Estimated memory of a request without its tokens, in bytes."""
INT_BYTES = 36
"""Estimated memory of a number, including its slot in a tuple, in bytes."""
SPAN_BYTES = 256
"""Estimated memory of a span, or of an image without its pixels, in bytes."""
NAME_BYTES = 256
"""Estimated memory of a waiting submission or of a remembered caller, without the caller's name, in bytes."""
STREAM_BYTES = 256
"""Estimated memory for streaming one sample to one submission, in bytes."""


def num_bytes_of(message: Generate | GetScores) -> int:
    """Return the estimated memory of a request's content in bytes.

    Tokens count twice, because they are stored as bytes and as an array.
    """
    beside = FIXED_BYTES + SPAN_BYTES * (len(message.spans) + len(message.images))
    if isinstance(message, GetScores):
        arrays = len(message.token_ids) + len(message.target_token_ids or b"")
        numbers = INT_BYTES * message.distribution.num_numbers
        return beside + _text_bytes(message.id, message.cache_salt) + 2 * arrays + numbers
    params = message.params
    num_bytes = (
        beside + 2 * len(message.prompt_token_ids) + INT_BYTES * (params.num_numbers + len(params.target_token_ids))
    )
    return num_bytes + _text_bytes(message.id, params.cache_salt, *params.stop)


def num_bytes_to_name(caller: str | None) -> int:
    """Return the estimated memory of a remembered caller, in bytes."""
    return NAME_BYTES + _text_bytes(caller)


def asked_by(message: Generate | GetScores, submission: Submission) -> Generate | GetScores:
    """Return a copy of a request with the caller and the delta settings of `submission`.

    Two submissions of the same request differ only in the caller and the delta settings.
    """
    told: dict[str, Any] = {"caller": submission.caller}
    if isinstance(message, Generate):
        told |= {"deltas": submission.num_streamed > 0, "delta_seconds": submission.delta_seconds}
    return message.model_copy(update=told)


def _text_bytes(*texts: str | None) -> int:
    """Return an upper bound on the memory that the texts use, in bytes.

    `sys.getsizeof` is not used, because its result grows when Python caches the text's UTF-8 encoding.
    """
    return sum(len(text) if text.isascii() else 8 * len(text) for text in texts if text)


class Submission(NamedTuple):
    """A recipient of replies: the identity of a connection, and the caller that uses the connection.

    `num_streamed`: number of samples for which the submission requests deltas. `delta_seconds`: as in `Generate`.
    """

    identity: bytes
    caller: str | None
    num_streamed: int = 0
    delta_seconds: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Estimated memory, in bytes, of this submission while it waits."""
        return num_bytes_to_name(self.caller) + STREAM_BYTES * self.num_streamed


_NOBODY = Submission(b"", None)


def submission_of(identity: bytes, message: Generate | GetScores) -> Submission:
    """Return the recipient that a message from connection `identity` names."""
    if isinstance(message, Generate) and message.deltas:
        return Submission(identity, message.caller, message.params.n, message.delta_seconds)
    return Submission(identity, message.caller)


class Submissions:
    """The waiting submissions of one request, by connection. `num_bytes`: estimated size of the submissions."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, list[Submission]] = {}
        self._count = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Submission]:
        """Iterate over a copy, so that submissions may be added and removed during the iteration."""
        return iter([submission for waiting in self._waiting.values() for submission in waiting])

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._waiting

    def add(self, submission: Submission) -> None:
        self._waiting.setdefault(submission.identity, []).append(submission)
        self._count += 1
        self.num_bytes += submission.num_bytes

    def take(self, identity: bytes) -> list[Submission]:
        """Remove and return the submissions of a connection."""
        taken = self._waiting.pop(identity, [])
        self._count -= len(taken)
        self.num_bytes -= sum(submission.num_bytes for submission in taken)
        return taken

    def withdraw(self, caller: str) -> None:
        """Remove the submissions of `caller`."""
        for identity, waiting in list(self._waiting.items()):
            if any(submission.caller == caller for submission in waiting):
                for submission in self.take(identity):
                    if submission.caller != caller:
                        self.add(submission)


@dataclass(eq=False)
class Entry:
    """One request: the submitted content, the waiting submissions, and the frames sent so far.

    - `key`: key of the request, unique among all users. `user`: name of the user that submitted the request.
    - `params`: resolved parameters; None for a score.
    - `num_unfinished`: number of unfinished samples. `num_bytes_asked`: estimated size of the content.
    - `subscribers`: the waiting submissions. Each subscriber gets separate replies.
    - `callers`: all callers that submitted the request. While the entry is open, each caller is mapped to the number of
      its waiting submissions.
    - `replies`: the frames sent so far, in order. `num_bytes_replied`: the size of `replies`.
    - `error`: the error that ends a failed entry when the engine has ended all its samples; None for other entries.
    - `num_aborts`: number of aborts that the engine has not answered yet.
    - `successors`: submissions that arrived after an abort. Successors do not get the aborted results, and are
      submitted again after the entry has ended.
    - `is_wanted`: whether to keep the result after the entry has ended.
    """

    key: str
    user: str | None
    message: Generate | GetScores
    params: SamplingParams | None
    num_unfinished: int
    num_bytes_asked: int
    subscribers: Submissions = field(default_factory=Submissions)
    callers: Counter[str | None] = field(default_factory=Counter)
    replies: list[bytes] = field(default_factory=list)
    num_bytes_replied: int = 0
    error: TruerollError | None = None
    finish_reasons: Counter[FinishReason] = field(default_factory=Counter)
    num_aborts: int = 0
    successors: Submissions = field(default_factory=Submissions)
    is_wanted: bool = True

    @property
    def num_bytes(self) -> int:
        """Estimated size of the content, the replies and the names of the callers, in bytes."""
        return self.num_bytes_asked + self.num_bytes_replied + sum(map(num_bytes_to_name, self.callers))

    @property
    def is_aborted(self) -> bool:
        """Return whether some samples of the request were aborted, or may still be aborted by a pending abort.

        Return False for a request that has failed, because all its submissions get the error.
        """
        if self.error is not None:
            return False
        return (self.num_aborts > 0 and self.num_unfinished > 0) or self.finish_reasons["abort"] > 0

    def serves(self, caller: str | None) -> bool:
        """Return whether a submission by `caller` may join this request. After an abort, only callers that submitted
        before the abort may join.
        """
        return caller in self.callers or not self.is_aborted

    @property
    def num_bytes_waiting(self) -> int:
        """Estimated size of the subscribers and the successors, in bytes."""
        return self.subscribers.num_bytes + self.successors.num_bytes

    def withdraw(self, caller: str) -> None:
        """Remove `caller` and all its submissions, because the caller has given up the request."""
        del self.callers[caller]
        self.subscribers.withdraw(caller)
        self.successors.withdraw(caller)
        self.is_wanted = self.is_wanted and bool(self.subscribers)

    def lose(self, identity: bytes) -> None:
        """Remove a lost connection.

        A caller that reconnects does not get results that were aborted while the caller was disconnected.
        """
        for submission in self.subscribers.take(identity):
            self.callers[submission.caller] -= 1
            if not self.callers[submission.caller]:
                del self.callers[submission.caller]
        self.successors.take(identity)


@dataclass
class ServiceStats:
    """Lifetime counters of requests.

    `accepted`: number of accepted requests. `joined`: number of submissions of requests that were already known.
    `finished`: number of accepted requests that have finished. `failed`: number of accepted requests that were answered
    with an error. `dropped`: number of evicted results. `reply_errors`: number of requests that failed, because the
    stored replies of unfinished requests exceeded `max_record_bytes`.
    """

    accepted: int = 0
    joined: int = 0
    finished: int = 0
    failed: int = 0
    dropped: int = 0
    reply_errors: int = 0


class KeptResults:
    """Ended entries by key, in the order in which the entries ended. The oldest entries are evicted first.

    Holds at most `max_results` entries of at most `max_bytes` in total. `num_bytes`: estimated size of all entries.
    """

    def __init__(self, max_results: int, max_bytes: int, stats: ServiceStats) -> None:
        self.num_bytes = 0
        self._max_results, self._max_bytes, self._stats = max_results, max_bytes, stats
        self._entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, key: str) -> Entry | None:
        """Return the kept entry with this key, else None."""
        return self._entries.get(key)

    def put(self, entry: Entry) -> None:
        """Keep an entry."""
        self._entries[entry.key] = entry
        self.num_bytes += entry.num_bytes
        self._push_out()

    def remember(self, entry: Entry, caller: str | None) -> None:
        """Record that `caller` has also received the replies of a kept entry."""
        if caller not in entry.callers:
            entry.callers[caller] = 1
            self.num_bytes += num_bytes_to_name(caller)
            self._push_out()

    def withdraw(self, entry: Entry, caller: str) -> None:
        """Remove `caller` from a kept entry. If no caller is left, drop the entry."""
        if entry.callers.pop(caller, None):
            self.num_bytes -= num_bytes_to_name(caller)
        if not entry.callers:
            self.drop(entry.key)

    def drop(self, key: str) -> None:
        """Drop the entry with this key. No-op if the key is unknown."""
        if (entry := self._entries.pop(key, None)) is not None:
            self.num_bytes -= entry.num_bytes

    def _push_out(self) -> None:
        while len(self._entries) > self._max_results or self.num_bytes > self._max_bytes:
            self.drop(next(iter(self._entries)))
            self._stats.dropped += 1


class Awaited:
    """The open entries that each connection waits for. `num_bytes`: estimated size of the submissions."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._entries: defaultdict[bytes, set[Entry]] = defaultdict(set)

    def add(self, entry: Entry, submissions: Submissions, submission: Submission) -> None:
        """Add a waiting submission to an entry's `submissions`."""
        submissions.add(submission)
        self.num_bytes += submission.num_bytes
        self._entries[submission.identity].add(entry)

    def release(self, entry: Entry, submissions: Submissions) -> list[Submission]:
        """Remove and return all submissions in `submissions`, which is either `entry.subscribers` or
        `entry.successors`.
        """
        released = list(submissions)
        self.num_bytes -= submissions.num_bytes
        for submission in released:
            submissions.take(submission.identity)
            self._tidy(entry, submission.identity)
        return released

    def lose(self, identity: bytes) -> list[Entry]:
        """Remove a lost connection. Return the entries that only this connection was waiting for."""
        lost = list(self._entries.pop(identity, ()))
        for entry in lost:
            before = entry.num_bytes_waiting
            entry.lose(identity)
            self.num_bytes += entry.num_bytes_waiting - before
        return [entry for entry in lost if not entry.subscribers and not entry.successors]

    def withdraw(self, entry: Entry, caller: str) -> None:
        """Remove `caller` from an entry."""
        waiting = [*entry.subscribers, *entry.successors]
        before, identities = entry.num_bytes_waiting, {each.identity for each in waiting if each.caller == caller}
        entry.withdraw(caller)
        self.num_bytes += entry.num_bytes_waiting - before
        for identity in identities:
            self._tidy(entry, identity)

    def _tidy(self, entry: Entry, identity: bytes) -> None:
        if identity not in entry.subscribers and identity not in entry.successors:
            self._entries[identity].discard(entry)
            if not self._entries[identity]:
                del self._entries[identity]


class Ledger:
    """The open requests (`open`) and the kept results of ended requests (`kept`), by key.

    `awaited`: the open entries that each connection waits for. `num_samples_left`: number of unfinished samples of open
    requests. `num_bytes_open`: estimated size of the content of open requests. `num_bytes_replied`: size of the replies
    of open requests.
    """

    def __init__(self, max_kept_results: int, max_kept_bytes: int) -> None:
        self.stats = ServiceStats()
        self.open: dict[str, Entry] = {}
        self.kept = KeptResults(max_kept_results, max_kept_bytes, self.stats)
        self.awaited = Awaited()
        self.num_samples_left = 0
        self.num_bytes_open = 0
        self.num_bytes_replied = 0

    def find(self, user: str | None, message: Generate | GetScores) -> Entry | None:
        """Return the entry with the message's id; None if the id is new.

        Raise IdConflictError if the entry has different content.
        """
        key = scoped(user, message.id)
        entry = self.open.get(key) or self.kept.get(key)
        if entry is not None and asked_by(entry.message, _NOBODY) != asked_by(message, _NOBODY):
            raise IdConflictError(
                f"id: {message.id!r} is in use for a request with different content; use a new id, or the same content",
                field="id",
                value=message.id,
            )
        return entry

    def add(self, user: str | None, message: Generate | GetScores, params: SamplingParams | None) -> Entry:
        """Open an entry for a request. The new entry replaces a kept entry with the same id."""
        key, num_samples = scoped(user, message.id), 1 if params is None else params.n
        entry = Entry(key, user, message, params, num_samples, num_bytes_of(message))
        self.kept.drop(entry.key)
        self.stats.accepted += 1
        self.num_samples_left += entry.num_unfinished
        self.num_bytes_open += entry.num_bytes_asked
        self.open[entry.key] = entry
        return entry

    def join(self, entry: Entry) -> None:
        """Count another submission of a known request, and mark the result as wanted."""
        self.stats.joined += 1
        entry.is_wanted = True

    def subscribe(self, entry: Entry, submission: Submission) -> None:
        """Add a submission to an entry. If the entry is open, the submission waits for the remaining replies."""
        if entry.key in self.open:
            entry.callers[submission.caller] += 1
            self.awaited.add(entry, entry.subscribers, submission)
        else:
            self.kept.remember(entry, submission.caller)

    def withdraw(self, key: str, caller: str) -> bool:
        """Remove `caller` from a request.

        Return False for an unknown request, and for an open request that has no waiting submissions left. If an open
        request has no waiting submissions left, the calling code must end the request.
        """
        if entry := self.open.get(key):
            self.awaited.withdraw(entry, caller)
            return bool(entry.subscribers or entry.successors)
        if entry := self.kept.get(key):
            self.kept.withdraw(entry, caller)
        return entry is not None

    def add_reply(self, entry: Entry, reply: bytes) -> None:
        """Store a reply of an open entry."""
        entry.replies.append(reply)
        entry.num_bytes_replied += len(reply)
        self.num_bytes_replied += len(reply)

    def most_replied(self) -> Entry:
        """Return the open entry with the most reply bytes; if several entries have the most bytes, return the entry
        that was opened last.
        """
        return max(reversed(self.open.values()), key=lambda entry: entry.num_bytes_replied)

    def begin_failure(self, entry: Entry, error: TruerollError) -> None:
        """Drop the replies of an open entry, which must end with `error`."""
        self.num_bytes_replied -= entry.num_bytes_replied
        entry.replies, entry.num_bytes_replied, entry.error = [], 0, error

    def end_sample(self, entry: Entry, reason: FinishReason) -> None:
        """Record that a sample or the score of an open entry has ended."""
        entry.finish_reasons[reason] += 1
        entry.num_unfinished -= 1
        self.num_samples_left -= 1

    def fail(self, key: str) -> None:
        """Close an open entry that ends without a result, and make its id available again."""
        self.stats.failed += 1
        self.num_samples_left -= self._close(key).num_unfinished

    def finish(self, key: str) -> None:
        """Close a finished entry, and keep the entry if its result is wanted."""
        entry = self._close(key)
        self.awaited.release(entry, entry.subscribers)
        self.stats.finished += 1
        if entry.is_wanted:
            self.kept.put(entry)

    def acknowledge(self, key: str) -> None:
        """Drop a kept result. An open request continues, but its result will not be kept. No-op for an unknown key."""
        self.kept.drop(key)
        if key in self.open:
            self.open[key].is_wanted = False

    def _close(self, key: str) -> Entry:
        entry = self.open.pop(key)
        self.num_bytes_open -= entry.num_bytes_asked
        self.num_bytes_replied -= entry.num_bytes_replied
        return entry


MAX_REMEMBERED = 1024


@dataclass(eq=False)
class _Known:
    """A known call.

    `content`: hash of the call; the call itself may be long, so it is not stored. `callers`: identities of the
    connections that wait for the reply. `reply`: None while the call is pending.
    """

    id: str
    content: int
    callers: list[bytes] = field(default_factory=list)
    reply: bytes | None = None


class Calls:
    """Calls by key. The key of a call is the call's id, or a combination of user and id.

    `send`: called with the identity of a client and a frame for the client. `most`: maximum number of pending calls;
    also the maximum number of clients that wait for the reply to the same call.
    """

    def __init__(self, send: Callable[[bytes, bytes], object], most: int) -> None:
        self._send = send
        self._most = most
        self._under_way: dict[str, _Known] = {}
        self._answered: OrderedDict[str, _Known] = OrderedDict()

    @property
    def under_way(self) -> tuple[str, ...]:
        """The keys of the pending calls."""
        return tuple(self._under_way)

    def is_new(self, key: str, identity: bytes, call: protocol.Call) -> bool:
        """Register a call. Return True if the call is new.

        After this method returns True, `answer` or `refuse` must be called for the new call.

        Return False for a copy of a known call. The client gets the reply to the known call, immediately or later.
        Raise IdConflictError if the key belongs to a different call. Raise QueueFullError if too many calls are
        pending, or if too many clients wait for this call.
        """
        content = hash(call)
        known = self._under_way.get(key) or self._answered.get(key)
        if known is None:
            self._check_room(len(self._under_way))
            self._under_way[key] = _Known(call.id, content, [identity])
            return True
        if known.content != content:
            raise IdConflictError(
                f"id: {call.id!r} is in use for a different call; use a new id, or send the same call",
                field="id",
                value=call.id,
            )
        if known.reply is None:
            self._check_room(len(known.callers))
            known.callers.append(identity)
        else:
            self._send(identity, known.reply)
        return False

    def refuse(self, key: str, error: TruerollError) -> None:
        """End a pending call with an error."""
        self.answer(key, protocol.error_message(self._under_way[key].id, error))

    def answer(self, key: str, reply: protocol.FromWorker) -> None:
        """End a pending call with a reply."""
        known = self._under_way.pop(key)
        known.reply = protocol.encode(reply)
        for identity in known.callers:
            self._send(identity, known.reply)
        known.callers.clear()
        self._answered[key] = known
        if len(self._answered) > MAX_REMEMBERED:
            self._answered.popitem(last=False)

    def _check_room(self, found: int) -> None:
        if found >= self._most:
            text = (
                f"calls: too many pending calls or clients of one call ({found}, limit {self._most}); wait for replies"
            )
            raise QueueFullError(text, value=found + 1, limit=self._most)
