"""Report how long weight pushes and sleeps take: `python examples/benchmarks/push_report.py [MODEL [SECTION ...]]`.

The report pushes a model's own weights to a worker process over each transport, once while the worker is idle and once
while the worker generates. The times are compared with plain memory copies of the same size. The report also measures
each pass over the pushed bytes, pushes after one optimizer step, deltas over several optimizer steps, pushes of LoRA
adapters, sleeping, waking up, and saving weights in the background. The worker checks every byte that it receives, and
commits between two steps. Without names of sections, the report has all sections of `SECTIONS`.
"""

import itertools
import os
import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import psutil
import safetensors.numpy
import torch
import xxhash
import zstandard
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from trueroll.engine.cache.memory import HUGE_PAGE, new_arena
from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.request import GenerateRequest, derive_seed
from trueroll.kernels.cpu.backend import PackedWeight, merge_into
from trueroll.kernels.cpu.copies import copy_bytes
from trueroll.rollout import (
    PushResult,
    RolloutClient,
    SamplingParams,
    WeightPublisher,
    WorkerProcess,
    launch_worker,
    resolve_model,
)
from trueroll.weight_sync.deltas.writer import DELTA_FILE
from trueroll.weight_sync.payload.tensors import copy_and_checksum, copy_checked, raw_bits
from trueroll.weight_sync.trainer.sender import BUCKET_BYTES
from trueroll.weight_sync.transports.shared import SharedSlots
from trueroll.weight_sync.worker.saved_folder import SavedFolder
from trueroll.weight_sync.worker.saver import Saver

REPEATS = 9
ROUNDS = 21
STEPS = 10
CYCLES = 10
WINDOWS, WINDOW_STEPS = 20, 10
KV_MEMORY = 256 * 2**20
PROMPTS = 64
PROMPT_TOKENS = 128
LEARNING_RATE = 1e-6
RANK = 16
ADAPTED = (["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"], "all-linear")
VERSIONS = itertools.count(1)
"""Versions of the pushes. Every push needs a higher version than the previous push."""
Weights = dict[str, torch.Tensor]


def read_weights(folder: Path) -> Weights:
    """Load all tensors of a checkpoint into the memory of this process."""
    weights: Weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return {name: tensor.clone() for name, tensor in weights.items()}


def median_seconds(
    action: Callable[[], object], repeats: int = REPEATS, clock: Callable[[], float] = time.perf_counter
) -> float:
    seconds = []
    for _ in range(repeats):
        start = clock()
        action()
        seconds.append(clock() - start)
    return statistics.median(seconds)


