"""`trueroll bench`: measure the engine's speed in this process, and the speed of transformers' `generate`.

Owns the workloads. Each figure is the median of RUNS runs after a warm-up run. The systems take turns, so that a change
in the machine's speed affects all systems. The table also shows the slowest and the fastest run. Guarantees that all
systems do the same work: the same model, dtype, threads, prompts, samples, number of new tokens and temperature. All
systems of trueroll must give the same bits; the benchmark compares the bits of all runs.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import os
import platform
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ...engine.config import EngineConfig
from ...engine.engine import Engine
from ...engine.request import GenerateRequest, SampleOutput, SamplingParams
from ...engine.running.loading import LoadedModel, load_dummy, load_model
from .pictures import check_can_plot, plot_speeds
from .progress import tell

RUNS = 3
NOTE = (
    f"Each figure is the median of {RUNS} runs after a warm-up run; the systems run in turn. tokens/s: new tokens of "
    "all samples per second, with the slowest and the fastest run. Systems with overlapping ranges are perhaps equal. "
    "reqs/s: prompts per second. hit rate: the share of prompt tokens found in the cache or shared with a running "
    "request. first token: mean time from submission to a request's first token, measured in separate runs of the same "
    "prompts with one new token."
)


@dataclass(frozen=True)
class Workload:
    """A workload of random prompts.

    - `num_prompts`: number of prompts
    - `shared`: length of the prefix that all prompts share. `own`: number of tokens that follow the shared prefix in
      each prompt
    - `n`: samples per prompt
    - `max_tokens`: new tokens per sample
    """

    name: str
    num_prompts: int
    shared: int
    own: int
    n: int
    max_tokens: int
    temperature: float

    def prompts(self, vocab_size: int) -> np.ndarray:
        """Return the prompts as int32 [num_prompts, shared + own]. Every call returns the same prompts."""
        generator = np.random.default_rng(0)
        shared = generator.integers(0, vocab_size, (1, self.shared), np.int32)
        own = generator.integers(0, vocab_size, (self.num_prompts, self.own), np.int32)
        return np.concatenate([shared.repeat(self.num_prompts, 0), own], axis=1)

    @property
    def num_samples(self) -> int:
        return self.num_prompts * self.n


WORKLOADS = {
    "group": (Workload("group", 8, 0, 128, 8, 128, 1.0),),
    "shared": (
        Workload("shared-8", 32, 1024, 64, 1, 8, 0.0),
        Workload("shared-128", 32, 1024, 64, 1, 128, 0.0),
    ),
    "single": (Workload("single", 1, 0, 128, 1, 128, 0.0),),
}


@dataclass(frozen=True)
class Measurement:
    """The measurement of one system (`cache on`, `cache off`, `drafts` or `hf`) on one workload.

    - `seconds`, `tokens_per_second`, `requests_per_second`, `first_token_seconds`: the medians of all runs
    - `all_seconds`, `all_tokens_per_second`: the values of each run, in order
    - `hit_rate`: in the last run, the share of prompt tokens that were found in the cache or shared with a running
      request; None for transformers
    - `drafted`, `accepted`: numbers of drafted and accepted tokens in the last run
    """

    workload: str
    system: str
    seconds: float
    tokens_per_second: float
    requests_per_second: float
    hit_rate: float | None
    first_token_seconds: float
    all_seconds: tuple[float, ...]
    all_tokens_per_second: tuple[float, ...]
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Timing:
    """One run: its duration, and the time of each request's first finished sample.

    `bits`: a digest of all tokens and log-probs; empty if the system does not guarantee equal bits. `drafted`,
    `accepted`: the numbers of drafted and accepted tokens.
    """

    seconds: float
    arrivals: list[float]
    hit_rate: float | None = None
    bits: bytes = b""
    drafted: int = 0
    accepted: int = 0


System: TypeAlias = Callable[[Workload], Timing]


def measure(
    workload: Workload, systems: Mapping[str, System], say: Callable[[str], Any] = lambda doing: None
) -> list[Measurement]:
    """Measure all systems on a workload; the systems take turns. Before each run, `say` is called with the name of the
    run.

    The first run of each system is not measured, because it allocates memory and is therefore slower. Raise
    RuntimeError if two runs have different bits.
    """
    for name, run in systems.items():
        say(f"{workload.name}: {name}, warm-up")
        run(workload)
    timings: dict[str, list[tuple[Timing, Timing]]] = {name: [] for name in systems}
    for number in range(1, RUNS + 1):
        for name, run in systems.items():
            say(f"{workload.name}: {name}, run {number} of {RUNS}")
            timings[name].append((run(workload), run(dataclasses.replace(workload, max_tokens=1))))
    seen = {timing.bits: name for name, runs in timings.items() for timing, _ in runs if timing.bits}
    if len(seen) > 1:
        raise RuntimeError(f"{workload.name}: runs of {' and '.join(sorted(seen.values()))} have different bits")
    return [_summarize(workload, name, runs) for name, runs in timings.items()]


def _summarize(workload: Workload, system: str, runs: Sequence[tuple[Timing, Timing]]) -> Measurement:
    """Return the medians of `runs`. Each element of `runs` is a pair: a run of the workload, and a run that generates
    only one token per sample.
    """
    all_seconds = tuple(timing.seconds for timing, _ in runs)
    seconds, num_tokens = median(all_seconds), workload.num_samples * workload.max_tokens
    return Measurement(
        workload.name,
        system,
        seconds=seconds,
        tokens_per_second=num_tokens / seconds,
        requests_per_second=workload.num_prompts / seconds,
        hit_rate=runs[-1][0].hit_rate,
        first_token_seconds=median(sum(first.arrivals) / len(first.arrivals) for _, first in runs),
        all_seconds=all_seconds,
        all_tokens_per_second=tuple(num_tokens / each for each in all_seconds),
        drafted=runs[-1][0].drafted,
        accepted=runs[-1][0].accepted,
    )


class EngineSystem:
    """The engine with its prefix cache on or off, and with or without drafts.

    The cache is empty at the start of each run. Each run has its own cache salt, so that no token is drafted from the
    samples of an earlier run.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel | None) -> None:
        self.engine = Engine(config, loaded)
        self._runs = 0

    def __call__(self, workload: Workload) -> Timing:
        engine = self.engine
        engine.invalidate_prefix_cache()
        self._runs += 1
        before, start = engine.stats(), time.perf_counter()
        for request in _requests(workload, engine.info.vocab_size, self._runs):
            engine.add(request)
        arrivals, samples = dict[str, float](), list[SampleOutput]()
        while engine.has_unfinished:
            for output in engine.step():
                assert isinstance(output, SampleOutput)
                samples.append(output)
                arrivals.setdefault(output.request_id, time.perf_counter() - start)
        seconds, after = time.perf_counter() - start, engine.stats()
        hits, queries = after.prefix_hits - before.prefix_hits, after.prefix_queries - before.prefix_queries
        drafted = sum(each.num_drafted for each in after.drafts) - sum(each.num_drafted for each in before.drafts)
        accepted = sum(each.num_accepted for each in after.drafts) - sum(each.num_accepted for each in before.drafts)
        return Timing(seconds, list(arrivals.values()), hits / queries, _digest(samples), drafted, accepted)


