"""The leader: starts the followers, and is the executor of an engine with several ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import NamedTuple, NoReturn, cast

import torch

from ..config import EngineConfig
from ..outputs.routes import RouteFormat
from ..request import Tag
from ..running.executor import LocalExecutor, Peers, StepResults
from ..running.loading import EngineInfo, LoadedModel, allocate_model
from ..running.mtp import DraftStep
from ..running.ranks import Topology
from ..running.step import Step
from ..running.weight_memory import Build
from ..running.weights import WeightStaging, WeightStore
from . import exchange
from .agreement import Agreement
from .computation import RankComputation
from .encoding import RankedEncoder
from .exchange import RankError, Segment, SharedExchange
from .place import RankPlace, config_of_rank
from .weights import LeaderWeights, RankedArena
from .wire import Channel, packed

SECONDS_TO_END = 5.0
_SECONDS_BETWEEN_LOOKS = 1.0


class Follower(NamedTuple):
    """A follower: its rank, its process, and the messages to it."""

    index: int
    process: subprocess.Popen[bytes]
    channel: Channel


class Followers:
    """The followers of an engine with `size` ranks. The followers end when this object is closed or garbage-collected,
    or when this process ends. A follower sends a message only if it fails.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._all = list[Follower]()
        self.close = weakref.finalize(self, _end, self._all)

    def start(self, config: EngineConfig, segment: int, folder: str, has_copies: bool) -> None:
        """Start the followers. `segment`: the file descriptor of the shared memory through which ranks exchange
        tensors. `folder`: the folder of the file through which the ranks find each other. `has_copies`: whether each
        rank computes with a copy of its weights.
        """
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
                # The follower runs in a separate session, so that a signal to the leader's process group does not end
                # it.
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=(other.fileno(), segment), start_new_session=True
                )
            self._all.append(Follower(index, process, Channel(own, exchange.MOST_SECONDS)))
        self.send("start", [config.model_dump(), folder, has_copies])

    def send(self, name: str, content: object = None) -> None:
        """Send a command to all followers."""
        message = packed(name, content)
        for follower in self._all:
            try:
                follower.channel.send_packed(message)
            except OSError:
                self._raise_failure(follower)

    def share(self, arena: RankedArena) -> None:
        """Send each follower the file descriptors of its memory in an arena."""
        for follower in self._all:
            try:
                follower.channel.send_files(arena.files_of(follower.index))
            except OSError:
                self._raise_failure(follower)

    def has_news(self) -> bool:
        """Return whether a follower has failed or ended. Any thread may call this method."""
        return any(follower.channel.has_news() for follower in self._all)

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
    """A step in flight on all ranks. `compute`: computes this rank's part of the step."""

    def __init__(self, step: Step, compute: Callable[[Step], RankComputation]) -> None:
        self._step, self._compute = step, compute
        self._own: RankComputation | None = None
        self._results: StepResults | None = None

    def begin(self) -> RankComputation:
        """Compute or queue this rank's part, unless an earlier call has done so."""
        if self._own is None:
            self._own = self._compute(self._step)
        return self._own

    def wait(self) -> StepResults:
        if self._results is None:
            self._results = self.begin().wait()
        return self._results


class Ranks:
    """Rank 0's connection to the other ranks. `followers`: the other processes. `place`: the `RankPlace` of rank 0."""

    def __init__(self, followers: Followers, place: RankPlace) -> None:
        self._followers, self._place, links = followers, place, place.links
        self._exchange = place.everyone
        distinct = {id(each): each for each in (links.everyone, links.stage, links.before)}
        self._meetings = [each.native for each in distinct.values() if isinstance(each, SharedExchange)]

    @property
    def waited_us(self) -> int:
        """See `Peers`."""
        return sum(meetings.waited_us for meetings in self._meetings)

    def tell(self, name: str, content: object = None) -> None:
        """Send a command."""
        self._followers.send(name, content)

    def order(self, name: str, content: object = None) -> None:
        """Send a command, and wait until all ranks have obeyed the command."""
        self.tell(name, content)
        self._exchange.meet()

    def map(self, arena: RankedArena) -> None:
        """Make each rank map the memory of its weights in `arena`."""
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
        self._place.abort()
        self._followers.close()


