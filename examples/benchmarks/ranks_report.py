"""Measure what several ranks cost on a CPU: `python examples/benchmarks/ranks_report.py`.

- Memory: the bytes of weights that each of four ranks reads and holds as its own part, as a share of all weights. The
  common weights (`docs/parallel.md`) are not included. The model has 1.1e9 parameters.
- Pushes: the duration of a push to a worker with four ranks, divided by the duration of a push of the same model to a
  worker with one rank. The report prints the median and the range of several pairs of pushes.
- Host time: the time that four ranks add to a step of 256 rows, listed by its parts, for a model with four small
  layers. The time for which a rank waits for slower ranks is not included.

Run the report on an otherwise idle machine with 12 GiB of free memory.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.models.loader import copy_checkpoint
from trueroll.engine.parallel import wire
from trueroll.engine.parallel.exchange import SLOT_BYTES
from trueroll.engine.request import GenerateRequest, SamplingParams
from trueroll.engine.running.executor import LocalExecutor
from trueroll.engine.running.loading import allocate_model, load_dummy, load_model
from trueroll.engine.running.ranks import Links, Topology
from trueroll.engine.running.step import Step
from trueroll.kernels.cpu import backend
from trueroll.kernels.cpu.ranks import RankMeetings
from trueroll.kernels.ranks import Finish, Rank, fold
from trueroll.kernels.shards import Shard
from trueroll.rollout import WeightPublisher, launch_worker

PAIRS = 7
SIZE = 4
LARGE = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=32000,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
)
SMALL = LARGE | dict(
    hidden_size=64,
    head_dim=16,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=2048,
)


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """Write a model with random weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_dummy(EngineConfig(model=str(folder), pieces=1)).weights
    save_file({name: weights.served(name) for name in weights.shapes}, folder / "model.safetensors", {"format": "pt"})
    return folder


class Alone:
    """A fake exchange of sums between ranks, for a rank that runs alone. The counters of other ranks are always ahead,
    so the rank never waits. The sums of other ranks are arbitrary.
    """

    def __init__(self, index: int) -> None:
        self.rank = Rank(index, SIZE)
        self._counters = torch.full((SIZE, 8), 2**60)
        self._slots = torch.zeros(2 * SIZE * SLOT_BYTES, dtype=torch.uint8)
        self.native = RankMeetings(
            self._counters.data_ptr(), self._slots.data_ptr(), SLOT_BYTES, index, SIZE, lambda _: None
        )

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._slots[: x.nbytes] = x.contiguous().view(-1).view(torch.uint8)
        self.native.meet()
        return [self._slots[: x.nbytes].view(x.dtype).view(x.shape)] * SIZE

    def add(self, own: torch.Tensor, finish: Finish) -> torch.Tensor:
        return finish(fold(self.gather(own)), 0)


def links_of(exchange: Alone) -> Links:
    return Links(Topology(SIZE, 1), exchange, exchange)


def report_memory(folder: Path, console: Console) -> None:
    whole = load_model(EngineConfig(model=str(folder))).weights.model.num_bytes
    table = Table("rank", "reads", "holds", title=f"The part of each of {SIZE} ranks, as a share of all weights")
    for index in range(SIZE):
        model = allocate_model(EngineConfig(model=str(folder)), links_of(Alone(index)))
        tensors = model.loaded.weights.tensors
        parts = {name: weight for name, weight in tensors.items() if isinstance(weight, Shard)}
        read, held = copy_checkpoint(model.checkpoint, parts), sum(weight.nbytes for weight in parts.values())
        table.add_row(str(index), f"{read / whole:.1%}", f"{held / whole:.1%}")
    console.print(table)


def report_pushes(folder: Path, console: Console) -> None:
    tensors, ratios, seconds = load_file(folder / "model.safetensors"), list[float](), list[float]()
    sizes: dict[str, Any] = dict(num_blocks=64, num_threads=2)
    with (
        launch_worker(str(folder), **sizes) as one,
        launch_worker(str(folder), tensor_parallel_size=SIZE, **sizes) as several,
        WeightPublisher("shared") as to_one,
        WeightPublisher("shared") as to_several,
    ):
        to_one.connect([one.address])
        to_several.connect([several.address])
        for number in range(1, 2 + PAIRS):
            took = dict[WeightPublisher, float]()
            for publisher in [to_one, to_several][:: 1 if number % 2 else -1]:
                started = time.perf_counter()
                publisher.push(tensors, number)
                took[publisher] = time.perf_counter() - started
            if number > 1:  # the first pair of pushes is a warm-up
                ratios.append(took[to_several] / took[to_one])
                seconds.append(took[to_one])
    table = Table("a push to one rank", f"to {SIZE} ranks, as a multiple", "least to most", title="Pushes")
    found = f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"
    table.add_row(f"{statistics.median(seconds):.2f} s", *found)
    console.print(table)


