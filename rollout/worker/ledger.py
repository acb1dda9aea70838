"""The worker's record of requests and calls. It makes submission idempotent; results survive a lost connection.

`Ledger` owns the request ids of all users: the content behind each id, the submissions that wait for it, and the
replies so far. It holds replies as encoded frames and sends none. `Calls` owns the pending calls that have one reply
each, the clients that sent them, and the last replies, for clients that have lost theirs. Does not own: sockets, the
engine, the effect of a call, or the decision to accept.

Promises:

- An id stands for one content for as long as it is known. Each user has ids of its own.
- An open entry is never dropped. Finished entries are kept, in the order in which they finished, until they are
  acknowledged or the limits evict the oldest.
- Aborted results go only to callers that had asked for them before the abort.
- The entries that a connection waits for are found without a search through others.
- A call that is sent again, for example after a reconnect, is done once and answered each time that it was sent, while
  it is pending or its reply is among the last `MAX_REMEMBERED`. A different call with the same id is refused.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from trueroll.errors import IdConflictError, QueueFullError, TruerollError

from ...engine.request import FinishReason, SamplingParams
from .. import protocol
from ..protocol import Generate, GetScores


def scoped(user: str | None, id: str) -> str:
    """Return the key of a user's id among the ids of all users. A user name has no slash in it."""
    return id if user is None else f"{user}/{id}"


def salt_of(user: str | None, cache_salt: str | None) -> str | None:
    """Return the salt with which a request is computed.

    Without a salt of its own, the requests of a user share prefixes only with each other, under a salt that no other
    user can name. With the same `cache_salt`, users share prefixes with each other.
    """
    if user is None:
        return cache_salt
    return f"user:{user}" if cache_salt is None else f"named:{cache_salt}"


FIXED_BYTES = 4096
"""Estimated size of a request without its tokens."""
INT_BYTES = 36
"""Estimated size of a number in memory, with its place in a tuple."""
SPAN_BYTES = 256
"""Estimated size of a span in memory."""
NAME_BYTES = 256
"""Estimated size of a waiting submission, or of a remembered caller, without its name."""
STREAM_BYTES = 256
"""Estimated size of the stream of one sample for one submission."""


def num_bytes_of(message: Generate | GetScores) -> int:
    """Return the estimated size of a request's content in bytes: its tokens, as bytes and as an array, and the rest."""
    beside = FIXED_BYTES + SPAN_BYTES * len(message.spans)
    if isinstance(message, GetScores):
        return beside + _text_bytes(message.id, message.cache_salt) + 2 * len(message.token_ids)
    params = message.params
    num_bytes = beside + 2 * len(message.prompt_token_ids) + INT_BYTES * len(params.stop_token_ids)
    return num_bytes + _text_bytes(message.id, params.cache_salt, *params.stop)


def num_bytes_to_name(caller: str | None) -> int:
    """Return the estimated number of bytes that it takes to remember `caller`."""
    return NAME_BYTES + _text_bytes(caller)


def num_streamed_by(message: Generate | GetScores) -> int:
    """Return the number of samples for which a submission wants deltas."""
    return message.params.n if isinstance(message, Generate) and message.deltas else 0


def asked_by(message: Generate | GetScores, caller: str | None, deltas: bool) -> Generate | GetScores:
    """Return a request as `caller` submits it. Two submissions of the same request are then equal."""
    if isinstance(message, Generate):
        return message.model_copy(update={"caller": caller, "deltas": deltas})
    return message.model_copy(update={"caller": caller})


def _text_bytes(*texts: str | None) -> int:
    """Return a limit on the texts' size. `sys.getsizeof` would give more once a text is also stored as UTF-8."""
    return sum(len(text) if text.isascii() else 8 * len(text) for text in texts if text)


class Submission(NamedTuple):
    """A recipient of replies: the identity of a connection, and the caller behind it.

    `num_streamed`: number of samples for which it wants deltas.
    """

    identity: bytes
    caller: str | None
    num_streamed: int = 0

    @property
    def num_bytes(self) -> int:
        """Estimated number of bytes that it takes while it waits."""
        return num_bytes_to_name(self.caller) + STREAM_BYTES * self.num_streamed