def copy_seconds(num_bytes: int) -> tuple[float, float]:
    """Return the seconds that one thread takes to copy `num_bytes` into memory already in use, and into new memory."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    warm, fresh = median_seconds(lambda: target.copy_(source)), median_seconds(source.clone)
    torch.set_num_threads(threads)
    return warm, fresh


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def report_passes(console: Console, worker: WorkerProcess, weights: Weights) -> None:
    """Compare the time of a push by `shared` with the time in which one thread copies the same bytes into memory
    already in use. Pushes and copies alternate. Then measure the CPU time of each pass over the bytes. CPU times depend
    less on the other processes of the machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    ratios, pushes, copies = list[float](), list[PushResult](), list[float]()
    own, theirs = list[float](), list[float]()
    with WeightPublisher("shared") as publisher:
        publisher.connect([worker.address])
        first = publisher.push(weights, next(VERSIONS))
        for _ in range(ROUNDS):
            copies.append(median_seconds(lambda: target.copy_(source), 3))
            before = time.process_time(), cpu_seconds(worker.pid)
            pushes.append(publisher.push(weights, next(VERSIONS)))
            own.append(time.process_time() - before[0])
            theirs.append(cpu_seconds(worker.pid) - before[1])
            ratios.append(pushes[-1].total_seconds / copies[-1])
    copy_cpu = median_seconds(lambda: target.copy_(source), ROUNDS, time.process_time)
    total = statistics.mean(own) + statistics.mean(theirs)
    median = statistics.median(push.total_seconds for push in pushes)
    phases = ", ".join(
        f"{name} {statistics.median(push.seconds[name] for push in pushes) * 1e3:.1f}" for name in pushes[0].seconds
    )
    console.print(
        f"a push by shared takes {statistics.median(ratios):.1f} times a warm copy (median of {ROUNDS} pairs): "
        f"{median * 1e3:.1f} ms ({phases}), copy {statistics.median(copies) * 1e3:.1f} ms; first push "
        f"{first.total_seconds * 1e3:.1f} ms"
    )
    console.print(
        f"CPU time of a push: trainer {statistics.mean(own) * 1e3:.1f} ms, worker {statistics.mean(theirs) * 1e3:.1f} "
        f"ms; together {total / copy_cpu:.1f} times the CPU time of a copy, {copy_cpu * 1e3:.1f} ms"
    )
    table = Table("pass", "MB read", "MB written", "CPU ms", "x warm copy")
    megabytes = num_bytes / 1e6
    for name, read, written, seconds in passes(weights, source):
        cells = (
            f"{read * megabytes:.0f}",
            f"{written * megabytes:.0f}",
            f"{seconds * 1e3:.1f}",
            f"{seconds / copy_cpu:.2f}",
        )
        table.add_row(name, *cells)
    console.print(table)
    torch.set_num_threads(threads)


