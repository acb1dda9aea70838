"""Deltas of a sample, as a client joins them. The joined deltas equal the sample, even if parts arrive twice, late, or
after a restart.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueroll.engine.request import SampleDelta
from trueroll.errors import ProtocolError
from trueroll.rollout.client.connection import Received
from trueroll.rollout.protocol import Delta, FinishedSample, TopArrays

NUM_TOKENS = 8


def columns(start: int, end: int, noise: int = 0) -> dict:
    """Return the columns of tokens [start, end). The tokens depend on `noise`."""
    tokens = np.arange(start, end, dtype="<i4") + 1000 * noise
    tops = TopArrays(
        k=2,
        entropy=tokens.astype("<f4").tobytes(),
        token_ids=tokens.repeat(2).tobytes(),
        logprobs=(-tokens.repeat(2)).astype("<f4").tobytes(),
    )
    return dict(token_ids=tokens.tobytes(), logprobs=(-tokens).astype("<f4").tobytes(), tops=tops)


def delta(start: int, end: int, noise: int = 0) -> Delta:
    return Delta(id="a", index=3, start=start, **columns(start, end, noise))


def sample(end: int = NUM_TOKENS, noise: int = 0) -> FinishedSample:
    fields = dict(finish_reason="length", seed=1, num_cached_tokens=0, weight_versions=())
    return FinishedSample(id="a", index=3, **fields, **columns(0, end, noise))


def tokens_of(pieces: list[SampleDelta | None]) -> list[int]:
    tokens: list[int] = []
    for piece in pieces:
        if piece is not None:
            assert piece.start in (0, len(tokens))
            tokens[piece.start :] = piece.token_ids
    return tokens


@given(st.lists(st.tuples(st.integers(0, NUM_TOKENS), st.integers(0, NUM_TOKENS), st.booleans())))
def test_the_deltas_together_equal_the_sample(deltas: list[tuple[int, int, bool]]) -> None:
    received, pieces, known = Received(), [], 0
    for start, end, is_taken in deltas:
        if start < end and start <= known:
            received.put(delta(start, end))
            known = max(known, end)
        if is_taken:
            pieces.append(received.take())
            assert received.take() is None
    pieces.append(received.finish(sample()))
    assert tokens_of(pieces) == list(range(NUM_TOKENS))
    given = [piece for piece in pieces if piece is not None]
    assert [piece.start for piece in given] == [sum(len(p.token_ids) for p in given[:i]) for i in range(len(given))]
    whole = columns(0, NUM_TOKENS)
    assert b"".join(p.logprobs.astype("<f4").tobytes() for p in given) == whole["logprobs"]
    assert b"".join(p.top_token_ids.astype("<i4").tobytes() for p in given) == whole["tops"].token_ids
    assert b"".join(p.entropy.astype("<f4").tobytes() for p in given) == whole["tops"].entropy


def test_new_tokens_are_announced_once() -> None:
    received = Received()
    assert received.put(delta(0, 2)) and not received.put(delta(2, 3))
    assert received.take() is not None and received.take() is None
    assert received.put(delta(3, 4))


@pytest.mark.parametrize("num_taken", [0, 2])
def test_the_deltas_of_a_restarted_sample_begin_at_0(num_taken: int) -> None:
    received, pieces = Received(), []
    if num_taken:
        received.put(delta(0, num_taken))
        pieces.append(received.take())
    received.put(delta(0, 1, noise=1))
    received.put(delta(1, 5, noise=1))
    pieces += [received.take(), received.finish(sample(noise=1))]
    assert [piece.start for piece in pieces if piece] == [0, 0, 5][not num_taken :]
    assert tokens_of(pieces) == [1000 + i for i in range(NUM_TOKENS)]


@pytest.mark.parametrize("end", [0, 1, 3])
def test_a_sample_shorter_than_its_deltas_is_delivered_whole(end: int) -> None:
    received = Received()
    received.put(delta(0, 4))
    pieces = [received.take(), received.finish(sample(end))]
    assert pieces[1] is not None and pieces[1].start == 0
    assert tokens_of(pieces) == list(range(end))


def test_a_gap_is_refused() -> None:
    received = Received()
    received.put(delta(0, 2))
    with pytest.raises(ProtocolError, match="request 'a', sample 3: a delta begins at token 3, but earlier tokens"):
        received.put(delta(3, 4))