class Submissions:
    """The waiting submissions of one request, by connection. `num_bytes`: their estimated size."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, list[Submission]] = {}
        self._count = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Submission]:
        """Iterate over a copy, so that submissions may change meanwhile."""
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
    """One request: its content as submitted, the submissions that wait for it, and the frames sent for it so far.

    - `key`: its key among the requests of all users. `user`: the user that made it.
    - `params`: resolved parameters; None for a score.
    - `num_unfinished`: number of samples still to come. `num_bytes_asked`: estimated size of the content.
    - `subscribers`: one for each submission, since each gets replies of its own.
    - `callers`: all callers that asked for it. For an open entry, with the number of waiting submissions of each.
    - `replies`: frames so far, in order.
    - `num_aborts`: number of aborts that the engine has not answered yet.
    - `successors`: submissions that came after an abort. They do not get what it ends, and are submitted again once the
      entry has ended.
    - `is_wanted`: keep the result once the entry has ended.
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
    finish_reasons: Counter[FinishReason] = field(default_factory=Counter)
    num_aborts: int = 0
    successors: Submissions = field(default_factory=Submissions)
    is_wanted: bool = True

    @property
    def num_bytes(self) -> int:
        """Estimated size of its content, its replies and its callers."""
        return self.num_bytes_asked + sum(map(len, self.replies)) + sum(map(num_bytes_to_name, self.callers))

    @property
    def is_aborted(self) -> bool:
        """Return whether some of it was aborted, or will be."""
        return (self.num_aborts > 0 and self.num_unfinished > 0) or self.finish_reasons["abort"] > 0

    def serves(self, caller: str | None) -> bool:
        """Return whether a submission by `caller` may join. After an abort only earlier callers may."""
        return caller in self.callers or not self.is_aborted

    @property
    def num_bytes_waiting(self) -> int:
        """Estimated size of the submissions that wait for it."""
        return self.subscribers.num_bytes + self.successors.num_bytes

    def withdraw(self, caller: str) -> None:
        """Remove `caller`, which does not wait any more."""
        del self.callers[caller]
        self.subscribers.withdraw(caller)
        self.successors.withdraw(caller)
        self.is_wanted = self.is_wanted and bool(self.subscribers)

    def lose(self, identity: bytes) -> None:
        """Remove a lost connection. If its callers come back, results aborted meanwhile are not for them."""
        for submission in self.subscribers.take(identity):
            self.callers[submission.caller] -= 1
            if not self.callers[submission.caller]:
                del self.callers[submission.caller]
        self.successors.take(identity)


@dataclass
class ServiceStats:
    """Lifetime counters of requests.

    `accepted`: accepted requests. `joined`: submissions of a known request. `finished`, `failed`: accepted requests
    that have finished, or were answered with an error. `dropped`: kept results that were dropped for lack of room.
    """

    accepted: int = 0
    joined: int = 0
    finished: int = 0
    failed: int = 0
    dropped: int = 0


