"""Warm-up before the first step on a GPU: which kernels are compiled, how memory is planned, and how it fails.

The tests use no GPU. Kernels are interpreted, and each replay runs the captured computation again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from matrix import thinned

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.models.decoder import ModelOutput
from trueroll.engine.request import Distribution, Request, ScoreRequest
from trueroll.engine.running import executor as executor_module
from trueroll.engine.running import warm_up
from trueroll.engine.running.graphs import DecodeGraphs, Outputs
from trueroll.engine.running.loading import load_model
from trueroll.engine.running.model_runner import ModelRunner
from trueroll.errors import ConfigError
from trueroll.kernels import reference
from trueroll.kernels.triton import attention, backend, experts, head, products, recurrence, rows
from trueroll.kernels.triton.launch import Launch, form_of

from ..drive import drain, generate, make_engine, tokens

prompt = partial(tokens, vocab_size=64)
BYTES_PER_BLOCK = 1024  # keys and values of two layers, four tokens and two heads of 16 numbers in bfloat16
FREE = 1000 * BYTES_PER_BLOCK


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The events on a machine with a CPU that is treated like a GPU.

    An event is a capture with its rows, a forward pass with its rows and number of blocks, or a query of the free
    memory.
    """
    seen: list[Any] = []
    forward = ModelRunner.forward

    def capture(compute: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], object]]:
        outputs = compute()
        seen.append(("capture", len(outputs[0])))
        return outputs, lambda: [place.copy_(found) for place, found in zip(outputs, compute(), strict=True)]

    def note(runner: ModelRunner, *inputs: Any) -> ModelOutput:
        seen.append(("forward", len(inputs[0]), len(runner.memories[0][0])))
        return forward(runner, *inputs)

    for module in (executor_module, warm_up):
        monkeypatch.setattr(module, "is_needed", lambda device: True)
        monkeypatch.setattr(module, "DecodeGraphs", partial(DecodeGraphs, new_capture=lambda: capture))
    monkeypatch.setattr(ModelRunner, "forward", note)
    monkeypatch.setattr(warm_up, "available_memory", lambda device: seen.append("look") or FREE)
    return seen


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen2", tmp_path_factory.mktemp("warm") / "tiny", dtype="bfloat16", vocab_size=64)


def engine_of(model: Path, **settings: Any) -> Engine:
    sizes = dict(block_size=4, max_num_seqs=4, max_num_batched_tokens=24, num_threads=1, backend="reference")
    config = EngineConfig(model=str(model), **(sizes | settings))
    loaded = load_model(config)
    capturing = dataclasses.replace(loaded.backend, can_capture=True)
    return Engine(config, dataclasses.replace(loaded, backend=capturing))


def test_free_memory_is_measured_beside_the_largest_step_and_all_graphs(model: Path, events: list[Any]) -> None:
    engine = engine_of(model, kv_memory_fraction=0.9)
    assert events.count("look") == 1 and engine.info.num_blocks == 900
    before, after = events[: events.index("look")], events[events.index("look") + 1 :]
    captures = [("capture", size) for size in (4, 4, 2, 2, 1, 1)]
    assert [event for event in before if event[0] == "capture"] == captures
    assert before[-1] == ("forward", 24, 1), "computed on a KV cache of one block"
    assert [event for event in after if event[0] == "capture"] == captures
    assert {event[2] for event in after if event[0] == "forward"} == {900 + 1}
    assert engine.info.warm_up_seconds > 0


