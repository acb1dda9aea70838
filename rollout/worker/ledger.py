"""The worker's record of requests and calls: what makes submission idempotent and results survive a lost connection.

`Ledger` owns which request ids of which users are in use, for which content, what waits for them, and what was replied
so far. It holds replies as encoded frames and sends none. `Calls` owns which calls that have one reply each are under
way, which clients sent them, and the last replies given, for callers that lost theirs. Not owned here: sockets, the
engine, what a call does, or the decision to accept.

Promises: an id stands for one content for as long as it is known, and each user has ids of its own. An open entry is
never dropped. Finished entries are kept, in the order in which they finished, until acknowledged or until the bounds
push the oldest out. What was aborted goes only to callers that had asked for it by then. What a connection waits for is
found without a look at anything else. A call that is sent again, as after a reconnect, is done once and answered each
time that it was sent, as long as it is under way or its reply is among the last `MAX_REMEMBERED`; under the id of
another call it is refused.
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
    """The name of a user's id among those of all users. A user's name has no slash in it."""
    return id if user is None else f"{user}/{id}"


def salt_of(user: str | None, cache_salt: str | None) -> str | None:
    """The salt that a request is computed with, for the one that it asks for.

    Without one of its own, a user's requests share prefixes with each other alone, and no other user can name the salt
    that they share them by. One that users agree on lets them share.
    """
    if user is None:
        return cache_salt
    return f"user:{user}" if cache_salt is None else f"named:{cache_salt}"


FIXED_BYTES = 4096
"""Of a request beside its tokens."""
INT_BYTES = 36
"""Of a number in memory, with its place in a tuple."""
SPAN_BYTES = 256
"""Of a span in memory."""
NAME_BYTES = 256
"""Of a submission that waits, or of a caller that is remembered, beside its name."""
STREAM_BYTES = 256
"""Of each sample that a submission which waits wants deltas of."""


def num_bytes_of(message: Generate | GetScores) -> int:
    """What the content of a request takes, about: its tokens as bytes, and as an array."""
    beside = FIXED_BYTES + SPAN_BYTES * len(message.spans)
    if isinstance(message, GetScores):
        return beside + _text_bytes(message.id, message.cache_salt) + 2 * len(message.token_ids)
    params = message.params
    num_bytes = beside + 2 * len(message.prompt_token_ids) + INT_BYTES * len(params.stop_token_ids)
    return num_bytes + _text_bytes(message.id, params.cache_salt, *params.stop)


def num_bytes_to_name(caller: str | None) -> int:
    """What it takes to remember `caller`, about."""
    return NAME_BYTES + _text_bytes(caller)


def num_streamed_by(message: Generate | GetScores) -> int:
    """The samples of which a submission wants deltas."""
    return message.params.n if isinstance(message, Generate) and message.deltas else 0


def asked_by(message: Generate | GetScores, caller: str | None, deltas: bool) -> Generate | GetScores:
    """A request as `caller` asks for it; what is equal then is the same request."""
    if isinstance(message, Generate):
        return message.model_copy(update={"caller": caller, "deltas": deltas})
    return message.model_copy(update={"caller": caller})


def _text_bytes(*texts: str | None) -> int:
    """At most, as they may be kept as UTF-8 too: `sys.getsizeof` would tell another number once they are."""
    return sum(len(text) if text.isascii() else 8 * len(text) for text in texts if text)


class Submission(NamedTuple):
    """Whom replies are sent to: the identity of a connection, and the caller behind it. `num_streamed`: the samples of
    which deltas are wanted.
    """

    identity: bytes
    caller: str | None
    num_streamed: int = 0

    @property
    def num_bytes(self) -> int:
        """What it takes while it waits, about."""
        return num_bytes_to_name(self.caller) + STREAM_BYTES * self.num_streamed


class Submissions:
    """The waiting submissions of one request, by connection. `num_bytes`: what they take, about."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, list[Submission]] = {}
        self._count = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Submission]:
        """As they are now, whatever changes meanwhile."""
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
        """Remove the submissions by `caller`."""
        for identity, waiting in list(self._waiting.items()):
            if any(submission.caller == caller for submission in waiting):
                for submission in self.take(identity):
                    if submission.caller != caller:
                        self.add(submission)


