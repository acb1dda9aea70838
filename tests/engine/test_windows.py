"""Layers with sliding windows: how many blocks a sequence holds, and that releasing older blocks changes no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny import make_tiny_model
from trueroll.engine.engine import Engine
from trueroll.engine.request import SampleOutput

from .drive import bits, drain, generate, make_engine, run, score, tokens

WINDOW, BLOCK, CHUNK = 32, 8, 16
PROMPT = tokens(8 * WINDOW)
SMALL: dict[str, Any] = dict(block_size=BLOCK, max_num_batched_tokens=CHUNK, max_num_seqs=4)


@pytest.fixture(scope="module", params=["gemma3", "mistral", "olmo3", "qwen2_window"])
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(request.param, tmp_path_factory.mktemp("windowed") / request.param)


def check_against_scores(model: Path, samples: list[SampleOutput], prompt: np.ndarray = PROMPT) -> None:
    """Check that the log-probs have the same bits as a score computed in one chunk."""
    whole = make_engine(model, max_num_batched_tokens=1024, enable_prefix_caching=False)
    for sample in samples:
        expected = score(whole, np.concatenate((prompt, np.array(sample.token_ids, np.int32))))
        assert bits(sample)[1] == expected[len(prompt) - 1 :].tobytes()


def window_tables(engine: Engine) -> list[list[int]]:
    """Return the window's blocks that running sequences hold."""
    cache, running = engine._scheduler.cache, engine._scheduler.running.sequences
    groups = [group for group, window in enumerate(cache.tables.windows) if window is not None]
    return [list(sequence.table.held(group)) for sequence in running for group in groups]


def test_a_sequence_holds_a_window_a_chunk_and_a_block(windowed: Path, steps_ahead: int) -> None:
    """The sequence holds one more chunk if a step is queued before the previous step is done."""
    engine = make_engine(windowed, **SMALL)
    engine.add(generate("long", PROMPT, max_tokens=40))
    held: list[int] = []
    outputs: list[Any] = []
    while engine.has_unfinished:
        outputs += engine.step()
        held += [len(blocks) * BLOCK for blocks in window_tables(engine)]
        engine.check_integrity()
    assert engine.stats().computed_tokens == 8 * WINDOW + 39, "premise: the sequence is longer than 8 windows"
    assert WINDOW <= max(held) <= WINDOW + (1 + steps_ahead) * CHUNK + BLOCK
    check_against_scores(windowed, outputs)


def test_a_prefix_hit_reads_the_window_before_it(windowed: Path, steps_ahead: int) -> None:
    engine = make_engine(windowed, **SMALL)
    [first] = run(engine, [generate("first", PROMPT, max_tokens=40)]).values()
    [again] = run(engine, [generate("again", PROMPT, max_tokens=40)]).values()
    assert again.num_cached_tokens == 8 * WINDOW - BLOCK and first.num_cached_tokens == 0
    assert bits(first) == bits(again)
    turn = np.concatenate((PROMPT, np.array(first.token_ids, np.int32)))
    [next_turn] = run(engine, [generate("turn", turn, max_tokens=9)]).values()
    assert next_turn.num_cached_tokens == 288, "all blocks of the first turn but the last are hit"
    check_against_scores(windowed, [next_turn], turn)


def test_a_prefix_hit_ends_where_its_window_is_complete(windowed: Path, steps_ahead: int) -> None:
    """The missing blocks of the window were handed out to later prompts."""
    num_blocks = 64 if windowed.name == "mistral" else 256
    engine, prompt = make_engine(windowed, **SMALL | dict(max_num_seqs=1), num_blocks=num_blocks), PROMPT[:100]
    [first] = run(engine, [generate("first", prompt)]).values()
    pool = engine._scheduler.cache.tables.pools[-1]
    for i in range(3):
        run(engine, [generate(f"other {i}", tokens(500, seed=i + 1))])
    assert pool.evictions > 0, "premise"
    [again] = run(engine, [generate("again", prompt)]).values()
    if len(engine._scheduler.cache.tables.pools) > 1:
        assert engine._scheduler.cache.tables.pools[0].evictions == 0, "premise: the layers without a window hold all"
    assert again.num_cached_tokens == 0
    assert bits(first) == bits(again)
    [third] = run(engine, [generate("third", prompt)]).values()
    assert third.num_cached_tokens == 96, "tokens computed again can be hit again"
    check_against_scores(windowed, [again, third], prompt)


def test_preempted_samples_keep_their_bits(windowed: Path, steps_ahead: int) -> None:
    requests = [generate(str(i), tokens(50 + i, seed=i), n=3, max_tokens=30) for i in range(4)]
    expected = run(make_engine(windowed, block_size=BLOCK, max_num_seqs=16), requests)
    pressed = make_engine(windowed, block_size=BLOCK, max_num_seqs=16, num_blocks=12)
    found = run(pressed, requests)
    assert pressed.stats().preemptions > 0, "premise"
    assert {key: bits(sample) for key, sample in found.items()} == {k: bits(s) for k, s in expected.items()}
    check_against_scores(windowed, [sample for key, sample in found.items() if key[0] == "3"], tokens(53, seed=3))


def test_a_group_forks_in_a_block_beyond_the_window(windowed: Path, steps_ahead: int) -> None:
    engine, prompt = make_engine(windowed, **SMALL), PROMPT[:101]
    samples = [*run(engine, [generate("group", prompt, n=4, max_tokens=40)]).values()]
    assert engine.stats().computed_prompt_tokens == 101, "premise: the prompt was computed once"
    assert len({bits(sample) for sample in samples}) == 4
    check_against_scores(windowed, samples, prompt)


def test_tokens_computed_again_have_the_same_bits(windowed: Path, steps_ahead: int) -> None:
    engine = make_engine(windowed, **SMALL)
    engine.add(generate("r", PROMPT[:101], n=2, max_tokens=60))
    outputs: list[Any] = []
    while not outputs and engine.stats().computed_tokens < 101 + 50:
        outputs += engine.step()
    outputs += engine.interrupt("recompute")
    assert engine.stats().recomputed == 2, "premise"
    outputs += drain(engine)
    assert len(outputs) == 2
    check_against_scores(windowed, outputs, PROMPT[:101])