class RankedExecutor:
    """The executor of an engine with several ranks, in the process of rank 0. The constructor checks that `config` can
    be served, then starts the followers.

    Raise ConfigError or ModelError if `config` cannot be served, and RankError if a rank fails.
    """

    def __init__(self, config: EngineConfig) -> None:
        topology = Topology.of(config)
        own = config_of_rank(config, 0)
        torch.set_num_threads(own.num_threads or 1)
        followers, file = Followers(topology.size), os.memfd_create("trueroll-ranks", os.MFD_CLOEXEC)
        place: RankPlace | None = None
        try:
            place = RankPlace(config, 0, Segment(topology, file, followers.check, exchange.MOST_SECONDS_TO_START))
            copies_to = device_of_copies(torch.device(own.device))
            if own.device != "cpu":
                watched = weakref.ref(followers), weakref.ref(place)
                threading.Thread(target=_abort_after_a_failure, args=watched, daemon=True).start()

            def memory(builds: Sequence[Build], dtype: torch.dtype, device: torch.device) -> LeaderWeights:
                return LeaderWeights(builds, dtype, topology, copies_to)

            model = allocate_model(own, place.links, memory)
            self._arena = cast(RankedArena, model.loaded.weights.arena)
            with TemporaryDirectory(prefix="trueroll-ranks-") as folder:
                followers.start(config, file, folder, copies_to is not None)
                place.join(folder)
                followers.share(self._arena)
                self.loaded: LoadedModel = model.read()
                place.everyone.meet()  # all weights have been read
                self._arena.update()
                self._own = LocalExecutor(own, self.loaded)
                self._cache_bytes = place.totals(self._own.memory())
        except BaseException:
            if place is not None:
                place.abort()
            followers.close()
            raise
        finally:
            os.close(file)
        place.segment.most_seconds = exchange.MOST_SECONDS
        self._ranks, self._agreement = Ranks(followers, place), Agreement(place.everyone, topology.tensor)
        self._place, self._in_flight = place, deque[_Computation](maxlen=topology.stages)
        self._encoder: RankedEncoder | None = None
        if self._own.encoder is not None:
            self._encoder = RankedEncoder(self._own.encoder, self._ranks.tell, self._catch_up, topology.stages > 1)

    @property
    def info(self) -> EngineInfo:
        tensor, stages = self._place.links.topology
        return replace(self._own.info, tensor_parallel_size=tensor, pipeline_parallel_size=stages)

    @property
    def weights(self) -> WeightStore:
        return self._own.weights

    @property
    def adapters(self) -> None:
        return None

    @property
    def routes(self) -> RouteFormat | None:
        return self._own.routes

    @property
    def runs_ahead(self) -> bool:
        return self._own.runs_ahead

    @property
    def encoder(self) -> RankedEncoder | None:
        return self._encoder

    @property
    def peers(self) -> Peers:
        return self._ranks

    def check_ready(self) -> None:
        self._own.check_ready()

    def compute(self, step: Step) -> _Computation:
        """See `Executor.compute`. The followers begin the step at once. With several stages, this rank computes the
        last stage, and begins only when the caller waits for the results, so that the first stage can begin another
        step meanwhile.
        """
        self._ranks.tell("compute", step)
        computation = _Computation(step, self._compute)
        self._in_flight.append(computation)
        if self._place.links.topology.stages == 1:
            computation.begin()
        return computation

    def _compute(self, step: Step) -> RankComputation:
        return RankComputation(step, self._own, self._agreement, self._place.segment)

    def _catch_up(self) -> None:
        """Wait for this rank's results of all steps in flight."""
        for computation in self._in_flight:
            computation.wait()

    def draft(self, step: DraftStep) -> list[list[int]]:
        self._ranks.tell("draft", step)
        return self._own.draft(step)

    def commit(self, staging: WeightStaging) -> None:
        self._catch_up()
        if not self._arena.is_held:
            raise RuntimeError("engine: cannot commit weights while they are asleep; wake them up first")
        before = self._arena.files
        self._ranks.settle()  # no follower may read weights while they are written
        try:
            self._own.commit(staging)
        finally:
            if self._arena.files != before or self._arena.copy is not None:
                self._ranks.map(self._arena)
                self._arena.update()

    def sleep(self, level: int, tags: Collection[Tag]) -> None:
        self._ranks.order("sleep", [level, [*tags]])
        self._own.sleep(level, tags)

    def wake_up(self, tags: Collection[Tag]) -> None:
        if "weights" in tags:
            self._arena.restore_host()
        self._ranks.tell("wake_up", [*tags])  # the ranks may have to capture CUDA graphs together
        try:
            self._own.wake_up(tags)
        except BaseException:
            self._ranks.close()  # the other ranks are awake, unlike this rank, so no further call can work
            raise
        self._place.everyone.meet()

    def memory(self) -> dict[str, int]:
        """Return the numbers of bytes that all ranks together hold."""
        own = self._own.memory()
        return own | {name: total if own[name] else 0 for name, total in self._cache_bytes.items()}


def _abort_after_a_failure(followers: Callable[[], Followers | None], place: Callable[[], RankPlace | None]) -> None:
    """Wait until a follower has failed, then abort rank 0's exchanges on its GPU. Without the abort, this process could
    wait for its GPU forever, because the GPU waits for the failed follower.
    """
    with suppress(OSError, ValueError):  # the channels are closed
        while (watched := followers()) is not None and not watched.has_news():
            del watched
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    if (ended := place()) is not None:
        ended.abort()


def device_of_copies(device: torch.device) -> torch.device | None:
    """Return the device to which ranks copy their weights; None if the ranks compute with the leader's memory."""
    return None if device.type == "cpu" else device