def passes(weights: Weights, memory: torch.Tensor) -> Iterator[tuple[str, int, int, float]]:
    """Measure the passes of a push in this process, one after the other, with the functions of a push. Yield the name
    of each pass, the reads and writes of each byte in memory or in the last-level cache, and the CPU seconds.
    """
    cpu = time.process_time
    slots = SharedSlots(BUCKET_BYTES["shared"])
    slot = slots.slots[0]

    def send() -> None:
        for tensor in weights.values():
            for rows in tensor.view(-1).split(len(slot) // tensor.itemsize):
                copy_and_checksum(slot[: rows.nbytes], rows, tensor.dtype)

    packed = {
        name: PackedWeight.new(*tensor.shape, lambda *shape, dtype=tensor.dtype: torch.zeros(shape, dtype=dtype))
        for name, tensor in weights.items()
        if tensor.dim() == 2
    }

    def receive() -> None:
        for name, place in packed.items():
            assert copy_checked(place, weights[name], reject_nonfinite=True) is not None

    def check() -> None:
        for name in packed:
            infinity = int(raw_bits(torch.full((1,), torch.inf, dtype=weights[name].dtype))[0])
            copy_bytes(weights[name].data_ptr(), weights[name].nbytes, 0, infinity)

    def pack() -> None:
        for name, place in packed.items():
            place.copy_(weights[name])

    def clear() -> None:
        new_arena(memory.nbytes, memory.device, huge_pages=True).empty(torch.uint8, memory.nbytes)[::HUGE_PAGE] = 1

    send()
    yield "trainer: copy to shared memory, checksum", 1, 1, median_seconds(send, clock=cpu)
    yield "worker: checksum, search for infinities, pack", 1, 1, median_seconds(receive, clock=cpu)
    yield "  of it checksum and search", 1, 0, median_seconds(check, clock=cpu)
    yield "  of it pack", 1, 1, median_seconds(pack, clock=cpu)
    yield "system, only for the first push: clear new memory", 0, 1, median_seconds(clear, clock=cpu)
    slots.close()


class Traffic:
    """Keeps the worker busy with groups of samples while the context is open."""

    def __init__(self, client: RolloutClient) -> None:
        self.client = client
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        params = SamplingParams(n=8, max_tokens=64, temperature=1.0, ignore_eos=True)
        while not self.is_over.is_set():
            self.client.generate([[number + 1] * 32 for number in range(8)], params)

    def __enter__(self) -> None:
        self.thread.start()
        while not self.client.health().requests.get("running"):
            time.sleep(0.01)

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self.thread.join()


def push_often(publisher: WeightPublisher, weights: Weights) -> list[PushResult]:
    publisher.push(weights, next(VERSIONS))  # warm-up: the first push allocates buffers that later pushes reuse
    return [publisher.push(weights, next(VERSIONS)) for _ in range(REPEATS)]


def report_transports(console: Console, worker: WorkerProcess, client: RolloutClient, weights: Weights) -> None:
    table = Table(
        "push", "idle worker: ms", "x warm copy", "x new copy", "busy worker: ms", "commit pause ms", "of push"
    )
    with tempfile.TemporaryDirectory() as folder:
        for transport in ("shared", "collective", "disk"):
            with WeightPublisher(transport, folder=folder if transport == "disk" else None) as publisher:
                publisher.connect([worker.address])
                idle = push_often(publisher, weights)
                with Traffic(client):
                    busy = push_often(publisher, weights)
            warm, fresh = copy_seconds(idle[0].num_bytes)
            quiet = statistics.median(result.total_seconds for result in idle)
            loaded = statistics.median(result.total_seconds for result in busy)
            pause = statistics.median(result.pause_seconds for result in busy)
            share = statistics.median(result.pause_seconds / result.total_seconds for result in busy)
            cells = (quiet * 1e3, quiet / warm, quiet / fresh, loaded * 1e3, pause * 1e3)
            table.add_row(transport, *(f"{cell:.1f}" for cell in cells), f"{share:.1%}")
    megabytes = idle[0].num_bytes / 1e6
    console.print(f"{megabytes:.0f} MB; copied in {warm * 1e3:.1f} ms, into new memory in {fresh * 1e3:.1f} ms")
    console.print(table)


def optimiser_step(weights: Weights) -> tuple[Weights, float]:
    """Take one AdamW step on float32 master weights with random gradients. Return the new weights and the share of
    changed elements.
    """
    generator = torch.Generator().manual_seed(0)
    after: Weights = {}
    changed = total = 0
    for name, tensor in weights.items():
        master = torch.nn.Parameter(tensor.float())
        master.grad = torch.randn(tensor.shape, generator=generator)
        torch.optim.AdamW([master], lr=LEARNING_RATE, weight_decay=0.0).step()
        after[name] = master.detach().to(tensor.dtype)
        changed += int((after[name] != tensor).sum())
        total += tensor.numel()
    return after, changed / total


def report_sparse(console: Console, worker: WorkerProcess, weights: Weights) -> None:
    after, share = optimiser_step(weights)
    with WeightPublisher("shared", sparse=True) as publisher:
        publisher.connect([worker.address])
        whole = publisher.push(weights, next(VERSIONS))
        results = []
        for number in range(REPEATS):
            results.append(publisher.push(weights if number % 2 else after, next(VERSIONS)))
    assert not whole.is_sparse and all(result.is_sparse for result in results)
    seconds = statistics.median(result.total_seconds for result in results)
    console.print(
        f"one optimiser step at a learning rate of {LEARNING_RATE:g} changes {share:.2%} of the weights: "
        f"{results[0].num_bytes / 1e6:.2f} MB in {seconds * 1e3:.0f} ms, against {whole.num_bytes / 1e6:.0f} MB"
    )


def training_steps(folder: Path) -> Iterator[Weights]:
    """Yield the weights in bfloat16 before and after each of `STEPS` AdamW steps on float32 weights. The gradients are
    those of the language model's loss on random tokens.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    yield {name: tensor.detach().bfloat16() for name, tensor in model.named_parameters()}
    for _ in range(STEPS):
        tokens = torch.randint(3, model.config.vocab_size, (2, 64))
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        yield {name: tensor.detach().bfloat16() for name, tensor in model.named_parameters()}


def slime_bytes(old: Weights, new: Weights) -> int:
    """Return the size in bytes of the delta file that slime would write with its default encoding: XOR, compressed with
    Zstandard at level 1.
    """
    frames: dict[str, np.ndarray] = {}
    digests: dict[str, str] = {}
    for name, tensor in new.items():
        before, after = (each.view(torch.uint8).numpy().reshape(-1) for each in (old[name], tensor))
        if not np.array_equal(before, after):
            frames[name] = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(before ^ after), np.uint8)
            digests[name] = xxhash.xxh3_128_hexdigest(after)
    return len(safetensors.numpy.save(frames, metadata=digests))


def report_deltas(console: Console, worker: WorkerProcess, folder: Path) -> None:
    """Push each of `STEPS` optimizer steps as a delta. Then let the worker pull the first version of the chain, and
    from there catch up with the last version.
    """
    table = Table("step", "changed", "delta MB", "of whole", "slime's MB", "push ms", "of it writing")
    with tempfile.TemporaryDirectory() as chain, WeightPublisher("delta", folder=chain, full_every=STEPS + 1) as to:
        to.connect([worker.address])
        versions = list(itertools.islice(VERSIONS, STEPS + 1))
        steps, whole = training_steps(folder), 0
        before: Weights = {}
        for number, (version, after) in enumerate(zip(versions, steps, strict=True)):
            result = to.push(after, version)
            if not number:
                before, whole = after, result.num_bytes
                continue
            assert result.is_sparse
            theirs, ours = (
                slime_bytes(before, after),
                (Path(chain) / f"weight_v{version:06d}" / DELTA_FILE).stat().st_size,
            )
            assert ours <= theirs
            total = sum(tensor.numel() for tensor in after.values())
            share = sum(int((after[name] != before[name]).sum()) for name in after) / total
            cells = f"{share:.2%}", f"{ours / 1e6:.2f}", f"1/{whole / ours:.0f}", f"{theirs / 1e6:.2f}"
            written = result.seconds["stage"] / result.total_seconds
            table.add_row(str(number), *cells, f"{result.total_seconds * 1e3:.0f}", f"{written:.0%}")
            before = after
        console.print(table)
        with to.pull(chain, versions[0], allow_older=True) as staged:
            staged.commit()
        with to.pull(chain, versions[-1]) as staged:
            result = staged.commit()
    console.print(f"a worker {STEPS} versions behind catches up in {result.total_seconds * 1e3:.0f} ms")


def merge_seconds(model: torch.nn.Module) -> float:
    """Return the CPU seconds that one thread takes to merge all adapters of a PEFT model into packed weights."""
    layers = []
    for module in model.modules():
        if isinstance(module, LoraLayer):
            weight = cast(torch.Tensor, module.get_base_layer().weight).detach()
            a, b = (factors["default"].weight.detach() for factors in (module.lora_A, module.lora_B))
            out = PackedWeight.new(*weight.shape, lambda *shape, dtype=weight.dtype: torch.zeros(shape, dtype=dtype))
            layers.append((out, weight, a, b))

    def merge() -> None:
        for layer in layers:
            assert merge_into(*layer, 1.0)

    return median_seconds(merge, clock=time.process_time)


def report_adapters(console: Console, worker: WorkerProcess, folder: Path, weights: Weights) -> None:
    """Compare pushes of adapters alone with pushes of all weights, in turn. The adapters cover some or all matrices.
    All weights are pushed in two ways: without an adapter and with an adapter. "prepare" is the time before the first
    message of the push.
    """
    columns = "MB", "of whole", "ms", "whole ms", "faster", "with adapters", "pause ms", "CPU ms: trainer", "worker"
    table = Table(f"rank {RANK}, target modules", *columns)
    phases = Table(f"rank {RANK}, target modules", "prepare ms", "begin", "stage", "verify", "commit", "merge, CPU ms")
    for modules in ADAPTED:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model = get_peft_model(model, LoraConfig(r=RANK, target_modules=modules, task_type="CAUSAL_LM"))
        alone, whole, both = list[PushResult](), list[PushResult](), list[PushResult]()
        cpu = list[tuple[float, float]]()
        with WeightPublisher("shared") as publisher:
            publisher.connect([worker.address])
            publisher.push(model, next(VERSIONS))  # warm-up
            for _ in range(REPEATS):
                whole.append(publisher.push(weights, next(VERSIONS)))
                publisher.push(model, next(VERSIONS), adapters=True)  # verifies the checksums of all weights
                before = time.process_time(), cpu_seconds(worker.pid)
                alone.append(publisher.push(model, next(VERSIONS), adapters=True))
                cpu.append((time.process_time() - before[0], cpu_seconds(worker.pid) - before[1]))
                both.append(publisher.push(model, next(VERSIONS)))
        faster, fastest = (
            statistics.median(a.total_seconds / b.total_seconds for a, b in zip(some, alone, strict=True))
            for some in (whole, both)
        )
        quick, slow = (statistics.median(each.total_seconds for each in some) for some in (alone, whole))
        pause, size = statistics.median(result.pause_seconds for result in alone), alone[0].num_bytes
        cells = f"{size / 1e6:.2f}", f"1/{whole[0].num_bytes / size:.0f}", f"{quick * 1e3:.1f}", f"{slow * 1e3:.1f}"
        name = modules if isinstance(modules, str) else ", ".join(modules)
        means = (f"{statistics.mean(each) * 1e3:.0f}" for each in zip(*cpu, strict=True))
        table.add_row(name, *cells, f"{faster:.1f} times", f"{fastest:.1f} times", f"{pause * 1e3:.1f}", *means)
        seconds = {part: [result.seconds[part] for result in alone] for part in alone[0].seconds}
        prepared = [result.total_seconds - sum(result.seconds.values()) for result in alone]
        told = [statistics.median(each) for each in (prepared, *seconds.values())]
        phases.add_row(name, *(f"{each * 1e3:.1f}" for each in (*told, merge_seconds(model))))
    console.print(table)
    console.print(phases)


def resident(worker: WorkerProcess) -> int:
    return psutil.Process(worker.pid).memory_info().rss


def fill_cache(client: RolloutClient) -> None:
    vocabulary = client.health().engine["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, vocabulary, (PROMPTS, PROMPT_TOKENS), generator=generator).tolist()
    client.generate(prompts, SamplingParams(n=8, max_tokens=64, ignore_eos=True))


def report_sleep(console: Console, worker: WorkerProcess, client: RolloutClient, weights: Weights) -> None:
    table = Table("sleep", "held before MB", "given back MB", "of held", "sleep ms", "wake-up ms", "with push ms")
    with WeightPublisher("shared") as publisher:
        publisher.connect([worker.address])
        publisher.push(weights, next(VERSIONS))
        for level in (1, 2):
            fill_cache(client)
            memory = client.health().memory
            held = memory["weights"] + memory["kv_cache"] if level == 2 else memory["kv_cache"]
            before = resident(worker)
            start = time.perf_counter()
            client.sleep(level)
            asleep = time.perf_counter()
            back = before - resident(worker)
            woken = time.perf_counter()
            client.wake_up(["weights"])
            client.wake_up(["kv_cache"])
            awake = time.perf_counter()
            if level == 2:
                publisher.push(weights, next(VERSIONS))
            whole = time.perf_counter()
            cells = (f"{held / 1e6:.0f}", f"{back / 1e6:.0f}", f"{back / held:.1%}", f"{(asleep - start) * 1e3:.1f}")
            table.add_row(f"level {level}", *cells, f"{(awake - woken) * 1e3:.1f}", f"{(whole - woken) * 1e3:.1f}")
        console.print(table)
        sizes = []
        for _ in range(CYCLES):
            fill_cache(client)
            sizes.append(resident(worker))
            client.sleep(2)
            client.wake_up()
            publisher.push(weights, next(VERSIONS))
    console.print(
        f"resident MB with a full cache, before each of {CYCLES} sleeps: " + ", ".join(f"{s / 1e6:.0f}" for s in sizes)
    )


def write_seconds(saver: Saver) -> float:
    """Save the weights once, and return the seconds until they are saved."""
    start = time.perf_counter()
    saver.save(secrets.token_hex(16), next(VERSIONS))
    while saver.state.is_writing:
        time.sleep(0.001)
    return time.perf_counter() - start


def interrupt_seconds(saver: Saver) -> float:
    """Interrupt a write, and return the seconds for which a commit would wait."""
    saver.save(secrets.token_hex(16), next(VERSIONS))
    time.sleep(0.05)
    start = time.perf_counter()
    saver.interrupt()
    seconds = time.perf_counter() - start
    while saver.state.is_writing:
        time.sleep(0.001)
    return seconds


def steps_per_second(engine: Engine, saver: Saver, saves: bool) -> float:
    """Run decode steps. `saves`: save the weights all the time."""
    start = time.perf_counter()
    for _ in range(WINDOW_STEPS):
        if saves and not saver.state.is_writing:
            saver.save(secrets.token_hex(16), next(VERSIONS))
        engine.step()
    return WINDOW_STEPS / (time.perf_counter() - start)


def report_saving(console: Console, model: str) -> None:
    engine = Engine(EngineConfig(model=model, kv_memory=KV_MEMORY))
    params = SamplingParams(max_tokens=2 * WINDOWS * WINDOW_STEPS + 100, ignore_eos=True)
    for number in range(PROMPTS // 4):
        prompt = np.arange(3, 35, dtype=np.int32)
        seed = derive_seed(0, number)
        engine.add(GenerateRequest(str(number), prompt, SamplingParams(**params.model_dump() | {"seed": seed})))
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(SavedFolder(folder), engine.weights, model, "cpu", lambda: None)
        saver.start()
        idle = statistics.median(write_seconds(saver) for _ in range(REPEATS))
        waits = [interrupt_seconds(saver) for _ in range(REPEATS)]
        steps_per_second(engine, saver, saves=True)
        shares = []
        for _ in range(WINDOWS):
            alone = steps_per_second(engine, saver, saves=False)
            shares.append(steps_per_second(engine, saver, saves=True) / alone)
            saver.interrupt()
            while saver.state.is_writing:
                time.sleep(0.001)
        saver.close()
        saver.join()
    console.print(
        f"saving: {engine.weights.num_bytes / 1e6:.0f} MB in {idle:.2f} s while idle; a commit waits "
        f"{statistics.median(waits) * 1e3:.1f} ms, at most {max(waits) * 1e3:.1f} ms; while saving, decoding has "
        f"{statistics.median(shares):.2f} of its speed"
    )


SECTIONS: dict[str, Callable[[Console, WorkerProcess, RolloutClient, Path, Weights], None]] = {
    "passes": lambda console, worker, client, folder, weights: report_passes(console, worker, weights),
    "transports": lambda console, worker, client, folder, weights: report_transports(console, worker, client, weights),
    "sparse": lambda console, worker, client, folder, weights: report_sparse(console, worker, weights),
    "deltas": lambda console, worker, client, folder, weights: report_deltas(console, worker, folder),
    "adapters": lambda console, worker, client, folder, weights: report_adapters(console, worker, folder, weights),
    "sleep": lambda console, worker, client, folder, weights: report_sleep(console, worker, client, weights),
    "saving": lambda console, worker, client, folder, weights: report_saving(console, str(folder)),
}


def main(model: str, sections: Sequence[str] = ()) -> None:
    console, folder = Console(width=120), resolve_model(model)
    weights = read_weights(folder)
    console.print(f"{model}, {os.cpu_count()} CPUs, medians of {REPEATS}")
    with launch_worker(model, kv_memory=KV_MEMORY) as worker, RolloutClient(worker.address) as client:
        for section in sections or SECTIONS:
            SECTIONS[section](console, worker, client, folder, weights)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2", sys.argv[2:])
