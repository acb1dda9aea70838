"""Connects TRL's `AsyncGRPOTrainer` to a trueroll worker. The trainer needs two objects from this module:
`TruerollWorker`, which generates samples, and `TruerollWeightTransfer`, which pushes weights.

Owns: the thread that generates and scores groups, the queue of scored samples, and the rule by which stale samples are
dropped. Does not own: the worker process, the model or the publisher's settings. Guarantees:

- Groups are generated in the order of the dataset, with seeds that depend on the trainer's seed.
- No token of a sample comes from weights older than the sample's reported version. Samples from unexpected versions
  raise WeightsError.
- An exception on the generating thread is logged. When the trainer runs out of samples, the trainer raises this
  exception of the generating thread.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from trueroll.errors import ConfigError, DeadlineError

from ....engine.request import derive_seed
from ...client.client import AsyncRolloutClient
from ...publisher.publisher import WeightPublisher
from .common import check_samples, encode, sampling_params, tokenizer_of
from .scoring import Group, RewardFunc, as_completion, call_reward, length_metrics, name_of, rollout_samples
from .seams import TRANSFER, WORKER, check_protocol

if TYPE_CHECKING:
    from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

POLL_SECONDS = 0.2
"""Interval at which an idle thread checks for room, for `stop`, and for the worker's progress."""
STOP_SECONDS = 60.0
"""Seconds for which `stop` waits for a running reward function."""

log = logging.getLogger(__name__)


class TruerollWeightTransfer:
    """The argument for `AsyncGRPOTrainer(weight_transfer=...)`. `publisher`: a publisher that is connected to the
    worker that generates samples.
    """

    def __init__(self, publisher: WeightPublisher) -> None:
        self._publisher = publisher
        self._version = 0

    def init_weight_transfer(self) -> None:
        """Begin a training run: the next push is version 1. Raise TrlMissingError if TRL requires methods that this
        integration does not have.
        """
        trainer = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")
        check_protocol(trainer.WeightTransferProtocol, TRANSFER)
        check_protocol(trainer.RolloutWorkerProtocol, WORKER)
        self._version = 0

    def pause(self) -> None:
        """Do nothing: a worker keeps generating while it receives weights."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Push the tensors from TRL as the next version. Versions are counted from 1, as in TRL."""
        self._version += 1
        # The worker may serve a version of an earlier training run, which also counted from 1.
        self._publisher.push(iterator, self._version, allow_older=self._version == 1)

    def resume(self) -> None:
        """Do nothing: the push has already switched the worker to the new weights."""

    def destroy(self) -> None:
        """Disconnect from the worker at the end of the training run. The worker keeps running."""
        self._publisher.close()


