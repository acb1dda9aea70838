"""The CPU report counts the arithmetic and the bytes of the ops."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest
import torch

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.running.loading import load_model
from trueroll.kernels.contract import NO_SLOT, AttentionBatch, ExpertsWeights, StateBatch
from trueroll.kernels.specs import DeltaNetSpec, ExpertsSpec, Mamba2Spec, NormSpec
from trueroll.rollout.tools.bench import Workload

REPORT = runpy.run_path(str(Path(__file__).parents[2] / "examples/benchmarks/cpu_report.py"))


def test_the_arithmetic_of_the_ops_is_counted(tiny_llama: Path) -> None:
    config = EngineConfig(model=str(tiny_llama), num_blocks=64)
    meter = REPORT["Meter"](load_model(config))
    workload = Workload("tiny", num_prompts=2, shared=0, own=20, n=3, max_tokens=5, temperature=1.0)
    phases = REPORT["run_workload"](Engine(config, meter.loaded), workload, meter)
    steps, _, op_seconds, flops, num_bytes = phases["decode"]
    spec = meter.loaded.model.spec
    layers, attention, mlp = len(spec.layers), spec.layers[0].mixer, spec.layers[0].mlp
    assert steps == 4 and op_seconds.keys() == flops.keys() == num_bytes.keys() > {"qkv", "gate_up", "next_tokens"}
    draws = 2 * 3 * steps
    assert flops["next_tokens"] == 2 * draws * spec.vocab_size * spec.hidden_size
    assert flops["gate_up"] == 2 * draws * layers * 2 * mlp.intermediate_size * spec.hidden_size
    pairs = sum(20 + i for i in range(1, 5)) * 2 * 3
    assert flops["paged_attention"] == 4 * pairs * layers * attention.num_heads * attention.head_dim
    assert num_bytes["next_tokens"] == steps * meter.loaded.model.head.nbytes
    assert phases["prompts"][3]["next_tokens"] == 2 * 2 * 3 * spec.vocab_size * spec.hidden_size


def test_the_ops_of_a_mixture_are_counted(tmp_path: Path) -> None:
    config = EngineConfig(model=str(make_tiny_model("qwen3_moe", tmp_path / "model")), num_blocks=64)
    meter = REPORT["Meter"](load_model(config))
    workload = Workload("tiny", num_prompts=1, shared=0, own=20, n=1, max_tokens=3, temperature=1.0)
    phases = REPORT["run_workload"](Engine(config, meter.loaded), workload, meter)
    spec = meter.loaded.model.spec
    of_expert = sum(3 * layer.mlp.intermediate_size * layer.mlp.top_k for layer in spec.layers) * spec.hidden_size
    assert phases["decode"][3]["experts"] == 2 * 2 * of_expert, "two steps with one row"


def test_attention_counts_what_a_window_sees() -> None:
    """The last 3 of 20 tokens, in blocks of 4, are queries. A window of 5 reads tokens 13 to 19, in 2 blocks."""
    batch = AttentionBatch([0, 3], [20], torch.arange(5)[None])
    q, cache = torch.zeros(3, 6, 16), torch.zeros(5, 4, 2, 16)
    everything = REPORT["attention_cost"](q, cache, cache, batch, 0.1, None, None, None)
    assert everything == (4 * (18 + 19 + 20) * 6 * 16, 2 * cache.nbytes)
    found = REPORT["attention_cost"](q, cache, cache, batch, 0.1, 5, None, None)
    assert found == (4 * 15 * 6 * 16, 2 * 2 * cache[0].nbytes)


def test_latent_attention_counts_keys_and_shorter_values() -> None:
    batch, caches = (
        AttentionBatch([0, 1], [8], torch.arange(2)[None]),
        (torch.zeros(2, 4, 1, 48), torch.zeros(2, 4, 1, 32)),
    )
    found = REPORT["attention_cost"](torch.zeros(1, 6, 48), *caches, batch, 0.1)
    assert found == (2 * 8 * 6 * (48 + 32), sum(cache.nbytes for cache in caches))


def test_only_the_experts_that_rows_go_to_are_read() -> None:
    """Three of eight experts are read, each once. An expert has matrices [2 * 32, 64] and [64, 32]."""
    spec = ExpertsSpec(num_experts=8, top_k=2, intermediate_size=32)
    gate_up, down = torch.zeros(8 * 2 * 32, 64), torch.zeros(8 * 64, 32)
    weights = ExpertsWeights(torch.zeros(8, 64), None, gate_up, None, down, None)
    experts = torch.tensor([[0, 5], [0, 7], [5, 7]])
    found = REPORT["experts_cost"](torch.zeros(3, 64), spec, weights, experts, torch.ones(3, 2))
    assert found == (2 * 6 * 3 * 32 * 64, 3 * 3 * 32 * 64 * 4)


def test_a_recurrence_reads_and_writes_each_state_once() -> None:
    """Two sequences have three tokens and one token. The sequence that begins here reads no state."""
    spec, states = DeltaNetSpec(1, 2, 8, 16, 4, NormSpec(1e-6)), torch.zeros(5, 2, 8, 16)
    batch = StateBatch([0, 3, 4], torch.tensor([4, NO_SLOT]), torch.tensor([4, 1]))
    found = REPORT["COSTS"]["delta_rule"](torch.zeros(4, spec.channels), None, None, spec, None, states, batch)
    assert found == (4 * 7 * 2 * 8 * 16, 3 * 2 * 8 * 16 * 4)
    space = Mamba2Spec(2, 16, 1, 8, 4, NormSpec(1e-6))
    found = REPORT["COSTS"]["state_space"](torch.zeros(4, space.channels), None, space, None, states, batch)
    assert found == (4 * 5 * 2 * 8 * 16, 3 * 2 * 8 * 16 * 4)


@pytest.mark.parametrize("family", ["qwen3_5", "bamba"])
def test_recurrences_of_all_layers_are_run(family: str, tmp_path: Path) -> None:
    """Three of four layers have a recurrence. Two sequences have two rows each."""
    loaded = load_model(EngineConfig(model=str(make_tiny_model(family, tmp_path))))
    assert len(specs := loaded.model.spec.recurrent) == 3, "premise"
    run, (flops, num_bytes) = REPORT["recurrence"](loaded, [2, 2])
    outs, size = run(), math.prod(specs[0].state_shape)
    assert [out.shape[0] for out in outs] == [4] * 3 and all(out.isfinite().all() for out in outs)
    assert flops == 3 * 4 * (7 if family == "qwen3_5" else 5) * size and num_bytes == 3 * 2 * 2 * size * 4
