"""A complete GRPO trainer: `python examples/grpo.py --out FOLDER`. `--help` lists the options.

SmolLM2-135M learns to answer with only a number if a question ends in an arithmetic expression, such as `4 - 9 =`. At
each step, a worker samples a group of answers for each of several reasoning-gym tasks. The trainer computes the rewards
of the answers, and their advantages relative to the group. After one optimizer step on PPO's clipped objective, the
trainer pushes the new weights. Each step prints the largest difference between the log-probs of worker and trainer.
This difference is 0.0, unless `--unaligned` selects the plain forward pass.

`--workers 2` uses two workers on Ray (pip install 'trueroll[ray]'). The metrics of two workers are the same as the
metrics of one worker.

`--staleness 1` generates the next batch while the trainer computes. Each sampled token records its weight version. The
importance ratio of a token compares the token's current log-prob with its log-prob at sampling time. Ratios are
truncated. With `--staleness 1` or `--unaligned`, ratios can differ from 1, and each step also prints the difference
between trainer and rollout. Without `--staleness 1`, a run is reproducible to the bit. The results of a run stay the
same even if a worker is killed, or if the trainer is killed and continued with `--resume`.

`--fsdp 2` trains in two processes: each keeps a shard of every weight (FSDP2) and computes half of the samples.
`--lora 16` trains a LoRA adapter of rank 16 and pushes only the adapter.

`--sampling '{"top_p": 0.9, "repetition_penalty": 1.1}'` samples with filters or penalties. The trainer computes the
log-probs of the same distribution, so the difference between worker and trainer is still 0.0, and no importance ratio
is biased.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # busy-waiting threads would slow down a worker on the same cores

import numpy as np
import reasoning_gym
import torch
import typer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from peft import LoraConfig, get_peft_model
from rich.progress import Progress
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from trueroll.kernels.importance import diagnose, truncated_weights
from trueroll.kernels.training import align, token_log_probs
from trueroll.rollout import (
    Fleet,
    FleetClient,
    Group,
    PushError,
    RolloutClient,
    SampleOutput,
    SamplingParams,
    TruerollError,
    WeightPublisher,
    WorkerFailedError,
    WorkerLostError,
    launch_worker,
    resolve_model,
)
from trueroll.rollout.grammar import GrammarMasks

GROUP_SIZE = 8
MAX_TOKENS = 12
LEARNING_RATE, LORA_LEARNING_RATE = 2e-5, 3e-4
PARAMS = SamplingParams(n=GROUP_SIZE, max_tokens=MAX_TOKENS)
CLIP = 0.2
CAP = 2.0  # upper limit of importance ratios
CHUNK = 64  # number of samples per forward pass
WORKER_TIMEOUT = 15.0  # after this many seconds without a message, the worker counts as lost

disable_progress_bar()  # hides the progress of loading weights


@dataclass(frozen=True)
class Sample:
    """A prompt and the answer that the policy sampled.

    `ids`: int64 [num_tokens]. `is_own`: bool [num_tokens], True for tokens that the policy sampled. `log_probs`:
    float32, one entry per sampled token. `versions`: int64, the weight version of each sampled token.
    """

    ids: torch.Tensor
    is_own: torch.Tensor
    log_probs: torch.Tensor
    versions: torch.Tensor
    reward: float
    advantage: float


def relative(rewards: list[float]) -> list[float]:
    """Return the advantage of each reward relative to its group."""
    group = torch.tensor(rewards)
    return ((group - group.mean()) / (group.std() + 1e-4)).tolist()


def versions_of(output: SampleOutput) -> torch.Tensor:
    """Return, for each token of `output`, the version of the weights that sampled it: int64 [num_tokens]."""
    return torch.cat([torch.full((span.end - span.start,), span.version) for span in output.weight_versions])


class Tasks:
    """The tasks of each step, and the rewards of their answers."""

    def __init__(self, folder: Path, seed: int, per_step: int, params: SamplingParams = PARAMS) -> None:
        self.params = params
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        sizes = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1)
        self.tasks: Any = reasoning_gym.create_dataset("chain_sum", seed=seed * 10**6, size=10**6, **sizes)
        self.per_step = per_step

    def of(self, step: int) -> list[dict[str, Any]]:
        return [self.tasks[index] for index in range(step * self.per_step, (step + 1) * self.per_step)]

    def requests(self, step: int) -> tuple[list[list[int]], list[SamplingParams]]:
        """Return the prompts of `step` and their parameters.

        The questions end with `=`, so the model completes them without a chat template.
        """
        prompts = [self.tokenizer(task["question"])["input_ids"] for task in self.of(step)]
        seeds = [self.tasks.seed + task["metadata"]["source_index"] for task in self.of(step)]
        return prompts, [self.params.model_copy(update=dict(seed=seed)) for seed in seeds]

    def score(self, step: int, groups: list[Group]) -> Iterator[Sample]:
        """Yield all samples, with rewards from 0 to 1 and advantages relative to the group."""
        for task, prompt, group in zip(self.of(step), self.requests(step)[0], groups, strict=True):
            texts = [self.tokenizer.decode(output.token_ids, skip_special_tokens=True) for output in group.samples]
            rewards = [self.tasks.score_answer(text.strip(), task) for text in texts]
            for output, reward, advantage in zip(group.samples, rewards, relative(rewards), strict=True):
                ids, log_probs = torch.tensor([*prompt, *output.token_ids]), torch.tensor(output.logprobs)
                is_own = torch.arange(len(ids)) >= len(prompt)
                yield Sample(ids, is_own, log_probs, versions_of(output), reward, advantage)


class Trainer:
    """A model with its optimizer. The weights are float32, and the model computes in bfloat16. `params`: the parameters
    of the samples. `formats`: settings of low precision that worker and trainer share. `version`: number of steps so
    far.
    """

    rank, num_ranks = 0, 1
    learning_rate, pushes_adapters = LEARNING_RATE, False
    masks: GrammarMasks | None = None  # the masks for samples with a grammar

    def __init__(
        self,
        folder: Path,
        is_aligned: bool,
        staleness: int,
        params: SamplingParams = PARAMS,
        formats: dict[str, str] | None = None,
    ) -> None:
        self.params, self.formats = params, formats or {}
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
        self._adapt()
        self.version, self.is_aligned, self.is_on_policy = 0, is_aligned, is_aligned and not staleness
        if is_aligned:
            align(self.model, **self.formats)
        self._shard()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.learning_rate, weight_decay=0.0, fused=True)

    @property
    def weight_version(self) -> int:
        """The version of the current weights for workers. Version 0 is the checkpoint that a new worker has loaded."""
        return self.version + 1

    def step(self, samples: list[Sample]) -> dict[str, Any]:
        """Take one optimizer step and return its metrics."""
        versions = torch.cat([sample.versions for sample in samples])
        own = samples[self.rank :: self.num_ranks]
        parts = [self._backward(own[i : i + CHUNK], len(versions)) for i in range(0, len(own), CHUNK)]
        lengths = [len(sample.log_probs) for sample in own]
        each = (list(torch.cat(part).split(lengths)) for part in zip(*parts, strict=True))
        losses, log_probs = (torch.cat(self._of_all_ranks(part)) for part in each)
        sampled = torch.cat([sample.log_probs for sample in samples])
        differences = (log_probs - sampled).abs()
        is_fresh = versions == self.weight_version
        fresh, stale = differences[is_fresh].tolist(), differences[~is_fresh].tolist()
        grad_norm = self._clip_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1
        reward, length = sum(sample.reward for sample in samples) / len(samples), len(versions) / len(samples)
        row = dict(reward=reward, response_length=length, mismatch=max(fresh, default=None))
        row |= dict(stale_difference=max(stale, default=None), stale_share=len(stale) / len(versions))
        row |= dict(oldest_version=versions.min().item(), loss=losses.sum().item(), grad_norm=grad_norm.item())
        return row if self.is_on_policy else row | diagnose(log_probs, sampled, high=CAP)._asdict()

    def push(self, publisher: WeightPublisher) -> None:
        """Push the weights to the workers of `publisher`."""
        # A worker that has served another run may have a higher version.
        publisher.push(self.model, self.weight_version, allow_older=True, adapters=self.pushes_adapters)

    def state(self) -> dict[str, Any]:
        return dict(model=self.model.state_dict(), optimizer=self.optimizer.state_dict())

    def load(self, checkpoint: Path) -> None:
        """Restore the state and the version saved in a checkpoint."""
        state = self._of_this_rank(torch.load(checkpoint, weights_only=True))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.version = state["version"]

    def _of_this_rank(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def _adapt(self) -> None:
        pass

    def _shard(self) -> None:
        pass

    def _of_all_ranks(self, own: list[torch.Tensor]) -> list[torch.Tensor]:
        return own

    def _clip_gradients(self) -> Any:
        """Clip the gradients and return their norm before clipping."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)

    def _backward(self, samples: list[Sample], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the gradients of a micro-batch. Return the loss and the log-prob of each sampled token."""
        with torch.autocast("cpu", torch.bfloat16):
            log_probs = self.log_probs(samples)
        sampled = torch.cat([sample.log_probs for sample in samples])
        advantages = torch.cat([torch.full_like(sample.log_probs, sample.advantage) for sample in samples])
        # PPO's ratio, truncated. `truncated_weights` is a constant for autograd. The other factor equals 1 and has the
        # ratio's gradient.
        ratios = truncated_weights(log_probs, sampled, cap=CAP) * (log_probs - log_probs.detach()).exp()
        losses = -torch.minimum(ratios * advantages, ratios.clamp(1 - CLIP, 1 + CLIP) * advantages) / num_tokens
        (losses.sum() * self.num_ranks).backward()  # FSDP averages the gradients of the ranks
        return losses.detach(), log_probs.detach()

    def log_probs(self, samples: list[Sample]) -> torch.Tensor:
        """Return the log-probs of all tokens that the policy sampled, concatenated: float32."""
        ids = pad_sequence([sample.ids for sample in samples], batch_first=True, padding_value=-1)
        is_own = pad_sequence([sample.is_own for sample in samples], batch_first=True)
        mask, ids = ids >= 0, ids.clamp(min=0)
        if self.is_aligned:
            drawn = dict(distribution=self.params, masks=self.masks)
            return token_log_probs(self.model, ids, mask, completion_mask=is_own, **drawn)[is_own]
        logits = self.model(ids, attention_mask=mask).logits[:, :-1][is_own[:, 1:]].float()
        return logits.log_softmax(-1).gather(1, ids[is_own][:, None])[:, 0]


class AdapterTrainer(Trainer):
    """Trains a LoRA adapter and pushes only the adapter. The worker merges the adapter with the checkpoint that the
    worker loaded.
    """

    learning_rate, pushes_adapters = LORA_LEARNING_RATE, True

    def __init__(self, lora: int, *arguments: Any) -> None:
        self.lora = lora
        super().__init__(*arguments)

    def _adapt(self) -> None:
        torch.manual_seed(0)  # the matrices A start with random values, the matrices B with zeros
        config = LoraConfig(r=self.lora, lora_alpha=self.lora, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = get_peft_model(self.model, config)


def gathered(state: Any) -> Any:
    """Return a copy of a state with whole tensors instead of sharded tensors."""
    if isinstance(state, dict):
        return {name: gathered(part) for name, part in state.items()}
    return state.full_tensor() if isinstance(state, DTensor) else state


def like(own: DTensor, whole: torch.Tensor) -> torch.Tensor:
    """Return the tensor `whole`, sharded like `own`. A scalar is returned unchanged."""
    return distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None) if whole.dim() else whole


class ShardedTrainer(Trainer):
    """A trainer that runs on several ranks. On each rank other than 0, `follow` repeats the calls of rank 0."""

    def __init__(self, *arguments: Any) -> None:
        self.rank, self.num_ranks = distributed.get_rank(), distributed.get_world_size()
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.num_ranks))
        super().__init__(*arguments)

    def follow(self) -> None:
        """Repeat the calls of rank 0 until rank 0 closes."""
        publisher = WeightPublisher("shared")  # pushes to no worker, because only rank 0 is connected to workers
        while (call := self._share(None))[0] != "close":
            name, *arguments = call
            try:
                getattr(self, name)(*([publisher] if name == "push" else arguments))
            except PushError:
                pass  # the same error occurs on rank 0, which handles it

    def close(self) -> None:
        """Stop the other ranks."""
        self._share(["close"])

    def step(self, samples: list[Sample]) -> dict[str, Any]:
        self._announce("step", samples)
        return super().step(samples)

    def push(self, publisher: WeightPublisher) -> None:
        self._announce("push")
        super().push(publisher)

    def state(self) -> dict[str, Any]:
        self._announce("state")
        return gathered(super().state())

    def load(self, checkpoint: Path) -> None:
        self._announce("load", checkpoint)
        super().load(checkpoint)

    def _of_this_rank(self, state: dict[str, Any]) -> dict[str, Any]:
        model, optimizer = state["model"], state["optimizer"]
        model = {name: like(own, model[name]) for name, own in self.model.state_dict().items()}
        moments = {
            index: {name: like(own, moment) for name, moment in optimizer["state"][index].items()}
            for index, own in enumerate(self.model.parameters())
        }
        return state | dict(model=model, optimizer=optimizer | dict(state=moments))

    def _announce(self, *call: Any) -> None:
        if self.rank == 0:
            self._share(call)

    def _share(self, call: Any) -> Any:
        """Return the call that rank 0 broadcasts."""
        calls = [call]
        distributed.broadcast_object_list(calls)
        return calls[0]

    def _shard(self) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*self.model.model.layers, self.model):
            fully_shard(module, mp_policy=policy)

    def _of_all_ranks(self, own: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of all ranks in the order of the samples. Samples are assigned to the ranks in turn."""
        parts: list[Any] = [None] * self.num_ranks
        distributed.all_gather_object(parts, own)
        return [part for of_each in zip(*parts, strict=True) for part in of_each]

    def _clip_gradients(self) -> Any:
        return super()._clip_gradients().full_tensor()


def join_ranks(meeting: str, rank: int, num_ranks: int) -> None:
    """Join the process group. `meeting`: path of the file through which the ranks find each other."""
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_ranks)