class TruerollWorker:
    """The argument for `AsyncGRPOTrainer(rollout_worker=...)`.

    Use each `TruerollWorker` together with a `TruerollWeightTransfer` that pushes to the same worker. Use each
    `TruerollWorker` for only one call to the trainer's `train`. If training resumes from a checkpoint, the dataset and
    the seeds start again from the beginning.

    - `client`: a client that only this `TruerollWorker` uses. The client is closed when the training run ends.
    - `args`: the `args` of the trainer; `token_budget` must be set
    - `train_dataset`: rows with a `prompt`; after the last row, iteration starts again with the first row
    - `reward_funcs`: functions or coroutine functions, called on another thread for one group at a time. Each function
      is called with `prompts`, `completions`, `completion_ids` and the other columns of the dataset; each argument has
      one entry per sample. `completions` are texts, or messages if the prompt is a conversation. A function returns a
      number for each sample, or None if it cannot score the sample.

    The reward of a sample is the sum of the functions' results. The advantage of a sample is its reward minus the
    mean reward of its group, divided by the standard deviation of the rewards of its group.

    When TRL trains on a token, the trainer's weights are at most `args.max_staleness` versions newer than the weights
    that generated the token. TRL takes samples from the queue some time before TRL trains on these samples. Samples
    that would be too old at training time are dropped. Raise ConfigError if every sample would be too old, if
    `token_budget` is None, or if a worker does not support a setting. AsyncGRPOTrainer does not support images: a row
    with images ends the training with ConfigError.
    """

    def __init__(
        self,
        client: AsyncRolloutClient,
        args: AsyncGRPOConfig,
        processing_class: Any,
        train_dataset: Iterable[Mapping[str, Any]],
        reward_funcs: RewardFunc | Sequence[RewardFunc],
    ) -> None:
        self._client, self._args, self._tokenizer = client, args, tokenizer_of(processing_class)
        self._dataset = train_dataset
        self._reward_funcs = (reward_funcs,) if callable(reward_funcs) else tuple(reward_funcs)
        if not self._reward_funcs:
            raise ConfigError("reward_funcs: the list is empty; give at least one function")
        self._params = sampling_params(vars(args), [self._tokenizer.eos_token_id])
        self._staleness_when_taken = _staleness_when_taken(args)
        self._model_version = 0
        self._progress_at = 0.0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.rollout_buffer: queue.Queue[RolloutSample] = _FreshQueue(self._is_fresh, self._note_drop)
        """Scored samples for TRL. The samples of a group are adjacent."""
        self.metrics_queue: queue.Queue[dict[str, float | tuple[float, float]]] = queue.Queue()
        """Metrics for TRL's log: numbers, or pairs (sum, count) that TRL reports as the mean sum / count."""

    def start(self) -> None:
        """Start generating. Raise ConfigError if `max_inflight_tasks` is less than 1."""
        if self._args.max_inflight_tasks < 1:
            raise ConfigError(
                f"max_inflight_tasks: must be at least 1 (got {self._args.max_inflight_tasks}); set max_inflight_tasks "
                "in args, or pass the args of the trainer (trainer.args), in which TRL sets max_inflight_tasks"
            )
        self._progress_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="trueroll-rollouts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Abort pending work and stop the thread. Raise DeadlineError if a reward function does not return."""
        self._stopping.set()
        if self._thread is None:
            return
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            raise DeadlineError(
                f"rollouts: a reward function did not return within {STOP_SECONDS} s; check why the function hangs"
            )

    def update_model_version(self, model_version: int) -> None:
        """Record that the trainer has pushed `model_version`."""
        self._model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """If an error has ended generation or scoring, raise the error. Raise DeadlineError if there was no progress
        for more than `stale_after_s` seconds.
        """
        if self._failure is not None:
            raise self._failure
        silence = time.monotonic() - self._progress_at
        if silence > stale_after_s:
            raise DeadlineError(
                f"rollouts: no progress for {silence:.0f} s (heartbeat_stale_after_s = {stale_after_s}); the worker or "
                "a reward function hangs; check the worker with `trueroll top`"
            )

    def _is_fresh(self, sample: RolloutSample) -> bool:
        return self._model_version - sample.model_version <= self._staleness_when_taken

    def _note_drop(self) -> None:
        self.metrics_queue.put({"sample/dropped_stale_total": 1.0})

    def _run(self) -> None:
        try:
            asyncio.run(self._produce())
        except BaseException as error:
            log.error("rollouts failed", exc_info=error)
            self._failure = error

    async def _produce(self) -> None:
        rows = enumerate(_endless(self._dataset))
        groups: deque[asyncio.Task[Group]] = deque()
        try:
            while not self._stopping.is_set():
                if self._has_room(len(groups)):
                    groups.append(asyncio.create_task(self._generate(*next(rows))))
                elif groups:
                    await self._deliver_first(groups)
                else:
                    self._progress_at = time.monotonic()
                    await asyncio.sleep(POLL_SECONDS)
        finally:
            for group in groups:
                group.cancel()
            await asyncio.gather(*groups, return_exceptions=True)
            await self._client.close()

    def _has_room(self, num_groups: int) -> bool:
        num_samples = num_groups * self._args.num_generations + self.rollout_buffer.qsize()
        return num_samples < self._args.max_inflight_tasks

    async def _generate(self, group_id: int, row: Mapping[str, Any]) -> Group:
        pushed = self._model_version
        # TRL has already parsed a string into a dict.
        options = cast(dict[str, Any], self._args.chat_template_kwargs or {})
        prompt_ids = encode(self._tokenizer, row["prompt"], options)
        fields = {"n": self._args.num_generations, "seed": derive_seed(self._args.seed, group_id)}
        [answer] = await self._client.generate([prompt_ids], self._params.model_copy(update=fields))
        # A worker serves a push before the trainer reports the version.
        check_samples(answer.samples, oldest=pushed, newest=self._model_version + 1)
        texts = [self._tokenizer.decode(sample.token_ids, skip_special_tokens=True) for sample in answer.samples]
        return Group(group_id, row, prompt_ids, answer.samples, [as_completion(row["prompt"], text) for text in texts])

    async def _deliver_first(self, groups: deque[asyncio.Task[Group]]) -> None:
        """If the oldest group has arrived, score the group and queue its samples. If the oldest group has not arrived,
        record when the worker last made progress.
        """
        if not (await asyncio.wait([groups[0]], timeout=POLL_SECONDS))[0]:
            await self._note_progress()
            return
        group = groups.popleft().result()
        rewards = [await call_reward(func, group) for func in self._reward_funcs]
        for sample in rollout_samples(group, [name_of(func) for func in self._reward_funcs], np.array(rewards)):
            self.rollout_buffer.put(sample)
        self.metrics_queue.put(length_metrics(group.samples))
        self._progress_at = time.monotonic()

    async def _note_progress(self) -> None:
        health = await self._client.health()
        if health.seconds_since_progress is not None:
            self._progress_at = max(self._progress_at, time.monotonic() - health.seconds_since_progress)


