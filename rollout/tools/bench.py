"""`trueroll bench`: measure the engine's speed in this process, and the speed of transformers' `generate`.

Owns the workloads. Each figure comes from a single run after a warm-up run, so the figures do not show how much they
vary. Promises that both systems do the same work: the same model, dtype, threads, prompts, samples, number of new
tokens and temperature.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from trueroll.errors import ConfigError

from ...engine.config import EngineConfig
from ...engine.engine import Engine
from ...engine.request import GenerateRequest, SampleOutput, SamplingParams
from ...engine.running.loading import LoadedModel, load_dummy, load_model
from .progress import tell

NOTE = (
    "first token: mean time from submission to a request's first token, measured in a separate run of the same prompts "
    "with one new token. hit rate: the share of prompt tokens found in the cache or shared with a running request."
)


@dataclass(frozen=True)
class Workload:
    """A workload of random prompts.

    - `num_prompts`: number of prompts
    - `shared`, `own`: number of first tokens that all prompts share, and number of further tokens of each prompt
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
        """Return the prompts, int32 [num_prompts, shared + own]. Every call returns the same prompts."""
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
    """The measurement of one system (`cache on`, `cache off` or `hf`) on one workload.

    `hit_rate`: None if the system has no cache.
    """

    workload: str
    system: str
    seconds: float
    tokens_per_second: float
    requests_per_second: float
    hit_rate: float | None
    first_token_seconds: float


@dataclass(frozen=True)
class Timing:
    """One run: its duration, and the time of each request's first finished sample."""

    seconds: float
    arrivals: list[float]
    hit_rate: float | None = None


def measure(workload: Workload, system: str, run: Callable[[Workload], Timing]) -> Measurement:
    """Run the workload twice and measure the second run. The first run is slower, because it allocates memory.

    A third run, with one new token per sample, measures the time to first token.
    """
    run(workload)
    timing = run(workload)
    first = run(dataclasses.replace(workload, max_tokens=1))
    return Measurement(
        workload.name,
        system,
        seconds=timing.seconds,
        tokens_per_second=workload.num_samples * workload.max_tokens / timing.seconds,
        requests_per_second=workload.num_prompts / timing.seconds,
        hit_rate=timing.hit_rate,
        first_token_seconds=sum(first.arrivals) / len(first.arrivals),
    )


class EngineSystem:
    """The engine with its prefix cache on or off. The cache is empty at the start of each run."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel) -> None:
        self.engine = Engine(config, loaded)

    def __call__(self, workload: Workload) -> Timing:
        engine = self.engine
        engine.invalidate_prefix_cache()
        before, start = engine.stats(), time.perf_counter()
        for request in _requests(workload, engine.info.vocab_size):
            engine.add(request)
        arrivals: dict[str, float] = {}
        while engine.has_unfinished:
            for output in engine.step():
                assert isinstance(output, SampleOutput)
                arrivals.setdefault(output.request_id, time.perf_counter() - start)
        seconds, after = time.perf_counter() - start, engine.stats()
        hits, queries = after.prefix_hits - before.prefix_hits, after.prefix_queries - before.prefix_queries
        return Timing(seconds, list(arrivals.values()), hits / queries)


def _requests(workload: Workload, vocab_size: int) -> list[GenerateRequest]:
    params = SamplingParams(
        n=workload.n, max_tokens=workload.max_tokens, temperature=workload.temperature, seed=0, ignore_eos=True
    )
    return [GenerateRequest(str(i), prompt, params) for i, prompt in enumerate(workload.prompts(vocab_size))]


class TransformersSystem:
    """transformers' `generate` with all prompts of a workload in one batch. All first tokens arrive together."""

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
    """The measurements to make, and the output files.

    - `workloads`: workloads to run
    - `caches`: one engine for each entry, with its prefix cache on (True) or off
    - `with_hf`: also measure transformers
    - `json_file`, `plot_file`: output files
    - `dummy_weights`: the model name is a configuration, and the weights are random; excludes `with_hf`
    """

    workloads: Sequence[Workload]
    caches: Sequence[bool] = (True, False)
    with_hf: bool = False
    json_file: Path | None = None
    plot_file: Path | None = None
    dummy_weights: bool = False


