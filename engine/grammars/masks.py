"""The grammars of an engine's requests: each grammar is tried before its request is admitted, and provides masks at
each step.

Only child processes load the tokenizer, and translate, compile and match grammars. One child tries new grammars, with
limits on time and memory. Another child process compiles the grammars that passed the trial, tracks the tokens of the
samples, and computes masks (`child`). One call computes all masks of a step; large masks take several calls
(`_MOST_CALL_BYTES`).

Guarantees: a grammar that takes too much time or memory, or crashes, ends only its own samples, with an error. If the
child process for masks dies, a spare child, which has already loaded the tokenizer, receives the tokens of the samples
again, so that no mask changes.
"""

from __future__ import annotations

import threading
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np

from trueroll.errors import InvalidRequestError, ModelError, UnavailableError

from ...kernels.contract import MASK_BITS
from ..models.child_process import ChildProcess
from ..models.files import MAX_TOKENIZER_BYTES, check_file
from ..models.trials import Limits
from .child import AGAIN, LOAD, MOST_TEMPLATES, LoadText, serve_masks, try_grammars
from .matching import GrammarError, TokenText, installed_version
from .source import Grammar

TRIAL = Limits(cpu_seconds=5, seconds=30, more_bytes=2**30)
"""The limits of a new grammar: to compile it and to compute its first mask."""
MORE_BYTES = 2**32
"""The address space that the child for masks may use beyond that of this process."""
STEP_SECONDS, ROW_SECONDS, TOKEN_SECONDS, COMPILE_SECONDS = 2.0, 0.001, 0.0001, 5.0
"""The time limit for the masks of a step, and the additional time for each mask and for each token that the child has
not seen. If a new child must first compile the grammar, the compilation also gets additional time. A token of JSON
takes about 0.02 ms.
"""
_MOST_CALL_BYTES = 2**23
"""The masks of one call have at most this size, which is far below `child_process.MAX_REPLY_BYTES`."""


@dataclass(eq=False)
class Prepared:
    """A grammar that a child process has tried. `lark`: the translated grammar. `fault`: the reason why the grammar
    cannot be used, or None.
    """

    number: int
    lark: str
    fault: str | None


@dataclass(eq=False)
class Place:
    """How far a sample, or the tokens of a score, have progressed in a text that a grammar restricts.

    `token_ids`: the tokens since the beginning of the text. `masks` (each int32 [ceil(V / 32)]): the masks that the
    last call of `fill`, `begin` or `fill_given` found. Places with equal masks may share an array. `error`: the reason
    why masks cannot be found, or None. After an error, `masks` allow no token. `num_told`: the number of tokens that
    the child process for masks has received. `wait`: waits for the call that finds `masks`; None if no call is in
    flight.
    """

    number: int
    ending_token_ids: list[int]
    token_ids: array[int]
    known: Prepared
    masks: list[np.ndarray] = field(default_factory=list)
    error: str | None = None
    num_told: int = 0
    wait: Callable[[], None] | None = None

    def next_mask(self) -> np.ndarray:
        """Return the mask of the next token. If `Grammars.begin` has asked for the mask, wait until it arrives."""
        if self.wait is not None:
            self.wait()
        return self.masks[0]


class _Asked(NamedTuple):
    """Masks to find for `place`: the mask of the token after the place's first `num_tokens` tokens, and the mask of the
    token after each of the `following` tokens.
    """

    place: Place
    num_tokens: int
    following: Sequence[int]


