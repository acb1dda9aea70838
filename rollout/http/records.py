"""Records in an answer, besides the log-probs of the generated tokens: log-probs of given tokens, sampling masks,
routed experts, and records of the prompt. If vLLM returns the same record, the record has vLLM's format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from trueroll.errors import InvalidRequestError

from ...engine.request import Columns, Distribution, SamplingParams, ScoreOutput, columns_of, new_columns
from .answers import Binary, Rows, TokenBytes, rows
from .fields import RecordFields, unsupported
from .images import Prompt
from .logprobs import numbers, top_rows
from .model import ServedModel
from .pieces import Piece

_ENTRY_BYTES = 60 + TokenBytes.ID + TokenBytes.TEXT + TokenBytes.NUMBER
"""Estimated size of a token in `prompt_logprobs`, in bytes."""


def told_records(piece: Piece, own: RecordFields) -> dict[str, Any]:
    """Return the records of a piece as fields of a choice.

    `target_logprobs`: float32 [num_tokens, K]. `sampling_mask`: for each token, the ids that could be drawn; an empty
    list means the whole vocabulary. `sampling_mask_log_mass`: float32 [num_tokens]. `routed_experts`: [num_rows,
    layers, k], only in the last piece of a choice. Arrays are `Binary`.
    """
    told, found = dict[str, Any](), piece.records
    if "target_logprobs" in found:
        told["target_logprobs"] = Binary(found["target_logprobs"])
    if "kept_counts" in found:
        told |= _told_mask(found, "sampling_mask")
    if piece.ended is not None and (routed := piece.ended.routed_experts) is not None:
        told["routed_experts"] = Binary(routed[own.routed_experts_prompt_start :])
    return told


def _told_mask(found: Columns, name: str) -> dict[str, Any]:
    counts, ids = found["kept_counts"], found["kept_token_ids"]
    width = 1 + len(ids) // max(1, len(counts))
    return {name: rows(_split(counts, ids), len(counts), width), f"{name}_log_mass": Binary(found["kept_log_mass"])}


def _split(counts: np.ndarray, ids: np.ndarray) -> Iterator[list[int]]:
    end = 0
    for count in counts.tolist():
        yield ids[end : end + count].tolist()
        end += count


def check_records(own: RecordFields, prompts: Sequence[Sequence[int]], is_stream: bool, params: SamplingParams) -> None:
    """Raise InvalidRequestError or HttpError if a prompt cannot have the requested records."""
    asked = dict(prompt_logprobs=own.prompt_logprobs, prompt_logprob_token_ids=own.prompt_logprob_token_ids)
    asked["prompt_sampling_mask"] = own.prompt_sampling_mask or None
    if is_stream and (name := next((name for name, value in asked.items() if value is not None), None)):
        raise unsupported(name, "null for a stream", asked[name])
    if (targets := own.prompt_logprob_token_ids) is not None:
        for prompt_len in dict.fromkeys(map(len, prompts)):
            _check_targets(targets, own.prompt_logprob_start, prompt_len)
    shortest = min(map(len, prompts))
    if params.return_routed_experts and own.routed_experts_prompt_start > shortest:
        raise InvalidRequestError(
            f"routed_experts_prompt_start: must be at most {shortest}, the length of the shortest prompt (got "
            f"{own.routed_experts_prompt_start})",
            field="routed_experts_prompt_start",
            value=own.routed_experts_prompt_start,
            limit=shortest,
        )


def _check_targets(targets: Sequence[Sequence[int]], start: int, prompt_len: int) -> None:
    expected, widths = max(prompt_len - 1 - start, 0), [len(row) for row in targets]
    if len(targets) != expected or min(widths) != max(widths):
        raise InvalidRequestError(
            f"prompt_logprob_token_ids: must have {expected} rows of equal length, one for each token of the prompt "
            f"after token prompt_logprob_start = {start} (got {len(targets)} rows with {min(widths)} to {max(widths)} "
            "ids)",
            field="prompt_logprob_token_ids",
            value=len(targets),
            limit=expected,
        )


def record_bytes(own: RecordFields, params: SamplingParams, served: ServedModel) -> TokenBytes:
    """Return the estimated number of bytes that each token adds to the records in an answer."""
    routes = served.route_bytes * params.return_routed_experts
    new = Binary.num_chars(4 * len(params.target_token_ids) + routes)
    if params.return_sampling_mask:
        new += _mask_bytes(params, served)
    prompt = Binary.num_chars(routes + 4 * len((own.prompt_logprob_token_ids or [[]])[0]))
    if own.prompt_sampling_mask:
        prompt += _mask_bytes(prompt_distribution(params), served)
    listed = 0 if own.prompt_logprobs is None else 4 + (own.prompt_logprobs + 1) * _ENTRY_BYTES
    return TokenBytes(new, prompt + listed)


def _mask_bytes(distribution: Distribution, served: ServedModel) -> int:
    return 4 + TokenBytes.ID * distribution.most_kept(served.vocab_size) + Binary.num_chars(4)


async def prompt_records(
    own: RecordFields, prompts: list[Prompt], params: SamplingParams, served: ServedModel
) -> list[dict[str, Any]]:
    """Return, for each prompt, the fields `prompt_logprobs`, `prompt_token_id_logprobs`, `prompt_sampling_mask` and
    `prompt_sampling_mask_log_mass` as requested.

    The records are computed with the temperature and the filters of the request. Edits of logits, such as penalties,
    have no effect on these records, because the edits apply only to drawn tokens.
    """
    if own.prompt_logprobs is None and own.prompt_logprob_token_ids is None and not own.prompt_sampling_mask:
        return [{} for _ in prompts]
    return [await _prompt_record(own, prompt, params, served) for prompt in prompts]


def prompt_distribution(params: SamplingParams) -> Distribution:
    """Return the distribution to which the log-probs of prompts refer."""
    return Distribution(**{name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")})


async def _prompt_record(
    own: RecordFields, prompt: Prompt, params: SamplingParams, served: ServedModel
) -> dict[str, Any]:
    told, token_ids = dict[str, Any](), prompt.token_ids
    scores = partial(
        served.client.score,
        [token_ids],
        media=[prompt.images],
        distribution=prompt_distribution(params),
        adapter=served.adapter,
        cache_salt=params.cache_salt,
    )
    if (k := own.prompt_logprobs) is not None:
        [score] = await scores(top_logprobs=k) if len(token_ids) > 1 else [None]
        told["prompt_logprobs"] = Rows(_prompt_rows(token_ids, score, k, served.texts.token), 2 + 2 * k)
    targets, has_mask, start = own.prompt_logprob_token_ids, own.prompt_sampling_mask, own.prompt_logprob_start + 1
    found = new_columns(None, 0, has_mask, 0)
    if (targets is not None or has_mask) and start < len(token_ids):
        asked: dict[str, Any] = dict(target_token_ids=None if targets is None else [targets], start=start)
        [score] = await scores(return_sampling_mask=has_mask, **asked)
        found = columns_of(score)
    if targets is not None:
        told["prompt_token_id_logprobs"] = Binary(found["target_logprobs"])
    if has_mask:
        told |= _told_mask(found, "prompt_sampling_mask")
    return told


def _prompt_rows(
    token_ids: Sequence[int], score: ScoreOutput | None, k: int, name: Callable[[int], str]
) -> Iterator[dict[str, Any] | None]:
    """For each token of a prompt, yield vLLM's map from token id to log-prob and rank. For the first token, yield None.

    The map has the `k` most probable tokens and the token of the prompt. If the token of the prompt is not one of the
    `k` most probable tokens, the rank of this token is not known. The map then has the rank k + 1, the smallest number
    that the rank can be.
    """
    yield None
    if score is None:
        return
    tops = top_rows(score.top_token_ids, score.top_logprobs) or ([] for _ in token_ids[1:])
    for token_id, logprob, best in zip(token_ids[1:], numbers(score.logprobs), tops, strict=True):
        told = {str(each): _entry(value, rank, name(each)) for rank, (each, value) in enumerate(best, 1)}
        told.setdefault(str(token_id), _entry(logprob, k + 1, name(token_id)))
        yield told


def _entry(logprob: float, rank: int, name: str) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": name}