def large_step(folder: Path) -> Step:
    """Return a step that generates the next token of 256 samples."""
    steps, compute = list[Step](), LocalExecutor.compute

    def recorded(executor: LocalExecutor, step: Step) -> Any:
        steps.append(step)
        return compute(executor, step)

    LocalExecutor.compute = recorded
    engine = Engine(config_of(folder))
    for i in range(256):
        prompt = np.random.default_rng(i).integers(3, 500, 100).astype(np.int32)
        engine.add(GenerateRequest(f"{i}", prompt, SamplingParams(max_tokens=20, seed=i, ignore_eos=True)))
    while engine.has_unfinished:
        engine.step()
    LocalExecutor.compute = compute
    return [step for step in steps if len(step.token_ids) == 256][5]


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(model=str(folder), num_blocks=4096, max_num_seqs=256, max_num_batched_tokens=4096)


def milliseconds(call: Callable[[], object], repeats: int = 200) -> float:
    """Return the median duration of a call."""
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return 1e3 * statistics.median(found)


def exchanging(folder: Path, step: Step) -> tuple[float, int]:
    """Return two numbers: how many milliseconds longer a step takes if a rank adds the sums of all ranks, and how many
    meetings (barriers) the step has.
    """
    exchange = Alone(0)
    several = LocalExecutor(config_of(folder), load_model(config_of(folder), links_of(exchange)))
    alone = LocalExecutor(config_of(folder), load_model(config_of(folder), links_of(Alone(0))))
    alone._runner.model.ops = alone._sampler.ops = backend  # type: ignore[assignment]
    several.compute(step).wait()
    before = exchange.native.turn
    several.compute(step).wait()
    meetings = exchange.native.turn - before
    differences = [
        milliseconds(lambda: several.compute(step).wait(), 10) - milliseconds(lambda: alone.compute(step).wait(), 10)
        for _ in range(20)
    ]
    return statistics.median(differences), meetings


def meeting() -> float:
    """Return the duration of a meeting (a barrier) of two processes, in milliseconds."""
    memory = mmap.mmap(-1, 4096)
    counters = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()

    def meet_often(rank: int) -> float:
        meetings = RankMeetings(counters, counters, 0, rank, 2, lambda _: None)
        return milliseconds(meetings.meet, 2000)

    if (child := os.fork()) == 0:
        meet_often(1)
        os._exit(0)
    found = meet_often(0)
    os.waitpid(child, 0)
    return found


def sending(step: Step) -> float:
    """Return the time that the leader takes to send a step to the other ranks, in milliseconds."""
    own, other = socket.socketpair()
    if (child := os.fork()) == 0:
        own.close()
        while other.recv(2**20):
            pass
        os._exit(0)
    other.close()
    channel = wire.Channel(own, 60.0)
    message = wire.packed("compute", step)
    found = milliseconds(lambda: channel.send_packed(message))
    channel.close()
    os.waitpid(child, 0)
    return (SIZE - 1) * found


def report_host_time(folder: Path, console: Console) -> None:
    step = large_step(folder)
    message = wire.packed("compute", step)
    added, meetings = exchanging(folder, step)
    parts = {
        "pack the step": milliseconds(lambda: wire.packed("compute", step)),
        f"send it to {SIZE - 1} ranks": sending(step),
        "unpack it": milliseconds(lambda: wire.unpacked(message[8:])),
        "add the sums of all ranks, and join the head": added,
        f"{meetings} meetings": meetings * meeting(),
    }
    table = Table("part", "milliseconds", title=f"What {SIZE} ranks add to a step of 256 rows ({len(message)} bytes)")
    for name, found in (parts | {"together": sum(parts.values())}).items():
        table.add_row(name, f"{found:.3f}")
    console.print(table)


def main() -> None:
    console = Console()
    with tempfile.TemporaryDirectory() as parent:
        report_host_time(write_model(Path(parent, "small"), SMALL), console)
        large = write_model(Path(parent, "large"), LARGE)
        report_memory(large, console)
        report_pushes(large, console)


if __name__ == "__main__":
    main()
