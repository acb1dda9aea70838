"""`trueroll demo`: a real model behind a real worker process.

The demo shows samples, and a trainer's log-probs of the same samples, with and without alignment. Then the demo shows
that cache hits, other requests and a sleep change no bit, and that a worker serves the pushed weights.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads would stall the worker on the same cores

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from trueroll.errors import LINES, printable

from ...engine.models.names import resolve_model
from ...engine.models.smollm2 import smollm2_folder, smollm2_path
from ...engine.request import SampleOutput, SamplingParams
from ..auditing import Audit, audit_folder
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


BINS = {"exactly 0": 0.0, "below 0.01": 0.01, "0.01 to 0.1": 0.1, "0.1 or more": np.inf}
"""The rows of the chart of differences, each with an upper limit that the row excludes. The first row includes its
limit, 0.
"""
TRAINERS = "Log-probs of a trainer and of the worker: same model, dtype, samples"
BAR = 24
"""Characters of the longest bar in the chart."""
NEXT = (
    ("trueroll serve smollm2", "run a worker for other programs"),
    ("trueroll generate smollm2 --prompt 'Once upon a time' -n 4", "complete your own prompts"),
    ("trueroll verify smollm2 --quick", "compare bits under more circumstances"),
)


@dataclass(frozen=True)
class Sizes:
    """The sizes of the demo.

    - `samples`: sampled answers per question
    - `max_tokens`: new tokens per sampled answer
    - `compared_tokens`: new tokens per answer that is repeated under other circumstances
    """

    samples: int = 8
    max_tokens: int = 48
    compared_tokens: int = 24

    @property
    def params(self) -> SamplingParams:
        """The parameters of the shown samples."""
        return SamplingParams(n=self.samples, temperature=0.8, max_tokens=self.max_tokens, seed=7)


SIZES = Sizes()


@dataclass(frozen=True)
class Answers:
    """One greedy answer and two sampled answers to each question."""

    greedy: list[SampleOutput]
    sampled: list[SampleOutput]

    @property
    def samples(self) -> list[SampleOutput]:
        return [*self.greedy, *self.sampled]


@dataclass(frozen=True)
class Repetition:
    """The answers of one run of the demo's requests, for example with a warm cache.

    `has_cache`: if True, the requests must find cached tokens; if False, the requests must find no cached tokens.
    """

    circumstance: str
    has_cache: bool
    answers: Answers

    @property
    def cached_tokens(self) -> int:
        """Total number of cached prompt tokens of all requests. All samples of a request have the same
        `num_cached_tokens`.
        """
        return sum(sample.num_cached_tokens for sample in self.answers.samples if sample.index == 0)


class Stages:
    """The stages of the demo and their total duration."""

    def __init__(self, console: Console) -> None:
        self.console, self.seconds = console, 0.0

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Context manager that prints the stage's title at the start and the stage's duration at the end. On a
        terminal, show a spinner below the title.
        """
        console, start = self.console, time.perf_counter()
        console.print(title, markup=False, highlight=False, soft_wrap=True)
        if console.is_interactive:
            columns = SpinnerColumn(), BarColumn(), TimeElapsedColumn()
            with Progress(*columns, console=console, transient=True) as progress:
                progress.add_task("", total=None)
                yield
        else:
            yield
        seconds = round(time.perf_counter() - start, 1)
        self.seconds += seconds
        console.print(f"  done in {seconds:.1f} s", highlight=False)


