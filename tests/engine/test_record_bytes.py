"""The records of unfinished requests are counted in bytes. Beyond the limit, the sample or score with the most bytes
ends with an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from refusals import about

from trueroll.engine.config import EngineConfig
from trueroll.engine.drafting.drafter import FunctionDrafter
from trueroll.engine.engine import Engine
from trueroll.engine.request import (
    Distribution,
    GenerateRequest,
    Output,
    SampleOutput,
    ScoreOutput,
    ScoreRequest,
    columns_of,
)
from trueroll.errors import InvalidRequestError

from .drive import drain, generate, make_engine, run, samples_of, tokens

LARGE_ROW = 4 + 8 * 64
"""The record bytes of each token of a `large` request."""


def large(id: str, **params: Any) -> GenerateRequest:
    return generate(id, tokens(9), **(dict(max_tokens=40, top_logprobs=64) | params))


SMALL = [
    generate("tops", tokens(9), max_tokens=30, top_logprobs=2, n=2),
    generate("targets", tokens(11, seed=1), max_tokens=30, target_token_ids=(5, 9), top_p=0.9),
    generate("kept", tokens(7, seed=2), max_tokens=20, top_k=5, return_sampling_mask=True),
    generate("plain", tokens(8, seed=3), max_tokens=30),
]
SCORE = ScoreRequest("score", tokens(21), top_logprobs=5)
SCORE_BYTES = 20 * (4 + 4 + 8 * 5)


def held(engine: Engine) -> int:
    return engine.memory()["records"]


def record_bytes(outputs: list[Output]) -> int:
    return sum(values.nbytes for output in outputs for name, values in columns_of(output).items() if name != "logprobs")


def bits(output: SampleOutput | ScoreOutput, count: int | None = None) -> dict[str, bytes]:
    """Return the bytes of the columns and tokens, or of the first `count` rows."""
    told = {name: values[:count].tobytes() for name, values in columns_of(output).items()}
    return told | (dict(token_ids=repr(output.token_ids[:count]).encode()) if isinstance(output, SampleOutput) else {})


def run_within(engine: Engine, limit: int) -> list[Output]:
    """Finish all requests. The records must be within the limit after each step."""
    outputs, most = list[Output](), 0
    while engine.has_unfinished:
        outputs += engine.step()
        most = max(most, held(engine))
    engine.check_integrity()
    assert limit - 600 < most <= limit and held(engine) == 0, "premise: the limit was reached"
    return outputs


@pytest.mark.usefixtures("steps_ahead")
@pytest.mark.parametrize("settings", [{}, dict(num_blocks=14, block_size=8)], ids=["roomy", "preempted"])
def test_the_largest_holder_ends_and_no_bit_of_the_others_changes(settings: dict[str, Any], tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, **settings)
    for request in (large("large"), *SMALL, SCORE):
        engine.add(request)
    alone = {name_of(output): output for output in drain(engine)}
    assert engine.stats().record_errors == 0 and (engine.stats().preemptions > 0) == bool(settings), "premise"

    limit = 12_000
    engine = make_engine(tiny_llama, max_record_bytes=limit, **settings)
    for request in (large("large"), *SMALL, SCORE):
        engine.add(request)
    found = {name_of(output): output for output in run_within(engine, limit)}
    cut, whole = found.pop(("large", 0)), alone.pop(("large", 0))
    assert isinstance(cut, SampleOutput) and isinstance(whole, SampleOutput) and cut.error is not None
    count, size = len(cut.token_ids), record_bytes([cut])
    assert cut.finish_reason == "error" and size == LARGE_ROW * count and 10 < count < 40
    assert "(limit 12000, max_record_bytes)" in cut.error and f"this sample's {size} bytes are the most" in cut.error
    assert bits(cut) == bits(whole, count), "the tokens so far are returned"
    assert {name: bits(output) for name, output in found.items()} == {n: bits(o) for n, o in alone.items()}
    assert engine.stats().record_errors == engine.stats().samples_finished["error"] == 1


def name_of(output: Output) -> tuple[str, int]:
    return output.request_id, output.index if isinstance(output, SampleOutput) else 0


@pytest.mark.usefixtures("steps_ahead")
def test_of_equal_holders_the_last_to_arrive_ends(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, max_record_bytes=75 * LARGE_ROW)
    found = run(engine, [large("first"), large("second", n=2)])
    assert {key: sample.finish_reason for key, sample in found.items()} == {
        ("first", 0): "length",
        ("second", 0): "error",
        ("second", 1): "error",
    }
    lengths = [len(found["second", index].token_ids) for index in (0, 1)]
    assert lengths[1] == 26 and lengths[0] == 38, "75 rows are 25 rows for each of 3, then 37.5 for each of 2"


@pytest.mark.parametrize("end", ["finish", "abort", "commit", "interrupt", "recompute", "sleep"])
def test_the_count_is_exact_until_it_is_0(end: str, steps_ahead: int, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    for request in SMALL:
        engine.add(request)
    while held(engine) < 500:
        assert not engine.step()
    before, outputs = held(engine), list[Output]()
    match end:
        case "abort":
            outputs = engine.abort("tops", 0)
            assert held(engine) == before - record_bytes(outputs) > 0
            for id in ("tops", "targets", "kept"):
                outputs += engine.abort(id)
            assert held(engine) == 0 and record_bytes(outputs) == before
        case "commit":
            outputs = engine.commit_weights(engine.weights.new_staging(False), 1, "abort")
        case "interrupt":
            outputs = engine.interrupt("abort")
        case "recompute":
            assert not engine.interrupt("recompute") and held(engine) >= before
        case "sleep":
            assert not engine.sleep(1, ["weights", "kv_cache"], "recompute") and held(engine) >= before
            engine.wake_up(["weights", "kv_cache"])
    assert (engine.stats().recomputed > 0) == (end in ("recompute", "sleep")), "premise"
    if end in ("commit", "interrupt"):
        assert held(engine) == 0 and record_bytes(outputs) >= before
    outputs += drain(engine)
    assert len(samples_of(outputs)) == 5 and held(engine) == 0 and engine.stats().record_errors == 0


def test_rejected_drafts_do_not_count(tiny_llama: Path) -> None:
    request = generate("a", tokens(6), n=2, max_tokens=40, top_logprobs=3)
    known = [[*tokens(6).tolist(), *sample.token_ids] for sample in run(make_engine(tiny_llama), [request]).values()]

    def draft(so_far: Sequence[int], most: int) -> list[int]:
        """Draft two right tokens and then wrong ones."""
        [right] = [whole[len(so_far) :] for whole in known if whole[: len(so_far)] == [*so_far]]
        return [*right[:2], *(token ^ 1 for token in right[2:])][:most]

    config = EngineConfig(model=str(tiny_llama), num_blocks=512, num_threads=1, speculative="ngram")
    engine = Engine(config, drafter=FunctionDrafter(draft))
    engine.add(request)
    engine.stream("a")
    counts, sizes, outputs = [0, 0], list[int](), list[Output]()
    while not outputs:
        outputs += engine.step()
        for delta in engine.take_deltas():
            counts[delta.index] += len(delta.token_ids)
        sizes.append(sum(counts) * (4 + 8 * 3))
        assert outputs or held(engine) == sizes[-1]
    [stats] = engine.stats().drafts
    assert len(set(sizes)) > 5 and 20 < stats.num_accepted < stats.num_drafted, "premise"


def test_a_score_that_alone_exceeds_the_limit_is_refused(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, max_record_bytes=SCORE_BYTES - 1)
    with pytest.raises(
        InvalidRequestError,
        match=f"score of 20 tokens needs {SCORE_BYTES} bytes .limit {SCORE_BYTES - 1}, max_record_bytes",
        check=about("token_ids", value=SCORE_BYTES, limit=SCORE_BYTES - 1),
    ):
        engine.add(SCORE)
    assert not engine.has_unfinished and engine.stats().num_waiting == 0


@pytest.mark.usefixtures("steps_ahead")
def test_waiting_scores_hold_no_records(tiny_llama: Path) -> None:
    """Each score is computed in several steps, and is restarted once."""
    engine = make_engine(tiny_llama, max_record_bytes=SCORE_BYTES, max_num_seqs=1, max_num_batched_tokens=8)
    for number in range(3):
        engine.add(ScoreRequest(str(number), SCORE.token_ids, top_logprobs=5))
    assert held(engine) == 0
    while held(engine) == 0:
        engine.step()
    assert held(engine) == SCORE_BYTES
    outputs = engine.interrupt("recompute")
    assert not outputs and held(engine) == SCORE_BYTES
    outputs += drain(engine)
    assert [output.finish_reason for output in outputs] == ["stop"] * 3 and held(engine) == 0
    assert len({repr(bits(output)) for output in outputs}) == 1 and engine.stats().recomputed == 1


@pytest.mark.usefixtures("steps_ahead")
@pytest.mark.parametrize("budget", [8, 64])
@pytest.mark.parametrize("is_within", [True, False])
def test_the_kept_ids_of_a_score_count_as_they_are_computed(is_within: bool, budget: int, tiny_llama: Path) -> None:
    """The score has 40 tokens, of which each step computes 8, or all."""
    fixed, chunk = 40 * (4 + 4 + 4), 8 * 4 * 50
    limit = fixed + (5 if is_within else 4) * chunk
    engine = make_engine(tiny_llama, max_record_bytes=limit, max_num_seqs=1, max_num_batched_tokens=budget)
    engine.add(ScoreRequest("kept", tokens(41), Distribution(top_k=50), return_sampling_mask=True))
    sizes, outputs = list[int](), list[Output]()
    while not outputs:
        outputs += engine.step()
        sizes.append(held(engine))
    [score], sizes = outputs, [size for size in dict.fromkeys(sizes) if size]
    assert isinstance(score, ScoreOutput) and score.kept_counts is not None and held(engine) == 0
    assert sizes == ([fixed + chunks * chunk for chunks in range(1, 5)] if budget == 8 else [])
    if is_within:
        assert score.kept_counts.tolist() == [50] * 40
        assert score.finish_reason == "stop" and engine.stats().record_errors == 0
    else:
        assert len(score.kept_counts) == len(score.logprobs) == 0
        assert score.finish_reason == "error" and score.error is not None and engine.stats().record_errors == 1
        assert f"this score's {fixed + 5 * chunk} bytes are the most" in score.error


@pytest.mark.usefixtures("steps_ahead")
@pytest.mark.parametrize("tops", [1, 64])
def test_a_score_and_a_sample_compete(tops: int, tiny_llama: Path) -> None:
    """The score begins while the sample holds 20 rows of records, which take fewer or more bytes than the score."""
    row = 4 + 8 * tops
    engine = make_engine(tiny_llama, max_record_bytes=20 * row + SCORE_BYTES - 1)
    engine.add(large("sample", top_logprobs=tops))
    while held(engine) < 20 * row:
        engine.step()
    engine.add(SCORE)
    outputs = {output.request_id: output for output in drain(engine)}
    sample, score = outputs["sample"], outputs["score"]
    assert isinstance(score, ScoreOutput) and engine.stats().record_errors == 1 and held(engine) == 0
    if tops == 1:
        assert (score.finish_reason, len(score.logprobs), sample.finish_reason) == ("error", 0, "length")
        assert score.error is not None and f"this score's {SCORE_BYTES} bytes are the most" in score.error
    else:
        assert (score.finish_reason, len(score.logprobs), sample.finish_reason) == ("stop", 20, "error")
