"""`AsyncGRPOTrainer` on a trueroll worker: its rollout worker and its weight transfer.

Owns: the thread that keeps groups coming and scores them, the queue that they wait in, and which of them are too old.
Does not own the worker process, the model or the publisher's settings. Promises: groups come in the order of the
dataset, with seeds that depend on the trainer's; no sample is older than it is said to be, or WeightsError is raised;
what fails on the thread is logged, and raised in the trainer when it runs out of samples.
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
from .common import check_samples, encode, sampling_params
from .scoring import Group, RewardFunc, as_completion, call_reward, length_metrics, name_of, rollout_samples
from .seams import TRANSFER, WORKER, check_protocol

if TYPE_CHECKING:
    from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

POLL_SECONDS = 0.2
"""Seconds between looks for room, for a stop and for the worker's progress, while there is nothing else to do."""
STOP_SECONDS = 60.0
"""Seconds that `stop` waits for a running reward function."""

log = logging.getLogger(__name__)


class TruerollWeightTransfer:
    """For `AsyncGRPOTrainer(weight_transfer=...)`. `publisher` is connected to the worker that generates."""

    def __init__(self, publisher: WeightPublisher) -> None:
        self._publisher = publisher
        self._version = 0

    def init_weight_transfer(self) -> None:
        """The trainer begins: the next push is its version 1. Raise TrlMissingError if TRL asks for unknown methods."""
        trainer = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")
        check_protocol(trainer.WeightTransferProtocol, TRANSFER)
        check_protocol(trainer.RolloutWorkerProtocol, WORKER)
        self._version = 0

    def pause(self) -> None:
        """Nothing is paused: a worker goes on generating while it receives."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Push what TRL streams as the next version; TRL counts versions the same way."""
        self._version += 1
        # The worker may serve the versions of an earlier training, which counted from 1 as well.
        self._publisher.push(iterator, self._version, allow_older=self._version == 1)

    def resume(self) -> None:
        """The push has switched the worker to the new weights; see `pause`."""

    def destroy(self) -> None:
        """The trainer ends: disconnect. The worker goes on."""
        self._publisher.close()


