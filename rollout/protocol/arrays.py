"""Tokens, log-probs and the engine's results as the arrays of messages, and back.

Arrays travel as raw little-endian bytes: int32 for tokens, float32 for log-probs, uint8 or uint16 for routed experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trueroll.errors import InvalidRequestError, TruerollError, brief

from ...engine.columns import columns_of, fields
from ...engine.request import SampleDelta, SampleOutput, ScoreOutput, WeightSpan, plain
from .columns import columns_within, fields_for
from .error_codes import told
from .messages import Delta, Error, FinishedSample, RoutedExperts, Scores, Span

_BOOLEANS = frozenset((bool, np.bool_))


def tokens_to_bytes(token_ids: Sequence[int] | np.ndarray, field: str) -> bytes:
    """Token ids as the protocol's int32 array. Raises InvalidRequestError naming the `field` that they are from.

    Integers of numpy are taken like those of Python. Booleans are refused, which numpy would turn into 0 and 1.
    """
    if isinstance(token_ids, list | tuple) and not (kinds := {*map(type, token_ids)}) <= {int}:
        if not _BOOLEANS.isdisjoint(kinds):
            text = f"{field}: booleans are not token ids ({brief(token_ids)}); give integers"
            raise InvalidRequestError(text, field=field, value=token_ids)
        token_ids = [plain(token) for token in token_ids]
    try:
        tokens = np.asarray(token_ids)
    except ValueError:  # sequences of several lengths
        tokens = np.empty((0, 0))
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        text = f"{field}: expected a flat sequence of token ids, found {brief(token_ids)}"
        raise InvalidRequestError(text, field=field, value=token_ids)
    if tokens.size and (tokens.min() < -(2**31) or tokens.max() >= 2**31):
        text = f"{field}: expected token ids that fit in 32 bits, found {tokens.min()}..{tokens.max()}"
        raise InvalidRequestError(text, field=field, value=int(max(tokens, key=abs)), limit=2**31 - 1)
    return tokens.astype("<i4").tobytes()


def bytes_to_tokens(data: bytes) -> np.ndarray:
    """int32 [num_tokens], writable."""
    return np.frombuffer(data, "<i4").astype(np.int32)


def sample_message(id: str, output: SampleOutput) -> FinishedSample:
    """The message that carries a sample the engine finished of the request `id`."""
    return FinishedSample(
        id=id,
        index=output.index,
        token_ids=np.array(output.token_ids, "<i4").tobytes(),
        finish_reason=output.finish_reason,
        seed=output.seed,
        num_cached_tokens=output.num_cached_tokens,
        weight_versions=_spans(output.weight_versions),
        error=output.error,
        stop_reason=output.stop_reason,
        routed_experts=_routed(output),
        **fields_for(columns_of(output)),
    )


def delta_message(id: str, delta: SampleDelta) -> Delta:
    """What a sample of the request `id` has got, as messages carry it."""
    return Delta(
        id=id,
        index=delta.index,
        start=delta.start,
        token_ids=np.array(delta.token_ids, "<i4").tobytes(),
        **fields_for(columns_of(delta)),
    )


def scores_message(id: str, output: ScoreOutput) -> Scores:
    """The message that carries a score the engine finished of the request `id`."""
    return Scores(
        id=id,
        finish_reason=output.finish_reason,
        weight_versions=_spans(output.weight_versions),
        routed_experts=_routed(output),
        **fields_for(columns_of(output)),
    )


def error_message(id: str | None, error: TruerollError, caller: str | None = None) -> Error:
    """The message that says that `id` has no result."""
    return Error(id=id, caller=caller, **told(error))


def sample_output(message: FinishedSample) -> SampleOutput:
    """The sample in a message, as the engine gave it; its array is writable."""
    return SampleOutput(
        request_id=message.id,
        index=message.index,
        token_ids=bytes_to_tokens(message.token_ids).tolist(),
        finish_reason=message.finish_reason,
        seed=message.seed,
        num_cached_tokens=message.num_cached_tokens,
        weight_versions=tuple(WeightSpan(*span) for span in message.weight_versions),
        error=message.error,
        stop_reason=message.stop_reason,
        routed_experts=_routed_array(message.routed_experts),
        **fields(columns_within(message)),
    )


def sample_delta(message: Delta) -> SampleDelta:
    """What a sample has got, as the engine gave it; arrays writable."""
    return SampleDelta(
        request_id=message.id,
        index=message.index,
        start=message.start,
        token_ids=bytes_to_tokens(message.token_ids).tolist(),
        **fields(columns_within(message)),
    )


def score_output(message: Scores) -> ScoreOutput:
    """The scores in a message, as the engine gave them; arrays writable."""
    return ScoreOutput(
        request_id=message.id,
        finish_reason=message.finish_reason,
        weight_versions=tuple(WeightSpan(*span) for span in message.weight_versions),
        routed_experts=_routed_array(message.routed_experts),
        **fields(columns_within(message)),
    )


def _routed_array(routed: RoutedExperts | None) -> np.ndarray | None:
    """`routed_experts`, as the engine gave it, writable."""
    if routed is None:
        return None
    elements = np.frombuffer(routed.data, np.dtype(routed.dtype).newbyteorder("<"))
    return elements.astype(routed.dtype).reshape(routed.shape)


def _routed(output: SampleOutput | ScoreOutput) -> RoutedExperts | None:
    if (routed := output.routed_experts) is None:
        return None
    tokens, layers, top_k = routed.shape
    data = routed.astype(routed.dtype.newbyteorder("<")).tobytes()
    dtype = "uint8" if routed.dtype == np.uint8 else "uint16"
    return RoutedExperts(dtype=dtype, shape=(tokens, layers, top_k), data=data)


def _spans(versions: tuple[WeightSpan, ...]) -> tuple[Span, ...]:
    return tuple((span.version, span.start, span.end) for span in versions)