@dataclass(eq=False)
class Entry:
    """One request: its content as submitted, the submissions that wait for it, and the frames sent for it so far, in
    order.

    `key`: its name among the requests of all users; `user`: the one that made it. `subscribers` has one for each
    submission, as each is owed its own replies. `params` are as resolved, None for a score. `num_unfinished` counts
    samples still to come. `num_bytes_asked`: of the content. `callers`: all that asked for it, and of an open one how
    many submissions of each wait; `num_aborts`: aborts that the engine has not answered. `successors`: submissions that
    came after an abort, are not to get what it ends, and are submitted anew once it has ended. `is_wanted`: whether to
    keep its result once it has ended.
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
        """What its content, its replies and its callers take, about."""
        return self.num_bytes_asked + sum(map(len, self.replies)) + sum(map(num_bytes_to_name, self.callers))

    @property
    def is_aborted(self) -> bool:
        """Whether some of it was aborted, or is to be."""
        return (self.num_aborts > 0 and self.num_unfinished > 0) or self.finish_reasons["abort"] > 0

    def serves(self, caller: str | None) -> bool:
        """Whether a submission by `caller` may join: an abort is only for callers that had asked before it came."""
        return caller in self.callers or not self.is_aborted

    @property
    def num_bytes_waiting(self) -> int:
        """What the submissions that wait for it take, about."""
        return self.subscribers.num_bytes + self.successors.num_bytes

    def withdraw(self, caller: str) -> None:
        """`caller` waits no more."""
        del self.callers[caller]
        self.subscribers.withdraw(caller)
        self.successors.withdraw(caller)
        self.is_wanted = self.is_wanted and bool(self.subscribers)

    def lose(self, identity: bytes) -> None:
        """A connection is gone. Should its callers come back, what was aborted meanwhile is not for them."""
        for submission in self.subscribers.take(identity):
            self.callers[submission.caller] -= 1
            if not self.callers[submission.caller]:
                del self.callers[submission.caller]
        self.successors.take(identity)


@dataclass
class ServiceStats:
    """Lifetime counters of requests: `accepted` ones, `joined` ones that named a request already known, `finished` and
    `failed` (answered with an error) ones of the accepted, and kept results `dropped` for want of room.
    """

    accepted: int = 0
    joined: int = 0
    finished: int = 0
    failed: int = 0
    dropped: int = 0


class KeptResults:
    """Entries that have ended, by key, in the order in which they did: at most `max_results` with `max_bytes` in all,
    of which the oldest give way. `num_bytes`: what they take, about.
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
        """The entry of a key, if it is kept."""
        return self._entries.get(key)

    def put(self, entry: Entry) -> None:
        """Keep one more."""
        self._entries[entry.key] = entry
        self.num_bytes += entry.num_bytes
        self._push_out()

    def remember(self, entry: Entry, caller: str | None) -> None:
        """Note that `caller`, too, has got the replies of a kept entry."""
        if caller not in entry.callers:
            entry.callers[caller] = 1
            self.num_bytes += num_bytes_to_name(caller)
            self._push_out()

    def withdraw(self, entry: Entry, caller: str) -> None:
        """`caller` wants nothing more of a kept entry, which is dropped if it was the last."""
        if entry.callers.pop(caller, None):
            self.num_bytes -= num_bytes_to_name(caller)
        if not entry.callers:
            self.drop(entry.key)

    def drop(self, key: str) -> None:
        """Drop an entry, if it is kept."""
        if (entry := self._entries.pop(key, None)) is not None:
            self.num_bytes -= entry.num_bytes

    def _push_out(self) -> None:
        while len(self._entries) > self._max_results or self.num_bytes > self._max_bytes:
            self.drop(next(iter(self._entries)))
            self._stats.dropped += 1