def _digest(samples: Sequence[SampleOutput]) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for sample in sorted(samples, key=lambda sample: (sample.request_id, sample.index)):
        assert sample.logprobs is not None
        found.update(array("i", sample.token_ids).tobytes() + sample.logprobs.tobytes())
    return found.digest()


def _requests(workload: Workload, vocab_size: int, run: int) -> list[GenerateRequest]:
    params = SamplingParams(
        n=workload.n,
        max_tokens=workload.max_tokens,
        temperature=workload.temperature,
        seed=0,
        ignore_eos=True,
        cache_salt=str(run),
    )
    return [GenerateRequest(str(i), prompt, params) for i, prompt in enumerate(workload.prompts(vocab_size))]


class TransformersSystem:
    """transformers' `generate` with all prompts of a workload in one batch. The first tokens of all prompts arrive
    together.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        from transformers import AutoModelForCausalLM

        self.vocab_size = loaded.model.spec.vocab_size
        model: Any = AutoModelForCausalLM.from_pretrained(
            loaded.folder, dtype=loaded.model.dtype, trust_remote_code=False, local_files_only=True
        )
        self.model = model.to(loaded.model.device)

    def __call__(self, workload: Workload) -> Timing:
        prompts = torch.from_numpy(workload.prompts(self.vocab_size)).long().to(self.model.device)
        torch.manual_seed(0)
        start = time.perf_counter()
        out = self.model.generate(
            prompts, attention_mask=torch.ones_like(prompts), generation_config=_generation_config(workload)
        )
        seconds = time.perf_counter() - start
        assert out.shape == (workload.num_samples, prompts.shape[1] + workload.max_tokens)
        return Timing(seconds, [seconds] * workload.num_prompts)


def _generation_config(workload: Workload) -> Any:
    from transformers import GenerationConfig

    sampling = dict(do_sample=True, temperature=workload.temperature, top_k=0, top_p=1.0)
    return GenerationConfig(
        max_new_tokens=workload.max_tokens,
        min_new_tokens=workload.max_tokens,
        num_return_sequences=workload.n,
        pad_token_id=0,
        **(sampling if workload.temperature > 0 else dict(do_sample=False)),
    )


@dataclass(frozen=True)
class Plan:
    """The measurements to make, and the output files. If the configuration has drafts, also measure an engine with
    drafts; all other engines run without drafts.

    - `workloads`: workloads to run
    - `caches`: for each entry, measure an engine with its prefix cache on (True) or off (False)
    - `with_hf`: also measure transformers
    - `json_file`, `plot_file`: output files
    - `dummy_weights`: the model name is the name of a configuration, and the weights are random; not possible together
      with `with_hf`
    """

    workloads: Sequence[Workload]
    caches: Sequence[bool] = (True, False)
    with_hf: bool = False
    json_file: Path | None = None
    plot_file: Path | None = None
    dummy_weights: bool = False


def bench(config: EngineConfig, plan: Plan, console: Console) -> list[Measurement]:
    """Measure every workload with every system, print a table, and write the files of `plan`.

    Raise ConfigError or ModelError if the model cannot be loaded. Raise ConfigError if a plot is requested but
    matplotlib is not installed.
    """
    if plan.plot_file is not None:
        check_can_plot()
    loaded = load_dummy(config) if plan.dummy_weights else load_model(config)
    systems = _make_systems(config, plan, loaded)
    gc.freeze()  # a worker also freezes its objects
    measurements = [each for workload in plan.workloads for each in measure(workload, systems, tell)]
    setting = _describe_setting(config, plan, loaded)
    title = ", ".join(setting.values())
    console.print(make_table(measurements, title))
    console.print(NOTE)
    if plan.json_file is not None:
        report = {"setting": setting, "measurements": [dataclasses.asdict(m) for m in measurements]}
        plan.json_file.write_text(json.dumps(report, indent=2))
    if plan.plot_file is not None:
        plot_speeds({(m.system, m.workload): m.all_tokens_per_second for m in measurements}, title, plan.plot_file)
    return measurements


def _make_systems(config: EngineConfig, plan: Plan, loaded: LoadedModel) -> dict[str, System]:
    systems: dict[str, System] = {}
    shared = loaded if config.num_ranks == 1 else None  # with several ranks, each rank loads its own part
    for is_on in plan.caches:
        cached = config.model_copy(update={"enable_prefix_caching": is_on, "speculative": "off"})
        systems[f"cache {'on' if is_on else 'off'}"] = EngineSystem(cached, shared)
    if config.num_drafts:
        systems["drafts"] = EngineSystem(config, shared)
    if plan.with_hf:
        systems["hf"] = TransformersSystem(loaded)
    return systems


def _describe_setting(config: EngineConfig, plan: Plan, loaded: LoadedModel) -> dict[str, str]:
    on_ranks = f" on each of {config.num_ranks} ranks" if config.num_ranks > 1 else ""
    return {
        "model": f"{config.model} with random weights" if plan.dummy_weights else config.model,
        "dtype": loaded.dtype_name,
        "device": str(loaded.model.device),
        "backend": f"backend {loaded.backend.name} ({loaded.backend.ops.instruction_set()})",
        "threads": f"{torch.get_num_threads()} threads{on_ranks}",
        "machine": _machine(loaded.model.device),
    }


def _machine(device: torch.device) -> str:
    """Return the name of the GPU. On a CPU, return the name of the processor and the number of cores that this process
    may use.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} ({len(os.sched_getaffinity(0))} cores)"