def bench(config: EngineConfig, plan: Plan, console: Console) -> list[Measurement]:
    """Measure every workload with every system, print a table, and write the files of `plan`.

    Raise ConfigError or ModelError if the model cannot be loaded. Raise ConfigError for a plot without matplotlib.
    """
    if plan.plot_file is not None:
        _check_can_plot()
    loaded = load_dummy(config) if plan.dummy_weights else load_model(config)
    systems = _make_systems(config, plan, loaded)
    gc.freeze()  # like a worker
    measurements = []
    for workload in plan.workloads:
        for name, system in systems.items():
            tell(f"measuring {workload.name}: {name} ...")
            measurements.append(measure(workload, name, system))
    setting = _describe_setting(config, plan, loaded)
    console.print(make_table(measurements, ", ".join(f"{value}" for value in setting.values())))
    console.print(NOTE)
    if plan.json_file is not None:
        report = {"setting": setting, "measurements": [dataclasses.asdict(m) for m in measurements]}
        plan.json_file.write_text(json.dumps(report, indent=2))
    if plan.plot_file is not None:
        plot(measurements, plan.plot_file)
    return measurements


def _make_systems(config: EngineConfig, plan: Plan, loaded: LoadedModel) -> dict[str, Callable[[Workload], Timing]]:
    systems: dict[str, Callable[[Workload], Timing]] = {}
    for is_on in plan.caches:
        cached = config.model_copy(update={"enable_prefix_caching": is_on})
        systems[f"cache {'on' if is_on else 'off'}"] = EngineSystem(cached, loaded)
    if plan.with_hf:
        systems["hf"] = TransformersSystem(loaded)
    return systems


def _describe_setting(config: EngineConfig, plan: Plan, loaded: LoadedModel) -> dict[str, str]:
    return {
        "model": f"{config.model} with random weights" if plan.dummy_weights else config.model,
        "dtype": loaded.dtype_name,
        "device": str(loaded.model.device),
        "backend": f"backend {loaded.backend.name} ({loaded.backend.ops.instruction_set()})",
        "threads": f"{torch.get_num_threads()} threads",
    }


def make_table(measurements: Sequence[Measurement], title: str) -> Table:
    """Return a table with a row for each measurement, and ratios to `hf` if it was measured."""
    hf = {m.workload: m for m in measurements if m.system == "hf"}
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    for header in ("workload", "system"):
        table.add_column(header, no_wrap=True)
    for header in ("seconds", "tokens\n/s", "reqs\n/s", "hit\nrate", "first\ntoken s"):
        table.add_column(header, justify="right")
    for header in ("speed\nvs hf", "first\nvs hf") if hf else ():
        table.add_column(header, justify="right")
    for m in measurements:
        speeds = [f"{x:.2f}" for x in (m.seconds, m.tokens_per_second, m.requests_per_second)]
        hit_rate = "-" if m.hit_rate is None else f"{m.hit_rate:.0%}"
        ratios = _ratios(m, hf[m.workload]) if hf else []
        table.add_row(m.workload, m.system, *speeds, hit_rate, f"{m.first_token_seconds:.2f}", *ratios)
    return table


def _ratios(measurement: Measurement, hf: Measurement) -> list[str]:
    speed = measurement.tokens_per_second / hf.tokens_per_second
    return [f"{speed:.2f}x", f"{measurement.first_token_seconds / hf.first_token_seconds:.2f}x"]


def _check_can_plot() -> None:
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise ConfigError("plot: the package matplotlib is not installed; run pip install 'trueroll[plot]'") from None


def plot(measurements: Sequence[Measurement], file: Path) -> None:
    """Write a PNG with one group of bars for each workload: tokens/s by system."""
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(m.workload for m in measurements))
    systems = list(dict.fromkeys(m.system for m in measurements))
    speeds = {(m.system, m.workload): m.tokens_per_second for m in measurements}
    figure = Figure(figsize=(2 + 2 * len(workloads), 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(systems)
    for i, system in enumerate(systems):
        places = [x + (i - (len(systems) - 1) / 2) * width for x in range(len(workloads))]
        axes.bar(places, [speeds[system, workload] for workload in workloads], width, label=system)
    axes.set_xticks(range(len(workloads)), workloads)
    axes.set_ylabel("generated tokens per second")
    axes.legend()
    figure.savefig(file, format="png")
