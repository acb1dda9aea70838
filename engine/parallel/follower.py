"""A follower: computes the steps that the leader sends. The command line is `python -m
trueroll.engine.parallel.follower SOCKET SEGMENT RANK`.

SOCKET and SEGMENT are file descriptors that the process inherits: one end of a socket pair, and the shared memory
through which the ranks exchange tensors. The process ignores signals that ask it to exit. The process exits when the
leader closes the other end of the socket pair, or when the leader has exited.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

import torch

from trueroll.errors import TruerollError

from ..config import EngineConfig
from ..running.executor import LocalExecutor
from ..running.loading import allocate_model
from ..running.ranks import Topology
from ..running.weight_memory import Build
from .agreement import Agreement
from .computation import RankComputation
from .encoding import obey
from .exchange import MOST_SECONDS, Segment
from .place import RankPlace, config_of_rank
from .weights import FollowerArena, FollowerWeights
from .wire import Channel

_SECONDS_BETWEEN_LOOKS = 1.0


class LeaderGone(Exception):
    """The leader has closed its end of the socket."""


def follow(channel: Channel, file: int, index: int) -> None:
    """Compute the steps that the leader sends to the rank `index`, until the leader closes the channel. `file`: the
    file descriptor of the shared memory through which the ranks exchange tensors.
    """
    _, (settings, folder, has_copies) = channel.receive()
    whole = EngineConfig(**settings)
    topology, config = Topology.of(whole), config_of_rank(whole, index)
    torch.set_num_threads(config.num_threads or 1)

    def check() -> None:
        if channel.is_closed():
            raise LeaderGone

    # A follower waits without a time limit, because the leader has a time limit, and ends all followers if one of them
    # hangs.
    place = RankPlace(whole, index, Segment(topology, file, check))
    os.close(file)
    everyone = place.everyone

    def memory(builds: Sequence[Build], dtype: torch.dtype, device: torch.device) -> FollowerWeights:
        reads_stage = topology.rank(index).index == 0
        copies_to = torch.device(config.device) if has_copies else None
        return FollowerWeights(builds[index], dtype, channel.receive_files, reads_stage, copies_to)

    if config.device != "cpu":
        threading.Thread(target=_end_with_the_leader, args=[channel], daemon=True).start()
    place.join(folder)
    model = allocate_model(config, place.links, memory)
    arena = cast(FollowerArena, model.loaded.weights.arena)
    loaded = model.read()
    everyone.meet()  # all weights have been read
    arena.update()
    executor = LocalExecutor(config, loaded)
    gc.freeze()  # otherwise a garbage collection would traverse all of torch, and all ranks would wait
    place.totals(executor.memory())
    agreement, in_flight = Agreement(everyone, topology.tensor), deque[RankComputation]()

    def settle(most: int = 0) -> None:
        """Wait until at most `most` steps are in flight."""
        while len(in_flight) > most:
            in_flight.popleft().wait()

    while True:
        name, content = channel.receive()
        if name == "compute":
            in_flight.append(RankComputation(content, executor, agreement, place.segment))
            settle(1 if executor.runs_ahead else 0)
            continue
        if obey(executor.encoder, name, content):
            continue
        settle()
        match name:
            case "draft":
                executor.draft(content)
                continue
            case "map":
                arena.map(channel.receive_files(len(arena.arenas)))
                arena.update()
            case "sleep":
                executor.sleep(*content)
            case "wake_up":
                executor.wake_up(content)
        everyone.meet()


def _end_with_the_leader(channel: Channel) -> None:
    """End this process as soon as the leader has closed its end of the socket. If this process did not end, its GPU
    could wait for ranks that have ended, and this process could wait for the GPU.
    """
    while not channel.is_closed():
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(0)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("trueroll").addHandler(logging.NullHandler())  # the leader logs the same warnings
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), MOST_SECONDS)
    try:
        follow(channel, int(sys.argv[2]), int(sys.argv[3]))
    except (EOFError, LeaderGone, ConnectionError):
        os._exit(0)  # a GPU may wait for ranks that have ended
    except TruerollError as error:
        _report(channel, str(error))
    except BaseException as error:
        _report(channel, f"{type(error).__name__}: {error}")
        raise


def _report(channel: Channel, failure: str) -> None:
    with suppress(OSError):  # the leader may have failed for the same reason, and ended
        channel.send("failed", failure)


if __name__ == "__main__":
    main()