def follow(meeting: str, rank: int, num_ranks: int, *arguments: Any) -> None:
    """Run a rank other than rank 0."""
    join_ranks(meeting, rank, num_ranks)
    ShardedTrainer(*arguments).follow()
    distributed.destroy_process_group()


def start_ranks(resources: ExitStack, num_ranks: int, *arguments: Any) -> Trainer:
    """Start all ranks and return the trainer of rank 0. The other ranks exit when `resources` closes or this process
    ends.
    """
    meeting = resources.enter_context(tempfile.TemporaryDirectory()) + "/ranks"
    context = multiprocessing.get_context("spawn")
    for rank in range(1, num_ranks):
        process = context.Process(target=follow, args=(meeting, rank, num_ranks, *arguments), daemon=True)
        process.start()
        resources.callback(process.join)
    join_ranks(meeting, 0, num_ranks)
    resources.callback(distributed.destroy_process_group)
    trainer = ShardedTrainer(*arguments)
    resources.callback(trainer.close)
    return trainer


class Rollouts:
    """Owns a worker process, or a fleet of `num_workers`, that serves the weights of `trainer`. Also owns the
    connections. `Rollouts` replaces a single worker that has died; a fleet replaces its own workers. The new worker
    returns the same samples, because a sample depends only on weights, prompt, parameters and seed.
    """

    max_model_len = 256

    def __init__(
        self, resources: ExitStack, folder: Path, trainer: Trainer, tasks: Any, num_workers: int = 1, staleness: int = 0
    ) -> None:
        self.resources, self.folder, self.trainer, self.tasks = resources, folder, trainer, tasks
        self.num_workers, self.staleness = num_workers, staleness
        self.is_running, self.background = False, ThreadPoolExecutor(1)
        self.pending: Future[list[Any]] | None = None

    def start(self, step: int) -> None:
        """Start generating the samples of `step` in the background; `finish` collects them."""
        self.pending = self.background.submit(self._generate, step)

    def finish(self, step: int) -> list[Any]:
        """Return the samples of `step`, one group per prompt. Generate the samples now if `start` was not called or the
        background generation failed.
        """
        pending, self.pending = self.pending, None
        try:
            if pending is not None:
                return pending.result()
        except TruerollError as error:
            print(f"generating again: {error}")
        return self._survive(lambda: self._generate(step))

    def sleep(self, level: Any) -> None:
        """Free the worker's memory until the next `publish`."""
        self._survive(lambda: self.client.sleep(level))

    def publish(self) -> None:
        """Push the trainer's current weights to the worker."""
        self._survive(self._push)

    def _survive(self, action: Callable[[], Any]) -> Any:
        """Run `action` and return its result. Replace a lost worker and try again; at most three attempts."""
        for _ in range(3):
            try:
                if not self.is_running:
                    self._launch()
                return action()
            except (WorkerLostError, WorkerFailedError, PushError) as error:
                self.is_running = False
                self.resources.close()
                print(f"the worker was lost: {error}")
        raise WorkerLostError("three workers in a row were lost; see the errors above")

    def _launch(self) -> None:
        self.publisher = self.resources.enter_context(WeightPublisher("shared", timeout=WORKER_TIMEOUT))
        self.client = self._start_worker() if self.num_workers == 1 else self._start_fleet()
        if (params := self.trainer.params).structured_outputs is not None:
            self.trainer.masks = GrammarMasks(params, self.tasks.tokenizer, self.client.health().engine)
        self._push()
        self.is_running = True

    def _start_worker(self) -> RolloutClient:
        worker = self.resources.enter_context(launch_worker(str(self.folder), **self._settings()))
        self.address = worker.address
        self.publisher.connect([self.address])
        return self.resources.enter_context(RolloutClient(self.address, timeout=WORKER_TIMEOUT))

    def _start_fleet(self) -> RolloutClient:
        fleet = Fleet(str(self.folder), self.num_workers, num_threads=1, **self._settings())
        self.resources.enter_context(fleet)
        self.publisher.connect_fleet(fleet)
        client = FleetClient(fleet, timeout=WORKER_TIMEOUT, max_staleness=self.staleness)
        return self.resources.enter_context(client)

    def _settings(self) -> dict[str, Any]:
        return dict(dtype="bfloat16", max_model_len=self.max_model_len, **self.trainer.formats)

    def _push(self) -> None:
        self.client.wake_up(["weights"])
        self.trainer.push(self.publisher)
        self.client.wake_up(["kv_cache"])

    def _generate(self, step: int) -> list[Group]:
        return self.client.generate(*self.tasks.requests(step))