def make_table(measurements: Sequence[Measurement], title: str) -> Table:
    """Return a table with a row for each measurement.

    If `hf` was measured, the table also has ratios to `hf`. If drafts were measured, the table also has the numbers of
    accepted and drafted tokens.
    """
    hf = {m.workload: m for m in measurements if m.system == "hf"}
    has_drafts = any(m.system == "drafts" for m in measurements)
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    for header in ("workload", "system"):
        table.add_column(header, no_wrap=True)
    for header in ("seconds", "tokens\n/s", "slowest to\nfastest", "reqs\n/s", "hit\nrate", "first\ntoken s"):
        table.add_column(header, justify="right")
    if has_drafts:
        table.add_column("accepted of\ndrafted", justify="right")
    for header in ("speed\nvs hf", "first\nvs hf") if hf else ():
        table.add_column(header, justify="right")
    for m in measurements:
        lowest, *_, highest = sorted(m.all_tokens_per_second)
        speeds = [f"{m.seconds:.2f}", f"{m.tokens_per_second:,.0f}", f"{lowest:,.0f} to {highest:,.0f}"]
        speeds.append(f"{m.requests_per_second:.2f}")
        hit_rate = "-" if m.hit_rate is None else f"{m.hit_rate:.0%}"
        drafts = [f"{m.accepted:,} of {m.drafted:,}" if m.system == "drafts" else "-"] if has_drafts else []
        ratios = _ratios(m, hf[m.workload]) if hf else []
        table.add_row(m.workload, m.system, *speeds, hit_rate, f"{m.first_token_seconds:.2f}", *drafts, *ratios)
    return table


def _ratios(measurement: Measurement, hf: Measurement) -> list[str]:
    speed = measurement.tokens_per_second / hf.tokens_per_second
    return [f"{speed:.2f}x", f"{measurement.first_token_seconds / hf.first_token_seconds:.2f}x"]