class Grammars:
    """The grammars of one engine. `folder`: the model's folder. Any thread may call `find` and `prepare`."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._path, self._vocab_size, self._eos = folder / "tokenizer.json", vocab_size, eos_token_ids
        self._numbers = count()
        self._known = weakref.WeakValueDictionary[Grammar, Prepared]()
        self._latest = OrderedDict[Grammar, Prepared]()
        self._places = weakref.WeakSet[Place]()
        self._ended = deque[int]()  # any thread may garbage-collect a `Place`
        self._lock, self._preparing, self._starting = threading.Lock(), threading.Lock(), threading.Lock()
        self._is_closed = False
        self._unread: Callable[[], None] | None = None  # waits for the call of `begin` that is in flight
        self._load: LoadText | None = None
        self._trial: ChildProcess | None = None
        self._child: ChildProcess | None = None
        self._spare: ChildProcess | None = None

    @property
    def is_used(self) -> bool:
        """Return whether a sample or score with a grammar is open."""
        return bool(self._places)

    def find(self, grammar: Grammar) -> Prepared | None:
        """Return the result of an earlier trial of the grammar; None if `prepare` must still try the grammar. A grammar
        remains known as long as a caller holds the result of `find`.
        """
        with self._lock:
            if (known := self._known.get(grammar)) is not None:
                self._remember(grammar, known)
            return known

    def prepare(self, grammar: Grammar) -> Prepared:
        """Compile a grammar in a trial process, and then in the process that computes masks. The limits in `TRIAL`
        bound the time of the trial. Return the object that `find` returns for this grammar from now on. Raise
        InvalidRequestError if the grammar is not supported, and UnavailableError if the system cannot start a process.
        """
        if (known := self.find(grammar)) is None:
            with self._preparing:
                if (known := self.find(grammar)) is None:  # else another thread has prepared it
                    known = self._try(grammar)
        if known.fault is not None:
            raise _refused(known.fault)
        return known

    def open(
        self, grammar: Grammar, ending_token_ids: Sequence[int], token_ids: Sequence[int], is_given: bool
    ) -> Place:
        """Return the place of a sample that begins with `token_ids`. If `is_given` is True, `token_ids` are tokens to
        score, and the grammar may exclude the last one. Raise the errors of `prepare`, and InvalidRequestError if the
        grammar excludes any other token of `token_ids`.
        """
        known = self.prepare(grammar)
        place = Place(next(self._numbers), [*ending_token_ids], array("i", token_ids), known)
        self._places.add(place)
        weakref.finalize(place, self._ended.append, place.number)
        if token_ids:
            self._fill([_Asked(place, len(token_ids) - is_given, ())])
            if place.error is not None:
                raise _refused(place.error)
        return place

    def fill(self, asked: Sequence[tuple[Place, Sequence[int]]]) -> None:
        """For each place in `asked`, find the mask of the token that comes after all tokens of the place. Also find the
        mask of the token after each token of the place's continuation, up to the first token of the continuation that
        the grammar excludes. `asked`: pairs of a place and its continuation.
        """
        self._fill_or_fail([_Asked(place, len(place.token_ids), following) for place, following in asked])

    def begin(self, places: Sequence[Place]) -> None:
        """For each place, begin to find the mask of the token that comes after all tokens of the place.
        `Place.next_mask` waits for the mask. If `next_mask` is not called, the next search for masks first waits for
        these masks.
        """
        asked = [_Asked(place, len(place.token_ids), ()) for place in places]
        if len(asked) > self._most_rows:
            self._fill_or_fail(asked)
            return
        with self._failing(asked):
            finish = self._begin(asked, is_alone=False)

            def wait() -> None:
                self._unread = None
                for place in places:
                    place.wait = None
                with self._failing(asked):
                    for each in finish()[0]:
                        self._fill_alone(each)

            self._unread = wait
            for place in places:
                place.wait = wait

    def fill_given(self, place: Place, first: int, end: int) -> None:
        """Find the masks with which tokens [first, end) of a place were drawn."""
        rows, found = self._most_rows, list[np.ndarray]()
        for start in range(first, end, rows):
            self._fill_or_fail([_Asked(place, start, place.token_ids[start : min(start + rows, end) - 1])])
            found += place.masks
        place.masks = found

    def close(self) -> None:
        """End the child processes. No call may follow. If `prepare` is running in another thread, that call of
        `prepare` ends soon after `close`.
        """
        with self._starting:
            self._is_closed = True
            for child in (self._trial, self._child, self._spare):
                if child is not None:
                    child.end()

    @property
    def _num_words(self) -> int:
        return -(-self._vocab_size // MASK_BITS)

    @property
    def _most_rows(self) -> int:
        return max(1, _MOST_CALL_BYTES * 8 // self._vocab_size)

    def _fill_or_fail(self, asked: list[_Asked]) -> None:
        """Find masks as `_fill` does. If the system cannot start a process, the samples of `asked` get an error, but
        the step goes on.
        """
        with self._failing(asked):
            self._fill(asked)

    @contextmanager
    def _failing(self, asked: list[_Asked]) -> Iterator[None]:
        """If UnavailableError is raised, set the error of each place."""
        try:
            yield
        except UnavailableError as error:
            for each in asked:
                self._fail(each, str(error))

    def _fill(self, asked: list[_Asked]) -> None:
        """Find masks. If a call for several places fails, make one call for each place."""
        for part in _parts(asked, self._most_rows):
            for each in self._compute(part, is_alone=False)[0]:
                self._fill_alone(each)

    def _fill_alone(self, asked: _Asked) -> None:
        """Find the masks of one place in a call of its own, so that only a grammar at fault is blamed for a failure."""
        known, asked.place.num_told = asked.place.known, 0
        if known.fault is None:
            left, known.fault = self._compute([asked], is_alone=True)
            assert not left or known.fault is not None, "a call with the grammar needs no other call"
        if known.fault is not None:
            self._fail(asked, known.fault)

    def _compute(self, asked: list[_Asked], is_alone: bool) -> tuple[list[_Asked], str | None]:
        """Find masks in one call. Return two values: the entries of `asked` that got no masks, because the call failed
        or the child was replaced; and the error of the call, or None. `is_alone`: whether `asked` has a single entry;
        the call then includes the translated grammar, so that a new child can compile the grammar.
        """
        return self._begin(asked, is_alone)()

    def _begin(self, asked: list[_Asked], is_alone: bool) -> Callable[[], tuple[list[_Asked], str | None]]:
        """Send the call of `_compute`, and return a function that waits for its result."""
        if self._unread is not None:
            self._unread()
        rows = [_row(each, is_alone) for each in asked if each.place.error is None]
        answer = self._begin_call(rows, _num_masks(asked), is_alone) if rows else lambda: (([], []), None)

        def finish() -> tuple[list[_Asked], str | None]:
            results, error = answer()
            return (asked, error) if error is not None else (self._put(asked, results), None)

        return finish

    def _put(self, asked: list[_Asked], results: Any) -> list[_Asked]:
        """Store the result of a call in the places. Return the entries of `asked` that the child did not know."""
        (rows, contents), left = results, list[_Asked]()
        masks, found = [np.frombuffer(each, np.int32) for each in contents], iter(rows)
        for each in asked:
            if each.place.error is not None:
                self._fail(each, each.place.error)
                continue
            places, fault = next(found)
            if fault == AGAIN:
                left.append(each)
            elif fault is not None:
                self._fail(each, fault)
            else:
                each.place.masks = [masks[place] for place in places]
                each.place.num_told = each.num_tokens
        return left

    def _begin_call(
        self, rows: list[tuple[Any, ...]], num_masks: int, is_alone: bool
    ) -> Callable[[], tuple[Any, str | None]]:
        """Send a call, and return a function that waits for the child's results for the rows, and for the error of the
        whole call.
        """
        num_new = sum(len(new) // 4 for *_, new, _ in rows)
        seconds = STEP_SECONDS + ROW_SECONDS * num_masks + TOKEN_SECONDS * num_new + COMPILE_SECONDS * is_alone
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        of_silence = f"a mask needs more than {STEP_SECONDS:.0f} s or {MORE_BYTES >> 20} MiB, or crashes"
        reply = self._send(1, _pack(ended, rows), seconds)
        return lambda: _read(reply(), of_silence)

    def _fail(self, asked: _Asked, fault: str) -> None:
        """Set the error of a place, and give the place masks that allow no token."""
        asked.place.error = fault
        asked.place.masks = [np.zeros(self._num_words, np.int32)] * (len(asked.following) + 1)

    def _remember(self, grammar: Grammar, known: Prepared) -> None:
        self._known[grammar] = self._latest[grammar] = known
        self._latest.move_to_end(grammar)
        if len(self._latest) > MOST_TEMPLATES:
            self._latest.popitem(last=False)

    def _try(self, grammar: Grammar) -> Prepared:
        """Try a new grammar, compile the grammar in the child for masks, and remember the result."""
        number, (lark, fault) = next(self._numbers), self._translated(grammar)
        if fault is None:
            # A second call, because another grammar may end the child during the first one.
            answers = (self._send(0, _pack(number, lark), TRIAL.seconds)() for _ in range(2))
            fault = _read(next(filter(None, answers), b""), _exceeds(TRIAL))[1]
        known = Prepared(number, lark, fault)
        with self._lock:
            self._remember(grammar, known)
        return known

    def _translated(self, grammar: Grammar) -> tuple[str, str | None]:
        """Return a grammar in llguidance's syntax, and the reason why the grammar cannot be used, or None."""
        try:
            trial = self._trial_child()
        except GrammarError as error:
            return "", str(error)
        reply = b"" if trial is None else trial.ask(_pack(asdict(grammar)), TRIAL.seconds)
        if not reply and trial is not None:
            trial.end()
            self._trial = None
        lark, error = _read(reply, _exceeds(TRIAL))
        return lark or "", error

    def _trial_child(self) -> ChildProcess | None:
        """Return the child that tries grammars, which has loaded the tokenizer; None after `close`. Raise GrammarError
        if the tokenizer cannot be loaded.
        """
        self._load = self._load or _loader(self._path, self._vocab_size, self._eos)
        with self._starting:
            if self._trial is None and not self._is_closed:
                self._trial = ChildProcess(partial(try_grammars, self._load, TRIAL))
            trial = self._trial
        if trial is not None and (error := _read(trial.greeting(LOAD.seconds), _exceeds(LOAD))[1]) is not None:
            trial.end()
            self._trial = None
            raise GrammarError(f"the tokenizer cannot be loaded: {error}")
        return trial

    def _send(self, pipe: int, message: bytes, seconds: float) -> Callable[[], bytes]:
        """Send a call to the child that computes masks, and return a function that waits for the reply. Start the child
        process if it is not running. If the reply is empty, end the child. The function and the returned function raise
        UnavailableError if no child can be started.
        """
        with self._starting:
            if self._child is None and not self._is_closed:
                self._replace_child()
            child = self._child
        if child is None:
            return lambda: b""
        is_ready = bool(child.greeting(LOAD.seconds, pipe=pipe))
        receive = child.begin(message, seconds, pipe=pipe) if is_ready else lambda: b""

        def reply() -> bytes:
            found = receive()
            if not found:
                with self._starting:
                    child.end()
                    is_current = self._child is child
                    self._child = None if is_current else self._child
                if is_current and not is_ready:
                    raise UnavailableError("the process that computes masks cannot load the tokenizer; try again")
            return found

        return reply

    def _replace_child(self) -> None:
        """Use the spare child for masks, or a new child if there is no spare; then start another spare."""
        assert self._load is not None
        work = partial(serve_masks, self._load, MORE_BYTES)
        has_spare = self._spare is not None and self._spare.is_alive
        self._child, self._spare = self._spare if has_spare else ChildProcess(work, num_pipes=2), None
        with suppress(UnavailableError):
            self._spare = ChildProcess(work, num_pipes=2)


