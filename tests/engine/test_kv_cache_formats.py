"""KV caches of 8 bits: no bit depends on how samples are computed, and a trainer computes the bits of the worker."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import thinned

from tiny import make_tiny_model
from trueroll.kernels.cache_formats import CACHE_FORMATS
from trueroll.kernels.training import align, aligned_with, token_log_probs

from .drive import executor_of, make_engine, tokens
from .running.test_ranks import FAMILIES as RANKED
from .test_host_tier import CASES, converse
from .test_parallel import engine_of
from .test_parallel import run as run_on_ranks
from .test_trainer_log_probs import count_differences, packed, padded, roll_out, trainer_model

FAMILIES = ("llama", "gemma3", "qwen3_5_moe", "deepseek_v3")
STATES: dict[str, dict[str, Any]] = {"qwen3_5_moe": dict(state_interval=16)}


@pytest.mark.parametrize(("family", "setting"), [*product(FAMILIES, CACHE_FORMATS)])
@thinned(lambda family, setting, backend: backend != "triton" and (backend == "cpu" or family == "llama"))
def test_a_trainer_computes_the_bits_of_a_worker_with_a_quantized_cache(
    family: str, setting: str, backend: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(family, tmp_path)
    settings: dict[str, Any] = dict(dtype="bfloat16", kv_cache_dtype=setting, backend=backend)
    rollout = roll_out(folder, (80, 40, 5), **settings, **STATES.get(family, {}))
    plain, model = (trainer_model(folder, "bfloat16") for _ in range(2))
    align(plain, backend)
    align(model, backend, kv_cache_dtype=setting)
    assert aligned_with(model)._asdict().items() <= asdict(make_engine(folder, **settings).info).items()
    assert count_differences(packed(plain, rollout), rollout) > 0, "premise: the format changes keys and values"
    assert [count_differences(batch(model, rollout), rollout) for batch in (packed, padded)] == [0, 0]


@pytest.mark.parametrize(("family", "setting"), [("qwen3_5", "int8"), ("deepseek_v3", "fp8")])
def test_no_bit_depends_on_chunks_or_on_where_codes_come_from(family: str, setting: str, tmp_path: Path) -> None:
    model, states = make_tiny_model(family, tmp_path), CASES[family]
    settings: dict[str, Any] = dict(dtype="bfloat16", kv_cache_dtype=setting, block_size=8, max_num_seqs=4, **states)
    expected = converse(make_engine(model, **settings))
    assert expected != converse(make_engine(model, **settings | dict(kv_cache_dtype="auto"))), "premise: codes matter"
    tiered = make_engine(model, **settings, num_blocks=24, max_num_batched_tokens=32, host_cache_bytes=2**24)
    assert converse(tiered) == expected and tiered.stats().host_restored > 0
    assert converse(tiered, together=True) == expected and tiered.stats().preemptions > 0


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("most", [2, 4])
@pytest.mark.parametrize("setting", CACHE_FORMATS)
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", "deepseek_v3"])
@thinned(lambda family, setting, most: (family, setting, most) == ("deepseek_v3", "int8", 2))
def test_ranks_change_no_bit(family: str, setting: str, most: int, tmp_path: Path) -> None:
    model = str(make_tiny_model(family, tmp_path, **RANKED[family]))
    found = []
    for size, stages in ((1, 1), (most, 1), (most // 2, 2)):
        with engine_of(model, size, stages, dtype="bfloat16", kv_cache_dtype=setting) as engine:
            found.append(run_on_ranks(engine))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_of_codes_takes_the_planned_bytes(family: str, tmp_path: Path) -> None:
    model, states = make_tiny_model(family, tmp_path), STATES.get(family, {})
    settings: dict[str, Any] = dict(dtype="bfloat16", num_blocks=64, **states)
    engines = {name: make_engine(model, **settings, kv_cache_dtype=name) for name in ("auto", *CACHE_FORMATS)}
    spec = executor_of(engines["auto"])._runner.model.spec
    cached = [mixer for mixer in spec.attentions if mixer.window == spec.windows[0]]
    for name, engine in engines.items():
        runner = executor_of(engine)._runner
        held = sum(memory.nbytes for group in runner.memories for memory in group)
        assert held == engine.info.kv_bytes + engine.info.state_bytes and engine.info.kv_cache_dtype == name
    vectors = [(m.num_kv_heads, sizes) for m in cached for sizes in (m.key_sizes, m.cached_sizes[1:])]
    for name, shared in (("int8", 4), ("fp8", 2)):
        planned = sum(heads * sum(size + shared for size in sizes) for heads, sizes in vectors)
        assert engines[name].info.token_bytes == planned < 0.7 * engines["auto"].info.token_bytes


def test_gradients_reach_keys_and_values(tmp_path: Path) -> None:
    model = trainer_model(make_tiny_model("llama", tmp_path), "float32")
    align(model, kv_cache_dtype="int8")
    ids = torch.from_numpy(tokens(40))[None].long()
    token_log_probs(model, ids).sum().backward()
    attention = model.model.layers[0].self_attn
    for projection in (attention.k_proj, attention.v_proj):
        assert projection.weight.grad.isfinite().all() and projection.weight.grad.any()


@pytest.mark.parametrize("setting", ["auto", "int8"])
def test_a_backend_without_codes_warns_that_no_memory_is_saved(
    setting: str, tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = make_engine(tiny_llama, backend="reference", kv_cache_dtype=setting).info
    native = make_engine(tiny_llama, kv_cache_dtype=setting).info
    warned = [record.getMessage() for record in caplog.records if "kv_cache_dtype" in record.getMessage()]
    assert reference.kv_cache_dtype == native.kv_cache_dtype == setting
    if setting == "auto":
        assert not warned and native.token_bytes == reference.token_bytes
    else:
        assert warned == [
            "kv_cache_dtype: the backend reference stores the values of int8 in float32, so the KV cache takes as much "
            "memory as with auto"
        ]
        assert native.token_bytes < 0.4 * reference.token_bytes
