"""Decode steps with inputs at fixed addresses, as CUDA graphs require: which steps use a graph, the graphs' sizes,
padding, and bits.

The tests do not use CUDA. Instead of replaying a graph, each replay runs the computation again, from the same inputs
into the same outputs. This finds all graph faults except kernels that cannot be captured, which tests/gpu covers.
"""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from matrix import thinned
from torch import Tensor

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.engine.drafting.drafter import Drafter, FunctionDrafter
from trueroll.engine.drafting.mtp import MtpDrafter
from trueroll.engine.engine import Engine
from trueroll.engine.models.decoder import ModelInput, ModelOutput
from trueroll.engine.request import Output, Request, SampleOutput, ScoreRequest
from trueroll.engine.running import executor as executor_module
from trueroll.engine.running.graphs import DecodeGraphs, Outputs
from trueroll.engine.running.loading import load_dummy, load_model
from trueroll.kernels import reference
from trueroll.kernels.contract import NO_SLOT, AttentionBatch

from ..drafting.mtp_models import make_mtp_model
from ..drive import bits, drain, executor_of, generate, run, tokens, top_bits

NUM_BLOCKS, BLOCK_SIZE = 64, 4
prompt = partial(tokens, vocab_size=64)
Found: TypeAlias = dict[Any, tuple[object, ...]]


class Recomputed:
    """A fake CUDA graph. `log`: the strings "capture" and "replay", in the order of the calls."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def __call__(self, compute: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], object]]:
        outputs = compute()
        self._log.append("capture")

        def replay() -> None:
            self._log.append("replay")
            for place, found in zip(outputs, compute(), strict=True):
                place.copy_(found)

        return outputs, replay


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs") / "tiny"
    return make_tiny_model("qwen3", folder, dtype="bfloat16", num_hidden_layers=1, vocab_size=64)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a delta net and an attention layer. The model has few columns, because its kernels run in an
    interpreter.
    """
    folder, layers = tmp_path_factory.mktemp("graphs") / "hybrid", ["linear_attention", "full_attention"]
    sizes = dict(linear_num_key_heads=1, linear_num_value_heads=2, linear_value_head_dim=8, vocab_size=64)
    sizes |= dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1)
    return make_tiny_model("qwen3_5", folder, "bfloat16", num_hidden_layers=2, layer_types=layers, **sizes)


@pytest.fixture
def log() -> list[str]:
    return []


MakeEngine: TypeAlias = Callable[..., Engine]


