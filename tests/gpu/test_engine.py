"""Engine and trainer on a GPU: the exactness matrix, CUDA graphs, memory that sleep frees, and bits of an aligned
trainer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.knobs
from torch.nn.utils.rnn import pad_sequence

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.request import Distribution, Request, ScoreRequest, Tag
from trueroll.engine.running.loading import LoadedModel, load_dummy, load_model
from trueroll.engine.scheduling.sequence import Chunks
from trueroll.kernels.training import align, token_log_probs
from trueroll.rollout.tools import verify

from ..engine.checkpoints import stage
from ..engine.drive import bits, generate, run, tokens
from ..engine.test_trainer_log_probs import TEMPERATURE, count_differences, roll_out, trainer_model
from .moved import DEVICE, cut_config, sized

BOTH: tuple[Tag, ...] = ("weights", "kv_cache")


def config_of(model: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(model), device=str(DEVICE), backend="triton", **settings)


@pytest.fixture
def two_layers(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The configuration of Qwen3-0.6B, or of the model that a test names, cut to two layers."""
    return cut_config(getattr(request, "param", "qwen3-0.6b"), tmp_path)


dense_and_mixture = pytest.mark.parametrize("two_layers", ["qwen3-0.6b", "qwen3-moe-0.3b"], indirect=True)


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use all cells of the matrix, or only one cell in a rehearsal."""
    monkeypatch.setattr(verify, "CELLS", sized(verify.CELLS, verify.CELLS[1:2]))


def failing_cells(config: EngineConfig, loaded: LoadedModel) -> list[str]:
    assert loaded.backend.name == "triton" and loaded.backend.can_capture == (DEVICE.type == "cuda")
    sizes = sized(verify.SIZES, verify.Sizes((5,), max_tokens=6, longest_token_by_token=5, varied_length=5))
    results = list(verify.run_matrix(config, loaded, sizes))
    assert len(results) == 1 + len(verify.cells_of(loaded)) and all(result.tokens > 0 for result in results[1:])
    return [f"{r.cell.name}: {r.differences} differ, {r.failed_premises}" for r in results if not r.passed]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_bit_differs_in_any_cell(gpu: torch.device, tiny_model: Path, dtype: str) -> None:
    config = config_of(tiny_model, dtype=dtype)
    assert failing_cells(config, load_model(config)) == []


def test_no_bit_differs_for_layers_of_real_size(two_layers: Path, cells: None) -> None:
    config = config_of(two_layers)
    assert failing_cells(config, load_dummy(config)) == []


@pytest.fixture
def replays(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The list of all replays of CUDA graphs in this test."""
    seen: list[object] = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (seen.append(graph), replay(graph)))
    return seen


@dense_and_mixture
def test_graphs_change_no_bit(two_layers: Path, replays: list[object]) -> None:
    """Ten samples end at different steps, so that the number of decodes shrinks."""
    config = config_of(two_layers, max_model_len=2048, max_num_batched_tokens=4096)
    loaded = load_dummy(config)
    requests = [
        generate(str(i), tokens(500 + i, seed=i), n=1 + i, temperature=float(i > 0), max_tokens=8 + 6 * i)
        for i in range(4)
    ]
    by_graphs = all_bits(Engine(config, loaded), requests)
    assert len(replays) >= 20 and len(set(replays)) >= 3, "graphs of several sizes ran"
    replays.clear()
    assert all_bits(Engine(config.model_copy(update={"cuda_graphs": False}), loaded), requests) == by_graphs
    assert replays == []


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make operations that synchronize the device raise RuntimeError."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def kinds_of(chunks: Chunks) -> set[str]:
    """Return the kinds of work in a step. Different kinds launch different kernels."""
    decodes = [chunk for chunk in chunks if chunk.start >= chunk.sequence.num_prompt_tokens]
    drawing = [sample.request.params for chunk in chunks for sample in chunk.drawing]
    found = {
        "mixed": 0 < len(decodes) < len(chunks),
        "filters": any(params.has_filters for params in drawing),
        "score": any(chunk.scoring for chunk in chunks),
    }
    return {kind for kind, is_there in found.items() if is_there}


@dense_and_mixture
def test_a_step_is_queued_without_waiting_for_the_device(
    two_layers: Path, replays: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(two_layers, max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=64)
    engine = Engine(config, load_dummy(config))
    requests = [
        generate("plain", tokens(20), temperature=1.0, max_tokens=12),
        generate("filters", tokens(20, seed=1), temperature=1.0, top_k=5, top_p=0.9, max_tokens=4),
        generate("group", tokens(150, seed=2), n=2),
        ScoreRequest("score", tokens(100, seed=3), Distribution()),
    ]
    expected = all_bits(engine, requests)
    engine.invalidate_prefix_cache()
    replays.clear()
    kinds: set[str] = set()
    launch: Callable[[Chunks, float], object] = engine._pipeline._launch

    def launch_without_waiting(chunks: Chunks, started: float) -> object:
        kinds.update(kinds_of(chunks))
        with no_waiting():
            return launch(chunks, started)

    monkeypatch.setattr(engine._pipeline, "_launch", launch_without_waiting)
    assert all_bits(engine, requests) == expected
    assert kinds == {"mixed", "filters", "score"} and replays, "all kinds of steps ran"
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device=DEVICE).item()