class _FreshQueue(queue.Queue[Any]):
    """A queue that never returns a stale item: `get` drops stale items, and calls `on_drop` for each dropped item."""

    def __init__(self, is_fresh: Callable[[Any], bool], on_drop: Callable[[], None]) -> None:
        super().__init__()
        self._is_fresh, self._on_drop = is_fresh, on_drop

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Like `queue.Queue.get`, but drop stale items. Each dropped item restarts the timeout."""
        while not self._is_fresh(item := super().get(block, timeout)):
            self._on_drop()
        return item


def _staleness_when_taken(args: AsyncGRPOConfig) -> int:
    """Return the maximum staleness, in versions, that a sample may have when TRL takes it from the queue."""
    if args.token_budget is None:
        raise ConfigError("token_budget: with None, TRL would query a vLLM server; set a number, or 0 for no budget")
    ahead = _versions_taken_ahead(args.token_budget, args.gradient_accumulation_steps)
    if args.max_staleness < ahead:
        raise ConfigError(
            f"max_staleness: {args.max_staleness} is too low, since with these settings TRL takes samples from the "
            f"queue {ahead} versions before it trains on them; set max_staleness to at least {ahead}"
        )
    return args.max_staleness - ahead


def _versions_taken_ahead(token_budget: int, num_batches: int) -> int:
    """Return the maximum number of versions that the trainer pushes between taking a sample from the queue and training
    on it.

    `num_batches`: number of batches per update. TRL fetches a batch while the previous batch waits for training. With a
    token budget, TRL also takes the first sample that does not fit into the batch, and uses this sample for the
    following batch. If an update has a single batch, the following batch belongs to the next update. If an update
    accumulates several batches, the following batch belongs to the same update.
    """
    return 2 if token_budget > 0 and num_batches == 1 else 1


def _endless(dataset: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    while True:
        row = None
        for row in dataset:
            if "prompt" not in row:
                raise ConfigError(f"train_dataset: the column 'prompt' is missing (found {', '.join(row)}); add it")
            if row.get("image") is not None or row.get("images"):
                raise ConfigError(
                    "train_dataset: AsyncGRPOTrainer does not support images; use GRPOTrainer with "
                    "trueroll_generation, or remove the images"
                )
            yield row
        if row is None:
            raise ConfigError("train_dataset: the dataset has no rows, or can be iterated only once; give a list")
