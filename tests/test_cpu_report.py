"""The report on a CPU counts what the ops did."""

from __future__ import annotations

import runpy
from pathlib import Path

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.running.loading import load_model
from trueroll.rollout.tools.bench import Workload

REPORT = runpy.run_path(str(Path(__file__).parents[1] / "examples/cpu_report.py"))


def test_the_arithmetic_of_the_ops_is_counted(tiny_llama: Path) -> None:
    config = EngineConfig(model=str(tiny_llama), num_blocks=64)
    meter = REPORT["Meter"](load_model(config))
    workload = Workload("tiny", num_prompts=2, shared=0, own=20, n=3, max_tokens=5, temperature=1.0)
    phases = REPORT["run_workload"](Engine(config, meter.loaded), workload, meter)
    steps, seconds, op_seconds, flops, num_bytes = phases["decode"]
    model = meter.loaded.model.config
    assert steps == 4 and 0 < sum(op_seconds.values()) < seconds
    draws = 2 * 3 * steps
    assert flops["next_tokens"] == 2 * draws * model.vocab_size * model.hidden_size
    assert flops["gate_up"] == 2 * draws * model.num_layers * 2 * model.intermediate_size * model.hidden_size
    pairs = sum(20 + i for i in range(1, 5)) * 2 * 3
    assert flops["paged_attention"] == 4 * pairs * model.num_layers * model.num_heads * model.head_dim
    assert num_bytes["next_tokens"] == steps * meter.loaded.model.head.nbytes
    assert phases["prompts"][3]["next_tokens"] == 2 * 2 * 3 * model.vocab_size * model.hidden_size
