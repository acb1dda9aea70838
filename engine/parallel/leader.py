"""The leader: starts the followers, and is the executor of an engine with several ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple, NoReturn, cast

import torch

from trueroll.errors import ConfigError

from ...kernels.cpu.library import library_obstacle
from ..config import EngineConfig
from ..outputs.routes import RouteFormat
from ..request import Tag
from ..running.executor import LocalComputation, LocalExecutor, Peers, StepResults
from ..running.loading import EngineInfo, LoadedModel, allocate_model
from ..running.mtp import DraftStep
from ..running.ranks import Links, Topology
from ..running.step import Step
from ..running.weights import WeightStaging, WeightStore
from . import exchange
from .agreement import Agreement
from .exchange import RankError, Segment, SharedExchange
from .weights import LeaderWeights, RankedArena
from .wire import Channel, packed

SECONDS_TO_END = 5.0


class Follower(NamedTuple):
    """A follower: its rank, its process, and the messages to it."""

    index: int
    process: subprocess.Popen[bytes]
    channel: Channel


class Followers:
    """The followers of an engine with `size` ranks. They end when the object is closed or garbage-collected, or when
    this process ends. A follower sends a message only if it fails.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._all = list[Follower]()
        self.close = weakref.finalize(self, _end, self._all)

    def start(self, config: EngineConfig, segment: int) -> None:
        """Start the followers. `segment`: the memory for exchanges."""
        for index in range(1, self._size):
            own, other = socket.socketpair()
            with other:
                command = [
                    sys.executable,
                    "-P",
                    "-m",
                    "trueroll.engine.parallel.follower",
                    str(other.fileno()),
                    str(segment),
                    str(index),
                ]
                # In a session of its own, so that a signal to the leader's process group does not end the follower.
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=(other.fileno(), segment), start_new_session=True
                )
            self._all.append(Follower(index, process, Channel(own, exchange.MOST_SECONDS)))
        self.send("start", config.model_dump())

    def send(self, name: str, content: object = None) -> None:
        """Send a command to all followers."""
        message = packed(name, content)
        for follower in self._all:
            try:
                follower.channel.send_packed(message)
            except OSError:
                self._raise_failure(follower)

    def share(self, arena: RankedArena) -> None:
        """Send each follower the descriptors of its memory in an arena."""
        for follower in self._all:
            try:
                follower.channel.send_files(arena.files_of(follower.index))
            except OSError:
                self._raise_failure(follower)

    def check(self) -> None:
        """Raise RankError if a follower has failed or ended."""
        for follower in self._all:
            if follower.channel.has_news():
                self._raise_failure(follower)

    def _raise_failure(self, follower: Follower) -> NoReturn:
        if not follower.channel.has_news():
            raise RankError(f"{self._name(follower)} does not answer; it hangs")
        try:
            _, content = follower.channel.receive()
        except (EOFError, OSError):
            raise self._ended(follower) from None
        raise RankError(f"{self._name(follower)} failed: {content}")

    def _ended(self, follower: Follower) -> RankError:
        return RankError(f"{self._name(follower)} ended with exit code {_exit_code(follower.process)}")

    def _name(self, follower: Follower) -> str:
        return f"rank {follower.index} of {self._size} (process {follower.process.pid})"


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        return None


def _end(followers: list[Follower]) -> None:
    """Close the channels, which ends the followers, and kill the followers that do not end in time."""
    for follower in followers:
        follower.channel.close()
    until = time.monotonic() + SECONDS_TO_END
    for follower in followers:
        try:
            follower.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            follower.process.kill()
            follower.process.wait()


class _Computation:
    """A step in flight on all ranks. `compute`: computes this rank's part of it."""

    def __init__(self, step: Step, compute: Callable[[Step], LocalComputation], agreement: Agreement) -> None:
        self._step, self._compute, self._agreement = step, compute, agreement
        self._results: StepResults | None = None

    def wait(self) -> StepResults:
        if self._results is None:
            self._results = self._compute(self._step).wait()
            self._agreement.add(self._step, self._results)
        return self._results


class Ranks:
    """The other ranks, in the process of rank 0. `followers`: the processes. `links`: how rank 0 reaches them."""

    def __init__(self, followers: Followers, links: Links) -> None:
        self._followers, self._exchange = followers, cast(SharedExchange, links.everyone)
        distinct = {id(each): each for each in (links.everyone, links.stage, links.before) if each is not None}
        self._meetings = [cast(SharedExchange, each).native for each in distinct.values()]

    @property
    def waited_us(self) -> int:
        """See `Peers`."""
        return sum(meetings.waited_us for meetings in self._meetings)

    def tell(self, name: str, content: object = None) -> None:
        """Send a command."""
        self._followers.send(name, content)

    def order(self, name: str, content: object = None) -> None:
        """Send a command, and wait until all ranks have obeyed it."""
        self.tell(name, content)
        self._exchange.meet()

    def map(self, arena: RankedArena) -> None:
        """Make each rank use the memory of its weights in an arena."""
        self.tell("map")
        self._followers.share(arena)
        self._exchange.meet()

    def settle(self) -> None:
        """See `Peers`."""
        self.order("meet")

    def check(self) -> None:
        """See `Peers`."""
        self._followers.check()

    def close(self) -> None:
        """See `Peers`."""
        self._followers.close()


