"""A follower: computes the steps that the leader sends. `python -m trueroll.engine.parallel.follower SOCKET SEGMENT
RANK`.

SOCKET and SEGMENT are descriptors that the process inherits: an end of a socket pair, and the memory for exchanges. The
process ignores signals that ask it to end, and ends when the leader closes its end of the socket, or has ended itself.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
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
from .exchange import MOST_SECONDS, Segment, SharedExchange
from .weights import FollowerArena, FollowerWeights
from .wire import Channel


class LeaderGone(Exception):
    """The leader has closed its end of the socket."""


def follow(channel: Channel, segment: int, index: int) -> None:
    """Compute what the leader sends to the rank with this index, until it closes the channel."""
    _, settings = channel.receive()
    config = EngineConfig(**settings)
    topology = Topology.of(config)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)

    def check() -> None:
        if channel.is_closed():
            raise LeaderGone

    # A follower waits without a limit. The leader waits for each follower too, and ends all if one hangs.
    links = Segment(topology, segment, check).links(index)
    os.close(segment)
    everyone = cast(SharedExchange, links.everyone)

    def place(builds: Sequence[Build], dtype: torch.dtype, device: torch.device) -> FollowerWeights:
        return FollowerWeights(builds[index], dtype, channel.receive_files, topology.rank(index).index == 0)

    model = allocate_model(config, links, place)
    arena = cast(FollowerArena, model.loaded.weights.arena)
    executor = LocalExecutor(config, model.read())
    everyone.gather(torch.tensor([executor.memory()["kv_cache"]]))
    gc.freeze()  # otherwise a garbage collection would traverse all of torch, and all ranks would wait
    everyone.meet()
    agreement = Agreement(everyone, topology.tensor)
    while True:
        match channel.receive():
            case "compute", step:
                agreement.add(step, executor.compute(step).wait())
            case "draft", step:
                executor.draft(step)
            case "meet", None:
                everyone.meet()
            case "map", None:
                arena.map(channel.receive_files(len(arena.arenas)))
                everyone.meet()
            case "sleep", (level, tags):
                executor.sleep(level, tags)
                everyone.meet()
            case "wake_up", tags:
                executor.wake_up(tags)
                everyone.meet()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("trueroll").addHandler(logging.NullHandler())  # the leader logs the same warnings
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), MOST_SECONDS)
    try:
        follow(channel, int(sys.argv[2]), int(sys.argv[3]))
    except (EOFError, LeaderGone, ConnectionError):
        return
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
