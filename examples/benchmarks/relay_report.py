"""Report how long pushes over a network take with several workers: `sudo python examples/benchmarks/relay_report.py
[MODEL]`.

The trainer and each worker run in a network namespace of their own, as on separate machines. Each namespace has one
link to a common switch. The report pushes a model's own weights over links of different speeds, by `relay` and by
`collective`, to one worker and to several workers. The report also measures a push by `relay` in which a worker is
killed in the middle. The report needs Linux, root, `ip`, `tc` and `nsenter`.
"""

import ctypes
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from trueroll.rollout import RolloutClient, WeightPublisher, WorkerProcess, launch_worker, resolve_model

WORKERS = 8
RATES = ("200mbit", None)
"""Speeds of each link, in both directions, in the notation of `tc`. None is no limit."""
REPEATS = 2
KV_MEMORY = 2**24
SUBNET = "10.77.0"
VERSIONS = itertools.count(1)
"""Versions of the pushes. Every push needs a higher version than the previous push."""
_CLONE_NEWNET = 0x40000000
Weights = dict[str, torch.Tensor]


class Network:
    """A switch in a network namespace, and machines with one link each to the switch."""

    def __init__(self) -> None:
        enter_new_namespace()
        run("ip link add switch type bridge")
        run("ip link set switch up")
        self._switch = subprocess.Popen(["sleep", "infinity"])
        self._machines: list[subprocess.Popen[bytes]] = []

    def enter_new_machine(self) -> str:
        """Move this process to a new machine. Return the machine's address. Processes started from now on run there."""
        enter_new_namespace()
        number = len(self._machines) + 1
        address = f"{SUBNET}.{number}"
        self._machines.append(subprocess.Popen(["sleep", "infinity"]))
        run(f"ip link add eth0 type veth peer name port{number} netns {self._switch.pid}")
        run(f"ip address add {address}/24 dev eth0")
        run("ip link set eth0 up")
        run("ip link set lo up")
        run(f"ip link set port{number} master switch up", self._switch)
        return address

    def limit(self, rate: str | None) -> None:
        """Limit all links to `rate`."""
        how = f"root tbf rate {rate} burst 256kb latency 50ms"
        for number, machine in enumerate(self._machines, 1):
            for place, device in ((machine, "eth0"), (self._switch, f"port{number}")):
                if rate is None:
                    run(f"tc qdisc delete dev {device} root", place)
                else:
                    run(f"tc qdisc replace dev {device} {how}", place)

    def close(self) -> None:
        for process in (self._switch, *self._machines):
            process.kill()
            process.wait()


def enter_new_namespace() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        sys.exit(f"cannot make a network namespace: {os.strerror(ctypes.get_errno())}; run this report as root")


def run(command: str, place: subprocess.Popen[bytes] | None = None) -> None:
    """Run a command, in the namespace of this process or of the process `place`."""
    inside = [] if place is None else ["nsenter", f"--net=/proc/{place.pid}/ns/net"]
    subprocess.run([*inside, *command.split()], check=True)


def read_weights(model: str) -> Weights:
    weights: Weights = {}
    for file in sorted(resolve_model(model).glob("*.safetensors")):
        weights |= load_file(file)
    return {name: tensor.clone() for name, tensor in weights.items()}


def push_seconds(transport: str, host: str, workers: list[WorkerProcess], weights: Weights, repeats: int) -> float:
    """Return the median seconds of a push, after a warm-up push."""
    with WeightPublisher(transport, host=host, timeout=600.0) as publisher:
        publisher.connect([worker.address for worker in workers])
        results = [publisher.push(weights, next(VERSIONS)) for _ in range(repeats + 1)]
    return statistics.median(result.total_seconds for result in results[1:])


def killing(weights: Weights, victim: WorkerProcess) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights. Kill a worker after half of the bytes."""
    half, sent = sum(tensor.nbytes for tensor in weights.values()) / 2, 0
    for name, tensor in weights.items():
        if sent <= half < sent + tensor.nbytes:
            victim.kill()
        sent += tensor.nbytes
        yield name, tensor


def seconds_with_kill(host: str, workers: list[WorkerProcess], weights: Weights) -> float:
    """Return the seconds of a relayed push in which the worker in the middle is killed. All other workers must have the
    weights.
    """
    victim = workers[len(workers) // 2]
    with WeightPublisher("relay", host=host, timeout=600.0, on_lost="skip") as publisher:
        publisher.connect([worker.address for worker in workers])
        start = time.perf_counter()
        result = publisher.push(killing(weights, victim), next(VERSIONS))
        seconds = time.perf_counter() - start
    assert result.left_out == [victim.address], result
    for worker in workers:
        if worker is not victim:
            with RolloutClient(worker.address) as client:
                assert client.health().weight_version == result.version
    return seconds


def report(console: Console, model: str) -> None:
    weights = read_weights(model)
    megabytes = sum(tensor.nbytes for tensor in weights.values()) / 1e6
    table = Table("link", "transport", "1 worker: s", f"{WORKERS} workers: s", "ratio", "one killed: s", "ratio")
    with ExitStack() as stack:
        network = Network()
        stack.callback(network.close)
        workers = []

        def launch() -> WorkerProcess:
            network.enter_new_machine()
            hosts = [f"{SUBNET}.0/24"]
            return stack.enter_context(launch_worker(model, kv_memory=KV_MEMORY, num_threads=1, push_hosts=hosts))

        workers += [launch() for _ in range(WORKERS + len(RATES))]
        host = network.enter_new_machine()
        for rate in RATES:
            network.limit(rate)
            for transport in ("collective", "relay"):
                chosen = workers[:WORKERS]
                one, many = (push_seconds(transport, host, some, weights, REPEATS) for some in (chosen[:1], chosen))
                cells = [rate or "no limit", transport, f"{one:.2f}", f"{many:.2f}", f"{many / one:.2f}"]
                if transport == "relay":
                    killed = seconds_with_kill(host, chosen, weights)
                    workers.remove(chosen[WORKERS // 2])
                    cells += [f"{killed:.2f}", f"{killed / one:.2f}"]
                table.add_row(*cells)
    console.print(f"{model}: {megabytes:.0f} MB, {os.cpu_count()} CPUs, medians of {REPEATS}")
    console.print(table)


if __name__ == "__main__":
    report(Console(width=120), sys.argv[1] if len(sys.argv) > 1 else "smollm2")
