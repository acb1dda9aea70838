"""Measure the cost of computing sums in pieces on one device: `python examples/benchmarks/pieces_report.py [CONFIG]`.

A long sum can be computed in several pieces, which are then added (see the module `kernels.pieces`). Two engines take
turns and serve the same requests: the first engine computes sums in the model's number of pieces, the second engine in
one piece. The table shows the speed with the model's number of pieces as a multiple of the speed with one piece: the
median and the range of several pairs of runs. CONFIG: as in `trueroll bench --dummy-weights`; default: qwen3-0.6b. Run
the report on an otherwise idle machine.
"""

from __future__ import annotations

import statistics
import sys

import torch
from rich.console import Console
from rich.table import Table

from trueroll.engine.config import EngineConfig
from trueroll.engine.running.loading import load_dummy
from trueroll.rollout.tools.bench import WORKLOADS, EngineSystem

PAIRS = 7


def system(model: str, pieces: int | None) -> EngineSystem:
    config = EngineConfig(model=model, dtype="bfloat16", num_blocks=2048, pieces=pieces)
    return EngineSystem(config, load_dummy(config))


@torch.inference_mode()
def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "qwen3-0.6b"
    whole, cut = system(model, 1), system(model, None)
    info = cut.engine.info
    table = Table("workload", "speed", "slowest to fastest", title=f"{model} in {info.pieces} pieces, {info.isa}")
    for name in ("group", "single"):
        [workload] = WORKLOADS[name]
        speeds = list[float]()
        for number in range(1 + PAIRS):
            seconds = {each: each(workload).seconds for each in [whole, cut][:: 1 if number % 2 else -1]}
            if number > 0:  # the first pair of runs is a warm-up
                speeds.append(seconds[whole] / seconds[cut])
        table.add_row(name, f"{statistics.median(speeds):.3f}", f"{min(speeds):.3f} to {max(speeds):.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
