"""Answers in protobuf: the message `SampleResponse` of the package `tinker`.

The field numbers are the numbers in `tinker_public.proto` of tinker 0.38. Log-probs are encoded as the bits of float32
values. Format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ....engine.request import SampleOutput, ScoreOutput
from .fields import Asked
from .targets import Targets

PROTOBUF = "application/x-protobuf"
STOP, LENGTH = 0, 1
"""The reasons why a sample ended (the enum `StopReason`)."""
_FLOAT32 = 1
_NO_TOKEN, _NO_LOGPROB = 0, -99999.0
"""The token id and the log-prob in an empty cell of `TopkLogprobs`."""
_VARINT, _BYTES = 0, 2
"""Wire types."""


def sample_response(asked: Asked, samples: Sequence[SampleOutput], score: ScoreOutput | None) -> bytes:
    """Return the answer to a request: its samples in order, and the scores of its prompt.

    `score`: the scores of the prompt from the first requested token on; None if the request asks for no scores, or if
    the prompt has only one token.
    """
    parts = [_field(1, _sequence(sample)) for sample in samples]
    if asked.start is not None:
        parts.append(_field(2, _prompt_logprobs(asked, score)))
        if asked.num_top:
            parts.append(_field(3, _prompt_tops(asked, score)))
    parts.append(_number(4, max(sample.num_cached_tokens for sample in samples)))
    if asked.targets is not None:
        assert score is not None and score.target_logprobs is not None
        parts.append(_field(5, _target_logprobs(asked.targets, score.target_logprobs)))
    return b"".join(parts)


def _sequence(sample: SampleOutput) -> bytes:
    assert sample.logprobs is not None
    parts = [_number(1, STOP if sample.finish_reason == "stop" else LENGTH), _field(2, _int32(sample.token_ids))]
    parts.append(_field(3, _float32(sample.logprobs)))
    if sample.top_token_ids is not None and sample.top_logprobs is not None:
        parts.append(_field(4, _tops(sample.top_token_ids, sample.top_logprobs)))
    return b"".join(parts)


def _prompt_logprobs(asked: Asked, score: ScoreOutput | None) -> bytes:
    """Return a float32 for each token of the prompt; NaN for tokens without a log-prob."""
    logprobs = np.full(len(asked.prompt), np.nan, np.float32)
    if score is not None:
        assert asked.start is not None
        logprobs[asked.start :] = score.logprobs[len(score.logprobs) - (len(asked.prompt) - asked.start) :]
    return _float32(logprobs)


def _prompt_tops(asked: Asked, score: ScoreOutput | None) -> bytes:
    """Return the most probable tokens for each token of the prompt; empty cells for tokens without a log-prob."""
    shape = len(asked.prompt), asked.num_top
    token_ids, logprobs = np.full(shape, _NO_TOKEN, np.int32), np.full(shape, _NO_LOGPROB, np.float32)
    if score is not None:
        assert asked.start is not None and score.top_token_ids is not None and score.top_logprobs is not None
        num_rows = len(asked.prompt) - asked.start
        token_ids[asked.start :] = score.top_token_ids[-num_rows:]
        logprobs[asked.start :] = score.top_logprobs[-num_rows:]
    return _tops(token_ids, logprobs)


def _tops(token_ids: np.ndarray, logprobs: np.ndarray) -> bytes:
    length, k = token_ids.shape
    return _field(1, _int32(token_ids)) + _field(2, _float32(logprobs)) + _number(3, k) + _number(4, length)


def _target_logprobs(targets: Targets, scored: np.ndarray) -> bytes:
    """Return the log-probs as a tensor. The tensor is dense or in CSR form, like the tensor in the request. `scored`:
    float32 [num_scored, width], the log-probs of the last rows of the tensor. The earlier rows of the tensor name no
    token.
    """
    logprobs = np.zeros(targets.ids.shape, np.float32)
    logprobs[len(logprobs) - len(scored) :] = scored
    if (sparse := targets.sparse) is None:
        content = _field(1, _float32(logprobs))
    else:
        values = _field(1, _float32(logprobs[sparse.rows, sparse.places]))
        indices = _field(2, sparse.starts.astype("<i8").tobytes()) + _field(3, sparse.columns.astype("<i8").tobytes())
        content = _field(2, values + indices)
    shape = b"".join(map(_varint, (len(targets.ids), targets.num_columns)))
    return content + _number(3, _FLOAT32) + _field(4, shape)


def _int32(values: Iterable[int] | np.ndarray) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def _float32(values: np.ndarray) -> bytes:
    return np.asarray(values, "<f4").tobytes()


def _field(number: int, content: bytes) -> bytes:
    """Encode a protobuf field that contains bytes, a message, or packed integers."""
    return _varint(number << 3 | _BYTES) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    """Encode a protobuf field that contains a non-negative integer."""
    return _varint(number << 3 | _VARINT) + _varint(value)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
