"""`trueroll demo`: a real model behind a real worker process.

It shows that cache hits, other requests and a sleep change no bit, and that a worker serves the pushed weights.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

from trueroll.errors import LINES, printable

from ...engine.models.names import resolve_model
from ...engine.models.smollm2 import smollm2_folder, smollm2_path
from ...engine.request import SampleOutput, SamplingParams
from ..client.client import Group, RolloutClient
from ..client.local_worker import WorkerProcess, launch_worker
from ..publisher.publisher import PushResult, WeightPublisher
from ..text import TextModel

SYSTEM_PROMPT = (
    "You are a patient teacher and explain how things work to curious readers. Answer in two or three short "
    "sentences. Use everyday words, and if a technical term cannot be avoided, say what it means. Prefer an example "
    "from the kitchen, the garden or the street to an abstract definition. Do not repeat the question, do not list "
    "sources, and stop as soon as the answer is complete. If you are not certain, say so in a few words and give the "
    "most likely explanation."
)
QUESTIONS = (
    "Why is the sky blue?",
    "What makes bread rise?",
    "How does a bicycle stay upright?",
    "Why do leaves turn red in autumn?",
)


@dataclass(frozen=True)
class Sizes:
    """The sizes of the demo.

    - `samples`: sampled answers per question
    - `max_tokens`: new tokens per sampled answer
    - `greedy_tokens`: new tokens per greedy answer, for the comparison
    """

    samples: int = 8
    max_tokens: int = 48
    greedy_tokens: int = 24


SIZES = Sizes()


@dataclass(frozen=True)
class Repetition:
    """The greedy answers under one circumstance, one for each question.

    `has_cache`: whether cached tokens must be found; if False, none may be found.
    """

    circumstance: str
    has_cache: bool
    samples: Sequence[SampleOutput]

    @property
    def cached_tokens(self) -> int:
        return sum(sample.num_cached_tokens for sample in self.samples)


def demo(console: Console, model: str = "smollm2", sizes: Sizes = SIZES) -> bool:
    """Generate groups of samples, show some of them, and repeat greedy answers under other circumstances.

    Return whether all bits agree.
    """
    if model == "smollm2" and not os.path.exists(smollm2_path()):
        with _stage(console, f"Converting smollm2 to {smollm2_path().parent} (only once) ..."):
            smollm2_folder()
    with _stage(console, f"Loading the tokenizer of {model} ..."):
        text = TextModel(model)
        prompts = [text.encode_chat(question, SYSTEM_PROMPT) for question in QUESTIONS]
    title = f"Starting a worker process for {model} ..."
    with _start_worker(console, title, model) as worker, RolloutClient(worker.address) as client:
        console.print(f"It listens at {worker.address}.", soft_wrap=True)
        groups = _generate_groups(console, client, prompts, sizes)
        _show_samples(console, text, groups)
        with _stage(console, "Generating greedy answers to the same prompts under other circumstances ..."):
            repetitions = _repeat(client, prompts, sizes)
        with _stage(console, "Putting the worker to sleep, then pushing changed weights, then the old weights ..."):
            changed, restored = _sleep_and_push(console, client, worker, _read_weights(model), prompts, sizes)
        repetitions.append(Repetition("after a sleep and two pushes", False, restored))
    title = "Starting another worker, without a prefix cache ..."
    with (
        _start_worker(console, title, model, enable_prefix_caching=False) as worker,
        RolloutClient(worker.address) as client,
        _stage(console, "Generating greedy answers with it ..."),
    ):
        repetitions.append(Repetition("cache off (another worker)", False, _greedy(client, prompts, sizes)))
    return _compare_changed(console, restored, changed) & compare(console, repetitions)


@contextmanager
def _stage(console: Console, title: str) -> Iterator[None]:
    """Print a title. On a terminal, show a spinner below it until the context ends."""
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    if not console.is_interactive:
        yield
        return
    with Progress(SpinnerColumn(), BarColumn(), TimeElapsedColumn(), console=console, transient=True) as progress:
        progress.add_task("", total=None)
        yield


def _start_worker(console: Console, title: str, model: str, **settings: Any) -> WorkerProcess:
    with _stage(console, title):
        return launch_worker(model, **settings)


def _generate_groups(console: Console, client: RolloutClient, prompts: list[list[int]], sizes: Sizes) -> list[Group]:
    console.print(f"Generating {sizes.samples} samples of up to {sizes.max_tokens} tokens for each prompt ...")
    params = SamplingParams(n=sizes.samples, temperature=0.8, top_p=0.95, max_tokens=sizes.max_tokens)
    start = time.perf_counter()
    groups = client.generate(prompts, params, seed=7, progress=console.is_interactive)
    seconds = time.perf_counter() - start
    engine = client.stats().engine
    num_tokens = sum(len(sample.token_ids) for group in groups for sample in group.samples)
    console.print(
        f"{len(prompts)} prompts x {sizes.samples} samples: {num_tokens} tokens in {seconds:.1f} s, "
        f"{num_tokens / seconds:.0f} tokens/s; prefix cache: {engine['prefix_hits']} of {engine['prefix_queries']} "
        f"prompt tokens found, hit rate {engine['prefix_hits'] / engine['prefix_queries']:.0%}."
    )
    return groups


def _show_samples(console: Console, text: TextModel, groups: list[Group]) -> None:
    for question, group in zip(QUESTIONS, groups, strict=True):
        answer = text.decode(group.samples[0].token_ids).strip()
        console.print(
            f"\n[bold]{question}[/] (sample 1 of {len(group.samples)})\n{escape(printable(answer, kept=LINES))}"
        )
    console.print()


def _repeat(client: RolloutClient, prompts: list[list[int]], sizes: Sizes) -> list[Repetition]:
    """Return greedy answers with a cold cache, with a warm cache, and beside sampled requests."""
    others = SamplingParams(n=2, seed=11, max_tokens=sizes.greedy_tokens, ignore_eos=True)
    params = [*[_greedy_params(sizes)] * len(prompts), *[others] * len(prompts)]
    company = client.generate(prompts + [prompt[::-1] for prompt in prompts], params)
    return [
        Repetition("cache cold", False, _greedy_cold(client, prompts, sizes)),
        Repetition("cache warm", True, _greedy(client, prompts, sizes)),
        Repetition("beside other requests", True, [group.samples[0] for group in company[: len(prompts)]]),
    ]


def _sleep_and_push(
    console: Console,
    client: RolloutClient,
    worker: WorkerProcess,
    weights: Mapping[str, Tensor],
    prompts: list[list[int]],
    sizes: Sizes,
) -> tuple[list[SampleOutput], list[SampleOutput]]:
    """Let the worker drop its weights and cache, push changed weights, and then push the old weights.

    Return the greedy answers with the changed and with the old weights.
    """
    process = psutil.Process(worker.pid)
    before = process.memory_info().rss
    client.sleep(level=2)
    console.print(f"sleep(level=2) released {(before - process.memory_info().rss) / 1e6:.0f} MB.")
    client.wake_up(tags=["weights"])
    with WeightPublisher("shared") as publisher:
        publisher.connect([worker.address])
        push = publisher.push(((name, _blur(tensor)) for name, tensor in weights.items()), version=1)
        client.wake_up(tags=["kv_cache"])
        changed = _greedy_cold(client, prompts, sizes)
        _show_push(console, push, changed)
        push = publisher.push(weights, version=2)
        restored = _greedy_cold(client, prompts, sizes)
        _show_push(console, push, restored)
    return changed, restored


def _read_weights(model: str) -> dict[str, Tensor]:
    files = sorted(resolve_model(model).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _blur(tensor: Tensor) -> Tensor:
    """Return the tensor with visible noise added."""
    return tensor + 0.5 * tensor.float().std() * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))


def _show_push(console: Console, push: PushResult, samples: Sequence[SampleOutput]) -> None:
    versions = sorted({span.version for sample in samples for span in sample.weight_versions})
    console.print(
        f"Version {push.version} was pushed: {push.num_bytes / 1e6:.0f} MB in {push.total_seconds:.2f} s, with a pause "
        f"of {push.pause_seconds * 1e3:.1f} ms. First tokens: {samples[0].token_ids[:6]}, from version "
        f"{versions}."
    )


def _greedy_cold(client: RolloutClient, prompts: list[list[int]], sizes: Sizes) -> list[SampleOutput]:
    """Return greedy answers that share no cached prefix with each other or with other requests."""
    return _greedy(client, prompts, sizes, salts=[f"cold {i}" for i in range(len(prompts))])


def _greedy(
    client: RolloutClient, prompts: list[list[int]], sizes: Sizes, salts: Sequence[str | None] | None = None
) -> list[SampleOutput]:
    """Return one greedy answer for each prompt. Requests with different salts share no cached prefix."""
    params = [_greedy_params(sizes, salt) for salt in salts or [None] * len(prompts)]
    return [group.samples[0] for group in client.generate(prompts, params)]


def _greedy_params(sizes: Sizes, salt: str | None = None) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=sizes.greedy_tokens, ignore_eos=True, cache_salt=salt)


def compare(console: Console, repetitions: Sequence[Repetition]) -> bool:
    """Print how many tokens and log-probs of each repetition differ from the first repetition.

    Return True if nothing differs, a warm cache had a hit and a cold cache had none.
    """
    cold = repetitions[0]
    table = Table("circumstance", "cached prompt tokens", "tokens compared", "differences")
    differences = 0
    for repetition in repetitions:
        found = sum(_count_differences(*pair) for pair in zip(cold.samples, repetition.samples, strict=True))
        num_tokens = sum(len(sample.token_ids) for sample in repetition.samples)
        table.add_row(repetition.circumstance, str(repetition.cached_tokens), str(num_tokens), str(found))
        differences += found
    console.print(table)
    is_meant = all((r.cached_tokens > 0) == r.has_cache for r in repetitions)
    if differences == 0 and is_meant:
        console.print("[green]All bits agree:[/] tokens and log-probs are the same under all circumstances.")
    elif differences == 0:
        console.print("[red]Nothing is proved:[/] the cache was not in the state that the first column names.")
    else:
        console.print(f"[red]{differences} tokens or log-probs differ.[/] Please report this as a bug.")
    return differences == 0 and is_meant


def _compare_changed(console: Console, old: Sequence[SampleOutput], changed: Sequence[SampleOutput]) -> bool:
    """Return whether the changed weights changed every answer. Otherwise restoring the old weights proves nothing."""
    if all(_count_differences(*pair) for pair in zip(old, changed, strict=True)):
        return True
    console.print("[red]Nothing is proved:[/] changed weights gave the same bits.")
    return False


def _count_differences(expected: SampleOutput, found: SampleOutput) -> int:
    assert expected.logprobs is not None and found.logprobs is not None
    if len(expected.token_ids) != len(found.token_ids):
        return max(len(expected.token_ids), len(found.token_ids))
    same_bits = expected.logprobs.view(np.int32) == found.logprobs.view(np.int32)
    return int((~(same_bits & np.equal(expected.token_ids, found.token_ids))).sum())