def demo(console: Console, model: str = "smollm2", sizes: Sizes = SIZES) -> bool:
    """Generate groups of samples, compare a trainer with the worker, and repeat answers under other circumstances.

    Return whether all bits agree.
    """
    stages = Stages(console)
    if model == "smollm2" and not os.path.exists(smollm2_path()):
        with stages.stage(f"Converting smollm2 to {smollm2_path().parent} (only once) ..."):
            smollm2_folder()
    with stages.stage(f"Loading the tokenizer of {model} ..."):
        text = TextModel(model)
        prompts = [text.encode_chat(question, SYSTEM_PROMPT) for question in QUESTIONS]
    title = f"Starting a worker process for {model} ..."
    with _start_worker(stages, title, model) as worker, RolloutClient(worker.address) as client:
        console.print(f"It listens at {worker.address}.", soft_wrap=True)
        groups = _generate_groups(stages, client, prompts, sizes)
        _show_samples(console, text, groups)
        with stages.stage("Computing the log-probs of these samples as a trainer does, aligned and not ..."):
            audits = _audit(client, model, prompts, sizes)
        is_aligned = compare_trainers(console, *audits)
        with stages.stage("Generating answers to the same prompts under other circumstances ..."):
            repetitions = _repeat(client, prompts, sizes)
        with stages.stage("Putting the worker to sleep, then pushing changed weights, then the old weights ..."):
            changed, restored = _sleep_and_push(console, client, worker, _read_weights(model), prompts, sizes)
        repetitions.append(Repetition("after a sleep and two pushes", False, restored))
    title = "Starting another worker, without a prefix cache ..."
    with (
        _start_worker(stages, title, model, enable_prefix_caching=False) as worker,
        RolloutClient(worker.address) as client,
        stages.stage("Generating the same answers with it ..."),
    ):
        repetitions.append(Repetition("cache off (another worker)", False, _answer(client, prompts, sizes)))
    agrees = _compare_changed(console, restored, changed) & compare(console, repetitions, sum(map(len, prompts)))
    console.print(f"All stages took {stages.seconds:.1f} s.", highlight=False)
    _say_what_is_next(console)
    return agrees & is_aligned


def _start_worker(stages: Stages, title: str, model: str, **settings: Any) -> WorkerProcess:
    with stages.stage(title):
        return launch_worker(model, **settings)


def _generate_groups(stages: Stages, client: RolloutClient, prompts: list[list[int]], sizes: Sizes) -> list[Group]:
    params, seed = sizes.params.model_copy(update={"seed": None}), sizes.params.seed
    start = time.perf_counter()
    with stages.stage(f"Generating {sizes.samples} samples of up to {sizes.max_tokens} tokens for each prompt ..."):
        groups = client.generate(prompts, params, seed=seed)
    seconds = time.perf_counter() - start
    engine = client.stats().engine
    num_tokens = sum(len(sample.token_ids) for group in groups for sample in group.samples)
    shared, total = len(os.path.commonprefix(prompts)), sum(map(len, prompts))
    block_size = (client.health().engine or {})["block_size"]
    stages.console.print(
        f"{len(prompts)} prompts x {sizes.samples} samples = {len(prompts) * sizes.samples} samples with {num_tokens} "
        f"tokens: {num_tokens / seconds:.0f} tokens/s.\n"
        f"Prompts: {total} tokens. Their first {shared} tokens are the same, of which whole blocks of {block_size} are "
        f"shared: {engine['prefix_hits']} of the {total} tokens came from the prefix cache "
        f"({engine['prefix_hits'] / total:.0%}).",
        soft_wrap=True,
    )
    return groups


def _show_samples(console: Console, text: TextModel, groups: list[Group]) -> None:
    for question, group in zip(QUESTIONS, groups, strict=True):
        answer = text.decode(group.samples[0].token_ids).strip()
        console.print(
            f"\n[bold]{question}[/] (sample 1 of {len(group.samples)})\n{escape(printable(answer, kept=LINES))}"
        )
    console.print()


def _audit(client: RolloutClient, model: str, prompts: list[list[int]], sizes: Sizes) -> list[Audit]:
    """Return the audit of an aligned trainer and the audit of a trainer without alignment. Both audits use the samples
    that the demo has shown.
    """
    disable_progress_bar()
    return audit_folder(model, client, prompts, sizes.params, with_plain=True)