PANELS = {
    "reward": "mean reward",
    "response_length": "mean answer, tokens",
    "mismatch": "largest |rollout log-prob - trainer log-prob|",
}
"""The panels of the plot: for each, a column of the metrics and a title."""


class Record:
    """The folder of a run. Even after a kill, the folder holds a complete checkpoint and the metrics up to that
    checkpoint.
    """

    def __init__(self, folder: Path, trainer: Trainer, settings: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.metrics, self.checkpoint, self.plot = (folder / n for n in ("metrics.csv", "checkpoint.pt", "plot.png"))
        self.trainer, self.settings = trainer, settings

    def begin(self, resume: bool) -> None:
        """Restore the trainer from the last checkpoint, if there is one, and drop the metrics of later steps."""
        if self.metrics.exists() and not resume:
            raise typer.BadParameter(f"--out: {self.metrics} already exists; add --resume or choose another folder")
        if not self.checkpoint.exists():
            self.metrics.write_text("")
            return
        settings = torch.load(self.checkpoint, weights_only=True, mmap=True)["settings"]
        if settings != self.settings:
            raise typer.BadParameter(
                f"--resume: the run was started with {settings}, but the options now are {self.settings}"
            )
        self.trainer.load(self.checkpoint)
        lines = self.metrics.read_bytes().splitlines(keepends=True)[: self.trainer.version + 1]
        os.truncate(self.metrics, len(b"".join(lines)))

    def save(self) -> None:
        state = self.trainer.state()
        new = self.checkpoint.with_suffix(".new")
        torch.save(state | dict(version=self.trainer.version, settings=self.settings), new)
        os.replace(new, self.checkpoint)

    def add(self, row: dict[str, Any]) -> None:
        with self.metrics.open("a") as file:
            if file.tell() == 0:
                file.write(",".join(row) + "\n")
            file.write(",".join("" if value is None else repr(value) for value in row.values()) + "\n")
        print("step {step}: reward {reward:.3f}, response length {response_length:.1f},".format(**row), end=" ")
        print("max |rollout log-prob - trainer log-prob|: fresh {mismatch}, stale {stale_difference}".format(**row))
        if "k3" in row:
            print("    KL {k3:.1e} nats a token, perplexity gap {perplexity_gap:.1e},".format(**row), end=" ")
            print("largest ratio {largest_ratio:.2f}, {clipped_share:.1%} of the tokens truncated".format(**row))

    def draw(self, beside: Path | None = None) -> None:
        """Draw the metrics. `beside`: the folder of another run to add to the panel of the mismatch."""
        rows = read_rows(self.metrics)
        figure = Figure(figsize=(8, 8), layout="constrained")
        for axes, (name, title) in zip(figure.subplots(3, sharex=True), PANELS.items(), strict=True):
            axes.plot(rows["step"], rows[name], ".", label="step")
            if name == "mismatch" and beside is not None:
                others = read_rows(beside / self.metrics.name)
                axes.plot(others["step"], others[name], "s", markersize=4, label=f"step of {beside.name}")
            else:
                draw_mean(axes, rows["step"], rows[name])
            axes.set_title(title)
            axes.set_ylim(bottom=0, top=None if axes.dataLim.y1 else 1)
            axes.legend()
        figure.suptitle("GRPO: " + ", ".join(f"{name} {value}" for name, value in self.settings.items() if value))
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.savefig(self.plot)


def read_rows(metrics: Path) -> Any:
    return np.genfromtxt(metrics, delimiter=",", names=True, ndmin=1)


def draw_mean(axes: Any, steps: Any, values: Any) -> None:
    width = min(5, len(values))  # number of steps in the moving average
    mean = np.convolve(values, np.full(width, 1 / width), "valid")
    axes.plot(steps[width - 1 :], mean, label=f"mean of {width} steps")


def seconds_between(times: list[float]) -> list[float]:
    """Return the seconds from the first of `times` to the last, followed by the seconds from each of `times` to the
    next.
    """
    return [times[-1] - times[0], *(end - start for start, end in pairwise(times))]


def train(record: Record, tasks: Tasks, rollouts: Rollouts, steps: int, staleness: int, sleep: int, every: int) -> None:
    with Progress() as progress:
        bar = progress.add_task("", total=steps, completed=record.trainer.version)
        for step in range(record.trainer.version, steps):
            times = [time.perf_counter()]
            progress.update(bar, description="generate")
            groups = rollouts.finish(step)
            times.append(time.perf_counter())
            if staleness and step + 1 < steps:
                rollouts.start(step + 1)
            if sleep:
                rollouts.sleep(sleep)
            progress.update(bar, description="train")
            metrics = record.trainer.step(list(tasks.score(step, groups)))
            times.append(time.perf_counter())
            progress.update(bar, description="push")
            rollouts.publish()
            times.append(time.perf_counter())
            record.add(dict(step=step) | metrics)
            print("    {:.1f} s: generate {:.1f} s, train {:.1f} s, push {:.1f} s".format(*seconds_between(times)))
            if (step + 1) % every == 0 or step + 1 == steps:
                record.save()
            progress.advance(bar)


def read_sampling(text: str) -> SamplingParams:
    """Return the parameters of the samples. `text`: a JSON object with further parameters, or an empty string."""
    try:
        params = SamplingParams(**(json.loads(text or "{}") | PARAMS.model_dump(exclude_defaults=True)))
    except (TypeError, ValueError, TruerollError) as error:
        raise typer.BadParameter(f"--sampling: {error}") from None
    if params.min_tokens and not params.ignore_eos:
        raise typer.BadParameter(
            "--sampling: min_tokens needs ignore_eos to be true, and stop_token_ids to list all tokens that end a "
            "sample"
        )
    return params


def main(
    out: Annotated[Path, typer.Option(help="Folder for metrics.csv, plot.png and the last checkpoint (1.6 GB).")],
    steps: Annotated[int, typer.Option(min=1, help="Training steps of the whole run.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the tasks and the samples.")] = 1,
    prompts: Annotated[int, typer.Option(min=1, help="Tasks per step, with 8 samples each.")] = 8,
    model: Annotated[str, typer.Option(help="A model folder, hf://ORG/NAME, or smollm2.")] = "smollm2",
    unaligned: Annotated[bool, typer.Option("--unaligned", help="Train with the plain forward pass.")] = False,
    staleness: Annotated[int, typer.Option(min=0, max=1, help="1: generate the next batch while training.")] = 0,
    sleep: Annotated[int, typer.Option(min=0, max=2, help="Sleep level of the worker during training; 0: none.")] = 0,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = 10,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="2 or more: a fleet on Ray, one thread per worker.")] = 1,
    fsdp: Annotated[int, typer.Option(min=1, max=2, help="Number of training processes (FSDP2).")] = 1,
    lora: Annotated[int, typer.Option(min=0, help="Rank of the LoRA adapter to train; 0: train all weights.")] = 0,
    sampling: Annotated[str, typer.Option(help="More sampling parameters, as a JSON object.")] = "",
    quantization: Annotated[str, typer.Option(help="Format of the weights, such as fp8.")] = "none",
    kv_cache_dtype: Annotated[str, typer.Option(help="Format of keys and values, such as int8.")] = "auto",
    beside: Annotated[
        Path | None, typer.Option(help="Folder of another run; the plot shows the mismatch of both runs.")
    ] = None,
) -> None:
    """Train a small language model to do sums."""
    params = read_sampling(sampling)
    if sampling and (unaligned or staleness):
        raise typer.BadParameter("--sampling needs an aligned trainer and --staleness 0")
    if params.structured_outputs is not None and (workers > 1 or fsdp > 1):
        raise typer.BadParameter("--sampling: structured_outputs needs --workers 1 and --fsdp 1")
    if sleep and staleness:
        raise typer.BadParameter("--sleep needs --staleness 0: with --staleness 1 the worker generates during training")
    if lora and (sleep == 2 or fsdp > 1):
        raise typer.BadParameter("--lora needs --fsdp 1 and --sleep 0 or 1: the worker must keep its base weights")
    if beside is not None and not (beside / "metrics.csv").exists():
        raise typer.BadParameter(f"--beside: {beside} has no metrics.csv; give the --out folder of a finished run")
    settings = dict(seed=seed, prompts=prompts, model=model, unaligned=unaligned, staleness=staleness, fsdp=fsdp)
    formats = {} if quantization == "none" else dict(quantization=quantization)
    formats |= {} if kv_cache_dtype == "auto" else dict(kv_cache_dtype=kv_cache_dtype)
    settings |= dict(lora=lora, sampling=sampling) | formats
    folder = resolve_model(model)
    with ExitStack() as ranks, ExitStack() as resources:
        arguments = folder, not unaligned, staleness, params, formats
        if fsdp > 1:
            trainer = start_ranks(ranks, fsdp, *arguments)
        else:
            trainer = AdapterTrainer(lora, *arguments) if lora else Trainer(*arguments)
        tasks, record = Tasks(folder, seed, prompts, params), Record(out, trainer, settings)
        record.begin(resume)
        rollouts = Rollouts(resources, folder, trainer, tasks, workers, staleness)
        train(record, tasks, rollouts, steps, staleness, sleep, checkpoint_every)
    record.draw(beside)


if __name__ == "__main__":
    typer.run(main)
