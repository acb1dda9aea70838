"""What a worker asks of a new request before it takes it. Pure: raises, and changes nothing."""

from __future__ import annotations

from typing import NamedTuple

from trueroll.errors import InvalidRequestError, QueueFullError, UnavailableError

from ...engine.request import check_length
from ..config import WorkerConfig
from ..protocol import Generate, GetScores, State
from .ledger import Entry, Ledger, Submission, num_bytes_of
from .waiting_room import serves, too_old

MOST_CALLERS = 1024
"""Who may ask for the same request by different names."""


class Conditions(NamedTuple):
    """How a worker stands, as far as it matters to a new request. `takes_requests`: the engine may be given one now.
    `version`: of the weights in use, and `max_model_len`, in tokens; None until the model has loaded.
    """

    state: State
    is_ending: bool
    takes_requests: bool
    version: int | None
    max_model_len: int | None


def check_admission(
    message: Generate | GetScores, conditions: Conditions, config: WorkerConfig, ledger: Ledger
) -> None:
    """Raise UnavailableError, InvalidRequestError, QueueFullError or StaleWeightsError unless it may come in."""
    _check_state(conditions, config)
    num_samples = message.params.n if isinstance(message, Generate) else 1
    if num_samples > config.max_n:
        text = f"n: expected at most max_n = {config.max_n}, found {num_samples}"
        raise InvalidRequestError(text, field="n", value=num_samples, limit=config.max_n)
    _check_limit(config, "max_queued_requests", len(ledger.open), 1)
    _check_limit(config, "max_queued_samples", ledger.num_samples_left, num_samples)
    _check_limit(config, "max_queued_bytes", ledger.num_bytes_open, num_bytes_of(message))
    if conditions.takes_requests and (version := conditions.version) is not None:
        if not (message.wait_for_weights or serves(message, version)):
            raise too_old(message, version)
    if conditions.max_model_len is not None:
        check_length(*_length(message), conditions.max_model_len)


def check_joining(entry: Entry, submission: Submission, config: WorkerConfig, ledger: Ledger) -> None:
    """Raise QueueFullError unless one more may ask for a known request."""
    is_open = entry.key in ledger.open
    if is_open and len(entry.subscribers) >= (most := config.max_queued_requests):
        raise _too_many("who wait for", entry, most)
    if len(entry.callers) + (submission.caller not in entry.callers) > MOST_CALLERS:
        raise _too_many("callers of", entry, MOST_CALLERS)
    if is_open:
        _check_room_to_wait(submission, config, ledger)


def check_succession(entry: Entry, submission: Submission, config: WorkerConfig, ledger: Ledger) -> None:
    """Raise QueueFullError unless one more may wait for the end of an open request."""
    if len(entry.successors) >= (most := config.max_queued_requests):
        raise _too_many("who wait for the end of", entry, most)
    _check_room_to_wait(submission, config, ledger)


def _check_room_to_wait(submission: Submission, config: WorkerConfig, ledger: Ledger) -> None:
    """For what is known already there is room of its own, as whoever lost a connection asks again."""
    more, of = submission.num_bytes, " for who waits for known requests"
    _check_limit(config, "max_queued_bytes", ledger.awaited.num_bytes, more, of)


def _too_many(which: str, entry: Entry, most: int) -> QueueFullError:
    return QueueFullError(
        f"queue: expected at most {most} {which} {entry.message.id!r}, found so many already; try again later",
        value=most + 1,
        limit=most,
    )


def _check_state(conditions: Conditions, config: WorkerConfig) -> None:
    state = conditions.state
    if conditions.is_ending or state == "failed":
        raise UnavailableError(f"worker: found state {state}, in which it ends; use another worker", value=state)
    if config.while_unavailable == "reject" and state not in ("loading", "ready"):
        raise UnavailableError(
            f"worker: expected state ready, found {state}; try again later, or start the worker with "
            "while_unavailable = queue",
            value=state,
        )


def _check_limit(config: WorkerConfig, limit: str, held: int, more: int, of: str = "") -> None:
    if held + more > (most := getattr(config, limit)):
        raise QueueFullError(
            f"queue: holds {held} of {limit} = {most}{of}, no room for {more} more; wait for results and try again",
            field=limit,
            value=held + more,
            limit=most,
        )


def _length(message: Generate | GetScores) -> tuple[str, int, int]:
    """The field with the prompt, its tokens, and how many may follow."""
    if isinstance(message, GetScores):
        return "token_ids", len(message.token_ids) // 4, 0
    num_new = 1 if (most := message.params.max_tokens) is None else most
    return "prompt_token_ids", len(message.prompt_token_ids) // 4, num_new