class Awaited:
    """Which open entries each connection waits for. `num_bytes`: what the submissions take, about."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._entries: defaultdict[bytes, set[Entry]] = defaultdict(set)

    def add(self, entry: Entry, submissions: Submissions, submission: Submission) -> None:
        """A submission waits among those of an entry."""
        submissions.add(submission)
        self.num_bytes += submission.num_bytes
        self._entries[submission.identity].add(entry)

    def release(self, entry: Entry, submissions: Submissions) -> list[Submission]:
        """The entry's subscribers or successors, which wait no more."""
        released = list(submissions)
        self.num_bytes -= submissions.num_bytes
        for submission in released:
            submissions.take(submission.identity)
            self._tidy(entry, submission.identity)
        return released

    def lose(self, identity: bytes) -> list[Entry]:
        """A connection gets no more replies. Return the entries that no submission waits for any more."""
        lost = list(self._entries.pop(identity, ()))
        for entry in lost:
            before = entry.num_bytes_waiting
            entry.lose(identity)
            self.num_bytes += entry.num_bytes_waiting - before
        return [entry for entry in lost if not entry.subscribers and not entry.successors]

    def withdraw(self, entry: Entry, caller: str) -> None:
        """`caller` waits for an entry no more."""
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
    """Requests by key: `open` ones, and `kept` ones that have ended. `awaited`: which connections wait for which of the
    open ones. `num_samples_left`: the samples of open requests that are still to come. `num_bytes_open`: what the
    content of open requests takes, about.
    """

    def __init__(self, max_kept_results: int, max_kept_bytes: int) -> None:
        self.stats = ServiceStats()
        self.open: dict[str, Entry] = {}
        self.kept = KeptResults(max_kept_results, max_kept_bytes, self.stats)
        self.awaited = Awaited()
        self.num_samples_left = 0
        self.num_bytes_open = 0

    def find(self, user: str | None, message: Generate | GetScores) -> Entry | None:
        """The entry of the same request submitted before, None if the id is new. Raises IdConflictError."""
        key = scoped(user, message.id)
        entry = self.open.get(key) or self.kept.get(key)
        if entry is not None and asked_by(entry.message, None, False) != asked_by(message, None, False):
            raise IdConflictError(
                f"id: {message.id!r} is in use for a request with other content; expected a new id, or the same "
                "content",
                field="id",
                value=message.id,
            )
        return entry

    def add(self, user: str | None, message: Generate | GetScores, params: SamplingParams | None) -> Entry:
        """Open an entry for a new id, or in the place of a kept one."""
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
        """A submission gets the replies of an entry: of an open one those to come, too."""
        if entry.key in self.open:
            entry.callers[submission.caller] += 1
            self.awaited.add(entry, entry.subscribers, submission)
        else:
            self.kept.remember(entry, submission.caller)

    def withdraw(self, key: str, caller: str) -> bool:
        """`caller` wants nothing more of a request. Returns whether that is all there is to do."""
        if entry := self.open.get(key):
            self.awaited.withdraw(entry, caller)
            return bool(entry.subscribers)
        if entry := self.kept.get(key):
            self.kept.withdraw(entry, caller)
        return entry is not None

    def end_sample(self, entry: Entry, reason: FinishReason) -> None:
        """One sample (or the score) of an open entry has ended."""
        entry.finish_reasons[reason] += 1
        entry.num_unfinished -= 1
        self.num_samples_left -= 1

    def fail(self, key: str) -> None:
        """Close an open entry that gets no result; its id is free again."""
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
        """Drop a kept result. An open request goes on, but its result will not be kept. An unknown key changes
        nothing.
        """
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
    """`content`: the hash of a call, which may be long. `callers`: the connections that wait. `reply`: None until there
    is one.
    """

    id: str
    content: int
    callers: list[bytes] = field(default_factory=list)
    reply: bytes | None = None


class Calls:
    """Calls by key, which is their id, or that with its user. `send` is called with a caller's identity and the frame
    for it. No more than `most` may be under way at a time, nor wait for the reply of one.
    """

    def __init__(self, send: Callable[[bytes, bytes], object], most: int) -> None:
        self._send = send
        self._most = most
        self._under_way: dict[str, _Known] = {}
        self._answered: OrderedDict[str, _Known] = OrderedDict()

    @property
    def under_way(self) -> tuple[str, ...]:
        """The keys of the calls that have no reply yet."""
        return tuple(self._under_way)

    def is_new(self, key: str, identity: bytes, call: protocol.Call) -> bool:
        """Take a call; `answer` is due for it. False if it was sent before, and its reply with that, now or later.

        Raises IdConflictError if its key is another call's, QueueFullError if there are too many.
        """
        content = hash(call)
        known = self._under_way.get(key) or self._answered.get(key)
        if known is None:
            self._check_room(len(self._under_way))
            self._under_way[key] = _Known(call.id, content, [identity])
            return True
        if known.content != content:
            raise IdConflictError(
                f"id: {call.id!r} is in use for another call; expected a new id, or the same call again",
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
        """End a call that is under way with an error."""
        self.answer(key, protocol.error_message(self._under_way[key].id, error))

    def answer(self, key: str, reply: protocol.FromWorker) -> None:
        """End a call that is under way."""
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
            text = f"calls: found {found} of at most {self._most} under way; wait for their replies"
            raise QueueFullError(text, value=found + 1, limit=self._most)