def all_bits(engine: Engine, requests: Sequence[Request]) -> dict[tuple[str, int], tuple[tuple[int, ...], bytes]]:
    return {key: bits(sample) for key, sample in run(engine, requests).items()}


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("tags", [BOTH, BOTH[:1], BOTH[1:]], ids="+".join)
def test_sleep_gives_the_memory_of_the_device_back(
    two_layers: Path, gpu: torch.device, level: int, tags: tuple[Tag, ...], record_property: Callable[[str, str], None]
) -> None:
    config = config_of(two_layers, kv_memory=2**30, max_model_len=2048, host_cache_bytes=2**28)
    engine = Engine(config, load_dummy(config))
    weights = {name: weight.to_dense().cpu() for name, weight in engine.weights.tensors.items()}
    requests = [generate(str(i), tokens(100 + i), n=3) for i in range(4)]
    expected = all_bits(engine, requests)
    held, awake = engine.memory(), free_bytes()
    before = time.perf_counter()
    assert engine.sleep(level, tags, "recompute") == []
    seconds, asleep = time.perf_counter() - before, free_bytes()
    expected_bytes = sum(held[tag] for tag in tags)
    assert asleep - awake >= 0.97 * expected_bytes > 0, "the system has the memory, not torch"
    before = time.perf_counter()
    engine.wake_up(BOTH)  # waking what is awake is a no-op
    awake_seconds = time.perf_counter() - before
    assert asleep - free_bytes() >= 0.97 * expected_bytes
    what = f"level {level} of {' and '.join(tags)}: {asleep - awake} of {expected_bytes} bytes given back"
    record_property("found", f"{what}, asleep in {seconds * 1e3:.0f} ms, awake in {awake_seconds * 1e3:.0f} ms")
    if level == 2 and "weights" in tags:
        engine.commit_weights(stage(engine, weights, step=4096), 1, "recompute")
    assert all_bits(engine, requests) == expected


@dense_and_mixture
def test_serving_compiles_no_kernel_and_captures_no_graph(
    gpu: torch.device, two_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    begin = torch.cuda.CUDAGraph.capture_begin

    def capture(graph: torch.cuda.CUDAGraph, *args: Any, **options: Any) -> None:
        seen.append("capture")
        begin(graph, *args, **options)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", capture)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **_: seen.append("compile"))
    config = config_of(two_layers, max_model_len=2048, max_num_seqs=48, max_num_batched_tokens=700)
    engine = Engine(config, load_dummy(config))
    assert "capture" in seen
    seen.clear()
    requests: list[Request] = [
        generate("group", tokens(1500), n=40, max_tokens=9),
        generate("filters", tokens(20, seed=1), n=3, top_k=5, top_p=0.9, top_logprobs=50, max_tokens=12),
        generate("banned", tokens(300, seed=2), min_tokens=5, stop_token_ids=[7], max_tokens=20),
        ScoreRequest("score", tokens(700, seed=3), Distribution(top_p=0.5), top_logprobs=3),
    ]
    all_bits(engine, requests)
    assert seen == []
    engine.sleep(1, BOTH, "recompute")
    engine.wake_up(BOTH)
    assert set(seen) == {"capture"}
    seen.clear()
    all_bits(engine, requests)
    assert seen == []

    @triton.jit
    def new_kernel(x: torch.Tensor) -> None:
        pass

    new_kernel[1,](torch.ones(1, device=DEVICE))
    assert seen == ["compile"], "premise: compiling is noticed"


def test_a_commit_while_the_device_is_busy(gpu: torch.device, two_layers: Path) -> None:
    """Weights are staged on a separate CUDA stream, as in a push. The staging is freed before the device begins to
    copy.
    """
    config = config_of(two_layers, kv_memory=2**28, max_model_len=2048)
    engine = Engine(config, load_dummy(config))
    expected = {name: weight.to_dense().cpu().flip(0) for name, weight in engine.weights.tensors.items()}
    with torch.cuda.stream(torch.cuda.Stream()):
        staging = stage(engine, expected, step=4096)
        torch.cuda.current_stream().synchronize()
        size = staging.num_bytes
        with torch.cuda.stream(torch.cuda.default_stream()):
            torch.cuda._sleep(10**9)  # cycles: about half a second
            engine.commit_weights(staging, 1, "recompute")
        assert size > 0 == staging.num_bytes
        in_their_place = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    assert all(torch.equal(engine.weights.tensors[name].to_dense().cpu(), tensor) for name, tensor in expected.items())
    assert in_their_place.eq(255).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_trainer_computes_the_bits_of_the_rollout(gpu: torch.device, tiny_model: Path, dtype: str) -> None:
    rollout = roll_out(tiny_model, dtype=dtype, device="cuda", backend="triton")
    model = trainer_model(tiny_model, dtype).to(DEVICE)
    align(model, "triton")
    sequences = [torch.tensor([*prompt, *s.token_ids]).long().to(DEVICE) for prompt, s in rollout]
    lengths = [len(sequence) for sequence in sequences]
    packed = token_log_probs(model, torch.cat(sequences), lengths=lengths, temperature=TEMPERATURE).split(lengths)
    mask = pad_sequence([torch.ones_like(sequence) for sequence in sequences], batch_first=True)
    padded = token_log_probs(model, pad_sequence(sequences, batch_first=True), mask, temperature=TEMPERATURE)
    for found in (packed, padded):
        parts = [
            row[len(prompt) : n].detach().cpu() for row, (prompt, _), n in zip(found, rollout, lengths, strict=True)
        ]
        assert count_differences(parts, rollout) == 0