class KeptResults:
    """Ended entries, by key, in the order in which they ended. Evicts the oldest.

    Holds at most `max_results` entries with `max_bytes` in all. `num_bytes`: their estimated size.
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
        """Note that `caller` has also received the replies of a kept entry."""
        if caller not in entry.callers:
            entry.callers[caller] = 1
            self.num_bytes += num_bytes_to_name(caller)
            self._push_out()

    def withdraw(self, entry: Entry, caller: str) -> None:
        """Remove `caller` from a kept entry, and drop the entry if it was the last caller."""
        if entry.callers.pop(caller, None):
            self.num_bytes -= num_bytes_to_name(caller)
        if not entry.callers:
            self.drop(entry.key)

    def drop(self, key: str) -> None:
        """Drop the entry with this key. No-op if it is not kept."""
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
        """Remove and return an entry's subscribers or successors, which wait no more."""
        released = list(submissions)
        self.num_bytes -= submissions.num_bytes
        for submission in released:
            submissions.take(submission.identity)
            self._tidy(entry, submission.identity)
        return released

    def lose(self, identity: bytes) -> list[Entry]:
        """Remove a lost connection. Return the entries for which no submission waits any more."""
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
    """Requests by key: `open` ones, and `kept` ones that have ended.

    `awaited`: the open entries that each connection waits for. `num_samples_left`: number of unfinished samples of open
    requests. `num_bytes_open`: estimated size of the content of open requests.
    """

    def __init__(self, max_kept_results: int, max_kept_bytes: int) -> None:
        self.stats = ServiceStats()
        self.open: dict[str, Entry] = {}
        self.kept = KeptResults(max_kept_results, max_kept_bytes, self.stats)
        self.awaited = Awaited()
        self.num_samples_left = 0
        self.num_bytes_open = 0

    def find(self, user: str | None, message: Generate | GetScores) -> Entry | None:
        """Return the entry of the same request; None if the id is new. Raise IdConflictError for other content."""
        key = scoped(user, message.id)
        entry = self.open.get(key) or self.kept.get(key)
        if entry is not None and asked_by(entry.message, None, False) != asked_by(message, None, False):
            raise IdConflictError(
                f"id: {message.id!r} is in use for a request with other content; use a new id, or the same content",
                field="id",
                value=message.id,
            )
        return entry

    def add(self, user: str | None, message: Generate | GetScores, params: SamplingParams | None) -> Entry:
        """Open an entry for a new id, or instead of a kept entry."""
        key, num_samples = scoped(user, message.id), 1 if params is None else params.n
        entry = Entry(key, user, message, params, num_samples, num_bytes_of(message))
        self.kept.drop(entry.key)
        self.stats.accepted += 1
        self.num_samples_left += entry.num_unfinished
        self.num_bytes_open += entry.num_bytes_asked
        self.open[entry.key] = entry
        return entry

    def join(self, entry: Entry) -> None:
        """Count one more submission of a known request."""
        self.stats.joined += 1
        entry.is_wanted = True

    def subscribe(self, entry: Entry, submission: Submission) -> None:
        """Add a submission that gets the replies of an entry, including those to come if it is open."""
        if entry.key in self.open:
            entry.callers[submission.caller] += 1
            self.awaited.add(entry, entry.subscribers, submission)
        else:
            self.kept.remember(entry, submission.caller)

    def withdraw(self, key: str, caller: str) -> bool:
        """Remove `caller` from a request. Return whether nothing else is left to do."""
        if entry := self.open.get(key):
            self.awaited.withdraw(entry, caller)
            return bool(entry.subscribers)
        if entry := self.kept.get(key):
            self.kept.withdraw(entry, caller)
        return entry is not None

    def end_sample(self, entry: Entry, reason: FinishReason) -> None:
        """Note that one sample (or the score) of an open entry has ended."""
        entry.finish_reasons[reason] += 1
        entry.num_unfinished -= 1
        self.num_samples_left -= 1

    def fail(self, key: str) -> None:
        """Close an open entry that gets no result. Its id is free again."""
        self.stats.failed += 1
        self.num_samples_left -= self._close(key).num_unfinished

    def finish(self, key: str) -> None:
        """Close an open entry that has its result, and keep it if it is wanted."""
        entry = self._close(key)
        self.awaited.release(entry, entry.subscribers)
        self.stats.finished += 1
        if entry.is_wanted:
            self.kept.put(entry)

    def acknowledge(self, key: str) -> None:
        """Drop a kept result. An open request goes on, but its result will not be kept. No-op for an unknown key."""
        self.kept.drop(key)
        if key in self.open:
            self.open[key].is_wanted = False

    def _close(self, key: str) -> Entry:
        entry = self.open.pop(key)
        self.num_bytes_open -= entry.num_bytes_asked
        return entry


MAX_REMEMBERED = 1024


@dataclass(eq=False)
class _Known:
    """A known call. `content`: hash of the call, which may be long. `callers`: connections that wait for the reply.
    `reply`: None while the call is pending.
    """

    id: str
    content: int
    callers: list[bytes] = field(default_factory=list)
    reply: bytes | None = None


class Calls:
    """Calls by key, which is their id or a combination of user and id.

    `send`: called with the identity of a client and a frame for it. `most`: limit on pending calls, and on the clients
    that wait for the reply of one call.
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
        """Take a call. Return True if the caller of this method must `answer` it.

        Return False if it was sent before: its client gets the same reply, now or later. Raise IdConflictError if the
        key belongs to another call, and QueueFullError if too many calls are pending.
        """
        content = hash(call)
        known = self._under_way.get(key) or self._answered.get(key)
        if known is None:
            self._check_room(len(self._under_way))
            self._under_way[key] = _Known(call.id, content, [identity])
            return True
        if known.content != content:
            raise IdConflictError(
                f"id: {call.id!r} is in use for another call; use a new id, or send the same call",
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
            text = f"calls: {found} are pending (limit {self._most}); wait for their replies"
            raise QueueFullError(text, value=found + 1, limit=self._most)
