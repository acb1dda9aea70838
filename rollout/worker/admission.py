"""Decides whether the worker accepts a request, or another submission of a known request. Changes no state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from trueroll.errors import (
    InvalidRequestError,
    QueueFullError,
    StaleWeightsError,
    UnavailableError,
)

from ...engine.request import check_length
from ..config import WorkerConfig
from ..protocol import Generate, GetScores, State, bytes_to_tokens
from .ledger import Entry, Ledger, Submission, num_bytes_of

MOST_CALLERS = 1024
"""Maximum number of callers that can submit the same request."""


class Versions(NamedTuple):
    """The versions of the weights that a worker serves: of the base weights, and of each named adapter."""

    base: int
    adapters: Mapping[str, int]

    def of(self, message: Generate | GetScores) -> int | None:
        """Return the version of the weights that a request asks for; None if the request's adapter is not loaded."""
        return self.base if message.adapter is None else self.adapters.get(message.adapter)


class Conditions(NamedTuple):
    """The parts of the worker's state that determine the admission of a request.

    `takes_requests`: whether the engine accepts requests now. `versions`: None until the model has loaded.
    """

    state: State
    is_ending: bool
    takes_requests: bool
    versions: Versions | None


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
    if conditions.takes_requests and (versions := conditions.versions) is not None:
        if not (message.wait_for_weights or serves(message, versions)):
            raise too_old(message, versions)
    if max_model_len is not None:
        check_length(*_length(message), max_model_len)
    if isinstance(message, GetScores):
        targets_of(message)


def targets_of(message: GetScores) -> np.ndarray | None:
    """Return the target token ids of a score request, int32 [num_tokens - start, K]. Raise InvalidRequestError unless
    each token from `start` on has the same number of ids, at least 1.
    """
    if message.target_token_ids is None:
        return None
    ids, rows = bytes_to_tokens(message.target_token_ids), len(message.token_ids) // 4 - message.start
    if rows > 0 and len(ids) and len(ids) % rows == 0:
        return ids.reshape(rows, -1)
    raise InvalidRequestError(
        f"target_token_ids must have K ids for each of the {max(rows, 0)} tokens in token_ids[start:], with the same K "
        f"for all tokens (got {len(ids)} ids in total)",
        field="target_token_ids",
        value=len(ids),
    )


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
        raise _too_many("clients wait behind", entry, most)
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


def serves(message: Generate | GetScores, versions: Versions | None) -> bool:
    """Return whether the served weights are new enough for the request."""
    demanded, version = message.min_weight_version, None if versions is None else versions.of(message)
    return demanded is None or (version is not None and version >= demanded)


def too_old(message: Generate | GetScores, versions: Versions) -> StaleWeightsError:
    """Return the error for a request that demands newer weights than `versions`."""
    version = versions.of(message)
    served = "no version" if version is None else f"version {version}"
    of_adapter = "" if message.adapter is None else f" of adapter {message.adapter!r}"
    return StaleWeightsError(
        f"min_weight_version: the request needs version {message.min_weight_version} or later{of_adapter}, but the "
        f"worker serves {served} (a restarted worker has lost its pushes); push newer weights, or set wait_for_weights",
        field="min_weight_version",
        value=message.min_weight_version,
        limit=version,
    )
