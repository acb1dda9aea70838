"""Report the overhead of alignment for a trainer: `python examples/benchmarks/training_report.py [MODEL]`.

The report takes 5 minutes and 8 GB of memory with `smollm2`. For several batches and dtypes, the report shows the time
of an aligned training step divided by the time of an unaligned step. A step is a forward and a backward pass, without
the optimizer. The ratio is the median over pairs of consecutive steps. With `--fsdp 2`, two processes shard the model
with FSDP2. The weights are float32, and the model computes in bfloat16. Each process gets half of the cores and half of
the batch.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from trueroll.kernels.training import align, token_log_probs, unalign
from trueroll.rollout import resolve_model

WAYS = {
    "bfloat16": (torch.bfloat16, False),
    "float32 under bfloat16 autocast": (torch.float32, True),
    "float32": (torch.float32, False),
}


def plain_log_probs(model: Any, ids: Tensor) -> Tensor:
    log_probs = torch.log_softmax(model(ids).logits[:, :-1].float(), -1)
    return log_probs.gather(2, ids[:, 1:, None])


def time_step(model: Any, ids: Tensor, log_probs: Callable[[Any, Tensor], Tensor], is_autocast: bool) -> float:
    """Return the seconds of a training step."""
    model.zero_grad()
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16) if is_autocast else nullcontext():
        found = log_probs(model, ids)
    found.sum().backward()
    return time.perf_counter() - start


def time_pair(model: Any, ids: Tensor, is_autocast: bool) -> tuple[float, float]:
    """Run one step of the unaligned and one of the aligned model. Return the seconds of each step."""
    unaligned = time_step(model, ids, plain_log_probs, is_autocast)
    align(model)
    aligned = time_step(model, ids, token_log_probs, is_autocast)
    unalign(model)
    return unaligned, aligned


def time_pairs(model: Any, ids: Tensor, is_autocast: bool, pairs: int) -> tuple[float, float, float]:
    """Return the median seconds of an unaligned and of an aligned step, and the median ratio."""
    times = [time_pair(model, ids, is_autocast) for _ in range(pairs + 1)][1:]
    unaligned, aligned = (statistics.median(column) for column in zip(*times, strict=True))
    return unaligned, aligned, statistics.median(aligned / unaligned for unaligned, aligned in times)


def time_rank(
    folder: Path, meeting: str, num_ranks: int, shapes: list[tuple[int, int]], pairs: int, rank: int
) -> list[tuple[float, float, float]]:
    """Run `time_pairs` for each shape on one of the ranks. `meeting`: path of the file through which the ranks find
    each other.
    """
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_ranks)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.model.layers, model):
        fully_shard(module, mp_policy=policy)
    found = []
    for rows, columns in shapes:
        ids = torch.randint(3, model.config.vocab_size, (-(-rows // num_ranks), columns))
        found.append(time_pairs(model, ids, False, pairs))
    return found


def time_ranks(folder: Path, num_ranks: int, shapes: list[tuple[int, int]], pairs: int) -> list[Any]:
    """Return the result of `time_rank` on rank 0. A step ends when all ranks have finished the step."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch, ProcessPoolExecutor(num_ranks, context) as pool:
        run = partial(time_rank, folder, f"{scratch}/ranks", num_ranks, shapes, pairs)
        return list(pool.map(run, range(num_ranks)))[0]


def main(
    model: Annotated[str, typer.Argument(help="A model folder, hf://ORG/NAME, or smollm2.")] = "smollm2",
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of steps, after an uncounted pair.")] = 3,
    shapes: Annotated[str, typer.Option(help="Comma-separated batches: sequences x tokens.")] = "1x128,8x128,4x512",
    fsdp: Annotated[int, typer.Option(min=1, help="Number of processes that share the weights.")] = 1,
) -> None:
    """Compare training steps of an aligned model with training steps of the same model without alignment."""
    table = Table("weights", "batch", "unaligned, s", "aligned, s", "ratio", title=f"Training steps of {model}")
    folder, sizes = resolve_model(model), [(int(rows), int(n)) for rows, n in (s.split("x") for s in shapes.split(","))]

    def add(way: str, size: tuple[int, int], found: tuple[float, float, float]) -> None:
        table.add_row(way, "{}x{}".format(*size), *(f"{number:.2f}" for number in found))

    if fsdp > 1:
        for size, found in zip(sizes, time_ranks(folder, fsdp, sizes, pairs), strict=True):
            add(f"FSDP2, {fsdp} ranks", size, found)
    for way, (dtype, is_autocast) in {} if fsdp > 1 else WAYS.items():
        trained = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
        for size in sizes:
            ids = torch.randint(3, trained.config.vocab_size, size)
            add(way, size, time_pairs(trained, ids, is_autocast, pairs))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