class RankedExecutor:
    """The executor of an engine with several ranks, in the process of rank 0. Construction starts the followers, after
    it has checked that `config` can be served.

    Raise ConfigError or ModelError if `config` cannot be served, and RankError if a rank fails.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._topology = topology = Topology.of(config)
        config = config_of_rank(config)
        torch.set_num_threads(config.num_threads or 1)
        followers, file = Followers(topology.size), os.memfd_create("trueroll-ranks", os.MFD_CLOEXEC)
        try:
            segment = Segment(topology, file, followers.check, exchange.MOST_SECONDS_TO_START)
            links = segment.links(0)
            everyone = cast(SharedExchange, links.everyone)
            model = allocate_model(config, links, lambda builds, dtype, _: LeaderWeights(builds, dtype, topology))
            followers.start(config, file)
            self._arena = cast(RankedArena, model.loaded.weights.arena)
            followers.share(self._arena)
            self.loaded: LoadedModel = model.read()
            self._own = LocalExecutor(config, self.loaded)
            of_ranks = everyone.gather(torch.tensor([self._own.memory()["kv_cache"]]))
            self._kv_bytes = sum(map(int, of_ranks))
            everyone.meet()
        except BaseException:
            followers.close()
            raise
        finally:
            os.close(file)
        segment.most_seconds = exchange.MOST_SECONDS
        self._ranks, self._agreement = Ranks(followers, links), Agreement(everyone, topology.tensor)
        self._in_flight = deque[_Computation](maxlen=topology.stages)

    @property
    def info(self) -> EngineInfo:
        tensor, stages = self._topology
        return replace(self._own.info, tensor_parallel_size=tensor, pipeline_parallel_size=stages)

    @property
    def weights(self) -> WeightStore:
        return self._own.weights

    @property
    def routes(self) -> RouteFormat | None:
        return self._own.routes

    @property
    def runs_ahead(self) -> bool:
        return self._own.runs_ahead

    @property
    def peers(self) -> Peers:
        return self._ranks

    def check_ready(self) -> None:
        self._own.check_ready()

    def compute(self, step: Step) -> _Computation:
        """See `Executor.compute`. The followers begin at once. With several stages, this rank, which computes the last
        one, begins when the results are awaited, so that the first stage can begin another step meanwhile.
        """
        self._ranks.tell("compute", step)
        computation = _Computation(step, self._own.compute, self._agreement)
        self._in_flight.append(computation)
        if self._topology.stages == 1:
            computation.wait()
        return computation

    def draft(self, step: DraftStep) -> list[list[int]]:
        self._ranks.tell("draft", step)
        return self._own.draft(step)

    def commit(self, staging: WeightStaging) -> None:
        for computation in self._in_flight:
            computation.wait()
        before = self._arena.files
        self._ranks.settle()  # no follower may read weights while they are written
        try:
            self._own.commit(staging)
        finally:
            if self._arena.files != before:
                self._ranks.map(self._arena)

    def sleep(self, level: int, tags: Collection[Tag]) -> None:
        self._ranks.order("sleep", [level, _without_weights(tags)])
        self._own.sleep(level, tags)

    def wake_up(self, tags: Collection[Tag]) -> None:
        self._own.wake_up(tags)
        self._ranks.order("wake_up", _without_weights(tags))

    def memory(self) -> dict[str, int]:
        """Return the bytes that all ranks hold."""
        own = self._own.memory()
        return own | {"kv_cache": self._kv_bytes if own["kv_cache"] else 0}


def _without_weights(tags: Collection[Tag]) -> list[Tag]:
    """Return the tags of memory that followers own."""
    return [tag for tag in tags if tag != "weights"]


def config_of_rank(config: EngineConfig) -> EngineConfig:
    """Return the configuration of each rank. The ranks share the threads of the engine. Raise ConfigError for a device
    other than a CPU, and without the native library.
    """
    field = "tensor_parallel_size" if config.tensor_parallel_size > 1 else "pipeline_parallel_size"
    if torch.device(config.device).type != "cpu":
        value = getattr(config, field)
        text = f"{field} must be 1 on {config.device} (got {value}); only a CPU can have several ranks"
        raise ConfigError(text, field=field, value=value)
    if obstacle := library_obstacle():
        raise ConfigError(f"{field}: ranks exchange tensors with the native library, but {obstacle}")
    cores = config.num_threads or len(os.sched_getaffinity(0))
    return config.model_copy(update=dict(num_threads=max(1, cores // config.num_ranks)))