@pytest.fixture
def make_engine(model: Path, log: list[str], steps_ahead: int, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """Return a function that makes engines, with or without graphs for decode steps."""
    attention = reference.paged_attention

    def read_lens(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, *options: Any) -> Tensor:
        if batch.lens is not None:
            batch = dataclasses.replace(batch, context_lens=batch.lens.tolist())
        return attention(q, k_cache, v_cache, batch, *options)

    monkeypatch.setattr(reference, "paged_attention", read_lens)
    monkeypatch.setattr(executor_module, "DecodeGraphs", partial(DecodeGraphs, new_capture=partial(Recomputed, log)))

    def make(
        cuda_graphs: bool,
        folder: Path = model,
        load: Any = load_model,
        drafter: Drafter | None = None,
        draft_always: bool = False,
        **changes: Any,
    ) -> Engine:
        settings = dict(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=64, max_num_seqs=6, num_threads=1)
        settings |= dict(model=str(folder), backend="reference", cuda_graphs=cuda_graphs) | changes
        config = EngineConfig(**settings)
        loaded = load(config)
        backend = dataclasses.replace(loaded.backend, can_capture=True)
        return Engine(config, dataclasses.replace(loaded, backend=backend), drafter, draft_always=draft_always)

    return make


def graphs_of(engine: Engine) -> dict[int, Any]:
    """Return the graphs of the engine by number of rows."""
    graphs = executor_of(engine)._graphs
    assert graphs is not None
    return graphs._graphs


def serve(engine: Engine, requests: Sequence[Request]) -> Found:
    for request in requests:
        engine.add(request)
    return {key_of(output): what(output) for output in drain(engine)}


def serve_all(engine: Engine, requests: Sequence[Request]) -> dict[Any, tuple[bytes, bytes]]:
    """Like `serve`, but also accepts outputs without log-probs."""
    for request in requests:
        engine.add(request)
    outputs = drain(engine)
    return {
        key_of(o): (bytes(o.token_ids), b"" if o.logprobs is None else o.logprobs.tobytes())
        for o in outputs
        if isinstance(o, SampleOutput)
    }


def key_of(output: Output) -> Any:
    return (output.request_id, output.index) if isinstance(output, SampleOutput) else output.request_id


def what(output: Output) -> tuple[object, ...]:
    of_tokens = bits(output) if isinstance(output, SampleOutput) else (output.logprobs.tobytes(),)
    return of_tokens if output.entropy is None else (*of_tokens, *top_bits(output))


def mixed_requests() -> list[Request]:
    """Sampled and greedy requests, with raw log-probs and without, and requests that graphs do not draw: filters, bans
    and `top_logprobs`.
    """
    return [
        generate("sampled", prompt(3), n=2, max_tokens=4),
        generate("greedy", prompt(4, seed=1), temperature=0.0, max_tokens=8, logprobs="raw"),
        generate("filtered", prompt(2, seed=3), top_k=3, max_tokens=2),
        generate("recorded", prompt(2, seed=4), top_logprobs=3, max_tokens=2),
        generate("banned", prompt(2, seed=5), min_tokens=3, stop_token_ids=(7, 9), max_tokens=3),
    ]


@pytest.mark.parametrize("backend", ["reference", "triton"])
@thinned(lambda steps_ahead, backend: backend == "reference" or steps_ahead)
def test_graphs_change_no_bit(make_engine: MakeEngine, log: list[str], backend: str) -> None:
    settings = dict(backend=backend, max_num_seqs=3)
    expected = serve(make_engine(False, **settings), mixed_requests())
    assert log == []
    assert serve(make_engine(True, **settings), mixed_requests()) == expected
    assert log.count("replay") > 4, "forward passes, and at least the draws of the longest request"


@pytest.mark.parametrize("backend", ["reference", "triton"])
@thinned(lambda steps_ahead, backend: backend == "reference")
def test_graphs_have_tables_for_each_window(
    make_engine: MakeEngine, log: list[str], backend: str, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = dict(sliding_window=8, hidden_size=32, intermediate_size=32, num_hidden_layers=2)
    sizes |= dict(vocab_size=64, num_attention_heads=2, num_key_value_heads=1)
    settings = dict(model=str(make_tiny_model("ministral", tmp_path / "m", "bfloat16", **sizes)), backend=backend)
    settings |= dict(max_num_seqs=3, max_num_batched_tokens=8)
    requests = [generate("group", prompt(9), n=3, max_tokens=5)]
    expected = serve(make_engine(False, **settings), requests)
    engine = make_engine(True, **settings)
    window = engine._scheduler.cache.tables.pools[1]
    window.release(window.take(window.num_blocks)[::-1])
    assert serve(engine, requests) == expected and log.count("replay") > 4
    inputs = graphs_of(engine)[4].inputs
    assert (inputs.slots[0] != inputs.slots[1]).all(), "premise: the windows have different blocks"
    assert [int(tables[3, 0]) for tables in inputs.tables] == list(engine.info.blocks_by_window), (
        "padding has a block of its own"
    )


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize("max_num_seqs", [6, 1])
def test_drafts_are_rows_of_graphs(
    make_engine: MakeEngine, log: list[str], tmp_path: Path, family: str, max_num_seqs: int
) -> None:
    """A step with drafts replays graphs, if it has no more rows than the largest graph."""
    sizes: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, vocab_size=64, num_attention_heads=2)
    sizes |= dict(num_key_value_heads=1)
    settings: dict[str, Any] = dict(folder=make_tiny_model(family, tmp_path / "m", **sizes), load=load_dummy)
    settings |= dict(max_num_seqs=max_num_seqs, max_num_batched_tokens=12)
    requests = [generate("a", prompt(5), max_tokens=12)]
    plain = make_engine(False, **settings)
    expected = serve(plain, requests)
    known = array("i", [*prompt(5).tolist(), *run(plain, requests)["a", 0].token_ids])

    def draft(so_far: array[int], most: int) -> list[int]:
        return [*known[len(so_far) :][: min(most, 2)], 1]

    engine = make_engine(True, drafter=FunctionDrafter(draft), speculative="ngram", **settings)
    del log[:]
    assert serve(engine, requests) == expected
    [stats] = engine.stats().drafts
    assert 0 < stats.num_accepted < stats.num_drafted
    num_decodes = engine.stats().steps - 1
    assert stats.drafts >= num_decodes - 1, "all steps of the sample have drafts, but the last"
    fitting = num_decodes if max_num_seqs == 6 else num_decodes - stats.drafts
    assert log.count("replay") == 2 * fitting


def test_the_module_for_multi_token_prediction_follows_graphs(
    make_engine: MakeEngine, log: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hidden states that graphs compute reach the module, beside padding rows.

    Two of four steps have no drafts, and the second one repeats no rows, so that it replays a graph.
    """
    expect = MtpDrafter.expect

    def expect_sometimes(drafter: MtpDrafter, *others: Any) -> Any:
        return expect(drafter, *others) if engine.stats().steps % 4 > 1 else ()

    monkeypatch.setattr(MtpDrafter, "expect", expect_sometimes)
    settings: dict[str, Any] = dict(folder=make_mtp_model("qwen3_5", tmp_path / "m"))
    requests = [generate(str(i), prompt(5 + i), n=3, max_tokens=40) for i in range(2)]
    expected = serve(make_engine(False, **settings), requests)
    drafting: dict[str, Any] = dict(speculative="mtp", num_speculative_tokens=2, draft_always=True)
    found = []
    for cuda_graphs in (False, True):
        engine = make_engine(cuda_graphs, **settings, **drafting)
        del log[:]
        assert serve(engine, requests) == expected
        found.append(engine.stats().drafts)
    assert found[0] == found[1] and found[0][0].num_accepted > 5, "the same drafts"
    assert log.count("replay") > 3


def test_routed_experts_come_out_of_graphs(make_engine: MakeEngine, log: list[str], tmp_path: Path) -> None:
    """Padding rows are neither recorded nor counted."""
    sizes: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, vocab_size=64, num_attention_heads=2)
    sizes |= dict(num_key_value_heads=1)
    settings: dict[str, Any] = dict(folder=make_tiny_model("qwen3_moe", tmp_path / "m", **sizes), load=load_dummy)
    requests = [generate(str(i), prompt(5 + i), n=3 - i, max_tokens=6, return_routed_experts=i < 2) for i in range(3)]
    found = []
    for cuda_graphs in (False, True):
        engine = make_engine(cuda_graphs, **settings)
        samples = run(engine, requests)
        routes = {key: None if (r := s.routed_experts) is None else r.tobytes() for key, s in samples.items()}
        found.append((routes, engine.stats().expert_tokens, engine.stats().computed_tokens))
    assert found[0] == found[1] and log.count("replay") > 4
    assert None not in [found[0][0]["0", 2], found[0][0]["1", 1]] and found[0][0].keys() == {*found[1][0]}


@pytest.mark.parametrize("backend", ["reference", "triton"])
@thinned(lambda steps_ahead, backend: backend == "reference")
def test_graphs_change_no_bit_of_a_mixture(
    make_engine: MakeEngine, log: list[str], backend: str, tmp_path: Path
) -> None:
    """The model has sinks, biases after attention, and a window. Padding rows are also routed to experts."""
    sizes: dict[str, Any] = dict(num_hidden_layers=1, layer_types=["sliding_attention"], vocab_size=64)
    folder = make_tiny_model("gpt_oss", tmp_path / "m", "bfloat16", num_local_experts=4, **sizes)
    settings = dict(model=str(folder), backend=backend, max_num_seqs=3, max_num_batched_tokens=8)
    requests = [generate("group", prompt(9), n=3, max_tokens=4)]
    expected = serve(make_engine(False, **settings), requests)
    assert log == [] and len(set(expected.values())) > 1
    assert serve(make_engine(True, **settings), requests) == expected and log.count("replay") > 2


def test_all_graphs_are_captured_before_the_first_step_and_none_later(make_engine: MakeEngine, log: list[str]) -> None:
    engine = make_engine(True, max_num_seqs=5)
    assert log == ["capture"] * 2 * 4, "a forward pass and a draw of 8, 4, 2 and 1 rows"
    del log[:]
    serve(engine, mixed_requests())
    assert set(log) == {"replay"} and len(set(graphs_of(engine))) == 4


def test_the_largest_graph_is_captured_first(make_engine: MakeEngine) -> None:
    """The other graphs fit into the memory of the largest graph."""
    assert list(graphs_of(make_engine(True, max_num_seqs=3))) == [4, 2, 1]
    assert list(graphs_of(make_engine(True, max_num_seqs=1))) == [1]


@pytest.mark.parametrize(
    "params", [dict(top_p=0.9), dict(min_tokens=4, stop_token_ids=(7, 9)), dict(top_logprobs=2), dict(logprobs=None)]
)
def test_the_forward_pass_is_replayed_whatever_is_drawn(
    make_engine: MakeEngine, log: list[str], params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [generate("r", prompt(7), max_tokens=4, **params), generate("s", prompt(5, seed=1), max_tokens=4)]
    expected = serve_all(make_engine(False), requests)
    engine, computed = make_engine(True), []
    run = executor_of(engine)._runner.run
    monkeypatch.setattr(
        executor_of(engine)._runner, "run", lambda step, *rest: computed.append(step) or run(step, *rest)
    )
    del log[:]
    assert serve_all(engine, requests) == expected
    assert [len(step.token_ids) for step in computed] == [12], "only the prompts are computed without a graph"
    assert log.count("replay") == 3 * (2 if "logprobs" in params else 1), "plain draws are replayed, too"


@pytest.mark.parametrize(
    "beside", [ScoreRequest("beside", prompt(2, seed=4)), generate("beside", prompt(9, seed=4), max_tokens=3)]
)
def test_a_row_with_two_draws_beside_one_with_none(make_engine: MakeEngine, beside: Request) -> None:
    """The step has two tokens and two draws. Both draws follow the first token."""
    settings = dict(max_num_batched_tokens=2, max_num_seqs=2)
    requests = [generate("group", prompt(1), n=2, max_tokens=3), beside]
    expected = serve(make_engine(False, **settings), requests)
    assert len(expected) == 3 and serve(make_engine(True, **settings), requests) == expected


@pytest.mark.parametrize("seed", range(4))
def test_graphs_change_no_bit_of_random_requests(make_engine: MakeEngine, log: list[str], seed: int) -> None:
    rng = random.Random(seed)
    settings = dict(num_blocks=24, max_num_batched_tokens=rng.choice((9, 30)))

    def some_request(i: int) -> Request:
        if rng.random() < 0.2:
            return ScoreRequest(str(i), prompt(rng.randrange(2, 20), seed=i % 5))
        ending = dict(min_tokens=2, stop_token_ids=(7, 9))
        options = rng.choice((dict(), dict(), dict(temperature=0.0), ending, dict(top_k=5), dict(top_logprobs=2)))
        return generate(
            str(i), prompt(rng.randrange(1, 20), seed=i % 5), n=rng.randrange(1, 4), max_tokens=12, **options
        )

    requests = [some_request(i) for i in range(16)]
    expected = serve(make_engine(False, **settings), requests)
    assert log == []
    assert serve(make_engine(True, **settings), requests) == expected
    assert "replay" in log


def test_padding_touches_no_block_of_the_cache(make_engine: MakeEngine) -> None:
    engine = make_engine(True)
    run(engine, [generate("r", prompt(3), n=3, max_tokens=3)])
    graphs = graphs_of(engine)[4]
    inputs = graphs.inputs
    assert inputs.slots[0][3] == NUM_BLOCKS * BLOCK_SIZE != inputs.slots[0][2], "premise: three of four rows are filled"
    caches = [cache for pair in executor_of(engine)._runner.memories for cache in pair]
    before = [cache[:NUM_BLOCKS].clone() for cache in caches]
    with torch.inference_mode():
        for column in (*inputs.slots, *inputs.tables):
            column.copy_(torch.full_like(column, int(column[3].flatten()[0])))
        graphs.forward.replay()
    for cache, was in zip(caches, before, strict=True):
        assert torch.equal(cache[:NUM_BLOCKS].view(torch.int16), was.view(torch.int16))


def test_rows_of_a_hybrid_continue_from_their_states(make_engine: MakeEngine, log: list[str], hybrid: Path) -> None:
    """The samples of a prompt continue from the prompt's state. Each sample writes its state to its own slot."""
    settings = dict(folder=hybrid, num_blocks=24, max_num_batched_tokens=9, state_interval=4)
    requests = [generate(str(i), prompt(3 + 5 * i, seed=i), n=1 + i, max_tokens=3 + 4 * i) for i in range(3)]
    expected = serve(make_engine(False, **settings), requests)
    assert log == []
    engine = make_engine(True, **settings)
    assert serve(engine, requests) == expected and log.count("replay") > 10
    assert serve(engine, requests) == expected and engine.stats().checkpoints_restored > 0


@pytest.mark.parametrize("backend", ["reference", "triton"])
@thinned(lambda steps_ahead, backend: backend == "reference" or steps_ahead)
def test_a_hybrid_resumes_from_a_checkpoint_with_the_same_bits(
    make_engine: MakeEngine, log: list[str], hybrid: Path, backend: str
) -> None:
    """The checkpoint comes from another prompt."""
    settings = dict(folder=hybrid, backend=backend, max_num_seqs=1, state_interval=4)
    shared, request = prompt(5), generate("r", np.concatenate((prompt(5), prompt(2, seed=1))), max_tokens=3)
    expected = serve(make_engine(False, **settings), [request])
    assert log == []
    engine = make_engine(True, **settings)
    serve(engine, [generate("before", shared, max_tokens=1)])
    assert engine.stats().checkpoints_restored == 0
    assert serve(engine, [request]) == expected
    assert engine.stats().checkpoints_restored == 1 and log.count("replay") > 3


def test_padding_touches_no_state(make_engine: MakeEngine, hybrid: Path) -> None:
    engine = make_engine(True, folder=hybrid)
    run(engine, [generate("r", prompt(3), n=3, max_tokens=3)])
    graphs, slots = graphs_of(engine)[4], engine.info.num_slots
    states = graphs.inputs.states
    assert states[:, 3].tolist() == [NO_SLOT, slots] and slots not in states[:, :3], (
        "premise: three of four rows are filled"
    )
    (memory, tails), *_ = executor_of(engine)._runner.memories
    assert len(memory) == len(tails) == slots + 1
    before = memory[:slots].clone(), tails[:slots].clone()
    with torch.inference_mode():
        states.copy_(states[:, 3:].clone().expand_as(states))
        memory[slots] = torch.nan
        graphs.forward.replay()
    assert memory[slots].isfinite().all(), "premise: the slot was written"
    for found, was in zip((memory, tails), before, strict=True):
        assert torch.equal(found[:slots].view(torch.int16), was.view(torch.int16))


def test_a_sleep_drops_the_graphs_and_waking_up_captures_them(make_engine: MakeEngine, log: list[str]) -> None:
    engine = make_engine(True)
    request = generate("r", prompt(3), n=2, max_tokens=3)
    first = serve(engine, [request])
    engine.sleep(1, ("weights", "kv_cache"), "recompute")
    assert not graphs_of(engine)
    del log[:]
    engine.wake_up(("weights",))
    assert log == [] and not graphs_of(engine), "the KV cache still sleeps"
    for _ in range(2):
        engine.wake_up(("kv_cache",))
        assert log == ["capture"] * 2 * 4
    del log[:]
    assert serve(engine, [request]) == first
    assert set(log) == {"replay"}


def test_a_step_computes_only_the_rows_of_its_graph(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, lens = make_engine(True), []
    forward = executor_of(engine)._runner.model.forward

    def note(tokens: ModelInput) -> ModelOutput:
        lens.append(len(tokens.token_ids))
        return forward(tokens)

    monkeypatch.setattr(executor_of(engine)._runner.model, "forward", note)
    run(engine, [generate("r", prompt(7), max_tokens=4)])
    assert lens == [7, 1, 1, 1]