@pytest.mark.parametrize(
    ("settings", "num_blocks"),
    [
        (dict(), 250),
        (dict(max_model_len=64), 4 * 64 // 4),
        (dict(max_model_len=64, kv_memory_fraction=0.5), 500),
        (dict(kv_memory=20 * BYTES_PER_BLOCK), 20),
        (dict(num_blocks=1000), 1000),
    ],
)
def test_the_kv_cache_takes_its_share_of_the_free_memory(
    model: Path, events: list[Any], settings: dict[str, Any], num_blocks: int
) -> None:
    assert engine_of(model, cuda_graphs=False, **settings).info.num_blocks == num_blocks


def test_more_than_the_free_memory_is_refused(model: Path, events: list[Any]) -> None:
    for settings in (dict(num_blocks=1001), dict(kv_memory=FREE + BYTES_PER_BLOCK)):
        with pytest.raises(ConfigError, match=f"1001 blocks .* exceed the {FREE} bytes of available memory"):
            engine_of(model, **settings)


def test_steps_that_do_not_fit_are_refused_with_what_to_lower(
    model: Path, events: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*inputs: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    monkeypatch.setattr(ModelRunner, "forward", fail)
    with pytest.raises(
        ConfigError, match="^max_num_batched_tokens, .* weights: tried to allocate 3 GiB; lower one of these settings"
    ):
        engine_of(model)


def test_a_kernel_cache_that_cannot_be_written_is_named(
    model: Path, events: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*inputs: Any) -> None:
        raise fault

    monkeypatch.setenv("TRITON_CACHE_DIR", "/cache/kernels")
    monkeypatch.setattr(backend, "compile_all", fail)
    for place in ("/cache", "/cache/kernels/ABC"):
        fault = PermissionError(13, "Permission denied", place)
        with pytest.raises(ConfigError, match=f"^TRITON_CACHE_DIR: cannot use .*denied: '{place}'; name another"):
            engine_of(model, backend="triton")
    fault = OSError(28, "No space left on device")
    with pytest.raises(ConfigError, match="^TRITON_CACHE_DIR: cannot use .*No space left on device; name another"):
        engine_of(model, backend="triton")


def test_a_missing_compiler_is_named(model: Path, events: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*inputs: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory", "gcc")

    monkeypatch.setattr(backend, "compile_all", fail)
    with pytest.raises(
        ConfigError, match="^triton: cannot run .*No such file or directory: 'gcc'; install a C compiler"
    ):
        engine_of(model, backend="triton")


def test_a_cpu_needs_no_warm_up(tiny_llama: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*inputs: Any) -> None:
        pytest.fail("something was computed before the first step")

    for module, name in ((reference, "prepare"), (ModelRunner, "forward"), (warm_up, "_rehearse")):
        monkeypatch.setattr(module, name, fail)
    engine = make_engine(tiny_llama, backend=backend)
    with pytest.raises(pytest.fail.Exception, match="before the first step"):
        engine.add(generate("r", tokens(5)))
        drain(engine)


KERNELS: tuple[ModuleType, ...] = (attention, experts, head, products, recurrence, rows)


def requests() -> list[Request]:
    """All kinds of draws and scores, and prompts in chunks of several lengths."""
    both = dict(top_k=5, min_tokens=2, stop_token_ids=[7], allowed_token_ids=range(60), top_logprobs=0)
    return [
        generate("plain", prompt(20), n=2, max_tokens=2),
        generate("recorded", prompt(3, seed=2), top_logprobs=40, max_tokens=2),
        generate("filtered", prompt(3, seed=3), max_tokens=2, **both),
        ScoreRequest("score", prompt(5, seed=4), Distribution(top_k=3), top_logprobs=2),
    ]


ONE_LAYER: dict[str, Any] = dict(num_hidden_layers=1)
WINDOWED_LAYER = ONE_LAYER | dict(layer_types=["sliding_attention"])
HYBRID: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=1,
    linear_num_value_heads=1,
    linear_value_head_dim=8,
)


@pytest.mark.parametrize(
    ("family", "sizes", "most_rows"),
    [
        ("qwen2", ONE_LAYER, 17),
        ("olmo3", WINDOWED_LAYER, 17),
        ("qwen3_5", HYBRID, 17),
        ("qwen3_5", HYBRID, 2),
        ("gpt_oss", WINDOWED_LAYER | dict(num_local_experts=4), 17),
    ],
)
@thinned(lambda family, sizes, most_rows: family == "qwen3_5" and most_rows == 17)
def test_steps_launch_no_kernel_that_was_not_prepared_and_capture_nothing(
    family: str,
    sizes: dict[str, Any],
    most_rows: int,
    tmp_path: Path,
    events: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared: list[Launch] = []
    launched: set[Launch] = set()
    launch = attention.launch

    def note(kernel: Any, grid: Any, *args: Any, warps: int, stages: int = 1, **constants: Any) -> None:
        launched.add(form_of(kernel, grid, args, warps, stages, constants))
        launch(kernel, grid, *args, warps=warps, stages=stages, **constants)

    monkeypatch.setattr(backend, "compile_all", lambda forms, device: prepared.extend(forms))
    folder = make_tiny_model(family, tmp_path, "bfloat16", vocab_size=64, **sizes)
    settings = dict(num_blocks=40, max_num_seqs=2, max_num_batched_tokens=most_rows, state_interval=64)
    engine = engine_of(folder, backend="triton", **settings)
    assert len(set(prepared)) == len(prepared) > 12
    del events[:]
    for module in KERNELS:
        monkeypatch.setattr(module, "launch", note)
    for request in requests():
        engine.add(request)
    drain(engine)
    assert launched <= set(prepared) and len(launched) > 12
    assert any(form.kernel is head._mask_kernel for form in launched)
    forms = {dict(form.constants)["LISTED"] for form in launched if form.kernel is recurrence._delta_rule_kernel}
    assert forms == ({True, False} if family == "qwen3_5" else set())
    tiles = {dict(form.constants)["TOKENS"] for form in launched if form.kernel is experts._down_kernel}
    assert tiles == ({16, 32} if family == "gpt_oss" else set())
    assert {event[1] for event in events} >= {2, most_rows} and {event[0] for event in events} == {"forward"}