class TruerollWorker:
    """For `AsyncGRPOTrainer(rollout_worker=...)`, together with a `TruerollWeightTransfer` for the same worker.

    It is for one call of `train`; a training resumed from a checkpoint begins the dataset and the seeds anew. `client`
    is used by nothing else, and closed when the training ends. `args`: the trainer's own, with a `token_budget`.
    `train_dataset`: rows with a `prompt`, gone through again and again.

    `reward_funcs` are called for one group at a time, on another thread, with `prompts`, `completions` (texts, or
    messages where the prompt is a conversation), `completion_ids` and the other columns of the dataset, one entry for
    each sample in each. They return, or their coroutines do, a number for each sample, or None for one that they cannot
    judge. The sum over the functions is the reward; its distance from the mean of the group, in standard deviations, is
    the advantage.

    No token is trained on by weights that are more than `args.max_staleness` versions newer than those it came from.
    TRL takes samples ahead of training on them, so the ones that would be too old by then are dropped. Raises
    ConfigError if that leaves nothing, for a `token_budget` of None, or for settings that a worker does not have.
    """

    def __init__(
        self,
        client: AsyncRolloutClient,
        args: AsyncGRPOConfig,
        processing_class: Any,
        train_dataset: Iterable[Mapping[str, Any]],
        reward_funcs: RewardFunc | Sequence[RewardFunc],
    ) -> None:
        self._client, self._args, self._tokenizer = client, args, processing_class
        self._dataset = train_dataset
        self._reward_funcs = (reward_funcs,) if callable(reward_funcs) else tuple(reward_funcs)
        if not self._reward_funcs:
            raise ConfigError("reward_funcs: expected at least one, found none; give what is to be rewarded")
        self._params = sampling_params(vars(args), [processing_class.eos_token_id])
        self._staleness_when_taken = _staleness_when_taken(args)
        self._model_version = 0
        self._progress_at = 0.0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.rollout_buffer: queue.Queue[RolloutSample] = _FreshQueue(self._is_fresh, self._note_drop)
        """Scored samples, from which TRL takes; the samples of a group follow one another."""
        self.metrics_queue: queue.Queue[dict[str, float | tuple[float, float]]] = queue.Queue()
        """Metrics that TRL adds to its log: numbers, or pairs of a sum and a count, of which it reports the mean."""

    def start(self) -> None:
        """Begin to generate. Raise ConfigError if there may be nothing in flight."""
        if self._args.max_inflight_tasks < 1:
            raise ConfigError(
                f"max_inflight_tasks: expected at least 1, found {self._args.max_inflight_tasks}; set it, or give this "
                "worker the trainer's own args, in which TRL sets it"
            )
        self._progress_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="trueroll-rollouts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Abort what is under way and end. Raise DeadlineError if a reward function does not return."""
        self._stopping.set()
        if self._thread is None:
            return
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            raise DeadlineError(
                f"rollouts: expected reward functions to return within {STOP_SECONDS} s, found one that has not; make "
                "it end"
            )

    def update_model_version(self, model_version: int) -> None:
        """The trainer has pushed this version."""
        self._model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise what ended generating or scoring, or DeadlineError if they made no progress for so many seconds."""
        if self._failure is not None:
            raise self._failure
        silence = time.monotonic() - self._progress_at
        if silence > stale_after_s:
            raise DeadlineError(
                f"rollouts: expected progress within heartbeat_stale_after_s = {stale_after_s} s, found none for "
                f"{silence:.0f} s: the worker or a reward function hangs; see the worker's state with `trueroll top`"
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
        # TRL has parsed what was a string.
        options = cast(dict[str, Any], self._args.chat_template_kwargs or {})
        prompt_ids = encode(self._tokenizer, row["prompt"], options)
        fields = {"n": self._args.num_generations, "seed": derive_seed(self._args.seed, group_id)}
        [answer] = await self._client.generate([prompt_ids], self._params.model_copy(update=fields))
        # A worker serves what is pushed before the trainer says so.
        check_samples(answer.samples, oldest=pushed, newest=self._model_version + 1)
        texts = [self._tokenizer.decode(sample.token_ids, skip_special_tokens=True) for sample in answer.samples]
        return Group(group_id, row, prompt_ids, answer.samples, [as_completion(row["prompt"], text) for text in texts])

    async def _deliver_first(self, groups: deque[asyncio.Task[Group]]) -> None:
        """Score the oldest group and hand it over, if it is there; otherwise note whether the worker makes progress."""
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
    """A queue that drops, when it comes to them, items that are not fresh any more, and calls `on_drop` for each."""

    def __init__(self, is_fresh: Callable[[Any], bool], on_drop: Callable[[], None]) -> None:
        super().__init__()
        self._is_fresh, self._on_drop = is_fresh, on_drop

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """As `queue.Queue.get`; each item that is dropped starts the timeout anew."""
        while not self._is_fresh(item := super().get(block, timeout)):
            self._on_drop()
        return item


def _staleness_when_taken(args: AsyncGRPOConfig) -> int:
    """How many versions older than the trainer's weights a sample may be when TRL takes it."""
    if args.token_budget is None:
        raise ConfigError(
            "token_budget: expected a number, 0 for none, found None, for which TRL asks a vLLM server; set it"
        )
    ahead = _versions_taken_ahead(args.token_budget, args.gradient_accumulation_steps)
    if args.max_staleness < ahead:
        raise ConfigError(
            f"max_staleness: expected at least {ahead}, as TRL takes samples that many versions ahead with these "
            f"settings, found {args.max_staleness}; raise it"
        )
    return args.max_staleness - ahead


def _versions_taken_ahead(token_budget: int, num_batches: int) -> int:
    """How many versions after it takes a sample TRL may train on it, with `num_batches` to an update.

    It fetches a batch while the one before waits to be trained on; with a token budget it also takes the first sample
    that does not fit in. That one goes into the batch after, which belongs to the next update if each has one batch,
    and to the same update if gradients of several batches accumulate.
    """
    return 2 if token_budget > 0 and num_batches == 1 else 1


def _endless(dataset: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    while True:
        row = None
        for row in dataset:
            if "prompt" not in row:
                raise ConfigError(f"train_dataset: expected a column prompt, found {', '.join(row)}; add it")
            yield row
        if row is None:
            raise ConfigError("train_dataset: expected rows each time it is gone through, found none; give a list")
