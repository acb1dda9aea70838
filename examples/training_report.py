"""What alignment costs a trainer: `python examples/training_report.py [MODEL]`, 5 minutes and 8 GB with `smollm2`.

For several batches and dtypes: the time of an aligned training step (forward and backward pass, no optimizer) over that
of an unaligned one, the median over pairs of steps that run one right after the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
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
    """Seconds."""
    model.zero_grad()
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16) if is_autocast else nullcontext():
        found = log_probs(model, ids)
    found.sum().backward()
    return time.perf_counter() - start


def time_pair(model: Any, ids: Tensor, is_autocast: bool) -> tuple[float, float]:
    """Seconds of a step of the model as it is, and aligned."""
    unaligned = time_step(model, ids, plain_log_probs, is_autocast)
    align(model)
    aligned = time_step(model, ids, token_log_probs, is_autocast)
    unalign(model)
    return unaligned, aligned


def main(
    model: Annotated[str, typer.Argument(help="A model folder, hf://ORG/NAME, or smollm2.")] = "smollm2",
    pairs: Annotated[int, typer.Option(min=1, help="Counted pairs of steps; one more comes first.")] = 3,
    shapes: Annotated[str, typer.Option(help="Sequences x tokens, with commas.")] = "1x128,8x128,4x512",
) -> None:
    """Compare training steps of an aligned model with those of the same model unaligned."""
    table = Table("weights", "batch", "unaligned, s", "aligned, s", "ratio", title=f"Training steps of {model}")
    for way, (dtype, is_autocast) in WAYS.items():
        trained = AutoModelForCausalLM.from_pretrained(resolve_model(model), dtype=dtype, trust_remote_code=False)
        for shape in shapes.split(","):
            rows, columns = map(int, shape.split("x"))
            ids = torch.randint(3, trained.config.vocab_size, (rows, columns))
            times = [time_pair(trained, ids, is_autocast) for _ in range(pairs + 1)][1:]
            unaligned, aligned = (statistics.median(column) for column in zip(*times, strict=True))
            ratio = statistics.median(aligned / unaligned for unaligned, aligned in times)
            table.add_row(way, shape, f"{unaligned:.2f}", f"{aligned:.2f}", f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