def _pack(*call: Any) -> bytes:
    message: bytes = msgpack.Packer().pack(call)
    return message


def _row(asked: _Asked, is_alone: bool) -> tuple[Any, ...]:
    """Return one row of the argument `rows` of `_Masks.compute`."""
    place, num_tokens, following = asked
    if place.num_told > num_tokens:
        place.num_told = 0  # given tokens are computed again
    new = place.token_ids[place.num_told : num_tokens].tobytes()
    after = array("i", following).tobytes() if following else b""
    lark = place.known.lark if is_alone else None
    return place.number, place.known.number, lark, place.ending_token_ids, place.num_told, new, after


def _num_masks(asked: Sequence[_Asked]) -> int:
    return sum(len(each.following) + 1 for each in asked)


def _parts(asked: Sequence[_Asked], most: int) -> Iterator[list[_Asked]]:
    """Split `asked` into parts with at most `most` masks each. A place that needs more masks is a part of its own."""
    part, room = list[_Asked](), most
    for each in asked:
        if part and room < len(each.following) + 1:
            yield part
            part, room = [], most
        part.append(each)
        room -= len(each.following) + 1
    if part:
        yield part


def _exceeds(limits: Limits) -> str:
    return f"it needs more than {limits}, or crashes"


def _read(reply: bytes, of_silence: str) -> tuple[Any, str | None]:
    """Return the result and the error that a reply contains. `of_silence`: the error to return for an empty reply."""
    if not reply:
        return None, of_silence
    result, error = msgpack.unpackb(reply)
    return result, error


def _refused(fault: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs: {fault}", field="structured_outputs")


def _loader(path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LoadText:
    """Read the file of a tokenizer, and return a function that loads the text of the tokens. Raise GrammarError if the
    worker lacks llguidance or a valid file, and UnavailableError if the file cannot be read now.
    """
    if installed_version() is None:
        raise GrammarError("the worker lacks llguidance; install it with: pip install 'trueroll[grammar]'")
    if not path.is_file():
        raise GrammarError(f"the model has no {path.name}; use a model with a fast tokenizer")
    try:
        check_file(path, MAX_TOKENIZER_BYTES)
        tokenizer = path.read_bytes()
    except OSError as error:
        raise UnavailableError(f"structured_outputs: {path.name} cannot be read: {error}; try again") from None
    except ModelError as error:
        raise GrammarError(f"the tokenizer cannot be loaded: {error}") from None
    return lambda: TokenText(tokenizer.decode(), vocab_size, eos_token_ids)