def compare_trainers(console: Console, aligned: Audit, plain: Audit) -> bool:
    """Print how much the log-probs of both trainers differ from the log-probs of the worker.

    Return True if the aligned trainer computed exactly the worker's log-probs, and the trainer without alignment
    computed different log-probs. If both trainers had the same bits, the comparison would prove nothing.
    """
    names = "aligned trainer", "ordinary forward pass"
    table = Table("trainer", "other bits", "at most", "importance ratios", title=TRAINERS)
    for name, audit in zip(names, (aligned, plain), strict=True):
        ratios = np.exp(np.concatenate(audit.differences))
        low, high = ratios.min(), ratios.max()
        shown = f"exactly {low}" if low == high else f"{low:.6f} to {high:.6f}"
        table.add_row(name, f"{audit.num_different} of {audit.num_tokens}", f"{audit.largest:.3g}", shown)
    console.print(table)
    console.print(_draw_differences(dict(zip(names, (aligned, plain), strict=True))))
    if aligned.num_different:
        console.print(printable(str(aligned), kept=LINES), style="red", markup=False)
    elif not plain.num_different:
        console.print("[red]Nothing is proved:[/] the ordinary forward pass has the same bits as the worker.")
    return not aligned.num_different and plain.num_different > 0


def _draw_differences(audits: Mapping[str, Audit]) -> Table:
    """Return a bar chart that shows, for each range of differences, the number of tokens with a difference in this
    range.
    """
    chart = Table("|difference|", *audits, title="Tokens by |trainer's log-prob - worker's log-prob|")
    columns = [_draw_bars(count_by_size(np.concatenate(audit.differences))) for audit in audits.values()]
    for row in zip(BINS, *columns, strict=True):
        chart.add_row(*row)
    return chart


def count_by_size(differences: np.ndarray) -> list[int]:
    """Return the number of differences in each of BINS."""
    sizes = np.abs(differences)
    up_to = [int((sizes == 0).sum()), *(int((sizes < limit).sum()) for limit in [*BINS.values()][1:-1]), len(sizes)]
    return np.diff([0, *up_to]).tolist()


def _draw_bars(counts: list[int]) -> list[str]:
    """Return each count with a bar. The bar of every count above 0 has at least one character."""
    return [f"{count:>6} {'█' * -(-BAR * count // sum(counts))}" for count in counts]


def _say_what_is_next(console: Console) -> None:
    console.print("\nTry next:")
    if shutil.which("trueroll") is None:
        console.print(f"  source {sys.prefix}/bin/activate", markup=False, highlight=False, soft_wrap=True)
    for command, purpose in NEXT:
        console.print(f"  {command:<60} # {purpose}", markup=False, highlight=False, soft_wrap=True)


def _repeat(client: RolloutClient, prompts: list[list[int]], sizes: Sizes) -> list[Repetition]:
    """Return the answers with a cold cache, with a warm cache, and while other requests run."""
    return [
        Repetition("cache cold", False, _answer(client, prompts, sizes, is_cold=True)),
        Repetition("cache warm", True, _answer(client, prompts, sizes)),
        Repetition("beside other requests", True, _answer(client, prompts, sizes, others=len(prompts))),
    ]


def _sleep_and_push(
    console: Console,
    client: RolloutClient,
    worker: WorkerProcess,
    weights: Mapping[str, Tensor],
    prompts: list[list[int]],
    sizes: Sizes,
) -> tuple[Answers, Answers]:
    """Make the worker drop its weights and cache. Then push changed weights, and after that the old weights.

    Return the answers with the changed weights and the answers with the old weights.
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
        changed = _answer(client, prompts, sizes, is_cold=True)
        _show_push(console, push, changed)
        push = publisher.push(weights, version=2)
        restored = _answer(client, prompts, sizes, is_cold=True)
        _show_push(console, push, restored)
    return changed, restored


def _read_weights(model: str) -> dict[str, Tensor]:
    files = sorted(resolve_model(model).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _blur(tensor: Tensor) -> Tensor:
    """Return the tensor plus noise that is strong enough to change the model's answers."""
    return tensor + 0.5 * tensor.float().std() * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))


