"""The maximum size of a reply in bytes, computed before the request runs.

The worker sends each sample or score as one message. The size of the message grows with the number of tokens and with
the records of each token, such as log-probs. So a single reply could exceed `max_unread_bytes`, the limit on replies
that clients have not read yet. A request with a reply that could exceed the limit is refused. The error names the size
of the reply and the limit.
"""

from __future__ import annotations

from math import prod
from typing import Protocol

from trueroll.errors import InvalidRequestError

from ...engine.request import (
    COLUMNS,
    TOKENS,
    Columns,
    Distribution,
    Request,
    ScoreRequest,
    Widths,
    empty_columns,
    new_columns,
)

_BESIDE = 4096
"""Maximum size of a reply without its arrays, in bytes."""


class ModelSizes(Protocol):
    """The fields of `EngineInfo` on which the size of a reply depends."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def route_bytes(self) -> int: ...


def check_reply(request: Request, sizes: ModelSizes, limit: int) -> None:
    """Raise InvalidRequestError if the longest reply to a request exceeds `limit` bytes. Each sample is a separate
    reply.
    """
    tokens, each, others = _sizes(request, sizes)
    if (planned := _BESIDE + tokens * each + others) <= limit:
        return
    raise InvalidRequestError(
        f"records: a reply may need {planned} bytes (limit {limit}, max_unread_bytes), for {tokens} tokens with {each} "
        f"bytes each and {others} bytes of routed experts; request fewer records per token or fewer tokens, set top_k "
        "if return_sampling_mask is set, or raise the worker's max_unread_bytes",
        field="token_ids" if isinstance(request, ScoreRequest) else "max_tokens",
        value=planned,
        limit=limit,
    )


def _sizes(request: Request, sizes: ModelSizes) -> tuple[int, int, int]:
    """Return the number of tokens with records, the maximum number of bytes per token, and the bytes of all routed
    experts.
    """
    if isinstance(request, ScoreRequest):
        tokens, fed = len(request.token_ids) - request.start, len(request.token_ids) - 1
        num_targets = 0 if request.target_token_ids is None else request.target_token_ids.shape[1]
        each = _bytes_of_row(new_columns(request.top_logprobs, num_targets, request.return_sampling_mask, 0))
        each += _kept_bytes(request.return_sampling_mask, request.distribution, sizes)
        return tokens, each, fed * sizes.route_bytes * request.return_routed_experts
    params, prompt = request.params, len(request.prompt_token_ids)
    room = max(1, sizes.max_model_len - prompt)
    tokens = min(params.max_tokens or room, room)
    each = TOKENS.num_bytes(Widths()) + _bytes_of_row(empty_columns(params))
    each += _kept_bytes(params.return_sampling_mask, params, sizes)
    return tokens, each, (prompt + tokens) * sizes.route_bytes * params.return_routed_experts


def _kept_bytes(has_mask: bool, distribution: Distribution, sizes: ModelSizes) -> int:
    """Return the maximum number of bytes that the sampling mask of one token takes. The mask lists the ids that the
    distribution keeps.
    """
    return 4 * distribution.most_kept(sizes.vocab_size) if has_mask else 0


def _bytes_of_row(columns: Columns) -> int:
    """Return the bytes that one token takes in all columns with a fixed number of elements per token. `columns`: empty
    columns.
    """
    fixed = (columns[column.name] for column in COLUMNS if column.name in columns and not column.counts)
    return sum(values.itemsize * prod(values.shape[1:]) for values in fixed)