def _show_push(console: Console, push: PushResult, answers: Answers) -> None:
    versions = sorted({span.version for sample in answers.samples for span in sample.weight_versions})
    console.print(
        f"Version {push.version} was pushed: {push.num_bytes / 1e6:.0f} MB in {push.total_seconds:.2f} s, with a pause "
        f"of {push.pause_seconds * 1e3:.1f} ms. First tokens: {answers.greedy[0].token_ids[:6]}, from version "
        f"{versions}."
    )


def _answer(
    client: RolloutClient, prompts: list[list[int]], sizes: Sizes, is_cold: bool = False, others: int = 0
) -> Answers:
    """Return the answers to all prompts.

    `is_cold`: whether to prevent the requests from sharing cached prefixes with each other and with earlier requests.
    `others`: number of additional requests, with reversed prompts, that run at the same time.
    """
    kind: dict[str, Any] = dict(max_tokens=sizes.compared_tokens, ignore_eos=True)
    greedy, sampled = SamplingParams(temperature=0.0, **kind), SamplingParams(n=2, seed=3, **kind)
    params = [greedy] * len(prompts) + [sampled] * len(prompts)
    if is_cold:
        params = [each.model_copy(update={"cache_salt": f"cold {i}"}) for i, each in enumerate(params)]
    params += [SamplingParams(n=2, seed=11, **kind)] * others
    groups = client.generate(prompts * 2 + [prompt[::-1] for prompt in prompts[:others]], params)
    samples = [group.samples for group in groups]
    return Answers(
        [group[0] for group in samples[: len(prompts)]],
        [sample for group in samples[len(prompts) : 2 * len(prompts)] for sample in group],
    )


def compare(console: Console, repetitions: Sequence[Repetition], prompt_tokens: int) -> bool:
    """Print how many tokens and log-probs of each repetition differ from the first repetition.

    `prompt_tokens`: the total number of tokens in all prompts. Each prompt is used in one greedy and one sampled
    request. Return True if nothing differs, every warm cache had hits, and every cold cache had no hits.
    """
    cold = repetitions[0].answers.samples
    headers = "circumstance", "cached", "greedy", "sampled", "differences"
    table, differences = Table(*headers, title="Cached prompt tokens, compared tokens, and differences"), 0
    for repetition in repetitions:
        answers = repetition.answers
        found = sum(_count_differences(*pair) for pair in zip(cold, answers.samples, strict=True))
        cached = f"{repetition.cached_tokens} of {2 * prompt_tokens}"
        table.add_row(
            repetition.circumstance, cached, *map(_count_tokens, (answers.greedy, answers.sampled)), f"{found}"
        )
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


def _count_tokens(samples: Sequence[SampleOutput]) -> str:
    return str(sum(len(sample.token_ids) for sample in samples))


def _compare_changed(console: Console, old: Answers, changed: Answers) -> bool:
    """Return whether the changed weights changed every answer. If an answer did not change, restoring the old weights
    proves nothing.
    """
    if all(_count_differences(*pair) for pair in zip(old.samples, changed.samples, strict=True)):
        return True
    console.print("[red]Nothing is proved:[/] changed weights gave the same bits.")
    return False


def _count_differences(expected: SampleOutput, found: SampleOutput) -> int:
    assert expected.logprobs is not None and found.logprobs is not None
    if len(expected.token_ids) != len(found.token_ids):
        return max(len(expected.token_ids), len(found.token_ids))
    same_bits = expected.logprobs.view(np.int32) == found.logprobs.view(np.int32)
    return int((~(same_bits & np.equal(expected.token_ids, found.token_ids))).sum())
